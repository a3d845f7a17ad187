"""A model out of tensors in a file: checked by name, shape and kind before one number is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..blueprint import Model
from ..errors import SpecError
from ..models import Transformer, build
from .plan import Map, Plan
from .slots import NOTHING
from .tensors import Kind, Stored

KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def built(
    described: Model, names: Map, stored: Stored, dropout: float, constants: Mapping[str, Any] = NOTHING
) -> Transformer:
    """The model with the numbers of a file, in the file's dtype, set to answer and not to train.

    `constants` are numbers of attentions by name where they are not those that follow from their specs.
    """
    held = tensors(described, names, stored)
    missing = described.shapes().keys() - held.keys()
    held |= {name: made for name, made in _constants(described, constants) if name in missing}
    with torch.device("meta"):
        net = build(described, dropout=dropout)
    net.load_state_dict(held, assign=True)
    return net.eval()


def tensors(described: Model, names: Map, stored: Stored) -> dict[str, Tensor]:
    """Every tensor of a model that a file holds, by our names; what does not fit is refused before it is read."""
    kinds = {names.usual(name): kind for name, kind in stored.kinds.items()}
    plan = Plan.of(described, names, names.trunk(kinds))
    wrong = next(_misfits(plan, names, kinds), None) or next(_odd_numbers(described, plan, kinds), None)
    if wrong:
        raise SpecError(f"{stored.where}: {wrong}")
    held, later = _empty(described, plan, kinds), list[tuple[str, str, Tensor, Tensor]]()
    for there, tensor in stored.each():
        name = names.usual(there)
        first = plan.twins.get(name, name)
        for piece in plan.pieces.get(first, ()):
            theirs, ours = piece.there.of(tensor), piece.here.of(held[piece.name])
            if name == plan.source(first, kinds):
                ours.copy_(theirs)
            else:
                later.append((name, first, theirs, ours))
    for name, first, theirs, ours in later:
        if not torch.equal(theirs, ours):
            one = "which config.json says are one; if they are two, it must say tie_word_embeddings = false"
            raise SpecError(f"{stored.where}: {name} differs from {first}, {one}")
    return held


def _misfits(plan: Plan, names: Map, kinds: Mapping[str, Kind]) -> Iterator[str]:
    """What is missing, of another shape, or too much."""
    for path in plan.pieces:
        if plan.source(path, kinds) is None:
            yield f"{path} is missing; copy the files again, or give the description that belongs to them"
    for name, kind in kinds.items():
        wanted = plan.pieces.get(plan.twins.get(name, name))
        if wanted is None and not names.ignores(name):
            yield f"{name} is no tensor of the model that is described; give the description that belongs to the file"
        elif wanted and kind.shape != wanted[0].shape:
            shapes = f"{list(kind.shape)}, the description asks for {list(wanted[0].shape)}"
            yield f"{name} is {shapes}; give the description that belongs to the file"


def _odd_numbers(described: Model, plan: Plan, kinds: Mapping[str, Kind]) -> Iterator[str]:
    """Numbers of a kind that nothing here computes with, and parameters of several kinds."""
    learned = {weight.name for weight in described.weights() if weight.learned}
    used = {path: kinds[name].dtype for path in plan.pieces if (name := plan.source(path, kinds))}
    for path, dtype in used.items():
        if dtype not in KINDS:
            yield f"{path} holds {dtype}; weights in fewer bits are not read, give them as {', '.join(KINDS)}"
    several = {used[path] for path, own in plan.pieces.items() if any(piece.name in learned for piece in own)}
    if len(several) > 1:
        yield f"parameters are of {' and '.join(sorted(several))}; save them in one dtype"


def _empty(described: Model, plan: Plan, kinds: Mapping[str, Kind]) -> dict[str, Tensor]:
    """A tensor for each of ours that the file holds, to be filled."""
    shapes = described.shapes()
    return {
        piece.name: torch.empty(shapes[piece.name], dtype=KINDS[kinds[name].dtype])
        for path, own in plan.pieces.items()
        if (name := plan.source(path, kinds))
        for piece in own
    }


def _constants(described: Model, given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Numbers of attentions that follow from their specs, unless given."""
    for where, spec in described.specs():
        shapes = spec.shapes()
        for name, param in spec.params().items():
            if not param.learned:
                full, made = f"{where}.{name}", param.init(shapes[name])
                yield full, _given(full, given[full], made) if full in given else made


def _given(name: str, told: Any, like: Tensor) -> Tensor:
    try:
        return torch.tensor(told, dtype=like.dtype).reshape(like.shape)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{name} = {told!r} are not {like.numel()} numbers; copy the folder again") from None

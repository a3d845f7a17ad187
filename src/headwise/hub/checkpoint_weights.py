"""Tensors in safetensors files, one or many with an index: what they are, and each of them once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import SpecError
from ..families.weight_names import EMPTY, CheckpointPlan, WeightNames
from ..model_spec import ModelSpec
from ..models import Transformer, build

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


class TensorInfo(NamedTuple):
    """What a file says of a tensor before it is read: its shape, and the kind of its numbers, "F32" say."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Tensors in a file: what they are, by name, and each of them once; `where` names the file to whoever errs."""

    path: Path
    infos: Mapping[str, TensorInfo]

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        ...


class SafetensorsFolder:
    """The tensors of model.safetensors, or of the shards that an index beside them names."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX_FILE
        self.path = index if index.is_file() else folder / WEIGHTS_FILE
        self.files: list[Path] = [folder / name for name in _list_shards(index)] if index.is_file() else [self.path]
        self.infos: Mapping[str, TensorInfo] = {
            name: kind for path in self.files for name, kind in _read_infos(path).items()
        }

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, shard by shard."""
        for path in self.files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    yield name, file.get_tensor(name)


def _read_infos(path: Path) -> dict[str, TensorInfo]:
    if not path.is_file():
        raise SpecError(f"{path} is missing; copy the folder again")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {name: TensorInfo(tuple(held.get_shape()), held.get_dtype()) for name, held in slices.items()}
    except (SafetensorError, OSError) as error:
        raise SpecError(f"{path} is cut short or no safetensors: {error}; copy the file again") from None


def _list_shards(index: Path) -> list[str]:
    """The files that an index names, if each holds just what the index says of it."""
    said = _read_weight_map(index)
    files = sorted(set(said.values()))
    if odd := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
        raise SpecError(f"{index} names {odd[0]!r}; shards are .safetensors files that lie beside it")
    for file in files:
        held = _read_infos(index.parent / file)
        named = {name for name, where in said.items() if where == file}
        for name in sorted(named ^ set(held)):
            fact = f"{name} is not in {file}" if name in named else f"{file} holds {name}, which it puts elsewhere"
            raise SpecError(f"{index}: {fact}; copy the folder again, the index belongs to other shards")
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{index} cannot be read: {error}; copy the file again") from None
    told = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(told, dict) or not told or not all(isinstance(file, str) for file in told.values()):
        raise SpecError(f"{index} is no index of shards; it must say weight_map = {{tensor: file}}")
    return told


# --- A model out of tensors in a file ------------------------------------------------------------------

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def build_from_weights(
    model_spec: ModelSpec,
    names: WeightNames,
    source: TensorSource,
    dropout: float,
    constants: Mapping[str, Any] = EMPTY,
) -> Transformer:
    """The model with the numbers of a file, in the file's dtype, set to answer and not to train.

    `constants` are numbers of attentions by name where they are not those that follow from their specs.
    """
    held = read_tensors(model_spec, names, source)
    missing = model_spec.shapes().keys() - held.keys()
    held |= {name: made for name, made in _make_constants(model_spec, constants) if name in missing}
    with torch.device("meta"):
        net = build(model_spec, dropout=dropout)
    net.load_state_dict(held, assign=True)
    return net.eval()


def read_tensors(model_spec: ModelSpec, names: WeightNames, source: TensorSource) -> dict[str, Tensor]:
    """Every tensor of a model that a file holds, by our names; what does not fit is refused before it is read."""
    kinds = {names.canonical_name(name): kind for name, kind in source.infos.items()}
    plan = CheckpointPlan.from_spec(model_spec, names, names.find_prefix(kinds))
    wrong = next(_find_mismatches(plan, names, kinds), None) or next(
        _find_unsupported_dtypes(model_spec, plan, kinds), None
    )
    if wrong:
        raise SpecError(f"{source.path}: {wrong}")
    held, later = _allocate(model_spec, plan, kinds), list[tuple[str, str, Tensor, Tensor]]()
    for there, tensor in source.iter_tensors():
        name = names.canonical_name(there)
        first = plan.tied_names.get(name, name)
        for piece in plan.pieces.get(first, ()):
            theirs, ours = piece.file_view.view(tensor), piece.own_view.view(held[piece.name])
            if name == plan.find_source(first, kinds):
                ours.copy_(theirs)
            else:
                later.append((name, first, theirs, ours))
    for name, first, theirs, ours in later:
        if not torch.equal(theirs, ours):
            one = "which config.json says are one; if they are two, it must say tie_word_embeddings = false"
            raise SpecError(f"{source.path}: {name} differs from {first}, {one}")
    return held


def _find_mismatches(plan: CheckpointPlan, names: WeightNames, kinds: Mapping[str, TensorInfo]) -> Iterator[str]:
    """What is missing, of another shape, or too much."""
    for path in plan.pieces:
        if plan.find_source(path, kinds) is None:
            yield f"{path} is missing; copy the files again, or give the description that belongs to them"
    for name, kind in kinds.items():
        wanted = plan.pieces.get(plan.tied_names.get(name, name))
        if wanted is None and not names.is_ignored(name):
            yield f"{name} is no tensor of the model that is described; give the description that belongs to the file"
        elif wanted and kind.shape != wanted[0].shape:
            shapes = f"{list(kind.shape)}, the description asks for {list(wanted[0].shape)}"
            yield f"{name} is {shapes}; give the description that belongs to the file"


def _find_unsupported_dtypes(
    described: ModelSpec, plan: CheckpointPlan, kinds: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """Numbers of a kind that nothing here computes with, and parameters of several kinds."""
    learned = {weight.name for weight in described.weights() if weight.trainable}
    used = {path: kinds[name].dtype for path in plan.pieces if (name := plan.find_source(path, kinds))}
    for path, dtype in used.items():
        if dtype not in DTYPES:
            yield f"{path} holds {dtype}; weights in fewer bits are not read, give them as {', '.join(DTYPES)}"
    several = {used[path] for path, own in plan.pieces.items() if any(piece.name in learned for piece in own)}
    if len(several) > 1:
        yield f"parameters are of {' and '.join(sorted(several))}; save them in one dtype"


def _allocate(described: ModelSpec, plan: CheckpointPlan, kinds: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """A tensor for each of ours that the file holds, to be filled."""
    shapes = described.shapes()
    return {
        piece.name: torch.empty(shapes[piece.name], dtype=DTYPES[kinds[name].dtype])
        for path, own in plan.pieces.items()
        if (name := plan.find_source(path, kinds))
        for piece in own
    }


def _make_constants(described: ModelSpec, given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Numbers of attentions that follow from their specs, unless given."""
    for where, spec in described.attention_specs():
        shapes = spec.shapes()
        for name, param in spec.params().items():
            if not param.trainable:
                full, made = f"{where}.{name}", param.init(shapes[name])
                yield full, _check_constant(full, given[full], made) if full in given else made


def _check_constant(name: str, told: Any, like: Tensor) -> Tensor:
    try:
        return torch.tensor(told, dtype=like.dtype).reshape(like.shape)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{name} = {told!r} are not {like.numel()} numbers; copy the folder again") from None

"""Models that must say the same, held to it: cut and silenced, written and read again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import suggest
from ..heads.saying import get_output_tensor
from ..heads.scene import Example
from ..hub.editing import HeadRef, patch
from ..hub.patches import HeadPatch, ScaledOutput
from ..hub.readable import ModelInputs, prepare_inputs
from ..models import Transformer
from .sayings import compute_output

MAX_DOUBLE_PARAMETERS = 2 * 10**7  # parameters, up to which copies in double precision are made
MAX_DOUBLE_TEXTS = 16  # texts that are read in double precision
TOLERANCE_STEPS, HALF_TOLERANCE_STEPS = 1024, 16  # of rounding that two ways to one number may lie apart; of numbers of two bytes
FULL_PRECISION_BITS = 32  # bits
ModelCall = Callable[..., Any]  # a model of anybody, called with the names that ours is called with


@dataclass(frozen=True)
class OutputDifference:
    """How far two models lie apart at most, in what they say of so many texts; `largest` is the largest number said."""

    what: str
    apart: float
    largest: float
    texts: int
    dtype: str

    @property
    def allowed(self) -> float:
        """What rounding may make of it."""
        kind = torch.finfo(getattr(torch, self.dtype))
        return (TOLERANCE_STEPS if kind.bits >= FULL_PRECISION_BITS else HALF_TOLERANCE_STEPS) * kind.eps * max(1.0, self.largest)

    @property
    def same(self) -> bool:
        """Whether it is no more than that."""
        return self.apart <= self.allowed

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"allowed": self.allowed, "same": self.same}


def compare_ablated(
    before: Transformer,
    after: Transformer,
    examples: Sequence[Example],
    keep: Mapping[str, Sequence[int]],
    replacements: Mapping[HeadRef, Tensor] | None = None,
) -> tuple[OutputDifference, ...]:
    """How far the model before, with what is cut made silent, lies from the model after; where it is cheap, in double
    precision too.

    `said` is what heads that are gone say instead of nothing, where that was folded into the layer.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> texts = [Example({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> [one.apart for one in compare_ablated(net, net, texts, {"decoder.0.attention": [0, 1]})]
    [0.0, 0.0]
    """
    patches = build_ablations(before, keep, replacements or {})
    what = "silenced = cut"
    found = [_compare_with_patches(what, (before, after), examples, patches)]
    if sum(p.numel() for p in before.parameters()) <= MAX_DOUBLE_PARAMETERS and found[0].dtype != "float64":
        exact = tuple(copy.deepcopy(net).double() for net in (before, after))
        doubled = _compare_with_patches(f"{what}, in double precision", exact, examples[:MAX_DOUBLE_TEXTS], patches)
        # What was folded in is a vector of the model's own precision, however it is computed with.
        found.append(replace(doubled, dtype=found[0].dtype) if replacements else doubled)
    return tuple(found)


def build_ablations(
    before: Transformer, keep: Mapping[str, Sequence[int]], replacements: Mapping[HeadRef, Tensor]
) -> dict[HeadRef, HeadPatch | Tensor]:
    """What is put in the place of every head that a plan does not keep.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> build_ablations(net, {"decoder.0.attention": [1]}, {})
    {('decoder.0.attention', 0): Scaled(scale=0.0)}
    """
    specs, found = dict(before.described.attention_specs()), dict[HeadRef, HeadPatch | Tensor]()
    for site, kept in keep.items():
        if site not in specs:
            raise ValueError(f"the model has no site {site!r}; {suggest(site, specs)}")
        count = len(specs[site].score_head_of_output)
        if wrong := [head for head in kept if not 0 <= head < count]:
            raise ValueError(f"{site} has no head {wrong[0]} to keep; give heads in 0..{count - 1}")
        out = [(site, head) for head in range(count) if head not in kept]
        found |= {one: replacements.get(one, ScaledOutput(0.0)) for one in out}
    return found


def compare_reloaded(what: str, after: Transformer, model_call: ModelCall, examples: Sequence[Example]) -> OutputDifference:
    """How far what was read again lies from the model after."""
    return OutputDifference(what, *_max_difference(_iter_inputs(after, examples), partial(compute_output, after), partial(_call_model, model_call)))


def _call_model(says: ModelCall, given: ModelInputs) -> Tensor:
    with torch.inference_mode():
        return get_output_tensor(says(*given.args, **given.kwargs))


def _compare_with_patches(
    what: str, nets: tuple[Transformer, ...], scenes: Sequence[Example], patches: Mapping[HeadRef, HeadPatch | Tensor]
) -> OutputDifference:
    before, after = nets
    quiet: AbstractContextManager[Any] = patch(before, patches) if patches else nullcontext()
    with quiet:
        return OutputDifference(what, *_max_difference(_iter_inputs(before, scenes), partial(compute_output, before), partial(compute_output, after)))


def _iter_inputs(net: Transformer, scenes: Sequence[Example]) -> Iterator[ModelInputs]:
    """The texts as a model reads them, its pixels and frames in its precision."""
    dtype = next(net.parameters()).dtype
    for scene in scenes:
        given = prepare_inputs(net, scene.model_inputs, 0)
        yield replace(
            given,
            args=tuple(_cast_floats(one, dtype) for one in given.args),
            kwargs={name: _cast_floats(one, dtype) for name, one in given.kwargs.items()},
        )


def _cast_floats(one: Any, dtype: torch.dtype) -> Any:
    return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one


def _max_difference(
    givens: Iterator[ModelInputs], one: Callable[[ModelInputs], Tensor], other: Callable[[ModelInputs], Tensor]
) -> tuple[float, float, int, str]:
    """How far they lie apart at most, the largest number said, of how many texts, in which precision."""
    apart, largest, count, dtype = 0.0, 0.0, 0, ""
    for count, given in enumerate(givens, 1):
        first, second = one(given), other(given)
        if first.shape != second.shape:
            shapes = f"{list(first.shape)} and {list(second.shape)}"
            raise ValueError(f"of text {count - 1} the two models say {shapes} numbers; compare models of one shape")
        apart = max(apart, float((first.double() - second.to(first.device).double()).abs().max()))
        largest = max(largest, float(first.abs().max()))
        dtype = str(first.dtype).removeprefix("torch.")
    return apart, largest, count, dtype

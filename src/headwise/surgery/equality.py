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

from ..errors import nearest
from ..heads.saying import output_of
from ..heads.scene import Scene
from ..hub.editing import Head, patch
from ..hub.patches import Patch, Scaled
from ..hub.readable import Readable, readable
from ..models import Transformer
from .sayings import output

CHEAP = 2 * 10**7  # parameters, up to which copies in double precision are made
CHECKED = 16  # texts that are read in double precision
STEPS, FEW = 1024, 16  # of rounding that two ways to one number may lie apart; of numbers of two bytes
WIDE = 32  # bits
Says = Callable[..., Any]  # a model of anybody, called with the names that ours is called with


@dataclass(frozen=True)
class Difference:
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
        return (STEPS if kind.bits >= WIDE else FEW) * kind.eps * max(1.0, self.largest)

    @property
    def same(self) -> bool:
        """Whether it is no more than that."""
        return self.apart <= self.allowed

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"allowed": self.allowed, "same": self.same}


def silenced(
    before: Transformer,
    after: Transformer,
    scenes: Sequence[Scene],
    keep: Mapping[str, Sequence[int]],
    said: Mapping[Head, Tensor] | None = None,
) -> tuple[Difference, ...]:
    """How far the model before, with what is cut made silent, lies from the model after; where it is cheap, in double
    precision too.

    `said` is what heads that are gone say instead of nothing, where that was folded into the layer.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... ).eval()
    >>> texts = [Scene({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> [one.apart for one in silenced(net, net, texts, {"decoder.0.attention": [0, 1]})]
    [0.0, 0.0]
    """
    patches = gone(before, keep, said or {})
    what = "silenced = cut"
    found = [_apart(what, (before, after), scenes, patches)]
    if sum(p.numel() for p in before.parameters()) <= CHEAP and found[0].dtype != "float64":
        exact = tuple(copy.deepcopy(net).double() for net in (before, after))
        doubled = _apart(f"{what}, in double precision", exact, scenes[:CHECKED], patches)
        # What was folded in is a vector of the model's own precision, however it is computed with.
        found.append(replace(doubled, dtype=found[0].dtype) if said else doubled)
    return tuple(found)


def gone(
    before: Transformer, keep: Mapping[str, Sequence[int]], said: Mapping[Head, Tensor]
) -> dict[Head, Patch | Tensor]:
    """What is put in the place of every head that a plan does not keep.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> gone(net, {"decoder.0.attention": [1]}, {})
    {('decoder.0.attention', 0): Scaled(scale=0.0)}
    """
    specs, found = dict(before.described.specs()), dict[Head, Patch | Tensor]()
    for site, kept in keep.items():
        if site not in specs:
            raise ValueError(f"the model has no site {site!r}; {nearest(site, specs)}")
        count = len(specs[site].speaks)
        if wrong := [head for head in kept if not 0 <= head < count]:
            raise ValueError(f"{site} has no head {wrong[0]} to keep; give heads in 0..{count - 1}")
        out = [(site, head) for head in range(count) if head not in kept]
        found |= {one: said.get(one, Scaled(0.0)) for one in out}
    return found


def reloaded(what: str, after: Transformer, again: Says, scenes: Sequence[Scene]) -> Difference:
    """How far what was read again lies from the model after."""
    return Difference(what, *_farthest(_readables(after, scenes), partial(output, after), partial(_called, again)))


def _called(says: Says, given: Readable) -> Tensor:
    with torch.inference_mode():
        return output_of(says(*given.places, **given.names))


def _apart(
    what: str, nets: tuple[Transformer, ...], scenes: Sequence[Scene], patches: Mapping[Head, Patch | Tensor]
) -> Difference:
    before, after = nets
    quiet: AbstractContextManager[Any] = patch(before, patches) if patches else nullcontext()
    with quiet:
        return Difference(what, *_farthest(_readables(before, scenes), partial(output, before), partial(output, after)))


def _readables(net: Transformer, scenes: Sequence[Scene]) -> Iterator[Readable]:
    """The texts as a model reads them, its pixels and frames in its precision."""
    dtype = next(net.parameters()).dtype
    for scene in scenes:
        given = readable(net, scene.given, 0)
        yield replace(
            given,
            places=tuple(_exact(one, dtype) for one in given.places),
            names={name: _exact(one, dtype) for name, one in given.names.items()},
        )


def _exact(one: Any, dtype: torch.dtype) -> Any:
    return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one


def _farthest(
    givens: Iterator[Readable], one: Callable[[Readable], Tensor], other: Callable[[Readable], Tensor]
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

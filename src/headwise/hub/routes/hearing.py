"""What a module compares, overheard while its own code runs.

Every function of torch that it calls is looked at: `F.scaled_dot_product_attention` says all that there is to know; a
softmax whose result, and nothing else, multiplies values says the weights. That it is the same numbers is compared, not
assumed. Listening is known to the thread that listens and to no other, and ends with the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..watching import Core, Seen
from .base import Given

FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
KEPT = 4  # grids of weights that may be open at once


class Heard(NamedTuple):
    """One comparison: what was compared, and what heads then say.

    `since` is how many of the modules that ran when values were read ran already when their weights were made. `why`
    says what of it is not understood.
    """

    core: Core | None = None
    z_BTHV: Tensor | None = None
    kv: int = 0
    dim: int = 0
    since: int = 0
    why: str = ""


@dataclass
class Made:
    """A softmax over a grid of `axes`: the modules that ran then, and whether values were read by what it gave."""

    inside: tuple[nn.Module, ...]
    axes: int
    read: bool = False


class Grid(NamedTuple):
    """Weights as a softmax gave them, and as they are used since."""

    used: Tensor
    weights: Tensor
    made: Made


Told = Callable[[Heard], Tensor | None]


class Ear(TorchFunctionMode):
    """Tells of every comparison; what it is told in return takes the place of what heads say.

    `heads` is how many a module says it has, for those who keep batch and heads on one axis; 0 if it does not say.
    `inside` is the modules that run, which somebody else keeps.
    """

    def __init__(self, told: Told, heads: int = 0, inside: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.told, self.heads, self.inside = told, heads, inside
        self.open: deque[Grid] = deque(maxlen=KEPT)
        self.made: list[Made] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        hears = HEARS.get(getattr(func, "__name__", ""))
        return result if hears is None else hears(self, args, kwargs, result)

    def fused(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """One function does it all: exactly what it was told."""
        told = dict(zip(FUSED, args, strict=False)) | dict(kwargs)
        since = len(self.inside)
        if told["query"].dim() != 4:
            return self._put(Heard(since=since, why=_flat(told["query"])), o)
        _, kv, _, dim = told["key"].shape
        return self._put(Heard(seen(told), o.transpose(1, 2), kv, dim, since), o)

    def softmax(self, args: Any, kwargs: Mapping[str, Any], weights: Tensor) -> Tensor:
        """Perhaps weights: they are, if values are multiplied with them."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if weights.dim() >= 3 and dim in (-1, weights.dim() - 1):
            self.made.append(Made(tuple(self.inside), weights.dim()))
            self.open.append(Grid(weights, weights, self.made[-1]))
        return weights

    def dropout(self, args: Any, kwargs: Mapping[str, Any], dropped: Tensor) -> Tensor:
        """Weights, of which some are left out while a model trains."""
        before = args[0] if args else kwargs["input"]
        if grid := self._opened(before):
            self.open.append(grid._replace(used=dropped))
        return dropped

    def matmul(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """Perhaps values, multiplied with weights."""
        first = args[0] if args else kwargs["input"]
        return self._multiplied(first, o) if isinstance(first, Tensor) and first.dim() >= 3 else o

    def einsum(self, args: Any, kwargs: Mapping[str, Any], o: Tensor) -> Tensor:
        """The same, if its letters say so."""
        equation, first, *_ = (args[0], *args[1]) if isinstance(args[1], (list, tuple)) else args
        if not isinstance(equation, str) or first.dim() < 3:
            return o
        operands, _, said = equation.replace(" ", "").partition("->")
        weights, _, values = operands.partition(",")
        if said[: len(weights) - 1] == weights[:-1] and weights[-1] in values and weights[-1] not in said:
            return self._multiplied(first, o)
        grid = self._opened(first)
        if grid is None:
            return o
        return self._put(Heard(since=self._since(grid), why=f"it reads values by {equation!r}"), o)

    def _multiplied(self, first: Tensor, o: Tensor) -> Tensor:
        grid = self._opened(first)
        if grid is None:
            return o
        since = self._since(grid)
        weights = _by_head(grid.weights, self.heads)
        if weights is None:
            return self._put(Heard(since=since, why=_flat(grid.weights)), o)
        z_BHTV = o.reshape(*weights.shape[:3], o.shape[-1])
        return self._put(Heard(Given(weights), z_BHTV.transpose(1, 2), since=since), o)

    def _since(self, grid: Grid) -> int:
        """How many modules ran both when these weights were made and now."""
        grid.made.read = True
        both = zip(grid.made.inside, self.inside, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))

    def _opened(self, tensor: Tensor) -> Grid | None:
        """The weights that these numbers are, if any."""
        return next((grid for grid in reversed(self.open) if _same(grid.used, tensor)), None)

    def _put(self, heard: Heard, o: Tensor) -> Tensor:
        z_BTHV = self.told(heard)
        return o if z_BTHV is None else z_BTHV.transpose(1, 2).reshape(o.shape)


HEARS: dict[str, Callable[[Ear, Any, Mapping[str, Any], Tensor], Tensor]] = {
    "scaled_dot_product_attention": Ear.fused, "softmax": Ear.softmax, "dropout": Ear.dropout,
    "matmul": Ear.matmul, "__matmul__": Ear.matmul, "bmm": Ear.matmul, "einsum": Ear.einsum,
}  # fmt: skip


def seen(told: Mapping[str, Any]) -> Seen:
    """What torch's fused function was told."""
    q, k, v = (told[side].transpose(1, 2) for side in ("query", "key", "value"))
    scale, mask = told.get("scale"), told.get("attn_mask")
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    batch = q.shape[0]
    return Seen(
        q, k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1), q.shape[-1] ** -0.5 if scale is None else scale,
        mask, bool(told.get("is_causal", False)),
    )  # fmt: skip


def _by_head(weights: Tensor, heads: int) -> Tensor | None:
    """[B, H, T, S], or None if nobody says which axis is which."""
    if weights.dim() == 4:
        return weights
    return weights.unflatten(0, (-1, heads)) if weights.dim() == 3 and heads and not weights.shape[0] % heads else None


def _flat(grid: Tensor) -> str:
    return f"what it compares has {grid.dim()} axes, so that heads cannot be told apart; hw.declare says how many"


def _same(used: Tensor, tensor: Tensor) -> bool:
    """Whether these are the same numbers, perhaps in another shape or rounded to another type."""
    if used is tensor:  # also where some of them are no numbers
        return True
    if used.numel() != tensor.numel() or used.shape[-2:] != tensor.shape[-2:]:
        return False
    return torch.equal(used.to(tensor.dtype).reshape(tensor.shape), tensor)

"""A probe observes, and may replace, tensors at named points inside a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import suggest
from .core_types import AuxLosses

# The points that can be probed, with the axes of their tensors.
PROBE_POINTS = {
    "q": "B T H K",
    "k": "B S G K",
    "v": "B S G V",
    "scores": "B H T S",
    "weights": "B H T S",
    "lse": "B H T",
    "heads": "B T O V",
}


class Probe:
    """Calls ``callback(point, tensor)`` at each of the given points; a tensor that it returns replaces the original.

    Without a callback the probe records the tensors in `tensors`. `aux_losses` collects the auxiliary losses of parts.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=2))
    >>> with_weights = hw.Probe("weights")
    >>> _ = layer(torch.randn(1, 3, 8), probe=with_weights)
    >>> with_weights.tensors["weights"].shape
    torch.Size([1, 2, 3, 3])
    """

    def __init__(
        self,
        *points: str,
        callback: Callable[[str, Tensor], Tensor | None] | None = None,
        aux_losses: AuxLosses | None = None,
    ) -> None:
        for point in points:
            if point not in PROBE_POINTS:
                raise ValueError(f"cannot probe {point!r}: there is no such point; {suggest(point, PROBE_POINTS)}")
        self.points: frozenset[str] = frozenset(points)
        self.callback = callback
        self.aux_losses = aux_losses
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        if point not in self.points:
            return tensor
        if self.callback is None:
            self.tensors[point] = tensor
            return tensor
        changed = self.callback(point, tensor)
        return tensor if changed is None else changed

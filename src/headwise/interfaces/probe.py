"""A probe sees, and may change, what passes a named place inside a layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import suggest
from .core_types import AuxLosses

# Where a probe may stand, with the axes of what passes there.
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
    """Calls `see(place, tensor)` at each place it wants; a tensor it returns takes the other's place.

    Without `see` it keeps what it saw. `ledger` is where parts set their training terms.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=2))
    >>> with_weights = hw.Probe("weights")
    >>> _ = layer(torch.randn(1, 3, 8), probe=with_weights)
    >>> with_weights.tensors["weights"].shape
    torch.Size([1, 2, 3, 3])
    """

    def __init__(
        self,
        *places: str,
        callback: Callable[[str, Tensor], Tensor | None] | None = None,
        aux_losses: AuxLosses | None = None,
    ) -> None:
        for place in places:
            if place not in PROBE_POINTS:
                raise ValueError(f"no probe can stand at {place!r}; {suggest(place, PROBE_POINTS)}")
        self.points: frozenset[str] = frozenset(places)
        self.callback = callback
        self.aux_losses = aux_losses
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, place: str, tensor: Tensor) -> Tensor:
        if place not in self.points:
            return tensor
        if self.callback is None:
            self.tensors[place] = tensor
            return tensor
        changed = self.callback(place, tensor)
        return tensor if changed is None else changed

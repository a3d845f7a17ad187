"""Weights of every attention while a model runs, a band of rows at a time, handed to whoever adds them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..hub.readable import readable
from ..hub.routes.base import Found
from ..hub.running import Run
from ..hub.watching import Core
from .block import Block
from .scene import Scene

CELLS = 2**22  # weights of a band, at most: 64 MB
See = Callable[[str, Block], None]


class Looker:
    """A watcher that hands the weights of one site on, band by band; `see` is told the name of the site."""

    wants_core = True

    def __init__(self, name: str, scene: Scene, streams: tuple[str, str], see: See) -> None:
        self.name, self.scene, self.streams, self.see = name, scene, streams, see

    def core(self, seen: Core) -> None:
        """Hand all rows on."""
        asks, told = (self.scene.streams[stream] for stream in self.streams)
        heads, keys = seen.every(slice(0, 1)).shape[1], told.count
        step = max(1, CELLS // max(1, heads * keys))
        for start in range(0, asks.count, step):
            some = slice(start, min(asks.count, start + step))
            w_BHTS, allowed = seen.every(some), seen.allowed(some)
            w_HTS = w_BHTS[0]
            allowed = allowed[0].expand(-1, w_HTS.shape[1], -1)
            self.see(self.name, Block(w_HTS, allowed[0] if len(allowed) == 1 else allowed, start, asks, told))

    def heads(self, z: Tensor) -> None:
        """Leave it."""


def look(
    model: nn.Module, those: Sequence[Found], scene: Scene, streams: Mapping[str, tuple[str, str]], see: See
) -> None:
    """Run a model over one text, and hand the weights of these sites on as they come."""
    lookers = {one.site.name: Looker(one.site.name, scene, streams[one.site.name], see) for one in those}
    with torch.inference_mode():
        Run(model, readable(model, scene.inputs, 0)).watched(those, lookers)

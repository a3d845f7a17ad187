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

CELLS = 2**22  # weights of a band, at most: 16 MB
TALL = 4  # times as high as one of all keys is a band of few keys, at most
See = Callable[[str, Block], None]


class Looker:
    """A watcher that hands the weights of one site on, band by band; `see` is told the name of the site."""

    wants_core = True

    def __init__(self, name: str, scene: Scene, streams: tuple[str, str], see: See) -> None:
        self.name, self.scene, self.streams, self.see = name, scene, streams, see

    def core(self, seen: Core) -> None:
        """Hand all rows on, each band with the keys that it may read."""
        asks, told = (self.scene.streams[stream] for stream in self.streams)
        last = max(0, asks.count - 1)
        _, heads, queries, keys = seen.every(slice(last, None)).shape
        if (last + queries, keys) != (asks.count, told.count):
            fact = f"the model reads {keys} tokens and asks for {last + queries}, where {told.count} and {asks.count}"
            raise ValueError(f"{fact} are known; tell of all tokens as the model's tokenizer makes them")
        start, least = 0, max(1, CELLS // max(1, heads * keys))
        step = least
        while start < asks.count:
            some = slice(start, min(asks.count, start + step))
            allowed = seen.allowed(some)[0]
            read = allowed.flatten(0, -2).any(0).nonzero()
            those = slice(int(read[0]), int(read[-1]) + 1) if len(read) else slice(0, 1)
            w_HTS = seen.every(some, those)[0]
            allowed = allowed[..., those].expand(-1, w_HTS.shape[1], -1)
            allowed = allowed[0] if len(allowed) == 1 else allowed
            self.see(self.name, Block(w_HTS, allowed, start, asks, told, first=those.start))
            # the next reads about as many keys; it may read all
            start, step = some.stop, max(least, min(TALL * least, CELLS // (heads * w_HTS.shape[-1])))

    def heads(self, z: Tensor) -> None:
        """Leave it."""


def look(
    model: nn.Module, those: Sequence[Found], scene: Scene, streams: Mapping[str, tuple[str, str]], see: See
) -> None:
    """Run a model over one text, and hand the weights of these sites on as they come."""
    lookers = {one.site.name: Looker(one.site.name, scene, streams[one.site.name], see) for one in those}
    with torch.inference_mode():
        Run(model, readable(model, scene.given, 0)).watched(those, lookers)

"""Weights of every attention while a model runs, a band of rows at a time, handed to whoever adds them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..hub.readable import prepare_inputs
from ..hub.routes.base import SiteModule
from ..hub.running import ModelRun
from ..hub.watching import AttentionCall
from .block import WeightBand
from .scene import Example

MAX_CELLS = 2**22  # weights of a band, at most: 16 MB
MAX_HEIGHT_RATIO = 4  # times as high as one of all keys is a band of few keys, at most
BandCallback = Callable[[str, WeightBand], None]


class WeightBandHook:
    """A watcher that hands the weights of one site on, band by band; `see` is told the name of the site."""

    needs_call = True

    def __init__(self, name: str, example: Example, streams: tuple[str, str], add_band: BandCallback) -> None:
        self.name, self.example, self.streams, self.add_band = name, example, streams, add_band

    def on_call(self, call: AttentionCall) -> None:
        """Hand all rows on, each band with the keys that it may read."""
        asks, told = (self.example.streams[stream] for stream in self.streams)
        last = max(0, asks.count - 1)
        _, heads, queries, keys = call.all_weights(slice(last, None)).shape
        if (last + queries, keys) != (asks.count, told.count):
            fact = f"the model reads {keys} tokens and asks for {last + queries}, where {told.count} and {asks.count}"
            raise ValueError(f"{fact} are known; tell of all tokens as the model's tokenizer makes them")
        start, least = 0, max(1, MAX_CELLS // max(1, heads * keys))
        step = least
        while start < asks.count:
            some = slice(start, min(asks.count, start + step))
            allowed = call.allowed_pairs(some)[0]
            read = allowed.flatten(0, -2).any(0).nonzero()
            those = slice(int(read[0]), int(read[-1]) + 1) if len(read) else slice(0, 1)
            w_HTS = call.all_weights(some, those)[0]
            allowed = allowed[..., those].expand(-1, w_HTS.shape[1], -1)
            allowed = allowed[0] if len(allowed) == 1 else allowed
            self.add_band(self.name, WeightBand(w_HTS, allowed, start, asks, told, first_key=those.start))
            # the next reads about as many keys; it may read all
            start, step = some.stop, max(least, min(MAX_HEIGHT_RATIO * least, MAX_CELLS // (heads * w_HTS.shape[-1])))

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Leave it."""


def stream_weight_bands(
    model: nn.Module, sites: Sequence[SiteModule], example: Example, streams: Mapping[str, tuple[str, str]], add_band: BandCallback
) -> None:
    """Run a model over one text, and hand the weights of these sites on as they come."""
    lookers = {one.site.name: WeightBandHook(one.site.name, example, streams[one.site.name], add_band) for one in sites}
    with torch.inference_mode():
        ModelRun(model, prepare_inputs(model, example.model_inputs, 0)).run_with_hooks(sites, lookers)

"""Rows of all heads at once, and what they say, of one text: a sample, so that little is held at any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..hub.readable import prepare_inputs
from ..hub.routes.base import SiteModule
from ..hub.running import ModelRun
from ..hub.watching import AttentionCall
from .likeness import append_sink_column
from .scene import Example

MAX_SAMPLED_CELLS = 2**25  # weights of all heads of a text, at most: 128 MB
MIN_ROWS = 8  # rows of a text, however long it is
StreamPair = tuple[str, str]


class HeadLocation(NamedTuple):
    """A head by its site, its layer, and its number there."""

    site: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.site} head {self.head}"


class SampledRows(NamedTuple):
    """Some rows of every head that reads the same tokens, [heads, rows, keys and one for a learned sink], which of
    these keys each may read, and how many rows of the text each stands for."""

    streams: StreamPair
    heads: tuple[HeadLocation, ...]
    weights: Tensor
    allowed: Tensor
    row_weight: float = 1.0

    def permute_weights(self, seed: Sequence[int]) -> Tensor:
        """The same weights, those of each row dealt anew among the keys that it may read: as sharp, and looking at
        nothing."""
        draw, found = np.random.default_rng(seed), self.weights.clone()
        for head, may in enumerate(self.allowed):
            marks = torch.from_numpy(draw.random(may.shape, dtype=np.float32)).to(may.device)
            places, keys = ((~may).int().argsort(dim=-1, stable=True), torch.where(may, marks, 2).argsort(-1))
            own = found[head, :, :-1]
            own.scatter_(-1, places, self.weights[head, :, :-1].gather(-1, keys))
        return found


class RowSampling(NamedTuple):
    """How many queries of a text are looked at, and the seed they are drawn with."""

    num_rows: int = 64
    seed: int = 0

    def choose_queries(self, text_index: int, num_queries: int, cells_per_query: int) -> Tensor:
        """Which queries of text `number`, of so many, when each holds so many cells: evenly spaced from a drawn start.

        >>> RowSampling(3).queries(0, 9, 1).diff().tolist()
        [3, 3]
        """
        most = max(1, min(num_queries, self.num_rows, max(MIN_ROWS, MAX_SAMPLED_CELLS // max(1, cells_per_query))))
        start = np.random.default_rng([self.seed, text_index]).random()
        return torch.from_numpy(((start + np.arange(most)) * num_queries / most).astype(np.int64))


class RowSamplingHook:
    """A watcher that keeps the drawn rows of one site; `why` says why its rows are no shares of what is read."""

    needs_call = True

    def __init__(self, picks: Tensor) -> None:
        gaps = (picks.diff() != 1).nonzero()[:, 0] + 1
        self.query_runs = [slice(int(run[0]), int(run[-1]) + 1) for run in picks.tensor_split(gaps)]
        self.weights: Tensor | None = None
        self.allowed: Tensor | None = None
        self.unsupported_reason = ""

    def on_call(self, call: AttentionCall) -> None:
        """Keep what was drawn, and compute no other row."""
        weights = torch.cat([call.all_weights(run)[0] for run in self.query_runs], 1)
        allowed = torch.cat([call.allowed_pairs(run)[0] for run in self.query_runs], 1)
        self.weights, self.allowed = weights, allowed.expand(weights.shape)
        if bool((weights < 0).any()) or bool((weights.sum(-1) > 1 + 1e-3).any()):
            self.unsupported_reason = "its weights are below zero or sum to more than one, and so are no shares"

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Leave it."""


def sample_rows(
    model: nn.Module, sites: Sequence[SiteModule], example: Example, streams: Mapping[str, StreamPair], sampling: RowSampling,
    text_index: int = 0,
) -> tuple[list[SampledRows], dict[str, str]]:  # fmt: skip
    """Drawn rows of one text, of all heads that read the same tokens together; and which sites have none, and why.

    Rows in which some head may read nothing are left out.
    """
    cells = {one.site.name: _num_comparable_heads(sites, streams, one) * example.streams[streams[one.site.name][1]].count
             for one in sites}  # fmt: skip
    picks = {name: sampling.choose_queries(text_index, example.streams[streams[name][0]].count, held) for name, held in cells.items()}
    samplers = {name: RowSamplingHook(own) for name, own in picks.items()}
    ModelRun(model, prepare_inputs(model, example.model_inputs, 0)).run_with_hooks(sites, samplers)
    found: list[SampledRows] = []
    for pair in dict.fromkeys(streams[one.site.name] for one in sites):
        own = [one for one in sites if streams[one.site.name] == pair]
        kept = {one: held for one in own if (held := samplers[one.site.name]).weights is not None and not held.unsupported_reason}
        if kept:
            asked = example.streams[pair[0]].count
            found.append(_merge_sites(pair, kept)._replace(row_weight=asked / len(picks[own[0].site.name])))
    return found, {name: held.unsupported_reason for name, held in samplers.items() if held.unsupported_reason}


def _num_comparable_heads(those: Sequence[SiteModule], streams: Mapping[str, StreamPair], one: SiteModule) -> int:
    return sum(other.site.q for other in those if streams[other.site.name] == streams[one.site.name])


def _merge_sites(pair: StreamPair, kept: Mapping[SiteModule, RowSamplingHook]) -> SampledRows:
    weights = [held.weights for held in kept.values() if held.weights is not None]
    may = torch.cat([held.allowed for held in kept.values() if held.allowed is not None])
    alive = may.any(-1).all(0)
    heads = [
        HeadLocation(one.site.name, one.site.layer, head) for one, own in zip(kept, weights, strict=True)
        for head in range(len(own))
    ]  # fmt: skip
    return SampledRows(pair, tuple(heads), append_sink_column(torch.cat(weights)[:, alive].float()), may[:, alive])


class HeadOutputsHook:
    """A watcher that keeps what each head says of a text, [tokens, heads, width]."""

    needs_call = False

    def __init__(self) -> None:
        self.outputs: Tensor | None = None

    def on_call(self, call: AttentionCall) -> None:
        """Leave it."""

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Keep it."""
        self.outputs = outputs[0].detach()


def collect_head_outputs(model: nn.Module, sites: Sequence[SiteModule], example: Example) -> dict[str, Tensor]:
    """What every head of these sites says while a model reads a text, [tokens, heads, width] by site."""
    listeners = {one.site.name: HeadOutputsHook() for one in sites}
    ModelRun(model, prepare_inputs(model, example.model_inputs, 0)).run_with_hooks(sites, listeners)
    return {name: one.outputs for name, one in listeners.items() if one.outputs is not None}


class OutputReservoir:
    """A sample of what heads say, drawn evenly from all tokens of a data set, however they come in texts.

    Every token has a number drawn for it, and those with the least are kept: so all at once and text by text keep the
    same.
    """

    def __init__(self, max_tokens: int, seed: int = 0) -> None:
        self.max_tokens, self.seed, self.threshold = max_tokens, seed, 1.0
        self.priorities: NDArray[np.float64] = np.empty(0)
        self.outputs: dict[str, Tensor] = {}

    def add(self, text_index: int, head_outputs: Mapping[str, Tensor]) -> None:
        """What heads say [tokens, heads, width] of text `number`, by site, of the same tokens each."""
        count = len(next(iter(head_outputs.values())))
        marks = np.random.default_rng([self.seed, text_index]).random(count)
        own = np.flatnonzero(marks < self.threshold)
        self.priorities = np.concatenate([self.priorities, marks[own]])
        for name, z in head_outputs.items():
            new = z[torch.from_numpy(own).to(z.device)].float().cpu()
            self.outputs[name] = torch.cat([self.outputs[name], new]) if name in self.outputs else new
        if len(self.priorities) > self.max_tokens:
            best = np.argsort(self.priorities)[: self.max_tokens]
            self.priorities, self.threshold = self.priorities[best], float(self.priorities[best[-1]])
            self.outputs = {name: z[torch.from_numpy(best)] for name, z in self.outputs.items()}

    def features(self, sites: Sequence[str]) -> Tensor:
        """Of all heads of these sites, [heads, tokens, width]; narrower ones are filled up with zeros."""
        wide = max(self.outputs[name].shape[-1] for name in sites)
        each = [nn.functional.pad(self.outputs[name], (0, wide - self.outputs[name].shape[-1])) for name in sites]
        return torch.cat(each, 1).transpose(0, 1)

"""Rows of all heads at once, and what they say, of one text: a sample, so that little is held at any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..hub.readable import readable
from ..hub.routes.base import Found
from ..hub.running import Run
from ..hub.watching import Core
from .likeness import whole
from .scene import Scene

HELD = 2**25  # weights of all heads of a text, at most: 128 MB
FEWEST = 8  # rows of a text, however long it is
Streams = tuple[str, str]


class Who(NamedTuple):
    """A head by its site, its layer, and its number there."""

    site: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.site} head {self.head}"


class Rows(NamedTuple):
    """Some rows of every head that reads the same tokens, [heads, rows, keys and one for a learned sink], which of
    these keys each may read, and how many rows of the text each stands for."""

    streams: Streams
    heads: tuple[Who, ...]
    weights: Tensor
    allowed: Tensor
    weight: float = 1.0

    def dealt(self, seed: Sequence[int]) -> Tensor:
        """The same weights, those of each row dealt anew among the keys that it may read: as sharp, and looking at
        nothing."""
        draw, found = np.random.default_rng(seed), self.weights.clone()
        for head, may in enumerate(self.allowed):
            marks = torch.from_numpy(draw.random(may.shape, dtype=np.float32)).to(may.device)
            places, keys = ((~may).int().argsort(dim=-1, stable=True), torch.where(may, marks, 2).argsort(-1))
            own = found[head, :, :-1]
            own.scatter_(-1, places, self.weights[head, :, :-1].gather(-1, keys))
        return found


class Choice(NamedTuple):
    """How many queries of a text are looked at, and the seed they are drawn with."""

    rows: int = 64
    seed: int = 0

    def queries(self, number: int, count: int, cells: int) -> Tensor:
        """Which queries of text `number`, of so many, when each holds so many cells: evenly spaced from a drawn start.

        >>> Choice(3).queries(0, 9, 1).diff().tolist()
        [3, 3]
        """
        most = max(1, min(count, self.rows, max(FEWEST, HELD // max(1, cells))))
        start = np.random.default_rng([self.seed, number]).random()
        return torch.from_numpy(((start + np.arange(most)) * count / most).astype(np.int64))


class Sampler:
    """A watcher that keeps the drawn rows of one site; `why` says why its rows are no shares of what is read."""

    wants_core = True

    def __init__(self, picks: Tensor) -> None:
        gaps = (picks.diff() != 1).nonzero()[:, 0] + 1
        self.runs = [slice(int(run[0]), int(run[-1]) + 1) for run in picks.tensor_split(gaps)]
        self.weights: Tensor | None = None
        self.allowed: Tensor | None = None
        self.why = ""

    def core(self, seen: Core) -> None:
        """Keep what was drawn, and compute no other row."""
        weights = torch.cat([seen.every(run)[0] for run in self.runs], 1)
        allowed = torch.cat([seen.allowed(run)[0] for run in self.runs], 1)
        self.weights, self.allowed = weights, allowed.expand(weights.shape)
        if bool((weights < 0).any()) or bool((weights.sum(-1) > 1 + 1e-3).any()):
            self.why = "its weights are below zero or sum to more than one, and so are no shares"

    def heads(self, z: Tensor) -> None:
        """Leave it."""


def rows_of(
    model: nn.Module, those: Sequence[Found], scene: Scene, streams: Mapping[str, Streams], choice: Choice,
    number: int = 0,
) -> tuple[list[Rows], dict[str, str]]:  # fmt: skip
    """Drawn rows of one text, of all heads that read the same tokens together; and which sites have none, and why.

    Rows in which some head may read nothing are left out.
    """
    cells = {one.site.name: _heads(those, streams, one) * scene.streams[streams[one.site.name][1]].count
             for one in those}  # fmt: skip
    picks = {name: choice.queries(number, scene.streams[streams[name][0]].count, held) for name, held in cells.items()}
    samplers = {name: Sampler(own) for name, own in picks.items()}
    Run(model, readable(model, scene.given, 0)).watched(those, samplers)
    found: list[Rows] = []
    for pair in dict.fromkeys(streams[one.site.name] for one in those):
        own = [one for one in those if streams[one.site.name] == pair]
        kept = {one: held for one in own if (held := samplers[one.site.name]).weights is not None and not held.why}
        if kept:
            asked = scene.streams[pair[0]].count
            found.append(_together(pair, kept)._replace(weight=asked / len(picks[own[0].site.name])))
    return found, {name: held.why for name, held in samplers.items() if held.why}


def _heads(those: Sequence[Found], streams: Mapping[str, Streams], one: Found) -> int:
    return sum(other.site.q for other in those if streams[other.site.name] == streams[one.site.name])


def _together(pair: Streams, kept: Mapping[Found, Sampler]) -> Rows:
    weights = [held.weights for held in kept.values() if held.weights is not None]
    may = torch.cat([held.allowed for held in kept.values() if held.allowed is not None])
    alive = may.any(-1).all(0)
    heads = [
        Who(one.site.name, one.site.layer, head) for one, own in zip(kept, weights, strict=True)
        for head in range(len(own))
    ]  # fmt: skip
    return Rows(pair, tuple(heads), whole(torch.cat(weights)[:, alive].float()), may[:, alive])


class Listener:
    """A watcher that keeps what each head says of a text, [tokens, heads, width]."""

    wants_core = False

    def __init__(self) -> None:
        self.said: Tensor | None = None

    def core(self, seen: Core) -> None:
        """Leave it."""

    def heads(self, z: Tensor) -> None:
        """Keep it."""
        self.said = z[0].detach()


def said_in(model: nn.Module, those: Sequence[Found], scene: Scene) -> dict[str, Tensor]:
    """What every head of these sites says while a model reads a text, [tokens, heads, width] by site."""
    listeners = {one.site.name: Listener() for one in those}
    Run(model, readable(model, scene.given, 0)).watched(those, listeners)
    return {name: one.said for name, one in listeners.items() if one.said is not None}


class Reservoir:
    """A sample of what heads say, drawn evenly from all tokens of a data set, however they come in texts.

    Every token has a number drawn for it, and those with the least are kept: so all at once and text by text keep the
    same.
    """

    def __init__(self, most: int, seed: int = 0) -> None:
        self.most, self.seed, self.least = most, seed, 1.0
        self.marks: NDArray[np.float64] = np.empty(0)
        self.kept: dict[str, Tensor] = {}

    def add(self, number: int, said: Mapping[str, Tensor]) -> None:
        """What heads say [tokens, heads, width] of text `number`, by site, of the same tokens each."""
        count = len(next(iter(said.values())))
        marks = np.random.default_rng([self.seed, number]).random(count)
        own = np.flatnonzero(marks < self.least)
        self.marks = np.concatenate([self.marks, marks[own]])
        for name, z in said.items():
            new = z[torch.from_numpy(own).to(z.device)].float().cpu()
            self.kept[name] = torch.cat([self.kept[name], new]) if name in self.kept else new
        if len(self.marks) > self.most:
            best = np.argsort(self.marks)[: self.most]
            self.marks, self.least = self.marks[best], float(self.marks[best[-1]])
            self.kept = {name: z[torch.from_numpy(best)] for name, z in self.kept.items()}

    def features(self, sites: Sequence[str]) -> Tensor:
        """Of all heads of these sites, [heads, tokens, width]; narrower ones are filled up with zeros."""
        wide = max(self.kept[name].shape[-1] for name in sites)
        each = [nn.functional.pad(self.kept[name], (0, wide - self.kept[name].shape[-1])) for name in sites]
        return torch.cat(each, 1).transpose(0, 1)

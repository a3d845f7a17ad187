"""How the time of a layer grows with the length of its rows, measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..module import Attention
from .complexity import Sizes, attentions
from .costs import time
from .here import seconds, where

LENGTHS = (256, 512, 1024, 2048)
WIDTH = 64  # small, so that all of it takes seconds on one processor
SECONDS = 0.08  # of one measurement: there are about thirty


@dataclass(frozen=True)
class Growth:
    """Seconds of each layer at every length, each twice the one before."""

    width: int
    lengths: tuple[int, ...]
    layers: dict[str, tuple[float, ...]]

    @property
    def times(self) -> dict[str, tuple[float, ...]]:
        """How many times as long each layer takes on rows twice as long."""
        return {name: tuple(after / before for before, after in pairwise(each)) for name, each in self.layers.items()}

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        rows = [{"name": name, "seconds": each, "times": self.times[name]} for name, each in self.layers.items()]
        return {"width": self.width, "lengths": self.lengths, "layers": rows}

    def __str__(self) -> str:
        told = (
            f"Measured on this machine ({where()}), one row, width {self.width}: the time of {self.lengths[0]} tokens"
        )
        lines = [told, "and how many times as long each doubling takes", ""]
        lines.append(f"{'':<20}" + "".join(f"{f'{length:,} tokens':>15}" for length in self.lengths))
        for name, each in self.layers.items():
            cells = [time(each[0]), *(f"x {times:.1f}" for times in self.times[name])]
            lines.append(f"{name:<20}" + "".join(f"{cell:>15}" for cell in cells))
        return "\n".join(lines)


def growth(sizes: Sizes, lengths: tuple[int, ...] = LENGTHS) -> Growth:
    """Every layer of the table, small, at a few lengths; heads, kernel and window as they are there.

    >>> told = growth(Sizes(tokens=8, model=64), lengths=(4, 8))
    >>> all(second > 0 for each in told.layers.values() for second in each), len(told.times["GRU"])
    (True, 1)
    """
    heads = math.gcd(sizes.heads, WIDTH)
    small = Sizes(max(lengths), WIDTH, heads, sizes.kernel, sizes.window)
    layers: dict[str, tuple[float, ...]] = {}
    with torch.no_grad():
        for name, run in _layers(small):
            layers[name] = tuple(_seconds(run, length) for length in lengths)
    return Growth(WIDTH, lengths, layers)


def _seconds(run: Callable[[Tensor], Any], tokens: int) -> float:
    x_BTD = torch.randn(1, tokens, WIDTH, device=where())
    return seconds(lambda: run(x_BTD), SECONDS)


def _layers(sizes: Sizes) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """What runs on x_BTD."""
    for name, spec in attentions(sizes).items():
        yield name, Attention(spec).eval().to(where())
    for name, recurrent in {"recurrent": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}.items():
        yield name, recurrent(sizes.model, sizes.model, batch_first=True).eval().to(where())
    wide = nn.Conv1d(sizes.model, sizes.model, sizes.kernel).to(where())
    deep = nn.Conv1d(sizes.model, sizes.model, sizes.kernel, groups=sizes.model).to(where())
    across = nn.Conv1d(sizes.model, sizes.model, 1).to(where())
    yield "convolution", lambda x_BTD: wide(_before(x_BTD, sizes.kernel))
    yield "separable conv.", lambda x_BTD: across(deep(_before(x_BTD, sizes.kernel)))


def _before(x_BTD: Tensor, kernel: int) -> Tensor:
    """Channels first, with nothing before the first token: so that each position sees itself and those before it."""
    return F.pad(x_BTD.transpose(1, 2), (kernel - 1, 0))

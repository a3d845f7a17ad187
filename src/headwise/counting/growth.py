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
from .complexity import LayerSizes, attention_specs
from .costs import format_seconds
from .here import time_run, accelerator_type

MEASURED_LENGTHS = (256, 512, 1024, 2048)
MODEL_WIDTH = 64  # small, so that all of it takes seconds on one processor
SECONDS_PER_MEASUREMENT = 0.08  # of one measurement: there are about thirty


@dataclass(frozen=True)
class ScalingMeasurement:
    """Seconds of each layer at every length, each twice the one before."""

    width: int
    lengths: tuple[int, ...]
    layers: dict[str, tuple[float, ...]]

    @property
    def growth_factors(self) -> dict[str, tuple[float, ...]]:
        """How many times as long each layer takes on rows twice as long."""
        return {name: tuple(after / before for before, after in pairwise(each)) for name, each in self.layers.items()}

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        rows = [{"name": name, "seconds": each, "times": self.growth_factors[name]} for name, each in self.layers.items()]
        return {"width": self.width, "lengths": self.lengths, "layers": rows}

    def __str__(self) -> str:
        told = (
            f"Measured on this machine ({accelerator_type()}), one row, width {self.width}: the time of {self.lengths[0]} tokens"
        )
        lines = [told, "and how many times as long each doubling takes", ""]
        lines.append(f"{'':<20}" + "".join(f"{f'{length:,} tokens':>15}" for length in self.lengths))
        for name, each in self.layers.items():
            cells = [format_seconds(each[0]), *(f"x {times:.1f}" for times in self.growth_factors[name])]
            lines.append(f"{name:<20}" + "".join(f"{cell:>15}" for cell in cells))
        return "\n".join(lines)


def measure_scaling(sizes: LayerSizes, lengths: tuple[int, ...] = MEASURED_LENGTHS) -> ScalingMeasurement:
    """Every layer of the table, small, at a few lengths; heads, kernel and window as they are there.

    >>> told = measure_scaling(LayerSizes(tokens=8, model=64), lengths=(4, 8))
    >>> all(second > 0 for each in told.layers.values() for second in each), len(told.times["GRU"])
    (True, 1)
    """
    heads = math.gcd(sizes.heads, MODEL_WIDTH)
    small = LayerSizes(max(lengths), MODEL_WIDTH, heads, sizes.kernel, sizes.window)
    layers: dict[str, tuple[float, ...]] = {}
    with torch.no_grad():
        for name, run in _runnable_layers(small):
            layers[name] = tuple(_time_layer(run, length) for length in lengths)
    return ScalingMeasurement(MODEL_WIDTH, lengths, layers)


def _time_layer(run: Callable[[Tensor], Any], tokens: int) -> float:
    x_BTD = torch.randn(1, tokens, MODEL_WIDTH, device=accelerator_type())
    return time_run(lambda: run(x_BTD), SECONDS_PER_MEASUREMENT)


def _runnable_layers(sizes: LayerSizes) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """What runs on x_BTD."""
    for name, spec in attention_specs(sizes).items():
        yield name, Attention(spec).eval().to(accelerator_type())
    for name, recurrent in {"recurrent": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}.items():
        yield name, recurrent(sizes.model, sizes.model, batch_first=True).eval().to(accelerator_type())
    wide = nn.Conv1d(sizes.model, sizes.model, sizes.kernel).to(accelerator_type())
    deep = nn.Conv1d(sizes.model, sizes.model, sizes.kernel, groups=sizes.model).to(accelerator_type())
    across = nn.Conv1d(sizes.model, sizes.model, 1).to(accelerator_type())
    yield "convolution", lambda x_BTD: wide(_pad_causal(x_BTD, sizes.kernel))
    yield "separable conv.", lambda x_BTD: across(deep(_pad_causal(x_BTD, sizes.kernel)))


def _pad_causal(x_BTD: Tensor, kernel: int) -> Tensor:
    """Channels first, with nothing before the first token: so that each position sees itself and those before it."""
    return F.pad(x_BTD.transpose(1, 2), (kernel - 1, 0))

"""Attention beside the layers that it took the place of: work, what waits for what, and paths, counted."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.linear_attention import CHUNK_SIZE
from ..errors import SpecError
from ..nn.attention import Attention
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import count_parameters
from .cost_report import TERMINAL_WIDTH, format_count, format_seconds
from .cost_vs_length import MAX_TOKENS, find_ranges, prefill_flops
from .roofline import accelerator_type, time_run
from .symbolic_int import SymbolicInt, formula
from .workload import Workload

# What is often said otherwise.
NOTES = (
    "What stays constant as rows grow is how much of self-attention is serial, and how far it is from token to token; "
    "not its work: 4 n^2 d for scores and values, the larger share beyond n = 2 d, and 8 n d^2 for four projections, "
    "which a table of orders leaves out.",
    "Nor do orders tell which costs less: a GRU of 12 n d^2 is dearer than self-attention up to n = d, a plain "
    "recurrence never.",
    "A convolution is computed at all positions at once, as attention is; range costs it depth, not time.",
    "A recurrent layer reads any distance in form; what limits it is how often its gradient is multiplied.",
)
TABLE_HEADER = ("", "parameters", "FLOP", "serial", "path", "   order", "dearer")


@dataclass(frozen=True)
class LayerSizes:
    """A layer's surroundings: n tokens of width d; h heads, a kernel of k tokens, a window of r."""

    tokens: int
    model: int
    heads: int = 8
    kernel: int = 3
    window: int = 64

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("model", 1), ("heads", 1), ("kernel", 2), ("window", 2)):
            size = getattr(self, name)
            if type(size) is not int or not least <= size <= MAX_TOKENS:
                raise SpecError(f"{name}={size!r} compares nothing; give a whole number from {least} to {MAX_TOKENS}")


class LayerComplexity(NamedTuple):
    """One layer: learned numbers, FLOPs and how they come about, and what Table 1 of 1706.03762 tells of it.

    `serial` operations must be done one after another, however many processors there are. `path` is how often such a
    layer is applied, in time or in depth, until the last token knows of the first. `dearer` is the length from which
    self-attention asks for more FLOPs, or None where it never does.
    """

    name: str
    parameters: int
    flops: int
    formula: str
    order: str
    serial: int
    path: int
    dearer: int | None


@dataclass(frozen=True)
class ComplexityTable:
    """Layers of one width over rows of one length."""

    sizes: LayerSizes
    layers: tuple[LayerComplexity, ...]

    @staticmethod
    def from_sizes(sizes: LayerSizes) -> ComplexityTable:
        """Every layer of these sizes.

        >>> for layer in ComplexityTable.from_sizes(LayerSizes(tokens=1000, model=64, window=10)).layers[:4]:
        ...     print(layer.name, layer.formula, layer.serial, layer.path, layer.dearer)
        self-attention 8 n d^2 + 4 n^2 d 1 1 None
        in a window 8 n d^2 + 4 d pairs[window(10)] 1 111 2
        linear 8 n d^2 + sums over tokens 8 1 131
        recurrent 4 n d^2 1000 1000 1
        """
        known: dict[int, int] = {}

        def attention(tokens: int) -> int:
            if tokens not in known:
                known[tokens] = LAYER_KINDS["self-attention"].flops(sizes, SymbolicInt.of(tokens, "n"))
            return known[tokens]

        return ComplexityTable(sizes, tuple(kind.layer(name, sizes, attention) for name, kind in LAYER_KINDS.items()))

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"sizes": asdict(self.sizes), "layers": [layer._asdict() for layer in self.layers], "notes": list(NOTES)}

    def __str__(self) -> str:
        told = "One layer of width d = {model:,}, n = {tokens:,} tokens, k = {kernel:,}, r = {window:,}, h = {heads:,}"
        lines = [*textwrap.wrap(told.format(**asdict(self.sizes)), TERMINAL_WIDTH), "", _format_row(*TABLE_HEADER)]
        for layer in self.layers:
            cells = (format_count(size) for size in (layer.parameters, layer.flops, layer.serial, layer.path))
            since = "never" if layer.dearer is None else f"n={layer.dearer:,}"
            lines.append(_format_row(layer.name, *cells, f"   {layer.order}", "" if layer is self.layers[0] else since))
        ends = (
            "Serial: operations one after another. Path: layers, or moments, from the first token to the last. Dearer: "
            "the length from which self-attention is."
        )
        return "\n".join(
            [*lines, "", *(line for note in (ends, *NOTES) for line in textwrap.wrap(note, TERMINAL_WIDTH))]
        )


def _format_row(name: str, *cells: str) -> str:
    wide = (19, 10, 10, 8, 8, 16, 9)
    signs = ("<", ">", ">", ">", ">", "<", ">")
    return "".join(f"{cell:{sign}{n}}" for cell, sign, n in zip((name, *cells), signs, wide, strict=True)).rstrip()


@dataclass(frozen=True)
class _LayerKind:
    """A kind of layer: its order, serial, path, learned numbers, and FLOPs of so many tokens."""

    order: str
    sequential_steps: Callable[[LayerSizes], int]
    path_length: Callable[[LayerSizes], int]
    parameters: Callable[[LayerSizes], int]
    flops: Callable[[LayerSizes, SymbolicInt], int]

    def layer(self, name: str, sizes: LayerSizes, attention: Callable[[int], int]) -> LayerComplexity:
        flops = self.flops(sizes, SymbolicInt.of(sizes.tokens, "n"))
        counts = (
            self.parameters(sizes),
            int(flops),
            formula(flops),
            self.order,
            self.sequential_steps(sizes),
            self.path_length(sizes),
        )
        dearer = find_ranges(lambda n: attention(n) > self.flops(sizes, SymbolicInt.of(n, "n")), MAX_TOKENS)
        return LayerComplexity(name, *counts, dearer[-1].first if dearer and dearer[-1].last is None else None)


def attention_specs(sizes: LayerSizes) -> dict[str, AttentionSpec]:
    """The layers of the table that a spec describes.

    >>> attention_specs(LayerSizes(tokens=9, model=64, window=5))["in a window"].pattern
    Window(keys=5)
    """
    return {
        "self-attention": design(model=sizes.model, heads=sizes.heads),
        "in a window": design(model=sizes.model, heads=sizes.heads, pattern=f"window({sizes.window})"),
        "linear": design(preset="linear", model=sizes.model, heads=sizes.heads),
    }


def _attention_kind(
    name: str, order: str, told: str, serial: Callable[[LayerSizes], int], path: Callable[[LayerSizes], int]
) -> _LayerKind:
    def flops(sizes: LayerSizes, n: SymbolicInt) -> int:
        asked = prefill_flops(attention_specs(sizes)[name], Workload(context=int(n)))
        return SymbolicInt.of(asked, told.format(r=sizes.window), loose="sum")

    return _LayerKind(order, serial, path, lambda sizes: count_parameters(attention_specs(sizes)[name]), flops)


def _recurrent_kind(gates: int) -> _LayerKind:
    """A state of d numbers: each gate multiplies the token and the state, and has two biases, as torch's have."""

    def flops(sizes: LayerSizes, n: SymbolicInt) -> int:
        return 4 * gates * n * SymbolicInt.of(sizes.model, "d") ** 2

    def parameters(sizes: LayerSizes) -> int:
        return gates * (2 * sizes.model**2 + 2 * sizes.model)

    return _LayerKind("n d^2", _one_step_per_token, _one_step_per_token, parameters, flops)


def _convolution_kind(path: Callable[[LayerSizes], int]) -> _LayerKind:
    """k matrices, each for the token so many places back, and a bias."""

    def flops(sizes: LayerSizes, n: SymbolicInt) -> int:
        return 2 * SymbolicInt.of(sizes.kernel, "k") * n * SymbolicInt.of(sizes.model, "d") ** 2

    def parameters(sizes: LayerSizes) -> int:
        return sizes.kernel * sizes.model**2 + sizes.model

    return _LayerKind("k n d^2", _constant_steps, path, parameters, flops)


def _separable_flops(sizes: LayerSizes, n: SymbolicInt) -> int:
    d = SymbolicInt.of(sizes.model, "d")
    return 2 * SymbolicInt.of(sizes.kernel, "k") * n * d + 2 * n * d**2


def _constant_steps(sizes: LayerSizes) -> int:
    return 1


def _one_step_per_token(sizes: LayerSizes) -> int:
    return sizes.tokens


def _num_chunks(sizes: LayerSizes) -> int:
    """Each chunk of tokens waits for the state of those before it."""
    return -(-sizes.tokens // CHUNK_SIZE)


def _layers_to_reach(back: int, tokens: int) -> int:
    """Layers that each reach so far back, until the last token knows of the first."""
    return max(-(-(tokens - 1) // back), 1)


def _dilated_path(sizes: LayerSizes) -> int:
    """Layers whose gaps grow by a factor of k: together k^layers tokens, the own included."""
    layers, reached = 1, sizes.kernel
    while reached < sizes.tokens:
        layers, reached = layers + 1, reached * sizes.kernel
    return layers


def _contiguous_path(sizes: LayerSizes) -> int:
    return _layers_to_reach(sizes.kernel - 1, sizes.tokens)


LAYER_KINDS = {
    "self-attention": _attention_kind("self-attention", "n^2 d", "8 n d^2 + 4 n^2 d", _constant_steps, _constant_steps),
    "in a window": _attention_kind(
        "in a window",
        "r n d",
        "8 n d^2 + 4 d pairs[window({r})]",
        _constant_steps,
        lambda sizes: _layers_to_reach(sizes.window - 1, sizes.tokens),
    ),
    "linear": _attention_kind("linear", "n d^2 / h", "8 n d^2 + sums over tokens", _num_chunks, _constant_steps),
    "recurrent": _recurrent_kind(1),
    "GRU": _recurrent_kind(3),
    "LSTM": _recurrent_kind(4),
    "convolution": _convolution_kind(_contiguous_path),
    "dilated convolution": _convolution_kind(_dilated_path),
    "separable conv.": _LayerKind(
        "k n d + n d^2",
        _constant_steps,
        _contiguous_path,
        lambda sizes: sizes.model * (sizes.kernel + 1) + sizes.model * (sizes.model + 1),
        _separable_flops,
    ),
}

# --- How the time of a layer grows with the length of its rows, measured on this machine ---------------

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
        rows = [
            {"name": name, "seconds": each, "times": self.growth_factors[name]} for name, each in self.layers.items()
        ]
        return {"width": self.width, "lengths": self.lengths, "layers": rows}

    def __str__(self) -> str:
        told = (
            f"Measured on this machine ({accelerator_type()}), one row, width {self.width}: the time of "
            f"{self.lengths[0]} tokens"
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
    >>> all(second > 0 for each in told.layers.values() for second in each), len(told.growth_factors["GRU"])
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

"""Complexity of attention compared with recurrent and convolutional layers, after table 1 of
1706.03762.

`ComplexityTable` counts parameters, FLOPs, sequential operations and path lengths;
`measure_scaling` times small layers at several lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.backends.linear_attention import CHUNK_SIZE
from ..attention.presets import design
from ..attention.spec.attention_spec import AttentionSpec
from ..report.data import Column, Table
from ..report.text import format_count, format_seconds
from ..util.errors import SpecError
from . import count_parameters
from .cost_report import estimate_cost
from .flops import SymbolicInt, formula
from .roofline import accelerator_type, time_run
from .workload import Workload

# Common misunderstandings, which the printed table corrects.
NOTES = (
    "Self-attention has a constant number of sequential operations and a constant path length, "
    "but not constant work: 4 n^2 d for scores and values, the larger share beyond n = 2 d, and "
    "8 n d^2 for four projections, which a table of orders leaves out.",
    "The order does not decide which layer is cheaper: a GRU with 12 n d^2 costs more than "
    "self-attention up to n = d, a plain recurrent layer never does.",
    "A convolution is computed at all positions in parallel, like attention; a longer range costs "
    "depth, not time.",
    "A recurrent layer can read any distance in principle; the limit is how often its gradient is "
    "multiplied.",
)
MAX_TOKENS = 2**40


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the layers: n tokens of width d; h heads, a convolution kernel of k tokens, a window
    of r tokens.
    """

    tokens: int
    model: int
    heads: int = 8
    kernel: int = 3
    window: int = 64

    def __post_init__(self) -> None:
        for name, least in (
            ("tokens", 1),
            ("model", 1),
            ("heads", 1),
            ("kernel", 2),
            ("window", 2),
        ):
            size = getattr(self, name)
            if type(size) is not int or not least <= size <= MAX_TOKENS:
                raise SpecError(
                    f"{name} must be a whole number from {least} to {MAX_TOKENS}, got {size!r}"
                )


class LayerComplexity(NamedTuple):
    """One layer: parameters, FLOPs and their formula, and the columns of table 1 of 1706.03762.

    `serial` is the number of sequential operations with any number of processors. `path` is how
    often the layer is applied, in time or in depth, until information of the first token reaches
    the last. `dearer` is the length from which self-attention requires more FLOPs than this layer,
    or None if it never does.
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
    """The complexity of all kinds of layers at given sizes."""

    sizes: LayerSizes
    layers: tuple[LayerComplexity, ...]

    @staticmethod
    def from_sizes(sizes: LayerSizes) -> ComplexityTable:
        """Compute the table for these sizes.

        >>> for layer in ComplexityTable.from_sizes(
        ...     LayerSizes(tokens=1000, model=64, window=10)
        ... ).layers[:4]:
        ...     print(layer.name, layer.formula, layer.serial, layer.path, layer.dearer)
        self-attention 8 n d^2 + 4 n^2 d 1 1 None
        sliding window 8 n d^2 + 4 d pairs[window(10)] 1 111 2
        linear 8 n d^2 + sums over tokens 8 1 131
        recurrent 4 n d^2 1000 1000 1
        """
        attention = LAYER_KINDS["self-attention"]

        @cache
        def attention_flops(tokens: int) -> int:
            return attention.flops(sizes, SymbolicInt.of(tokens, "n"))

        layers: list[LayerComplexity] = []
        for name, kind in LAYER_KINDS.items():

            def is_exceeded(tokens: int, kind: _LayerKind = kind) -> bool:
                return attention_flops(tokens) > kind.flops(sizes, SymbolicInt.of(tokens, "n"))

            flops = kind.flops(sizes, SymbolicInt.of(sizes.tokens, "n"))
            counts = (kind.parameters(sizes), int(flops), formula(flops))
            steps = (kind.serial(sizes), kind.path(sizes), _first_length_where(is_exceeded))
            layers.append(LayerComplexity(name, *counts, kind.order, *steps))
        return ComplexityTable(sizes, tuple(layers))

    @property
    def data(self) -> dict[str, Any]:
        """The table as plain values."""
        return {
            "sizes": asdict(self.sizes),
            "layers": [layer._asdict() for layer in self.layers],
            "notes": list(NOTES),
        }

    @property
    def items(self) -> list[Table]:
        """The table with its notes."""
        sizes = self.sizes
        title = (
            f"One layer of width d = {sizes.model:,}, n = {sizes.tokens:,} tokens, "
            f"k = {sizes.kernel:,}, r = {sizes.window:,}, h = {sizes.heads:,}"
        )
        names = ("params", "FLOPs", "serial", "path")
        columns = ["", *(Column(name, format_count) for name in names), "order", "crossover"]
        rows: list[list[Any]] = []
        for layer in self.layers:
            crossover = "never" if layer.dearer is None else f"n={layer.dearer:,}"
            cells = [layer.name, layer.parameters, layer.flops, layer.serial, layer.path]
            rows.append([*cells, layer.order, crossover if rows else ""])
        legend = (
            "Serial: sequential operations. Path: layers, or time steps, from the first token to "
            "the last. Crossover: the length from which self-attention costs more than this layer."
        )
        return [Table(title, columns, rows, (legend, *NOTES))]


class _LayerKind(NamedTuple):
    """A kind of layer: order, and functions of its sizes: sequential operations, path length,
    parameters, and FLOPs of n tokens.
    """

    order: str
    serial: Callable[[LayerSizes], int]
    path: Callable[[LayerSizes], int]
    parameters: Callable[[LayerSizes], int]
    flops: Callable[[LayerSizes, SymbolicInt], int]


def _first_length_where(holds: Callable[[int], bool]) -> int | None:
    """Return the length from which a condition holds; None if it does not hold at the greatest.

    All lengths up to 16 are tried, then powers of two and the lengths halfway between.
    """
    lengths = list(range(1, 17))
    while lengths[-1] < MAX_TOKENS:
        size = 2 ** (lengths[-1].bit_length() - 1)
        lengths.append(3 * size // 2 if lengths[-1] == size else 2 * size)
    if not holds(MAX_TOKENS):
        return None
    low = next((length for length in reversed(lengths) if not holds(length)), 0)
    high = next(length for length in lengths if length > low)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def attention_specs(sizes: LayerSizes) -> dict[str, AttentionSpec]:
    """Return the specs of the attention layers in the table.

    >>> attention_specs(LayerSizes(tokens=9, model=64, window=5))["sliding window"].pattern
    Window(keys=5)
    """
    return {
        "self-attention": design(model=sizes.model, heads=sizes.heads),
        "sliding window": design(
            model=sizes.model, heads=sizes.heads, pattern=f"window({sizes.window})"
        ),
        "linear": design(preset="linear", model=sizes.model, heads=sizes.heads),
    }


def _attention_kind(name: str, order: str, text: str, **steps: Any) -> _LayerKind:
    def flops(sizes: LayerSizes, n: SymbolicInt) -> int:
        spec = attention_specs(sizes)[name]
        required = estimate_cost(spec, Workload(context=int(n))).prefill_flops.total
        return SymbolicInt.of(required, text.format(r=sizes.window), loose="sum")

    def parameters(sizes: LayerSizes) -> int:
        return count_parameters(attention_specs(sizes)[name])

    return _LayerKind(order, parameters=parameters, flops=flops, **steps)


def _recurrent_kind(gates: int) -> _LayerKind:
    """A recurrent layer with d state values; each gate has two matrices and two biases, as in
    torch.nn.
    """

    def flops(sizes: LayerSizes, n: SymbolicInt) -> int:
        return 4 * gates * n * SymbolicInt.of(sizes.model, "d") ** 2

    def parameters(sizes: LayerSizes) -> int:
        return gates * (2 * sizes.model**2 + 2 * sizes.model)

    return _LayerKind("n d^2", _tokens, _tokens, parameters, flops)


def _convolution_kind(path: Callable[[LayerSizes], int], separable: bool = False) -> _LayerKind:
    """A convolution: one d x d matrix for each of k positions, or one channel by channel and one
    matrix (separable); with biases.
    """

    def flops(sizes: LayerSizes, n: SymbolicInt) -> int:
        k = SymbolicInt.of(sizes.kernel, "k")
        d = SymbolicInt.of(sizes.model, "d")
        return 2 * k * n * d + 2 * n * d**2 if separable else 2 * k * n * d**2

    def parameters(sizes: LayerSizes) -> int:
        if separable:
            return sizes.model * (sizes.kernel + 1) + sizes.model * (sizes.model + 1)
        return sizes.kernel * sizes.model**2 + sizes.model

    order = "k n d + n d^2" if separable else "k n d^2"
    return _LayerKind(order, _one, path, parameters, flops)


def _one(sizes: LayerSizes) -> int:
    return 1


def _tokens(sizes: LayerSizes) -> int:
    return sizes.tokens


def _layers_to_reach(reach: int, tokens: int) -> int:
    """Number of layers, each reaching back `reach` tokens, from the last token to the first."""
    return max(-(-(tokens - 1) // reach), 1)


def _window_path(sizes: LayerSizes) -> int:
    return _layers_to_reach(sizes.window - 1, sizes.tokens)


def _contiguous_path(sizes: LayerSizes) -> int:
    return _layers_to_reach(sizes.kernel - 1, sizes.tokens)


def _dilated_path(sizes: LayerSizes) -> int:
    """Number of layers whose dilation grows by a factor of k each; together they see k^layers
    tokens.
    """
    layers = 1
    while sizes.kernel**layers < sizes.tokens:
        layers += 1
    return layers


def _num_chunks(sizes: LayerSizes) -> int:
    """Number of chunks of linear attention; a chunk needs the state of the chunk before it."""
    return -(-sizes.tokens // CHUNK_SIZE)


WINDOW_TEXT = "8 n d^2 + 4 d pairs[window({r})]"
LINEAR_TEXT = "8 n d^2 + sums over tokens"
LAYER_KINDS = {
    "self-attention": _attention_kind(
        "self-attention", "n^2 d", "8 n d^2 + 4 n^2 d", serial=_one, path=_one
    ),
    "sliding window": _attention_kind(
        "sliding window", "r n d", WINDOW_TEXT, serial=_one, path=_window_path
    ),
    "linear": _attention_kind("linear", "n d^2 / h", LINEAR_TEXT, serial=_num_chunks, path=_one),
    "recurrent": _recurrent_kind(1),
    "GRU": _recurrent_kind(3),
    "LSTM": _recurrent_kind(4),
    "convolution": _convolution_kind(_contiguous_path),
    "dilated convolution": _convolution_kind(_dilated_path),
    "separable conv.": _convolution_kind(_contiguous_path, separable=True),
}

# --- Measured scaling: the time of a layer by length, on this machine -----------------------------

MEASURED_LENGTHS = (256, 512, 1024, 2048)
MODEL_WIDTH = 64  # small, so that all measurements take a few seconds on one processor
SECONDS_PER_MEASUREMENT = 0.08  # there are about thirty


@dataclass(frozen=True)
class ScalingMeasurement:
    """Measured seconds of each layer at several lengths, each twice the one before."""

    width: int
    lengths: tuple[int, ...]
    layers: dict[str, tuple[float, ...]]

    @property
    def growth_factors(self) -> dict[str, tuple[float, ...]]:
        """Ratio of the times at successive lengths, by layer: the factor for a doubled length."""
        return {
            name: tuple(after / before for before, after in pairwise(seconds))
            for name, seconds in self.layers.items()
        }

    @property
    def data(self) -> dict[str, Any]:
        """The measurement as plain values."""
        factors = self.growth_factors
        rows = [
            {"name": name, "seconds": seconds, "times": factors[name]}
            for name, seconds in self.layers.items()
        ]
        return {"width": self.width, "lengths": self.lengths, "layers": rows}

    @property
    def items(self) -> list[Table]:
        """The times at the first length, and the factor for each doubling of it."""
        title = (
            f"Measured on this machine ({accelerator_type()}), one row, width {self.width}: time "
            f"at {self.lengths[0]} tokens, and factor for each doubling of the length"
        )
        headers = [Column(f"{length:,} tokens", align="right") for length in self.lengths]
        factors = self.growth_factors
        rows: list[list[str]] = []
        for name, seconds in self.layers.items():
            growth = [f"x {factor:.1f}" for factor in factors[name]]
            rows.append([name, format_seconds(seconds[0]), *growth])
        return [Table(title, ["", *headers], rows)]


def measure_scaling(
    sizes: LayerSizes, lengths: tuple[int, ...] = MEASURED_LENGTHS
) -> ScalingMeasurement:
    """Time every layer of the table at a few lengths, with width 64 and the kernel and window of
    `sizes`.

    >>> scaling = measure_scaling(LayerSizes(tokens=8, model=64), lengths=(4, 8))
    >>> (
    ...     all(min(seconds) > 0 for seconds in scaling.layers.values()),
    ...     len(scaling.growth_factors["GRU"]),
    ... )
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
    """Yield functions of x_BTD that run the layers of the table."""
    for name, spec in attention_specs(sizes).items():
        yield name, Attention(spec).eval().to(accelerator_type())
    widths = (sizes.model, sizes.model)
    for name, recurrent in {"recurrent": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}.items():
        yield name, recurrent(*widths, batch_first=True).eval().to(accelerator_type())
    conv = nn.Conv1d(*widths, sizes.kernel).to(accelerator_type())
    depthwise = nn.Conv1d(*widths, sizes.kernel, groups=sizes.model).to(accelerator_type())
    pointwise = nn.Conv1d(*widths, 1).to(accelerator_type())
    yield "convolution", lambda x_BTD: conv(_pad_causal(x_BTD, sizes.kernel))
    yield "separable conv.", lambda x_BTD: pointwise(depthwise(_pad_causal(x_BTD, sizes.kernel)))


def _pad_causal(x_BTD: Tensor, kernel: int) -> Tensor:
    """Transpose to channels first and pad with zeros on the left, so that a
    convolution is causal.
    """
    return F.pad(x_BTD.transpose(1, 2), (kernel - 1, 0))

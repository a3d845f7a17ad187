"""Complexity of attention compared with recurrent and convolutional layers, after table 1 of
1706.03762.

`ComplexityTable` counts parameters, FLOPs, sequential operations and path lengths;
`measure_scaling` times small layers at several lengths; `measure_layer_reach` differentiates small
layers in float64: gradient by distance, receptive field and equivariance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.backends.linear_attention import CHUNK_SIZE
from ..attention.presets import design
from ..attention.spec.attention_spec import AttentionSpec
from ..report.data import Column, Table
from ..report.text import format_count
from ..util.errors import SpecError
from . import count_parameters
from .cost_estimate import estimate_cost
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
        linear 8 n d^2 + sums over tokens 16 1 67
        recurrent 4 n d^2 1000 1000 1
        """
        kinds = _list_kinds(sizes)
        attention_flops = cache(kinds["self-attention"].flops)
        layers: list[LayerComplexity] = []
        for name, kind in kinds.items():

            def is_exceeded(tokens: int, kind: _LayerKind = kind) -> bool:
                return attention_flops(tokens) > kind.flops(tokens)

            flops = kind.flops(sizes.tokens)
            counts = (kind.parameters, int(flops), formula(flops))
            steps = (kind.serial, kind.path, _first_length_where(is_exceeded))
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
    """A kind of layer: its order, sequential operations, path length, parameters, and the FLOPs of
    a number of tokens.
    """

    order: str
    serial: int
    path: int
    parameters: int
    flops: Callable[[int], int]


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


def _list_kinds(sizes: LayerSizes) -> dict[str, _LayerKind]:
    """Return the kinds of layers. A gate of a recurrent layer has two matrices and two biases, as
    in torch.nn; a separable convolution mixes positions channel by channel, then channels by a
    matrix.
    """
    tokens = sizes.tokens
    width = sizes.model
    d = SymbolicInt.with_formula(width, "d")
    k = SymbolicInt.with_formula(sizes.kernel, "k")

    def depth(reach: int) -> int:  # layers, each reaching back so far, from the last to the first
        return max(-(-(tokens - 1) // reach), 1)

    # Order, sequential operations, path and formula. A chunk of linear attention needs the state of
    # the chunk before it.
    window = f"8 n d^2 + 4 d pairs[window({sizes.window})]"
    chunks = -(-tokens // CHUNK_SIZE)
    attention = {
        "self-attention": ("n^2 d", 1, 1, "8 n d^2 + 4 n^2 d"),
        "sliding window": ("r n d", 1, depth(sizes.window - 1), window),
        "linear": ("n d^2 / h", chunks, 1, "8 n d^2 + sums over tokens"),
    }
    kinds: dict[str, _LayerKind] = {}
    for name, spec in attention_specs(sizes).items():
        order, serial, path, text = attention[name]

        def flops(n: int, spec: AttentionSpec = spec, text: str = text) -> int:
            required = estimate_cost(spec, Workload(context=n)).prefill_flops.total
            return SymbolicInt.with_formula(required, text, loose="sum")

        kinds[name] = _LayerKind(order, serial, path, count_parameters(spec), flops)
    for name, gates in {"recurrent": 1, "GRU": 3, "LSTM": 4}.items():
        parameters = gates * (2 * width**2 + 2 * width)
        factor = 4 * gates
        kinds[name] = _LayerKind(
            *("n d^2", tokens, tokens, parameters),
            lambda n, factor=factor: factor * SymbolicInt.with_formula(n, "n") * d**2,
        )
    contiguous = depth(sizes.kernel - 1)
    dilated = 1  # dilation grows by a factor of k each layer, so that they see k^layers tokens
    while sizes.kernel**dilated < tokens:
        dilated += 1
    for name, path in {"convolution": contiguous, "dilated convolution": dilated}.items():
        kinds[name] = _LayerKind(
            *("k n d^2", 1, path, sizes.kernel * width**2 + width),
            lambda n: 2 * k * SymbolicInt.with_formula(n, "n") * d**2,
        )
    kinds["separable conv."] = _LayerKind(
        *("k n d + n d^2", 1, contiguous, width * (sizes.kernel + width + 2)),
        lambda n: (
            2 * k * SymbolicInt.with_formula(n, "n") * d
            + 2 * SymbolicInt.with_formula(n, "n") * d**2
        ),
    )
    return kinds


# --- Measured scaling: the time of a layer by length, on this machine -----------------------------

MEASURED_LENGTHS = (256, 512, 1024, 2048)
MODEL_WIDTH = 64  # small, so that all measurements take a few seconds on one processor
SECONDS_PER_MEASUREMENT = 0.08  # there are about thirty


def measure_scaling(
    sizes: LayerSizes, lengths: Sequence[int] = MEASURED_LENGTHS
) -> dict[str, tuple[float, ...]]:
    """Seconds of every layer of the table at a few lengths, with width 64 and the kernel and window
    of `sizes`.

    >>> seconds = measure_scaling(LayerSizes(tokens=8, model=64), lengths=(4, 8))
    >>> all(min(times) > 0 for times in seconds.values()), len(seconds["GRU"])
    (True, 2)
    """
    heads = math.gcd(sizes.heads, MODEL_WIDTH)
    small = LayerSizes(max(lengths), MODEL_WIDTH, heads, sizes.kernel, sizes.window)
    layers: dict[str, tuple[float, ...]] = {}
    with torch.no_grad():
        for name, run in _runnable_layers(small):
            seconds: list[float] = []
            for tokens in lengths:
                x_BTD = torch.randn(1, tokens, MODEL_WIDTH, device=accelerator_type())
                seconds.append(time_run(partial(run, x_BTD), SECONDS_PER_MEASUREMENT))
            layers[name] = tuple(seconds)
    return layers


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


MAX_REACH_TOKENS = 512  # a convolution stacks up to half as many layers
DISTANCES = (1, 8, 32)
WIDTH = 16
KERNEL = 3
HEADS = 2
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerReach:
    """Measured range, gradients and equivariance of one layer with random weights over n tokens.

    `receptive_field` is the number of input tokens with a nonzero derivative in the middle output
    or, if these are more, in the last one, where a border cuts off later tokens. `layers` is the
    number of stacked layers until the first token reaches the last output. `chain` is the longest
    chain of dependent operations that autograd records. `gradients` is the Frobenius norm of the
    last output's derivative by the token at each distance. `shift` and `permutation` are the
    largest differences between the layer of moved tokens and the moved outputs, away from the
    borders for shifts. `parameters` does not depend on n; `state_bytes` is what the next token
    reads of the tokens before, in float32.
    """

    name: str
    receptive_field: int
    layers: int
    chain: int
    gradients: Mapping[int, float]
    shift: float
    permutation: float
    parameters: int
    state_bytes: int


def measure_layer_reach(tokens: int = 64) -> list[LayerReach]:
    """Measure self-attention, a GRU, an LSTM and a convolution of 3 tokens with random weights.

    >>> [(layer.name, layer.receptive_field, layer.layers) for layer in measure_layer_reach(33)]
    [('attention', 33, 1), ('GRU', 33, 1), ('LSTM', 33, 1), ('convolution', 3, 32)]
    """
    if not DISTANCES[-1] < tokens <= MAX_REACH_TOKENS:
        raise SpecError(
            f"tokens must be from {DISTANCES[-1] + 1} to {MAX_REACH_TOKENS}, got {tokens}"
        )
    rows: list[LayerReach] = []
    with torch.random.fork_rng(devices=[]):
        for name, make in LAYERS.items():
            torch.manual_seed(0)
            module = make().double().eval()
            rows.append(_measure(name, module, tokens))
    return rows


# --- The layers, each a function of x_TD ----------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.GRU | nn.LSTM]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.inner(x_TD)[0]

    def state_bytes(self, tokens: int) -> int:
        state = self.inner(torch.zeros(tokens, WIDTH, dtype=torch.float64))[1]
        return 4 * sum(part.numel() for part in (state if isinstance(state, tuple) else (state,)))


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.inner(x_TD.T[None])[0].T

    def state_bytes(self, tokens: int) -> int:
        return 4 * WIDTH * min(KERNEL - 1, tokens)


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(
            design(model=WIDTH, heads=HEADS), backend="dense"
        )  # one graph for all lengths

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.inner(x_TD[None])[0]

    def state_bytes(self, tokens: int) -> int:
        cached = Attention(design(model=WIDTH, heads=HEADS, pattern="causal()"))
        return cached.cache(batch=1, capacity=tokens).nbytes


LAYERS: Mapping[str, Callable[[], _SelfAttention | _Recurrent | _Convolution]] = {
    "attention": _SelfAttention,
    "GRU": lambda: _Recurrent(nn.GRU),
    "LSTM": lambda: _Recurrent(nn.LSTM),
    "convolution": _Convolution,
}


# --- Measures -------------------------------------------------------------------------------------


def _measure(
    name: str, module: _SelfAttention | _Recurrent | _Convolution, tokens: int
) -> LayerReach:
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    norms_T = gradient_norms(module, x_TD)
    order = torch.randperm(len(x_TD), generator=torch.Generator().manual_seed(2))
    return LayerReach(
        name=name,
        receptive_field=max(
            int((gradient_norms(module, x_TD, output) > 0).sum()) for output in (tokens // 2, -1)
        ),
        layers=layers_to_reach(module, x_TD),
        chain=longest_chain(module(x_TD)),
        gradients={distance: float(norms_T[-1 - distance]) for distance in DISTANCES},
        shift=_shift_error(module, x_TD),
        permutation=_error(module(x_TD[order]), module(x_TD)[order]),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        state_bytes=module.state_bytes(tokens),
    )


def gradient_norms(layer: Layer, x_TD: Tensor, output: int = -1) -> Tensor:
    """Frobenius norm of one output's derivative by each input token; the last output unless another
    is given.

    >>> gradient_norms(lambda x_TD: x_TD.cumsum(0), torch.zeros(3, 4)).tolist()
    [2.0, 2.0, 2.0]
    """
    jacobian_DTD = torch.autograd.functional.jacobian(lambda x: layer(x)[output], x_TD)
    assert isinstance(jacobian_DTD, Tensor)
    return torch.linalg.vector_norm(jacobian_DTD, dim=(0, 2))


def layers_to_reach(layer: Layer, x_TD: Tensor) -> int:
    """Count how often a layer is applied until the last output depends on the first token.

    >>> layers_to_reach(lambda x_TD: x_TD.roll(1, 0), torch.zeros(5, 2))
    4
    """
    # 1 where an output depends on an input, by the derivative in a random direction of channels.
    x = x_TD.detach().clone().requires_grad_()
    direction_D = torch.randn(
        x_TD.shape[1], generator=torch.Generator().manual_seed(3), dtype=x_TD.dtype
    )
    outputs_T = layer(x) @ direction_D
    rows = [torch.autograd.grad(output, x, retain_graph=True)[0] for output in outputs_T]
    depends_TT = torch.stack([(row != 0).any(-1) for row in rows]).float()
    reached_T = torch.zeros(len(x_TD))
    reached_T[-1] = 1
    for count in range(1, len(x_TD) + 1):
        reached_T = ((reached_T @ depends_TT) > 0).float()
        if reached_T[0]:
            return count
    raise SpecError(
        f"the last of {len(x_TD)} tokens does not depend on the first after {len(x_TD)} layers"
    )


def longest_chain(output: Tensor) -> int:
    """Count operations on the longest path of autograd's graph, from an output back to its inputs.

    >>> x = torch.ones(3, requires_grad=True)
    >>> longest_chain((x * 2).exp().sum()), longest_chain(x.exp() + x)
    (4, 3)
    """
    assert output.grad_fn is not None, "the output needs a gradient"
    depths: dict[Any, int] = {}
    stack = [output.grad_fn]
    while stack:
        node = stack[-1]
        nodes = [following for following, _ in node.next_functions if following is not None]
        waiting = [following for following in nodes if following not in depths]
        if waiting:
            stack += waiting
            continue
        depths[stack.pop()] = 1 + max((depths[following] for following in nodes), default=0)
    return depths[output.grad_fn]


def _shift_error(layer: Layer, x_TD: Tensor, by: int = 2) -> float:
    """Error of a circular shift, at tokens where the convolution does not see a border."""
    inside = slice(2 * by + KERNEL, -by - KERNEL)
    return _error(layer(x_TD.roll(by, 0))[inside], layer(x_TD).roll(by, 0)[inside])


def _error(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())

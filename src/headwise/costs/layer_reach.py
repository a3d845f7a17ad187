"""Gradient by distance, receptive field and equivariance of attention, GRU, LSTM and convolution
layers, measured.

`measure_layer_reach` runs small layers in float64 and differentiates them; `complexity` counts
their FLOPs and path lengths by formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.attention import Attention
from ..attention.presets import design
from ..report.data import Column, Table
from ..util.errors import SpecError

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
    or, if these are more, in the last one, whose later tokens a border cuts off. `layers` is the
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


@dataclass(frozen=True)
class LayerReachTable:
    """The reach of all layers over the same tokens."""

    tokens: int
    layers: tuple[LayerReach, ...]

    @property
    def data(self) -> dict[str, Any]:
        """The table as plain values."""
        return {
            "tokens": self.tokens,
            "width": WIDTH,
            "layers": [asdict(layer) for layer in self.layers],
        }

    @property
    def items(self) -> list[Table]:
        """A row for each measure, a column for each layer."""
        title = (
            f"Reach of random layers, differentiated in float64: {self.tokens} tokens, width "
            f"{WIDTH}, convolution of {KERNEL} tokens"
        )
        measures: dict[str, Callable[[LayerReach], str]] = {
            "receptive field, tokens": lambda layer: f"{layer.receptive_field:,}",
            "layers from first token to last": lambda layer: f"{layer.layers:,}",
            "longest chain of operations": lambda layer: f"{layer.chain:,}",
            **{f"gradient, {n} tokens back": _gradient_cell(n) for n in DISTANCES},
            "error of shifted tokens": lambda layer: f"{layer.shift:.0e}",
            "error of permuted tokens": lambda layer: f"{layer.permutation:.0e}",
            "parameters": lambda layer: f"{layer.parameters:,}",
            "bytes read of earlier tokens": lambda layer: f"{layer.state_bytes:,}",
        }
        rows = [[name, *map(cell, self.layers)] for name, cell in measures.items()]
        columns = [Column(layer.name, align="right") for layer in self.layers]
        return [Table(title, ["", *columns], rows)]


def _gradient_cell(distance: int) -> Callable[[LayerReach], str]:
    return lambda layer: f"{layer.gradients[distance]:.1e}"


def measure_layer_reach(tokens: int = 64) -> LayerReachTable:
    """Measure self-attention, a GRU, an LSTM and a convolution of 3 tokens with random weights.

    >>> [
    ...     (layer.name, layer.receptive_field, layer.layers)
    ...     for layer in measure_layer_reach(33).layers
    ... ]
    [('attention', 33, 1), ('GRU', 33, 1), ('LSTM', 33, 1), ('convolution', 3, 32)]
    """
    if not DISTANCES[-1] < tokens <= MAX_REACH_TOKENS:
        raise SpecError(
            f"tokens must be from {DISTANCES[-1] + 1} to {MAX_REACH_TOKENS}, got {tokens}"
        )
    rows = []
    with torch.random.fork_rng(devices=[]):
        for name, make in LAYERS.items():
            torch.manual_seed(0)
            module = make().double().eval()
            rows.append(_measure(name, module, tokens))
    return LayerReachTable(tokens, tuple(rows))


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
    return LayerReach(
        name=name,
        receptive_field=max(
            int((gradient_norms(module, x_TD, output) > 0).sum()) for output in (tokens // 2, -1)
        ),
        layers=layers_to_reach(module, x_TD),
        chain=longest_chain(module(x_TD)),
        gradients={distance: float(norms_T[-1 - distance]) for distance in DISTANCES},
        shift=_shift_error(module, x_TD),
        permutation=_permutation_error(module, x_TD),
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
    """Number of times that a layer is applied until the last output depends on the first token.

    >>> layers_to_reach(lambda x_TD: x_TD.roll(1, 0), torch.zeros(5, 2))
    4
    """
    depends_TT = _dependencies(layer, x_TD)
    reached_T = torch.zeros(len(x_TD))
    reached_T[-1] = 1
    for count in range(1, len(x_TD) + 1):
        reached_T = ((reached_T @ depends_TT) > 0).float()
        if reached_T[0]:
            return count
    raise SpecError(
        f"the last of {len(x_TD)} tokens does not depend on the first after {len(x_TD)} layers"
    )


def _dependencies(layer: Layer, x_TD: Tensor) -> Tensor:
    """1 where an output depends on an input, by the derivative in a random direction of channels,
    [output, input].
    """
    x = x_TD.detach().clone().requires_grad_()
    direction_D = torch.randn(
        x_TD.shape[1], generator=torch.Generator().manual_seed(3), dtype=x_TD.dtype
    )
    outputs_T = layer(x) @ direction_D
    rows = [torch.autograd.grad(output, x, retain_graph=True)[0] for output in outputs_T]
    return torch.stack([(row != 0).any(-1) for row in rows]).float()


def longest_chain(output: Tensor) -> int:
    """Number of operations on the longest path of autograd's graph, from an output back to its
    inputs.

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
    """Error of a circular shift, at tokens whose convolution does not see a border."""
    inside = slice(2 * by + KERNEL, -by - KERNEL)
    return _error(layer(x_TD.roll(by, 0))[inside], layer(x_TD).roll(by, 0)[inside])


def _permutation_error(layer: Layer, x_TD: Tensor) -> float:
    order = torch.randperm(len(x_TD), generator=torch.Generator().manual_seed(2))
    return _error(layer(x_TD[order]), layer(x_TD)[order])


def _error(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())

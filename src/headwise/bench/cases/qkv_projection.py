"""Queries, keys and values of all heads: one product, three, or three for each head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn.attention import Attention
from ...nn.bound_parts import QKTransforms
from ...presets import design
from ..benchmark_case import BenchmarkCase, TimedCall
from .call_overhead import stacked_weights

TITLE = "Queries, keys and values: one product or several"
MODEL_WIDTH, NUM_HEADS, NUM_TOKENS = 512, 8, 2048
HEAD_DIM = MODEL_WIDTH // NUM_HEADS


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """A long row and one token, forward, and the long one backward too; a small model's row in training."""
    for tokens, model in ((NUM_TOKENS, MODEL_WIDTH), (1, MODEL_WIDTH), (64, 128)):
        yield _case(tokens, model, backward=False)
        if tokens > 1:
            yield _case(tokens, model, backward=True)


def _case(tokens: int, model: int, *, backward: bool) -> BenchmarkCase:
    heads = model // HEAD_DIM
    layer = Attention(design(model=model, heads=heads))
    x = torch.randn(1, tokens, model)
    three = stacked_weights(layer)[:3]
    runs = {
        "ours": _QKVProjection(list(layer.parameters())[:3], layer),
        "one fused matrix": _QKVProjection([torch.cat(three)]),
    }
    runs["three matrices"] = _QKVProjection([own.clone() for own in three])
    runs[f"{3 * heads} matrices, three a head"] = _QKVProjection(
        [row.clone() for own in three for row in own.split(HEAD_DIM)]
    )
    how = _forward_backward if backward else _forward
    made = {name: how(way, x) for name, way in runs.items()}
    what = f"{tokens:,} token{'s' * (tokens > 1)}, {heads} heads of {HEAD_DIM}"
    return BenchmarkCase(f"{what}, {'forward and backward' if backward else 'forward'}", made.pop("ours"), made)


class _QKVProjection:
    """q, k and v [1, T, heads, dim] from matrices [out, in], as many as there are; or as a layer makes them."""

    def __init__(self, matrices: Sequence[Tensor], layer: Attention | None = None) -> None:
        self.matrices = [matrix.detach().requires_grad_() for matrix in matrices] if layer is None else matrices
        self.layer, self.turning = layer, QKTransforms(dict.fromkeys("qkv", ()), torch.zeros(1, 1))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.layer is not None:
            project, own = self.layer.spec.project, self.layer.weights["project"]
            entry = project.project_kv(x, self.turning, own)
            return project.project_query(x, self.turning, own), *project.expand_kv(entry, self.turning, own)
        parts = [F.linear(x, matrix) for matrix in self.matrices]
        if len(parts) == 1:
            parts = list(parts[0].chunk(3, -1))
        if len(parts) > 3:
            each = len(parts) // 3
            stacked = [torch.stack(parts[n * each : (n + 1) * each], 2) for n in range(3)]
            return tuple(stacked)
        return tuple(part.unflatten(-1, (-1, HEAD_DIM)) for part in parts)


def _forward(way: _QKVProjection, x: Tensor) -> TimedCall:
    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return way(x)

    return forward


def _forward_backward(way: _QKVProjection, x: Tensor) -> TimedCall:
    """What x gets; the matrices get theirs too, which others hold in other pieces."""
    x = x.detach().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    back = [torch.randn(1, x.shape[1], x.shape[2] // HEAD_DIM, HEAD_DIM, generator=draw) for _ in range(3)]

    def both() -> Tensor:
        return torch.autograd.grad(way(x), [x, *way.matrices], back)[0]

    return both

"""Queries, keys and values of all heads: one product, three, or three for each head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...module import Attention, Turning
from ...presets import design
from ..case import Case, Run
from .overhead import weights

TITLE = "Queries, keys and values: one product or several"
MODEL, HEADS, TOKENS = 512, 8, 2048
DIM = MODEL // HEADS


def cases(quick: bool) -> Iterator[Case]:
    """A long row and one token, forward, and the long one backward too; a small model's row in training."""
    for tokens, model in ((TOKENS, MODEL), (1, MODEL), (64, 128)):
        yield _case(tokens, model, backward=False)
        if tokens > 1:
            yield _case(tokens, model, backward=True)


def _case(tokens: int, model: int, *, backward: bool) -> Case:
    heads = model // DIM
    layer = Attention(design(model=model, heads=heads))
    x = torch.randn(1, tokens, model)
    three = weights(layer)[:3]
    runs = {"ours": _Ways(list(layer.parameters())[:3], layer), "one fused matrix": _Ways([torch.cat(three)])}
    runs["three matrices"] = _Ways([own.clone() for own in three])
    runs[f"{3 * heads} matrices, three a head"] = _Ways([row.clone() for own in three for row in own.split(DIM)])
    how = _both if backward else _forward
    made = {name: how(way, x) for name, way in runs.items()}
    what = f"{tokens:,} token{'s' * (tokens > 1)}, {heads} heads of {DIM}"
    return Case(f"{what}, {'forward and backward' if backward else 'forward'}", made.pop("ours"), made)


class _Ways:
    """q, k and v [1, T, heads, dim] from matrices [out, in], as many as there are; or as a layer makes them."""

    def __init__(self, matrices: Sequence[Tensor], layer: Attention | None = None) -> None:
        self.matrices = [matrix.detach().requires_grad_() for matrix in matrices] if layer is None else matrices
        self.layer, self.turning = layer, Turning(dict.fromkeys("qkv", ()), torch.zeros(1, 1))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.layer is not None:
            project, own = self.layer.spec.project, self.layer.weights["project"]
            entry = project.remember(x, self.turning, own)
            return project.ask(x, self.turning, own), *project.recall(entry, self.turning, own)
        parts = [F.linear(x, matrix) for matrix in self.matrices]
        if len(parts) == 1:
            parts = list(parts[0].chunk(3, -1))
        if len(parts) > 3:
            each = len(parts) // 3
            stacked = [torch.stack(parts[n * each : (n + 1) * each], 2) for n in range(3)]
            return tuple(stacked)
        return tuple(part.unflatten(-1, (-1, DIM)) for part in parts)


def _forward(way: _Ways, x: Tensor) -> Run:
    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return way(x)

    return forward


def _both(way: _Ways, x: Tensor) -> Run:
    """What x gets; the matrices get theirs too, which others hold in other pieces."""
    x = x.detach().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    back = [torch.randn(1, x.shape[1], x.shape[2] // DIM, DIM, generator=draw) for _ in range(3)]

    def both() -> Tensor:
        return torch.autograd.grad(way(x), [x, *way.matrices], back)[0]

    return both

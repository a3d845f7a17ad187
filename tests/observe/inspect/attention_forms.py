"""One attention layer written in many ways: the same weights and outputs, other operations and
modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WIDE, HEADS, DIM = 15, 3, 5

compiled_flex_attention = torch.compile(flex_attention, backend="eager")


class Layer(nn.Module):
    """q, k and v of a fused projection, [B, H, T, K] each, and `mix` between them and the output
    projection.

    Its name and its children's names say nothing, so only a run shows what it is.
    """

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.mix = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE), mix

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.one(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return self.two(self.mix(q * DIM**-0.5, k, v).flatten(2))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def exp_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.max(-1, keepdim=True).values)
    return ((e / e.sum(-1, keepdim=True)) @ v).transpose(1, 2)


def exp_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp_()
    e /= e.sum(-1, keepdim=True) + 1e-9
    return (e @ v).transpose(1, 2)


def exp_of_log(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v).transpose(1, 2)


def reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal() @ v).transpose(1, 2)


def masked_after_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    padded = torch.zeros(q.shape[2], dtype=torch.bool)
    weights = scores(q, k).masked_fill(padded, -torch.inf).softmax(-1)
    return (weights.masked_fill(padded[:, None], 0.0) @ v).transpose(1, 2)


def einsum_to_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bshd->bthd", scores(q, k).softmax(-1), v.transpose(1, 2))


def einsum_values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bshd,bhts->bthd", v.transpose(1, 2), scores(q, k).softmax(-1))


def einsum_with_dots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...ts,...sd->...td", scores(q, k).softmax(-1), v).transpose(1, 2)


def values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.transpose(-2, -1) @ scores(q, k).softmax(-1).transpose(-2, -1)).permute(0, 3, 1, 2)


def batch_and_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, (-1, HEADS)).transpose(1, 2)


def heads_and_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (y.transpose(0, 1).flatten(0, 1) for y in (q, k, v))
    return (
        torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        .unflatten(0, (HEADS, -1))
        .permute(1, 2, 0, 3)
    )


def fused_on_three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (y.flatten(0, 1) for y in (q, k, v))
    return (
        F.scaled_dot_product_attention(q, k, v, scale=1.0).unflatten(0, (-1, HEADS)).transpose(1, 2)
    )


def causal_on_three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (y.flatten(0, 1) for y in (q, k, v))
    mask = torch.ones(len(q), q.shape[1], k.shape[1], dtype=torch.bool).tril()
    mask[1::HEADS, 1:, 0] = False  # head 1 attends to the first key in the first row only
    z = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
    return z.unflatten(0, (-1, HEADS)).transpose(1, 2)


def loop_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(HEADS)], dim=-1)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, scale=1.0).transpose(1, 2)


def compiled_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return compiled_flex_attention(q, k, v, scale=1.0).transpose(1, 2)


def causal_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens = q.shape[2]
    mask = create_block_mask(lambda b, h, t, s: t >= s, None, None, tokens, tokens, device="cpu")
    slopes = torch.tensor([0.5, 0.25, 0.125])
    z = flex_attention(q, k, v, lambda s, b, h, t, key: s - slopes[h] * (t - key), mask, scale=1.0)
    return z.transpose(1, 2)


class Head(nn.Module):
    """One head of lectures: q, k and v of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDE, DIM, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.key(x), self.query(x), self.value(x)
        return (q @ k.transpose(-2, -1) * DIM**-0.5).softmax(-1) @ v


class ModulePerHead(nn.Module):
    """Heads in a list, concatenated and projected."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.two = nn.ModuleList(Head() for _ in range(HEADS)), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.cat([head(x) for head in self.heads], dim=-1))


class SummedHeads(nn.Module):
    """Heads in a list, each with a projection of its own; their outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.outs = nn.ModuleList(nn.Linear(DIM, WIDE) for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return sum(out(head(x)) for head, out in zip(self.heads, self.outs, strict=True))


FORMS: dict[str, Callable[[], nn.Module]] = {
    "exp and sum": lambda: Layer(exp_and_sum),
    "exp in place": lambda: Layer(exp_in_place),
    "exp of log": lambda: Layer(exp_of_log),
    "reciprocal": lambda: Layer(reciprocal),
    "masked after softmax": lambda: Layer(masked_after_softmax),
    "einsum to tokens": lambda: Layer(einsum_to_tokens),
    "einsum values first": lambda: Layer(einsum_values_first),
    "einsum with dots": lambda: Layer(einsum_with_dots),
    "values first": lambda: Layer(values_first),
    "batch and heads": lambda: Layer(batch_and_heads),
    "heads and batch": lambda: Layer(heads_and_batch),
    "fused on three axes": lambda: Layer(fused_on_three_axes),
    "causal on three axes": lambda: Layer(causal_on_three_axes),
    "loop over heads": lambda: Layer(loop_over_heads),
    "module per head": ModulePerHead,
    "flex": lambda: Layer(flex),
    "compiled flex": lambda: Layer(compiled_flex),
    "causal flex": lambda: Layer(causal_flex),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Two layers of one form with uneven attention, and an input of three rows."""
    torch.manual_seed(0)
    model = nn.Sequential(FORMS[name](), FORMS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model, torch.randn(4, 7, WIDE)


def expected_weights(name: str, layer: nn.Module, x: Tensor) -> Tensor:
    """Weights [B, H, T, S] by the definition, in float64."""
    x = x.double()
    if isinstance(layer, ModulePerHead):
        sides = [(head.query.weight, head.key.weight) for head in layer.heads]
        rows = [(x @ q.double().T, x @ k.double().T) for q, k in sides]
    else:
        weight, bias = layer.one.weight.double(), layer.one.bias.double()
        starts = [(DIM * h, WIDE + DIM * h) for h in range(HEADS)]
        rows = [
            [x @ weight[at : at + DIM].T + bias[at : at + DIM] for at in pair] for pair in starts
        ]
    weights = torch.zeros(len(x), HEADS, x.shape[1], x.shape[1], dtype=torch.float64)
    for h, (q, k) in enumerate(rows):
        for t in range(x.shape[1]):
            keys = range(t + 1) if "causal" in name else range(x.shape[1])
            keys = keys[1:] if name == "causal on three axes" and h == 1 and t else keys
            row = torch.stack([(q[:, t] * k[:, s]).sum(-1) / DIM**0.5 for s in keys], -1)
            if name == "causal flex":
                row = row - 0.5 ** (h + 1) * torch.arange(t, -1, -1.0, dtype=torch.float64)
            weights[:, h, t, list(keys)] = row.exp() / row.exp().sum(-1, keepdim=True)
    return weights

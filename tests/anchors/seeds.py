"""The attention layers of five source documents, rendered from their formulas in plain torch,
quirks included.

They are other people's definitions: nothing here imports or resembles the library. What is
deliberately kept as it stands in the sources: a mask that writes -1e9 (so that a row without any
visible key weighs all forbidden keys alike), a layer norm with the unbiased deviation and its
epsilon outside the root, norms before each sublayer, and rotary positions as complex numbers over
neighbouring channels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

# what masked scores become; not minus infinity, and that shows when every key is masked
HIDDEN = -1e9


# --- 000: three linear maps, with or without biases -----------------------------------------------


class Projections(nn.Module):
    """query, key and value: hidden_size -> all_head_size, each with a bias if `qkv_bias`."""

    def __init__(self, hidden_size: int, all_head_size: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(hidden_size, all_head_size, bias=qkv_bias) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x), self.key(x), self.value(x)


# --- 001: scaled dot products on [batch, head, token, channel] ------------------------------------


class ScaledDotProductAttention(nn.Module):
    """softmax(Q K^T / sqrt(d_k)) V on 4-D tensors, without any mask."""

    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.d_k = d_k

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / self.d_k**0.5
        return scores.softmax(-1) @ v


# --- 002: Llama 3, one rank -----------------------------------------------------------------------


def rotations(dim: int, end: int, theta: float) -> Tensor:
    """exp(i t theta^(-2c/dim)) for t < end and each of dim/2 pairs: [end, dim/2], complex."""
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(end, dtype=torch.float64), rates)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Neighbouring channels as one complex number each, multiplied: x [B, T, H,
    D], turns [T, D/2].
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(-2)


class LlamaAttention(nn.Module):
    """Grouped queries by repeating keys and values, a cache written at start_pos, and no biases
    anywhere.
    """

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.cache_k = torch.zeros(batch, length, n_kv_heads, self.head_dim, dtype=torch.float64)
        self.cache_v = torch.zeros_like(self.cache_k)

    def forward(self, x: Tensor, start_pos: int, turns: Tensor) -> Tensor:
        batch, count, _ = x.shape
        past = start_pos + count
        q = self.wq(x).view(batch, count, self.n_heads, self.head_dim)
        k, v = (w(x).view(batch, count, self.n_kv_heads, self.head_dim) for w in (self.wk, self.wv))
        now = turns[start_pos:past]
        self.cache_k[:, start_pos:past] = rotated(k, now)
        self.cache_v[:, start_pos:past] = v
        times = self.n_heads // self.n_kv_heads
        keys, values = (
            c[:, :past].repeat_interleave(times, 2).transpose(1, 2)
            for c in (self.cache_k, self.cache_v)
        )
        scores = rotated(q, now).transpose(1, 2) @ keys.mT / math.sqrt(self.head_dim)
        if count > 1:
            ahead = torch.full((count, count), -math.inf, dtype=x.dtype).triu(1)
            scores = scores + torch.cat([torch.zeros(count, start_pos, dtype=x.dtype), ahead], -1)
        return self.wo((scores.softmax(-1) @ values).transpose(1, 2).reshape(batch, count, -1))


# --- 002: the annotated transformer ---------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores where mask == 0 become -1e9; the softmax is over everything."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, HIDDEN)
    weights = scores.softmax(-1)
    weights = weights if dropout is None else dropout(weights)
    return weights @ value, weights


class MultiHeadedAttention(nn.Module):
    """h heads of d_k = d_model / h; four linear maps with biases; mask [B, 1 or T, S] is the same
    for all heads.
    """

    def __init__(self, h: int, d_model: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(p=dropout)
        self.weights: Tensor | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        mask = None if mask is None else mask.unsqueeze(1)
        batch = query.shape[0]
        q, k, v = (
            linear(x).view(batch, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        read, self.weights = attention(q, k, v, mask=mask, dropout=self.dropout)
        return self.linears[3](read.transpose(1, 2).contiguous().view(batch, -1, self.h * self.d_k))


class LayerNorm(nn.Module):
    """a (x - mean) / (std + eps) + b, std unbiased: not torch's, which has the biased variance +
    eps in the root.
    """

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a, self.b, self.eps = (
            nn.Parameter(torch.ones(features)),
            nn.Parameter(torch.zeros(features)),
            eps,
        )

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b
        )


class SublayerConnection(nn.Module):
    """x + sublayer(norm(x))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = LayerNorm(size)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + sublayer(self.norm(x))


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each in its sublayer."""

    def __init__(self, size: int, self_attn: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.sublayer = nn.ModuleList(SublayerConnection(size) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's memory (which no norm of this layer
    touches), feed-forward.
    """

    def __init__(
        self, size: int, self_attn: nn.Module, src_attn: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn, self.src_attn, self.feed_forward = self_attn, src_attn, feed_forward
        self.sublayer = nn.ModuleList(SublayerConnection(size) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, tgt_mask))
        x = self.sublayer[1](x, lambda y: self.src_attn(y, memory, memory, src_mask))
        return self.sublayer[2](x, self.feed_forward)


def feed_forward(d_model: int, d_ff: int) -> nn.Module:
    """w_2(relu(w_1 x))."""
    return nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


def scattered(module: nn.Module) -> nn.Module:
    """The module in float64 with every parameter random, norms and biases too: nothing hides behind
    a 0 or a 1.
    """
    module = copy.deepcopy(module).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * 0.5 + (0.7 if parameter.dim() == 1 else 0.0)
            )
    return module


# --- 003: one function on [batch, token, channel] -------------------------------------------------


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What is read and the weights; mask [B, T, S] hides where it is 0."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / torch.tensor(q.shape[-1], dtype=q.dtype).sqrt()
    if mask is not None:
        scores = scores.masked_fill(mask == 0, HIDDEN)
    weights = scores.softmax(-1)
    return torch.matmul(weights, v), weights

"""Attention modules as other people write them, with their own names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE, HEADS, DIM = 12, 3, 4


class TimmAttention(nn.Module):
    """Attention of timm: one projection for q, k and v, with and without the fused call."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.q_norm, self.proj = (
            nn.Linear(WIDE, 3 * WIDE),
            nn.LayerNorm(DIM),
            nn.Linear(WIDE, WIDE),
        )
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, wide = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.q_norm(k)
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        else:
            weights = (q * DIM**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
            z = self.attn_drop(weights) @ v
        return self.proj(z.transpose(1, 2).reshape(batch, length, wide))


class NanoGPTBlock(nn.Module):
    """Causal attention of nanoGPT, with and without the fused call; by its class name it could be
    anything.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.n_head = fused, HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.register_buffer("bias", torch.ones(16, 16).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, wide = x.shape
        q, k, v = (
            y.view(batch, length, HEADS, DIM).transpose(1, 2)
            for y in self.c_attn(x).split(wide, dim=2)
        )
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * DIM**-0.5
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            z = F.softmax(scores, dim=-1) @ v
        return self.c_proj(z.transpose(1, 2).contiguous().view(batch, length, wide))


class AttentionCore(nn.Module):
    """Scores, softmax and weighted sum in a module of their own, as in tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softmax(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(
            "bhts,bhsv->bhtv", self.soft(torch.einsum("bhtk,bhsk->bhts", q, k) / DIM**0.5), v
        )


class AttentionWithCore(nn.Module):
    """An attention with its core in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))
        self.core = AttentionCore()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for one in self.maps[:3])
        return self.maps[3](self.core(q, k, v).transpose(1, 2).flatten(2))


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention with a mask and its own scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.last = (
            nn.Linear(WIDE, 4 * 3),
            nn.Linear(WIDE, 2 * 2 * 3),
            nn.Linear(12, WIDE),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 3)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, mask, scale=0.7, enable_gqa=True)
        return self.last(z.transpose(1, 2).flatten(2))


class TalkingHeads(nn.Module):
    """Mixed weights: values are multiplied with something else than the result of softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(WIDE, 3 * WIDE), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        weights = self.mix(weights.movedim(1, -1)).movedim(-1, 1)
        return (weights @ v).transpose(1, 2).flatten(2)


class BatchedHeads(nn.Module):
    """Batch and heads on one axis, in either order."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.num_heads = first, HEADS
        self.qkv, self.proj = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        if self.first:
            q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).softmax(-1)
        z = torch.bmm(weights, v.flatten(0, 1)).unflatten(0, q.shape[:2])
        return self.proj((z.transpose(0, 1) if self.first else z).transpose(1, 2).flatten(2))


class TwoAttentions(nn.Module):
    """Two attentions in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDE, 3 * WIDE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v) - 0.5 * F.scaled_dot_product_attention(k, q, v)
        return z.transpose(1, 2).flatten(2)


class NestedAttention(nn.Module):
    """An attention whose values are the output of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.qkv = AttentionCore(), nn.Linear(WIDE, 3 * WIDE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, self.core(q, k, v)).transpose(1, 2).flatten(2)


class LoRALinear(nn.Module):
    """A projection with a LoRA adapter, as in PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


class Wrapped(nn.Module):
    """Self-attention by an nn.MultiheadAttention."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]

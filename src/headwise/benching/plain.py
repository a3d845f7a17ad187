"""A small GPT written plainly in PyTorch: nanoGPT's shape, the peer of several benchmarks.

Written from the shape alone (pre-norm blocks without biases, GELU, learned positions, one table for both ends).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, StackSpec
from ..presets import design


@dataclass(frozen=True)
class GPTShape:
    """nanoGPT's recipe for a laptop: 0.80 million parameters."""

    tokens: int = 65
    length: int = 64
    layers: int = 4
    heads: int = 4
    model: int = 128


def to_model_spec(shape: GPTShape) -> ModelSpec:
    """The same shape as a blueprint."""
    norm = NormSpec("unbiased")
    spec = design(model=shape.model, heads=shape.heads, pattern="causal")
    block = BlockSpec(spec, feed=FeedForwardSpec(4 * shape.model), norm=norm)
    embedding = EmbeddingSpec(shape.tokens, positions=PositionSpec("learned", shape.length))
    stack = StackSpec.from_blocks("decoder", shape.model, [block] * shape.layers, embedding=embedding, norm=norm)
    return ModelSpec("small-gpt", "decoder", (stack,), (OutputHeadSpec("tokens", shape.tokens, table="decoder"),))


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + feed(norm(x))."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(shape.model, bias=False) for _ in range(2))
        self.qkv = nn.Linear(shape.model, 3 * shape.model, bias=False)
        self.out = nn.Linear(shape.model, shape.model, bias=False)
        self.up = nn.Linear(shape.model, 4 * shape.model, bias=False)
        self.down = nn.Linear(4 * shape.model, shape.model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, model = x.shape
        q, k, v = (
            part.view(batch, count, self.heads, model // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(model, dim=2)
        )
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).reshape(batch, count, model))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """Logits of the next token."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.tokens, shape.model)
        self.positions = nn.Embedding(shape.length, shape.model)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.model, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers) if deep else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

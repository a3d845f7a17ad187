"""A Llama config, heads made faint, a random ranking and texts, for tests of pruning."""

from __future__ import annotations

import torch

from headwise.models import Transformer
from headwise.surgery import HeadRanking
from headwise.surgery.attention_replacement import get_attention
from support.importance_examples import WORDS
from support.tiny_configs import model_config

LLAMA = model_config(
    "llama",
    hidden_size=12,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=4,
    num_hidden_layers=2,
    intermediate_size=20,
    vocab_size=WORDS,
)


RANDOM_RANKING = HeadRanking("random", seed=3)


def with_faint_heads(net: Transformer, heads: list[tuple[str, int]]) -> Transformer:
    """The model with these heads scaled down, so that they hardly affect the output."""
    with torch.no_grad():
        for site, head in heads:
            attention = get_attention(net, site)
            wide = attention.spec.heads.vdim
            attention.weights["output"]["o"][:, head * wide : (head + 1) * wide] *= 1e-3
    return net


FAINT_HEADS = [
    ("decoder.0.attention", 1),
    ("decoder.0.attention", 4),
    ("decoder.1.attention", 0),
    ("decoder.1.attention", 3),
]


# Texts of bytes that differ, eleven of them; an empty line among them.
TEXTS = (
    "\n".join(f"text {n} of {n * n} words, {'and more ' * (n % 3)}here" for n in range(11)) + "\n\n"
)

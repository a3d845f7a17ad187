"""gpt-oss: experts, a learned sink in every head, windows in every other layer, YaRN from the start."""

from __future__ import annotations

from typing import Any

from ..blueprint import Block, Dense, Embedding, Experts, Head, Model, Norm, Stack
from ..parts.sink_softmax import SinkSoftmax
from ..presets import design
from .attention import Rope, alternating, patterns
from .config import Config
from .registry import decoder, family, tied

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@family("gpt_oss", "GptOss")
def gpt_oss(config: Config, task: str) -> Model:
    """Gates and ups of an expert are bounded before they meet (2508.10925)."""
    model = config.size("hidden_size", default=2880)
    heads = config.heads("num_attention_heads", default=64)
    layers = config.layers("num_hidden_layers", default=36)
    dim = config.dim(model, heads, "head_dim", default=64)
    rope = Rope(config, config.size("max_position_embeddings", default=131072), theta=150_000.0, usual=YARN)

    said: dict[str, Any] = {"model": model, "heads": heads, "kv": config.grouped(heads, default=8), "dim": dim}
    said |= {"bias": "qkvo" if config.flag("attention_bias", True) else "", "modifiers": (rope.rotary(dim),)}
    each = patterns(config, layers, alternating(layers), config.maybe("sliding_window", default=128))
    specs = {p: rope.said(design(**said, normaliser=SinkSoftmax(), pattern=p)) for p in set(each)}
    gain, limit = config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0)
    config.refuse("hidden_act", "silu", "is not what its experts apply")
    hidden = config.size("intermediate_size", default=2880)
    expert = Dense(hidden, f"bounded_silu({gain}, {limit})", "gated", bias="ugd")
    count = config.size("num_local_experts", "num_experts", default=128)
    active = config.size("num_experts_per_tok", "experts_per_token", default=4, most=count)
    feed = Experts(expert, count, active, scores="chosen", bias="learned")
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-5))
    blocks = [Block(specs[pattern], feed=feed, norm=norm) for pattern in each]

    tokens = config.size("vocab_size", default=201088)
    stack = Stack.of("decoder", model, blocks, embedding=Embedding(tokens), norm=norm)
    return decoder(config, task, stack, Head("tokens", tokens, table=tied(config, "decoder", False)))

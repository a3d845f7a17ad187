"""Granite: Llama with a number for each of its four sums and products (2405.04324)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm
from ..presets import design
from . import trunk
from .attention import Rope, scaled
from .config import Config
from .registry import family


@family("granite", "Granite")
def granite(config: Config, task: str) -> Model:
    """What is scaled: the table of tokens, scores, what every sublayer adds, and logits."""
    sizes = trunk.sizes(config, model=4096, heads=32)
    rope = Rope(config, trunk.length(config, 2048))
    scores = scaled(config.number("attention_multiplier", default=1.0), sizes.dim**-0.5)
    bias = "qkvo" if config.flag("attention_bias", False) else ""
    spec = design(**sizes.words, pattern="causal()", bias=bias, similarity=scores, modifiers=(rope.rotary(sizes.dim),))
    wide = "ugd" if config.flag("mlp_bias", False) else ""
    act = config.activation("hidden_act", "silu")
    feed = Dense(config.size("intermediate_size", default=11008), act, "gated", wide)
    norm = Norm("rms", config.number("rms_norm_eps", default=1e-6))
    adds = config.number("residual_multiplier", default=1.0)
    blocks = trunk.blocks([rope.said(spec)] * trunk.depth(config, 32), feed, norm, scale=adds)
    ends = trunk.Ends(
        config.size("vocab_size", default=32000),
        scale=config.number("embedding_multiplier", default=1.0),
        said=1 / config.number("logits_scaling", default=1.0),
    )
    return trunk.decoder(config, task, blocks, norm, ends)

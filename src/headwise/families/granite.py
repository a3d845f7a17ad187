"""Granite: Llama with a number for each of its four sums and products (2405.04324)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec
from ..presets import design
from . import trunk
from .attention import RopeConfig, make_dot
from .config import TransformersConfig
from .registry import register_family


@register_family("granite", "Granite")
def read_granite(config: TransformersConfig, task: str) -> ModelSpec:
    """What is scaled: the table of tokens, scores, what every sublayer adds, and logits."""
    sizes = trunk.read_decoder_sizes(config, model=4096, heads=32)
    rope = RopeConfig(config, trunk.read_max_length(config, 2048))
    scores = make_dot(config.read_float("attention_multiplier", default=1.0), sizes.dim**-0.5)
    bias = "qkvo" if config.read_bool("attention_bias", False) else ""
    spec = design(**sizes.design_args, pattern="causal()", bias=bias, similarity=scores, modifiers=(rope.make_rotary(sizes.dim),))
    wide = "ugd" if config.read_bool("mlp_bias", False) else ""
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=11008), act, "gated", wide)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    adds = config.read_float("residual_multiplier", default=1.0)
    blocks = trunk.make_blocks([rope.attention_with_limits(spec)] * trunk.read_num_layers(config, 32), feed, norm, scale=adds)
    ends = trunk.DecoderEnds(
        config.read_int("vocab_size", default=32000),
        embedding_scale=config.read_float("embedding_multiplier", default=1.0),
        logit_scale=1 / config.read_float("logits_scaling", default=1.0),
    )
    return trunk.build_decoder(config, task, blocks, norm, ends)

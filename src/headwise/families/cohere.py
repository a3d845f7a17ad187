"""Cohere's Command R: one norm for attention and feed-forward, neighbouring channels turn together."""

from __future__ import annotations

from ..blueprint import BlockSpec, FeedForwardSpec, ModelSpec, ApproximateAttention, NormSpec
from ..presets import design
from . import trunk
from .attention import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig, read_layer_types
from .config import TransformersConfig
from .registry import register_family


@register_family("cohere", "Cohere")
def read_cohere(config: TransformersConfig, task: str) -> ModelSpec:
    """LayerNorm without a bias; logits are scaled."""
    sizes, rope = trunk.read_decoder_sizes(config, model=8192, heads=64), _read_rope(config)
    turns = (rope.make_rotary(sizes.dim, "interleaved"),)
    spec = design(**sizes.design_args, pattern="causal()", bias=_read_bias(config), modifiers=turns)
    attention = rope.attention_with_limits(spec)
    if config.read_bool("use_qk_norm", False):
        wide = (("q_norm.weight", sizes.heads * sizes.dim), ("k_norm.weight", sizes.kv * sizes.dim))
        why = "use_qk_norm takes the mean off queries and keys and has weights for each head, which QKNorm has not"
        attention = ApproximateAttention(spec, why, wide)
    return _build_cohere(config, task, [attention] * trunk.read_num_layers(config, 40))


@register_family("cohere2", "Cohere2")
def read_cohere2(config: TransformersConfig, task: str) -> ModelSpec:
    """Three layers with a window, which turn queries and keys, to one without, which does not (2504.00698)."""
    sizes, rope, layers = trunk.read_decoder_sizes(config, model=8192, heads=64), _read_rope(config), trunk.read_num_layers(config, 40)
    window, every = config.read_optional_int("sliding_window", default=4096), config.read_int("sliding_window_pattern", default=4)
    usual = [FULL_ATTENTION if (layer + 1) % every == 0 else SLIDING_ATTENTION for layer in range(layers)]

    def attention(kind: str) -> trunk.LayerAttention:
        if kind == FULL_ATTENTION:
            return design(**sizes.design_args, bias=_read_bias(config), pattern="causal()")
        turns = (rope.make_rotary(sizes.dim, "interleaved"),)
        return rope.attention_with_limits(design(**sizes.design_args, bias=_read_bias(config), pattern=f"window({window})", modifiers=turns))

    return _build_cohere(config, task, trunk.make_attentions(read_layer_types(config, layers, usual, window), attention))


def _read_rope(config: TransformersConfig) -> RopeConfig:
    return RopeConfig(config, trunk.read_max_length(config, 8192), theta=500_000.0 if config.family_name == "cohere" else 10_000.0)


def _read_bias(config: TransformersConfig) -> str:
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def _build_cohere(config: TransformersConfig, task: str, attentions: list[trunk.LayerAttention]) -> ModelSpec:
    norm = NormSpec("unbiased", config.read_float("layer_norm_eps", default=1e-5))
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=22528), act, "gated")
    blocks: list[BlockSpec] = trunk.make_blocks(attentions, feed, norm, placement="parallel")
    said = config.read_float("logit_scale", default=0.0625)
    ends = trunk.DecoderEnds(config.read_int("vocab_size", default=256000), True, logit_scale=said)
    return trunk.build_decoder(config, task, blocks, norm, ends)

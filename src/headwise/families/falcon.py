"""Falcon: one key-value head for all, or groups; attention and feed-forward side by side (2311.16867)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, ApproximateAttention, NormSpec
from ..presets import design
from . import trunk
from .attention import RopeConfig
from .config import TransformersConfig
from .registry import register_family


@register_family("falcon", "Falcon")
def read_falcon(config: TransformersConfig, task: str) -> ModelSpec:
    """The newer architecture has groups, and a norm for each of the two."""
    model = config.read_int("n_embed", "hidden_size", default=4544)
    heads = config.read_num_heads("num_attention_heads", default=71)
    newer, parallel = config.read_bool("new_decoder_architecture", False), config.read_bool("parallel_attn", True)
    biased = config.read_bool("bias", False)
    said = trunk.DecoderSizes(model, heads, _read_num_kv_heads(config, heads), config.resolve_head_dim(model, heads)).design_args
    said |= {"pattern": "causal()", "bias": "qkvo" if biased else ""}
    rope = RopeConfig(config, trunk.read_max_length(config, 2048))
    attention = rope.attention_with_limits(design(**said, modifiers=(rope.make_rotary(said["dim"]),)))
    if config.read_bool("alibi", False):
        attention = ApproximateAttention(design(**said), "alibi adds 16-bit slopes before scores are scaled, which Alibi does not")

    act = config.read_activation("activation", "gelu")
    feed = FeedForwardSpec(config.read_optional_int("ffn_hidden_size") or 4 * model, act, bias="ud" if biased else "")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    norms = config.read_optional_int("num_ln_in_parallel_attn") or (2 if newer else 1)
    placement = "pre" if not parallel else "abreast" if newer and norms == 2 else "parallel"
    blocks = trunk.make_blocks([attention] * trunk.read_num_layers(config, 32), feed, norm, placement=placement)
    return trunk.build_decoder(config, task, blocks, norm, trunk.DecoderEnds(config.read_int("vocab_size", default=65024), True))


def _read_num_kv_heads(config: TransformersConfig, heads: int) -> int:
    """One for all, or as many as are said; the older architecture without multi_query has one for each."""
    if config.read_bool("new_decoder_architecture", False):
        kv = config.read_optional_int("num_kv_heads") or heads
    else:
        kv = 1 if config.read_bool("multi_query", True) else heads
    if heads % kv:
        config.fail(f"num_attention_heads = {heads} do not share num_kv_heads = {kv} evenly", "give a divisor")
    return kv

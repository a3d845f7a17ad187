"""StableLM: LayerNorm, a quarter of a head turns, a gated feed-forward (2402.17834)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, ApproximateAttention, NormSpec
from ..presets import design
from . import trunk
from .attention import RopeConfig
from .config import TransformersConfig
from .registry import register_family


@register_family("stablelm", "StableLm")
def read_stablelm(config: TransformersConfig, task: str) -> ModelSpec:
    """Feed-forwards may stand beside attention, with its norm."""
    sizes = trunk.read_decoder_sizes(config, model=2560, heads=32, kv=32)
    rope = RopeConfig(config, trunk.read_max_length(config, 4096), rotary_fraction=0.25)
    bias = "qkv" if config.read_bool("use_qkv_bias", False) else ""
    spec = design(**sizes.design_args, pattern="causal()", bias=bias, modifiers=(rope.make_rotary(sizes.dim),))
    attention = rope.attention_with_limits(spec)
    if config.read_bool("qk_layernorm", False):
        wide = (("q_norm.weights", sizes.heads * sizes.dim), ("k_norm.weights", sizes.kv * sizes.dim))
        why = "qk_layernorm takes the mean off queries and keys and has weights for each head, which QKNorm has not"
        attention = ApproximateAttention(spec, why, wide)
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=6912), act, "gated")
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    placement = "parallel" if config.read_bool("use_parallel_residual", False) else "pre"
    blocks = trunk.make_blocks([attention] * trunk.read_num_layers(config, 32), feed, norm, placement=placement)
    return trunk.build_decoder(config, task, blocks, norm, trunk.DecoderEnds(config.read_int("vocab_size", default=50304)))

"""Phi and Phi-3: a turn of half of a head beside a parallel feed-forward; then Llama with fused maps."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, ApproximateAttention, NormSpec
from ..presets import design
from . import trunk
from .attention import RopeConfig
from .config import TransformersConfig
from .registry import register_family


@register_family("phi", "Phi")
def read_phi(config: TransformersConfig, task: str) -> ModelSpec:
    """One norm for attention and feed-forward, biases everywhere (2306.11644)."""
    sizes = trunk.read_decoder_sizes(config, model=2048, heads=32)
    rope = RopeConfig(config, trunk.read_max_length(config, 2048), rotary_fraction=0.5)
    spec = design(**sizes.design_args, pattern="causal()", bias="qkvo", modifiers=(rope.make_rotary(sizes.dim),))
    attention = rope.attention_with_limits(spec)
    if config.read_bool("qk_layernorm", False):
        norms = tuple((f"{side}_norm.{name}", sizes.dim) for side in "qk" for name in ("weight", "bias"))
        attention = ApproximateAttention(spec, "qk_layernorm takes the mean off every query and key, which QKNorm does not", norms)
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=8192), config.read_activation("hidden_act", "gelu_new"), bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    blocks = trunk.make_blocks([attention] * trunk.read_num_layers(config, 24), feed, norm, placement="parallel")
    ends = trunk.DecoderEnds(config.read_int("vocab_size", default=51200), head_bias="learned")
    return trunk.build_decoder(config, task, blocks, norm, ends)


@register_family("phi3", "Phi3")
def read_phi3(config: TransformersConfig, task: str) -> ModelSpec:
    """Queries, keys and values lie in one matrix, gates and ups in another (2404.14219)."""
    sizes = trunk.read_decoder_sizes(config, model=3072, heads=32)
    usual = config.read_int("original_max_position_embeddings", default=4096)
    rope = RopeConfig(config, usual)
    if rope.rope_type == "yarn":
        rope.rope_type = "su"  # what the first files called yarn is none (as transformers reads them)
    window = config.read_optional_int("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    spec = design(**sizes.design_args, pattern=pattern, modifiers=(rope.make_rotary(sizes.dim),))
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=8192), act, "gated")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    blocks = trunk.make_blocks([rope.attention_with_limits(spec)] * trunk.read_num_layers(config, 32), feed, norm)
    return trunk.build_decoder(config, task, blocks, norm, trunk.DecoderEnds(config.read_int("vocab_size", default=32064)))

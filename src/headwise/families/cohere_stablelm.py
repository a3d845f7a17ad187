"""Cohere's Command R, with parallel blocks and interleaved RoPE; StableLM."""

from __future__ import annotations

from ..model_spec import ApproximateAttention, BlockSpec, FeedForwardSpec, ModelSpec, NormSpec
from ..presets import design
from . import model_builders
from .attention_config import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig, read_layer_types
from .config_reader import TransformersConfig, register_family
from .llama import LLAMA_WEIGHTS as LLAMA


@register_family("cohere", "Cohere")
def read_cohere(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Command R: parallel blocks, LayerNorm without a bias, scaled logits."""
    sizes, rope = model_builders.read_decoder_sizes(config, model=8192, heads=64), _read_rope(config)
    turns = (rope.make_rotary(sizes.dim, "interleaved"),)
    spec = design(**sizes.design_args, pattern="causal()", bias=_read_bias(config), modifiers=turns)
    attention = rope.attention_with_limits(spec)
    if config.read_bool("use_qk_norm", False):
        parameters = (("q_norm.weight", sizes.heads * sizes.dim), ("k_norm.weight", sizes.kv * sizes.dim))
        reason = "use_qk_norm subtracts the mean from queries and keys and has weights per head, which QKNorm lacks"
        attention = ApproximateAttention(spec, reason, parameters)
    return _build_cohere(config, task, [attention] * model_builders.read_num_layers(config, 40))


@register_family("cohere2", "Cohere2")
def read_cohere2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Command R7B (2504.00698): three sliding-window layers with RoPE, then a full one without positions."""
    sizes, rope, layers = (
        model_builders.read_decoder_sizes(config, model=8192, heads=64),
        _read_rope(config),
        model_builders.read_num_layers(config, 40),
    )
    window, interval = (
        config.read_optional_int("sliding_window", default=4096),
        config.read_int("sliding_window_pattern", default=4),
    )
    default_types = [FULL_ATTENTION if (layer + 1) % interval == 0 else SLIDING_ATTENTION for layer in range(layers)]

    def attention(kind: str) -> model_builders.LayerAttention:
        if kind == FULL_ATTENTION:
            return design(**sizes.design_args, bias=_read_bias(config), pattern="causal()")
        turns = (rope.make_rotary(sizes.dim, "interleaved"),)
        return rope.attention_with_limits(
            design(**sizes.design_args, bias=_read_bias(config), pattern=f"window({window})", modifiers=turns)
        )

    return _build_cohere(
        config, task, model_builders.make_attentions(read_layer_types(config, layers, default_types, window), attention)
    )


def _read_rope(config: TransformersConfig) -> RopeConfig:
    return RopeConfig(
        config,
        model_builders.read_max_length(config, 8192),
        theta=500_000.0 if config.family_name == "cohere" else 10_000.0,
    )


def _read_bias(config: TransformersConfig) -> str:
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def _build_cohere(config: TransformersConfig, task: str, attentions: list[model_builders.LayerAttention]) -> ModelSpec:
    norm = NormSpec("unbiased", config.read_float("layer_norm_eps", default=1e-5))
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=22528), act, "gated")
    blocks: list[BlockSpec] = model_builders.make_blocks(attentions, feed, norm, placement="parallel")
    scale = config.read_float("logit_scale", default=0.0625)
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=256000), True, logit_scale=scale)
    return model_builders.build_decoder(config, task, blocks, norm, ends)


# --- StableLM ------------------------------------------------------------------------------------------


@register_family("stablelm", "StableLm")
def read_stablelm(config: TransformersConfig, task: str) -> ModelSpec:
    """Read StableLM; its blocks may be parallel: attention and feed-forward share one norm."""
    sizes = model_builders.read_decoder_sizes(config, model=2560, heads=32, kv=32)
    rope = RopeConfig(config, model_builders.read_max_length(config, 4096), rotary_fraction=0.25)
    bias = "qkv" if config.read_bool("use_qkv_bias", False) else ""
    spec = design(**sizes.design_args, pattern="causal()", bias=bias, modifiers=(rope.make_rotary(sizes.dim),))
    attention = rope.attention_with_limits(spec)
    if config.read_bool("qk_layernorm", False):
        parameters = (("q_norm.weights", sizes.heads * sizes.dim), ("k_norm.weights", sizes.kv * sizes.dim))
        reason = "qk_layernorm subtracts the mean from queries and keys and has weights per head, which QKNorm lacks"
        attention = ApproximateAttention(spec, reason, parameters)
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=6912), act, "gated")
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    placement = "parallel" if config.read_bool("use_parallel_residual", False) else "pre"
    blocks = model_builders.make_blocks(
        [attention] * model_builders.read_num_layers(config, 32), feed, norm, placement=placement
    )
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=50304))
    )


# --- StableLM and Cohere -------------------------------------------------------------------------------

OWN_LAYER, FILE_LAYER = "decoder.{layer}", ".layers.{layer}"
STABLELM_NAMES = {
    f"{OWN_LAYER}.attention_norm.bias": f"{FILE_LAYER}.input_layernorm.bias",
    f"{OWN_LAYER}.feed_norm.bias": f"{FILE_LAYER}.post_attention_layernorm.bias",
    f"{OWN_LAYER}.norm.weight": f"{FILE_LAYER}.input_layernorm.weight",
    f"{OWN_LAYER}.norm.bias": f"{FILE_LAYER}.input_layernorm.bias",
    "decoder.norm.bias": ".norm.bias",
}
STABLELM_WEIGHTS = LLAMA._replace(
    families=("stablelm", "cohere", "cohere2"), locations={**LLAMA.locations, **STABLELM_NAMES}
)

"""OLMo, OLMo 2, OLMo 3 and OLMoE."""

from __future__ import annotations

from typing import Any

from ..model_spec import ApproximateAttention, FeedForwardSpec, ModelSpec, NormSpec
from ..parts.qk_norm import QKNorm
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import model_builders
from .attention_config import FULL_ATTENTION, SLIDING_ATTENTION, RopeConfig, read_layer_types, read_ropes_by_layer_type
from .config_reader import TransformersConfig, register_family
from .llama import LLAMA_WEIGHTS as LLAMA

OLMO_VOCAB_SIZE = 50304


@register_family("olmo", "Olmo")
def read_olmo(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMo (2402.00838): LayerNorm without weights or biases."""
    sizes, rope = _read_sizes_and_rope(config)
    norm = NormSpec("bare", 1e-5)
    blocks = model_builders.make_blocks(_repeat_attention(config, sizes, rope, ()), _read_feed_forward(config), norm)
    return model_builders.build_decoder(config, task, blocks, norm, _read_ends(config))


@register_family("olmo2", "Olmo2")
def read_olmo2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMo 2 (2501.00656): a norm after every sublayer and none before, QK-norm over all heads."""
    sizes, rope = _read_sizes_and_rope(config)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    turns = (QKNorm(scope="full", eps=norm.eps),)
    blocks = model_builders.make_blocks(
        _repeat_attention(config, sizes, rope, turns), _read_feed_forward(config), norm, placement="after"
    )
    return model_builders.build_decoder(config, task, blocks, norm, _read_ends(config))


@register_family("olmo3", "Olmo3")
def read_olmo3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMo 3: OLMo 2 with a sliding window in three layers of four."""
    sizes, layers = (
        model_builders.read_decoder_sizes(config, model=4096, heads=32),
        model_builders.read_num_layers(config, 32),
    )
    thetas = {FULL_ATTENTION: config.read_float("rope_theta", default=500_000.0), SLIDING_ATTENTION: 500_000.0}
    ropes = read_ropes_by_layer_type(config, model_builders.read_max_length(config, 2048), thetas)
    window = config.read_optional_int("sliding_window", default=4096)
    usual = [FULL_ATTENTION if (layer + 1) % 4 == 0 else SLIDING_ATTENTION for layer in range(layers)]
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))

    def attention(kind: str) -> model_builders.LayerAttention:
        turns = (QKNorm(scope="full", eps=norm.eps), ropes[kind].make_rotary(sizes.dim))
        pattern = f"window({window})" if kind == SLIDING_ATTENTION else "causal()"
        return ropes[kind].attention_with_limits(
            design(**sizes.design_args, bias=_read_bias(config), pattern=pattern, modifiers=turns)
        )

    attentions = model_builders.make_attentions(read_layer_types(config, layers, usual, window), attention)
    blocks = model_builders.make_blocks(attentions, _read_feed_forward(config), norm, placement="after")
    return model_builders.build_decoder(config, task, blocks, norm, _read_ends(config))


@register_family("olmoe", "Olmoe")
def read_olmoe(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMoE (2409.02060): eight of 64 experts, whose routing weights are not renormalised."""
    sizes, rope = _read_sizes_and_rope(config, model=2048, heads=16, positions=4096)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    expert = FeedForwardSpec(
        config.read_int("intermediate_size", default=2048), config.read_activation("hidden_act", "silu"), "gated"
    )
    feed = model_builders.make_experts(config, expert, count=64, active=8, normalized_over="all")
    turns = (QKNorm(scope="full", eps=norm.eps),)
    blocks = model_builders.make_blocks(_repeat_attention(config, sizes, rope, turns, usual=16), feed, norm)
    return model_builders.build_decoder(config, task, blocks, norm, _read_ends(config))


def _read_sizes_and_rope(
    config: TransformersConfig, model: int = 4096, heads: int = 32, positions: int = 2048
) -> tuple[model_builders.DecoderSizes, RopeConfig]:
    return model_builders.read_decoder_sizes(config, model, heads), RopeConfig(
        config, model_builders.read_max_length(config, positions)
    )


def _repeat_attention(
    config: TransformersConfig,
    sizes: model_builders.DecoderSizes,
    rope: RopeConfig,
    qk_norms: tuple[Any, ...],
    usual: int = 32,
) -> list[AttentionSpec | ApproximateAttention]:
    """Return the attention of every layer, marked as approximate if clip_qkv is set."""
    modifiers = (*qk_norms, rope.make_rotary(sizes.dim))
    spec = design(**sizes.design_args, bias=_read_bias(config), pattern="causal()", modifiers=modifiers)
    attention: AttentionSpec | ApproximateAttention = rope.attention_with_limits(spec)
    if (clip := config.read_optional_float("clip_qkv")) is not None:
        attention = ApproximateAttention(
            spec, f"clip_qkv clips queries, keys and values at {clip:g}, which AttentionSpec lacks"
        )
    return [attention] * model_builders.read_num_layers(config, usual)


def _read_bias(config: TransformersConfig) -> str:
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def _read_feed_forward(config: TransformersConfig) -> FeedForwardSpec:
    return FeedForwardSpec(
        config.read_int("intermediate_size", default=11008), config.read_activation("hidden_act", "silu"), "gated"
    )


def _read_ends(config: TransformersConfig) -> model_builders.DecoderEnds:
    return model_builders.DecoderEnds(config.read_int("vocab_size", default=OLMO_VOCAB_SIZE))


# --- OLMo 2 --------------------------------------------------------------------------------------------

OLMO2_NORMS = {
    "decoder.{layer}.attention_norm.weight": ".layers.{layer}.post_attention_layernorm.weight",
    "decoder.{layer}.feed_norm.weight": ".layers.{layer}.post_feedforward_layernorm.weight",
}
OLMO2_WEIGHTS = LLAMA._replace(families=("olmo2", "olmo3"), locations={**LLAMA.locations, **OLMO2_NORMS})

"""Mixture-of-experts decoders: Mixtral, Qwen 2 MoE and Qwen 3 MoE."""

from __future__ import annotations

from typing import Any

from ..model_spec import BlockSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, NormSpec, UnsupportedPart
from ..parts.qk_norm import QKNorm
from ..presets import design
from . import model_builders
from .attention_config import RopeConfig
from .config_reader import TransformersConfig, register_family
from .llama import LLAMA_WEIGHTS as LLAMA, read_attention_bias, read_qwen_patterns
from .weight_names import TensorLocation


@register_family("mixtral", "Mixtral")
def read_mixtral(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Mixtral (2401.04088): two of eight experts per token."""
    window = config.read_optional_int("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    patterns = [pattern] * model_builders.read_num_layers(config, 32)
    sizes = model_builders.read_decoder_sizes(config, model=4096, heads=32, kv=8)
    rope = RopeConfig(config, model_builders.read_max_length(config, 131072), theta=1_000_000.0)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    hidden = config.read_int("intermediate_size", default=14336)
    expert = FeedForwardSpec(hidden, config.read_activation("hidden_act", "silu"), "gated")
    count = config.read_int("num_local_experts", "num_experts", default=8)
    feed = ExpertsSpec(expert, count, config.read_int("num_experts_per_tok", default=2, maximum=count), scores="chosen")
    blocks = [BlockSpec(attention, feed=feed, norm=norm) for attention in _make_attentions(sizes, rope, patterns)]
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=32000))
    )


@register_family("qwen2_moe", "Qwen2Moe")
def read_qwen2_moe(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Qwen 2 MoE (2407.10671): chosen experts, and a gated shared expert for all tokens."""
    sizes = model_builders.read_decoder_sizes(config, model=2048, heads=16, kv=16)
    rope = RopeConfig(config, model_builders.read_max_length(config, 32768))
    act = config.read_activation("hidden_act", "silu")
    shared = FeedForwardSpec(config.read_int("shared_expert_intermediate_size", default=5632), act, "gated")
    expert = FeedForwardSpec(config.read_int("moe_intermediate_size", default=1408), act, "gated")
    chosen = model_builders.make_experts(config, expert, count=60, active=4, normalized_over="all")
    experts = ExpertsSpec(chosen.each, chosen.count, chosen.active, shared, chosen.scores)
    feeds = _select_feed_forwards(
        config, FeedForwardSpec(config.read_int("intermediate_size", default=5632), act, "gated"), experts
    )
    bias = "qkv" if config.read_bool("qkv_bias", True) else ""
    attentions = _make_attentions(sizes, rope, read_qwen_patterns(config, default=24), bias=bias)
    gates = tuple(
        (f"decoder.{n}.feed.shared_gate", sizes.model) for n, layer_feed in enumerate(feeds) if layer_feed is experts
    )
    unsupported = (
        (UnsupportedPart("a sigmoid gate per token scales the shared expert, which ExpertsSpec lacks", gates),)
        if gates
        else ()
    )
    return _build_mixture(config, task, attentions, feeds, 151936, unsupported)


@register_family("qwen3_moe", "Qwen3Moe")
def read_qwen3_moe(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Qwen 3 MoE (2505.09388): QK-norm, no shared expert."""
    sizes = model_builders.read_decoder_sizes(config, model=2048, heads=32, kv=4)
    rope = RopeConfig(config, model_builders.read_max_length(config, 32768))
    window = (
        config.read_optional_int("sliding_window", default=4096)
        if config.read_bool("use_sliding_window", False)
        else None
    )
    act = config.read_activation("hidden_act", "silu")
    expert = FeedForwardSpec(config.read_int("moe_intermediate_size", default=768), act, "gated")
    experts = model_builders.make_experts(config, expert, count=128, active=8, normalized_over="all")
    feeds = _select_feed_forwards(
        config, FeedForwardSpec(config.read_int("intermediate_size", default=6144), act, "gated"), experts
    )
    norms = (QKNorm(eps=config.read_float("rms_norm_eps", default=1e-6)),)
    patterns = ["causal()" if window is None else f"window({window})"] * len(feeds)
    return _build_mixture(
        config,
        task,
        _make_attentions(sizes, rope, patterns, bias=read_attention_bias(config), modifiers=norms),
        feeds,
        151936,
    )


def _make_attentions(
    sizes: model_builders.DecoderSizes, rope: RopeConfig, patterns: list[str], **design_args: Any
) -> list[model_builders.LayerAttention]:
    parts = (*design_args.pop("modifiers", ()), rope.make_rotary(sizes.dim))
    return model_builders.make_attentions(
        patterns,
        lambda p: rope.attention_with_limits(design(**sizes.design_args, pattern=p, modifiers=parts, **design_args)),
    )


def _select_feed_forwards(
    config: TransformersConfig, dense: FeedForwardSpec, experts: ExpertsSpec
) -> list[FeedForwardSpec | ExpertsSpec]:
    """Return the feed-forward of each layer: experts in every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = config.read_int("decoder_sparse_step", default=1)
    named = config.read_list("mlp_only_layers") or []
    layers = model_builders.read_num_layers(config, 24)
    return [dense if n in named or (n + 1) % step else experts for n in range(layers)]


def _build_mixture(
    config: TransformersConfig,
    task: str,
    attentions: list[model_builders.LayerAttention],
    feeds: list[FeedForwardSpec | ExpertsSpec],
    tokens: int,
    unsupported: tuple[UnsupportedPart, ...] = (),
) -> ModelSpec:
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    blocks = [BlockSpec(attention, feed=feed, norm=norm) for attention, feed in zip(attentions, feeds, strict=True)]
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=tokens)),
        unsupported,
    )


# --- Mixtral -------------------------------------------------------------------------------------------

OWN_LAYER, FILE_EXPERTS = "decoder.{layer}", ".layers.{layer}.block_sparse_moe"

MIXTRAL_WEIGHTS = LLAMA._replace(
    families=("mixtral",),
    locations={
        **LLAMA.locations,
        f"{OWN_LAYER}.feed.router": f"{FILE_EXPERTS}.gate.weight",
        f"{OWN_LAYER}.feed.each.gate": TensorLocation(f"{FILE_EXPERTS}.experts.{{expert}}.w1.weight", "hidden model"),
        f"{OWN_LAYER}.feed.each.up": TensorLocation(f"{FILE_EXPERTS}.experts.{{expert}}.w3.weight", "hidden model"),
        f"{OWN_LAYER}.feed.each.down": TensorLocation(f"{FILE_EXPERTS}.experts.{{expert}}.w2.weight", "model hidden"),
    },
)

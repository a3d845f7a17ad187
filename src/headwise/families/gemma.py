"""Gemma 1 to 3: norm weights stored minus one, a separate head dimension,
scaled token embeddings.
"""

from __future__ import annotations

from typing import Any

from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
)
from ..parts.rms_norms import QKNorm
from ..parts.softcap import Softcap
from ..presets import design
from . import model_builders
from .attention_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    RopeConfig,
    alternate_layer_types,
    make_dot,
    read_layer_patterns,
    read_layer_types,
    read_ropes_by_layer_type,
)
from .config_reader import TransformersConfig, make_decoder_model, read_tied_stack, register_family
from .llama import LLAMA_WEIGHTS as LLAMA

UNAPPLIED = "is not applied by transformers in this family"


@register_family("gemma", "Gemma")
def read_gemma(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Gemma (2403.08295): Llama with offset RMSNorm, gated GELU and scaled embeddings."""
    sizes = model_builders.read_decoder_sizes(config, model=3072, heads=16, kv=16, dim=256)
    config.require_default(
        "use_bidirectional_attention", False, "removes the causal mask, which is not described"
    )
    config.require_default("final_logit_softcapping", None, UNAPPLIED)
    rope = RopeConfig(config, model_builders.read_max_length(config, 8192))
    spec = design(
        **sizes.design_args,
        pattern="causal()",
        bias=_read_bias(config),
        modifiers=(rope.make_rotary(sizes.dim),),
    )
    norm = NormSpec("offset", config.read_float("rms_norm_eps", default=1e-6))
    act = config.read_activation("hidden_act", "gelu_pytorch_tanh")
    feed = _read_feed_forward(
        config, "gelu_tanh" if act == "gelu" else act, 24576
    )  # transformers treats "gelu" as the tanh approximation
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 28), feed, norm
    )
    return _build_gemma(config, task, blocks, norm, 256000)


@register_family("gemma3_text", "Gemma3")
def read_gemma3_text(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Gemma 3 (2503.19786): five sliding-window layers per full one, a RoPE base for either,
    QK-norm.
    """
    sizes = model_builders.read_decoder_sizes(config, model=2304, heads=8, kv=4, dim=256)
    layers, every = (
        model_builders.read_num_layers(config, 26),
        config.read_int("sliding_window_pattern", default=6),
    )
    config.require_default(
        "use_bidirectional_attention", False, "removes the causal mask, which is not described"
    )
    thetas = {FULL_ATTENTION: config.read_float("rope_theta", default=1_000_000.0)}
    thetas |= {SLIDING_ATTENTION: config.read_float("rope_local_base_freq", default=10_000.0)}
    ropes = read_ropes_by_layer_type(config, model_builders.read_max_length(config, 131072), thetas)
    window = config.read_optional_int("sliding_window", default=4096)
    usual = [
        FULL_ATTENTION if (layer + 1) % every == 0 else SLIDING_ATTENTION for layer in range(layers)
    ]

    norm = NormSpec("offset", config.read_float("rms_norm_eps", default=1e-6))
    scale = make_dot(
        config.read_float("query_pre_attn_scalar", default=256) ** -0.5, sizes.dim**-0.5
    )
    design_args: dict[str, Any] = {
        **sizes.design_args,
        "bias": _read_bias(config),
        "similarity": scale,
    }
    config.require_default("attn_logit_softcapping", None, UNAPPLIED)

    def attention(kind: str) -> model_builders.LayerAttention:
        turns = (QKNorm("offset", eps=norm.eps), ropes[kind].make_rotary(sizes.dim))
        pattern = f"window({window})" if kind == SLIDING_ATTENTION else "causal()"
        return ropes[kind].attention_with_limits(
            design(**design_args, pattern=pattern, modifiers=turns)
        )

    feed = _read_feed_forward(
        config, config.read_activation("hidden_activation", "gelu_pytorch_tanh"), 9216
    )
    attentions = model_builders.make_attentions(
        read_layer_types(config, layers, usual, window), attention
    )
    blocks = model_builders.make_blocks(attentions, feed, norm, placement="sandwich")
    return _build_gemma(config, task, blocks, norm, 262208)


@register_family("gemma3", "Gemma3", default_task="ForConditionalGeneration")
def read_gemma3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read the text decoder of a Gemma 3 with vision."""
    text = config.read_table("text_config") or TransformersConfig({}, config.source)
    text.family_name, text.notes = config.family_name, config.notes
    config.add_note(
        "vision_config: the vision tower and its projection into the decoder are left out"
    )
    return read_gemma3_text(text, {"ForConditionalGeneration": "ForCausalLM"}.get(task, task))


def _read_bias(config: TransformersConfig) -> str:
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def _read_feed_forward(config: TransformersConfig, act: str, usual: int) -> FeedForwardSpec:
    return FeedForwardSpec(config.read_int("intermediate_size", default=usual), act, "gated")


def _build_gemma(
    config: TransformersConfig, task: str, blocks: list[Any], norm: NormSpec, tokens: int
) -> ModelSpec:
    """Return a decoder whose tied token embeddings are scaled by sqrt(width)."""
    (wide,) = {spec.model for spec in blocks[0].attention_specs.values()}
    count, cap = (
        config.read_int("vocab_size", default=tokens),
        config.read_optional_float("final_logit_softcapping"),
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(count, True, embedding_scale=wide**0.5, logit_softcap=cap),
    )


# --- Gemma 2 --------------------------------------------------------------------------------------


@register_family("gemma2", "Gemma2")
def read_gemma2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Gemma 2 (2408.00118); scores are scaled by query_pre_attn_scalar instead of the head
    dimension.
    """
    model = config.read_int("hidden_size", default=2304)
    heads = config.read_num_heads("num_attention_heads", default=8)
    layers = config.read_num_layers("num_hidden_layers", default=26)
    dim = config.resolve_head_dim(model, heads, "head_dim", default=256)
    rope = RopeConfig(config, config.read_int("max_position_embeddings", default=8192))
    caps = {
        key: _read_softcap(config, f"{key}_logit_softcapping", usual)
        for key, usual in (("attn", 50.0), ("final", 30.0))
    }
    config.require_default(
        "use_bidirectional_attention", False, "removes the causal mask, which is not described"
    )

    design_args: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "kv": config.read_num_kv_heads(heads, default=4),
        "dim": dim,
    }
    design_args |= {"bias": "qkvo" if config.read_bool("attention_bias", False) else ""}
    design_args |= {
        "similarity": make_dot(
            config.read_float("query_pre_attn_scalar", default=256) ** -0.5, dim**-0.5
        )
    }
    design_args |= {
        "modifiers": (rope.make_rotary(dim), *((Softcap(caps["attn"]),) if caps["attn"] else ()))
    }
    norm = NormSpec("offset", config.read_float("rms_norm_eps", default=1e-6))
    act = config.read_activation("hidden_activation", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=9216), act, "gated")
    patterns = read_layer_patterns(
        config,
        layers,
        alternate_layer_types(layers),
        config.read_optional_int("sliding_window", default=4096),
    )
    specs = {
        pattern: rope.attention_with_limits(design(**design_args, pattern=pattern))
        for pattern in set(patterns)
    }
    blocks = [
        BlockSpec(specs[pattern], feed=feed, norm=norm, placement="sandwich")
        for pattern in patterns
    ]

    tokens = config.read_int("vocab_size", default=256000)
    stack = StackSpec.from_blocks(
        "decoder", model, blocks, embedding=EmbeddingSpec(tokens, scale=model**0.5), norm=norm
    )
    head = OutputHeadSpec(
        "tokens", tokens, table=read_tied_stack(config, "decoder", True), cap=caps["final"]
    )
    return make_decoder_model(config, task, stack, head)


def _read_softcap(config: TransformersConfig, name: str, usual: float) -> float | None:
    return (
        None
        if config.find_key([name], usual)[1] is None
        else config.read_float(name, default=usual)
    )


# --- Gemma 2 and 3 --------------------------------------------------------------------------------

GEMMA2_NORMS = {
    "decoder.{layer}.attention_norm_after.weight": ".layers.{layer}.post_attention_layernorm.weight",
    "decoder.{layer}.feed_norm.weight": ".layers.{layer}.pre_feedforward_layernorm.weight",
    "decoder.{layer}.feed_norm_after.weight": ".layers.{layer}.post_feedforward_layernorm.weight",
}
GEMMA2_WEIGHTS = LLAMA._replace(
    families=("gemma2", "gemma3_text"), locations={**LLAMA.locations, **GEMMA2_NORMS}
)

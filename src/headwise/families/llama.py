"""Llama and its relatives: RMSNorm before each sublayer, RoPE, grouped queries, gated feed-forwards
or experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import SpecError
from ..masking.patterns import Window
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
    UnsupportedPart,
)
from ..parts.rms_norms import QKNorm
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import model_builders
from .attention_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    RopeConfig,
    make_dot,
    read_layer_patterns,
    read_layer_types,
    rope_to_config,
)
from .config_reader import (
    TransformersConfig,
    activation_to_config,
    get_first_layer,
    make_decoder_model,
    read_tied_stack,
    register_family,
    register_writer,
)
from .weight_names import TensorLocation, WeightNames


class LlamaDefaults(NamedTuple):
    """Defaults for keys missing in a config; `kv` None means one key-value head per query head."""

    vocab_size: int
    hidden: int
    length: int
    kv: int | None = None
    dim: int | None = None


@register_family("llama", "Llama")
def read_llama(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Llama (2302.13971); the attention has biases everywhere or nowhere."""
    return build_llama_like(
        config,
        task,
        LlamaDefaults(32000, 11008, 2048),
        ["causal()"] * read_llama_depth(config),
        bias=read_attention_bias(config),
    )


@register_family("mistral", "Mistral")
def read_mistral(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Mistral (2310.06825); all layers use one sliding window, or full causal attention if it
    is null.
    """
    window = config.read_optional_int("sliding_window", default=4096)
    pattern = "causal()" if window is None else f"window({window})"
    return build_llama_like(
        config,
        task,
        LlamaDefaults(32000, 14336, 131072, kv=8),
        [pattern] * read_llama_depth(config),
    )


@register_family("qwen2", "Qwen2")
def read_qwen2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Qwen 2 (2407.10671), with biases on queries, keys and values."""
    return build_llama_like(
        config,
        task,
        LlamaDefaults(151936, 22016, 32768, kv=32),
        read_qwen_patterns(config),
        bias="qkv",
    )


@register_family("qwen3", "Qwen3")
def read_qwen3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Qwen 3 (2505.09388): QK-norm before RoPE, and a head dimension of 128 by default."""
    qk_norm = (QKNorm(eps=config.read_float("rms_norm_eps", default=1e-6)),)
    defaults = LlamaDefaults(151936, 22016, 32768, kv=32, dim=128)
    return build_llama_like(
        config,
        task,
        defaults,
        read_qwen_patterns(config),
        bias=read_attention_bias(config),
        modifiers=qk_norm,
    )


def read_llama_depth(config: TransformersConfig, default: int = 32) -> int:
    """Return `num_hidden_layers`."""
    return config.read_num_layers("num_hidden_layers", default=default)


def read_attention_bias(config: TransformersConfig) -> str:
    """Return which attention projections have biases: "qkvo" or none."""
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def read_qwen_patterns(config: TransformersConfig, default: int = 32) -> list[str]:
    """Return the layers' patterns by Qwen's rule: with windows, the first `max_window_layers` stay
    full.
    """
    window = (
        config.read_optional_int("sliding_window", default=4096)
        if config.read_bool("use_sliding_window", False)
        else None
    )
    first = config.read_int("max_window_layers", default=28, minimum=0)
    layers = read_llama_depth(config, default)
    types = [
        SLIDING_ATTENTION if window and layer >= first else FULL_ATTENTION
        for layer in range(layers)
    ]
    return read_layer_patterns(config, layers, types, window)


def build_llama_like(
    config: TransformersConfig,
    task: str,
    defaults: LlamaDefaults,
    patterns: list[str],
    **design_args: Any,
) -> ModelSpec:
    """Return a decoder whose layers have these patterns; `design_args` go to `design`, their
    modifiers precede RoPE.
    """
    model = config.read_int("hidden_size", default=4096)
    heads = config.read_num_heads("num_attention_heads", default=32)
    kv = config.read_num_kv_heads(heads, default=defaults.kv)
    dim = config.resolve_head_dim(model, heads, "head_dim", default=defaults.dim)
    rope = RopeConfig(config, config.read_int("max_position_embeddings", default=defaults.length))
    design_args |= {"modifiers": (*design_args.get("modifiers", ()), rope.make_rotary(dim))}

    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    hidden = config.read_int("intermediate_size", default=defaults.hidden)
    bias = "ugd" if config.read_bool("mlp_bias", False) and config.family_name == "llama" else ""
    feed = FeedForwardSpec(hidden, config.read_activation("hidden_act", "silu"), "gated", bias)
    specs = {
        pattern: rope.attention_with_limits(
            design(model=model, heads=heads, kv=kv, dim=dim, pattern=pattern, **design_args)
        )
        for pattern in set(patterns)
    }
    blocks = [BlockSpec(specs[pattern], feed=feed, norm=norm) for pattern in patterns]

    tokens = config.read_int("vocab_size", default=defaults.vocab_size)
    stack = StackSpec.from_blocks(
        "decoder", model, blocks, embedding=EmbeddingSpec(tokens), norm=norm
    )
    return make_decoder_model(
        config,
        task,
        stack,
        OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", False)),
    )


@register_writer("llama", "mistral", "qwen2", "qwen3")
def write_llama_config(model: ModelSpec, name: str) -> dict[str, Any]:
    """Write the config keys of a decoder like Llama; settings shared by all layers come from the
    first one.
    """
    stack, spec, feed = get_first_layer(model, name)
    heads = spec.heads
    if name == "llama" and stack.model % heads.q:
        raise SpecError(
            f"cannot write a llama: {stack.model} channels are not divisible by {heads.q} heads; "
            "write a mistral"
        )
    keys: dict[str, Any] = {"hidden_size": stack.model, "intermediate_size": feed.hidden}
    keys |= {
        "num_hidden_layers": len(stack.layers),
        "num_attention_heads": heads.q,
        "num_key_value_heads": heads.kv,
    }
    keys |= {
        "head_dim": heads.dim,
        "hidden_act": activation_to_config(feed.activation),
        "mlp_bias": bool(feed.bias),
    }
    keys |= {
        "rms_norm_eps": stack.layers[0].norm.eps,
        "attention_bias": "project.q_bias" in spec.params(),
    }
    keys |= {
        "vocab_size": stack.embedding.tokens if stack.embedding else 0,
        "rope_parameters": rope_to_config(spec),
    }
    keys |= {"tie_word_embeddings": any(head.table for head in model.heads)}
    return keys | (_write_windows(stack, name) if name != "llama" else {})


def _write_windows(stack: StackSpec, name: str) -> dict[str, Any]:
    """Write the sliding windows of the layers, as far as the family can express them."""
    patterns = [
        block.attention.pattern
        for block in stack.layers
        if isinstance(block.attention, AttentionSpec)
    ]
    sizes = [pattern.keys if isinstance(pattern, Window) else None for pattern in patterns]
    window = next((size for size in sizes if size), None)
    if name == "mistral":
        return {"sliding_window": window}
    types = [FULL_ATTENTION if size is None else SLIDING_ATTENTION for size in sizes]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types,
    }


# --- Weight names of Llama and of families that share them ----------------------------------------

LLAMA_WEIGHTS = WeightNames(
    families=("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "olmo"),
    prefixes=("model", "transformer", ""),
    locations={
        "decoder.embedding.tokens": ".embed_tokens.weight",
        "decoder.{layer}.attention.project.q": ".layers.{layer}.self_attn.q_proj.weight",
        "decoder.{layer}.attention.project.k": ".layers.{layer}.self_attn.k_proj.weight",
        "decoder.{layer}.attention.project.v": ".layers.{layer}.self_attn.v_proj.weight",
        "decoder.{layer}.attention.project.q_bias": ".layers.{layer}.self_attn.q_proj.bias",
        "decoder.{layer}.attention.project.k_bias": ".layers.{layer}.self_attn.k_proj.bias",
        "decoder.{layer}.attention.project.v_bias": ".layers.{layer}.self_attn.v_proj.bias",
        "decoder.{layer}.attention.qk_norm.q": ".layers.{layer}.self_attn.q_norm.weight",
        "decoder.{layer}.attention.qk_norm.k": ".layers.{layer}.self_attn.k_norm.weight",
        "decoder.{layer}.attention.output.o": ".layers.{layer}.self_attn.o_proj.weight",
        "decoder.{layer}.attention.output.o_bias": ".layers.{layer}.self_attn.o_proj.bias",
        "decoder.{layer}.attention_norm.weight": ".layers.{layer}.input_layernorm.weight",
        "decoder.{layer}.feed.gate": ".layers.{layer}.mlp.gate_proj.weight",
        "decoder.{layer}.feed.up": ".layers.{layer}.mlp.up_proj.weight",
        "decoder.{layer}.feed.down": ".layers.{layer}.mlp.down_proj.weight",
        "decoder.{layer}.feed.gate_bias": ".layers.{layer}.mlp.gate_proj.bias",
        "decoder.{layer}.feed.up_bias": ".layers.{layer}.mlp.up_proj.bias",
        "decoder.{layer}.feed.down_bias": ".layers.{layer}.mlp.down_proj.bias",
        "decoder.{layer}.feed_norm.weight": ".layers.{layer}.post_attention_layernorm.weight",
        "decoder.norm.weight": ".norm.weight",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
        "head.classes.bias": "score.bias",
        "head.span.weight": "qa_outputs.weight",
        "head.span.bias": "qa_outputs.bias",
    },
    ignored=(r"rotary_emb\.inv_freq$",),
)

# --- Granite --------------------------------------------------------------------------------------


@register_family("granite", "Granite")
def read_granite(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Granite, which scales embeddings, attention scores, residual branches and logits."""
    sizes = model_builders.read_decoder_sizes(config, model=4096, heads=32)
    rope = RopeConfig(config, model_builders.read_max_length(config, 2048))
    scores = make_dot(config.read_float("attention_multiplier", default=1.0), sizes.dim**-0.5)
    bias = "qkvo" if config.read_bool("attention_bias", False) else ""
    spec = design(
        **sizes.design_args,
        pattern="causal()",
        bias=bias,
        similarity=scores,
        modifiers=(rope.make_rotary(sizes.dim),),
    )
    wide = "ugd" if config.read_bool("mlp_bias", False) else ""
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=11008), act, "gated", wide)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    residual_scale = config.read_float("residual_multiplier", default=1.0)
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 32),
        feed,
        norm,
        scale=residual_scale,
    )
    ends = model_builders.DecoderEnds(
        config.read_int("vocab_size", default=32000),
        embedding_scale=config.read_float("embedding_multiplier", default=1.0),
        logit_scale=1 / config.read_float("logits_scaling", default=1.0),
    )
    return model_builders.build_decoder(config, task, blocks, norm, ends)


# --- SmolLM3 --------------------------------------------------------------------------------------


@register_family("smollm3", "SmolLM3")
def read_smollm3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read SmolLM3, in which some layers have no positional encoding (NoPE, 2305.19466)."""
    sizes = model_builders.read_decoder_sizes(config, model=2048, heads=16, kv=4)
    layers = model_builders.read_num_layers(config, 36)
    rope = RopeConfig(config, model_builders.read_max_length(config, 32768), theta=2_000_000.0)
    uses_rope = _read_rope_layers(config, layers)
    window = (
        config.read_optional_int("sliding_window")
        if config.read_bool("use_sliding_window", False)
        else None
    )
    default_types = [
        SLIDING_ATTENTION if window and not rope_flag else FULL_ATTENTION for rope_flag in uses_rope
    ]
    types = read_layer_types(config, layers, default_types, window)
    bias = "qkvo" if config.read_bool("attention_bias", False) else ""

    def attention(kind: tuple[str, int]) -> model_builders.LayerAttention:
        pattern = f"window({window})" if window and kind[0] == SLIDING_ATTENTION else "causal()"
        spec = design(
            **sizes.design_args,
            pattern=pattern,
            bias=bias,
            modifiers=(rope.make_rotary(sizes.dim),) if kind[1] else (),
        )
        return rope.attention_with_limits(spec) if kind[1] else spec

    act = config.read_activation("hidden_act", "silu")
    wide = "ugd" if config.read_bool("mlp_bias", False) else ""
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=11008), act, "gated", wide)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    blocks = model_builders.make_blocks(
        model_builders.make_attentions(zip(types, uses_rope, strict=True), attention), feed, norm
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=128256), True),
    )


def _read_rope_layers(config: TransformersConfig, layers: int) -> list[int]:
    """Return for each layer 1 if it applies RoPE, else 0."""
    interval = config.read_int("no_rope_layer_interval", default=4)
    flags = config.read_list("no_rope_layers")
    if flags is None:
        return [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        config.fail(
            f"no_rope_layers = {flags!r} is not 0 or 1 for each of {layers} layers",
            "list one for each",
        )
    return flags


# --- Mixtures of experts: Mixtral, Qwen 2 MoE and Qwen 3 MoE --------------------------------------


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
    feed = ExpertsSpec(
        expert,
        count,
        config.read_int("num_experts_per_tok", default=2, maximum=count),
        scores="chosen",
    )
    blocks = [
        BlockSpec(attention, feed=feed, norm=norm)
        for attention in _make_attentions(sizes, rope, patterns)
    ]
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=32000)),
    )


@register_family("qwen2_moe", "Qwen2Moe")
def read_qwen2_moe(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Qwen 2 MoE (2407.10671): chosen experts, and a gated shared expert for all tokens."""
    sizes = model_builders.read_decoder_sizes(config, model=2048, heads=16, kv=16)
    rope = RopeConfig(config, model_builders.read_max_length(config, 32768))
    act = config.read_activation("hidden_act", "silu")
    shared = FeedForwardSpec(
        config.read_int("shared_expert_intermediate_size", default=5632), act, "gated"
    )
    expert = FeedForwardSpec(config.read_int("moe_intermediate_size", default=1408), act, "gated")
    chosen = model_builders.make_experts(config, expert, count=60, active=4)
    experts = ExpertsSpec(chosen.each, chosen.count, chosen.active, shared, chosen.scores)
    feeds = _select_feed_forwards(
        config,
        FeedForwardSpec(config.read_int("intermediate_size", default=5632), act, "gated"),
        experts,
    )
    bias = "qkv" if config.read_bool("qkv_bias", True) else ""
    attentions = _make_attentions(sizes, rope, read_qwen_patterns(config, default=24), bias=bias)
    gates = tuple(
        (f"decoder.{n}.feed.shared_gate", sizes.model)
        for n, layer_feed in enumerate(feeds)
        if layer_feed is experts
    )
    unsupported = (
        (
            UnsupportedPart(
                "a sigmoid gate per token scales the shared expert, which ExpertsSpec lacks", gates
            ),
        )
        if gates
        else ()
    )
    return _build_mixture(config, task, attentions, feeds, unsupported)


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
    experts = model_builders.make_experts(config, expert, count=128, active=8)
    feeds = _select_feed_forwards(
        config,
        FeedForwardSpec(config.read_int("intermediate_size", default=6144), act, "gated"),
        experts,
    )
    norms = (QKNorm(eps=config.read_float("rms_norm_eps", default=1e-6)),)
    patterns = ["causal()" if window is None else f"window({window})"] * len(feeds)
    attentions = _make_attentions(
        sizes, rope, patterns, bias=read_attention_bias(config), modifiers=norms
    )
    return _build_mixture(config, task, attentions, feeds)


def _make_attentions(
    sizes: model_builders.DecoderSizes, rope: RopeConfig, patterns: list[str], **design_args: Any
) -> list[model_builders.LayerAttention]:
    parts = (*design_args.pop("modifiers", ()), rope.make_rotary(sizes.dim))
    return model_builders.make_attentions(
        patterns,
        lambda p: rope.attention_with_limits(
            design(**sizes.design_args, pattern=p, modifiers=parts, **design_args)
        ),
    )


def _select_feed_forwards(
    config: TransformersConfig, dense: FeedForwardSpec, experts: ExpertsSpec
) -> list[FeedForwardSpec | ExpertsSpec]:
    """Return the feed-forward of each layer: experts in every `decoder_sparse_step`-th, except
    `mlp_only_layers`.
    """
    step = config.read_int("decoder_sparse_step", default=1)
    named = config.read_list("mlp_only_layers") or []
    layers = model_builders.read_num_layers(config, 24)
    return [dense if n in named or (n + 1) % step else experts for n in range(layers)]


def _build_mixture(
    config: TransformersConfig,
    task: str,
    attentions: list[model_builders.LayerAttention],
    feeds: list[FeedForwardSpec | ExpertsSpec],
    unsupported: tuple[UnsupportedPart, ...] = (),
) -> ModelSpec:
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-6))
    blocks = [
        BlockSpec(attention, feed=feed, norm=norm)
        for attention, feed in zip(attentions, feeds, strict=True)
    ]
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=151936))
    return model_builders.build_decoder(config, task, blocks, norm, ends, unsupported)


# --- Mixtral --------------------------------------------------------------------------------------

OWN_LAYER, FILE_EXPERTS = "decoder.{layer}", ".layers.{layer}.block_sparse_moe"

MIXTRAL_WEIGHTS = LLAMA_WEIGHTS._replace(
    families=("mixtral",),
    locations={
        **LLAMA_WEIGHTS.locations,
        f"{OWN_LAYER}.feed.router": f"{FILE_EXPERTS}.gate.weight",
        f"{OWN_LAYER}.feed.each.gate": TensorLocation(
            f"{FILE_EXPERTS}.experts.{{expert}}.w1.weight", "hidden model"
        ),
        f"{OWN_LAYER}.feed.each.up": TensorLocation(
            f"{FILE_EXPERTS}.experts.{{expert}}.w3.weight", "hidden model"
        ),
        f"{OWN_LAYER}.feed.each.down": TensorLocation(
            f"{FILE_EXPERTS}.experts.{{expert}}.w2.weight", "model hidden"
        ),
    },
)

"""Relatives of Llama with other norms or blocks: Command R, StableLM, StarCoder, Phi, GLM-4, OLMo
and gpt-oss.
"""

from __future__ import annotations

from typing import Any

from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PositionSpec,
    StackSpec,
)
from ..parts.rms_norms import QKNorm
from ..parts.softmax import SinkSoftmax
from ..presets import design
from ..spec.attention_spec import AttentionSpec
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
from .weight_names import TensorLocation

# --- Command R (parallel blocks, interleaved RoPE) and StableLM -----------------------------------


@register_family("cohere", "Cohere")
def read_cohere(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Command R: parallel blocks, LayerNorm without a bias, scaled logits."""
    sizes, rope = (
        model_builders.read_decoder_sizes(config, model=8192, heads=64),
        _read_rope(config),
    )
    turns = (rope.make_rotary(sizes.dim, "interleaved"),)
    spec = design(**sizes.design_args, pattern="causal()", bias=_read_bias(config), modifiers=turns)
    attention = rope.attention_with_limits(spec)
    if config.read_bool("use_qk_norm", False):
        parameters = (
            ("q_norm.weight", sizes.heads * sizes.dim),
            ("k_norm.weight", sizes.kv * sizes.dim),
        )
        reason = (
            "use_qk_norm subtracts the mean from queries and keys and has weights per head, "
            "which QKNorm lacks"
        )
        attention = ApproximateAttention(spec, reason, parameters)
    return _build_cohere(config, task, [attention] * model_builders.read_num_layers(config, 40))


@register_family("cohere2", "Cohere2")
def read_cohere2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Command R7B (2504.00698): three sliding-window layers with RoPE, then a full one without
    positions.
    """
    sizes = model_builders.read_decoder_sizes(config, model=8192, heads=64)
    rope = _read_rope(config)
    layers = model_builders.read_num_layers(config, 40)
    window = config.read_optional_int("sliding_window", default=4096)
    interval = config.read_int("sliding_window_pattern", default=4)
    default_types = [
        FULL_ATTENTION if (layer + 1) % interval == 0 else SLIDING_ATTENTION
        for layer in range(layers)
    ]

    def attention(kind: str) -> model_builders.LayerAttention:
        if kind == FULL_ATTENTION:
            return design(**sizes.design_args, bias=_read_bias(config), pattern="causal()")
        turns = (rope.make_rotary(sizes.dim, "interleaved"),)
        return rope.attention_with_limits(
            design(
                **sizes.design_args,
                bias=_read_bias(config),
                pattern=f"window({window})",
                modifiers=turns,
            )
        )

    return _build_cohere(
        config,
        task,
        model_builders.make_attentions(
            read_layer_types(config, layers, default_types, window), attention
        ),
    )


def _read_rope(config: TransformersConfig) -> RopeConfig:
    return RopeConfig(
        config,
        model_builders.read_max_length(config, 8192),
        theta=500_000.0 if config.family_name == "cohere" else 10_000.0,
    )


def _read_bias(config: TransformersConfig) -> str:
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def _build_cohere(
    config: TransformersConfig, task: str, attentions: list[model_builders.LayerAttention]
) -> ModelSpec:
    norm = NormSpec("unbiased", config.read_float("layer_norm_eps", default=1e-5))
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=22528), act, "gated")
    blocks: list[BlockSpec] = model_builders.make_blocks(
        attentions, feed, norm, placement="parallel"
    )
    scale = config.read_float("logit_scale", default=0.0625)
    ends = model_builders.DecoderEnds(
        config.read_int("vocab_size", default=256000), True, logit_scale=scale
    )
    return model_builders.build_decoder(config, task, blocks, norm, ends)


# --- StableLM -------------------------------------------------------------------------------------


@register_family("stablelm", "StableLm")
def read_stablelm(config: TransformersConfig, task: str) -> ModelSpec:
    """Read StableLM; its blocks may be parallel: attention and feed-forward share one norm."""
    sizes = model_builders.read_decoder_sizes(config, model=2560, heads=32, kv=32)
    rope = RopeConfig(config, model_builders.read_max_length(config, 4096), rotary_fraction=0.25)
    bias = "qkv" if config.read_bool("use_qkv_bias", False) else ""
    spec = design(
        **sizes.design_args, pattern="causal()", bias=bias, modifiers=(rope.make_rotary(sizes.dim),)
    )
    attention = rope.attention_with_limits(spec)
    if config.read_bool("qk_layernorm", False):
        parameters = (
            ("q_norm.weights", sizes.heads * sizes.dim),
            ("k_norm.weights", sizes.kv * sizes.dim),
        )
        reason = (
            "qk_layernorm subtracts the mean from queries and keys and has weights per head, "
            "which QKNorm lacks"
        )
        attention = ApproximateAttention(spec, reason, parameters)
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=6912), act, "gated")
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    placement = "parallel" if config.read_bool("use_parallel_residual", False) else "pre"
    blocks = model_builders.make_blocks(
        [attention] * model_builders.read_num_layers(config, 32), feed, norm, placement=placement
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=50304)),
    )


# --- StableLM and Cohere --------------------------------------------------------------------------

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

# --- StarCoder and StarCoder 2 --------------------------------------------------------------------


@register_family("gpt_bigcode", "GPTBigCode")
def read_gpt_bigcode(config: TransformersConfig, task: str) -> ModelSpec:
    """Read StarCoder (2305.06161): GPT-2 with multi-query attention, or multi-head if multi_query
    is false.
    """
    model = config.read_int("n_embd", "hidden_size", default=768)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=12)
    usual = config.resolve_head_dim(model, heads) ** -0.5
    config.require_default(
        "add_cross_attention",
        False,
        "adds cross-attention to a second model, which is not described",
    )
    kv = 1 if config.read_bool("multi_query", True) else heads
    scale = make_dot(usual if config.read_bool("scale_attn_weights", True) else 1.0, usual)
    spec = design(
        model=model, heads=heads, kv=kv, pattern="causal()", bias="qkvo", similarity=scale
    )
    act = config.read_activation("activation_function", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=12)
    positions = PositionSpec(
        "learned", config.read_int("n_positions", "max_position_embeddings", default=1024)
    )
    ends = model_builders.DecoderEnds(
        config.read_int("vocab_size", default=50257), True, positions=positions
    )
    return model_builders.build_decoder(
        config, task, model_builders.make_blocks([spec] * layers, feed, norm), norm, ends
    )


# --- StarCoder 2 ----------------------------------------------------------------------------------


@register_family("starcoder2", "Starcoder2")
def read_starcoder2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read StarCoder 2, with tied token embeddings."""
    sizes = model_builders.read_decoder_sizes(config, model=3072, heads=24, kv=2)
    rope = RopeConfig(config, model_builders.read_max_length(config, 4096))
    window = config.read_optional_int("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    biased = config.read_bool("use_bias", True)
    spec = design(
        **sizes.design_args,
        pattern=pattern,
        bias="qkvo" if biased else "",
        modifiers=(rope.make_rotary(sizes.dim),),
    )
    act = config.read_activation("hidden_act", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(
        config.read_int("intermediate_size", default=12288), act, bias="ud" if biased else ""
    )
    norm = NormSpec("layer", config.read_float("norm_epsilon", default=1e-5))
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 30), feed, norm
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=49152), True),
    )


# --- StarCoder 2 ----------------------------------------------------------------------------------

STARCODER2_FEED_FORWARD = {
    f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.mlp.c_fc.weight",
    f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.mlp.c_fc.bias",
    f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.mlp.c_proj.weight",
    f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.mlp.c_proj.bias",
}
STARCODER2_WEIGHTS = STABLELM_WEIGHTS._replace(
    families=("starcoder2",), locations={**STABLELM_WEIGHTS.locations, **STARCODER2_FEED_FORWARD}
)

# --- Phi (parallel blocks, RoPE on half of each head) and Phi-3 (fused projections) ---------------


@register_family("phi", "Phi")
def read_phi(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Phi (2306.11644): parallel blocks with one norm, biases everywhere."""
    sizes = model_builders.read_decoder_sizes(config, model=2048, heads=32)
    rope = RopeConfig(config, model_builders.read_max_length(config, 2048), rotary_fraction=0.5)
    spec = design(
        **sizes.design_args,
        pattern="causal()",
        bias="qkvo",
        modifiers=(rope.make_rotary(sizes.dim),),
    )
    attention = rope.attention_with_limits(spec)
    if config.read_bool("qk_layernorm", False):
        norms = tuple(
            (f"{side}_norm.{name}", sizes.dim) for side in "qk" for name in ("weight", "bias")
        )
        attention = ApproximateAttention(
            spec,
            "qk_layernorm subtracts the mean from queries and keys, which QKNorm does not",
            norms,
        )
    feed = FeedForwardSpec(
        config.read_int("intermediate_size", default=8192),
        config.read_activation("hidden_act", "gelu_new"),
        bias="ud",
    )
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    blocks = model_builders.make_blocks(
        [attention] * model_builders.read_num_layers(config, 24), feed, norm, placement="parallel"
    )
    ends = model_builders.DecoderEnds(
        config.read_int("vocab_size", default=51200), head_bias="learned"
    )
    return model_builders.build_decoder(config, task, blocks, norm, ends)


@register_family("phi3", "Phi3")
def read_phi3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read Phi-3 (2404.14219); Q, K and V are stored as one matrix, gate and up projections as
    another.
    """
    sizes = model_builders.read_decoder_sizes(config, model=3072, heads=32)
    usual = config.read_int("original_max_position_embeddings", default=4096)
    rope = RopeConfig(config, usual, rotary_fraction=1.0)
    if rope.rope_type == "yarn":
        rope.rope_type = (
            "su"  # early files call longrope "yarn"; transformers reads them in this way too
        )
    window = config.read_optional_int("sliding_window")
    pattern = "causal()" if window is None else f"window({window})"
    spec = design(**sizes.design_args, pattern=pattern, modifiers=(rope.make_rotary(sizes.dim),))
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=8192), act, "gated")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 32), feed, norm
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=32064)),
    )


# --- Phi ------------------------------------------------------------------------------------------

PHI_NAMES = {
    f"{OWN_LAYER}.attention.output.o": f"{FILE_LAYER}.self_attn.dense.weight",
    f"{OWN_LAYER}.attention.output.o_bias": f"{FILE_LAYER}.self_attn.dense.bias",
    f"{OWN_LAYER}.feed.up": f"{FILE_LAYER}.mlp.fc1.weight",
    f"{OWN_LAYER}.feed.up_bias": f"{FILE_LAYER}.mlp.fc1.bias",
    f"{OWN_LAYER}.feed.down": f"{FILE_LAYER}.mlp.fc2.weight",
    f"{OWN_LAYER}.feed.down_bias": f"{FILE_LAYER}.mlp.fc2.bias",
    "decoder.norm.weight": ".final_layernorm.weight",
    "decoder.norm.bias": ".final_layernorm.bias",
    "head.tokens.bias": "lm_head.bias",
}
PHI_WEIGHTS = STABLELM_WEIGHTS._replace(
    families=("phi",), locations={**STABLELM_WEIGHTS.locations, **PHI_NAMES}
)

# --- Phi-3 ----------------------------------------------------------------------------------------

PHI3_QKV, PHI3_PROJECTION = (
    ".layers.{layer}.self_attn.qkv_proj.weight",
    "decoder.{layer}.attention.project",
)
FUSED_QKV_LAYOUT, FUSED_GATE_UP_LAYOUT = "([q|kv|v] dim) model", "(side hidden) model"
PHI3_GATE_UP = ".layers.{layer}.mlp.gate_up_proj.weight"

FUSED_GATE_UP_NAMES = {
    "decoder.{layer}.feed.gate": TensorLocation(
        PHI3_GATE_UP, FUSED_GATE_UP_LAYOUT, {"side": 0}, {"side": 2}
    ),
    "decoder.{layer}.feed.up": TensorLocation(
        PHI3_GATE_UP, FUSED_GATE_UP_LAYOUT, {"side": 1}, {"side": 2}
    ),
}
PHI3_WEIGHTS = LLAMA._replace(
    families=("phi3",),
    locations={
        **LLAMA.locations,
        **FUSED_GATE_UP_NAMES,
        f"{PHI3_PROJECTION}.q": TensorLocation(
            PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "q"}, own_layout="(q dim) model"
        ),
        f"{PHI3_PROJECTION}.k": TensorLocation(
            PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "kv"}, own_layout="(kv dim) model"
        ),
        f"{PHI3_PROJECTION}.v": TensorLocation(
            PHI3_QKV, FUSED_QKV_LAYOUT, {"q|kv|v": "v"}, own_layout="(v dim) model"
        ),
    },
)

# --- GLM-4: interleaved RoPE on half of each head, gate and up in one matrix (2406.12793) ---------


@register_family("glm", "Glm")
def read_glm(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GLM-4 with pre-norm layers."""
    return _build_glm(config, task, "pre")


@register_family("glm4", "Glm4")
def read_glm4(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GLM-4-0414, with norms before and after every sublayer."""
    return _build_glm(config, task, "sandwich")


def _build_glm(config: TransformersConfig, task: str, placement: str) -> ModelSpec:
    sizes = model_builders.read_decoder_sizes(config, model=4096, heads=32, kv=2, dim=128)
    rope = RopeConfig(config, model_builders.read_max_length(config, 131072), rotary_fraction=0.5)
    bias = "qkv" if config.read_bool("attention_bias", True) else ""
    turns = (rope.make_rotary(sizes.dim, "interleaved"),)
    spec = design(**sizes.design_args, pattern="causal()", bias=bias, modifiers=turns)
    act = config.read_activation("hidden_act", "silu")
    feed = FeedForwardSpec(config.read_int("intermediate_size", default=13696), act, "gated")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1.5625e-7))
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 40),
        feed,
        norm,
        placement=placement,
    )
    return model_builders.build_decoder(
        config,
        task,
        blocks,
        norm,
        model_builders.DecoderEnds(config.read_int("vocab_size", default=151552)),
    )


# --- GLM-4 ----------------------------------------------------------------------------------------

GLM_WEIGHTS = LLAMA._replace(
    families=("glm",), locations={**LLAMA.locations, **FUSED_GATE_UP_NAMES}
)

# --- OLMo, OLMo 2, OLMo 3 and OLMoE ---------------------------------------------------------------

OLMO_VOCAB_SIZE = 50304


@register_family("olmo", "Olmo")
def read_olmo(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMo (2402.00838): LayerNorm without weights or biases."""
    sizes, rope = _read_sizes_and_rope(config)
    norm = NormSpec("bare", 1e-5)
    blocks = model_builders.make_blocks(
        _repeat_attention(config, sizes, rope, ()), _read_feed_forward(config), norm
    )
    return model_builders.build_decoder(config, task, blocks, norm, _read_ends(config))


@register_family("olmo2", "Olmo2")
def read_olmo2(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMo 2 (2501.00656): a norm after every sublayer and none before, QK-norm over all
    heads.
    """
    sizes, rope = _read_sizes_and_rope(config)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    turns = (QKNorm(scope="full", eps=norm.eps),)
    blocks = model_builders.make_blocks(
        _repeat_attention(config, sizes, rope, turns),
        _read_feed_forward(config),
        norm,
        placement="after",
    )
    return model_builders.build_decoder(config, task, blocks, norm, _read_ends(config))


@register_family("olmo3", "Olmo3")
def read_olmo3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMo 3: OLMo 2 with a sliding window in three layers of four."""
    sizes = model_builders.read_decoder_sizes(config, model=4096, heads=32)
    layers = model_builders.read_num_layers(config, 32)
    thetas = {
        FULL_ATTENTION: config.read_float("rope_theta", default=500_000.0),
        SLIDING_ATTENTION: 500_000.0,
    }
    ropes = read_ropes_by_layer_type(config, model_builders.read_max_length(config, 2048), thetas)
    window = config.read_optional_int("sliding_window", default=4096)
    usual = [
        FULL_ATTENTION if (layer + 1) % 4 == 0 else SLIDING_ATTENTION for layer in range(layers)
    ]
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))

    def attention(kind: str) -> model_builders.LayerAttention:
        turns = (QKNorm(scope="full", eps=norm.eps), ropes[kind].make_rotary(sizes.dim))
        pattern = f"window({window})" if kind == SLIDING_ATTENTION else "causal()"
        return ropes[kind].attention_with_limits(
            design(
                **sizes.design_args,
                bias=_read_attention_bias(config),
                pattern=pattern,
                modifiers=turns,
            )
        )

    attentions = model_builders.make_attentions(
        read_layer_types(config, layers, usual, window), attention
    )
    blocks = model_builders.make_blocks(
        attentions, _read_feed_forward(config), norm, placement="after"
    )
    return model_builders.build_decoder(config, task, blocks, norm, _read_ends(config))


@register_family("olmoe", "Olmoe")
def read_olmoe(config: TransformersConfig, task: str) -> ModelSpec:
    """Read OLMoE (2409.02060): eight of 64 experts, whose routing weights are not renormalised."""
    sizes, rope = _read_sizes_and_rope(config, model=2048, heads=16, positions=4096)
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    expert = FeedForwardSpec(
        config.read_int("intermediate_size", default=2048),
        config.read_activation("hidden_act", "silu"),
        "gated",
    )
    feed = model_builders.make_experts(config, expert, count=64, active=8)
    turns = (QKNorm(scope="full", eps=norm.eps),)
    blocks = model_builders.make_blocks(
        _repeat_attention(config, sizes, rope, turns, usual=16), feed, norm
    )
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
    spec = design(
        **sizes.design_args,
        bias=_read_attention_bias(config),
        pattern="causal()",
        modifiers=modifiers,
    )
    attention: AttentionSpec | ApproximateAttention = rope.attention_with_limits(spec)
    if (clip := config.read_optional_float("clip_qkv")) is not None:
        attention = ApproximateAttention(
            spec, f"clip_qkv clips queries, keys and values at {clip:g}, which AttentionSpec lacks"
        )
    return [attention] * model_builders.read_num_layers(config, usual)


def _read_attention_bias(config: TransformersConfig) -> str:
    return "qkvo" if config.read_bool("attention_bias", False) else ""


def _read_feed_forward(config: TransformersConfig) -> FeedForwardSpec:
    return FeedForwardSpec(
        config.read_int("intermediate_size", default=11008),
        config.read_activation("hidden_act", "silu"),
        "gated",
    )


def _read_ends(config: TransformersConfig) -> model_builders.DecoderEnds:
    return model_builders.DecoderEnds(config.read_int("vocab_size", default=OLMO_VOCAB_SIZE))


# --- OLMo 2 ---------------------------------------------------------------------------------------

OLMO2_NORMS = {
    "decoder.{layer}.attention_norm.weight": ".layers.{layer}.post_attention_layernorm.weight",
    "decoder.{layer}.feed_norm.weight": ".layers.{layer}.post_feedforward_layernorm.weight",
}
OLMO2_WEIGHTS = LLAMA._replace(
    families=("olmo2", "olmo3"), locations={**LLAMA.locations, **OLMO2_NORMS}
)


DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


@register_family("gpt_oss", "GptOss")
def read_gpt_oss(config: TransformersConfig, task: str) -> ModelSpec:
    """Read gpt-oss (2508.10925); the gate and up projections of an expert are clipped before they
    are multiplied.
    """
    model = config.read_int("hidden_size", default=2880)
    heads = config.read_num_heads("num_attention_heads", default=64)
    layers = config.read_num_layers("num_hidden_layers", default=36)
    dim = config.resolve_head_dim(model, heads, "head_dim", default=64)
    rope = RopeConfig(
        config,
        config.read_int("max_position_embeddings", default=131072),
        theta=150_000.0,
        default=DEFAULT_YARN,
    )

    design_args: dict[str, Any] = {
        "model": model,
        "heads": heads,
        "kv": config.read_num_kv_heads(heads, default=8),
        "dim": dim,
    }
    design_args |= {
        "bias": "qkvo" if config.read_bool("attention_bias", True) else "",
        "modifiers": (rope.make_rotary(dim),),
    }
    patterns = read_layer_patterns(
        config,
        layers,
        alternate_layer_types(layers),
        config.read_optional_int("sliding_window", default=128),
    )
    specs = {
        p: rope.attention_with_limits(design(**design_args, normaliser=SinkSoftmax(), pattern=p))
        for p in set(patterns)
    }
    gain, limit = (
        config.read_float("swiglu_alpha", default=1.702),
        config.read_float("swiglu_limit", default=7.0),
    )
    config.require_default("hidden_act", "silu", "is not the activation of its experts")
    hidden = config.read_int("intermediate_size", default=2880)
    expert = FeedForwardSpec(hidden, f"bounded_silu({gain}, {limit})", "gated", bias="ugd")
    count = config.read_int("num_local_experts", "num_experts", default=128)
    active = config.read_int("num_experts_per_tok", default=4, maximum=count)
    feed = ExpertsSpec(expert, count, active, scores="chosen", bias="learned")
    norm = NormSpec("rms", config.read_float("rms_norm_eps", default=1e-5))
    blocks = [BlockSpec(specs[pattern], feed=feed, norm=norm) for pattern in patterns]

    tokens = config.read_int("vocab_size", default=201088)
    stack = StackSpec.from_blocks(
        "decoder", model, blocks, embedding=EmbeddingSpec(tokens), norm=norm
    )
    return make_decoder_model(
        config,
        task,
        stack,
        OutputHeadSpec("tokens", tokens, table=read_tied_stack(config, "decoder", False)),
    )


# --- gpt-oss --------------------------------------------------------------------------------------

FILE_EXPERTS = ".layers.{layer}.mlp.experts"
FILE_GATE_UP, FILE_GATE_UP_BIAS = (
    f"{FILE_EXPERTS}.gate_up_proj",
    f"{FILE_EXPERTS}.gate_up_proj_bias",
)
GATE_ROWS, UP_ROWS = ({"side": 0}, {"side": 2}), ({"side": 1}, {"side": 2})

GPT_OSS_WEIGHTS = LLAMA._replace(
    families=("gpt_oss",),
    locations={
        **LLAMA.locations,
        "decoder.{layer}.attention.normaliser.sink": ".layers.{layer}.self_attn.sinks",
        "decoder.{layer}.feed.router": ".layers.{layer}.mlp.router.weight",
        "decoder.{layer}.feed.router_bias": ".layers.{layer}.mlp.router.bias",
        "decoder.{layer}.feed.each.gate": TensorLocation(
            FILE_GATE_UP, "expert model (hidden side)", *GATE_ROWS
        ),
        "decoder.{layer}.feed.each.up": TensorLocation(
            FILE_GATE_UP, "expert model (hidden side)", *UP_ROWS
        ),
        "decoder.{layer}.feed.each.down": TensorLocation(
            f"{FILE_EXPERTS}.down_proj", "expert hidden model"
        ),
        "decoder.{layer}.feed.each.gate_bias": TensorLocation(
            FILE_GATE_UP_BIAS, "expert (hidden side)", *GATE_ROWS
        ),
        "decoder.{layer}.feed.each.up_bias": TensorLocation(
            FILE_GATE_UP_BIAS, "expert (hidden side)", *UP_ROWS
        ),
        "decoder.{layer}.feed.each.down_bias": f"{FILE_EXPERTS}.down_proj_bias",
    },
)

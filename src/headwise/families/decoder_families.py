"""Families of decoders: Llama and its relatives, mixtures of experts, and GPT-2 and its relatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_spec import (
    ApproximateAttention,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    UnsupportedPart,
)
from ..parts.dot_product import Dot
from ..parts.dynamic_composition import Dynamic
from ..parts.latent_attention import Latent
from ..parts.relative_position_bias import Alibi
from ..parts.rms_norms import QKNorm
from ..parts.rotary_embedding import Rotary
from ..parts.softcap import Softcap
from ..parts.softmax import SinkSoftmax
from ..presets import design
from .attention_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    RopeConfig,
    make_dot,
    read_ropes_by_layer_type,
)
from .config_reader import TransformersConfig, register_family
from .decoders import (
    BIASED,
    GPT_KEYS,
    LAYER_NORM,
    NO_CROSS_ATTENTION,
    Decoder,
    Extras,
    LayerFeed,
    LayerKind,
    Sizes,
    Switch,
    alternate,
    build_decoder,
    by_layer_type,
    full_every,
    make_layer_kinds,
    one_window,
    register_decoders,
)

# --- Llama (2302.13971), Mistral (2310.06825), Qwen 2 (2407.10671) and Qwen 3 (2505.09388) --------


def _qwen_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """With windows, the first `max_window_layers` stay full."""
    is_on = config.read_bool("use_sliding_window", False)
    window = config.read_optional_int("sliding_window", default=4096) if is_on else None
    first = config.read_int("max_window_layers", default=28, minimum=0)
    types = [
        SLIDING_ATTENTION if window and layer >= first else FULL_ATTENTION
        for layer in range(sizes.layers)
    ]
    return make_layer_kinds(config, types, window)


LLAMA = Decoder("Llama", 4096, 32, 32, 11008, 2048, 32000, bias=BIASED)
QWEN2 = Decoder(
    "Qwen2", 4096, 32, 32, 22016, 32768, 151936, kv=32, bias="qkv", layers_of=_qwen_layers
)
QWEN3 = replace(QWEN2, prefix="Qwen3", dim=128, bias=BIASED, qk_norm={})


# --- Granite and SmolLM3 (some layers without positions, 2305.19466) ------------------------------


def _granite(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Scaled embeddings, attention scores, residual branches and logits."""
    scale = config.read_float("attention_multiplier", default=1.0)
    return Extras(
        design={"similarity": make_dot(scale, sizes.dim**-0.5)},
        blocks={"scale": config.read_float("residual_multiplier", default=1.0)},
        embedding={"scale": config.read_float("embedding_multiplier", default=1.0)},
        head={"scale": 1 / config.read_float("logits_scaling", default=1.0)},
    )


def _smollm3_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    interval = config.read_int("no_rope_layer_interval", default=4)
    flags = config.read_list("no_rope_layers")
    if flags is None:
        flags = [int((layer + 1) % interval != 0) for layer in range(sizes.layers)]
    elif len(flags) != sizes.layers or any(flag not in (0, 1) for flag in flags):
        config.fail(
            f"no_rope_layers = {flags!r} is not 0 or 1 for each of {sizes.layers} layers",
            "list one for each",
        )
    is_on = config.read_bool("use_sliding_window", False)
    window = config.read_optional_int("sliding_window") if is_on else None
    types = [SLIDING_ATTENTION if window and not flag else FULL_ATTENTION for flag in flags]
    kinds = make_layer_kinds(config, types, window)
    return [
        kind if flag else kind._replace(rope="") for kind, flag in zip(kinds, flags, strict=True)
    ]


# --- Mixtures of experts: Mixtral (2401.04088), Qwen MoE, OLMoE (2409.02060), gpt-oss -------------


def _mixtral_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    """Two of eight experts per token."""
    count = config.read_int("num_local_experts", "num_experts", default=8)
    active = config.read_int("num_experts_per_tok", default=2, maximum=count)
    return [ExpertsSpec(feed, count, active, scores="chosen")] * sizes.layers


def _read_experts(
    config: TransformersConfig, expert: FeedForwardSpec, count: int, active: int
) -> ExpertsSpec:
    """A softmax over all experts, or over the chosen ones if `norm_topk_prob` is set."""
    normalized = config.read_bool("norm_topk_prob", False)
    count = config.read_int("num_experts", "num_local_experts", default=count)
    chosen = config.read_int("num_experts_per_tok", default=active, maximum=count)
    return ExpertsSpec(expert, count, chosen, scores="chosen" if normalized else "softmax")


def _olmoe_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    return [_read_experts(config, feed, count=64, active=8)] * sizes.layers


def _sparse_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec, experts: ExpertsSpec
) -> list[LayerFeed]:
    """Experts in every `decoder_sparse_step`-th layer, except `mlp_only_layers`."""
    step = config.read_int("decoder_sparse_step", default=1)
    named = config.read_list("mlp_only_layers") or []
    return [feed if n in named or (n + 1) % step else experts for n in range(sizes.layers)]


def _qwen2_moe_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    """Chosen experts, and a shared expert for all tokens."""
    shared = config.read_int("shared_expert_intermediate_size", default=5632)
    expert = replace(feed, hidden=config.read_int("moe_intermediate_size", default=1408))
    experts = _read_experts(config, expert, count=60, active=4)
    experts = replace(experts, shared=replace(feed, hidden=shared))
    return _sparse_feeds(config, sizes, feed, experts)


def _qwen2_moe(config: TransformersConfig, sizes: Sizes) -> Extras:
    dense = FeedForwardSpec(1)
    marker = ExpertsSpec(dense, 1, 1)
    gates = tuple(
        (f"decoder.{n}.feed.shared_gate", sizes.model)
        for n, feed in enumerate(_sparse_feeds(config, sizes, dense, marker))
        if feed is marker
    )
    reason = "a sigmoid gate per token scales the shared expert, which ExpertsSpec lacks"
    return Extras(unsupported=(UnsupportedPart(reason, gates),) if gates else ())


def _qwen3_moe_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    expert = replace(feed, hidden=config.read_int("moe_intermediate_size", default=768))
    experts = _read_experts(config, expert, count=128, active=8)
    return _sparse_feeds(config, sizes, feed, experts)


GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _gpt_oss_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    """The gate and up projections of an expert are clipped before they are multiplied."""
    gain = config.read_float("swiglu_alpha", default=1.702)
    limit = config.read_float("swiglu_limit", default=7.0)
    expert = FeedForwardSpec(feed.hidden, f"bounded_silu({gain}, {limit})", "gated", bias="ugd")
    count = config.read_int("num_local_experts", "num_experts", default=128)
    active = config.read_int("num_experts_per_tok", default=4, maximum=count)
    return [ExpertsSpec(expert, count, active, scores="chosen", bias="learned")] * sizes.layers


# --- Command R (parallel blocks, scaled logits), StableLM, Phi (2306.11644), Phi-3 (2404.14219) ---


def _normalised_heads(key: str, suffix: str, sizes: Sizes) -> tuple[Any, ...]:
    reason = (
        f"{key} subtracts the mean from queries and keys and has weights per head, "
        "which QKNorm lacks"
    )
    queries = (f"q_norm.{suffix}", sizes.heads * sizes.dim)
    return reason, (queries, (f"k_norm.{suffix}", sizes.kv * sizes.dim))


def _cohere(config: TransformersConfig, sizes: Sizes) -> Extras:
    extras = Extras(head={"scale": config.read_float("logit_scale", default=0.0625)})
    if config.family_name == "cohere" and config.read_bool("use_qk_norm", False):
        extras.approximate = _normalised_heads("use_qk_norm", "weight", sizes)
    return extras


def _stablelm(config: TransformersConfig, sizes: Sizes) -> Extras:
    is_normalised = config.read_bool("qk_layernorm", False)
    own = _normalised_heads("qk_layernorm", "weights", sizes) if is_normalised else ()
    return Extras(approximate=own)


def _phi(config: TransformersConfig, sizes: Sizes) -> Extras:
    if not config.read_bool("qk_layernorm", False):
        return Extras()
    names = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")
    reason = "qk_layernorm subtracts the mean from queries and keys, which QKNorm does not"
    return Extras(approximate=(reason, tuple((name, sizes.dim) for name in names)))


def _phi3_rope(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    """Early files call longrope "yarn"; transformers reads them in this way too."""
    length = config.read_int("original_max_position_embeddings", default=4096)
    rope = RopeConfig(config, length, rotary_fraction=1.0)
    if rope.rope_type == "yarn":
        rope.rope_type = "su"
    return {FULL_ATTENTION: rope}


COHERE = Decoder(
    "Cohere",
    *(8192, 64, 40, 22528, 8192, 256000),
    keys=LAYER_NORM,
    eps=1e-5,
    norm="unbiased",
    bias=BIASED,
    placement="parallel",
    tied=True,
    rope={"theta": 500_000.0},
    pairs="interleaved",
    extras=_cohere,
)

# --- GLM-4 (2406.12793): interleaved RoPE on half of each head ------------------------------------

GLM = Decoder(
    "Glm",
    *(4096, 32, 40, 13696, 131072, 151552),
    kv=2,
    dim=128,
    eps=1.5625e-7,
    bias=Switch("attention_bias", True, "qkv"),
    rope={"rotary_fraction": 0.5},
    pairs="interleaved",
)

# --- OLMo (2402.00838), OLMo 2 (2501.00656) and OLMo 3 --------------------------------------------


def _olmo(config: TransformersConfig, sizes: Sizes) -> Extras:
    return Extras(approximate=_read_clip(config))


def _read_clip(config: TransformersConfig) -> tuple[str, ...]:
    clip = config.read_optional_float("clip_qkv")
    if clip is None:
        return ()
    return (f"clip_qkv clips queries, keys and values at {clip:g}, which AttentionSpec lacks",)


def _olmo3_ropes(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    full = config.read_float("rope_theta", default=500_000.0)
    thetas = {FULL_ATTENTION: full, SLIDING_ATTENTION: 500_000.0}
    return read_ropes_by_layer_type(config, length, thetas)


OLMO = Decoder(
    "Olmo",
    *(4096, 32, 32, 11008, 2048, 50304),
    keys={"eps": ""},
    eps=1e-5,
    norm="bare",
    bias=BIASED,
    extras=_olmo,
)
OLMO2 = replace(
    OLMO, prefix="Olmo2", keys={}, norm="rms", placement="after", qk_norm={"scope": "full"}
)

# --- Gemma 1 to 3 (2403.08295, 2408.00118, 2503.19786): norm weights stored minus one -------------

UNAPPLIED = (None, "is not applied by transformers in this family")
ONLY_CAUSAL = {
    "use_bidirectional_attention": (False, "removes the causal mask, which is not described")
}


def _read_cap(config: TransformersConfig, name: str, default: float) -> float | None:
    is_off = config.find_key([name], default)[1] is None
    return None if is_off else config.read_float(name, default=default)


def _gemma(config: TransformersConfig, sizes: Sizes) -> Extras:
    return Extras(embedding={"scale": sizes.model**0.5})


def _gemma_scores(config: TransformersConfig, sizes: Sizes) -> dict[str, Any]:
    scale = config.read_float("query_pre_attn_scalar", default=256) ** -0.5
    return {"similarity": make_dot(scale, sizes.dim**-0.5)}


def _gemma2(config: TransformersConfig, sizes: Sizes) -> Extras:
    cap = _read_cap(config, "attn_logit_softcapping", 50.0)
    return Extras(
        design=_gemma_scores(config, sizes),
        modifiers=(Softcap(cap),) if cap else (),
        embedding={"scale": sizes.model**0.5},
        head={"cap": _read_cap(config, "final_logit_softcapping", 30.0)},
    )


def _gemma3(config: TransformersConfig, sizes: Sizes) -> Extras:
    return Extras(
        design=_gemma_scores(config, sizes),
        embedding={"scale": sizes.model**0.5},
        head={"cap": config.read_optional_float("final_logit_softcapping")},
    )


def _gemma3_ropes(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    thetas = {
        FULL_ATTENTION: config.read_float("rope_theta", default=1_000_000.0),
        SLIDING_ATTENTION: config.read_float("rope_local_base_freq", default=10_000.0),
    }
    return read_ropes_by_layer_type(config, length, thetas)


GEMMA = Decoder(
    "Gemma",
    *(3072, 16, 28, 24576, 8192, 256000),
    kv=16,
    dim=256,
    refused=ONLY_CAUSAL | {"final_logit_softcapping": UNAPPLIED},
    act="gelu_pytorch_tanh",
    norm="offset",
    bias=BIASED,
    tied=True,
    extras=_gemma,
)
GEMMA2 = replace(
    GEMMA,
    prefix="Gemma2",
    model=2304,
    heads=8,
    layers=26,
    hidden=9216,
    kv=4,
    keys={"act": "hidden_activation"},
    refused=ONLY_CAUSAL,
    placement="sandwich",
    layers_of=by_layer_type(alternate),
    extras=_gemma2,
)
GEMMA3 = replace(
    GEMMA2,
    prefix="Gemma3",
    length=131072,
    tokens=262208,
    refused=ONLY_CAUSAL | {"attn_logit_softcapping": UNAPPLIED},
    ropes=_gemma3_ropes,
    qk_norm={"kind": "offset"},
    layers_of=by_layer_type(full_every(6)),
    extras=_gemma3,
)


def _gemma_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    """transformers treats "gelu" as the tanh approximation."""
    act = "gelu_tanh" if feed.activation == "gelu" else feed.activation
    return [replace(feed, activation=act)] * sizes.layers


@register_family("gemma3", "Gemma3", default_task="ForConditionalGeneration")
def read_gemma3(config: TransformersConfig, task: str) -> ModelSpec:
    """Read the text decoder of a Gemma 3 with vision."""
    text = config.read_table("text_config") or TransformersConfig({}, config.source)
    text.family_name = config.family_name
    text.notes = config.notes
    config.add_note(
        "vision_config: the vision tower and its projection into the decoder are left out"
    )
    task = "ForCausalLM" if task == "ForConditionalGeneration" else task
    return build_decoder(text, task, GEMMA3)


# --- DeepSeek-V2 (2405.04434) and V3 (2412.19437): latent attention, experts after dense layers ---

UNREAD_ROUTING = "is not what transformers computes, which does not read the key"
KEPT_EXPERTS = {"moe_layer_freq": (1, "replaces expert layers that transformers keeps")}


DEEPSEEK_EXPERTS: dict[str, dict[str, int]] = {
    "deepseek_v2": {"dense": 0, "experts": 64, "active": 6, "hidden": 1407, "shared": 2},
    "deepseek_v3": {"dense": 3, "experts": 256, "active": 8, "hidden": 2048, "shared": 1},
}


def _read_groups(config: TransformersConfig, groups: int, active: int) -> dict[str, int]:
    """The number of groups of experts, and of those that each token may use."""
    return {
        "groups": config.read_int("n_group", default=groups),
        "active_groups": config.read_int("topk_group", default=active),
    }


def _read_routing(config: TransformersConfig) -> dict[str, Any]:
    """V2: a softmax chooses the experts, in the larger sizes within groups. V3: sigmoids with a
    load-balancing bias choose them within groups.
    """
    if config.family_name == "deepseek_v2":
        scale = config.read_float("routed_scaling_factor", default=1.0)
        methods = ("greedy", "group_limited_greedy")
        method = config.read_choice("topk_method", "greedy", methods)
        return {"scale": scale} | ({} if method == "greedy" else _read_groups(config, 1, 1))
    is_normalised = config.read_bool("norm_topk_prob", True)
    return {
        "scores": "sigmoid" if is_normalised else "sigmoid_sum",
        "bias": "constant",
        "scale": config.read_float("routed_scaling_factor", default=2.5),
        "group_score": "top2",
        **_read_groups(config, 8, 4),
    }


def _deepseek_feeds(
    config: TransformersConfig, sizes: Sizes, dense: FeedForwardSpec
) -> list[LayerFeed]:
    usual = DEEPSEEK_EXPERTS[config.family_name]
    routing = _read_routing(config)
    first = config.read_int("first_k_dense_replace", default=usual["dense"], minimum=0)
    hidden = config.read_int("moe_intermediate_size", default=usual["hidden"])
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    count = config.read_int(*names, default=usual["experts"])
    active = config.read_int("num_experts_per_tok", default=usual["active"], maximum=count)
    number = config.read_int("n_shared_experts", default=usual["shared"], minimum=0)
    expert = replace(dense, hidden=hidden, bias="")
    shared = replace(dense, hidden=number * hidden) if number else None
    experts = ExpertsSpec(expert, count, active, shared, **routing)
    return [dense if layer < first else experts for layer in range(sizes.layers)]


def _deepseek(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Multi-head latent attention."""
    if sizes.kv != sizes.heads:
        config.fail(
            "num_key_value_heads differs from num_attention_heads",
            "give both alike: in MLA every query head has its own keys",
        )
    dim = config.read_head_dim("qk_nope_head_dim", default=128)
    rope_dim = config.read_head_dim("qk_rope_head_dim", default=64)
    rank = config.read_int("kv_lora_rank", default=512)
    query_rank = config.read_optional_int("q_lora_rank", default=1536)
    rope = RopeConfig(config, sizes.length)
    pairs = "interleaved"
    if config.family_name == "deepseek_v3":
        pairs = "interleaved" if config.read_bool("rope_interleave", True) else "half"
        names = ("num_nextn_predict_layers", "num_mtp_layers")
        if config.read_int(*names, default=0, minimum=0):
            config.add_note(
                "num_nextn_predict_layers: the multi-token prediction layers are left out, as in "
                "transformers"
            )
    default_scale = (dim + rope_dim) ** -0.5
    is_biased = config.read_bool("attention_bias", False)
    spec = design(
        model=sizes.model,
        heads=sizes.heads,
        dim=dim,
        vdim=config.read_head_dim("v_head_dim", default=128),
        pattern="causal()",
        project=Latent(rank=rank, rope=rope_dim, query_rank=query_rank),
        bias="o" if is_biased else "",
        similarity=make_dot(default_scale * rope.attention_mscale() ** 2, default_scale),
        modifiers=(rope.make_rotary(rope_dim, pairs),),
    )
    if not is_biased:
        return Extras(attention=rope.attention_with_limits(spec))
    ranks = {"project.q_down_bias": query_rank or 0, "project.kv_down_bias": rank + rope_dim}
    own = tuple((name, size) for name, size in ranks.items() if size)
    reason = "attention_bias adds biases to the latent vectors, which Latent lacks"
    return Extras(attention=ApproximateAttention(spec, reason, own))


# --- GPT-2, StarCoder (2305.06161), GPT-Neo, GPT-J, GPT-NeoX, OPT (2205.01068), Falcon, MPT -------

GPT = Decoder(
    "GPT2",
    *(768, 12, 12, None, 1024, 50257),
    keys=GPT_KEYS,
    refused=NO_CROSS_ATTENTION,
    act="gelu_new",
    eps=1e-5,
    norm="layer",
    bias="qkvo",
    feed_bias="ud",
    form="plain",
    tied=True,
    rope=None,
    positions={},
)


def _gpt2_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """Scores may be divided by the layer number, counted from 1."""
    default = sizes.dim**-0.5
    scale = default if config.read_bool("scale_attn_weights", True) else 1.0
    by_depth = config.read_bool("scale_attn_by_inverse_layer_idx", False)
    divisors = range(1, sizes.layers + 1) if by_depth else [1] * sizes.layers
    return [LayerKind(similarity=make_dot(scale / divisor, default)) for divisor in divisors]


def _gpt_bigcode(config: TransformersConfig, sizes: Sizes) -> Extras:
    is_scaled = config.read_bool("scale_attn_weights", True)
    return Extras(design={"similarity": Dot() if is_scaled else make_dot(1.0, sizes.dim**-0.5)})


def _one_or_all(config: TransformersConfig, heads: int) -> int:
    return 1 if config.read_bool("multi_query", True) else heads


def _gpt_neo_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """Expand `attention_types`, pairs of patterns and repeats."""
    window = config.read_int("window_size", default=256)
    entries: Any = config.values.get("attention_types")
    entries = entries or [[["global", "local"], sizes.layers // 2]]
    types = list[str]()
    try:
        for pattern, times in entries:
            types += list(pattern) * times
    except (TypeError, ValueError):
        config.fail(
            f"attention_types = {entries!r} is not a list of patterns with counts",
            "write it as in [[['global'], 2]]",
        )
    if len(types) != sizes.layers or set(types) - {"global", "local"}:
        config.fail(
            f"attention_types names {types!r} for {sizes.layers} layers",
            "name 'global' or 'local' for each",
        )
    patterns = {"global": "causal()", "local": f"window({window})"}
    return [LayerKind(patterns[kind], similarity=Dot(scale=1.0)) for kind in types]


def _gptj(config: TransformersConfig, sizes: Sizes) -> Extras:
    dims = config.read_optional_int("rotary_dim", default=64)
    if dims is None:
        config.fail(
            "rotary_dim = None would rotate more channels than a head has",
            "give at most the head dimension",
        )
    return Extras(
        modifiers=(Rotary(dims=None if dims == sizes.dim else dims, pairs="interleaved"),)
    )


def _gpt_neox_rope(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    theta = config.read_float("rotary_emb_base", default=10_000.0)
    part = config.read_float("rotary_pct", default=0.25)
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        config.require_default(
            name, value, "is not read by transformers, which reads rotary_emb_base and rotary_pct"
        )
    return {FULL_ATTENTION: RopeConfig(config, length, theta=theta, rotary_fraction=part)}


def _all_heads(config: TransformersConfig, heads: int) -> int:
    config.require_default(
        "num_key_value_heads", heads, "is not read by transformers in this family"
    )
    return heads


def _opt(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Norms precede the sublayers, or follow them in one size, which then has no final norm."""
    narrow = config.read_optional_int("word_embed_proj_dim") or sizes.model
    if narrow != sizes.model:
        config.fail(
            f"word_embed_proj_dim = {narrow} is not hidden_size = {sizes.model}, and token "
            "embeddings of another "
            "width are not described",
            "give a config with equal widths",
        )
    is_first = config.read_bool("do_layer_norm_before", True)
    is_removed = config.read_bool("_remove_final_layer_norm", False)
    return Extras(has_final_norm=is_first and not is_removed)


def _bloom(config: TransformersConfig, sizes: Sizes) -> Extras:
    reason = (
        "apply_residual_connection_post_layernorm adds to the normalised input, which "
        "BlockSpec lacks"
    )
    is_normed = config.read_bool("apply_residual_connection_post_layernorm", False)
    return Extras(
        modifiers=(Alibi(),),
        embedding={"norm": sizes.norm},
        unsupported=(UnsupportedPart(reason),) if is_normed else (),
    )


def _falcon_kv(config: TransformersConfig, heads: int) -> int:
    """num_kv_heads in the newer architecture, else one, or one per head."""
    if config.read_bool("new_decoder_architecture", False):
        kv = config.read_optional_int("num_kv_heads") or heads
    else:
        kv = _one_or_all(config, heads)
    if heads % kv:
        config.fail(
            f"num_attention_heads = {heads} is not a multiple of num_kv_heads = {kv}",
            "give a divisor",
        )
    return kv


def _falcon(config: TransformersConfig, sizes: Sizes) -> Extras:
    """The newer architecture has separate norms for attention and feed-forward."""
    is_newer = config.read_bool("new_decoder_architecture", False)
    norms = config.read_optional_int("num_ln_in_parallel_attn") or (2 if is_newer else 1)
    placement = "abreast" if is_newer and norms == 2 else "parallel"
    is_parallel = config.read_bool("parallel_attn", True)
    reason = "alibi adds 16-bit slopes before scores are scaled, which Alibi does not"
    return Extras(
        blocks={"placement": placement if is_parallel else "pre"},
        approximate=(reason,) if config.read_bool("alibi", False) else (),
    )


def _falcon_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    return [LayerKind(rope="alibi" if config.read_bool("alibi", False) else FULL_ATTENTION)] * (
        sizes.layers
    )


def _mpt(config: TransformersConfig, sizes: Sizes) -> Extras:
    """ALiBi applies whatever the config contains, as in transformers."""
    inner = config.read_table("attn_config") or TransformersConfig({}, config.source)
    default = sizes.dim**-0.5
    scale = inner.read_optional_float("softmax_scale") or default
    steepest = inner.read_int("alibi_bias_max", default=8)
    reasons = _read_clip(inner)
    if sizes.heads & (sizes.heads - 1) or steepest != 8:
        reasons = (
            f"alibi_bias_max = {steepest} over {sizes.heads} heads gives slopes other than Alibi's",
        )
    return Extras({"similarity": make_dot(scale, default)}, (Alibi(),), approximate=reasons)


# --- DCFormer and DCPythia (2405.08553): heads composed dynamically -------------------------------

DC_WINDOWS = {"LG": (256, None), "LGLL": (256, None, 256, 256), "LGL6": (256, None, *[256] * 6)}
DC_KEYS = GPT_KEYS | {
    "model": "dim",
    "heads": "n_head",
    "layers": "n_layer",
    "hidden": "intermediate_size",
    "length": "",
    "act": "",
    "eps": "norm_eps",
}
DC_REFUSED: dict[str, tuple[Any, str]] = {
    "use_dcmha": (True, "composes no heads in training, but the code does in inference"),
    "query_wise": (False, "leaves out the factors of keys in decoding alone"),
    "mgate": (False, "adds gates that are not described"),
}


def _dcformer_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """Windows of n keys as in the JAX code; without `window_type`, in every other layer."""
    if config.values.get("window_type") is None:
        period = (config.read_optional_int("window_size", default=256), None)
    else:
        period = DC_WINDOWS[config.read_choice("window_type", "LG", DC_WINDOWS)]
    windows = [period[layer % len(period)] for layer in range(sizes.layers)]
    return [LayerKind("causal()" if window is None else f"window({window})") for window in windows]


def _dcformer(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Heads composed before and after the softmax."""
    dim, heads = sizes.dim, sizes.heads
    config.require_default(
        "head_dim", dim, f"is not dim / n_head = {dim}, which the published code uses"
    )
    if config.values.get("n_local_heads") not in (None, -1, heads):
        config.require_default(
            "n_local_heads", heads, f"is not n_head = {heads}; the published code shares no keys"
        )
    theta = 500_000.0
    dims = dim
    if config.family_name == "dcpythia":
        theta = 10_000.0
        dims = int(dim * config.read_float("rotary_pct", default=0.25))
    base = config.read_float("rope_base", default=theta)
    rotary = Rotary(base=base, dims=None if dims == dim else dims)
    norms = (QKNorm(eps=1e-6),) if config.read_bool("use_qk_norm", False) else ()
    return Extras(modifiers=(*norms, rotary, Dynamic(), Dynamic(on="weights")))


def _dcformer_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    """By default 8/3 of the model's width, rounded up to a multiple of 256."""
    hidden = config.read_optional_int("intermediate_size")
    hidden = hidden or -(-int(8 * sizes.model / 3) // 256) * 256
    return [replace(feed, hidden=hidden)] * sizes.layers


DCFORMER = Decoder(
    "DCFormer",
    *(2560, 32, 32, None, 0, 32000),
    keys=DC_KEYS,
    refused=DC_REFUSED,
    eps=1e-5,
    rope=None,
    tasks={"": "ForCausalLM"},
    layers_of=_dcformer_layers,
    feeds_of=_dcformer_feeds,
    extras=_dcformer,
)

# --- All families, by their model_type ------------------------------------------------------------

PARALLEL = "use_parallel_residual"

register_decoders(
    {
        "llama": replace(LLAMA, feed_bias=Switch("mlp_bias", False, "ugd")),
        "mistral": Decoder(
            "Mistral", 4096, 32, 32, 14336, 131072, 32000, kv=8, layers_of=one_window(4096)
        ),
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "granite": replace(
            LLAMA, prefix="Granite", feed_bias=Switch("mlp_bias", False, "ugd"), extras=_granite
        ),
        "smollm3": Decoder(
            "SmolLM3",
            *(2048, 16, 36, 11008, 32768, 128256),
            kv=4,
            bias=BIASED,
            feed_bias=Switch("mlp_bias", False, "ugd"),
            tied=True,
            rope={"theta": 2_000_000.0},
            layers_of=_smollm3_layers,
        ),
        "mixtral": Decoder(
            "Mixtral",
            *(4096, 32, 32, 14336, 131072, 32000),
            kv=8,
            eps=1e-5,
            rope={"theta": 1_000_000.0},
            layers_of=one_window(),
            feeds_of=_mixtral_feeds,
        ),
        "qwen2_moe": replace(
            QWEN2,
            prefix="Qwen2Moe",
            model=2048,
            heads=16,
            kv=16,
            layers=24,
            hidden=5632,
            bias=Switch("qkv_bias", True, "qkv"),
            feeds_of=_qwen2_moe_feeds,
            extras=_qwen2_moe,
        ),
        "qwen3_moe": Decoder(
            "Qwen3Moe",
            *(2048, 32, 24, 6144, 32768, 151936),
            kv=4,
            bias=BIASED,
            qk_norm={},
            layers_of=one_window(4096, "use_sliding_window"),
            feeds_of=_qwen3_moe_feeds,
        ),
        "gpt_oss": Decoder(
            "GptOss",
            *(2880, 64, 36, 2880, 131072, 201088),
            kv=8,
            dim=64,
            keys={"act": ""},
            refused={"hidden_act": ("silu", "is not the activation of its experts")},
            eps=1e-5,
            bias=Switch("attention_bias", True, "qkvo"),
            rope={"theta": 150_000.0, "default": GPT_OSS_YARN},
            layers_of=by_layer_type(alternate, 128),
            feeds_of=_gpt_oss_feeds,
            extras=lambda config, sizes: Extras({"normaliser": SinkSoftmax()}),
        ),
        "cohere": COHERE,
        "cohere2": replace(
            COHERE,
            prefix="Cohere2",
            rope={},
            layers_of=by_layer_type(full_every(4), without_rope=FULL_ATTENTION),
        ),
        "stablelm": Decoder(
            "StableLm",
            *(2560, 32, 32, 6912, 4096, 50304),
            kv=32,
            keys=LAYER_NORM,
            eps=1e-5,
            norm="layer",
            bias=Switch("use_qkv_bias", False, "qkv"),
            placement=Switch(PARALLEL, False, "parallel", "pre"),
            rope={"rotary_fraction": 0.25},
            extras=_stablelm,
        ),
        "starcoder2": Decoder(
            "Starcoder2",
            *(3072, 24, 30, 12288, 4096, 49152),
            kv=2,
            keys={"eps": "norm_epsilon"},
            act="gelu_pytorch_tanh",
            eps=1e-5,
            norm="layer",
            bias=Switch("use_bias", True, "qkvo"),
            feed_bias=Switch("use_bias", True, "ud"),
            form="plain",
            tied=True,
            layers_of=one_window(),
        ),
        "phi": Decoder(
            "Phi",
            *(2048, 32, 24, 8192, 2048, 51200),
            keys=LAYER_NORM,
            act="gelu_new",
            eps=1e-5,
            norm="layer",
            bias="qkvo",
            feed_bias="ud",
            form="plain",
            placement="parallel",
            head_bias="learned",
            rope={"rotary_fraction": 0.5},
            extras=_phi,
        ),
        "phi3": Decoder(
            "Phi3",
            *(3072, 32, 32, 8192, 4096, 32064),
            keys={"length": ""},
            eps=1e-5,
            ropes=_phi3_rope,
            layers_of=one_window(),
        ),
        "glm": GLM,
        "glm4": replace(GLM, prefix="Glm4", placement="sandwich"),
        "olmo": OLMO,
        "olmo2": OLMO2,
        "olmo3": replace(
            OLMO2,
            prefix="Olmo3",
            ropes=_olmo3_ropes,
            layers_of=by_layer_type(full_every(4, key="")),
            extras=None,
        ),
        "olmoe": replace(
            OLMO2,
            prefix="Olmoe",
            model=2048,
            heads=16,
            layers=16,
            hidden=2048,
            length=4096,
            placement="pre",
            feeds_of=_olmoe_feeds,
        ),
        "gemma": replace(GEMMA, feeds_of=_gemma_feeds),
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3,
        "deepseek_v2": Decoder(
            "DeepseekV2",
            *(4096, 32, 32, 11008, 2048, 102400),
            keys={"dim": "qk_nope_head_dim"},
            dim=128,
            refused=KEPT_EXPERTS
            | {
                "norm_topk_prob": (False, UNREAD_ROUTING),
                "scoring_func": ("softmax", UNREAD_ROUTING),
            },
            feed_bias=Switch("mlp_bias", False, "ugd"),
            feeds_of=_deepseek_feeds,
            extras=_deepseek,
        ),
        "deepseek_v3": Decoder(
            "DeepseekV3",
            *(7168, 128, 61, 18432, 4096, 129280),
            keys={"dim": "qk_nope_head_dim"},
            dim=128,
            refused=KEPT_EXPERTS
            | {
                "topk_method": ("noaux_tc", UNREAD_ROUTING),
                "scoring_func": ("sigmoid", UNREAD_ROUTING),
            },
            feeds_of=_deepseek_feeds,
            extras=_deepseek,
        ),
        "gpt2": replace(GPT, layers_of=_gpt2_layers, default_task="LMHeadModel"),
        "gpt_bigcode": replace(
            GPT, prefix="GPTBigCode", act="gelu_pytorch_tanh", kv=_one_or_all, extras=_gpt_bigcode
        ),
        "gpt_neo": replace(
            GPT,
            prefix="GPTNeo",
            model=2048,
            heads=16,
            layers=24,
            length=2048,
            keys=GPT_KEYS
            | {
                "model": "hidden_size",
                "heads": "num_heads num_attention_heads",
                "layers": "num_layers num_hidden_layers",
                "hidden": "intermediate_size",
                "length": "max_position_embeddings",
            },
            refused={},
            bias="o",
            layers_of=_gpt_neo_layers,
        ),
        "gptj": replace(
            GPT,
            prefix="GPTJ",
            model=4096,
            heads=16,
            layers=28,
            tokens=50400,
            keys=GPT_KEYS | {"length": ""},
            refused={},
            bias="",
            placement="parallel",
            tied=False,
            head_bias="learned",
            positions=None,
            extras=_gptj,
        ),
        "gpt_neox": Decoder(
            "GPTNeoX",
            *(6144, 64, 44, 24576, 2048, 50432),
            kv=_all_heads,
            keys=LAYER_NORM,
            act="gelu",
            eps=1e-5,
            norm="layer",
            bias=Switch("attention_bias", True, "qkvo"),
            feed_bias="ud",
            form="plain",
            placement=Switch(PARALLEL, True, "abreast", "pre"),
            ropes=_gpt_neox_rope,
        ),
        "opt": Decoder(
            "OPT",
            *(768, 12, 12, 3072, 2048, 50272),
            kv=_all_heads,
            keys={"hidden": "ffn_dim", "act": "activation_function", "eps": ""},
            refused={
                "layer_norm_elementwise_affine": (
                    True,
                    "removes the weights of norms, which is not described",
                )
            },
            act="relu",
            eps=1e-5,
            norm="layer",
            bias=Switch("enable_bias", True, "qkvo"),
            feed_bias=Switch("enable_bias", True, "ud"),
            form="plain",
            placement=Switch("do_layer_norm_before", True, "pre", "post"),
            tied=True,
            rope=None,
            positions={"skipped": 2},
            extras=_opt,
        ),
        "bloom": replace(
            GPT,
            prefix="Bloom",
            model=64,
            heads=8,
            layers=2,
            tokens=250880,
            keys=GPT_KEYS | {"model": "n_embed hidden_size", "hidden": "", "length": "", "act": ""},
            refused={},
            act="gelu_tanh",
            positions=None,
            extras=_bloom,
        ),
        "falcon": Decoder(
            "Falcon",
            *(4544, 71, 32, None, 2048, 65024),
            kv=_falcon_kv,
            keys={
                "model": "n_embed hidden_size",
                "dim": "",
                "hidden": "ffn_hidden_size",
                "act": "activation",
                "eps": "layer_norm_epsilon",
            },
            act="gelu",
            eps=1e-5,
            norm="layer",
            bias=Switch("bias", False, "qkvo"),
            feed_bias=Switch("bias", False, "ud"),
            form="plain",
            tied=True,
            layers_of=_falcon_layers,
            extras=_falcon,
        ),
        "mpt": replace(
            GPT,
            prefix="Mpt",
            model=2048,
            heads=16,
            layers=24,
            tokens=50368,
            keys=GPT_KEYS
            | {
                "model": "d_model hidden_size",
                "heads": "n_heads num_attention_heads",
                "layers": "n_layers num_hidden_layers",
                "hidden": "",
                "length": "",
                "act": "",
            },
            refused={},
            act="gelu",
            norm="unbiased",
            bias="",
            feed_bias="",
            positions=None,
            extras=_mpt,
        ),
        "dcformer": DCFORMER,
        "dcpythia": replace(
            DCFORMER,
            prefix="DCPythia",
            act="gelu",
            norm="layer",
            bias=Switch("use_linear_bias", True, "qkvo"),
            feed_bias=Switch("use_linear_bias", True, "ud"),
            form="plain",
            placement=Switch(PARALLEL, True, "abreast", "pre"),
        ),
    }
)

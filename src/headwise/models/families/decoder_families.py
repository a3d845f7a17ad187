"""Code of families of decoders beyond their tables in families.toml: layers, feed-forwards, RoPE
and other settings read by a function.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...attention.parts.dot_product import DotProduct, Softcap
from ...attention.parts.dynamic_composition import DynamicComposition
from ...attention.parts.latent_attention import MLAProjection
from ...attention.parts.relative_position_bias import Alibi
from ...attention.parts.rms_norms import QKNorm
from ...attention.parts.rotary_embedding import Rotary
from ...attention.parts.softmax import SinkSoftmax
from ...attention.presets import design
from ..model_spec import (
    ExpertsSpec,
    FeedForwardSpec,
)
from .attention_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    RopeConfig,
    make_dot,
    read_ropes_by_layer_type,
)
from .config_reader import TransformersConfig
from .decoders import (
    Decoder,
    Extras,
    FeedReader,
    LayerFeed,
    LayerKind,
    Sizes,
    build_decoder,
    family_function,
    make_layer_kinds,
    register_families,
)

EXPERT_KEYS = ("num_experts", "num_local_experts")

# --- Llama (2302.13971), Qwen 2 (2407.10671), Granite, SmolLM3 (2305.19466) -----------------------


@family_function
def qwen_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """With windows, the first `max_window_layers` stay full."""
    is_on = config.read_bool("use_sliding_window", False)
    window = config.read_optional_int("sliding_window", default=4096) if is_on else None
    first = config.read_int("max_window_layers", default=28, minimum=0)
    types = [
        SLIDING_ATTENTION if window and layer >= first else FULL_ATTENTION
        for layer in range(sizes.layers)
    ]
    return make_layer_kinds(config, types, window)


@family_function
def granite(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Scaled embeddings, attention scores, residual branches and logits."""
    scale = config.read_float("attention_multiplier", default=1.0)
    return Extras(
        design={"similarity": make_dot(scale, sizes.dim**-0.5)},
        blocks={"scale": config.read_float("residual_multiplier", default=1.0)},
        embedding={"scale": config.read_float("embedding_multiplier", default=1.0)},
        head={"scale": 1 / config.read_float("logits_scaling", default=1.0)},
    )


@family_function
def smollm3_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """Layers without RoPE, which have no window either."""
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


@family_function
def experts(
    count: int, active: int, scores: str = "", hidden: int = 0, sparse: bool = False
) -> FeedReader:
    """Feed-forwards of experts, with these defaults.

    Without `scores` they are a softmax over all experts, or over the chosen ones if
    `norm_topk_prob` is set. If `hidden` is not 0, it is the default width of an expert. `sparse`:
    only every `decoder_sparse_step`-th layer has experts, and `mlp_only_layers` have none.
    """

    def read(config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec) -> list[LayerFeed]:
        one = feed
        if hidden:
            one = replace(feed, hidden=config.read_int("moe_intermediate_size", default=hidden))
        scoring = scores
        if not scoring:
            scoring = "softmax_of_top_k" if config.read_bool("norm_topk_prob", False) else "softmax"
        number = config.read_int(*EXPERT_KEYS, default=count)
        chosen = config.read_int("num_experts_per_tok", default=active, maximum=number)
        spec = ExpertsSpec(one, number, chosen, scores=scoring)
        if not sparse:
            return [spec] * sizes.layers
        step = config.read_int("decoder_sparse_step", default=1)
        dense = config.read_list("mlp_only_layers") or []
        return [
            feed if layer in dense or (layer + 1) % step else spec for layer in range(sizes.layers)
        ]

    return read


@family_function
def gpt_oss_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    """The gate and up projections of an expert are clipped before they are multiplied."""
    gain = config.read_float("swiglu_alpha", default=1.702)
    limit = config.read_float("swiglu_limit", default=7.0)
    expert = FeedForwardSpec(feed.hidden, f"bounded_silu({gain}, {limit})", "gated", bias="ugd")
    count = config.read_int("num_local_experts", "num_experts", default=128)
    active = config.read_int("num_experts_per_tok", default=4, maximum=count)
    return [
        ExpertsSpec(expert, count, active, scores="softmax_of_top_k", bias="learned")
    ] * sizes.layers


@family_function
def gpt_oss(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Every head has a sink."""
    return Extras({"normaliser": SinkSoftmax()})


# --- Command R, StableLM, Phi (2306.11644), Phi-3 (2404.14219) ------------------------------------


@family_function
def cohere(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Scaled logits."""
    if config.family_name == "cohere":
        reason = (
            "subtracts the mean from queries and keys and has weights per head, which QKNorm lacks"
        )
        config.require_default("use_qk_norm", False, reason)
    return Extras(head={"scale": config.read_float("logit_scale", default=0.0625)})


@family_function
def phi3_rope(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    """Early files call longrope "yarn"; transformers reads them in this way too."""
    length = config.read_int("original_max_position_embeddings", default=4096)
    rope = RopeConfig(config, length, rotary_fraction=1.0)
    if rope.rope_type == "yarn":
        rope.rope_type = "su"
    return {FULL_ATTENTION: rope}


# --- OLMo (2402.00838) and OLMo 3 -----------------------------------------------------------------


@family_function
def olmo3_ropes(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    """The key rope_theta is for full attention."""
    full = config.read_float("rope_theta", default=500_000.0)
    thetas = {FULL_ATTENTION: full, SLIDING_ATTENTION: 500_000.0}
    return read_ropes_by_layer_type(config, length, thetas)


# --- Gemma 1 to 3 (2403.08295, 2408.00118, 2503.19786): norm weights stored minus one -------------


def _scaled(config: TransformersConfig, sizes: Sizes, cap: float | None) -> Extras:
    scale = config.read_float("query_pre_attn_scalar", default=256) ** -0.5
    return Extras(
        design={"similarity": make_dot(scale, sizes.dim**-0.5)},
        embedding={"scale": sizes.model**0.5},
        head={"cap": cap},
    )


def _read_cap(config: TransformersConfig, name: str, default: float | None) -> float | None:
    is_off = config.find_key([name], default)[1] is None
    return None if is_off else config.read_float(name, default=default or 1.0)


@family_function
def gemma(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Scaled embeddings."""
    return Extras(embedding={"scale": sizes.model**0.5})


@family_function
def gemma2(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Soft caps of scores and logits."""
    cap = _read_cap(config, "attn_logit_softcapping", 50.0)
    extras = _scaled(config, sizes, _read_cap(config, "final_logit_softcapping", 30.0))
    extras.modifiers = (Softcap(cap),) if cap else ()
    return extras


@family_function
def gemma3(config: TransformersConfig, sizes: Sizes) -> Extras:
    """As Gemma 2 without soft caps, unless one of the logits is set."""
    return _scaled(config, sizes, _read_cap(config, "final_logit_softcapping", None))


@family_function
def gemma3_ropes(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    """Layers with a window have another base."""
    thetas = {
        FULL_ATTENTION: config.read_float("rope_theta", default=1_000_000.0),
        SLIDING_ATTENTION: config.read_float("rope_local_base_freq", default=10_000.0),
    }
    return read_ropes_by_layer_type(config, length, thetas)


@family_function
def gemma_feeds(config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec) -> list[LayerFeed]:
    """transformers treats "gelu" as the tanh approximation."""
    act = "gelu_tanh" if feed.activation == "gelu" else feed.activation
    return [replace(feed, activation=act)] * sizes.layers


# --- DeepSeek-V2 (2405.04434) and V3 (2412.19437): latent attention, experts after dense layers ---


DEEPSEEK_EXPERTS: dict[str, dict[str, int]] = {
    "deepseek_v2": {"dense": 0, "experts": 64, "active": 6, "hidden": 1407, "shared": 2},
    "deepseek_v3": {"dense": 3, "experts": 256, "active": 8, "hidden": 2048, "shared": 1},
}


def _read_groups(config: TransformersConfig, groups: int, active: int) -> dict[str, int]:
    """The number of groups of experts, and of those that each token may use."""
    return {
        "groups": config.read_int("n_group", default=groups),
        "top_k_groups": config.read_int("topk_group", default=active),
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


@family_function
def deepseek_feeds(
    config: TransformersConfig, sizes: Sizes, dense: FeedForwardSpec
) -> list[LayerFeed]:
    """Experts after `first_k_dense_replace` dense layers."""
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


@family_function
def deepseek(config: TransformersConfig, sizes: Sizes) -> Extras:
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
    reason = "adds biases to the latent vectors, which MLAProjection lacks"
    config.require_default("attention_bias", False, reason)
    spec = design(
        model=sizes.model,
        heads=sizes.heads,
        dim=dim,
        vdim=config.read_head_dim("v_head_dim", default=128),
        pattern="causal()",
        project=MLAProjection(rank=rank, rope=rope_dim, query_rank=query_rank),
        similarity=make_dot(default_scale * rope.attention_mscale() ** 2, default_scale),
        modifiers=(rope.make_rotary(rope_dim, pairs),),
    )
    return Extras(attention=spec)


# --- GPT-2, GPT-Neo, GPT-J, GPT-NeoX, OPT (2205.01068), BLOOM -------------------------------------


@family_function
def gpt2_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """Scores may be divided by the layer number, counted from 1."""
    default = sizes.dim**-0.5
    scale = default if config.read_bool("scale_attn_weights", True) else 1.0
    by_depth = config.read_bool("scale_attn_by_inverse_layer_idx", False)
    divisors = range(1, sizes.layers + 1) if by_depth else [1] * sizes.layers
    return [LayerKind(similarity=make_dot(scale / divisor, default)) for divisor in divisors]


@family_function
def gpt_neo_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
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
    return [LayerKind(patterns[kind], similarity=DotProduct(scale=1.0)) for kind in types]


@family_function
def gptj(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Interleaved RoPE on `rotary_dim` channels."""
    dims = config.read_optional_int("rotary_dim", default=64)
    if dims is None:
        config.fail(
            "rotary_dim = None would rotate more channels than a head has",
            "give at most the head dimension",
        )
    return Extras(
        modifiers=(Rotary(dims=None if dims == sizes.dim else dims, pairs="interleaved"),)
    )


@family_function
def gpt_neox_rope(config: TransformersConfig, length: int) -> dict[str, RopeConfig]:
    """RoPE with GPT-NeoX's own config keys."""
    theta = config.read_float("rotary_emb_base", default=10_000.0)
    part = config.read_float("rotary_pct", default=0.25)
    for name, value in (("rope_theta", theta), ("partial_rotary_factor", part)):
        config.require_default(
            name, value, "is not read by transformers, which reads rotary_emb_base and rotary_pct"
        )
    return {FULL_ATTENTION: RopeConfig(config, length, theta=theta, rotary_fraction=part)}


@family_function
def all_heads(config: TransformersConfig, heads: int) -> int:
    """One key-value head per query head."""
    config.require_default(
        "num_key_value_heads", heads, "is not read by transformers in this family"
    )
    return heads


@family_function
def opt(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Norms precede the sublayers, or follow them in one size, which then has no final norm."""
    narrow = config.read_optional_int("word_embed_proj_dim") or sizes.model
    if narrow != sizes.model:
        config.refuse(
            f"word_embed_proj_dim = {narrow} is not hidden_size = {sizes.model}, and token "
            "embeddings of another "
            "width are not described",
            "give a config with equal widths",
        )
    is_first = config.read_bool("do_layer_norm_before", True)
    is_removed = config.read_bool("_remove_final_layer_norm", False)
    return Extras(has_final_norm=is_first and not is_removed)


@family_function
def bloom(config: TransformersConfig, sizes: Sizes) -> Extras:
    """ALiBi, and a norm of the embeddings."""
    return Extras(modifiers=(Alibi(),), embedding={"norm": sizes.norm})


# --- DCFormer and DCPythia (2405.08553): heads composed dynamically -------------------------------


DC_WINDOWS = {"LG": (256, None), "LGLL": (256, None, 256, 256), "LGL6": (256, None, *[256] * 6)}


@family_function
def dcformer_layers(config: TransformersConfig, sizes: Sizes) -> list[LayerKind]:
    """Windows of n keys as in the JAX code; without `window_type`, in every other layer."""
    if config.values.get("window_type") is None:
        period = (config.read_optional_int("window_size", default=256), None)
    else:
        period = DC_WINDOWS[config.read_choice("window_type", "LG", DC_WINDOWS)]
    windows = [period[layer % len(period)] for layer in range(sizes.layers)]
    return [LayerKind("causal()" if window is None else f"window({window})") for window in windows]


@family_function
def dcformer(config: TransformersConfig, sizes: Sizes) -> Extras:
    """Heads composed before and after the softmax."""
    dim = sizes.dim
    heads = sizes.heads
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
    return Extras(
        modifiers=(*norms, rotary, DynamicComposition(), DynamicComposition(on="weights"))
    )


@family_function
def dcformer_feeds(
    config: TransformersConfig, sizes: Sizes, feed: FeedForwardSpec
) -> list[LayerFeed]:
    """By default 8/3 of the model's width, rounded up to a multiple of 256."""
    hidden = config.read_optional_int("intermediate_size")
    hidden = hidden or -(-int(8 * sizes.model / 3) // 256) * 256
    return [replace(feed, hidden=hidden)] * sizes.layers


register_families("decoders", Decoder, build_decoder)

"""Families of decoders: Llama and its relatives, and mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_spec import (
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    UnsupportedPart,
)
from ..parts.softcap import Softcap
from ..parts.softmax import SinkSoftmax
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
    LAYER_NORM,
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
    return Extras(approximate=read_clip(config))


def read_clip(config: TransformersConfig) -> tuple[str, ...]:
    """Return why clip_qkv makes the attention approximate, or () without it."""
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
    }
)

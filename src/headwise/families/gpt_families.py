"""Families of decoders: GPT-2 and its relatives, and DCFormer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_spec import (
    FeedForwardSpec,
    UnsupportedPart,
)
from ..parts.dot_product import Dot
from ..parts.dynamic_composition import Dynamic
from ..parts.relative_position_bias import Alibi
from ..parts.rms_norms import QKNorm
from ..parts.rotary_embedding import Rotary
from .attention_config import (
    FULL_ATTENTION,
    RopeConfig,
    make_dot,
)
from .config_reader import TransformersConfig
from .decoder_families import PARALLEL, read_clip
from .decoders import (
    GPT_KEYS,
    LAYER_NORM,
    NO_CROSS_ATTENTION,
    Decoder,
    Extras,
    LayerFeed,
    LayerKind,
    Sizes,
    Switch,
    register_decoders,
)

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
    reasons = read_clip(inner)
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

register_decoders(
    {
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

"""DCFormer and DCPythia: decoders whose attention heads are composed dynamically (2405.08553)."""

from __future__ import annotations

from dataclasses import replace

from ..masking.patterns import Window
from ..model_spec import FeedForwardSpec, ModelSpec, NormSpec
from ..parts.dynamic_composition import Dynamic
from ..parts.rms_norms import QKNorm
from ..parts.rotary_embedding import Rotary
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import model_builders
from .config_reader import TransformersConfig, register_family
from .weight_names import TensorLocation, WeightNames

WINDOW_TYPES = {"LG": (256, None), "LGLL": (256, None, 256, 256), "LGL6": (256, None, *[256] * 6)}
NORM_EPS = 1e-6  # of queries and keys


@register_family("dcformer", "DCFormer")
def read_dcformer(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DCFormer: RMSNorm, gated feed-forwards, and windows in some layers, of n keys as in the
    JAX code.
    """
    model = config.read_int("dim", default=2560)
    feed = FeedForwardSpec(_read_hidden(config, model), "silu", "gated")
    return _build(config, task, _read_attentions(config, 500_000.0, 1.0), feed, "rms", "pre")


@register_family("dcpythia", "DCPythia")
def read_dcpythia(config: TransformersConfig, task: str) -> ModelSpec:
    """Read DCPythia: LayerNorm, biases, partial RoPE, and feed-forwards beside the attention."""
    model, biased = config.read_int("dim", default=2560), config.read_bool("use_linear_bias", True)
    attentions = _read_attentions(
        config, 10_000.0, config.read_float("rotary_pct", default=0.25), biased=biased
    )
    feed = FeedForwardSpec(_read_hidden(config, model), "gelu", bias="ud" if biased else "")
    placement = "abreast" if config.read_bool("use_parallel_residual", True) else "pre"
    return _build(config, task, attentions, feed, "layer", placement)


def _read_hidden(config: TransformersConfig, model: int) -> int:
    """The width of the feed-forward: by default 8/3 of the model's, rounded up to a multiple of
    256.
    """
    return config.read_optional_int("intermediate_size") or -(-int(8 * model / 3) // 256) * 256


def _read_attentions(
    config: TransformersConfig, theta: float, rotary_fraction: float, *, biased: bool = False
) -> list[AttentionSpec]:
    """The attention of each layer: windows in some, heads composed before and after the softmax in
    all.
    """
    model, heads = config.read_int("dim", default=2560), config.read_num_heads("n_head", default=32)
    dim = config.resolve_head_dim(model, heads)
    config.require_default(
        "use_dcmha", True, "composes no heads in training, but the code does in inference"
    )
    config.require_default("query_wise", False, "leaves out the factors of keys in decoding alone")
    config.require_default("mgate", False, "adds gates that are not described")
    config.require_default(
        "head_dim", dim, f"is not dim / n_head = {dim}, which the published code uses"
    )
    if config.values.get("n_local_heads") not in (None, -1, heads):
        config.require_default(
            "n_local_heads", heads, f"is not n_head = {heads}; the published code shares no keys"
        )
    normed = (QKNorm(eps=NORM_EPS),) if config.read_bool("use_qk_norm", False) else ()
    rotated = int(dim * rotary_fraction)
    rotary = Rotary(
        base=config.read_float("rope_base", default=theta), dims=None if rotated == dim else rotated
    )
    spec = design(
        model=model,
        heads=heads,
        pattern="causal()",
        bias="qkvo" if biased else "",
        modifiers=(*normed, rotary, Dynamic(), Dynamic(on="weights")),
    )
    windows = _read_windows(config)
    return [spec if window is None else replace(spec, pattern=Window(window)) for window in windows]


def _read_windows(config: TransformersConfig) -> list[int | None]:
    """The window of each layer, None for all tokens; without `window_type`, every other layer has
    one.
    """
    layers = config.read_num_layers("n_layer", default=32)
    if config.values.get("window_type") is None:
        period = (config.read_optional_int("window_size", default=256), None)
    else:
        period = WINDOW_TYPES[config.read_choice("window_type", "LG", WINDOW_TYPES)]
    return [period[layer % len(period)] for layer in range(layers)]


def _build(
    config: TransformersConfig,
    task: str,
    attentions: list[AttentionSpec],
    feed: FeedForwardSpec,
    norm_kind: str,
    placement: str,
) -> ModelSpec:
    norm = NormSpec(norm_kind, config.read_float("norm_eps", default=1e-5))
    blocks = model_builders.make_blocks(attentions, feed, norm, placement=placement)
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=32000))
    return model_builders.build_decoder(config, task or "ForCausalLM", blocks, norm, ends)


# --- Names of tensors -----------------------------------------------------------------------------

LAYER, FILE_LAYER = "decoder.{layer}", "layers.{layer}"
FUSED, COMPOSE = f"{FILE_LAYER}.attention.wqkv", f"{FILE_LAYER}.attention.dyn_w_proj"
BRANCHES = (("dynamic", "query"), ("dynamic", "key"), ("dynamic_2", "query"), ("dynamic_2", "key"))


def name_composition() -> dict[str, TensorLocation]:
    """Map the factors of both compositions to the branches of the stored tensors: one group, four
    branches.
    """
    rows: dict[str, TensorLocation] = {}
    for branch, (part, side) in enumerate(BRANCHES):
        ours, width = f"{LAYER}.attention.{part}.{side}", "model" if side == "query" else "source"
        head = "q" if part == "dynamic" else "out"
        fixed, sizes = {"group": 0, "branch": branch}, {"group": 1, "branch": 4}
        rows[f"{ours}_hidden"] = TensorLocation(
            f"{COMPOSE}.dw1", f"{width} group branch (q unit)", fixed, sizes
        )
        rows[f"{ours}_gate"] = TensorLocation(
            f"{COMPOSE}.dd", f"{width} group (branch {head})", fixed, sizes
        )
        for place, (factor, axis) in enumerate((("source", "q"), ("target", head))):
            rows[f"{ours}_{factor}"] = TensorLocation(
                f"{COMPOSE}.qkw",
                f"group branch hidden (factor rank) {axis}",
                {**fixed, "factor": place},
                {**sizes, "factor": 2},
            )
    return rows


def name_fused() -> dict[str, TensorLocation]:
    """Map queries, keys and values to their rows of the fused projection."""
    rows: dict[str, TensorLocation] = {}
    for place, (side, heads, dim, width) in enumerate(
        (("q", "q", "dim", "model"), ("k", "kv", "dim", "source"), ("v", "kv", "vdim", "source"))
    ):
        ours, at, sides = f"{LAYER}.attention.project.{side}", {"qkv": place}, {"qkv": 3}
        rows[ours] = TensorLocation(f"{FUSED}.weight", f"(qkv {heads} {dim}) {width}", at, sides)
        rows[f"{ours}_bias"] = TensorLocation(f"{FUSED}.bias", f"(qkv {heads} {dim})", at, sides)
    return rows


def make_weight_names(family: str, feed: dict[str, str]) -> WeightNames:
    """The table of one family; `feed` maps our tensors of the feed-forward to its own."""
    names = {
        "attention.qk_norm.q": "attention.q_norm.scale",
        "attention.qk_norm.k": "attention.k_norm.scale",
        "attention.output.o": "attention.wo.weight",
        "attention.output.o_bias": "attention.wo.bias",
        "attention_norm.weight": "attention_norm.weight",
        "attention_norm.bias": "attention_norm.bias",
        "feed_norm.weight": "ffn_norm.weight",
        "feed_norm.bias": "ffn_norm.bias",
        **{f"feed.{ours}": f"feed_forward.{theirs}" for ours, theirs in feed.items()},
    }
    return WeightNames(
        families=(family,),
        locations={
            "decoder.embedding.tokens": "tok_embeddings.weight",
            **name_fused(),
            **name_composition(),
            **{f"{LAYER}.{ours}": f"{FILE_LAYER}.{theirs}" for ours, theirs in names.items()},
            "decoder.norm.weight": "norm.weight",
            "decoder.norm.bias": "norm.bias",
            "head.tokens.weight": "output.weight",
        },
        # Joined copies that the published code makes of the factors, identities, and caches.
        ignored=(r"dyn_w_proj\.(dw_m|qkw_m|(pre|post)_proj\.w)$", r"attention\.kv_cache\."),
    )


DCFORMER_WEIGHTS = make_weight_names(
    "dcformer", {"gate": "w1.weight", "up": "w3.weight", "down": "w2.weight"}
)
DCPYTHIA_WEIGHTS = make_weight_names(
    "dcpythia",
    {"up": "w1.weight", "up_bias": "w1.bias", "down": "w2.weight", "down_bias": "w2.bias"},
)

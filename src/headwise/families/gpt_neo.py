"""GPT-Neo (unscaled scores, a sliding window in every other layer), GPT-J, GPT-NeoX and Pythia."""

from __future__ import annotations

from typing import Any

from ..model_spec import FeedForwardSpec, ModelSpec, NormSpec, PositionSpec
from ..parts.dot_product import Dot
from ..parts.rotary_embedding import Rotary
from ..presets import design
from . import model_builders
from .attention_config import RopeConfig
from .config_reader import TransformersConfig, register_family
from .weight_names import TensorLocation, WeightNames


@register_family("gpt_neo", "GPTNeo")
def read_gpt_neo(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-Neo; of the attention projections only the output has a bias."""
    model = config.read_int("hidden_size", default=2048)
    heads = config.read_num_heads("num_heads", "num_attention_heads", default=16)
    layers = config.read_num_layers("num_layers", "num_hidden_layers", default=24)
    config.resolve_head_dim(model, heads)
    window = config.read_int("window_size", default=256)
    patterns = {"global": "causal()", "local": f"window({window})"}
    design_args: dict[str, Any] = {"model": model, "heads": heads, "bias": "o", "similarity": Dot(scale=1.0)}
    attentions = model_builders.make_attentions(
        _read_attention_types(config, layers), lambda kind: design(**design_args, pattern=patterns[kind])
    )
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("intermediate_size") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=2048))
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=50257), True, positions=positions)
    return model_builders.build_decoder(config, task, model_builders.make_blocks(attentions, feed, norm), norm, ends)


def _read_attention_types(config: TransformersConfig, layers: int) -> list[str]:
    """Expand `attention_types`, pairs of patterns and repeats, to "global" or "local" for each layer."""
    entries: Any = config.values.get("attention_types") or [[["global", "local"], layers // 2]]
    try:
        types = [kind for pattern, times in entries for _ in range(times) for kind in pattern]
    except (TypeError, ValueError):
        config.fail(
            f"attention_types = {entries!r} is not a list of patterns with counts", "write it as in [[['global'], 2]]"
        )
    if len(types) != layers or set(types) - {"global", "local"}:
        config.fail(f"attention_types names {types!r} for {layers} layers", "name 'global' or 'local' for each")
    return types


# --- GPT-J ---------------------------------------------------------------------------------------------


@register_family("gptj", "GPTJ")
def read_gptj(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-J: no biases in the attention, a bias in the language-model head."""
    model = config.read_int("n_embd", "hidden_size", default=4096)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=16)
    dim = config.resolve_head_dim(model, heads)
    rotary_dim = config.read_optional_int("rotary_dim", default=64)
    if rotary_dim is None:
        config.fail("rotary_dim = None would rotate more channels than a head has", "give at most the head dimension")
    rotary = Rotary(dims=None if rotary_dim == dim else rotary_dim, pairs="interleaved")
    spec = design(model=model, heads=heads, pattern="causal()", modifiers=(rotary,))
    act = config.read_activation("activation_function", "gelu_new")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=28)
    blocks = model_builders.make_blocks([spec] * layers, feed, norm, placement="parallel")
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=50400), head_bias="learned")
    return model_builders.build_decoder(config, task, blocks, norm, ends)


# --- GPT-J ---------------------------------------------------------------------------------------------

GPTJ_LAYER, GPTJ_FILE_LAYER = "decoder.{layer}", ".h.{layer}"

GPTJ_WEIGHTS = WeightNames(
    families=("gptj",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".wte.weight",
        f"{GPTJ_LAYER}.norm.weight": f"{GPTJ_FILE_LAYER}.ln_1.weight",
        f"{GPTJ_LAYER}.norm.bias": f"{GPTJ_FILE_LAYER}.ln_1.bias",
        f"{GPTJ_LAYER}.attention.project.q": f"{GPTJ_FILE_LAYER}.attn.q_proj.weight",
        f"{GPTJ_LAYER}.attention.project.k": f"{GPTJ_FILE_LAYER}.attn.k_proj.weight",
        f"{GPTJ_LAYER}.attention.project.v": f"{GPTJ_FILE_LAYER}.attn.v_proj.weight",
        f"{GPTJ_LAYER}.attention.output.o": f"{GPTJ_FILE_LAYER}.attn.out_proj.weight",
        f"{GPTJ_LAYER}.feed.up": f"{GPTJ_FILE_LAYER}.mlp.fc_in.weight",
        f"{GPTJ_LAYER}.feed.up_bias": f"{GPTJ_FILE_LAYER}.mlp.fc_in.bias",
        f"{GPTJ_LAYER}.feed.down": f"{GPTJ_FILE_LAYER}.mlp.fc_out.weight",
        f"{GPTJ_LAYER}.feed.down_bias": f"{GPTJ_FILE_LAYER}.mlp.fc_out.bias",
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.tokens.bias": "lm_head.bias",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"(^|\.)attn\.(bias|masked_bias)$",),
)

# --- GPT-NeoX and Pythia -------------------------------------------------------------------------------


@register_family("gpt_neox", "GPTNeoX")
def read_gpt_neox(config: TransformersConfig, task: str) -> ModelSpec:
    """Read GPT-NeoX and Pythia; attention and feed-forward run in parallel, each with its own norm."""
    sizes = model_builders.read_decoder_sizes(config, model=6144, heads=64)
    theta, part = config.read_float("rotary_emb_base", default=10_000.0), config.read_float("rotary_pct", default=0.25)
    rope = RopeConfig(config, model_builders.read_max_length(config, 2048), theta=theta, rotary_fraction=part)
    bias = "qkvo" if config.read_bool("attention_bias", True) else ""
    spec = design(**sizes.design_args, pattern="causal()", bias=bias, modifiers=(rope.make_rotary(sizes.dim),))
    feed = FeedForwardSpec(
        config.read_int("intermediate_size", default=24576), config.read_activation("hidden_act", "gelu"), bias="ud"
    )
    norm = NormSpec("layer", config.read_float("layer_norm_eps", default=1e-5))
    placement = "abreast" if config.read_bool("use_parallel_residual", True) else "pre"
    blocks = model_builders.make_blocks(
        [rope.attention_with_limits(spec)] * model_builders.read_num_layers(config, 44), feed, norm, placement=placement
    )
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=50432))
    )


# --- GPT-NeoX and BLOOM --------------------------------------------------------------------------------

GPT_NEOX_LAYER = "decoder.{layer}"


def name_gpt_neox_layer(file_prefix: str, attention: str) -> dict[str, str | TensorLocation]:
    """Map the tensors of one layer to their stored names."""
    fused, sides = f"{file_prefix}.{attention}.query_key_value", {"qkv": 3}
    rows: dict[str, str | TensorLocation] = {}
    for place, side in enumerate("qkv"):
        at = {"qkv": place}
        matrix = TensorLocation(f"{fused}.weight", "(q qkv dim) model", at, sides, own_layout="(q dim) model")
        bias = TensorLocation(f"{fused}.bias", "(q qkv dim)", at, sides, own_layout="(q dim)")
        rows |= {
            f"{GPT_NEOX_LAYER}.attention.project.{side}": matrix,
            f"{GPT_NEOX_LAYER}.attention.project.{side}_bias": bias,
        }
    names = {
        "attention.output.o": f"{attention}.dense.weight",
        "attention.output.o_bias": f"{attention}.dense.bias",
        "attention_norm.weight": "input_layernorm.weight",
        "attention_norm.bias": "input_layernorm.bias",
        "feed_norm.weight": "post_attention_layernorm.weight",
        "feed_norm.bias": "post_attention_layernorm.bias",
        "feed.up": "mlp.dense_h_to_4h.weight",
        "feed.up_bias": "mlp.dense_h_to_4h.bias",
        "feed.down": "mlp.dense_4h_to_h.weight",
        "feed.down_bias": "mlp.dense_4h_to_h.bias",
    }
    return rows | {f"{GPT_NEOX_LAYER}.{ours}": f"{file_prefix}.{theirs}" for ours, theirs in names.items()}


GPT_NEOX_WEIGHTS = WeightNames(
    families=("gpt_neox",),
    prefixes=("gpt_neox", ""),
    locations={
        "decoder.embedding.tokens": ".embed_in.weight",
        **name_gpt_neox_layer(".layers.{layer}", "attention"),
        "decoder.norm.weight": ".final_layer_norm.weight",
        "decoder.norm.bias": ".final_layer_norm.bias",
        "head.tokens.weight": "embed_out.weight",
        "head.classes.weight": "score.weight",
    },
    ignored=(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)

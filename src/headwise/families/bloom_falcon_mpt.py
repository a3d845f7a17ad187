"""BLOOM: linear biases in the place of positions, and a norm behind the table of tokens (2211.05100)."""

from __future__ import annotations

from ..model_spec import ApproximateAttention, FeedForwardSpec, ModelSpec, NormSpec, UnsupportedPart
from ..parts.alibi import Alibi
from ..presets import design
from . import model_builders
from .attention_config import RopeConfig, make_dot
from .config_reader import TransformersConfig, register_family
from .gpt_neo import name_gpt_neox_layer
from .weight_names import WeightNames


@register_family("bloom", "Bloom")
def read_bloom(config: TransformersConfig, task: str) -> ModelSpec:
    """Queries, keys and values of a head lie side by side."""
    model = config.read_int("n_embed", "hidden_size", default=64)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=8)
    config.resolve_head_dim(model, heads)
    spec = design(model=model, heads=heads, pattern="causal()", bias="qkvo", modifiers=(Alibi(),))
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    feed = FeedForwardSpec(4 * model, "gelu_tanh", bias="ud")
    blocks = model_builders.make_blocks(
        [spec] * config.read_num_layers("n_layer", "num_hidden_layers", default=2), feed, norm
    )
    normed = config.read_bool("apply_residual_connection_post_layernorm", False)
    why = "apply_residual_connection_post_layernorm adds to what was normalised, which no word says"
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=250880), True, embedding_norm=norm)
    return model_builders.build_decoder(config, task, blocks, norm, ends, (UnsupportedPart(why),) if normed else ())


# --- BLOOM ---------------------------------------------------------------------------------------------

BLOOM_WEIGHTS = WeightNames(
    families=("bloom",),
    prefixes=("transformer", ""),
    locations={
        "decoder.embedding.tokens": ".word_embeddings.weight",
        "decoder.embedding.norm.weight": ".word_embeddings_layernorm.weight",
        "decoder.embedding.norm.bias": ".word_embeddings_layernorm.bias",
        **name_gpt_neox_layer(".h.{layer}", "self_attention"),
        "decoder.norm.weight": ".ln_f.weight",
        "decoder.norm.bias": ".ln_f.bias",
        "head.tokens.weight": "lm_head.weight",
        "head.classes.weight": "score.weight",
    },
)

# --- Falcon --------------------------------------------------------------------------------------------


@register_family("falcon", "Falcon")
def read_falcon(config: TransformersConfig, task: str) -> ModelSpec:
    """The newer architecture has groups, and a norm for each of the two."""
    model = config.read_int("n_embed", "hidden_size", default=4544)
    heads = config.read_num_heads("num_attention_heads", default=71)
    newer, parallel = config.read_bool("new_decoder_architecture", False), config.read_bool("parallel_attn", True)
    biased = config.read_bool("bias", False)
    said = model_builders.DecoderSizes(
        model, heads, _read_num_kv_heads(config, heads), config.resolve_head_dim(model, heads)
    ).design_args
    said |= {"pattern": "causal()", "bias": "qkvo" if biased else ""}
    rope = RopeConfig(config, model_builders.read_max_length(config, 2048))
    attention = rope.attention_with_limits(design(**said, modifiers=(rope.make_rotary(said["dim"]),)))
    if config.read_bool("alibi", False):
        attention = ApproximateAttention(
            design(**said), "alibi adds 16-bit slopes before scores are scaled, which Alibi does not"
        )

    act = config.read_activation("activation", "gelu")
    feed = FeedForwardSpec(config.read_optional_int("ffn_hidden_size") or 4 * model, act, bias="ud" if biased else "")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    norms = config.read_optional_int("num_ln_in_parallel_attn") or (2 if newer else 1)
    placement = "pre" if not parallel else "abreast" if newer and norms == 2 else "parallel"
    blocks = model_builders.make_blocks(
        [attention] * model_builders.read_num_layers(config, 32), feed, norm, placement=placement
    )
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=65024), True)
    )


def _read_num_kv_heads(config: TransformersConfig, heads: int) -> int:
    """One for all, or as many as are said; the older architecture without multi_query has one for each."""
    if config.read_bool("new_decoder_architecture", False):
        kv = config.read_optional_int("num_kv_heads") or heads
    else:
        kv = 1 if config.read_bool("multi_query", True) else heads
    if heads % kv:
        config.fail(f"num_attention_heads = {heads} do not share num_kv_heads = {kv} evenly", "give a divisor")
    return kv


# --- MPT -----------------------------------------------------------------------------------------------


@register_family("mpt", "Mpt")
def read_mpt(config: TransformersConfig, task: str) -> ModelSpec:
    """Slopes are those of ALiBi where heads are a power of two; transformers uses them whatever the config says."""
    model = config.read_int("d_model", "hidden_size", default=2048)
    heads = config.read_num_heads("n_heads", "num_attention_heads", default=16)
    dim = config.resolve_head_dim(model, heads)
    told = config.read_table("attn_config") or TransformersConfig({}, config.source)
    scale = make_dot(told.read_optional_float("softmax_scale") or dim**-0.5, dim**-0.5)
    spec = design(model=model, heads=heads, pattern="causal()", similarity=scale, modifiers=(Alibi(),))
    steepest, clip = told.read_int("alibi_bias_max", default=8), told.read_optional_float("clip_qkv")
    attention: model_builders.LayerAttention = spec
    if heads & (heads - 1) or steepest != 8:
        attention = ApproximateAttention(
            spec, f"alibi_bias_max = {steepest} over {heads} heads gives slopes other than Alibi's"
        )
    elif clip is not None:
        attention = ApproximateAttention(
            spec, f"clip_qkv bounds queries, keys and values at {clip:g}, which no word says"
        )
    norm = NormSpec("unbiased", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layers", "num_hidden_layers", default=24)
    blocks = model_builders.make_blocks([attention] * layers, FeedForwardSpec(4 * model, "gelu"), norm)
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=50368), True)
    )

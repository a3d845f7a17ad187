"""BLOOM (ALiBi and a norm after the token embeddings, 2211.05100), Falcon and MPT."""

from __future__ import annotations

from ..model_spec import ApproximateAttention, FeedForwardSpec, ModelSpec, NormSpec, UnsupportedPart
from ..parts.alibi import Alibi
from ..presets import design
from . import model_builders
from .attention_config import RopeConfig, make_dot
from .config_reader import TransformersConfig, register_family
from .gpt import name_gpt_neox_layer
from .weight_names import WeightNames


@register_family("bloom", "Bloom")
def read_bloom(config: TransformersConfig, task: str) -> ModelSpec:
    """Read BLOOM; Q, K and V of each head are stored next to each other."""
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
    reason = "apply_residual_connection_post_layernorm adds to the normalised input, which BlockSpec lacks"
    ends = model_builders.DecoderEnds(config.read_int("vocab_size", default=250880), True, embedding_norm=norm)
    return model_builders.build_decoder(config, task, blocks, norm, ends, (UnsupportedPart(reason),) if normed else ())


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
    """Read Falcon; its newer architecture has grouped heads and separate norms for attention and feed-forward."""
    model = config.read_int("n_embed", "hidden_size", default=4544)
    heads = config.read_num_heads("num_attention_heads", default=71)
    newer, parallel = config.read_bool("new_decoder_architecture", False), config.read_bool("parallel_attn", True)
    biased = config.read_bool("bias", False)
    design_args = model_builders.DecoderSizes(
        model, heads, _read_num_kv_heads(config, heads), config.resolve_head_dim(model, heads)
    ).design_args
    design_args |= {"pattern": "causal()", "bias": "qkvo" if biased else ""}
    rope = RopeConfig(config, model_builders.read_max_length(config, 2048))
    attention = rope.attention_with_limits(design(**design_args, modifiers=(rope.make_rotary(design_args["dim"]),)))
    if config.read_bool("alibi", False):
        attention = ApproximateAttention(
            design(**design_args), "alibi adds 16-bit slopes before scores are scaled, which Alibi does not"
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
    """Return the key-value heads: num_kv_heads in the newer architecture, else one, or one per head."""
    if config.read_bool("new_decoder_architecture", False):
        kv = config.read_optional_int("num_kv_heads") or heads
    else:
        kv = 1 if config.read_bool("multi_query", True) else heads
    if heads % kv:
        config.fail(f"num_attention_heads = {heads} is not a multiple of num_kv_heads = {kv}", "give a divisor")
    return kv


# --- MPT -----------------------------------------------------------------------------------------------


@register_family("mpt", "Mpt")
def read_mpt(config: TransformersConfig, task: str) -> ModelSpec:
    """Read MPT; ALiBi applies whatever the config contains, as in transformers."""
    model = config.read_int("d_model", "hidden_size", default=2048)
    heads = config.read_num_heads("n_heads", "num_attention_heads", default=16)
    dim = config.resolve_head_dim(model, heads)
    attention_config = config.read_table("attn_config") or TransformersConfig({}, config.source)
    scale = make_dot(attention_config.read_optional_float("softmax_scale") or dim**-0.5, dim**-0.5)
    spec = design(model=model, heads=heads, pattern="causal()", similarity=scale, modifiers=(Alibi(),))
    steepest, clip = (
        attention_config.read_int("alibi_bias_max", default=8),
        attention_config.read_optional_float("clip_qkv"),
    )
    attention: model_builders.LayerAttention = spec
    if heads & (heads - 1) or steepest != 8:
        attention = ApproximateAttention(
            spec, f"alibi_bias_max = {steepest} over {heads} heads gives slopes other than Alibi's"
        )
    elif clip is not None:
        attention = ApproximateAttention(
            spec, f"clip_qkv clips queries, keys and values at {clip:g}, which AttentionSpec lacks"
        )
    norm = NormSpec("unbiased", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layers", "num_hidden_layers", default=24)
    blocks = model_builders.make_blocks([attention] * layers, FeedForwardSpec(4 * model, "gelu"), norm)
    return model_builders.build_decoder(
        config, task, blocks, norm, model_builders.DecoderEnds(config.read_int("vocab_size", default=50368), True)
    )

"""MPT: linear biases, LayerNorm without biases, no bias anywhere."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, ApproximateAttention, NormSpec
from ..parts.alibi import Alibi
from ..presets import design
from . import trunk
from .attention import make_dot
from .config import TransformersConfig
from .registry import register_family


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
    attention: trunk.LayerAttention = spec
    if heads & (heads - 1) or steepest != 8:
        attention = ApproximateAttention(spec, f"alibi_bias_max = {steepest} over {heads} heads gives slopes other than Alibi's")
    elif clip is not None:
        attention = ApproximateAttention(spec, f"clip_qkv bounds queries, keys and values at {clip:g}, which no word says")
    norm = NormSpec("unbiased", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layers", "num_hidden_layers", default=24)
    blocks = trunk.make_blocks([attention] * layers, FeedForwardSpec(4 * model, "gelu"), norm)
    return trunk.build_decoder(config, task, blocks, norm, trunk.DecoderEnds(config.read_int("vocab_size", default=50368), True))

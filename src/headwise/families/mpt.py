"""MPT: linear biases, LayerNorm without biases, no bias anywhere."""

from __future__ import annotations

from ..blueprint import Dense, Model, Nearly, Norm
from ..parts.alibi import Alibi
from ..presets import design
from . import trunk
from .attention import scaled
from .config import Config
from .registry import family


@family("mpt", "Mpt")
def mpt(config: Config, task: str) -> Model:
    """Slopes are those of ALiBi where heads are a power of two; transformers uses them whatever the config says."""
    model = config.size("d_model", "hidden_size", default=2048)
    heads = config.heads("n_heads", "num_attention_heads", default=16)
    dim = config.dim(model, heads)
    told = config.table("attn_config") or Config({}, config.where)
    scale = scaled(told.maybe_number("softmax_scale") or dim**-0.5, dim**-0.5)
    spec = design(model=model, heads=heads, pattern="causal()", similarity=scale, modifiers=(Alibi(),))
    steepest, clip = told.size("alibi_bias_max", default=8), told.maybe_number("clip_qkv")
    attention: trunk.Attention = spec
    if heads & (heads - 1) or steepest != 8:
        attention = Nearly(spec, f"alibi_bias_max = {steepest} over {heads} heads gives slopes other than Alibi's")
    elif clip is not None:
        attention = Nearly(spec, f"clip_qkv bounds queries, keys and values at {clip:g}, which no word says")
    norm = Norm("unbiased", config.number("layer_norm_epsilon", default=1e-5))
    layers = config.layers("n_layers", "num_hidden_layers", default=24)
    blocks = trunk.blocks([attention] * layers, Dense(4 * model, "gelu"), norm)
    return trunk.decoder(config, task, blocks, norm, trunk.Ends(config.size("vocab_size", default=50368), True))

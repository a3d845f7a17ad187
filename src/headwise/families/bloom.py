"""BLOOM: linear biases in the place of positions, and a norm behind the table of tokens (2211.05100)."""

from __future__ import annotations

from ..blueprint import UnsupportedPart, FeedForwardSpec, ModelSpec, NormSpec
from ..parts.alibi import Alibi
from ..presets import design
from . import trunk
from .config import TransformersConfig
from .registry import register_family


@register_family("bloom", "Bloom")
def read_bloom(config: TransformersConfig, task: str) -> ModelSpec:
    """Queries, keys and values of a head lie side by side."""
    model = config.read_int("n_embed", "hidden_size", default=64)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=8)
    config.resolve_head_dim(model, heads)
    spec = design(model=model, heads=heads, pattern="causal()", bias="qkvo", modifiers=(Alibi(),))
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    feed = FeedForwardSpec(4 * model, "gelu_tanh", bias="ud")
    blocks = trunk.make_blocks([spec] * config.read_num_layers("n_layer", "num_hidden_layers", default=2), feed, norm)
    normed = config.read_bool("apply_residual_connection_post_layernorm", False)
    why = "apply_residual_connection_post_layernorm adds to what was normalised, which no word says"
    ends = trunk.DecoderEnds(config.read_int("vocab_size", default=250880), True, embedding_norm=norm)
    return trunk.build_decoder(config, task, blocks, norm, ends, (UnsupportedPart(why),) if normed else ())

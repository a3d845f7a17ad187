"""BLOOM: linear biases in the place of positions, and a norm behind the table of tokens (2211.05100)."""

from __future__ import annotations

from ..blueprint import Beyond, Dense, Model, Norm
from ..parts.alibi import Alibi
from ..presets import design
from . import trunk
from .config import Config
from .registry import family


@family("bloom", "Bloom")
def bloom(config: Config, task: str) -> Model:
    """Queries, keys and values of a head lie side by side."""
    model = config.size("n_embed", "hidden_size", default=64)
    heads = config.heads("n_head", "num_attention_heads", default=8)
    config.dim(model, heads)
    spec = design(model=model, heads=heads, pattern="causal()", bias="qkvo", modifiers=(Alibi(),))
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5))
    feed = Dense(4 * model, "gelu_tanh", bias="ud")
    blocks = trunk.blocks([spec] * config.layers("n_layer", "num_hidden_layers", default=2), feed, norm)
    normed = config.flag("apply_residual_connection_post_layernorm", False)
    why = "apply_residual_connection_post_layernorm adds to what was normalised, which no word says"
    ends = trunk.Ends(config.size("vocab_size", default=250880), True, norm=norm)
    return trunk.decoder(config, task, blocks, norm, ends, (Beyond(why),) if normed else ())

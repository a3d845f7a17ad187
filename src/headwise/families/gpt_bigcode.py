"""StarCoder: GPT-2 whose heads share one head of keys and values (2305.06161)."""

from __future__ import annotations

from ..blueprint import Dense, Model, Norm, Positions
from ..presets import design
from . import trunk
from .attention import scaled
from .config import Config
from .registry import family


@family("gpt_bigcode", "GPTBigCode")
def gpt_bigcode(config: Config, task: str) -> Model:
    """Or each its own, where multi_query is false."""
    model = config.size("n_embd", "hidden_size", default=768)
    heads = config.heads("n_head", "num_attention_heads", default=12)
    usual = config.dim(model, heads) ** -0.5
    config.refuse("add_cross_attention", False, "reads a model that this file does not describe")
    kv = 1 if config.flag("multi_query", True) else heads
    scale = scaled(usual if config.flag("scale_attn_weights", True) else 1.0, usual)
    spec = design(model=model, heads=heads, kv=kv, pattern="causal()", bias="qkvo", similarity=scale)
    act = config.activation("activation_function", "gelu_pytorch_tanh")
    feed = Dense(config.maybe("n_inner") or 4 * model, act, bias="ud")
    norm = Norm("layer", config.number("layer_norm_epsilon", default=1e-5))
    layers = config.layers("n_layer", "num_hidden_layers", default=12)
    positions = Positions("learned", config.size("n_positions", "max_position_embeddings", default=1024))
    ends = trunk.Ends(config.size("vocab_size", default=50257), True, positions=positions)
    return trunk.decoder(config, task, trunk.blocks([spec] * layers, feed, norm), norm, ends)

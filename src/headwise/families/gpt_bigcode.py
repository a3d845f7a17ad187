"""StarCoder: GPT-2 whose heads share one head of keys and values (2305.06161)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, ModelSpec, NormSpec, PositionSpec
from ..presets import design
from . import trunk
from .attention import make_dot
from .config import TransformersConfig
from .registry import register_family


@register_family("gpt_bigcode", "GPTBigCode")
def read_gpt_bigcode(config: TransformersConfig, task: str) -> ModelSpec:
    """Or each its own, where multi_query is false."""
    model = config.read_int("n_embd", "hidden_size", default=768)
    heads = config.read_num_heads("n_head", "num_attention_heads", default=12)
    usual = config.resolve_head_dim(model, heads) ** -0.5
    config.require_default("add_cross_attention", False, "reads a model that this file does not describe")
    kv = 1 if config.read_bool("multi_query", True) else heads
    scale = make_dot(usual if config.read_bool("scale_attn_weights", True) else 1.0, usual)
    spec = design(model=model, heads=heads, kv=kv, pattern="causal()", bias="qkvo", similarity=scale)
    act = config.read_activation("activation_function", "gelu_pytorch_tanh")
    feed = FeedForwardSpec(config.read_optional_int("n_inner") or 4 * model, act, bias="ud")
    norm = NormSpec("layer", config.read_float("layer_norm_epsilon", default=1e-5))
    layers = config.read_num_layers("n_layer", "num_hidden_layers", default=12)
    positions = PositionSpec("learned", config.read_int("n_positions", "max_position_embeddings", default=1024))
    ends = trunk.DecoderEnds(config.read_int("vocab_size", default=50257), True, positions=positions)
    return trunk.build_decoder(config, task, trunk.make_blocks([spec] * layers, feed, norm), norm, ends)

"""DistilBERT: BERT without kinds of token and without a pooler (1910.01108)."""

from __future__ import annotations

from ..blueprint import FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, HeadTransformSpec
from ..presets import design
from . import reading
from .config import TransformersConfig
from .registry import register_family, read_tied_stack


@register_family("distilbert", "DistilBert", default_task="ForMaskedLM")
def read_distilbert(config: TransformersConfig, task: str) -> ModelSpec:
    """A classifier reads the first token through a relu."""
    model = config.read_int("dim", "hidden_size", default=768)
    heads = config.read_num_heads("n_heads", "num_attention_heads", default=12)
    config.resolve_head_dim(model, heads)
    config.require_default("sinusoidal_pos_embds", False, "freezes the table of positions, which is not described")
    norm, act = NormSpec("layer", 1e-12), config.read_activation("activation", "gelu")
    feed = FeedForwardSpec(config.read_int("hidden_dim", default=3072), act, bias="ud")
    layers = config.read_num_layers("n_layers", "num_hidden_layers", default=6)
    sizes = reading.EncoderSizes(model, heads, layers, config.read_int("vocab_size", default=30522), norm, feed)
    positions = PositionSpec("learned", config.read_int("max_position_embeddings", default=512))
    attention = design(model=model, heads=heads, bias="qkvo")
    body = reading.make_encoder_stack(sizes, [attention] * layers, EmbeddingSpec(sizes.vocab_size, positions=positions, norm=norm))
    inner = HeadTransformSpec(model, act, norm)
    masked = OutputHeadSpec("tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True))
    return reading.build_encoder(config, task, body, reading.EncoderHeads(HeadTransformSpec(model, "relu"), masked, pools_base_model=False))

"""DistilBERT: BERT without kinds of token and without a pooler (1910.01108)."""

from __future__ import annotations

from ..blueprint import Dense, Embedding, Head, Model, Norm, Positions, Transform
from ..presets import design
from . import reading
from .config import Config
from .registry import family, tied


@family("distilbert", "DistilBert", usual="ForMaskedLM")
def distilbert(config: Config, task: str) -> Model:
    """A classifier reads the first token through a relu."""
    model = config.size("dim", "hidden_size", default=768)
    heads = config.heads("n_heads", "num_attention_heads", default=12)
    config.dim(model, heads)
    config.refuse("sinusoidal_pos_embds", False, "freezes the table of positions, which is not described")
    norm, act = Norm("layer", 1e-12), config.activation("activation", "gelu")
    feed = Dense(config.size("hidden_dim", default=3072), act, bias="ud")
    layers = config.layers("n_layers", "num_hidden_layers", default=6)
    sizes = reading.Encoder(model, heads, layers, config.size("vocab_size", default=30522), norm, feed)
    positions = Positions("learned", config.size("max_position_embeddings", default=512))
    attention = design(model=model, heads=heads, bias="qkvo")
    body = reading.stack(sizes, [attention] * layers, Embedding(sizes.tokens, positions=positions, norm=norm))
    inner = Transform(model, act, norm)
    masked = Head("tokens", sizes.tokens, transform=inner, bias="learned", table=tied(config, "encoder", True))
    return reading.whole(config, task, body, reading.Said(Transform(model, "relu"), masked, bare=False))

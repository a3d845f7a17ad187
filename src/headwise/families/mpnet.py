"""MPNet: BERT with T5's table of relative positions beside its own (2004.09297)."""

from __future__ import annotations

from ..blueprint import Embedding, Head, Model, Positions, Transform
from ..parts.t5_bias import T5Bias
from ..presets import design
from . import reading
from .config import Config
from .registry import family, tied

PADDING = 1  # the same for all of them, whatever their configs say


@family("mpnet", "MPNet", usual="ForMaskedLM")
def mpnet(config: Config, task: str) -> Model:
    """Positions begin behind the row of padding."""
    sizes = reading.encoder(config, reading.Usual(tokens=30527))
    config.refuse("relative_attention_num_buckets", 32, "is not how many transformers looks up")
    bias = T5Bias(32, 128, "both")
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo", modifiers=(bias,))
    rows, skipped = config.size("max_position_embeddings", default=512, least=PADDING + 2), PADDING + 1
    positions = Positions("learned", rows - skipped, skipped=skipped)
    table = Embedding(sizes.tokens, positions=positions, norm=sizes.norm)
    body = reading.stack(sizes, [attention] * sizes.layers, table)
    inner = Transform(sizes.model, "gelu", sizes.norm)
    masked = Head("tokens", sizes.tokens, transform=inner, bias="learned", table=tied(config, "encoder", True))
    return reading.whole(config, task, body, reading.Said(Transform(sizes.model), masked))

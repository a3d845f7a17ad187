"""RoBERTa and its kin in other tongues: BERT whose positions begin behind the row of padding (1907.11692)."""

from __future__ import annotations

from ..blueprint import Embedding, Head, Model, Transform
from ..presets import design
from . import reading
from .config import Config
from .registry import family, tied


@family("xlm-roberta", "XLMRoberta", usual="ForMaskedLM")
@family("camembert", "Camembert", usual="ForMaskedLM")
@family("roberta", "Roberta", usual="ForMaskedLM")
def roberta(config: Config, task: str) -> Model:
    """The exact gelu stands in the head over tokens, whatever layers apply."""
    sizes = reading.encoder(config, reading.Usual(tokens=50265 if config.name == "roberta" else 30522))
    pattern = "causal()" if config.flag("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    types = config.size("type_vocab_size", default=2, least=0)
    table = Embedding(sizes.tokens, positions=reading.behind_padding(config), types=types, norm=sizes.norm)
    body = reading.stack(sizes, [attention] * sizes.layers, table)
    inner = Transform(sizes.model, "gelu", sizes.norm)
    masked = Head("tokens", sizes.tokens, transform=inner, bias="learned", table=tied(config, "encoder", True))
    return reading.whole(config, task, body, reading.Said(Transform(sizes.model), masked))

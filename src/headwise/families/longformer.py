"""Longformer: RoBERTa that reads a window, with tokens that read and are read by all (2004.05150)."""

from __future__ import annotations

from ..blueprint import Embedding, Head, Model, Nearly, Transform
from ..presets import design
from . import reading
from .config import Config
from .registry import family, tied

WHY = "global tokens are chosen in every call and have queries, keys and values of their own; without any it is this"


@family("longformer", "Longformer", usual="ForMaskedLM")
def longformer(config: Config, task: str) -> Model:
    """hw.LongformerAttention runs such a layer; one spec is not enough for it."""
    sizes = reading.encoder(config)
    sides = [f"{side}_global" for side in ("query", "key", "value")]
    more = [(f"{side}.weight", sizes.model**2) for side in sides] + [(f"{side}.bias", sizes.model) for side in sides]

    def attention(window: int) -> Nearly:
        pattern = f"window({window + 1}, after={window // 2})"
        return Nearly(design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo"), WHY, tuple(more))

    types = config.size("type_vocab_size", default=2, least=0)
    table = Embedding(sizes.tokens, positions=reading.behind_padding(config), types=types, norm=sizes.norm)
    body = reading.stack(sizes, [attention(window) for window in _windows(config, sizes.layers)], table)
    inner = Transform(sizes.model, "gelu", sizes.norm)
    masked = Head("tokens", sizes.tokens, transform=inner, bias="learned", table=tied(config, "encoder", True))
    return reading.whole(config, task, body, reading.Said(Transform(sizes.model), masked))


def _windows(config: Config, layers: int) -> list[int]:
    """How many neighbours each layer reads on both sides together."""
    told = config.said.get("attention_window", 512)
    each = (config.items("attention_window") or []) if isinstance(told, (list, tuple)) else [told] * layers
    if len(each) != layers or any(type(one) is not int or one < 2 or one % 2 for one in each):
        config.wrong(f"attention_window = {told!r} is no even number for each of {layers} layers", "give 512, say")
    return each

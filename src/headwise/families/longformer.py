"""Longformer: RoBERTa that reads a window, with tokens that read and are read by all (2004.05150)."""

from __future__ import annotations

from ..blueprint import EmbeddingSpec, OutputHeadSpec, ModelSpec, ApproximateAttention, HeadTransformSpec
from ..presets import design
from . import reading
from .config import TransformersConfig
from .registry import register_family, read_tied_stack

GLOBAL_TOKENS_REASON = "global tokens are chosen in every call and have queries, keys and values of their own; without any it is this"


@register_family("longformer", "Longformer", default_task="ForMaskedLM")
def read_longformer(config: TransformersConfig, task: str) -> ModelSpec:
    """hw.LongformerAttention runs such a layer; one spec is not enough for it."""
    sizes = reading.read_encoder_sizes(config)
    sides = [f"{side}_global" for side in ("query", "key", "value")]
    more = [(f"{side}.weight", sizes.model**2) for side in sides] + [(f"{side}.bias", sizes.model) for side in sides]

    def attention(window: int) -> ApproximateAttention:
        pattern = f"window({window + 1}, after={window // 2})"
        return ApproximateAttention(design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo"), GLOBAL_TOKENS_REASON, tuple(more))

    types = config.read_int("type_vocab_size", default=2, minimum=0)
    table = EmbeddingSpec(sizes.vocab_size, positions=reading.make_offset_positions(config), types=types, norm=sizes.norm)
    body = reading.make_encoder_stack(sizes, [attention(window) for window in _windows(config, sizes.layers)], table)
    inner = HeadTransformSpec(sizes.model, "gelu", sizes.norm)
    masked = OutputHeadSpec("tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True))
    return reading.build_encoder(config, task, body, reading.EncoderHeads(HeadTransformSpec(sizes.model), masked))


def _windows(config: TransformersConfig, layers: int) -> list[int]:
    """How many neighbours each layer reads on both sides together."""
    told = config.values.get("attention_window", 512)
    each = (config.read_list("attention_window") or []) if isinstance(told, (list, tuple)) else [told] * layers
    if len(each) != layers or any(type(one) is not int or one < 2 or one % 2 for one in each):
        config.fail(f"attention_window = {told!r} is no even number for each of {layers} layers", "give 512, say")
    return each

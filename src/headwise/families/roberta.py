"""RoBERTa and its kin in other tongues: BERT whose positions begin behind the row of padding (1907.11692)."""

from __future__ import annotations

from ..blueprint import EmbeddingSpec, OutputHeadSpec, ModelSpec, HeadTransformSpec
from ..presets import design
from . import reading
from .config import TransformersConfig
from .registry import register_family, read_tied_stack


@register_family("xlm-roberta", "XLMRoberta", default_task="ForMaskedLM")
@register_family("camembert", "Camembert", default_task="ForMaskedLM")
@register_family("roberta", "Roberta", default_task="ForMaskedLM")
def read_roberta(config: TransformersConfig, task: str) -> ModelSpec:
    """The exact gelu stands in the head over tokens, whatever layers apply."""
    sizes = reading.read_encoder_sizes(config, reading.EncoderDefaults(vocab_size=50265 if config.family_name == "roberta" else 30522))
    pattern = "causal()" if config.read_bool("is_decoder", False) else "full()"
    attention = design(model=sizes.model, heads=sizes.heads, pattern=pattern, bias="qkvo")
    types = config.read_int("type_vocab_size", default=2, minimum=0)
    table = EmbeddingSpec(sizes.vocab_size, positions=reading.make_offset_positions(config), types=types, norm=sizes.norm)
    body = reading.make_encoder_stack(sizes, [attention] * sizes.layers, table)
    inner = HeadTransformSpec(sizes.model, "gelu", sizes.norm)
    masked = OutputHeadSpec("tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True))
    return reading.build_encoder(config, task, body, reading.EncoderHeads(HeadTransformSpec(sizes.model), masked))

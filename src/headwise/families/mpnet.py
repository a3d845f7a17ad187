"""MPNet: BERT with T5's table of relative positions beside its own (2004.09297)."""

from __future__ import annotations

from ..blueprint import EmbeddingSpec, OutputHeadSpec, ModelSpec, PositionSpec, HeadTransformSpec
from ..parts.t5_bias import T5Bias
from ..presets import design
from . import reading
from .config import TransformersConfig
from .registry import register_family, read_tied_stack

PAD_ID = 1  # the same for all of them, whatever their configs say


@register_family("mpnet", "MPNet", default_task="ForMaskedLM")
def read_mpnet(config: TransformersConfig, task: str) -> ModelSpec:
    """Positions begin behind the row of padding."""
    sizes = reading.read_encoder_sizes(config, reading.EncoderDefaults(vocab_size=30527))
    config.require_default("relative_attention_num_buckets", 32, "is not how many transformers looks up")
    bias = T5Bias(32, 128, "both")
    attention = design(model=sizes.model, heads=sizes.heads, bias="qkvo", modifiers=(bias,))
    rows, skipped = config.read_int("max_position_embeddings", default=512, minimum=PAD_ID + 2), PAD_ID + 1
    positions = PositionSpec("learned", rows - skipped, skipped=skipped)
    table = EmbeddingSpec(sizes.vocab_size, positions=positions, norm=sizes.norm)
    body = reading.make_encoder_stack(sizes, [attention] * sizes.layers, table)
    inner = HeadTransformSpec(sizes.model, "gelu", sizes.norm)
    masked = OutputHeadSpec("tokens", sizes.vocab_size, transform=inner, bias="learned", table=read_tied_stack(config, "encoder", True))
    return reading.build_encoder(config, task, body, reading.EncoderHeads(HeadTransformSpec(sizes.model), masked))

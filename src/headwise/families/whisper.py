"""Whisper: an encoder that reads sound, a decoder that writes what was said; keys have no bias (2212.04356)."""

from __future__ import annotations

from ..blueprint import UnsupportedPart, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, StackSpec
from .bart import BartVariant, make_bart_blocks
from .config import TransformersConfig
from .registry import select_heads, register_family

WHISPER = BartVariant("pre", final_norm=NormSpec(), layers=4, heads=6, hidden=1536, bias="qvo")


@register_family("whisper", "Whisper", default_task="ForConditionalGeneration")
def read_whisper(config: TransformersConfig, task: str) -> ModelSpec:
    """The frames of a spectrogram, two to a position."""
    model = config.read_int("d_model", "hidden_size", default=384)
    tokens, bins = config.read_int("vocab_size", default=51865), config.read_int("num_mel_bins", default=80)
    frames = config.read_int("max_source_positions", default=1500)
    scale = model**0.5 if config.read_bool("scale_embedding", False) else 1.0
    config.require_default("tie_word_embeddings", True, "gives the head a table of its own, which is not described")
    why = f"sound enters by two convolutions over time and {frames} positions of sines, which no word says"
    sizes = {"conv1": model * bins * 3 + model, "conv2": model * model * 3 + model}
    sound = UnsupportedPart(why, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items()))

    positions = PositionSpec("learned", config.read_int("max_target_positions", default=448))
    table = EmbeddingSpec(tokens, positions=positions, scale=scale)
    reads = StackSpec.from_blocks("encoder", model, make_bart_blocks(config, WHISPER, model, "encoder"), norm=WHISPER.final_norm)
    writes = StackSpec.from_blocks("decoder", model, make_bart_blocks(config, WHISPER, model, "decoder"), embedding=table, norm=WHISPER.final_norm)
    ways = {"ForConditionalGeneration": [OutputHeadSpec("tokens", tokens, table="decoder")], "Model": []}
    heads = select_heads(config, task, ways)
    return ModelSpec("whisper", "encoder-decoder", (reads, writes), heads, tuple(config.notes), (sound,))

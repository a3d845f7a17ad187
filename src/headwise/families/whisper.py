"""Whisper: an encoder that reads sound, a decoder that writes what was said; keys have no bias (2212.04356)."""

from __future__ import annotations

from ..blueprint import Beyond, Embedding, Head, Model, Norm, Positions, Stack
from .bart import Kin, layers_of
from .config import Config
from .registry import choose, family

KIN = Kin("pre", last=Norm(), layers=4, heads=6, hidden=1536, bias="qvo")


@family("whisper", "Whisper", usual="ForConditionalGeneration")
def whisper(config: Config, task: str) -> Model:
    """The frames of a spectrogram, two to a position."""
    model = config.size("d_model", "hidden_size", default=384)
    tokens, bins = config.size("vocab_size", default=51865), config.size("num_mel_bins", default=80)
    frames = config.size("max_source_positions", default=1500)
    scale = model**0.5 if config.flag("scale_embedding", False) else 1.0
    config.refuse("tie_word_embeddings", True, "gives the head a table of its own, which is not described")
    why = f"sound enters by two convolutions over time and {frames} positions of sines, which no word says"
    sizes = {"conv1": model * bins * 3 + model, "conv2": model * model * 3 + model}
    sound = Beyond(why, tuple((f"encoder.embedding.{name}", size) for name, size in sizes.items()))

    positions = Positions("learned", config.size("max_target_positions", default=448))
    table = Embedding(tokens, positions=positions, scale=scale)
    reads = Stack.of("encoder", model, layers_of(config, KIN, model, "encoder"), norm=KIN.last)
    writes = Stack.of("decoder", model, layers_of(config, KIN, model, "decoder"), embedding=table, norm=KIN.last)
    ways = {"ForConditionalGeneration": [Head("tokens", tokens, table="decoder")], "Model": []}
    heads = choose(config, task, ways)
    return Model("whisper", "encoder-decoder", (reads, writes), heads, tuple(config.notes), (sound,))

"""Traces of large models and long texts, made without a model: what the page
must stay fast with.
"""

from __future__ import annotations

import numpy as np

from headwise.observe.head_analysis.head_table import HeadClass, HeadMeasures, HeadTable, Measure
from headwise.observe.traces.attention_record import AttentionCallRecord, AttentionRecord
from headwise.observe.traces.attention_trace import Trace, make_token_rows

WAVES = 16  # channel pairs of a head that hold its positions
CLASSES = (
    "previous",
    "sink",
    "broad",
    "rare-token",
    "induction",
    "duplicate",
    "obj -> governor",
    "punctuation",
)
MEASURES = ("entropy", "sink", "confidence", "distance", "importance")


def make_large_trace(
    layers: int, heads: int, tokens: int, *, kv_heads: int = 0, causal: bool = True
) -> Trace:
    """A trace whose head h attends to the token h + 1 places back, with some noise."""
    rng = np.random.default_rng(0)
    kv_heads = kv_heads or heads
    width, position = 2 * WAVES, np.arange(tokens)
    angles = position[:, None] * 1.5 * 2.0 ** (-np.arange(WAVES) / 4)
    keys = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    call = AttentionCallRecord((0, tokens), (0, tokens), scale=1.0, causal=causal)
    records: list[AttentionRecord] = []
    for layer in range(layers):
        q = rng.normal(0, 0.4, (1, tokens, heads, width)).astype(np.float16)
        for head in range(heads):
            q[0, :, head] += np.roll(keys, head + 1, axis=0) * (0.3 + (layer + head) % 5 / 4)
        k = np.repeat(keys[None, :, None], kv_heads, axis=2).astype(np.float16)
        v = rng.standard_normal((1, tokens, kv_heads, 8)).astype(np.float16)
        groups = tuple(head * kv_heads // heads for head in range(heads))
        name = f"layers.{layer}.attention"
        arrays = {"q": q, "k": k, "v": v}
        records.append(
            AttentionRecord(
                *(name, "decoder", layer, "self", "test", heads, groups, "text", "text"),
                (call,),
                arrays,
            )
        )
    words = [f" w{number}" for number in range(tokens)]
    return Trace({"name": "large"}, {"text": make_token_rows([words])}, tuple(records))


def make_table(trace: Trace) -> HeadTable:
    """Invented measures and classes of every head of a trace."""
    rng = np.random.default_rng(1)
    heads: list[HeadMeasures] = []
    for layer in trace.layers:
        for head in range(layer.heads):
            values = rng.random(len(MEASURES))
            measures = {
                name: Measure(value, value - 0.02, value + 0.02, 0.1)
                for name, value in zip(MEASURES, values.tolist(), strict=True)
            }
            name = CLASSES[int(rng.integers(len(CLASSES)))]
            classes = (
                (HeadClass(name, float(rng.random()), f"{name} in most texts"),)
                if rng.random() < 0.8
                else ()
            )
            heads.append(
                HeadMeasures(
                    *("decoder", "self", layer.layer, head, layer.kv_head_of_query[head]),
                    layer.name,
                    measures,
                    classes,
                )
            )
    return HeadTable("large", "7 texts", tuple(heads))

"""The Diff screen: compare the open trace with another text, ablated heads, or another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..observe.traces import Trace, TraceComparison, compare_traces, load_trace
from ..util.model_names import label_model
from .lab_actions import Ablation, LabRuns
from .model_actions import capture_trace, check_text_length
from .model_worker import HEADS, JobProgress, action, choice, text
from .open_model import (
    CAPTURE_BUDGET,
    MAX_TILE_CELLS,
    AblatedHead,
    OpenModel,
    id_inputs,
    is_trace,
    load_target,
    read_pruned_heads,
)
from .weight_summaries import Array, encode_arrays, make_edges

if TYPE_CHECKING:
    from torch import nn

LISTED_PAIRS = 500  # those that differ most
SIGNED_ZERO = 128
SIGNED_ONE = 127  # 8-bit codes of a difference of 0, and of 1 above it


@action(
    "compare",
    kind=choice(("text", "ablated", "other"), key="with"),
    heads=HEADS,
    target=text(key="text"),
    source=text(),
)
def compare_attention(
    model: OpenModel,
    progress: JobProgress,
    kind: str,
    heads: Sequence[AblatedHead],
    target: str,
    source: str,
) -> bytes:
    """Compare the open trace with another one and keep the comparison. Returns the list of heads.

    `with` is "text" (the same model on `text`, and `source` or the open one), "ablated" (the open
    text without `heads`) or "other" (the open text in the model or trace that the page was started
    with, or that was pruned on it).
    """
    first = model.get_recorded()
    kept_heads: dict[str, list[int]] = {}
    name = ""
    if kind == "text":
        if not (target or source).strip():
            raise ValueError("the text to compare with is empty; enter at least one word")
        check_text_length(model, target, source)
        second = capture_trace(model.get_model(), target, source, model.max_tokens, progress)
    elif kind == "ablated":
        second = _trace_ablated(model, heads, progress)
    else:
        name, second, kept_heads = _trace_other(model, progress)
    comparison = compare_traces(
        first,
        second,
        kept_heads=kept_heads,
        progress=lambda done, total: progress(done, total, "comparing heads"),
    )
    model.set_comparison(comparison, first)
    return encode_comparison(comparison, kind, name)


def _trace_ablated(model: OpenModel, heads: Sequence[AblatedHead], progress: JobProgress) -> Trace:
    """Trace the open text with some heads ablated, which changes attention in later layers."""
    from ..observe.inspect.ablation import patch

    if not heads:
        raise ValueError("no head is ablated, so nothing would differ; ablate some heads first")
    model.check_ablated(heads)
    progress(0, 1, "running the model without the heads")
    net = model.get_model()
    with patch(net, LabRuns(model).make_patches(Ablation(heads))):
        return _trace_ids(net, model.get_recorded())


def _trace_ids(net: nn.Module, first: Trace) -> Trace:
    """Trace a model on the token ids of a trace, with that trace's token strings."""
    from ..observe.inspect.trace_capture import Capture, trace

    inputs: Any = id_inputs(net, first)
    second = trace(net, inputs, capture=Capture(extra=("v",), budget=CAPTURE_BUDGET))
    return replace(second, streams={name: rows[:1] for name, rows in first.streams.items()})


def _trace_other(
    model: OpenModel, progress: JobProgress
) -> tuple[str, Trace, dict[str, list[int]]]:
    """Return the other model's name, its trace of the open text, and which of the open heads it
    kept.
    """
    if not model.other:
        raise ValueError("no other model is open; start `headwise view` with --compare MODEL")
    name = label_model(model.other)
    if is_trace(model.other):
        return name, load_trace(model.other), {}
    progress(0, 2, f"opening {name}")
    from ..hub.model_names import find_model

    source = find_model(model.other)
    other = load_target(source, model.loading)
    removed = read_pruned_heads(str(source) if isinstance(source, Path) else "")
    kept_heads = {
        layer.name: sorted(set(range(layer.heads)) - set(removed[layer.name]))
        for layer in model.get_recorded().layers
        if layer.name in removed
    }
    progress(1, 2, f"running {name}")
    return name, _trace_same_text(model, other), kept_heads


def _trace_same_text(model: OpenModel, other: nn.Module) -> Trace:
    """Trace another model on the open text, with its own tokenizer, or on the open token ids if the
    text was generated.
    """
    from ..observe.inspect.model_tokenizer import get_tokenizer_documents

    first = model.get_recorded()
    streams = {name: rows[0] for name, rows in first.streams.items() if rows}
    if all(row.offsets for row in streams.values()):
        texts = {name: row.text for name, row in streams.items()}
        return capture_trace(
            other, texts.get("text", ""), texts.get("source", ""), model.max_tokens
        )
    if model.has_model and get_tokenizer_documents(model.get_model()) != get_tokenizer_documents(
        other
    ):
        raise ValueError(
            "the other model has another tokenizer, and the open text was generated; enter a text "
            "first"
        )
    return _trace_ids(other, first)


# --- Answers --------------------------------------------------------------------------------------


def encode_comparison(comparison: TraceComparison, kind: str, name: str) -> bytes:
    """Encode the heads with their differences, [heads, 4], and the second trace's tokens with their
    alignment.
    """
    numbers = {layer.name: number for number, layer in enumerate(comparison.first.layers)}
    differences = [
        [head.divergence, head.largest, head.mean_difference, head.entropy_change]
        for head in comparison.heads
    ]
    arrays: dict[str, Array] = {"differences": np.array(differences, np.float32).reshape(-1, 4)}
    for stream, pairs in comparison.alignments.items():
        arrays[f"{stream}.pairs"] = np.stack([pairs.first, pairs.second], 1).astype(np.int32)
    return encode_arrays(
        arrays,
        kind=kind,
        name=name,
        heads=[[numbers[head.site], head.head] for head in comparison.heads],
        places=[[head.query, head.key] for head in comparison.heads],
        words={
            stream: list(rows[comparison.row].words)
            for stream, rows in comparison.second.streams.items()
        },
        leftOut=dict(comparison.left_out),
    )


def pool_difference(
    comparison: TraceComparison, site: str, head: int, cells: int
) -> dict[str, Array]:
    """Pool the weights of one head in both traces, and their difference, to at most `cells` cells
    per side.

    `first` and `second` hold the largest weight of each cell in 8 bits. `change` is second minus
    first, the largest magnitude in each cell; 128 means unchanged. `queries` and `keys` are the
    first aligned pair of each cell. `places` [pairs, 2] are the query and key of the pairs that
    differ most, and `weights` [pairs, 2] their exact weights in both traces.
    """
    layer = comparison.first.get_layer(site)
    counts = [len(pairs.first) for pairs in comparison.aligned_tokens(layer)]
    queries, keys = (make_edges(0, count, min(cells, MAX_TILE_CELLS)) for count in counts)
    pooled = np.zeros((4, len(queries) - 1, len(keys) - 1), np.float32)
    pairs = np.zeros((0, 4))  # query, key and the weights, largest differences first
    for row, (start, stop) in enumerate(pairwise(queries.tolist())):
        one, other = comparison.weights(site, head, slice(start, stop))
        differing, of_keys = np.nonzero(one != other)
        candidates = (
            start + differing,
            of_keys,
            one[differing, of_keys],
            other[differing, of_keys],
        )
        pairs = np.concatenate([pairs, np.column_stack(candidates)])
        order = np.argsort(-np.abs(pairs[:, 3] - pairs[:, 2]), kind="stable")
        pairs = pairs[order[:LISTED_PAIRS]]
        pooled[0, row] = _pool_keys(one, keys, np.maximum)
        pooled[1, row] = _pool_keys(other, keys, np.maximum)
        pooled[2, row] = _pool_keys(other - one, keys, np.maximum)
        pooled[3, row] = _pool_keys(other - one, keys, np.minimum)
    first, second = np.round(pooled[:2] * 255).clip(0, 255).astype(np.uint8)
    change = np.where(pooled[2] >= -pooled[3], pooled[2], pooled[3])
    signed = (np.round(change * SIGNED_ONE) + SIGNED_ZERO).clip(1, 255)
    return {
        "first": first,
        "second": second,
        "change": signed.astype(np.uint8),
        "queries": queries[:-1].astype(np.int32),
        "keys": keys[:-1].astype(np.int32),
        "places": pairs[:, :2].astype(np.int32),
        "weights": pairs[:, 2:].astype(np.float32),
    }


def _pool_keys(weights: Array, edges: Sequence[int] | Array, pool: np.ufunc) -> Array:
    """Return the largest or smallest weight between the edges, over all queries."""
    return pool.reduceat(pool.reduce(weights, axis=0), np.asarray(edges)[:-1])


def exact_pair(comparison: TraceComparison, site: str, head: int, query: int, key: int) -> Array:
    """Return the exact weights of an aligned query and key in both traces, [2]."""
    one, other = comparison.weights(site, head, slice(query, query + 1))
    return np.array([one[0, key], other[0, key]], np.float32)

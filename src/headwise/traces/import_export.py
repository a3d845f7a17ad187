"""Weights that others computed, taken in as a trace; and a trace's weights, given out as CSV, JSON or NPZ."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SpecError
from ..files import write_atomically
from .attention_record import AttentionCallRecord, AttentionRecord, TokenRow
from .attention_trace import Trace, make_token_rows
from .packed_masks import Array

EXPORT_SUFFIXES = (".csv", ".json", ".npz")
EXPORT_COLUMNS = ("site", "head", "row", "query", "key", "query_token", "key_token", "weight")
TokenStrings = Sequence[str] | Sequence[Sequence[str]]


def trace_from_weights(
    attention: Sequence[Any] = (),
    tokens: TokenStrings = (),
    *,
    encoder_attention: Sequence[Any] = (),
    cross_attention: Sequence[Any] = (),
    source: TokenStrings = (),
) -> Trace:
    """A trace of weights that are there already: for each layer a tensor [B, heads, T, S], as BertViz takes them.

    `attention` is what `tokens` read of themselves; `encoder` and `cross` are what `source` read of itself, and what
    `tokens` read of `source`.

    >>> trace = trace_from_weights([np.eye(2)[None, None]], ["a", "b"])
    >>> trace.head_weights(0, 0)
    array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    kinds = [
        ("encoder", "attention", encoder_attention, "source", "source"),
        ("decoder" if encoder_attention or cross_attention else "model", "attention", attention, "text", "text"),
        ("decoder", "cross", cross_attention, "text", "source"),
    ]
    streams = {"text": _token_rows(tokens), "source": _token_rows(source)}
    layers = [_weights_layer(kind, n, one, streams) for kind in kinds for n, one in enumerate(kind[2])]
    if not layers:
        raise SpecError("there are no weights; give a tensor [batch, heads, queries, keys] for each layer")
    return Trace({"name": "weights"}, {name: rows for name, rows in streams.items() if rows}, tuple(layers))


def _token_rows(words: TokenStrings) -> tuple[TokenRow, ...]:
    if words and all(isinstance(word, str) for word in words):
        return make_token_rows([[str(word) for word in words]])
    return make_token_rows([list(row) for row in words])


def _weights_layer(
    kind: tuple[Any, ...], number: int, told: Any, streams: dict[str, tuple[TokenRow, ...]]
) -> AttentionRecord:
    stack, what, _, asks, reads = kind
    name = f"{stack}.{number}.{what}"
    if not isinstance(told, (np.ndarray, list, tuple)):  # a tensor of torch, which this package does not import
        told = told.detach().float().cpu()
    weights = np.asarray(told, np.float32)
    if weights.ndim == 3:
        weights = weights[None]
    if weights.ndim != 4:
        raise SpecError(f"{name} is given weights {list(weights.shape)}; give [batch, heads, queries, keys]")
    batch, heads, queries, keys = weights.shape
    for side, count in ((asks, queries), (reads, keys)):
        if wrong := [len(row.ids) for row in streams[side] if len(row.ids) != count]:
            raise SpecError(f"{name} has {count} tokens of {side}, told were {wrong[0]}; give a string for each")
        if not streams[side]:
            streams[side] = make_token_rows([[str(n) for n in range(count)]] * batch)
        elif len(streams[side]) != batch:
            raise SpecError(f"{name} has {batch} rows, told were {len(streams[side])} of {side}; give as many")
    call = AttentionCallRecord((0, queries), (0, keys), weights=0)
    where = {"path": name, "asks": asks, "told": reads}
    return AttentionRecord(
        name, stack, number, what, heads=heads, reads=(), calls=(call,), arrays={"weights.0": weights}, **where
    )


def export_weights(trace: Trace, path: Path | str, layers: Sequence[AttentionRecord], min_weight: float) -> None:
    """Write the weights of these layers in the form that the ending of a path says."""
    path = Path(path)
    if path.suffix not in EXPORT_SUFFIXES:
        raise SpecError(f"{path.name} ends in none of {', '.join(EXPORT_SUFFIXES)}; give one of these")
    if path.suffix == ".npz":
        held = io.BytesIO()
        np.savez_compressed(held, allow_pickle=False, **{one.name: _layer_weights(trace, one) for one in layers})
        write_atomically(path, held.getvalue())
    elif path.suffix == ".csv":
        write_atomically(path, _csv_lines(trace, layers, min_weight))
    else:
        pairs = [dict(zip(EXPORT_COLUMNS, pair, strict=True)) for pair in _weight_pairs(trace, layers, min_weight)]
        write_atomically(path, json.dumps({"model": dict(trace.model), "weights": pairs}).encode())


def _csv_lines(trace: Trace, those: Sequence[AttentionRecord], least: float) -> Iterator[bytes]:
    yield ",".join(EXPORT_COLUMNS).encode() + b"\r\n"
    for one in those:
        held = io.StringIO()
        csv.writer(held).writerows(_weight_pairs(trace, [one], least))
        yield held.getvalue().encode(errors="backslashreplace")


def _layer_weights(trace: Trace, one: AttentionRecord) -> Array:
    """All weights of a layer, [B, heads, queries, keys]."""
    return np.stack(
        [
            np.stack([trace.head_weights(one.name, head, row=row) for head in range(one.heads)])
            for row in range(one.batch_size)
        ]
    )


def _weight_pairs(trace: Trace, those: Sequence[AttentionRecord], least: float) -> Iterator[tuple[Any, ...]]:
    for one, row in ((layer, row) for layer in those for row in range(layer.batch_size)):
        asks, told = (
            _token_strings(trace, one.asks, row, one.num_queries),
            _token_strings(trace, one.told, row, one.num_keys),
        )
        for head in range(one.heads):
            weights = trace.head_weights(one.name, head, row=row)
            for t, s in np.argwhere(weights >= max(least, np.finfo(np.float32).tiny)).tolist():
                yield one.name, head, row, t, s, asks[t], told[s], float(weights[t, s])


def _token_strings(trace: Trace, stream: str, row: int, count: int) -> list[str]:
    """How tokens are written, numbers where nobody said."""
    rows = trace.streams.get(stream, ())
    words = list(rows[row].words) if row < len(rows) else []
    return (words + [str(n) for n in range(len(words), count)])[:count]

"""Import attention weights computed elsewhere as a trace, and export a trace's weights as CSV, JSON or NPZ."""

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
from .attention_record import Array, AttentionCallRecord, AttentionRecord, TokenRow
from .attention_trace import Trace, make_token_rows

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
    """Make a trace of given attention weights: one tensor [B, heads, T, S] per layer, the format that BertViz takes.

    `attention` is the self-attention of `tokens`; `encoder_attention` the self-attention of `source`, and
    `cross_attention` the attention from `tokens` to `source`. Tokens that are not given are shown as numbers.

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
    layers = [_weights_layer(kind, n, weights, streams) for kind in kinds for n, weights in enumerate(kind[2])]
    if not layers:
        raise SpecError("no weights given; give a tensor [batch, heads, queries, keys] for each layer")
    return Trace({"name": "weights"}, {name: rows for name, rows in streams.items() if rows}, tuple(layers))


def _token_rows(words: TokenStrings) -> tuple[TokenRow, ...]:
    if words and all(isinstance(word, str) for word in words):
        return make_token_rows([[str(word) for word in words]])
    return make_token_rows([list(row) for row in words])


def _weights_layer(
    kind: tuple[Any, ...], number: int, values: Any, streams: dict[str, tuple[TokenRow, ...]]
) -> AttentionRecord:
    stack, site_kind, _, query_stream, key_stream = kind
    name = f"{stack}.{number}.{site_kind}"
    if not isinstance(values, (np.ndarray, list, tuple)):  # a tensor of torch, which this package does not import
        values = values.detach().float().cpu()
    weights = np.asarray(values, np.float32)
    if weights.ndim == 3:
        weights = weights[None]
    if weights.ndim != 4:
        raise SpecError(f"{name} has weights of shape {list(weights.shape)}; give [batch, heads, queries, keys]")
    batch, heads, queries, keys = weights.shape
    for side, count in ((query_stream, queries), (key_stream, keys)):
        if wrong := [len(row.ids) for row in streams[side] if len(row.ids) != count]:
            raise SpecError(
                f"{name} has {count} tokens of {side}, but {wrong[0]} strings were given; give a string for each token"
            )
        if not streams[side]:
            streams[side] = make_token_rows([[str(n) for n in range(count)]] * batch)
        elif len(streams[side]) != batch:
            raise SpecError(
                f"{name} has {batch} rows, but {len(streams[side])} rows of {side} were given; give one for each"
            )
    call = AttentionCallRecord((0, queries), (0, keys), weights=0)
    streams_and_path = {"path": name, "query_stream": query_stream, "key_stream": key_stream}
    return AttentionRecord(
        name,
        stack,
        number,
        site_kind,
        heads=heads,
        kv_head_of_query=(),
        calls=(call,),
        arrays={"weights.0": weights},
        **streams_and_path,
    )


def export_weights(trace: Trace, path: Path | str, layers: Sequence[AttentionRecord], min_weight: float) -> None:
    """Write the weights of these layers in the format that the suffix of `path` names."""
    path = Path(path)
    if path.suffix not in EXPORT_SUFFIXES:
        raise SpecError(f"{path.name} has none of the suffixes {', '.join(EXPORT_SUFFIXES)}; give one of these")
    if path.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, allow_pickle=False, **{layer.name: _layer_weights(trace, layer) for layer in layers}
        )
        write_atomically(path, buffer.getvalue())
    elif path.suffix == ".csv":
        write_atomically(path, _csv_lines(trace, layers, min_weight))
    else:
        pairs = [dict(zip(EXPORT_COLUMNS, pair, strict=True)) for pair in _weight_pairs(trace, layers, min_weight)]
        write_atomically(path, json.dumps({"model": dict(trace.model), "weights": pairs}).encode())


def _csv_lines(trace: Trace, layers: Sequence[AttentionRecord], min_weight: float) -> Iterator[bytes]:
    yield ",".join(EXPORT_COLUMNS).encode() + b"\r\n"
    for layer in layers:
        buffer = io.StringIO()
        csv.writer(buffer).writerows(_weight_pairs(trace, [layer], min_weight))
        yield buffer.getvalue().encode(errors="backslashreplace")


def _layer_weights(trace: Trace, layer: AttentionRecord) -> Array:
    """All attention weights of a layer, [B, heads, queries, keys]."""
    return np.stack(
        [
            np.stack([trace.head_weights(layer.name, head, row=row) for head in range(layer.heads)])
            for row in range(layer.batch_size)
        ]
    )


def _weight_pairs(trace: Trace, layers: Sequence[AttentionRecord], min_weight: float) -> Iterator[tuple[Any, ...]]:
    layer_rows = ((layer, row) for layer in layers for row in range(layer.batch_size))
    for layer, row in layer_rows:
        query_tokens, key_tokens = (
            _token_strings(trace, layer.query_stream, row, layer.num_queries),
            _token_strings(trace, layer.key_stream, row, layer.num_keys),
        )
        for head in range(layer.heads):
            weights = trace.head_weights(layer.name, head, row=row)
            for t, s in np.argwhere(weights >= max(min_weight, np.finfo(np.float32).tiny)).tolist():
                yield layer.name, head, row, t, s, query_tokens[t], key_tokens[s], float(weights[t, s])


def _token_strings(trace: Trace, stream: str, row: int, count: int) -> list[str]:
    """Strings of the first `count` tokens of a stream; numbers for tokens without a string."""
    rows = trace.streams.get(stream, ())
    words = list(rows[row].words) if row < len(rows) else []
    return (words + [str(n) for n in range(len(words), count)])[:count]

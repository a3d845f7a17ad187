"""Import attention weights computed elsewhere as a trace, and export a trace's weights as CSV, JSON
or NPZ.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...util.errors import SpecError
from ...util.files import write_atomically
from ...util.output_paths import FileKind, check_output
from .attention_record import Array, AttentionCallRecord, AttentionRecord, TokenRow
from .attention_trace import Trace, make_token_rows, query_blocks

EXPORT_SUFFIXES = (".csv", ".json", ".npz")
EXPORT_COLUMNS = ("site", "head", "row", "query", "key", "query_token", "key_token", "weight")
PAIRS_PER_PIECE = 10_000  # pairs of .csv and .json that are encoded at once
EXACT_PAIRS = 50_000  # exports up to this many pairs are encoded to measure their size
SAMPLED_HEADS = 24
SAMPLED_QUERIES = 8  # others are estimated from these
TokenStrings = Sequence[str] | Sequence[Sequence[str]]


def trace_from_weights(
    attention: Sequence[Any] = (),
    tokens: TokenStrings = (),
    *,
    encoder_attention: Sequence[Any] = (),
    cross_attention: Sequence[Any] = (),
    source: TokenStrings = (),
) -> Trace:
    """Make a trace of given attention weights: one tensor [B, heads, T, S] per layer, the format
    that BertViz takes.

    `attention` is the self-attention of `tokens`; `encoder_attention` the self-attention of
    `source`, and `cross_attention` the attention from `tokens` to `source`. Tokens that are not
    given are shown as numbers.

    >>> trace = trace_from_weights([np.eye(2)[None, None]], ["a", "b"])
    >>> trace.head_weights(0, 0)
    array([[1., 0.],
           [0., 1.]], dtype=float32)
    """
    stack = "decoder" if encoder_attention or cross_attention else "model"
    kinds = [
        ("encoder", "attention", encoder_attention, "source", "source"),
        (stack, "attention", attention, "text", "text"),
        ("decoder", "cross", cross_attention, "text", "source"),
    ]
    streams = {"text": _token_rows(tokens), "source": _token_rows(source)}
    layers: list[AttentionRecord] = []
    for kind in kinds:
        layers += [_weights_layer(kind, n, weights, streams) for n, weights in enumerate(kind[2])]
    if not layers:
        raise SpecError(
            "no weights given; give a tensor [batch, heads, queries, keys] for each layer"
        )
    return Trace(
        {"name": "weights"}, {name: rows for name, rows in streams.items() if rows}, tuple(layers)
    )


def _token_rows(words: TokenStrings) -> tuple[TokenRow, ...]:
    if words and all(isinstance(word, str) for word in words):
        return make_token_rows([[str(word) for word in words]])
    return make_token_rows([list(row) for row in words])


def _weights_layer(
    kind: tuple[Any, ...], number: int, values: Any, streams: dict[str, tuple[TokenRow, ...]]
) -> AttentionRecord:
    stack, site_kind, _, query_stream, key_stream = kind
    name = f"{stack}.{number}.{site_kind}"
    # a tensor of torch, which this package does not import
    if not isinstance(values, (np.ndarray, list, tuple)):
        values = values.detach().float().cpu()
    weights = np.asarray(values, np.float32)
    if weights.ndim == 3:
        weights = weights[None]
    if weights.ndim != 4:
        raise SpecError(
            f"{name} has weights of shape {list(weights.shape)}; give [batch, heads, queries, keys]"
        )
    batch, heads, queries, keys = weights.shape
    for side, count in ((query_stream, queries), (key_stream, keys)):
        wrong = [len(row.ids) for row in streams[side] if len(row.ids) != count]
        if wrong:
            raise SpecError(
                f"{name} has {count} tokens of {side}, but {wrong[0]} strings were given; give a "
                "string for each token"
            )
        if not streams[side]:
            streams[side] = make_token_rows([[str(n) for n in range(count)]] * batch)
        elif len(streams[side]) != batch:
            raise SpecError(
                f"{name} has {batch} rows, but {len(streams[side])} rows of {side} were given; "
                "give one for each"
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


class WeightSelection(NamedTuple):
    """Select weights to export: layers, heads of each (default: all), and a minimum weight.

    The minimum applies to the pairs in .csv and .json.
    """

    layers: Sequence[AttentionRecord]
    heads: Sequence[int] = ()
    min_weight: float = 0.0

    def list_heads(self) -> list[tuple[AttentionRecord, int, int]]:
        """List every selected head in every row: (layer, row, head)."""
        places: list[tuple[AttentionRecord, int, int]] = []
        for layer in self.layers:
            heads = self.heads or range(layer.heads)
            for row in range(layer.batch_size):
                places += [(layer, row, head) for head in heads]
        return places


NPZ_COMMENT = b"attention weights of headwise"  # of the zip archive; numpy ignores it
WEIGHT_FILE = FileKind(
    "file of attention weights", (",".join(EXPORT_COLUMNS).encode(), b'"weights": [', NPZ_COMMENT)
)


def export_weights(
    trace: Trace,
    path: Path | str,
    *,
    sites: Iterable[str | int] = (),
    heads: Sequence[int] = (),
    min_weight: float = 0.0,
    overwrite: bool = False,
) -> None:
    """Write the weights of these sites (default: all) in the format of the suffix: .csv, .json
    (pairs) or .npz.

    `heads` are the heads of each site (default: all). Pairs with a weight below `min_weight` are
    omitted from .csv and .json. `overwrite` replaces an earlier file of weights; anything else at
    this path is refused.
    """
    layers = [trace.get_layer(site) for site in sites] or trace.layers
    selection = WeightSelection(layers, heads, min_weight)
    path = check_output(path, WEIGHT_FILE, "overwrite" if overwrite else "refuse")
    write_atomically(path, encode_weights(trace, path.suffix, selection, path.name))


def encode_weights(
    trace: Trace, suffix: str, selection: WeightSelection, name: str = ""
) -> Iterator[bytes]:
    """Encode the selected weights as a .csv, .json or .npz file, in pieces.

    `name` is used in messages.
    """
    if suffix not in EXPORT_SUFFIXES:
        raise SpecError(
            f"{name or suffix} has none of the suffixes {', '.join(EXPORT_SUFFIXES)}; give one of "
            "these"
        )
    for layer, _, head in selection.list_heads():
        # refuse an unknown head before anything is written
        trace.head_weights(layer.name, head, slice(0, 1))
    if suffix == ".npz":
        return _npz_pieces(trace, selection)
    pieces = _encode_pairs(_weight_pairs(trace, selection), suffix)
    if suffix == ".csv":
        return chain([",".join(EXPORT_COLUMNS).encode() + b"\r\n"], pieces)
    model = json.dumps(dict(trace.model)).encode()
    return chain([b'{"model": ' + model + b', "weights": ['], pieces, [b"]}"])


def estimate_export_bytes(trace: Trace, suffix: str, selection: WeightSelection) -> int:
    """Estimate the output size of `encode_weights` from a sample of queries."""
    heads = selection.list_heads()
    if sum(layer.num_queries * layer.num_keys for layer, _, _ in heads) <= EXACT_PAIRS:
        return sum(map(len, encode_weights(trace, suffix, selection)))
    queries = sum(layer.num_queries for layer, _, _ in heads)
    sizes: list[int] = []
    for layer, row, head in heads[:: max(1, len(heads) // SAMPLED_HEADS)]:
        for query in range(0, layer.num_queries, max(1, layer.num_queries // SAMPLED_QUERIES)):
            if suffix == ".npz":
                weights = trace.head_weights(layer.name, head, slice(query, query + 1), row=row)
                sizes.append(len(zlib.compress(np.ascontiguousarray(weights).tobytes())))
            else:
                pairs = _head_pairs(
                    trace, (layer, row, head), selection.min_weight, (query, query + 1)
                )
                sizes.append(sum(map(len, _encode_pairs(pairs, suffix))))
    return int(sum(sizes) / max(1, len(sizes)) * queries)


def _npz_pieces(trace: Trace, selection: WeightSelection) -> Iterator[bytes]:
    buffer = io.BytesIO()
    arrays: dict[str, Array] = {}
    for layer in selection.layers:
        rows = [trace.weights(layer.name, row=row) for row in range(layer.batch_size)]
        arrays[layer.name] = np.stack(rows)[:, selection.heads or range(layer.heads)]
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = NPZ_COMMENT
    yield buffer.getvalue()


def _encode_pairs(pairs: Iterator[tuple[Any, ...]], suffix: str) -> Iterator[bytes]:
    """Yield rows of .csv, or elements of a list of .json, in pieces."""
    separator = ""
    while rows := list(islice(pairs, PAIRS_PER_PIECE)):
        if suffix == ".csv":
            buffer = io.StringIO()
            csv.writer(buffer).writerows(rows)
            yield buffer.getvalue().encode(errors="backslashreplace")
        else:
            named = [json.dumps(dict(zip(EXPORT_COLUMNS, row, strict=True))) for row in rows]
            yield (separator + ", ".join(named)).encode()
            separator = ", "


def _weight_pairs(trace: Trace, selection: WeightSelection) -> Iterator[tuple[Any, ...]]:
    for layer, row, head in selection.list_heads():
        for block in query_blocks(layer.num_queries):
            yield from _head_pairs(trace, (layer, row, head), selection.min_weight, block)


def _head_pairs(
    trace: Trace,
    head: tuple[AttentionRecord, int, int],
    min_weight: float,
    queries: tuple[int, int],
) -> Iterator[tuple[Any, ...]]:
    """Yield table rows for pairs of one head and some queries with large enough weights."""
    layer, row, number = head
    query_tokens = _token_strings(trace, layer.query_stream, row, layer.num_queries)
    key_tokens = _token_strings(trace, layer.key_stream, row, layer.num_keys)
    weights = trace.head_weights(layer.name, number, slice(*queries), row=row)
    for t, s in np.argwhere(weights >= max(min_weight, np.finfo(np.float32).tiny)).tolist():
        query = queries[0] + t
        place = (layer.name, number, row, query, s)
        yield (*place, query_tokens[query], key_tokens[s], float(weights[t, s]))


def _token_strings(trace: Trace, stream: str, row: int, count: int) -> list[str]:
    """Return strings of the first `count` tokens of a stream; numbers if they have none."""
    rows = trace.streams.get(stream, ())
    words = list(rows[row].words) if row < len(rows) else []
    return (words + [str(n) for n in range(len(words), count)])[:count]

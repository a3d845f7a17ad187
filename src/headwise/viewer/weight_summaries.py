"""Summaries of attention weights too many to send: pooled tiles, marginals, the largest weight of a
part, thumbnails.

Each reads one head a few hundred queries at a time, so a text of 8,192 tokens needs megabytes, not
gigabytes.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..observe.traces.attention_record import AttentionRecord, TokenRow
from ..observe.traces.attention_trace import QUERY_BLOCK, THUMBNAIL_SIZE, Trace, query_blocks

if TYPE_CHECKING:
    from ..observe.head_analysis.head_table import HeadTable
    from ..observe.inspect.site import Ability, Site

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
Array = NDArray[Any]
WeightReader = Callable[[slice], FloatArray]  # the weights of a range of queries, [queries, keys]
MaskReader = Callable[
    [slice], NDArray[np.bool_]
]  # whether each query of a range may attend to each key


class HeadReader(NamedTuple):
    """Reads weights and mask of one head by query range; has its numbers of queries and keys."""

    weights: WeightReader
    mask: MaskReader
    num_queries: int
    num_keys: int


class Cells(NamedTuple):
    """Cell edges of a picture: cell i covers the positions edges[i] to edges[i + 1] - 1."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]


def make_edges(start: int, stop: int, cells: int) -> NDArray[np.int64]:
    """Return edges of at most `cells` nearly equal cells over the positions from `start` to `stop`.

    >>> make_edges(3, 10, 3)
    array([ 3,  5,  7, 10])
    """
    cells = max(1, min(cells, stop - start))
    return start + np.arange(cells + 1) * (stop - start) // cells


def pool_weights(head: HeadReader, cells: Cells) -> tuple[FloatArray, ByteArray]:
    """Return the largest weight of each cell, and a mask: 1 where no pair of a cell is allowed."""
    values = np.zeros((len(cells.queries) - 1, len(cells.keys) - 1), np.float32)
    masked = np.zeros(values.shape, np.uint8)
    left = int(cells.keys[0])
    right = int(cells.keys[-1])
    columns = cells.keys[:-1] - left
    for first, last in _group_cells(cells.queries):
        block = slice(int(cells.queries[first]), int(cells.queries[last]))
        rows = cells.queries[first:last] - block.start
        values[first:last] = _reduce_cells(
            head.weights(block)[:, left:right], rows, columns, np.maximum
        )
        masked[first:last] = ~_reduce_cells(
            head.mask(block)[:, left:right], rows, columns, np.logical_or
        )
    return values, masked


def _reduce_cells(
    values: Array, rows: NDArray[np.int64], columns: NDArray[np.int64], ufunc: np.ufunc
) -> Array:
    """Reduce each cell to one value; cells begin at `rows` and `columns`."""
    ends = [*rows[1:].tolist(), len(values)]
    if len(rows) < len(
        values
    ):  # one reduction a cell, because reduceat over the first axis is ten times slower
        values = np.stack(
            [
                ufunc.reduce(values[row:end], axis=0)
                for row, end in zip(rows.tolist(), ends, strict=True)
            ]
        )
    return values if len(columns) == values.shape[1] else ufunc.reduceat(values, columns, axis=1)


def _group_cells(edges: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of neighbouring cells that cover up to `QUERY_BLOCK` positions, or one larger
    cell.
    """
    first = 0
    while first < len(edges) - 1:
        last = int(np.searchsorted(edges, edges[first] + QUERY_BLOCK, side="right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def compute_marginals(head: HeadReader, factor: FloatArray | None = None) -> dict[str, FloatArray]:
    """Compute the weight received by each key of one head, the spread of each query, and the mean
    weight by distance.

    `received` is the mean over the queries that may attend to a key, [keys]. `entropy` (nats) and
    `maximum` are per query, [queries]. `by_offset` is the mean weight at each distance query - key
    over the allowed pairs, from -(keys - 1) to queries - 1. `factor` (per key) scales `received`
    and `maximum`, not the entropy.
    """
    num_queries = head.num_queries
    num_keys = head.num_keys
    factor = None if factor is None else factor[:num_keys]
    entropy = np.zeros(num_queries, np.float32)
    maximum = np.zeros(num_queries, np.float32)
    received = np.zeros(num_keys, np.float64)
    possible = np.zeros(num_keys, np.int64)
    sums = np.zeros(num_queries + num_keys - 1, np.float64)
    counts = np.zeros(num_queries + num_keys - 1, np.int64)
    for start, stop in query_blocks(num_queries):
        weights = head.weights(slice(start, stop))
        allowed = head.mask(slice(start, stop))
        logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
        entropy[start:stop] = -np.einsum("qk,qk->q", weights, logs)
        maximum[start:stop] = (weights if factor is None else weights * factor).max(1, initial=0.0)
        received += weights.sum(0, dtype=np.float64)
        possible += np.count_nonzero(allowed, axis=0)
        for row, query in enumerate(
            range(start, stop)
        ):  # a distance is a shift, and a shift is a slice
            sums[query : query + num_keys] += weights[row, ::-1]
            counts[query : query + num_keys] += allowed[row, ::-1]
    means = np.divide(received, possible, out=np.zeros_like(received), where=possible > 0).astype(
        np.float32
    )
    by_offset = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0).astype(
        np.float32
    )
    return {
        "received": means if factor is None else means * factor,
        "entropy": entropy,
        "maximum": maximum,
        "by_offset": by_offset,
    }


def find_peak(weights: WeightReader, queries: slice, keys: slice) -> tuple[int, int, float]:
    """Find the query, the key and the value of the largest weight in a range; the first of ties."""
    peak = (queries.start, keys.start, -1.0)
    for start, stop in query_blocks(queries.stop - queries.start):
        part = weights(slice(queries.start + start, queries.start + stop))[:, keys]
        row, column = divmod(int(part.argmax()), part.shape[1])
        if part[row, column] > peak[2]:
            peak = (queries.start + start + row, keys.start + column, float(part[row, column]))
    return peak


# --- Thumbnails -----------------------------------------------------------------------------------


def enlarge_picture(picture: ByteArray) -> ByteArray:
    """Enlarge a picture of at most 64 x 64 cells to 64 x 64."""
    rows = np.arange(THUMBNAIL_SIZE) * picture.shape[0] // THUMBNAIL_SIZE
    columns = np.arange(THUMBNAIL_SIZE) * picture.shape[1] // THUMBNAIL_SIZE
    return picture[rows[:, None], columns]


def thumbnail_masks(trace: Trace) -> tuple[ByteArray, NDArray[np.int32]]:
    """Return the distinct thumbnail masks, [masks, 64, 64], and the mask number of each head.

    Most heads share one mask, so each mask is computed and sent once.
    """
    masks: dict[bytes, tuple[int, ByteArray]] = {}
    by_content: dict[object, int] = {}
    numbers: list[int] = []
    for layer in trace.layers:
        for head in range(layer.heads):
            content = _mask_content(trace, layer, head)
            if content not in by_content:
                mask = _draw_mask(trace, layer, head)
                by_content[content] = masks.setdefault(mask.tobytes(), (len(masks), mask))[0]
            numbers.append(by_content[content])
    pictures = [mask for _, mask in masks.values()]
    shape = (0, THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    return np.stack(pictures) if pictures else np.zeros(shape, np.uint8), np.array(
        numbers, np.int32
    )


def _mask_content(trace: Trace, layer: AttentionRecord, head: int) -> object:
    """Return a key for a head's mask; equal masks have equal keys."""
    owner: object = None
    if any(call.weights is not None or call.places is not None for call in layer.calls):
        owner = layer.name, head
    elif any(trace.grids[number].shape[1] > 1 for call in layer.calls for number in call.grids):
        owner = head
    calls = tuple(
        (call.queries, call.keys, call.first, call.causal, call.grids) for call in layer.calls
    )
    return owner, layer.num_queries, layer.num_keys, calls


def _draw_mask(trace: Trace, layer: AttentionRecord, head: int) -> ByteArray:
    """Return a thumbnail mask: 1 in cells without an allowed pair."""
    rows = make_edges(0, layer.num_queries, THUMBNAIL_SIZE)
    columns = make_edges(0, layer.num_keys, THUMBNAIL_SIZE)[:-1]
    masked = np.zeros((len(rows) - 1, len(columns)), np.uint8)
    for first, last in _group_cells(rows):
        block = slice(int(rows[first]), int(rows[last]))
        allowed = trace.head_mask(layer.name, head, block)
        masked[first:last] = ~_reduce_cells(
            allowed, rows[first:last] - block.start, columns, np.logical_or
        )
    return enlarge_picture(masked)


DOCUMENT_VERSION = 1
MAX_STEM = 60  # characters of a file name that come from the name of the model
ABILITIES = ("observe", "ablate", "prune", "convert")


def describe_trace(
    trace: Trace,
    sites: Mapping[str, Site] | None = None,
    *,
    is_loadable: bool = False,
    pruned: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Describe the recorded run: its model, the tokens of every stream, and its attention layers.

    `sites` are the attention layers of the open model by name; without a model, no layer can be
    changed. If the model `is_loadable`, possible changes are checked when it is loaded. `pruned`
    lists the heads removed from each site, by their original numbers.
    """
    numbers = {layer.name: number for number, layer in enumerate(trace.layers)}
    return {
        "version": DOCUMENT_VERSION,
        "model": {
            name: value
            for name, value in trace.model.items()
            if isinstance(value, (str, int, float, bool))
        },
        "streams": {name: list(map(_describe_row, rows)) for name, rows in trace.streams.items()},
        "sites": [
            _describe_site(layer, (sites or {}).get(layer.name), is_loadable)
            | {"prunedHeads": sorted((pruned or {}).get(layer.name, ()))}
            for layer in trace.layers
        ],
        "skipped": dict(trace.skipped),
        "images": {name: list(image.shape[1:]) for name, image in trace.images.items()},
        "classes": [
            [numbers[site], head, name]
            for (site, head), name in trace.classes.items()
            if site in numbers
        ],
    }


def estimate_memory(trace: Trace, model: Any, max_tokens: int) -> dict[str, int | None]:
    """Estimate parameters and bytes of a loaded model, bytes of the recorded run, and bytes of a
    run of `max_tokens`.

    Queries, keys and values grow with the number of tokens, recorded weights with its square.
    """
    longest = 0.0
    for layer in trace.layers:
        growth = max_tokens / max(layer.num_queries, layer.num_keys, 1)
        for name, array in layer.arrays.items():
            longest += array.nbytes * (
                growth**2 if name.startswith("weights") else growth if name[0] in "qkvz" else 1
            )
    parameters = [] if model is None else list(model.parameters())
    return {
        "parameters": sum(one.numel() for one in parameters) if parameters else None,
        "weightBytes": sum(one.numel() * one.element_size() for one in parameters)
        if parameters
        else None,
        "recordBytes": trace.nbytes,
        "longestBytes": int(longest),
    }


def _describe_row(row: TokenRow) -> dict[str, Any]:
    return {
        "ids": list(row.ids),
        "words": list(row.words),
        "text": row.text,
        "offsets": [list(span) for span in row.offsets],
    }


def _describe_site(layer: AttentionRecord, site: Site | None, is_loadable: bool) -> dict[str, Any]:
    has_weights = any(call.weights is not None for call in layer.calls)
    return {
        "name": layer.name,
        "stack": layer.stack,
        "layer": layer.layer,
        "kind": layer.kind,
        "heads": layer.heads,
        "kvHeads": max(layer.kv_head_of_query, default=-1) + 1,
        "kvHeadOfQuery": list(layer.kv_head_of_query),
        "queryStream": layer.query_stream,
        "keyStream": layer.key_stream,
        "numQueries": layer.num_queries,
        "numKeys": layer.num_keys,
        "batch": layer.batch_size,
        "calls": len(layer.calls),
        "capture": "weights" if has_weights else "queries and keys",
        "hasValues": "v" in layer.arrays,
        "hasOutputs": "z" in layer.arrays,
        "abilities": {name: _describe_ability(site, name, is_loadable) for name in ABILITIES},
    }


def _describe_ability(site: Site | None, name: str, is_loadable: bool) -> dict[str, Any]:
    if site is None:
        if is_loadable:
            return {"possible": True, "reason": ""}
        return {
            "possible": False,
            "reason": "only a trace is open; open the model to change its heads",
        }
    ability: Ability = getattr(site, name)
    return {"possible": ability.possible, "reason": ability.reason}


def list_heads(trace: Trace) -> list[tuple[str, int]]:
    """List all heads as (site, head), in page order."""
    heads: list[tuple[str, int]] = []
    for layer in trace.layers:
        heads += [(layer.name, head) for head in range(layer.heads)]
    return heads


def measure_names(table: HeadTable) -> list[str]:
    """Return every measure that some head has; self- and cross-attention differ."""
    names: dict[str, None] = {}
    for head in table.heads:
        names |= dict.fromkeys(head.measures)
    return list(names)


def describe_measures(table: HeadTable | None) -> list[dict[str, Any]]:
    """Describe the measures of a table: name and range of the values over all heads."""
    if table is None or not table.heads:
        return []
    descriptions: list[dict[str, Any]] = []
    for name in measure_names(table):
        values = [head.measures[name].value for head in table.heads if name in head.measures]
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        descriptions.append({"name": name, "low": low, "high": high})
    return descriptions


def stack_measures(
    table: HeadTable, heads: Sequence[tuple[str, int]]
) -> tuple[list[str], NDArray[np.float32]]:
    """Return the names of the measures, and [heads, measures, 4] with value, interval and chance
    level of each head.

    `heads` are (site, head). Missing measurements are NaN.
    """
    names = measure_names(table)
    by_head = {(head.site, head.head): head for head in table.heads}
    stacked = np.full((len(heads), len(names), 4), np.nan, np.float32)
    for row, key in enumerate(heads):
        for column, name in enumerate(names if key in by_head else ()):
            if name in by_head[key].measures:
                stacked[row, column] = by_head[key].measures[name][:4]
    return names, stacked


def list_classes(table: HeadTable, sites: Sequence[str]) -> list[dict[str, Any]]:
    """List the classes of every head, likeliest first: site index, head, name, score, evidence."""
    index = {name: number for number, name in enumerate(sites)}
    listed: list[dict[str, Any]] = []
    for head in table.heads:
        if head.site in index:
            classes = [one._asdict() for one in head.classes]
            listed.append({"site": index[head.site], "head": head.head, "classes": classes})
    return listed


def make_file_stem(name: str) -> str:
    """Return the start of a model's file names: letters, digits, points and hyphens only.

    >>> make_file_stem("dates"), make_file_stem("../a b\\n"), make_file_stem("日期")
    ('headwise-dates', 'headwise-a-b', 'headwise-model')
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", plain).strip("-.")[:MAX_STEM].rstrip("-.")
    return f"headwise-{stem or 'model'}"


# --- Binary messages ----------------------------------------------------------------------

# Layout: header length (4 bytes, little-endian); header (JSON padded with spaces); then the
# arrays, each at a multiple of 8 bytes. The header lists the arrays with name, dtype, shape and
# offset, counted from the end of the header, and the fields of the caller.
ALIGNMENT = 8  # bytes; JavaScript's typed arrays need aligned offsets
DTYPE_NAMES = {"uint8": "u8", "float32": "f32", "int32": "i32"}
LENGTH_BYTES = 4  # size of the length of the header


def encode_arrays(arrays: Mapping[str, Array], **fields: Any) -> bytes:
    """Encode arrays of dtype uint8, int32 or float32 and the fields of the header as one message.

    >>> encode_arrays({"weights": np.zeros((1, 2), np.uint8)}, max=1.0)[4:].rstrip(bytes([0, 32]))
    b'{"max": 1.0, "arrays": [{"name": "weights", "dtype": "u8", "shape": [1, 2], "offset": 0}]}'
    """
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        entries.append(
            {
                "name": name,
                "dtype": DTYPE_NAMES[array.dtype.name],
                "shape": list(array.shape),
                "offset": offset,
            }
        )
        parts.append(data + b"\0" * (-len(data) % ALIGNMENT))
        offset += len(parts[-1])
    header = json.dumps({**fields, "arrays": entries}, allow_nan=False).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    return b"".join([len(header).to_bytes(LENGTH_BYTES, "little"), header, *parts])

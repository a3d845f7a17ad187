"""Summaries of attention weights too many to send: pooled tiles, marginals, the largest weight of a
part, thumbnails.

All of them read the weights of one head a few hundred queries at a time, so that a text of 8,192
tokens needs megabytes and not gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..observe.traces.attention_record import AttentionRecord
from ..observe.traces.attention_trace import QUERY_BLOCK, THUMBNAIL_SIZE, Trace, query_blocks

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
Array = NDArray[Any]
WeightReader = Callable[[slice], FloatArray]  # the weights of a range of queries, [queries, keys]
MaskReader = Callable[
    [slice], NDArray[np.bool_]
]  # whether each query of a range may attend to each key


class HeadReader(NamedTuple):
    """The weights and the mask of one head, by ranges of queries, and its numbers of queries and
    keys.
    """

    weights: WeightReader
    mask: MaskReader
    num_queries: int
    num_keys: int


class Cells(NamedTuple):
    """Edges of the cells of a picture: cell i covers the positions edges[i] to edges[i + 1] - 1."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]


class Marginals(NamedTuple):
    """One head without its pairs: what each key receives, how each query spreads, and the mean by
    distance.

    `received` is the mean over the queries that may attend to a key, [keys]. `entropy` (nats) and
    `maximum` are those of each query, [queries]. `by_offset` is the mean weight at each distance
    query - key over the allowed pairs, from
    -(keys - 1) to queries - 1.
    """

    received: FloatArray
    entropy: FloatArray
    maximum: FloatArray
    by_offset: FloatArray


class Peak(NamedTuple):
    """The largest weight of a part, and where it is."""

    query: int
    key: int
    weight: float


def make_edges(start: int, stop: int, cells: int) -> NDArray[np.int64]:
    """Edges of at most `cells` nearly equal cells over the positions from `start` to `stop`.

    >>> make_edges(3, 10, 3)
    array([ 3,  5,  7, 10])
    """
    cells = max(1, min(cells, stop - start))
    return start + np.arange(cells + 1) * (stop - start) // cells


def pool_weights(head: HeadReader, cells: Cells) -> tuple[FloatArray, ByteArray]:
    """The largest weight of each cell, and 1 where no pair of a cell is allowed."""
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
    """Ranges of neighbouring cells that cover up to `QUERY_BLOCK` positions, or one cell that
    covers more.
    """
    first = 0
    while first < len(edges) - 1:
        last = int(np.searchsorted(edges, edges[first] + QUERY_BLOCK, side="right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def compute_marginals(head: HeadReader, factor: FloatArray | None = None) -> Marginals:
    """The marginals of one head. `factor`, of every key, scales `received` and `maximum`, not the
    entropy.
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
        entropy[start:stop] = _row_entropy(weights)
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
    return Marginals(means if factor is None else means * factor, entropy, maximum, by_offset)


def _row_entropy(weights: FloatArray) -> FloatArray:
    """Entropy of every row in nats; 0 log 0 is 0."""
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return -np.einsum("qk,qk->q", weights, logs)


def find_peak(weights: WeightReader, queries: slice, keys: slice) -> Peak:
    """The largest weight of a range of queries and keys; the first of several."""
    peak = Peak(queries.start, keys.start, -1.0)
    for start, stop in query_blocks(queries.stop - queries.start):
        part = weights(slice(queries.start + start, queries.start + stop))[:, keys]
        row, column = divmod(int(part.argmax()), part.shape[1])
        if part[row, column] > peak.weight:
            peak = Peak(queries.start + start + row, keys.start + column, float(part[row, column]))
    return peak


# --- Thumbnails -----------------------------------------------------------------------------------


def enlarge_picture(picture: ByteArray) -> ByteArray:
    """A picture of at most 64 x 64 cells as one of 64 x 64 cells."""
    rows = np.arange(THUMBNAIL_SIZE) * picture.shape[0] // THUMBNAIL_SIZE
    columns = np.arange(THUMBNAIL_SIZE) * picture.shape[1] // THUMBNAIL_SIZE
    return picture[rows[:, None], columns]


def thumbnail_masks(trace: Trace) -> tuple[ByteArray, NDArray[np.int32]]:
    """The masked cells of all thumbnails, [masks, 64, 64], and the number of the mask of each head.

    Most heads of a model share one mask, so that each mask is computed and sent once.
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
    """A key of the mask of a head: equal for heads with equal masks."""
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
    """1 in every cell of a thumbnail in which no pair is allowed."""
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

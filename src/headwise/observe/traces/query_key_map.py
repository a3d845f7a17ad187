"""The queries and keys of one head: as points on a plane, and multiplied channel by channel.

On the plane, near points of both kinds have large scores. The products q[c] k[c] of the channels
sum up to q . k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...report.data import Table
from ...report.render import to_text
from .attention_record import Array, AttentionRecord
from .attention_trace import Trace


class QueryKeyMap(NamedTuple):
    """Points [queries, 2] and [keys, 2], and the share of the variance of all vectors that the
    plane holds.
    """

    queries: Array
    keys: Array
    share: float
    query_words: tuple[str, ...] = ()
    key_words: tuple[str, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """The points as plain values."""
        points = {"queries": self.queries.tolist(), "keys": self.keys.tolist(), "share": self.share}
        return points | {"query_words": self.query_words, "key_words": self.key_words}

    def __str__(self) -> str:
        rows: list[tuple[str, int, float, float, str]] = []
        sides = {"query": (self.queries, self.query_words), "key": (self.keys, self.key_words)}
        for kind, (points, words) in sides.items():
            for place, (x, y) in enumerate(points.tolist()):
                rows.append((kind, place, x, y, words[place] if words else ""))
        plane = f"plane of the largest variance ({self.share:.0%} of it)"
        title = f"queries and keys on the {plane}"
        return to_text(Table(title, ("kind", "position", "x", "y", "token"), rows))


def map_queries_and_keys(trace: Trace, site: str | int, head: int, *, row: int = 0) -> QueryKeyMap:
    """The first two principal components of the queries and keys of a head, after rotation.

    The mean of each kind is subtracted: adding a vector to all keys changes no attention weight.
    Both kinds are scaled to the same mean length, so that one kind does not shrink to a point.
    """
    layer = _layer_with_scores(trace, site)
    layer.check(head=head, row=row)
    if any(
        call.first != call.keys[0] or call.first_query_row != call.queries[0]
        for call in layer.calls
    ):
        raise ValueError(
            f"the queries and keys of {layer.name} are not in the order of the tokens; trace one "
            "forward call"
        )
    queries = layer.arrays["q"][row, : layer.num_queries, head].astype(np.float64)
    keys = layer.arrays["k"][row, : layer.num_keys, layer.kv_head_of_query[head]].astype(np.float64)
    queries, keys = (_normalise_lengths(vectors - vectors.mean(0)) for vectors in (queries, keys))
    stacked = np.concatenate([queries, keys])
    _, sizes, directions = np.linalg.svd(stacked, full_matrices=False)
    plane = directions[:2]
    largest = np.take_along_axis(plane, np.abs(plane).argmax(1)[:, None], 1)
    points = stacked @ (plane * np.sign(largest)).T  # one of the two signs
    # a head of one channel has one component
    points = np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
    total = float((sizes**2).sum())
    share = float((sizes[:2] ** 2).sum() / total) if total > 0 else 1.0
    points = points.astype(np.float32)
    return QueryKeyMap(
        points[: len(queries)],
        points[len(queries) :],
        share,
        _words(trace, layer.query_stream, row, len(queries)),
        _words(trace, layer.key_stream, row, len(keys)),
    )


def _layer_with_scores(trace: Trace, site: str | int) -> AttentionRecord:
    layer = trace.get_layer(site)
    if not {"q", "k"} <= set(layer.arrays):
        raise ValueError(
            f"the queries and keys of {layer.name} were not recorded; show the tokens of the model"
        )
    return layer


def _words(trace: Trace, stream: str, row: int, count: int) -> tuple[str, ...]:
    return trace.streams[stream][row].words[:count] if trace.streams.get(stream) else ()


def _normalise_lengths(vectors: Array) -> Array:
    length = np.linalg.norm(vectors, axis=1).mean()
    return vectors / length if length > 0 else vectors


# --- Channel by channel ---------------------------------------------------------------------------


class ChannelProducts(NamedTuple):
    """Products [keys, channels] of a query and each key, the `positions` of the keys, and the
    `scale` of the score.
    """

    products: Array
    positions: Array
    scale: float


def multiply_channels(
    trace: Trace,
    site: str | int,
    head: int,
    query: int,
    *,
    row: int = 0,
    max_keys: int | None = None,
) -> ChannelProducts:
    """The products of the channels of one query with those of its keys, after rotation and before
    the scale.

    Of more than `max_keys` keys those with the largest scores are kept, in the order of the text.
    Biases and soft-caps of the scores are not part of the products.
    """
    layer = _layer_with_scores(trace, site)
    layer.check(head=head, row=row, query=query)
    call = layer.find_call(query)
    number = query - call.queries[0]
    q = layer.queries_of(call, head, row, number, number + 1)
    k = layer.keys_of(call, head, row)
    positions = layer.key_indices(call)
    allowed = trace.head_mask(site, head, slice(query, query + 1), row=row)[0][positions]
    rows = np.flatnonzero(allowed)
    products = k[rows] * q
    if max_keys is not None and len(rows) > max_keys:
        strongest = np.sort(np.argsort(-products.sum(1), kind="stable")[:max_keys])
        rows = rows[strongest]
        products = products[strongest]
    return ChannelProducts(
        np.ascontiguousarray(products), positions[rows].astype(np.int32), call.scale
    )

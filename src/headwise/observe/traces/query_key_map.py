"""The queries and keys of one head: as points on a plane, and multiplied channel by channel.

On the plane, near points of both kinds have large scores. The products q[c] k[c] of the channels
sum up to q . k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...report.text import pad, pad_left
from .attention_record import Array
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
        lines = [
            f"queries and keys on the plane of their largest variance ({self.share:.0%} of it)",
            "",
        ]
        lines.append(f"{'':<6}{pad_left('position', 8)}  {'x':>9}  {'y':>9}  token")
        for kind, points, words in (
            ("query", self.queries, self.query_words),
            ("key", self.keys, self.key_words),
        ):
            named = words or ("",) * len(points)
            for place, ((x, y), word) in enumerate(zip(points.tolist(), named, strict=True)):
                lines.append(f"{pad(kind, 6)}{place:>8}  {x:>9.3f}  {y:>9.3f}  {word!r}")
        return "\n".join(lines)


def map_queries_and_keys(trace: Trace, site: str | int, head: int, *, row: int = 0) -> QueryKeyMap:
    """The first two principal components of the queries and keys of a head, after rotation.

    The mean of each kind is subtracted: adding a vector to all keys changes no attention weight.
    Both kinds are scaled to the same mean length, so that one kind does not shrink to a point.
    """
    layer = trace.get_layer(site)
    if not {"q", "k"} <= set(layer.arrays):
        raise ValueError(
            f"the queries and keys of {layer.name} were not recorded; show the tokens of the model"
        )
    if not 0 <= head < layer.heads:
        raise ValueError(f"{layer.name} has no head {head}; give one in 0..{layer.heads - 1}")
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
    plane = (
        plane * np.sign(plane[np.arange(len(plane)), np.abs(plane).argmax(1)])[:, None]
    )  # one of the two signs
    points = stacked @ plane.T
    points = np.pad(
        points, ((0, 0), (0, 2 - points.shape[1]))
    )  # a head of one channel has one component
    total = float((sizes**2).sum())
    share = float((sizes[:2] ** 2).sum() / total) if total > 0 else 1.0
    words = (
        trace.streams[stream][row].words[:count] if trace.streams.get(stream) else ()
        for stream, count in ((layer.query_stream, len(queries)), (layer.key_stream, len(keys)))
    )
    return QueryKeyMap(
        points[: len(queries)].astype(np.float32),
        points[len(queries) :].astype(np.float32),
        share,
        *words,
    )


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
    layer = trace.get_layer(site)
    if not {"q", "k"} <= set(layer.arrays):
        raise ValueError(
            f"the queries and keys of {layer.name} were not recorded; show the tokens of the model"
        )
    if not 0 <= head < layer.heads or not 0 <= query < layer.num_queries:
        raise ValueError(
            f"{layer.name} has no head {head} with query {query}; give both in its ranges"
        )
    call = next(one for one in layer.calls if one.queries[0] <= query < one.queries[1])
    if call.first is None and call.places is None:
        raise ValueError(
            f"the key positions of query {query} of {layer.name} are unknown; trace one forward "
            "call"
        )
    q = layer.arrays["q"][row, call.first_query_row + query - call.queries[0], head].astype(
        np.float32
    )
    k = layer.arrays["k"][row, call.keys[0] : call.keys[1], layer.kv_head_of_query[head]].astype(
        np.float32
    )
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

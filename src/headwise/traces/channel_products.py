"""The score of a query and its keys, channel by channel: q[c] k[c], whose sum over the channels is q . k."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .attention_record import Array
from .attention_trace import Trace


class ChannelProducts(NamedTuple):
    """Products [keys, channels] of a query and each key, the `positions` of the keys, and the `scale` of the score."""

    products: Array
    positions: Array
    scale: float


def multiply_channels(
    trace: Trace, site: str | int, head: int, query: int, *, row: int = 0, max_keys: int | None = None
) -> ChannelProducts:
    """The products of the channels of one query with those of its keys, after rotation and before the scale.

    Of more than `max_keys` keys those with the largest scores are kept, in the order of the text. Biases and soft-caps
    of the scores are not part of the products.
    """
    layer = trace.get_layer(site)
    if not {"q", "k"} <= set(layer.arrays):
        raise ValueError(f"the queries and keys of {layer.name} were not recorded; show the tokens of the model")
    if not 0 <= head < layer.heads or not 0 <= query < layer.num_queries:
        raise ValueError(f"{layer.name} has no head {head} with query {query}; give both in its ranges")
    call = next(one for one in layer.calls if one.queries[0] <= query < one.queries[1])
    if call.first is None and call.places is None:
        raise ValueError(f"the key positions of query {query} of {layer.name} are unknown; trace one forward call")
    q = layer.arrays["q"][row, call.first_query_row + query - call.queries[0], head].astype(np.float32)
    k = layer.arrays["k"][row, call.keys[0] : call.keys[1], layer.kv_head_of_query[head]].astype(np.float32)
    positions = layer.key_indices(call)
    allowed = trace.head_mask(site, head, slice(query, query + 1), row=row)[0][positions]
    rows = np.flatnonzero(allowed)
    products = k[rows] * q
    if max_keys is not None and len(rows) > max_keys:
        strongest = np.sort(np.argsort(-products.sum(1), kind="stable")[:max_keys])
        rows, products = rows[strongest], products[strongest]
    return ChannelProducts(np.ascontiguousarray(products), positions[rows].astype(np.int32), call.scale)

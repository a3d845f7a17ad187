"""The computation of one head for one query, step by step: each step with its numbers and the rule
that made them.

`recorded_steps` reads the steps that a trace holds, without the model.
`headwise.observe.head_analysis.model_steps` runs an open model and has all of them.
`map_queries_and_keys` shows the queries and keys of a head as points on a plane, where near points
of both kinds have large scores; `multiply_channels` gives the products q[c] k[c], which sum up to q
. k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...report.data import Table
from ...report.render import to_text
from .attention_record import MASKED_BELOW, Array, AttentionCallRecord, AttentionRecord
from .attention_trace import Trace

MAX_KEY_VECTORS = 32  # key vectors in the steps; scores and weights cover all keys
NOT_RECORDED = (
    "a trace holds what attention reads, from the queries and keys on; open the model to see it"
)
NO_SCORES = (
    "the layer is no plain softmax of scores, so the trace holds its weights themselves; open the "
    "model to see it"
)
UNRECORDED_STEPS: tuple[str, ...] = (
    "residual",
    "norm",
    "project",
    "transform",
    "contribution",
    "residual_out",
)


class HeadPlace(NamedTuple):
    """Identify one query of one head: site, head, query position, and batch row."""

    site: str
    head: int
    query: int
    row: int = 0


@dataclass(frozen=True)
class HeadStep:
    """Describe one step: its name, its arrays, and how they follow from the previous steps.

    `formula` is the rule; `facts` are the numbers in it that are not arrays, such as a scale;
    `part` is the part of the layer that does the step. The array "out" is the result; others are
    operands.
    """

    name: str
    formula: str
    arrays: Mapping[str, Array] = field(repr=False)
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    part: str = ""


@dataclass(frozen=True)
class HeadSteps:
    """List the steps of one head for one query in order, and the `missing` steps with the reason.

    `positions` are the positions of all keys, [S]. `shown_keys` are the indices of the keys with
    the largest weights; only their vectors are included. `origin` is "model" or "trace".
    """

    place: HeadPlace
    origin: str
    steps: tuple[HeadStep, ...]
    positions: Array = field(repr=False)
    shown_keys: Array = field(repr=False)
    missing: Mapping[str, str] = field(default_factory=dict[str, str])

    def find(self, name: str) -> HeadStep:
        """Return the first step with this name."""
        for step in self.steps:
            if step.name == name:
                return step
        raise ValueError(
            f"there is no step {name!r}; the steps are "
            f"{', '.join(step.name for step in self.steps)}"
        )


def choose_keys(weights: Array, allowed: Array, always: int | None = None) -> Array:
    """Return indices of allowed keys with the largest weights, and the key `always`.

    At most `MAX_KEY_VECTORS` in all.

    >>> choose_keys(np.array([0.1, 0.7, 0.2]), np.array([True, True, True])).tolist()
    [0, 1, 2]
    """
    order = np.argsort(np.where(allowed, -weights, np.inf), kind="stable")[:MAX_KEY_VECTORS]
    chosen = set(order[allowed[order]].tolist())
    if always is not None and 0 <= always < len(weights) and always not in chosen:
        chosen = {*sorted(chosen, key=lambda key: -weights[key])[: MAX_KEY_VECTORS - 1], always}
    return np.array(sorted(chosen), np.int32)


def gather_step(weights: Array, values: Array, shown: Array, out: Array | None = None) -> HeadStep:
    """Sum the weighted values [S, V]; "rest" is the contribution of the keys not shown."""
    total = weights.astype(np.float64) @ values.astype(np.float64)
    rest = total - weights[shown].astype(np.float64) @ values[shown].astype(np.float64)
    arrays = {
        "v": values[shown],
        "rest": as_float32(rest),
        "out": as_float32(total if out is None else out),
    }
    return HeadStep("gather", "z = Σⱼ aⱼ vⱼ", arrays)


def contribution_step(z: Array, matrix: Array, terms: int = 4) -> HeadStep:
    """Multiply z by the head's slice of the output projection, [V, model].

    The result is the head's contribution to the residual stream.
    """
    arrays = {"out": as_float32(z.astype(np.float64) @ matrix.astype(np.float64))}
    return HeadStep("contribution", "c = z W_O[head]", arrays | largest_terms(z, matrix, terms))


def largest_terms(x: Array, matrix: Array, count: int) -> dict[str, Array]:
    """Find the `count` largest products of each output channel of x @ matrix.

    Returns their input channels and weights, [outputs, count].

    >>> terms = largest_terms(np.array([1.0, 2.0]), np.array([[3.0], [-4.0]]), 1)
    >>> terms["channels"].tolist(), terms["factors"].tolist()
    ([[1]], [[-4.0]])
    """
    products = np.abs(x[:, None] * matrix)
    count = min(count, len(x))
    largest = np.argpartition(-products, count - 1, axis=0)[:count]
    order = np.argsort(-np.take_along_axis(products, largest, 0), axis=0, kind="stable")
    channels = np.take_along_axis(largest, order, 0)
    factors = np.take_along_axis(matrix, channels, 0)
    return {
        "channels": channels.T.astype(np.int32),
        "factors": as_float32(factors.T),
        "input": as_float32(x),
    }


# --- From a trace ---------------------------------------------------------------------------------


def recorded_steps(trace: Trace, place: HeadPlace, key: int | None = None) -> HeadSteps:
    """Return the steps that a trace holds, from the queries and keys to the head's output."""
    layer = trace.get_layer(place.site)
    layer.check(head=place.head, row=place.row, query=place.query)
    call = layer.find_call(place.query)
    positions = layer.key_indices(call)
    block = slice(place.query, place.query + 1)
    weights = trace.head_weights(place.site, place.head, block, row=place.row)[0][positions]
    allowed = trace.head_mask(place.site, place.head, block, row=place.row)[0][positions]
    matches = np.flatnonzero(positions == key)
    shown = choose_keys(weights, allowed, int(matches[0]) if len(matches) else None)
    missing: dict[str, str] = dict.fromkeys(UNRECORDED_STEPS, NOT_RECORDED)
    if call.weights is None:
        steps = [
            *_score_steps(trace, layer, call, place, shown),
            softmax_step(weights, layer.sink(place.head)),
        ]
    else:
        missing |= dict.fromkeys(("product", "scale", "mask"), NO_SCORES)
        steps = [HeadStep("normalise", "a as recorded", {"out": weights})]
    if "v" in layer.arrays and call.weights is None:
        steps.append(gather_step(weights, layer.keys_of(call, place.head, place.row, "v"), shown))
    else:
        missing["gather"] = "the values were not recorded; record the trace with --record v"
    return HeadSteps(place, "trace", tuple(steps), positions.astype(np.int32), shown, missing)


def _score_steps(
    trace: Trace, layer: AttentionRecord, call: AttentionCallRecord, place: HeadPlace, shown: Array
) -> Iterator[HeadStep]:
    """Yield products, scale, soft-cap, bias and mask of a call with recorded queries and keys."""
    number = place.query - call.queries[0]
    q = layer.queries_of(call, place.head, place.row, number, number + 1)[0]
    k = layer.keys_of(call, place.head, place.row)
    products = k @ q
    scores = products * np.float32(call.scale)
    yield HeadStep("vectors", "q and k as attention compares them", {"q": q, "k": k[shown]})
    yield HeadStep("product", "pⱼ = q · kⱼ", {"out": products})
    yield HeadStep("scale", "sⱼ = scale · pⱼ", {"out": scores}, {"scale": call.scale})
    if call.cap is not None:
        cap = np.float32(call.cap)
        scores = (cap * np.tanh(scores / cap)).astype(np.float32)
        formula = "sⱼ ← cap · tanh(sⱼ / cap)"
        yield HeadStep("score_step", formula, {"out": scores}, {"cap": call.cap}, "soft-cap")
    allowed = np.ones(len(scores), bool)
    for grid in call.grids:
        added = trace.grids[grid].unpack_rows(place.row, place.head, number, number + 1)[0]
        is_allowed = added > MASKED_BELOW
        allowed &= is_allowed
        bias = np.where(is_allowed, added, 0).astype(np.float32)
        if bias.any():
            scores = scores + bias
            arrays = {"out": scores, "added": bias}
            yield HeadStep("score_step", "sⱼ ← sⱼ + bⱼ", arrays, part="bias")
    if call.causal:
        allowed &= np.arange(len(scores)) <= number
    yield mask_step(allowed)


def mask_step(allowed: Array) -> HeadStep:
    """Show which keys a query may attend to."""
    facts = {"allowed": float(allowed.sum()), "keys": float(len(allowed))}
    return HeadStep(
        "mask", "sⱼ = -∞ where key j is not allowed", {"allowed": allowed.astype(np.uint8)}, facts
    )


def softmax_step(weights: Array, sink: float | None, part: str = "") -> HeadStep:
    """Compute the weights; a sink (a score without a value) takes part of the row."""
    facts = {"sum": float(weights.sum(dtype=np.float64))}
    if sink is None:
        return HeadStep("normalise", "aⱼ = exp(sⱼ) / Σᵢ exp(sᵢ)", {"out": weights}, facts, part)
    formula = "aⱼ = exp(sⱼ) / (exp(sink) + Σᵢ exp(sᵢ))"
    return HeadStep("normalise", formula, {"out": weights}, facts | {"sink": sink}, part)


def as_float32(array: Array) -> Array:
    """Return the array in float32, contiguous."""
    return np.ascontiguousarray(array, np.float32)


# --- Queries and keys of one head -----------------------------------------------------------------


class QueryKeyMap(NamedTuple):
    """Place queries [queries, 2] and keys [keys, 2] on a plane.

    The share is the part of the variance of all vectors that the plane holds.
    """

    queries: Array
    keys: Array
    share: float
    query_words: tuple[str, ...] = ()
    key_words: tuple[str, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """Return the points as plain values."""
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
    """Project rotated queries and keys of a head on their first two principal components.

    The mean of each kind is subtracted: adding a vector to all keys changes no attention weight.
    Both kinds are scaled to the same mean length, so that neither shrinks to a point.
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
    """Store products [keys, channels] of a query and each key.

    `positions` are the key positions, and `scale` is the scale of the score.
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
    """Multiply one query with its keys channel by channel, after rotation and before the scale.

    With more than `max_keys` keys, the largest scores are kept, in text order. Biases and soft-caps
    of the scores are not part of the products.
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

"""Comparison of two traces head by head: two inputs of one model, or one input of two checkpoints.

Tokens of the two traces are aligned first; weights are compared over the aligned queries. Measures that need no
alignment, such as entropy, are reported for both traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

import numpy as np

from ..errors import suggest
from .attention_record import Array, AttentionRecord
from .attention_trace import Trace, query_blocks, token_strings

ALIGNMENTS = ("tokens", "positions")
MEASURES = ("entropy", "breadth", "confidence", "distance", "first")
SUM_TOLERANCE = 1e-4  # rounding error of float32 weights in the sum of a row
MAX_HEADS_SHOWN = 12


@dataclass(frozen=True)
class TokenAlignment:
    """Pairs of tokens of two texts: token `first[n]` of the first text corresponds to token `second[n]` of the second.

    `equal[n]` is true if the two tokens are the same string. Both lists of positions increase.
    """

    first: Array
    second: Array
    equal: Array

    def within(self, first_count: int, second_count: int) -> TokenAlignment:
        """The pairs among the first `first_count` and `second_count` tokens."""
        inside = (self.first < first_count) & (self.second < second_count)
        return TokenAlignment(self.first[inside], self.second[inside], self.equal[inside])


def align_tokens(first: list[str], second: list[str], align: str = "tokens") -> TokenAlignment:
    """Align two texts: equal runs of tokens, and replaced runs of equal length token by token.

    With `align="positions"`, token n corresponds to token n. Empty strings, which stand for padding, correspond to
    nothing.

    >>> align_tokens("the cat sat".split(), "so the dog sat".split()).second.tolist()
    [1, 2, 3]
    """
    if align not in ALIGNMENTS:
        raise ValueError(f"unknown align={align!r}; {suggest(align, ALIGNMENTS)}")
    pairs: list[tuple[int, int]] = []
    if align == "positions":
        pairs = [(n, n) for n in range(min(len(first), len(second)))]
    else:
        for operation, i, i_end, j, j_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
            if operation == "equal" or i_end - i == j_end - j:
                pairs += zip(range(i, i_end), range(j, j_end), strict=True)
    pairs = [(i, j) for i, j in pairs if first[i] and second[j]]
    firsts, seconds = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    return TokenAlignment(firsts, seconds, np.array([first[i] == second[j] for i, j in pairs], bool))


@dataclass(frozen=True)
class HeadComparison:
    """Differences of one head between two traces.

    - `max_difference`, `mean_difference`: largest and mean |second weight - first weight| over the aligned queries and
      keys that either trace allows. `mean_difference` is NaN if there is no such pair.
    - `js_distance`: Jensen-Shannon distance of two rows, 0 (equal) to 1, mean over aligned queries.
    - `entropy_change`: entropy of the second row minus entropy of the first in nats, mean over aligned queries.
    - `js_distance_T`, `entropy_change_T`: these two for each aligned query.
    - `measures`: mean over all queries of the first trace, and of the second.

    A value is NaN where it is undefined: weights below zero or rows that sum to more than 1 are no distribution.
    """

    site: str
    head: int
    max_difference: float
    mean_difference: float
    js_distance: float
    entropy_change: float
    js_distance_T: Array = field(repr=False)
    entropy_change_T: Array = field(repr=False)
    measures: Mapping[str, tuple[float, float]] = field(repr=False)

    @property
    def data(self) -> dict[str, Any]:
        """The comparison as plain values; None where a value is undefined."""
        numbers = {name: _finite(getattr(self, name)) for name in _COLUMNS}
        rows = {
            "js_distances": [_finite(value) for value in self.js_distance_T.tolist()],
            "entropy_changes": [_finite(value) for value in self.entropy_change_T.tolist()],
        }
        measures = {name: [_finite(value) for value in pair] for name, pair in self.measures.items()}
        return {"site": self.site, "head": self.head, **numbers, **rows, "measures": measures}


_COLUMNS = ("max_difference", "mean_difference", "js_distance", "entropy_change")


@dataclass(frozen=True)
class TraceComparison:
    """Two compared traces: every head of the sites that both have, and how their tokens were aligned.

    `alignments` has one entry for each token stream. `skipped` maps sites that were not compared to the reason.
    """

    first: Trace = field(repr=False)
    second: Trace = field(repr=False)
    rows: tuple[int, int]
    heads: tuple[HeadComparison, ...]
    alignments: Mapping[str, TokenAlignment] = field(repr=False)
    skipped: Mapping[str, str]

    @property
    def by_distance(self) -> list[HeadComparison]:
        """All heads, the one with the largest Jensen-Shannon distance first; heads without one are last."""
        return sorted(self.heads, key=lambda head: (math.isnan(head.js_distance), -head.js_distance))

    def get_head(self, site: str | int, head: int) -> HeadComparison:
        """The comparison of one head."""
        name = self.first.get_layer(site).name
        for comparison in self.heads:
            if (comparison.site, comparison.head) == (name, head):
                return comparison
        reason = self.skipped.get(name, "give one of the compared heads")
        raise ValueError(f"head {head} of {name} was not compared: {reason}")

    def aligned_tokens(self, site: str | int, side: str = "queries") -> TokenAlignment:
        """The aligned queries or keys of a site."""
        if side not in ("queries", "keys"):
            raise ValueError(f"unknown side={side!r}; {suggest(side, ('queries', 'keys'))}")
        layers = [trace.get_layer(site) for trace in (self.first, self.second)]
        counts = [layer.num_queries if side == "queries" else layer.num_keys for layer in layers]
        stream = layers[0].query_stream if side == "queries" else layers[0].key_stream
        return self.alignments[stream].within(*counts)

    def weight_difference(self, site: str | int, head: int) -> Array:
        """Second weights minus first weights of one head, [aligned queries, aligned keys]."""
        queries, keys = (self.aligned_tokens(site, side) for side in ("queries", "keys"))
        first = self.first.head_weights(site, head, row=self.rows[0])[np.ix_(queries.first, keys.first)]
        return self.second.head_weights(site, head, row=self.rows[1])[np.ix_(queries.second, keys.second)] - first

    @property
    def data(self) -> dict[str, Any]:
        """The comparison as plain values: streams with their pairs of tokens, heads, sites that were skipped."""
        streams = {
            name: {
                "first": pairs.first.tolist(),
                "second": pairs.second.tolist(),
                "equal": pairs.equal.tolist(),
            }
            for name, pairs in self.alignments.items()
        }
        return {
            "models": [dict(trace.model) for trace in (self.first, self.second)],
            "rows": list(self.rows),
            "streams": streams,
            "heads": [head.data for head in self.heads],
            "skipped": dict(self.skipped),
        }

    def __str__(self) -> str:
        return format_comparison(self)


def compare_traces(
    first: Trace,
    second: Trace,
    *,
    sites: Iterable[str | int] = (),
    rows: tuple[int, int] = (0, 0),
    align: str = "tokens",
) -> TraceComparison:
    """Compare the attention weights of two traces, head by head.

    Sites are matched by name, tokens by `align`: "tokens" aligns equal runs of tokens, and replaced runs of equal
    length token by token; "positions" aligns token n with token n. `rows` are the texts of the two traces that are
    compared, `sites` the sites of the first (default: all).

    A key that only one trace has counts as a different key in `js_distance`, and so does the weight that a row gives
    to no key (a learned sink). Memory stays small, because weights are computed for a few hundred queries at a time.

    >>> from headwise.traces import trace_from_weights
    >>> sharp, flat = (trace_from_weights([[[row, row]]], ["a", "b"]) for row in ([1.0, 0.0], [0.5, 0.5]))
    >>> head = compare_traces(sharp, flat).heads[0]
    >>> head.max_difference, round(head.js_distance, 3), round(head.entropy_change, 3)
    (0.5, 0.558, 0.693)
    """
    chosen = [first.get_layer(site) for site in sites]
    wanted = chosen or list(first.layers)
    _check_rows(first, second, rows)
    partners = {layer.name: layer for layer in second.layers}
    skipped = {layer.name: reason for layer in wanted if (reason := _mismatch(layer, partners.get(layer.name)))}
    if not chosen:
        names = {layer.name for layer in wanted}
        skipped |= {name: "the first trace has no such site" for name in partners if name not in names}
    compared = [layer for layer in wanted if layer.name not in skipped]
    if not compared:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in islice(skipped.items(), 3))
        raise ValueError(f"cannot compare the traces: they have no site in common ({reasons}); trace related models")
    streams = {stream for layer in compared for stream in (layer.query_stream, layer.key_stream)}
    alignments = {
        stream: align_tokens(_stream_tokens(first, stream, rows[0]), _stream_tokens(second, stream, rows[1]), align)
        for stream in sorted(streams)
    }
    empty = TraceComparison(first, second, rows, (), alignments, skipped)
    heads = tuple(_compare_head(empty, layer.name, head) for layer in compared for head in range(layer.heads))
    return TraceComparison(first, second, rows, heads, alignments, skipped)


def _check_rows(first: Trace, second: Trace, rows: tuple[int, int]) -> None:
    for trace, row, which in zip((first, second), rows, ("first", "second"), strict=True):
        batch = min((layer.batch_size for layer in trace.layers), default=0)
        if not 0 <= row < batch:
            raise ValueError(f"the {which} trace has no row {row}; it has {batch} rows, numbered from 0")


def _mismatch(layer: AttentionRecord, partner: AttentionRecord | None) -> str:
    """Why two layers cannot be compared; empty if they can."""
    if partner is None:
        return "the second trace has no such site"
    if layer.heads != partner.heads:
        return f"it has {layer.heads} heads in the first trace and {partner.heads} in the second"
    if (layer.query_stream, layer.key_stream) != (partner.query_stream, partner.key_stream):
        return "its queries and keys are of other token streams in the second trace"
    return ""


def _stream_tokens(trace: Trace, stream: str, row: int) -> list[str]:
    """Strings of the tokens of a stream; "" for padding."""
    counts = [
        count
        for layer in trace.layers
        for name, count in ((layer.query_stream, layer.num_queries), (layer.key_stream, layer.num_keys))
        if name == stream
    ]
    words = token_strings(trace, stream, row, max(counts))
    rows = trace.streams.get(stream, ())
    ids = rows[row].ids if row < len(rows) else ()
    return ["" if n < len(ids) and ids[n] < 0 else word or "\0" for n, word in enumerate(words)]


# --- One head ------------------------------------------------------------------------------------------


def _compare_head(comparison: TraceComparison, site: str, head: int) -> HeadComparison:
    queries, keys = (comparison.aligned_tokens(site, side) for side in ("queries", "keys"))
    largest, total, pairs = 0.0, 0.0, 0
    distances: list[Array] = []
    changes: list[Array] = []
    for start, stop in query_blocks(len(queries.first)):
        block = slice(start, stop)
        p, q, allowed = _aligned_rows(comparison, (site, head), (queries.first[block], queries.second[block]))
        difference = np.abs(q[:, keys.second] - p[:, keys.first])
        allowed_pairs = allowed[0][:, keys.first] | allowed[1][:, keys.second]
        largest = max(largest, float(difference.max(initial=0.0)))
        total, pairs = total + float(difference[allowed_pairs].sum()), pairs + int(allowed_pairs.sum())
        distances.append(_js_distances(p, q, keys))
        changes.append(row_entropies(q) - row_entropies(p))
    js_distance_T, entropy_change_T = (
        np.concatenate(parts) if parts else np.zeros(0) for parts in (distances, changes)
    )
    measured = [
        _measure_head(trace, site, head, row)
        for trace, row in zip((comparison.first, comparison.second), comparison.rows, strict=True)
    ]
    return HeadComparison(
        site,
        head,
        largest,
        total / pairs if pairs else math.nan,
        _mean(js_distance_T),
        _mean(entropy_change_T),
        js_distance_T,
        entropy_change_T,
        {name: (measured[0][name], measured[1][name]) for name in MEASURES if name in measured[0]},
    )


def _aligned_rows(
    comparison: TraceComparison, head: tuple[str, int], queries: tuple[Array, Array]
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Weights of the given queries in both traces, in float64, and the pairs that each trace allows."""
    weights: list[Array] = []
    allowed: list[Array] = []
    traces = zip((comparison.first, comparison.second), comparison.rows, queries, strict=True)
    for trace, row, positions in traces:
        start, stop = int(positions.min(initial=0)), int(positions.max(initial=-1)) + 1
        neighbours = slice(start, stop)
        weights.append(trace.head_weights(*head, neighbours, row=row)[positions - start].astype(np.float64))
        allowed.append(trace.head_mask(*head, neighbours, row=row)[positions - start])
    return weights[0], weights[1], (allowed[0], allowed[1])


def _js_distances(p: Array, q: Array, keys: TokenAlignment) -> Array:
    """Jensen-Shannon distance of each pair of rows, in 0..1; NaN for rows that are no distributions.

    The rows are distributions over the aligned keys, the keys of either trace alone, and no key.
    """
    sums = [weights.sum(-1) for weights in (p, q)]
    is_distribution = (p >= 0).all(-1) & (q >= 0).all(-1)
    is_distribution &= (sums[0] <= 1 + SUM_TOLERANCE) & (sums[1] <= 1 + SUM_TOLERANCE)
    p, q = np.maximum(p, 0), np.maximum(q, 0)
    divergence = _js_terms(p[:, keys.first], q[:, keys.second]).sum(-1)
    aligned_sums = [p[:, keys.first].sum(-1), q[:, keys.second].sum(-1)]
    for total, aligned in zip(sums, aligned_sums, strict=True):  # a weight w opposite 0 contributes w / 2 log 2
        divergence += np.maximum(total - aligned, 0) * math.log(2) / 2
    to_no_key = [np.where(1 - total > SUM_TOLERANCE, 1 - total, 0) for total in sums]
    divergence += _js_terms(*to_no_key)
    return np.where(is_distribution, np.sqrt(np.clip(divergence / math.log(2), 0, 1)), np.nan)


def _js_terms(p: Array, q: Array) -> Array:
    """Terms of the Jensen-Shannon divergence in nats: H((p + q) / 2) - (H(p) + H(q)) / 2 summed over keys."""
    middle = (p + q) / 2
    terms = np.zeros_like(p)
    for weights in (p, q):
        positive = weights > 0
        ratio = np.divide(weights, middle, out=np.ones_like(p), where=positive)
        terms += np.where(positive, weights, 0) * np.log(ratio) / 2
    return terms


def row_entropies(weights: Array) -> Array:
    """Entropy -sum p log p of each row in nats; NaN for rows with a weight below zero.

    >>> row_entropies(np.array([[0.5, 0.5, 0.0]])).round(4)
    array([0.6931])
    """
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return np.where((weights < 0).any(-1), np.nan, -(weights * logs).sum(-1) + 0.0)


def _measure_head(trace: Trace, site: str, head: int, row: int) -> dict[str, float]:
    """Means of `MEASURES` over the queries of one trace that may attend to a key; padded queries do not count."""
    layer = trace.get_layer(site)
    padded, padded_keys = (
        np.array([not token for token in _stream_tokens(trace, stream, row)], bool)
        for stream in (layer.query_stream, layer.key_stream)
    )
    first_key = int(np.argmin(padded_keys))
    columns: dict[str, list[Array]] = {name: [] for name in MEASURES}
    for start, stop in query_blocks(layer.num_queries):
        weights = trace.head_weights(site, head, slice(start, stop), row=row).astype(np.float64)
        allowed = trace.head_mask(site, head, slice(start, stop), row=row)
        counted = allowed.any(-1) & ~padded[start:stop]
        for name, values in _row_measures(weights, allowed, start, first_key).items():
            columns[name].append(np.where(counted, values, np.nan))
    if layer.query_stream != layer.key_stream:
        del columns["distance"]
    return {name: _mean(np.concatenate(values) if values else np.zeros(0)) for name, values in columns.items()}


def _row_measures(weights: Array, allowed: Array, first_query: int, first_key: int) -> dict[str, Array]:
    """Every measure of each row; NaN where a row has none, for example a breadth of a single allowed key."""
    entropy, num_allowed = row_entropies(weights), allowed.sum(-1)
    query_positions: Array = np.arange(first_query, first_query + len(weights), dtype=np.int64)
    offsets = np.abs(np.arange(weights.shape[1], dtype=np.int64) - query_positions[:, None])
    return {
        "entropy": entropy,
        "breadth": np.where(num_allowed > 1, np.exp(entropy) / np.maximum(num_allowed, 1), np.nan),
        "confidence": weights.max(-1, initial=0.0),
        "distance": (weights * offsets).sum(-1),
        "first": np.where(allowed[:, first_key], weights[:, first_key], np.nan),
    }


def _mean(values: Array) -> float:
    """Mean of the values that are not NaN; NaN if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- A comparison as a table in a terminal -------------------------------------------------------------


def format_comparison(comparison: TraceComparison) -> str:
    """Summary of a comparison for the terminal: alignment by stream, then the most different heads."""
    lines: list[str] = []
    for stream, pairs in comparison.alignments.items():
        tokens = [
            len(_stream_tokens(trace, stream, row))
            for trace, row in zip((comparison.first, comparison.second), comparison.rows, strict=True)
        ]
        counts = f"{len(pairs.first)} aligned tokens of {tokens[0]} and {tokens[1]}"
        lines.append(f"{stream}: {counts}, {int(pairs.equal.sum())} equal")
    shown = comparison.by_distance[:MAX_HEADS_SHOWN]
    width = max(len(head.site) for head in shown) + 5
    lines.append("head".ljust(width) + "  JS distance  max |dw|  mean |dw|  entropy change (nats)")
    for head in shown:
        numbers = f"{head.js_distance:11.4f}  {head.max_difference:8.4f}  {head.mean_difference:9.5f}"
        lines.append(f"{head.site}:{head.head}".ljust(width) + f"  {numbers}  {head.entropy_change:+21.4f}")
    if more := len(comparison.heads) - len(shown):
        lines.append(f"{more} more heads")
    return "\n".join([*lines, *(f"{name}: not compared, {reason}" for name, reason in comparison.skipped.items())])

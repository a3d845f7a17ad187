"""Comparison of two traces: which heads attend differently, for two texts, two checkpoints, or with
heads ablated.

Tokens of the two traces are aligned first. The distributions of a pair of aligned queries are
compared over the aligned keys, the keys that only one trace has, and the weight on no token at all
(of heads with a learned sink).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...report.data import Column, Table
from ...report.notebook import TableResult
from ...report.render import to_plain
from ...report.text import format_number
from ...util.errors import pluralise
from ..head_names import print_head
from .attention_record import Array, AttentionRecord
from .attention_trace import Trace, query_blocks

Positions = NDArray[np.int64]
# Product of the lengths of the parts that differ; longer ones are not aligned inside.
MAX_EDITED_TOKENS = 1 << 24
SUM_TOLERANCE = 1e-3


class HeadDifference(NamedTuple):
    """Measure how differently one head attends in two traces, over the pairs of aligned queries.

    `divergence` is the mean Jensen-Shannon divergence of a query's weights, in nats: 0 for equal
    weights, ln 2 = 0.69 for weights on disjoint keys; NaN for a head with negative weights.
    `largest` is the largest absolute difference of a weight, at `query` and `key` of the first
    trace. `entropy_change` is the mean entropy in the second trace minus the mean entropy in the
    first, in nats.
    """

    site: str
    head: int
    divergence: float
    largest: float
    query: int
    key: int
    mean_difference: float
    entropy_change: float


class TokenAlignment(NamedTuple):
    """List positions of tokens that correspond in two token rows, in order."""

    first: Positions
    second: Positions

    def within(self, first_count: int, second_count: int) -> TokenAlignment:
        """Return the pairs among the first tokens of both rows.

        The last generated token is never a query.
        """
        count = min(
            np.searchsorted(self.first, first_count), np.searchsorted(self.second, second_count)
        )
        return TokenAlignment(self.first[:count], self.second[:count])


NO_TOKENS = TokenAlignment(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, repr=False)
class TraceComparison(TableResult):
    """Two traces, the alignment of their tokens by stream, and the difference of every head that
    both have.

    `sites` maps each compared site of the first trace to its partner in the second. `left_out` maps
    the other sites of the first trace to the reason. `heads` are in the order of the first trace.
    `kept_heads` are the heads of a site of the first trace that the second kept, where heads were
    removed.
    """

    first: Trace = field(repr=False)
    second: Trace = field(repr=False)
    alignments: Mapping[str, TokenAlignment] = field(repr=False)
    sites: dict[str, str]
    heads: tuple[HeadDifference, ...]
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    row: int = 0
    kept_heads: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    def weights(self, site: str, head: int, queries: slice = slice(None)) -> tuple[Array, Array]:
        """Return weights of one head in both traces for a range of aligned queries.

        Each array is [queries, aligned keys].
        """
        layer = self.first.get_layer(site)
        if layer.name not in self.sites:
            raise ValueError(
                f"{layer.name} was not compared: {self.left_out[layer.name]}; use one of "
                f"{', '.join(self.sites)}"
            )
        pairs, keys = self.aligned_tokens(layer)
        one = _read_queries(self.first, layer.name, head, pairs.first[queries], self.row)
        other = self.second_weights(layer, head, pairs.second[queries])
        return one[:, keys.first], other[:, keys.second]

    def aligned_tokens(self, layer: AttentionRecord) -> tuple[TokenAlignment, TokenAlignment]:
        """Return the queries and keys of a site of the first trace that both traces have."""
        return self.align(layer, self.second.get_layer(self.sites[layer.name]))

    def align(
        self, layer: AttentionRecord, other: AttentionRecord
    ) -> tuple[TokenAlignment, TokenAlignment]:
        """Return the aligned queries and keys of a site of each trace."""
        queries = self.alignments.get(layer.query_stream, NO_TOKENS)
        keys = self.alignments.get(layer.key_stream, NO_TOKENS)
        return (
            queries.within(layer.num_queries, other.num_queries),
            keys.within(layer.num_keys, other.num_keys),
        )

    def second_weights(self, layer: AttentionRecord, head: int, positions: Positions) -> Array:
        """Return the weights that a head of the first trace has in the second, [queries, keys].

        The queries are positions in the second trace.
        """
        kept_heads = list(self.kept_heads.get(layer.name, range(layer.heads)))
        if head not in kept_heads:
            raise ValueError(
                f"head {head} of {layer.name} was removed; the heads that were kept are "
                f"{kept_heads}"
            )
        place = kept_heads.index(head)
        return _read_queries(self.second, self.sites[layer.name], place, positions, self.row)

    @property
    def ranked(self) -> list[HeadDifference]:
        """Rank heads, most different first.

        Heads without a divergence come last, by their largest difference.
        """
        return sorted(
            self.heads,
            key=lambda head: (math.isnan(head.divergence), -head.divergence, -head.largest),
        )

    @property
    def data(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "aligned_tokens": {name: len(pairs.first) for name, pairs in self.alignments.items()},
            "left_out": dict(self.left_out),
            "heads": [to_plain(head._asdict()) for head in self.ranked],
        }

    @property
    def table(self) -> Table:
        """The heads, the most different first."""
        lines = [
            f"{pluralise(len(pairs.first), 'aligned token')} of the {name}"
            for name, pairs in self.alignments.items()
        ]
        lines += [f"{site} is not compared: {reason}" for site, reason in self.left_out.items()]
        names = [layer.name for layer in self.first.layers]
        rows = [
            (
                print_head(head.site, head.head, names),
                head.divergence,
                head.largest,
                head.entropy_change,
            )
            for head in self.ranked
        ]
        columns = [Column(name, format_number) for name in ("divergence", "largest")]
        columns.append(Column("entropy change", _format_change))
        return Table("", ("head", *columns), rows, lines)


def _format_change(value: float) -> str:
    return f"{'+' if value >= 0 else ''}{format_number(value)}"


def compare_traces(
    first: Trace,
    second: Trace,
    *,
    row: int = 0,
    kept_heads: Mapping[str, Sequence[int]] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> TraceComparison:
    """Compare the attention of every head of two traces over the tokens that correspond to each
    other.

    Tokens are aligned by their strings, as a text comparison aligns lines; replaced runs of equal
    length correspond in order. Sites are matched by name, else by stack, layer and kind; sites with
    different head counts are left out, unless `kept_heads` lists the heads of the first trace that
    the second still has.

    >>> from headwise.observe.traces import trace_from_weights
    >>> one, two = np.eye(2)[None, None], np.eye(2)[::-1][None, None]
    >>> compare_traces(
    ...     trace_from_weights([one], ["a", "b"]), trace_from_weights([two], ["a", "b"])
    ... ).heads[0].largest
    1.0
    """
    for layer in (*first.layers, *second.layers):
        if row >= layer.batch_size:
            raise ValueError(
                f"cannot compare row {row}: a trace has {layer.batch_size}; give 0 to "
                f"{layer.batch_size - 1}"
            )
    heads_of_second = dict(kept_heads or {})
    alignments = {
        stream: align_tokens(rows[row].words, second.streams[stream][row].words)
        for stream, rows in first.streams.items()
        if stream in second.streams
    }
    comparison = TraceComparison(
        first, second, alignments, {}, (), {}, row=row, kept_heads=heads_of_second
    )
    places: list[tuple[AttentionRecord, int]] = []
    for layer in first.layers:
        # the partner has the same name, or else the same place
        place = (layer.stack, layer.layer, layer.kind)
        by_place = [one for one in second.layers if (one.stack, one.layer, one.kind) == place]
        matches = [one for one in second.layers if one.name == layer.name] or by_place
        other = matches[-1] if matches else None
        reason = _mismatch_reason(comparison, layer, other)
        if other is None or reason:
            comparison.left_out[layer.name] = reason
        else:
            comparison.sites[layer.name] = other.name
            heads = heads_of_second.get(layer.name, range(layer.heads))
            places += [(layer, head) for head in heads]
    differences: list[HeadDifference] = []
    for layer, head in places:
        if progress is not None:
            progress(len(differences), len(places))
        differences.append(_compare_head(comparison, layer, head))
    return replace(comparison, heads=tuple(differences))


def _mismatch_reason(
    comparison: TraceComparison, layer: AttentionRecord, other: AttentionRecord | None
) -> str:
    """Explain why a layer cannot be compared with its partner; "" if it can."""
    if other is None:
        return "the other trace has no such site"
    expected = len(comparison.kept_heads.get(layer.name, range(layer.heads)))
    if other.heads != expected:
        return f"{expected} heads against {other.heads}"
    if (other.query_stream, other.key_stream) != (layer.query_stream, layer.key_stream):
        return f"it attends from {other.query_stream} to {other.key_stream} in the other trace"
    streams = (layer.query_stream, layer.key_stream)
    for name, pairs in zip(streams, comparison.align(layer, other), strict=True):
        if not len(pairs.first):
            return f"no token of the {name} corresponds to one of the other trace"
    return ""


def align_tokens(first: Sequence[str], second: Sequence[str]) -> TokenAlignment:
    """Align two token rows: equal tokens in order, and replaced tokens where their numbers agree.

    >>> first, second = align_tokens(["the", "cat", "sat", "down"], ["the", "dog", "sat"])
    >>> first.tolist(), second.tolist()
    ([0, 1, 2], [0, 1, 2])
    """
    limit = min(len(first), len(second))
    start = next((n for n in range(limit) if first[n] != second[n]), limit)
    limit -= start
    end = next((n for n in range(limit) if first[-1 - n] != second[-1 - n]), limit)
    one = list(first[start : len(first) - end])
    other = list(second[start : len(second) - end])
    pairs = [(place, place) for place in range(start)]
    if len(one) * len(other) <= MAX_EDITED_TOKENS:
        for kind, i, i_end, j, j_end in SequenceMatcher(
            None, one, other, autojunk=False
        ).get_opcodes():
            if kind == "equal" or (kind == "replace" and i_end - i == j_end - j):
                pairs += [(start + i + n, start + j + n) for n in range(i_end - i)]
    pairs += [(len(first) - place, len(second) - place) for place in range(end, 0, -1)]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return TokenAlignment(table[:, 0], table[:, 1])


# --- One head -------------------------------------------------------------------------------------


def _compare_head(comparison: TraceComparison, layer: AttentionRecord, head: int) -> HeadDifference:
    pairs, keys = comparison.aligned_tokens(layer)
    divergence = differences = entropy_change = 0.0
    largest = -1.0
    place = (0, 0)
    for start, stop in query_blocks(len(pairs.first)):
        read = _read_queries(
            comparison.first, layer.name, head, pairs.first[start:stop], comparison.row
        )
        one = read.astype(np.float64)
        other = comparison.second_weights(layer, head, pairs.second[start:stop]).astype(np.float64)
        divergence += float(_divergences(one, other, keys).sum())
        entropy_change += float(_entropies(other).sum() - _entropies(one).sum())
        change = np.abs(one[:, keys.first] - other[:, keys.second])
        differences += float(change.sum())
        query, key = np.unravel_index(int(change.argmax()), change.shape)
        if change[query, key] > largest:
            largest = float(change[query, key])
            place = (int(pairs.first[start + query]), int(keys.first[key]))
    count = len(pairs.first)
    mean_difference = differences / (count * len(keys.first))
    return HeadDifference(
        layer.name,
        head,
        divergence / count,
        largest,
        *place,
        mean_difference,
        entropy_change / count,
    )


def _read_queries(trace: Trace, site: str, head: int, positions: Positions, row: int) -> Array:
    """Read weights of queries at rising positions, [queries, keys]."""
    first = int(positions[0])
    last = int(positions[-1]) + 1
    return trace.head_weights(site, head, slice(first, last), row=row)[positions - first]


def _divergences(one: Array, other: Array, keys: TokenAlignment) -> Array:
    """Compute the Jensen-Shannon divergence of each query in nats; NaN for invalid distributions.

    A key in only one trace contributes half of its weight times ln 2, whatever the other weights
    are.
    """
    terms = np.zeros(len(one))
    p = np.maximum(one[:, keys.first], 0)
    q = np.maximum(other[:, keys.second], 0)
    # weight on no token, as with a learned sink
    p_rest = 1 - one.sum(1, keepdims=True)
    q_rest = 1 - other.sum(1, keepdims=True)
    smallest = np.minimum(p_rest, q_rest)[:, 0]
    is_distribution = (np.minimum(one.min(1), other.min(1)) >= 0) & (smallest > -SUM_TOLERANCE)
    p_rest = np.where(p_rest > SUM_TOLERANCE, p_rest, 0.0)
    q_rest = np.where(q_rest > SUM_TOLERANCE, q_rest, 0.0)
    for first, second in ((p, q), (p_rest, q_rest)):
        middle = (first + second) / 2
        terms += (_p_log_ratio(first, middle) + _p_log_ratio(second, middle)).sum(1) / 2
    unaligned = one.sum(1) - p.sum(1) + other.sum(1) - q.sum(1)
    return np.where(is_distribution, np.maximum(terms + unaligned * math.log(2) / 2, 0.0), np.nan)


def _p_log_ratio(p: Array, q: Array) -> Array:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0.0)


def _entropies(weights: Array) -> Array:
    return -_p_log_ratio(weights, np.ones_like(weights)).sum(1)

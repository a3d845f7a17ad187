"""Comparison of two traces: which heads attend differently, for two texts, two checkpoints, or with
heads ablated.

Tokens of the two traces are aligned first. The distributions of a pair of aligned queries are
compared over the aligned keys, the keys that only one trace has, and the weight on no token at all
(of heads with a learned sink).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...report.text import pad, pad_left
from ...util.errors import pluralise
from .attention_record import Array, AttentionRecord
from .attention_trace import Trace, query_blocks

Positions = NDArray[np.int64]
MAX_EDITED_TOKENS = (
    1 << 24
)  # product of the lengths of the parts that differ; longer ones are not aligned inside
SUM_TOLERANCE = 1e-3
SMALLEST_FIXED = 1e-3  # the smallest number that four decimals show with two digits


class HeadDifference(NamedTuple):
    """How differently one head attends in two traces, over the pairs of aligned queries.

    `divergence` is the mean Jensen-Shannon divergence of a query's weights, in nats: 0 for equal
    weights, ln 2 = 0.69 for weights on disjoint keys; NaN for a head with negative weights.
    `largest` is the largest absolute difference of a weight, at `query` and `key` of the first
    trace. `entropy_change` is the mean entropy in the second trace minus that in the first, in
    nats.
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
    """Positions of tokens that correspond to each other in two token rows, in order."""

    first: Positions
    second: Positions

    def within(self, first_count: int, second_count: int) -> TokenAlignment:
        """The pairs among the first tokens of both rows: the last token that was generated is no
        query.
        """
        count = min(
            np.searchsorted(self.first, first_count), np.searchsorted(self.second, second_count)
        )
        return TokenAlignment(self.first[:count], self.second[:count])


@dataclass(frozen=True)
class TraceComparison:
    """Two traces, the alignment of their tokens by stream, and the difference of every head that
    both have.

    `sites` maps each compared site of the first trace to that of the second. `left_out` maps the
    other sites of the first trace to the reason. `heads` are in the order of the first trace.
    `kept_heads` are the heads of a site of the first trace that the second kept, where heads were
    removed.
    """

    first: Trace = field(repr=False)
    second: Trace = field(repr=False)
    alignments: Mapping[str, TokenAlignment] = field(repr=False)
    sites: Mapping[str, str]
    heads: tuple[HeadDifference, ...]
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    row: int = 0
    kept_heads: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])

    def weights(self, site: str, head: int, queries: slice = slice(None)) -> tuple[Array, Array]:
        """The weights of one head in both traces for a range of aligned queries, each [queries,
        aligned keys].
        """
        layer = self.first.get_layer(site)
        if layer.name not in self.sites:
            raise ValueError(
                f"{layer.name} was not compared: {self.left_out[layer.name]}; use one of "
                f"{', '.join(self.sites)}"
            )
        pairs, keys = self.aligned_tokens(layer)
        return (
            _read_queries(self.first, layer.name, head, pairs.first[queries], self.row)[
                :, keys.first
            ],
            self.second_weights(layer, head, pairs.second[queries])[:, keys.second],
        )

    def aligned_tokens(self, layer: AttentionRecord) -> tuple[TokenAlignment, TokenAlignment]:
        """The aligned queries and keys of a site of the first trace, as far as both traces have
        them.
        """
        other = self.second.get_layer(self.sites[layer.name])
        queries, keys = (
            _pairs(self.alignments, name) for name in (layer.query_stream, layer.key_stream)
        )
        return (
            queries.within(layer.num_queries, other.num_queries),
            keys.within(layer.num_keys, other.num_keys),
        )

    def second_weights(self, layer: AttentionRecord, head: int, positions: Positions) -> Array:
        """The weights of a head of the first trace in the second, for queries of the second,
        [queries, keys].
        """
        kept_heads = self.kept_heads.get(layer.name, range(layer.heads))
        if head not in kept_heads:
            raise ValueError(
                f"head {head} of {layer.name} was removed; the heads that were kept are "
                f"{list(kept_heads)}"
            )
        return _read_queries(
            self.second, self.sites[layer.name], list(kept_heads).index(head), positions, self.row
        )

    @property
    def ranked(self) -> list[HeadDifference]:
        """The heads, most different first; heads without a divergence come last, by their largest
        difference.
        """
        return sorted(
            self.heads,
            key=lambda head: (math.isnan(head.divergence), -head.divergence, -head.largest),
        )

    @property
    def data(self) -> dict[str, Any]:
        """The comparison as plain values."""
        return {
            "aligned_tokens": {name: len(pairs.first) for name, pairs in self.alignments.items()},
            "left_out": dict(self.left_out),
            "heads": [
                {name: None if value != value else value for name, value in head._asdict().items()}
                for head in self.ranked
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"{pluralise(len(pairs.first), 'aligned token')} of the {name}"
            for name, pairs in self.alignments.items()
        ]
        lines += [f"not compared: {site}: {reason}" for site, reason in self.left_out.items()]
        headings = [pad_left(name, width) for name, width in (("divergence", 10), ("largest", 9))]
        lines += [" ".join([pad("head", 28), *headings, pad_left("entropy change", 15)])]
        ranked = self.ranked
        divergences = _format_column([head.divergence for head in ranked])
        weights = _format_column([head.largest for head in ranked])
        changes = _format_column([head.entropy_change for head in ranked], "+")
        for head, *cells in zip(ranked, divergences, weights, changes, strict=True):
            name = f"{head.site} H{head.head}"
            lines.append(f"{name:<28} {cells[0]:>10} {cells[1]:>9} {cells[2]:>15}")
        return "\n".join(lines)


def _format_column(values: Sequence[float], sign: str = "") -> list[str]:
    """Format numbers alike: with four decimals, or in scientific form if these would hide most
    digits of one.
    """
    is_fixed = all(
        abs(value) >= SMALLEST_FIXED for value in values if value and math.isfinite(value)
    )
    return [format(value, f"{sign}.4f" if is_fixed else f"{sign}.2e") for value in values]


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

    Tokens are aligned by their strings, as a text comparison aligns lines; where as many tokens
    were replaced as were removed, they correspond in order. Sites are matched by name, else by
    stack, layer and kind; those with other numbers of heads are left out, unless `kept_heads` says
    which heads of the first trace the second has.

    >>> from headwise.observe.traces import trace_from_weights
    >>> one, two = np.eye(2)[None, None], np.eye(2)[::-1][None, None]
    >>> compare_traces(
    ...     trace_from_weights([one], ["a", "b"]), trace_from_weights([two], ["a", "b"])
    ... ).heads[0].largest
    1.0
    """
    for trace in (first, second):
        rows = [layer.batch_size for layer in trace.layers if row >= layer.batch_size]
        if rows:
            raise ValueError(
                f"cannot compare row {row}: a trace has {rows[0]}; give 0 to {rows[0] - 1}"
            )
    heads_of_second = dict(kept_heads or {})
    matches, left_out = _match_sites(first, second, heads_of_second)
    alignments = {
        stream: align_tokens(first.streams[stream][row].words, second.streams[stream][row].words)
        for stream in first.streams
        if stream in second.streams
    }
    comparison = TraceComparison(
        first, second, alignments, matches, (), left_out, row, heads_of_second
    )
    for site in list(matches):
        layer = first.get_layer(site)
        streams = zip(
            (layer.query_stream, layer.key_stream), comparison.aligned_tokens(layer), strict=True
        )
        empty = [name for name, pairs in streams if not len(pairs.first)]
        if empty:
            left_out[site] = f"no token of the {empty[0]} corresponds to one of the other trace"
            del matches[site]
    places = [
        (site, head)
        for site in matches
        for head in heads_of_second.get(site, range(first.get_layer(site).heads))
    ]
    heads: list[HeadDifference] = []
    for site, head in places:
        if progress is not None:
            progress(len(heads), len(places))
        heads.append(_compare_head(comparison, first.get_layer(site), head))
    return replace(comparison, heads=tuple(heads))


def align_tokens(first: Sequence[str], second: Sequence[str]) -> TokenAlignment:
    """Align two token rows: equal tokens in order, and replaced tokens where their numbers agree.

    >>> first, second = align_tokens(["the", "cat", "sat", "down"], ["the", "dog", "sat"])
    >>> first.tolist(), second.tolist()
    ([0, 1, 2], [0, 1, 2])
    """
    start = _count_equal(zip(first, second, strict=False))
    limit = min(len(first), len(second)) - start
    end = min(limit, _count_equal(zip(reversed(first), reversed(second), strict=False)))
    middle = first[start : len(first) - end], second[start : len(second) - end]
    pairs = [(place, place) for place in range(start)]
    if len(middle[0]) * len(middle[1]) <= MAX_EDITED_TOKENS:
        codes = SequenceMatcher(
            None, list(middle[0]), list(middle[1]), autojunk=False
        ).get_opcodes()
        for kind, one, one_end, other, other_end in codes:
            if kind == "equal" or (kind == "replace" and one_end - one == other_end - other):
                pairs += zip(
                    range(start + one, start + one_end),
                    range(start + other, start + other_end),
                    strict=True,
                )
    pairs += [(len(first) - place, len(second) - place) for place in range(end, 0, -1)]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return TokenAlignment(table[:, 0], table[:, 1])


def _count_equal(pairs: Iterator[tuple[str, str]]) -> int:
    count = 0
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count


def _pairs(alignments: Mapping[str, TokenAlignment], stream: str) -> TokenAlignment:
    nothing = np.zeros(0, np.int64)
    return alignments.get(stream, TokenAlignment(nothing, nothing))


def _match_sites(
    first: Trace, second: Trace, kept_heads: Mapping[str, Sequence[int]]
) -> tuple[dict[str, str], dict[str, str]]:
    """The sites that both traces have, and the reason for each other site of the first."""
    by_name = {layer.name: layer for layer in second.layers}
    by_place = {(layer.stack, layer.layer, layer.kind): layer for layer in second.layers}
    matches: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for layer in first.layers:
        other = by_name.get(layer.name) or by_place.get((layer.stack, layer.layer, layer.kind))
        expected = len(kept_heads.get(layer.name, range(layer.heads)))
        if other is None:
            left_out[layer.name] = "the other trace has no such site"
        elif other.heads != expected:
            left_out[layer.name] = f"{expected} heads against {other.heads}"
        elif (other.query_stream, other.key_stream) != (layer.query_stream, layer.key_stream):
            left_out[layer.name] = (
                f"it attends from {other.query_stream} to {other.key_stream} in the other trace"
            )
        else:
            matches[layer.name] = other.name
    return matches, left_out


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
    """The weights of queries at rising positions, [queries, keys]."""
    first = int(positions[0])
    last = int(positions[-1]) + 1
    return trace.head_weights(site, head, slice(first, last), row=row)[positions - first]


def _divergences(one: Array, other: Array, keys: TokenAlignment) -> Array:
    """Jensen-Shannon divergence of each query in nats; NaN for weights that are no distribution.

    A key that one trace alone has contributes half of its weight times ln 2, whatever the other
    weights are.
    """
    terms = np.zeros(len(one))
    aligned = np.maximum(one[:, keys.first], 0), np.maximum(other[:, keys.second], 0)
    rest = (
        1 - one.sum(1, keepdims=True),
        1 - other.sum(1, keepdims=True),
    )  # on no token, as with a learned sink
    is_distribution = (np.minimum(one.min(1), other.min(1)) >= 0) & (
        np.minimum(*rest)[:, 0] > -SUM_TOLERANCE
    )
    for p, q in (aligned, tuple(np.where(weight > SUM_TOLERANCE, weight, 0.0) for weight in rest)):
        middle = (p + q) / 2
        terms += (_p_log_ratio(p, middle) + _p_log_ratio(q, middle)).sum(1) / 2
    unaligned = one.sum(1) - aligned[0].sum(1) + other.sum(1) - aligned[1].sum(1)
    return np.where(is_distribution, np.maximum(terms + unaligned * math.log(2) / 2, 0.0), np.nan)


def _p_log_ratio(p: Array, q: Array) -> Array:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0.0)


def _entropies(weights: Array) -> Array:
    return -np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1)), 0.0).sum(1)

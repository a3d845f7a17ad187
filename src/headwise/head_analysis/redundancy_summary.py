"""The redundancy of heads in sentences, with every number that the answer rests on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..errors import pluralise
from .resampling import PermutationTest

if TYPE_CHECKING:
    from .head_redundancy import ComparableHeads

SIGNIFICANCE = 0.05
MIN_SINK_WEIGHT = 0.005  # mean weight on sinks that is worth a sentence
SMALLEST_FIXED = 0.001  # smaller distances are printed in scientific form
MAX_DIVERGENCE = math.log(2)  # the largest Jensen-Shannon divergence, in nats


def summarise_redundancy(group: ComparableHeads) -> str:
    """Whether heads are redundant, in sentences with every number that the answer rests on."""
    parts = [
        _distances_sentence(group),
        _whole_rows_sentence(group),
        _clusters_sentence(group),
        _layers_sentence(group),
        _outputs_sentence(group),
    ]
    return f"{_verdict_sentence(group)} " + " ".join(part for part in parts if part)


def compare_redundancy(group: ComparableHeads, other: ComparableHeads) -> str:
    """A sentence about another model on the same texts: its median distance and how many of its
    pairs are similar.
    """
    median = float(np.median(other.distances[np.triu_indices(len(other.heads), 1)]))
    return (
        f"among {_describe_heads(other)}, the median pair is {_nats(median)} nats apart without "
        "sinks, and "
        f"{len(other.similar_pairs)} of {other.num_pairs} pairs are significantly similar "
        f"(instead of {len(group.similar_pairs)})."
    )


def _describe_heads(group: ComparableHeads) -> str:
    queries, keys = group.streams
    return f"{len(group.heads)} heads (queries from the {queries}, keys from the {keys})"


def _verdict_sentence(group: ComparableHeads) -> str:
    if not group.similar_pair_test.p < SIGNIFICANCE:
        return "Not shown to be redundant."
    similar = "Some heads have attention patterns more similar than chance"
    if math.isnan(group.agreement.p):
        return f"{similar}; their outputs could not be compared."
    if group.agreement.p < SIGNIFICANCE:
        outputs = "and heads with similar patterns have similar outputs"
    else:
        outputs = "but similar outputs are not shown"
    return f"{similar}, {outputs}; ablate or prune them to measure what the model loses."


def _distances_sentence(group: ComparableHeads) -> str:
    pairs = np.triu_indices(len(group.heads), 1)
    median, chance = (float(np.median(grid[pairs])) for grid in (group.distances, group.chance))
    similar = group.similar_pairs
    sinks = (
        f" without the {group.sink_weight:.0%} of their weight that is on sinks,"
        if _has_sinks(group)
        else ""
    )
    sentence = (
        f"Among {_describe_heads(group)},{sinks} the median pair has a Jensen-Shannon divergence "
        f"of {_nats(median)} "
        f"nats (at most {_nats(MAX_DIVERGENCE)}), and of {_nats(chance)} if weights are permuted; "
        f"{len(similar)} of {group.num_pairs} pairs are significantly closer than "
        f"{_nats(group.threshold)}, "
        f"where {group.similar_pair_test.chance:.1f} are expected by chance "
        f"({_format_p(group.similar_pair_test)})"
    )
    if not similar:
        return f"{sentence}."
    first, second = similar[0]
    distance = group.distances[group.heads.index(first), group.heads.index(second)]
    return f"{sentence}; the closest are {first} and {second} with {_nats(distance)}."


def _has_sinks(group: ComparableHeads) -> bool:
    return group.sink_weight >= MIN_SINK_WEIGHT


def _whole_rows_sentence(group: ComparableHeads) -> str:
    """How similar the heads would seem with their sinks, if they have any."""
    if not _has_sinks(group):
        return ""
    whole = group.with_sinks
    pairs = (
        f"{whole.num_similar} of {math.comb(len(whole.distances), 2)} pairs are closer than "
        f"{_nats(whole.threshold)}"
    )
    expected = f"{whole.num_expected:.1f} are expected if every row keeps its sinks"
    return (
        f"With sinks, the median pair is {_nats(whole.median)} nats apart, and {pairs}, where "
        f"{expected}."
    )


def _clusters_sentence(group: ComparableHeads) -> str:
    clusters = group.cluster_members
    count = len(clusters)
    counts = f"{pluralise(count, 'cluster')} ({group.num_chance_clusters} by chance)"
    largest = pluralise(len(clusters[0]), "head")
    return (
        f"Clustering up to {_nats(group.threshold)} nats gives {counts}, the largest with "
        f"{largest}."
    )


def _layers_sentence(group: ComparableHeads) -> str:
    parts = list[str]()
    if not math.isnan(group.within_layer_test.p):
        parts.append(_within_layer_sentence(group.within_layer_test))
    if any(not math.isnan(layer.p) for layer in group.layers):
        significant = [layer for layer in group.layers if layer.p < SIGNIFICANCE]
        fact = (
            f"{len(significant)} of {len(group.layers)} layers differ in diversity from "
            "randomly chosen heads"
        )
        parts.append(f"{fact} (corrected p < {SIGNIFICANCE}).")
    outliers = [outlier for outlier in group.outliers if outlier.p < SIGNIFICANCE]
    if outliers:
        fact = f"{len(outliers)} heads are outliers in their layer, most clearly"
        fact = "1 head is an outlier in its layer:" if len(outliers) == 1 else fact
        parts.append(f"{fact} {outliers[0].head} (corrected p {outliers[0].p:.3f}).")
    elif group.outliers:
        parts.append("No head is an outlier in its layer.")
    return " ".join(parts)


def _within_layer_sentence(test: PermutationTest) -> str:
    direction = "closer to" if test.value < 0 else "farther from"
    distance = f"{_nats(abs(test.value))} nats {direction} each other than to heads of other layers"
    return f"Heads of one layer are {distance} ({_format_p(test)})."


def _outputs_sentence(group: ComparableHeads) -> str:
    if math.isnan(group.agreement.p):
        return ""
    correlation = f"r = {group.agreement.value:.2f} ({_format_p(group.agreement)})"
    return f"Distances between attention patterns and between outputs correlate with {correlation}."


def _nats(value: float) -> str:
    """A distance with three decimals, or in scientific form if these would show no digit of it."""
    return f"{value:.3f}" if value == 0 or abs(value) >= SMALLEST_FIXED else f"{value:.1e}"


def _format_p(test: PermutationTest) -> str:
    return f"p = {test.p:.3f}" if test.p >= 0.001 else "p < 0.001"

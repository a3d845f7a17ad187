"""What was found between heads, as an answer to whether they are redundant: numbers beside what chance gives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .nulls import PermutationTest

if TYPE_CHECKING:
    from .redundancy import ComparableHeads

SIGNIFICANCE = 0.05
CHANCE_RATE = 0.05  # of pairs are nearer than the cut where heads look at nothing alike
MAX_DIVERGENCE = math.log(2)  # the largest Jensen-Shannon divergence, in nats


def summarise_redundancy(group: ComparableHeads) -> str:
    """Whether heads are redundant, with every number that it rests on."""
    parts = [_distances_sentence(group), _clusters_sentence(group), _layers_sentence(group), _outputs_sentence(group)]
    return f"{_verdict_sentence(group)} " + " ".join(part for part in parts if part)


def compare_redundancy(group: ComparableHeads, other: ComparableHeads) -> str:
    """What another model does with the same texts, beside how many pairs are near in one's own."""
    middle = float(np.median(other.distances[np.triu_indices(len(other.heads), 1)]))
    return (
        f"of {len(other.heads)} heads ({other.streams[0]} reads {other.streams[1]}) the median pair is {middle:.3f} "
        f"nats apart, and {len(other.similar_pairs)} of {other.num_pairs} pairs are surely near, not {len(group.similar_pairs)}."
    )


def _verdict_sentence(own: ComparableHeads) -> str:
    agree = own.agreement
    if not own.alike.p < SIGNIFICANCE:
        return "Not shown to be redundant."
    if math.isnan(agree.p):
        return "Some heads read alike beyond chance; what they say could not be compared."
    said = "and heads that read alike say alike" if agree.p < SIGNIFICANCE else "but not shown to say alike"
    return f"Some heads read alike beyond chance, {said}; silence or cut them to know what the model loses."


def _distances_sentence(own: ComparableHeads) -> str:
    pairs = np.triu_indices(len(own.heads), 1)
    middle, chance = (float(np.median(grid[pairs])) for grid in (own.distances, own.chance))
    near = own.similar_pairs
    told = (
        f"Of {len(own.heads)} heads ({own.streams[0]} reads {own.streams[1]}) the median pair is {middle:.3f} nats "
        f"apart of at most {MAX_DIVERGENCE:.3f}, and {chance:.3f} where weights are dealt anew; {len(near)} of {own.num_pairs} pairs "
        f"are surely nearer than {own.cut:.3f}, where {own.alike.chance:.1f} would be by chance ({_format_p(own.alike)})"
    )
    if not near:
        return f"{told}."
    one, other = (own.heads.index(who) for who in near[0])
    return f"{told}, the nearest {near[0][0]} and {near[0][1]} with {own.distances[one, other]:.3f}."


def _clusters_sentence(own: ComparableHeads) -> str:
    largest = own.cluster_members[0]
    return (
        f"Below that distance they are {len(own.cluster_members)} clusters ({own.by_chance} by chance), the largest of "
        f"{len(largest)}."
    )


def _layers_sentence(own: ComparableHeads) -> str:
    parts = list[str]()
    if not math.isnan(own.within.p):
        parts.append(_within_layer_sentence(own.within))
    odd = [layer for layer in own.layers if layer.p < SIGNIFICANCE]
    if any(not math.isnan(layer.p) for layer in own.layers):
        parts.append(f"{len(odd)} of {len(own.layers)} layers spread otherwise than heads dealt out anew (corrected "
                     f"p < {SIGNIFICANCE}).")  # fmt: skip
    apart = [one for one in own.outliers if one.p < SIGNIFICANCE]
    if own.outliers:
        parts.append(
            "No head stands apart from its layer."
            if not apart
            else f"{len(apart)} stand apart from their layer, first {apart[0].head} (corrected p {apart[0].p:.3f})."
        )
    return " ".join(parts)


def _within_layer_sentence(found: PermutationTest) -> str:
    way = "nearer to" if found.value < 0 else "farther from"
    return f"Heads of a layer are {abs(found.value):.3f} nats {way} each other than to those of others ({_format_p(found)})."


def _outputs_sentence(own: ComparableHeads) -> str:
    if math.isnan(own.agreement.p):
        return ""
    return f"Distances of weights and of what heads say agree with r = {own.agreement.value:.2f} ({_format_p(own.agreement)})."


def _format_p(one: PermutationTest) -> str:
    return f"p = {one.p:.3f}" if one.p >= 0.001 else "p < 0.001"

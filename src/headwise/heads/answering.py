"""What was found between heads, as an answer to whether they are redundant: numbers beside what chance gives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from .nulls import Against

if TYPE_CHECKING:
    from .redundancy import Readers

SURE = 0.05
CHANCE = 0.05  # of pairs are nearer than the cut where heads look at nothing alike
FAR = math.log(2)  # the largest Jensen-Shannon divergence, in nats


def answer(own: Readers) -> str:
    """Whether heads are redundant, with every number that it rests on."""
    parts = [_weights(own), _clusters(own), _layers(own), _outputs(own)]
    return f"{_verdict(own)} " + " ".join(part for part in parts if part)


def compared(own: Readers, other: Readers) -> str:
    """What another model does with the same texts, beside how many pairs are near in one's own."""
    middle = float(np.median(other.distances[np.triu_indices(len(other.heads), 1)]))
    return (
        f"of {len(other.heads)} heads ({other.streams[0]} reads {other.streams[1]}) the median pair is {middle:.3f} "
        f"nats apart, and {len(other.near)} of {other.pairs} pairs are surely near, not {len(own.near)}."
    )


def _verdict(own: Readers) -> str:
    agree = own.agreement
    if not own.alike.p < SURE:
        return "Not shown to be redundant."
    if math.isnan(agree.p):
        return "Some heads read alike beyond chance; what they say could not be compared."
    said = "and heads that read alike say alike" if agree.p < SURE else "but not shown to say alike"
    return f"Some heads read alike beyond chance, {said}; silence or cut them to know what the model loses."


def _weights(own: Readers) -> str:
    pairs = np.triu_indices(len(own.heads), 1)
    middle, chance = (float(np.median(grid[pairs])) for grid in (own.distances, own.chance))
    near = own.near
    told = (
        f"Of {len(own.heads)} heads ({own.streams[0]} reads {own.streams[1]}) the median pair is {middle:.3f} nats "
        f"apart of at most {FAR:.3f}, and {chance:.3f} where weights are dealt anew; {len(near)} of {own.pairs} pairs "
        f"are surely nearer than {own.cut:.3f}, where {own.alike.chance:.1f} would be by chance ({_p(own.alike)})"
    )
    if not near:
        return f"{told}."
    one, other = (own.heads.index(who) for who in near[0])
    return f"{told}, the nearest {near[0][0]} and {near[0][1]} with {own.distances[one, other]:.3f}."


def _clusters(own: Readers) -> str:
    largest = own.members[0]
    return (
        f"Below that distance they are {len(own.members)} clusters ({own.by_chance} by chance), the largest of "
        f"{len(largest)}."
    )


def _layers(own: Readers) -> str:
    parts = list[str]()
    if not math.isnan(own.within.p):
        parts.append(_within(own.within))
    odd = [layer for layer in own.layers if layer.p < SURE]
    if any(not math.isnan(layer.p) for layer in own.layers):
        parts.append(f"{len(odd)} of {len(own.layers)} layers spread otherwise than heads dealt out anew (corrected "
                     f"p < {SURE}).")  # fmt: skip
    apart = [one for one in own.outliers if one.p < SURE]
    if own.outliers:
        parts.append(
            "No head stands apart from its layer."
            if not apart
            else f"{len(apart)} stand apart from their layer, first {apart[0].head} (corrected p {apart[0].p:.3f})."
        )
    return " ".join(parts)


def _within(found: Against) -> str:
    way = "nearer to" if found.value < 0 else "farther from"
    return f"Heads of a layer are {abs(found.value):.3f} nats {way} each other than to those of others ({_p(found)})."


def _outputs(own: Readers) -> str:
    if math.isnan(own.agreement.p):
        return ""
    return f"Distances of weights and of what heads say agree with r = {own.agreement.value:.2f} ({_p(own.agreement)})."


def _p(one: Against) -> str:
    return f"p = {one.p:.3f}" if one.p >= 0.001 else "p < 0.001"

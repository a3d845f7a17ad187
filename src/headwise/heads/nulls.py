"""What chance would do: how often it does as much, corrected for how often one looked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatVector = NDArray[np.float64]
Z_95 = 1.959964  # of a normal number, on both sides of 95 % of them


class PermutationTest(NamedTuple):
    """A number, what it is on average where nothing is there, and how often chance does as much."""

    value: float
    chance: float
    p: float


def compare_with_null(value: float, null_values: FloatVector, tail: str = "both") -> PermutationTest:
    """A number held to what chance drew: `tail` says whether "high", "low" or "both" ways are much.

    The number itself counts as one more draw, so that p is never zero; it is nan where nothing was drawn.

    >>> compare_with_null(9.0, np.arange(9.0), "high").p
    0.1
    """
    if not len(null_values) or np.isnan(value):
        return PermutationTest(float(value), float("nan"), float("nan"))
    middle = float(null_values.mean())
    beyond = {"high": null_values >= value, "low": null_values <= value, "both": np.abs(null_values - middle) >= abs(value - middle)}
    return PermutationTest(float(value), middle, float((1 + beyond[tail].sum()) / (1 + len(null_values))))


def holm_correction(p: Sequence[float]) -> list[float]:
    """The same for as many tests as there are, in the way of Holm (1979); what is nan was not tested.

    >>> holm_correction([0.01, 0.04, float("nan")])
    [0.02, 0.04, nan]
    """
    told = np.asarray(p, dtype=np.float64)
    found = np.is_full(len(told), np.nan)
    order = [n for n in np.argsort(told) if not np.isnan(told[n])]
    least = 0.0
    for rank, n in enumerate(order):
        least = max(least, min(1.0, float(told[n]) * (len(order) - rank)))
        found[n] = least
    return found.tolist()


def poisson_test(count: int, expected: float) -> PermutationTest:
    """A count of rare things, held to how many are expected: p is how often a Poisson number is as large.

    >>> poisson_test(2, 0.1).p < 0.005
    True
    """
    below = sum(math.exp(-expected + k * math.log(expected) - math.lgamma(k + 1)) for k in range(count) if expected > 0)
    return PermutationTest(float(count), expected, float(min(1.0, max(0.0, 1 - below))) if expected > 0 else float(not count))


def expected_pairs_below(mean: FloatVector, low: FloatVector, high: FloatVector, threshold: float) -> float:
    """How many of these numbers, drawn anew as their intervals say, would have intervals that end below both themselves
    and the cut; nan where an interval is not known.

    >>> told = [np.array([value] * 1000) for value in (5.0, 4.0, 6.0)]
    >>> round(expected_pairs_below(*told, cut=9.0)), round(expected_pairs_below(*told, cut=2.0))
    (25, 0)
    """
    error = np.maximum((high - low) / (2 * Z_95), 1e-300)
    far = (np.minimum(mean, threshold) - mean) / error - Z_95
    return float(sum((1 + math.erf(max(-40.0, one) / math.sqrt(2))) / 2 for one in far))


def class_separation_test(distances: FloatVector, labels: Sequence[int], permutations: int, seed: int) -> PermutationTest:
    """How much nearer those of one class are to each other than to others, held to classes dealt out anew.

    >>> line = np.array([0.0, 1, 10, 11])
    >>> class_separation_test(np.abs(line[:, None] - line), [0, 0, 1, 1], 99, 0).value
    -9.0
    """
    draw, own = np.random.default_rng(seed), np.asarray(labels)
    pairs = np.triu_indices(len(own), 1)
    far = distances[pairs]

    def gap(own: NDArray[np.int64]) -> float:
        same = own[pairs[0]] == own[pairs[1]]
        return float(far[same].mean() - far[~same].mean()) if same.any() and not same.all() else float("nan")

    value = gap(own)
    return compare_with_null(value, np.array([gap(draw.permutation(own)) for _ in range(permutations)]), "low")


def mantel_test(one: FloatVector, other: FloatVector, permutations: int, seed: int) -> PermutationTest:
    """How two sets of distances between the same things agree, as a correlation, held to things exchanged in one.

    >>> far = np.abs(np.subtract.outer(np.arange(9.0), np.arange(9.0)))
    >>> tuple(round(value, 2) for value in mantel_test(far, 2 * far + 1, 99, 0)[::2])
    (1.0, 0.01)
    """
    draw, pairs = np.random.default_rng(seed), np.triu_indices(len(one), 1)

    def agree(order: NDArray[np.int64]) -> float:
        return float(np.corrcoef(one[np.ix_(order, order)][pairs], other[pairs])[0, 1])

    if len(one) < 4 or not (np.ptp(one[pairs]) > 0 and np.ptp(other[pairs]) > 0):
        return PermutationTest(*[float("nan")] * 3)
    value = agree(np.arange(len(one)))
    return compare_with_null(value, np.array([agree(draw.permutation(len(one))) for _ in range(permutations)]), "high")

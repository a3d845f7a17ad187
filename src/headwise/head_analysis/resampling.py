"""Means of sums, and where they might have come out: resampled over the texts of a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import suggest
from .head_table import Measure

Array = NDArray[np.float64]
CONFIDENCE = 0.95


def draw_resamples(num_texts: int, num_resamples: int, seed: int) -> Array:
    """How often each of so many texts is drawn, `times` over, [times, count].

    >>> draw_resamples(3, 2, 0).sum(1)
    array([3., 3.])
    """
    draw = np.random.default_rng(seed)
    return draw.multinomial(num_texts, np.full(num_texts, 1 / num_texts), size=num_resamples).astype(np.float64)


def ratio_of_sums(sums: Array, counts: Array) -> Array:
    """The sum of sums over the sum of numbers, of texts along the first axis; nan where nothing was counted.

    >>> ratio_of_sums(np.array([[1.0], [5.0]]), np.array([[2.0], [4.0]]))
    array([1.])
    """
    total = counts.sum(0)
    return np.divide(sums.sum(0), total, out=np.full(total.shape, np.nan), where=total > 0)


def resampled_ratios(sums: Array, counts: Array, resamples: Array) -> Array:
    """The same of every draw, [times, ...]; one column of numbers is that of all sums."""
    total, count = (resamples @ told.reshape(len(told), -1) for told in (sums, counts))
    count = np.broadcast_to(count, total.shape)
    found = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return found.reshape(len(resamples), *sums.shape[1:])


def confidence_interval(values: Array, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
    """Between which values this share of draws lies, of draws along the first axis.

    >>> low, high = confidence_interval(np.arange(101.0)[:, None])
    >>> low.round(9).tolist(), high.round(9).tolist()
    ([2.5], [97.5])
    """
    tails = (1 - confidence) / 2, (1 + confidence) / 2
    flat = values.reshape(len(values), -1)
    there = ~np.isnan(flat).all(0)
    ends = np.full((2, flat.shape[1]), np.nan)
    ends[:, there] = np.nanquantile(flat[:, there], tails, axis=0)
    low, high = ends.reshape(2, *values.shape[1:])
    return low, high


# --- Sums over texts in bounded memory, that can still be resampled ------------------------------------

MAX_FOLDS = 64
COLUMNS_PER_CHUNK = 4096


class MeanIntervals(NamedTuple):
    """Means of one shape, and between which values resampled ones lie."""

    mean: Array
    low: Array
    high: Array

    def measure_at(self, index: int | tuple[int, ...], chance: float = math.nan) -> Measure:
        """One of them as a measure."""
        value, low, high = (float(grid[index]) for grid in self)
        return Measure(value, low, high, chance)


class FoldedSums:
    """Sums of one shape, and how many rows each is of; text n goes to fold n modulo the most there are.

    With fewer texts than that each is a fold of its own.

    >>> folds = FoldedSums()
    >>> for number in range(3):
    ...     folds.add(number, np.array([2.0 * number]), 1.0)
    >>> folds.mean
    array([2.])
    """

    def __init__(self) -> None:
        self._sums: list[Array] = []
        self._counts: list[float] = []

    def add(self, text_index: int, sums: Array, count: float) -> None:
        """Of text `number`."""
        place = text_index % MAX_FOLDS
        if place < len(self._sums):
            self._sums[place] = self._sums[place] + sums
            self._counts[place] += count
        else:
            self._sums.append(sums)
            self._counts.append(count)

    @property
    def count(self) -> float:
        """How many rows were added."""
        return sum(self._counts)

    @property
    def mean(self) -> Array:
        """The sum of all over how many rows there are."""
        return np.sum(self._sums, 0) / self.count

    def mean_intervals(self, num_resamples: int, seed: int) -> MeanIntervals:
        """The means, and between which 95 % of those of resampled folds come out; nan where there is one fold."""
        shape = self._sums[0].shape
        flat, counts = np.stack(self._sums).reshape(len(self._sums), -1), np.array(self._counts)
        low, high = np.full(flat.shape[1], np.nan), np.full(flat.shape[1], np.nan)
        if len(flat) > 1:
            draws = draw_resamples(len(flat), num_resamples, seed)
            numbers = draws @ counts
            draws, numbers = draws[numbers > 0], numbers[numbers > 0]
            for start in range(0, flat.shape[1], COLUMNS_PER_CHUNK):
                some = slice(start, start + COLUMNS_PER_CHUNK)
                low[some], high[some] = confidence_interval(draws @ flat[:, some] / numbers[:, None])
        return MeanIntervals(self.mean, low.reshape(shape), high.reshape(shape))


# --- How likely chance alone would do as much ----------------------------------------------------------

FloatMatrix = NDArray[np.float64]
MAX_EXACT_TEXTS = 14  # texts: with as many, or fewer, all turns are tried
NUM_SIGN_FLIPS = (
    9_999  # else so many, or `EACH` for every head that is tested, so that a correction leaves room below 0.05
)
FLIPS_PER_TEST = 200
COMPARISON_TOLERANCE = 1e-12  # of what was seen: a turn that adds the same numbers in another order is as far out
CORRECTION_METHODS = ("holm", "bonferroni", "none")


def sign_flip_p_values(differences: FloatMatrix, seed: int = 0) -> FloatMatrix:
    """For each column of [texts, heads]: how often a mean is as far from 0 when signs are turned over by chance.

    All turns of few texts, else drawn ones, with what was seen among them (Phipson and Smyth 2010).

    >>> sign_flip_p_values(np.array([[1.0, 1.0], [2.0, -1.0], [3.0, 0.0]])).tolist()
    [0.25, 1.0]
    """
    texts, heads = differences.shape
    seen = np.abs(differences.sum(0))
    least = seen - COMPARISON_TOLERANCE * np.abs(differences).sum(0)
    if texts <= MAX_EXACT_TEXTS:
        bits = (np.arange(2**texts)[:, None] >> np.arange(texts)) & 1
        return (np.abs((1.0 - 2 * bits) @ differences) >= least).mean(0)
    draw, turns, beyond = np.random.default_rng(seed), max(NUM_SIGN_FLIPS, FLIPS_PER_TEST * heads - 1), np.ones(heads)
    for start in range(0, turns, 1000):
        signs = 1.0 - 2 * draw.integers(0, 2, (min(1000, turns - start), texts))
        beyond += (np.abs(signs @ differences) >= least).sum(0)
    return beyond / (turns + 1)


def min_p_value(num_texts: int) -> float:
    """The least p that so many texts can have: all signs alike is one of two ways to be as far out.

    >>> min_p_value(5)
    0.0625
    """
    return 2.0 ** (1 - num_texts)


def correct_p_values(p: FloatMatrix, method: str = "holm") -> FloatMatrix:
    """The same for as many tests at once: the least level at which each is still told from chance.

    >>> p = np.array([0.01, 0.04, 0.03])
    >>> correct_p_values(p).round(4).tolist(), correct_p_values(p, "bonferroni").round(4).tolist()
    ([0.03, 0.06, 0.06], [0.03, 0.12, 0.09])
    """
    if method not in CORRECTION_METHODS:
        raise ValueError(f"correction={method!r} is unknown; {suggest(method, CORRECTION_METHODS)}")
    if method == "none":
        return p
    if method == "bonferroni":
        return np.minimum(1, p * len(p))
    order = p.argsort()
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    found = np.empty_like(p)
    found[order] = np.minimum(1, stepped)
    return found


# --- What chance would do ------------------------------------------------------------------------------

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
    beyond = {
        "high": null_values >= value,
        "low": null_values <= value,
        "both": np.abs(null_values - middle) >= abs(value - middle),
    }
    return PermutationTest(float(value), middle, float((1 + beyond[tail].sum()) / (1 + len(null_values))))


def holm_correction(p: Sequence[float]) -> list[float]:
    """The same for as many tests as there are, in the way of Holm (1979); what is nan was not tested.

    >>> holm_correction([0.01, 0.04, float("nan")])
    [0.02, 0.04, nan]
    """
    told = np.asarray(p, dtype=np.float64)
    found = np.full(len(told), np.nan)
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
    return PermutationTest(
        float(count), expected, float(min(1.0, max(0.0, 1 - below))) if expected > 0 else float(not count)
    )


def expected_pairs_below(mean: FloatVector, low: FloatVector, high: FloatVector, threshold: float) -> float:
    """How many of these numbers, drawn anew as their intervals say, would have intervals that end below both themselves
    and the cut; nan where an interval is not known.

    >>> told = [np.array([value] * 1000) for value in (5.0, 4.0, 6.0)]
    >>> round(expected_pairs_below(*told, threshold=9.0)), round(expected_pairs_below(*told, threshold=2.0))
    (25, 0)
    """
    error = np.maximum((high - low) / (2 * Z_95), 1e-300)
    far = (np.minimum(mean, threshold) - mean) / error - Z_95
    return float(sum((1 + math.erf(max(-40.0, one) / math.sqrt(2))) / 2 for one in far))


def class_separation_test(
    distances: FloatVector, labels: Sequence[int], permutations: int, seed: int
) -> PermutationTest:
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

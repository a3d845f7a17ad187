"""Statistics over independent units, such as texts or seeds: intervals, p-values, corrections and
permutation tests.

Intervals and t tests use the jackknife, which needs the statistic of all units and of all units but
one. The jackknife of a mean gives its standard error, so its interval equals Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .head_table import Measure

Array = NDArray[np.float64]
CONFIDENCE = 0.95
# metrics between 0 and 1 begin so; their intervals are cut off there
SHARES = ("accuracy", "exact")
# from this many units on, intervals and tests are corrected for skewness; fewer hardly show it
MIN_SKEWED_UNITS = 10
# Units without spread have no standard error. Their interval is their common value from this many
# units on (6 values fall on one side by chance with p = 2 / 2^6 = 0.03), and NaN below.
MIN_EQUAL_UNITS = 6
# a standard error below this share of the value is rounding: attention weights are float32
ROUNDING = 1e-6

# --- Student's t over units -----------------------------------------------------------------------


def ratio_of_sums(sums: Array, counts: Array) -> Array:
    """Total sum over total count, with texts along the first axis; NaN where nothing was counted.

    >>> ratio_of_sums(np.array([[1.0], [5.0]]), np.array([[2.0], [4.0]]))
    array([1.])
    """
    return _divide(sums.sum(0), counts.sum(0))


def _divide(total: Array, count: Array) -> Array:
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def stack_texts(by_text: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return the sums and the counts of all texts, each as one array."""
    return np.stack([sums for sums, _ in by_text]), np.stack([counts for _, counts in by_text])


def stack_by_key(by_text: Sequence[Mapping[Any, Array]]) -> dict[Any, Array]:
    """Return the numbers of all texts by key, each as one array; zeros for a text without the key.

    >>> stack_by_key([{"a": np.ones(2)}, {}])
    {'a': array([[1., 1.],
           [0., 0.]])}
    """
    stacked: dict[Any, Array] = {}
    for text in by_text:
        for key in [key for key in text if key not in stacked]:
            missing = np.zeros_like(text[key])
            stacked[key] = np.stack([one.get(key, missing) for one in by_text])
    return stacked


def t_quantile(df: NDArray[Any] | int, probability: float) -> Array:
    """Quantile of Student's t; NaN without degrees of freedom.

    >>> t_quantile(np.array([0, 2]), 0.975).round(3).tolist()
    [nan, 4.303]
    """
    from scipy import special

    degrees = np.asarray(df, dtype=np.float64)
    return np.where(degrees > 0, special.stdtrit(np.maximum(degrees, 1), probability), np.nan)


@dataclass(frozen=True)
class Jackknife:
    """A statistic of units: of all of them, `value` [...], and without each of them, `without`
    [units, ...].

    `is_counted` [units, ...] are the units that the statistic depends on. `scale` [...] is the size
    of the numbers that it was computed from, which decides what counts as rounding.

    >>> mean = Jackknife.of_ratio(np.array([1.0, 2.0, 3.0]))
    >>> [end.round(2).item() for end in mean.interval()], mean.p_values().round(4).item()
    ([-0.48, 4.48], 0.0742)
    """

    value: Array
    without: Array
    is_counted: NDArray[np.bool_]
    scale: Array

    @staticmethod
    def of_ratio(sums: Array, counts: Array | float = 1.0) -> Jackknife:
        """Total sum over total count; `counts` broadcasts to `sums`. Units without a count do not
        matter.
        """
        counts = np.broadcast_to(np.asarray(counts, dtype=np.float64), sums.shape)
        total = sums.sum(0)
        count = counts.sum(0)
        value = _divide(total, count)
        without = _divide(total - sums, count - counts)
        return Jackknife(value, without, counts.astype(np.bool_), np.abs(value))

    def map(self, function: Callable[[Array], Array]) -> Jackknife:
        """A function of the statistic, which may change the length of its last
        axis, or reduce it.
        """
        value = function(self.value)
        without = function(self.without)
        is_counted = self.is_counted
        if without.ndim < is_counted.ndim:
            is_counted = np.asarray(is_counted.any(-1))
        elif without.shape != is_counted.shape:
            is_counted = np.broadcast_to(is_counted.any(-1, keepdims=True), without.shape)
        return Jackknife(value, without, is_counted, np.abs(value))

    def __sub__(self, other: Jackknife) -> Jackknife:
        """The difference of two statistics of the same units."""
        return Jackknife(
            self.value - other.value,
            self.without - other.without,
            self.is_counted & other.is_counted,
            np.maximum(self.scale, other.scale),
        )

    @property
    def num_units(self) -> NDArray[np.int64]:
        """Number of units that the statistic depends on."""
        return self.is_counted.sum(0)

    @property
    def has_spread(self) -> NDArray[np.bool_]:
        """True where the statistic has a standard error, larger than rounding."""
        return self._moments()[0] > ROUNDING * self.scale * np.sqrt(np.maximum(self.num_units, 1))

    def _moments(self) -> tuple[Array, Array]:
        """Standard deviation of the units' contributions (jackknife pseudo-values), and their
        skewness.

        The skewness of fewer than `MIN_SKEWED_UNITS` units counts as 0.
        """
        count = self.num_units
        mean = np.where(self.is_counted, self.without, 0).sum(0) / np.maximum(count, 1)
        residuals = np.where(self.is_counted, (count - 1) * (mean - self.without), 0)
        deviation = np.sqrt((residuals**2).sum(0) / np.maximum(count - 1, 1))
        third = (residuals**3).sum(0) / np.maximum(count, 1)
        is_skewed = (count >= MIN_SKEWED_UNITS) & (deviation > 0)
        return deviation, np.divide(third, deviation**3, out=np.zeros_like(third), where=is_skewed)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
        """Ends of the confidence interval by Student's t, from 10 units on corrected for skewness
        (Hall 1992).

        Both ends are the value where at least `MIN_EQUAL_UNITS` units have no spread, and NaN where
        fewer have none.
        """
        count = self.num_units
        (deviation, skewness) = self._moments()
        reach = t_quantile(count - 1, (1 + confidence) / 2) / np.sqrt(np.maximum(count, 1))
        shift = skewness / (6 * np.maximum(count, 1))
        low, high = (
            self.value - deviation * _unskew(end - shift, skewness) for end in (reach, -reach)
        )
        no_spread = np.where(count >= MIN_EQUAL_UNITS, self.value, np.nan)
        return np.where(self.has_spread, low, no_spread), np.where(self.has_spread, high, no_spread)

    def p_values(self, sides: int = 2) -> Array:
        """P-values of the t test that the statistic is 0 (two sides), or at most 0 (one side); NaN
        without spread.

        The t test agrees with `interval`: p is below 0.05 where the interval excludes 0.
        """
        from scipy import special

        count = self.num_units
        (deviation, skewness) = self._moments()
        size = np.divide(self.value, deviation, out=np.zeros_like(deviation), where=deviation > 0)
        cubic = size + skewness * size**2 / 3 + skewness**2 * size**3 / 27
        t = (cubic + skewness / (6 * np.maximum(count, 1))) * np.sqrt(count)
        tail = special.stdtr(np.maximum(count - 1, 1), -(np.abs(t) if sides == 2 else t))
        return np.where(self.has_spread, np.minimum(1, sides * tail), np.nan)


def _unskew(corrected: Array, skewness: Array) -> Array:
    """Inverse of w + skewness w^2 / 3 + skewness^2 w^3 / 27, the transform of Hall (1992) without
    its constant.
    """
    root = np.cbrt(1 + skewness * corrected) - 1
    return np.divide(3 * root, skewness, out=np.array(corrected), where=np.abs(skewness) > 1e-6)


# --- Tests of a ratio against its chance level ----------------------------------------------------


def excess_p_values(observed: tuple[Array, Array], baseline: tuple[Array, Array]) -> Array:
    """One-sided p-values that a ratio of sums exceeds the ratio of a baseline, [columns].

    `observed` and `baseline` are sums and counts, [texts, columns] each or arrays that broadcast to
    it. Texts without any count are left out; p is NaN if fewer than two are left, or if the texts
    differ by rounding alone. The exception are n texts that all have the same ratio v >= 0: by the
    inequality of Markov, p is at most (baseline / v)^n.

    >>> sums, counts = np.array([[3.0], [4.0], [5.0]]), np.full((3, 1), 10.0)
    >>> excess_p_values((sums, counts), (np.ones((3, 1)), counts)).round(4).tolist()
    [0.0175]
    >>> excess_p_values((counts, counts), (np.ones((3, 1)), counts)).round(4).tolist()
    [0.001]
    """
    shape = np.broadcast_shapes(*(array.shape for array in (*observed, *baseline)))
    sums, counts, base_sums, base_counts = (
        np.broadcast_to(array, shape) for array in (*observed, *baseline)
    )
    own = Jackknife.of_ratio(sums, counts)
    base = Jackknife.of_ratio(base_sums, base_counts)
    excess = own - base
    is_law = ~own.has_spread & (excess.num_units > 1) & (sums >= 0).all(0)
    is_law &= (own.value > 0) & (base.value >= 0)
    share = np.divide(base.value, own.value, out=np.full(shape[1], np.nan), where=is_law)
    return np.where(is_law, np.minimum(1, share) ** excess.num_units, excess.p_values(sides=1))


# --- Means in bounded memory ----------------------------------------------------------------------

MAX_FOLDS = 64
COLUMNS_PER_CHUNK = 4096


class MeanIntervals(NamedTuple):
    """Means with the ends of their confidence intervals, three arrays of one shape."""

    mean: Array
    low: Array
    high: Array

    def measure_at(self, index: int | tuple[int, ...], chance: float = math.nan) -> Measure:
        """The mean at `index` as a `Measure`."""
        value, low, high = (float(array[index]) for array in self)
        return Measure(value, low, high, chance)


class FoldedSums:
    """Sums and row counts in at most `MAX_FOLDS` folds, which bound the memory of an interval.

    Text n goes to fold n modulo `MAX_FOLDS`; with fewer texts, each text is one fold. A count is a
    number, or an array of the shape of the sums; the mean of what was never counted is NaN.

    >>> folds = FoldedSums()
    >>> for number in range(3):
    ...     folds.add(number, np.array([2.0 * number]), 1.0)
    >>> folds.mean
    array([2.])
    """

    def __init__(self) -> None:
        self._folds: list[Array] = []  # sums and counts, in the shape of the sums

    def add(self, text_index: int, sums: Array, count: float | Array) -> None:
        """Add the sums of one text over `count` rows."""
        added = np.stack([sums, np.broadcast_to(np.asarray(count, np.float64), sums.shape)])
        fold = text_index % MAX_FOLDS
        if fold < len(self._folds):
            self._folds[fold] = self._folds[fold] + added
        else:
            self._folds.append(added)

    @property
    def num_folds(self) -> int:
        """Number of folds that hold texts."""
        return len(self._folds)

    @property
    def count(self) -> Array:
        """Number of rows added so far, in the shape of the sums."""
        return np.sum(self._folds, 0)[1]

    @property
    def mean(self) -> Array:
        """Total sum over the number of rows."""
        return ratio_of_sums(*np.stack(self._folds, 1))

    def mean_intervals(self) -> MeanIntervals:
        """Means with 95 % intervals over folds; NaN intervals if there is only one fold."""
        flat = np.stack(self._folds, 1).reshape(2, self.num_folds, -1)
        ends = np.full((2, flat.shape[2]), np.nan)
        for start in range(0, flat.shape[2], COLUMNS_PER_CHUNK):
            columns = slice(start, start + COLUMNS_PER_CHUNK)
            ends[:, columns] = Jackknife.of_ratio(*flat[..., columns]).interval()
        mean = self.mean
        return MeanIntervals(mean, *ends.reshape(2, *mean.shape))


# --- Corrections for multiple tests ---------------------------------------------------------------


def correct_p_values(p: Sequence[float] | Array) -> Array:
    """Adjust p-values for testing all of them at once (Holm 1979); NaN values count as not tested.

    >>> correct_p_values(np.array([0.01, 0.04, 0.03, math.nan])).round(4).tolist()
    [0.03, 0.06, 0.06, nan]
    """
    values = np.array(p, dtype=np.float64)
    order = values.argsort()[: (~np.isnan(values)).sum()]  # NaN values are sorted last
    scaled = np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1))
    values[order] = np.minimum(1, scaled)
    return values


# --- Permutation tests ----------------------------------------------------------------------------


class PermutationTest(NamedTuple):
    """A statistic, its mean under the null hypothesis, and its p-value."""

    value: float
    chance: float
    p: float


def compare_with_null(value: float, null_values: Array, tail: str = "both") -> PermutationTest:
    """Compare a statistic with samples of its null distribution.

    Values at least as far from the mean count as extreme; with `tail="low"`, values at most as
    large. The statistic itself counts as one more sample, so that p is never zero. The result is
    NaN without samples.

    >>> compare_with_null(-1.0, np.arange(9.0), "low").p
    0.1
    """
    if not len(null_values) or np.isnan(value):
        return PermutationTest(float(value), float("nan"), float("nan"))
    mean = float(null_values.mean())
    is_extreme = null_values <= value
    if tail != "low":
        is_extreme = np.abs(null_values - mean) >= abs(value - mean)
    p = (1 + is_extreme.sum()) / (1 + len(null_values))
    return PermutationTest(float(value), mean, float(p))


def poisson_test(count: int, expected: float) -> PermutationTest:
    """Test a count of rare events: p is the probability that a Poisson variable with mean
    `expected` is at least `count`.

    >>> poisson_test(2, 0.1).p < 0.005
    True
    """
    from scipy import special

    p = float(special.pdtrc(count - 1, expected)) if count else 1.0
    return PermutationTest(float(count), expected, p)


def expected_pairs_below(intervals: MeanIntervals, threshold: float, num_units: int) -> float:
    """Estimate how many intervals would end below both their value and the threshold, if each value
    were sampled again with its own standard error. The intervals are for `num_units` units.

    >>> five = MeanIntervals(*(np.full(1000, value) for value in (5.0, 4.0, 6.0)))
    >>> [round(expected_pairs_below(five, threshold, num_units=1000)) for threshold in (9.0, 2.0)]
    [25, 0]
    """
    from scipy import special

    mean, low, high = intervals
    reach = float(t_quantile(num_units - 1, (1 + CONFIDENCE) / 2))
    error = np.fmax((high - low) / (2 * reach), 1e-300)
    return float(special.ndtr((np.minimum(mean, threshold) - mean) / error - reach).sum())


def class_separation_test(
    distances: Array, labels: Sequence[int], permutations: int, seed: int
) -> PermutationTest:
    """Test whether members of one class are closer to each other than to others, by permuting the
    labels.

    The statistic is the mean distance within classes minus the mean distance between classes.

    >>> line = np.array([0.0, 1, 10, 11])
    >>> class_separation_test(np.abs(line[:, None] - line), [0, 0, 1, 1], 99, 0).value
    -9.0
    """
    pairs = np.triu_indices(len(labels), 1)
    pair_distances = distances[pairs]

    def gap(labels: NDArray[np.int64]) -> float:
        is_same = labels[pairs[0]] == labels[pairs[1]]
        if not is_same.any() or is_same.all():
            return math.nan
        return float(pair_distances[is_same].mean() - pair_distances[~is_same].mean())

    generator = np.random.default_rng(seed)
    items = np.asarray(labels)
    null_values = [gap(generator.permutation(items)) for _ in range(permutations)]
    return compare_with_null(gap(items), np.array(null_values), "low")

"""Statistics over texts: bootstrap confidence intervals, permutation tests and corrections for multiple tests."""

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

# --- Bootstrap over texts ------------------------------------------------------------------------------


def draw_resamples(num_texts: int, num_resamples: int, seed: int) -> Array:
    """Bootstrap counts [resamples, texts]: how often each resample draws each text.

    >>> draw_resamples(3, 2, 0).sum(1)
    array([3., 3.])
    """
    generator = np.random.default_rng(seed)
    return generator.multinomial(num_texts, np.full(num_texts, 1 / num_texts), size=num_resamples).astype(np.float64)


def ratio_of_sums(sums: Array, counts: Array) -> Array:
    """Total sum over total count, with texts along the first axis; NaN where nothing was counted.

    >>> ratio_of_sums(np.array([[1.0], [5.0]]), np.array([[2.0], [4.0]]))
    array([1.])
    """
    total = counts.sum(0)
    return np.divide(sums.sum(0), total, out=np.full(total.shape, np.nan), where=total > 0)


def resampled_ratios(sums: Array, counts: Array, resamples: Array) -> Array:
    """The ratio of total sum to total count of every resample, [resamples, ...].

    `counts` may have a single column that all columns of `sums` share.
    """
    total, count = (resamples @ array.reshape(len(array), -1) for array in (sums, counts))
    count = np.broadcast_to(count, total.shape)
    ratios = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return ratios.reshape(len(resamples), *sums.shape[1:])


def confidence_interval(values: Array, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
    """Ends of the interval that holds this share of the values, which lie along the first axis; NaN values are ignored.

    >>> low, high = confidence_interval(np.arange(101.0)[:, None])
    >>> low.round(9).tolist(), high.round(9).tolist()
    ([2.5], [97.5])
    """
    quantiles = (1 - confidence) / 2, (1 + confidence) / 2
    flat = values.reshape(len(values), -1)
    has_values = ~np.isnan(flat).all(0)
    ends = np.full((2, flat.shape[1]), np.nan)
    ends[:, has_values] = np.nanquantile(flat[:, has_values], quantiles, axis=0)
    low, high = ends.reshape(2, *values.shape[1:])
    return low, high


# --- Tests of a ratio against its chance level ---------------------------------------------------------


def student_t_tail(t: Array, df: int) -> Array:
    """Probability that a variable with Student's t distribution of `df` degrees of freedom exceeds each `t`.

    The finite sums are 26.7.3 and 26.7.4 of Abramowitz and Stegun (1964).

    >>> (
    ...     student_t_tail(np.array([0.0, 12.706]), 1).round(4).tolist(),
    ...     student_t_tail(np.array([4.303]), 2).round(4).tolist(),
    ... )
    ([0.5, 0.025], [0.025])
    """
    theta = np.arctan(np.abs(t) / math.sqrt(df))
    cosine, sine = np.cos(theta), np.sin(theta)
    is_odd = df % 2
    term = cosine if is_odd else np.ones_like(cosine)
    total = np.zeros_like(cosine)
    for k in range(1 + is_odd, df, 2):
        total = total + term
        term = term * cosine**2 * k / (k + 1)
    within = 2 / math.pi * (theta + sine * total) if is_odd else sine * total
    tail = np.clip((1 - within) / 2, 0, 1)
    return np.where(t >= 0, tail, 1 - tail)


def excess_p_values(observed: tuple[Array, Array], baseline: tuple[Array, Array]) -> Array:
    """One-sided p-values that a ratio of sums exceeds the ratio of a baseline, [columns].

    `observed` and `baseline` are sums and counts, [texts, columns] each or arrays that broadcast to it. The test is a
    t-test of the linearised contributions of the texts to the two ratios (Cochran 1977, 6.4). Texts without any count
    are left out; p is NaN if fewer than two are left.

    >>> sums, counts = np.array([[3.0], [4.0], [5.0]]), np.full((3, 1), 10.0)
    >>> round(float(excess_p_values((sums, counts), (np.ones((3, 1)), counts))[0]), 4)
    0.0175
    """
    shape = np.broadcast_shapes(*(array.shape for array in (*observed, *baseline)))
    sums, counts, base_sums, base_counts = (np.broadcast_to(array, shape) for array in (*observed, *baseline))
    p = np.full(shape[1], math.nan)
    has_rows = (counts > 0) & (base_counts > 0)
    for rows in np.unique(has_rows, axis=1).T:  # columns that count the same texts share their degrees of freedom
        num_texts, columns = int(rows.sum()), (has_rows == rows[:, None]).all(0)
        if num_texts < 2:
            continue
        own = _ratio_contributions(sums[rows][:, columns], counts[rows][:, columns])
        base = _ratio_contributions(base_sums[rows][:, columns], base_counts[rows][:, columns])
        excess, residuals = own[0] - base[0], own[1] - base[1]
        error = np.sqrt((residuals**2).sum(0) / (num_texts * (num_texts - 1)))
        # Texts that agree exactly leave no error: the excess is then certain if it is more than rounding.
        is_exact = error <= COMPARISON_TOLERANCE
        t = np.where(
            is_exact, np.where(excess > COMPARISON_TOLERANCE, np.inf, -np.inf), excess / np.where(is_exact, 1, error)
        )
        p[columns] = student_t_tail(t, num_texts - 1)
    return p


def _ratio_contributions(sums: Array, counts: Array) -> tuple[Array, Array]:
    """The ratio of total sum to total count, and each text's residual from it over the mean count."""
    ratio = sums.sum(0) / counts.sum(0)
    return ratio, (sums - ratio * counts) / counts.mean(0)


# --- Bootstrap in bounded memory -----------------------------------------------------------------------

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
    """Sums and row counts in at most `MAX_FOLDS` folds, which bound the memory of a bootstrap.

    Text n goes to fold n modulo `MAX_FOLDS`; with fewer texts, every text is a fold of its own. A count is a number, or
    an array of the shape of the sums; the mean of what was never counted is NaN.

    >>> folds = FoldedSums()
    >>> for number in range(3):
    ...     folds.add(number, np.array([2.0 * number]), 1.0)
    >>> folds.mean
    array([2.])
    """

    def __init__(self) -> None:
        self._sums: list[Array] = []
        self._counts: list[Array] = []

    def add(self, text_index: int, sums: Array, count: float | Array) -> None:
        """Add the sums of one text over `count` rows."""
        count = np.asarray(count, dtype=np.float64)
        fold = text_index % MAX_FOLDS
        if fold < len(self._sums):
            self._sums[fold] = self._sums[fold] + sums
            self._counts[fold] = self._counts[fold] + count
        else:
            self._sums.append(sums)
            self._counts.append(count)

    @property
    def count(self) -> Array:
        """Number of rows added so far."""
        return np.sum(self._counts, 0)

    @property
    def mean(self) -> Array:
        """Total sum over the number of rows."""
        return ratio_of_sums(np.stack(self._sums), self._stack_counts())

    def mean_intervals(self, num_resamples: int, seed: int) -> MeanIntervals:
        """Means with 95 % intervals from resampled folds; NaN intervals if there is only one fold."""
        shape, folds = self._sums[0].shape, len(self._sums)
        flat, counts = np.stack(self._sums).reshape(folds, -1), self._stack_counts().reshape(folds, -1)
        low, high = np.full(flat.shape[1], np.nan), np.full(flat.shape[1], np.nan)
        if folds > 1:
            resamples = draw_resamples(folds, num_resamples, seed)
            for start in range(0, flat.shape[1], COLUMNS_PER_CHUNK):
                columns = slice(start, start + COLUMNS_PER_CHUNK)
                ratios = resampled_ratios(flat[:, columns], counts[:, columns], resamples)
                low[columns], high[columns] = confidence_interval(ratios)
        return MeanIntervals(self.mean, low.reshape(shape), high.reshape(shape))

    def _stack_counts(self) -> Array:
        """Counts of every fold, in the shape of the sums."""
        shape = self._sums[0].shape
        return np.stack([np.broadcast_to(count, shape) for count in self._counts])


# --- Sign-flip tests and corrections for multiple tests ------------------------------------------------

FloatMatrix = NDArray[np.float64]
MAX_EXACT_TEXTS = 14  # up to this many texts, all sign flips are enumerated
# With more texts, sign flips are sampled: this many, or FLIPS_PER_TEST for every head if that is more, so that p-values
# can stay below 0.05 after a correction.
NUM_SIGN_FLIPS = 9_999
FLIPS_PER_TEST = 200
COMPARISON_TOLERANCE = 1e-12  # relative rounding error: flips that sum the same numbers in another order count as equal
CORRECTION_METHODS = ("holm", "bonferroni", "none")


def sign_flip_p_values(differences: FloatMatrix, seed: int = 0) -> FloatMatrix:
    """Two-sided p-values of a paired sign-flip test, for each column of `differences` [texts, heads].

    All sign flips are enumerated for few texts. For more texts they are sampled, and the observed signs count as one of
    the samples (Phipson and Smyth 2010).

    >>> sign_flip_p_values(np.array([[1.0, 1.0], [2.0, -1.0], [3.0, 0.0]])).tolist()
    [0.25, 1.0]
    """
    texts, heads = differences.shape
    observed = np.abs(differences.sum(0))
    threshold = observed - COMPARISON_TOLERANCE * np.abs(differences).sum(0)
    if texts <= MAX_EXACT_TEXTS:
        bits = (np.arange(2**texts)[:, None] >> np.arange(texts)) & 1
        return (np.abs((1.0 - 2 * bits) @ differences) >= threshold).mean(0)
    generator = np.random.default_rng(seed)
    num_flips = max(NUM_SIGN_FLIPS, FLIPS_PER_TEST * heads - 1)
    exceedances = np.ones(heads)
    for start in range(0, num_flips, 1000):
        signs = 1.0 - 2 * generator.integers(0, 2, (min(1000, num_flips - start), texts))
        exceedances += (np.abs(signs @ differences) >= threshold).sum(0)
    return exceedances / (num_flips + 1)


def min_p_value(num_texts: int) -> float:
    """Smallest p-value that a sign-flip test of `num_texts` texts can have: two of the 2^n flips have all signs alike.

    >>> min_p_value(5)
    0.0625
    """
    return 2.0 ** (1 - num_texts)


def correct_p_values(p: FloatMatrix, method: str = "holm") -> FloatMatrix:
    """Adjust p-values for testing all of them at once, by "holm" or "bonferroni"; "none" returns them unchanged.

    >>> p = np.array([0.01, 0.04, 0.03])
    >>> correct_p_values(p).round(4).tolist(), correct_p_values(p, "bonferroni").round(4).tolist()
    ([0.03, 0.06, 0.06], [0.03, 0.12, 0.09])
    """
    if method not in CORRECTION_METHODS:
        raise ValueError(f"unknown correction={method!r}; {suggest(method, CORRECTION_METHODS)}")
    if method == "none":
        return p
    if method == "bonferroni":
        return np.minimum(1, p * len(p))
    order = p.argsort()
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1, stepped)
    return corrected


# --- Permutation tests ---------------------------------------------------------------------------------

FloatVector = NDArray[np.float64]
Z_95 = 1.959964  # half the width of a 95 % interval in standard deviations of a normal distribution


class PermutationTest(NamedTuple):
    """A statistic, its mean under the null hypothesis, and its p-value."""

    value: float
    chance: float
    p: float


def compare_with_null(value: float, null_values: FloatVector, tail: str = "both") -> PermutationTest:
    """Compare a statistic with samples of its null distribution.

    `tail` names the values that count as extreme: "high", "low" or "both". The statistic itself counts as one more
    sample, so that p is never zero. The result is NaN if there are no samples.

    >>> compare_with_null(9.0, np.arange(9.0), "high").p
    0.1
    """
    if not len(null_values) or np.isnan(value):
        return PermutationTest(float(value), float("nan"), float("nan"))
    mean = float(null_values.mean())
    is_extreme = {
        "high": null_values >= value,
        "low": null_values <= value,
        "both": np.abs(null_values - mean) >= abs(value - mean),
    }
    return PermutationTest(float(value), mean, float((1 + is_extreme[tail].sum()) / (1 + len(null_values))))


def holm_correction(p: Sequence[float]) -> list[float]:
    """Adjust p-values by the method of Holm (1979); NaN values count as not tested.

    >>> holm_correction([0.01, 0.04, float("nan")])
    [0.02, 0.04, nan]
    """
    values = np.asarray(p, dtype=np.float64)
    corrected = np.full(len(values), np.nan)
    order = [n for n in np.argsort(values) if not np.isnan(values[n])]
    running_max = 0.0
    for rank, n in enumerate(order):
        running_max = max(running_max, min(1.0, float(values[n]) * (len(order) - rank)))
        corrected[n] = running_max
    return corrected.tolist()


def poisson_test(count: int, expected: float) -> PermutationTest:
    """Test a count of rare events: p is the probability that a Poisson variable with mean `expected` is at least
    `count`.

    >>> poisson_test(2, 0.1).p < 0.005
    True
    """
    below = sum(math.exp(-expected + k * math.log(expected) - math.lgamma(k + 1)) for k in range(count) if expected > 0)
    return PermutationTest(
        float(count), expected, float(min(1.0, max(0.0, 1 - below))) if expected > 0 else float(not count)
    )


def expected_pairs_below(mean: FloatVector, low: FloatVector, high: FloatVector, threshold: float) -> float:
    """Expected number of values whose interval would end below both the value itself and the threshold, if each value
    were sampled again with its own standard error; NaN where an interval is unknown.

    >>> mean, low, high = (np.array([value] * 1000) for value in (5.0, 4.0, 6.0))
    >>> [round(expected_pairs_below(mean, low, high, threshold=threshold)) for threshold in (9.0, 2.0)]
    [25, 0]
    """
    error = np.maximum((high - low) / (2 * Z_95), 1e-300)
    z_score = (np.minimum(mean, threshold) - mean) / error - Z_95
    return float(sum((1 + math.erf(max(-40.0, z) / math.sqrt(2))) / 2 for z in z_score))


def class_separation_test(
    distances: FloatVector, labels: Sequence[int], permutations: int, seed: int
) -> PermutationTest:
    """Test whether members of one class are closer to each other than to others, by permuting the labels.

    The statistic is the mean distance within classes minus the mean distance between classes.

    >>> line = np.array([0.0, 1, 10, 11])
    >>> class_separation_test(np.abs(line[:, None] - line), [0, 0, 1, 1], 99, 0).value
    -9.0
    """
    generator, label_array = np.random.default_rng(seed), np.asarray(labels)
    pairs = np.triu_indices(len(label_array), 1)
    pair_distances = distances[pairs]

    def gap(label_array: NDArray[np.int64]) -> float:
        same_class = label_array[pairs[0]] == label_array[pairs[1]]
        if not same_class.any() or same_class.all():
            return float("nan")
        return float(pair_distances[same_class].mean() - pair_distances[~same_class].mean())

    null_values = np.array([gap(generator.permutation(label_array)) for _ in range(permutations)])
    return compare_with_null(gap(label_array), null_values, "low")


def mantel_test(one: FloatVector, other: FloatVector, permutations: int, seed: int) -> PermutationTest:
    """Mantel test: correlation of two distance matrices over the same items, against permutations of the items of one.

    >>> far = np.abs(np.subtract.outer(np.arange(9.0), np.arange(9.0)))
    >>> tuple(round(value, 2) for value in mantel_test(far, 2 * far + 1, 99, 0)[::2])
    (1.0, 0.01)
    """
    generator, pairs = np.random.default_rng(seed), np.triu_indices(len(one), 1)

    def correlation(order: NDArray[np.int64]) -> float:
        return float(np.corrcoef(one[np.ix_(order, order)][pairs], other[pairs])[0, 1])

    if len(one) < 4 or not (np.ptp(one[pairs]) > 0 and np.ptp(other[pairs]) > 0):
        return PermutationTest(*[float("nan")] * 3)
    value = correlation(np.arange(len(one)))
    return compare_with_null(
        value, np.array([correlation(generator.permutation(len(one))) for _ in range(permutations)]), "high"
    )

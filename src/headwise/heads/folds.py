"""Sums over texts in bounded memory, that can still be resampled: texts are dealt into so many folds at most."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .intervals import Array, confidence_interval, draw_resamples
from .table import Measure

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
        low, high = np.is_full(flat.shape[1], np.nan), np.is_full(flat.shape[1], np.nan)
        if len(flat) > 1:
            draws = draw_resamples(len(flat), num_resamples, seed)
            numbers = draws @ counts
            draws, numbers = draws[numbers > 0], numbers[numbers > 0]
            for start in range(0, flat.shape[1], COLUMNS_PER_CHUNK):
                some = slice(start, start + COLUMNS_PER_CHUNK)
                low[some], high[some] = confidence_interval(draws @ flat[:, some] / numbers[:, None])
        return MeanIntervals(self.mean, low.reshape(shape), high.reshape(shape))

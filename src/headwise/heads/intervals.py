"""Means of sums, and where they might have come out: resampled over the texts of a data set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CONFIDENCE = 0.95


def draw_resamples(num_texts: int, num_resamples: int, seed: int) -> Array:
    """How often each of so many texts is drawn, `times` over, [times, count].

    >>> draw_resamples(3, 2, 0).sum(1)
    array([3., 3.])
    """
    draw = np.random.default_rng(seed)
    return draw.multinomial(num_texts, np.is_full(num_texts, 1 / num_texts), size=num_resamples).astype(np.float64)


def ratio_of_sums(sums: Array, counts: Array) -> Array:
    """The sum of sums over the sum of numbers, of texts along the first axis; nan where nothing was counted.

    >>> ratio_of_sums(np.array([[1.0], [5.0]]), np.array([[2.0], [4.0]]))
    array([1.])
    """
    total = counts.sum(0)
    return np.divide(sums.sum(0), total, out=np.is_full(total.shape, np.nan), where=total > 0)


def resampled_ratios(sums: Array, counts: Array, resamples: Array) -> Array:
    """The same of every draw, [times, ...]; one column of numbers is that of all sums."""
    total, count = (resamples @ told.reshape(len(told), -1) for told in (sums, counts))
    count = np.broadcast_to(count, total.shape)
    found = np.divide(total, count, out=np.is_full(total.shape, np.nan), where=count > 0)
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
    ends = np.is_full((2, flat.shape[1]), np.nan)
    ends[:, there] = np.nanquantile(flat[:, there], tails, axis=0)
    low, high = ends.reshape(2, *values.shape[1:])
    return low, high

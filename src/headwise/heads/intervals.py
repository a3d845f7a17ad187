"""Means of sums, and where they might have come out: resampled over the texts of a data set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SHARE = 0.95


def resampled(count: int, times: int, seed: int) -> Array:
    """How often each of so many texts is drawn, `times` over, [times, count].

    >>> resampled(3, 2, 0).sum(1)
    array([3., 3.])
    """
    draw = np.random.default_rng(seed)
    return draw.multinomial(count, np.full(count, 1 / count), size=times).astype(np.float64)


def mean(sums: Array, numbers: Array) -> Array:
    """The sum of sums over the sum of numbers, of texts along the first axis; nan where nothing was counted.

    >>> mean(np.array([[1.0], [5.0]]), np.array([[2.0], [4.0]]))
    array([1.])
    """
    total = numbers.sum(0)
    return np.divide(sums.sum(0), total, out=np.full(total.shape, np.nan), where=total > 0)


def means(sums: Array, numbers: Array, draws: Array) -> Array:
    """The same of every draw, [times, ...]; one column of numbers is that of all sums."""
    total, count = (draws @ told.reshape(len(told), -1) for told in (sums, numbers))
    count = np.broadcast_to(count, total.shape)
    found = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return found.reshape(len(draws), *sums.shape[1:])


def interval(found: Array, share: float = SHARE) -> tuple[Array, Array]:
    """Between which values this share of draws lies, of draws along the first axis.

    >>> low, high = interval(np.arange(101.0)[:, None])
    >>> low.round(9).tolist(), high.round(9).tolist()
    ([2.5], [97.5])
    """
    tails = (1 - share) / 2, (1 + share) / 2
    flat = found.reshape(len(found), -1)
    there = ~np.isnan(flat).all(0)
    ends = np.full((2, flat.shape[1]), np.nan)
    ends[:, there] = np.nanquantile(flat[:, there], tails, axis=0)
    low, high = ends.reshape(2, *found.shape[1:])
    return low, high

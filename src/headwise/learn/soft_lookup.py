"""Soft look-up: estimate the value of a key that a key-value store lacks, by weighting the stored
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEYS = (51.0, 56.0, 58.0)
VALUES = (40.0, 43.0, 48.0)
QUERY = 57.0
KERNEL_WIDTHS = (0.5, 1.0, 2.0, 5.0, 10.0)

WeightFunction = Callable[[float, Sequence[float]], list[float]]


@dataclass(frozen=True)
class LookupAnswer:
    """A weighting method, its weights for a query, and the weighted mean of the values."""

    method: str
    query: float
    weights: tuple[float, ...]
    value: float


def normalise(values: Sequence[float]) -> list[float]:
    """Divide the values by their sum."""
    return [value / sum(values) for value in values]


def distance_weights(query: float, keys: Sequence[float]) -> list[float]:
    """|q - k| / sum |q - k|, which grows with distance.

    >>> distance_weights(57.0, [51.0, 56.0, 58.0])
    [0.75, 0.125, 0.125]
    """
    return normalise([abs(query - key) for key in keys])


def inverse_distance_weights(query: float, keys: Sequence[float]) -> list[float]:
    """1/|q - k|, normalised; a key equal to the query gets all the weight.

    >>> (
    ...     [round(w, 3) for w in inverse_distance_weights(57.0, [51.0, 56.0, 58.0])],
    ...     inverse_distance_weights(56.0, [51.0, 56.0]),
    ... )
    ([0.077, 0.462, 0.462], [0.0, 1.0])
    """
    if query in keys:
        return [float(key == query) for key in keys]
    return normalise([1 / abs(query - key) for key in keys])


def linear_interpolation_weights(query: float, keys: Sequence[float]) -> list[float]:
    """Linear interpolation between the two neighbours in a sorted sequence of keys.

    >>> linear_interpolation_weights(56.5, [51.0, 56.0, 58.0])
    [0.0, 0.75, 0.25]
    """
    above = next(n for n, key in enumerate(keys) if key >= query and n > 0)
    lower = keys[above - 1]
    upper = keys[above]
    share = (query - lower) / (upper - lower)
    return [1 - share if n == above - 1 else share if n == above else 0.0 for n in range(len(keys))]


def gaussian_weights(width: float) -> WeightFunction:
    """exp(-(q - k)^2 / (2 width^2)) normalised: kernel regression (Nadaraya 1964, Watson 1964).

    >>> [round(w, 3) for w in gaussian_weights(2.0)(57.0, [51.0, 56.0, 58.0])]
    [0.006, 0.497, 0.497]
    """

    def weigh(query: float, keys: Sequence[float]) -> list[float]:
        nearest = min(
            abs(query - key) for key in keys
        )  # subtracted so that narrow widths do not underflow
        return normalise(
            [math.exp((nearest**2 - (query - key) ** 2) / (2 * width**2)) for key in keys]
        )

    return weigh


def look_up(
    method: str, weight_function: WeightFunction, query: float = QUERY, keys: Sequence[float] = KEYS
) -> LookupAnswer:
    """Look up `query` with one method; stored keys that are not in `keys` get weight 0.

    >>> look_up("distance", distance_weights).value
    41.375
    """
    weight_of_key = dict(zip(keys, weight_function(query, keys), strict=True))
    weights = tuple(weight_of_key.get(key, 0.0) for key in KEYS)
    return LookupAnswer(
        method, query, weights, sum(w * value for w, value in zip(weights, VALUES, strict=True))
    )

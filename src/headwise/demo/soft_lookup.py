"""Soft look-up: estimate the value of a key that a key-value store lacks, by weighting the stored
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..translation.terminal_text import pad, pad_left, wrap

KEYS, VALUES, QUERY = (51.0, 56.0, 58.0), (40.0, 43.0, 48.0), 57.0
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
    lower, upper = keys[above - 1], keys[above]
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


def look_up_by_all_methods() -> list[LookupAnswer]:
    """Look up the default query with every method."""
    return [
        look_up("|q-k| over all keys", distance_weights),
        look_up("|q-k| over two neighbours", distance_weights, keys=KEYS[1:]),
        look_up("1/|q-k|", inverse_distance_weights),
        look_up("linear interpolation", linear_interpolation_weights),
        *(
            look_up(f"gaussian, width {width:g}", gaussian_weights(width))
            for width in KERNEL_WIDTHS
        ),
    ]


def counterexamples() -> list[tuple[LookupAnswer, LookupAnswer]]:
    """Return two queries where weights that grow with distance fail, each with linear
    interpolation.
    """
    between = (
        look_up("two neighbours", distance_weights, 56.5, KEYS[1:]),
        look_up("line", linear_interpolation_weights, 56.5),
    )
    at_key = (
        look_up("all keys", distance_weights, 51.0),
        look_up("line", linear_interpolation_weights, 51.0),
    )
    return [between, at_key]


def format_lookup() -> str:
    """Format all answers as a table, and the erratum that follows from them."""
    rows = [
        pad(answer.method, 28)
        + "".join(f"{weight:>9.4f}" for weight in answer.weights)
        + f"{answer.value:>14.10g}"
        for answer in look_up_by_all_methods()
    ]
    (between, line), (at_key, key) = counterexamples()
    store = ", ".join(f"{key:g} -> {value:g}" for key, value in zip(KEYS, VALUES, strict=True))
    erratum = (
        "Erratum. |q-k| / sum |q-k| is often printed as a weight that favours near keys, but it "
        "grows with distance. "
        f"Over two neighbours it is right only if both are equally far: at {between.query:g} it "
        "gives "
        f"{between.value:g}, linear interpolation gives {line.value:g}. At the key "
        f"{at_key.query:g}, it gives that "
        f"key the weight {at_key.weights[0]:g} and returns {at_key.value:.2f}, not {key.value:g}."
    )
    return "\n".join(
        [
            *wrap(f"A store maps {store}. What is the value for {QUERY:g}?"),
            *wrap("The answer is the mean of the values, weighted by how near each key is."),
            "",
            pad("weights", 28)
            + "".join(f"{f'w({key:g})':>9}" for key in KEYS)
            + pad_left("answer", 14),
            *rows,
            "",
            *wrap(erratum),
            "",
            *wrap(
                "A Gaussian kernel does not have this fault, and it is attention: its weights are "
                "the softmax of the "
                "scores -(q-k)^2 / 2w^2."
            ),
        ]
    )

"""Soft look-up: what a store of numbers answers for a key that it does not hold."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEYS, VALUES, QUERY = (51.0, 56.0, 58.0), (40.0, 43.0, 48.0), 57.0
KERNEL_WIDTHS = (0.5, 1.0, 2.0, 5.0, 10.0)

WeightFunction = Callable[[float, Sequence[float]], list[float]]


@dataclass(frozen=True)
class LookupAnswer:
    """One way to weigh the keys, the weights it gives, and the weighted mean of the values."""

    way: str
    query: float
    weights: tuple[float, ...]
    value: float


def normalise(parts: Sequence[float]) -> list[float]:
    """Each as a share of all."""
    return [part / sum(parts) for part in parts]


def distance_weights(query: float, keys: Sequence[float]) -> list[float]:
    """|q - k| / sum |q - k|, which grows with distance.

    >>> distance_weights(57.0, [51.0, 56.0, 58.0])
    [0.75, 0.125, 0.125]
    """
    return normalise([abs(query - key) for key in keys])


def inverse_distance_weights(query: float, keys: Sequence[float]) -> list[float]:
    """1/|q - k| as shares; a key that is met exactly takes all.

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
    """Linear interpolation between the two neighbours in a sorted row of keys.

    >>> linear_interpolation_weights(56.5, [51.0, 56.0, 58.0])
    [0.0, 0.75, 0.25]
    """
    above = next(n for n, key in enumerate(keys) if key >= query and n > 0)
    low, high = keys[above - 1], keys[above]
    share = (query - low) / (high - low)
    return [1 - share if n == above - 1 else share if n == above else 0.0 for n in range(len(keys))]


def gaussian_weights(width: float) -> WeightFunction:
    """exp(-(q - k)^2 / (2 width^2)) as shares: kernel regression (Nadaraya 1964, Watson 1964).

    >>> [round(w, 3) for w in gaussian_weights(2.0)(57.0, [51.0, 56.0, 58.0])]
    [0.006, 0.497, 0.497]
    """

    def weigh(query: float, keys: Sequence[float]) -> list[float]:
        nearest = min(abs(query - key) for key in keys)  # taken off, so that no width is too narrow for floats
        return normalise([math.exp((nearest**2 - (query - key) ** 2) / (2 * width**2)) for key in keys])

    return weigh


def look_up(
    method: str, weight_function: WeightFunction, query: float = QUERY, keys: Sequence[float] = KEYS
) -> LookupAnswer:
    """What one way of weighing answers; keys that are not named weigh nothing.

    >>> look_up("distance", distance_weights).value
    41.375
    """
    given = dict(zip(keys, weight_function(query, keys), strict=True))
    weights = tuple(given.get(key, 0.0) for key in KEYS)
    return LookupAnswer(method, query, weights, sum(w * value for w, value in zip(weights, VALUES, strict=True)))


def look_up_by_all_methods() -> list[LookupAnswer]:
    """Every way, for the query between two keys."""
    return [
        look_up("|q-k| over all keys", distance_weights),
        look_up("|q-k| over two neighbours", distance_weights, keys=KEYS[1:]),
        look_up("1/|q-k|", inverse_distance_weights),
        look_up("linear interpolation", linear_interpolation_weights),
        *(look_up(f"gaussian, width {width:g}", gaussian_weights(width)) for width in KERNEL_WIDTHS),
    ]


def counterexamples() -> list[tuple[LookupAnswer, LookupAnswer]]:
    """Where weights that grow with distance go wrong, each beside linear interpolation."""
    beside = (
        look_up("two neighbours", distance_weights, 56.5, KEYS[1:]),
        look_up("line", linear_interpolation_weights, 56.5),
    )
    met = look_up("all keys", distance_weights, 51.0), look_up("line", linear_interpolation_weights, 51.0)
    return [beside, met]


def format_lookup() -> str:
    """All answers as a table, and the erratum that they prove."""
    rows = [
        f"{one.way:<28}" + "".join(f"{weight:>9.4f}" for weight in one.weights) + f"{one.value:>14.10g}"
        for one in look_up_by_all_methods()
    ]
    (beside, line), (met, key) = counterexamples()
    store = ", ".join(f"{key:g} -> {value:g}" for key, value in zip(KEYS, VALUES, strict=True))
    erratum = (
        "Erratum. |q-k| / sum |q-k| is often printed as a weight that favours near keys. It grows with distance. "
        f"Over two neighbours it is right only when both are equally far: at {beside.query:g} it says "
        f"{beside.value:g}, the line says {line.value:g}. At {met.query:g}, a key of the store, it gives that key the "
        f"weight {met.weights[0]:g} and says {met.value:.2f}, not {key.value:g}."
    )
    return "\n".join(
        [
            f"A store holds {store}. What would it hold for {QUERY:g}?",
            "The answer is a mean of the values, weighed by how near each key is.",
            "",
            f"{'weights':<28}" + "".join(f"{f'w({key:g})':>9}" for key in KEYS) + f"{'answer':>14}",
            *rows,
            "",
            *textwrap.wrap(erratum, 80),
            "",
            "A gaussian kernel has no such fault, and it is attention: its shares are the",
            "softmax of the scores -(q-k)^2 / 2w^2.",
        ]
    )

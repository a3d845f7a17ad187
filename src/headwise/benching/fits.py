"""What follows from seconds at several sizes: by which power they grow, and where one way overtakes another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

# Two-sided 95 % quantiles of Student's t for 1, 2, .. degrees of freedom; beyond them the normal's.
STUDENT_T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL_975 = 1.96
MIN_POINTS = 3  # points of a fit that has an interval


class PowerLawFit(NamedTuple):
    """Seconds grow as sizes to the `power`, between `low` and `high` with 95 %; `start` is the smallest size used."""

    power: float
    low: float
    high: float
    start: int
    points: int


class SpeedCrossover(NamedTuple):
    """From so many on, `to` is faster than `from_`."""

    from_: str
    to: str
    at: float


def fit_power_law(seconds: Mapping[int, float]) -> PowerLawFit | None:
    """Least squares of log seconds on log sizes, over the larger half of the sizes and at least three of them.

    The smaller half is left out because calls that are short say little of what grows.

    >>> fit = fit_power_law({64: 9.0, 128: 9.1, 256: 10.0, 512: 40.0, 1024: 160.0, 2048: 640.0})
    >>> round(fit.power, 3), fit.start, fit.points
    (2.0, 512, 3)
    """
    sizes = sorted(seconds)
    used = sizes[-max(MIN_POINTS, -(-len(sizes) // 2)) :]
    if len(used) < MIN_POINTS:
        return None
    xs, ys = [math.log(size) for size in used], [math.log(seconds[size]) for size in used]
    power, error = _fit_line(xs, ys)
    free = len(used) - 2
    wide = error * (STUDENT_T_975[free - 1] if free <= len(STUDENT_T_975) else NORMAL_975)
    return PowerLawFit(power, power - wide, power + wide, used[0], len(used))


def _fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """The slope of the line that misses least, and its standard error."""
    middle, height = sum(xs) / len(xs), sum(ys) / len(ys)
    width = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True)) / width
    missed = sum((y - height - slope * (x - middle)) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, math.sqrt(missed / (len(xs) - 2) / width)


def fastest_by_size(points: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Who is fastest at every size.

    >>> fastest_by_size({8: {"a": 1.0, "b": 2.0}, 16: {"a": 3.0, "b": 2.5}})
    {8: 'a', 16: 'b'}
    """
    return {size: min(told, key=lambda name: told[name]) for size, told in sorted(points.items()) if told}


def find_crossings(points: Mapping[int, Mapping[str, float]]) -> list[SpeedCrossover]:
    """Where the fastest changes: the size at which straight lines between the points, in logarithms, meet.

    >>> find_crossings({256: {"a": 1.0, "b": 2.0}, 1024: {"a": 4.0, "b": 2.0}})
    [Crossing(from_='a', to='b', at=512.0)]
    """
    found, best = [], list(fastest_by_size(points).items())
    for (size, one), (larger, other) in pairwise(best):
        if one == other or not {one, other} <= set(points[size]) & set(points[larger]):
            continue
        before = math.log(points[size][other] / points[size][one])
        after = math.log(points[larger][one] / points[larger][other])
        share = before / (before + after) if before + after else 0.5
        found.append(SpeedCrossover(one, other, round(size * (larger / size) ** share, 6)))
    return found

"""How the rate of learning goes up and down again, as functions of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

RISE = 25  # a one-cycle schedule begins at this part of the highest rate, as torch's


class Course(NamedTuple):
    """Where a run stands: `step` from 1 to `steps`; how many of these it warms up and decays; the lowest factor."""

    step: int
    steps: int
    warmup: float
    decay: float
    floor: float

    @property
    def rising(self) -> float:
        """The part of the warm-up that is done."""
        return min(1.0, self.step / self.warmup) if self.warmup else 1.0


def _bend(part: float, first: float, last: float) -> float:
    """Half a cosine from `first` to `last`."""
    return last + (first - last) * (1 + math.cos(math.pi * part)) / 2


def constant(course: Course) -> float:
    """Up, and there it stays.

    >>> [constant(Course(step, 8, 2, 0, 0)) for step in (1, 2, 3, 8)]
    [0.5, 1.0, 1.0, 1.0]
    """
    return course.rising


def cosine(course: Course) -> float:
    """Up in a line, down along half a cosine (1608.03983).

    >>> [round(cosine(Course(step, 10, 2, 0, 0)), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if course.step <= course.warmup:
        return course.rising
    return _bend((course.step - course.warmup) / (course.steps - course.warmup), 1.0, course.floor)


def inverse_sqrt(course: Course) -> float:
    """min(s / w, sqrt(w / s)) at step s of w that warm up: the one of 1706.03762, with its peak at 1.

    >>> [inverse_sqrt(Course(step, 100, 4, 0, 0)) for step in (1, 4, 16, 64)]
    [0.25, 1.0, 0.5, 0.25]
    """
    warmup = max(course.warmup, 1)
    return min(course.step / warmup, max(course.floor, math.sqrt(warmup / course.step)))


def wsd(course: Course) -> float:
    """Warm up, stay, decay in a line over the last steps (2404.06395).

    >>> [wsd(Course(step, 10, 2, 4, 0)) for step in (1, 2, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    left = (course.steps - course.step) / course.decay if course.decay else 1.0
    return min(course.rising, course.floor + (1 - course.floor) * min(1.0, left))


def one_cycle(course: Course) -> float:
    """Half a cosine up from 1 / 25, and half a cosine down (1708.07120); the last step is at the floor, as torch's.

    >>> [round(one_cycle(Course(step, 9, 3, 0, 0)), 3) for step in (1, 2, 3, 6, 9)]
    [0.04, 0.52, 1.0, 0.5, 0.0]
    """
    top, at = course.warmup - 1, course.step - 1
    if at < top:
        return _bend(at / top, 1 / RISE, 1.0)
    top = max(top, 0.0)
    return _bend((at - top) / max(course.steps - 1 - top, 1e-9), 1.0, course.floor)


SCHEDULES: Mapping[str, Callable[[Course], float]] = {
    "constant": constant,
    "cosine": cosine,
    "inverse-sqrt": inverse_sqrt,
    "wsd": wsd,
    "one-cycle": one_cycle,
}

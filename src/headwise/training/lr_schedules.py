"""How the rate of learning goes up and down again, as functions of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

ONE_CYCLE_DIVISOR = 25  # a one-cycle schedule begins at this part of the highest rate, as torch's


class ScheduleStep(NamedTuple):
    """Where a run stands: `step` from 1 to `steps`; how many of these it warms up and decays; the lowest factor."""

    step: int
    steps: int
    warmup: float
    decay: float
    min_factor: float

    @property
    def warmup_progress(self) -> float:
        """The part of the warm-up that is done."""
        return min(1.0, self.step / self.warmup) if self.warmup else 1.0


def _half_cosine(part: float, first: float, last: float) -> float:
    """Half a cosine from `first` to `last`."""
    return last + (first - last) * (1 + math.cos(math.pi * part)) / 2


def constant(course: ScheduleStep) -> float:
    """Up, and there it stays.

    >>> [constant(ScheduleStep(step, 8, 2, 0, 0)) for step in (1, 2, 3, 8)]
    [0.5, 1.0, 1.0, 1.0]
    """
    return course.warmup_progress


def cosine(course: ScheduleStep) -> float:
    """Up in a line, down along half a cosine (1608.03983).

    >>> [round(cosine(ScheduleStep(step, 10, 2, 0, 0)), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if course.step <= course.warmup:
        return course.warmup_progress
    return _half_cosine((course.step - course.warmup) / (course.steps - course.warmup), 1.0, course.min_factor)


def inverse_sqrt(course: ScheduleStep) -> float:
    """min(s / w, sqrt(w / s)) at step s of w that warm up: the one of 1706.03762, with its peak at 1.

    >>> [inverse_sqrt(ScheduleStep(step, 100, 4, 0, 0)) for step in (1, 4, 16, 64)]
    [0.25, 1.0, 0.5, 0.25]
    """
    warmup = max(course.warmup, 1)
    return min(course.step / warmup, max(course.min_factor, math.sqrt(warmup / course.step)))


def wsd(course: ScheduleStep) -> float:
    """Warm up, stay, decay in a line over the last steps (2404.06395).

    >>> [wsd(ScheduleStep(step, 10, 2, 4, 0)) for step in (1, 2, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    left = (course.steps - course.step) / course.decay if course.decay else 1.0
    return min(course.warmup_progress, course.min_factor + (1 - course.min_factor) * min(1.0, left))


def one_cycle(course: ScheduleStep) -> float:
    """Half a cosine up from 1 / 25, and half a cosine down (1708.07120); the last step is at the floor, as torch's.

    >>> [round(one_cycle(ScheduleStep(step, 9, 3, 0, 0)), 3) for step in (1, 2, 3, 6, 9)]
    [0.04, 0.52, 1.0, 0.5, 0.0]
    """
    top, at = course.warmup - 1, course.step - 1
    if at < top:
        return _half_cosine(at / top, 1 / ONE_CYCLE_DIVISOR, 1.0)
    top = max(top, 0.0)
    return _half_cosine((at - top) / max(course.steps - 1 - top, 1e-9), 1.0, course.min_factor)


SCHEDULES: Mapping[str, Callable[[ScheduleStep], float]] = {
    "constant": constant,
    "cosine": cosine,
    "inverse-sqrt": inverse_sqrt,
    "wsd": wsd,
    "one-cycle": one_cycle,
}

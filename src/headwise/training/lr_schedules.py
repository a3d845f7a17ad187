"""Learning-rate schedules: functions from the step to a factor of the peak learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

ONE_CYCLE_DIVISOR = 25  # a one-cycle schedule starts at 1 / 25 of the peak, as in torch.optim.lr_scheduler.OneCycleLR


class ScheduleStep(NamedTuple):
    """Position in a run: `step` of `steps`, counted from 1; numbers of warm-up and decay steps; the lowest factor."""

    step: int
    steps: int
    warmup: float
    decay: float
    min_factor: float

    @property
    def warmup_progress(self) -> float:
        """Share of the warm-up that is done, at most 1."""
        return min(1.0, self.step / self.warmup) if self.warmup else 1.0


def _half_cosine(progress: float, first: float, last: float) -> float:
    """Half a cosine from `first` to `last`, for progress from 0 to 1."""
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


def constant(schedule: ScheduleStep) -> float:
    """Linear warm-up, then constant.

    >>> [constant(ScheduleStep(step, 8, 2, 0, 0)) for step in (1, 2, 3, 8)]
    [0.5, 1.0, 1.0, 1.0]
    """
    return schedule.warmup_progress


def cosine(schedule: ScheduleStep) -> float:
    """Linear warm-up, then half a cosine down (1608.03983).

    >>> [round(cosine(ScheduleStep(step, 10, 2, 0, 0)), 3) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if schedule.step <= schedule.warmup:
        return schedule.warmup_progress
    return _half_cosine(
        (schedule.step - schedule.warmup) / (schedule.steps - schedule.warmup), 1.0, schedule.min_factor
    )


def inverse_sqrt(schedule: ScheduleStep) -> float:
    """min(s / w, sqrt(w / s)) at step s with w warm-up steps: the schedule of 1706.03762, scaled to a peak of 1.

    >>> [inverse_sqrt(ScheduleStep(step, 100, 4, 0, 0)) for step in (1, 4, 16, 64)]
    [0.25, 1.0, 0.5, 0.25]
    """
    warmup = max(schedule.warmup, 1)
    return min(schedule.step / warmup, max(schedule.min_factor, math.sqrt(warmup / schedule.step)))


def wsd(schedule: ScheduleStep) -> float:
    """Warmup-stable-decay: linear warm-up, constant, then linear decay over the last steps (2404.06395).

    >>> [wsd(ScheduleStep(step, 10, 2, 4, 0)) for step in (1, 2, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    left = (schedule.steps - schedule.step) / schedule.decay if schedule.decay else 1.0
    return min(schedule.warmup_progress, schedule.min_factor + (1 - schedule.min_factor) * min(1.0, left))


def one_cycle(schedule: ScheduleStep) -> float:
    """Half a cosine up from 1 / 25, then half a cosine down to the floor at the last step (1708.07120), as in PyTorch.

    >>> [round(one_cycle(ScheduleStep(step, 9, 3, 0, 0)), 3) for step in (1, 2, 3, 6, 9)]
    [0.04, 0.52, 1.0, 0.5, 0.0]
    """
    peak, step = schedule.warmup - 1, schedule.step - 1  # counted from 0
    if step < peak:
        return _half_cosine(step / peak, 1 / ONE_CYCLE_DIVISOR, 1.0)
    peak = max(peak, 0.0)
    return _half_cosine((step - peak) / max(schedule.steps - 1 - peak, 1e-9), 1.0, schedule.min_factor)


SCHEDULES: Mapping[str, Callable[[ScheduleStep], float]] = {
    "constant": constant,
    "cosine": cosine,
    "inverse-sqrt": inverse_sqrt,
    "wsd": wsd,
    "one-cycle": one_cycle,
}

"""Runs timed in turns within one process, so that all of them meet the same machine."""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from .case import Run

Clock = Callable[[], float]


@dataclass(frozen=True)
class Samples:
    """Seconds of one call, by sample; a sample is so many calls in a row."""

    seconds: tuple[float, ...]
    calls: int = 1

    @property
    def median(self) -> float:
        """Seconds of a call in the middle sample.

        >>> Samples((3.0, 1.0, 2.0)).median
        2.0
        """
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """How far apart the middle half of the samples lies, as a share of the median.

        >>> Samples((1.0, 2.0, 3.0, 4.0, 5.0)).spread  # from 2 to 4
        0.6666666666666666
        """
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass(frozen=True)
class Pace:
    """How long a sample lasts at least, how many are taken, and the seconds that those of one case may take.

    The seconds are shared out evenly: what is slow is sampled less often, but `least` times whatever it takes. Where
    somebody's spread is beyond `wide` with fewer than the `most` samples, everybody is sampled as often again, once.
    """

    sample: float = 0.02
    least: int = 3
    most: int = 15
    budget: float = 20.0
    wide: float = 0.15

    def calls(self, seconds: float) -> int:
        """How many calls of so many seconds are a sample.

        >>> Pace(sample=0.02).calls(0.003)
        7
        """
        return max(1, math.ceil(self.sample / seconds))

    def repeats(self, seconds: float, runs: int) -> int:
        """How many samples are taken of one of so many runs, when a sample takes so many seconds.

        >>> [Pace(budget=10).repeats(seconds, runs=2) for seconds in (0.02, 1.0, 7.0)]
        [15, 5, 3]
        """
        return max(self.least, min(self.most, int(self.budget / runs / seconds)))

    def unsettled(self, samples: Samples) -> bool:
        """Whether they lie apart, and more might bring their median nearer.

        >>> pace = Pace(most=4)
        >>> pace.unsettled(Samples((1.0, 2.0, 3.0))), pace.unsettled(Samples((1.0, 2.0, 3.0, 4.0)))
        (True, False)
        """
        return len(samples.seconds) < self.most and samples.spread > self.wide


def once(run: Run, clock: Clock, least: float) -> float:
    """Seconds of a call that is warm: the shortest of as many as take `least` seconds together."""
    begun, best = clock(), math.inf
    while True:
        start = clock()
        run()
        now = clock()
        best = min(best, max(now - start, 1e-9))
        if now - begun >= least:
            return best


def in_turns(runs: Mapping[str, Run], pace: Pace, clock: Clock, seed: int = 0) -> dict[str, Samples]:
    """Samples of every run, each of which is warm; their order is drawn anew in every round.

    The first round says how long calls take. One that is as long as a sample is one: what is slow is not called once
    more for that.
    """
    calls: dict[str, int] = {}
    more: dict[str, int] = {}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with no_collector():
        for name in turns(dict.fromkeys(runs, 1), seed):
            seconds = once(runs[name], clock, pace.sample)
            calls[name] = pace.calls(seconds)
            taken[name] += [seconds] if calls[name] == 1 else []
            more[name] = pace.repeats(seconds * calls[name], len(runs)) - len(taken[name])
        for name in turns(more, seed + 1):
            taken[name].append(timed(runs[name], calls[name], clock))
        if any(pace.unsettled(Samples(tuple(seconds))) for seconds in taken.values()):
            for name in turns({name: len(seconds) for name, seconds in taken.items()}, seed + 2):
                taken[name].append(timed(runs[name], calls[name], clock))
    return {name: Samples(tuple(seconds), calls[name]) for name, seconds in taken.items()}


def turns(repeats: Mapping[str, int], seed: int) -> Iterator[str]:
    """Whose turn it is, round by round: whoever is sampled less often is in evenly spaced rounds.

    >>> "".join(turns({"a": 4, "b": 2}, seed=0))
    'aabaab'
    """
    draw, rounds = random.Random(seed), max(repeats.values())
    for number in range(rounds):
        those = [name for name, count in repeats.items() if (number + 1) * count // rounds > number * count // rounds]
        draw.shuffle(those)
        yield from those


def timed(run: Run, calls: int, clock: Clock) -> float:
    """Seconds of one of so many calls in a row."""
    begun = clock()
    for _ in range(calls):
        run()
    return (clock() - begun) / calls


@contextmanager
def no_collector() -> Iterator[None]:
    """Python looks for garbage before, and not within."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

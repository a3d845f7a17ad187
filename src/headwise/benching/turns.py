"""Runs timed in turns within one process, so that all of them meet the same machine."""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from .case import TimedCall

Clock = Callable[[], float]


@dataclass(frozen=True)
class TimingSamples:
    """Seconds of one call, by sample; a sample is so many calls in a row."""

    seconds: tuple[float, ...]
    calls_per_sample: int = 1

    @property
    def median(self) -> float:
        """Seconds of a call in the middle sample.

        >>> TimingSamples((3.0, 1.0, 2.0)).median
        2.0
        """
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """How far apart the middle half of the samples lies, as a share of the median.

        >>> TimingSamples((1.0, 2.0, 3.0, 4.0, 5.0)).spread  # from 2 to 4
        0.6666666666666666
        """
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


@dataclass(frozen=True)
class TimingPace:
    """How long a sample lasts at least, how many are taken, and the seconds that those of one case may take.

    The seconds are shared out evenly: what is slow is sampled less often, but `least` times whatever it takes. Where
    somebody's spread is beyond `wide` with fewer than the `most` samples, everybody is sampled as often again, once.
    """

    min_sample_seconds: float = 0.02
    min_samples: int = 3
    max_samples: int = 15
    max_seconds: float = 20.0
    max_spread: float = 0.15

    def calls_per_sample(self, seconds: float) -> int:
        """How many calls of so many seconds are a sample.

        >>> TimingPace(sample=0.02).calls(0.003)
        7
        """
        return max(1, math.ceil(self.min_sample_seconds / seconds))

    def num_samples(self, seconds: float, runs: int) -> int:
        """How many samples are taken of one of so many runs, when a sample takes so many seconds.

        >>> [TimingPace(budget=10).num_samples(seconds, runs=2) for seconds in (0.02, 1.0, 7.0)]
        [15, 5, 3]
        """
        return max(self.min_samples, min(self.max_samples, int(self.max_seconds / runs / seconds)))

    def needs_more_samples(self, samples: TimingSamples) -> bool:
        """Whether they lie apart, and more might bring their median nearer.

        >>> pace = TimingPace(most=4)
        >>> pace.needs_more_samples(TimingSamples((1.0, 2.0, 3.0))), pace.needs_more_samples(TimingSamples((1.0, 2.0, 3.0, 4.0)))
        (True, False)
        """
        return len(samples.seconds) < self.max_samples and samples.spread > self.max_spread


def time_warm_call(run: TimedCall, clock: Clock, least: float) -> float:
    """Seconds of a call that is warm: the shortest of as many as take `least` seconds together."""
    begun, best = clock(), math.inf
    while True:
        start = clock()
        run()
        now = clock()
        best = min(best, max(now - start, 1e-9))
        if now - begun >= least:
            return best


def time_interleaved(runs: Mapping[str, TimedCall], pace: TimingPace, clock: Clock, seed: int = 0) -> dict[str, TimingSamples]:
    """Samples of every run, each of which is warm; their order is drawn anew in every round.

    The first round says how long calls take. One that is as long as a sample is one: what is slow is not called once
    more for that.
    """
    calls: dict[str, int] = {}
    more: dict[str, int] = {}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with garbage_collection_disabled():
        for name in interleaved_order(dict.fromkeys(runs, 1), seed):
            seconds = time_warm_call(runs[name], clock, pace.min_sample_seconds)
            calls[name] = pace.calls_per_sample(seconds)
            taken[name] += [seconds] if calls[name] == 1 else []
            more[name] = pace.num_samples(seconds * calls[name], len(runs)) - len(taken[name])
        for name in interleaved_order(more, seed + 1):
            taken[name].append(time_calls(runs[name], calls[name], clock))
        if any(pace.needs_more_samples(TimingSamples(tuple(seconds))) for seconds in taken.values()):
            for name in interleaved_order({name: len(seconds) for name, seconds in taken.items()}, seed + 2):
                taken[name].append(time_calls(runs[name], calls[name], clock))
    return {name: TimingSamples(tuple(seconds), calls[name]) for name, seconds in taken.items()}


def interleaved_order(repeats: Mapping[str, int], seed: int) -> Iterator[str]:
    """Whose turn it is, round by round: whoever is sampled less often is in evenly spaced rounds.

    >>> "".join(interleaved_order({"a": 4, "b": 2}, seed=0))
    'aabaab'
    """
    draw, rounds = random.Random(seed), max(repeats.values())
    for number in range(rounds):
        those = [name for name, count in repeats.items() if (number + 1) * count // rounds > number * count // rounds]
        draw.shuffle(those)
        yield from those


def time_calls(run: TimedCall, calls: int, clock: Clock) -> float:
    """Seconds of one of so many calls in a row."""
    begun = clock()
    for _ in range(calls):
        run()
    return (clock() - begun) / calls


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Python looks for garbage before, and not within."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

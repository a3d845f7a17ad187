"""A benchmark case, comparison of results, and timing of alternatives in alternation."""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

LIMIT = "limit"  # baseline of a target that refers to the machine's limit instead of a peer

TimedCall = Callable[[], Any]  # does the work once; its result is compared with that of headwise


class MissingPeer(NamedTuple):
    """A peer that cannot run on this machine, and why."""

    reason: str


class SpeedTarget(NamedTuple):
    """Target: at least `ratio` times as fast as a peer, or at least the share `ratio` of the
    machine's limit.
    """

    baseline: str
    ratio: float


class RequiredWork(NamedTuple):
    """Minimum work of a case: bytes read from memory, and FLOPs of matrix products in one dtype."""

    bytes_read: int = 0
    flops: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class BenchmarkCase:
    """One row of the report: the work as done by headwise (`ours`) and by `peers`.

    `tolerance` is the largest difference between the results of a peer and of headwise, as a share
    of the largest number; None if the results are not comparable, as for a training step. `history`
    records, for a target known to be missed, what was tried and how far it got. `reported_peers`
    names peers that do different work and are listed for scale only.
    """

    name: str
    ours: TimedCall
    peers: Mapping[str, TimedCall | MissingPeer]
    targets: tuple[SpeedTarget, ...] = ()
    required_work: RequiredWork | None = None
    tolerance: float | None = 1e-3
    history: str = ""
    reported_peers: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(
        default_factory=dict
    )  # further lines of the report, such as memory


class CaseCount(NamedTuple):
    """Number of cases of one kind, in a full run and in a quick one; it only serves to estimate the
    time left.
    """

    full: int
    quick: int


class CaseKind(NamedTuple):
    """One kind of work: its title in the report, and a generator that makes its cases one at a
    time.
    """

    title: str
    make_cases: Callable[[bool], Iterator[BenchmarkCase]]  # the argument is `quick`
    count: CaseCount


# --- Comparison of results ------------------------------------------------------------------------


def describe_difference(ours: Any, theirs: Any, tolerance: float) -> str:
    """Describe how two results differ; "" if every number is within the tolerance.

    The tolerance is a share of the largest number of each tensor.

    >>> describe_difference(torch.tensor([1.0, 100.0]), torch.tensor([1.05, 100.0]), 1e-3)
    ''
    >>> describe_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), 1e-3)
    'off by 0.25 times the largest number'
    """
    our_tensors, their_tensors = _list_tensors(ours), _list_tensors(theirs)
    if [tensor.shape for tensor in our_tensors] != [tensor.shape for tensor in their_tensors]:
        return f"returns {_format_shapes(their_tensors)}, not {_format_shapes(our_tensors)}"
    error = max(
        (_relative_error(*pair) for pair in zip(our_tensors, their_tensors, strict=True)),
        default=0.0,
    )
    return "" if error <= tolerance else f"off by {error:.2g} times the largest number"


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference divided by the largest number."""
    if not expected.numel():
        return 0.0
    expected, actual = expected.detach().double(), actual.detach().to(expected.device).double()
    difference = (
        (expected - actual).abs().masked_fill(expected == actual, 0)
    )  # equal infinities do not differ
    largest_difference = float(difference.max())
    scale = float(expected.abs().max())
    if not math.isfinite(largest_difference):
        return math.inf
    return largest_difference / scale if scale else largest_difference


def _list_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _list_tensors(item)]
    return [torch.as_tensor(value)]


def _format_shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "nothing"


# --- Other libraries, if they are installed -------------------------------------------------------

T = TypeVar("T")


def make_peer(library: str, make: Callable[[Any], T]) -> T | MissingPeer:
    """Call `make` with an imported library; return a `MissingPeer` if it cannot be imported.

    >>> make_peer("no_such_library", lambda library: library.run)
    MissingPeer(reason="No module named 'no_such_library'")
    """
    try:
        return make(import_quietly(library))
    except ImportError as error:
        return MissingPeer(str(error))


def import_quietly(library: str) -> Any:
    """Import a library; transformers is silenced (progress bars, warnings about random weights)."""
    module = import_module(library)
    if library == "transformers":
        module.utils.logging.disable_progress_bar()
        module.utils.logging.set_verbosity_error()
    return module


# --- Timing in alternation within one process, so that all runs see the same machine state --------

Clock = Callable[[], float]


@dataclass(frozen=True)
class TimingSamples:
    """Seconds per call of each sample; a sample is `calls_per_sample` calls in a row, and starts at
    `started`.
    """

    seconds: tuple[float, ...]
    calls_per_sample: int = 1
    started: tuple[float, ...] = field(default=(), compare=False)

    @property
    def median(self) -> float:
        """Median of the seconds per call.

        >>> TimingSamples((3.0, 1.0, 2.0)).median
        2.0
        """
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range of the samples divided by their median.

        >>> TimingSamples((1.0, 2.0, 3.0, 4.0, 5.0)).spread  # from 2 to 4
        0.6666666666666666
        """
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (upper - lower) / self.median


MIN_TAIL = 0.025  # probability that the median of a ratio lies below its interval, and above it


class SpeedRatio(NamedTuple):
    """The median of theirs / ours over pairs of samples taken side by side, and its 95 % interval
    by the sign test.

    With fewer than six pairs no such interval exists; then it is that of all pairs.
    """

    median: float
    low: float
    high: float
    pairs: int

    def scaled(self, factor: float) -> SpeedRatio:
        """The ratio times a factor."""
        return SpeedRatio(self.median * factor, self.low * factor, self.high * factor, self.pairs)

    def is_certain(self, target: float) -> bool:
        """Whether the whole interval is on one side of a target."""
        return self.low >= target or self.high < target


def compare_pairs(ours: TimingSamples, theirs: TimingSamples) -> SpeedRatio:
    """Compare two interleaved runs by pairs of samples.

    Both samples of a pair see about the same machine, so that other work beside them changes their
    ratio much less than it changes either of them. Runs with equally many samples are paired by
    rounds; otherwise each sample of the run with fewer samples is paired with the nearest one in
    time.

    >>> compare_pairs(
    ...     TimingSamples((1.0, 5.0, 1.0), 1, (0, 2, 4)),
    ...     TimingSamples((2.0, 9.0, 2.2), 1, (1, 3, 5)),
    ... )
    SpeedRatio(median=2.0, low=1.8, high=2.2, pairs=3)
    """
    few, many = sorted((ours, theirs), key=lambda samples: len(samples.seconds))
    ratios = []
    for number, seconds in enumerate(few.seconds):
        nearest = _nearest_sample(few, number, many)
        ratios.append(nearest / seconds if few is ours else seconds / nearest)
    ratios.sort()
    below = count_outside(len(ratios))
    return SpeedRatio(statistics.median(ratios), ratios[below], ratios[-1 - below], len(ratios))


def count_outside(pairs: int) -> int:
    """How many ratios lie outside the interval of the median on each side: the most with a tail of
    at most 2.5 %.

    >>> [count_outside(pairs) for pairs in (3, 6, 9, 15, 30)]
    [0, 0, 1, 3, 9]
    """
    tail, count = 0.0, -1
    while count + 1 < pairs:
        tail += math.comb(pairs, count + 1) / 2**pairs
        if tail > MIN_TAIL:
            break
        count += 1
    return max(0, count)


def _nearest_sample(samples: TimingSamples, number: int, others: TimingSamples) -> float:
    if len(samples.seconds) == len(others.seconds):
        return others.seconds[number]  # of the same round
    start = samples.started[number]
    index = min(range(len(others.seconds)), key=lambda n: abs(others.started[n] - start))
    return others.seconds[index]


@dataclass(frozen=True)
class TimingPace:
    """Minimum length of a sample, number of samples, and time limit of one case.

    The time is divided evenly: slow runs get fewer samples, but at least `min_samples`. If the
    spread of a run exceeds `max_spread` with fewer than `max_samples` samples, all runs are sampled
    once more as often.
    """

    min_sample_seconds: float = 0.02
    min_samples: int = 3
    max_samples: int = 15
    max_seconds: float = 20.0
    max_spread: float = 0.15

    def calls_per_sample(self, seconds: float) -> int:
        """Return how many calls of this length make one sample.

        >>> TimingPace(min_sample_seconds=0.02).calls_per_sample(0.003)
        7
        """
        return max(1, math.ceil(self.min_sample_seconds / seconds))

    def num_samples(self, seconds: float, runs: int) -> int:
        """Return how many samples to take of each of `runs` runs, if a sample takes this many
        seconds.

        >>> [
        ...     TimingPace(max_seconds=10).num_samples(seconds, runs=2)
        ...     for seconds in (0.02, 1.0, 7.0)
        ... ]
        [15, 5, 3]
        """
        return max(self.min_samples, min(self.max_samples, int(self.max_seconds / runs / seconds)))

    def needs_more_samples(self, samples: TimingSamples) -> bool:
        """Whether the samples spread too far, and more of them could be taken.

        >>> pace = TimingPace(max_samples=4)
        >>> (
        ...     pace.needs_more_samples(TimingSamples((1.0, 2.0, 3.0))),
        ...     pace.needs_more_samples(TimingSamples((1.0, 2.0, 3.0, 4.0))),
        ... )
        (True, False)
        """
        return len(samples.seconds) < self.max_samples and samples.spread > self.max_spread


def time_warm_call(run: TimedCall, clock: Clock, min_seconds: float) -> float:
    """Return the shortest time of one call, over as many calls as take `min_seconds` together."""
    started, best = clock(), math.inf
    while True:
        start = clock()
        run()
        now = clock()
        best = min(best, max(now - start, 1e-9))
        if now - started >= min_seconds:
            return best


def time_interleaved(
    runs: Mapping[str, TimedCall], pace: TimingPace, clock: Clock, seed: int = 0
) -> dict[str, TimingSamples]:
    """Time all runs, which must be warm, in rounds of random order; return the samples of each.

    The first round estimates how long a call takes. If one call is as long as a sample, it counts
    as a sample.
    """
    calls: dict[str, int] = {}
    remaining: dict[str, int] = {}
    seconds_of: dict[str, list[float]] = {name: [] for name in runs}
    started: dict[str, list[float]] = {name: [] for name in runs}

    def sample_all(order: Iterator[str]) -> None:
        for name in order:
            started[name].append(clock())
            seconds_of[name].append(time_calls(runs[name], calls[name], clock))

    with garbage_collection_disabled():
        for name in interleaved_order(dict.fromkeys(runs, 1), seed):
            start = clock()
            seconds = time_warm_call(runs[name], clock, pace.min_sample_seconds)
            calls[name] = pace.calls_per_sample(seconds)
            if calls[name] == 1:
                seconds_of[name], started[name] = [seconds], [start]
            remaining[name] = pace.num_samples(seconds * calls[name], len(runs)) - len(
                seconds_of[name]
            )
        sample_all(interleaved_order(remaining, seed + 1))
        if any(
            pace.needs_more_samples(TimingSamples(tuple(seconds)))
            for seconds in seconds_of.values()
        ):
            counts = {name: len(seconds) for name, seconds in seconds_of.items()}
            sample_all(interleaved_order(counts, seed + 2))
    return {
        name: TimingSamples(tuple(seconds), calls[name], tuple(started[name]))
        for name, seconds in seconds_of.items()
    }


def interleaved_order(repeats: Mapping[str, int], seed: int) -> Iterator[str]:
    """Yield the names in rounds, each round shuffled; names with fewer repeats are in evenly spaced
    rounds.

    >>> "".join(interleaved_order({"a": 4, "b": 2}, seed=0))
    'aabaab'
    """
    generator, rounds = random.Random(seed), max(repeats.values())
    for number in range(rounds):
        names = [
            name
            for name, count in repeats.items()
            if (number + 1) * count // rounds > number * count // rounds
        ]
        generator.shuffle(names)
        yield from names


def time_calls(run: TimedCall, calls: int, clock: Clock) -> float:
    """Return the mean seconds of `calls` calls in a row."""
    started = clock()
    for _ in range(calls):
        run()
    return (clock() - started) / calls


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Collect garbage once, then keep the collector off inside the context."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

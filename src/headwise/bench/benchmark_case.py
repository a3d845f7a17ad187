"""One piece of work done by us and by others: what is timed, what it is held to, and what the machine allows."""

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

LIMIT = "limit"  # the machine's own, where an aim names no peer

TimedCall = Callable[[], Any]  # does the work once; what it gives is compared with what ours gives


class MissingPeer(NamedTuple):
    """A peer that cannot run here, and why."""

    reason: str


class SpeedTarget(NamedTuple):
    """To be at least so many times as fast as a peer; of the machine's limit, to reach at least this share."""

    baseline: str
    ratio: float


class RequiredWork(NamedTuple):
    """What the work cannot do without: bytes read from memory, and FLOPs of products in one dtype."""

    bytes_read: int = 0
    flops: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class BenchmarkCase:
    """One row of the table.

    `tolerance` is how far what a peer gives may be from what ours gives, as a share of its largest number; None where
    they give nothing that can be compared, as a step of training. `tried` says, where an aim is known to be missed,
    what was tried and how far it got. `beside` names peers that do other work and stand for scale.
    """

    name: str
    ours: TimedCall
    peers: Mapping[str, TimedCall | MissingPeer]
    targets: tuple[SpeedTarget, ...] = ()
    required_work: RequiredWork | None = None
    tolerance: float | None = 1e-3
    history: str = ""
    reported_peers: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # more that is worth a line: memory, say


# --- Whether two ways give the same --------------------------------------------------------------------


def describe_difference(ours: Any, theirs: Any, tolerance: float) -> str:
    """How what theirs gives is not what ours gives; nothing where each number is within the tolerance.

    The tolerance is a share of the largest number of each tensor.

    >>> describe_difference(torch.tensor([1.0, 100.0]), torch.tensor([1.05, 100.0]), 1e-3)
    ''
    >>> describe_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), 1e-3)
    'off by 0.25 times the largest number'
    """
    mine, other = _list_tensors(ours), _list_tensors(theirs)
    if [one.shape for one in mine] != [one.shape for one in other]:
        return f"gives {_format_shapes(other)}, not {_format_shapes(mine)}"
    off = max((_relative_error(*pair) for pair in zip(mine, other, strict=True)), default=0.0)
    return "" if off <= tolerance else f"off by {off:.2g} times the largest number"


def _relative_error(mine: Tensor, other: Tensor) -> float:
    """The largest difference over the largest number."""
    if not mine.numel():
        return 0.0
    mine, other = mine.detach().double(), other.detach().to(mine.device).double()
    apart = (mine - other).abs().masked_fill(mine == other, 0)  # two infinities are the same
    most = float(apart.max())
    size = float(mine.abs().max())
    if not math.isfinite(most):
        return math.inf
    return most / size if size else most


def _list_tensors(given: Any) -> list[Tensor]:
    if isinstance(given, (tuple, list)):
        return [tensor for one in given for tensor in _list_tensors(one)]
    return [torch.as_tensor(given)]


def _format_shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(one.shape)) for one in tensors) or "nothing"


# --- Other libraries, each where it is installed -------------------------------------------------------

T = TypeVar("T")


def make_peer(library: str, make: Callable[[Any], T]) -> T | MissingPeer:
    """What `make` makes of an imported library; where that cannot be imported, the reason.

    >>> make_peer("no_such_library", lambda library: library.run)
    MissingPeer(reason="No module named 'no_such_library'")
    """
    try:
        return make(import_quietly(library))
    except ImportError as error:
        return MissingPeer(str(error))


def import_quietly(library: str) -> Any:
    """A library that keeps its progress, and its doubts about random models, to itself."""
    found = import_module(library)
    if library == "transformers":
        found.utils.logging.disable_progress_bar()
        found.utils.logging.set_verbosity_error()
    return found


# --- Runs timed in turns within one process, so that all of them meet the same machine -----------------

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

        >>> TimingPace(min_sample_seconds=0.02).calls_per_sample(0.003)
        7
        """
        return max(1, math.ceil(self.min_sample_seconds / seconds))

    def num_samples(self, seconds: float, runs: int) -> int:
        """How many samples are taken of one of so many runs, when a sample takes so many seconds.

        >>> [TimingPace(max_seconds=10).num_samples(seconds, runs=2) for seconds in (0.02, 1.0, 7.0)]
        [15, 5, 3]
        """
        return max(self.min_samples, min(self.max_samples, int(self.max_seconds / runs / seconds)))

    def needs_more_samples(self, samples: TimingSamples) -> bool:
        """Whether they lie apart, and more might bring their median nearer.

        >>> pace = TimingPace(max_samples=4)
        >>> (
        ...     pace.needs_more_samples(TimingSamples((1.0, 2.0, 3.0))),
        ...     pace.needs_more_samples(TimingSamples((1.0, 2.0, 3.0, 4.0))),
        ... )
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


def time_interleaved(
    runs: Mapping[str, TimedCall], pace: TimingPace, clock: Clock, seed: int = 0
) -> dict[str, TimingSamples]:
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

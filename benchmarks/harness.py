"""Cases, results compared, and times of alternatives that take turns in one process.

`torch.utils.benchmark.Timer` takes the samples. The limits of the machine, one pass over memory and
one large matrix product, take their turns with the implementations of a row.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from timeit import default_timer
from typing import Any, NamedTuple, TypeVar

import torch
from scipy.stats import binom
from torch import Tensor
from torch.utils.benchmark import Timer

from headwise.kernels.capabilities import this_machine
from headwise.kernels.compilation import compile_when_called

LIMIT = "limit"  # baseline of a target that refers to the machine's limit instead of a peer
OURS = "ours"
READ_RUN, PRODUCT_RUN = "(read)", "(product)"  # in brackets, so that no peer has this name
BUFFER_BYTES = 2**30  # read from memory: several times any last-level cache
MATRIX_SIZE = 1024  # rows of the multiplied matrices
SAMPLE_SECONDS = 0.02  # shortest sample
ROUNDS = 3, 15  # fewest and most samples of an implementation
SECONDS_PER_CASE = {False: 20.0, True: 1.5}  # by `quick`
PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "transformers",
    "x-transformers",
    "entmax",
    "local-attention",
    "ctranslate2",
)

TimedCall = Callable[[], Any]  # does the work once; its result is compared with that of headwise
Row = dict[str, Any]  # plain values, ready for JSON


class MissingPeer(NamedTuple):
    """A peer that cannot run on this machine, and why."""

    reason: str


class SpeedTarget(NamedTuple):
    """At least `ratio` times as fast as a peer, or the share `ratio` of the machine's limit."""

    baseline: str
    ratio: float


class RequiredWork(NamedTuple):
    """Minimum work of a case: bytes read from memory, and FLOPs of products in one dtype."""

    bytes_read: int = 0
    flops: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class BenchmarkCase:
    """One row: the work as done by headwise (`ours`) and by `peers`.

    `tolerance` is the largest difference between results as a share of the largest number; None if
    they are not comparable, as for a training step. `reported_peers` do different work and are
    listed for scale only.
    """

    name: str
    ours: TimedCall
    peers: Mapping[str, TimedCall | MissingPeer]
    targets: tuple[SpeedTarget, ...] = ()
    required_work: RequiredWork | None = None
    tolerance: float | None = 1e-3
    reported_peers: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # such as the memory that was added
    clock: Callable[[], float] = default_timer  # `time.process_time` counts all threads


class CaseKind(NamedTuple):
    """One kind of work: its title, and a generator of its cases; the argument is `quick`."""

    title: str
    make_cases: Callable[[bool], Iterator[BenchmarkCase]]


T = TypeVar("T")


def make_peer(library: str, make: Callable[[Any], T]) -> T | MissingPeer:
    """Call `make` with an imported library; a `MissingPeer` if it cannot be imported."""
    try:
        return make(import_quietly(library))
    except ImportError as error:
        return MissingPeer(str(error))


def import_quietly(library: str) -> Any:
    """Import a library without its warnings of deprecated calls; transformers is silenced as well
    (progress bars, warnings about random weights).
    """
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        module = import_module(library)
    if library == "transformers":
        module.utils.logging.disable_progress_bar()
        module.utils.logging.set_verbosity_error()
    return module


def describe_difference(ours: Any, theirs: Any, tolerance: float) -> str:
    """Describe how two results differ; "" if every number is within the tolerance."""
    our_tensors = _list_tensors(ours)
    their_tensors = _list_tensors(theirs)
    our_shapes = [tuple(tensor.shape) for tensor in our_tensors]
    their_shapes = [tuple(tensor.shape) for tensor in their_tensors]
    if our_shapes != their_shapes:
        return f"returns {their_shapes}, not {our_shapes}"
    errors = map(_relative_error, our_tensors, their_tensors)
    error = max(errors, default=0.0)
    return "" if error <= tolerance else f"off by {error:.2g} times the largest number"


def _list_tensors(value: Any) -> list[Tensor]:
    if not isinstance(value, (tuple, list)):
        return [torch.as_tensor(value)]
    tensors = []
    for item in value:
        tensors += _list_tensors(item)
    return tensors


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    """The largest difference divided by the largest number; equal infinities do not differ."""
    expected = expected.detach().double()
    actual = actual.detach().to(expected)
    if not expected.numel():
        return 0.0
    difference = float((expected - actual).abs().masked_fill(expected == actual, 0).max())
    scale = float(expected.abs().max())
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale else difference


def time_in_turns(
    runs: Mapping[str, TimedCall],
    max_seconds: float,
    clock: Callable[[], float] = default_timer,
) -> dict[str, list[float]]:
    """Seconds per call of each sample, in rounds of random order; all runs must be warm."""
    threads = torch.get_num_threads()
    timers = {
        name: Timer("run()", timer=clock, globals={"run": run}, num_threads=threads)
        for name, run in runs.items()
    }
    fewest, most = ROUNDS
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    shuffle = random.Random(0).shuffle
    started = time.perf_counter()
    for number in range(most):
        if number >= fewest and time.perf_counter() - started > max_seconds:
            break
        shuffle(order)
        for name in order:
            sample = timers[name].blocked_autorange(min_run_time=SAMPLE_SECONDS)
            samples[name].append(sample.median)
    return samples


class SpeedRatio(NamedTuple):
    """Median of theirs / ours over rounds, and its 95 % interval by the sign test."""

    median: float
    low: float
    high: float


def compare_rounds(ours: Sequence[float], theirs: Sequence[float], factor: float = 1) -> SpeedRatio:
    """Compare samples of the same rounds; other work on the machine changes their ratio little.

    >>> compare_rounds([1.0, 5.0, 1.0], [2.0, 9.0, 2.2])
    SpeedRatio(median=2.0, low=1.8, high=2.2)
    """
    ratios = sorted(factor * their / our for our, their in zip(ours, theirs, strict=True))
    outside = max(0, int(binom.ppf(0.025, len(ratios), 0.5)) - 1)
    return SpeedRatio(statistics.median(ratios), ratios[outside], ratios[-1 - outside])


class MachineLimits:
    """Reads of memory and products of matrices as fast as the machine does them."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def read(self) -> TimedCall:
        """A call that reads `BUFFER_BYTES`; ones, because untouched zeros are not in memory."""
        if READ_RUN not in self._buffers:
            self._buffers[READ_RUN] = torch.ones(BUFFER_BYTES // 4)
        return self._buffers[READ_RUN].sum

    def multiply(self, dtype: torch.dtype) -> TimedCall:
        """A call that multiplies two large matrices."""
        if dtype not in self._buffers:
            generator = torch.Generator().manual_seed(0)
            matrices = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, generator=generator)
            self._buffers[dtype] = matrices.to(dtype)
        return partial(torch.mm, *self._buffers[dtype])

    def runs(self, work: RequiredWork | None) -> dict[str, TimedCall]:
        """The runs that bound work of this kind."""
        runs = {}
        if work is not None and work.bytes_read:
            runs[READ_RUN] = self.read()
        if work is not None and work.flops:
            runs[PRODUCT_RUN] = self.multiply(work.dtype)
        return runs

    def rates(self) -> dict[str, float]:
        """Bytes read and FLOPs of products per second."""
        calls = {
            "read_bytes_per_second": (BUFFER_BYTES, self.read()),
            "fp32_flops_per_second": (2 * MATRIX_SIZE**3, self.multiply(torch.float32)),
            "bf16_flops_per_second": (2 * MATRIX_SIZE**3, self.multiply(torch.bfloat16)),
        }
        rates = {}
        for name, (amount, run) in calls.items():
            timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
            rates[name] = amount / timer.blocked_autorange(min_run_time=SAMPLE_SECONDS).median
        return rates


def limit_ratio(
    work: RequiredWork, samples: Mapping[str, Sequence[float]]
) -> tuple[str, float, SpeedRatio]:
    """What bounds the work, its lower-bound seconds, and their share of our time."""
    shares = {}
    if work.bytes_read:
        shares["memory"] = (work.bytes_read / BUFFER_BYTES, READ_RUN)
    if work.flops:
        shares["compute"] = (work.flops / (2 * MATRIX_SIZE**3), PRODUCT_RUN)
    seconds = {
        name: share * statistics.median(samples[run]) for name, (share, run) in shares.items()
    }
    bottleneck = max(seconds, key=lambda name: seconds[name])
    share, run = shares[bottleneck]
    return bottleneck, seconds[bottleneck], compare_rounds(samples[OURS], samples[run], share)


def time_case(case: BenchmarkCase, kind: str, limits: MachineLimits, quick: bool) -> Row:
    """Warm up and compare all implementations, time them in turns, and return the row."""
    row: Row = {
        "name": case.name,
        "kind": kind,
        "ours_s": None,
        "peers": {},
        "ratio": {},
        "interval": {},
        "limit": None,
        "aim": [],
        "absent": {},
        "differs": {},
        "failed": "",
        "notes": {},
    }
    runs = _warm_up(case, row)
    if row["failed"]:
        return row
    runs |= limits.runs(case.required_work)
    samples = time_in_turns(runs, SECONDS_PER_CASE[quick], case.clock)
    row["ours_s"] = statistics.median(samples[OURS])
    ratios = {}
    for name in case.peers:
        if name in samples:
            ratios[name] = compare_rounds(samples[OURS], samples[name])
            row["peers"][name] = statistics.median(samples[name])
    if case.required_work is not None:
        bottleneck, seconds, ratios[LIMIT] = limit_ratio(case.required_work, samples)
        share = ratios[LIMIT].median
        row["limit"] = {"bottleneck": bottleneck, "seconds": seconds, "share": share}
    row["ratio"] = {name: ratios[name].median for name in row["peers"]}
    row["interval"] = {name: list(ratio[1:]) for name, ratio in ratios.items()}
    row["aim"] = [_verdict(target, ratios, row["differs"]) for target in case.targets]
    row["notes"] = dict(case.notes)
    return row


def _warm_up(case: BenchmarkCase, row: Row) -> dict[str, TimedCall]:
    """Run everything once, compare results with ours; return the runs that succeeded."""
    try:
        expected = case.ours()
    except Exception as error:
        row["failed"] = _format_error(error)
        return {}
    runs = {OURS: case.ours}
    for name, run in case.peers.items():
        if isinstance(run, MissingPeer):
            row["absent"][name] = run.reason
            continue
        try:
            result = run()
        except Exception as error:
            row["absent"][name] = f"failed: {_format_error(error)}"
            continue
        runs[name] = run
        if case.tolerance is not None and name not in case.reported_peers:
            difference = describe_difference(expected, result, case.tolerance)
            if difference:
                row["differs"][name] = difference
    return runs


def _verdict(
    target: SpeedTarget, ratios: Mapping[str, SpeedRatio], differs: Mapping[str, str]
) -> Row:
    """The reached ratio of a target, and whether it is met; None where there is no verdict."""
    reached = ratios.get(target.baseline)
    return {
        "against": target.baseline,
        "times": target.ratio,
        "reached": None if reached is None else reached.median,
        "met": None if reached is None or differs else reached.median >= target.ratio,
    }


def _format_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def describe_machine(limits: MachineLimits, quick: bool) -> Row:
    """Processor, date, threads, versions and rates."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": this_machine().processor,
        "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "versions": versions,
        **limits.rates(),
        "quick": quick,
        "interrupted": False,
    }


def run_kinds(
    kinds: Mapping[str, CaseKind],
    selected: Mapping[str, Sequence[str]],
    quick: bool,
    progress: Callable[[str], None],
) -> Row:
    """Time the rows of these kinds whose names contain one of the texts; all before an interrupt.

    The report is {"machine": ..., "rows": [...]}.
    """
    limits = MachineLimits()
    progress("measuring the machine")
    machine = describe_machine(limits, quick)
    rows: list[Row] = []
    try:
        with compile_when_called(), torch.random.fork_rng():
            for kind, texts in selected.items():
                torch.manual_seed(0)
                for case in kinds[kind].make_cases(quick):
                    if any(text in case.name.lower() for text in texts):
                        progress(f"{kind}: {case.name}")
                        row = time_case(case, kind, limits, quick)
                        rows.append(row | {"title": kinds[kind].title})
                    del case  # free it before the next case is made
                    gc.collect()
    except KeyboardInterrupt:
        machine["interrupted"] = True
    return {"machine": machine, "rows": rows}

"""What the machine allows, measured beside the work: memory read once, and products of large matrices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..costs.roofline import accelerator_type, processor_name, synchronize_device, time_run
from ..errors import SpecError
from ..files import FolderLock
from .benchmark_case import (
    LIMIT,
    BenchmarkCase,
    Clock,
    MissingPeer,
    RequiredWork,
    SpeedTarget,
    TimedCall,
    TimingPace,
    TimingSamples,
    describe_difference,
    time_interleaved,
)

READ_RUN, MATMUL_RUN = "(read)", "(products)"  # in brackets: no peer is called so
CACHE_MULTIPLE = 8  # times the last-level cache: so little of what is read can still be in it
ASSUMED_CACHE_BYTES = 2**25  # bytes of a last-level cache, where the system does not say
CPU_SYSFS = Path("/sys/devices/system/cpu")
MATRIX_SIZES = {"cpu": 2048, "cuda": 8192}  # rows of the matrices that are multiplied
HEADER_SECONDS = 0.2  # seconds of each rate of the machine
CACHE_KEYS = ("level", "size", "shared_cpu_list")  # what the system tells of a cache
RATE_KEYS = ("bytes_per_second", "flops_per_second")  # of memory, of compute
SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class LastLevelCache(NamedTuple):
    """The last-level caches of a machine together, in bytes, and whether the system said so."""

    size: int
    is_reported: bool


@dataclass(frozen=True)
class MachineLimits:
    """Runs that reach for what the machine can do, on buffers that are made once."""

    last_level_cache: LastLevelCache
    device_type: str = "cpu"
    _kept: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of_this_machine() -> MachineLimits:
        """Of the machine that runs this."""
        return MachineLimits(find_last_level_cache(CPU_SYSFS), accelerator_type())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that is read."""
        return CACHE_MULTIPLE * self.last_level_cache.size

    def limit_runs(self, need: RequiredWork | None) -> dict[str, TimedCall]:
        """What is timed in turns with work that needs this."""
        runs: dict[str, TimedCall] = {}
        if need is not None and need.bytes_read:
            runs[READ_RUN] = self._buffer().sum
        if need is not None and need.flops:
            runs[MATMUL_RUN] = partial(torch.mm, *self._matrices(need.dtype))
        return runs

    def bound(self, need: RequiredWork, taken: Mapping[str, TimingSamples]) -> dict[str, Any]:
        """Seconds that the work takes at least, which of the two it waits for, and what was measured of the machine.

        >>> said = MachineLimits(LastLevelCache(2**20, True)).bound(
        ...     RequiredWork(bytes_read=2**24), {READ_RUN: TimingSamples((0.5, 0.25, 1.0))}
        ... )
        >>> said["seconds"], said["waits_for"]
        (1.0, 'memory')
        """
        waits = {"memory": READ_RUN, "compute": MATMUL_RUN}
        rates = {"memory": float(self.buffer_bytes), "compute": float(self.flops_per_product)}
        needs = {"memory": need.bytes_read, "compute": need.flops}
        least = {by: needs[by] * taken[run].median / rates[by] for by, run in waits.items() if needs[by]}
        longest = max(least, key=lambda by: least[by])
        told = {
            name: rates[by] / taken[run].median
            for (by, run), name in zip(waits.items(), RATE_KEYS, strict=True)
            if needs[by]
        }
        spread = taken[waits[longest]].spread
        needed = {"bytes": need.bytes_read, "flops": need.flops, "dtype": str(need.dtype).removeprefix("torch.")}
        return {"seconds": least[longest], "waits_for": longest, "spread": spread, **told, **needed}

    @property
    def flops_per_product(self) -> int:
        """FLOPs of one product."""
        return 2 * MATRIX_SIZES[self.device_type] ** 3

    def measure_rates(self) -> dict[str, float]:
        """What the machine does in a large read, a large copy, and large products, each measured for a moment."""
        source = self._buffer()
        there = torch.empty_like(source)
        rates = {
            "read_bytes_per_second": source.nbytes / time_run(source.sum, HEADER_SECONDS),
            "copy_bytes_per_second": 2 * source.nbytes / time_run(lambda: there.copy_(source), HEADER_SECONDS),
        }
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            one, other = self._matrices(dtype)
            rates[f"{name}_flops_per_second"] = self.flops_per_product / time_run(
                partial(torch.mm, one, other), HEADER_SECONDS
            )
        return rates

    def _buffer(self) -> Tensor:
        if READ_RUN not in self._kept:
            # ones and not zeros: memory that nobody wrote to is not read from memory
            self._kept[READ_RUN] = torch.ones(self.buffer_bytes // 4, device=self.device_type)
        return self._kept[READ_RUN]

    def _matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype not in self._kept:
            rows = MATRIX_SIZES[self.device_type]
            draw = torch.Generator(self.device_type).manual_seed(0)
            both = torch.randn(2, rows, rows, device=self.device_type, generator=draw).to(dtype)
            self._kept[dtype] = both.unbind()
        return self._kept[dtype]


def find_last_level_cache(system: Path) -> LastLevelCache:
    """The last-level caches of all processors together; what is assumed where the system says nothing of them."""
    found: dict[str, tuple[int, int]] = {}  # who shares it: its level, its bytes
    for index in sorted(system.glob("cpu[0-9]*/cache/index[0-9]*")):
        try:
            level, size, shared = (index.joinpath(name).read_text().strip() for name in CACHE_KEYS)
            found[f"{level} {shared}"] = int(level), int(size.rstrip("KMG")) * SIZE_UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    highest = max((level for level, _ in found.values()), default=0)
    size = sum(size for level, size in found.values() if level == highest)
    return LastLevelCache(size, True) if size else LastLevelCache(ASSUMED_CACHE_BYTES, False)


# --- The machine and the versions that a run belongs to, and what is odd about them --------------------

# Whoever a row may be compared with, by the name under which it is installed.
PACKAGES = ("torch", "numpy", "numba", "transformers", "x-transformers", "entmax", "local-attention", "ctranslate2")
UNKNOWN = "unknown"
BUSY_LOAD = 1.0  # a load that is more than this process starting


def describe_machine(limits: MachineLimits, threads: int) -> dict[str, Any]:
    """Processor, threads, caches, versions, rates, and labels: what a reader has to know before the numbers."""
    said = package_versions()
    told = limits.last_level_cache.is_reported
    labels = ["1 thread: others use more"] if threads == 1 else []
    labels += [f"{name}: unknown version" for name, which in said.items() if which == UNKNOWN]
    load = os.getloadavg()[0]  # of the last minute, in processes that want to run
    labels += [f"other work ran too: a load of {load:.1f} before"] if load > BUSY_LOAD else []
    labels += [] if told else ["the size of the last-level cache is assumed"]
    name = torch.cuda.get_device_name() if limits.device_type == "cuda" else processor_name()
    return {
        "processor": name,
        "threads": threads,
        "processors": num_processors(),
        "last_level_cache_bytes": limits.last_level_cache.size,
        "buffer_bytes": limits.buffer_bytes,
        "versions": said,
        **limits.measure_rates(),
        "labels": labels,
    }


def package_versions() -> dict[str, str]:
    """The version of everything that is installed; what says none is unknown."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name) or UNKNOWN
        except PackageNotFoundError:
            continue
        except (KeyError, TypeError):  # there, but its description is damaged
            found[name] = UNKNOWN
    return found


def num_processors() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux says which: elsewhere it may use all
        return os.cpu_count() or 1


def check_threads(threads: int | None) -> int:
    """So many threads, or as many as there are processors.

    >>> check_threads(0)
    Traceback (most recent call last):
    headwise.errors.SpecError: threads=0 are not between 1 and ...; leave it out to use all
    """
    most = num_processors()
    if threads is not None and not 1 <= threads <= most:
        raise SpecError(f"threads={threads} are not between 1 and the {most} processors; leave it out to use all")
    return threads or most


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """torch and numba use so many threads; afterwards, as many as before."""
    numba: Any = import_module("numba")  # of whose types little is told
    before, others = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # it cannot use more than it began with
    try:
        yield
    finally:
        torch.set_num_threads(before)
        numba.set_num_threads(others)


# --- One row -------------------------------------------------------------------------------------------

HEADWISE = "ours"
MAX_SPREAD = 0.2  # a spread beyond which there is no verdict
BenchmarkRow = dict[str, Any]  # what JSON can say, the same when it is read back


@dataclass(frozen=True)
class CaseTimer:
    """How cases are timed: the pace, what the machine allows, and the clock."""

    pace: TimingPace
    limits: MachineLimits
    clock: Clock = time.perf_counter

    def time_case(self, case: BenchmarkCase, kind: str) -> BenchmarkRow:
        """Everybody who can run it, warm and agreeing, timed in turns."""
        _check_targets(case)
        found, begun = _CaseResult(case), self.clock()
        runs = found.warm_up({name: _synchronized(run) for name, run in _available_runs(case).items()})
        warm = self.clock()
        found.phase_seconds = {"first calls": warm - begun}
        if HEADWISE not in runs:
            return found.row(kind)
        found.samples = time_interleaved(runs | self.limits.limit_runs(case.required_work), self.pace, self.clock)
        found.phase_seconds["samples"] = self.clock() - warm
        if case.required_work is not None:
            limit = self.limits.bound(case.required_work, found.samples)
            found.limit = limit | {"share": limit["seconds"] / found.samples[HEADWISE].median}
        return found.row(kind)


def _check_targets(case: BenchmarkCase) -> None:
    """Every aim is at somebody."""
    for aim in case.targets:
        if aim.baseline == LIMIT and case.required_work is None:
            raise ValueError(f"{case.name!r} aims at a limit, and says no need")
        if aim.baseline not in (LIMIT, *case.peers):
            raise ValueError(f"{case.name!r} aims at {aim.baseline!r}, and has no such peer")


def failed_row(kind: str, name: str, error: Exception) -> BenchmarkRow:
    """The row of what could not even be made."""
    return _CaseResult(BenchmarkCase(name, lambda: None, {}), failed=_format_error(error)).row(kind)


def _available_runs(case: BenchmarkCase) -> dict[str, TimedCall]:
    peers = {name: run for name, run in case.peers.items() if not isinstance(run, MissingPeer)}
    return {HEADWISE: case.ours, **peers}


def _synchronized(run: TimedCall) -> TimedCall:
    """The same, done when it returns."""

    def whole() -> Any:
        given = run()
        synchronize_device()
        return given

    return whole


def _format_error(error: Exception) -> str:
    """An error in one line that is not too long."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) < 200 else f"{words[:197]}..."


@dataclass
class _CaseResult:
    """What is known of a case so far."""

    case: BenchmarkCase
    samples: dict[str, TimingSamples] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    limit: dict[str, Any] | None = None
    failed: str = ""
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def warm_up(self, runs: Mapping[str, TimedCall]) -> dict[str, TimedCall]:
        """Those that have run once, and what they gave compared with ours; whoever fails is named with the reason."""
        self.missing = {name: run.reason for name, run in self.case.peers.items() if isinstance(run, MissingPeer)}
        try:
            ours = runs[HEADWISE]()
        except Exception as error:
            self.failed = _format_error(error)
            return {}
        going = {HEADWISE: runs[HEADWISE]}
        for name, run in runs.items():
            if name == HEADWISE:
                continue
            try:
                theirs = run()
            except Exception as error:
                self.missing[name] = f"failed: {_format_error(error)}"
                continue
            going[name] = run
            tolerance = None if name in self.case.reported_peers else self.case.tolerance
            if tolerance is not None and (said := describe_difference(ours, theirs, tolerance)):
                self.differences[name] = said
        return going

    def row(self, kind: str) -> BenchmarkRow:
        """As plain values."""
        case, taken = self.case, self.samples
        peers = {name: taken[name].median for name in case.peers if name in taken}
        ours = taken[HEADWISE].median if HEADWISE in taken else None
        verdicts = [self._target_verdict(aim, ours, peers) for aim in case.targets]
        return {
            "name": case.name,
            "kind": kind,
            "ours_s": ours,
            "peers": peers,
            "ratio": {name: seconds / ours for name, seconds in peers.items() if ours},
            "limit": self.limit,
            "aim": verdicts,
            "met": _overall_verdict([one["met"] for one in verdicts]),
            "spread": {name: taken[name].spread for name in (HEADWISE, *peers) if name in taken},
            "samples": {name: len(taken[name].seconds) for name in (HEADWISE, *peers) if name in taken},
            "calls": {name: taken[name].calls_per_sample for name in (HEADWISE, *peers) if name in taken},
            "absent": self.missing,
            "differs": self.differences,
            "failed": self.failed,
            "notes": dict(case.notes),
            "tried": case.history,
            "took": self.phase_seconds,
        }

    def _target_verdict(self, aim: SpeedTarget, ours: float | None, peers: Mapping[str, float]) -> dict[str, Any]:
        """What was reached of an aim, and whether it is met; where nothing can be said, why."""
        reached, why = None, ""
        spreads = {HEADWISE: self.samples[HEADWISE].spread} if HEADWISE in self.samples else {}
        if ours is None:
            why = "ours failed"
        elif aim.baseline == LIMIT and self.limit is not None:
            reached, spreads = self.limit["share"], spreads | {LIMIT: self.limit["spread"]}
        elif aim.baseline in peers:
            reached, spreads = peers[aim.baseline] / ours, spreads | {aim.baseline: self.samples[aim.baseline].spread}
        else:
            why = "absent"
        if reached is not None and self.differences:
            why = "not the same results"
        elif reached is not None and (loose := [name for name, spread in spreads.items() if spread > MAX_SPREAD]):
            why = f"spread of {', '.join(loose)} above {MAX_SPREAD:.0%}"
        met = None if why or reached is None else reached >= aim.ratio
        return {"against": aim.baseline, "times": aim.ratio, "reached": reached, "met": met, "why": why}


def _overall_verdict(verdicts: list[bool | None]) -> bool | None:
    """Missed if one is, met if all are; None where nothing is aimed at, or something cannot be said."""
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


# --- What goes around every run ------------------------------------------------------------------------

ProgressCallback = Callable[[str], None]
RowSource = Callable[
    [CaseTimer], Iterable[BenchmarkRow]
]  # one after the other, so that an interrupt keeps those before it


class WritableReport(Protocol):
    """What is found, and can be written into a folder."""

    def write(self, folder: Path | str) -> None: ...


ReportT = TypeVar("ReportT", bound=WritableReport)


def no_progress(said: str) -> None:
    """Nobody looks on."""


@dataclass(frozen=True)
class BenchmarkSession:
    """How many threads work, where what was found is written, and who looks on."""

    threads: int | None = None
    output_folder: Path | str | None = None
    progress: ProgressCallback = no_progress

    def run(
        self,
        pace: TimingPace,
        quick: bool,
        found: RowSource,
        made: Callable[[BenchmarkRow, list[BenchmarkRow]], ReportT],
    ) -> ReportT:
        """Everything that is found, or what was until an interrupt, which is then said."""
        count = check_threads(self.threads)
        if self.output_folder is not None:
            _check_folder(self.output_folder)
        with use_threads(count), torch.random.fork_rng():
            how = CaseTimer(pace, MachineLimits.of_this_machine())
            begun = how.clock()
            self.progress("measuring the machine")
            told, each = (
                describe_machine(how.limits, count) | {"quick": quick, "interrupted": False},
                list[BenchmarkRow](),
            )
            try:
                for one in found(how):
                    each.append(one)
            except KeyboardInterrupt:
                told["interrupted"] = True
            told["took"] = how.clock() - begun
        self.progress("")
        whole = made(told, each)
        if self.output_folder is not None:
            whole.write(self.output_folder)
        return whole


def _check_folder(folder: Path | str) -> None:
    """Refuse where nothing can be written, before anything is measured."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise SpecError(f"{folder} is no folder; give one that is, or a new name")
    with FolderLock(folder):
        pass

"""A benchmark session: the machine's limits, timing of one case, and verdicts on its targets.

The limits are the rates of one pass over memory and of large matrix products, measured in
alternation with the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..costs.roofline import accelerator_type, multiply_matrices, synchronize_device, time_run
from ..errors import SpecError
from ..files import FolderLock
from ..machine.capabilities import MachineCapabilities, read_caches, this_machine
from ..machine.takeover_points import current_points
from ..output_paths import Existing, FolderKind, check_output
from .benchmark_case import (
    LIMIT,
    BenchmarkCase,
    Clock,
    MissingPeer,
    RequiredWork,
    SpeedRatio,
    SpeedTarget,
    TimedCall,
    TimingPace,
    TimingSamples,
    compare_pairs,
    describe_difference,
    time_interleaved,
)

READ_RUN, MATMUL_RUN = "(read)", "(products)"  # in brackets, so that no peer has this name
RUN_OF_RESOURCE = {"memory": READ_RUN, "compute": MATMUL_RUN}
CACHE_MULTIPLE = 8  # buffer size over last-level cache size, so that little of the buffer is cached
ASSUMED_CACHE_BYTES = 2**25  # used if the system does not report the last-level cache
CPU_SYSFS = Path("/sys/devices/system/cpu")
MATRIX_SIZES = {"cpu": 2048, "cuda": 8192}  # rows of the multiplied matrices
HEADER_SECONDS = 0.2  # time limit for each rate of the machine
RATE_KEYS = ("bytes_per_second", "flops_per_second")  # rates of memory and of compute


class LastLevelCache(NamedTuple):
    """Total size of the last-level caches in bytes, and whether the system reports it."""

    size: int
    is_reported: bool


@dataclass(frozen=True)
class MachineLimits:
    """Measures memory bandwidth and matrix-multiplication rate, on buffers that
    are allocated once.
    """

    last_level_cache: LastLevelCache
    device_type: str = "cpu"
    _buffers: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of_this_machine() -> MachineLimits:
        """Return the limits of the machine that runs this process."""
        return MachineLimits(find_last_level_cache(CPU_SYSFS), accelerator_type())

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer for reads."""
        return CACHE_MULTIPLE * self.last_level_cache.size

    def limit_runs(self, work: RequiredWork | None) -> dict[str, TimedCall]:
        """Return the runs to time in alternation with work of this kind."""
        runs: dict[str, TimedCall] = {}
        if work is not None and work.bytes_read:
            runs[READ_RUN] = self._buffer().sum
        if work is not None and work.flops:
            runs[MATMUL_RUN] = partial(multiply_matrices, *self._matrices(work.dtype))
        return runs

    def bound(self, work: RequiredWork, samples: Mapping[str, TimingSamples]) -> dict[str, Any]:
        """Return the minimum time of the work, whether memory or compute bounds it, and the
        measured rates.

        >>> limit = MachineLimits(LastLevelCache(2**20, True)).bound(
        ...     RequiredWork(bytes_read=2**24), {READ_RUN: TimingSamples((0.5, 0.25, 1.0))}
        ... )
        >>> limit["seconds"], limit["bottleneck"]
        (1.0, 'memory')
        """
        rates = {"memory": float(self.buffer_bytes), "compute": float(self.flops_per_product)}
        required_amount = {"memory": work.bytes_read, "compute": work.flops}
        seconds_by_resource = {
            resource: required_amount[resource] * samples[run].median / rates[resource]
            for resource, run in RUN_OF_RESOURCE.items()
            if required_amount[resource]
        }
        bottleneck = max(seconds_by_resource, key=lambda resource: seconds_by_resource[resource])
        measured = {
            name: rates[resource] / samples[run].median
            for (resource, run), name in zip(RUN_OF_RESOURCE.items(), RATE_KEYS, strict=True)
            if required_amount[resource]
        }
        spread = samples[RUN_OF_RESOURCE[bottleneck]].spread
        required = {
            "bytes": work.bytes_read,
            "flops": work.flops,
            "dtype": str(work.dtype).removeprefix("torch."),
        }
        return {
            "seconds": seconds_by_resource[bottleneck],
            "bottleneck": bottleneck,
            "spread": spread,
            **measured,
            **required,
        }

    @property
    def flops_per_product(self) -> int:
        """FLOPs of one matrix product."""
        return 2 * MATRIX_SIZES[self.device_type] ** 3

    def measure_rates(self) -> dict[str, float]:
        """Measure the rates of a large read, a large copy, and large matrix products."""
        source = self._buffer()
        target = torch.empty_like(source)
        rates = {
            "read_bytes_per_second": source.nbytes / time_run(source.sum, HEADER_SECONDS),
            "copy_bytes_per_second": 2
            * source.nbytes
            / time_run(lambda: target.copy_(source), HEADER_SECONDS),
        }
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            a, b = self._matrices(dtype)
            rates[f"{name}_flops_per_second"] = self.flops_per_product / time_run(
                partial(multiply_matrices, a, b), HEADER_SECONDS
            )
        return rates

    def _buffer(self) -> Tensor:
        if READ_RUN not in self._buffers:
            # ones, not zeros: untouched zero pages are not read from memory
            self._buffers[READ_RUN] = torch.ones(self.buffer_bytes // 4, device=self.device_type)
        return self._buffers[READ_RUN]

    def _matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype not in self._buffers:
            rows = MATRIX_SIZES[self.device_type]
            generator = torch.Generator(self.device_type).manual_seed(0)
            matrices = torch.randn(2, rows, rows, device=self.device_type, generator=generator).to(
                dtype
            )
            self._buffers[dtype] = matrices.unbind()
        return self._buffers[dtype]


def find_last_level_cache(system: Path) -> LastLevelCache:
    """Return the total size of the last-level caches, or an assumed size if the system does not
    report it.
    """
    size = MachineCapabilities("", "", (), 1, 1, caches=read_caches(system)).last_level_cache_bytes
    return LastLevelCache(size, True) if size else LastLevelCache(ASSUMED_CACHE_BYTES, False)


# --- Description of the machine -------------------------------------------------------------------

# Libraries in the report, by their distribution names.
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
UNKNOWN = "unknown"
BUSY_LOAD = 1.0  # load average above which other processes are assumed to run


def describe_machine(limits: MachineLimits, threads: int) -> dict[str, Any]:
    """Return processor, threads, caches, versions, rates, and warnings for the
    head of the report.
    """
    versions = package_versions()
    is_reported = limits.last_level_cache.is_reported
    labels = ["1 thread only"] if threads == 1 else []
    labels += [
        f"{name}: unknown version" for name, installed in versions.items() if installed == UNKNOWN
    ]
    load = os.getloadavg()[0]  # runnable processes, averaged over the last minute
    labels += (
        [f"other processes were running: load average {load:.1f} before the run"]
        if load > BUSY_LOAD
        else []
    )
    labels += this_machine().notes(threads)
    labels += [] if is_reported else ["the size of the last-level cache is assumed"]
    name = (
        torch.cuda.get_device_name() if limits.device_type == "cuda" else this_machine().processor
    )
    return {
        "processor": name,
        "date": time.strftime("%Y-%m-%d"),
        "threads": threads,
        "processors": num_processors(),
        "capabilities": this_machine().data,
        "described": [f"machine: {this_machine().describe()}", *current_points().describe()],
        "last_level_cache_bytes": limits.last_level_cache.size,
        "buffer_bytes": limits.buffer_bytes,
        "versions": versions,
        **limits.measure_rates(),
        "labels": labels,
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages; "unknown" without metadata."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name) or UNKNOWN
        except PackageNotFoundError:
            continue
        except (KeyError, TypeError):  # installed, but with broken metadata
            versions[name] = UNKNOWN
    return versions


def num_processors() -> int:
    """Return the number of processors that this process may use, by affinity and by the quota of
    its container.
    """
    return this_machine().usable_processors


def check_threads(threads: int | None) -> int:
    """Return `threads`, or the number of processors for None; raise if it is out of range.

    >>> check_threads(0)
    Traceback (most recent call last):
    headwise.errors.SpecError: threads=0 is not between 1 and ...; leave it out to use all
    """
    available = num_processors()
    if threads is not None and not 1 <= threads <= available:
        raise SpecError(
            f"threads={threads} is not between 1 and {available}, the number of processors; leave "
            "it out to use all"
        )
    return threads or available


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch, and with it the kernels, use `count` threads inside the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- One case -------------------------------------------------------------------------------------

HEADWISE = "ours"
BenchmarkRow = dict[str, Any]  # JSON-serialisable, unchanged by a round trip


@dataclass(frozen=True)
class CaseTimer:
    """Times cases: pace, machine limits, and clock."""

    pace: TimingPace
    limits: MachineLimits
    clock: Clock = time.perf_counter

    def time_case(self, case: BenchmarkCase, kind: str) -> BenchmarkRow:
        """Warm up and compare all implementations, time them in alternation, and return the row."""
        _check_targets(case)
        result, started = _CaseResult(case), self.clock()
        runs = result.warm_up(
            {name: _synchronized(run) for name, run in _available_runs(case).items()}
        )
        warm_at = self.clock()
        result.phase_seconds = {"first calls": warm_at - started}
        if HEADWISE not in runs:
            return result.row(kind)
        result.samples = time_interleaved(
            runs | self.limits.limit_runs(case.required_work), self.pace, self.clock
        )
        result.phase_seconds["samples"] = self.clock() - warm_at
        if case.required_work is not None:
            limit = self.limits.bound(case.required_work, result.samples)
            run = result.samples[RUN_OF_RESOURCE[limit["bottleneck"]]]
            ratio = compare_pairs(result.samples[HEADWISE], run).scaled(
                limit["seconds"] / run.median
            )
            result.limit_ratio = ratio
            result.limit = limit | {"share": ratio.median, "interval": [ratio.low, ratio.high]}
        return result.row(kind)


def _check_targets(case: BenchmarkCase) -> None:
    """Raise unless every target has a baseline."""
    for target in case.targets:
        if target.baseline == LIMIT and case.required_work is None:
            raise ValueError(
                f"{case.name!r} has a target against the limit, but no required_work; set it"
            )
        if target.baseline not in (LIMIT, *case.peers):
            raise ValueError(
                f"{case.name!r} has a target against {target.baseline!r}, which is not one of its "
                "peers; add the peer"
            )


def failed_row(kind: str, name: str, error: Exception) -> BenchmarkRow:
    """Return the row of a case that raised while it was created."""
    return _CaseResult(BenchmarkCase(name, lambda: None, {}), failed=_format_error(error)).row(kind)


def _available_runs(case: BenchmarkCase) -> dict[str, TimedCall]:
    peers = {name: run for name, run in case.peers.items() if not isinstance(run, MissingPeer)}
    return {HEADWISE: case.ours, **peers}


def _synchronized(run: TimedCall) -> TimedCall:
    """Wrap a run so that it waits for the device before it returns."""

    def run_and_wait() -> Any:
        result = run()
        synchronize_device()
        return result

    return run_and_wait


def _format_error(error: Exception) -> str:
    """Format an error in one line of at most 200 characters."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return message if len(message) < 200 else f"{message[:197]}..."


@dataclass
class _CaseResult:
    """Results of one case, collected step by step."""

    case: BenchmarkCase
    samples: dict[str, TimingSamples] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    limit: dict[str, Any] | None = None
    limit_ratio: SpeedRatio | None = None
    failed: str = ""
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def warm_up(self, runs: Mapping[str, TimedCall]) -> dict[str, TimedCall]:
        """Run everything once and compare results with headwise; return the runs that succeeded."""
        self.missing = {
            name: run.reason
            for name, run in self.case.peers.items()
            if isinstance(run, MissingPeer)
        }
        try:
            our_result = runs[HEADWISE]()
        except Exception as error:
            self.failed = _format_error(error)
            return {}
        succeeded = {HEADWISE: runs[HEADWISE]}
        for name, run in runs.items():
            if name == HEADWISE:
                continue
            try:
                their_result = run()
            except Exception as error:
                self.missing[name] = f"failed: {_format_error(error)}"
                continue
            succeeded[name] = run
            tolerance = None if name in self.case.reported_peers else self.case.tolerance
            if tolerance is not None and (
                difference := describe_difference(our_result, their_result, tolerance)
            ):
                self.differences[name] = difference
        return succeeded

    def row(self, kind: str) -> BenchmarkRow:
        """Return the row as plain values."""
        case, samples = self.case, self.samples
        peers = {name: samples[name].median for name in case.peers if name in samples}
        ours = samples[HEADWISE].median if HEADWISE in samples else None
        ratios = {name: compare_pairs(samples[HEADWISE], samples[name]) for name in peers}
        verdicts = [self._target_verdict(target, ours, ratios) for target in case.targets]
        return {
            "name": case.name,
            "kind": kind,
            "ours_s": ours,
            "peers": peers,
            "ratio": {name: ratio.median for name, ratio in ratios.items()},
            "interval": {name: [ratio.low, ratio.high] for name, ratio in ratios.items()},
            "limit": self.limit,
            "aim": verdicts,
            "met": _overall_verdict([verdict["met"] for verdict in verdicts]),
            "spread": {
                name: samples[name].spread for name in (HEADWISE, *peers) if name in samples
            },
            "samples": {
                name: len(samples[name].seconds) for name in (HEADWISE, *peers) if name in samples
            },
            "calls": {
                name: samples[name].calls_per_sample
                for name in (HEADWISE, *peers)
                if name in samples
            },
            "absent": self.missing,
            "differs": self.differences,
            "failed": self.failed,
            "notes": dict(case.notes),
            "tried": case.history,
            "took": self.phase_seconds,
        }

    def _target_verdict(
        self, target: SpeedTarget, ours: float | None, ratios: Mapping[str, SpeedRatio]
    ) -> dict[str, Any]:
        """Return the reached ratio of a target with its interval, and whether it is met; or why
        there is no verdict.

        The verdict is that of the median over pairs. It is not certain if the target lies within
        the interval.
        """
        reached, reason = ratios.get(target.baseline), ""
        if ours is None:
            reason = "ours failed"
        elif target.baseline == LIMIT and self.limit is not None:
            reached = self.limit_ratio
        if reached is None:
            reason = reason or "absent"
        elif self.differences:
            reason = "different results"
        met = None if reason or reached is None else reached.median >= target.ratio
        return {
            "against": target.baseline,
            "times": target.ratio,
            "reached": None if reached is None else reached.median,
            "interval": None if reached is None else [reached.low, reached.high],
            "met": met,
            "certain": met is not None and reached is not None and reached.is_certain(target.ratio),
            "why": reason,
        }


def _overall_verdict(verdicts: list[bool | None]) -> bool | None:
    """Return False if any target is missed, True if all are met, None without targets or with an
    open verdict.
    """
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


# --- Session --------------------------------------------------------------------------------------

ProgressCallback = Callable[[str], None]
# A generator of rows, so that an interrupt keeps the finished ones.
RowSource = Callable[[CaseTimer], Iterable[BenchmarkRow]]


class WritableReport(Protocol):
    """A report that can be written to a folder."""

    def write(self, folder: Path | str) -> None: ...


ReportT = TypeVar("ReportT", bound=WritableReport)


def no_progress(message: str) -> None:
    """Progress callback that does nothing."""


@dataclass(frozen=True)
class BenchmarkSession:
    """Number of threads, output folder, and progress callback of a run."""

    threads: int | None = None
    output_folder: Path | str | None = None
    progress: ProgressCallback = no_progress
    overwrite: bool = False

    def run(
        self,
        pace: TimingPace,
        quick: bool,
        rows: RowSource,
        make_report: Callable[[BenchmarkRow, list[BenchmarkRow]], ReportT],
    ) -> ReportT:
        """Collect all rows, or those before an interrupt; return the report and write it to the
        folder, if any.
        """
        num_threads = check_threads(self.threads)
        if self.output_folder is not None:
            _check_folder(self.output_folder, "overwrite" if self.overwrite else "refuse")
        with use_threads(num_threads), torch.random.fork_rng():
            timer = CaseTimer(pace, MachineLimits.of_this_machine())
            started = timer.clock()
            self.progress("measuring the machine")
            machine = describe_machine(timer.limits, num_threads) | {
                "quick": quick,
                "interrupted": False,
            }
            measured = list[BenchmarkRow]()
            try:
                for row in rows(timer):
                    measured.append(row)
            except KeyboardInterrupt:
                machine["interrupted"] = True
            machine["took"] = timer.clock() - started
        self.progress("")
        report = make_report(machine, measured)
        if self.output_folder is not None:
            report.write(self.output_folder)
        return report


REPORT_FOLDER = FolderKind("benchmark report", ("bench.json", "bench.svg", "scaling.json"))


def _check_folder(folder: Path | str, existing: Existing) -> None:
    """Raise if the folder is not writable, before anything is measured."""
    with FolderLock(check_output(folder, REPORT_FOLDER, existing)):
        pass

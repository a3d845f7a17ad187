"""What choosing costs: every row of `headwise bench` on the chosen path, and on every other path
that could take it.

    python -m benchmarks.choices [KIND[:PIECE] ...] [--threads COUNT] [--seconds SECONDS] [--json]

A row is run as headwise chooses; then with each take-over point that it consults on the other side,
so that torch's path runs where headwise's own did, or the other way round; then with every backend
forced that supports its calls. The loss is the time of the chosen path over that of the fastest,
1.00 if it is the fastest. Runs alternate, and the fastest sample of each counts, because other work
can only add to it. The fastest of many paths owes some of its lead to chance, so a loss above 5 %
is measured again with fresh samples of these two paths alone, and those count. With one thread,
samples are processor time, to which other processes add little. The last lines list the kernels
that ran, each with its largest gain: the time of the fastest path without it over that of the
chosen path with it. Exit code 1 if a row loses more than 5 %, or if a result depends on the choice.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headwise.backends.dispatch import BACKENDS, CoreDispatch
from headwise.bench import runner
from headwise.bench.benchmark_case import (
    BenchmarkCase,
    TimedCall,
    describe_difference,
    garbage_collection_disabled,
    interleaved_order,
    time_calls,
)
from headwise.bench.session import check_threads, use_threads
from headwise.kernels.compilation import compile_when_called
from headwise.kernels.launch import KernelSet
from headwise.machine.takeover_points import (
    NEVER,
    UP_TO_POINTS,
    TakeoverPoint,
    TakeoverPoints,
    assume_points,
    current_points,
    machine_notes,
)

MAX_LOSS = 1.05
SECONDS_PER_ROW, MIN_SAMPLE_SECONDS, MIN_ROUNDS, MAX_ROUNDS = 6.0, 0.01, 3, 60
# an alternative whose second call is this much slower than the chosen path is not sampled further
MAX_SLOWDOWN = 4.0
MAX_DENSE_KEYS = 2048  # all scores of longer rows do not fit
TOLERANCE = 3e-2  # of results in bfloat16


class RecordingPoints(dict[str, TakeoverPoint]):
    """Points that record which of them are consulted."""

    def __init__(self, points: Mapping[str, TakeoverPoint]) -> None:
        super().__init__(points)
        self.consulted: set[str] = set()

    def __getitem__(self, name: str) -> TakeoverPoint:
        self.consulted.add(name)
        return super().__getitem__(name)


@dataclass
class PathRecord:
    """The backends that could take the calls of a run, and the path that it took: its backends and
    kernels in order.
    """

    possible: set[str] = field(default_factory=set)
    backends: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)

    @property
    def path(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What tells two paths apart."""
        return tuple(self.backends), tuple(self.kernels)


@contextmanager
def select_backends(choose: Callable[[CoreDispatch, Any, Any, str], str]) -> Iterator[None]:
    """Let `choose` replace the choice of `CoreDispatch.select`, which it is given as the last
    argument.
    """
    original = CoreDispatch.select

    def select(self: CoreDispatch, attention_mask: Any, inputs: Any) -> str:
        return choose(self, attention_mask, inputs, original(self, attention_mask, inputs))

    CoreDispatch.select = select
    try:
        yield
    finally:
        CoreDispatch.select = original


@contextmanager
def record_path(record: PathRecord) -> Iterator[None]:
    """Record the backends and kernels of all calls inside the context."""

    def choose(dispatch: CoreDispatch, attention_mask: Any, inputs: Any, name: str) -> str:
        record.possible |= {
            one for one in dispatch.backend_names if can_run(one, dispatch, attention_mask, inputs)
        }
        record.backends.append(name)
        return name

    run_kernel = KernelSet.run

    def run(self: KernelSet, name: str, *args: Any, **options: Any) -> None:
        record.kernels.append(f"{self.module}.{name}")
        run_kernel(self, name, *args, **options)

    KernelSet.run = run
    try:
        with select_backends(choose):
            yield
    finally:
        KernelSet.run = run_kernel


def can_run(name: str, dispatch: CoreDispatch, attention_mask: Any, inputs: Any) -> bool:
    """Whether a backend can run these tensors."""
    if name == "dense" and attention_mask.keys.count > MAX_DENSE_KEYS:
        return False
    return name in dispatch.backend_names and not BACKENDS[name].tensor_conflicts(
        dispatch.signature, attention_mask, inputs
    )


@contextmanager
def force_backend(forced: str) -> Iterator[None]:
    """Run every call inside the context on one backend, if that can run it."""

    def choose(dispatch: CoreDispatch, attention_mask: Any, inputs: Any, name: str) -> str:
        return forced if can_run(forced, dispatch, attention_mask, inputs) else name

    with select_backends(choose):
        yield


def opposite_points(name: str, points: TakeoverPoints) -> list[tuple[str, TakeoverPoints]]:
    """The points with one of them at each end: the own path at every size, and torch's at every
    size.
    """
    always, never = (NEVER, 0.0) if name in UP_TO_POINTS else (0.0, NEVER)
    companions = (
        {f"gemm_tokens_{name[5:]}": NEVER}
        if name[:5] in ("gemv_", "gemm_") and "tokens" not in name
        else {}
    )
    return [
        (f"{name}: own", points.with_sizes(**{name: always}, **companions)),
        (f"{name}: torch", points.with_sizes(**{name: never})),
    ]


def alternatives(
    call: TimedCall,
) -> tuple[PathRecord, dict[str, TimedCall], dict[str, frozenset[str]]]:
    """The path that headwise chooses for a call, the call on every other path that could take it,
    and their kernels.
    """
    points, chosen = current_points(), PathRecord()
    recording = RecordingPoints(points.points)
    with (
        assume_points(TakeoverPoints(points.machine_class, recording, points.calibration)),
        record_path(chosen),
    ):
        call()
    candidates: dict[str, TimedCall] = {}
    for name in sorted(recording.consulted):
        for label, changed in opposite_points(name, points):
            candidates[label] = _within(lambda changed=changed: assume_points(changed), call)
    for name in sorted(chosen.possible):
        candidates[f"backend {name}"] = _within(lambda name=name: force_backend(name), call)
    runs, kernels, paths = (
        dict[str, TimedCall](),
        {"chosen": frozenset(chosen.kernels)},
        {chosen.path},
    )
    for label, run in candidates.items():
        record = PathRecord()
        with record_path(record):
            run()
        if (
            record.path not in paths
        ):  # some points decide nothing in this row, and some decide the same
            paths.add(record.path)
            runs[label], kernels[label] = run, frozenset(record.kernels)
    return chosen, runs, kernels


def _within(context: Callable[[], Any], call: TimedCall) -> TimedCall:
    def run() -> Any:
        with context():
            return call()

    return run


@dataclass(frozen=True)
class RowChoice:
    """One row: the fastest sample of the chosen path and of each alternative, results that differ,
    gains of kernels.
    """

    name: str
    chosen: str
    seconds: Mapping[str, float]
    differs: Mapping[str, str]
    gains: Mapping[str, float]

    @property
    def fastest(self) -> str:
        """The name of the fastest path."""
        return min(self.seconds, key=lambda name: self.seconds[name])

    @property
    def loss(self) -> float:
        """Time of the chosen path over that of the fastest."""
        return self.seconds["chosen"] / self.seconds[self.fastest]

    def __str__(self) -> str:
        fastest = f"{self.fastest} {self.seconds[self.fastest] * 1e3:.3f}"
        others = fastest if self.loss > 1 else f"{len(self.seconds) - 1} others"
        differs = "".join(f"\n    ! {name}: {how}" for name, how in self.differs.items())
        mark = " <--" if self.loss > MAX_LOSS else ""
        milliseconds = f"{self.seconds['chosen'] * 1e3:10.3f} ms"
        return (
            f"{self.loss:5.2f}  {milliseconds}  {self.name} [{self.chosen}; "
            f"{others}]{mark}{differs}"
        )


def compare_paths(
    case: BenchmarkCase, name: str, max_seconds: float, clock: Callable[[], float]
) -> RowChoice:
    """Time the chosen path of a row and all alternatives in rounds of random order."""
    chosen, runs, kernels = alternatives(case.ours)
    runs = {"chosen": case.ours, **runs}
    seconds, differs, started = dict[str, float](), dict[str, str](), time.perf_counter()
    expected = list_tensors(case.ours())
    is_repeatable = not describe_difference(
        expected, list_tensors(case.ours()), 0.0
    )  # not if a cache grows, or a step trains
    for label, run in runs.items():
        result = list_tensors(run())
        is_compared = is_repeatable and case.tolerance is not None
        how = (
            describe_difference(expected, result, max(TOLERANCE, case.tolerance or 0))
            if is_compared
            else ""
        )
        differs |= {label: how} if how else {}
        seconds[label] = time_calls(run, 1, clock)
    del expected, result
    limit = MAX_SLOWDOWN * seconds["chosen"]
    calls = {n: max(1, math.ceil(MIN_SAMPLE_SECONDS / s)) for n, s in seconds.items() if s <= limit}
    seconds |= sample_paths(runs, calls, max_seconds - (time.perf_counter() - started), clock)
    backends = ", ".join(dict.fromkeys(chosen.backends)) or "no backend"
    row = RowChoice(name, backends, seconds, differs, kernel_gains(seconds, kernels))
    if row.loss > MAX_LOSS:
        pair = {label: calls[label] for label in ("chosen", row.fastest)}
        row = replace(row, seconds=sample_paths(runs, pair, max_seconds, clock))
    return row


def kernel_gains(
    seconds: Mapping[str, float], kernels: Mapping[str, frozenset[str]]
) -> dict[str, float]:
    """For each kernel of the chosen path: the time of the fastest path without it over that of the
    chosen path.
    """
    gains = dict[str, float]()
    for name in kernels["chosen"]:
        without = [seconds[label] for label, names in kernels.items() if name not in names]
        gains |= {name: min(without) / seconds["chosen"]} if without else {}
    return gains


def print_gains(rows: Sequence[RowChoice]) -> None:
    """Print one line per kernel: the largest gain, its row, and in how many rows it ran."""
    largest, counts = dict[str, tuple[float, str]](), Counter[str]()
    for row in rows:
        counts.update(row.gains.keys())
        for kernel, gain in row.gains.items():
            largest[kernel] = max(largest.get(kernel, (0.0, "")), (gain, row.name))
    print("\n gain  rows  kernel: row of the largest gain", file=sys.stderr)
    for kernel, (gain, name) in sorted(largest.items(), key=lambda item: item[1]):
        print(f"{gain:5.2f}  {counts[kernel]:4}  {kernel}: {name}", file=sys.stderr)


def sample_paths(
    runs: Mapping[str, TimedCall],
    calls: Mapping[str, int],
    max_seconds: float,
    clock: Callable[[], float],
) -> dict[str, float]:
    """The fastest sample of each path in `calls`, the number of calls per sample; rounds are in
    random order.
    """
    seconds, started = dict.fromkeys(calls, math.inf), time.perf_counter()
    with garbage_collection_disabled():
        for number, label in enumerate(interleaved_order(dict.fromkeys(calls, MAX_ROUNDS), seed=0)):
            if number >= MIN_ROUNDS * len(calls) and time.perf_counter() - started > max_seconds:
                break
            seconds[label] = min(seconds[label], time_calls(runs[label], calls[label], clock))
    return seconds


def list_tensors(result: Any) -> list[Any]:
    """The numbers and tensors of a result; gradients of parameters without any are left out."""
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in list_tensors(item)]
    return [] if result is None else [result]


def compare_rows(
    names: Sequence[str], quick: bool, max_seconds: float, clock: Callable[[], float]
) -> Iterator[RowChoice]:
    """Compare the paths of all selected rows, one at a time."""
    for kind, parts in runner.select_cases(names).items():
        torch.manual_seed(0)
        for case in runner.case_kinds()[kind].make_cases(quick):
            if any(part in case.name.lower() for part in parts):
                with compile_when_called():
                    row = compare_paths(case, f"{kind}: {case.name}", max_seconds, clock)
                yield row
            gc.collect()


def main() -> int:
    """Print one line per row, as it is finished."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.choices", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="KIND[:PIECE]",
        help="rows, as for headwise bench (default: all)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="COUNT", help="torch's threads (default: all processors)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS_PER_ROW, help="time of a row (default: 6)"
    )
    parser.add_argument(
        "--full", action="store_true", help="all rows of a full benchmark, not those of a quick one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    threads, rows = check_threads(args.threads), list[RowChoice]()
    clock = time.process_time if threads == 1 else time.perf_counter
    with use_threads(threads):
        print("\n".join(machine_notes()), file=sys.stderr)
        print(f" loss      chosen  row [backends; fastest], {threads} threads", file=sys.stderr)
        for row in compare_rows(args.names, not args.full, args.seconds, clock):
            rows.append(row)
            if not args.json:
                print(row, flush=True)
    if args.json:
        columns = ("name", "chosen", "seconds", "differs", "gains", "fastest", "loss")
        print(
            json.dumps(
                [{column: getattr(row, column) for column in columns} for row in rows], indent=1
            )
        )
    print_gains(rows)
    worst = max((row.loss for row in rows), default=1.0)
    print(f"{len(rows)} rows, the largest loss is {worst:.2f}", file=sys.stderr)
    return 1 if worst > MAX_LOSS or any(row.differs for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

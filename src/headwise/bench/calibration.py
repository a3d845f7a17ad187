"""Calibration: measure the take-over points of this machine in about a minute, and keep them for
later calls.

Each point is measured by one call of headwise that runs twice in alternation: with its own path
from the smallest size on, and with torch's path. Other work on the machine slows both, so their
fastest samples are compared.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SpecError
from ..files import write_atomically
from ..kernels import small_batch_ops
from ..kernels.compilation import compile_when_called
from ..kernels.launch import has_kernels
from ..machine.capabilities import this_machine
from ..machine.takeover_points import (
    NEVER,
    POINT_NAMES,
    UP_TO_POINTS,
    Calibration,
    TakeoverPoints,
    assume_points,
    calibration_path,
    forget_points,
    installed_versions,
    points_of_class,
    takeover_size,
    write_text_of,
)
from ..masking.sequence_info import SequenceInfo
from ..nn.attention import Attention
from ..ops.linear import linear
from ..presets import design
from .benchmark_case import (
    Clock,
    TimedCall,
    garbage_collection_disabled,
    interleaved_order,
    time_calls,
)
from .benchmark_report import format_seconds, wrap_lines
from .runner import FilledCache
from .session import ProgressCallback, check_threads, no_progress, use_threads

TOTAL_SECONDS = 50.0  # of all points together; points after it keep the sizes of the table
MIN_SAMPLE_SECONDS, MIN_ROUNDS, MAX_ROUNDS = 0.004, 2, 40
# share of its time by which the own path may be slower without ending a range in which it is faster
NOISE = 0.04
HEADS, HEAD_DIM, MODEL_WIDTH = (
    8,
    64,
    32,
)  # narrow models with wide heads, so that the core dominates
COLD_BYTES = 2**26  # weights of a product are read from memory, as in a decode step of a model
MAX_COLD_TOKENS = 16  # products of more tokens use every weight so often that caches decide nothing
PathPair = tuple[TimedCall, TimedCall]


class SizeTiming(NamedTuple):
    """The shortest seconds per call of the own path and of torch's at one size."""

    own: float
    torch: float

    @property
    def speedup(self) -> float:
        """How many times as fast the own path is."""
        return self.torch / self.own


@dataclass(frozen=True)
class PointMeasurement:
    """How one point is measured: sizes in its unit, and a call at each size that headwise runs by
    its points.
    """

    sizes: tuple[int, ...]
    make_call: Callable[[int], TimedCall]


def find_takeover(timings: Mapping[int, SizeTiming], is_up_to: bool) -> float:
    """The take-over point of measured sizes, interpolated between the sizes where the faster path
    changes.

    A "from" point is the size from which the own path is faster at all larger sizes, infinity if it
    is slower at the largest. An "up to" point is the size up to which it is faster at all smaller
    ones, 0 if it is slower at the smallest.

    >>> timings = {64: SizeTiming(2.0, 1.0), 256: SizeTiming(1.0, 2.0), 512: SizeTiming(1.0, 4.0)}
    >>> find_takeover(timings, is_up_to=False)
    128.0
    >>> find_takeover(
    ...     {size: SizeTiming(*reversed(pair)) for size, pair in timings.items()}, is_up_to=True
    ... )
    128.0
    """
    sizes = sorted(
        timings, reverse=not is_up_to
    )  # from the end where the own path should be faster
    lasting = [size for n, size in enumerate(sizes) if _are_faster(timings, sizes[: n + 1])]
    while lasting and timings[lasting[-1]].speedup < 1:
        lasting.pop()
    if not lasting:
        return 0.0 if is_up_to else NEVER
    if len(lasting) == len(sizes):
        return float(sizes[-1]) if is_up_to else 0.0
    inside, outside = lasting[-1], sizes[len(lasting)]
    gain, loss = math.log(timings[inside].speedup), max(0.0, -math.log(timings[outside].speedup))
    share = gain / (gain + loss) if gain + loss else 0.0
    return round(inside * (outside / inside) ** share, 3)


def _are_faster(timings: Mapping[int, SizeTiming], sizes: Sequence[int]) -> bool:
    return all(timings[size].speedup >= 1 - NOISE for size in sizes)


# --- What is measured -----------------------------------------------------------------------------


def measurements() -> dict[str, PointMeasurement]:
    """Every point with its sizes, in the order in which they are measured."""
    lengths, bf16 = (32, 64, 128, 256, 512), torch.bfloat16
    plain, window = (
        {"preset": "mha", "pattern": "causal()"},
        {"preset": "mha", "pattern": "window(128)"},
    )
    linear_heads, full = {"preset": "linear"}, {"preset": "mha"}
    points = {
        "flash_cpu": PointMeasurement(lengths, lambda size: _layer_call(plain, size)),
        "flash_cpu_full": PointMeasurement((64, 256, 1024), lambda size: _layer_call(full, size)),
        "block_sparse": PointMeasurement(
            (192, 256, 384, 512, 1024), lambda size: _layer_call(window, size)
        ),
        "routed": PointMeasurement(
            (512, 1024, 2048), lambda size: _layer_call({"preset": "moh"}, size)
        ),
        "linear": PointMeasurement(
            (64, 128, 256, 512), lambda size: _layer_call(linear_heads, size)
        ),
        "bf16_matmul": PointMeasurement(
            (64, 256, 1024), lambda size: _layer_call(plain, size, bf16, needs_grad=False)
        ),
        "bf16_matmul_gradients": PointMeasurement(
            (64, 128, 256, 512, 1024), lambda size: _layer_call(plain, size, bf16)
        ),
        "varlen": PointMeasurement((16, 64, 128, 256, 512), _packed_call),
        "elementwise": PointMeasurement((2**10, 2**12, 2**14, 2**16), _norm_call),
        "bf16_training": PointMeasurement((2**20,), _training_call),
    }
    for dtype, label in small_batch_ops.GEMV_DTYPES.items():
        nbytes = (2**18, 2**20, 2**22, 2**24, 2**26)
        points[f"ragged_{label}"] = PointMeasurement(
            (2**19, 2**21, 2**22, 2**23, 2**24), lambda size, dtype=dtype: _decode_call(size, dtype)
        )
        points[f"gemv_{label}"] = PointMeasurement(
            nbytes, lambda size, dtype=dtype: _product_call(size, 1, dtype)
        )
        points[f"gemm_{label}"] = PointMeasurement(
            (2**16, 2**18, 2**20, 2**22), lambda size, dtype=dtype: _product_call(size, 4, dtype)
        )
        points[f"gemm_tokens_{label}"] = PointMeasurement(
            (2, 4, 8, 16, 64, 256, 1024, 8192),
            lambda size, dtype=dtype: _product_call(2**22, size, dtype),
        )
    return {
        name: points[name] for name in POINT_NAMES if has_kernels() or name in KERNEL_FREE_POINTS
    }


KERNEL_FREE_POINTS = (
    "block_sparse",
    "linear",
    "bf16_matmul",
    "bf16_matmul_gradients",
    "bf16_training",
)


def _layer_call(
    args: Mapping[str, Any],
    tokens: int,
    dtype: torch.dtype = torch.float32,
    needs_grad: bool = True,
) -> TimedCall:
    """A layer over whole sequences, forward and, if needed, backward."""
    torch.manual_seed(0)
    layer = Attention(design(model=MODEL_WIDTH, heads=HEADS, dim=HEAD_DIM, **args)).to(dtype).eval()
    x = torch.randn(1, tokens, MODEL_WIDTH, dtype=dtype)

    def run() -> Any:
        with torch.set_grad_enabled(needs_grad):
            y = layer(x)
            return (
                torch.autograd.grad(y.sum(), list(layer.parameters()), allow_unused=True)
                if needs_grad
                else y
            )

    return run


def _decode_call(nbytes: int, dtype: torch.dtype) -> TimedCall:
    """A decode step over a cache whose keys and values have this many bytes."""
    torch.manual_seed(0)
    tokens = nbytes // (2 * HEADS * HEAD_DIM * dtype.itemsize)
    layer = (
        Attention(design(model=MODEL_WIDTH, heads=HEADS, dim=HEAD_DIM, pattern="causal()"))
        .to(dtype)
        .eval()
    )
    x = torch.randn(1, tokens, MODEL_WIDTH, dtype=dtype)
    filled = FilledCache(layer, x)

    def run() -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x[:, -1:], cache=filled.cache)
        return y

    return run


def _product_call(nbytes: int, tokens: int, dtype: torch.dtype) -> TimedCall:
    """Products of tokens with matrices of this many bytes; with a few tokens, of more matrices than
    fit in caches.
    """
    torch.manual_seed(0)
    width = 512 if nbytes <= 2**20 else 1024
    rows = nbytes // (width * dtype.itemsize)
    count = max(1, min(64, COLD_BYTES // nbytes)) if tokens <= MAX_COLD_TOKENS else 1
    weights = [torch.randn(rows, width).to(dtype) for _ in range(count)]
    x = torch.randn(tokens, width).to(dtype)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [linear(x, weight) for weight in weights]

    return run


def _packed_call(length: int) -> TimedCall:
    """A layer over packed sequences, the longest of `length` tokens, forward and backward."""
    torch.manual_seed(0)
    layer = Attention(
        design(model=MODEL_WIDTH, heads=HEADS, dim=HEAD_DIM, pattern="causal()")
    ).eval()
    lengths = [max(1, length * share // 8) for share in (8, 5, 3, 7, 2, 4, 6, 1)]
    sequence = SequenceInfo.packed([lengths])
    x = torch.randn(1, sum(lengths), MODEL_WIDTH)
    return lambda: torch.autograd.grad(layer(x, sequence=sequence).sum(), list(layer.parameters()))


def _norm_call(numbers: int) -> TimedCall:
    """RMSNorm of rows of 512 numbers, by the kernel or by torch."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(max(1, numbers // 512), min(512, numbers)),
        torch.ones(min(512, numbers)),
    )

    def run() -> Tensor:
        with torch.no_grad():
            if small_batch_ops.is_small_batch(x, weight):
                return small_batch_ops.rms_norm(x, weight, 1e-6)
            return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    return run


def _training_call(parameters: int) -> TimedCall:
    """Forward and backward pass of a feed-forward block; in bfloat16 if the points prefer it."""
    torch.manual_seed(0)
    width = math.isqrt(parameters // 8)
    net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    x = torch.randn(512, width)

    def run() -> Any:
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=takeover_size("bf16_training") <= parameters
        ):
            y = net(x)
        return torch.autograd.grad(y.float().sum(), list(net.parameters()))

    return run


# --- Timing ---------------------------------------------------------------------------------------


def _paths(name: str, call: TimedCall, points: TakeoverPoints) -> PathPair:
    """The call with the own path at every size, and with torch's."""
    always, never = (NEVER, 0.0) if name in UP_TO_POINTS else (0.0, NEVER)
    own = points.with_sizes(**_companions(name, True), **{name: always})
    plain = points.with_sizes(**_companions(name, False), **{name: never})
    return _with_points(own, call), _with_points(plain, call)


def _companions(name: str, is_own: bool) -> dict[str, float]:
    """Sizes of points that decide together with this one: tokens and bytes of a product."""
    if name.startswith("gemm_tokens_"):
        return {name.replace("gemm_tokens_", "gemm_"): 0.0}
    if name.startswith(("gemv_", "gemm_")):
        return {f"gemm_tokens_{name[5:]}": NEVER if is_own else 0.0}
    return {}


def _with_points(points: TakeoverPoints, call: TimedCall) -> TimedCall:
    def run() -> Any:
        with assume_points(points):
            return call()

    return run


def time_paths(pair: PathPair, max_seconds: float, clock: Clock) -> SizeTiming:
    """Time both paths in rounds of random order until the time is used up; return the fastest
    sample of each.
    """
    runs: dict[str, TimedCall] = {"own": pair[0], "torch": pair[1]}
    started = clock()
    for run in pair:
        run()  # compiles and allocates
    best: dict[str, float] = {
        name: max(time_calls(run, 1, clock), 1e-9) for name, run in runs.items()
    }
    calls = {
        name: max(1, math.ceil(MIN_SAMPLE_SECONDS / seconds)) for name, seconds in best.items()
    }
    with garbage_collection_disabled():
        for number, name in enumerate(interleaved_order(dict.fromkeys(runs, MAX_ROUNDS), seed=0)):
            if number >= 2 * MIN_ROUNDS and number % 2 == 0 and clock() - started > max_seconds:
                break
            best[name] = min(best[name], time_calls(runs[name], calls[name], clock))
    return SizeTiming(best["own"], best["torch"])


@dataclass(frozen=True)
class CalibrationReport:
    """The measured points with the timings behind them; `problem` says why they could not be
    stored.
    """

    calibration: Calibration
    timings: Mapping[str, Mapping[int, SizeTiming]]
    seconds: float
    stored_in: str = ""
    problem: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values; null is "never"."""
        points = {
            name: None if math.isinf(size) else size
            for name, size in self.calibration.points.items()
        }
        timings = {
            name: {str(size): t._asdict() for size, t in sizes.items()}
            for name, sizes in self.timings.items()
        }
        return {
            "machine": this_machine().data,
            "threads": self.calibration.threads,
            "versions": self.calibration.versions,
            "points": points,
            "timings": timings,
            "seconds": self.seconds,
            "stored_in": self.stored_in,
            "problem": self.problem,
        }

    def __str__(self) -> str:
        table = points_of_class(this_machine().machine_class, self.calibration.threads).points
        lines = wrap_lines(f"machine: {this_machine().describe()}")
        lines += [
            "",
            f"  {'take-over point':<22} {'measured':>16} {'table':>16}",
            "      speedup of headwise by size",
        ]
        for name, size in self.calibration.points.items():
            sizes = ", ".join(
                f"{one:,}: {timing.speedup:.2f}" for one, timing in self.timings[name].items()
            )
            own, table_size = _format_size(name, size), _format_size(name, table[name].size)
            lines += [f"  {name:<22} {own:>16} {table_size:>16}", *wrap_lines(sizes, "      ")]
        if missing := [name for name in measurements() if name not in self.calibration.points]:
            lines += wrap_lines(f"! not measured, so the table holds: {', '.join(missing)}")
        location = (
            f"kept in {self.stored_in}" if self.stored_in else f"not kept: {self.problem}"
        )  # not wrapped: a path
        threads = f"{self.calibration.threads} thread{'s' if self.calibration.threads > 1 else ''}"
        return "\n".join([*lines, "", f"{threads}, {format_seconds(self.seconds)}", location])


def _format_size(name: str, size: float) -> str:
    """A point in words.

    >>> (
    ...     _format_size("flash_cpu", 64.0),
    ...     _format_size("flash_cpu", NEVER),
    ...     _format_size("varlen", 256.0),
    ... )
    ('from 64', 'never', 'up to 256')
    """
    if math.isinf(size) or (name in UP_TO_POINTS and not size):
        return "never"
    return f"{'up to' if name in UP_TO_POINTS else 'from'} {size:,.0f}"


@compile_when_called()
def calibrate(
    threads: int | None = None,
    *,
    names: Sequence[str] = (),
    progress: ProgressCallback = no_progress,
    clock: Clock = time.perf_counter,
    total_seconds: float = TOTAL_SECONDS,
) -> CalibrationReport:
    """Measure the take-over points of this machine and keep them in the user's cache folder.

    `names` limits the points that are measured; a calibration with some points leaves the others to
    the table.
    """
    count = check_threads(threads)
    selected = {name: one for name, one in measurements().items() if not names or name in names}
    if unknown := sorted(set(names) - set(selected)):
        raise SpecError(
            f"there is no take-over point {unknown[0]!r}; use some of {', '.join(measurements())}"
        )
    points, timings = dict[str, float](), dict[str, dict[int, SizeTiming]]()
    load = os.getloadavg()[0]  # runnable processes before this one, averaged over the last minute
    with use_threads(count), torch.random.fork_rng():
        base, started = points_of_class(this_machine().machine_class, count), clock()
        for number, (name, one) in enumerate(selected.items()):
            left = total_seconds - (clock() - started)
            if left <= 0:
                break
            progress(f"[{number} / {len(selected)}] {name}")
            seconds_per_size = left / (len(selected) - number) / len(one.sizes)
            timings[name] = dict(_measure_point(name, one, base, (seconds_per_size, clock)))
            points[name] = find_takeover(timings[name], name in UP_TO_POINTS)
            base = base.with_sizes(**{name: points[name]})
        seconds = clock() - started
    progress("")
    machine = this_machine()
    calibration = Calibration(
        machine.processor, machine.instructions, count, installed_versions(), time.time(), points
    )
    if load > machine.usable_processors:
        problem = (
            f"other processes kept all processors busy (load average {load:.1f}); repeat it "
            "on a quiet machine"
        )
        return CalibrationReport(calibration, timings, seconds, problem=problem)
    return CalibrationReport(calibration, timings, seconds, *_store(calibration))


def _measure_point(
    name: str, one: PointMeasurement, base: TakeoverPoints, pace: tuple[float, Clock]
) -> Iterator[tuple[int, SizeTiming]]:
    for size in one.sizes:
        yield size, time_paths(_paths(name, one.make_call(size), base), *pace)


def _store(calibration: Calibration) -> tuple[str, str]:
    """Keep a calibration; return its path, or "" and why it could not be kept."""
    try:
        path = calibration_path(calibration.threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write_text_of(calibration).encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return "", str(error).partition(";")[0]
    forget_points()
    return str(path), ""

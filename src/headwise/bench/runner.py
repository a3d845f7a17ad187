"""Run benchmark cases one at a time, and measure how every backend scales with
the size of a call.
"""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import CallSignature
from ..cache import KVCache
from ..costs.roofline import accelerator_type
from ..errors import SpecError, suggest
from ..files import FolderLock, write_atomically
from ..head_analysis.resampling import t_quantile
from ..kernels.compilation import compile_when_called
from ..nn.attention import Attention
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import cases
from .benchmark_case import BenchmarkCase, CaseKind, TimedCall, TimingPace
from .benchmark_report import (
    BenchmarkReport,
    format_duration,
    format_seconds,
    machine_heading,
    wrap_lines,
)
from .session import (
    HEADWISE,
    BenchmarkRow,
    BenchmarkSession,
    CaseTimer,
    ProgressCallback,
    failed_row,
    no_progress,
)

# By `quick`. A quick run does not repeat samples that spread far: they only lose their verdict.
TIMING_PACES = {
    False: TimingPace(max_seconds=20.0),
    True: TimingPace(max_seconds=1.5, max_spread=math.inf),
}


@dataclass
class RunProgress:
    """Counts the cases of a run, estimates the time left, and reports both.

    `running` gets a line before each step, `finished` one after each case. `remaining` counts cases
    by kind.
    """

    remaining: dict[str, int]
    running: ProgressCallback = no_progress
    finished: ProgressCallback = no_progress
    done: int = 0
    seconds: float = 0.0

    @property
    def missing(self) -> dict[str, int]:
        """Number of cases that have not been timed, for every kind that has some."""
        return {kind: count for kind, count in self.remaining.items() if count}

    @property
    def status(self) -> str:
        """Cases done, their total, and the time left if all cases take as long as those done."""
        left = sum(self.remaining.values())
        estimate = (
            f", about {format_duration(self.seconds / self.done * left)} left" if self.done else ""
        )
        return f"{self.done} / {self.done + left}{estimate}"

    def start_case(self, name: str) -> None:
        """Report a case that is about to be timed."""
        self.running(f"[{self.status}] {name}")

    def finish_case(self, kind: str, name: str, seconds: float) -> None:
        """Count a case that has been timed, and report it."""
        self.skip_case(kind)
        self.done += 1
        self.seconds += seconds
        self.finished(f"{name} ({self.status})")

    def skip_case(self, kind: str) -> None:
        """Count a case that is not selected."""
        self.remaining[kind] = max(0, self.remaining[kind] - 1)

    def finish_kind(self, kind: str) -> None:
        """Correct the count of a kind that has no more cases."""
        self.remaining[kind] = 0

    def mark_missing(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Return the machine's entry of a report; after an interrupt, with the missing cases by
        kind.
        """
        return machine | ({"missing": self.missing} if machine["interrupted"] else {})


@compile_when_called()
def run_benchmarks(
    *names: str,
    quick: bool = False,
    threads: int | None = None,
    output_folder: Path | str | None = None,
    progress: ProgressCallback = no_progress,
    finished: ProgressCallback = no_progress,
    overwrite: bool = False,
) -> BenchmarkReport:
    """Time headwise against other libraries and the machine's limits; return the report.

    `names` are kinds of work; "entmax:core" selects the rows of one kind with "core" in their
    names. Without names, everything runs. After an interrupt, the report has the finished rows and
    is marked. `output_folder` receives the report as JSON and as an SVG chart; `overwrite` replaces
    an earlier report there. `progress` gets a line before each step, `finished` one after each
    case.

    >>> run_benchmarks("entmaxx")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of work 'entmaxx'; did you mean 'entmax'?
    """
    selected = select_cases(names)
    counts = {kind: case_kinds()[kind].count for kind in selected}
    tracker = RunProgress(
        {kind: count.quick if quick else count.full for kind, count in counts.items()},
        progress,
        finished,
    )
    return BenchmarkSession(threads, output_folder, progress, overwrite).run(
        TIMING_PACES[quick],
        quick,
        lambda timer: _time_cases(timer, selected, quick, tracker),
        lambda machine, rows: BenchmarkReport(tracker.mark_missing(machine), rows),
    )


def case_kinds() -> dict[str, CaseKind]:
    """Return all kinds of work by name."""
    modules = [
        import_module(f"{cases.__name__}.{module.name}") for module in iter_modules(cases.__path__)
    ]
    return dict(sorted((name, kind) for module in modules for name, kind in module.KINDS.items()))


def list_cases() -> dict[str, str]:
    """Return the title of every kind of work."""
    return {name: kind.title for name, kind in case_kinds().items()}


def select_cases(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the selected kinds, each with the parts of row names that select its rows ("" for
    all).
    """
    kinds = list(case_kinds())
    selected = dict[str, list[str]]() if names else {kind: [""] for kind in kinds}
    for name in names:
        kind, _, part = name.partition(":")
        if kind not in kinds:
            raise SpecError(f"there is no kind of work {kind!r}; {suggest(kind, kinds)}")
        selected.setdefault(kind, []).append(part.lower())
    return selected


def _time_cases(
    timer: CaseTimer, selected: dict[str, list[str]], quick: bool, progress: RunProgress
) -> Iterator[BenchmarkRow]:
    for kind, parts in selected.items():
        title = {"title": case_kinds()[kind].title}
        try:
            for row in _time_kind(timer, kind, parts, quick, progress):
                yield row | title
        except Exception as error:
            if isinstance(error, SpecError) and not progress.done:
                raise  # a wrong name raises, unless rows have been measured that would be lost
            yield failed_row(kind, kind, error) | title
        progress.finish_kind(kind)


def _time_kind(
    timer: CaseTimer, kind: str, parts: list[str], quick: bool, progress: RunProgress
) -> Iterator[BenchmarkRow]:
    case_names, started = list[str](), timer.clock()
    progress.start_case(kind)
    for case in _iter_cases(case_kinds()[kind], quick):
        case_names.append(case.name)
        if any(part in case.name.lower() for part in parts):
            name = f"{kind}: {case.name}"
            progress.start_case(name)
            making = {"making": timer.clock() - started}
            row = timer.time_case(case, kind)
            yield row | {"took": making | row["took"]}
            progress.finish_case(kind, name, timer.clock() - started)
        else:
            progress.skip_case(kind)
        del case  # free it before the next case is created
        gc.collect()
        started = timer.clock()
    if unknown := [part for part in parts if not any(part in name.lower() for name in case_names)]:
        raise SpecError(
            f"no row of {kind} has {unknown[0]!r} in its name; its rows are: "
            f"{'; '.join(case_names)}"
        )


def _iter_cases(kind: CaseKind, quick: bool) -> Iterator[BenchmarkCase]:
    """Yield the cases of a kind one at a time, from a fixed seed."""
    torch.manual_seed(0)
    yield from kind.make_cases(quick)


# --- Power laws and crossings ---------------------------------------------------------------------

MIN_POINTS = 3  # fewest points for a confidence interval


class PowerLawFit(NamedTuple):
    """Seconds grow as size ** power, 95 % interval `low` to `high`; `start` is the smallest size in
    the fit.
    """

    power: float
    low: float
    high: float
    start: int
    points: int


class SpeedCrossover(NamedTuple):
    """`to` is faster than `from_` from size `at` on."""

    from_: str
    to: str
    at: float


def fit_power_law(seconds: Mapping[int, float]) -> PowerLawFit | None:
    """Fit log seconds to log size by least squares, over the larger half of the sizes (at least
    three).

    The smaller half is left out because constant overhead dominates short calls.

    >>> fit = fit_power_law({64: 9.0, 128: 9.1, 256: 10.0, 512: 40.0, 1024: 160.0, 2048: 640.0})
    >>> round(fit.power, 3), fit.start, fit.points
    (2.0, 512, 3)
    """
    sizes = sorted(seconds)
    used = sizes[-max(MIN_POINTS, -(-len(sizes) // 2)) :]
    if len(used) < MIN_POINTS:
        return None
    xs, ys = [math.log(size) for size in used], [math.log(seconds[size]) for size in used]
    power, std_error = _fit_line(xs, ys)
    half_width = std_error * float(t_quantile(len(used) - 2, 0.975))
    return PowerLawFit(power, power - half_width, power + half_width, used[0], len(used))


def _fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope and its standard error."""
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    x_squares = sum((x - x_mean) ** 2 for x in xs)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / x_squares
    residual_squares = sum(
        (y - y_mean - slope * (x - x_mean)) ** 2 for x, y in zip(xs, ys, strict=True)
    )
    return slope, math.sqrt(residual_squares / (len(xs) - 2) / x_squares)


def fastest_by_size(points: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Return the fastest backend at every size.

    >>> fastest_by_size({8: {"a": 1.0, "b": 2.0}, 16: {"a": 3.0, "b": 2.5}})
    {8: 'a', 16: 'b'}
    """
    return {
        size: min(seconds, key=lambda name: seconds[name])
        for size, seconds in sorted(points.items())
        if seconds
    }


def find_crossings(points: Mapping[int, Mapping[str, float]]) -> list[SpeedCrossover]:
    """Return where the fastest backend changes, by linear interpolation of log seconds over log
    size.

    >>> find_crossings({256: {"a": 1.0, "b": 2.0}, 1024: {"a": 4.0, "b": 2.0}})
    [SpeedCrossover(from_='a', to='b', at=512.0)]
    """
    crossings, fastest = [], list(fastest_by_size(points).items())
    for (size, current), (larger, following) in pairwise(fastest):
        if current == following or not {current, following} <= set(points[size]) & set(
            points[larger]
        ):
            continue
        log_lead = math.log(points[size][following] / points[size][current])
        log_loss = math.log(points[larger][current] / points[larger][following])
        share = log_lead / (log_lead + log_loss) if log_lead + log_loss else 0.5
        crossings.append(
            SpeedCrossover(current, following, round(size * (larger / size) ** share, 6))
        )
    return crossings


# --- Scaling: calls of growing size ---------------------------------------------------------------

MODEL_WIDTH, HEAD_DIM = 32, 64  # a narrow model with wide heads, so that attention itself dominates
SCALING_PACE = TimingPace(min_sample_seconds=0.005, min_samples=3, max_samples=7, max_seconds=0.5)
MAX_CALL_SECONDS = 0.08  # a backend slower than this is not timed at larger sizes
COMPILED_BACKEND = "flex"  # compiles one kernel per shape, which takes seconds
COMPILED_SIZES = {
    ("tokens", 512),
    ("tokens", 1024),
    ("tokens", 2048),
}  # the only sizes it is timed at


class CallSize(NamedTuple):
    """Size of a call."""

    tokens: int = 512
    heads: int = 8
    rows: int = 1
    layers: int = 1


SCALING_AXES = {
    "tokens": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "heads": (2, 4, 8, 16),
    "rows": (1, 2, 4, 8),
    "layers": (1, 2, 4),
}


class ScalingLayer(NamedTuple):
    """A kind of layer: arguments of `design`, whether it decodes a single query, and whether
    gradients are timed.
    """

    design_args: Mapping[str, Any]
    single_query: bool = False
    needs_grad: bool = False


SCALING_LAYERS = {
    "plain heads, causal": ScalingLayer({"preset": "mha", "pattern": "causal()"}),
    "plain heads, causal, with gradients": ScalingLayer(
        {"preset": "mha", "pattern": "causal()"}, needs_grad=True
    ),
    "a window of 128": ScalingLayer({"preset": "mha", "pattern": "window(128)"}),
    "a window of 128, with gradients": ScalingLayer(
        {"preset": "mha", "pattern": "window(128)"}, needs_grad=True
    ),
    "one query, heads in fours": ScalingLayer(
        {"preset": "gqa", "modifiers": (), "pattern": "causal()"}, single_query=True
    ),
    "one query, heads apart": ScalingLayer(
        {"preset": "mha", "pattern": "causal()"}, single_query=True
    ),
    "talking heads, causal": ScalingLayer({"preset": "talking", "pattern": "causal()"}),
    "dcmha": ScalingLayer({"preset": "dcmha"}),
    "moh": ScalingLayer({"preset": "moh"}),
    "entmax, causal": ScalingLayer({"preset": "entmax", "pattern": "causal()"}),
    "linear": ScalingLayer({"preset": "linear"}),
}


def select_layers(names: Sequence[str]) -> list[str]:
    """Return the kinds of layers whose names contain one of `names`, or all."""
    for name in names:
        if not any(name in kind for kind in SCALING_LAYERS):
            raise SpecError(f"there is no kind of layer {name!r}; {suggest(name, SCALING_LAYERS)}")
    return [kind for kind in SCALING_LAYERS if not names or any(name in kind for name in names)]


def list_layers() -> dict[str, str]:
    """Return the axes that every kind of layer is measured along."""
    return {
        name: "tokens" if kind.needs_grad else ", ".join(SCALING_AXES)
        for name, kind in SCALING_LAYERS.items()
    }


def measure_scaling(bench: CaseTimer, kind: str) -> Iterator[dict[str, Any]]:
    """Measure one kind of layer along every axis; gradients and compiled backends along tokens
    only.
    """
    for axis, sizes in SCALING_AXES.items():
        slow: set[str] = set()
        for value in sizes if axis == "tokens" or not SCALING_LAYERS[kind].needs_grad else ():
            size = CallSize()._replace(**{axis: value})
            spec = design_layer(kind, size)
            supported = [
                name for name, reasons in unsupported_reasons(kind, spec).items() if not reasons
            ]
            names = [
                name
                for name in supported
                if name not in slow
                and (name != COMPILED_BACKEND or (axis, value) in COMPILED_SIZES)
            ]
            if not names:
                break
            row = bench.time_case(_scaling_case(kind, spec, size, names), kind)
            seconds = {names[0]: row["ours_s"], **row["peers"]} if row["ours_s"] else {}
            failures = ({names[0]: row["failed"]} if row["failed"] else {}) | row["absent"]
            slow |= {name for name, elapsed in seconds.items() if elapsed > MAX_CALL_SECONDS} | set(
                failures
            )
            spread = {
                names[0] if name == HEADWISE else name: spread_value
                for name, spread_value in row["spread"].items()
            }
            yield {
                "kind": kind,
                "axis": axis,
                "at": value,
                "seconds": seconds,
                "spread": spread,
                "runs": supported[0],
                "absent": failures,
                "differs": row["differs"],
            }


def design_layer(kind: str, size: CallSize) -> AttentionSpec:
    """Return the spec of a kind of layer with the heads of `size`."""
    return design(
        model=MODEL_WIDTH, heads=size.heads, dim=HEAD_DIM, **SCALING_LAYERS[kind].design_args
    )


def unsupported_reasons(kind: str, spec: AttentionSpec) -> dict[str, list[str]]:
    """Return for every backend its reasons to refuse this call on this machine."""
    layer = SCALING_LAYERS[kind]
    core = spec.core_of(spec.projection_form(layer.single_query))
    return backends.unsupported_reasons_by_backend(
        CallSignature(
            spec,
            core,
            device=accelerator_type(),
            single_query=layer.single_query,
            needs_grad=layer.needs_grad,
        )
    )


def _scaling_case(
    kind: str, spec: AttentionSpec, size: CallSize, names: Sequence[str]
) -> BenchmarkCase:
    first, *rest = (_layer_run(SCALING_LAYERS[kind], spec, size, name) for name in names)
    return BenchmarkCase(kind, first, dict(zip(names[1:], rest, strict=True)))


def _layer_run(kind: ScalingLayer, spec: AttentionSpec, size: CallSize, name: str) -> TimedCall:
    """Return a run of all layers in sequence on one backend."""
    torch.manual_seed(0)
    layers = [
        Attention(spec, backend=name).to(accelerator_type()).eval() for _ in range(size.layers)
    ]
    x = torch.randn(
        size.rows,
        size.tokens,
        MODEL_WIDTH,
        device=accelerator_type(),
        requires_grad=kind.needs_grad,
    )
    caches = [FilledCache(layer, x) for layer in layers] if kind.single_query else []

    def run() -> Any:
        with torch.set_grad_enabled(kind.needs_grad):
            y = x[:, -1:] if kind.single_query else x
            for n, layer in enumerate(layers):
                y = layer(y, cache=caches[n].cache) if kind.single_query else layer(y)
        return torch.autograd.grad(y.sum(), [x, *layers[0].parameters()]) if kind.needs_grad else y

    return run


class FilledCache:
    """A prefilled KV cache that grows with every call; it is reset before it is
    an eighth longer.
    """

    def __init__(self, layer: Attention, x: Tensor) -> None:
        rows, tokens, _ = x.shape
        prefill_layer = Attention(layer.spec).to(
            x.device, x.dtype
        )  # a single-query backend may refuse the prefill
        prefill_layer.load_state_dict(layer.state_dict())
        self._capacity = tokens + max(tokens // 8, 16)
        self._prefilled = layer.cache(batch=rows, capacity=self._capacity)
        with torch.no_grad():
            prefill_layer(x, cache=self._prefilled)
        self._current = copy.deepcopy(self._prefilled)

    @property
    def cache(self) -> KVCache:
        """The cache, with room for one more token."""
        if self._current.used == self._capacity:
            self._current = copy.deepcopy(self._prefilled)
        return self._current


# --- Report of scaling ----------------------------------------------------------------------------

SCALING_FILE = "scaling.json"


@dataclass(frozen=True)
class ScalingReport:
    """Seconds of every backend at every size, with the machine."""

    machine: dict[str, Any]
    points: list[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        """The points, power laws and order of speed as one document."""
        return {
            "machine": self.machine,
            "points": self.points,
            "powers": self.power_laws,
            "order": self.speed_order,
        }

    @property
    def is_valid(self) -> bool:
        """Whether every backend that supports a call ran it, with the same result as the others."""
        return not any(point["differs"] or point["absent"] for point in self.points)

    @property
    def power_laws(self) -> list[dict[str, Any]]:
        """Power law of every backend along every axis."""
        fits = []
        for kind, axis, points in self._lines():
            for name in dict.fromkeys(name for seconds in points.values() for name in seconds):
                fit = fit_power_law(
                    {size: seconds[name] for size, seconds in points.items() if name in seconds}
                )
                fits += (
                    []
                    if fit is None
                    else [{"kind": kind, "axis": axis, "backend": name, **fit._asdict()}]
                )
        return fits

    @property
    def speed_order(self) -> list[dict[str, Any]]:
        """For every kind of layer: the default backend, the fastest one by number of tokens, and
        the crossings.
        """
        orders = []
        for kind, axis, points in self._lines():
            if axis == "tokens":
                crossings = [
                    {"from": crossing.from_, "to": crossing.to, "at": crossing.at}
                    for crossing in find_crossings(points)
                ]
                runs = next(point["runs"] for point in self.points if point["kind"] == kind)
                fastest = {str(size): name for size, name in fastest_by_size(points).items()}
                orders.append(
                    {"kind": kind, "runs": runs, "fastest": fastest, "crossings": crossings}
                )
        return orders

    def seconds_by_size(self, kind: str, axis: str) -> dict[int, dict[str, float]]:
        """Return the seconds of every backend by size."""
        points = [point for point in self.points if (point["kind"], point["axis"]) == (kind, axis)]
        return {point["at"]: point["seconds"] for point in points if point["seconds"]}

    def _lines(self) -> Iterator[tuple[str, str, dict[int, dict[str, float]]]]:
        for kind, axis in dict.fromkeys((point["kind"], point["axis"]) for point in self.points):
            yield kind, axis, self.seconds_by_size(kind, axis)

    def write(self, folder: Path | str) -> None:
        """Write the report as JSON to a folder, atomically."""
        with FolderLock(folder):
            write_atomically(
                Path(folder) / SCALING_FILE, (json.dumps(self.data, indent=1) + "\n").encode()
            )

    @staticmethod
    def read(path: Path | str) -> ScalingReport:
        """Read a report that `write` has written."""
        document = json.loads(Path(path).read_text())
        return ScalingReport(document["machine"], document["points"])

    def __str__(self) -> str:
        lines = [*machine_heading(self.machine)]
        for order in self.speed_order:
            lines += [
                "",
                order["kind"],
                *_format_seconds_table(self.seconds_by_size(order["kind"], "tokens")),
                *_format_order(order),
            ]
            lines += [f"  {line}" for line in _format_power_laws(self.power_laws, order["kind"])]
        problems = {
            f"{point['kind']}, {name}: {reason}"
            for point in self.points
            for name, reason in _point_faults(point).items()
        }
        return "\n".join(
            [*lines, *(line for problem in sorted(problems) for line in wrap_lines(f"! {problem}"))]
        )


@compile_when_called()
def run_scaling(
    *names: str,
    threads: int | None = None,
    output_folder: Path | str | None = None,
    progress: ProgressCallback = no_progress,
    finished: ProgressCallback = no_progress,
    overwrite: bool = False,
) -> ScalingReport:
    """Time every backend that supports a kind of layer, in alternation, at growing sizes.

    `names` select the kinds of layers whose names contain one of them. `progress` gets a line
    before each kind, `finished` one after each size. `overwrite` replaces an earlier report in
    `output_folder`.

    >>> run_scaling("anything else")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of layer 'anything else'; use one of ...
    """
    kinds = select_layers(names)
    tracker = RunProgress({kind: _num_sizes(kind) for kind in kinds}, progress, finished)

    def measure_points(timer: CaseTimer) -> Iterator[dict[str, Any]]:
        for kind in kinds:
            tracker.start_case(kind)
            started = timer.clock()
            for point in measure_scaling(timer, kind):
                yield point
                tracker.finish_case(
                    kind, f"{kind}: {point['at']} {point['axis']}", timer.clock() - started
                )
                started = timer.clock()
            tracker.finish_kind(kind)

    return BenchmarkSession(threads, output_folder, progress, overwrite).run(
        SCALING_PACE,
        False,
        measure_points,
        lambda machine, points: ScalingReport(tracker.mark_missing(machine), points),
    )


def _num_sizes(kind: str) -> int:
    """Return how many sizes of a kind are measured at most."""
    return sum(
        len(sizes)
        for axis, sizes in SCALING_AXES.items()
        if axis == "tokens" or not SCALING_LAYERS[kind].needs_grad
    )


def _point_faults(point: Mapping[str, Any]) -> dict[str, str]:
    """Return backends that failed on a supported call or gave a different
    result, with the reason.
    """
    return point["absent"] | {
        name: f"different result ({difference})" for name, difference in point["differs"].items()
    }


def _format_seconds_table(points: Mapping[int, Mapping[str, float]]) -> list[str]:
    names = list(dict.fromkeys(name for seconds in points.values() for name in seconds))
    lines = ["  tokens" + "".join(f"{name:>12}" for name in names)]
    for size, seconds in points.items():
        cells = (format_seconds(seconds[name]) if name in seconds else "-" for name in names)
        lines.append(f"  {size:>6,}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def _format_order(order: Mapping[str, Any]) -> list[str]:
    overtakings = [
        f"{crossing['to']} overtakes {crossing['from']} at {crossing['at']:,.0f} tokens"
        for crossing in order["crossings"]
    ]
    slow = [size for size, name in order["fastest"].items() if name != order["runs"]]
    summary = f"default: {order['runs']}" + (
        f", which is not the fastest at {', '.join(slow)} tokens" if slow else ""
    )
    return wrap_lines("; ".join([summary, *overtakings]), "  ")


def _format_power_laws(powers: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    exponents: dict[str, list[str]] = {}
    for fit in powers:
        if fit["kind"] == kind:
            half_width = (fit["high"] - fit["low"]) / 2
            exponents.setdefault(fit["backend"], []).append(
                f"{fit['axis']} {fit['power']:.2f} ± {half_width:.2f}"
            )
    return [
        line
        for name, parts in exponents.items()
        for line in wrap_lines(f"{name} scales with: {', '.join(parts)}")
    ]

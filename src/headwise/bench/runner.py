"""The bench: every row, one case at a time, on one machine."""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import CallSignature
from ..cache import KVCache
from ..costs.roofline import accelerator_type
from ..errors import SpecError, suggest
from ..files import FolderLock, write_atomically
from ..nn.attention import Attention
from ..presets import design
from ..spec.attention_spec import AttentionSpec
from . import cases
from .benchmark_case import BenchmarkCase, TimedCall, TimingPace
from .benchmark_report import BenchmarkReport, format_seconds, machine_heading, wrap_lines
from .session import HEADWISE, BenchmarkRow, BenchmarkSession, CaseTimer, ProgressCallback, failed_row, no_progress

TIMING_PACES = {False: TimingPace(max_seconds=20.0), True: TimingPace(max_seconds=3.0)}  # by whether it is to be quick


def run_benchmarks(
    *names: str,
    quick: bool = False,
    threads: int | None = None,
    output_folder: Path | str | None = None,
    progress: ProgressCallback = no_progress,
) -> BenchmarkReport:
    """Time our paths beside those of others and the machine's limits, in one run.

    `names` are kinds of work; "decode:paged" are the rows of one with that in their names.

    What was measured before an interrupt is kept, and the report says so. `out` is a folder for the numbers and a
    drawing of them.

    >>> run_benchmarks("attentoin")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of work 'attentoin'; ...
    """
    wanted = select_cases(names)
    return BenchmarkSession(threads, output_folder, progress).run(
        TIMING_PACES[quick], quick, lambda how: _time_cases(how, wanted, quick, progress), BenchmarkReport
    )


def case_modules() -> dict[str, ModuleType]:
    """Every kind of work: one module of `cases` each."""
    names = sorted(found.name for found in iter_modules(cases.__path__))
    return {name: import_module(f"{cases.__name__}.{name}") for name in names}


def list_cases() -> dict[str, str]:
    """Every kind of work, with a few words of what it is."""
    return {kind: module.TITLE for kind, module in case_modules().items()}


def select_cases(names: Sequence[str]) -> dict[str, list[str]]:
    """The kinds that are asked for, each with the pieces of names by which its rows are chosen; all where none is."""
    every = list(case_modules())
    wanted = dict[str, list[str]]() if names else {kind: [""] for kind in every}
    for name in names:
        kind, _, piece = name.partition(":")
        if kind not in every:
            raise SpecError(f"there is no kind of work {kind!r}; {suggest(kind, every)}")
        wanted.setdefault(kind, []).append(piece.lower())
    return wanted


def _time_cases(
    how: CaseTimer, wanted: dict[str, list[str]], quick: bool, tell: ProgressCallback
) -> Iterator[BenchmarkRow]:
    count = 0
    for kind, pieces in wanted.items():
        tell(kind)
        title = {"title": case_modules()[kind].TITLE}
        try:
            for row in _time_case_module(how, kind, pieces, quick, tell):
                yield row | title
                count += 1
        except Exception as error:
            if isinstance(error, SpecError) and not count:
                raise  # a wrong name is refused, but not with minutes of work
            yield failed_row(kind, kind, error) | title


def _time_case_module(
    how: CaseTimer, kind: str, pieces: list[str], quick: bool, tell: ProgressCallback
) -> Iterator[BenchmarkRow]:
    known, begun = list[str](), how.clock()
    for case in _iter_cases(case_modules()[kind], quick):
        known.append(case.name)
        if any(piece in case.name.lower() for piece in pieces):
            tell(f"{kind}: {case.name}")
            made = {"making": how.clock() - begun}
            row = how.time_case(case, kind)
            yield row | {"took": made | row["took"]}
        del case  # or it would live until the next is made
        gc.collect()
        begun = how.clock()
    if wrong := [piece for piece in pieces if not any(piece in name.lower() for name in known)]:
        raise SpecError(f"no row of {kind} has {wrong[0]!r} in its name; its rows are: {'; '.join(known)}")


def _iter_cases(module: ModuleType, quick: bool) -> Iterator[BenchmarkCase]:
    """One case at a time, from the same seed for every kind."""
    torch.manual_seed(0)
    yield from module.features(quick)


# --- What follows from seconds at several sizes --------------------------------------------------------

# Two-sided 95 % quantiles of Student's t for 1, 2, .. degrees of freedom; beyond them the normal's.
STUDENT_T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL_975 = 1.96
MIN_POINTS = 3  # points of a fit that has an interval


class PowerLawFit(NamedTuple):
    """Seconds grow as sizes to the `power`, between `low` and `high` with 95 %; `start` is the smallest size used."""

    power: float
    low: float
    high: float
    start: int
    points: int


class SpeedCrossover(NamedTuple):
    """From so many on, `to` is faster than `from_`."""

    from_: str
    to: str
    at: float


def fit_power_law(seconds: Mapping[int, float]) -> PowerLawFit | None:
    """Least squares of log seconds on log sizes, over the larger half of the sizes and at least three of them.

    The smaller half is left out because calls that are short say little of what grows.

    >>> fit = fit_power_law({64: 9.0, 128: 9.1, 256: 10.0, 512: 40.0, 1024: 160.0, 2048: 640.0})
    >>> round(fit.power, 3), fit.start, fit.points
    (2.0, 512, 3)
    """
    sizes = sorted(seconds)
    used = sizes[-max(MIN_POINTS, -(-len(sizes) // 2)) :]
    if len(used) < MIN_POINTS:
        return None
    xs, ys = [math.log(size) for size in used], [math.log(seconds[size]) for size in used]
    power, error = _fit_line(xs, ys)
    free = len(used) - 2
    wide = error * (STUDENT_T_975[free - 1] if free <= len(STUDENT_T_975) else NORMAL_975)
    return PowerLawFit(power, power - wide, power + wide, used[0], len(used))


def _fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """The slope of the line that misses least, and its standard error."""
    middle, height = sum(xs) / len(xs), sum(ys) / len(ys)
    width = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True)) / width
    missed = sum((y - height - slope * (x - middle)) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, math.sqrt(missed / (len(xs) - 2) / width)


def fastest_by_size(points: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Who is fastest at every size.

    >>> fastest_by_size({8: {"a": 1.0, "b": 2.0}, 16: {"a": 3.0, "b": 2.5}})
    {8: 'a', 16: 'b'}
    """
    return {size: min(told, key=lambda name: told[name]) for size, told in sorted(points.items()) if told}


def find_crossings(points: Mapping[int, Mapping[str, float]]) -> list[SpeedCrossover]:
    """Where the fastest changes: the size at which straight lines between the points, in logarithms, meet.

    >>> find_crossings({256: {"a": 1.0, "b": 2.0}, 1024: {"a": 4.0, "b": 2.0}})
    [SpeedCrossover(from_='a', to='b', at=512.0)]
    """
    found, best = [], list(fastest_by_size(points).items())
    for (size, one), (larger, other) in pairwise(best):
        if one == other or not {one, other} <= set(points[size]) & set(points[larger]):
            continue
        before = math.log(points[size][other] / points[size][one])
        after = math.log(points[larger][one] / points[larger][other])
        share = before / (before + after) if before + after else 0.5
        found.append(SpeedCrossover(one, other, round(size * (larger / size) ** share, 6)))
    return found


# --- Calls that grow along one axis at a time ----------------------------------------------------------

MODEL_WIDTH, HEAD_DIM = 32, 64  # narrow models of wide heads: hardly anything but the core is timed
SCALING_PACE = TimingPace(min_sample_seconds=0.005, min_samples=3, max_samples=7, max_seconds=0.5)
MAX_CALL_SECONDS = 0.08  # seconds of a call, beyond which a backend is not asked for a larger one
COMPILED_BACKEND = "flex"  # a kernel for every shape, seconds each
COMPILED_SIZES = {("tokens", 512), ("tokens", 1024), ("tokens", 2048)}  # so only for these


class CallSize(NamedTuple):
    """How large a call is."""

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
    """A kind of layer: how it is designed, and whether one query reads so many tokens, or each of them."""

    design_args: Mapping[str, Any]
    single_query: bool = False
    needs_grad: bool = False


SCALING_LAYERS = {
    "plain heads, causal": ScalingLayer({"preset": "mha", "pattern": "causal()"}),
    "plain heads, causal, with gradients": ScalingLayer({"preset": "mha", "pattern": "causal()"}, needs_grad=True),
    "a window of 128": ScalingLayer({"preset": "mha", "pattern": "window(128)"}),
    "a window of 128, with gradients": ScalingLayer({"preset": "mha", "pattern": "window(128)"}, needs_grad=True),
    "one query, heads in fours": ScalingLayer(
        {"preset": "gqa", "modifiers": (), "pattern": "causal()"}, single_query=True
    ),
    "one query, heads apart": ScalingLayer({"preset": "mha", "pattern": "causal()"}, single_query=True),
    "talking heads, causal": ScalingLayer({"preset": "talking", "pattern": "causal()"}),
    "dcmha": ScalingLayer({"preset": "dcmha"}),
    "moh": ScalingLayer({"preset": "moh"}),
    "entmax, causal": ScalingLayer({"preset": "entmax", "pattern": "causal()"}),
    "linear": ScalingLayer({"preset": "linear"}),
}


def select_layers(names: Sequence[str]) -> list[str]:
    """The kinds that have a piece of one of these names, or all."""
    for name in names:
        if not any(name in kind for kind in SCALING_LAYERS):
            raise SpecError(f"there is no kind of layer {name!r}; {suggest(name, SCALING_LAYERS)}")
    return [kind for kind in SCALING_LAYERS if not names or any(name in kind for name in names)]


def list_layers() -> dict[str, str]:
    """Every kind, and along what it is measured."""
    return {name: "tokens" if kind.needs_grad else ", ".join(SCALING_AXES) for name, kind in SCALING_LAYERS.items()}


def measure_scaling(bench: CaseTimer, kind: str) -> Iterator[dict[str, Any]]:
    """Every axis of a kind; gradients are measured along tokens alone, and so is what compiles."""
    for axis, sizes in SCALING_AXES.items():
        slow: set[str] = set()
        for at in sizes if axis == "tokens" or not SCALING_LAYERS[kind].needs_grad else ():
            size = CallSize()._replace(**{axis: at})
            spec = design_layer(kind, size)
            takes = [name for name, refused in unsupported_reasons(kind, spec).items() if not refused]
            names = [
                name
                for name in takes
                if name not in slow and (name != COMPILED_BACKEND or (axis, at) in COMPILED_SIZES)
            ]
            if not names:
                break
            row = bench.time_case(_scaling_case(kind, spec, size, names), kind)
            seconds = {names[0]: row["ours_s"], **row["peers"]} if row["ours_s"] else {}
            broken = ({names[0]: row["failed"]} if row["failed"] else {}) | row["absent"]
            slow |= {name for name, took in seconds.items() if took > MAX_CALL_SECONDS} | set(broken)
            spread = {names[0] if name == HEADWISE else name: wide for name, wide in row["spread"].items()}
            yield {
                "kind": kind,
                "axis": axis,
                "at": at,
                "seconds": seconds,
                "spread": spread,
                "runs": takes[0],
                "absent": broken,
                "differs": row["differs"],
            }


def design_layer(kind: str, size: CallSize) -> AttentionSpec:
    """The layer of this kind, with so many heads."""
    return design(model=MODEL_WIDTH, heads=size.heads, dim=HEAD_DIM, **SCALING_LAYERS[kind].design_args)


def unsupported_reasons(kind: str, spec: AttentionSpec) -> dict[str, list[str]]:
    """Every backend with its reasons to refuse such a call here."""
    told = SCALING_LAYERS[kind]
    core = spec.core_of(spec.projection_form(told.single_query))
    return backends.unsupported_reasons_by_backend(
        CallSignature(spec, core, device=accelerator_type(), single_query=told.single_query, needs_grad=told.needs_grad)
    )


def _scaling_case(kind: str, spec: AttentionSpec, size: CallSize, names: Sequence[str]) -> BenchmarkCase:
    first, *rest = (_layer_run(SCALING_LAYERS[kind], spec, size, name) for name in names)
    return BenchmarkCase(kind, first, dict(zip(names[1:], rest, strict=True)))


def _layer_run(kind: ScalingLayer, spec: AttentionSpec, size: CallSize, name: str) -> TimedCall:
    """All layers in a row, on a backend of this name."""
    torch.manual_seed(0)
    layers = [Attention(spec, backend=name).to(accelerator_type()).eval() for _ in range(size.layers)]
    x = torch.randn(size.rows, size.tokens, MODEL_WIDTH, device=accelerator_type(), requires_grad=kind.needs_grad)
    caches = [_FilledCache(layer, x) for layer in layers] if kind.single_query else []

    def run() -> Any:
        with torch.set_grad_enabled(kind.needs_grad):
            y = x[:, -1:] if kind.single_query else x
            for n, layer in enumerate(layers):
                y = layer(y, cache=caches[n].cache) if kind.single_query else layer(y)
        return torch.autograd.grad(y.sum(), [x, *layers[0].parameters()]) if kind.needs_grad else y

    return run


class _FilledCache:
    """A cache of so many tokens, and a few more with every call; it begins anew before it is an eighth longer."""

    def __init__(self, layer: Attention, x: Tensor) -> None:
        rows, tokens, _ = x.shape
        anyone = Attention(layer.spec).to(x.device)  # what reads a token at a time may refuse to read many
        anyone.load_state_dict(layer.state_dict())
        self._most = tokens + max(tokens // 8, 16)
        self._full = layer.cache(batch=rows, capacity=self._most)
        with torch.no_grad():
            anyone(x, cache=self._full)
        self._now = copy.deepcopy(self._full)

    @property
    def cache(self) -> KVCache:
        """With room for one token more."""
        if self._now.used == self._most:
            self._now = copy.deepcopy(self._full)
        return self._now


# --- What every backend costs as calls grow ------------------------------------------------------------

SCALING_FILE = "scaling.json"


@dataclass(frozen=True)
class ScalingReport:
    """Seconds of every backend at every size, and the machine they were measured on."""

    machine: dict[str, Any]
    points: list[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        """The points, and what follows from them."""
        return {"machine": self.machine, "points": self.points, "powers": self.power_laws, "order": self.speed_order}

    @property
    def is_valid(self) -> bool:
        """Whether all backends that take a call ran it, and gave the same."""
        return not any(point["differs"] or point["absent"] for point in self.points)

    @property
    def power_laws(self) -> list[dict[str, Any]]:
        """By which power the seconds of every backend grow, along every axis."""
        found = []
        for kind, axis, points in self._lines():
            for name in dict.fromkeys(name for told in points.values() for name in told):
                fit = fit_power_law({size: told[name] for size, told in points.items() if name in told})
                found += [] if fit is None else [{"kind": kind, "axis": axis, "backend": name, **fit._asdict()}]
        return found

    @property
    def speed_order(self) -> list[dict[str, Any]]:
        """Who runs a kind of layer, who is fastest at how many tokens, and where that changes."""
        found = []
        for kind, axis, points in self._lines():
            if axis == "tokens":
                changes = [{"from": one.from_, "to": one.to, "at": one.at} for one in find_crossings(points)]
                runs = next(point["runs"] for point in self.points if point["kind"] == kind)
                best = {str(size): name for size, name in fastest_by_size(points).items()}
                found.append({"kind": kind, "runs": runs, "fastest": best, "crossings": changes})
        return found

    def seconds_by_size(self, kind: str, axis: str) -> dict[int, dict[str, float]]:
        """Seconds of every backend by size."""
        those = [point for point in self.points if (point["kind"], point["axis"]) == (kind, axis)]
        return {point["at"]: point["seconds"] for point in those if point["seconds"]}

    def _lines(self) -> Iterator[tuple[str, str, dict[int, dict[str, float]]]]:
        for kind, axis in dict.fromkeys((point["kind"], point["axis"]) for point in self.points):
            yield kind, axis, self.seconds_by_size(kind, axis)

    def write(self, folder: Path | str) -> None:
        """The whole as JSON, whole or as before."""
        with FolderLock(folder):
            write_atomically(Path(folder) / SCALING_FILE, (json.dumps(self.data, indent=1) + "\n").encode())

    @staticmethod
    def read(path: Path | str) -> ScalingReport:
        """What was written before."""
        told = json.loads(Path(path).read_text())
        return ScalingReport(told["machine"], told["points"])

    def __str__(self) -> str:
        said = [*machine_heading(self.machine)]
        for one in self.speed_order:
            said += [
                "",
                one["kind"],
                *_format_seconds_table(self.seconds_by_size(one["kind"], "tokens")),
                *_format_order(one),
            ]
            said += [f"  {line}" for line in _format_power_laws(self.power_laws, one["kind"])]
        faults = {
            f"{point['kind']}, {name}: {why}" for point in self.points for name, why in _point_faults(point).items()
        }
        return "\n".join([*said, *(line for fault in sorted(faults) for line in wrap_lines(f"! {fault}"))])


def run_scaling(
    *names: str,
    threads: int | None = None,
    output_folder: Path | str | None = None,
    progress: ProgressCallback = no_progress,
) -> ScalingReport:
    """Time every backend that takes a kind of layer, in turns, at growing sizes; `names` are kinds by any piece.

    >>> run_scaling("anything else")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no kind of layer 'anything else'; use one of ...
    """
    kinds = select_layers(names)

    def found(how: CaseTimer) -> Iterator[dict[str, Any]]:
        for point in chain.from_iterable(measure_scaling(how, kind) for kind in kinds):
            progress(f"{point['kind']}: {point['at']} {point['axis']}")
            yield point

    return BenchmarkSession(threads, output_folder, progress).run(SCALING_PACE, False, found, ScalingReport)


def _point_faults(point: Mapping[str, Any]) -> dict[str, str]:
    """Who failed where it does not refuse, and who gives something else."""
    return point["absent"] | {name: f"something else ({how})" for name, how in point["differs"].items()}


def _format_seconds_table(points: Mapping[int, Mapping[str, float]]) -> list[str]:
    names = list(dict.fromkeys(name for told in points.values() for name in told))
    lines = ["  tokens" + "".join(f"{name:>12}" for name in names)]
    for size, told in points.items():
        cells = (format_seconds(told[name]) if name in told else "-" for name in names)
        lines.append(f"  {size:>6,}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def _format_order(one: Mapping[str, Any]) -> list[str]:
    changes = [f"{each['to']} overtakes {each['from']} at {each['at']:,.0f} tokens" for each in one["crossings"]]
    slow = [size for size, name in one["fastest"].items() if name != one["runs"]]
    told = f"{one['runs']} runs it" + (f", and is not the fastest at {', '.join(slow)} tokens" if slow else "")
    return wrap_lines("; ".join([told, *changes]), "  ")


def _format_power_laws(powers: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for one in powers:
        if one["kind"] == kind:
            wide = (one["high"] - one["low"]) / 2
            found.setdefault(one["backend"], []).append(f"{one['axis']} {one['power']:.2f} ± {wide:.2f}")
    return [line for name, told in found.items() for line in wrap_lines(f"{name} grows as: {', '.join(told)}")]

"""Cost estimates side by side, as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..attention.masking.patterns import Pattern
from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import ModelSpec
from ..report.data import Axis, Column, Figure, Item, Plot, Reference, Series, Table
from ..report.notebook import NotebookResult
from ..report.plots import save_figure
from ..report.render import to_text
from ..report.text import format_count, format_number, format_seconds
from ..util.errors import SpecError, pluralise, suggest
from .components import (
    SpecOrModel,
    list_attentions,
)
from .cost_estimate import CALL_LABELS, CostEstimate, estimate_cost
from .counted_model import CountedModel
from .roofline import RooflineOperation
from .workload import (
    Workload,
    image_tokens,
    max_lengths,
)

__all__ = ["CostReport", "Workload", "cost"]

FORMAT_VERSION = 1  # of the JSON document
FOOTNOTE = (
    "FLOPs required: of allowed query-key pairs only; executed: by the backend that the layer "
    "would choose; counted: by torch's FlopCounterMode, all pairs. k, M, G, T, P are powers of "
    "1000."
)
TIME_NOTE = "Times are lower bounds: peak FLOP/s or bandwidth, fully overlapped."
NO_DEVICE_NOTE = "--device NAME adds lower bounds of the time, --device here those of this machine."
TERMS_LEGEND = (
    "In formulas: B rows, T queries, S keys that a row attends to, new tokens whose keys and "
    "values are computed, pairs of a query and a key that the pattern allows in a row; other names "
    "are sizes of the spec, such as q and dim."
)


@dataclass(frozen=True, repr=False)
class CostReport(NotebookResult):
    """Cost estimates under one workload; `print` shows them side by side.

    A report iterates over its estimates and can be indexed by name. `names_device` is False if the
    device of the workload was not chosen: the tables then leave out times.
    """

    estimates: tuple[CostEstimate, ...]
    names_device: bool = True

    def __iter__(self) -> Iterator[CostEstimate]:
        return iter(self.estimates)

    def __getitem__(self, name: str) -> CostEstimate:
        by_name = {estimate.name: estimate for estimate in self.estimates}
        if name not in by_name:
            raise SpecError(f"the report has no estimate {name!r}; {suggest(name, by_name)}")
        return by_name[name]

    def __str__(self) -> str:
        return "\n\n".join(map(to_text, self.items))

    @property
    def report_items(self) -> Sequence[Item]:
        """`items`, for notebooks."""
        return self.items

    @property
    def items(self) -> list[str | Table]:
        """A table of the estimates side by side, between a heading and notes."""
        rows: list[tuple[str, ...]] = []
        times = TIME_ROWS if self.names_device else []
        for label, cell, is_optional in [*SIZE_ROWS, *times, *FLOP_ROWS]:
            cells = [cell(estimate) for estimate in self.estimates]
            if not is_optional or set(cells) != {"-"}:
                rows.append((label, *cells))
        names = [one.name[-COLUMN_WIDTH:] for one in self.estimates]
        columns = [Column(""), *(Column(name, align="right") for name in names)]
        items: list[str | Table] = [_describe_workload(self.estimates, self.names_device)]
        items.append(Table("", columns, rows))
        for estimate in self.estimates:
            shortfalls = filter(None, map(estimate.shortfall, estimate.operations))
            notes = [*estimate.notes, *map(str, list(shortfalls)[-1:])]
            items += [f"{estimate.name}: {note}" for note in notes]
        return [*items, f"{FOOTNOTE} {TIME_NOTE if self.names_device else NO_DEVICE_NOTE}"]

    @property
    def terms(self) -> list[str | list[str]]:
        """All terms of parameters, FLOPs and cache, with the formula of each."""
        items: list[str | list[str]] = [TERMS_LEGEND]
        for estimate in self.estimates:
            for name, breakdown in estimate.breakdowns.items():
                label = f"{CALL_LABELS[name]} FLOPs" if name in CALL_LABELS else BREAKDOWNS[name]
                if breakdown.terms:
                    items.append(f"{estimate.name}: {label}, {breakdown.total:,}")
                    items.append(
                        [f"{name} = {formula} = {n:,}" for name, formula, n in breakdown.terms]
                    )
        return items

    @property
    def operations(self) -> list[Table]:
        """A table of operations for each estimate and phase: FLOPs, bytes moved, lower bound of the
        time, and limiting resource.
        """
        columns = (
            "",
            Column("FLOPs", format_count),
            Column("bytes", format_count),
            Column("FLOPs/byte", "{:.1f}".format),
            Column("lower bound", align="right"),
            "bound by",
        )
        tables: list[Table] = []
        for estimate in self.estimates:
            for phase, operations in estimate.operations.items():
                total = estimate.total_operation(phase)
                rows = [
                    (
                        one.name,
                        one.flops,
                        one.moved,
                        one.intensity,
                        format_seconds(one.seconds),
                        one.bound,
                    )
                    for one in (*operations, total)
                ]
                time = "too large" if estimate.shortfall(phase) else rows[-1][4]
                rows[-1] = ("total", *rows[-1][1:4], time, total.bound)
                tables.append(Table(f"{estimate.name}: {CALL_LABELS[phase]}", columns, rows))
        return tables

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values: {"version", "device", "workload", "rows"}."""
        workload = asdict(self.estimates[0].workload)
        return {
            "version": FORMAT_VERSION,
            "device": workload["device"],
            "workload": workload,
            "rows": [estimate.data for estimate in self.estimates],
        }


def cost(
    spec_or_model: SpecOrModel | Mapping[str, SpecOrModel], workload: Workload | None = None
) -> CostReport:
    """Estimate the cost of specs and described models, one or several by name; `hw.cost` also takes
    names of models.
    """
    named: Any = spec_or_model
    if isinstance(spec_or_model, ModelSpec | CountedModel):
        named = {spec_or_model.name: spec_or_model}
    elif isinstance(spec_or_model, AttentionSpec):
        named = {"spec": spec_or_model}
    is_valid = isinstance(named, Mapping) and all(
        isinstance(spec, AttentionSpec | ModelSpec | CountedModel) for spec in named.values()
    )
    if not is_valid or not named:
        remedy = "give a spec or a model, or specs by name as in {'gqa': hw.design(...)}"
        raise SpecError(f"cannot estimate the cost of {spec_or_model!r}; {remedy}")
    workload = (workload or Workload()).fitted_to(named.values())
    return CostReport(tuple(estimate_cost(spec, workload, name) for name, spec in named.items()))


def _describe_workload(estimates: Sequence[CostEstimate], names_device: bool) -> str:
    """Describe the workload, and the models if there are any."""
    workload = estimates[0].workload
    tokens = pluralise(workload.context, "token")
    tokens += f" and {workload.generate:,} generated" if workload.generate else ""
    text = f"{pluralise(workload.batch, 'row')} of {tokens}, {workload.dtype}"
    text += f", {estimates[0].device.description}" if names_device else ""
    if all(isinstance(estimate.spec_or_model, AttentionSpec) for estimate in estimates):
        return f"one layer, {text}"
    return "; ".join([text, *(f"{one.name}: {_describe_target(one)}" for one in estimates)])


def _describe_target(estimate: CostEstimate) -> str:
    model = estimate.spec_or_model
    if isinstance(model, AttentionSpec):
        return "one layer"
    if isinstance(model, CountedModel):
        return model.kind
    call = estimate.full_call
    layers = " + ".join(str(len(stack.layers)) for stack in model.stacks)
    tokens = f", {call.tokens:,} tokens per image" if image_tokens(model)[-1] else ""
    source = f", {call.source:,} source tokens" if len(model.stacks) > 1 else ""
    return f"{model.kind} of {layers} {'layer' if layers == '1' else 'layers'}{tokens}{source}"


Cell = Callable[[CostEstimate], str]
Row = tuple[str, Cell, bool]  # label, cell, and True if it is left out where nothing has a number


def _count(number: int | None) -> str:
    return "-" if number is None else format_count(number)


def _flops_rows(call: str, is_optional: bool = False) -> list[Row]:
    """Return the FLOP rows of one call: required, executed, counted."""
    return [
        (
            f"{call}, FLOPs required",
            lambda estimate: _count(estimate.required_flops.get(call)),
            is_optional,
        ),
        ("  executed", lambda estimate: _count(estimate.executed_flops.get(call)), is_optional),
        ("  counted", lambda estimate: _count(estimate.counted_flops.get(call)), is_optional),
    ]


def _time_rows(phase: str) -> list[Row]:
    """Return the rows of the time that a phase takes."""

    def seconds(estimate: CostEstimate) -> str:
        if phase not in estimate.operations:
            return "-"
        time = estimate.seconds(phase)
        return "too large" if time is None else format_seconds(time)

    def bound(estimate: CostEstimate) -> str:
        is_timed = phase in estimate.operations and estimate.shortfall(phase) is None
        return estimate.total_operation(phase).bound if is_timed else "-"

    def rate(estimate: CostEstimate) -> str:
        time = estimate.seconds(phase) if phase in estimate.operations else None
        workload = estimate.workload
        tokens = workload.batch * (workload.context if phase == "prefill" else 1)
        number = tokens / time if time else math.nan
        return format_count(round(number)) if number >= 10 else format_number(number)

    return [
        (f"{phase}, lower bound", seconds, False),
        ("  tokens per second, at most", rate, True),
        ("  bound by", bound, False),
    ]


def _cache_per_token_cell(estimate: CostEstimate) -> str:
    if not estimate.has_cache:
        return "-"
    if estimate.cache_bytes_per_token is None and estimate.cache_numbers.terms:
        return "a state"
    return format_count(estimate.cache_bytes_per_token or 0)


def _cache_cell(estimate: CostEstimate) -> str:
    return format_count(estimate.cache_bytes) if estimate.has_cache else "-"


def _reserved_cell(estimate: CostEstimate) -> str:
    is_other = estimate.has_cache and estimate.reserved_cache_bytes != estimate.cache_bytes
    return format_count(estimate.reserved_cache_bytes) if is_other else "-"


def _active_cell(estimate: CostEstimate, number: int) -> str:
    return "-" if estimate.active_parameters == estimate.parameters.total else format_count(number)


def _core_cell(estimate: CostEstimate, text: Callable[[RooflineOperation], str]) -> str:
    return text(estimate.core_operation) if "decode" in estimate.calls else "-"


COLUMN_WIDTH = 40  # characters of a name at the head of a column
BREAKDOWNS = {
    "parameters": "parameters",
    "cache": "cached values per token",
    "source_cache": "cached values per source token",
}
SIZE_ROWS: list[Row] = [
    ("parameters", lambda one: format_count(one.parameters.total), False),
    ("  active per token", lambda one: _active_cell(one, one.active_parameters), True),
    (
        "    without embeddings",
        lambda one: _active_cell(one, one.active_parameters_without_embeddings),
        True,
    ),
    ("weights, bytes", lambda one: format_count(one.weights_bytes), False),
    ("cache, bytes per token", _cache_per_token_cell, False),
    ("  per source token", lambda one: _count(one.source_cache_bytes_per_token), True),
    ("cache, total bytes", _cache_cell, False),
    ("  in pages of engines", _reserved_cell, True),
]
FLOP_ROWS: list[Row] = [
    *_flops_rows("prefill"),
    *_flops_rows("backward"),
    *_flops_rows("decode"),
    *_flops_rows("generate", is_optional=True),
]
TIME_ROWS: list[Row] = [
    *_time_rows("prefill"),
    *_time_rows("decode"),
    (
        "  core, FLOPs per byte",
        lambda one: _core_cell(one, lambda core: f"{core.intensity:.1f}"),
        False,
    ),
    ("  core bound by", lambda one: _core_cell(one, lambda core: core.bound), False),
]


SHORTEST = 2**6
LONGEST = 2**17  # tokens; lines go at least so far
BEYOND = 4  # lines go at least to this multiple of the workload's context
MAX_PATTERN_TOKENS = 2**14  # for patterns with more segments in longer rows
PHASE_MARKERS = {"prefill": "o", "decode": "s"}
SIZE = (4.6, 3.2)  # inches of a panel


def make_figure(estimates: Mapping[str, CostEstimate], kind: str = "all") -> Figure:
    """Return one kind of plot, or all: roofline, kv, flops.

    >>> import headwise as hw
    >>> costs = hw.cost({"gqa": hw.design(preset="gqa"), "linear": hw.design(preset="linear")})
    >>> figure = make_figure({cost.name: cost for cost in costs}, "kv")
    >>> [series.name for series in figure.panels[0].series]
    ['gqa', 'linear']
    """
    if kind not in (*PLOT_KINDS, "all"):
        raise SpecError(f"there is no kind of plot {kind!r}; {suggest(kind, [*PLOT_KINDS, 'all'])}")
    if kind == "kv" and not any("decode" in one.calls for one in estimates.values()):
        fact = f"cannot draw a KV cache: none of {', '.join(estimates)} is causal"
        raise SpecError(f"{fact}; give them pattern='causal()', or draw another kind")
    first = next(iter(estimates.values()))
    workload = first.workload
    title = f"{pluralise(workload.batch, 'row')} of {workload.context:,} tokens, {workload.dtype}"
    panels = [PLOT_KINDS[name](estimates) for name in (PLOT_KINDS if kind == "all" else [kind])]
    missing = [name for name, one in estimates.items() if "decode" not in one.calls]
    note = f"no cache, because not causal: {', '.join(missing)}" if missing else ""
    return Figure(f"{title}, {first.device.description}", panels, note=note)


def save_plot(
    estimates: Mapping[str, CostEstimate],
    path: Path | str,
    kind: str = "all",
    *,
    overwrite: bool = False,
) -> None:
    """Draw one kind of plot, or all of `make_figure`, into an SVG, PNG or PDF file."""
    save_figure(make_figure(estimates, kind), path, overwrite=overwrite)


def _roofline(estimates: Mapping[str, CostEstimate]) -> Plot:
    """Both phases of every spec below the roofline of the device."""
    first = next(iter(estimates.values()))
    device = first.device
    peak = device.flops[first.workload.dtype]
    ridge_point = peak / device.bandwidth
    points: list[Series] = []
    for name, estimate in estimates.items():
        for phase, marker in PHASE_MARKERS.items():
            total = estimate.total_operation(phase) if phase in estimate.operations else None
            if total and total.flops:
                rate = total.flops / total.seconds
                label = f"{name}, {phase}"
                points.append(Series(label, [total.intensity], [rate], line="", marker=marker))
    intensities = [ridge_point, *(series.xs[0] for series in points)]
    low = min(intensities) / 3
    high = max(intensities) * 3
    roof = Series(
        f"{format_count(peak)}FLOP/s, {format_count(device.bandwidth)}B/s",
        [low, ridge_point, high],
        [low * device.bandwidth, peak, peak],
        colour="muted",
    )
    y = Axis("FLOP/s", log=True)
    return Plot([*points, roof], Axis("FLOPs per byte moved", log=True), y, "Roofline", size=SIZE)


def _over_lengths(
    title: str, value: Callable[[CostEstimate], float | None]
) -> Callable[[Mapping[str, CostEstimate]], Plot]:
    """Return a function that draws a quantity of every spec over the context length."""

    def draw(estimates: Mapping[str, CostEstimate]) -> Plot:
        lines: list[Series] = []
        for name, estimate in estimates.items():
            context = estimate.workload.context
            lengths = list(_sample_lengths(estimate.spec_or_model, context))
            values: list[float] = []
            for tokens in lengths:
                workload = replace(estimate.workload, context=tokens, generate=0)
                number = value(estimate_cost(estimate.spec_or_model, workload, name))
                values += [] if number is None else [number]
            if len(values) == len(lengths):
                lines.append(Series(name, lengths, values))
        context = next(iter(estimates.values())).workload.context
        mark = Reference("x", context, f"{context:,}")
        x = Axis("tokens per row", log=True)
        return Plot(lines, x, Axis(log=True), title, [mark], "ends", SIZE)

    return draw


def _sample_lengths(spec_or_model: SpecOrModel, context: int) -> Iterator[int]:
    """Yield powers of two, the context, and at last the greatest length that is drawn."""
    longest = max(LONGEST, 2 ** math.ceil(math.log2(BEYOND * context)))
    attentions = list_attentions(spec_or_model)
    patterns = [one.spec.pattern for one in attentions]
    if any(_num_segments(pattern, 1024) > _num_segments(pattern, 512) for pattern in patterns):
        longest = MAX_PATTERN_TOKENS
    longest = min(longest, max_lengths(spec_or_model).own or longest)
    powers = [2**n for n in range(SHORTEST.bit_length() - 1, longest.bit_length())]
    yield from sorted({*powers, min(context, longest), longest})


def _num_segments(pattern: Pattern, tokens: int) -> int:
    return sum(map(len, pattern.lines(range(tokens), range(tokens))))


def _cache_bytes(estimate: CostEstimate) -> float | None:
    return estimate.cache_bytes if "decode" in estimate.calls else None


def _flops_per_token(estimate: CostEstimate) -> float:
    return estimate.prefill_flops.total / estimate.workload.context / estimate.workload.batch


PLOT_KINDS: dict[str, Callable[[Mapping[str, CostEstimate]], Plot]] = {
    "roofline": _roofline,
    "kv": _over_lengths("KV cache, bytes", _cache_bytes),
    "flops": _over_lengths("Prefill, FLOPs per token", _flops_per_token),
}

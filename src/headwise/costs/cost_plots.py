"""Figures of costs: the roofline of the device, and KV cache and FLOPs over the context length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..attention.masking.patterns import Pattern
from ..report.data import Axis, Figure, Plot, Reference, Series
from ..report.plots import save_figure
from ..report.text import format_count
from ..util.errors import SpecError, pluralise, suggest
from .components import SpecOrModel, list_attentions
from .cost_report import CostEstimate, estimate_cost
from .workload import max_lengths

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

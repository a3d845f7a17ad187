"""What a drawing of costs shows, as numbers: lines over lengths, and points under a roof."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import SpecError, suggest
from .along import CostByLength, LengthCost
from .breakeven import Crossover, LengthRange, find_crossover, bisection_lengths
from .devices import Device
from .pricing import CostEstimate

SHORTEST, LONGEST = 2**6, 2**17  # tokens between which costs are drawn, and as far as is asked beyond them
BEYOND = 4  # times what is asked


class Canvas(Protocol):
    """What a chart or a roof is drawn on."""

    def chart(self, chart: LineChart) -> None:
        """Draw lines over lengths."""
        ...

    def roof(self, roof: RooflineChart) -> None:
        """Draw points below a roof."""
        ...


class ChartLine(NamedTuple):
    """One line over lengths; its label stands at its end."""

    name: str
    label: str
    xs: tuple[int, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class LineChart:
    """Lines over lengths; `at` is the length that was priced, `without` who has no such line: what reads ahead."""

    title: str
    marked_length: int
    lines: tuple[ChartLine, ...]
    missing_names: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Who is not among the lines, and why."""
        return f"not here, for they read ahead: {', '.join(self.missing_names)}" if self.missing_names else ""

    def draw_on(self, canvas: Canvas) -> None:
        """Draw it there."""
        canvas.chart(self)


class RooflinePoint(NamedTuple):
    """One call: FLOPs a byte, and FLOPs a second."""

    name: str
    call: str
    x: float
    y: float


@dataclass(frozen=True)
class RooflineChart:
    """What a device can do at most, and the calls below it."""

    title: str
    peak_flops: float
    bandwidth: float
    points: tuple[RooflinePoint, ...]

    @property
    def ridge_point(self) -> float:
        """FLOPs a byte at which the roof bends."""
        return self.peak_flops / self.bandwidth

    def draw_on(self, canvas: Canvas) -> None:
        """Draw it there."""
        canvas.roof(self)


def make_charts(estimates: Mapping[str, CostEstimate], kind: str = "all") -> list[LineChart | RooflineChart]:
    """One kind of drawing, or all four: roofline, kv, flops, breakeven.

    >>> import headwise as hw
    >>> costs = hw.cost({"gqa": hw.design(preset="gqa"), "linear": hw.design(preset="linear")})
    >>> [line.label for line in make_charts({one.name: one for one in costs}, "breakeven")[0].lines]
    ['gqa', 'linear from 2,057']
    """
    if kind not in (*CHART_KINDS, "all"):
        raise SpecError(f"there is no drawing {kind!r}; {suggest(kind, [*CHART_KINDS, 'all'])}")
    if kind == "breakeven" and len(estimates) < 2:
        raise SpecError(f"{', '.join(estimates)} has nothing to break even with; draw two or more")
    if kind == "kv" and all(one.decode_flops is None for one in estimates.values()):
        told = f"nothing here is remembered, for they read ahead: {', '.join(estimates)}"
        raise SpecError(f"{told}; give them pattern='causal()', or draw another kind")
    load = next(iter(estimates.values())).workload
    drawn = _ChartBuilder(estimates, CostByLength({name: one.spec_or_model for name, one in estimates.items()}, load))
    every = [name for name in CHART_KINDS if len(estimates) > 1 or name != "breakeven"]
    return [CHART_KINDS[name](drawn) for name in (every if kind == "all" else [kind])]


@dataclass(frozen=True)
class _ChartBuilder:
    """What is drawn, priced at one length and at all others."""

    estimates: Mapping[str, CostEstimate]
    costs: CostByLength

    def roofline(self) -> RooflineChart:
        """Every call below the roof of the device."""
        load = self.costs.workload
        device = Device.from_name(load.device)
        calls = {"prefill": "all tokens", "decode": "a step"}
        steps = [(name, calls[phase], one.total_operation(phase)) for name, one in self.estimates.items() for phase in one.operations]
        points = (RooflinePoint(name, call, one.intensity, one.flops / one.seconds) for name, call, one in steps if one.flops)
        return RooflineChart("Roofline, FLOP a second", device.flops[load.dtype], device.bandwidth, tuple(points))

    def cache(self) -> LineChart:
        """Bytes remembered."""
        return self._chart(f"Cache of {self._rows}, bytes", lambda sample, tokens: sample.cache_bytes)

    def flops_per_token(self) -> LineChart:
        """FLOPs of each token, all of them at once."""
        rows = self.costs.workload.batch
        return self._chart("Prefill, FLOP a token", lambda sample, tokens: sample.prefill_flops / tokens / rows)

    def relative_seconds(self) -> LineChart:
        """Seconds over those of the first: of a step if the first has one, else of all tokens."""
        first = next(iter(self.estimates))
        quantity = "prefill_seconds" if self.estimates[first].decode_flops is None else "step_seconds"

        def share(sample: LengthCost, tokens: int) -> float | None:
            one, whole = getattr(sample, quantity), getattr(self.costs.at(first, tokens), quantity)
            return None if one is None else one / whole

        title = f"Time of {'a step' if quantity == 'step_seconds' else 'prefill'}, {first} = 1"
        return self._chart(title, share, lambda name: _crossover_label(find_crossover(self.costs, name, first, quantity, self._farthest)))

    @property
    def _rows(self) -> str:
        rows = self.costs.workload.batch
        return "one row" if rows == 1 else f"{rows:,} rows"

    @property
    def _farthest(self) -> int:
        return max(LONGEST, 2 ** math.ceil(math.log2(BEYOND * self.costs.workload.context)))

    def _chart(
        self, title: str, cost: Callable[[LengthCost, int], float | None], label: Callable[[str], str] = str
    ) -> LineChart:
        lines: list[ChartLine] = []
        for name in self.estimates:
            farthest = min(self._farthest, self.costs.max_length(name))
            lengths = sorted({*bisection_lengths(min(SHORTEST, farthest), farthest), min(self.costs.workload.context, farthest)})
            costs = [cost(self.costs.at(name, tokens), tokens) for tokens in lengths]
            known = tuple(cost for cost in costs if cost is not None)
            lines += [ChartLine(name, label(name), tuple(lengths), known)] if len(known) == len(lengths) else []
        without = set(self.estimates) - {line.name for line in lines}
        return LineChart(
            title, self.costs.workload.context, tuple(lines), tuple(name for name in self.estimates if name in without)
        )


CHART_KINDS: dict[str, Callable[[_ChartBuilder], LineChart | RooflineChart]] = {
    "roofline": _ChartBuilder.roofline,
    "kv": _ChartBuilder.cache,
    "flops": _ChartBuilder.flops_per_token,
    "breakeven": _ChartBuilder.relative_seconds,
}


def _crossover_label(found: Crossover) -> str:
    """The name, with the length from which it is cheaper where there is one such."""
    match found.ranges:
        case (LengthRange(first, None),) if first > 1:
            return f"{found.name} from {first:,}"
        case _:
            return found.name

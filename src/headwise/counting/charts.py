"""What a drawing of costs shows, as numbers: lines over lengths, and points under a roof."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import SpecError, nearest
from .along import Along, Sample
from .breakeven import Even, Span, even, halfway
from .devices import Device
from .pricing import Price

SHORTEST, LONGEST = 2**6, 2**17  # tokens between which costs are drawn, and as far as is asked beyond them
BEYOND = 4  # times what is asked


class Canvas(Protocol):
    """What a chart or a roof is drawn on."""

    def chart(self, chart: Chart) -> None:
        """Draw lines over lengths."""
        ...

    def roof(self, roof: Roof) -> None:
        """Draw points below a roof."""
        ...


class Line(NamedTuple):
    """One line over lengths; its label stands at its end."""

    name: str
    label: str
    xs: tuple[int, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """Lines over lengths; `at` is the length that was priced, `without` who has no such line: what reads ahead."""

    title: str
    at: int
    lines: tuple[Line, ...]
    without: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Who is not among the lines, and why."""
        return f"not here, for they read ahead: {', '.join(self.without)}" if self.without else ""

    def onto(self, canvas: Canvas) -> None:
        """Draw it there."""
        canvas.chart(self)


class Point(NamedTuple):
    """One call: FLOPs a byte, and FLOPs a second."""

    name: str
    call: str
    x: float
    y: float


@dataclass(frozen=True)
class Roof:
    """What a device can do at most, and the calls below it."""

    title: str
    peak: float
    bandwidth: float
    points: tuple[Point, ...]

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which the roof bends."""
        return self.peak / self.bandwidth

    def onto(self, canvas: Canvas) -> None:
        """Draw it there."""
        canvas.roof(self)


def charts(prices: Mapping[str, Price], kind: str = "all") -> list[Chart | Roof]:
    """One kind of drawing, or all four: roofline, kv, flops, breakeven.

    >>> import headwise as hw
    >>> costs = hw.cost({"gqa": hw.design(preset="gqa"), "linear": hw.design(preset="linear")})
    >>> [line.label for line in charts({one.name: one for one in costs}, "breakeven")[0].lines]
    ['gqa', 'linear from 2,057']
    """
    if kind not in (*KINDS, "all"):
        raise SpecError(f"there is no drawing {kind!r}; {nearest(kind, [*KINDS, 'all'])}")
    if kind == "breakeven" and len(prices) < 2:
        raise SpecError(f"{', '.join(prices)} has nothing to break even with; draw two or more")
    if kind == "kv" and all(one.decode is None for one in prices.values()):
        told = f"nothing here is remembered, for they read ahead: {', '.join(prices)}"
        raise SpecError(f"{told}; give them pattern='causal()', or draw another kind")
    load = next(iter(prices.values())).load
    drawn = _Drawn(prices, Along({name: one.described for name, one in prices.items()}, load))
    every = [name for name in KINDS if len(prices) > 1 or name != "breakeven"]
    return [KINDS[name](drawn) for name in (every if kind == "all" else [kind])]


@dataclass(frozen=True)
class _Drawn:
    """What is drawn, priced at one length and at all others."""

    prices: Mapping[str, Price]
    along: Along

    def roofline(self) -> Roof:
        """Every call below the roof of the device."""
        load = self.along.load
        device = Device.named(load.device)
        calls = {"prefill": "all tokens", "decode": "a step"}
        steps = [(name, calls[phase], one.step(phase)) for name, one in self.prices.items() for phase in one.operations]
        points = (Point(name, call, one.intensity, one.flops / one.seconds) for name, call, one in steps if one.flops)
        return Roof("Roofline, FLOP a second", device.flops[load.dtype], device.bandwidth, tuple(points))

    def cache(self) -> Chart:
        """Bytes remembered."""
        return self._chart(f"Cache of {self._rows}, bytes", lambda sample, tokens: sample.cache_bytes)

    def products(self) -> Chart:
        """FLOPs of each token, all of them at once."""
        rows = self.along.load.batch
        return self._chart("Prefill, FLOP a token", lambda sample, tokens: sample.prefill_flops / tokens / rows)

    def relative(self) -> Chart:
        """Seconds over those of the first: of a step if the first has one, else of all tokens."""
        first = next(iter(self.prices))
        quantity = "prefill_seconds" if self.prices[first].decode is None else "step_seconds"

        def share(sample: Sample, tokens: int) -> float | None:
            one, whole = getattr(sample, quantity), getattr(self.along.at(first, tokens), quantity)
            return None if one is None else one / whole

        title = f"Time of {'a step' if quantity == 'step_seconds' else 'prefill'}, {first} = 1"
        return self._chart(title, share, lambda name: _label(even(self.along, name, first, quantity, self._farthest)))

    @property
    def _rows(self) -> str:
        rows = self.along.load.batch
        return "one row" if rows == 1 else f"{rows:,} rows"

    @property
    def _farthest(self) -> int:
        return max(LONGEST, 2 ** math.ceil(math.log2(BEYOND * self.along.load.context)))

    def _chart(
        self, title: str, cost: Callable[[Sample, int], float | None], label: Callable[[str], str] = str
    ) -> Chart:
        lines: list[Line] = []
        for name in self.prices:
            farthest = min(self._farthest, self.along.farthest(name))
            lengths = sorted({*halfway(min(SHORTEST, farthest), farthest), min(self.along.load.context, farthest)})
            costs = [cost(self.along.at(name, tokens), tokens) for tokens in lengths]
            known = tuple(cost for cost in costs if cost is not None)
            lines += [Line(name, label(name), tuple(lengths), known)] if len(known) == len(lengths) else []
        without = set(self.prices) - {line.name for line in lines}
        return Chart(
            title, self.along.load.context, tuple(lines), tuple(name for name in self.prices if name in without)
        )


KINDS: dict[str, Callable[[_Drawn], Chart | Roof]] = {
    "roofline": _Drawn.roofline,
    "kv": _Drawn.cache,
    "flops": _Drawn.products,
    "breakeven": _Drawn.relative,
}


def _label(found: Even) -> str:
    """The name, with the length from which it is cheaper where there is one such."""
    match found.spans:
        case (Span(first, None),) if first > 1:
            return f"{found.name} from {first:,}"
        case _:
            return found.name

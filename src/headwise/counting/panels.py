"""One panel of a drawing: lines or points, and a name for each at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from .charts import Chart, Roof
from .costs import UNITS
from .labels import shortened, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 7.5  # points of text: 11 pixels where a drawing is 800 wide
LEAST = 4.0  # points of text where many names share a panel
LETTER = 0.56  # of its size, the width of most letters
STEPS = ((30, (1, 2, 5)), (3000, (1, 3)), (math.inf, (1,)))  # of ticks in a decade, by how much there is to show
LINE = 1.2  # of its size, the height of a line
GREY, PALE = "#555555", "#DDDDDD"
MARKS, SIGNS = {"all tokens": "o", "a step": "^"}, {"all tokens": "●", "a step": "▲"}
Ink = tuple[str, Any]  # a colour, and a style of line


class Mark(NamedTuple):
    """Something that has a name: where it stands, and in which colour."""

    name: str
    x: float
    y: float
    colour: str


@dataclass(frozen=True)
class Panel:
    """A pair of axes, how many inches they are wide and tall, `room` on their right, and the ink of every name."""

    axes: Axes
    inches: tuple[float, float]
    room: float
    inks: dict[str, Ink]

    def chart(self, chart: Chart) -> None:
        """Lines over lengths, with a dot at the one that was priced."""
        axes = self.axes
        axes.set_title(shortened(chart.title, int(0.8 * self._letters)))
        note = wrap(chart.note, self._letters, max_lines=2, placeholder=" …", break_on_hyphens=False)
        if not chart.lines:
            axes.set_axis_off()
            axes.text(0, 1, "\n".join(note), va="top", color=GREY, transform=axes.transAxes)
            return
        axes.set_xlabel("\n".join([f"tokens of a row, and dots at {chart.at:,}", *note]), loc="left")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for depth, line in enumerate(chart.lines):
            colour, style = self.inks[line.name]
            axes.plot(line.xs, line.ys, color=colour, linestyle=style, zorder=3 - depth / 100)
            if chart.at in line.xs:
                axes.plot(chart.at, line.ys[line.xs.index(chart.at)], "o", color=colour, markersize=2.5)
        axes.set_xlim(min(line.xs[0] for line in chart.lines), max(line.xs[-1] for line in chart.lines))
        self._heights([y for line in chart.lines for y in line.ys])
        axes.set_xticks(_lengths(*axes.get_xlim()), minor=False)
        self._words(lambda x: f"{x:,.0f}", _short)
        self._names([Mark(line.label, line.xs[-1], line.ys[-1], self.inks[line.name][0]) for line in chart.lines])

    def roof(self, roof: Roof) -> None:
        """Points below what the device can do at most."""
        axes, points = self.axes, roof.points
        axes.set_title(roof.title)
        calls = {
            call: [Mark(one.name, one.x, one.y, self.inks[one.name][0]) for one in points if one.call == call]
            for call in MARKS
        }
        signs = "  ".join(f"{SIGNS[call]} {call}" for call in MARKS if calls[call])
        axes.set_xlabel(f"FLOP for each byte moved\n{signs}", loc="left")
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = min([roof.ridge, *(one.x for one in points)]) / 3, max([roof.ridge, *(one.x for one in points)]) * 3
        axes.set_xlim(low, high)
        axes.set_ylim(min([low * roof.bandwidth, *(one.y for one in points)]) / 1.5, roof.peak * 3)
        axes.plot([low, roof.ridge, high], [low * roof.bandwidth, roof.peak, roof.peak], color=GREY, linewidth=1)
        for one in points:
            axes.plot(one.x, one.y, MARKS[one.call], color=self.inks[one.name][0], markersize=4, zorder=3)
        self._words(_short, _short)
        self._edges(roof)
        # Below the roof there is room, on the right of what waits for memory and of what reaches the top.
        places = {call: [self._place(mark) for mark in marks] for call, marks in calls.items()}
        self._names(calls["all tokens"], between=(0.0, max([0.0, *(y for _, y in places["all tokens"])])))
        self._names(
            calls["a step"], at=min(max([0.3, *(x for x, _ in places["a step"])]) + 0.1, 0.8), between=(0.03, 0.7)
        )

    def _edges(self, roof: Roof) -> None:
        """What the two sides of the roof are."""
        axes = self.axes
        left, low = axes.get_xlim()[0], axes.get_ylim()[0]
        start = max(left, low / roof.bandwidth)
        ends = [axes.transData.transform((x, x * roof.bandwidth)) for x in (start, roof.ridge)]
        slope = math.degrees(math.atan2(ends[1][1] - ends[0][1], ends[1][0] - ends[0][0]))
        said = {"color": GREY, "textcoords": "offset points", "size": SIZE - 0.5}
        middle = math.sqrt(start * roof.ridge)
        axes.annotate(
            f"{_short(roof.bandwidth)}B a second", (middle, middle * roof.bandwidth), (-4, 3), rotation=slope,
            rotation_mode="anchor", ha="center", **said,
        )  # fmt: skip
        axes.annotate(f"{_short(roof.peak)}FLOP a second", (axes.get_xlim()[1], roof.peak), (0, 3), ha="right", **said)

    def _heights(self, ys: Sequence[float]) -> None:
        """Room below the lowest and above the highest, and ticks that are round numbers."""
        low, high = min(ys) / 1.3, max(ys) * 1.3
        steps = next(steps for most, steps in STEPS if high / low < most)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        self.axes.set_ylim(low, high)
        self.axes.set_yticks(
            [tick for power in powers for step in steps if low <= (tick := step * 10.0**power) <= high]
        )

    def _words(self, across: Callable[[float], str], up: Callable[[float], str]) -> None:
        """Numbers as people write them, and none but at the ticks."""
        from matplotlib.ticker import FuncFormatter, NullLocator

        for axis, words in ((self.axes.xaxis, across), (self.axes.yaxis, up)):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _, words=words: words(value)))

    def _names(self, marks: Sequence[Mark], at: float = 1.06, between: tuple[float, float] = (0.0, 1.0)) -> None:
        """A name for each, one below the other, with a thin line to what it names."""
        low, high = between
        wide, tall = self.inches
        fits = 72 * tall * (high - low) / LINE / max(len(marks), 1)
        size = max(min(SIZE, fits), LEAST)
        room = (1.05 - at) * wide if at < 1 else self.room - (at - 1) * wide - 0.05
        # Of those at one height the one on the left comes lowest: then no line crosses another.
        marks = sorted(marks, key=lambda mark: mark.x)
        heights = spread([round(self._place(mark)[1], 3) for mark in marks], LINE * size / 72 / tall, low, high)
        for mark, height in zip(marks, heights, strict=True):
            self.axes.annotate(
                shortened(mark.name, int(72 * room / size / LETTER)), (mark.x, mark.y), (at, height),
                textcoords="axes fraction", va="center", color=mark.colour, size=size, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": mark.colour, "linewidth": 0.4, "shrinkA": 1, "shrinkB": 0,
                            "relpos": (0, 0.5)},
            )  # fmt: skip

    def _place(self, mark: Mark) -> tuple[float, float]:
        """Where it stands, as shares of the axes."""
        shown = self.axes.transData.transform((mark.x, mark.y))
        x, y = self.axes.transAxes.inverted().transform(shown)
        return float(x), float(y)

    @property
    def _letters(self) -> int:
        """How many stand side by side below the axes."""
        return int(72 * (self.inches[0] + self.room) / SIZE / LETTER)


def _lengths(low: float, high: float) -> list[float]:
    """Powers of two, not too many."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return [2.0**power for power in range(first, last + 1, max(1, (last - first + 3) // 4))]


def _short(value: float) -> str:
    """A number in a few characters.

    >>> _short(2_000_000), _short(0.05), _short(4.8e12)
    ('2 M', '0.05', '4.8 T')
    """
    power = min(max(math.floor(math.log10(value) / 3), 0), len(UNITS) - 1) if value > 0 else 0
    return f"{value / 1000**power:.3g} {UNITS[power]}".rstrip()

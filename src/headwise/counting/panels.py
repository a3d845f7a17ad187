"""One panel of a drawing: lines or points, and a name for each at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from .charts import LineChart, RooflineChart
from .costs import UNIT_PREFIXES
from .labels import shorten_label, spread_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT_SIZE = 7.5  # points of text: 11 pixels where a drawing is 800 wide
MIN_LABEL_GAP = 4.0  # points of text where many names share a panel
LETTER_WIDTH = 0.56  # of its size, the width of most letters
TICK_STEPS = ((30, (1, 2, 5)), (3000, (1, 3)), (math.inf, (1,)))  # of ticks in a decade, by how much there is to show
LINE_HEIGHT = 1.2  # of its size, the height of a line
GREY, PALE = "#555555", "#DDDDDD"
MARKERS, MARKER_SIGNS = {"all tokens": "o", "a step": "^"}, {"all tokens": "●", "a step": "▲"}
LineStyle = tuple[str, Any]  # a colour, and a style of line


class LabelledPoint(NamedTuple):
    """Something that has a name: where it stands, and in which colour."""

    name: str
    x: float
    y: float
    colour: str


@dataclass(frozen=True)
class PlotPanel:
    """A pair of axes, how many inches they are wide and tall, `room` on their right, and the ink of every name."""

    axes: Axes
    inches: tuple[float, float]
    label_room: float
    line_styles: dict[str, LineStyle]

    def chart(self, chart: LineChart) -> None:
        """Lines over lengths, with a dot at the one that was priced."""
        axes = self.axes
        axes.set_title(shorten_label(chart.title, int(0.8 * self._letters_per_line)))
        note = wrap(chart.note, self._letters_per_line, max_lines=2, placeholder=" …", break_on_hyphens=False)
        if not chart.lines:
            axes.set_axis_off()
            axes.text(0, 1, "\n".join(note), va="top", color=GREY, transform=axes.transAxes)
            return
        axes.set_xlabel("\n".join([f"tokens of a row, and dots at {chart.marked_length:,}", *note]), loc="left")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for depth, line in enumerate(chart.lines):
            colour, style = self.line_styles[line.name]
            axes.plot(line.xs, line.ys, color=colour, linestyle=style, zorder=3 - depth / 100)
            if chart.marked_length in line.xs:
                axes.plot(chart.marked_length, line.ys[line.xs.index(chart.marked_length)], "o", color=colour, markersize=2.5)
        axes.set_xlim(min(line.xs[0] for line in chart.lines), max(line.xs[-1] for line in chart.lines))
        self._set_y_limits([y for line in chart.lines for y in line.ys])
        axes.set_xticks(_length_ticks(*axes.get_xlim()), minor=False)
        self._format_ticks(lambda x: f"{x:,.0f}", _format_tick)
        self._draw_labels([LabelledPoint(line.label, line.xs[-1], line.ys[-1], self.line_styles[line.name][0]) for line in chart.lines])

    def roof(self, roof: RooflineChart) -> None:
        """Points below what the device can do at most."""
        axes, points = self.axes, roof.points
        axes.set_title(roof.title)
        calls = {
            call: [LabelledPoint(one.name, one.x, one.y, self.line_styles[one.name][0]) for one in points if one.call == call]
            for call in MARKERS
        }
        signs = "  ".join(f"{MARKER_SIGNS[call]} {call}" for call in MARKERS if calls[call])
        axes.set_xlabel(f"FLOP for each byte moved\n{signs}", loc="left")
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = min([roof.ridge_point, *(one.x for one in points)]) / 3, max([roof.ridge_point, *(one.x for one in points)]) * 3
        axes.set_xlim(low, high)
        axes.set_ylim(min([low * roof.bandwidth, *(one.y for one in points)]) / 1.5, roof.peak_flops * 3)
        axes.plot([low, roof.ridge_point, high], [low * roof.bandwidth, roof.peak_flops, roof.peak_flops], color=GREY, linewidth=1)
        for one in points:
            axes.plot(one.x, one.y, MARKERS[one.call], color=self.line_styles[one.name][0], markersize=4, zorder=3)
        self._format_ticks(_format_tick, _format_tick)
        self._label_roof_edges(roof)
        # Below the roof there is room, on the right of what waits for memory and of what reaches the top.
        places = {call: [self._axes_position(mark) for mark in marks] for call, marks in calls.items()}
        self._draw_labels(calls["all tokens"], between=(0.0, max([0.0, *(y for _, y in places["all tokens"])])))
        self._draw_labels(
            calls["a step"], at=min(max([0.3, *(x for x, _ in places["a step"])]) + 0.1, 0.8), between=(0.03, 0.7)
        )

    def _label_roof_edges(self, roof: RooflineChart) -> None:
        """What the two sides of the roof are."""
        axes = self.axes
        left, low = axes.get_xlim()[0], axes.get_ylim()[0]
        start = max(left, low / roof.bandwidth)
        ends = [axes.transData.transform((x, x * roof.bandwidth)) for x in (start, roof.ridge_point)]
        slope = math.degrees(math.atan2(ends[1][1] - ends[0][1], ends[1][0] - ends[0][0]))
        said = {"color": GREY, "textcoords": "offset points", "size": FONT_SIZE - 0.5}
        middle = math.sqrt(start * roof.ridge_point)
        axes.annotate(
            f"{_format_tick(roof.bandwidth)}B a second", (middle, middle * roof.bandwidth), (-4, 3), rotation=slope,
            rotation_mode="anchor", ha="center", **said,
        )  # fmt: skip
        axes.annotate(f"{_format_tick(roof.peak_flops)}FLOP a second", (axes.get_xlim()[1], roof.peak_flops), (0, 3), ha="right", **said)

    def _set_y_limits(self, ys: Sequence[float]) -> None:
        """Room below the lowest and above the highest, and ticks that are round numbers."""
        low, high = min(ys) / 1.3, max(ys) * 1.3
        steps = next(steps for most, steps in TICK_STEPS if high / low < most)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        self.axes.set_ylim(low, high)
        self.axes.set_yticks(
            [tick for power in powers for step in steps if low <= (tick := step * 10.0**power) <= high]
        )

    def _format_ticks(self, across: Callable[[float], str], up: Callable[[float], str]) -> None:
        """Numbers as people write them, and none but at the ticks."""
        from matplotlib.ticker import FuncFormatter, NullLocator

        for axis, words in ((self.axes.xaxis, across), (self.axes.yaxis, up)):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _, words=words: words(value)))

    def _draw_labels(self, marks: Sequence[LabelledPoint], at: float = 1.06, between: tuple[float, float] = (0.0, 1.0)) -> None:
        """A name for each, one below the other, with a thin line to what it names."""
        low, high = between
        wide, tall = self.inches
        fits = 72 * tall * (high - low) / LINE_HEIGHT / max(len(marks), 1)
        size = max(min(FONT_SIZE, fits), MIN_LABEL_GAP)
        room = (1.05 - at) * wide if at < 1 else self.label_room - (at - 1) * wide - 0.05
        # Of those at one height the one on the left comes lowest: then no line crosses another.
        marks = sorted(marks, key=lambda mark: mark.x)
        heights = spread_labels([round(self._axes_position(mark)[1], 3) for mark in marks], LINE_HEIGHT * size / 72 / tall, low, high)
        for mark, height in zip(marks, heights, strict=True):
            self.axes.annotate(
                shorten_label(mark.name, int(72 * room / size / LETTER_WIDTH)), (mark.x, mark.y), (at, height),
                textcoords="axes fraction", va="center", color=mark.colour, size=size, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": mark.colour, "linewidth": 0.4, "shrinkA": 1, "shrinkB": 0,
                            "relpos": (0, 0.5)},
            )  # fmt: skip

    def _axes_position(self, mark: LabelledPoint) -> tuple[float, float]:
        """Where it stands, as shares of the axes."""
        shown = self.axes.transData.transform((mark.x, mark.y))
        x, y = self.axes.transAxes.inverted().transform(shown)
        return float(x), float(y)

    @property
    def _letters_per_line(self) -> int:
        """How many stand side by side below the axes."""
        return int(72 * (self.inches[0] + self.label_room) / FONT_SIZE / LETTER_WIDTH)


def _length_ticks(low: float, high: float) -> list[float]:
    """Powers of two, not too many."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return [2.0**power for power in range(first, last + 1, max(1, (last - first + 3) // 4))]


def _format_tick(value: float) -> str:
    """A number in a few characters.

    >>> _format_tick(2_000_000), _format_tick(0.05), _format_tick(4.8e12)
    ('2 M', '0.05', '4.8 T')
    """
    power = min(max(math.floor(math.log10(value) / 3), 0), len(UNIT_PREFIXES) - 1) if value > 0 else 0
    return f"{value / 1000**power:.3g} {UNIT_PREFIXES[power]}".rstrip()

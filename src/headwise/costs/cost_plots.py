"""Charts of costs: roofline, KV cache, FLOPs and crossovers over the context length, drawn with
matplotlib.

`make_charts` computes the lines and points, `save_plot` draws them into a file. Also the estimates
as CSV (RFC 4180).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import SpecError, suggest
from ..files import write_atomically
from ..output_paths import FIGURE_FILE, FIGURE_METADATA, Existing, check_output
from .cost_report import UNIT_PREFIXES, CostEstimate
from .cost_vs_length import (
    CostByLength,
    Crossover,
    LengthCost,
    LengthRange,
    bisection_lengths,
    find_crossover,
)
from .roofline import Device

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHORTEST, LONGEST = 2**6, 2**17  # tokens; the x axis goes at least from SHORTEST to LONGEST
BEYOND = 4  # the x axis goes at least to this multiple of the workload's context


class Canvas(Protocol):
    """Something that can draw charts."""

    def chart(self, chart: LineChart) -> None:
        """Draw lines over lengths."""
        ...

    def roof(self, roof: RooflineChart) -> None:
        """Draw the points of a roofline chart."""
        ...


class ChartLine(NamedTuple):
    """One line over the context length, with a label at its end."""

    name: str
    label: str
    xs: tuple[int, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class LineChart:
    """Lines over the context length; `missing_names` are specs without a line, because they are not
    causal.

    `marked_length` is the context of the workload, at which each line has a dot.
    """

    title: str
    marked_length: int
    lines: tuple[ChartLine, ...]
    missing_names: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """A sentence about specs without a line."""
        return (
            f"not shown, because not causal: {', '.join(self.missing_names)}"
            if self.missing_names
            else ""
        )

    def draw_on(self, canvas: Canvas) -> None:
        """Draw the chart on a canvas."""
        canvas.chart(self)


class RooflinePoint(NamedTuple):
    """One phase of one spec: x is FLOPs per byte, y is FLOPs per second."""

    name: str
    call: str
    x: float
    y: float


@dataclass(frozen=True)
class RooflineChart:
    """The roofline of a device, and one point for each spec and phase."""

    title: str
    peak_flops: float
    bandwidth: float
    points: tuple[RooflinePoint, ...]

    @property
    def ridge_point(self) -> float:
        """FLOPs per byte above which the device is compute-bound."""
        return self.peak_flops / self.bandwidth

    def draw_on(self, canvas: Canvas) -> None:
        """Draw the chart on a canvas."""
        canvas.roof(self)


def make_charts(
    estimates: Mapping[str, CostEstimate], kind: str = "all"
) -> list[LineChart | RooflineChart]:
    """Compute one kind of chart, or all four: roofline, kv, flops, crossovers.

    >>> import headwise as hw
    >>> costs = hw.cost({"gqa": hw.design(preset="gqa"), "linear": hw.design(preset="linear")})
    >>> [
    ...     line.label
    ...     for line in make_charts({cost.name: cost for cost in costs}, "crossovers")[0].lines
    ... ]
    ['gqa', 'linear from 2,057']
    """
    if kind not in (*CHART_KINDS, "all"):
        raise SpecError(
            f"there is no kind of plot {kind!r}; {suggest(kind, [*CHART_KINDS, 'all'])}"
        )
    if kind == "crossovers" and len(estimates) < 2:
        raise SpecError(
            f"cannot find crossovers of {', '.join(estimates)}: it takes two specs; draw two or "
            "more"
        )
    if kind == "kv" and all(estimate.decode_flops is None for estimate in estimates.values()):
        fact = f"cannot draw a KV cache: none of {', '.join(estimates)} is causal"
        raise SpecError(f"{fact}; give them pattern='causal()', or draw another kind")
    workload = next(iter(estimates.values())).workload
    specs = {name: estimate.spec_or_model for name, estimate in estimates.items()}
    builder = _ChartBuilder(estimates, CostByLength(specs, workload))
    possible = [name for name in CHART_KINDS if len(estimates) > 1 or name != "crossovers"]
    return [CHART_KINDS[name](builder) for name in (possible if kind == "all" else [kind])]


@dataclass(frozen=True)
class _ChartBuilder:
    """Computes charts from the estimates of a workload and the costs at other lengths."""

    estimates: Mapping[str, CostEstimate]
    costs: CostByLength

    def roofline(self) -> RooflineChart:
        """Both phases of every spec below the roofline of the device."""
        workload = self.costs.workload
        device = Device.from_name(workload.device)
        points: list[RooflinePoint] = []
        for name, estimate in self.estimates.items():
            for phase in estimate.operations:
                total = estimate.total_operation(phase)
                if total.flops:
                    points.append(
                        RooflinePoint(name, phase, total.intensity, total.flops / total.seconds)
                    )
        return RooflineChart(
            "Roofline, FLOP/s", device.flops[workload.dtype], device.bandwidth, tuple(points)
        )

    def cache(self) -> LineChart:
        """Bytes of the KV cache."""
        return self._chart(
            f"KV cache of {self._rows}, bytes", lambda sample, tokens: sample.cache_bytes
        )

    def flops_per_token(self) -> LineChart:
        """Required FLOPs of prefill, per token."""
        rows = self.costs.workload.batch
        return self._chart(
            "Prefill, FLOPs per token", lambda sample, tokens: sample.prefill_flops / tokens / rows
        )

    def relative_seconds(self) -> LineChart:
        """Time relative to the first spec: of a decode step if the first has
        one, else of prefill.
        """
        first = next(iter(self.estimates))
        quantity = (
            "prefill_seconds" if self.estimates[first].decode_flops is None else "step_seconds"
        )

        def ratio(sample: LengthCost, tokens: int) -> float | None:
            seconds, baseline = (
                getattr(sample, quantity),
                getattr(self.costs.at(first, tokens), quantity),
            )
            return None if seconds is None else seconds / baseline

        def label(name: str) -> str:
            return _crossover_label(
                find_crossover(self.costs, name, first, quantity, self._max_length)
            )

        title = (
            f"Time of {'a decode step' if quantity == 'step_seconds' else 'prefill'}, {first} = 1"
        )
        return self._chart(title, ratio, label)

    @property
    def _rows(self) -> str:
        rows = self.costs.workload.batch
        return "one row" if rows == 1 else f"{rows:,} rows"

    @property
    def _max_length(self) -> int:
        return max(LONGEST, 2 ** math.ceil(math.log2(BEYOND * self.costs.workload.context)))

    def _chart(
        self,
        title: str,
        cost: Callable[[LengthCost, int], float | None],
        label: Callable[[str], str] = str,
    ) -> LineChart:
        lines: list[ChartLine] = []
        for name in self.estimates:
            max_length = min(self._max_length, self.costs.max_length(name))
            sampled = bisection_lengths(min(SHORTEST, max_length), max_length)
            lengths = sorted({*sampled, min(self.costs.workload.context, max_length)})
            costs = [cost(self.costs.at(name, tokens), tokens) for tokens in lengths]
            ys = tuple(cost for cost in costs if cost is not None)
            if len(ys) == len(lengths):
                lines.append(ChartLine(name, label(name), tuple(lengths), ys))
        line_names = {line.name for line in lines}
        missing_names = tuple(name for name in self.estimates if name not in line_names)
        return LineChart(title, self.costs.workload.context, tuple(lines), missing_names)


CHART_KINDS: dict[str, Callable[[_ChartBuilder], LineChart | RooflineChart]] = {
    "roofline": _ChartBuilder.roofline,
    "kv": _ChartBuilder.cache,
    "flops": _ChartBuilder.flops_per_token,
    "crossovers": _ChartBuilder.relative_seconds,
}


def _crossover_label(crossover: Crossover) -> str:
    """The name of a spec, with the length from which it is cheaper if there is one such length."""
    match crossover.ranges:
        case (LengthRange(first, None),) if first > 1:
            return f"{crossover.name} from {first:,}"
        case _:
            return crossover.name


# --- Placing labels without overlap ---------------------------------------------------------------


def spread_labels(
    targets: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0
) -> list[float]:
    """Move positions apart by at least `gap`, within bounds, with the least sum of squared
    distances to `targets`.

    If the bounds are too narrow for the gap, the gap is reduced.

    >>> spread_labels([0.5, 0.5, 0.9], gap=0.2)
    [0.4, 0.6, 0.9]
    >>> spread_labels([1.0, 0.0, 1.0], gap=0.25)
    [0.75, 0.0, 1.0]
    """
    order = sorted(range(len(targets)), key=lambda n: targets[n])
    gap = min(gap, (high - low) / max(len(targets) - 1, 1))
    blocks: list[tuple[float, int]] = []  # sum and number of neighbours that touch each other
    for rank, n in enumerate(order):
        total, count = targets[n] - rank * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            previous_total, previous_count = blocks.pop()
            total, count = total + previous_total, count + previous_count
        blocks.append((total, count))
    max_start = high - (len(targets) - 1) * gap
    starts = [
        min(max(total / count, low), max_start) for total, count in blocks for _ in range(count)
    ]
    positions = {
        n: start + rank * gap for rank, (n, start) in enumerate(zip(order, starts, strict=True))
    }
    return [round(positions[n], 9) for n in range(len(targets))]


def shorten_label(name: str, max_length: int) -> str:
    """Shorten a name to `max_length` characters by leaving out its middle, because names differ at
    their ends.

    >>> shorten_label("llama-3-8b-instruct-q4", 12)
    'llama-…ct-q4'
    """
    half = max_length // 2
    return (
        name
        if len(name) <= max_length
        else f"{name[:half]}…{name[len(name) - (max_length - half - 1) :]}"
    )


# --- Drawing one panel ----------------------------------------------------------------------------

FONT_SIZE = 7.5  # points; 11 pixels in a figure 800 pixels wide
MIN_LABEL_GAP = 4.0  # smallest font size, in points, if many labels share a panel
LETTER_WIDTH = 0.56  # width of most letters, relative to the font size
LINE_HEIGHT = 1.2  # relative to the font size
TICK_STEPS = (
    (30, (1, 2, 5)),
    (3000, (1, 3)),
    (math.inf, (1,)),
)  # ticks per decade if max / min of y is less than this
GREY, PALE = "#555555", "#DDDDDD"
MARKERS, MARKER_SIGNS = {"prefill": "o", "decode": "^"}, {"prefill": "●", "decode": "▲"}
LineStyle = tuple[str, Any]  # colour and dashes


class LabelledPoint(NamedTuple):
    """A point with its label and colour."""

    name: str
    x: float
    y: float
    colour: str


@dataclass(frozen=True)
class PlotPanel:
    """The axes of one chart, their width and height in inches, the room for labels, and the line
    style of each name.
    """

    axes: Axes
    inches: tuple[float, float]
    label_room: float
    line_styles: dict[str, LineStyle]

    def chart(self, chart: LineChart) -> None:
        """Draw the lines, with a dot at the context of the workload."""
        axes = self.axes
        axes.set_title(shorten_label(chart.title, int(0.8 * self._letters_per_line)))
        note = wrap(
            chart.note,
            self._letters_per_line,
            max_lines=2,
            placeholder=" …",
            break_on_hyphens=False,
        )
        if not chart.lines:
            axes.set_axis_off()
            axes.text(0, 1, "\n".join(note), va="top", color=GREY, transform=axes.transAxes)
            return
        axes.set_xlabel(
            "\n".join([f"tokens per row, dots at {chart.marked_length:,}", *note]), loc="left"
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for depth, line in enumerate(chart.lines):
            colour, style = self.line_styles[line.name]
            axes.plot(line.xs, line.ys, color=colour, linestyle=style, zorder=3 - depth / 100)
            if chart.marked_length in line.xs:
                marked_y = line.ys[line.xs.index(chart.marked_length)]
                axes.plot(chart.marked_length, marked_y, "o", color=colour, markersize=2.5)
        axes.set_xlim(
            min(line.xs[0] for line in chart.lines), max(line.xs[-1] for line in chart.lines)
        )
        self._set_y_limits([y for line in chart.lines for y in line.ys])
        axes.set_xticks(_length_ticks(*axes.get_xlim()), minor=False)
        self._format_ticks(lambda x: f"{x:,.0f}", _format_tick)
        self._draw_labels(
            [
                LabelledPoint(line.label, line.xs[-1], line.ys[-1], self.line_styles[line.name][0])
                for line in chart.lines
            ]
        )

    def roof(self, roof: RooflineChart) -> None:
        """Draw the roofline of the device and the points below it."""
        axes, points = self.axes, roof.points
        axes.set_title(roof.title)
        by_call = {
            call: [
                LabelledPoint(point.name, point.x, point.y, self.line_styles[point.name][0])
                for point in points
                if point.call == call
            ]
            for call in MARKERS
        }
        legend = "  ".join(f"{MARKER_SIGNS[call]} {call}" for call in MARKERS if by_call[call])
        axes.set_xlabel(f"FLOPs per byte moved\n{legend}", loc="left")
        axes.set_xscale("log")
        axes.set_yscale("log")
        xs = [roof.ridge_point, *(point.x for point in points)]
        low, high = min(xs) / 3, max(xs) * 3
        axes.set_xlim(low, high)
        axes.set_ylim(
            min([low * roof.bandwidth, *(point.y for point in points)]) / 1.5, roof.peak_flops * 3
        )
        axes.plot(
            [low, roof.ridge_point, high],
            [low * roof.bandwidth, roof.peak_flops, roof.peak_flops],
            color=GREY,
            linewidth=1,
        )
        for point in points:
            colour = self.line_styles[point.name][0]
            axes.plot(point.x, point.y, MARKERS[point.call], color=colour, markersize=4, zorder=3)
        self._format_ticks(_format_tick, _format_tick)
        self._label_roof_edges(roof)
        # Labels of prefill stand right of the axes, not above the highest point; those of decode
        # stand below the roof, right of the rightmost decode point.
        prefill_ys = [self._axes_position(point)[1] for point in by_call["prefill"]]
        decode_xs = [self._axes_position(point)[0] for point in by_call["decode"]]
        self._draw_labels(by_call["prefill"], between=(0.0, max([0.0, *prefill_ys])))
        self._draw_labels(
            by_call["decode"], at=min(max([0.3, *decode_xs]) + 0.1, 0.8), between=(0.03, 0.7)
        )

    def _label_roof_edges(self, roof: RooflineChart) -> None:
        """Label the two edges of the roof with bandwidth and peak FLOP/s."""
        axes = self.axes
        left, low = axes.get_xlim()[0], axes.get_ylim()[0]
        start = max(left, low / roof.bandwidth)
        ends = [
            axes.transData.transform((x, x * roof.bandwidth)) for x in (start, roof.ridge_point)
        ]
        slope = math.degrees(math.atan2(ends[1][1] - ends[0][1], ends[1][0] - ends[0][0]))
        style = {"color": GREY, "textcoords": "offset points", "size": FONT_SIZE - 0.5}
        middle = math.sqrt(start * roof.ridge_point)
        axes.annotate(
            f"{_format_tick(roof.bandwidth)}B/s",
            (middle, middle * roof.bandwidth),
            (-4, 3),
            rotation=slope,
            rotation_mode="anchor",
            ha="center",
            **style,
        )
        axes.annotate(
            f"{_format_tick(roof.peak_flops)}FLOP/s",
            (axes.get_xlim()[1], roof.peak_flops),
            (0, 3),
            ha="right",
            **style,
        )

    def _set_y_limits(self, ys: Sequence[float]) -> None:
        """Set limits with some room below and above, and ticks at round numbers."""
        low, high = min(ys) / 1.3, max(ys) * 1.3
        steps = next(steps for max_ratio, steps in TICK_STEPS if high / low < max_ratio)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        ticks = [step * 10.0**power for power in powers for step in steps]
        self.axes.set_ylim(low, high)
        self.axes.set_yticks([tick for tick in ticks if low <= tick <= high])

    def _format_ticks(
        self, format_x: Callable[[float], str], format_y: Callable[[float], str]
    ) -> None:
        """Set the formats of the tick labels, and remove minor ticks."""
        from matplotlib.ticker import FuncFormatter, NullLocator

        for axis, format_value in ((self.axes.xaxis, format_x), (self.axes.yaxis, format_y)):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(
                FuncFormatter(lambda value, _, format_value=format_value: format_value(value))
            )

    def _draw_labels(
        self,
        points: Sequence[LabelledPoint],
        at: float = 1.06,
        between: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """Draw the labels below each other at x = `at` (a fraction of the axes), with a thin line
        to each point.
        """
        low, high = between
        width, height = self.inches
        largest_size = 72 * height * (high - low) / LINE_HEIGHT / max(len(points), 1)
        size = max(min(FONT_SIZE, largest_size), MIN_LABEL_GAP)
        room = (1.05 - at) * width if at < 1 else self.label_room - (at - 1) * width - 0.05
        # Of points at one height, the leftmost gets the lowest label, so that no line crosses
        # another.
        points = sorted(points, key=lambda point: point.x)
        label_ys = spread_labels(
            [round(self._axes_position(point)[1], 3) for point in points],
            LINE_HEIGHT * size / 72 / height,
            low,
            high,
        )
        for point, label_y in zip(points, label_ys, strict=True):
            self.axes.annotate(
                shorten_label(point.name, int(72 * room / size / LETTER_WIDTH)),
                (point.x, point.y),
                (at, label_y),
                textcoords="axes fraction",
                va="center",
                color=point.colour,
                size=size,
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": point.colour,
                    "linewidth": 0.4,
                    "shrinkA": 1,
                    "shrinkB": 0,
                    "relpos": (0, 0.5),
                },
            )

    def _axes_position(self, point: LabelledPoint) -> tuple[float, float]:
        """Position of a point as fractions of the axes."""
        pixels = self.axes.transData.transform((point.x, point.y))
        x, y = self.axes.transAxes.inverted().transform(pixels)
        return float(x), float(y)

    @property
    def _letters_per_line(self) -> int:
        """Number of letters that fit into a line below the axes."""
        return int(72 * (self.inches[0] + self.label_room) / FONT_SIZE / LETTER_WIDTH)


def _length_ticks(low: float, high: float) -> list[float]:
    """About five powers of two between two lengths."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return [2.0**power for power in range(first, last + 1, max(1, (last - first + 3) // 4))]


def _format_tick(value: float) -> str:
    """Format a number with up to three significant digits and a unit prefix.

    >>> _format_tick(2_000_000), _format_tick(0.05), _format_tick(4.8e12)
    ('2 M', '0.05', '4.8 T')
    """
    power = (
        min(max(math.floor(math.log10(value) / 3), 0), len(UNIT_PREFIXES) - 1) if value > 0 else 0
    )
    return f"{value / 1000**power:.3g} {UNIT_PREFIXES[power]}".rstrip()


# --- Drawing into a file --------------------------------------------------------------------------

SAVE_OPTIONS: dict[str, dict[str, Any]] = {".svg": {}, ".pdf": {}, ".png": {"dpi": 200}}
# Okabe and Ito's colours without yellow and sky blue, some of them darker, so that labels are
# readable on white.
LINE_COLOURS = ("#0072B2", "#D55E00", "#007A5A", "#A8458A", "#A87400", "#333333")
LINE_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))  # for more lines than colours
# Inches.
FIGURE_WIDTH, PANEL_HEIGHT, TITLE_HEIGHT = 8.0, 3.3, 0.4
LEFT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 0.5, 0.25, 0.65  # of a panel
OUTER_MARGIN = 0.12  # of the figure
LABEL_ROOM = {1: 1.8, 2: 1.4}  # for labels on the right of a panel, by number of panels per row
MATPLOTLIB_STYLE: Any = {
    "font.size": FONT_SIZE,
    "font.family": "DejaVu Sans",
    "axes.titlesize": FONT_SIZE + 1,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": PALE,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "text.parse_math": False,
    "svg.hashsalt": "headwise",
    "svg.fonttype": "path",
}


def save_plot(
    estimates: Mapping[str, CostEstimate],
    path: Path | str,
    kind: str = "all",
    *,
    overwrite: bool = False,
) -> None:
    """Draw one kind of chart, or all four, into an SVG, PNG or PDF file; see `make_charts`.

    `overwrite` replaces an earlier figure; anything else at this path is refused.

    >>> import tempfile, headwise as hw
    >>> costs = {cost.name: cost for cost in hw.cost(hw.design(preset="gqa"))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plot(costs, f"{folder}/gqa.svg", "kv")
    ...     Path(folder, "gqa.svg").read_text()[:5]
    '<?xml'
    """
    options = check_plot_path(path, "overwrite" if overwrite else "refuse")
    charts = make_charts(estimates, kind)
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # without the user's settings, so that equal costs give equal files
        matplotlib.rcParams.update(MATPLOTLIB_STYLE)
        buffer = io.BytesIO()
        make_figure(estimates, charts).savefig(buffer, format=Path(path).suffix[1:], **options)
    write_atomically(path, buffer.getvalue())


def make_figure(
    estimates: Mapping[str, CostEstimate], charts: Sequence[LineChart | RooflineChart]
) -> Figure:
    """Draw charts into the panels of a figure, two per row."""
    from matplotlib.figure import Figure

    num_columns = min(len(charts), 2)
    num_rows = -(-len(charts) // num_columns)
    panel_height = PANEL_HEIGHT if num_columns == 2 else 1.4 * PANEL_HEIGHT
    figure = Figure(figsize=(FIGURE_WIDTH, TITLE_HEIGHT + num_rows * panel_height))
    workload = next(iter(estimates.values())).workload
    rows = "one row" if workload.batch == 1 else f"{workload.batch:,} rows"
    title = (
        f"{rows} of {workload.context:,} tokens, {workload.dtype}, "
        f"{Device.from_name(workload.device).description}"
    )
    figure.text(
        OUTER_MARGIN / FIGURE_WIDTH,
        1 - OUTER_MARGIN / figure.get_figheight(),
        title,
        va="top",
        color=GREY,
    )
    styles = [(colour, dashes) for dashes in LINE_DASHES for colour in LINE_COLOURS]
    line_styles = {name: styles[n % len(styles)] for n, name in enumerate(estimates)}
    for n, chart in enumerate(charts):
        chart.draw_on(_add_panel(figure, n, (num_columns, num_rows), line_styles))
    return figure


def check_plot_path(path: Path | str, existing: Existing = "refuse") -> dict[str, Any]:
    """Return the options of `savefig` for a file; raise an error for unsupported formats and
    unwritable paths.

    >>> check_plot_path("costs.jpg")
    Traceback (most recent call last):
    headwise.errors.SpecError: cannot draw into costs.jpg: '.jpg' is not supported; use .svg, .png or .pdf
    """
    suffix = Path(path).suffix
    if suffix not in SAVE_OPTIONS:
        raise SpecError(
            f"cannot draw into {path}: {suffix!r} is not supported; use .svg, .png or .pdf"
        )
    check_output(path, FIGURE_FILE, existing)
    return {**SAVE_OPTIONS[suffix], "metadata": FIGURE_METADATA[suffix]}


def _add_panel(
    figure: Figure, n: int, grid: tuple[int, int], line_styles: dict[str, LineStyle]
) -> PlotPanel:
    """Add panel n of a grid of (columns, rows), with room for tick labels on the left and labels on
    the right.
    """
    num_columns, num_rows = grid
    width, height = figure.get_figwidth(), figure.get_figheight()
    cell_width, cell_height = width / num_columns, (height - TITLE_HEIGHT) / num_rows
    x = n % num_columns * cell_width + LEFT_MARGIN
    y = height - TITLE_HEIGHT - (n // num_columns + 1) * cell_height + BOTTOM_MARGIN
    inches = (
        cell_width - LEFT_MARGIN - LABEL_ROOM[num_columns],
        cell_height - TOP_MARGIN - BOTTOM_MARGIN,
    )
    axes = figure.add_axes((x / width, y / height, inches[0] / width, inches[1] / height))
    return PlotPanel(axes, inches, LABEL_ROOM[num_columns], line_styles)


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows of plain values as CSV (RFC 4180), with one column for each scalar value.

    Values of nested mappings get dotted names; lists are left out; a missing value is an empty
    field.

    >>> to_csv(
    ...     [
    ...         {"name": "a, b", "flops": {"prefill": 2**70}, "terms": []},
    ...         {"name": "c", "bound": None},
    ...     ]
    ... ).split("\\r\\n")
    ['name,flops.prefill,bound', '"a, b",1180591620717411303424,', 'c,,', '']
    """
    flat = [dict(_flatten_values("", row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _flatten_values(prefix: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten_values(f"{prefix}{key}.", value)
        elif not isinstance(value, list | tuple):
            yield prefix + key, value

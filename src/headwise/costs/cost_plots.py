"""What a drawing of costs shows, as numbers: lines over lengths, and points under a roof."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import SpecError, suggest
from ..files import write_atomically
from .cost_report import UNIT_PREFIXES, CostEstimate
from .cost_vs_length import CostByLength, Crossover, LengthCost, LengthRange, bisection_lengths, find_crossover
from .roofline import Device

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        raise SpecError(f"cannot find crossovers of {', '.join(estimates)}: it takes two specs; draw two or more")
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
        steps = [
            (name, calls[phase], one.total_operation(phase))
            for name, one in self.estimates.items()
            for phase in one.operations
        ]
        points = (
            RooflinePoint(name, call, one.intensity, one.flops / one.seconds) for name, call, one in steps if one.flops
        )
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
        return self._chart(
            title,
            share,
            lambda name: _crossover_label(find_crossover(self.costs, name, first, quantity, self._farthest)),
        )

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
            lengths = sorted(
                {*bisection_lengths(min(SHORTEST, farthest), farthest), min(self.costs.workload.context, farthest)}
            )
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


# --- Where names stand beside what they name, so that none covers another ------------------------------


def spread_labels(wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Places at least a gap apart, between two bounds, whose squared distances to the wanted ones are least together.

    Where there is no room for the gap, they share what there is.

    >>> spread_labels([0.5, 0.5, 0.9], gap=0.2)
    [0.4, 0.6, 0.9]
    >>> spread_labels([1.0, 0.0, 1.0], gap=0.25)
    [0.75, 0.0, 1.0]
    """
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    blocks: list[tuple[float, int]] = []  # the sum, and the number, of those that have to stand together
    for place, n in enumerate(order):
        total, count = wanted[n] - place * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, more = blocks.pop()
            total, count = total + before, count + more
        blocks.append((total, count))
    most = high - (len(wanted) - 1) * gap
    starts = [min(max(total / count, low), most) for total, count in blocks for _ in range(count)]
    places = {n: start + place * gap for place, (n, start) in enumerate(zip(order, starts, strict=True))}
    return [round(places[n], 9) for n in range(len(wanted))]


def shorten_label(name: str, most: int) -> str:
    """A name in so many characters: what stands in its middle is left out, for names differ at their ends.

    >>> shorten_label("llama-3-8b-instruct-q4", 12)
    'llama-…ct-q4'
    """
    half = most // 2
    return name if len(name) <= most else f"{name[:half]}…{name[len(name) - (most - half - 1) :]}"


# --- One panel of a drawing ----------------------------------------------------------------------------

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
                axes.plot(
                    chart.marked_length, line.ys[line.xs.index(chart.marked_length)], "o", color=colour, markersize=2.5
                )
        axes.set_xlim(min(line.xs[0] for line in chart.lines), max(line.xs[-1] for line in chart.lines))
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
        """Points below what the device can do at most."""
        axes, points = self.axes, roof.points
        axes.set_title(roof.title)
        calls = {
            call: [
                LabelledPoint(one.name, one.x, one.y, self.line_styles[one.name][0])
                for one in points
                if one.call == call
            ]
            for call in MARKERS
        }
        signs = "  ".join(f"{MARKER_SIGNS[call]} {call}" for call in MARKERS if calls[call])
        axes.set_xlabel(f"FLOP for each byte moved\n{signs}", loc="left")
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = (
            min([roof.ridge_point, *(one.x for one in points)]) / 3,
            max([roof.ridge_point, *(one.x for one in points)]) * 3,
        )
        axes.set_xlim(low, high)
        axes.set_ylim(min([low * roof.bandwidth, *(one.y for one in points)]) / 1.5, roof.peak_flops * 3)
        axes.plot(
            [low, roof.ridge_point, high],
            [low * roof.bandwidth, roof.peak_flops, roof.peak_flops],
            color=GREY,
            linewidth=1,
        )
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
            f"{_format_tick(roof.bandwidth)}B a second",
            (middle, middle * roof.bandwidth),
            (-4, 3),
            rotation=slope,
            rotation_mode="anchor",
            ha="center",
            **said,
        )
        axes.annotate(
            f"{_format_tick(roof.peak_flops)}FLOP a second",
            (axes.get_xlim()[1], roof.peak_flops),
            (0, 3),
            ha="right",
            **said,
        )

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

    def _draw_labels(
        self, marks: Sequence[LabelledPoint], at: float = 1.06, between: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        """A name for each, one below the other, with a thin line to what it names."""
        low, high = between
        wide, tall = self.inches
        fits = 72 * tall * (high - low) / LINE_HEIGHT / max(len(marks), 1)
        size = max(min(FONT_SIZE, fits), MIN_LABEL_GAP)
        room = (1.05 - at) * wide if at < 1 else self.label_room - (at - 1) * wide - 0.05
        # Of those at one height the one on the left comes lowest: then no line crosses another.
        marks = sorted(marks, key=lambda mark: mark.x)
        heights = spread_labels(
            [round(self._axes_position(mark)[1], 3) for mark in marks], LINE_HEIGHT * size / 72 / tall, low, high
        )
        for mark, height in zip(marks, heights, strict=True):
            self.axes.annotate(
                shorten_label(mark.name, int(72 * room / size / LETTER_WIDTH)),
                (mark.x, mark.y),
                (at, height),
                textcoords="axes fraction",
                va="center",
                color=mark.colour,
                size=size,
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": mark.colour,
                    "linewidth": 0.4,
                    "shrinkA": 1,
                    "shrinkB": 0,
                    "relpos": (0, 0.5),
                },
            )

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


# --- Costs drawn into a file ---------------------------------------------------------------------------

# What leaves no trace of when it was written, so that the same costs are the same file.
SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    ".svg": {"metadata": {"Date": None}},
    ".pdf": {"metadata": {"CreationDate": None, "ModDate": None}},
    ".png": {"dpi": 200},
}
# Okabe and Ito's colours without yellow and sky blue, some of them darker: names in them can be read on white.
LINE_COLOURS = ("#0072B2", "#D55E00", "#007A5A", "#A8458A", "#A87400", "#333333")
LINE_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))  # of lines in one colour
FIGURE_WIDTH, PANEL_HEIGHT, TITLE_HEIGHT = 8.0, 3.3, 0.4  # inches of a drawing, of one row of it, and above the first
LEFT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN, OUTER_MARGIN = (
    0.5,
    0.25,
    0.65,
    0.12,
)  # inches around a panel, and at the edges of the drawing
LABEL_ROOM = {1: 1.8, 2: 1.4}  # inches for names on the right of one panel, and of each of two
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


def save_plot(estimates: Mapping[str, CostEstimate], path: Path | str, kind: str = "all") -> None:
    """Draw a roofline, the cache, FLOPs and break-even over lengths, or one of them, into an SVG, PNG or PDF file.

    >>> import tempfile, headwise as hw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plot({one.name: one for one in hw.cost(hw.design(preset="gqa"))}, f"{folder}/gqa.svg", "kv")
    ...     Path(folder, "gqa.svg").read_text()[:5]
    '<?xml'
    """
    kept = check_plot_suffix(path)
    shown = make_charts(estimates, kind)
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are: the same costs are the same drawing
        matplotlib.rcParams.update(MATPLOTLIB_STYLE)
        written = io.BytesIO()
        make_figure(estimates, shown).savefig(written, format=Path(path).suffix[1:], **kept)
    write_atomically(path, written.getvalue())


def make_figure(estimates: Mapping[str, CostEstimate], charts: Sequence[LineChart | RooflineChart]) -> Figure:
    """The panels of a drawing, two beside each other."""
    from matplotlib.figure import Figure

    across = min(len(charts), 2)
    down = -(-len(charts) // across)
    made = Figure(figsize=(FIGURE_WIDTH, TITLE_HEIGHT + down * (PANEL_HEIGHT if across == 2 else 1.4 * PANEL_HEIGHT)))
    load = next(iter(estimates.values())).workload
    rows = "one row" if load.batch == 1 else f"{load.batch:,} rows"
    told = f"{rows} of {load.context:,} tokens, {load.dtype}, {Device.from_name(load.device).description}"
    made.text(OUTER_MARGIN / FIGURE_WIDTH, 1 - OUTER_MARGIN / made.get_figheight(), told, va="top", color=GREY)
    styles = [(colour, style) for style in LINE_DASHES for colour in LINE_COLOURS]
    inks = {name: styles[n % len(styles)] for n, name in enumerate(estimates)}
    for n, one in enumerate(charts):
        one.draw_on(_add_panel(made, n, (across, down), inks))
    return made


def check_plot_suffix(path: Path | str) -> dict[str, Any]:
    """How a drawing of this name is written; what cannot be is refused before anything is drawn.

    >>> check_plot_suffix("costs.jpg")
    Traceback (most recent call last):
    headwise.errors.SpecError: costs.jpg: no drawing is written as '.jpg'; give a name that ends in .svg, .png or .pdf
    """
    suffix = Path(path).suffix
    if suffix not in SAVE_OPTIONS:
        raise SpecError(f"{path}: no drawing is written as {suffix!r}; give a name that ends in .svg, .png or .pdf")
    return SAVE_OPTIONS[suffix]


def _add_panel(figure: Figure, n: int, grid: tuple[int, int], inks: dict[str, LineStyle]) -> PlotPanel:
    """One of so many across and down, with room for numbers on its left and names on its right."""
    across, down = grid
    wide, high = figure.get_figwidth(), figure.get_figheight()
    cell, row = wide / across, (high - TITLE_HEIGHT) / down
    x, y = n % across * cell + LEFT_MARGIN, high - TITLE_HEIGHT - (n // across + 1) * row + BOTTOM_MARGIN
    inches = cell - LEFT_MARGIN - LABEL_ROOM[across], row - TOP_MARGIN - BOTTOM_MARGIN
    axes = figure.add_axes((x / wide, y / high, inches[0] / wide, inches[1] / high))
    return PlotPanel(axes, inches, LABEL_ROOM[across], inks)

"""Report of a benchmark run: text for a terminal, a JSON document, and an SVG chart."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..costs.cost_plots import shorten_label
from ..escaping import escape_svg
from ..files import FolderLock, write_together
from ..head_analysis.head_figures import FIGURE_THEMES, FigureTheme
from .benchmark_case import LIMIT
from .session import HEADWISE, BenchmarkRow

TERMINAL_WIDTH = 80
NAME_WIDTH, NUMBER_WIDTH = 31, 11  # characters of the name column, and of each number column
REPORT_FILE, CHART_FILE = "bench.json", "bench.svg"
SPREAD_WIDTH = 10  # of the spread, or the interval of a ratio
VALUE_COLUMN = NAME_WIDTH + 2 * NUMBER_WIDTH + SPREAD_WIDTH  # first column of the targets
TIME_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))
VERDICT_LABELS = {True: "met", False: "missed", None: "no verdict"}


@dataclass(frozen=True)
class BenchmarkReport:
    """The machine, and one row per case, as plain values."""

    machine: dict[str, Any]
    rows: list[BenchmarkRow]

    @property
    def data(self) -> dict[str, Any]:
        """The report as one JSON-serialisable document."""
        return {"machine": self.machine, "rows": self.rows}

    @property
    def is_valid(self) -> bool:
        """Whether every case ran, and all implementations agreed."""
        return not any(row["differs"] or row["failed"] for row in self.rows)

    def write(self, folder: Path | str) -> None:
        """Write the JSON document and the chart to a folder; a failure leaves the earlier ones."""
        document = (json.dumps(self.data, indent=1) + "\n").encode()
        with FolderLock(folder):
            write_together(folder, {REPORT_FILE: document, CHART_FILE: render_chart(self.rows)})

    @staticmethod
    def read(path: Path | str) -> BenchmarkReport:
        """Read a report that `write` has written."""
        document = json.loads(Path(path).read_text())
        return BenchmarkReport(document["machine"], document["rows"])

    def __str__(self) -> str:
        lines, title = [*machine_heading(self.machine)], None
        for row in self.rows:
            if row["title"] != title:
                lines += ["", row["title"], "-" * min(TERMINAL_WIDTH, len(row["title"]))]
                title = row["title"]
            lines += ["", *row_lines(row)]
        return "\n".join([*lines, "", *format_summary(self.rows), *format_time_shares(self.rows)])


def machine_heading(machine: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the machine: processor, measured rates, versions, and warnings."""
    threads = machine["threads"]
    about = [f"{threads} thread{'s' if threads > 1 else ''}"]
    about += [machine["date"]] if "date" in machine else []  # both are missing in older files
    duration = f"; total time {format_duration(machine['took'])}" if "took" in machine else ""
    yield from wrap_lines(f"{machine['processor']}, {', '.join(about)}{duration}")
    rates = {name: rate / 1e9 for name, rate in machine.items() if name.endswith("_per_second")}
    yield from wrap_lines(
        f"reads {rates['read_bytes_per_second']:.1f} GB/s, copies "
        f"{rates['copy_bytes_per_second']:.1f}; products "
        f"{rates['fp32_flops_per_second']:.0f} GFLOP/s in fp32, "
        f"{rates['bf16_flops_per_second']:.0f} in bf16"
    )
    yield from wrap_lines(
        ", ".join(f"{name} {installed}" for name, installed in machine["versions"].items())
    )
    for line in machine.get("described", ()):  # missing in older files
        yield from wrap_lines(line)
    for label in machine_labels(machine):
        yield from wrap_lines(f"! {label}")


def machine_labels(machine: Mapping[str, Any]) -> list[str]:
    """Return everything unusual about a run."""
    labels = [*machine["labels"]]
    labels += ["quick: fewer samples, and some rows left out"] if machine["quick"] else []
    return labels + (["interrupted: some rows are missing"] if machine["interrupted"] else [])


class ReportLine(NamedTuple):
    """One line of a row: seconds per call, ratio to headwise (or share of the limit), spread, and
    targets.
    """

    name: str
    seconds: float
    ratio: str
    spread: str
    targets: Sequence[str] = ()

    def __str__(self) -> str:
        first, *wrapped = textwrap.wrap(self.name, NAME_WIDTH - 2)
        numbers = f"{format_seconds(self.seconds):>{NUMBER_WIDTH}}{self.ratio:>{NUMBER_WIDTH - 2}}"
        numbers += f"{self.spread:>{SPREAD_WIDTH}}"
        target, *further_targets = self.targets or [""]
        line = f"  {first:<{NAME_WIDTH - 2}}{numbers}  {target}".rstrip()
        return "\n".join(
            [
                line,
                *(f"    {part}" for part in wrapped),
                *(f"{'':{VALUE_COLUMN}}{target_line}" for target_line in further_targets),
            ]
        )


def row_lines(row: BenchmarkRow) -> Iterator[str]:
    """Yield the lines of one row: every implementation, then those that are missing or differ,
    notes and history.
    """
    yield from wrap_lines(row["name"])
    for line in row_seconds(row):
        yield str(line)
    for name, reason in row["absent"].items():
        yield from wrap_lines(f"{name}: {reason}", "  ")
    for name, difference in row["differs"].items():
        yield from wrap_lines(f"{name} gives a different result ({difference}): no verdict", "  ")
    if row["failed"]:
        yield from wrap_lines(f"ours failed: {row['failed']}", "  ")
    for target in row["aim"]:
        if target["why"]:
            yield from wrap_lines(
                f"no verdict on {format_target(target)} against {target['against']}: "
                f"{target['why']}",
                "  ",
            )
    for name, note in row["notes"].items():
        yield from wrap_lines(f"{name}: {note}", "  ")
    if row["tried"] and misses_target(row):
        yield from wrap_lines(f"tried: {row['tried']}", "  ")


def misses_target(row: Mapping[str, Any]) -> bool:
    """Whether a target is missed or has no verdict."""
    return any(target["met"] is not True for target in row["aim"])


def row_seconds(row: BenchmarkRow) -> Iterator[ReportLine]:
    """Yield the lines with times: headwise, every peer, and the limit."""
    if row["ours_s"] is None:
        return
    yield ReportLine(HEADWISE, row["ours_s"], "", format_share(row["spread"][HEADWISE]))
    for name, seconds in row["peers"].items():
        yield ReportLine(
            name,
            seconds,
            format_ratio(row["ratio"][name]),
            _format_interval(row.get("interval", {}).get(name))
            or format_share(row["spread"][name]),
            target_labels(row, name),
        )
    if limit := row["limit"]:
        name = f"limit ({limit['bottleneck']}-bound)"
        yield ReportLine(
            name,
            limit["seconds"],
            format_share(limit["share"]),
            _format_interval(limit.get("interval")) or format_share(limit["spread"]),
            target_labels(row, LIMIT),
        )


def target_labels(row: BenchmarkRow, against: str) -> list[str]:
    """Return the targets against one baseline, each with its verdict."""
    return [
        f"{format_target(target)}: {verdict_label(target)}"
        for target in row["aim"]
        if target["against"] == against
    ]


def verdict_label(target: Mapping[str, Any]) -> str:
    """Return the verdict in words; one whose interval contains the target is marked by a question
    mark.

    >>> (
    ...     verdict_label({"met": True, "certain": False}),
    ...     verdict_label({"met": False, "certain": True}),
    ... )
    ('met ?', 'missed')
    """
    unsure = target["met"] is not None and not target.get("certain", True)  # missing in older files
    return f"{VERDICT_LABELS[target['met']]}{' ?' if unsure else ''}"


def _format_interval(interval: Sequence[float] | None) -> str:
    """Format the interval of a ratio; "" for older files, which have none.

    >>> _format_interval([0.978, 1.04]), _format_interval([12.2, 14.1]), _format_interval(None)
    ('0.98-1.04', '12-14', '')
    """
    if interval is None:
        return ""
    places = 0 if interval[1] >= 10 else 2
    return "-".join(f"{value:.{places}f}" for value in interval)


def format_target(target: Mapping[str, Any]) -> str:
    """Format a target as a ratio, or as a share of the machine's limit."""
    return (
        format_share(target["times"])
        if target["against"] == LIMIT
        else format_ratio(target["times"])
    )


def format_summary(rows: list[BenchmarkRow]) -> Iterator[str]:
    """Yield the legend of the columns, and how many targets are met."""
    counts = {
        word: sum(target["met"] is verdict for row in rows for target in row["aim"])
        for verdict, word in VERDICT_LABELS.items()
    }
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.items())
    yield from wrap_lines(
        "Columns: median seconds per call; speedup of headwise (ours), or the share of the limit "
        "that it reaches, as "
        "the median over pairs of samples taken side by side; the 95 % interval of that median "
        "(for ours: the "
        "interquartile range over the median); target. A target with ? lies within the interval. "
        f"Targets: {verdicts}."
    )


def format_time_shares(rows: list[BenchmarkRow]) -> Iterator[str]:
    """Yield how long each kind of work took, longest first."""
    seconds_of_kind: dict[str, float] = {}
    for row in rows:
        seconds_of_kind[row["kind"]] = seconds_of_kind.get(row["kind"], 0.0) + sum(
            row.get("took", {}).values()
        )  # missing in older files
    shares = [
        f"{kind} {format_duration(seconds_of_kind[kind])}"
        for kind in sorted(seconds_of_kind, key=lambda kind: -seconds_of_kind[kind])
    ]
    if any(seconds_of_kind.values()):
        yield from wrap_lines(f"Time by kind: {', '.join(shares)}.")


def format_duration(seconds: float) -> str:
    """Format a duration in minutes and seconds.

    >>> format_duration(7.6), format_duration(391.2)
    ('8 s', '6 min 31 s')
    """
    minutes, seconds_left = divmod(round(seconds), 60)
    return f"{minutes} min {seconds_left} s" if minutes else f"{seconds_left} s"


def format_ratio(ratio: float) -> str:
    """Format a ratio with about three digits.

    >>> format_ratio(3.417), format_ratio(31.28), format_ratio(0.981), format_ratio(100)
    ('3.42 x', '31.3 x', '0.98 x', '100 x')
    """
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f} x"


def format_share(share: float) -> str:
    """Format a share in per cent.

    >>> format_share(0.917)
    '92 %'
    """
    return f"{share * 100:.0f} %"


def format_seconds(seconds: float) -> str:
    """Format seconds with about three digits, in s, ms or us.

    >>> format_seconds(0.0029134), format_seconds(12.5), format_seconds(8.2e-6)
    ('2.91 ms', '12.5 s', '8.2 us')
    """
    _, factor, unit = next(scale for scale in TIME_UNITS if seconds >= scale[0])
    value = seconds * factor
    places = 0 if value >= 100 else 1 if value >= 10 or unit == "us" else 2
    return f"{value:,.{places}f} {unit}"


def wrap_lines(text: str, indent: str = "") -> list[str]:
    """Wrap text to 80 columns; continuation lines are indented."""
    return textwrap.wrap(
        text, TERMINAL_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "
    ) or [""]


# --- Chart (SVG) ----------------------------------------------------------------------------------

CHART_WIDTH, CHART_MARGIN = 960, 20  # pixels
PLOT_LEFT, PLOT_RIGHT = 306, 714  # bars; names on their left, numbers on their right
NUMBER_X, TARGET_X = 774, 788  # right edge of numbers, left edge of targets
NAME_X = PLOT_LEFT - 8  # right edge of names
CHART_TOP, SECTION_GAP = 84, 20  # above the first section, and between sections
TITLE_HEIGHT, HEADING_HEIGHT, BAR_HEIGHT = (
    36,
    24,
    17,
)  # heights of section titles, row headings and bars
LABEL_LETTERS = 42, 90  # longest name, longest heading
MIN_RATIO, MAX_RATIO = 0.5, 2.0  # always within the scale
TICK_FACTORS = (0.5, 2.0)  # ticks besides powers of ten
CAPTION = (
    "Time relative to headwise: bars to the right of 1 are slower peers, bars to the left faster "
    "ones.",
    "An open bar is the machine's limit. A mark is a target; a dashed line leads to a missed one.",
)
EMPTY_MESSAGE = "Nothing to draw: no row has a peer or a limit."
CHART_TITLE = "headwise compared with others"
# The widest font first: text that fits in it fits in the others.
FONT_CSS = "font-family:'DejaVu Sans',Verdana,system-ui,sans-serif"
CHART_CSS = f"""\
text{{{FONT_CSS};font-size:11.5px}}.head{{font-size:16px;font-weight:700}}.title{{font-size:14px;font-weight:700}}
.row,.missed{{font-weight:700}}.scale{{font-size:10px}}.end{{text-anchor:end}}.middle{{text-anchor:middle}}
path{{fill:none}}.mark{{stroke-width:3}}.gap{{stroke-width:1.5;stroke-dasharray:3 2}}.one{{stroke-width:1.5}}
.grid{{stroke-opacity:.3}}.slower,.faster{{fill-opacity:.6}}.limit{{fill:none}}
"""
VERDICT_CLASSES = {
    True: "met",
    False: "missed",
    None: "open",
}  # CSS class of a target by its verdict


class TargetMark(NamedTuple):
    """A target on the chart: position, label, and whether it is met."""

    ratio: float
    label: str
    is_met: bool | None


class RatioBar(NamedTuple):
    """One line of the chart: a heading, or a bar from 1 to the time of a peer
    relative to headwise.
    """

    name: str
    ratio: float | None = None
    label: str = ""
    targets: tuple[TargetMark, ...] = ()
    is_limit: bool = False


class LogScale(NamedTuple):
    """Logarithmic x axis for ratios."""

    low: float
    high: float

    @staticmethod
    def from_bars(bars: Sequence[RatioBar]) -> LogScale:
        """Return the scale that contains every bar and every target."""
        ratios = [
            ratio
            for bar in bars
            for ratio in (bar.ratio, *(target.ratio for target in bar.targets))
            if ratio
        ]
        return LogScale(min(MIN_RATIO, *ratios) / 1.1, max(MAX_RATIO, *ratios) * 1.1)

    def position(self, ratio: float) -> float:
        """Return the x coordinate of a ratio.

        >>> LogScale(0.1, 10).position(1) == (PLOT_LEFT + PLOT_RIGHT) / 2
        True
        """
        share = math.log(ratio / self.low) / math.log(self.high / self.low)
        return round(PLOT_LEFT + share * (PLOT_RIGHT - PLOT_LEFT), 1)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten within the scale, and 0.5 and 2.

        >>> LogScale(0.04, 200).ticks
        [0.1, 0.5, 1.0, 2.0, 10.0, 100.0]
        """
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        return sorted(
            {
                *(10.0**n for n in powers),
                *(side for side in TICK_FACTORS if self.low < side < self.high),
            }
        )


def render_chart(rows: Sequence[BenchmarkRow]) -> bytes:
    """Return an SVG chart that follows the reader's light or dark theme; equal rows give equal
    bytes.
    """
    page = _SvgPage()
    for title in dict.fromkeys(row["title"] for row in rows):
        if sections := [bars for row in rows if row["title"] == title and (bars := row_bars(row))]:
            page.add_section(title, sections)
    return page.render()


def row_bars(row: BenchmarkRow) -> list[RatioBar]:
    """Return the bars of one row: a heading with the time of headwise, every
    peer, and the limit.
    """
    if row["ours_s"] is None or not (row["peers"] or row["limit"]):
        return []
    bars = [RatioBar(row["name"], None, f"{HEADWISE} {format_seconds(row['ours_s'])}")]
    bars += [
        RatioBar(name, ratio, format_ratio(ratio), _target_marks(row, name))
        for name, ratio in row["ratio"].items()
    ]
    if limit := row["limit"]:
        reached = limit["share"]
        bars.append(
            RatioBar(
                f"limit: {limit['bottleneck']}",
                reached,
                format_share(reached),
                _target_marks(row, LIMIT),
                is_limit=True,
            )
        )
    return bars


def _target_marks(row: BenchmarkRow, against: str) -> tuple[TargetMark, ...]:
    targets = [target for target in row["aim"] if target["against"] == against]
    return tuple(
        TargetMark(
            target["times"],
            f"{format_target(target)}: {VERDICT_LABELS[target['met']]}",
            target["met"],
        )
        for target in targets
    )


def _bar_height(bar: RatioBar) -> int:
    return BAR_HEIGHT * max(1, len(bar.targets))


@dataclass
class _SvgPage:
    """SVG elements, added from the top down; `y` is the top of the next one."""

    y: float = CHART_TOP
    elements: list[str] = field(default_factory=list)

    def add_section(self, title: str, rows: Sequence[Sequence[RatioBar]]) -> None:
        """Add one kind of work: title, scale, and rows."""
        scale = LogScale.from_bars([bar for lines in rows for bar in lines])
        self.add_text(CHART_MARGIN, self.y + 14, title, "title")
        self.add_path(f"M{CHART_MARGIN} {self.y + 21}H{CHART_WIDTH - CHART_MARGIN}", "rule")
        for tick in scale.ticks:
            self.add_text(scale.position(tick), self.y + 35, f"{tick:g}", "scale middle")
        self.y += TITLE_HEIGHT
        for head, *lines in rows:
            self._row(head, lines, scale)
        self.y += SECTION_GAP

    def _row(self, head: RatioBar, lines: Sequence[RatioBar], scale: LogScale) -> None:
        """Add a heading and its bars; grid lines cover the bars only."""
        self.add_text(
            CHART_MARGIN,
            self.y + HEADING_HEIGHT - 7,
            shorten_label(head.name, LABEL_LETTERS[1]),
            "row",
        )
        self.add_text(
            CHART_WIDTH - CHART_MARGIN, self.y + HEADING_HEIGHT - 7, head.label, "row end"
        )
        self.y += HEADING_HEIGHT
        ends = self.y + sum(map(_bar_height, lines))
        self.add_path(
            "".join(
                f"M{scale.position(tick):g} {self.y:g}V{ends:g}"
                for tick in scale.ticks
                if tick != 1
            ),
            "grid",
        )
        self.add_path(f"M{scale.position(1):g} {self.y:g}V{ends:g}", "one")
        for bar in lines:
            self._bar(bar, scale)

    def _bar(self, bar: RatioBar, scale: LogScale) -> None:
        assert bar.ratio is not None
        y_middle, x_one, x_end = (
            self.y + BAR_HEIGHT / 2,
            scale.position(1),
            scale.position(bar.ratio),
        )
        kind = "limit" if bar.is_limit else "slower" if bar.ratio >= 1 else "faster"
        self.add_text(NAME_X, y_middle + 4, shorten_label(bar.name, LABEL_LETTERS[0]), "end")
        geometry = (
            f'x="{min(x_end, x_one):g}" y="{y_middle - 5:g}" '
            f'width="{abs(x_end - x_one):.1f}" height="10"'
        )
        self.elements.append(f'<rect class="{kind}" {geometry}/>')
        self.add_text(NUMBER_X, y_middle + 4, bar.label, "end")
        for n, target in enumerate(bar.targets):
            x_target = scale.position(target.ratio)
            if target.is_met is False:
                self.add_path(f"M{x_end:g} {y_middle:g}H{x_target:g}", "gap missed")
            self.add_path(
                f"M{x_target:g} {y_middle - 7:g}v14", f"mark {VERDICT_CLASSES[target.is_met]}"
            )
            self.add_text(
                TARGET_X,
                y_middle + 4 + n * BAR_HEIGHT,
                target.label,
                VERDICT_CLASSES[target.is_met],
            )
        self.y += _bar_height(bar)

    def add_text(self, x: float, y: float, text: str, kind: str) -> None:
        """Add a text element."""
        self.elements.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape_svg(text)}</text>')

    def add_path(self, to: str, kind: str) -> None:
        """Add a path element."""
        self.elements.append(f'<path class="{kind}" d="{to}"/>')

    def render(self) -> bytes:
        """Return the SVG document."""
        caption = CAPTION if self.elements else (EMPTY_MESSAGE,)
        height = round(self.y)
        header = _SvgPage()
        header.add_text(CHART_MARGIN, 32, CHART_TITLE, "head")
        for n, line in enumerate(caption):
            header.add_text(CHART_MARGIN, 52 + n * BAR_HEIGHT, line, "")
        light, dark = (_colour_css(FIGURE_THEMES[name]) for name in ("light", "dark"))
        size = f'viewBox="0 0 {CHART_WIDTH} {height}" width="{CHART_WIDTH}" height="{height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{CHART_TITLE}</title>",
                f"<style>{CHART_CSS}{light}\n@media (prefers-color-scheme:dark){{{dark}}}</style>",
                f'<rect class="paper" width="{CHART_WIDTH}" height="{height}"/>',
                *header.elements,
                *self.elements,
                "</svg>\n",
            ]
        ).encode()


def _colour_css(theme: FigureTheme) -> str:
    """Return the colour rules of a theme: one colour for slower peers and met targets, one for the
    opposite.
    """
    ours, theirs = theme.pair_colours
    return (
        f".paper{{fill:{theme.background}}}text{{fill:{theme.foreground}}}.scale,.open{{fill:{theme.muted}}}"
        f".rule,.grid,.open,.limit{{stroke:{theme.muted}}}text.open{{stroke:none}}.one{{stroke:{ours}}}"
        f".slower{{fill:{ours}}}.faster{{fill:{theirs}}}"
        f"path.met{{stroke:{ours}}}path.missed{{stroke:{theirs}}}text.met{{fill:{ours}}}text.missed{{fill:{theirs}}}"
    )

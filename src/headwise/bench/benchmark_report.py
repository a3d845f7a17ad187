"""What a bench found: a table for a terminal, one JSON document, and a folder with both the numbers and a drawing."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from ..costs.cost_plots import shorten_label
from ..files import FolderLock, write_atomically
from ..head_analysis.head_figures import FIGURE_THEMES, FigureTheme
from .benchmark_case import LIMIT
from .session import HEADWISE, MAX_SPREAD, BenchmarkRow

TERMINAL_WIDTH = 80
NAME_WIDTH, NUMBER_WIDTH = 33, 11  # letters of a name, and of a number behind it
REPORT_FILE, CHART_FILE = "bench.json", "bench.svg"
VALUE_COLUMN = NAME_WIDTH + 2 * NUMBER_WIDTH + 7  # where aims stand
TIME_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us"))
VERDICT_LABELS = {True: "met", False: "missed", None: "no verdict"}


@dataclass(frozen=True)
class BenchmarkReport:
    """The machine, and a row for every case, in plain values."""

    machine: dict[str, Any]
    rows: list[BenchmarkRow]

    @property
    def data(self) -> dict[str, Any]:
        """What JSON can say."""
        return {"machine": self.machine, "rows": self.rows}

    @property
    def is_valid(self) -> bool:
        """Whether all rows ran, and everybody in them gave the same."""
        return not any(row["differs"] or row["failed"] for row in self.rows)

    def write(self, folder: Path | str) -> None:
        """The numbers and a drawing of them, each whole or as before."""

        with FolderLock(folder):
            write_atomically(Path(folder) / REPORT_FILE, (json.dumps(self.data, indent=1) + "\n").encode())
            write_atomically(Path(folder) / CHART_FILE, render_chart(self.rows))

    @staticmethod
    def read(path: Path | str) -> BenchmarkReport:
        """What was written before."""
        told = json.loads(Path(path).read_text())
        return BenchmarkReport(told["machine"], told["rows"])

    def __str__(self) -> str:
        said, title = [*machine_heading(self.machine)], None
        for row in self.rows:
            if row["title"] != title:
                said += ["", row["title"], "-" * min(TERMINAL_WIDTH, len(row["title"]))]
                title = row["title"]
            said += ["", *row_lines(row)]
        return "\n".join([*said, "", *format_summary(self.rows), *format_time_shares(self.rows)])


def machine_heading(machine: Mapping[str, Any]) -> Iterator[str]:
    """The machine in a few lines, and what is odd about it."""
    threads = machine["threads"]
    took = f"; all took {format_duration(machine['took'])}" if "took" in machine else ""  # older files do not say
    yield from wrap_lines(f"{machine['processor']}, {threads} thread{'s' if threads > 1 else ''}{took}")
    giga = {name: rate / 1e9 for name, rate in machine.items() if name.endswith("_per_second")}
    yield from wrap_lines(
        f"reads {giga['read_bytes_per_second']:.1f} GB/s, copies {giga['copy_bytes_per_second']:.1f}; products "
        f"{giga['fp32_flops_per_second']:.0f} GFLOP/s in fp32, {giga['bf16_flops_per_second']:.0f} in bf16"
    )
    yield from wrap_lines(", ".join(f"{name} {which}" for name, which in machine["versions"].items()))
    for label in machine_labels(machine):
        yield from wrap_lines(f"! {label}")


def machine_labels(machine: Mapping[str, Any]) -> list[str]:
    """What makes a run another than a usual one."""
    said = [*machine["labels"]]
    said += ["quick: fewer samples, and not every row"] if machine["quick"] else []
    return said + (["interrupted: not every row is here"] if machine["interrupted"] else [])


class ReportLine(NamedTuple):
    """Somebody's seconds: as how many times, or as which share, ours are; the spread, and what is aimed at."""

    name: str
    seconds: float
    ratio: str
    spread: str
    targets: Sequence[str] = ()

    def __str__(self) -> str:
        first, *rest = textwrap.wrap(self.name, NAME_WIDTH - 2)
        numbers = f"{format_seconds(self.seconds):>{NUMBER_WIDTH}}{self.ratio:>{NUMBER_WIDTH - 2}}{self.spread:>7}"
        aim, *more = self.targets or [""]
        said = f"  {first:<{NAME_WIDTH - 2}}{numbers}  {aim}".rstrip()
        return "\n".join([said, *(f"    {part}" for part in rest), *(f"{'':{VALUE_COLUMN}}{each}" for each in more)])


def row_lines(row: BenchmarkRow) -> Iterator[str]:
    """One row: a line for everybody in it, and one for everybody who is not."""
    yield from wrap_lines(row["name"])
    for line in row_seconds(row):
        yield str(line)
    for name, why in row["absent"].items():
        yield from wrap_lines(f"{name}: {why}", "  ")
    for name, how in row["differs"].items():
        yield from wrap_lines(f"{name} says something else ({how}): no verdict", "  ")
    if row["failed"]:
        yield from wrap_lines(f"ours failed: {row['failed']}", "  ")
    for one in row["aim"]:
        if one["why"]:
            yield from wrap_lines(f"no verdict on {format_target(one)} against {one['against']}: {one['why']}", "  ")
    for name, note in row["notes"].items():
        yield from wrap_lines(f"{name}: {note}", "  ")
    if row["tried"] and misses_target(row):
        yield from wrap_lines(f"tried: {row['tried']}", "  ")


def misses_target(row: Mapping[str, Any]) -> bool:
    """Whether an aim is missed, or cannot be told."""
    return any(one["met"] is not True for one in row["aim"])


def row_seconds(row: BenchmarkRow) -> Iterator[ReportLine]:
    """Ours, every peer, and the limit."""
    if row["ours_s"] is None:
        return
    yield ReportLine(HEADWISE, row["ours_s"], "", format_share(row["spread"][HEADWISE]))
    for name, seconds in row["peers"].items():
        yield ReportLine(
            name, seconds, format_ratio(row["ratio"][name]), format_share(row["spread"][name]), target_labels(row, name)
        )
    if limit := row["limit"]:
        name = f"limit, waiting for {limit['waits_for']}"
        yield ReportLine(
            name,
            limit["seconds"],
            format_share(limit["share"]),
            format_share(limit["spread"]),
            target_labels(row, LIMIT),
        )


def target_labels(row: BenchmarkRow, against: str) -> list[str]:
    """What is aimed at against somebody, and what came of it."""
    return [f"{format_target(one)}: {VERDICT_LABELS[one['met']]}" for one in row["aim"] if one["against"] == against]


def format_target(aim: Mapping[str, Any]) -> str:
    """How many times as fast, or which share of what the machine allows."""
    return format_share(aim["times"]) if aim["against"] == LIMIT else format_ratio(aim["times"])


def format_summary(rows: list[BenchmarkRow]) -> Iterator[str]:
    """How many aims are met, and how to read the columns."""
    counts = {
        word: sum(one["met"] is met for row in rows for one in row["aim"]) for met, word in VERDICT_LABELS.items()
    }
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    yield from wrap_lines(
        f"Columns: median seconds of a call; how many times as fast ours is, or which share of the limit it reaches; "
        f"the spread (middle half of the samples over their median; no verdict above {MAX_SPREAD:.0%}); the aim. "
        f"Aims: {told}."
    )


def format_time_shares(rows: list[BenchmarkRow]) -> Iterator[str]:
    """Where the time went: kinds of work, those that took longest first."""
    took: dict[str, float] = {}
    for row in rows:
        took[row["kind"]] = took.get(row["kind"], 0.0) + sum(row.get("took", {}).values())  # older files do not say
    told = [f"{kind} {format_duration(took[kind])}" for kind in sorted(took, key=lambda kind: -took[kind])]
    if any(took.values()):
        yield from wrap_lines(f"Time went to: {', '.join(told)}.")


def format_duration(seconds: float) -> str:
    """Seconds as a clock tells them.

    >>> format_duration(7.6), format_duration(391.2)
    ('8 s', '6 min 31 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_ratio(ratio: float) -> str:
    """A ratio in three figures.

    >>> format_ratio(3.417), format_ratio(31.28), format_ratio(0.981), format_ratio(100)
    ('3.42 x', '31.3 x', '0.98 x', '100 x')
    """
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f} x"


def format_share(part: float) -> str:
    """A share in per cent.

    >>> format_share(0.917)
    '92 %'
    """
    return f"{part * 100:.0f} %"


def format_seconds(seconds: float) -> str:
    """Seconds in three figures, in the unit that suits them.

    >>> format_seconds(0.0029134), format_seconds(12.5), format_seconds(8.2e-6)
    ('2.91 ms', '12.5 s', '8.2 us')
    """
    _, factor, unit = next(scale for scale in TIME_UNITS if seconds >= scale[0])
    value = seconds * factor
    places = 0 if value >= 100 else 1 if value >= 10 or unit == "us" else 2
    return f"{value:,.{places}f} {unit}"


def wrap_lines(text: str, indent: str = "") -> list[str]:
    """Lines of at most 80 letters; those after the first stand further in."""
    return textwrap.wrap(text, TERMINAL_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ") or [""]


# --- Rows drawn ----------------------------------------------------------------------------------------

CHART_WIDTH, CHART_MARGIN = 960, 20  # pixels of the drawing, and of its margins
PLOT_LEFT, PLOT_RIGHT = 306, 714  # where bars are: names stand on the left of them, numbers on the right
NUMBER_X, TARGET_X = 774, 788  # where numbers end, and where aims begin
NAME_X = PLOT_LEFT - 8  # where names end
CHART_TOP, SECTION_GAP = 84, 20  # above the first kind of work, and between two
TITLE_HEIGHT, HEADING_HEIGHT, BAR_HEIGHT = 36, 24, 17  # how tall are titles, names of rows, and bars
LABEL_LETTERS = 42, 90  # of a name, of a heading
MIN_RATIO, MAX_RATIO = 0.5, 2.0  # the scale shows these at least
TICK_FACTORS = (0.5, 2.0)  # what a scale says beside powers of ten
CAPTION = (
    "Seconds as multiples of ours: a bar on the right of 1 is a slower peer, one on the left a faster one.",
    "An open bar is the machine's limit. A mark is an aim; dashes lead to one that is missed.",
)
EMPTY_MESSAGE = "There is nothing to draw: no row has a peer or a limit."
CHART_TITLE = "Ours beside others"
# The widest letters first: what fits in them fits in others.
FONT_CSS = "font-family:'DejaVu Sans',Verdana,system-ui,sans-serif"
CHART_CSS = f"""\
text{{{FONT_CSS};font-size:11.5px}}.head{{font-size:16px;font-weight:700}}.title{{font-size:14px;font-weight:700}}
.row,.missed{{font-weight:700}}.scale{{font-size:10px}}.end{{text-anchor:end}}.middle{{text-anchor:middle}}
path{{fill:none}}.mark{{stroke-width:3}}.gap{{stroke-width:1.5;stroke-dasharray:3 2}}.one{{stroke-width:1.5}}
.grid{{stroke-opacity:.3}}.slower,.faster{{fill-opacity:.6}}.limit{{fill:none}}
"""
VERDICT_CLASSES = {True: "met", False: "missed", None: "told"}  # of aims, by what came of them


class TargetMark(NamedTuple):
    """What is aimed at, in words, and whether it is met."""

    ratio: float
    label: str
    is_met: bool | None


class RatioBar(NamedTuple):
    """One line: a heading, or a bar from 1 to how many times our seconds somebody takes."""

    name: str
    ratio: float | None = None
    label: str = ""
    targets: tuple[TargetMark, ...] = ()
    is_limit: bool = False


class LogScale(NamedTuple):
    """Ratios as places, by their logarithms."""

    low: float
    high: float

    @staticmethod
    def from_bars(lines: Sequence[RatioBar]) -> LogScale:
        """One on which there is room for every bar and every aim."""
        every = [ratio for bar in lines for ratio in (bar.ratio, *(goal.ratio for goal in bar.targets)) if ratio]
        return LogScale(min(MIN_RATIO, *every) / 1.1, max(MAX_RATIO, *every) * 1.1)

    def position(self, ratio: float) -> float:
        """How far to the right this is.

        >>> LogScale(0.1, 10).position(1) == (PLOT_LEFT + PLOT_RIGHT) / 2
        True
        """
        part = math.log(ratio / self.low) / math.log(self.high / self.low)
        return round(PLOT_LEFT + part * (PLOT_RIGHT - PLOT_LEFT), 1)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten, and half and twice as many.

        >>> LogScale(0.04, 200).ticks
        [0.1, 0.5, 1.0, 2.0, 10.0, 100.0]
        """
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        return sorted({*(10.0**n for n in powers), *(side for side in TICK_FACTORS if self.low < side < self.high)})


def render_chart(rows: Sequence[BenchmarkRow]) -> bytes:
    """An SVG on light or dark paper, as whoever looks at it prefers, with the same bytes for the same rows."""
    page = _SvgPage()
    for title in dict.fromkeys(row["title"] for row in rows):
        if those := [lines for row in rows if row["title"] == title and (lines := row_bars(row))]:
            page.add_section(title, those)
    return page.render()


def row_bars(row: BenchmarkRow) -> list[RatioBar]:
    """The lines of one row: its name with our seconds, every peer, and the limit."""
    if row["ours_s"] is None or not (row["peers"] or row["limit"]):
        return []
    found = [RatioBar(row["name"], None, f"{HEADWISE} {format_seconds(row['ours_s'])}")]
    found += [
        RatioBar(name, ratio, format_ratio(ratio), _target_marks(row, name)) for name, ratio in row["ratio"].items()
    ]
    if limit := row["limit"]:
        reached = limit["share"]
        found.append(
            RatioBar(
                f"limit: {limit['waits_for']}", reached, format_share(reached), _target_marks(row, LIMIT), is_limit=True
            )
        )
    return found


def _target_marks(row: BenchmarkRow, against: str) -> tuple[TargetMark, ...]:
    those = [one for one in row["aim"] if one["against"] == against]
    return tuple(
        TargetMark(one["times"], f"{format_target(one)}: {VERDICT_LABELS[one['met']]}", one["met"]) for one in those
    )


def _bar_height(bar: RatioBar) -> int:
    """As many lines as it has aims."""
    return BAR_HEIGHT * max(1, len(bar.targets))


@dataclass
class _SvgPage:
    """A drawing from the top down: how far it is, and what stands in it."""

    y: float = CHART_TOP
    elements: list[str] = field(default_factory=list)

    def add_section(self, title: str, rows: Sequence[Sequence[RatioBar]]) -> None:
        """One kind of work: its title over a line, a scale of its own, and its rows."""
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
        """A heading, and bars on lines that leave headings free."""
        self.add_text(CHART_MARGIN, self.y + HEADING_HEIGHT - 7, shorten_label(head.name, LABEL_LETTERS[1]), "row")
        self.add_text(CHART_WIDTH - CHART_MARGIN, self.y + HEADING_HEIGHT - 7, head.label, "row end")
        self.y += HEADING_HEIGHT
        ends = self.y + sum(map(_bar_height, lines))
        self.add_path(
            "".join(f"M{scale.position(tick):g} {self.y:g}V{ends:g}" for tick in scale.ticks if tick != 1), "grid"
        )
        self.add_path(f"M{scale.position(1):g} {self.y:g}V{ends:g}", "one")
        for bar in lines:
            self._bar(bar, scale)

    def _bar(self, bar: RatioBar, scale: LogScale) -> None:
        assert bar.ratio is not None
        middle, one, at = self.y + BAR_HEIGHT / 2, scale.position(1), scale.position(bar.ratio)
        kind = "limit" if bar.is_limit else "slower" if bar.ratio >= 1 else "faster"
        self.add_text(NAME_X, middle + 4, shorten_label(bar.name, LABEL_LETTERS[0]), "end")
        box = f'x="{min(at, one):g}" y="{middle - 5:g}" width="{abs(at - one):.1f}" height="10"'
        self.elements.append(f'<rect class="{kind}" {box}/>')
        self.add_text(NUMBER_X, middle + 4, bar.label, "end")
        for n, goal in enumerate(bar.targets):
            aim = scale.position(goal.ratio)
            if goal.is_met is False:
                self.add_path(f"M{at:g} {middle:g}H{aim:g}", "gap missed")
            self.add_path(f"M{aim:g} {middle - 7:g}v14", f"mark {VERDICT_CLASSES[goal.is_met]}")
            self.add_text(TARGET_X, middle + 4 + n * BAR_HEIGHT, f"aim {goal.label}", VERDICT_CLASSES[goal.is_met])
        self.y += _bar_height(bar)

    def add_text(self, x: float, y: float, said: str, kind: str) -> None:
        """Words at a place."""
        self.elements.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(said)}</text>')

    def add_path(self, to: str, kind: str) -> None:
        """A line."""
        self.elements.append(f'<path class="{kind}" d="{to}"/>')

    def render(self) -> bytes:
        """The whole, as tall as it has become."""
        told = CAPTION if self.elements else (EMPTY_MESSAGE,)
        tall = round(self.y)
        head = _SvgPage()
        head.add_text(CHART_MARGIN, 32, CHART_TITLE, "head")
        for n, line in enumerate(told):
            head.add_text(CHART_MARGIN, 52 + n * BAR_HEIGHT, line, "")
        light, dark = (_colour_css(FIGURE_THEMES[name]) for name in ("light", "dark"))
        size = f'viewBox="0 0 {CHART_WIDTH} {tall}" width="{CHART_WIDTH}" height="{tall}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{CHART_TITLE}</title>",
                f"<style>{CHART_CSS}{light}\n@media (prefers-color-scheme:dark){{{dark}}}</style>",
                f'<rect class="paper" width="{CHART_WIDTH}" height="{tall}"/>',
                *head.elements,
                *self.elements,
                "</svg>\n",
            ]
        ).encode()


def _colour_css(paper: FigureTheme) -> str:
    """What is drawn in which colour: what speaks for ours in one, what speaks against it in the other."""
    ours, theirs = paper.pair_colours
    return (
        f".paper{{fill:{paper.background}}}text{{fill:{paper.foreground}}}.scale,.told{{fill:{paper.muted}}}"
        f".rule,.grid,.told,.limit{{stroke:{paper.muted}}}text.told{{stroke:none}}.one{{stroke:{ours}}}"
        f".slower{{fill:{ours}}}.faster{{fill:{theirs}}}"
        f"path.met{{stroke:{ours}}}path.missed{{stroke:{theirs}}}text.met{{fill:{ours}}}text.missed{{fill:{theirs}}}"
    )

"""Rows drawn: everybody's seconds as multiples of ours, what is aimed at, and what the machine allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import escape

from ..counting.labels import shorten_label
from ..heads.inks import FIGURE_THEMES, FigureTheme
from .case import LIMIT
from .report import VERDICT_LABELS, format_share, format_seconds, format_ratio, format_target
from .rows import HEADWISE, BenchmarkRow

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

        >>> LogScale(0.1, 10).at(1) == (PLOT_LEFT + PLOT_RIGHT) / 2
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
    found += [RatioBar(name, ratio, format_ratio(ratio), _target_marks(row, name)) for name, ratio in row["ratio"].items()]
    if limit := row["limit"]:
        reached = limit["share"]
        found.append(RatioBar(f"limit: {limit['waits_for']}", reached, format_share(reached), _target_marks(row, LIMIT), is_limit=True))
    return found


def _target_marks(row: BenchmarkRow, against: str) -> tuple[TargetMark, ...]:
    those = [one for one in row["aim"] if one["against"] == against]
    return tuple(TargetMark(one["times"], f"{format_target(one)}: {VERDICT_LABELS[one['met']]}", one["met"]) for one in those)


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
        self.add_path("".join(f"M{scale.position(tick):g} {self.y:g}V{ends:g}" for tick in scale.ticks if tick != 1), "grid")
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
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{CHART_TITLE}</title>",
            f"<style>{CHART_CSS}{light}\n@media (prefers-color-scheme:dark){{{dark}}}</style>",
            f'<rect class="paper" width="{CHART_WIDTH}" height="{tall}"/>', *head.elements, *self.elements, "</svg>\n",
        ]).encode()  # fmt: skip


def _colour_css(paper: FigureTheme) -> str:
    """What is drawn in which colour: what speaks for ours in one, what speaks against it in the other."""
    ours, theirs = paper.pair_colours
    return (
        f".paper{{fill:{paper.background}}}text{{fill:{paper.foreground}}}.scale,.told{{fill:{paper.muted}}}"
        f".rule,.grid,.told,.limit{{stroke:{paper.muted}}}text.told{{stroke:none}}.one{{stroke:{ours}}}"
        f".slower{{fill:{ours}}}.faster{{fill:{theirs}}}"
        f"path.met{{stroke:{ours}}}path.missed{{stroke:{theirs}}}text.met{{fill:{ours}}}text.missed{{fill:{theirs}}}"
    )

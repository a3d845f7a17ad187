"""Rows drawn: everybody's seconds as multiples of ours, what is aimed at, and what the machine allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import escape

from ..counting.labels import shortened
from ..heads.inks import PAPERS, Paper
from .case import LIMIT
from .report import VERDICT, share, timed, times, wanted
from .rows import OURS, Row

WIDE, EDGE = 960, 20  # pixels of the drawing, and of its margins
LEFT, RIGHT = 306, 714  # where bars are: names stand on the left of them, numbers on the right
NUMBER, AIMED = 774, 788  # where numbers end, and where aims begin
NAMED = LEFT - 8  # where names end
TOP, BETWEEN = 84, 20  # above the first kind of work, and between two
TITLE, HEADING, LINE = 36, 24, 17  # how tall are titles, names of rows, and bars
LETTERS = 42, 90  # of a name, of a heading
LEAST, MOST = 0.5, 2.0  # the scale shows these at least
BESIDE = (0.5, 2.0)  # what a scale says beside powers of ten
TOLD = (
    "Seconds as multiples of ours: a bar on the right of 1 is a slower peer, one on the left a faster one.",
    "An open bar is the machine's limit. A mark is an aim; dashes lead to one that is missed.",
)
NONE = "There is nothing to draw: no row has a peer or a limit."
HEAD = "Ours beside others"
# The widest letters first: what fits in them fits in others.
FONT = "font-family:'DejaVu Sans',Verdana,system-ui,sans-serif"
SHAPES = f"""\
text{{{FONT};font-size:11.5px}}.head{{font-size:16px;font-weight:700}}.title{{font-size:14px;font-weight:700}}
.row,.missed{{font-weight:700}}.scale{{font-size:10px}}.end{{text-anchor:end}}.middle{{text-anchor:middle}}
path{{fill:none}}.mark{{stroke-width:3}}.gap{{stroke-width:1.5;stroke-dasharray:3 2}}.one{{stroke-width:1.5}}
.grid{{stroke-opacity:.3}}.slower,.faster{{fill-opacity:.6}}.limit{{fill:none}}
"""
KINDS = {True: "met", False: "missed", None: "told"}  # of aims, by what came of them


class Goal(NamedTuple):
    """What is aimed at, in words, and whether it is met."""

    times: float
    said: str
    met: bool | None


class Bar(NamedTuple):
    """One line: a heading, or a bar from 1 to how many times our seconds somebody takes."""

    name: str
    ratio: float | None = None
    said: str = ""
    goals: tuple[Goal, ...] = ()
    limit: bool = False


class Scale(NamedTuple):
    """Ratios as places, by their logarithms."""

    low: float
    high: float

    @staticmethod
    def of(lines: Sequence[Bar]) -> Scale:
        """One on which there is room for every bar and every aim."""
        every = [ratio for bar in lines for ratio in (bar.ratio, *(goal.times for goal in bar.goals)) if ratio]
        return Scale(min(LEAST, *every) / 1.1, max(MOST, *every) * 1.1)

    def at(self, ratio: float) -> float:
        """How far to the right this is.

        >>> Scale(0.1, 10).at(1) == (LEFT + RIGHT) / 2
        True
        """
        part = math.log(ratio / self.low) / math.log(self.high / self.low)
        return round(LEFT + part * (RIGHT - LEFT), 1)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten, and half and twice as many.

        >>> Scale(0.04, 200).ticks
        [0.1, 0.5, 1.0, 2.0, 10.0, 100.0]
        """
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        return sorted({*(10.0**n for n in powers), *(side for side in BESIDE if self.low < side < self.high)})


def drawn(rows: Sequence[Row]) -> bytes:
    """An SVG on light or dark paper, as whoever looks at it prefers, with the same bytes for the same rows."""
    page = _Page()
    for title in dict.fromkeys(row["title"] for row in rows):
        if those := [lines for row in rows if row["title"] == title and (lines := bars(row))]:
            page.chapter(title, those)
    return page.svg()


def bars(row: Row) -> list[Bar]:
    """The lines of one row: its name with our seconds, every peer, and the limit."""
    if row["ours_s"] is None or not (row["peers"] or row["limit"]):
        return []
    found = [Bar(row["name"], None, f"{OURS} {timed(row['ours_s'])}")]
    found += [Bar(name, ratio, times(ratio), _goals(row, name)) for name, ratio in row["ratio"].items()]
    if limit := row["limit"]:
        reached = limit["share"]
        found.append(Bar(f"limit: {limit['waits_for']}", reached, share(reached), _goals(row, LIMIT), limit=True))
    return found


def _goals(row: Row, against: str) -> tuple[Goal, ...]:
    those = [one for one in row["aim"] if one["against"] == against]
    return tuple(Goal(one["times"], f"{wanted(one)}: {VERDICT[one['met']]}", one["met"]) for one in those)


def _height(bar: Bar) -> int:
    """As many lines as it has aims."""
    return LINE * max(1, len(bar.goals))


@dataclass
class _Page:
    """A drawing from the top down: how far it is, and what stands in it."""

    y: float = TOP
    pieces: list[str] = field(default_factory=list)

    def chapter(self, title: str, rows: Sequence[Sequence[Bar]]) -> None:
        """One kind of work: its title over a line, a scale of its own, and its rows."""
        scale = Scale.of([bar for lines in rows for bar in lines])
        self.text(EDGE, self.y + 14, title, "title")
        self.path(f"M{EDGE} {self.y + 21}H{WIDE - EDGE}", "rule")
        for tick in scale.ticks:
            self.text(scale.at(tick), self.y + 35, f"{tick:g}", "scale middle")
        self.y += TITLE
        for head, *lines in rows:
            self._row(head, lines, scale)
        self.y += BETWEEN

    def _row(self, head: Bar, lines: Sequence[Bar], scale: Scale) -> None:
        """A heading, and bars on lines that leave headings free."""
        self.text(EDGE, self.y + HEADING - 7, shortened(head.name, LETTERS[1]), "row")
        self.text(WIDE - EDGE, self.y + HEADING - 7, head.said, "row end")
        self.y += HEADING
        ends = self.y + sum(map(_height, lines))
        self.path("".join(f"M{scale.at(tick):g} {self.y:g}V{ends:g}" for tick in scale.ticks if tick != 1), "grid")
        self.path(f"M{scale.at(1):g} {self.y:g}V{ends:g}", "one")
        for bar in lines:
            self._bar(bar, scale)

    def _bar(self, bar: Bar, scale: Scale) -> None:
        assert bar.ratio is not None
        middle, one, at = self.y + LINE / 2, scale.at(1), scale.at(bar.ratio)
        kind = "limit" if bar.limit else "slower" if bar.ratio >= 1 else "faster"
        self.text(NAMED, middle + 4, shortened(bar.name, LETTERS[0]), "end")
        box = f'x="{min(at, one):g}" y="{middle - 5:g}" width="{abs(at - one):.1f}" height="10"'
        self.pieces.append(f'<rect class="{kind}" {box}/>')
        self.text(NUMBER, middle + 4, bar.said, "end")
        for n, goal in enumerate(bar.goals):
            aim = scale.at(goal.times)
            if goal.met is False:
                self.path(f"M{at:g} {middle:g}H{aim:g}", "gap missed")
            self.path(f"M{aim:g} {middle - 7:g}v14", f"mark {KINDS[goal.met]}")
            self.text(AIMED, middle + 4 + n * LINE, f"aim {goal.said}", KINDS[goal.met])
        self.y += _height(bar)

    def text(self, x: float, y: float, said: str, kind: str) -> None:
        """Words at a place."""
        self.pieces.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(said)}</text>')

    def path(self, to: str, kind: str) -> None:
        """A line."""
        self.pieces.append(f'<path class="{kind}" d="{to}"/>')

    def svg(self) -> bytes:
        """The whole, as tall as it has become."""
        told = TOLD if self.pieces else (NONE,)
        tall = round(self.y)
        head = _Page()
        head.text(EDGE, 32, HEAD, "head")
        for n, line in enumerate(told):
            head.text(EDGE, 52 + n * LINE, line, "")
        light, dark = (_colours(PAPERS[name]) for name in ("light", "dark"))
        size = f'viewBox="0 0 {WIDE} {tall}" width="{WIDE}" height="{tall}"'
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{HEAD}</title>",
            f"<style>{SHAPES}{light}\n@media (prefers-color-scheme:dark){{{dark}}}</style>",
            f'<rect class="paper" width="{WIDE}" height="{tall}"/>', *head.pieces, *self.pieces, "</svg>\n",
        ]).encode()  # fmt: skip


def _colours(paper: Paper) -> str:
    """What is drawn in which colour: what speaks for ours in one, what speaks against it in the other."""
    ours, theirs = paper.pair
    return (
        f".paper{{fill:{paper.paper}}}text{{fill:{paper.ink}}}.scale,.told{{fill:{paper.faint}}}"
        f".rule,.grid,.told,.limit{{stroke:{paper.faint}}}text.told{{stroke:none}}.one{{stroke:{ours}}}"
        f".slower{{fill:{ours}}}.faster{{fill:{theirs}}}"
        f"path.met{{stroke:{ours}}}path.missed{{stroke:{theirs}}}text.met{{fill:{ours}}}text.missed{{fill:{theirs}}}"
    )

"""Rows drawn: everybody's seconds as multiples of ours, and a line for what the machine allows."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..counting.drawing import COLOURS, STYLE
from ..counting.labels import shortened
from ..counting.panels import GREY, SIZE
from .report import share, timed, times
from .rows import OURS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, LINE, TOP, EDGE = 8.0, 0.17, 0.4, 0.1  # inches of the drawing, of one line, above the first, around
BETWEEN = 0.5  # lines between two rows
NAMES, NUMBERS = 2.9, 0.75  # inches for names on the left, and for numbers on the right
LETTERS = 48, 90  # of a name, of a heading
OWN, THEIRS, LEAST = COLOURS[0], "#A0A0A0", COLOURS[1]
NONE = "there is nothing to draw: no row has a peer or a limit"


class Bar(NamedTuple):
    """One line: a heading, or a bar from 1 to how many times our seconds somebody takes."""

    name: str
    ratio: float | None = None
    said: str = ""


def drawn(rows: Sequence[Row]) -> bytes:
    """An SVG on white, with the same bytes for the same rows."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = [bar for row in rows for bar in bars(row)]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are
        matplotlib.rcParams.update(STYLE)
        tall = LINE * _heights(lines)[-1] if lines else 0.0
        high = TOP + tall + 0.3
        figure = Figure(figsize=(WIDE, high), facecolor="white")
        told = "Seconds as multiples of ours, which are 1: a longer bar is a slower peer; | is what the machine allows"
        figure.text(EDGE / WIDE, 1 - EDGE / high, told if lines else NONE, va="top", color=GREY)
        if lines:
            box = (NAMES / WIDE, 0.3 / high, 1 - (NAMES + NUMBERS) / WIDE, tall / high)
            _draw(figure.add_axes(box), lines)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def bars(row: Row) -> list[Bar]:
    """The lines of one row: its name with our seconds, every peer, and the limit."""
    if row["ours_s"] is None or not (row["peers"] or row["limit"]):
        return []
    found = [Bar(row["name"], None, f"{OURS} {timed(row['ours_s'])}")]
    found += [Bar(name, ratio, times(ratio)) for name, ratio in row["ratio"].items()]
    if limit := row["limit"]:
        found.append(Bar(f"limit: {limit['waits_for']}", limit["share"], share(limit["share"])))
    return found


def _heights(lines: Sequence[Bar]) -> list[float]:
    """Where every line stands, from the top down, and where the last one ends.

    >>> _heights([Bar("row"), Bar("peer", 2.0), Bar("row"), Bar("peer", 3.0)])
    [0.5, 1.5, 3.0, 4.0, 4.5]
    """
    found, height = [], -0.5 - BETWEEN
    for bar in lines:
        height += 1 + (BETWEEN if bar.ratio is None else 0)
        found.append(height)
    return [*found, height + 0.5]


def _draw(axes: Axes, lines: Sequence[Bar]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    ratios = [bar.ratio for bar in lines if bar.ratio]
    *heights, end = _heights(lines)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *(0.8 * ratio for ratio in ratios)), max(2.0, *(1.2 * ratio for ratio in ratios)))
    axes.set_ylim(end, 0)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.axvline(1, color=OWN, linewidth=1.2)
    for height, bar in zip(heights, lines, strict=True):
        _line(axes, height, bar)


def _line(axes: Axes, height: float, bar: Bar) -> None:
    """A heading in bold, or a bar with its name and number."""
    heading, limit = bar.ratio is None, bar.name.startswith("limit: ")
    said: Any = {"va": "center", "size": SIZE - 0.5, "transform": axes.get_yaxis_transform(), "clip_on": False}
    if heading:
        left = (EDGE - NAMES) / (WIDE - NAMES - NUMBERS)
        clear: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # nothing shines through its letters
        axes.text(left, height, shortened(bar.name, LETTERS[1]), color="#222222", weight="bold", bbox=clear, **said)
        axes.text(1.01, height, bar.said, color=OWN, **said)
        return
    colour = LEAST if limit else GREY
    axes.text(-0.02, height, shortened(bar.name, LETTERS[0]), ha="right", color=colour, **said)
    axes.text(1.01, height, bar.said, color=colour, **said)
    assert bar.ratio is not None
    if limit:
        axes.plot([bar.ratio, bar.ratio], [height - 0.4, height + 0.4], color=LEAST, linewidth=2)
    else:
        axes.barh(height, bar.ratio - 1, left=1, height=0.7, color=THEIRS if bar.ratio >= 1 else LEAST, zorder=2)

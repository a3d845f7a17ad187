"""Costs drawn into a file: lines that carry their names, in colours that everybody can tell apart."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..files import write_atomically
from .charts import Chart, Roof, charts
from .devices import Device
from .panels import GREY, PALE, SIZE, Ink, Panel
from .pricing import Price

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What leaves no trace of when it was written, so that the same costs are the same file.
SUFFIXES: dict[str, dict[str, Any]] = {
    ".svg": {"metadata": {"Date": None}},
    ".pdf": {"metadata": {"CreationDate": None, "ModDate": None}},
    ".png": {"dpi": 200},
}
# Okabe and Ito's colours without yellow and sky blue, some of them darker: names in them can be read on white.
COLOURS = ("#0072B2", "#D55E00", "#007A5A", "#A8458A", "#A87400", "#333333")
STYLES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))  # of lines in one colour
WIDE, HIGH, TOP = 8.0, 3.3, 0.4  # inches of a drawing, of one row of it, and above the first
LEFT, OVER, BELOW, EDGE = 0.5, 0.25, 0.65, 0.12  # inches around a panel, and at the edges of the drawing
ROOM = {1: 1.8, 2: 1.4}  # inches for names on the right of one panel, and of each of two
STYLE: Any = {
    "font.size": SIZE,
    "font.family": "DejaVu Sans",
    "axes.titlesize": SIZE + 1,
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


def draw(prices: Mapping[str, Price], path: Path | str, kind: str = "all") -> None:
    """Draw a roofline, the cache, FLOPs and break-even over lengths, or one of them, into an SVG, PNG or PDF file.

    >>> import tempfile, headwise as hw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw({one.name: one for one in hw.cost(hw.design(preset="gqa"))}, f"{folder}/gqa.svg", "kv")
    ...     Path(folder, "gqa.svg").read_text()[:5]
    '<?xml'
    """
    kept = writable(path)
    shown = charts(prices, kind)
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a user's own settings are: the same costs are the same drawing
        matplotlib.rcParams.update(STYLE)
        written = io.BytesIO()
        figure(prices, shown).savefig(written, format=Path(path).suffix[1:], **kept)
    write_atomically(path, written.getvalue())


def figure(prices: Mapping[str, Price], shown: Sequence[Chart | Roof]) -> Figure:
    """The panels of a drawing, two beside each other."""
    from matplotlib.figure import Figure

    across = min(len(shown), 2)
    down = -(-len(shown) // across)
    made = Figure(figsize=(WIDE, TOP + down * (HIGH if across == 2 else 1.4 * HIGH)))
    load = next(iter(prices.values())).load
    rows = "one row" if load.batch == 1 else f"{load.batch:,} rows"
    told = f"{rows} of {load.context:,} tokens, {load.dtype}, {Device.named(load.device).what}"
    made.text(EDGE / WIDE, 1 - EDGE / made.get_figheight(), told, va="top", color=GREY)
    styles = [(colour, style) for style in STYLES for colour in COLOURS]
    inks = {name: styles[n % len(styles)] for n, name in enumerate(prices)}
    for n, one in enumerate(shown):
        one.onto(_panel(made, n, (across, down), inks))
    return made


def writable(path: Path | str) -> dict[str, Any]:
    """How a drawing of this name is written; what cannot be is refused before anything is drawn.

    >>> writable("costs.jpg")
    Traceback (most recent call last):
    headwise.errors.SpecError: costs.jpg: no drawing is written as '.jpg'; give a name that ends in .svg, .png or .pdf
    """
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise SpecError(f"{path}: no drawing is written as {suffix!r}; give a name that ends in .svg, .png or .pdf")
    return SUFFIXES[suffix]


def _panel(figure: Figure, n: int, grid: tuple[int, int], inks: dict[str, Ink]) -> Panel:
    """One of so many across and down, with room for numbers on its left and names on its right."""
    across, down = grid
    wide, high = figure.get_figwidth(), figure.get_figheight()
    cell, row = wide / across, (high - TOP) / down
    x, y = n % across * cell + LEFT, high - TOP - (n // across + 1) * row + BELOW
    inches = cell - LEFT - ROOM[across], row - OVER - BELOW
    axes = figure.add_axes((x / wide, y / high, inches[0] / wide, inches[1] / high))
    return Panel(axes, inches, ROOM[across], inks)

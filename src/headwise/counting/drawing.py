"""Costs drawn into a file: lines that carry their names, in colours that everybody can tell apart."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..files import write_atomically
from .charts import LineChart, RooflineChart, make_charts
from .devices import Device
from .panels import GREY, PALE, FONT_SIZE, LineStyle, PlotPanel
from .pricing import CostEstimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
LEFT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN, OUTER_MARGIN = 0.5, 0.25, 0.65, 0.12  # inches around a panel, and at the edges of the drawing
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
    ...     save_plot({one.name: one for one in hw.cost(hw.design(preset="gqa"))}, f"{folder}/gqa.render", "kv")
    ...     Path(folder, "gqa.render").read_text()[:5]
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

"""Results before they are shown: estimates, tables, figures and pages of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Estimate(NamedTuple):
    """A value with its 95 % interval, the value expected by chance, a count and a p-value.

    NaN is what was not computed. `rows` is the number of units that the value averages; `p` is
    one-sided and not corrected for several tests.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    chance: float = math.nan
    rows: float = math.nan
    p: float = math.nan

    @property
    def data(self) -> dict[str, float | None]:
        """Dictionary of plain values; NaN becomes None."""
        items = self._asdict().items()
        return {name: None if math.isnan(value) else value for name, value in items}


Value = str | int | float | bool | Estimate | None


@dataclass(frozen=True)
class Column:
    """A column of a table. `format` turns one value into text.

    Without `format`, numbers with a fraction are shown alike over the whole column, and whole
    numbers with thousands separators. Numbers are aligned to the right.
    """

    name: str
    format: Callable[[Any], str] | None = None
    unit: str = ""
    align: str = ""  # "left" or "right"; by default, the right for numbers


@dataclass(frozen=True)
class Table:
    """Rows of values below named columns. `bold` are cells (row, column) to stress."""

    title: str
    columns: Sequence[str | Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()
    bold: frozenset[tuple[int, int]] = frozenset()

    @property
    def column_list(self) -> list[Column]:
        """The columns, each as a `Column`."""
        return [Column(one) if isinstance(one, str) else one for one in self.columns]

    def without_empty_columns(self) -> Table:
        """Return the table without columns that hold no value."""

        def has_values(column: int) -> bool:
            values = [row[column] for row in self.rows]
            return any(value not in (None, "") and value == value for value in values)

        columns = list(filter(has_values, range(len(self.columns))))
        places = {old: new for new, old in enumerate(columns)}
        bold = frozenset((row, places[n]) for row, n in self.bold if n in places)
        rows = [list(map(row.__getitem__, columns)) for row in self.rows]
        return Table(self.title, [self.columns[n] for n in columns], rows, self.notes, bold)


# --- Figures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An axis: label, logarithmic or not, reversed or not, limits, and ticks (position -> label).

    `format` turns the number of a tick into text.
    """

    label: str = ""
    log: bool = False
    reverse: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Mapping[float, str] = field(default_factory=dict[float, str])
    format: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one name, joined or not. A colour is "#rrggbb", "text", "muted" or "" (the
    palette).

    `labels` are written at the points; `colours` and `sizes` (points) replace the series's.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    line: str = "-"  # "-", "--", ":" or "" for points alone
    marker: str = ""
    colour: str = ""
    labels: Sequence[str] = ()
    colours: Sequence[str] = ()
    sizes: Sequence[float] = ()
    band: bool = True  # intervals as a band, or as a line at each point


@dataclass(frozen=True)
class Reference:
    """A line across a plot at a position of the axis "x" or "y", with a label."""

    axis: str
    at: float
    label: str = ""


@dataclass(frozen=True)
class Plot:
    """Lines, or a scatter of points. Names are written at the ends of lines, or in a legend."""

    series: Sequence[Series]
    x: Axis = Axis()
    y: Axis = Axis()
    title: str = ""
    references: Sequence[Reference] = ()
    names: str = "legend"  # "legend", "ends" or "" for none
    size: tuple[float, float] = (4.4, 2.9)  # inches


@dataclass(frozen=True)
class Bars:
    """Columns, stacked or side by side: `groups` has a height for each column, `texts` may label
    the boxes.

    `marks` are texts at the top of a column: (column, text, colour).
    """

    columns: Sequence[str]
    groups: Mapping[str, Sequence[float]]
    x_label: str = ""
    y_label: str = ""
    title: str = ""
    colours: Mapping[str, str] = field(default_factory=dict[str, str])
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    marks: Sequence[tuple[int, str, str]] = ()
    size: tuple[float, float] = (4.6, 3.6)
    stacked: bool = True
    references: Sequence[Reference] = ()


@dataclass(frozen=True)
class HeatMap:
    """Values from 0 to 1 as cells of growing strength.

    `texts` are written into cells, `colours` replaces the ramp by a colour for each cell, `marked`
    are framed cells (row, column).
    """

    values: Any  # [rows, columns]
    rows: Sequence[str]
    columns: Sequence[str]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    texts: Sequence[Sequence[str]] | None = None
    colours: Sequence[Sequence[str]] | None = None
    marked: Sequence[tuple[int, int]] = ()
    frame: str = ""  # colour of the frame
    size: tuple[float, float] | None = None  # by default, by the number of cells


@dataclass(frozen=True)
class Links:
    """Weights [T, S] of one or two heads, as lines from the tokens on the left to the right."""

    left: Sequence[str]
    right: Sequence[str]
    weights: Mapping[str, Any]
    least: float = 0.05  # smaller weights are not drawn
    headings: tuple[str, str] = ("query", "key")
    width: float = 4.6  # inches


@dataclass(frozen=True)
class Dendrogram:
    """A tree of merges, as `scipy.cluster.hierarchy.linkage` returns it."""

    merges: Any  # [n - 1, 4]
    labels: Sequence[str]
    x_label: str = "distance"
    title: str = ""
    size: tuple[float, float] | None = None


Panel = Plot | Bars | HeatMap | Links | Dendrogram


@dataclass(frozen=True)
class Figure:
    """Panels below a title, with a legend (text -> colour) and a note below."""

    title: str
    panels: Sequence[Panel]
    legend: Mapping[str, str] = field(default_factory=dict[str, str])
    legend_title: str = ""
    note: str = ""
    num_columns: int = 2
    scale_label: str = ""  # of the ramp of heat maps; "" for no scale


# --- Pages ----------------------------------------------------------------------------------------

Item = str | list[str] | Table | Figure  # a paragraph, a list, a table or a figure


@dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    title: str
    items: Sequence[Item]


@dataclass(frozen=True)
class Page:
    """A titled document of sections."""

    title: str
    sections: Sequence[Section]
    summary: str = ""
    language: str = "en"

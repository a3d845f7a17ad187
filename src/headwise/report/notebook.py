"""Results as a notebook shows them: tables and pictures, a repr of one line, and a pandas table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ..util.errors import SpecError, pluralise
from .data import Figure, Item, Table
from .render import fill_template, flat_rows, to_text
from .text import cut

RESULT_TEMPLATE = Path(__file__).with_name("result.html")
MAX_ROWS = 20  # of a table in a notebook
MAX_TITLE = 100  # characters of a title in a repr


class NotebookResult(ABC):
    """Base class of results: their tables and pictures in a notebook, a short repr, and their rows
    as a pandas table.
    """

    @property
    @abstractmethod
    def report_items(self) -> Sequence[Item]:
        """The result as paragraphs, tables and figures; `to_pandas` returns the first table."""

    @property
    def main_table(self) -> Table:
        """The table that `to_pandas` returns."""
        return next(one for one in self.report_items if isinstance(one, Table))

    def __repr__(self) -> str:
        first = self.report_items[0]
        title = first.title if isinstance(first, Figure | Table) else str(first)
        if isinstance(first, Table) and not title:
            title = pluralise(len(first.rows), "row")
        remedy = "print() shows it, .to_pandas() returns its rows"
        return f"<{type(self).__name__}: {cut(title, MAX_TITLE)}; {remedy}>"

    def _repr_html_(self) -> str:
        items = [_shorten(one) if isinstance(one, Table) else one for one in self.report_items]
        return fill_template(RESULT_TEMPLATE, items=items, themes=["light"])

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; an estimate has three columns, with the ends of
        its interval.
        """
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise SpecError("cannot make a DataFrame without pandas; pip install pandas") from None
        header, *rows = flat_rows(self.main_table)
        return pandas.DataFrame(rows, columns=header)


class TableResult(NotebookResult):
    """Base class of results that are one table."""

    @property
    @abstractmethod
    def table(self) -> Table:
        """The rows of the result."""

    @property
    def report_items(self) -> Sequence[Item]:
        """The table."""
        return [self.table]

    def __str__(self) -> str:
        return to_text(self.table)


class ShownTable(Table, TableResult):
    """A table that shows itself in a notebook and prints as text."""

    @property
    def table(self) -> Table:
        return Table(self.title, self.columns, self.rows, self.notes, self.bold)

    __repr__ = TableResult.__repr__


class ShownFigure(Figure):
    """A figure that shows itself in a notebook."""

    def __repr__(self) -> str:
        return f"<Figure: {cut(self.title, MAX_TITLE)}>"

    def _repr_html_(self) -> str:
        return fill_template(RESULT_TEMPLATE, items=[self], themes=["light"])


def _shorten(table: Table) -> Table:
    """Return the first rows of a table, with a note if there are more."""
    num_more = len(table.rows) - MAX_ROWS
    if num_more <= 0:
        return table
    note = f"and {num_more:,} more rows; .to_pandas() has all"
    return replace(table, rows=table.rows[:MAX_ROWS], notes=(note, *table.notes))

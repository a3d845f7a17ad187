"""`--beside`: what others publish of the same quantities, and why it is another number."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..screen import TERMINAL_WIDTH

if TYPE_CHECKING:
    from ...counting.costs import CostReport
    from ...counting.published import FormulaComparison, FormulaSource

SOURCE_NAMES = "zhihu-624740065, seeds, paper-2022, palm or scaling-book"


class PublishedFormulasView(NamedTuple):
    """Published numbers beside ours, source by source."""

    sources: tuple[FormulaSource, ...]
    rows: tuple[FormulaComparison, ...]

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [row._asdict() for row in self.rows]

    def __str__(self) -> str:
        return "\n".join(line for source in self.sources for line in _format_source(source, self.rows)).lstrip("\n")


def _format_source(source: FormulaSource, rows: Iterable[FormulaComparison]) -> Iterator[str]:
    yield from ("", *textwrap.wrap(f"{source.name}: {source.source}", TERMINAL_WIDTH))
    for row in rows:
        if row.beside == source.name:
            yield ""
            yield from _wrap(f"{row.name}: {row.quantity} = {row.formula}", "  ")
            ours = "none yet" if row.ours is None else f"{row.ours:,}"
            yield from _wrap(f"theirs {row.theirs:,}, ours {ours}: {row.why}", "    ")


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, TERMINAL_WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def add_published_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    told = f"published formulas beside ours: {SOURCE_NAMES}"
    parser.add_argument("--beside", action="append", default=[], metavar="NAME", help=told)
    parser.add_argument("--ways", type=int, default=8, metavar="COUNT", help="tensor-parallel ways of paper-2022 (8)")


def make_published_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, PublishedFormulasView]:
    """Every source that is named, of everything that is priced."""
    if not given.beside:
        return {}
    from ...counting.published import FormulaSource, compare_formulas

    sources = tuple(FormulaSource.from_name(name) for name in given.beside)
    rows = (row for source in sources for price in costs for row in compare_formulas(price, source, given.ways))
    return {"beside": PublishedFormulasView(sources, tuple(rows))}

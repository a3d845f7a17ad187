"""`--beside`: what others publish of the same quantities, and why it is another number."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..screen import WIDTH

if TYPE_CHECKING:
    from ...counting.costs import Costs
    from ...counting.published import Beside, Published

NAMES = "zhihu-624740065, seeds, paper-2022, palm or scaling-book"


class Formulas(NamedTuple):
    """Published numbers beside ours, source by source."""

    sources: tuple[Published, ...]
    rows: tuple[Beside, ...]

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [row._asdict() for row in self.rows]

    def __str__(self) -> str:
        return "\n".join(line for source in self.sources for line in _page(source, self.rows)).lstrip("\n")


def _page(source: Published, rows: Iterable[Beside]) -> Iterator[str]:
    yield from ("", *textwrap.wrap(f"{source.name}: {source.source}", WIDTH))
    for row in rows:
        if row.beside == source.name:
            yield ""
            yield from _wrapped(f"{row.name}: {row.quantity} = {row.formula}", "  ")
            ours = "none yet" if row.ours is None else f"{row.ours:,}"
            yield from _wrapped(f"theirs {row.theirs:,}, ours {ours}: {row.why}", "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def take(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    told = f"published formulas beside ours: {NAMES}"
    parser.add_argument("--beside", action="append", default=[], metavar="NAME", help=told)
    parser.add_argument("--ways", type=int, default=8, metavar="COUNT", help="tensor-parallel ways of paper-2022 (8)")


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, Formulas]:
    """Every source that is named, of everything that is priced."""
    if not given.beside:
        return {}
    from ...counting.published import Published, beside

    sources = tuple(Published.named(name) for name in given.beside)
    rows = (row for source in sources for price in costs for row in beside(price, source, given.ways))
    return {"beside": Formulas(sources, tuple(rows))}

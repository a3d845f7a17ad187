"""`--plot`, `--csv`: costs as a drawing in a file, and as lines of a sheet."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..screen import Wrong
from .comparing import apart

if TYPE_CHECKING:
    from ...counting.costs import Costs
    from . import View

KINDS = ("all", "roofline", "kv", "flops", "breakeven")
NO_ROOM = ("operations", "terms", "verify")  # for these in a sheet
PRICED = ("matched", "plot")  # what changes prices themselves, or stands in a file of its own


class Drawn(NamedTuple):
    """A file that was written."""

    file: str
    kind: str

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return self._asdict()

    def __str__(self) -> str:
        return f"drawn into {self.file}"


def take(parser: argparse.ArgumentParser) -> None:
    """Their options."""
    more = parser.add_argument_group("other forms")
    more.add_argument("--csv", action="store_true", help="a line for each, of all that is one number, and nothing else")
    more.add_argument("--plot", metavar="FILE", help="a drawing into a .svg, .png or .pdf file")
    more.add_argument(
        "--plot-kind", metavar="KIND", help=f"what is drawn: {', '.join(KINDS[:-1])} or {KINDS[-1]} (all)"
    )


def views(given: argparse.Namespace, costs: Costs) -> Mapping[str, Drawn]:
    """The drawing, when one is asked for."""
    if given.plot is None:
        if given.plot_kind is not None:
            raise Wrong(f"--plot-kind {given.plot_kind} draws nothing without a file; give --plot costs.svg")
        return {}
    from ...counting.drawing import draw

    kind = given.plot_kind or KINDS[0]
    draw(apart(costs), given.plot, kind)
    return {"plot": Drawn(given.plot, kind)}


def sheet_of(given: argparse.Namespace, costs: Costs, views: Mapping[str, View]) -> str:
    """A line for each price, and an error where more was asked for than such lines can hold."""
    if given.json:
        raise Wrong("--csv and --json are two forms of one document; leave one out")
    asked = [f"--{name}" for name in NO_ROOM if getattr(given, name)] + [name for name in views if name not in PRICED]
    if asked:
        raise Wrong(f"--csv has a line for each that is priced, and no room for {asked[0]}; ask for that with --json")
    from ...counting.sheet import sheet

    return sheet(costs.data["rows"])

"""`--plot`, `--csv`: costs as a drawing in a file, and as lines of a sheet."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..screen import UsageError
from .comparing import with_unique_names

if TYPE_CHECKING:
    from ...counting.costs import CostReport
    from . import CostView

PLOT_KINDS = ("all", "roofline", "kv", "flops", "breakeven")
OPTIONS_NOT_IN_CSV = ("operations", "terms", "verify")  # for these in a sheet
VIEWS_IN_CSV = ("matched", "plot")  # what changes prices themselves, or stands in a file of its own


class PlotView(NamedTuple):
    """A file that was written."""

    file: str
    kind: str

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return self._asdict()

    def __str__(self) -> str:
        return f"drawn into {self.file}"


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Their options."""
    more = parser.add_argument_group("other forms")
    more.add_argument("--csv", action="store_true", help="a line for each, of all that is one number, and nothing else")
    more.add_argument("--plot", metavar="FILE", help="a drawing into a .svg, .png or .pdf file")
    more.add_argument(
        "--plot-kind", metavar="KIND", help=f"what is drawn: {', '.join(PLOT_KINDS[:-1])} or {PLOT_KINDS[-1]} (all)"
    )


def make_plot_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, PlotView]:
    """The drawing, when one is asked for."""
    if given.plot is None:
        if given.plot_kind is not None:
            raise UsageError(f"--plot-kind {given.plot_kind} draws nothing without a file; give --plot costs.svg")
        return {}
    from ...counting.drawing import save_plot

    kind = given.plot_kind or PLOT_KINDS[0]
    save_plot(with_unique_names(costs), given.plot, kind)
    return {"plot": PlotView(given.plot, kind)}


def csv_of_costs(given: argparse.Namespace, costs: CostReport, views: Mapping[str, CostView]) -> str:
    """A line for each price, and an error where more was asked for than such lines can hold."""
    if given.json:
        raise UsageError("--csv and --json are two forms of one document; leave one out")
    asked = [f"--{name}" for name in OPTIONS_NOT_IN_CSV if getattr(given, name)] + [name for name in views if name not in VIEWS_IN_CSV]
    if asked:
        raise UsageError(f"--csv has a line for each that is priced, and no room for {asked[0]}; ask for that with --json")
    from ...counting.sheet import to_csv

    return to_csv(costs.data["rows"])

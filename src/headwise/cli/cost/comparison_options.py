"""`--beside`: what others publish of the same quantities, and why it is another number."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import SpecError, suggest
from ..arguments import TERMINAL_WIDTH, UsageError

if TYPE_CHECKING:
    from ...costs.complexity import ComplexityTable, LayerSizes, ScalingMeasurement
    from ...costs.cost_report import CostEstimate, CostReport
    from ...costs.published_formulas import FormulaComparison, FormulaSource
    from ...costs.size_matching import SizeMatch
    from ...spec.attention_spec import AttentionSpec
    from . import CostView

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
    from ...costs.published_formulas import FormulaSource, compare_formulas

    sources = tuple(FormulaSource.from_name(name) for name in given.beside)
    rows = (row for source in sources for price in costs for row in compare_formulas(price, source, given.ways))
    return {"beside": PublishedFormulasView(sources, tuple(rows))}


# --- `--match`, `--breakeven`, `--complexity` ----------------------------------------------------------

MATCH_QUANTITIES = ("params", "flops", "kv")
DEFAULT_KERNEL, DEFAULT_WINDOW = 3, 64


@dataclass(frozen=True)
class SizeMatchView:
    """What was changed of each spec, so that it comes nearest to the first."""

    first: str
    matches: Mapping[str, SizeMatch]

    def __str__(self) -> str:
        lines = [f"made as large as {self.first} before they were priced:"]
        for name, match in self.matches.items():
            lines += textwrap.wrap(f"{name}: {match}", TERMINAL_WIDTH, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"like": self.first, "rows": [{"name": name, **match.data} for name, match in self.matches.items()]}


@dataclass(frozen=True)
class ComplexityView:
    """The table of complexities, and how the time of small layers grows where that was measured."""

    table: ComplexityTable
    measurement: ScalingMeasurement | None

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.measurement}" if self.measurement else str(self.table)

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return self.table.data | {"measured": self.measurement.data if self.measurement else None}


def add_comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """Their options."""
    more = parser.add_argument_group("comparing")
    more.add_argument(
        "--match", choices=MATCH_QUANTITIES, help="change a size of each, so that it comes nearest to the first"
    )
    told = "the size that may change: dim, vdim, kv, q, model, or one of a part, as in mla=project.rank"
    more.add_argument("--free", action="append", default=[], metavar="[SPEC=]SIZE", help=told)
    more.add_argument("--breakeven", action="store_true", help="lengths at which each costs less than the first")
    told = "attention beside recurrent and convolutional layers: counted, or measured as well"
    more.add_argument("--complexity", nargs="?", const="counted", choices=("counted", "measured"), help=told)
    more.add_argument("--kernel", type=int, metavar="TOKENS", help=f"of its convolutions ({DEFAULT_KERNEL})")
    more.add_argument("--window", type=int, metavar="TOKENS", help=f"of its attention in a window ({DEFAULT_WINDOW})")


def make_comparison_views(given: argparse.Namespace, costs: CostReport) -> Mapping[str, CostView]:
    """What was asked for."""
    found: dict[str, CostView] = {}
    if given.breakeven:
        from ...costs.cost_vs_length import find_crossovers

        prices = with_unique_names(costs)
        found["break_even"] = find_crossovers(
            {name: price.spec_or_model for name, price in prices.items()}, costs.estimates[0].workload
        )
    if given.complexity:
        from ...costs.complexity import ComplexityTable

        sizes = _layer_sizes(given, costs)
        found["complexity"] = ComplexityView(ComplexityTable.from_sizes(sizes), _measure_scaling(given, sizes))
    elif given.kernel is not None or given.window is not None:
        raise UsageError("--kernel and --window are sizes of --complexity; give it, or leave them out")
    return found


def match_sizes(given: argparse.Namespace, costs: CostReport) -> tuple[CostReport, dict[str, CostView]]:
    """Everything made as large as the first and priced anew, and what was changed for that."""
    if given.match is None:
        if given.free:
            raise UsageError(
                f"--free {given.free[0]} changes nothing without --match; give --match params, flops or kv"
            )
        return costs, {}
    from ...costs.cost_report import CostReport, estimate_cost

    first, *others = with_unique_names(costs).items()
    if not others:
        raise UsageError(f"--match makes others as large as the first, and there is only {first[0]}; name one more")
    free = _free_sizes(given, [name for name, _ in others])
    found = {name: _match_estimate(given.match, first, (name, one), free[name]) for name, one in others}
    anew = (estimate_cost(found[name].spec, one.workload, one.name) for name, one in others)
    return CostReport((first[1], *anew)), {"matched": SizeMatchView(first[0], found)}


def with_unique_names(costs: CostReport) -> dict[str, CostEstimate]:
    """Every price under a name of its own: what is named like one before it gets a number."""
    seen: Counter[str] = Counter()
    found: dict[str, CostEstimate] = {}
    for one in costs:
        seen[one.name] += 1
        found[one.name if seen[one.name] == 1 else f"{one.name} ({seen[one.name]})"] = one
    return found


def _free_sizes(given: argparse.Namespace, names: list[str]) -> dict[str, str | None]:
    """The size that is free of each, or None where nothing says which."""
    free: dict[str, str | None] = dict.fromkeys(names)
    for said in given.free:
        name, equals, size = said.rpartition("=")
        if equals and name not in free:
            raise UsageError(f"--free {said}: nothing that is changed is called {name!r}; {suggest(name, free)}")
        free |= {name: size} if equals else dict.fromkeys(names, size)
    return free


def _match_estimate(
    by: str, first: tuple[str, CostEstimate], other: tuple[str, CostEstimate], free: str | None
) -> SizeMatch:
    from ...costs.size_matching import match_size

    like, spec = _spec_to_match(*first), _spec_to_match(*other)
    try:
        return match_size(spec, like=like, by=by, free=free, workload=other[1].workload)
    except SpecError as error:
        raise UsageError(f"{other[0]} cannot be made as large as {first[0]}: {error}") from None


def _spec_to_match(name: str, price: CostEstimate) -> AttentionSpec:
    from ...spec.attention_spec import AttentionSpec

    if isinstance(price.spec_or_model, AttentionSpec):
        return price.spec_or_model
    raise UsageError(
        f"--match changes single layers, and {name} is more; take one attention of it, as in --layer 0.attention"
    )


def _layer_sizes(given: argparse.Namespace, costs: CostReport) -> LayerSizes:
    """The surroundings of the first attention that is priced."""
    from ...costs.complexity import LayerSizes

    price = costs.estimates[0]
    spec = next(iter(price.attention_specs.values()), None)
    if spec is None:
        raise UsageError(
            f"--complexity takes its width from an attention, and {price.name} has none; name a spec first"
        )
    kernel, window = (
        (DEFAULT_KERNEL if given.kernel is None else given.kernel),
        (DEFAULT_WINDOW if given.window is None else given.window),
    )
    return LayerSizes(price.workload.context, spec.model, math.gcd(spec.heads.q, spec.model), kernel, window)


def _measure_scaling(given: argparse.Namespace, sizes: LayerSizes) -> ScalingMeasurement | None:
    if given.complexity != "measured":
        return None
    from ...costs.complexity import measure_scaling

    return measure_scaling(sizes)


# --- `--plot`, `--csv` ---------------------------------------------------------------------------------

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
    from ...costs.cost_plots import save_plot

    kind = given.plot_kind or PLOT_KINDS[0]
    save_plot(with_unique_names(costs), given.plot, kind)
    return {"plot": PlotView(given.plot, kind)}


def csv_of_costs(given: argparse.Namespace, costs: CostReport, views: Mapping[str, CostView]) -> str:
    """A line for each price, and an error where more was asked for than such lines can hold."""
    if given.json:
        raise UsageError("--csv and --json are two forms of one document; leave one out")
    asked = [f"--{name}" for name in OPTIONS_NOT_IN_CSV if getattr(given, name)] + [
        name for name in views if name not in VIEWS_IN_CSV
    ]
    if asked:
        raise UsageError(
            f"--csv has a line for each that is priced, and no room for {asked[0]}; ask for that with --json"
        )
    from ...costs.cost_report import to_csv

    return to_csv(costs.data["rows"])

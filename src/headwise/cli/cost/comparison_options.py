"""`headwise cost` options that compare: --published, --match, --crossovers, --complexity, --plot
and --csv.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import SpecError, suggest
from ...translation.terminal_text import wrap
from ..arguments import add_overwrite_argument, existing_mode, print_page, to_json
from ..command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ...costs.complexity import ComplexityTable, LayerSizes, ScalingMeasurement
    from ...costs.cost_report import CostEstimate, CostReport
    from ...costs.layer_reach import LayerReachTable
    from ...costs.published_formulas import FormulaComparison, FormulaSource
    from ...costs.size_matching import SizeMatch
    from ...spec.attention_spec import AttentionSpec
    from . import CostView

SOURCE_NAMES = "zhihu-624740065, seeds, paper-2022, palm or scaling-book"


# --- `--published`: published formulas ------------------------------------------------------------


class PublishedFormulasView(NamedTuple):
    """Published numbers beside those of headwise, by source."""

    sources: tuple[FormulaSource, ...]
    rows: tuple[FormulaComparison, ...]

    @property
    def data(self) -> list[dict[str, Any]]:
        """The comparisons as plain values."""
        return [row._asdict() for row in self.rows]

    def __str__(self) -> str:
        return "\n".join(
            line for source in self.sources for line in _format_source(source, self.rows)
        ).lstrip("\n")


def _format_source(source: FormulaSource, rows: Iterable[FormulaComparison]) -> Iterator[str]:
    yield from ("", *wrap(f"{source.name}: {source.source}"))
    for row in rows:
        if row.source == source.name:
            yield ""
            yield from wrap(
                f"{row.name}: {row.quantity} = {row.formula}", indent="  ", hanging="    "
            )
            estimate = "not estimated" if row.estimate is None else f"{row.estimate:,}"
            text = f"published {row.published:,}, headwise {estimate}: {row.explanation}"
            yield from wrap(text, indent="    ", hanging="      ")


def add_published_arguments(parser: CommandParser) -> None:
    """Add --published, --article and --tensor-parallel."""
    group = parser.add_expert_group("published formulas")
    group.add_argument(
        "--published",
        action="append",
        default=[],
        metavar="NAME",
        help=f"compare with published formulas: {SOURCE_NAMES}",
    )
    group.add_argument(
        "--article",
        metavar="NUMBER",
        help="table of an article with numbers of GPT-3 and LLaMA-65B: 624740065",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        default=8,
        metavar="COUNT",
        help="tensor-parallel devices of paper-2022",
    )


def print_article(args: argparse.Namespace) -> int:
    """Print the table of --article, which is of models of its own."""
    from ...costs.published_article import ArticleTable

    if args.specs or args.preset:
        name = [*args.specs, *args.preset][0]
        raise UsageError(
            f"--article {args.article} is a table of models of its own; leave {name} out"
        )
    table = ArticleTable.from_name(args.article)
    print_page(to_json(table.data) if args.json else str(table))
    return 0


def make_published_views(
    args: argparse.Namespace, costs: CostReport
) -> Mapping[str, PublishedFormulasView]:
    """Return the report of --published, if it is given."""
    if not args.published:
        return {}
    from ...costs.published_formulas import FormulaSource, compare_formulas

    sources = tuple(FormulaSource.from_name(name) for name in args.published)
    rows = [
        row
        for source in sources
        for estimate in costs
        for row in compare_formulas(estimate, source, args.tensor_parallel)
    ]
    return {"published": PublishedFormulasView(sources, tuple(rows))}


# --- `--match`, `--crossovers`, `--complexity` ----------------------------------------------------

MATCH_QUANTITIES = ("params", "flops", "kv")
DEFAULT_KERNEL, DEFAULT_WINDOW = 3, 64


@dataclass(frozen=True)
class SizeMatchView:
    """The sizes that --match changed so that each spec is as large as the first."""

    first: str
    matches: Mapping[str, SizeMatch]

    def __str__(self) -> str:
        lines = [f"resized to match {self.first}:"]
        for name, match in self.matches.items():
            lines += wrap(f"{name}: {match}", indent="  ", hanging="    ")
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The matches as plain values."""
        return {
            "like": self.first,
            "rows": [{"name": name, **match.data} for name, match in self.matches.items()],
        }


@dataclass(frozen=True)
class ComplexityView:
    """The table of complexities; with --complexity measured, the scaling and the reach of small
    layers.
    """

    table: ComplexityTable
    measurement: ScalingMeasurement | None
    reach: LayerReachTable | None = None

    def __str__(self) -> str:
        return "\n\n".join(
            str(part) for part in (self.table, self.measurement, self.reach) if part is not None
        )

    @property
    def data(self) -> dict[str, Any]:
        """The table and the measurement as plain values."""
        measured = {"measured": self.measurement, "reach": self.reach}
        return self.table.data | {
            name: part.data if part else None for name, part in measured.items()
        }


def add_comparison_arguments(parser: CommandParser) -> None:
    """Add --match, --crossovers, --complexity and the options that refine them."""
    group = parser.add_argument_group("comparing")
    group.add_argument(
        "--match",
        choices=MATCH_QUANTITIES,
        metavar="WHAT",
        help="resize each spec to match the first: params, flops or kv",
    )
    group.add_argument(
        "--crossovers", action="store_true", help="lengths at which each costs less than the first"
    )
    expert = parser.add_expert_group("details of comparing")
    expert.add_argument(
        "--resize",
        action="append",
        default=[],
        metavar="[SPEC=]SIZE",
        help=(
            "size that --match changes: dim, vdim, kv, q, model, or one of a part, as in "
            "mla=project.rank"
        ),
    )
    expert.add_argument(
        "--complexity",
        nargs="?",
        const="counted",
        choices=("counted", "measured"),
        metavar="HOW",
        help=(
            "compare with recurrent and convolutional layers: counted by formulas (also without "
            "HOW), or measured"
        ),
    )
    expert.add_argument(
        "--kernel",
        type=int,
        metavar="TOKENS",
        help=f"kernel of its convolutions (default: {DEFAULT_KERNEL})",
    )
    expert.add_argument(
        "--window",
        type=int,
        metavar="TOKENS",
        help=f"window of its local attention (default: {DEFAULT_WINDOW})",
    )


def make_comparison_views(args: argparse.Namespace, costs: CostReport) -> Mapping[str, CostView]:
    """Return the reports of --crossovers and --complexity, as far as they are given."""
    views: dict[str, CostView] = {}
    if args.crossovers:
        from ...costs.cost_vs_length import find_crossovers

        specs = {
            name: estimate.spec_or_model for name, estimate in with_unique_names(costs).items()
        }
        views["crossovers"] = find_crossovers(specs, costs.estimates[0].workload)
    if args.complexity:
        from ...costs.complexity import ComplexityTable

        sizes = _layer_sizes(args, costs)
        table, is_measured = ComplexityTable.from_sizes(sizes), args.complexity == "measured"
        views["complexity"] = ComplexityView(
            table, *(_measure_layers(sizes) if is_measured else (None, None))
        )
    elif args.kernel is not None or args.window is not None:
        raise UsageError(
            "--kernel and --window are sizes of --complexity; give it, or leave them out"
        )
    return views


def match_sizes(
    args: argparse.Namespace, costs: CostReport
) -> tuple[CostReport, dict[str, CostView]]:
    """With --match, resize every spec to match the first; return the new estimates, and a report of
    the changes.
    """
    if args.match is None:
        if args.resize:
            raise UsageError(
                f"--resize {args.resize[0]} changes nothing without --match; give --match params, "
                "flops or kv"
            )
        return costs, {}
    from ...costs.cost_report import CostReport, estimate_cost

    first, *others = with_unique_names(costs).items()
    if not others:
        raise UsageError(
            f"--match resizes others to match the first, and there is only {first[0]}; name one "
            "more"
        )
    free = _free_sizes(args, [name for name, _ in others])
    matches = {
        name: _match_estimate(args.match, first, (name, estimate), free[name])
        for name, estimate in others
    }
    resized = [
        estimate_cost(matches[name].spec, estimate.workload, estimate.name)
        for name, estimate in others
    ]
    return CostReport((first[1], *resized)), {"matched": SizeMatchView(first[0], matches)}


def with_unique_names(costs: CostReport) -> dict[str, CostEstimate]:
    """Return the estimates by name; a repeated name gets a number, as in "gqa (2)"."""
    counts: Counter[str] = Counter()
    by_name: dict[str, CostEstimate] = {}
    for estimate in costs:
        counts[estimate.name] += 1
        number = counts[estimate.name]
        by_name[estimate.name if number == 1 else f"{estimate.name} ({number})"] = estimate
    return by_name


def _free_sizes(args: argparse.Namespace, names: list[str]) -> dict[str, str | None]:
    """Return the size that --resize names for each spec; None if it names none."""
    free: dict[str, str | None] = dict.fromkeys(names)
    for text in args.resize:
        name, equals, size = text.rpartition("=")
        if equals and name not in free:
            raise UsageError(
                f"--resize {text}: there is no resized spec {name!r}; {suggest(name, free)}"
            )
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
        raise UsageError(f"cannot resize {other[0]} to match {first[0]}: {error}") from None


def _spec_to_match(name: str, estimate: CostEstimate) -> AttentionSpec:
    from ...spec.attention_spec import AttentionSpec

    if isinstance(estimate.spec_or_model, AttentionSpec):
        return estimate.spec_or_model
    raise UsageError(
        f"--match changes single layers, and {name} is a model; select one attention, as in "
        "--layer 0.attention"
    )


def _layer_sizes(args: argparse.Namespace, costs: CostReport) -> LayerSizes:
    """Sizes for --complexity, from the first attention spec."""
    from ...costs.complexity import LayerSizes

    estimate = costs.estimates[0]
    spec = next(iter(estimate.attention_specs.values()), None)
    if spec is None:
        fact = f"--complexity takes its width from an attention layer, and {estimate.name} has none"
        raise UsageError(f"{fact}; name a spec first")
    return LayerSizes(
        tokens=estimate.workload.context,
        model=spec.model,
        heads=math.gcd(spec.heads.q, spec.model),
        kernel=DEFAULT_KERNEL if args.kernel is None else args.kernel,
        window=DEFAULT_WINDOW if args.window is None else args.window,
    )


def _measure_layers(sizes: LayerSizes) -> tuple[ScalingMeasurement, LayerReachTable]:
    from ...costs.complexity import measure_scaling
    from ...costs.layer_reach import measure_layer_reach

    return measure_scaling(sizes), measure_layer_reach()


# --- `--plot`, `--csv` ----------------------------------------------------------------------------

PLOT_KINDS = ("all", "roofline", "kv", "flops", "crossovers")
OPTIONS_NOT_IN_CSV = ("operations", "terms", "verify")
VIEWS_IN_CSV = (
    "matched",
    "plot",
)  # reports that change the estimates themselves, or are a file of their own


class PlotView(NamedTuple):
    """The file that a plot was written to."""

    file: str
    kind: str

    @property
    def data(self) -> dict[str, Any]:
        """The file and the kind of plot as plain values."""
        return self._asdict()

    def __str__(self) -> str:
        return f"plot written to {self.file}"


def add_plot_arguments(parser: CommandParser) -> None:
    """Add --csv, --plot and --plot-kind."""
    group = parser.add_argument_group("other output formats")
    group.add_argument(
        "--csv", action="store_true", help="print CSV with one line per spec instead of the table"
    )
    group.add_argument("--plot", metavar="FILE", help="draw charts into a .svg, .png or .pdf file")
    expert = parser.add_expert_group("charts")
    add_overwrite_argument(expert)
    expert.add_argument(
        "--plot-kind",
        metavar="KIND",
        help=f"{', '.join(PLOT_KINDS[1:])} or {PLOT_KINDS[0]} (default: {PLOT_KINDS[0]})",
    )


def check_plot(args: argparse.Namespace) -> None:
    """Refuse a file of --plot that may not be written, before anything is computed."""
    from ...costs.cost_plots import check_plot_path

    if args.plot is not None:
        check_plot_path(args.plot, existing_mode(args))


def make_plot_views(args: argparse.Namespace, costs: CostReport) -> Mapping[str, PlotView]:
    """Draw the plot, if --plot is given."""
    if args.plot is None:
        if args.plot_kind is not None:
            raise UsageError(
                f"--plot-kind {args.plot_kind} draws nothing without a file; give --plot costs.svg"
            )
        return {}
    from ...costs.cost_plots import save_plot

    kind = args.plot_kind or PLOT_KINDS[0]
    save_plot(with_unique_names(costs), args.plot, kind, overwrite=args.overwrite)
    return {"plot": PlotView(args.plot, kind)}


def csv_of_costs(args: argparse.Namespace, costs: CostReport, views: Mapping[str, CostView]) -> str:
    """Return the costs as CSV; raise an error if other reports were requested too."""
    if args.json:
        raise UsageError("--csv and --json are two forms of one document; leave one out")
    unsupported = [f"--{name}" for name in OPTIONS_NOT_IN_CSV if getattr(args, name)]
    unsupported += [name for name in views if name not in VIEWS_IN_CSV]
    if unsupported:
        raise UsageError(
            f"--csv has one line per spec and no room for {unsupported[0]}; use --json instead"
        )
    from ...costs.cost_plots import to_csv

    return to_csv(costs.data["rows"])

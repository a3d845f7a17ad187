"""`headwise heads`: measure and classify every head of a model; optionally importance, redundancy and a baseline."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..progress import ProgressReporter
from .arguments import add_json_argument, print_page, supports_style, to_json
from .command_parser import TERMINAL_WIDTH, CommandParser, UsageError
from .text_arguments import add_text_arguments, attach_named_tokenizer, check_text_arguments, read_examples

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.head_redundancy import RedundancyResult
    from ..head_analysis.head_table import HeadTable
    from ..head_analysis.importance_methods import ImportanceResult


TRACE_SUFFIX = ".trace"


@dataclass
class ExtraAnalyses:
    """Results of --importance, --redundancy and --random-baseline; None if not requested. `lines` summarise them."""

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    random_baseline: HeadTable | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def data(self) -> dict[str, Any]:
        """Results as plain values, by option."""
        results = {
            "importance": self.importance,
            "redundancy": self.redundancy,
            "random_baseline": self.random_baseline,
        }
        return {name: result.data for name, result in results.items() if result is not None}


def add_extra_arguments(parser: CommandParser) -> None:
    """Add --importance, --redundancy and --random-baseline."""
    parser.add_argument(
        "--importance", metavar="METHOD", help="estimate head importance: leave-one-out, michel or shapley"
    )
    parser.add_argument("--redundancy", action="store_true", help="measure how similar heads are, compared with chance")
    parser.add_argument(
        "--random-baseline", action="store_true", help="also measure a randomly initialised copy of the model"
    )


def run_extras(
    model: Any,
    table: HeadTable,
    examples: Sequence[Example],
    args: argparse.Namespace,
    measure: Callable[[Any], HeadTable],
    report: ProgressReporter,
) -> tuple[HeadTable, ExtraAnalyses]:
    """Run the requested analyses; `measure` makes the head table of another model. Return the table and the results."""
    extras = ExtraAnalyses()
    if args.importance is not None:
        extras.importance = _measure_importance(model, examples, args, report)
        table = _add_importance(table, extras)
    baseline = None
    if args.random_baseline:
        from ..head_analysis.random_baseline import make_random_baseline

        baseline = make_random_baseline(model, seed=args.seed)
        extras.random_baseline = measure(baseline)
        extras.lines.append(
            f"classes here: {_count_classes(table)}; of the randomly initialised model: "
            f"{_count_classes(extras.random_baseline)}"
        )
    if args.redundancy:
        from ..head_analysis.head_redundancy import measure_redundancy

        report("comparing heads")
        extras.redundancy = measure_redundancy(model, examples, name=table.model)
        extras.lines.append(extras.redundancy.sentence)
        if baseline is not None:
            extras.lines.append(
                extras.redundancy.compare_with(measure_redundancy(baseline, examples, name="its random baseline"))
            )
    return table, extras


def _measure_importance(
    model: Any, examples: Sequence[Example], args: argparse.Namespace, report: ProgressReporter
) -> ImportanceResult:
    from ..head_analysis.head_importance import estimate_importance
    from ..head_analysis.importance_methods import ImportanceOptions

    options = ImportanceOptions(max_seconds=args.budget, num_resamples=args.resamples, seed=args.seed)
    progress = report.counter(f"importance of heads ({args.importance})", len(examples), "texts")
    return estimate_importance(model, examples, method=args.importance, options=options, progress=progress)


def _add_importance(table: HeadTable, extras: ExtraAnalyses) -> HeadTable:
    """Return the table with the importance of every head as a measure; adds a line on the most important ones."""
    from ..head_analysis.measure_tables import format_interval

    result = extras.importance
    assert result is not None
    by_head = {(head.site, head.head): head.measure for head in result.heads}
    heads = tuple(
        replace(head, measures={**head.measures, "importance": by_head[head.site, head.head]})
        if (head.site, head.head) in by_head
        else head
        for head in table.heads
    )
    top_heads = "; ".join(
        f"{head.site} {head.head} {format_interval(head.measure)}" for head in result.by_importance[:5]
    )
    extras.lines.append(
        f"importance ({result.method}, {result.objective}, {result.texts} texts), with 95 % intervals: most important "
        f"are {top_heads}"
    )
    return replace(table, heads=heads, notes=(*table.notes, *result.notes))


def _count_classes(table: HeadTable) -> str:
    from ..head_analysis.head_figures import class_group

    counts = Counter(
        group for head in table.heads for group in {class_group(head_class.name) for head_class in head.classes}
    )
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def format_extras(extras: ExtraAnalyses) -> str:
    """Format each summary line as a paragraph."""
    return "\n".join("\n" + textwrap.fill(line, TERMINAL_WIDTH) for line in extras.lines)


# --- `headwise heads` ----------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Measure and classify the heads of a model, print the table, and write figures if asked."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.model.endswith(TRACE_SUFFIX):
        return _draw_from_trace(args, parser)
    _check_arguments(args)
    from ..hub.pretrained_models import load_original
    from ..inspect.attention_sites import sites

    model = load_original(args.model).eval()
    attach_named_tokenizer(model, args)
    drawn_heads = _locate_drawn_heads(args, sites(model)) if args.draw else []
    examples, notes = read_examples(model, args)
    report = ProgressReporter()
    measure = partial(_measure_model, examples=examples, args=args, report=report)
    table, extras = run_extras(model, measure(model), examples, args, measure, report)
    table = replace(table, notes=(*table.notes, *notes))
    report("")
    if args.out is not None:
        from ..head_analysis.head_report import ReportOptions, write_head_report

        options = ReportOptions(extras.importance, extras.redundancy, _parse_head_pair(args.pair), drawn_heads)
        for name in write_head_report(model, table, examples, Path(args.out), options):
            print(name, file=sys.stderr)
    print_page(to_json(table.data | extras.data) if args.json else _format_table(table, args) + format_extras(extras))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "heads",
        "Measure what every head of a model attends to over texts, compare it with chance, and classify the heads, "
        "with bootstrap confidence intervals over the texts.",
        "headwise heads path/to/model --data texts.txt --importance michel",
        "headwise heads dates.trace --draw E1H3 X0H2 --out heads",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a headwise or transformers folder; with --draw also a .trace file"
    )
    add_text_arguments(
        parser,
        "use examples of a task with known alignments: dates",
        "read parsed sentences, and measure their dependency relations",
    )
    parser.add_argument("--sort", metavar="MEASURE", help="list heads by this measure, largest first")
    add_extra_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="write the table and figures (SVG, PNG) to this folder")
    parser.add_argument(
        "--draw",
        nargs="+",
        default=[],
        metavar="HEAD",
        help="with --out, also draw these heads on the first text, such as L3H2 or SITE:HEAD",
    )
    add_json_argument(parser)
    expert = parser.add_expert_group("details of the measurement")
    expert.add_argument(
        "--align",
        dest="align_files",
        nargs=3,
        metavar=("SOURCE", "TARGET", "GOLD"),
        help="read parallel lines, and word alignments as in 0-0 1-2 2?3",
    )
    expert.add_argument(
        "--criteria",
        default="ours",
        metavar="NAME",
        help="definitions of the head classes: ours, untested (ours without the test), clark or voita",
    )
    expert.add_argument("--resamples", type=int, default=1000, metavar="COUNT", help="bootstrap resamples")
    expert.add_argument("--seed", type=int, default=0, metavar="INT", help="random seed")
    expert.add_argument(
        "--budget", type=float, metavar="SECONDS", help="time limit for --importance (default: no limit)"
    )
    expert.add_argument(
        "--pair",
        nargs="*",
        default=[],
        metavar="SITE:HEAD",
        help="with --out, draw these two heads over each other (default: the most global and the most local)",
    )
    return parser


def _check_arguments(args: argparse.Namespace) -> None:
    check_text_arguments(args)
    if args.resamples < 100:
        raise UsageError(f"--resamples {args.resamples} is too few for a confidence interval; give at least 100")
    if _parse_head_pair(args.pair) and args.out is None:
        raise UsageError("--pair needs a folder for the figure; add --out DIR")
    _check_drawing(args)


def _check_drawing(args: argparse.Namespace) -> None:
    """Check --draw and --out."""
    from ..head_analysis.head_table import check_head_name

    for name in args.draw:
        check_head_name(name)
    if args.draw and args.out is None:
        raise UsageError("--draw needs a folder for the figures; add --out DIR")
    if args.out is not None and Path(args.out).exists() and not Path(args.out).is_dir():
        raise UsageError(f"{args.out} is a file; give a folder")


def _locate_drawn_heads(args: argparse.Namespace, layers: Sequence[Any]) -> list[tuple[str, int]]:
    from ..head_analysis.head_table import locate_head

    return [locate_head(name, layers) for name in args.draw]


def _draw_from_trace(args: argparse.Namespace, parser: CommandParser) -> int:
    """Draw heads of a trace, which needs neither the model nor texts."""
    _check_drawing(args)
    if not args.draw:
        raise UsageError(f"{args.model} is a trace, whose heads can only be drawn; add --draw HEAD --out DIR")
    unused = [name for name in vars(args) if getattr(args, name) != parser.get_default(name)]
    if unused := [name for name in unused if name not in ("model", "draw", "out")]:
        raise UsageError(f"--{unused[0].replace('_', '-')} needs a model, but {args.model} is a trace; leave it out")
    from ..head_analysis.head_report import draw_traced_heads
    from ..traces import load_trace

    trace = load_trace(args.model)
    heads = _locate_drawn_heads(args, trace.layers)
    for site, head in heads:
        trace.head_weights(site, head, slice(0, 1))  # refuse an unknown head before anything is written
    for name in draw_traced_heads(trace, heads, Path(args.out)):
        print(name)
    return 0


def _parse_head_pair(names: list[str]) -> list[tuple[str, int]]:
    """Parse --pair: two heads as (site, head), or an empty list."""
    parts = [name.rpartition(":") for name in names]
    if len(names) not in (0, 2) or not all(site and head.isdecimal() for site, _, head in parts):
        raise UsageError(
            f"--pair {' '.join(names)} is not two heads; write SITE:HEAD twice, as in encoder.0.attention:3"
        )
    return [(site, int(head)) for site, _, head in parts]


def _measure_model(
    model: Any, *, examples: Sequence[Example], args: argparse.Namespace, report: ProgressReporter
) -> HeadTable:
    from ..head_analysis.dependency_syntax import DependencyScores
    from ..head_analysis.head_measurement import MeasureOptions
    from ..head_analysis.text_analysis import measure_and_classify
    from ..head_analysis.word_alignment import AlignmentScores

    options = MeasureOptions(num_resamples=args.resamples, seed=args.seed)
    convention = "clark" if args.criteria == "clark" else "ours"
    has_links = args.align_files is not None or args.task is not None
    collectors = (
        [DependencyScores(convention=convention)]
        if args.conllu is not None
        else [AlignmentScores()]
        if has_links
        else []
    )
    progress = report.counter("measuring heads", len(examples), "texts")
    return measure_and_classify(
        model, examples, criteria=args.criteria, options=options, collectors=collectors, progress=progress
    )


def _format_table(table: HeadTable, args: argparse.Namespace) -> str:
    from ..head_analysis.head_figures import format_head_table, with_ansi_colour, without_colour
    from ..head_analysis.measure_tables import format_head_ranking

    if args.sort is not None:
        return format_head_ranking(table, args.sort)
    return format_head_table(table, with_ansi_colour if supports_style() else without_colour)

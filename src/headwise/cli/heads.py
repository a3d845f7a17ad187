"""What `headwise heads` tells besides the table, when asked: importance, redundancy, and a twin without training."""

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

from .arguments import TERMINAL_WIDTH, CommandParser, UsageError, add_json_argument, print_page, supports_style, to_json
from .text_arguments import add_text_arguments, attach_named_tokenizer, check_text_arguments, read_examples

if TYPE_CHECKING:
    from ..head_analysis.annotated_examples import Example
    from ..head_analysis.head_redundancy import RedundancyResult
    from ..head_analysis.head_table import HeadTable
    from ..head_analysis.importance_methods import ImportanceResult


@dataclass
class ExtraAnalyses:
    """What was asked besides, as far as it was; `data` by the names of the options."""

    importance: ImportanceResult | None = None
    redundancy: RedundancyResult | None = None
    random_baseline: HeadTable | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"importance": self.importance, "redundancy": self.redundancy, "twin": self.random_baseline}
        return {name: one.data for name, one in told.items() if one is not None}


def add_extra_arguments(parser: argparse.ArgumentParser) -> None:
    """Let the verb be asked for it."""
    parser.add_argument("--importance", metavar="METHOD", help="how much heads matter: leave-one-out, michel, shapley")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of --importance, at most")
    parser.add_argument("--redundancy", action="store_true", help="how alike heads are, held to chance")
    parser.add_argument("--twin", action="store_true", help="the same of a model with fresh weights, beside it")


def run_extras(
    model: Any,
    table: HeadTable,
    examples: Sequence[Example],
    args: argparse.Namespace,
    measure: Callable[[Any], HeadTable],
) -> tuple[HeadTable, ExtraAnalyses]:
    """The table with what was asked in it, and the rest; `again` measures another model alike."""
    more = ExtraAnalyses()
    if args.importance is not None:
        table = _measure_importance(model, table, examples, args, more)
    other = None
    if args.twin:
        from ..head_analysis.random_baseline import make_random_baseline

        other = make_random_baseline(model, seed=args.seed)
        more.random_baseline = measure(other)
        more.lines.append(
            f"classes here: {_count_classes(table)}; of its twin with fresh weights: "
            f"{_count_classes(more.random_baseline)}"
        )
    if args.redundancy:
        from ..head_analysis.head_redundancy import measure_redundancy

        more.redundancy = measure_redundancy(model, examples, name=table.model)
        more.lines.append(more.redundancy.sentence)
        if other is not None:
            more.lines.append(more.redundancy.compare_with(measure_redundancy(other, examples, name="its twin")))
    return table, more


def _measure_importance(
    model: Any, table: HeadTable, scenes: Sequence[Example], given: argparse.Namespace, more: ExtraAnalyses
) -> HeadTable:
    from ..head_analysis.head_importance import estimate_importance
    from ..head_analysis.importance_methods import ImportanceOptions

    how = ImportanceOptions(max_seconds=given.budget, num_resamples=given.resamples, seed=given.seed)
    found = more.importance = estimate_importance(model, scenes, method=given.importance, options=how)
    by_head = {(one.site, one.head): one.measure for one in found.heads}
    heads = tuple(
        replace(one, measures={**one.measures, "importance": by_head[one.site, one.head]})
        if (one.site, one.head) in by_head
        else one
        for one in table.heads
    )
    first = ", ".join(f"{one.site} {one.head} ({one.value:.3g})" for one in found.by_importance[:5])
    more.lines.append(f"importance by {found.method}, of {found.objective}, {found.texts} texts: most of all {first}")
    return replace(table, heads=heads, notes=(*table.notes, *found.notes))


def _count_classes(table: HeadTable) -> str:
    from ..head_analysis.head_figures import class_group

    met = Counter(group for one in table.heads for group in {class_group(named.name) for named in one.classes})
    return ", ".join(f"{count} {name}" for name, count in met.most_common()) or "none"


def format_extras(more: ExtraAnalyses) -> str:
    """A paragraph for each."""
    return "\n".join("\n" + textwrap.fill(line, TERMINAL_WIDTH) for line in more.lines)


# --- `headwise heads` ----------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Measure, name, and show the heads of a model."""
    given = _parser().parse_args(argv)
    _check_arguments(given)
    from ..hub.model_import import load_original

    model = load_original(given.model).eval()
    attach_named_tokenizer(model, given)
    scenes, notes = read_examples(model, given)
    measured = partial(_measure_model, scenes=scenes, given=given)
    table, more = run_extras(model, measured(model), scenes, given, measured)
    table = replace(table, notes=(*table.notes, *notes))
    if given.out is not None:
        from ..head_analysis.head_report import write_head_report

        for name in write_head_report(
            model, table, scenes, Path(given.out), (more.importance, more.redundancy), _parse_head_pair(given.pair)
        ):
            print(name, file=sys.stderr)
    print_page(to_json(table.data | more.data) if given.json else _format_table(table, given) + format_extras(more))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "heads",
        "What every head of a model does over texts: where it looks, against what chance would give, and the classes "
        "that this makes it one of, with intervals over the texts.",
        "headwise heads path/to/model --conllu parsed.conllu --limit 500 --out heads",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder of headwise, or one of transformers")
    add_text_arguments(parser, "examples of a task that knows its links: dates")
    parser.add_argument(
        "--align",
        dest="align_files",
        nargs=3,
        metavar=("SOURCE", "TARGET", "GOLD"),
        help="pairs of lines, and links between their words as in 0-0 1-2 2?3",
    )
    parser.add_argument("--sort", metavar="MEASURE", help="heads with the most of it first")
    parser.add_argument("--criteria", default="ours", metavar="WHOSE", help="ours, clark or voita: what makes a class")
    parser.add_argument("--resamples", type=int, default=1000, metavar="COUNT", help="draws of the bootstrap (1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="of the bootstrap (0)")
    add_extra_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="write figures there, as SVG and PNG, and the table")
    parser.add_argument(
        "--pair",
        nargs="*",
        default=[],
        metavar="SITE:HEAD",
        help="with --out, two heads laid over each other; the most global and the most local unless named",
    )
    add_json_argument(parser)
    return parser


def _check_arguments(given: argparse.Namespace) -> None:
    check_text_arguments(given)
    if given.resamples < 100:
        raise UsageError(f"--resamples {given.resamples} make no interval; give at least 100")
    if _parse_head_pair(given.pair) and given.out is None:
        raise UsageError("--pair is drawn into a folder; say which by --out DIR")
    if given.out is not None and Path(given.out).exists() and not Path(given.out).is_dir():
        raise UsageError(f"{given.out} is a file; give a folder")


def _parse_head_pair(said: list[str]) -> list[tuple[str, int]]:
    """Two heads that were named, or none."""
    parted = [one.rpartition(":") for one in said]
    if len(said) not in (0, 2) or not all(site and head.isdecimal() for site, _, head in parted):
        raise UsageError(
            f"--pair {' '.join(said)} names no two heads; write SITE:HEAD twice, as in encoder.0.attention:3"
        )
    return [(site, int(head)) for site, _, head in parted]


def _measure_model(model: Any, *, scenes: Sequence[Example], given: argparse.Namespace) -> HeadTable:
    from ..head_analysis import literature_metrics
    from ..head_analysis.dependency_syntax import DependencyScores
    from ..head_analysis.head_classes import classify_heads
    from ..head_analysis.head_measurement import MeasureOptions, measure_heads
    from ..head_analysis.word_alignment import AlignmentScores
    from ..inspect.trace_capture import get_model_name

    def tell(count: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{count} of {len(scenes)} texts", end="" if count < len(scenes) else "\n", file=sys.stderr)

    chosen = MeasureOptions(num_resamples=given.resamples, seed=given.seed)
    chosen = chosen._replace(metrics=(*chosen.metrics, *literature_metrics.metrics_for_criteria(given.criteria)))
    theirs = "clark" if given.criteria == "clark" else "ours"
    links = given.align_files is not None or given.task is not None
    more = [DependencyScores(convention=theirs)] if given.conllu is not None else [AlignmentScores()] if links else []
    table = measure_heads(model, scenes, options=chosen, collectors=more, name=get_model_name(model), progress=tell)
    return classify_heads(table, criteria=given.criteria)


def _format_table(table: HeadTable, given: argparse.Namespace) -> str:
    from ..head_analysis.head_figures import format_head_ranking, format_head_table, with_ansi_colour, without_colour

    if given.sort is not None:
        return format_head_ranking(table, given.sort)
    return format_head_table(table, with_ansi_colour if supports_style() else without_colour)

"""`headwise heads`: what every head of a model does over texts, and what it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reading import check_text_arguments, read_examples, attach_named_tokenizer, add_text_arguments
from ..screen import CommandParser, UsageError, to_json, supports_style, print_page, add_json_argument
from .more import run_extras, add_extra_arguments
from .more import format_extras as told_more

if TYPE_CHECKING:
    from ...heads.scene import Example
    from ...heads.table import HeadTable


def main(argv: list[str]) -> int:
    """Measure, name, and show the heads of a model."""
    given = _parser().parse_args(argv)
    _check_arguments(given)
    from ...hub.opening import load_original

    model = load_original(given.model).eval()
    attach_named_tokenizer(model, given)
    scenes, notes = read_examples(model, given)
    measured = partial(_measure_model, scenes=scenes, given=given)
    table, more = run_extras(model, measured(model), scenes, given, measured)
    table = replace(table, notes=(*table.notes, *notes))
    if given.out is not None:
        from ...heads.report import write_head_report

        for name in write_head_report(model, table, scenes, Path(given.out), (more.importance, more.redundancy), _parse_head_pair(given.pair)):
            print(name, file=sys.stderr)
    print_page(to_json(table.data | more.data) if given.json else _format_table(table, given) + told_more(more))
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
        "--align", dest="align_files", nargs=3, metavar=("SOURCE", "TARGET", "GOLD"),
        help="pairs of lines, and links between their words as in 0-0 1-2 2?3",
    )  # fmt: skip
    parser.add_argument("--sort", metavar="MEASURE", help="heads with the most of it first")
    parser.add_argument("--criteria", default="ours", metavar="WHOSE", help="ours, clark or voita: what makes a class")
    parser.add_argument("--resamples", type=int, default=1000, metavar="COUNT", help="draws of the bootstrap (1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="of the bootstrap (0)")
    add_extra_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="write figures there, as SVG and PNG, and the table")
    parser.add_argument(
        "--pair", nargs="*", default=[], metavar="SITE:HEAD",
        help="with --out, two heads laid over each other; the most global and the most local unless named",
    )  # fmt: skip
    add_json_argument(parser)
    return parser


def _check_arguments(given: argparse.Namespace) -> None:
    check_text_arguments(given)
    if given.num_resamples < 100:
        raise UsageError(f"--resamples {given.num_resamples} make no interval; give at least 100")
    if _parse_head_pair(given.pair) and given.out is None:
        raise UsageError("--pair is drawn into a folder; say which by --out DIR")
    if given.out is not None and Path(given.out).exists() and not Path(given.out).is_dir():
        raise UsageError(f"{given.out} is a file; give a folder")


def _parse_head_pair(said: list[str]) -> list[tuple[str, int]]:
    """Two heads that were named, or none."""
    parted = [one.rpartition(":") for one in said]
    if len(said) not in (0, 2) or not all(site and head.isdecimal() for site, _, head in parted):
        raise UsageError(f"--pair {' '.join(said)} names no two heads; write SITE:HEAD twice, as in encoder.0.attention:3")
    return [(site, int(head)) for site, _, head in parted]


def _measure_model(model: Any, *, scenes: Sequence[Example], given: argparse.Namespace) -> HeadTable:
    from ...heads import published
    from ...heads.alignment import AlignmentScores
    from ...heads.classes import classify_heads
    from ...heads.measuring import MeasureOptions, measure_heads
    from ...heads.syntax import DependencyScores
    from ...hub.capturing import get_model_name

    def tell(count: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{count} of {len(scenes)} texts", end="" if count < len(scenes) else "\n", file=sys.stderr)

    chosen = MeasureOptions(num_resamples=given.num_resamples, seed=given.seed)
    chosen = chosen._replace(metrics=(*chosen.metrics, *published.metrics_for_criteria(given.criteria)))
    theirs = "clark" if given.criteria == "clark" else "ours"
    links = given.align_files is not None or given.task is not None
    more = [DependencyScores(convention=theirs)] if given.conllu is not None else [AlignmentScores()] if links else []
    table = measure_heads(model, scenes, options=chosen, collectors=more, name=get_model_name(model), progress=tell)
    return classify_heads(table, criteria=given.criteria)


def _format_table(table: HeadTable, given: argparse.Namespace) -> str:
    from ...heads.telling import format_head_ranking, with_ansi_colour, without_colour, format_head_table

    if given.sort is not None:
        return format_head_ranking(table, given.sort)
    return format_head_table(table, with_ansi_colour if supports_style() else without_colour)

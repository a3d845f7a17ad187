"""`headwise heads`: what every head of a model does over texts, and what it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reading import check_texts, scenes_of, spoken, take_texts
from ..screen import Arguments, Wrong, document, in_colour, show, take_form
from .more import asked, take_more
from .more import told as told_more

if TYPE_CHECKING:
    from ...heads.scene import Scene
    from ...heads.table import Table


def main(argv: list[str]) -> int:
    """Measure, name, and show the heads of a model."""
    given = _parser().parse_args(argv)
    _check(given)
    from ...hub.opening import opened

    model = opened(given.model).eval()
    spoken(model, given)
    scenes, notes = scenes_of(model, given)
    measured = partial(_measured, scenes=scenes, given=given)
    table, more = asked(model, measured(model), scenes, given, measured)
    table = replace(table, notes=(*table.notes, *notes))
    if given.out is not None:
        from ...heads.report import write_all

        for name in write_all(model, table, scenes, Path(given.out), (more.weighed, more.alike), _pair(given.pair)):
            print(name, file=sys.stderr)
    show(document(table.data | more.data) if given.json else _told(table, given) + told_more(more))
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        "heads",
        "What every head of a model does over texts: where it looks, against what chance would give, and the classes "
        "that this makes it one of, with intervals over the texts.",
        "headwise heads path/to/model --conllu parsed.conllu --limit 500 --out heads",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder of headwise, or one of transformers")
    take_texts(parser, "examples of a task that knows its links: dates")
    parser.add_argument(
        "--align", dest="align_files", nargs=3, metavar=("SOURCE", "TARGET", "GOLD"),
        help="pairs of lines, and links between their words as in 0-0 1-2 2?3",
    )  # fmt: skip
    parser.add_argument("--sort", metavar="MEASURE", help="heads with the most of it first")
    parser.add_argument("--criteria", default="ours", metavar="WHOSE", help="ours, clark or voita: what makes a class")
    parser.add_argument("--resamples", type=int, default=1000, metavar="COUNT", help="draws of the bootstrap (1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="of the bootstrap (0)")
    take_more(parser)
    parser.add_argument("--out", metavar="DIR", help="write figures there, as SVG and PNG, and the table")
    parser.add_argument(
        "--pair", nargs="*", default=[], metavar="SITE:HEAD",
        help="with --out, two heads laid over each other; the most global and the most local unless named",
    )  # fmt: skip
    take_form(parser)
    return parser


def _check(given: argparse.Namespace) -> None:
    check_texts(given)
    if given.resamples < 100:
        raise Wrong(f"--resamples {given.resamples} make no interval; give at least 100")
    if _pair(given.pair) and given.out is None:
        raise Wrong("--pair is drawn into a folder; say which by --out DIR")
    if given.out is not None and Path(given.out).exists() and not Path(given.out).is_dir():
        raise Wrong(f"{given.out} is a file; give a folder")


def _pair(said: list[str]) -> list[tuple[str, int]]:
    """Two heads that were named, or none."""
    parted = [one.rpartition(":") for one in said]
    if len(said) not in (0, 2) or not all(site and head.isdecimal() for site, _, head in parted):
        raise Wrong(f"--pair {' '.join(said)} names no two heads; write SITE:HEAD twice, as in encoder.0.attention:3")
    return [(site, int(head)) for site, _, head in parted]


def _measured(model: Any, *, scenes: Sequence[Scene], given: argparse.Namespace) -> Table:
    from ...heads import published
    from ...heads.alignment import Alignment
    from ...heads.classes import classified
    from ...heads.measuring import Chosen, measure
    from ...heads.syntax import Syntax
    from ...hub.capturing import name_of

    def tell(count: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{count} of {len(scenes)} texts", end="" if count < len(scenes) else "\n", file=sys.stderr)

    chosen = Chosen(resamples=given.resamples, seed=given.seed)
    chosen = chosen._replace(statistics=(*chosen.statistics, *published.chosen(given.criteria)))
    theirs = "clark" if given.criteria == "clark" else "ours"
    links = given.align_files is not None or given.task is not None
    more = [Syntax(convention=theirs)] if given.conllu is not None else [Alignment()] if links else []
    table = measure(model, scenes, chosen=chosen, more=more, name=name_of(model), tell=tell)
    return classified(table, criteria=given.criteria)


def _told(table: Table, given: argparse.Namespace) -> str:
    from ...heads.telling import listed, painted, plain, told

    if given.sort is not None:
        return listed(table, given.sort)
    return told(table, painted if in_colour() else plain)

"""`headwise convert`: keys and values shared, split or merged in a new folder, and the proof of what is left."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from .arguments import CommandParser, UsageError
from .compression_arguments import CompressionRun, add_compression_arguments

if TYPE_CHECKING:
    from ..surgery import AttentionConversion

CONVERSION_FORMS = ("mha", "latent", "collaborative=WIDTH", "routed=ALWAYS,ACTIVE")


def main(argv: list[str]) -> int:
    """Change who reads whom, write what it makes, and prove it."""
    given = _parser().parse_args(argv)
    way = _parse_conversion(given)
    work = CompressionRun.from_args(given)
    from ..surgery.conversion import convert
    from ..surgery.head_selection import HeadRanking
    from ..surgery.pruning_plan import fingerprint_model

    by = HeadRanking(given.by, given.objective, seed=given.seed)
    done = convert(work.net, way, work.selection_examples, kind=given.where, ranking=by, log=work.report_progress)
    after, learnt = work.retrain(done.after)
    same: dict[str, Any] = {}
    if done.equivalent is not None:
        same["aligned, before heads are pooled"] = lambda: done.equivalent
    if way.is_exact:
        same["the new form, which says the same"] = lambda: done.after
    record = done.data | {"model": fingerprint_model(work.net)} | learnt
    return work.write_and_verify(after, way.summary, record, equivalents=same)


def _parser() -> CommandParser:
    parser = CommandParser(
        "convert",
        "Heads of keys and values are shared among query heads, or brought into another form, and the model is written "
        "into a new folder with a proof of what was saved and what was lost.",
        "headwise convert path/to/model --kv 2 --align --data texts.txt --out smaller",
    )
    add_compression_arguments(parser)
    which = parser.add_argument_group("what is made (one of these)")
    which.add_argument("--kv", type=int, metavar="COUNT", help="so many heads of keys and values in every layer")
    which.add_argument(
        "--to", metavar="FORM", help="exactly the same as mha or latent; or " + " or ".join(CONVERSION_FORMS[2:])
    )
    how = parser.add_argument_group("how heads are pooled")
    how.add_argument(
        "--align",
        nargs="?",
        const="both",
        default="none",
        metavar="SIDE",
        help="map heads as near to each other as the function allows: both, keys or values",
    )
    how.add_argument("--grouping", default="even", metavar="KIND", help="even takes neighbours, alike the nearest")
    how.add_argument("--score", default="distance", metavar="KIND", help="nearness for --grouping: distance or cosine")
    how.add_argument("--where", default="all", metavar="KIND", help="in all attentions, self or cross alone")
    how.add_argument("--by", default="best", metavar="METHOD", help="what --to routed weighs heads by")
    return parser


def _parse_conversion(given: argparse.Namespace) -> AttentionConversion:
    """What the command line says, as the library has it."""
    from ..surgery import Collaborate, Merged, Pool, Route, Split

    if (given.kv is None) == (given.to is None):
        raise UsageError(f"say what is made: --kv COUNT, or --to with one of {', '.join(CONVERSION_FORMS)}")
    if given.kv is not None:
        return Pool(given.kv, given.align, given.grouping, given.score, given.seed)
    if given.align != "none" or given.grouping != "even":
        raise UsageError(f"--align and --grouping are for --kv; leave them out of --to {given.to}")
    if given.to in ("mha", "latent"):
        return Split() if given.to == "mha" else Merged()
    if found := re.fullmatch(r"collaborative=(\d+)", given.to):
        return Collaborate(int(found[1]))
    if found := re.fullmatch(r"routed=(\d+),(\d+)", given.to):
        return Route(int(found[1]), int(found[2]))
    raise UsageError(f"--to {given.to} is no form; give one of {', '.join(CONVERSION_FORMS)}")

"""`headwise convert`: change the number or form of key-value heads, write the new model, and verify
it.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from . import known_names
from .argument_checks import (
    check_choice,
    check_groups_of_config,
    check_minimum,
    check_routing_of_config,
)
from .command_parser import CommandParser, UsageError
from .compression_arguments import (
    CompressionRun,
    add_compression_arguments,
    check_compression_arguments,
)

if TYPE_CHECKING:
    from ..surgery import AttentionConversion

CONVERSION_FORMS = ("mha", "latent", "collaborative=WIDTH", "routed=ALWAYS,ACTIVE")
FORM = re.compile(r"mha|latent|collaborative=(?P<width>\d+)|routed=(?P<always>\d+),(?P<active>\d+)")


def main(argv: list[str]) -> int:
    """Convert the attention layers, retrain if asked, write the model and its proof."""
    args = _parser().parse_args(argv)
    check_compression_arguments(args)
    check_groups_of_config(args.model, args.kv)
    conversion = _parse_conversion(args)
    run = CompressionRun.from_args(args)
    run.split_texts(conversion.text_uses)
    from ..surgery.conversion import convert
    from ..surgery.pruning_plan import fingerprint_model

    result = convert(
        run.net, conversion, run.selection_examples, kind=args.where, log=run.report_progress
    )
    model, retraining = run.retrain(result.after)
    record = result.data | {"model": fingerprint_model(run.net)} | retraining
    return run.write_and_verify(model, conversion.summary, record, **result.proof_options)


def _parser() -> CommandParser:
    parser = CommandParser(
        "convert",
        "Convert attention layers to fewer key-value heads (GQA, MQA) or to another form (MHA, "
        "latent, collaborative, "
        "routed). Writes the model to a new folder, with a proof of what was saved and what was "
        "lost.",
        "headwise convert path/to/model --kv 2 --align --data texts.txt --out smaller",
        "headwise convert path/to/model --to latent --data texts.txt --out latent",
    )
    add_compression_arguments(parser)
    target = parser.add_argument_group("target (exactly one)")
    target.add_argument(
        "--kv", type=int, metavar="COUNT", help="pool to this many key-value heads in every layer"
    )
    target.add_argument(
        "--to",
        metavar="FORM",
        help="rewrite exactly as mha or latent; or convert to " + " or ".join(CONVERSION_FORMS[2:]),
    )
    pooling = parser.add_argument_group("pooling")
    pooling.add_argument(
        "--align",
        nargs="?",
        const="both",
        default="none",
        metavar="SIDE",
        help=(
            "align heads first, within the model's symmetries: both (also without SIDE), keys or "
            "values"
        ),
    )
    pooling.add_argument(
        "--grouping",
        default="consecutive",
        metavar="KIND",
        help="heads to pool: consecutive, or similar (with the most similar values)",
    )
    expert = parser.add_expert_group("details of the conversion")
    expert.add_argument(
        "--score",
        default="distance",
        metavar="KIND",
        help="similarity for --grouping similar: distance or cosine",
    )
    expert.add_argument(
        "--where",
        default="all",
        metavar="KIND",
        help="attention layers to convert: all, self or cross",
    )
    expert.add_argument(
        "--by", default="best", metavar="METHOD", help="importance method for --to routed"
    )
    return parser


def _parse_conversion(args: argparse.Namespace) -> AttentionConversion:
    """Return the conversion that the options ask for."""
    for option, value, names in (
        ("--align", args.align, known_names.ALIGN_SIDES),
        ("--grouping", args.grouping, known_names.GROUPINGS),
        ("--score", args.score, known_names.SIMILARITY_KINDS),
        ("--where", args.where, known_names.ATTENTION_KINDS),
        ("--by", args.by, known_names.RANKING_METHODS),
    ):
        check_choice(option, value, names)
    if (args.kv is None) == (args.to is None):
        raise UsageError(
            "give exactly one target: --kv COUNT, or --to with one of "
            f"{', '.join(CONVERSION_FORMS)}"
        )
    if args.to is not None and (args.align != "none" or args.grouping != "consecutive"):
        raise UsageError(
            f"--align and --grouping apply to --kv only; leave them out with --to {args.to}"
        )
    match = FORM.fullmatch(args.to or "mha")
    if match is None:
        raise UsageError(
            f"--to {args.to} is not a known form; give one of {', '.join(CONVERSION_FORMS)}"
        )
    if match["width"]:
        check_minimum("--to collaborative", int(match["width"]), 1)
    if match["active"]:
        check_routing_of_config(args.model, int(match["always"]), int(match["active"]))
    from ..surgery import HeadRanking, Pool, ToCollaborative, ToLatent, ToMHA, ToMixtureOfHeads

    if args.kv is not None:
        return Pool(args.kv, args.align, args.grouping, args.score, args.seed)
    if match["width"]:
        return ToCollaborative(int(match["width"]))
    if match["active"]:
        ranking = HeadRanking(args.by, args.objective, seed=args.seed)
        return ToMixtureOfHeads(int(match["always"]), int(match["active"]), ranking)
    return ToMHA() if args.to == "mha" else ToLatent()

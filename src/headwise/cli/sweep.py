"""`headwise prune MODEL --sweep`: quality against heads left in several orders, as numbers, figures and a page."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .screen import CommandParser, UsageError, to_json, print_page
from .smaller import CompressionRun, add_model_arguments

if TYPE_CHECKING:
    from ..surgery.curves import SweepOptions
    from ..surgery.gates import GateTrainingOptions

GATE_BATCH_SIZE = 16  # texts that gates learn from at once


def sweep_main(argv: list[str]) -> int:
    """Take heads away in every order, hear what is left, and say what it shows; no model is written."""
    given = _sweep_parser().parse_args(argv)
    points = _parse_fractions(given.points)
    work = CompressionRun.from_args(given)
    from ..surgery.curve_page import to_report_data, render_terminal, write_report
    from ..surgery.curves import run_sweep

    curves = run_sweep(work.net, work.selection_examples, work.proof_examples, _sweep_config(given, work, points), work.report_progress)
    command = shlex.join(["headwise", "prune", *argv])
    curves = replace(curves, notes=(*work.notes, *curves.notes), command=command)
    work.report_progress("drawing")
    write_report(curves, Path(given.out))
    work.report_progress("")
    if given.json:
        print_page(to_json(to_report_data(curves)))
    else:
        print_page(f"{render_terminal(curves)}\n\n{given.out}\n  CURVES.md in it says all of this and more, beside figures.")
    return 0


def _sweep_parser() -> CommandParser:
    parser = CommandParser(
        "prune --sweep",
        "Heads are taken out of a model, ever more of them, in several orders; how well it speaks with those that are "
        "left is written into a new folder as numbers, figures and a page. Nothing is trained, no model is written.",
        "headwise prune path/to/model --sweep --data texts.txt --out curves",
    )
    add_model_arguments(parser)
    how = parser.add_argument_group("what is swept")
    how.add_argument("--sweep", action="store_true", help="quality against heads left, and no model")
    how.add_argument("--by", nargs="+", default=[], metavar="ORDER",
                     help="methods of importance, random, gates; the first is ours")  # fmt: skip
    how.add_argument("--points", default="", metavar="SHARES", help="shares of heads that stay, as in 0.75,0.5,0.25")
    how.add_argument("--parts", nargs="+", default=[], metavar="PART", help="of all, encoder, decoder, cross")
    how.add_argument("--draws", type=int, default=5, metavar="COUNT", help="of the random order (5)")
    how.add_argument("--gates", type=int, metavar="STEPS", help="an order by gates too, which learn so long")
    how.add_argument("--answers", nargs="+", default=[], metavar="ORDER",
                     help="orders whose models also answer freely: BLEU, or what a task scores")  # fmt: skip
    how.add_argument("--sample", type=int, metavar="COUNT", help="texts that importance reads")
    how.add_argument("--unit", default="auto", metavar="KIND", help="head, group (of one key head), or auto")
    how.add_argument("--least", type=int, default=0, metavar="COUNT", help="heads that stay in every attention (0)")
    how.add_argument("--allowed", type=float, default=0.1, metavar="LOSS", help="by which a loss may grow (0.1)")
    return parser


def _parse_fractions(said: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in said.split(",")) if said else ()
    except ValueError:
        raise UsageError(f"--points {said} are no shares of heads; write them as in 0.75,0.5,0.25") from None


def _sweep_config(given: argparse.Namespace, work: CompressionRun, points: tuple[float, ...]) -> SweepOptions:
    """What the command line says, as the library has it."""
    from ..surgery.curves import DEFAULT_SHARES, SweepOptions
    from ..surgery.orders import OrderingOptions

    gates = None if given.gates is None else _gate_training(given, work)
    ordering = OrderingOptions(given.objective, given.sample, gates, given.seed)
    return SweepOptions(
        ordering, tuple(given.by), points or DEFAULT_SHARES, tuple(given.parts), given.draws, tuple(given.answers), given.unit,
        given.least, given.allowed, work.task,
    )  # fmt: skip


def _gate_training(given: argparse.Namespace, work: CompressionRun) -> GateTrainingOptions:
    """Gates learn on the model as it is: half are to stay, and those likeliest to be open are worth most."""
    from ..heads.objectives import choose_objective
    from ..surgery.gates import GateTrainingOptions

    texts = len(work.selection_examples)
    loss = choose_objective(work.net, given.objective, work.selection_examples[0])[0]
    batch = max(1, min(GATE_BATCH_SIZE, texts - max(1, round(0.1 * texts))))
    return GateTrainingOptions(
        heads=0.5, steps=given.gates, batch=batch, freeze="model", objective=given.objective,
        alpha=0.0 if loss.has_gradient else 1.0, seed=given.seed,
    )  # fmt: skip

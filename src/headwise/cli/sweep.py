"""`headwise prune MODEL --sweep`: quality against heads left in several orders, as numbers, figures and a page."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .screen import Arguments, Wrong, document, show
from .smaller import Work, take_model

if TYPE_CHECKING:
    from ..surgery.curves import Sweep
    from ..surgery.gates import Gating

BATCH = 16  # texts that gates learn from at once


def main(argv: list[str]) -> int:
    """Take heads away in every order, hear what is left, and say what it shows; no model is written."""
    given = _parser().parse_args(argv)
    points = _points(given.points)
    work = Work.of(given)
    from ..surgery.curve_page import data_of, told, write
    from ..surgery.curves import swept

    curves = swept(work.net, work.chosen_by, work.proven_with, _sweep(given, work, points), work.tell)
    command = shlex.join(["headwise", "prune", *argv])
    curves = replace(curves, notes=(*work.notes, *curves.notes), command=command)
    work.tell("drawing")
    write(curves, Path(given.out))
    work.tell("")
    if given.json:
        show(document(data_of(curves)))
    else:
        show(f"{told(curves)}\n\n{given.out}\n  CURVES.md in it says all of this and more, beside figures.")
    return 0


def _parser() -> Arguments:
    parser = Arguments(
        "prune --sweep",
        "Heads are taken out of a model, ever more of them, in several orders; how well it speaks with those that are "
        "left is written into a new folder as numbers, figures and a page. Nothing is trained, no model is written.",
        "headwise prune path/to/model --sweep --data texts.txt --out curves",
    )
    take_model(parser)
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


def _points(said: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in said.split(",")) if said else ()
    except ValueError:
        raise Wrong(f"--points {said} are no shares of heads; write them as in 0.75,0.5,0.25") from None


def _sweep(given: argparse.Namespace, work: Work, points: tuple[float, ...]) -> Sweep:
    """What the command line says, as the library has it."""
    from ..surgery.curves import POINTS, Sweep
    from ..surgery.orders import Ordering

    gates = None if given.gates is None else _gating(given, work)
    ordering = Ordering(given.objective, given.sample, gates, given.seed)
    return Sweep(
        ordering, tuple(given.by), points or POINTS, tuple(given.parts), given.draws, tuple(given.answers), given.unit,
        given.least, given.allowed, work.task,
    )  # fmt: skip


def _gating(given: argparse.Namespace, work: Work) -> Gating:
    """Gates learn on the model as it is: half are to stay, and those likeliest to be open are worth most."""
    from ..heads.objectives import objective_of
    from ..surgery.gates import Gating

    texts = len(work.chosen_by)
    loss = objective_of(work.net, given.objective, work.chosen_by[0])[0]
    batch = max(1, min(BATCH, texts - max(1, round(0.1 * texts))))
    return Gating(
        heads=0.5, steps=given.gates, batch=batch, freeze="model", objective=given.objective,
        alpha=0.0 if loss.sloped else 1.0, seed=given.seed,
    )  # fmt: skip

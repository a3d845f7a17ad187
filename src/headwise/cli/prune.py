"""`headwise prune`: a model with fewer heads in a new folder, and the proof of what is left of it."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import CommandParser, UsageError, print_page, to_json
from .compression_arguments import CompressionRun, add_compression_arguments, add_model_arguments

if TYPE_CHECKING:
    from ..models import Transformer
    from ..surgery import HeadRanking, HeadSelection
    from ..surgery.l0_gates import GateTrainingOptions
    from ..surgery.sweep.pruning_curves import SweepOptions

SELECTION_OPTIONS = ("keep", "heads", "drop", "clusters", "budget", "plan")


def main(argv: list[str]) -> int:
    """Choose heads, cut them, write what is left, and prove it."""
    if "--sweep" in argv:
        return sweep_main(argv)
    given = _parser().parse_args(argv)
    _check_selection(given)
    work = CompressionRun.from_args(given)
    from ..surgery.pruning import prune
    from ..surgery.pruning_plan import fingerprint_model

    done = prune(work.net, _selection(given, work), work.selection_examples, fold=given.fold, log=work.report_progress)
    record = done.data | {"model": fingerprint_model(work.net)}
    return work.write_and_verify(
        done.after,
        done.plan.summary,
        record,
        keep=dict(done.plan.changed_sites),
        replacements=dict(done.head_constants),
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        "prune",
        "Heads are chosen and cut out of a model for good; what is left is written into a new folder, with a proof: "
        "that it says what the model said with these heads silent, what was saved, and what was lost.",
        "headwise prune path/to/model --keep 0.5 --data texts.txt --out smaller",
    )
    add_compression_arguments(parser)
    which = parser.add_argument_group("which heads go (one of these)")
    which.add_argument("--keep", metavar="SHARE", help="those worth most stay: 0.5 of every layer, or 4 heads of each")
    which.add_argument("--heads", nargs="+", metavar="LAYER:HEADS", help="these go, as in 0:1,3 decoder.2.cross:0")
    which.add_argument("--drop", nargs="+", metavar="CLASS", help="those that are of these classes and no other go")
    which.add_argument("--clusters", action="store_true", help="one stays of each cluster of heads that look alike")
    which.add_argument(
        "--budget",
        metavar="KIND=LIMIT",
        help="those worth least go until parameters=0.8, cache=0.5 or time=0.7 is met, or as long as loss=0.05 is kept",
    )
    which.add_argument("--plan", metavar="FOLDER", help="the same as was done before, of which this folder tells")
    which.add_argument("--sweep", action="store_true", help="no model, but curves: see headwise prune --sweep --help")
    how = parser.add_argument_group("how they are chosen")
    how.add_argument("--by", default="best", metavar="METHOD", help="a method of importance, or random")
    how.add_argument("--per", default="layer", metavar="WHERE", help="--keep of each layer, stack (alike), or model")
    how.add_argument("--unit", default="auto", metavar="KIND", help="head, group (of one key head), or auto")
    how.add_argument("--least", type=int, metavar="COUNT", help="stay in every layer, with --per model and --budget")
    how.add_argument("--sample", type=int, metavar="COUNT", help="texts that importance reads")
    how.add_argument("--again", type=int, metavar="COUNT", help="with --budget, weigh anew after so many have gone")
    how.add_argument("--state", metavar="FILE", help="with --budget, keep what was done there, and go on from it")
    how.add_argument("--gates", type=int, metavar="STEPS", help="learn with a gate on each head; --keep of all stay")
    how.add_argument(
        "--fold", default="none", metavar="KIND", help="what heads leave behind: none, their mean, or bias"
    )
    return parser


def _check_selection(given: argparse.Namespace) -> None:
    said = [name for name in SELECTION_OPTIONS if getattr(given, name)]
    if len(said) != 1:
        both = f"; --{said[0]} and --{said[1]} are two" if len(said) > 1 else ""
        raise UsageError(f"say which heads go by one of {', '.join(f'--{name}' for name in SELECTION_OPTIONS)}{both}")
    if given.gates is not None and not given.keep:
        raise UsageError("--gates learns which heads stay, and --keep says how many; give both")
    for name in ("again", "state"):
        if getattr(given, name) is not None and not given.budget:
            raise UsageError(f"--{name} is for --budget; leave it out, or give one")


def _selection(given: argparse.Namespace, work: CompressionRun) -> HeadSelection:
    """What the command line says, as the library has it."""
    from ..surgery import (
        DropClasses,
        DropHeads,
        GateTrainingOptions,
        HeadRanking,
        KeepOnePerCluster,
        KeepOpenGates,
        KeepTop,
    )

    if given.gates is not None:
        how = {} if given.rate is None else {"rate": given.rate}
        unit = "kv" if given.unit == "group" else "head"
        return KeepOpenGates(
            GateTrainingOptions(heads=_parse_fraction(given.keep), steps=given.gates, unit=unit, seed=given.seed, **how)
        )
    by = HeadRanking(given.by, given.objective, num_examples=given.sample, seed=given.seed)
    if given.keep:
        return KeepTop(
            _parse_fraction(given.keep), by, given.per, given.unit, 1 if given.least is None else given.least
        )
    if given.heads:
        return DropHeads(tuple(_parse_heads(work.net, given.heads)))
    if given.drop:
        return DropClasses(tuple(given.drop))
    if given.clusters:
        return KeepOnePerCluster(by)
    return _stopping_budget(given, by) if given.budget else _load_plan(given, work)


def _stopping_budget(given: argparse.Namespace, by: HeadRanking) -> HeadSelection:
    from ..surgery import PruneToBudget, PruningBudget

    kind, _, limit = given.budget.partition("=")
    try:
        budget = PruningBudget(kind, float(limit))
    except ValueError:
        raise UsageError(f"--budget {given.budget} is no budget; write KIND=LIMIT, as in cache=0.5") from None
    state = None if given.state is None else Path(given.state)
    return PruneToBudget(budget, by, given.again, given.unit, given.least or 0, state)


def _load_plan(given: argparse.Namespace, work: CompressionRun) -> HeadSelection:
    """What heads.json of another folder says, if that was made of this very model."""
    from ..surgery import DropHeads
    from ..surgery.hf_export.model_folder import read_record
    from ..surgery.pruning_plan import PruningPlan, fingerprint_model

    done = read_record(given.plan).done
    if done.get("done") != "prune":
        raise UsageError(f"{given.plan} does not say which heads went; give a folder that headwise prune wrote")
    if done.get("model") != fingerprint_model(work.net):
        raise UsageError(f"the plan in {given.plan} was made for another checkpoint than {given.model}; choose anew")
    return DropHeads(PruningPlan.from_dict(work.net.spec, done).removed_heads)


def _parse_fraction(said: str) -> float | int:
    if re.fullmatch(r"\d+", said):
        return int(said)
    try:
        return float(said)
    except ValueError:
        raise UsageError(f"--keep {said} is no share of heads; give 0.5, say, or a whole number of them") from None


def _parse_heads(net: Transformer, said: list[str]) -> list[tuple[str, int]]:
    """The heads that were named, LAYER:HEADS each."""
    from ..inspect.attention_sites import sites

    known, found = sites(net), list[tuple[str, int]]()
    for one in said:
        where, _, heads = one.rpartition(":")
        if not where or not re.fullmatch(r"\d+(,\d+)*", heads):
            raise UsageError(f"--heads {one} names no heads; write LAYER:HEADS or SITE:HEADS, as in 0:1,3")
        site = known.find(int(where) if where.isdecimal() else where).name
        found += [(site, int(head)) for head in heads.split(",")]
    return found


# --- `headwise prune MODEL --sweep` --------------------------------------------------------------------

GATE_BATCH_SIZE = 16  # texts that gates learn from at once


def sweep_main(argv: list[str]) -> int:
    """Take heads away in every order, hear what is left, and say what it shows; no model is written."""
    given = _sweep_parser().parse_args(argv)
    points = _parse_fractions(given.points)
    work = CompressionRun.from_args(given)
    from ..surgery.sweep.curve_report import render_terminal, to_report_data, write_report
    from ..surgery.sweep.pruning_curves import run_sweep

    curves = run_sweep(
        work.net, work.selection_examples, work.proof_examples, _sweep_config(given, work, points), work.report_progress
    )
    command = shlex.join(["headwise", "prune", *argv])
    curves = replace(curves, notes=(*work.notes, *curves.notes), command=command)
    work.report_progress("drawing")
    write_report(curves, Path(given.out))
    work.report_progress("")
    if given.json:
        print_page(to_json(to_report_data(curves)))
    else:
        print_page(
            f"{render_terminal(curves)}\n\n{given.out}\n  CURVES.md in it says all of this and more, beside figures."
        )
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
    how.add_argument(
        "--by", nargs="+", default=[], metavar="ORDER", help="methods of importance, random, gates; the first is ours"
    )
    how.add_argument("--points", default="", metavar="SHARES", help="shares of heads that stay, as in 0.75,0.5,0.25")
    how.add_argument("--parts", nargs="+", default=[], metavar="PART", help="of all, encoder, decoder, cross")
    how.add_argument("--draws", type=int, default=5, metavar="COUNT", help="of the random order (5)")
    how.add_argument("--gates", type=int, metavar="STEPS", help="an order by gates too, which learn so long")
    how.add_argument(
        "--answers",
        nargs="+",
        default=[],
        metavar="ORDER",
        help="orders whose models also answer freely: BLEU, or what a task scores",
    )
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
    from ..surgery.sweep.pruning_curves import DEFAULT_SHARES, OrderingOptions, SweepOptions

    gates = None if given.gates is None else _gate_training(given, work)
    ordering = OrderingOptions(given.objective, given.sample, gates, given.seed)
    return SweepOptions(
        ordering,
        tuple(given.by),
        points or DEFAULT_SHARES,
        tuple(given.parts),
        given.draws,
        tuple(given.answers),
        given.unit,
        given.least,
        given.allowed,
        work.task,
    )


def _gate_training(given: argparse.Namespace, work: CompressionRun) -> GateTrainingOptions:
    """Gates learn on the model as it is: half are to stay, and those likeliest to be open are worth most."""
    from ..head_analysis.objectives import choose_objective
    from ..surgery.l0_gates import GateTrainingOptions

    texts = len(work.selection_examples)
    loss = choose_objective(work.net, given.objective, work.selection_examples[0])[0]
    batch = max(1, min(GATE_BATCH_SIZE, texts - max(1, round(0.1 * texts))))
    return GateTrainingOptions(
        heads=0.5,
        steps=given.gates,
        batch=batch,
        freeze="model",
        objective=given.objective,
        alpha=0.0 if loss.has_gradient else 1.0,
        seed=given.seed,
    )

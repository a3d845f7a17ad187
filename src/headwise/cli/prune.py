"""`headwise prune`: remove heads, write the smaller model, and verify it; or sweep over pruning
ratios.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..output_paths import check_output
from . import known_names
from .argument_checks import (
    check_choice,
    check_heads_of_config,
    check_minimum,
    check_positive,
    check_share,
)
from .arguments import existing_mode, print_page, to_json
from .command_parser import CommandParser, UsageError
from .compression_arguments import CompressionRun, add_compression_arguments, add_model_arguments

if TYPE_CHECKING:
    from ..models import Transformer
    from ..surgery import HeadRanking, HeadSelection
    from ..surgery.l0_gates import GateTrainingOptions
    from ..surgery.pruning_curves import SweepOptions

SELECTION_OPTIONS = ("keep", "heads", "drop", "clusters", "budget", "plan")


def main(argv: list[str]) -> int:
    """Choose heads, remove them, write the model and its proof."""
    if "--sweep" in argv:
        return sweep_main(argv)
    args = _parser().parse_args(argv)
    _check_selection(args)
    run = CompressionRun.from_args(args)
    from ..surgery.pruning import list_text_uses, prune
    from ..surgery.pruning_plan import fingerprint_model

    selection = _selection(args, run)
    run.split_texts(list_text_uses(selection, args.fold))
    result = prune(
        run.net, selection, run.selection_examples, fold=args.fold, log=run.report_progress
    )
    model, retraining = run.retrain(result.after)
    record = result.data | {"model": fingerprint_model(run.net)} | retraining
    return run.write_and_verify(model, result.plan.summary, record, **result.proof_options)


def _parser() -> CommandParser:
    parser = CommandParser(
        "prune",
        "Remove attention heads from a model. Writes the smaller model to a new folder, with a "
        "proof that it equals "
        "the model with these heads ablated, what was saved, and what was lost.",
        "headwise prune path/to/model --keep 0.5 --data texts.txt --out smaller",
        "headwise prune path/to/model --heads 0:1,3 --data texts.txt --out smaller",
    )
    add_compression_arguments(parser)
    selection = parser.add_argument_group("heads to remove (exactly one)")
    selection.add_argument(
        "--keep",
        metavar="SHARE",
        help="keep the most important heads: a share (0.5) or number (4) of each layer",
    )
    selection.add_argument(
        "--heads",
        nargs="+",
        metavar="LAYER:HEADS",
        help="remove these heads, as in 0:1,3 decoder.2.cross:0",
    )
    selection.add_argument(
        "--budget",
        metavar="KIND=LIMIT",
        help=(
            "remove the least important heads until parameters=0.8, cache=0.5, time=0.7, or a "
            "rise of loss=0.05"
        ),
    )
    selection.add_argument(
        "--sweep", action="store_true", help="write pruning curves: headwise prune --sweep --help"
    )
    other = parser.add_expert_group("other ways to choose the heads to remove")
    other.add_argument(
        "--drop", nargs="+", metavar="CLASS", help="remove heads that have only these classes"
    )
    other.add_argument(
        "--clusters", action="store_true", help="keep one head of each cluster of similar heads"
    )
    other.add_argument(
        "--plan", metavar="FOLDER", help="repeat the pruning recorded in this folder"
    )
    _add_ranking_arguments(parser)
    return parser


def _add_ranking_arguments(parser: CommandParser) -> None:
    everyday = parser.add_argument_group("ranking of heads")
    everyday.add_argument(
        "--by", default="best", metavar="METHOD", help="importance method, or random"
    )
    everyday.add_argument(
        "--per", default="layer", metavar="SCOPE", help="scope of --keep: layer, stack or model"
    )
    ranking = parser.add_expert_group("details of the ranking")
    add_unit_argument(ranking)
    ranking.add_argument(
        "--min-heads",
        type=int,
        metavar="COUNT",
        help="heads to keep in every layer (default: 1 with --keep, 0 with --budget)",
    )
    ranking.add_argument(
        "--sample",
        type=int,
        metavar="COUNT",
        help="texts to estimate importance with (default: all)",
    )
    ranking.add_argument(
        "--rerank-every",
        type=int,
        metavar="COUNT",
        help=(
            "with --budget, estimate importance again after removing this many heads (default: "
            "never)"
        ),
    )
    ranking.add_argument(
        "--state",
        metavar="FILE",
        help="with --budget, save progress to this file and resume from it (default: not saved)",
    )
    ranking.add_argument(
        "--gates",
        type=int,
        metavar="STEPS",
        help=(
            "train an L0 gate on each head for this many steps; --keep is the share of all heads "
            "(default: no gates)"
        ),
    )
    ranking.add_argument(
        "--fold",
        default="none",
        metavar="KIND",
        help="replace removed heads by none, mean (their mean output), or bias",
    )


def add_unit_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--unit`."""
    parser.add_argument(
        "--unit",
        default="auto",
        metavar="KIND",
        help="unit of removal: head, group (all query heads of a key-value head) or auto",
    )


def _check_selection(args: argparse.Namespace) -> None:
    selected = [name for name in SELECTION_OPTIONS if getattr(args, name)]
    if len(selected) != 1:
        conflict = f", not both --{selected[0]} and --{selected[1]}" if len(selected) > 1 else ""
        raise UsageError(
            "choose heads by exactly one of "
            f"{', '.join(f'--{name}' for name in SELECTION_OPTIONS)}{conflict}"
        )
    if args.keep is not None:
        _parse_fraction(args.keep)
    for name in args.heads or ():
        layer, heads = _split_heads(name)
        check_heads_of_config(args.model, name, int(layer) if layer.isdecimal() else None, heads)
    if args.budget is not None:
        _parse_budget(args.budget)
    if args.plan is not None and not Path(args.plan).exists():
        raise UsageError(
            f"there is no folder {args.plan!r} for --plan; give a folder that headwise prune wrote"
        )
    if args.gates is not None and not args.keep:
        raise UsageError("--gates needs --keep for the number of heads that stay; give both")
    for option, value in (("--rerank-every", args.rerank_every), ("--state", args.state)):
        if value is not None and not args.budget:
            raise UsageError(f"{option} needs --budget; add --budget, or leave out {option}")
    check_choice("--by", args.by, known_names.RANKING_METHODS)
    check_choice("--per", args.per, known_names.KEEP_SCOPES)
    check_choice("--fold", args.fold, known_names.FOLD_MODES)
    check_minimum("--rerank-every", args.rerank_every, 1)
    if args.state is not None:
        from ..surgery.head_selection import STATE_FILE

        check_output(args.state, STATE_FILE, "continue")
    _check_removal(args)


def _check_removal(args: argparse.Namespace) -> None:
    """Check the options that --sweep has too."""
    check_choice("--unit", args.unit, known_names.UNIT_KINDS)
    check_minimum("--min-heads", args.min_heads, 0)
    check_minimum("--sample", args.sample, 2)
    check_minimum("--gates", args.gates, 1)


def _selection(args: argparse.Namespace, run: CompressionRun) -> HeadSelection:
    """Return the library objects that the options describe."""
    from ..surgery import (
        DropClasses,
        DropHeads,
        GateTrainingOptions,
        HeadRanking,
        KeepOnePerCluster,
        KeepOpenGates,
        KeepTop,
    )

    if args.gates is not None:
        overrides = {} if args.lr is None else {"rate": args.lr}
        unit = "kv" if args.unit == "group" else "head"
        return KeepOpenGates(
            GateTrainingOptions(
                heads=_parse_fraction(args.keep),
                steps=args.gates,
                unit=unit,
                seed=args.seed,
                **overrides,
            )
        )
    ranking = HeadRanking(args.by, args.objective, num_examples=args.sample, seed=args.seed)
    if args.keep:
        return KeepTop(
            _parse_fraction(args.keep),
            ranking,
            args.per,
            args.unit,
            1 if args.min_heads is None else args.min_heads,
        )
    if args.heads:
        return DropHeads(tuple(_parse_heads(run.net, args.heads)))
    if args.drop:
        return DropClasses(tuple(args.drop))
    if args.clusters:
        return KeepOnePerCluster(ranking)
    return _stopping_budget(args, ranking) if args.budget else _load_plan(args, run)


def _stopping_budget(args: argparse.Namespace, ranking: HeadRanking) -> HeadSelection:
    from ..surgery import PruneToBudget, PruningBudget

    budget = PruningBudget(*_parse_budget(args.budget))
    state = None if args.state is None else Path(args.state)
    return PruneToBudget(budget, ranking, args.rerank_every, args.unit, args.min_heads or 0, state)


def _parse_budget(text: str) -> tuple[str, float]:
    """Parse --budget: its kind and its limit."""
    kind, _, limit = text.partition("=")
    try:
        number = float(limit)
    except ValueError:
        raise UsageError(
            f"--budget {text} is not a budget; write KIND=LIMIT, as in cache=0.5"
        ) from None
    check_choice("--budget", kind, known_names.BUDGET_KINDS)
    if (
        not 0 <= number < math.inf
        or (number == 0 and kind != "loss")
        or (kind == "time" and number >= 1)
    ):
        below = " and below 1" if kind == "time" else ""
        raise UsageError(
            f"--budget {text} cannot be met; give a limit above 0{below}, as in {kind}=0.7"
        )
    if kind in ("parameters", "cache") and number > 1 and not number.is_integer():
        unit = "bytes per token" if kind == "cache" else "parameters"
        raise UsageError(
            f"--budget {text} is no share and no number of {unit}; give a share below 1, or a "
            "number"
        )
    return kind, number


def _load_plan(args: argparse.Namespace, run: CompressionRun) -> HeadSelection:
    """Return the selection recorded in heads.json of another folder, which must come from this
    model.
    """
    from ..surgery import DropHeads
    from ..surgery.hf_export.model_folder import read_record
    from ..surgery.pruning_plan import PruningPlan, fingerprint_model

    record = read_record(args.plan).change
    if record.get("operation") != "prune":
        raise UsageError(
            f"{args.plan} has no record of removed heads; give a folder that headwise prune wrote"
        )
    if record.get("model") != fingerprint_model(run.net):
        raise UsageError(
            f"the plan in {args.plan} was made for another checkpoint than {args.model}; choose "
            "heads by another option"
        )
    return DropHeads(PruningPlan.from_dict(run.net.spec, record).removed_heads)


def _parse_fraction(text: str) -> float | int:
    try:
        amount = int(text) if re.fullmatch(r"\d+", text) else float(text)
    except ValueError:
        raise UsageError(
            f"--keep {text} is not a share or number of heads; give 0.5 or 4, for example"
        ) from None
    if amount < 1 if isinstance(amount, int) else not 0 < amount < 1:
        raise UsageError(
            f"--keep {text} is out of range; give a share below 1, such as 0.5, or a number of "
            "heads"
        )
    return amount


def _parse_heads(net: Transformer, names: list[str]) -> list[tuple[str, int]]:
    """Parse --heads, each LAYER:HEADS; return (site, head) pairs."""
    from ..inspect.attention_sites import sites

    known_sites, heads = sites(net), list[tuple[str, int]]()
    for name in names:
        layer, numbers = _split_heads(name)
        site = known_sites.find(int(layer) if layer.isdecimal() else layer).name
        heads += [(site, head) for head in numbers]
    return heads


def _split_heads(name: str) -> tuple[str, list[int]]:
    """Split LAYER:HEADS into the layer and the numbers of its heads."""
    layer, _, numbers = name.rpartition(":")
    if not layer or not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise UsageError(
            f"--heads {name} is not a list of heads; write LAYER:HEADS or SITE:HEADS, as in 0:1,3"
        )
    return layer, [int(number) for number in numbers.split(",")]


# --- `headwise prune MODEL --sweep` ---------------------------------------------------------------

GATE_BATCH_SIZE = 16  # texts per training step of the gates


def sweep_main(argv: list[str]) -> int:
    """Measure quality against the number of remaining heads, for several orders of removal; write
    curves, no model.
    """
    args = _sweep_parser().parse_args(argv)
    points = _parse_fractions(args.points)
    _check_sweep(args, points)
    run = CompressionRun.from_args(args)
    run.split_texts(("heads were chosen",))
    from ..surgery.curve_report import render_terminal, to_report_data, write_report
    from ..surgery.pruning_curves import run_sweep

    curves = run_sweep(
        run.net,
        run.selection_examples,
        run.proof_examples,
        _sweep_config(args, run, points),
        run.report_progress,
    )
    command = shlex.join(["headwise", "prune", *argv])
    curves = replace(curves, notes=(*run.notes, *curves.notes), command=command)
    run.report_progress("drawing figures")
    write_report(curves, Path(args.out), existing_mode(args))
    run.report_progress("")
    if args.json:
        print_page(to_json(to_report_data(curves)))
    else:
        print_page(
            f"{render_terminal(curves)}\n\n{args.out}\n  CURVES.md in this folder has the full "
            "report, with figures."
        )
    return 0


def _sweep_parser() -> CommandParser:
    parser = CommandParser(
        "prune --sweep",
        "Remove more and more heads of a model, in several orders, and measure its quality. "
        "Writes numbers, figures "
        "and a report to a new folder. Retrains nothing and writes no model.",
        "headwise prune MODEL --sweep --data texts.txt --out curves",
        "headwise prune MODEL --sweep --by michel random --task dates --out curves",
    )
    add_model_arguments(parser, "the numbers, figures and report")
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument(
        "--sweep", action="store_true", help="measure quality against the number of remaining heads"
    )
    sweep.add_argument(
        "--by",
        nargs="+",
        default=[],
        metavar="ORDER",
        help="orders to compare: importance methods, random, gates; the report compares the first "
        "with the others "
        "(default: leave-one-out, michel where the loss has a gradient, random)",
    )
    sweep.add_argument(
        "--points",
        default="",
        metavar="SHARES",
        help="shares of heads to keep, as in 0.75,0.5,0.25 (default: 0.9, 0.8, ... 0.1)",
    )
    sweep.add_argument(
        "--parts",
        nargs="+",
        default=[],
        metavar="PART",
        help="prune in all, encoder, decoder or cross attention (default: each of them)",
    )
    sweep.add_argument(
        "--max-loss-rise",
        type=float,
        default=0.1,
        metavar="LOSS",
        help="largest acceptable rise of the loss",
    )
    expert = parser.add_expert_group("details of the sweep")
    expert.add_argument(
        "--random-orders", type=int, default=5, metavar="COUNT", help="samples of the random order"
    )
    expert.add_argument(
        "--gates",
        type=int,
        metavar="STEPS",
        help="add the order of L0 gates, trained for this many steps (default: no gates)",
    )
    expert.add_argument(
        "--answers",
        nargs="+",
        default=[],
        metavar="ORDER",
        help=(
            "orders whose pruned models also generate text, for BLEU or the scores of the task "
            "(default: none)"
        ),
    )
    expert.add_argument(
        "--sample",
        type=int,
        metavar="COUNT",
        help="texts to estimate importance with (default: all)",
    )
    add_unit_argument(expert)
    expert.add_argument(
        "--min-heads",
        type=int,
        default=0,
        metavar="COUNT",
        help="heads to keep in every attention layer",
    )
    return parser


def _parse_fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(fraction) for fraction in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(
            f"--points {text} are not shares of heads; write them as in 0.75,0.5,0.25"
        ) from None


def _check_sweep(args: argparse.Namespace, points: tuple[float, ...]) -> None:
    for point in points:
        check_share("--points", point)
    for option, orders in (("--by", args.by), ("--answers", args.answers)):
        for order in orders:
            check_choice(option, order, known_names.REMOVAL_ORDERS)
            if order == "gates" and args.gates is None:
                raise UsageError(
                    f"{option} gates needs the steps that gates are trained for; add --gates STEPS"
                )
    check_positive("--max-loss-rise", args.max_loss_rise)
    check_minimum("--random-orders", args.random_orders, 1)
    _check_removal(args)


def _sweep_config(
    args: argparse.Namespace, run: CompressionRun, points: tuple[float, ...]
) -> SweepOptions:
    """Return the library objects that the options describe."""
    from ..surgery.pruning_curves import DEFAULT_SHARES, SweepOptions

    return SweepOptions(
        orders=tuple(args.by),
        shares=points or DEFAULT_SHARES,
        parts=tuple(args.parts),
        objective=args.objective,
        num_examples=args.sample,
        gate_options=None if args.gates is None else _gate_training(args, run),
        seed=args.seed,
        seeds=args.random_orders,
        generation_orders=tuple(args.answers),
        unit=args.unit,
        least=args.min_heads,
        max_loss_increase=args.max_loss_rise,
        task=run.task,
    )


def _gate_training(args: argparse.Namespace, run: CompressionRun) -> GateTrainingOptions:
    """Return options for training gates on the frozen model with half of the heads open; heads are
    ranked by how likely their gates are to be open.
    """
    from ..head_analysis.objectives import choose_objective
    from ..surgery.l0_gates import GateTrainingOptions

    num_texts = len(run.selection_examples)
    loss = choose_objective(run.net, args.objective, run.selection_examples[0])[0]
    batch = max(1, min(GATE_BATCH_SIZE, num_texts - max(1, round(0.1 * num_texts))))
    return GateTrainingOptions(
        heads=0.5,
        steps=args.gates,
        batch=batch,
        freeze="model",
        objective=args.objective,
        alpha=0.0 if loss.has_gradient else 1.0,
        seed=args.seed,
    )

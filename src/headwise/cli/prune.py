"""`headwise prune`: remove heads, write the smaller model, and verify it; or sweep over pruning
ratios.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output_paths import FolderKind, check_output
from .argument_checks import check_heads_of_config
from .arguments import existing_mode, print_page, to_json
from .compression_arguments import CompressionOptions, CompressionRun, SurgeryOptions
from .options import (
    AtLeastTwo,
    Count,
    Natural,
    Positive,
    UsageError,
    Words,
    check_choice,
    check_share,
    options,
)

if TYPE_CHECKING:
    from ..models import Transformer
    from ..surgery import HeadRanking, HeadSelection
    from ..surgery.l0_gates import GateTrainingOptions
    from ..surgery.pruning_curves import SweepOptions


@options
class PruneOptions(CompressionOptions):
    """Remove attention heads from a model, chosen by one of --keep, --heads, --budget and others.
    Writes the smaller model to a new folder, with a proof that it equals the model with these heads
    ablated, what was saved, and what was lost. With --sweep it writes pruning curves instead:
    headwise prune --sweep --help.

    --keep SHARE  keep the most important heads: a share (0.5) or number (4) of each layer
    --heads LAYER:HEADS  remove these heads, as in 0:1,3 decoder.2.cross:0
    --budget KIND=LIMIT  remove the least important heads until parameters=0.8, cache=0.5,
        time=0.7, or a rise of loss=0.05
    --by METHOD  importance method to rank heads, or random
    --per SCOPE  scope of --keep: layer, stack or model
    --sweep  write pruning curves: headwise prune --sweep --help

    other ways to choose the heads to remove:
    --drop CLASS  remove heads that have only these classes
    --clusters  keep one head of each cluster of similar heads
    --plan FOLDER  repeat the pruning recorded in this folder

    details of the ranking:
    --unit KIND  unit of removal: head, group (all query heads of a key-value head) or auto
    --min-heads COUNT  heads to keep in every layer (default: 1 with --keep, 0 with --budget)
    --sample COUNT  texts to estimate importance with (default: all)
    --rerank-every COUNT  with --budget, estimate importance again after removing this many heads
        (default: never)
    --state FILE  with --budget, save progress to this file and resume from it (default: not
        saved)
    --gates STEPS  train an L0 gate on each head for this many steps; --keep is the share of all
        heads (default: no gates)
    --fold KIND  replace removed heads by none, mean (their mean output), or bias

    examples:
    headwise prune path/to/model --keep 0.5 --data texts.txt --out smaller
    headwise prune path/to/model --heads 0:1,3 --data texts.txt --out smaller
    """

    command = "prune"
    choices = {
        "by": "surgery.head_selection:RANKING_METHODS",
        "per": "surgery.head_selection:KEEP_SCOPES",
        "unit": "surgery.pruning_plan:UNIT_KINDS",
        "fold": "surgery.pruning:FOLD_MODES",
    }
    keep: str | None = None
    heads: Words = ()
    budget: str | None = None
    by: str = "best"
    per: str = "layer"
    sweep: bool = False
    drop: Words = ()
    clusters: bool = False
    plan: str | None = None
    unit: str = "auto"
    min_heads: Natural | None = None
    sample: AtLeastTwo | None = None
    rerank_every: Count | None = None
    state: str | None = None
    gates: Count | None = None
    fold: str = "none"

    def check(self) -> None:
        """Refuse anything but one way of choosing heads, and heads that the model lacks."""
        super().check()
        ways = ("keep", "heads", "drop", "clusters", "budget", "plan")
        chosen = [f"--{name}" for name in ways if getattr(self, name)]
        if len(chosen) != 1:
            conflict = f", not both {chosen[0]} and {chosen[1]}" if len(chosen) > 1 else ""
            listed = ", ".join(f"--{name}" for name in ways)
            raise UsageError(f"choose heads by exactly one of {listed}{conflict}")
        if self.keep is not None:
            _parse_fraction(self.keep)
        for name in self.heads:
            layer, heads = _split_heads(name)
            number = int(layer) if layer.isdecimal() else None
            check_heads_of_config(self.model, name, number, heads)
        if self.budget is not None:
            _parse_budget(self.budget)
        if self.plan is not None and not Path(self.plan).exists():
            raise UsageError(
                f"there is no folder {self.plan!r} for --plan; give a folder that headwise prune "
                "wrote"
            )
        if self.gates is not None and not self.keep:
            raise UsageError("--gates needs --keep for the number of heads that stay; give both")
        for name in ("rerank_every", "state"):
            if name in self.options_set and not self.budget:
                flag = self.options_set[name]
                raise UsageError(f"{flag} needs --budget; add --budget, or leave out {flag}")
        if self.state is not None:
            from ..surgery.head_selection import STATE_FILE

            check_output(self.state, STATE_FILE, "continue")


def main(argv: list[str]) -> int:
    """Choose heads, remove them, write the model and its proof."""
    if "--sweep" in argv:
        return sweep_main(argv)
    args = PruneOptions.parse(argv)
    run = CompressionRun.from_options(args)
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


def _selection(args: Any, run: CompressionRun) -> HeadSelection:
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


def _stopping_budget(args: Any, ranking: HeadRanking) -> HeadSelection:
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
    check_choice("--budget", kind, ["surgery.head_selection:BUDGET_KINDS"])
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


def _load_plan(args: Any, run: CompressionRun) -> HeadSelection:
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


def _parse_heads(net: Transformer, names: Sequence[str]) -> list[tuple[str, int]]:
    """Parse --heads, each LAYER:HEADS; return (site, head) pairs."""
    from ..inspect.attention_sites import sites

    known_sites = sites(net)
    heads = list[tuple[str, int]]()
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


@options
class SweepCommandOptions(SurgeryOptions):
    """Remove more and more heads of a model, in several orders, and measure its quality. Writes
    numbers, figures and a report to a new folder. Retrains nothing and writes no model.

    --sweep  measure quality against the number of remaining heads
    --by ORDER  orders to compare: importance methods, random, gates; the report compares the
        first with the others (default: leave-one-out, michel where the loss has a gradient,
        random)
    --points SHARES  shares of heads to keep, as in 0.75,0.5,0.25 (default: 0.9, 0.8, ... 0.1)
    --parts PART  prune in all, encoder, decoder or cross attention (default: each of them)
    --max-loss-rise LOSS  largest acceptable rise of the loss

    details of the sweep:
    --random-orders COUNT  samples of the random order
    --gates STEPS  add the order of L0 gates, trained for this many steps (default: no gates)
    --answers ORDER  orders whose pruned models also generate text, for BLEU or the scores of the
        task (default: none)
    --sample COUNT  texts to estimate importance with (default: all)
    --unit KIND  unit of removal: head, group (all query heads of a key-value head) or auto
    --min-heads COUNT  heads to keep in every attention layer

    examples:
    headwise prune MODEL --sweep --data texts.txt --out curves
    headwise prune MODEL --sweep --by michel random --task dates --out curves
    """

    command = "prune --sweep"
    choices = {
        "by": "surgery.pruning_curves:REMOVAL_ORDERS",
        "answers": "surgery.pruning_curves:REMOVAL_ORDERS",
        "unit": "surgery.pruning_plan:UNIT_KINDS",
    }
    sweep: bool = False
    by: Words = ()
    points: str = ""
    parts: Words = ()
    max_loss_rise: Positive = 0.1
    random_orders: Count = 5
    gates: Count | None = None
    answers: Words = ()
    sample: AtLeastTwo | None = None
    unit: str = "auto"
    min_heads: Natural = 0

    @property
    def output_kind(self) -> FolderKind:
        """The kind of folder that the command writes."""
        from ..surgery.curve_report import CURVES_FOLDER

        return CURVES_FOLDER

    def check(self) -> None:
        """Refuse shares and orders that cannot be."""
        super().check()
        for point in _parse_fractions(self.points):
            check_share("--points", point)
        for flag, orders in (("--by", self.by), ("--answers", self.answers)):
            if "gates" in orders and self.gates is None:
                raise UsageError(
                    f"{flag} gates needs the steps that gates are trained for; add --gates STEPS"
                )


def sweep_main(argv: list[str]) -> int:
    """Measure quality against the number of remaining heads, for several orders of removal; write
    curves, no model.
    """
    args = SweepCommandOptions.parse(argv)
    run = CompressionRun.from_options(args)
    run.split_texts(("heads were chosen",))
    from ..surgery.curve_report import render_terminal, to_report_data, write_report
    from ..surgery.pruning_curves import run_sweep

    curves = run_sweep(
        run.net,
        run.selection_examples,
        run.proof_examples,
        _sweep_config(args, run),
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


def _parse_fractions(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(fraction) for fraction in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(
            f"--points {text} are not shares of heads; write them as in 0.75,0.5,0.25"
        ) from None


def _sweep_config(args: SweepCommandOptions, run: CompressionRun) -> SweepOptions:
    """Return the library objects that the options describe."""
    from ..surgery.pruning_curves import DEFAULT_SHARES, SweepOptions

    return SweepOptions(
        orders=tuple(args.by),
        shares=_parse_fractions(args.points) or DEFAULT_SHARES,
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


def _gate_training(args: Any, run: CompressionRun) -> GateTrainingOptions:
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

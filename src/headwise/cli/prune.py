"""`headwise prune`: remove heads, write the smaller model, and verify it; or sweep over pruning
ratios.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import print_result
from .options import AtLeastTwo, Count, Natural, Positive, UsageError, Words, check_value, options
from .text_arguments import CompressionOptions, CompressionRun, SurgeryOptions

if TYPE_CHECKING:
    from ..surgery import AttentionConversion, HeadSelection, PruningBudget
    from ..surgery.l0_gates import GateTrainingOptions


@options
class PruneOptions(CompressionOptions):
    """Remove attention heads from a model, chosen by one of --keep, --heads, --budget and others.
    Writes the smaller model to a new folder and checks that it equals the model with these heads
    ablated. A report shows what was saved and what was lost.

    --keep SHARE  keep the most important heads: a share (0.5) or number (4) of each layer
    --heads HEAD  remove these heads, as in L0H1 L0H3, 0:1,3 or decoder.2.cross:0
    --budget KIND=LIMIT  remove the least important heads until parameters=0.8, cache=0.5,
        time=0.7, or a rise of loss=0.05
    --by METHOD  importance method to rank heads, or random
    --sweep  write pruning curves: headwise prune --sweep --help

    other ways to choose the heads to remove:
    --clusters  keep one head of each cluster of similar heads

    details of the ranking:
    --per SCOPE  of --keep: layer, stack or model
    --unit KIND  unit of removal: head, group (all query heads of a key-value head) or auto
    --min-heads COUNT  heads to keep in every layer (default: 1 with --keep, 0 with --budget)
    --sample COUNT  texts to estimate importance with (default: all)
    --rerank-every COUNT  with --budget, estimate importance again after removing this many heads
        (default: never)
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
    needs = {"gates": "keep", "rerank_every": "budget"}
    keep: str | None = None
    heads: Words = ()
    budget: str | None = None
    by: str = "best"
    per: str = "layer"
    sweep: bool = False
    clusters: bool = False
    unit: str = "auto"
    min_heads: Natural | None = None
    sample: AtLeastTwo | None = None
    rerank_every: Count | None = None
    gates: Count | None = None
    fold: str = "none"

    def check(self) -> None:
        """Require exactly one way of choosing heads; refuse malformed heads and amounts."""
        super().check()
        ways = ("keep", "heads", "clusters", "budget")
        chosen = [f"--{name}" for name in ways if getattr(self, name)]
        if len(chosen) != 1:
            conflict = f", not both {chosen[0]} and {chosen[1]}" if len(chosen) > 1 else ""
            listed = ", ".join(f"--{name}" for name in ways)
            raise UsageError(f"choose heads by exactly one of {listed}{conflict}")
        if self.keep:
            _parse_amount(self.keep)  # before imports, which take seconds
        from ..observe.head_names import parse_heads

        for name in self.heads:
            parse_heads(name)
        if self.keep or self.budget:
            self.selection()  # refuses amounts

    def selection(self) -> HeadSelection:
        """Return the head selection, without a model."""
        from .. import surgery

        if self.gates is not None:
            overrides: dict[str, Any] = {} if self.lr is None else {"rate": self.lr}
            unit = "kv" if self.unit == "group" else "head"
            return surgery.KeepOpenGates(
                surgery.GateTrainingOptions(
                    heads=_parse_amount(self.keep or ""),
                    steps=self.gates,
                    unit=unit,
                    seed=self.seed,
                    **overrides,
                )
            )
        ranking = surgery.HeadRanking(
            self.by, self.objective, num_examples=self.sample, seed=self.seed
        )
        if self.keep:
            least = 1 if self.min_heads is None else self.min_heads
            amount = _parse_amount(self.keep)
            return surgery.KeepTop(amount, ranking, self.per, self.unit, least)
        if self.budget:
            return surgery.PruneToBudget(
                _parse_budget(self.budget),
                ranking,
                self.rerank_every,
                self.unit,
                self.min_heads or 0,
            )
        return surgery.KeepOnePerCluster(ranking)


def main(argv: list[str]) -> int:
    """Choose heads, remove them, write the model and its verification report."""
    if "--sweep" in argv:
        return sweep_main(argv)
    args = PruneOptions.parse(argv)
    run = CompressionRun.from_options(args)
    from ..observe.head_names import check_head, parse_heads
    from ..observe.inspect.attention_sites import sites
    from ..surgery import DropHeads
    from ..surgery.any_model import prune
    from ..surgery.pruning import list_text_uses

    known_sites = sites(run.net)
    heads: list[tuple[str, int]] = []
    for name in args.heads:
        layer, numbers = parse_heads(name)
        site = known_sites.find(layer)
        for head in numbers:
            check_head(site.name, head, site.heads)
            heads.append((site.name, head))
    selection = DropHeads(tuple(heads)) if heads else args.selection()
    run.split_texts(list_text_uses(selection, args.fold))
    result = prune(
        run.net, selection, run.selection_examples, fold=args.fold, log=run.report_progress
    )
    return run.finish(result)


def _parse_amount(text: str) -> float | int:
    """Parse --keep: a share, or a number of heads."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        fact = f"--keep {text} is not a share or number of heads"
        raise UsageError(f"{fact}; give 0.5 or 4, for example") from None


def _parse_budget(text: str) -> PruningBudget:
    """Parse --budget: its kind and its limit."""
    from ..surgery import PruningBudget

    kind, _, limit = text.partition("=")
    try:
        number = float(limit)
    except ValueError:
        raise UsageError(
            f"--budget {text} is not a budget; write KIND=LIMIT, as in cache=0.5"
        ) from None
    if kind in ("parameters", "cache") and number > 1 and not number.is_integer():
        unit = "bytes per token" if kind == "cache" else "parameters"
        fact = f"--budget {text} is no share and no number of {unit}"
        raise UsageError(f"{fact}; give a share below 1, or a number")
    return PruningBudget(kind, number)


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
    outputs = {"out": "surgery.pruning_curves:CURVES_FOLDER"}
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

    def check(self) -> None:
        """Refuse invalid shares, and gate options without training steps."""
        super().check()
        _parse_shares(self.points)
        for name in ("by", "answers"):
            if "gates" in getattr(self, name):
                self.require(name, "gates")


def sweep_main(argv: list[str]) -> int:
    """Measure quality against the number of remaining heads, for several orders of removal; write
    curves, no model.
    """
    args = SweepCommandOptions.parse(argv)
    run = CompressionRun.from_options(args)
    run.split_texts(("heads were chosen",))
    from ..surgery.pruning_curves import (
        DEFAULT_SHARES,
        SweepOptions,
        render_terminal,
        run_sweep,
        to_report_data,
        write_report,
    )

    options = SweepOptions(
        orders=tuple(args.by),
        shares=_parse_shares(args.points) or DEFAULT_SHARES,
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
    curves = run_sweep(
        run.net,
        run.selection_examples,
        run.verification_examples,
        options,
        run.report_progress,
    )
    command = shlex.join(["headwise", "prune", *argv])
    curves = replace(curves, notes=(*run.notes, *curves.notes), command=command)
    run.report_progress("drawing figures")
    write_report(curves, Path(args.out), args.existing)
    run.report_progress("")
    end = f"{args.out}\n  CURVES.md in this folder has the full report, with figures."
    print_result(args, f"{render_terminal(curves)}\n\n{end}", to_report_data(curves))
    return 0


def _parse_shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(share) for share in text.split(",")) if text else ()
    except ValueError:
        fact = f"--points {text} are not shares of heads"
        raise UsageError(f"{fact}; write them as in 0.75,0.5,0.25") from None
    for share in shares:
        check_value("Share", "--points", share)
    return shares


def _gate_training(args: Any, run: CompressionRun) -> GateTrainingOptions:
    """Return options for training gates on the frozen model with half of the heads open. Heads are
    ranked by the probability that their gates are open.
    """
    from ..observe.head_analysis.objectives import choose_objective
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


CONVERSION_FORMS = (
    *("mha", "latent", "collaborative=WIDTH", "composed=COUNT"),
    "routed=ALWAYS,ACTIVE",
)
FORM = re.compile(
    r"mha|latent|collaborative=(?P<width>\d+)|composed=(?P<components>\d+)"
    r"|routed=(?P<always>\d+),(?P<active>\d+)"
)


@options
class ConvertOptions(CompressionOptions):
    """Convert attention layers to fewer key-value heads (GQA, MQA) or to another form (MHA, latent,
    collaborative, composed, routed): give one of --kv and --to. Writes the model to a new folder,
    with a report of what was saved and what was lost.

    --kv COUNT  pool to this many key-value heads in every layer
    --to FORM  rewrite exactly as mha or latent; or convert to collaborative=WIDTH, composed=COUNT
        (keys and values as sums of COUNT cached ones) or routed=ALWAYS,ACTIVE
    --align [SIDE=both]  align heads before pooling, within the model's symmetries: both (also
        without SIDE), keys or values
    --grouping KIND  heads to pool: consecutive, or similar (with the most similar values)

    details of the conversion:
    --where KIND  attention layers to convert: all, self or cross
    --by METHOD  importance method for --to routed

    examples:
    headwise convert path/to/model --kv 2 --align --data texts.txt --out smaller
    headwise convert path/to/model --to latent --data texts.txt --out latent
    """

    command = "convert"
    choices = {
        "align": "surgery.conversion:ALIGN_SIDES",
        "grouping": "surgery.conversion:GROUPINGS",
        "where": "surgery.conversion:ATTENTION_KINDS",
        "by": "surgery.head_selection:RANKING_METHODS",
    }
    kv: Count | None = None
    to: str | None = None
    align: str = "none"
    grouping: str = "consecutive"
    where: str = "all"
    by: str = "best"

    def check(self) -> None:
        """Refuse an impossible target."""
        super().check()
        if (self.kv is None) == (self.to is None):
            raise UsageError(
                "give exactly one target: --kv COUNT, or --to with one of "
                f"{', '.join(CONVERSION_FORMS)}"
            )
        if self.kv is not None:
            return
        if self.align != "none" or self.grouping != "consecutive":
            raise UsageError(
                f"--align and --grouping apply to --kv only; leave them out with --to {self.to}"
            )
        match = FORM.fullmatch(self.to or "")
        if match is None:
            raise UsageError(
                f"--to {self.to} is not a known form; give one of {', '.join(CONVERSION_FORMS)}"
            )
        for form, name in (("collaborative", "width"), ("composed", "components")):
            if match[name]:
                check_value("Count", f"--to {form}", int(match[name]))


def convert_main(argv: list[str]) -> int:
    """Convert the attention layers, retrain if asked, write the model and its verification
    report.
    """
    args = ConvertOptions.parse(argv)
    conversion = _parse_conversion(args)
    run = CompressionRun.from_options(args)
    run.split_texts(conversion.text_uses)
    from ..surgery.any_model import convert

    result = convert(
        run.net, conversion, run.selection_examples, kind=args.where, log=run.report_progress
    )
    return run.finish(result)


def _parse_conversion(args: ConvertOptions) -> AttentionConversion:
    """Return the conversion described by the options."""
    from .. import surgery

    if args.kv is not None:
        return surgery.Pool(args.kv, args.align, args.grouping, args.seed)
    match = FORM.fullmatch(args.to or "")
    assert match is not None
    if match["width"]:
        return surgery.ToCollaborative(int(match["width"]))
    if match["components"]:
        return surgery.ToComposed(int(match["components"]))
    if match["active"]:
        ranking = surgery.HeadRanking(args.by, args.objective, seed=args.seed)
        return surgery.ToMixtureOfHeads(int(match["always"]), int(match["active"]), ranking)
    return surgery.ToMHA() if args.to == "mha" else surgery.ToLatent()

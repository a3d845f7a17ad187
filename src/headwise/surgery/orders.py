"""Orders in which heads are taken away: by what they are worth, by gates that were learned, by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import SpecError, suggest
from ..heads.objectives import Objective, choose_objective
from ..heads.scene import Example
from ..models import Transformer
from .course import RetrainingPoint
from .gates import GateTrainingOptions, train_gates
from .plans import HeadUnit
from .worths import RANKING_METHODS, RANDOM, HeadRanking, HeadScores, score_heads

GATE_ORDER = "gates"
REMOVAL_ORDERS = (*RANKING_METHODS, GATE_ORDER)
DEFAULT_METHOD, GRADIENT_METHOD = "leave-one-out", "michel"
OrderLogFunction = Callable[[str], object]


@dataclass(frozen=True)
class OrderingOptions:
    """How an order is found: on how many of the texts, of which objective, with which gates, from which seed."""

    objective: str | Objective | None = None
    num_examples: int | None = None
    gate_options: GateTrainingOptions | None = None
    seed: int = 0


def list_default_orders(net: Transformer, examples: Sequence[Example], options: OrderingOptions) -> tuple[str, ...]:
    """The orders that can be found of a model: those with slopes need a loss, gates need to be said how they learn.

    >>> import headwise as hw, torch
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> texts = [Example({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> list_default_orders(net, texts, OrderingOptions()), list_default_orders(net, texts, OrderingOptions("drift"))
    (('leave-one-out', 'michel', 'random'), ('leave-one-out', 'random'))
    """
    sloped = (GRADIENT_METHOD,) if choose_objective(net, options.objective, examples[0])[0].has_gradient else ()
    return (DEFAULT_METHOD, *sloped, RANDOM, *([GATE_ORDER] if options.gate_options is not None else []))


def check_order(order: str, options: OrderingOptions) -> None:
    """Refuse an order that nothing can find."""
    if order not in REMOVAL_ORDERS:
        raise SpecError(f"heads are ordered by {order!r} nowhere; {suggest(order, REMOVAL_ORDERS)}")
    if order == GATE_ORDER and options.gate_options is None:
        raise SpecError("gates learn before they order heads; say how, as in gates=Gating(heads=0.5, freeze='model')")


def score_by_order(
    net: Transformer,
    examples: Sequence[Example],
    units: Mapping[str, Sequence[HeadUnit]],
    order: str,
    options: OrderingOptions,
    log: OrderLogFunction = lambda _: None,
) -> HeadScores:
    """What each head is worth by this order: those worth least go first.

    By gates (1905.09418) a head is worth the chance that its gate is open.
    """
    check_order(order, options)
    if order != GATE_ORDER:
        return score_heads(net, examples, HeadRanking(order, options.objective, options.num_examples, seed=options.seed))
    assert options.gate_options is not None
    whole = all(len(unit.heads) == 1 for own in units.values() for unit in own)
    gating = replace(options.gate_options, unit="head" if whole else "kv")

    def progress(point: RetrainingPoint) -> None:
        log(f"gates: step {point.step} of {gating.steps}")

    found = train_gates(net, examples, gating, progress)
    of = {(site, head): chance for site, own in found.open_probabilities.items() for head, chance in enumerate(own)}
    share = gating.target_count(sum(map(len, units.values())))
    said = f"gates learned in {gating.steps} steps until {share} were to stay, freeze={gating.freeze!r}"
    return HeadScores(of, (said, *found.notes))

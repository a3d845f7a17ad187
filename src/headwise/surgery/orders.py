"""Orders in which heads are taken away: by what they are worth, by gates that were learned, by chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import SpecError, nearest
from ..heads.objectives import Objective, objective_of
from ..heads.scene import Scene
from ..models import Transformer
from .course import Point
from .gates import Gating, gated
from .plans import Unit
from .worths import BY, RANDOM, By, Worths, worths

GATES = "gates"
ORDERS = (*BY, GATES)
FIRST, SLOPED = "leave-one-out", "michel"
Tell = Callable[[str], object]


@dataclass(frozen=True)
class Ordering:
    """How an order is found: on how many of the texts, of which objective, with which gates, from which seed."""

    objective: str | Objective | None = None
    sample: int | None = None
    gates: Gating | None = None
    seed: int = 0


def usual(net: Transformer, scenes: Sequence[Scene], how: Ordering) -> tuple[str, ...]:
    """The orders that can be found of a model: those with slopes need a loss, gates need to be said how they learn.

    >>> import headwise as hw, torch
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}), seed=0)
    >>> texts = [Scene({"x": torch.tensor([[3, 1, 4]])}, {})]
    >>> usual(net, texts, Ordering()), usual(net, texts, Ordering("drift"))
    (('leave-one-out', 'michel', 'random'), ('leave-one-out', 'random'))
    """
    sloped = (SLOPED,) if objective_of(net, how.objective, scenes[0])[0].sloped else ()
    return (FIRST, *sloped, RANDOM, *([GATES] if how.gates is not None else []))


def check_order(order: str, how: Ordering) -> None:
    """Refuse an order that nothing can find."""
    if order not in ORDERS:
        raise SpecError(f"heads are ordered by {order!r} nowhere; {nearest(order, ORDERS)}")
    if order == GATES and how.gates is None:
        raise SpecError("gates learn before they order heads; say how, as in gates=Gating(heads=0.5, freeze='model')")


def ordered(
    net: Transformer,
    scenes: Sequence[Scene],
    units: Mapping[str, Sequence[Unit]],
    order: str,
    how: Ordering,
    tell: Tell = lambda _: None,
) -> Worths:
    """What each head is worth by this order: those worth least go first.

    By gates (1905.09418) a head is worth the chance that its gate is open.
    """
    check_order(order, how)
    if order != GATES:
        return worths(net, scenes, By(order, how.objective, how.sample, seed=how.seed))
    assert how.gates is not None
    whole = all(len(unit.heads) == 1 for own in units.values() for unit in own)
    gating = replace(how.gates, unit="head" if whole else "kv")

    def progress(point: Point) -> None:
        tell(f"gates: step {point.step} of {gating.steps}")

    found = gated(net, scenes, gating, progress)
    of = {(site, head): chance for site, own in found.chances.items() for head, chance in enumerate(own)}
    share = gating.target(sum(map(len, units.values())))
    said = f"gates learned in {gating.steps} steps until {share} were to stay, freeze={gating.freeze!r}"
    return Worths(of, (said, *found.notes))

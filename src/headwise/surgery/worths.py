"""What every head is worth, by any of the names that importance goes by, or by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..errors import SpecError, nearest
from ..heads.objectives import Objective, objective_of
from ..heads.rating import How
from ..heads.scene import Scene
from ..heads.weighing import METHODS, importance
from ..models import Transformer
from .plans import Head, Unit, counts

RANDOM, BEST = "random", "best"
BY = (*METHODS, RANDOM, BEST)


class By(NamedTuple):
    """By what heads are ranked: a method of `hw.importance`, or "random"; of which objective, on how many texts.

    "best" is michel where the objective has a slope, and leave-one-out where it has none: of a trained translator the
    latter was no better than chance when many heads went at once (docs/findings/translator.md).
    """

    method: str = "best"
    objective: str | Objective | None = None
    sample: int | None = None
    budget: float | None = None
    normalised: str = ""
    seed: int = 0


USUAL = By()


class Worths(NamedTuple):
    """A number for every head, and what must be said of how it was found."""

    of: Mapping[Head, float]
    notes: tuple[str, ...] = ()

    def unit(self, unit: Unit) -> float:
        """What the heads of a unit are worth together; one of which nothing is known is not taken away."""
        told = [self.of.get((unit.site, head), math.inf) for head in unit.heads]
        return math.inf if any(map(math.isnan, told)) else sum(told)


def worths(net: Transformer, scenes: Sequence[Scene], by: By = USUAL) -> Worths:
    """What each head of a model is worth on these texts.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 1}), seed=0)
    >>> sorted(worths(net, [], By("random")).of.values())
    [0.0, 1.0, 2.0, 3.0]
    """
    if by.method not in BY:
        raise SpecError(f"heads are ranked by {by.method!r} nowhere; {nearest(by.method, BY)}")
    if by.method == RANDOM:
        heads = [(site, head) for site, count in counts(net.described).items() for head in range(count)]
        order = np.random.default_rng(by.seed).permutation(len(heads))
        return Worths({head: float(place) for head, place in zip(heads, order, strict=True)})
    if len(scenes) < 2:
        raise SpecError(f"{len(scenes)} texts say nothing of heads by {by.method}; give at least two, or by='random'")
    if by.method == BEST:
        sloped = objective_of(net, by.objective, scenes[0])[0].sloped
        return worths(net, scenes, by._replace(method="michel" if sloped else "leave-one-out"))
    how = replace(How(), sample=by.sample, budget=by.budget, normalised=by.normalised, seed=by.seed, resamples=1)
    found = importance(net, scenes, method=by.method, objective=by.objective, how=how)
    notes = (f"ranked by {found.method} of {found.objective} over {found.texts} texts", *found.notes)
    return Worths({(one.site, one.head): one.value for one in found.heads}, notes)

"""What every head is worth, by any of the names that importance goes by, or by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..errors import SpecError, suggest
from ..heads.objectives import Objective, choose_objective
from ..heads.rating import ImportanceOptions
from ..heads.scene import Example
from ..heads.weighing import IMPORTANCE_METHODS, estimate_importance
from ..models import Transformer
from .plans import HeadId, HeadUnit, count_heads

RANDOM, BEST = "random", "best"
RANKING_METHODS = (*IMPORTANCE_METHODS, RANDOM, BEST)


class HeadRanking(NamedTuple):
    """By what heads are ranked: a method of `hw.importance`, or "random"; of which objective, on how many texts.

    "best" is michel where the objective has a slope, and leave-one-out where it has none: of a trained translator the
    latter was no better than chance when many heads went at once (docs/findings/translator.md).
    """

    method: str = "best"
    objective: str | Objective | None = None
    num_examples: int | None = None
    max_seconds: float | None = None
    normalisation: str = ""
    seed: int = 0


DEFAULT_RANKING = HeadRanking()


class HeadScores(NamedTuple):
    """A number for every head, and what must be said of how it was found."""

    scores: Mapping[HeadId, float]
    notes: tuple[str, ...] = ()

    def unit_score(self, unit: HeadUnit) -> float:
        """What the heads of a unit are worth together; one of which nothing is known is not taken away."""
        told = [self.scores.get((unit.site, head), math.inf) for head in unit.heads]
        return math.inf if any(map(math.isnan, told)) else sum(told)


def score_heads(net: Transformer, examples: Sequence[Example], ranking: HeadRanking = DEFAULT_RANKING) -> HeadScores:
    """What each head of a model is worth on these texts.

    >>> import headwise as hw
    >>> net = hw.build(hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 1}), seed=0)
    >>> sorted(score_heads(net, [], HeadRanking("random")).of.values())
    [0.0, 1.0, 2.0, 3.0]
    """
    if ranking.method not in RANKING_METHODS:
        raise SpecError(f"heads are ranked by {ranking.method!r} nowhere; {suggest(ranking.method, RANKING_METHODS)}")
    if ranking.method == RANDOM:
        heads = [(site, head) for site, count in count_heads(net.described).items() for head in range(count)]
        order = np.random.default_rng(ranking.seed).permutation(len(heads))
        return HeadScores({head: float(place) for head, place in zip(heads, order, strict=True)})
    if len(examples) < 2:
        raise SpecError(f"{len(examples)} texts say nothing of heads by {ranking.method}; give at least two, or by='random'")
    if ranking.method == BEST:
        sloped = choose_objective(net, ranking.objective, examples[0])[0].has_gradient
        return score_heads(net, examples, ranking._replace(method="michel" if sloped else "leave-one-out"))
    how = replace(ImportanceOptions(), num_examples=ranking.num_examples, max_seconds=ranking.max_seconds, normalisation=ranking.normalisation, seed=ranking.seed, num_resamples=1)
    found = estimate_importance(net, examples, method=ranking.method, objective=ranking.objective, options=how)
    notes = (f"ranked by {found.method} of {found.objective} over {found.texts} texts", *found.notes)
    return HeadScores({(one.site, one.head): one.value for one in found.heads}, notes)

"""How well a model speaks, over texts: a named objective and what is right, with intervals, alone or beside another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..heads.intervals import Array, interval, mean, means, resampled
from ..heads.objectives import Drift, Objective, Question, objective_of
from ..heads.scene import Scene
from ..models import Transformer
from ..tasks import IGNORED
from .sayings import output

RESAMPLES, SEED = 1000, 0
LOSS, PERPLEXITY, ACCURACY = "loss", "perplexity", "accuracy"


class Between(NamedTuple):
    """A mean over texts, and between which values it might have come out."""

    value: float
    low: float
    high: float


class Row(NamedTuple):
    """One number of a model, beside that of another, `before`, and the difference, text by text: after - before.

    `better` says which is better, "lower" or "higher".
    """

    name: str
    better: str
    after: Between
    before: Between | None = None
    change: Between | None = None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"before": self.before, "after": self.after, "change": self.change}
        return {"name": self.name, "better": self.better} | {
            name: None if one is None else one._asdict() for name, one in told.items()
        }


@dataclass(frozen=True)
class Quality:
    """Rows of an objective over so many texts, in which so many places were asked."""

    objective: str
    texts: int
    places: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """One of them."""
        return next(row for row in self.rows if row.name == name)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"objective": self.objective, "texts": self.texts, "places": self.places}
        return told | {"rows": [row.data for row in self.rows], "notes": list(self.notes)}


class Counts(NamedTuple):
    """Of one text: sums by name, and of how many places."""

    sums: Mapping[str, float]
    places: int


def quality(
    net: Transformer,
    scenes: Iterable[Scene],
    objective: str | Objective | None = None,
    other: Transformer | None = None,
) -> Quality:
    """How well a model speaks over texts; beside `other`, the model before, text by text, where that is given.

    The objective is that of the model's own head where none is named, and how far it drifts from `other` where the head
    is not known. A loss is a mean over the places that are asked, in all texts together; intervals resample texts.

    >>> import headwise as hw, torch
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> texts = [Scene({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> found = quality(net.eval(), texts)
    >>> [row.name for row in found.rows], found.texts, found.places
    (['loss', 'perplexity', 'accuracy'], 5, 20)
    """
    texts = iter(scenes)
    if (first := next(texts, None)) is None:
        raise ValueError("no text was given; give at least two")
    chosen, said = objective_of(net, objective, first)
    check_drifts(chosen, other)
    sums = Tallied(chosen, [said] if said else [])
    for number, scene in enumerate(chain([first], texts)):
        question = chosen.question(net, scene, number)
        own = output(net, question.given)
        sums.take(question, own, None if other is None else output(other, question.given))
    return sums.quality


def check_drifts(objective: Objective, other: Transformer | None) -> None:
    """Refuse to measure how far a model drifts from nothing."""
    if isinstance(objective, Drift) and other is None:
        raise ValueError("drift is how far a model lies from another; give other=, the model before")


@dataclass
class Tallied:
    """What was counted, text by text, of a model and of the one before."""

    objective: Objective
    notes: list[str]
    after: list[Counts] = field(default_factory=list)
    before: list[Counts] = field(default_factory=list)
    silent: int = 0

    def take(self, question: Question, own: Tensor, other: Tensor | None) -> float | None:
        """One text more; how much worse it got, None where nothing is asked of it."""
        if not self.count(question, own, other) or other is None:
            return 0.0 if question.asked else None
        if not isinstance(self.objective, Drift):
            self.before.append(self._counts(question, other, other))
        return self.worse

    def count(self, question: Question, own: Tensor, other: Tensor | None) -> bool:
        """One text more of the model after alone; whether anything is asked of it."""
        if question.asked:
            self.after.append(self._counts(question, own, other))
        else:
            self.silent += 1
        return bool(question.asked)

    @property
    def worse(self) -> float:
        """How much worse the last text got."""
        before, after = self.losses
        return after - before

    @property
    def losses(self) -> tuple[float, float]:
        """Of the last text, before and after, means over its places."""
        own = self.after[-1]
        past = self.before[-1].sums[LOSS] if self.before else 0.0
        return past / own.places, own.sums[LOSS] / own.places

    def _counts(self, question: Question, own: Tensor, plain: Tensor | None) -> Counts:
        value = float(self.objective.value(own, plain, question))
        found = {LOSS: value * question.asked}
        if question.labels is not None:
            flat, labels = own.reshape(-1, own.shape[-1]), question.labels.to(own.device)
            found[ACCURACY] = float(((flat.argmax(-1) == labels) & (labels != IGNORED)).sum())
        return Counts(found, question.asked)

    @property
    def quality(self) -> Quality:
        """The whole of it."""
        count, name = len(self.after), self.objective.name
        check_count(count, "texts in which something is asked")
        notes = list(self.notes)
        if self.silent:
            notes.append(f"{self.silent} texts in which nothing is asked were left out")
        rows = list(rows_of(self.after, self.before or None))
        if isinstance(self.objective, Drift):
            rows = [row._replace(name=name) for row in rows]
        elif name != "label":
            rows.insert(1, row_of(PERPLEXITY, LOSS, (self.after, self.before or None), np.exp))
        return Quality(name, count, sum(one.places for one in self.after), tuple(rows), tuple(notes))


def check_count(count: int, what: str) -> None:
    """Refuse an interval over fewer than two."""
    if count < 2:
        raise ValueError(f"{count} {what} leave no interval; give at least two")


def rows_of(after: Sequence[Counts], before: Sequence[Counts] | None) -> list[Row]:
    """A row for everything that was counted."""
    return [row_of(name, name, (after, before)) for name in after[0].sums]


def row_of(
    name: str,
    of: str,
    counts: tuple[Sequence[Counts], Sequence[Counts] | None],
    shape: Callable[[Array], Array] = lambda one: one,
) -> Row:
    """A mean over places, after `shape`, with the interval over texts; both models have the same texts drawn.

    >>> some = [Counts({"loss": 4.0}, 2), Counts({"loss": 8.0}, 4)]
    >>> row_of("loss", "loss", (some, None)).after
    Between(value=2.0, low=2.0, high=2.0)
    """
    draws = resampled(len(counts[0]), RESAMPLES, SEED)
    own = _drawn(counts[0], of, draws, shape)
    better = "lower" if of == LOSS else "higher"
    if counts[1] is None:
        return Row(name, better, _between(*own))
    other = _drawn(counts[1], of, draws, shape)
    return Row(name, better, _between(*own), _between(*other), _between(own[0] - other[0], own[1] - other[1]))


def _drawn(counts: Sequence[Counts], of: str, draws: Array, shape: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The mean, and that of every draw."""
    sums = np.array([[one.sums[of]] for one in counts])
    places = np.array([[float(one.places)] for one in counts])
    return shape(mean(sums, places)), shape(means(sums, places, draws))


def _between(value: Array, drawn: Array) -> Between:
    low, high = interval(drawn)
    return Between(*(float(one[0]) for one in (value, low, high)))


def surely(change: Between | None) -> str:
    """Whether a change is told from none: "more", "less" or "no difference shown".

    >>> surely(Between(0.5, 0.1, 0.9)), surely(Between(0.5, -0.1, 0.9))
    ('more', 'no difference shown')
    """
    if change is None or math.isnan(change.value) or change.low <= 0 <= change.high:
        return "no difference shown"
    return "more" if change.value > 0 else "less"

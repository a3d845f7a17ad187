"""How well a model speaks, over texts: a named objective and what is right, with intervals, alone or beside another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..heads.intervals import Array, confidence_interval, ratio_of_sums, resampled_ratios, draw_resamples
from ..heads.objectives import OutputDrift, Objective, EvaluationInput, choose_objective
from ..heads.scene import Example
from ..models import Transformer
from ..tasks import IGNORED
from .sayings import compute_output

BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED = 1000, 0
LOSS, PERPLEXITY, ACCURACY = "loss", "perplexity", "accuracy"


class IntervalEstimate(NamedTuple):
    """A mean over texts, and between which values it might have come out."""

    value: float
    low: float
    high: float


class MetricRow(NamedTuple):
    """One number of a model, beside that of another, `before`, and the difference, text by text: after - before.

    `better` says which is better, "lower" or "higher".
    """

    name: str
    better: str
    after: IntervalEstimate
    before: IntervalEstimate | None = None
    change: IntervalEstimate | None = None

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"before": self.before, "after": self.after, "change": self.change}
        return {"name": self.name, "better": self.better} | {
            name: None if one is None else one._asdict() for name, one in told.items()
        }


@dataclass(frozen=True)
class QualityReport:
    """Rows of an objective over so many texts, in which so many places were asked."""

    objective: str
    texts: int
    num_positions: int
    rows: tuple[MetricRow, ...]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> MetricRow:
        """One of them."""
        return next(row for row in self.rows if row.name == name)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        told = {"objective": self.objective, "texts": self.texts, "places": self.num_positions}
        return told | {"rows": [row.data for row in self.rows], "notes": list(self.notes)}


class TextCounts(NamedTuple):
    """Of one text: sums by name, and of how many places."""

    sums: Mapping[str, float]
    num_positions: int


def measure_quality(
    net: Transformer,
    examples: Iterable[Example],
    objective: str | Objective | None = None,
    baseline: Transformer | None = None,
) -> QualityReport:
    """How well a model speaks over texts; beside `other`, the model before, text by text, where that is given.

    The objective is that of the model's own head where none is named, and how far it drifts from `other` where the head
    is not known. A loss is a mean over the places that are asked, in all texts together; intervals resample texts.

    >>> import headwise as hw, torch
    >>> net = hw.build(
    ...     hw.families.read({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}), seed=0
    ... )
    >>> texts = [Example({"x": torch.tensor([[n, 1, 4, 1, 5]])}, {}) for n in range(5)]
    >>> found = measure_quality(net.eval(), texts)
    >>> [row.name for row in found.rows], found.texts, found.places
    (['loss', 'perplexity', 'accuracy'], 5, 20)
    """
    texts = iter(examples)
    if (first := next(texts, None)) is None:
        raise ValueError("no text was given; give at least two")
    chosen, said = choose_objective(net, objective, first)
    check_drift_baseline(chosen, baseline)
    sums = QualityTally(chosen, [said] if said else [])
    for number, scene in enumerate(chain([first], texts)):
        question = chosen.prepare_input(net, scene, number)
        own = compute_output(net, question.inputs)
        sums.add_pair(question, own, None if baseline is None else compute_output(baseline, question.inputs))
    return sums.report


def check_drift_baseline(objective: Objective, baseline: Transformer | None) -> None:
    """Refuse to measure how far a model drifts from nothing."""
    if isinstance(objective, OutputDrift) and baseline is None:
        raise ValueError("drift is how far a model lies from another; give other=, the model before")


@dataclass
class QualityTally:
    """What was counted, text by text, of a model and of the one before."""

    objective: Objective
    notes: list[str]
    after: list[TextCounts] = field(default_factory=list)
    before: list[TextCounts] = field(default_factory=list)
    num_unscored: int = 0

    def add_pair(self, question: EvaluationInput, own: Tensor, other: Tensor | None) -> float | None:
        """One text more; how much worse it got, None where nothing is asked of it."""
        if not self.add(question, own, other) or other is None:
            return 0.0 if question.num_targets else None
        if not isinstance(self.objective, OutputDrift):
            self.before.append(self._counts(question, other, other))
        return self.last_loss_change

    def add(self, question: EvaluationInput, own: Tensor, other: Tensor | None) -> bool:
        """One text more of the model after alone; whether anything is asked of it."""
        if question.num_targets:
            self.after.append(self._counts(question, own, other))
        else:
            self.num_unscored += 1
        return bool(question.num_targets)

    @property
    def last_loss_change(self) -> float:
        """How much worse the last text got."""
        before, after = self.last_losses
        return after - before

    @property
    def last_losses(self) -> tuple[float, float]:
        """Of the last text, before and after, means over its places."""
        own = self.after[-1]
        past = self.before[-1].sums[LOSS] if self.before else 0.0
        return past / own.num_positions, own.sums[LOSS] / own.num_positions

    def _counts(self, question: EvaluationInput, own: Tensor, plain: Tensor | None) -> TextCounts:
        value = float(self.objective.value(own, plain, question))
        found = {LOSS: value * question.num_targets}
        if question.labels is not None:
            flat, labels = own.reshape(-1, own.shape[-1]), question.labels.to(own.device)
            found[ACCURACY] = float(((flat.argmax(-1) == labels) & (labels != IGNORED)).sum())
        return TextCounts(found, question.num_targets)

    @property
    def report(self) -> QualityReport:
        """The whole of it."""
        count, name = len(self.after), self.objective.name
        check_min_count(count, "texts in which something is asked")
        notes = list(self.notes)
        if self.num_unscored:
            notes.append(f"{self.num_unscored} texts in which nothing is asked were left out")
        rows = list(build_metric_rows(self.after, self.before or None))
        if isinstance(self.objective, OutputDrift):
            rows = [row._replace(name=name) for row in rows]
        elif name != "label":
            rows.insert(1, build_metric_row(PERPLEXITY, LOSS, (self.after, self.before or None), np.exp))
        return QualityReport(name, count, sum(one.num_positions for one in self.after), tuple(rows), tuple(notes))


def check_min_count(count: int, what: str) -> None:
    """Refuse an interval over fewer than two."""
    if count < 2:
        raise ValueError(f"{count} {what} leave no interval; give at least two")


def build_metric_rows(after: Sequence[TextCounts], before: Sequence[TextCounts] | None) -> list[MetricRow]:
    """A row for everything that was counted."""
    return [build_metric_row(name, name, (after, before)) for name in after[0].sums]


def build_metric_row(
    name: str,
    sum_name: str,
    counts: tuple[Sequence[TextCounts], Sequence[TextCounts] | None],
    transform: Callable[[Array], Array] = lambda one: one,
) -> MetricRow:
    """A mean over places, after `shape`, with the interval over texts; both models have the same texts drawn.

    >>> some = [TextCounts({"loss": 4.0}, 2), TextCounts({"loss": 8.0}, 4)]
    >>> build_metric_row("loss", "loss", (some, None)).after
    Between(value=2.0, low=2.0, high=2.0)
    """
    draws = draw_resamples(len(counts[0]), BOOTSTRAP_RESAMPLES, BOOTSTRAP_SEED)
    own = _bootstrap_means(counts[0], sum_name, draws, transform)
    better = "lower" if sum_name == LOSS else "higher"
    if counts[1] is None:
        return MetricRow(name, better, _interval_estimate(*own))
    other = _bootstrap_means(counts[1], sum_name, draws, transform)
    return MetricRow(name, better, _interval_estimate(*own), _interval_estimate(*other), _interval_estimate(own[0] - other[0], own[1] - other[1]))


def _bootstrap_means(counts: Sequence[TextCounts], of: str, draws: Array, shape: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The mean, and that of every draw."""
    sums = np.array([[one.sums[of]] for one in counts])
    places = np.array([[float(one.num_positions)] for one in counts])
    return shape(ratio_of_sums(sums, places)), shape(resampled_ratios(sums, places, draws))


def _interval_estimate(value: Array, drawn: Array) -> IntervalEstimate:
    low, high = confidence_interval(drawn)
    return IntervalEstimate(*(float(one[0]) for one in (value, low, high)))


def describe_significance(change: IntervalEstimate | None) -> str:
    """Whether a change is told from none: "more", "less" or "no difference shown".

    >>> describe_significance(IntervalEstimate(0.5, 0.1, 0.9)), describe_significance(IntervalEstimate(0.5, -0.1, 0.9))
    ('more', 'no difference shown')
    """
    if change is None or math.isnan(change.value) or change.low <= 0 <= change.high:
        return "no difference shown"
    return "more" if change.value > 0 else "less"

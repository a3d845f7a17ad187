"""Summaries of the heads of a study's model on a task: measures and classes, diversity, gates, and
scores.

`summarise_heads` returns means over the heads of a model, small enough to be stored for every cell
and every moment at which heads are measured: before training, during it, and on each further test.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models import Transformer
from ..observe.head_analysis.annotated_examples import Example, examples_from_task
from ..observe.head_analysis.head_classes import classify_heads
from ..observe.head_analysis.head_measurement import measure_heads
from ..observe.head_analysis.head_similarity import spread_of_sets
from ..observe.head_analysis.head_table import HeadTable, Measure
from ..observe.head_analysis.rank_analysis import (
    MAX_QUERIES,
    effective_rank,
    measure_rank_collapse,
    score_stages,
)
from ..observe.head_analysis.weight_bands import WeightBand
from ..observe.inspect.adapters.native_attention import HeadwiseCall
from ..observe.inspect.attention_sites import find_attention
from ..observe.inspect.hooks import AttentionHook, ModelRun
from ..observe.inspect.model_inputs import prepare_inputs
from ..observe.inspect.observed_call import ObservedCall
from ..training.data import Task

HEAD_MEASURES = (
    "entropy",
    "breadth",
    "confidence",
    "distance",
    "sink",
    "previous",
    "self",
    "induction",
)
UNCLEAR = "unclear"


def summarise_heads(net: Transformer, task: Task, num_texts: int) -> dict[str, Any]:
    """Means over all heads of a model on texts of a task, and the heads of each class; or a note
    why there are none.

    - `measures`, `chance`: `HEAD_MEASURES` and their chance levels; `classes`: number of heads by
      their first class;
    - `diversity`: generalised Jensen-Shannon divergence of the heads of a layer, from 0 (equal) to
      1 (1909.00015);
    - `support`, `support_spread`: number of keys with a weight above 0, mean over heads, and the
      standard deviation of
      this number over the heads of the model;
    - `score_deviation`: standard deviation of the scores of a query over its keys; `score_rank`:
      their effective rank;
      `score_change`: size of what modifiers and mixing add to the scores, as a share of the scores;
    - `gates`: for each attention with gates, the share of tokens for which each head is on;
    - `residual`: how different the tokens of a text are after each layer, from 0 (equal) to 1
      (2103.03404).
    """
    if num_texts < 2:
        return {"note": "not measured"}
    net.eval()
    try:
        examples = examples_from_task(net, task, num_texts).examples_with_frequencies()
        diversity = LayerDiversity()
        support = HeadSupport()
        table = classify_heads(measure_heads(net, examples, collectors=[diversity, support]))
    except ValueError as error:
        return {"note": str(error)}
    classes = Counter(head.classes[0].name if head.classes else UNCLEAR for head in table.heads)
    return {
        "heads": len(table.heads),
        "measures": _means(table, "value"),
        "chance": _means(table, "chance"),
        "classes": dict(sorted(classes.items())),
        "diversity": diversity.value,
        "support": statistics.fmean(support.values),
        "support_spread": statistics.pstdev(support.values),
        **_summarise_calls(net, examples),
    }


def _means(table: HeadTable, kind: str) -> dict[str, float]:
    """Mean over heads of the values or chance levels of every measure that has them."""
    means: dict[str, float] = {}
    for name in HEAD_MEASURES:
        measures = [head.measures[name] for head in table.heads if name in head.measures]
        values = [getattr(measure, kind) for measure in measures]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if finite:
            means[name] = sum(finite) / len(finite)
    return means


class BandCollector:
    """Base class of collectors that read the weights of all heads during `measure_heads`, and
    measure no single head.
    """

    def start_example(self, example: Example) -> None:
        """Nothing is needed of an example."""

    def finish_example(self) -> None:
        """Nothing is kept of an example."""

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """No measures of single heads."""
        return {}


class LayerDiversity(BandCollector):
    """Collects the diversity of the heads within each layer."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0.0

    @property
    def value(self) -> float | None:
        """Mean over rows and layers; None if no layer has two heads."""
        return self._sum / self._count if self._count else None

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add the rows of a band."""
        heads, rows, _ = band.w_HTS.shape
        sums, counts = spread_of_sets(band.w_HTS, torch.ones(1, heads), torch.ones(heads, rows))
        self._sum += float(sums[0])
        self._count += float(counts[0])


class HeadSupport(BandCollector):
    """Collects the number of keys to which each head gives a weight above 0."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], tuple[float, int]] = {}

    @property
    def values(self) -> list[float]:
        """Mean number of keys over the rows of each head."""
        return [total / count for total, count in self._sums.values()]

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add the rows of a band."""
        for head, keys in enumerate((band.w_HTS > 0).sum(-1).tolist()):
            total, count = self._sums.get((site, head), (0.0, 0))
            self._sums[site, head] = (total + sum(keys), count + len(keys))


class _CallHook(AttentionHook):
    """Hook that reads scores and gates of each call of one attention."""

    def __init__(self) -> None:
        self.scores: list[tuple[float, float, float]] = []
        self.gates: list[Tensor] = []

    def on_call(self, call: ObservedCall) -> None:
        """Read the spread, rank and change of the scores, and the share of tokens for which each
        head is on.
        """
        if not isinstance(call, HeadwiseCall):
            return
        stages = score_stages(call)
        allowed = call.allowed_pairs(slice(0, MAX_QUERIES))
        if "scores" in stages:
            scores = stages["scores"]
            final = stages.get("mixed", scores)
            rank = float(effective_rank(final[0].float()).mean())
            change = _change(scores, final, allowed)
            self.scores.append((_row_deviation(final, allowed), rank, change))
        self.gates += [(gate != 0).float().mean((0, 1)).flatten() for gate in call.inputs.gates]


def _row_deviation(scores_BHTS: Tensor, allowed: Tensor) -> float:
    """Standard deviation of the scores of a query over its allowed keys, mean over queries with at
    least two.
    """
    allowed = allowed.expand(scores_BHTS.shape)[..., : scores_BHTS.shape[2], :]
    count = allowed.sum(-1)
    mean = scores_BHTS.masked_fill(~allowed, 0).sum(-1) / count.clamp(min=1)
    squares = (scores_BHTS - mean[..., None]).masked_fill(~allowed, 0).square().sum(-1)
    return float((squares / (count - 1).clamp(min=1)).sqrt()[count > 1].mean())


def _change(before_BHTS: Tensor, after_BHTS: Tensor, allowed: Tensor) -> float:
    """Size of the change as a share of the scores; NaN or infinite without scores, as of weights
    learned by position.
    """
    forbidden = ~allowed.expand(before_BHTS.shape)
    difference = (after_BHTS - before_BHTS).masked_fill(forbidden, 0)
    return float(difference.norm() / before_BHTS.masked_fill(forbidden, 0).norm())


def _summarise_calls(net: Transformer, examples: Sequence[Example]) -> dict[str, Any]:
    """Means of scores over attentions and texts, gates of each attention, and the differences
    between tokens.
    """
    sites = [module for module in find_attention(net) if module.site.observe.possible]
    scores: list[tuple[float, float, float]] = []
    gates: dict[str, list[Tensor]] = {}
    for example in examples:
        hooks = {module.site.name: _CallHook() for module in sites}
        ModelRun(net, prepare_inputs(net, example.model_inputs, 0)).run_with_hooks(sites, hooks)
        for name, hook in hooks.items():
            scores += hook.scores
            if hook.gates:
                gates.setdefault(name, []).append(torch.stack(hook.gates).prod(0))
    depths = measure_rank_collapse(net, examples)
    summary: dict[str, Any] = {
        "residual": [one.residual.value for one in depths if one.stack == depths[-1].stack]
    }
    if scores:
        means = np.mean(scores, 0).tolist()
        named = zip(("score_deviation", "score_rank", "score_change"), means, strict=True)
        summary |= {name: mean for name, mean in named if math.isfinite(mean)}
    if gates:
        summary["gates"] = {
            name: torch.stack(values).mean(0).tolist() for name, values in gates.items()
        }
    return summary

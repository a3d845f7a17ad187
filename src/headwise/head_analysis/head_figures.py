"""Figures of all heads of a model: a measure by layer, importance, and similar heads on a plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..report.data import Axis, Figure, Plot, Series
from ..report.plots import find_undrawable as find_undrawable
from .head_metrics import HEAD_METRICS
from .head_similarity import PlaneEmbedding
from .head_table import (
    CLASS_STYLES,
    HeadMeasures,
    HeadTable,
    ImportanceResult,
    class_group as class_group,
)

NUM_NAMED_HEADS = 5  # named on the curve of importance
MEASURE_UNITS = {"entropy": "nats", "distance": "tokens"}
COLOUR_NOTE = "colour: class with the highest score"


def _class_colours(heads: Sequence[HeadMeasures]) -> list[str]:
    return [CLASS_STYLES.get(head.group, ("", "muted"))[1] or "empty" for head in heads]


def plot_measure_by_layer(table: HeadTable, measure: str = "entropy") -> Figure:
    """Return a measure of every head by layer: dots are heads with intervals, the line their mean."""
    sites = table.sites
    xs: list[float] = []
    heads: list[HeadMeasures] = []
    means: list[float] = []
    chance: list[float] = []
    for index, site in enumerate(sites):
        members = [head for head in table.heads if head.site == site]
        heads += members
        xs += [index + 0.5 * (n / max(1, len(members) - 1) - 0.5) for n in range(len(members))]
        means.append(sum(head.measures[measure].value for head in members) / len(members))
        chance.append(members[0].measures[measure].chance)
    values = [head.measures[measure] for head in heads]
    lows = [value.low for value in values]
    highs = [value.high for value in values]
    ys = [value.value for value in values]
    dots: dict[str, Any] = {"line": "", "colours": _class_colours(heads), "sizes": [3.4] * len(xs)}
    layers = range(len(sites))
    series = [
        Series("head, 95 % interval", xs, ys, lows, highs, band=False, **dots),
        Series("mean of the layer", layers, means, colour="text"),
        Series("chance", layers, chance, line="--", colour="muted"),
    ]
    metric = HEAD_METRICS.get(measure)
    unit = MEASURE_UNITS.get(measure) or (metric.description if metric is not None else "")
    step = -(-len(sites) // 12)
    names = [site.removesuffix(".attention") for site in sites]
    ticks: dict[float, str] = {n: names[n] for n in range(0, len(sites), step)}
    y = Axis(f"{measure} ({unit})" if unit else measure)
    plot = Plot(series, Axis("attention layer", ticks=ticks), y, size=(6.4, 3.4))
    title = f"{table.model}: {measure} of every head, {table.texts}"
    return Figure(title, [plot], table.class_legend, legend_title=COLOUR_NOTE)


def plot_importance(result: ImportanceResult) -> Figure:
    """Return the importance of the heads in decreasing order, with 95 % intervals."""
    heads = result.by_importance
    ys = [head.value for head in heads]
    lows = [head.low for head in heads]
    highs = [head.high for head in heads]
    names = [f"{rank}  {head.site} {head.head}" for rank, head in enumerate(heads)]
    ranks = range(len(heads))
    series = Series("head, 95 % interval", ranks, ys, lows, highs, marker=".")
    axes = (Axis("heads by decreasing importance"), Axis(f"importance by {result.method}"))
    plot = Plot([series], *axes, size=(6.4, 3.1))
    title = f"{result.model}: importance of every head for {result.objective}, {result.texts} texts"
    return Figure(title, [plot], note=f"most important: {', '.join(names[:NUM_NAMED_HEADS])}")


def plot_similar_heads(table: HeadTable, embedding: PlaneEmbedding) -> Figure:
    """Return heads as points of an embedding; later layers have larger dots."""
    last = max(1, len(table.sites) - 1)
    sizes = [6 + 5 * table.sites.index(head.site) / last for head in table.heads]
    xs, ys = embedding.points.T.tolist()
    labels = [f"{head.layer}.{head.head}" for head in table.heads]
    dots: dict[str, Any] = {"line": "", "colours": _class_colours(table.heads), "sizes": sizes}
    series = Series("", xs, ys, labels=labels, **dots)
    unit = "nats of Jensen-Shannon divergence without sinks"
    plot = Plot([series], Axis(unit), Axis(unit), names="", size=(5.6, 5.4))
    note = f"labels are layer.head; larger dots are later layers; stress {embedding.stress:.2f}"
    title = f"{table.model}: similar heads are close"
    return Figure(title, [plot], table.class_legend, legend_title=COLOUR_NOTE, note=note)

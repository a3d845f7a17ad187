"""Learning curves of a run as a figure, from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.data import Axis, Figure, Plot, Reference, Series
from ..report.plots import to_svg
from ..util.files import write_atomically

CURVE_FILES = {"light": "curves.svg", "dark": "curves-dark.svg"}
SMOOTHING_WINDOW = 0.02  # share of the steps over which the training loss is averaged
MAX_POINTS = 1000  # of one line, so that the picture of a long run stays small
STEP_AXIS = Axis("step")


def make_curves(
    records: Iterable[Mapping[str, Any]], title: str, changes: Sequence[int] = ()
) -> Figure:
    """The curves of a run over its steps: loss, other metrics of evaluations, and learning rate.

    `changes` are the steps after which the recipe changed.
    """
    steps: list[int] = []
    losses: list[float] = []
    rates: list[float] = []
    evaluations: dict[str, dict[int, float]] = {}
    for record in records:
        if record["event"] == "step":
            steps.append(record["step"])
            losses.append(record["loss"])
            rates.append(record["rate"])
        elif record["event"] == "evaluation":
            for name, value in record["metrics"].items():
                if "@" not in name:  # slices, such as "accuracy@distance<=8"
                    evaluations.setdefault(name, {})[record["step"]] = value
    window = max(1, round(SMOOTHING_WINDOW * len(steps)))
    smooth = average_over_windows(losses, window)
    thin = slice(None, None, 1 + len(steps) // MAX_POINTS)
    name = "training" if window == 1 else f"training, mean of {window} steps"
    series = [Series(name, steps[thin], smooth[thin])]
    series += _metric_series({"validation": evaluations.pop("loss", {})})
    references = [Reference("x", step, "changed") for step in changes]
    panels = [Plot(series, STEP_AXIS, Axis("nats per label"), "loss", references)]
    if evaluations:
        scores = _metric_series(evaluations)
        panels.append(Plot(scores, STEP_AXIS, title="validation metrics", references=references))
    rate = Series("", steps[thin], rates[thin])
    rate_axis = Axis(low=0.0)
    panels.append(Plot([rate], STEP_AXIS, rate_axis, "learning rate", references))
    return Figure(title, panels, num_columns=3)


def _metric_series(metrics: Mapping[str, Mapping[int, float]]) -> list[Series]:
    return [
        Series(name, list(values), list(values.values()), marker="o")
        for name, values in metrics.items()
        if values
    ]


def average_over_windows(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values at each position, of fewer at the beginning.

    >>> average_over_windows([4.0, 2.0, 6.0], 2)
    [4.0, 3.0, 4.0]
    """
    means: list[float] = []
    total = 0.0
    for n, value in enumerate(values):
        total += value - (values[n - window] if n >= window else 0.0)
        means.append(total / min(n + 1, window))
    return means


def save_curves(folder: Path, figure: Figure) -> None:
    """Draw the curves into the folder of a run for both backgrounds; equal records give equal
    files.
    """
    for theme, name in CURVE_FILES.items():
        write_atomically(folder / name, to_svg(figure, theme).encode())

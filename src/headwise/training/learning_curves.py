"""Learning curves of a run as pictures for light and dark backgrounds, from its metrics.jsonl."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_atomically
from ..output_paths import FIGURE_METADATA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_FILES = {"light": "curves.svg", "dark": "curves-dark.svg"}
SMOOTHING_WINDOW = 0.02  # share of the steps over which the training loss is averaged
MAX_POINTS = 1000  # of one line, so that the picture of a long run stays small


@dataclass(frozen=True)
class CurveTheme:
    """Colours: background, text, axes and grid, and those of training, validation and changes of
    the recipe.
    """

    background: str
    text: str
    axes: str
    grid: str
    training: str
    validation: str


THEMES = {
    "light": CurveTheme("#FFFFFF", "#1A1A1A", "#6A6A6A", "#E4E4E4", "#0072B2", "#C04A00"),
    "dark": CurveTheme("#14161A", "#E8E8E8", "#9AA1AA", "#2A2E35", "#56B4E9", "#F0924C"),
}


@dataclass
class LearningCurves:
    """Curves of a run over its steps: training loss, learning rate, and metrics of evaluations."""

    steps: list[int] = field(default_factory=list[int])
    losses: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])
    evaluations: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict[str, Any])
    best: int | None = None
    changes: list[int] = field(default_factory=list[int])  # steps after which the recipe changed

    @staticmethod
    def of(records: Iterable[Mapping[str, Any]], changes: Sequence[int] = ()) -> LearningCurves:
        """The curves of the records of a run.

        >>> step = {"event": "step", "step": 1, "loss": 2.5, "rate": 0.1}
        >>> curves = LearningCurves.of(
        ...     [step, {"event": "evaluation", "step": 1, "metrics": {"loss": 2.0}, "best": True}]
        ... )
        >>> curves.losses, curves.evaluations, curves.best
        ([2.5], {'loss': ([1], [2.0])}, 1)
        """
        curves = LearningCurves(changes=list(changes))
        for record in records:
            if record["event"] == "step":
                curves.steps.append(record["step"])
                curves.losses.append(record["loss"])
                curves.rates.append(record["rate"])
            elif record["event"] == "evaluation":
                curves.best = record["step"] if record["best"] else curves.best
                for name, value in record["metrics"].items():
                    steps, values = curves.evaluations.setdefault(name, ([], []))
                    steps.append(record["step"])
                    values.append(value)
        return curves

    @property
    def scores(self) -> list[str]:
        """Metrics besides the loss, without slices such as "accuracy@distance<=8"."""
        return [name for name in self.evaluations if name != "loss" and "@" not in name]


def average_over_windows(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values at each position, of fewer at the beginning.

    >>> average_over_windows([4.0, 2.0, 6.0], 2)
    [4.0, 3.0, 4.0]
    """
    means, total = list[float](), 0.0
    for n, value in enumerate(values):
        total += value - (values[n - window] if n >= window else 0.0)
        means.append(total / min(n + 1, window))
    return means


def save_curves(folder: Path, curves: LearningCurves, title: str) -> None:
    """Draw the curves into the folder of a run; equal records give equal files."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_matplotlib_style(THEMES["light"]))
        draw_curves(curves, THEMES["light"], title).savefig(
            buffer, format="svg", metadata=FIGURE_METADATA[".svg"]
        )
    light = buffer.getvalue().decode()
    for name, theme in THEMES.items():
        write_atomically(
            folder / CURVE_FILES[name], _recolour(light, THEMES["light"], theme).encode()
        )


def _recolour(svg: str, theme: CurveTheme, other: CurveTheme) -> str:
    """Replace the colours of one theme by those of another, which is quicker than drawing again."""
    replacements = {
        one.lower(): two.lower() for one, two in zip(astuple(theme), astuple(other), strict=True)
    }
    return re.sub("|".join(replacements), lambda match: replacements[match[0]], svg)


def draw_curves(curves: LearningCurves, theme: CurveTheme, title: str) -> Figure:
    """Panels over steps: training and validation loss, the other metrics if there are any, and the
    learning rate.
    """
    from matplotlib.figure import Figure

    panels = [_draw_loss, *([_draw_scores] if curves.scores else []), _draw_rate]
    figure = Figure(figsize=(3.3 * len(panels), 2.9), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
    for axes, draw in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw(axes, curves, theme)
        axes.set_xlabel("step")
        axes.margins(x=0.02)
        for step in curves.changes:
            axes.axvline(step, color=theme.axes, linestyle=(0, (2, 2)), linewidth=0.8)
    return figure


def _draw_loss(axes: Axes, curves: LearningCurves, theme: CurveTheme) -> None:
    axes.set_title("loss (nats per label)")
    thinned = slice(None, None, 1 + len(curves.steps) // MAX_POINTS)
    window = max(1, round(SMOOTHING_WINDOW * len(curves.steps)))
    if window > 1:
        axes.plot(
            curves.steps[thinned],
            curves.losses[thinned],
            color=theme.training,
            alpha=0.3,
            linewidth=0.7,
        )
    smooth = average_over_windows(curves.losses, window)
    label = "training" if window == 1 else f"training, mean of {window} steps"
    axes.plot(curves.steps[thinned], smooth[thinned], color=theme.training, label=label)
    steps, losses = curves.evaluations.get("loss", ([], []))
    if steps:
        axes.plot(
            steps, losses, color=theme.validation, marker="o", markersize=2.5, label="validation"
        )
    if curves.best in steps:
        lowest = losses[steps.index(curves.best)]
        axes.plot(
            curves.best,
            lowest,
            "o",
            color=theme.validation,
            markersize=7,
            fillstyle="none",
            label="saved model",
        )
    axes.legend()


def _draw_scores(axes: Axes, curves: LearningCurves, theme: CurveTheme) -> None:
    axes.set_title("validation metrics")
    for n, name in enumerate(curves.scores):
        steps, values = curves.evaluations[name]
        colour, marker = (
            (theme.validation, "o") if n == 0 else (theme.training, "s^Dv"[(n - 1) % 4])
        )
        axes.plot(steps, values, color=colour, marker=marker, markersize=2.5, label=name)
    axes.legend()


def _draw_rate(axes: Axes, curves: LearningCurves, theme: CurveTheme) -> None:
    axes.set_title("learning rate")
    thinned = slice(None, None, 1 + len(curves.steps) // MAX_POINTS)
    axes.plot(curves.steps[thinned], curves.rates[thinned], color=theme.training)
    axes.set_ylim(bottom=0)


def _matplotlib_style(theme: CurveTheme) -> Any:
    return {
        "font.size": 7.5,
        "font.family": "DejaVu Sans",
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "axes.facecolor": theme.background,
        "text.color": theme.text,
        "axes.edgecolor": theme.axes,
        "axes.labelcolor": theme.axes,
        "xtick.color": theme.axes,
        "ytick.color": theme.axes,
        "axes.titlesize": 8,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.3,
        "legend.facecolor": theme.background,
        "legend.edgecolor": theme.background,
        "legend.framealpha": 0.85,
        "text.parse_math": False,
        "svg.hashsalt": "headwise",
        "svg.fonttype": "path",
    }

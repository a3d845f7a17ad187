"""The report of a study as one self-contained HTML page: claims, figures and tables, in light and
dark.

Figures are SVG text whose colours are CSS variables of the page, so that one figure serves light
and dark; every mark has a title for hovering.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..data import Task
from ..errors import pluralise
from ..escaping import escape_html, escape_svg
from ..report.text import spread_labels
from .study_file import StudyTask
from .study_report import ReportTable, StudyReport, describe_protocol, list_task_details

# Okabe and Ito's colours, which colour-blind readers can tell apart; more series repeat them with
# dashed lines.
SERIES_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c6d1f",
    "#7f7f7f",
)
DASHES = ("", "5 3", "2 2", "7 2 2 2")
WIDTH, PLOT_HEIGHT = 640, 260
LABEL_WIDTH, LEFT, TOP, BOTTOM = 110, 56, 12, 40
ROW_HEIGHT = 22
MIN_LOG_RATIO = 4
SVG_STYLE = """
svg text { fill: var(--text); font: 11.5px system-ui, sans-serif; } svg .label { fill: var(--muted); }
svg line { stroke-width: 1.2; } svg .axis { stroke: var(--muted); stroke-width: 1; } svg .grid { stroke: var(--line); }
svg .leader { stroke: var(--line); } svg .reference { stroke: var(--muted); stroke-dasharray: 4 3; }
svg .interval { stroke: var(--text); stroke-width: 1.6; } svg .mean { stroke: var(--text); stroke-width: 2.4; }
svg .seed { fill: var(--seed); fill-opacity: 0.65; }
svg .front { fill: none; stroke: var(--muted); stroke-dasharray: 5 4; }
svg .curve { fill: none; stroke-width: 1.7; } svg .sample { stroke-width: 2.2; }
"""


class Span(NamedTuple):
    """A value with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` to pixels from `start` to `end`, linearly or by their
    logarithm.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @staticmethod
    def around(values: Sequence[float], start: float, end: float, log: bool = False) -> Scale:
        """A scale that holds all values, with a margin; `log` has no effect on values within a
        factor of 4.
        """
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        log = log and high / low > MIN_LOG_RATIO
        if log:
            low, high = (low / 1.2, high * 1.2)
        else:
            margin = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
            low, high = low - margin, high + margin
        return Scale(low, high, start, end, log)

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(x) for x in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers inside the scale."""
        if self.log:
            steps = (1, 2, 5) if self.high / self.low < 100 else (1,)
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [
                step * 10.0**n
                for n in decades
                for step in steps
                if self.low <= step * 10.0**n <= self.high
            ]
        step = nice_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `rough`.

    >>> nice_step(0.03), nice_step(7)
    (0.05, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(
        (step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9)), 10 * power
    )


def format_tick(value: float) -> str:
    """A tick label: short, with k, M or G for large numbers.

    >>> [format_tick(value) for value in (0.25, 0.30000000000000004, 2000, 5e6)]
    ['0.25', '0.3', '2k', '5M']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:.4g}"


def series_style(number: int) -> tuple[str, str]:
    """Colour and dash pattern of a series."""
    return SERIES_COLOURS[number % len(SERIES_COLOURS)], DASHES[
        number // len(SERIES_COLOURS) % len(DASHES)
    ]


def _interval_line(x: Scale, span: Span, y: float) -> list[str]:
    """A line over the interval of a span; none if it has no interval."""
    if not math.isfinite(span.low):
        return []
    return [
        f'<line class="interval" x1="{x(span.low):.1f}" x2="{x(span.high):.1f}" y1="{y}" y2="{y}"/>'
    ]


def strip_figure(
    rows: Mapping[str, Sequence[float]],
    means: Mapping[str, Span],
    baseline: str,
    label: str,
    bold: Sequence[str] = (),
) -> str:
    """One row per variant: a dot for each seed, the mean with its interval, and a line at the
    baseline's mean.
    """
    values = [value for seeds in rows.values() for value in seeds]
    x = Scale.around(
        [*values, *(end for mean in means.values() for end in mean)], LEFT + 90, WIDTH - 16
    )
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    parts = [*_x_axis(x, height - BOTTOM, label)]
    if math.isfinite(means[baseline].value):
        at = x(means[baseline].value)
        parts.append(
            f'<line class="reference" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" '
            f'y2="{height - BOTTOM}"/>'
        )
    for number, (name, seeds) in enumerate(rows.items()):
        y = TOP + ROW_HEIGHT * (number + 0.5)
        weight = ' style="font-weight:700"' if name in bold else ""
        parts.append(
            f'<text x="{LEFT + 80}" y="{y + 4:.1f}" '
            f'text-anchor="end"{weight}>{escape_svg(name)}</text>'
        )
        mean = means[name]
        if math.isfinite(mean.value):
            parts += _interval_line(x, mean, y)
            parts.append(_mark(x(mean.value), y - 6, "mean", f"{name}: mean {mean.value:.4g}"))
        for n, value in enumerate(seeds, 1):
            parts.append(
                f'<circle class="seed" cx="{x(value):.1f}" cy="{y:.1f}" r="3.5">'
                f"<title>{escape_svg(name)}, seed {n}: {value:.4g}</title></circle>"
            )
    return _svg(height, parts, f"{label} of every seed, by variant")


def difference_figure(
    rows: Mapping[str, tuple[Sequence[float], Span]], label: str, bold: Sequence[str] = ()
) -> str:
    """One comparison per row: a dot for each seed's difference, their mean with its interval; a
    line at 0.
    """
    ends = [end for seeds, span in rows.values() for end in (*seeds, *span)]
    x = Scale.around([0.0, *ends], 16, WIDTH - 16)
    height = TOP + 2 * ROW_HEIGHT * len(rows) + BOTTOM
    parts = [*_x_axis(x, height - BOTTOM, label)]
    parts.append(
        f'<line class="reference" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP}" '
        f'y2="{height - BOTTOM}"/>'
    )
    for number, (name, (seeds, span)) in enumerate(rows.items()):
        y = TOP + ROW_HEIGHT * (2 * number + 1.4)
        weight = ' style="font-weight:700"' if name in bold else ""
        parts.append(f'<text x="16" y="{y - 14:.1f}"{weight}>{escape_svg(name)}</text>')
        parts += _interval_line(x, span, y)
        parts.append(_mark(x(span.value), y - 6, "mean", f"{name}: {span.value:+.4g}"))
        parts += [
            f'<circle class="seed" cx="{x(value):.1f}" cy="{y:.1f}" r="3"/>' for value in seeds
        ]
    return _svg(height, parts, f"{label}: differences of every seed")


def scatter_figure(
    points: Mapping[str, tuple[float, Span]], x_label: str, y_label: str, higher_is_better: bool
) -> str:
    """Quality against a cost on a logarithmic axis; the variants on the Pareto front are joined and
    labelled bold.
    """
    finite = {
        name: point
        for name, point in points.items()
        if math.isfinite(point[0]) and math.isfinite(point[1].value)
    }
    if not finite:
        return ""
    x = Scale.around([cost for cost, _ in finite.values()], LEFT, WIDTH - LABEL_WIDTH, log=True)
    y = Scale.around([end for _, mean in finite.values() for end in mean], TOP + PLOT_HEIGHT, TOP)
    front = pareto_front(
        {name: (cost, mean.value) for name, (cost, mean) in finite.items()}, higher_is_better
    )
    height = TOP + PLOT_HEIGHT + BOTTOM
    parts = [*_x_axis(x, TOP + PLOT_HEIGHT, x_label), *_y_axis(y, y_label, WIDTH - LABEL_WIDTH)]
    path = " ".join(f"{x(finite[name][0]):.1f},{y(finite[name][1].value):.1f}" for name in front)
    parts.append(f'<polyline class="front" points="{path}"/>')
    names = list(finite)
    labels = _spread([y(finite[name][1].value) for name in names])
    for number, name in enumerate(names):
        cost, mean = finite[name]
        colour, _ = series_style(list(points).index(name))
        on_front = name in front
        faded = "" if on_front else ' opacity="0.55"'
        low, high = (mean.low, mean.high) if math.isfinite(mean.low) else (mean.value, mean.value)
        ends = f" ({low:.4g} to {high:.4g})" if low < high else ""
        title = f"{name}: {x_label} {cost:,.4g}, {y_label} {mean.value:.4g}{ends}"
        parts.append(
            f'<g{faded}><line stroke="{colour}" x1="{x(cost):.1f}" x2="{x(cost):.1f}" '
            f'y1="{y(low):.1f}" '
            f'y2="{y(high):.1f}"/><circle fill="{colour}" cx="{x(cost):.1f}" '
            f'cy="{y(mean.value):.1f}" r="4">'
            f"<title>{escape_svg(title)}</title></circle>"
            f'<line class="leader" x1="{x(cost) + 5:.1f}" y1="{y(mean.value):.1f}" '
            f'x2="{WIDTH - LABEL_WIDTH + 2}" '
            f'y2="{labels[number]:.1f}"/>{_label(labels[number], name, colour, bold=on_front)}</g>'
        )
    return _svg(height, parts, f"{y_label} against {x_label}")


def curve_figure(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    log: bool = False,
) -> str:
    """One line per variant, labelled at its right end; `log` sets the horizontal axis."""
    non_empty = {name: points for name, points in curves.items() if points}
    if not non_empty:
        return ""
    x = Scale.around(
        [at for points in non_empty.values() for at, _ in points],
        LEFT,
        WIDTH - LABEL_WIDTH,
        log=log,
    )
    y = Scale.around(
        [value for points in non_empty.values() for _, value in points], TOP + PLOT_HEIGHT, TOP
    )
    parts = [*_x_axis(x, TOP + PLOT_HEIGHT, x_label), *_y_axis(y, y_label, WIDTH - LABEL_WIDTH)]
    labels = _spread([y(points[-1][1]) for points in non_empty.values()])
    for number, (name, points) in enumerate(non_empty.items()):
        colour, dash = series_style(list(curves).index(name))
        path = " ".join(
            f"{x(at):.1f},{y(value):.1f}" for at, value in points if math.isfinite(value)
        )
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<polyline class="curve" stroke="{colour}"{dashed} '
            f'points="{path}"><title>{escape_svg(name)}</title>'
            f"</polyline>{_label(labels[number], name, colour, dash)}"
        )
    return _svg(TOP + PLOT_HEIGHT + BOTTOM, parts, f"{y_label} against {x_label}, by variant")


def pareto_front(points: Mapping[str, tuple[float, float]], higher_is_better: bool) -> list[str]:
    """Names of the points that no other beats in cost and quality at once, by rising cost.

    >>> pareto_front({"a": (1, 0.5), "b": (2, 0.4), "c": (3, 0.9)}, True)
    ['a', 'c']
    """
    sign = 1 if higher_is_better else -1
    front: list[str] = []
    best = -math.inf
    for name, (_, quality) in sorted(
        points.items(), key=lambda item: (item[1][0], -sign * item[1][1])
    ):
        if sign * quality > best:
            front.append(name)
            best = sign * quality
    return front


def _spread(targets: Sequence[float]) -> list[float]:
    return spread_labels(targets, 13.0, TOP + 6.0, TOP + PLOT_HEIGHT + BOTTOM - 8.0)


def _label(y: float, name: str, colour: str, dash: str = "", bold: bool = False) -> str:
    """A sample of the line, and the name of the series."""
    weight, left = ' style="font-weight:700"' if bold else "", WIDTH - LABEL_WIDTH
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line class="sample" stroke="{colour}"{dashed} x1="{left + 6}" x2="{left + 22}" '
        f'y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{left + 26}" y="{y + 4:.1f}"{weight}>{escape_svg(name)}</text>'
    )


def _mark(x: float, y: float, kind: str, title: str) -> str:
    return (
        f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 12:.1f}">'
        f"<title>{escape_svg(title)}</title></line>"
    )


def _x_axis(x: Scale, y: float, label: str) -> Iterator[str]:
    yield f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y}" y2="{y}"/>'
    for tick in x.ticks:
        at = x(tick)
        yield f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{y}" y2="{y + 4}"/>'
        yield f'<text x="{at:.1f}" y="{y + 16}" text-anchor="middle">{format_tick(tick)}</text>'
    middle = (x.start + x.end) / 2
    yield (
        f'<text class="label" x="{middle:.0f}" y="{y + 32}" '
        f'text-anchor="middle">{escape_svg(label)}</text>'
    )


def _y_axis(y: Scale, label: str, right: float) -> Iterator[str]:
    for tick in y.ticks:
        at = y(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
    middle = (y.start + y.end) / 2
    turned = f"translate(13 {middle:.0f}) rotate(-90)"
    yield (
        f'<text class="label" transform="{turned}" text-anchor="middle">{escape_svg(label)}</text>'
    )


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape_svg(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


STYLE = """
:root { color-scheme: light dark; --ground: #fff; --panel: #fff; --text: #1b1b1f; --muted: #5c5c66; --line: #dcdce0;
  --accent: #3b3fb6; --seed: #3b3fb6; }
@media (prefers-color-scheme: dark) { :root { --ground: #131316; --panel: #1b1b20; --text: #ececf1; --muted: #a3a3ad;
  --line: #34343c; --accent: #9aa0ff; --seed: #9aa0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 32px 20px 80px; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 44px 0 10px; }
h3 { font-size: 15px; margin: 26px 0 8px; }
.hypothesis { border-left: 3px solid var(--accent); padding: 2px 0 2px 14px; margin: 14px 0 0; max-width: 75ch; }
.claims { max-width: 75ch; padding-left: 20px; } .muted, figcaption, caption { color: var(--muted); font-size: 13px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 18px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; background: var(--panel); padding: 12px; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; width: 100%; }
caption { caption-side: bottom; text-align: left; padding-top: 6px; }
th, td { padding: 4px 10px 4px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, td:last-child, th:last-child { text-align: left; }
th { color: var(--muted); font-weight: 500; } td { font-variant-numeric: tabular-nums; }
"""
STYLE += SVG_STYLE


def render_page(report: StudyReport) -> str:
    """The page: no script, no remote address."""
    study = report.results.study
    body = [
        f"<h1>{escape_html(study.name)}</h1>",
        f'<p class="muted">{pluralise(len(study.variants), "variant")}, {", ".join(study.tasks)}, '
        f"{pluralise(len(study.seeds), 'seed')}</p>",
        (
            '<p class="hypothesis"><b>Hypothesis, stated before the runs.</b> '
            f"{escape_html(study.hypothesis)}</p>"
        ),
        "<h2>What can be claimed</h2>",
        _list(report.claims, "claims"),
    ]
    for task in study.tasks.values():
        body.append(f"<h2>{escape_html(task.name)}</h2>")
        body.append(f'<div class="figures">{"".join(_figures(report, task))}</div>')
        body += map(_table, (report.score_table(task), *list_task_details(report, task)))
    body += _decoding(report)
    body += ["<h2>Formula against measurement</h2>", _table(report.size_table())]
    if report.failures:
        body += ["<h2>Cells without a result</h2>", _list(report.failures, "")]
    body += ["<h2>Protocol and environment</h2>", _list(describe_protocol(report), "")]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">"
        f"<title>{escape_html(study.name)}: headwise study</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _figures(report: StudyReport, task: StudyTask) -> Iterator[str]:
    study, scores = report.results.study, report.scores
    names = sorted(
        study.variants,
        key=lambda name: _sort_key(scores[name, task.name].mean.value, task.higher_is_better),
    )
    means = {name: Span(*scores[name, task.name].mean) for name in names}
    best = [name for name in names if scores[name, task.name].is_best]
    strips = strip_figure(
        {name: scores[name, task.name].values for name in names},
        means,
        study.baseline,
        task.metric,
        best,
    )
    yield _figure(
        strips,
        "Every dot is one seed; bar: mean and 95 % interval; dashed: the mean of "
        f"{study.baseline}.",
    )
    if study.contrasts:
        yield from (_figure(*pair) for pair in draw_differences(report, task))
    sizes = {name: report.results.grid.models[name, task.name].size for name in study.variants}
    costs = {
        "parameters": {name: float(size.parameters) for name, size in sizes.items()},
        "FLOPs of a training step": {name: float(size.step_flops) for name, size in sizes.items()},
        "KV bytes of a row": {
            name: float(size.kv_bytes or math.nan) for name, size in sizes.items()
        },
    }
    for label, values in costs.items():
        points = {name: (values[name], means[name]) for name in study.variants}
        if figure := scatter_figure(points, label, task.metric, task.higher_is_better):
            yield _figure(
                figure, f"{task.metric} against {label}; joined: no variant is better and cheaper."
            )
    yield from _curves(report, task)
    yield from (_figure(*pair) for pair in draw_lengths(report, task))
    yield from _head_figures(report, task)


def draw_differences(report: StudyReport, task: StudyTask) -> Iterator[tuple[str, str]]:
    """Every comparison of the study on a task, as a figure with its caption; none if nothing was
    compared.
    """
    named = {
        name: one for (name, of_task), one in report.comparisons.items() if of_task == task.name
    }
    rows, bold = {}, []
    for name, one in named.items():
        label = (
            f"{name} minus {report.results.study.baseline}"
            if name in report.results.study.variants
            else name
        )
        rows[label] = one.pairs, Span(*one.difference)
        bold += [label] if one.is_significant else []
    if rows:
        caption = (
            "Every dot is one seed; bar: mean and 95 % interval of the paired t test; bold: "
            "significant."
        )
        yield difference_figure(rows, f"difference on {task.name}", bold), caption


def draw_lengths(report: StudyReport, task: StudyTask) -> Iterator[tuple[str, str]]:
    """The metric against the length of the inputs, if further tests have other lengths, with its
    caption.
    """
    lengths = {name: _longest(test) for name, test in task.tests.items()}
    trained = _longest(task.task)
    if not set(lengths.values()) - {trained}:
        return
    curves: dict[str, list[tuple[float, float]]] = {}
    for variant in report.results.study.variants:
        points = {trained: report.scores[variant, task.name].mean.value}
        for name, length in lengths.items():
            points[length] = report.test_mean(variant, task, name)
        curves[variant] = [
            (float(at), value) for at, value in sorted(points.items()) if math.isfinite(value)
        ]
    if figure := curve_figure(curves, "tokens of an input", task.metric):
        yield (
            figure,
            f"{task.metric} against the length; models were trained on up to {trained} tokens; "
            "mean over seeds.",
        )


def _longest(task: Task) -> int:
    """Tokens of the longest of a few inputs."""
    return task.batch(0, 64, "test").labels.shape[-1]


def _head_figures(report: StudyReport, task: StudyTask) -> Iterator[str]:
    """Weight on tokens after an earlier occurrence, and entropy, during training, if heads were
    measured then.
    """
    for measure, label in (
        ("induction", "induction weight"),
        ("entropy", "entropy of a row, nats"),
    ):
        curves = {
            variant: report.head_curve(variant, task, measure)
            for variant in report.results.study.variants
        }
        if any(len(points) > 2 for points in curves.values()) and (
            figure := curve_figure(curves, "step", label)
        ):
            yield _figure(figure, f"Heads during training: {label}, mean over heads and seeds.")


def _decoding(report: StudyReport) -> Iterator[str]:
    if (table := report.decode_table()) is None:
        return
    yield "<h2>Decode time against context</h2>"
    figures: list[str] = []
    for kind, label in (("step", "ms for a token"), ("prompt", "ms for the prompt")):
        curves = {
            name: [(float(one["context"]), 1000 * one[kind]) for one in records]
            if isinstance(records, list)
            else []
            for name, records in report.decoding["variants"].items()
        }
        if svg := curve_figure(curves, "tokens", label, log=True):
            figures.append(_figure(svg, f"{label} against its context, processor time of one row."))
    yield f'<div class="figures">{"".join(figures)}</div>'
    yield _table(table)


def _curves(report: StudyReport, task: StudyTask) -> Iterator[str]:
    """Validation loss of the median seed against steps, time and FLOPs."""
    by_step: dict[str, list[tuple[float, float]]] = {}
    by_time: dict[str, list[tuple[float, float]]] = {}
    by_flops: dict[str, list[tuple[float, float]]] = {}
    for name in report.results.study.variants:
        cells = [one for one in report.results.report_cells(name, task.name) if one.is_done]
        if not cells:
            continue
        one = sorted(cells, key=lambda cell: cell.result["metrics"]["loss"])[len(cells) // 2]
        points = [(float(point["step"]), point["metrics"]["loss"]) for point in one.result["curve"]]
        step = one.result["timing"].get("step", math.nan)
        flops = report.results.grid.models[name, task.name].size.step_flops
        by_step[name] = points
        by_time[name] = [(at * step, loss) for at, loss in points]
        by_flops[name] = [(at * flops, loss) for at, loss in points]
    for label, curves in (
        ("step", by_step),
        ("seconds of training", by_time),
        ("training FLOPs", by_flops),
    ):
        if figure := curve_figure(curves, label, "validation loss"):
            yield _figure(figure, f"Validation loss against {label}, median seed of each variant.")


def _sort_key(value: float, higher_is_better: bool) -> float:
    return math.inf if math.isnan(value) else -value if higher_is_better else value


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape_html(caption)}</figcaption></figure>"


def _list(lines: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape_html(line)}</li>" for line in lines)}</ul>'


def _table(table: ReportTable) -> str:
    head = "".join(f"<th>{escape_html(name)}</th>" for name in table.header)
    rows = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in table.rows)
    caption = f"<caption>{escape_html(table.caption)}</caption>" if table.caption else ""
    return (
        f"<h3>{escape_html(table.title)}</h3><div "
        f'class="wide"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    if text.startswith("**"):
        return f"<td><b>{escape_html(text.strip('*'))}</b></td>"
    return f"<td>{escape_html(text)}</td>"

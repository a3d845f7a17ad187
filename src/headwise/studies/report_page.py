"""The report of a study as one self-contained HTML page: claims, figures and tables, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..data import Task
from ..errors import pluralise
from ..escaping import escape_html
from .report_figures import SVG_STYLE, Span, curve_figure, difference_figure, scatter_figure, strip_figure
from .study_file import StudyTask
from .study_report import ReportTable, StudyReport, describe_protocol, list_task_details

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
        f'<p class="hypothesis"><b>Hypothesis, stated before the runs.</b> {escape_html(study.hypothesis)}</p>',
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
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
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
        {name: scores[name, task.name].values for name in names}, means, study.baseline, task.metric, best
    )
    yield _figure(strips, f"Every dot is one seed; bar: mean and 95 % interval; dashed: the mean of {study.baseline}.")
    if study.contrasts:
        yield from (_figure(*pair) for pair in draw_differences(report, task))
    sizes = {name: report.results.grid.models[name, task.name].size for name in study.variants}
    costs = {
        "parameters": {name: float(size.parameters) for name, size in sizes.items()},
        "FLOPs of a training step": {name: float(size.step_flops) for name, size in sizes.items()},
        "KV bytes of a row": {name: float(size.kv_bytes or math.nan) for name, size in sizes.items()},
    }
    for label, values in costs.items():
        points = {name: (values[name], means[name]) for name in study.variants}
        if figure := scatter_figure(points, label, task.metric, task.higher_is_better):
            yield _figure(figure, f"{task.metric} against {label}; joined: no variant is better and cheaper.")
    yield from _curves(report, task)
    yield from (_figure(*pair) for pair in draw_lengths(report, task))
    yield from _head_figures(report, task)


def draw_differences(report: StudyReport, task: StudyTask) -> Iterator[tuple[str, str]]:
    """Every comparison of the study on a task, as a figure with its caption; none if nothing was compared."""
    named = {name: one for (name, of_task), one in report.comparisons.items() if of_task == task.name}
    rows, bold = {}, []
    for name, one in named.items():
        label = f"{name} minus {report.results.study.baseline}" if name in report.results.study.variants else name
        rows[label] = one.pairs, Span(*one.difference)
        bold += [label] if one.is_significant else []
    if rows:
        caption = "Every dot is one seed; bar: mean and 95 % interval of the paired t test; bold: significant."
        yield difference_figure(rows, f"difference on {task.name}", bold), caption


def draw_lengths(report: StudyReport, task: StudyTask) -> Iterator[tuple[str, str]]:
    """The metric against the length of the inputs, if further tests have other lengths, with its caption."""
    lengths = {name: _longest(test) for name, test in task.tests.items()}
    trained = _longest(task.task)
    if not set(lengths.values()) - {trained}:
        return
    curves: dict[str, list[tuple[float, float]]] = {}
    for variant in report.results.study.variants:
        points = {trained: report.scores[variant, task.name].mean.value}
        for name, length in lengths.items():
            points[length] = report.test_mean(variant, task, name)
        curves[variant] = [(float(at), value) for at, value in sorted(points.items()) if math.isfinite(value)]
    if figure := curve_figure(curves, "tokens of an input", task.metric):
        yield (
            figure,
            f"{task.metric} against the length; models were trained on up to {trained} tokens; mean over seeds.",
        )


def _longest(task: Task) -> int:
    """Tokens of the longest of a few inputs."""
    return task.batch(0, 64, "test").labels.shape[-1]


def _head_figures(report: StudyReport, task: StudyTask) -> Iterator[str]:
    """Weight on tokens after an earlier occurrence, and entropy, during training, if heads were measured then."""
    for measure, label in (("induction", "induction weight"), ("entropy", "entropy of a row, nats")):
        curves = {variant: report.head_curve(variant, task, measure) for variant in report.results.study.variants}
        if any(len(points) > 2 for points in curves.values()) and (figure := curve_figure(curves, "step", label)):
            yield _figure(figure, f"Heads during training: {label}, mean over heads and seeds.")


def _decoding(report: StudyReport) -> Iterator[str]:
    if (table := report.decode_table()) is None:
        return
    yield "<h2>Decode time against context</h2>"
    figures: list[str] = []
    for kind, label in (("step", "ms for a token"), ("prompt", "ms for the prompt")):
        curves = {
            name: [(float(one["context"]), 1000 * one[kind]) for one in records] if isinstance(records, list) else []
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
    for label, curves in (("step", by_step), ("seconds of training", by_time), ("training FLOPs", by_flops)):
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
        f'<h3>{escape_html(table.title)}</h3><div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    if text.startswith("**"):
        return f"<td><b>{escape_html(text.strip('*'))}</b></td>"
    return f"<td>{escape_html(text)}</td>"

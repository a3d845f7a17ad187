"""The report of a study: tables, and the sentences that its tests support, as Markdown, CSV and for the HTML page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..escaping import make_visible
from ..files import read_json_file, write_atomically
from ..output_paths import FolderKind, check_output, stage_folder
from .seed_statistics import SIGNIFICANCE, VariantScore, bootstrap_mean, score_variants
from .study_file import StudyTask
from .study_plan import format_seconds
from .study_runner import REPORT, STUDY_FOLDER, CellResult, StudyResults

REPORT_FOLDER, REPORT_FILE, PAGE_FILE, TABLE_FILE = "report", "report.md", "report.html", "results.csv"
ENVIRONMENT_FILE = "environment.json"
STUDY_REPORT = FolderKind("report of a study", (REPORT_FILE,), lambda _: (REPORT_FILE, PAGE_FILE, TABLE_FILE))
MIN_SEEDS_TO_CLAIM = 3


@dataclass(frozen=True)
class ReportTable:
    """A table of a report: header, rows of text, and a caption. Cells that begin with "**" are bold."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @property
    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"### {self.title}", "", _markdown_row(self.header), _markdown_row(["---"] * len(self.header))]
        lines += [_markdown_row(row) for row in self.rows]
        return "\n".join([*lines, "", self.caption] if self.caption else lines)


@dataclass(frozen=True)
class StudyReport:
    """Everything that a report shows."""

    results: StudyResults
    scores: Mapping[tuple[str, str], VariantScore]
    claims: tuple[str, ...]
    environment: Mapping[str, Any]

    @staticmethod
    def of(results: StudyResults, environment: Mapping[str, Any]) -> StudyReport:
        """Compute the statistics of a study."""
        scores = score_variants(results)
        return StudyReport(results, scores, tuple(list_claims(results, scores)), environment)

    def score_table(self, task: StudyTask) -> ReportTable:
        """Size, metric, difference from the baseline and success of every variant on one task."""
        study = self.results.study
        header = (
            "variant",
            "parameters",
            "FLOPs/step",
            "KV bytes",
            "lr",
            f"{task.metric} (95 % interval)",
            "seeds",
            "sd of seeds",
            "test error",
            f"minus {study.baseline}",
            "p",
            "s/step",
        )
        if task.threshold is not None:
            header = (*header, f"reached {task.threshold:g}", "steps")
        rows = [self._score_row(self.scores[variant, task.name], task) for variant in study.variants]
        direction = "higher" if task.higher_is_better else "lower"
        caption = (
            f"{task.metric}: {direction} is better; chance {_number(task.task.chance.get(task.metric, math.nan))}. "
            f"p from a paired t test over seeds, corrected for all comparisons of the study (Holm); bold: the best, "
            f"and significantly so at {SIGNIFICANCE:g}. Test error: standard error from the finite test set."
        )
        return ReportTable(task.name, header, tuple(rows), caption)

    def slice_table(self, task: StudyTask) -> ReportTable | None:
        """The metric on each part of the test set and on each further test; None if there are none."""
        names = self._slice_names(task)
        if not names:
            return None
        rows = [
            (variant, *(_number(self._slice_mean(variant, task, name)) for name in names))
            for variant in self.results.study.variants
        ]
        return ReportTable(f"{task.name}, by part and test", ("variant", *names), tuple(rows), "Means over seeds.")

    def head_table(self, task: StudyTask) -> ReportTable | None:
        """Heads of each variant on the task: means of measures, and the number of heads of each class."""
        rows: list[tuple[str, ...]] = []
        measures: dict[str, None] = {}
        cells: dict[str, tuple[dict[str, float], dict[str, float], str]] = {}
        for variant in self.results.study.variants:
            heads = [one.result["heads"] for one in self._done(variant, task)]
            measured = [one for one in heads if "measures" in one]
            note = next((one["note"] for one in heads if "note" in one), "")
            means = _mean_of_dicts([one["measures"] for one in measured])
            classes = {
                name: total / len(measured) for name, total in _sum_dicts(one["classes"] for one in measured).items()
            }
            measures |= dict.fromkeys(means)
            cells[variant] = means, classes, note
        for variant, (means, classes, note) in cells.items():
            counts = ", ".join(f"{count:.3g} {name}" for name, count in sorted(classes.items(), key=lambda x: -x[1]))
            rows.append((variant, *(_number(means.get(name, math.nan)) for name in measures), counts or note))
        if not any(means for means, _, _ in cells.values()):
            return None
        header = ("variant", *measures, "heads of each class, mean over seeds")
        return ReportTable(f"{task.name}, what heads do", header, tuple(rows), "Means over heads and seeds.")

    def size_table(self) -> ReportTable:
        """Counted against built parameters, and how each variant was matched."""
        rows = []
        for variant, task in self.results.grid.pairs:
            model = self.results.grid.models[variant.name, task.name]
            built = next((one.result.get("parameters") for one in self._done(variant.name, task)), None)
            agrees = "-" if built is None else "equal" if built == model.size.parameters else f"differs: {built:,}"
            rows.append((task.name, variant.name, f"{model.size.parameters:,}", agrees, model.match or "-"))
        return ReportTable(
            "Formula against measurement",
            ("task", "variant", "parameters by formula", "built model", "matching"),
            tuple(rows),
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each cell without metrics."""
        return tuple(
            f"{one.cell.variant} on {one.cell.task}, lr {one.cell.rate:g}, seed {one.cell.seed}: "
            f"{one.result['status']}: {one.result.get('message', '')}"
            for one in self.results.cells
            if not one.is_done
        )

    def _done(self, variant: str, task: StudyTask) -> list[CellResult]:
        return [one for one in self.results.report_cells(variant, task.name) if one.is_done]

    def _score_row(self, score: VariantScore, task: StudyTask) -> tuple[str, ...]:
        size = self.results.grid.models[score.variant, task.name].size
        rate = self.results.rates.get((score.variant, task.name), math.nan)
        mean, mark = score.mean, "**" if score.is_best else ""
        value = f"{_number(mean.value)} ({_number(mean.low)} to {_number(mean.high)})" if score.values else "-"
        comparison = score.comparison
        times = [
            one.result["timing"]["step"] for one in self._done(score.variant, task) if "step" in one.result["timing"]
        ]
        row = (
            score.variant,
            f"{size.parameters:,}",
            f"{size.step_flops:.2e}",
            "-" if size.kv_bytes is None else f"{size.kv_bytes:,}",
            f"{rate:g}",
            f"{mark}{value}{mark}",
            "; ".join([str(len(score.values)), *score.failures]),
            _number(score.seed_deviation),
            _number(score.test_error),
            "-" if comparison is None else f"{comparison.difference.value:+.4f}",
            "-" if comparison is None else _format_p(comparison.corrected_p),
            _number(sorted(times)[len(times) // 2]) if times else "-",
        )
        if task.threshold is None:
            return row
        return (
            *row,
            f"{score.success_rate:.0%}" if math.isfinite(score.success_rate) else "-",
            _number(score.steps_to_threshold),
        )

    def _slice_names(self, task: StudyTask) -> list[str]:
        names: dict[str, None] = {}
        for variant in self.results.study.variants:
            for one in self._done(variant, task):
                names |= dict.fromkeys(name for name in one.result["metrics"] if name.startswith(f"{task.metric}@"))
                names |= dict.fromkeys(f"test {name}" for name in one.result["tests"])
        return list(names)

    def _slice_mean(self, variant: str, task: StudyTask, name: str) -> float:
        values = []
        for one in self._done(variant, task):
            test = one.result["tests"].get(name.removeprefix("test "), {}) if name.startswith("test ") else None
            value = one.result["metrics"].get(name) if test is None else test.get(task.metric)
            if value is not None:
                values.append(value)
        return bootstrap_mean(values).value


def list_claims(results: StudyResults, scores: Mapping[tuple[str, str], VariantScore]) -> Iterator[str]:
    """Sentences that the tests support, one task after the other; never more than the numbers say."""
    study = results.study
    if len(study.seeds) < MIN_SEEDS_TO_CLAIM:
        yield f"With {len(study.seeds)} seeds no difference is claimed; give at least {MIN_SEEDS_TO_CLAIM}."
        return
    for task in study.tasks.values():
        compared = [score for (_, name), score in scores.items() if name == task.name and score.comparison]
        better, worse = [], []
        for score in compared:
            if score.comparison and score.comparison.is_significant:
                rises = score.comparison.difference.value > 0
                (better if rises == task.higher_is_better else worse).append(score)
        baseline = scores[study.baseline, task.name]
        reached = f"{task.name}: {study.baseline} reaches {task.metric} {_number(baseline.mean.value)}"
        yield f"{reached} (mean of {len(baseline.values)} seeds)."
        for kind, group in (("better", better), ("worse", worse)):
            if group:
                names = ", ".join(
                    f"{score.variant} ({score.comparison.difference.value:+.3f})" for score in group if score.comparison
                )
                yield f"{task.name}: significantly {kind} than {study.baseline}: {names}."
        others = len(compared) - len(better) - len(worse)
        if others:
            yield (
                f"{task.name}: {others} of {len(compared)} variants show no significant difference from "
                f"{study.baseline}; that does not prove them equal."
            )


def render_markdown(report: StudyReport) -> str:
    """The whole report as Markdown."""
    study = report.results.study
    lines = [f"# Study: {study.name}", "", f"**Hypothesis, stated before the runs.** {study.hypothesis}", ""]
    lines += ["## What can be claimed", "", *(f"- {claim}" for claim in report.claims), ""]
    lines += ["## Results", ""]
    for table in list_tables(report):
        lines += [table.markdown, ""]
    if report.failures:
        lines += ["## Cells without a result", "", *(f"- {failure}" for failure in report.failures), ""]
    lines += ["## Protocol and environment", "", *(f"- {line}" for line in describe_protocol(report)), ""]
    return "\n".join(lines)


def list_tables(report: StudyReport) -> Iterator[ReportTable]:
    """All tables, task by task."""
    for task in report.results.study.tasks.values():
        yield report.score_table(task)
        for table in (report.slice_table(task), report.head_table(task)):
            if table is not None:
                yield table
    yield report.size_table()


def describe_protocol(report: StudyReport) -> list[str]:
    """How the study was run, one fact a line."""
    study = report.results.study
    count = len([one for one in report.results.cells if one.stage == REPORT])
    seconds = sum(one.result.get("timing", {}).get("seconds", 0.0) for one in report.results.cells)
    rates = sorted({rate for variant in study.variants.values() for rate in report.results.grid.rates(variant)})
    lines = [
        f"scale {study.scale}; sizes matched by {study.match}; report seeds {', '.join(map(str, study.seeds))}",
        f"learning rates {', '.join(f'{rate:g}' for rate in rates)}, chosen by the validation metric of seed "
        f"{study.tuning_seed}, which is not reported",
        "every seed has the same initial random numbers and the same data in the same order for all variants",
        f"{count} report cells and {len(report.results.cells) - count} tuning cells, {format_seconds(seconds)} in all",
    ]
    return [*lines, *(f"{name}: {value}" for name, value in report.environment.items())]


def render_csv(results: StudyResults) -> str:
    """One line for each cell and metric."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["id", "stage", "task", "variant", "lr", "seed", "status", "metric", "value"])
    for one in results.cells:
        cell = one.cell
        start = [cell.id, one.stage, cell.task, cell.variant, cell.rate, cell.seed, one.result["status"]]
        for name, value in sorted(one.result.get("metrics", {}).items()):
            writer.writerow([*start, name, repr(value)])
        if not one.is_done:
            writer.writerow([*start, "", ""])
    return out.getvalue()


def describe_environment() -> dict[str, Any]:
    """Versions and processor, for the report."""
    import platform

    import torch

    from .. import __version__
    from ..machine.capabilities import this_machine

    return {
        "headwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": this_machine().processor,
        "threads of a cell": 1,
    }


def write_report(results: StudyResults, out: Path | str) -> StudyReport:
    """Write report.md, report.html and results.csv to the folder report of a study; nothing is trained."""
    from .report_page import render_page

    folder = check_output(out, STUDY_FOLDER, "continue")
    path = folder / ENVIRONMENT_FILE
    if not path.exists():
        write_atomically(path, json.dumps(describe_environment(), indent=1).encode() + b"\n")
    report = StudyReport.of(results, read_json_file(path))
    pages = {REPORT_FILE: render_markdown(report), TABLE_FILE: render_csv(results), PAGE_FILE: render_page(report)}
    with stage_folder(folder / REPORT_FOLDER, STUDY_REPORT, "overwrite") as staged:
        for name, page in pages.items():
            write_atomically(staged / name, page.encode())
    return report


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in map(make_visible, cells)) + " |"


def _number(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:.4g}"


def _format_p(p: float) -> str:
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _sum_dicts(tables: Iterator[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _mean_of_dicts(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}

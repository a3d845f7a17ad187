"""The report of a study: tables, and the sentences that its tests support, as Markdown, CSV and for
the HTML page.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import pluralise
from ..escaping import make_visible
from ..files import read_json_file, write_atomically
from ..output_paths import FolderKind, check_output, stage_folder
from .cell_heads import HEAD_MEASURES
from .cells import describe_task
from .decode_times import read_decode_times
from .model_edits import describe_edits
from .seed_statistics import (
    SIGNIFICANCE,
    Comparison,
    Interval,
    VariantScore,
    compare_seeds,
    mean_interval,
    score_variants,
)
from .study_file import Study, StudyTask
from .study_plan import format_seconds
from .study_runner import REPORT, STUDY_FOLDER, CellResult, StudyResults

REPORT_FOLDER, REPORT_FILE, PAGE_FILE, TABLE_FILE = (
    "report",
    "report.md",
    "report.html",
    "results.csv",
)
ENVIRONMENT_FILE = "environment.json"
STUDY_REPORT = FolderKind(
    "report of a study", (REPORT_FILE,), lambda _: (REPORT_FILE, PAGE_FILE, TABLE_FILE)
)
MIN_SEEDS_TO_CLAIM = 3
NO_SPREAD = "no spread"  # instead of an interval, where all seeds agree or there is only one
SMALLEST_NUMBER = (
    1e-6  # what is closer to 0 is rounding, such as the weight on a sink that was never chosen
)
_HEAD_COLUMNS = {
    **{name: name for name in HEAD_MEASURES},
    "diversity": "diversity",
    "support": "support",
}
_HEAD_COLUMNS |= {"support_spread": "support sd", "score_deviation": "score sd"}
_HEAD_COLUMNS |= {
    "score_rank": "score rank",
    "score_change": "score change",
    "residual": "token residual",
}
# What the caption of a table of heads says about a column.
_COLUMN_NOTES = {
    "diversity": "Diversity: how different the heads of a layer attend, 0 equal, 1 disjoint.",
    "support": "Support: keys with a weight above 0.",
    "support sd": "Support sd: standard deviation of that number over heads.",
    "score sd": "Score sd: standard deviation of scores over keys.",
    "score rank": "Score rank: effective rank of the scores.",
    "score change": "Score change: what mixing and biases add to the scores, as a share. Heads "
    "that are mixed after "
    "the softmax (DCMHA, talking heads) may have negative weights, and entropy, confidence, sink "
    "and diversity may "
    "then leave their usual ranges.",
    "token residual": (
        "Token residual: how different the tokens of a text are after the last layer, 0 equal."
    ),
}


def describe_columns(header: Sequence[str]) -> str:
    """The caption of a table of heads, which explains the columns that it has.

    >>> describe_columns(["variant", "entropy", "score rank"])
    'Means over heads and seeds. Score rank: effective rank of the scores.'
    """
    return " ".join(
        [
            "Means over heads and seeds.",
            *(_COLUMN_NOTES[name] for name in header if name in _COLUMN_NOTES),
        ]
    )


@dataclass(frozen=True)
class ReportTable:
    """A table of a report: header, rows of text, and a caption. Cells that begin with "**" are
    bold.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @property
    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [
            f"### {self.title}",
            "",
            _markdown_row(self.header),
            _markdown_row(["---"] * len(self.header)),
        ]
        lines += [_markdown_row(row) for row in self.rows]
        return "\n".join([*lines, "", self.caption] if self.caption else lines)


@dataclass(frozen=True)
class StudyReport:
    """Everything that a report shows."""

    results: StudyResults
    scores: Mapping[tuple[str, str], VariantScore]
    comparisons: Mapping[tuple[str, str], Comparison]
    claims: tuple[str, ...]
    environment: Mapping[str, Any]
    decoding: Mapping[str, Any]

    @staticmethod
    def of(
        results: StudyResults, environment: Mapping[str, Any], decoding: Mapping[str, Any]
    ) -> StudyReport:
        """Compute the statistics of a study; `decoding` is the result of `read_decode_times`."""
        comparisons = compare_seeds(results)
        scores = score_variants(results, comparisons)
        claims = tuple(list_claims(results, scores, comparisons))
        return StudyReport(results, scores, comparisons, claims, environment, decoding)

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
            f"minus {study.baseline} (95 % interval)",
            "p",
            "s/step",
        )
        if task.threshold is not None:
            header = (*header, f"reached {task.threshold:g}", "steps")
        rows = [
            self._score_row(self.scores[variant, task.name], task) for variant in study.variants
        ]
        direction = "higher" if task.higher_is_better else "lower"
        caption = (
            f"{task.metric}: {direction} is better; chance "
            f"{_number(task.task.chance.get(task.metric, math.nan))}. "
            "p from a paired t test over seeds, corrected for all comparisons of the study "
            "(Holm); bold: the best, "
            f"and significantly so at {SIGNIFICANCE:g}. Seeds without spread have neither "
            "interval nor p. Test error: "
            "standard error from the finite test set. s/step: processor seconds of a training step."
        )
        return ReportTable(task.name, header, tuple(rows), caption)

    def contrast_table(self, task: StudyTask) -> ReportTable | None:
        """The contrasts that the study planned, on one task; None if it planned none."""
        rows: list[tuple[str, ...]] = []
        for contrast in self.results.study.contrasts:
            if (one := self.comparisons.get((contrast.name, task.name))) is not None:
                verdict = "yes" if one.is_significant else "no"
                row = (
                    _format_difference(one),
                    str(len(one.pairs)),
                    _format_p(one.corrected_p),
                    verdict,
                )
                rows.append((contrast.name, *row))
        if not rows:
            return None
        header = ("contrast", "difference (95 % interval)", "seeds", "p", "significant")
        caption = (
            f"Stated in the study file: {task.metric}, or the measure that is named; change: what "
            "the edit or the test "
            "changes in it; learning: its mean over the evaluations during training. Intervals "
            "are those of the paired "
            "t test over seeds, for each contrast alone; p is corrected as above."
        )
        return ReportTable(f"{task.name}, planned contrasts", header, tuple(rows), caption)

    def slice_table(self, task: StudyTask) -> ReportTable | None:
        """The metric on each part of the test set and on each further test;
        None if there are none.
        """
        names = self._slice_names(task)
        if not names:
            return None
        rows = [
            (variant, *(self._slice_text(variant, task, name) for name in names))
            for variant in self.results.study.variants
        ]
        caption = f"{task.metric}: means over seeds; on tests with 95 % intervals."
        return ReportTable(
            f"{task.name}, by part and test", ("variant", *names), tuple(rows), caption
        )

    def head_table(self, task: StudyTask) -> ReportTable | None:
        """Heads of each variant on the task: means of measures, and the number of heads of each
        class.
        """
        rows: list[tuple[str, ...]] = []
        for variant in self.results.study.variants:
            summaries = [one.result["heads"] for one in self._done(variant, task)]
            measured = [one for one in summaries if "measures" in one]
            note = next((one["note"] for one in summaries if "note" in one), "")
            classes = _sum_dicts(one["classes"] for one in measured)
            ordered = sorted(classes.items(), key=lambda item: -item[1])
            counts = ", ".join(f"{total / len(measured):.3g} {name}" for name, total in ordered)
            rows.append((variant, *_head_cells(measured), counts or note))
        if all(row[1] == "-" for row in rows):
            return None
        header = ("variant", *_HEAD_COLUMNS.values(), "heads of each class, mean over seeds")
        table = _without_empty_columns(
            ReportTable(f"{task.name}, what heads do", header, tuple(rows))
        )
        return replace(table, caption=describe_columns(table.header))

    def head_place_table(self, task: StudyTask) -> ReportTable | None:
        """Measures of heads before training, during it, and on further tests; None if heads were
        not measured.
        """
        rows: list[tuple[str, ...]] = []
        for variant in self.results.study.variants:
            done = self._done(variant, task)
            for place in _sort_places(
                place for one in done for place in one.result.get("heads_at", {})
            ):
                summaries = [one.result["heads_at"].get(place, {}) for one in done]
                measured = [one for one in summaries if "measures" in one]
                if measured:
                    rows.append((variant, place, *_head_cells(measured)))
        if not rows:
            return None
        header = ("variant", "heads at", *_HEAD_COLUMNS.values())
        title = f"{task.name}, heads before training, during it, and on further tests"
        return _without_empty_columns(
            ReportTable(title, header, tuple(rows), "Means over heads and seeds.")
        )

    def gate_table(self, task: StudyTask) -> ReportTable | None:
        """Share of tokens for which each gated head is on; None if no variant has gates."""
        rows: list[tuple[str, ...]] = []
        for variant in self.results.study.variants:
            gates = [one.result["heads"].get("gates", {}) for one in self._done(variant, task)]
            for site in dict.fromkeys(site for one in gates for site in one):
                loads = [one[site] for one in gates if site in one]
                means = [sum(column) / len(loads) for column in zip(*loads, strict=True)]
                rows.append(
                    (variant, site, ", ".join(f"{mean:.2f}" for mean in means), f"{sum(means):.2f}")
                )
        if not rows:
            return None
        header = (
            "variant",
            "attention",
            "share of tokens for which each head is on",
            "heads on, per token",
        )
        return ReportTable(
            f"{task.name}, load of gated heads", header, tuple(rows), "Means over seeds."
        )

    def edit_table(self, task: StudyTask) -> ReportTable | None:
        """The metric after each edit of the trained models; None if the study has no edits."""
        study = self.results.study
        if not study.edits:
            return None
        rows: list[tuple[str, ...]] = []
        for variant in study.variants:
            done = self._done(variant, task)
            values = {
                "not edited": [one.result["metrics"].get(task.metric, math.nan) for one in done]
            }
            for name in study.edits:
                metrics = [
                    one.result["edits"][name]["metrics"]
                    for one in done
                    if name in one.result["edits"]
                ]
                values[name] = [one.get(task.metric, math.nan) for one in metrics]
            rows.append(
                (
                    variant,
                    *(
                        _format_interval(mean_interval(of_edit, task.metric))
                        for of_edit in values.values()
                    ),
                )
            )
        return ReportTable(
            f"{task.name}, {task.metric} after edits",
            ("variant", "not edited", *study.edits),
            tuple(rows),
            f"Means over seeds with 95 % intervals. {describe_edits(study.edits)}",
        )

    def decode_table(self) -> ReportTable | None:
        """Seconds of a decode step and bytes of the cache at each context; None without a task that
        decodes.
        """
        variants: Mapping[str, Any] = self.decoding.get("variants", {})
        if not variants:
            return None
        lists = [records for records in variants.values() if isinstance(records, list)]
        contexts = sorted({record["context"] for records in lists for record in records})
        rows: list[tuple[str, ...]] = []
        for name, records in variants.items():
            if isinstance(records, str):
                rows.append((name, *["-"] * (2 * len(contexts) + 1), records))
                continue
            at = {record["context"]: record for record in records}
            last = records[-1]
            agrees = all(record["formula"] == record["held"] for record in records)
            rows.append(
                (
                    name,
                    *(
                        f"{1000 * at[one][kind]:.2f}" if one in at else "-"
                        for kind in ("step", "prompt")
                        for one in contexts
                    ),
                    f"{last['held']:,}",
                    "equal" if agrees else f"differs: {last['formula']:,}",
                )
            )
        return ReportTable(
            "Decode time against context",
            (
                "variant",
                *(f"ms at {context:,}" for context in contexts),
                *(f"prompt of {context:,}" for context in contexts),
                "KV bytes at the last",
                "bytes by formula",
            ),
            tuple(rows),
            f"One row, random weights of the models of {self.decoding['task']}; milliseconds of "
            "processor time of a "
            "token (median of 9), and of the whole prompt.",
        )

    def size_table(self) -> ReportTable:
        """Counted against built parameters, and how each variant was matched."""
        rows = []
        for variant, task in self.results.grid.pairs:
            model = self.results.grid.models[variant.name, task.name]
            built = next(
                (one.result.get("parameters") for one in self._done(variant.name, task)), None
            )
            agrees = (
                "-"
                if built is None
                else "equal"
                if built == model.size.parameters
                else f"differs: {built:,}"
            )
            rows.append(
                (task.name, variant.name, f"{model.size.parameters:,}", agrees, model.match or "-")
            )
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

    def test_mean(self, variant: str, task: StudyTask, test: str) -> float:
        """Mean over seeds of the metric of a variant on a further test of a task."""
        return self._slice_mean(variant, task, f"test {test}").value

    def head_curve(self, variant: str, task: StudyTask, measure: str) -> list[tuple[float, float]]:
        """Mean over heads and seeds of a measure of heads, by training step; with the trained heads
        at the end.
        """
        values: dict[int, list[float]] = {}
        for one in self._done(variant, task):
            places = one.result.get("heads_at", {}) | {
                f"step {one.result['steps']}": one.result["heads"]
            }
            for place, summary in places.items():
                if place.startswith("step ") and measure in summary.get("measures", {}):
                    values.setdefault(int(place.removeprefix("step ")), []).append(
                        summary["measures"][measure]
                    )
        return [(float(step), sum(column) / len(column)) for step, column in sorted(values.items())]

    def _done(self, variant: str, task: StudyTask) -> list[CellResult]:
        return [one for one in self.results.report_cells(variant, task.name) if one.is_done]

    def _score_row(self, score: VariantScore, task: StudyTask) -> tuple[str, ...]:
        size = self.results.grid.models[score.variant, task.name].size
        rate = self.results.rates.get((score.variant, task.name), math.nan)
        mean, mark = score.mean, "**" if score.is_best else ""
        value = _format_interval(mean)
        comparison = score.comparison
        times = [
            one.result["timing"]["step"]
            for one in self._done(score.variant, task)
            if "step" in one.result["timing"]
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
            "-" if comparison is None else _format_difference(comparison),
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
                names |= dict.fromkeys(
                    name for name in one.result["metrics"] if name.startswith(f"{task.metric}@")
                )
                names |= dict.fromkeys(f"test {name}" for name in one.result["tests"])
        return sorted(names, key=lambda name: (name.startswith("test "), len(name), name))

    def _slice_text(self, variant: str, task: StudyTask, name: str) -> str:
        mean = self._slice_mean(variant, task, name)
        return _format_interval(mean) if name.startswith("test ") else _number(mean.value)

    def _slice_mean(self, variant: str, task: StudyTask, name: str) -> Interval:
        values = []
        for one in self._done(variant, task):
            test = (
                one.result["tests"].get(name.removeprefix("test "), {})
                if name.startswith("test ")
                else None
            )
            value = one.result["metrics"].get(name) if test is None else test.get(task.metric)
            if value is not None:
                values.append(value)
        return mean_interval(values, task.metric)


def list_claims(
    results: StudyResults,
    scores: Mapping[tuple[str, str], VariantScore],
    comparisons: Mapping[tuple[str, str], Comparison],
) -> Iterator[str]:
    """Sentences that the tests support, one task after the other; never more
    than the numbers say.
    """
    study = results.study
    if len(study.seeds) < MIN_SEEDS_TO_CLAIM:
        seeds = pluralise(len(study.seeds), "seed")
        yield f"With {seeds} no difference is claimed; give at least {MIN_SEEDS_TO_CLAIM}."
        return
    for task in study.tasks.values():
        baseline = scores[study.baseline, task.name]
        reached = (
            f"{task.name}: {study.baseline} reaches {task.metric} {_number(baseline.mean.value)}"
        )
        yield f"{reached} (mean of {len(baseline.values)} seeds)."
        if task.threshold is not None:
            yield _claim_successes(task, [scores[variant, task.name] for variant in study.variants])
        named = {name: one for (name, of_task), one in comparisons.items() if of_task == task.name}
        yield from _claim_variants(
            study, task, {name: one for name, one in named.items() if name in study.variants}
        )
        planned = {name: one for name, one in named.items() if name not in study.variants}
        for name, one in planned.items():
            verdict = "significant" if one.is_significant else "not significant"
            yield (
                f"{task.name}: {name}: {_format_difference(one)}, p "
                f"{_format_p(one.corrected_p)}, {verdict}."
            )
    if (count := len(comparisons)) > 1:
        yield (
            f"The study makes {count} comparisons of {len(study.seeds)} seeds each, so the "
            "clearest of them is only "
            f"significant if its uncorrected p is below {SIGNIFICANCE / count:.2g}; large "
            "differences can miss that. "
            "What is not significant is not thereby equal."
        )


def _claim_successes(task: StudyTask, scores: Sequence[VariantScore]) -> str:
    """How many seeds of each variant learned the task, because a model that did not says little
    about its attention.
    """
    if all(
        one.success_rate == 1 for one in scores
    ):  # NaN without runs, as if no learning rate could be chosen
        return f"{task.name}: all seeds of all variants reach {task.threshold:g}."
    counts = ", ".join(f"{one.variant} {_count_successes(one)}" for one in scores)
    return f"{task.name}: seeds that reach {task.threshold:g}: {counts}."


def _count_successes(score: VariantScore) -> str:
    if not math.isfinite(score.success_rate):
        return "not run"
    count = len(score.values) + len(score.failures)
    return f"{round(score.success_rate * count)} of {count}"


def _claim_variants(
    study: Study, task: StudyTask, compared: Mapping[str, Comparison]
) -> Iterator[str]:
    """Variants that differ significantly from the baseline, and those that do not, with their
    intervals.
    """
    groups: dict[str, list[str]] = {"better": [], "worse": [], "": []}
    for name, one in compared.items():
        rises = one.difference.value > 0
        kind = (
            ""
            if not one.is_significant
            else "better"
            if rises == task.higher_is_better
            else "worse"
        )
        groups[kind].append(f"{name} {_format_difference(one)}")
    for kind, texts in groups.items():
        if texts:
            start = f"significantly {kind} than" if kind else "no significant difference from"
            yield f"{task.name}: {start} {study.baseline}: {', '.join(texts)}."


def render_markdown(report: StudyReport) -> str:
    """The whole report as Markdown."""
    study = report.results.study
    lines = [
        f"# Study: {study.name}",
        "",
        f"**Hypothesis, stated before the runs.** {study.hypothesis}",
        "",
    ]
    lines += ["## What can be claimed", "", *(f"- {claim}" for claim in report.claims), ""]
    lines += ["## Results", ""]
    for table in list_tables(report):
        lines += [table.markdown, ""]
    if report.failures:
        lines += [
            "## Cells without a result",
            "",
            *(f"- {failure}" for failure in report.failures),
            "",
        ]
    lines += [
        "## Protocol and environment",
        "",
        *(f"- {line}" for line in describe_protocol(report)),
        "",
    ]
    return "\n".join(lines)


def list_tables(report: StudyReport) -> Iterator[ReportTable]:
    """All tables, task by task."""
    for task in report.results.study.tasks.values():
        yield report.score_table(task)
        yield from list_task_details(report, task)
    if (decoding := report.decode_table()) is not None:
        yield decoding
    yield report.size_table()


def list_task_details(report: StudyReport, task: StudyTask) -> Iterator[ReportTable]:
    """The tables of a task below its scores."""
    tables = (
        report.contrast_table(task),
        report.slice_table(task),
        report.edit_table(task),
        report.head_table(task),
        report.head_place_table(task),
        report.gate_table(task),
    )
    return (table for table in tables if table is not None)


def describe_protocol(report: StudyReport) -> list[str]:
    """How the study was run, one fact a line."""
    results = report.results
    study = results.study
    count = len([one for one in results.cells if one.stage == REPORT])
    seconds = sum(one.result.get("timing", {}).get("processor", math.nan) for one in results.cells)
    time = "" if math.isnan(seconds) else f", {format_seconds(seconds)} of processor time in all"
    rates = sorted(
        {rate for variant in study.variants.values() for rate in results.grid.rates(variant)}
    )
    recipes = {
        f"{recipe.steps} steps of {recipe.batch} examples"
        for recipe in results.grid.recipes.values()
    }
    chosen = f"chosen by the validation metric of seed {study.tuning_seed}, which is not reported"
    if len(results.cells) == count:
        chosen = "not chosen: each variant had a single one"
    lines = [
        f"scale {study.scale}: {', '.join(sorted(recipes))}; sizes matched by {study.match}; "
        "report seeds "
        f"{', '.join(map(str, study.seeds))}",
        *(f"task {task.name}: {_describe_task(task)}" for task in study.tasks.values()),
        f"learning rates {', '.join(f'{rate:g}' for rate in rates)}, {chosen}",
        (
            "every seed has the same initial random numbers and the same data in the same order "
            "for "
            "all variants"
        ),
        f"{count} report cells and {len(results.cells) - count} tuning cells{time}",
    ]
    return [*lines, *(f"{name}: {value}" for name, value in report.environment.items())]


def _describe_task(task: StudyTask) -> str:
    """The fields of a task as text, its seed left out."""
    values = describe_task(task.task)
    return ", ".join(
        f"{name} {value}" for name, value in values.items() if name not in ("task", "seed")
    )


def render_csv(results: StudyResults) -> str:
    """One line for each cell and metric."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["id", "stage", "task", "variant", "lr", "seed", "status", "metric", "value"])
    for one in results.cells:
        cell = one.cell
        start = [
            cell.id,
            one.stage,
            cell.task,
            cell.variant,
            cell.rate,
            cell.seed,
            one.result["status"],
        ]
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
    """Write report.md, report.html and results.csv to the folder report of a study; nothing is
    trained.
    """
    from .report_page import render_page

    folder = check_output(out, STUDY_FOLDER, "continue")
    path = folder / ENVIRONMENT_FILE
    if not path.exists():
        write_atomically(path, json.dumps(describe_environment(), indent=1).encode() + b"\n")
    report = StudyReport.of(results, read_json_file(path), read_decode_times(results.grid, folder))
    pages = {
        REPORT_FILE: render_markdown(report),
        TABLE_FILE: render_csv(results),
        PAGE_FILE: render_page(report),
    }
    with stage_folder(folder / REPORT_FOLDER, STUDY_REPORT, "overwrite") as staged:
        for name, page in pages.items():
            write_atomically(staged / name, page.encode())
    return report


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in map(make_visible, cells)) + " |"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if abs(value) > SMALLEST_NUMBER else "0"


def _format_interval(mean: Interval) -> str:
    if math.isnan(mean.value):
        return "-"
    ends = f"{_number(mean.low)} to {_number(mean.high)}" if mean.low < mean.high else NO_SPREAD
    return f"{_number(mean.value)} ({ends})"


def _format_difference(comparison: Comparison) -> str:
    value, low, high = comparison.difference
    return f"{value:+.3f} ({f'{low:+.3f} to {high:+.3f}' if low < high else NO_SPREAD})"


def _without_empty_columns(table: ReportTable) -> ReportTable:
    """The table without columns in which every cell is "-" or "0"."""
    columns = [
        n for n in range(len(table.header)) if any(row[n] not in ("-", "0") for row in table.rows)
    ]
    header, *rows = (tuple(row[n] for n in columns) for row in (table.header, *table.rows))
    return replace(table, header=header, rows=tuple(rows))


def _sort_places(places: Iterable[str]) -> list[str]:
    """Training steps by number, then further tests by name.

    >>> _sort_places({"test longer", "step 100", "step 20"})
    ['step 20', 'step 100', 'test longer']
    """
    return sorted(set(places), key=lambda place: (not place.startswith("step "), len(place), place))


def _head_cells(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means of the columns of a table of heads over summaries of several seeds."""
    values: dict[str, list[float]] = {name: [] for name in _HEAD_COLUMNS}
    for one in summaries:
        flat = {**one, **one["measures"], "residual": one["residual"][-1]}
        for name, column in values.items():
            if flat.get(name) is not None:
                column.append(flat[name])
    return [_number(sum(column) / len(column)) if column else "-" for column in values.values()]


def _format_p(p: float) -> str:
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _sum_dicts(tables: Iterator[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0.0) + value
    return total

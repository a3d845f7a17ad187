"""The report of a study: tables, the claims that its tests support, and one page of both with
figures.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import pluralise
from ..files import read_json_file, write_atomically
from ..output_paths import FolderKind, check_output, stage_folder
from ..report import render
from ..report.data import Column, Estimate, Item, Page, Section, Table, Value
from ..report.numbers import format_count, format_interval, format_number, format_p, format_seconds
from .cell_heads import HEAD_MEASURES
from .cells import PairKey, describe_task
from .decode_times import read_decode_times
from .model_edits import describe_edits
from .seed_statistics import (
    SIGNIFICANCE,
    Comparison,
    VariantScore,
    compare_seeds,
    estimate_mean,
    mean_test,
    score_variants,
)
from .study_figures import draw_decoding, draw_task
from .study_file import OTHER_HEAD_NUMBERS, StudyTask
from .study_runner import REPORT, STUDY_FOLDER, CellResult, StudyResults

REPORT_FOLDER = "report"
REPORT_FILE = "report.md"
PAGE_FILE = "report.html"
TABLE_FILE = "results.csv"
ENVIRONMENT_FILE = "environment.json"
STUDY_REPORT = FolderKind(
    "report of a study", (REPORT_FILE,), lambda _: (REPORT_FILE, PAGE_FILE, TABLE_FILE)
)
MIN_SEEDS_TO_CLAIM = 3
CLAIMS_TITLE = "What can be claimed"  # the report.md has this section, which `learn` reads
HEAD_NUMBERS = (*HEAD_MEASURES, *OTHER_HEAD_NUMBERS)
# What the notes of a table of heads say about a column.
COLUMN_NOTES = {
    "diversity": "diversity: how different the heads of a layer attend, 0 equal, 1 disjoint",
    "support": "support: keys with a weight above 0",
    "support_spread": "support_spread: standard deviation of that number over heads",
    "score_deviation": "score_deviation: standard deviation of scores over keys",
    "score_rank": "score_rank: effective rank of the scores",
    "score_change": "score_change: what mixing and biases add to the scores, as a share; heads "
    "that are mixed after the softmax may have negative weights, and entropy, confidence, sink and "
    "diversity may then leave their usual ranges",
    "residual": "residual: how different the tokens of a text are after the last layer, 0 equal",
}


@dataclass(frozen=True)
class StudyReport:
    """Everything that a report shows; `decoding` is the result of `read_decode_times`."""

    results: StudyResults
    scores: Mapping[PairKey, VariantScore]
    comparisons: Mapping[PairKey, Comparison]
    environment: Mapping[str, Any]
    decoding: Mapping[str, Any]

    @property
    def claims(self) -> list[str]:
        """Sentences that the tests support."""
        return list(list_claims(self.results, self.scores, self.comparisons))

    @property
    def failures(self) -> list[str]:
        """One line for each cell without metrics."""
        return [
            f"{one.cell.variant} on {one.cell.task}, lr {one.cell.rate:g}, seed {one.cell.seed}: "
            f"{one.result['status']}: {one.result.get('message', '')}"
            for one in self.results.cells
            if not one.is_done
        ]

    @property
    def page(self) -> Page:
        """The report as one page."""
        study = self.results.study
        claims: list[Item] = [self.claims]
        sections = [Section(CLAIMS_TITLE, claims)]
        for task in study.tasks.values():
            figures = draw_task(self.results, task, self.scores, self.comparisons)
            sections.append(Section(task.name, [*figures, *self.tables(task)]))
        if self.decoding.get("variants"):
            items = [*draw_decoding(self.decoding), tabulate_decoding(self.decoding)]
            sections.append(Section("Decode time against context", items))
        sections.append(Section("Formula against measurement", [self._size_table()]))
        if self.failures:
            sections.append(Section("Cells without a result", [self.failures]))
        sections.append(Section("Protocol and environment", [describe_protocol(self)]))
        summary = f"Hypothesis, stated before the runs. {study.hypothesis}"
        return Page(f"Study: {study.name}", sections, summary)

    # --- Tables ---

    def tables(self, task: StudyTask) -> Iterator[Table]:
        """The tables of a task that have rows."""
        makers = (
            self._score_table,
            self._contrast_table,
            self._slice_table,
            self._edit_table,
            self._head_table,
            self._gate_table,
        )
        for make in makers:
            table = make(task)
            if table.rows:
                yield table

    def _score_table(self, task: StudyTask) -> Table:
        """Size, metric, difference from the baseline and success of every variant."""
        results = self.results
        columns = [
            "variant",
            "parameters",
            Column("FLOPs/step", format_count),
            "KV bytes",
            Column("lr", format_number),
            f"{task.metric} [95 % interval]",
            "seeds",
            Column("sd of seeds", format_number),
            Column("test error", format_number),
            Column(f"minus {results.study.baseline} [95 % interval]", format_difference),
            Column("p", format_p),
            Column("s/step", format_number),
        ]
        if task.threshold is not None:
            columns += [f"share reached {task.threshold:g}", Column("steps", format_number)]
        rows: list[list[Value]] = []
        for variant in results.study.variants:
            score = self.scores[variant, task.name]
            size = results.grid.models[variant, task.name].size
            compared = score.comparison
            cells = results.done_cells(variant, task.name)
            times = sorted(one.result["timing"].get("step", math.nan) for one in cells)
            row: list[Value] = [
                variant,
                size.parameters,
                float(size.step_flops),
                size.kv_bytes,
                results.rates.get((variant, task.name), math.nan),
                score.mean,
                "; ".join([str(len(score.values)), *score.failures]),
                score.seed_deviation,
                score.test_error,
                compared.difference if compared else None,
                compared.corrected_p if compared else None,
                times[len(times) // 2] if times else None,
            ]
            if task.threshold is not None:
                row += [score.success_rate, score.steps_to_threshold]
            rows.append(row)
        best = [self.scores[variant, task.name].is_best for variant in results.study.variants]
        direction = "higher" if task.sign > 0 else "lower"
        chance = format_number(task.task.chance.get(task.metric, math.nan))
        notes = (
            f"{task.metric}: {direction} is better; chance {chance}.",
            "p from a paired t test over seeds, corrected for all comparisons of the study (Holm); "
            f"bold: the best, and significantly so at {SIGNIFICANCE:g}. Seeds without spread have "
            "neither interval nor p.",
            "Test error: standard error from the finite test set. s/step: processor seconds of a "
            "training step.",
        )
        bold = frozenset((row, 5) for row, is_best in enumerate(best) if is_best)
        return Table(task.name, columns, rows, notes, bold)

    def _contrast_table(self, task: StudyTask) -> Table:
        """The contrasts that the study planned, on one task."""
        rows: list[list[Value]] = []
        for contrast in self.results.study.contrasts:
            one = self.comparisons.get((contrast.name, task.name))
            if one is not None:
                p = one.corrected_p
                rows.append([contrast.name, one.difference, len(one.pairs), p, one.is_significant])
        columns = [
            "contrast",
            Column("difference [95 % interval]", format_difference),
            "seeds",
            Column("p", format_p),
            "significant",
        ]
        notes = (
            f"Stated in the study file: {task.metric}, or the measure that is named; change: what "
            "the edit or the test changes in it; learning: its mean over the evaluations during "
            "training. Intervals are of each contrast alone; p is corrected as above.",
        )
        return Table(f"{task.name}, planned contrasts", columns, rows, notes)

    def _slice_table(self, task: StudyTask) -> Table:
        """The metric on each part of the test set and on each further test."""
        results = self.results
        parts: dict[str, None] = {}
        for variant in results.study.variants:
            for one in results.done_cells(variant, task.name):
                parts |= dict.fromkeys(one.result["metrics"])
        parts = {name: None for name in parts if name.startswith(f"{task.metric}@")}
        names = sorted(parts, key=lambda name: (len(name), name))
        tests = list(task.tests)
        rows: list[list[Value]] = []
        for variant in results.study.variants if names or tests else ():
            cells = results.done_cells(variant, task.name)
            row: list[Value] = [variant]
            metrics = [one.result["metrics"] for one in cells]
            row += [_mean_of(metrics, name) for name in names]
            row += [mean_test(results, variant, task, test) for test in tests]
            rows.append(row)
        columns = ["variant", *names, *(f"test {test}" for test in tests)]
        note = f"{task.metric}: means over seeds; on tests with 95 % intervals."
        return Table(f"{task.name}, by part and test", columns, rows, (note,))

    def _edit_table(self, task: StudyTask) -> Table:
        """The metric after each edit of the trained models."""
        study = self.results.study
        rows: list[list[Value]] = []
        for variant in study.variants if study.edits else ():
            cells = self.results.done_cells(variant, task.name)
            trained = [one.result["metrics"].get(task.metric, math.nan) for one in cells]
            row: list[Value] = [variant, estimate_mean(trained, task.metric)]
            for name in study.edits:
                edited = [one.result["edits"].get(name, {"metrics": {}}) for one in cells]
                values = [edit["metrics"].get(task.metric, math.nan) for edit in edited]
                row.append(estimate_mean(values, task.metric))
            rows.append(row)
        columns = ["variant", "not edited", *study.edits]
        notes = ("Means over seeds with 95 % intervals.", describe_edits(study.edits))
        return Table(f"{task.name}, {task.metric} after edits", columns, rows, notes)

    def _head_table(self, task: StudyTask) -> Table:
        """Means of measures of heads, and the number of heads of each class: of the trained model,
        before and during training, and on further tests.
        """
        rows: list[list[Value]] = []
        for variant in self.results.study.variants:
            cells = self.results.done_cells(variant, task.name)
            places: dict[str, None] = {}
            for one in cells:
                places |= dict.fromkeys(one.result.get("heads_at", {}))
            summaries = {"trained": [one.result["heads"] for one in cells]}
            for place in sort_places(places):
                summaries[place] = [one.result["heads_at"].get(place, {}) for one in cells]
            for place, of_place in summaries.items():
                measured = [one for one in of_place if "measures" in one]
                notes = [one["note"] for one in of_place if "note" in one]
                if measured:
                    rows.append([variant, place, *_head_means(measured), _count_classes(measured)])
                elif place == "trained" and notes:
                    rows.append([variant, place, *([None] * len(HEAD_NUMBERS)), notes[0]])
        if all(set(row[2:-1]) == {None} for row in rows):
            rows = []
        columns = [Column(name, format_number) for name in HEAD_NUMBERS]
        title = f"{task.name}, what heads do"
        table = Table(title, ["variant", "heads", *columns, "classes, mean over seeds"], rows)
        table = table.without_empty_columns()
        names = [column.name for column in table.column_list]
        notes = [COLUMN_NOTES[name] for name in names if name in COLUMN_NOTES]
        return Table(title, table.columns, table.rows, ["Means over heads and seeds.", *notes])

    def _gate_table(self, task: StudyTask) -> Table:
        """Share of tokens for which each gated head is on."""
        rows: list[list[Value]] = []
        for variant in self.results.study.variants:
            cells = self.results.done_cells(variant, task.name)
            gates = [one.result["heads"].get("gates", {}) for one in cells]
            for site in gates[0] if gates else ():
                loads = [one[site] for one in gates if site in one]
                means = [sum(column) / len(loads) for column in zip(*loads, strict=True)]
                shares = ", ".join(f"{mean:.2f}" for mean in means)
                rows.append([variant, site, shares, sum(means)])
        columns = ["variant", "attention", "share of tokens for which each head is on", "heads on"]
        return Table(f"{task.name}, load of gated heads", columns, rows, ("Means over seeds.",))

    def _size_table(self) -> Table:
        """Counted against built parameters, and how each variant was matched."""
        rows: list[list[Value]] = []
        for variant, task in self.results.grid.pairs:
            model = self.results.grid.models[variant.name, task.name]
            cells = self.results.done_cells(variant.name, task.name)
            built = cells[0].result.get("parameters") if cells else None
            row = [task.name, variant.name, model.size.parameters, built, model.match]
            rows.append(row)
        columns = ["task", "variant", "parameters by formula", "of the built model", "matching"]
        return Table("", columns, rows).without_empty_columns()


def tabulate_decoding(decoding: Mapping[str, Any]) -> Table:
    """Milliseconds of a decode step and bytes of the cache, by variant and context."""
    rows: list[list[Value]] = []
    for name, records in decoding["variants"].items():
        if isinstance(records, str):
            rows.append([name, None, None, None, None, records])
            continue
        for record in records:
            times = [1000 * record[kind] for kind in ("step", "prompt")]
            rows.append([name, record["context"], *times, record["held"], record["formula"]])
    columns = ["variant", "context", "ms a token", "ms of the prompt", "KV bytes", "by formula"]
    note = (
        f"One row, random weights of the models of {decoding['task']}; processor time of a token "
        "(median of 9), and of the whole prompt."
    )
    return Table("", columns, rows, (note,))


def format_difference(difference: Estimate) -> str:
    """A difference with its sign and its interval."""
    return format_interval(*difference[:3], sign="+")


def sort_places(places: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Training steps by number, then further tests by name.

    >>> sort_places(["test longer", "step 100", "step 20"])
    ['step 20', 'step 100', 'test longer']
    """
    return sorted(places, key=lambda place: (not place.startswith("step "), len(place), place))


def _head_means(summaries: Sequence[Mapping[str, Any]]) -> list[Value]:
    """Means of `HEAD_NUMBERS` over summaries of several seeds."""
    flat = [{**one, **one["measures"], "residual": one["residual"][-1]} for one in summaries]
    return [_mean_of(flat, name) for name in HEAD_NUMBERS]


def _mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean of a value over the records that have it."""
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None


def _count_classes(summaries: Sequence[Mapping[str, Any]]) -> str:
    totals: dict[str, float] = {}
    for one in summaries:
        for name, count in one["classes"].items():
            totals[name] = totals.get(name, 0.0) + count
    ordered = sorted(totals, key=lambda name: -totals[name])
    return ", ".join(f"{totals[name] / len(summaries):.3g} {name}" for name in ordered)


# --- Claims ---------------------------------------------------------------------------------------


def list_claims(
    results: StudyResults,
    scores: Mapping[PairKey, VariantScore],
    comparisons: Mapping[PairKey, Comparison],
) -> Iterator[str]:
    """Sentences that the tests support, one task after the other; never more than the numbers say."""
    study = results.study
    if len(study.seeds) < MIN_SEEDS_TO_CLAIM:
        seeds = pluralise(len(study.seeds), "seed")
        yield f"With {seeds} no difference is claimed; give at least {MIN_SEEDS_TO_CLAIM}."
        return
    for task in study.tasks.values():
        baseline = scores[study.baseline, task.name]
        yield (
            f"{task.name}: {study.baseline} reaches {task.metric} "
            f"{format_number(baseline.mean.value)} (mean of {len(baseline.values)} seeds)."
        )
        if task.threshold is not None:
            yield _claim_successes(task, [scores[variant, task.name] for variant in study.variants])
        named = {name: one for (name, of_task), one in comparisons.items() if of_task == task.name}
        groups: dict[str, list[str]] = {}
        for name, one in named.items():
            verdict = "no significant difference from"
            if one.is_significant:
                is_better = task.sign * one.difference.value > 0
                verdict = f"significantly {'better' if is_better else 'worse'} than"
            if name in study.variants:
                text = f"{name} {format_difference(one.difference)}"
                groups.setdefault(verdict, []).append(text)
        for verdict in sorted(groups, key=lambda verdict: (verdict.startswith("no"), verdict)):
            yield f"{task.name}: {verdict} {study.baseline}: {', '.join(groups[verdict])}."
        for name, one in named.items():
            if name not in study.variants:
                verdict = "significant" if one.is_significant else "not significant"
                yield (
                    f"{task.name}: {name}: {format_difference(one.difference)}, p "
                    f"{format_p(one.corrected_p)}, {verdict}."
                )
    count = len(comparisons)
    if count > 1:
        yield (
            f"The study makes {count} comparisons of {len(study.seeds)} seeds each, so the "
            f"clearest of them is only significant if its uncorrected p is below "
            f"{SIGNIFICANCE / count:.2g}. What is not significant is not thereby equal."
        )


def _claim_successes(task: StudyTask, scores: Sequence[VariantScore]) -> str:
    """How many seeds of each variant learned the task, because a model that did not says little
    about its attention.
    """
    # The rate is NaN without runs, as if no learning rate could be chosen.
    if all(one.success_rate == 1 for one in scores):
        return f"{task.name}: all seeds of all variants reach {task.threshold:g}."
    counts: list[str] = []
    for score in scores:
        total = len(score.values) + len(score.failures)
        rate = score.success_rate
        text = f"{round(rate * total)} of {total}" if math.isfinite(rate) else "not run"
        counts.append(f"{score.variant} {text}")
    return f"{task.name}: seeds that reach {task.threshold:g}: {', '.join(counts)}."


# --- Files ----------------------------------------------------------------------------------------


def describe_protocol(report: StudyReport) -> list[str]:
    """How the study was run, one fact a line."""
    results = report.results
    study = results.study
    grid = results.grid
    count = sum(one.stage == REPORT for one in results.cells)
    seconds = sum(one.result.get("timing", {}).get("processor", math.nan) for one in results.cells)
    rates: set[float] = set()
    for variant in study.variants.values():
        rates.update(grid.rates(variant))
    recipes = {f"{one.steps} steps of {one.batch} examples" for one in grid.recipes.values()}
    chosen = f"chosen by the validation metric of seed {study.tuning_seed}, which is not reported"
    if len(results.cells) == count:
        chosen = "not chosen: each variant had a single one"
    lines = [
        f"scale {study.scale}: {', '.join(sorted(recipes))}; sizes matched by {study.match}; "
        f"report seeds {', '.join(map(str, study.seeds))}"
    ]
    for task in study.tasks.values():
        options = describe_task(task.task)
        texts = [f"{name} {options[name]}" for name in options if name not in ("task", "seed")]
        lines.append(f"task {task.name}: {', '.join(texts)}")
    return [
        *lines,
        f"learning rates {', '.join(f'{rate:g}' for rate in sorted(rates))}, {chosen}",
        "every seed has the same initial random numbers and the same data in the same order for "
        "all variants",
        f"{count} report cells and {len(results.cells) - count} tuning cells, "
        f"{format_seconds(seconds)} of processor time in all",
        *(f"{name}: {value}" for name, value in report.environment.items()),
    ]


def tabulate_cells(cells: Sequence[CellResult]) -> Table:
    """One row for each cell and metric."""
    rows: list[list[Value]] = []
    for one in cells:
        cell = one.cell
        start: list[Value] = [cell.id, one.stage, cell.task, cell.variant, cell.rate, cell.seed]
        start.append(one.result["status"])
        for name, value in sorted(one.result.get("metrics", {}).items()):
            rows.append([*start, name, value])
        if not one.is_done:
            rows.append([*start, None, None])
    names = ("id", "stage", "task", "variant", "lr", "seed", "status", "metric", "value")
    return Table("", names, rows)


def describe_environment() -> dict[str, Any]:
    """Versions and processor, for the report."""
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


def make_report(results: StudyResults, folder: Path) -> StudyReport:
    """Compute the statistics of a study, and measure its decoding unless `folder` holds it."""
    path = folder / ENVIRONMENT_FILE
    if not path.exists():
        write_atomically(path, json.dumps(describe_environment(), indent=1).encode() + b"\n")
    comparisons = compare_seeds(results)
    return StudyReport(
        results,
        score_variants(results, comparisons),
        comparisons,
        read_json_file(path),
        read_decode_times(results.grid, folder),
    )


def write_report(results: StudyResults, out: Path | str) -> StudyReport:
    """Write report.md, report.html and results.csv to the folder report of a study; nothing is
    trained.
    """
    folder = check_output(out, STUDY_FOLDER, "continue")
    report = make_report(results, folder)
    page = report.page
    contents = {
        REPORT_FILE: render.to_markdown(page),
        PAGE_FILE: render.to_html(page),
        TABLE_FILE: render.to_csv(tabulate_cells(results.cells)),
    }
    with stage_folder(folder / REPORT_FOLDER, STUDY_REPORT, "overwrite") as staged:
        for name, text in contents.items():
            write_atomically(staged / name, text.encode())
    return report

"""The report of a study: tables, the claims that its tests support, and one page of both with
figures.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..kernels.capabilities import this_machine
from ..report import render
from ..report.data import Column, Item, Page, Section, Table, Value
from ..report.text import (
    format_count,
    format_difference,
    format_number,
    format_p,
    format_seconds,
    median_time,
)
from ..util.errors import pluralise
from ..util.files import read_json_file, write_atomically
from ..util.output_paths import FolderKind, check_output, stage_folder
from .cells import PairKey, describe_task
from .run_cell import HEAD_MEASURES
from .seed_statistics import (
    SIGNIFICANCE,
    Comparison,
    VariantScore,
    compare_seeds,
    draw_decoding,
    draw_task,
    mean_of_seeds,
    score_variants,
)
from .study_file import OTHER_HEAD_NUMBERS, Readout, StudyTask
from .study_runner import REPORT, STUDY_FOLDER, CellResult, StudyResults, read_decode_times
from .study_verdict import StudyVerdict, judge_study

REPORT_FOLDER = "report"
REPORT_FILE = "report.md"
PAGE_FILE = "report.html"
TABLE_FILE = "results.csv"
ENVIRONMENT_FILE = "environment.json"
STUDY_REPORT = FolderKind(
    "report of a study", (REPORT_FILE,), lambda _: (REPORT_FILE, PAGE_FILE, TABLE_FILE)
)
MIN_SEEDS_TO_CLAIM = 3
CellsByVariant = Mapping[str, Sequence[CellResult]]
CLAIMS_TITLE = "What can be claimed"  # the report.md has this section, which `learn` reads
HEAD_NUMBERS = (*HEAD_MEASURES, *OTHER_HEAD_NUMBERS)
# Notes of a table of heads, by column.
COLUMN_NOTES = {
    "diversity": "diversity: how different the heads of a layer attend, 0 equal, 1 disjoint",
    "support": "support: keys with a weight above 0",
    "support_spread": "support_spread: standard deviation of that number over heads",
    "score_deviation": "score_deviation: standard deviation of scores over keys",
    "score_rank": "score_rank: effective rank of the scores",
    "score_change": "score_change: what mixing and biases add to the scores, as a share",
    "residual": "residual: how different the tokens of a text are after the last layer, 0 equal",
}


@dataclass(frozen=True)
class StudyReport:
    """Hold everything that a report shows; `decoding` is the result of `read_decode_times`."""

    results: StudyResults
    scores: Mapping[PairKey, VariantScore]
    comparisons: Mapping[PairKey, Comparison]
    environment: Mapping[str, Any]
    decoding: Mapping[str, Any]

    @property
    def claims(self) -> list[str]:
        """List the sentences that the tests support: one for each comparison, and one for the
        baseline of each task.
        """
        study = self.results.study
        if len(study.seeds) < MIN_SEEDS_TO_CLAIM:
            seeds = pluralise(len(study.seeds), "seed")
            return [f"With {seeds} no difference is claimed; give at least {MIN_SEEDS_TO_CLAIM}."]
        claims: list[str] = []
        for task in study.tasks.values():
            baseline = self.scores[study.baseline, task.name]
            claims.append(
                f"{task.name}: {study.baseline} reaches {task.metric} "
                f"{format_number(baseline.mean.value)} (mean of {len(baseline.values)} seeds)."
            )
            for (name, of_task), one in self.comparisons.items():
                if of_task == task.name:
                    label = f"{name} minus {study.baseline}" if name in study.variants else name
                    verdict = "significant" if one.is_significant else "not significant"
                    claims.append(
                        f"{task.name}: {label}: {format_difference(one.difference)}, p "
                        f"{format_p(one.corrected_p)}, {verdict}."
                    )
        return claims

    @property
    def verdict(self) -> StudyVerdict:
        """Judge what the study file expects, by rules."""
        return judge_study(self.results.study, self.scores, self.comparisons)

    @property
    def failures(self) -> list[str]:
        """List one line for each cell without metrics."""
        return [
            f"{one.cell.variant} on {one.cell.task}, lr {one.cell.rate:g}, seed {one.cell.seed}: "
            f"{one.result['status']}: {one.result.get('message', '')}"
            for one in self.results.cells
            if not one.is_done
        ]

    @property
    def page(self) -> Page:
        """Make the report as one page."""
        study = self.results.study
        claims: list[Item] = [self.claims]
        sections = [Section(CLAIMS_TITLE, claims)]
        is_judged = any(contrast.expected for contrast in study.contrasts)
        if is_judged and len(study.seeds) >= MIN_SEEDS_TO_CLAIM:
            sections.insert(0, Section("Verdict, by rules", [self.verdict.sentences]))
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

    def tables(self, task: StudyTask) -> list[Table]:
        """List the tables of a task that have rows."""
        variants = self.results.study.variants
        cells = {variant: self.results.done_cells(variant, task.name) for variant in variants}
        tables = (
            self._score_table(task, cells),
            self._contrast_table(task),
            self._slice_table(task, cells),
            self._edit_table(task),
            tabulate_heads(task, cells),
            tabulate_gates(task, cells),
        )
        return [table for table in tables if table.rows]

    def _score_table(self, task: StudyTask, cells: CellsByVariant) -> Table:
        """Tabulate size, metric, difference from the baseline and success of every variant."""
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
        best: list[tuple[int, int]] = []
        for variant in cells:
            key = (variant, task.name)
            score = self.scores[key]
            model = results.grid.models[key]
            compared = score.comparison
            times = [one.result["timing"].get("step", math.nan) for one in cells[variant]]
            row: list[Value] = [
                variant,
                model.parameters,
                float(model.step_flops),
                model.kv_bytes,
                results.rates.get(key, math.nan),
                score.mean,
                "; ".join([str(len(score.values)), *score.failures]),
                score.seed_deviation,
                score.test_error,
                compared.difference if compared else None,
                compared.corrected_p if compared else None,
                median_time(times),
                score.success_rate,
                score.steps_to_threshold,
            ]
            best += [(len(rows), 5)] if score.is_best else []
            rows.append(row[: len(columns)])
        direction = "higher" if task.sign > 0 else "lower"
        chance = format_number(task.task.chance.get(task.metric, math.nan))
        notes = (
            f"{task.metric}: {direction} is better; chance {chance}.",
            "p from a paired t test over seeds, corrected for all comparisons of the study (Holm); "
            f"bold: the best, and significantly so at {SIGNIFICANCE:g}. Seeds without spread have "
            "neither interval nor p.",
            "Test error: standard error from the finite test set. s/step: processor seconds of a "
            "training step, the median over seeds; none if their quartiles spread by over 20 %.",
        )
        return Table(task.name, columns, rows, notes, frozenset(best))

    def _contrast_table(self, task: StudyTask) -> Table:
        """Tabulate the contrasts that the study planned, on one task."""
        rows: list[list[Value]] = []
        study = self.results.study
        for contrast in study.contrasts:
            one = self.comparisons.get((contrast.key(study.baseline), task.name))
            if one is not None:
                p = one.corrected_p
                row: list[Value] = [contrast.name, contrast.expected or None, one.difference]
                rows.append([*row, len(one.pairs), p, one.is_significant])
        columns = [
            "contrast",
            "expected",
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
        table = Table(f"{task.name}, planned contrasts", columns, rows, notes)
        return table.without_empty_columns()

    def _slice_table(self, task: StudyTask, cells: CellsByVariant) -> Table:
        """Tabulate the metric on each part of the test set and on each further test."""
        metrics: dict[str, list[dict[str, Any]]] = {}
        slices = set[str]()
        for variant, of_variant in cells.items():
            metrics[variant] = [one.result["metrics"] for one in of_variant]
            slices.update(*metrics[variant])
        parts = [name for name in slices if name.startswith(f"{task.metric}@")]
        parts = sorted(parts, key=lambda name: (len(name), name))
        rows: list[list[Value]] = []
        for variant in cells if parts or task.tests else ():
            row: list[Value] = [variant, *(_mean_of(metrics[variant], name) for name in parts)]
            tests = [Readout.for_variant(variant, "on", test) for test in task.tests]
            rows.append([*row, *(mean_of_seeds(self.results, task, one) for one in tests)])
        columns = ["variant", *parts, *(f"test {test}" for test in task.tests)]
        note = f"{task.metric}: means over seeds; on tests with 95 % intervals."
        return Table(f"{task.name}, by part and test", columns, rows, (note,))

    def _edit_table(self, task: StudyTask) -> Table:
        """Tabulate the metric after each edit of the trained models."""
        edits = self.results.study.edits
        rows: list[list[Value]] = []
        for variant in self.results.study.variants if edits else ():
            after = [Readout.for_variant(variant, "after", edit) for edit in edits]
            readouts = [Readout.for_variant(variant), *after]
            rows.append([variant, *(mean_of_seeds(self.results, task, one) for one in readouts)])
        notes = ["Means over seeds with 95 % intervals."]
        notes += [f"{name}: {edit.description}." for name, edit in edits.items()]
        columns = ["variant", "not edited", *edits]
        return Table(f"{task.name}, {task.metric} after edits", columns, rows, notes)

    def _size_table(self) -> Table:
        """Tabulate counted against built parameters, and how each variant was matched."""
        rows: list[list[Value]] = []
        for (variant, task), model in self.results.grid.models.items():
            cells = self.results.done_cells(variant, task)
            built = cells[0].result.get("parameters") if cells else None
            rows.append([task, variant, model.parameters, built, model.match])
        columns = ["task", "variant", "parameters by formula", "of the built model", "matching"]
        return Table("", columns, rows).without_empty_columns()


def tabulate_heads(task: StudyTask, cells: CellsByVariant) -> Table:
    """Tabulate mean head measures and the number of heads of each class.

    Covers the trained model, before and during training, and further tests.
    """
    rows: list[list[Value]] = []
    for variant, of_variant in cells.items():
        places = set[str]().union(*(one.result.get("heads_at", {}) for one in of_variant))
        summaries = {"trained": [one.result["heads"] for one in of_variant]}
        ordered = sorted(
            places, key=lambda place: (not place.startswith("step "), len(place), place)
        )
        for place in ordered:
            summaries[place] = [one.result["heads_at"].get(place, {}) for one in of_variant]
        for place, of_place in summaries.items():
            measured = [one for one in of_place if "heads" in one]
            notes = [one["note"] for one in of_place if "note" in one]
            if measured:
                flat = [
                    {**one, **one.get("measures", {}), "residual": one["residual"][-1]}
                    for one in measured
                ]
                means = [_mean_of(flat, name) for name in HEAD_NUMBERS]
                totals = Counter[str]()
                for one in measured:
                    totals.update(one.get("classes", {}))
                counts = [f"{n / len(measured):.3g} {name}" for name, n in totals.most_common()]
                counts += dict.fromkeys(notes)
                rows.append([variant, place, *means, ", ".join(counts)])
            elif place == "trained" and notes:
                rows.append([variant, place, *([None] * len(HEAD_NUMBERS)), notes[0]])
    if all(set(row[2:-1]) == {None} for row in rows):
        rows = []
    columns = [Column(name, format_number) for name in HEAD_NUMBERS]
    columns = ["variant", "heads", *columns, "classes, mean over seeds"]
    table = Table(f"{task.name}, what heads do", columns, rows).without_empty_columns()
    shown = [COLUMN_NOTES.get(column.name) for column in table.column_list]
    return replace(table, notes=["Means over heads and seeds.", *filter(None, shown)])


def tabulate_gates(task: StudyTask, cells: CellsByVariant) -> Table:
    """Tabulate the share of tokens for which each gated head is on."""
    rows: list[list[Value]] = []
    for variant, of_variant in cells.items():
        gates = [one.result["heads"].get("gates", {}) for one in of_variant]
        for site in gates[0] if gates else ():
            means = np.mean([one[site] for one in gates if site in one], axis=0)
            rows.append(
                [variant, site, ", ".join(f"{mean:.2f}" for mean in means), float(means.sum())]
            )
    columns = ["variant", "attention", "share of tokens for which each head is on", "heads on"]
    return Table(f"{task.name}, load of gated heads", columns, rows, ("Means over seeds.",))


def tabulate_decoding(decoding: Mapping[str, Any]) -> Table:
    """Tabulate milliseconds of a decode step and bytes of the cache, by variant and context."""
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


def _mean_of(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Average a value over the records that have it."""
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None


# --- Files ----------------------------------------------------------------------------------------


def describe_protocol(report: StudyReport) -> list[str]:
    """Describe how the study was run, one fact a line."""
    results = report.results
    study = results.study
    grid = results.grid
    count = sum(one.stage == REPORT for one in results.cells)
    seconds = sum(one.result.get("timing", {}).get("processor", math.nan) for one in results.cells)
    tried = {(variant.name, task.name): grid.rates(variant, task) for variant, task in grid.pairs}
    rates = set[float]().union(*tried.values())
    highest = [
        rate == max(tried[pair]) for pair, rate in results.rates.items() if len(tried[pair]) > 1
    ]
    recipes = {f"{one.steps} steps of {one.batch} examples" for one in grid.recipes.values()}
    facts = {
        "scale": study.scale,
        "training": ", ".join(sorted(recipes)),
        "sizes matched by": study.match,
        "report seeds": ", ".join(map(str, study.seeds)),
        "learning rates": ", ".join(f"{rate:g}" for rate in sorted(rates)),
        "seed whose validation metric chooses the rate": study.tuning_seed,
        "chosen rates that are the highest tried": f"{sum(highest)} of {len(highest)}",
        "report cells": count,
        "tuning cells": len(results.cells) - count,
        "processor time": format_seconds(seconds),
    }
    for task in study.tasks.values():
        options = describe_task(task.task)
        texts = [f"{name} {options[name]}" for name in options if name not in ("task", "seed")]
        facts[f"task {task.name}"] = ", ".join(texts)
    return [f"{name}: {value}" for name, value in (facts | dict(report.environment)).items()]


def tabulate_cells(cells: Sequence[CellResult]) -> Table:
    """Tabulate one row for each cell and metric."""
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


def write_report(results: StudyResults, out: Path | str) -> StudyReport:
    """Write report.md, report.html and results.csv to the folder report of a study; nothing is
    trained.
    """
    folder = check_output(out, STUDY_FOLDER, "continue")
    path = folder / ENVIRONMENT_FILE
    if not path.exists():
        environment = {
            "headwise": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": this_machine().processor,
            "threads of a cell": 1,
        }
        write_atomically(path, json.dumps(environment, indent=1).encode() + b"\n")
    comparisons = compare_seeds(results)
    report = StudyReport(
        results,
        score_variants(results, comparisons),
        comparisons,
        read_json_file(path),
        read_decode_times(results.grid, folder),
    )
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

"""Findings of studies: `python tools/study_findings.py RUNS NAME...` writes
docs/findings/study-NAME.md with figures.

RUNS is the folder of the stored runs; that of studies/NAME.toml is in RUNS/NAME, at the scale
"page", or the one in `SCALES`. Cells without a result there are trained, so that an interrupted run
goes on. The verdict of each study, which a person writes after reading its numbers, is in
tools/study_verdicts.toml.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.report import plots, render
from headwise.studies.process_engine import ProcessEngine
from headwise.studies.study_figures import draw_differences, draw_lengths
from headwise.studies.study_file import Study, read_study
from headwise.studies.study_report import (
    StudyReport,
    describe_protocol,
    tabulate_decoding,
    write_report,
)
from headwise.studies.study_runner import run_study
from headwise.util.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
FINDINGS = ROOT / "docs" / "findings"
SCALE, JOBS = "page", 1
SCALES = {"variants": "small"}  # studies whose page is made at another scale
ABOUT_DECODING = ("attention-vs-rnn-vs-conv",)  # studies whose page shows decode times
PAGE = """# Study: {name}

{hypothesis}

{verdict}

## What can be claimed

{claims}

{figures}

## What was not tested

{limits}

## Results

{tables}

## Protocol and environment

    headwise study studies/{name}.toml --scale {scale} --jobs {jobs} --out RUNS/{name}
    python tools/study_findings.py RUNS {name}

{protocol}
"""
LIMITS = (
    "The models are small ({parameters} parameters) and are trained for {steps} steps on {tasks}: "
    "what is shown holds "
    "for this size and this task. What is not significant may become so with more seeds or longer "
    "training. "
    "[Studies](../studies.md) explains the protocol, and [{name}](../../studies/{name}.toml) is "
    "the study file."
)


def write_page(name: str, runs: Path) -> Path:
    """Write the page of one study from its stored run; returns its path."""
    study = read_study(ROOT / "studies" / f"{name}.toml", SCALES.get(name, SCALE))
    results = run_study(
        study, runs / name, ProcessEngine(JOBS), progress=lambda line: print(line, file=sys.stderr)
    )
    report = write_report(results, runs / name)
    verdicts = tomllib.loads((ROOT / "tools" / "study_verdicts.toml").read_text(encoding="utf-8"))
    tables = [table for task in study.tasks.values() for table in report.tables(task)]
    if name in ABOUT_DECODING and report.decoding.get("variants"):
        tables.append(tabulate_decoding(report.decoding))
    page = PAGE.format(
        name=name,
        scale=study.scale,
        jobs=JOBS,
        hypothesis=_fill(f"**Hypothesis, stated before the runs.** {study.hypothesis}"),
        verdict=_fill(f"**Verdict, written after them.** {verdicts[name]}"),
        claims=_list(report.claims),
        figures="\n\n".join(_write_figures(report)),
        limits=_list(_list_limits(report)),
        tables="\n\n".join(render.to_markdown(table, level=3) for table in tables),
        protocol=_list([*report.failures, *describe_protocol(report)]),
    )
    path = FINDINGS / f"study-{name}.md"
    path.write_text(page, encoding="utf-8")
    return path


def _write_figures(report: StudyReport) -> Iterator[str]:
    """Write the figures of the page beside it; yields the lines that show them."""
    results, name = report.results, report.results.study.name
    for task in results.study.tasks.values():
        scores = {variant: report.scores[variant, task.name] for variant in results.study.variants}
        drawings = {
            "differences": draw_differences(results, task, report.comparisons),
            "lengths": draw_lengths(results, task, scores),
        }
        for kind, figures in drawings.items():
            for figure in figures:
                file = f"study-{name}-{task.name}-{kind}.svg"
                write_atomically(FINDINGS / file, plots.to_svg(figure).encode())
                yield f"![{figure.title}]({file})\n\n{_fill(figure.title)}"


def _list_limits(report: StudyReport) -> Iterator[str]:
    """What the page does not show: the size of its models, and what the scale leaves out of the
    study file.
    """
    study, grid = report.results.study, report.results.grid
    full = read_study(ROOT / "studies" / f"{study.name}.toml")
    sizes = [model.size.parameters for model in grid.models.values()]
    steps = [recipe.steps for recipe in grid.recipes.values()]
    yield LIMITS.format(
        name=study.name,
        tasks=", ".join(study.tasks),
        parameters=" to ".join(dict.fromkeys((f"{min(sizes):,}", f"{max(sizes):,}"))),
        steps=" to ".join(dict.fromkeys((f"{min(steps):,}", f"{max(steps):,}"))),
    )
    for kind, before, after in _left_out(full, study):
        if missing := [one for one in before if one not in after]:
            yield (
                f"{kind} of the study file that were left out at this scale: {', '.join(missing)}."
            )
    if len(full.rates) > 1 and len(study.rates) == 1:
        rates = ", ".join(f"{rate:g}" for rate in full.rates)
        yield (
            f"A single learning rate, {study.rates[0]:g}, although the study file tries {rates} "
            "for each variant."
        )


def _left_out(
    full: Study, study: Study
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    yield "Tasks", full.tasks, study.tasks
    yield "Variants", full.variants, study.variants
    yield "Edits", full.edits, study.edits
    for name, task in study.tasks.items():
        yield f"Tests on {name}", full.tasks[name].tests, task.tests


def _fill(text: str) -> str:
    return "\n\n".join(textwrap.fill(part, 118) for part in text.strip().split("\n\n"))


def _list(lines: Iterable[str]) -> str:
    return "\n".join(textwrap.fill(f"- {line}", 118, subsequent_indent="  ") for line in lines)


def main(argv: list[str]) -> int:
    """Write the pages of the studies that are named."""
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    for name in argv[1:]:
        print(write_page(name, Path(argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Findings of studies: `python tools/study_findings.py RUNS NAME...` writes docs/findings/study-NAME.md.

RUNS is the folder of the stored runs; that of studies/NAME.toml is in RUNS/NAME, at the scale "page". Cells without a
result there are trained, so that an interrupted run goes on.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from headwise.studies.process_engine import ProcessEngine
from headwise.studies.study_file import read_study
from headwise.studies.study_report import render_markdown, write_report
from headwise.studies.study_runner import run_study

ROOT = Path(__file__).resolve().parents[1]
SCALE = "page"
PAGE = """# Study: {name}

{about}

    headwise study studies/{name}.toml --scale page --jobs {jobs} --out RUNS/{name}
    python tools/study_findings.py RUNS {name}

{report}"""
ABOUT = (
    "This page is the report of the study [{name}](../../studies/{name}.toml), made from a stored run on one processor "
    "core. The scale is small: {cells} models of {parameters} parameters, trained on {tasks} for {steps} steps each; "
    "what the hypothesis says about other tasks was not run. A difference "
    "that is not significant here may be so with more seeds or longer training, and what is significant here is shown "
    "for this task and this size only. [Studies](../studies.md) explains the protocol."
)
JOBS = 0


def write_page(name: str, runs: Path) -> Path:
    """Write the page of one study from its stored run; returns its path."""
    study = read_study(ROOT / "studies" / f"{name}.toml", SCALE)
    results = run_study(study, runs / name, ProcessEngine(JOBS), progress=lambda line: print(line, file=sys.stderr))
    report = write_report(results, runs / name)
    sizes = [model.size.parameters for model in results.grid.models.values()]
    steps = {recipe.steps for recipe in results.grid.recipes.values()}
    about = ABOUT.format(
        name=name,
        cells=len(results.cells),
        tasks=" and ".join(study.tasks),
        parameters=" to ".join(dict.fromkeys((f"{min(sizes):,}", f"{max(sizes):,}"))),
        steps=" to ".join(f"{one:,}" for one in sorted({min(steps), max(steps)})),
    )
    body = render_markdown(report).split("\n", 2)[2]
    page = ROOT / "docs" / "findings" / f"study-{name}.md"
    page.write_text(PAGE.format(name=name, about=textwrap.fill(about, 118), jobs=JOBS, report=body), encoding="utf-8")
    return page


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

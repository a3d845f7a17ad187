"""`headwise study`: train variants of attention on tasks over several seeds, and report which
differences are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ..util.output_paths import check_output
from .arguments import DeviceOptions, parse_assignments, print_note, print_page, print_result
from .options import InputFile, Natural, Positive, UsageError, options

if TYPE_CHECKING:
    from ..studies.cells import Cell


@options
class StudyOptions(DeviceOptions):
    """Train variants of attention on tasks, over several seeds, and report which differences are
    real. A study file names variants, tasks, seeds and learning rates. A study that was stopped
    goes on when it is run again.

    FILE  a study file (.toml)
    --scale NAME  a scale of the file, such as smoke, small or base
    --out DIR  folder of the results (default: runs/studies/NAME-SCALE)
    --plan  print the cost of every cell and train nothing
    --only GLOB  run only these cells, as TASK/VARIANT/SEED, such as 'recall/*'; repeatable
    --set KEY=VALUE  change a key of the file, as in recipe.steps=100; repeatable
    --jobs COUNT  processes (default: one for each processor)
    --engine NAME  local: processes of this machine; ray: a cluster of several (default: local)
    --address HOST:PORT  Ray cluster (default: start one here)
    --budget HOURS  refuse a study that is predicted to take longer
    --device NAME  cpu, auto, cuda, ...; on a GPU, cells are not exactly repeatable (default: cpu)
    --json  print one JSON document instead of text

    examples:
    headwise study studies/variants.toml --scale smoke
    headwise study studies/variants.toml --plan
    """

    command = "study"
    names = {"--set": "changes"}
    choices = {"engine": "local ray"}
    needs = {"address": "engine"}
    file: InputFile
    scale: str = "small"
    out: str | None = None
    plan: bool = False
    only: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    jobs: Natural | None = None
    engine: str = "local"
    address: str = ""
    budget: Positive | None = None
    device: str | None = "cpu"
    json: bool = False

    def check(self) -> None:
        """Refuse an engine that would run cells in this process."""
        if self.engine == "ray" and self.jobs == 0:
            raise UsageError(
                "--jobs 0 runs cells in this process, which --engine ray does not; give 1 or more"
            )


def main(argv: list[str]) -> int:
    """Plan or run a study. Finished cells are not run again."""
    args = StudyOptions.parse(argv)
    from ..kernels.devices import resolve_device
    from ..report.render import to_text
    from ..studies.process_engine import ProcessEngine, RayEngine
    from ..studies.study_file import read_study
    from ..studies.study_report import REPORT_FOLDER, STUDY_REPORT, write_report
    from ..studies.study_runner import STUDY_FOLDER, plan_study, run_study, tabulate_plan

    study = read_study(
        args.file, args.scale, parse_assignments(args.changes, "--set recipe.steps=100")
    )
    study = replace(
        study, device=str(resolve_device("auto" if args.device is None else args.device))
    )
    out = args.out or f"runs/studies/{study.name}-{study.scale}"
    check_output(out, STUDY_FOLDER, "continue")
    check_output(Path(out, REPORT_FOLDER), STUDY_REPORT, "overwrite")
    if args.plan or args.budget is not None:
        plan = plan_study(study, ProcessEngine(args.jobs), print_note)
        if args.budget is not None:
            plan.check_budget(args.budget)
        if args.plan:
            sizes = {"study": study.name, "scale": study.scale, "seconds": plan.seconds}
            print_result(args, to_text(tabulate_plan(plan)), sizes | {"cells": plan.data})
            return 0
    out = Path(out)
    local = args.engine == "local"
    engine = ProcessEngine(args.jobs) if local else RayEngine(args.address, args.jobs)
    try:
        results = run_study(study, out, engine, _make_filter(args.only), print_note)
    except KeyboardInterrupt:
        print_note(f"headwise: interrupted; run the same command to go on in {out}")
        raise
    report = write_report(results, out)
    lines = [f"{study.name}, scale {study.scale}", "", *report.claims, "", *report.failures]
    data = {"out": str(out), "claims": report.claims, "failures": report.failures}
    print_result(args, "\n".join(lines).rstrip(), data)
    if not args.json:
        page = out / REPORT_FOLDER / "report.html"
        print_page(f"\n{page}\n  The report, with figures; report.md and results.csv beside it.")
    return 0


def _make_filter(patterns: Sequence[str]) -> Callable[[Cell], bool]:
    """Return a test for cells that match any of the patterns; without patterns, all match."""

    def is_chosen(cell: Cell) -> bool:
        names = (f"{cell.task}/{cell.variant}/{cell.seed}", cell.id)
        pairs = product(names, patterns or ("*",))
        return any(name == pattern or fnmatchcase(name, pattern) for name, pattern in pairs)

    return is_chosen

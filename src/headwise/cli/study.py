"""`headwise study`: train variants of attention on tasks over several seeds, and report which
differences are real.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output_paths import check_output
from .argument_checks import check_engine, check_input_file
from .arguments import (
    add_engine_arguments,
    add_json_argument,
    add_set_argument,
    parse_value,
    print_note,
    print_page,
    to_json,
)
from .command_parser import CommandParser, UsageError

if TYPE_CHECKING:
    from ..studies.cells import Cell
    from ..studies.process_engine import CellEngine
    from ..studies.study_plan import StudyPlan


def main(argv: list[str]) -> int:
    """Plan or run a study; cells that were finished before are not run again."""
    args = _parser().parse_args(argv)
    _check_arguments(args)
    from ..studies.process_engine import ProcessEngine
    from ..studies.study_file import read_study
    from ..studies.study_plan import format_plan, plan_study
    from ..studies.study_report import REPORT_FOLDER, STUDY_REPORT, write_report
    from ..studies.study_runner import STUDY_FOLDER, run_study

    study = read_study(args.file, args.scale, _parse_overrides(args.changes))
    out = args.out or f"runs/studies/{study.name}-{study.scale}"
    check_output(out, STUDY_FOLDER, "continue")
    check_output(Path(out, REPORT_FOLDER), STUDY_REPORT, "overwrite")
    if args.plan or args.budget is not None:
        plan = plan_study(study, ProcessEngine(args.jobs), print_note)
        if args.budget is not None:
            plan.check_budget(args.budget)
        if args.plan:
            print_page(to_json(_plan_data(plan)) if args.json else format_plan(plan))
            return 0
    out = Path(out)
    try:
        results = run_study(study, out, _make_engine(args), _make_filter(args.only), print_note)
    except KeyboardInterrupt:
        print_note(f"headwise: interrupted; run the same command to go on in {out}")
        raise
    report = write_report(results, out)
    if args.json:
        print_page(to_json({"out": str(out), "claims": report.claims, "failures": report.failures}))
    else:
        print_page(
            "\n".join(
                [f"{study.name}, scale {study.scale}", "", *report.claims, "", *report.failures]
            ).rstrip()
        )
        page = out / REPORT_FOLDER / "report.html"
        print_page(f"\n{page}\n  The report, with figures; report.md and results.csv beside it.")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "study",
        "Train variants of attention on tasks, over several seeds, and report which differences "
        "are real. A study file "
        "names variants, tasks, seeds and learning rates. A study that was stopped goes on when "
        "it is run again.",
        "headwise study studies/variants.toml --scale smoke",
        "headwise study studies/variants.toml --plan",
    )
    parser.add_argument("file", metavar="FILE", help="a study file (.toml)")
    parser.add_argument(
        "--scale",
        default="small",
        metavar="NAME",
        help="a scale of the file, such as smoke, small or base",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the results (default: runs/studies/NAME-SCALE)"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print the cost of every cell and train nothing"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GLOB",
        help="run only these cells, as TASK/VARIANT/SEED, such as 'recall/*'; repeatable",
    )
    add_set_argument(parser, "change a key of the file, as in recipe.steps=100; repeatable")
    parser.add_argument(
        "--jobs", type=int, metavar="COUNT", help="processes (default: one for each processor)"
    )
    add_engine_arguments(
        parser, "local: processes of this machine; ray: a cluster of several (default: local)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="HOURS",
        help="refuse a study that is predicted to take longer",
    )
    add_json_argument(parser)
    return parser


def _check_arguments(args: argparse.Namespace) -> None:
    check_input_file("FILE", args.file)
    if args.jobs is not None and args.jobs < 0:
        raise UsageError(
            f"--jobs {args.jobs} is negative; give 1 or more, or 0 to run in this process"
        )
    check_engine(args)
    if args.engine == "ray" and args.jobs == 0:
        raise UsageError(
            "--jobs 0 runs cells in this process, which --engine ray does not; give 1 or more"
        )
    if args.budget is not None and not args.budget > 0:
        raise UsageError(f"--budget {args.budget:g} is no number of hours; give a number above 0")


def _make_engine(args: argparse.Namespace) -> CellEngine:
    if args.engine == "ray":
        from ..studies.ray_engine import RayEngine

        return RayEngine(args.address, args.jobs)
    from ..studies.process_engine import ProcessEngine

    return ProcessEngine(args.jobs)


def _parse_overrides(changes: list[str]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"--set {change!r} is not KEY=VALUE; write it as in --set recipe.steps=100"
            )
        overrides[key.strip()] = parse_value(text)
    return overrides


def _make_filter(patterns: list[str]) -> Callable[[Cell], bool]:
    """Whether a cell matches one of the patterns; without patterns all do."""

    def is_chosen(cell: Cell) -> bool:
        name = f"{cell.task}/{cell.variant}/{cell.seed}"
        return not patterns or any(
            fnmatchcase(name, pattern) or cell.id == pattern for pattern in patterns
        )

    return is_chosen


def _plan_data(plan: StudyPlan) -> dict[str, Any]:
    return {
        "study": plan.study.name,
        "scale": plan.study.scale,
        "seconds": plan.seconds,
        "cells": plan.data,
    }

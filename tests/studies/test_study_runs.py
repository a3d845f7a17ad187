"""Runs of a study: the same bytes after kill -9, killed processes, cells that
fail, and the report.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from headwise.cli import main
from headwise.report.text import format_interval, format_number
from headwise.studies import process_engine
from headwise.studies.cells import Cell
from headwise.studies.process_engine import ProcessEngine
from headwise.studies.study_file import Study, read_study
from headwise.studies.study_report import StudyReport, describe_protocol, write_report
from headwise.studies.study_runner import RESULTS_FILE, StudyResults, plan_study, run_study
from headwise.util.errors import SpecError
from headwise.util.files import FolderLock
from studies import dying_cells

pytestmark = pytest.mark.usefixtures("unrendered_figures")

FILE = """
hypothesis = "A window of 3 recalls less than full attention; <script>alert(1)</script>"
match = "params"
seeds = [1, 2, 3]
head_texts = 2
contrasts = [["near on longer", "mha on longer"], ["learning of gqa", "learning of mha"]]

[recipe]
steps = 6
batch = 4
lr = [0.001, 0.01]
evaluate_every = 3
evaluate_batches = 1

[variants.mha]
[variants.gqa]
recipe = { lr = 0.003 }
[variants.near]
options = { pattern = "window(3)" }

[tasks.recall]
vocabulary = 16
length = 16
pairs = [2, 3]
threshold = 0.1
tests.longer = { length = 32, pairs = 4 }
"""
IN_THIS_PROCESS = 0


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "small.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def study(study_file: Path) -> Study:
    return read_study(study_file)


@pytest.fixture(scope="module")
def finished(study, tmp_path_factory) -> tuple[StudyResults, StudyReport, Path]:
    folder = tmp_path_factory.mktemp("finished")
    results = run_study(study, folder, ProcessEngine(IN_THIS_PROCESS))
    return results, write_report(results, folder), folder


def test_a_finished_study_is_not_run_again(study, finished, monkeypatch):
    _, _, folder = finished
    before = (folder / RESULTS_FILE).read_bytes()
    monkeypatch.setattr(
        process_engine, "run_cell", lambda *_: pytest.fail("a finished cell was run again")
    )
    again = run_study(study, folder, ProcessEngine(IN_THIS_PROCESS))
    assert (folder / RESULTS_FILE).read_bytes() == before
    assert len(again.cells) == 4 + 9  # learning rates of two variants, three seeds of three


def test_metrics_are_those_of_the_trained_model(finished: tuple[StudyResults, StudyReport, Path]):
    results, _, folder = finished
    cell = results.report_cells("mha", "recall")[0]
    record = json.loads((folder / "cells" / cell.cell.id / "run" / "final.json").read_text())
    assert cell.result["metrics"] == record["metrics"]
    assert cell.result["parameters"] == results.grid.models["mha", "recall"].parameters
    assert [point["step"] for point in cell.result["curve"]] == [3, 6]
    assert 0 <= cell.result["tests"]["longer"]["accuracy"] <= 1
    assert not (folder / "cells" / cell.cell.id / "run" / "checkpoint").exists()
    assert not list((folder / "cells").glob("*/run/curves*.svg"))
    times = cell.result["timing"]
    assert 0 < 6 * times["step"] < times["processor"]


def test_the_report_says_how_many_chosen_rates_are_the_highest_tried(finished):
    results, report, _ = finished
    highest = [results.rates[name, "recall"] for name in ("mha", "near")].count(0.01)
    fact = f"chosen rates that are the highest tried: {highest} of 2"  # gqa has one rate
    assert fact in describe_protocol(report)


def test_kill_and_resume_give_the_same_bytes(study_file, study, finished, tmp_path):
    command = [
        *(sys.executable, "-m", "headwise", "study"),
        str(study_file),
        "--out",
        str(tmp_path / "out"),
        "--jobs",
        "2",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    cells = tmp_path / "out" / "cells"
    deadline = time.monotonic() + 400
    while (
        len(list(cells.glob("*/result.json"))) < 2
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = len(list(cells.glob("*/result.json")))
    assert 2 <= done < 13
    run_study(study, tmp_path / "out", ProcessEngine(IN_THIS_PROCESS))
    assert (tmp_path / "out" / RESULTS_FILE).read_bytes() == (
        finished[2] / RESULTS_FILE
    ).read_bytes()


def test_killed_processes_are_replaced(study, finished, tmp_path, monkeypatch):
    monkeypatch.setattr(process_engine, "_run_marked", dying_cells.run_or_die)
    cells = [one.cell for one in finished[0].report_cells("gqa", "recall")][:2]
    with ProcessEngine(1) as engine:
        results = {cell.seed: result for cell, result in engine.run_cells(cells, tmp_path)}
    assert results[1]["metrics"] == finished[0].report_cells("gqa", "recall")[0].result["metrics"]
    assert results[2]["status"] == "killed"
    assert "3 times" in results[2]["message"]


def test_a_cell_that_runs_beside_one_that_dies_is_not_blamed(tmp_path, monkeypatch):
    def run_in_pool(
        _: ProcessEngine, pending: dict[str, Cell], folder: Path
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        for cell in pending.values():
            (folder / cell.id).mkdir(exist_ok=True)
            (folder / cell.id / process_engine.STARTED_FILE).touch()
        if any(cell.seed == 2 for cell in pending.values()):
            raise BrokenProcessPool
        for cell in pending.values():
            yield cell, {"status": "done"}

    monkeypatch.setattr(ProcessEngine, "_run_in_pool", run_in_pool)
    cells = [Cell("gqa", "recall", 1e-3, seed, {"seed": seed}) for seed in (1, 2)]
    results = {
        cell.seed: result["status"] for cell, result in ProcessEngine(2).run_cells(cells, tmp_path)
    }
    assert results == {1: "done", 2: "killed"}


@pytest.mark.slow
def test_workers_that_cannot_start(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(process_engine, "_run_marked", dying_cells.die_before_the_cell)
    cells = [one.cell for one in finished[0].report_cells("gqa", "recall")][:1]
    with (
        ProcessEngine(1) as engine,
        pytest.raises(OSError, match=r"ended 3 times before .* --jobs 0"),
    ):
        list(engine.run_cells(cells, tmp_path))


def test_cells_that_fail_are_recorded(study, tmp_path, monkeypatch):
    for error, status in [
        (MemoryError(), "out of memory"),
        (SpecError("no such option"), "failed"),
    ]:
        monkeypatch.setattr("headwise.studies.run_cell._train_and_test", _raising(error))
        results = run_study(
            study, tmp_path / status.replace(" ", ""), ProcessEngine(IN_THIS_PROCESS)
        )
        assert {one.result["status"] for one in results.cells} == {status}
        report = write_report(results, tmp_path / status.replace(" ", ""))
        assert len(report.failures) == len(results.cells)


def _raising(error: Exception) -> Callable[..., dict[str, Any]]:
    def run(*_: object) -> dict[str, Any]:
        raise error

    return run


def test_the_report(finished: tuple[StudyResults, StudyReport, Path]):
    results, report, folder = finished
    page, text = (
        (folder / "report" / "report.html").read_text(),
        (folder / "report" / "report.md").read_text(),
    )
    mean = format_interval(*report.scores["mha", "recall"].mean[:3])
    assert mean in page
    assert mean.replace("[", "\\[").replace("]", "\\]") in text
    assert "<script" not in page
    assert "//" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "").replace(
        'xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    # seeds, differences, costs, losses, length of the test, decoding; each in light and dark
    assert page.count("<svg") == 2 * 6
    measured = json.loads((folder / "decoding.json").read_text())["variants"]["gqa"][-1]
    assert measured["formula"] == measured["held"]
    assert f"| {measured['held']:,} | {measured['formula']:,} |" in text
    assert all(claim in text.replace("\\", "") for claim in report.claims)
    for place in ("step 0", "test longer"):
        summaries = [one.result["heads_at"][place] for one in results.report_cells("gqa", "recall")]
        entropy = sum(one["measures"]["entropy"] for one in summaries) / len(summaries)
        assert f"| gqa | {place} | {format_number(entropy)} |" in text
    name = "near on longer minus mha on longer"
    difference = report.comparisons[name, "recall"].difference
    shown = format_interval(*difference[:3], sign="+")
    assert f"recall: {name}: {shown}, p " in " ".join(report.claims)
    assert f'<td class="left">{name}</td><td>{shown}</td><td>3</td>' in page
    assert "share reached 0.1" in text
    rows = (folder / "report" / "results.csv").read_text().splitlines()
    cell = results.report_cells("gqa", "recall")[0]
    value = cell.result["metrics"]["accuracy"]
    assert f"{cell.cell.id},report,recall,gqa,0.003,1,done,accuracy,{value!r}" in rows
    for model in results.grid.models.values():  # formulas and built models agree
        assert f"| {model.parameters:,} | {model.parameters:,} |" in text


def test_plan_and_budget(study: Study):
    lines: list[str] = []
    plan = plan_study(study, ProcessEngine(IN_THIS_PROCESS), lines.append)
    assert [line.split()[0] for line in lines] == ["starting", *["timing"] * len(plan.prices)]
    assert plan.num_cells == 13
    assert all(price.seconds and price.seconds > 0 for price in plan.prices)
    assert plan.prices[0].flops == 6 * plan.prices[0].model.step_flops
    with pytest.raises(SpecError, match="more than the budget of 1e-06 h"):
        plan.check_budget(1e-6)


def test_a_plan_counts_the_steps_of_edits_and_runs_none(study_file: Path, tmp_path: Path):
    path = tmp_path / "edited.toml"
    table = '[edits.{}]\nchange = "prune"\nshare = 0.5\nranking = "gates"\n'
    steps = "gate_steps = 400_000_000\nsteps = 600_000_000\n"
    path.write_text(FILE + table.format("half") + steps)
    seconds = [
        plan_study(read_study(one), ProcessEngine(IN_THIS_PROCESS)).prices[0].seconds
        for one in (study_file, path)
    ]
    plain, edited = (one or 0.0 for one in seconds)
    assert 0 < plain < 60
    assert edited > 10**9 * 1e-4  # a step takes over 0.1 ms


def test_two_studies_in_one_folder_are_refused(study, finished, tmp_path):
    (tmp_path / "study.json").write_text('{"study": "another"}')
    with pytest.raises(SpecError, match="holds the study 'another'"):
        run_study(study, tmp_path, ProcessEngine(IN_THIS_PROCESS))
    with FolderLock(finished[2]), pytest.raises(ValueError, match=str(finished[2])):
        run_study(study, finished[2], ProcessEngine(IN_THIS_PROCESS))


def test_command(study_file, finished, capsys, tmp_path):
    assert main(["study", str(study_file), "--out", str(finished[2]), "--jobs", "0"]) == 0
    printed = capsys.readouterr()
    assert "recall: mha reaches accuracy" in printed.out
    assert "report  9/9" in printed.err
    only = [
        "study",
        str(study_file),
        "--out",
        str(tmp_path),
        *("--jobs", "0", "--only", "recall/gqa/1", "--json"),
    ]
    assert main(only) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == []
    assert len((tmp_path / RESULTS_FILE).read_text().splitlines()) == 1
    for wrong, words in [
        ([str(study_file), "--scale", "huge"], "no scale 'huge'"),
        ([str(study_file), "--set", "steps"], "is not KEY=VALUE"),
        ([str(study_file), "--jobs", "-1"], "--jobs -1 is out of range"),
        ([str(study_file), "--budget", "0"], "give a number above 0"),
        ([str(tmp_path / "none.toml")], "; give one that exists"),
    ]:
        assert main(["study", *wrong]) == 2
        assert words in capsys.readouterr().err

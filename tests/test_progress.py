"""Progress of long commands: what a terminal and a pipe show, and that every long command reports
it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headwise import cli
from headwise.report import progress
from headwise.report.progress import CountedMessage, ProgressReporter, format_duration
from headwise.studies import study_runner
from headwise.studies.cells import Cell
from support.saved_models import save_byte_model
from support.tiny_configs import model_config


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def count(label: str, done: int) -> CountedMessage:
    return CountedMessage(label, done, 40, "texts")


def test_a_terminal_shows_every_message_on_one_line_with_the_time_left():
    clock, stream = Clock(), Terminal()
    report = ProgressReporter(stream, clock)
    report(count("ranking heads", 0))
    clock.seconds += 8
    report(count("ranking heads", 10))  # 10 in 8 s, so 30 take 24 s
    report("removing heads")
    clock.seconds += 5
    report(count("comparing", 20))  # a new stage starts its own clock
    clock.seconds += 60
    report(count("comparing", 30))
    report("")
    assert stream.getvalue().split("\r\x1b[K")[1:] == [
        "ranking heads: 0 of 40 texts",
        "ranking heads: 10 of 40 texts, 0:24 left",
        "removing heads",
        "comparing: 20 of 40 texts",
        "comparing: 30 of 40 texts, 1:00 left",
        "",
    ]


def test_a_pipe_gets_lines_at_intervals():
    clock, stream = Clock(), io.StringIO()
    report = ProgressReporter(stream, clock)
    for done in range(41):
        report(count("measuring heads", done))
        clock.seconds += 1
    report("")
    assert stream.getvalue().splitlines() == [
        f"measuring heads: {done} of 40 texts, {format_duration(40 - done)} left"
        for done in (10, 20, 30, 40)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("progress")
    config = model_config("gpt2", n_embd=24, n_head=4, n_layer=2, vocab_size=300, n_positions=64)
    save_byte_model(config, base / "model")
    (base / "texts").write_text("".join(f"text number {n}\n" for n in range(40)))
    return base


COMMANDS = {
    "heads": (["heads", "--importance", "taylor"], [("measuring heads: 40 of 40 texts, "
                                                    "0:"), ("importance of heads (taylor): 40 of "
                                                           "40 texts, 0:")]),
    "prune": (["prune", "--keep", "0.5", "--uptrain", "2"], [("ranking heads: 20 of 20 texts, "
                                                             "0:"), "removing heads", ("comparing "
                                                                                      "texts before and after: 19 of 20 texts, 0:"), "retraining by distillation: 2 of 2 steps, 0:"]),  # noqa: E501 - one case a line
    "convert": (["convert", "--kv", "2", "--align"], [("collecting keys and values: 19 of 20 "
                                                      "texts, 0:"), "measuring speed"]),
    "sweep": (["prune", "--sweep", "--by", "michel"], ["ranking heads: 20 of 20 texts, 0:"]),
    "gates": (["prune", "--keep", "0.5", "--gates", "2"], ["training gates: 2 of 2 steps, 0:"]),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_long_commands_report_counts_and_the_time_left_when_piped(
    name, folder, tmp_path, monkeypatch, capsys
):
    (command, *options), expected = COMMANDS[name]
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.0)
    out = [] if name == "heads" else ["--out", str(tmp_path / "out")]
    fast = [] if name in ("heads", "sweep") else ["--seconds", "0.05", "--length", "8"]
    code = cli.main(
        [command, str(folder / "model"), "--data", str(folder / "texts"), *options, *out, *fast]
    )
    printed = capsys.readouterr()
    assert code == 0, printed.err
    if "--uptrain" in options:
        record = json.loads((tmp_path / "out" / "heads.json").read_text())["change"]
        assert [point["step"] for point in record["uptraining"]["curve"]] == [0, 2]
    for line in expected:
        assert any(shown.startswith(line) for shown in printed.err.splitlines()), (
            line,
            printed.err,
        )
    assert not re.search(r"\d:\d\d left", printed.out)


class SlowEngine:
    """An engine whose cells take five seconds each of a clock that is set by hand."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def run_cells(
        self, cells: Sequence[Cell], folder: Path
    ) -> Iterator[tuple[Cell, Mapping[str, Any]]]:
        for cell in cells:
            self.clock.seconds += 5
            yield cell, {"status": "done", "timing": {"seconds": 5.0}}


def test_a_study_prints_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr(study_runner, "TimeLeft", lambda: progress.TimeLeft(clock))
    cells = [Cell("gqa", "recall", 1e-3, seed, {"seed": seed}) for seed in range(14)]
    engine: Any = SlowEngine(clock)
    study_runner.run_stage("tune", cells, tmp_path, engine, lines.append)
    assert lines[1].endswith("seed 1  done in 5.0 s, 1:00 left")
    assert lines[-1].endswith("seed 13  done in 5.0 s, 0:00 left")

"""Loggers of a run: its own file, other trackers and the terminal; and automatically chosen
settings.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.kernels.takeover_points import assume_points, points_of_class
from headwise.report.progress import LINE_INTERVAL, ProgressReporter
from headwise.training import ConsoleLogger, autotune, train
from headwise.training.autotune import Autotuner
from headwise.training.loggers import JsonlLogger, create_logger, read_records
from headwise.training.train_step import StepOptions
from headwise.util.errors import SpecError
from headwise.util.files import read_lines
from support.small_training import Echo, short_recipe

CONFIG = {
    "event": "run",
    "step": 0,
    "task": {"name": "echo"},
    "recipe": {"steps": 6, "lr": 0.1},
    "parameters": 1234,
}
STEP = {
    "event": "step",
    "step": 3,
    "loss": 0.5,
    "rate": 0.1,
    "tokens_per_second": 1e4,
    "mfu": 0.25,
    "left": 61.0,
}
EVALUATION_RECORD = {
    "event": "evaluation",
    "step": 3,
    "metrics": {"loss": 0.25, "accuracy@date": 0.5},
    "best": True,
}


class Calls(types.ModuleType):
    """A package that notes how it is called; what it makes notes in the same list."""

    def __init__(self, name: str, value: list) -> None:
        super().__init__(name)
        self.calls = value

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **kwargs: object) -> Calls:
            self.calls.append((name, args, kwargs))
            return Calls(name, self.calls)

        return call


def record_logger_calls(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, folder: Path
) -> list:
    """All that a tracker hears of a run of one step and one evaluation."""
    recorded: list = []
    monkeypatch.setitem(sys.modules, module, Calls(module, recorded))
    one = create_logger(name)
    one.open(folder, CONFIG)
    for record in (CONFIG, STEP, EVALUATION_RECORD, {"event": "note", "step": 3, "says": "hello"}):
        one.write(record)
    one.close()
    return recorded


def test_tensorboard_logs_every_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    result = record_logger_calls(monkeypatch, "torch.utils.tensorboard", "tensorboard", tmp_path)
    assert result[0] == ("SummaryWriter", (), {"log_dir": str(tmp_path / "tensorboard")})
    assert ("add_scalar", ("step/loss", 0.5, 3), {}) in result
    assert ("add_scalar", ("evaluation/loss", 0.25, 3), {}) in result
    assert result[-1] == ("close", (), {})


def test_a_missing_package_is_reported_before_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SpecError, match="pip install tensorboard"):
        train(Echo(), recipe=short_recipe(), out=tmp_path, loggers=["tensorboard"])
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_sink_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="did you mean 'tensorboard'"):
        train(Echo(), recipe=short_recipe(), out=tmp_path, loggers=["tensorbord"])


def step_record(step: int) -> dict[str, Any]:
    return {"event": "step", "step": step, "loss": math.inf, "rate": 0.1}


def test_a_log_with_a_value_of_another_type_is_refused(tmp_path: Path):
    path, right = (
        tmp_path / JsonlLogger.NAME,
        [("event", "x"), ("loss", 1.5), ("rate", 1.5), ("best", True), ("metrics", {})],
    )
    evaluation = {"event": "evaluation", "step": 1, "best": True, "metrics": {"accuracy": 0.5}}
    names = ("event", "step", "loss", "rate", "best", "metrics")
    for name, value in itertools.product(names, ["x", None, [], {}, True, 1.5, {"a": "b"}]):
        row = evaluation if name in ("best", "metrics") else step_record(2)
        path.write_text("".join(json.dumps(line) + "\n" for line in (row, row | {name: value})))
        if (name, value) in right:
            assert len(read_records(path)) == 2
            continue
        with pytest.raises(SpecError, match=r"metrics.jsonl: line 2\..*; delete the line"):
            JsonlLogger().open(tmp_path, CONFIG | {"step": 1})


def test_the_log_resumes_after_the_checkpoint(tmp_path: Path):
    """What was written after it comes again, so it is dropped, and so is half a line."""
    rows = [CONFIG, step_record(1), step_record(2), {"event": "end", "step": 1}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"event": "st'
    (tmp_path / JsonlLogger.NAME).write_text(text)
    journal = JsonlLogger()
    journal.open(tmp_path, CONFIG | {"step": 1})
    journal.write({"event": "note", "step": 1})
    journal.close()
    assert read_lines(tmp_path / JsonlLogger.NAME) == [*rows[:2], {"event": "note", "step": 1}]


# --- the screen -----------------------------------------------------------------------------------


def test_a_pipe_gets_plain_lines_now_and_then(tmp_path: Path):
    now = [100.0]
    out = io.StringIO()
    one = ConsoleLogger(out)
    one._report = ProgressReporter(out, now=lambda: now[0])
    one.open(tmp_path, CONFIG)
    one.write(STEP)
    now[0] += LINE_INTERVAL + 1
    one.write(STEP)
    one.write(EVALUATION_RECORD)
    one.write({"event": "end", "step": 6, "metrics": {"loss": 0.5}, "seconds": 61, "split": "test"})
    one.close()
    assert out.getvalue().splitlines() == [
        f"echo into {tmp_path}, 6 steps, 1,234 parameters",
        "step 3: loss 0.5000, 10,000 tokens/s, MFU 25%, 1:01 left",
        "step 3, held out: loss 0.2500, best so far",
        "test: loss 0.5000; 1:01 in all",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_for_steps_and_the_others_above_it(tmp_path: Path):
    out = Terminal()
    one = ConsoleLogger(out)
    one.open(tmp_path, CONFIG)
    one.write(STEP)
    one.write(EVALUATION_RECORD)
    one.close()
    assert "\x1b[Kstep 3: loss 0.5000, 10,000 tokens/s" in out.getvalue()
    assert "\x1b[Kstep 3, held out: loss 0.2500, best so far\n" in out.getvalue()


# --- what is chosen -------------------------------------------------------------------------------

SECONDS = {("fp32", "off"): 0.4, ("bf16", "off"): 0.2, ("bf16", "on"): 0.1, ("fp32", "on"): 0.1}


def chosen(
    monkeypatch: pytest.MonkeyPatch, seconds: dict, **options: object
) -> tuple[StepOptions, list]:
    """What is chosen when steps take so long, and what was tried on the way; an error in the place
    of a time fails.
    """
    tried = []

    def measured(self: Autotuner, stepper: autotune.TrainStep) -> float:
        way = (stepper.options.precision, stepper.options.compile)
        if stepper.options.attention == "plain":
            way = (*way, "plain")
        tried.append(way)
        if isinstance(seconds[way], Exception):
            raise seconds[way]
        return seconds[way]

    monkeypatch.setattr(Autotuner, "_time_step", measured)
    recipe = (
        short_recipe(steps=10_000, precision="auto", compile="auto")
        if not options
        else short_recipe(**{"steps": 10_000} | options)
    )
    trial = Autotuner(
        hw.build(Echo().model(), seed=0), recipe, torch.device("cpu"), [Echo().batch(0, 5)]
    )
    return trial.choose_options(), tried


def test_all_settings_are_tried_and_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch):
    choice, tried = chosen(monkeypatch, SECONDS)
    assert (choice.precision, choice.compile) == ("bf16", "on")
    assert tried == [("fp32", "off"), ("bf16", "off"), ("bf16", "on")]
    assert choice.reasons[0] == "bf16: 0.2000 s per step, fp32 0.4000"


def test_both_attention_settings_are_tried_for_short_rows(monkeypatch: pytest.MonkeyPatch):
    plain = {("fp32", "off", "plain"): 0.3, ("bf16", "off", "plain"): 0.15}
    choice, tried = chosen(
        monkeypatch, SECONDS | plain, precision="auto", compile="off", attention="auto"
    )
    assert (choice.precision, choice.attention) == ("bf16", "plain")
    assert tried == [
        ("fp32", "off"),
        ("fp32", "off", "plain"),
        ("bf16", "off"),
        ("bf16", "off", "plain"),
    ]
    assert choice.reasons[0].startswith("bf16, plain attention: 0.1500 s per step, fp32 0.4000")
    monkeypatch.setattr(autotune, "MAX_PLAIN_LENGTH", 1)
    assert chosen(monkeypatch, SECONDS, precision="fp32", compile="off", attention="auto")[1] == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x86-avx512", "bf16 was measured to be slower"), ("aarch64", "bf16 was not measured")],
)
def test_bf16_is_not_tried_where_it_is_slower_or_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, name: str, reason: str
):
    seconds = {way: time for way, time in SECONDS.items() if way[0] == "fp32"}
    with assume_points(points_of_class(name)):
        choice, tried = chosen(monkeypatch, seconds)
        assert tried == [("fp32", "off"), ("fp32", "on")]
        assert (choice.precision, choice.compile) == ("fp32", "on")
        assert choice.reasons[0] == f"fp32: {reason} on this class of machine ({name})"
        requested, _ = chosen(monkeypatch, SECONDS, precision="bf16", compile="off")
        assert requested.precision == "bf16"  # the caller's own choice


@pytest.mark.parametrize(
    ("bf16", "compiled", "steps", "expected"),
    [
        (0.3, 0.1, 10_000, ("bf16", "on")),
        (0.39, 0.1, 10_000, ("fp32", "on")),  # within 5 %
        (0.2, 0.195, 10_000, ("bf16", "off")),
        (0.2, 0.1, 900, ("bf16", "off")),  # compiling would take longer than it gains
    ],
)
def test_gains_must_be_worth_it(
    monkeypatch: pytest.MonkeyPatch,
    bf16: float,
    compiled: float,
    steps: int,
    expected: tuple[str, str],
):
    seconds = {("fp32", "off"): 0.4, ("bf16", "off"): bf16}
    seconds |= {("bf16", "on"): compiled, ("fp32", "on"): compiled}
    choice, _ = chosen(monkeypatch, seconds, precision="auto", compile="auto", steps=steps)
    assert (choice.precision, choice.compile) == expected


def test_requested_settings_are_not_tried(monkeypatch: pytest.MonkeyPatch):
    choice, tried = chosen(monkeypatch, SECONDS, precision="fp32", compile="on")
    assert (choice, tried) == (StepOptions("fp32", "on"), [])


def test_a_requested_precision_is_timed_if_compilation_depends_on_it(
    monkeypatch: pytest.MonkeyPatch,
):
    choice, tried = chosen(monkeypatch, SECONDS, precision="fp32", compile="auto")
    assert (choice.precision, choice.compile) == ("fp32", "on")
    assert tried == [("fp32", "off"), ("fp32", "on")]


def test_a_failing_setting_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    failing = SECONDS | {
        ("bf16", "off"): RuntimeError("no kernel\nmore"),
        ("fp32", "on"): RuntimeError("no compiler"),
    }
    choice, _ = chosen(monkeypatch, failing)
    assert choice == StepOptions(
        "fp32",
        "off",
        (
            "fp32: 0.4000 s per step",
            "a step in bf16 fails: no kernel",
            "fp32: 0.4000 s per step",
            "a step in fp32, compiled fails: no compiler",
        ),
    )


def test_a_trial_changes_neither_weights_nor_random_state():
    net = hw.build(Echo().model(), seed=0, dropout=0.5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    recipe = short_recipe(precision="auto", compile="off", dropout=0.5)
    Autotuner(net, recipe, torch.device("cpu"), [Echo().batch(0, 5)]).choose_options()
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_a_resumed_run_keeps_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train(Echo(), recipe=short_recipe(precision="auto"), out=tmp_path)
    monkeypatch.setattr(Autotuner, "choose_options", None)
    result = train(Echo(), recipe=short_recipe(precision="auto"), out=tmp_path, resume="allowed")
    notes = [r["says"] for r in read_lines(tmp_path / JsonlLogger.NAME) if r["event"] == "note"]
    assert result.precision in ("fp32", "bf16")
    assert sum("s per step" in note for note in notes) == 2

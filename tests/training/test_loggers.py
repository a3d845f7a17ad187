"""Loggers of a run: its own file, other trackers and the terminal; and the chosen precision."""

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

from headwise.kernels.capabilities import assume_points, current_points
from headwise.report.progress import LINE_INTERVAL, ProgressReporter
from headwise.training import ConsoleLogger, run_setup, train
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
    "device": "cpu",
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


def test_a_missing_package_is_reported_before_training(monkeypatch, tmp_path):
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
    one.open(tmp_path, CONFIG | {"device": "cuda:1"})
    one.write(STEP)
    one.write(EVALUATION_RECORD)
    one.close()
    assert "6 steps, 1,234 parameters on cuda:1\n" in out.getvalue()
    assert "\x1b[Kstep 3: loss 0.5000, 10,000 tokens/s" in out.getvalue()
    assert "\x1b[Kstep 3, held out: loss 0.2500, best so far\n" in out.getvalue()


# --- what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "precision"), [(0, "bf16"), (math.inf, "fp32")])
def test_precision_is_bf16_where_it_was_measured_to_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: float, precision: str
):
    recipe = short_recipe(steps=1, batch=2, precision="auto")
    with assume_points(current_points().with_sizes(bf16_training=threshold)):
        result = train(Echo(), recipe=recipe, out=tmp_path)
    assert result.precision == precision
    monkeypatch.setattr(run_setup, "crossover_size", None)
    again = train(Echo(), recipe=recipe, out=tmp_path, resume="allowed")
    assert again.precision == precision  # a resumed run keeps its settings


@pytest.mark.parametrize(
    ("steps", "changes", "compiles"),
    [
        (100, {}, False),  # 15 s saved, compiling takes 30 s
        (1000, {}, True),
        (1000, {"rows": "packed"}, False),
        (1000, {"compile": "off"}, False),
    ],
)
def test_steps_are_compiled_where_it_is_estimated_to_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, changes: Any, compiles: bool
):
    made: list[StepOptions] = []

    def stop(setup: object, net: object, options: StepOptions) -> None:
        made.append(options)
        raise KeyboardInterrupt

    recipe = short_recipe(**({"compile": "auto", "batch": 2, "steps": steps} | changes))
    flops = run_setup.count_step_flops(Echo().model(), Echo().batch(0, 2))
    # a step takes half a second at this peak
    peak = flops / (0.5 * run_setup.USUAL_MFU)
    monkeypatch.setattr(run_setup, "measure_peak_flops", lambda device, dtype: peak)
    monkeypatch.setattr(run_setup.TrainingSetup, "_make_run", stop)
    with pytest.raises(KeyboardInterrupt):
        train(Echo(), recipe=recipe, out=tmp_path)
    assert made[0].compile == ("on" if compiles else "off")

"""Runs that are extended and retuned, why they end, what they leave behind, and what they print on
the way.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.cli import main
from headwise.models import load
from headwise.training import ConsoleLogger, Recipe, loop, train, training_run
from headwise.training.data import Batch
from headwise.training.evaluation import TaskEvaluator
from headwise.training.loggers import CURVE_FILES, make_curves, save_curves
from headwise.training.recipe import SCHEDULES, ScheduleStep
from headwise.training.run_setup import read_run_recipe
from headwise.training.train_step import BatchPrefetcher
from headwise.util.errors import SpecError
from headwise.util.files import read_lines
from support.refusals import refused_cases
from support.small_training import Echo, short_recipe

CONSTANT = {"schedule": "constant", "warmup": 0.0, "dropout": 0.1}


def check_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).state_dict()


def step_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_lines(folder / "metrics.jsonl") if record["event"] == "step"]


# --- extending and retuning -----------------------------------------------------------------------


def test_an_extended_run_has_the_bits_of_one_that_was_long_from_the_start(tmp_path: Path):
    train(Echo(), recipe=short_recipe(steps=6, **CONSTANT), out=tmp_path / "extended")
    longer = short_recipe(steps=12, **CONSTANT)
    result = train(Echo(), recipe=longer, out=tmp_path / "extended", resume="with-changes")
    train(Echo(), recipe=longer, out=tmp_path / "whole")
    assert (result.steps, result.history) == (12, [{"step": 6, "fields": {"steps": [6, 12]}}])
    check_same(weights(tmp_path / "extended"), weights(tmp_path / "whole"))
    losses = [
        [record["loss"] for record in step_records(tmp_path / name)]
        for name in ("extended", "whole")
    ]
    assert losses[0] == losses[1]


def test_another_rate_and_schedule_apply_from_the_next_step_on(tmp_path: Path):
    train(Echo(), recipe=short_recipe(steps=6, lr=0.01, **CONSTANT), out=tmp_path)
    changes = {
        "steps": 16,
        "lr": 0.004,
        "schedule": "cosine",
        "warmup": 0.2,
        "schedule_start": 6,
        "dropout": 0.1,
    }
    retuned = short_recipe(**changes)
    train(Echo(), recipe=retuned, out=tmp_path, resume="with-changes")
    rates = [record["rate"] for record in step_records(tmp_path)]
    cosine = [
        0.004 * SCHEDULES["cosine"](ScheduleStep(step, 10, 2.0, 0.0, 0.0)) for step in range(1, 11)
    ]
    assert rates == pytest.approx([0.01] * 6 + cosine)
    # The history is in the checkpoint, the result, the log and the page; the next resumption needs
    # no change.
    again = train(Echo(), recipe=retuned, out=tmp_path, resume="allowed")
    fields = {
        "steps": [6, 16],
        "lr": [0.01, 0.004],
        "schedule": ["constant", "cosine"],
        "warmup": [0.0, 0.2],
    }
    assert again.history == [{"step": 6, "fields": {**fields, "schedule_start": [0, 6]}}]
    line = (
        "after step 6: steps 6 -> 16, lr 0.01 -> 0.004, schedule constant -> cosine, warmup 0 "
        "-> 0.2, "
    )
    assert line in (tmp_path / "README.md").read_text()
    notes = [
        record["says"]
        for record in read_lines(tmp_path / "metrics.jsonl")
        if record["event"] == "note"
    ]
    assert any(note.startswith(line) for note in notes)
    assert json.loads((tmp_path / "final.json").read_text())["history"] == again.history


def test_a_change_is_kept_if_the_run_dies_before_its_next_checkpoint(tmp_path, monkeypatch):
    train(Echo(), recipe=short_recipe(steps=6, **CONSTANT), out=tmp_path)
    retuned = short_recipe(steps=12, lr=0.001, **CONSTANT)
    monkeypatch.setattr(training_run.TrainingRun, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(Echo(), recipe=retuned, out=tmp_path, resume="with-changes")
    monkeypatch.undo()
    assert read_run_recipe(tmp_path) == Recipe(**{**vars(retuned), "parallelism": "auto"})
    assert train(Echo(), recipe=retuned, out=tmp_path, resume="allowed").history[0]["step"] == 6


@pytest.mark.parametrize(
    ("options", "resume", "message"), refused_cases(__file__, "changes of a run", globals(), 2)
)
def test_changes_that_a_run_cannot_take_are_refused(tmp_path, options, resume, message):
    train(Echo(), recipe=short_recipe(steps=6), out=tmp_path)
    with pytest.raises(SpecError, match=message):
        train(Echo(), recipe=short_recipe(**{"steps": 6, **options}), out=tmp_path, resume=resume)


def test_the_command_extends_a_run_without_repeating_its_options(capsys, tmp_path):
    plain = [
        "--precision",
        "fp32",
        "--compile",
        "off",
        "--device",
        "cpu",
        "--batch",
        "4",
        "--lr",
        "0.01",
    ]
    first = [
        "train",
        "recall",
        "--out",
        str(tmp_path / "a"),
        *("--steps", "2", "--set", "recipe.evaluate_batches=1"),
    ]
    assert main([*first, *plain]) == 0
    assert (
        main(
            [
                "train",
                "recall",
                "--out",
                str(tmp_path / "a"),
                *("--resume", "--steps", "4", "--schedule", "wsd"),
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "after step 2: steps 2 -> 4, schedule one-cycle -> wsd" in err
    assert "recall: 4 steps" in out
    recipe = read_run_recipe(tmp_path / "a")
    assert recipe is not None
    assert (recipe.steps, recipe.lr, recipe.batch, recipe.schedule) == (4, 0.01, 4, "wsd")


def test_a_schedule_may_start_later():
    recipe = Recipe(steps=20, lr=0.5, schedule="wsd", warmup=0.2, decay=0.5, schedule_start=10)
    assert [recipe.lr_at(step) for step in (3, 11, 12, 15, 20)] == [0.25, 0.25, 0.5, 0.5, 0.0]
    with pytest.raises(
        SpecError, match="schedule_start=20 leaves no step of steps=20 for the schedule"
    ):
        Recipe(steps=20, schedule_start=20)


# --- how a run ends -------------------------------------------------------------------------------


def test_early_stopping_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = iter([3.0, 2.0, 2.5, 2.0])
    monkeypatch.setattr(
        TaskEvaluator,
        "compute_metrics",
        lambda self, net, split: {"loss": next(left) if split == "valid" else 0.0},
    )
    result = train(
        Echo(), recipe=short_recipe(steps=10, evaluate_every=2, patience=2), out=tmp_path
    )
    reason = (
        "stopped early at step 8 of 10: no lower validation loss in 2 evaluations (patience=2); "
        "the lowest, 2.0000, was at step 4"
    )
    assert result.ended == reason
    *_, note, end = read_lines(tmp_path / "metrics.jsonl")
    assert (note["says"], end["ended"]) == (reason, reason)
    assert reason in (tmp_path / "README.md").read_text()
    # More patience lets it go on, counted from there.
    left = iter([2.5, 1.0])
    more = train(
        Echo(),
        recipe=short_recipe(steps=12, evaluate_every=2, patience=3),
        out=tmp_path,
        resume="with-changes",
    )
    assert (more.steps, more.best, more.ended) == (12, 12, "all 12 steps are taken")


def test_the_time_in_all_counts_start_up_and_earlier_processes(tmp_path, monkeypatch, capsys):
    before = training_run.measure_peak_flops
    monkeypatch.setattr(
        training_run, "measure_peak_flops", lambda *args: time.sleep(0.6) or before(*args)
    )
    start = time.perf_counter()
    first = train(Echo(), recipe=short_recipe(steps=2), out=tmp_path)
    assert 0.6 < first.seconds <= time.perf_counter() - start
    second = train(Echo(), recipe=short_recipe(steps=3), out=tmp_path, resume="with-changes")
    assert second.seconds > first.seconds + 0.6
    logger = ConsoleLogger(startup=65.0)
    logger.write(
        {"event": "end", "step": 3, "metrics": {"loss": 1.0}, "split": "test", "seconds": 10.0}
    )
    assert "1:15 in all" in capsys.readouterr().err


# --- what a run leaves behind ---------------------------------------------------------------------


def test_the_learning_curves_are_drawn_for_both_backgrounds(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "save_curves", save_curves)
    train(Echo(), recipe=short_recipe(), out=tmp_path)
    light, dark = ((tmp_path / name).read_text() for name in CURVE_FILES.values())
    assert light.startswith("<?xml")
    assert light != dark
    assert "curves-dark.svg" in (tmp_path / "README.md").read_text()
    records = read_lines(tmp_path / "metrics.jsonl")
    loss, metrics, rate = make_curves(records, "run", changes=[3]).panels
    assert (loss.series[0].xs, loss.series[0].ys) == (
        [1, 2, 3, 4, 5, 6],
        [record["loss"] for record in records if record["event"] == "step"],
    )
    assert (loss.series[1].name, loss.series[1].xs) == ("validation", [3, 6])
    assert [one.name for one in metrics.series] == ["accuracy"]
    assert [line.at for line in rate.references] == [3]


# --- batches ahead of time ------------------------------------------------------------------------


class Watched(Echo):
    """The echo task, which notes where each batch is made."""

    made: list[tuple[int, str]] = []  # noqa: RUF012 - shared by all instances on purpose

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        if split == "train":
            self.made.append((index, threading.current_thread().name))
        return super().batch(index, size, split)


def test_batches_are_prepared_by_a_thread_and_change_nothing(tmp_path: Path):
    for name, ahead in (("ahead", 3), ("plain", 0)):
        Watched.made.clear()
        train(Watched(), recipe=short_recipe(**CONSTANT, prefetch=ahead), out=tmp_path / name)
        threads = {
            thread.rpartition("_")[0] for index, thread in Watched.made[3:]
        }  # after those of trial steps
        assert threads == ({"headwise-batches"} if ahead else {""})
        assert [index for index, _ in Watched.made][-6:] == [0, 1, 2, 3, 4, 5]
    check_same(weights(tmp_path / "ahead"), weights(tmp_path / "plain"))


def test_batches_come_in_the_order_they_are_asked_for_and_none_too_many():
    made: list[int] = []

    class Counted(Echo):
        def batch(self, index: int, size: int, split: str = "train") -> Batch:
            made.append(index)
            if index == 4:
                raise ValueError("no such batch")
            return super().batch(index, size, split)

    with BatchPrefetcher(Counted(), 5, ahead=2, stop=6) as batches:
        for index in (1, 2, 3):
            assert torch.equal(batches.get(index).x, Echo().batch(index, 5).x)
        with pytest.raises(ValueError, match="no such batch"):
            batches.get(4)
        assert torch.equal(batches.get(5).x, Echo().batch(5, 5).x)
    assert made == [1, 2, 3, 4, 5]

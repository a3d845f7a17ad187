"""Files of a run, and recovery from kills, full disks, edits and numbers that are not finite."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import headwise as hw
from headwise.models import load, save
from headwise.training import CheckpointFolder, TrainingCheckpoint, train, training_run
from headwise.training.data import Batch
from headwise.training.evaluation import TaskEvaluator
from headwise.training.loop import InterruptGuard
from headwise.training.run_setup import TrainingSetup
from headwise.training.train_step import TrainStep
from headwise.util import files
from headwise.util.errors import SpecError, TrainingDiverged
from headwise.util.files import read_lines
from support.refusals import refused_cases
from support.small_training import Answered, CrashingLogger, Echo, short_recipe

STOCHASTIC = {"dropout": 0.1, "accumulate": 5}  # so that what is drawn has to go on where it stood


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).state_dict()


def check_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def newest(folder: Path) -> TrainingCheckpoint:
    found, damages = CheckpointFolder(folder / "checkpoint").load_newest()
    assert found is not None
    assert not damages
    return found


def trail(folder: Path) -> list[tuple[object, ...]]:
    """What every step and evaluation came to, without the times."""
    lines = read_lines(folder / "metrics.jsonl")
    steps = [(r["step"], r["loss"], r["rate"], r["norm"]) for r in lines if r["event"] == "step"]
    return steps + [(r["step"], r["metrics"]) for r in lines if r["event"] in ("evaluation", "end")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(Echo(), recipe=short_recipe(**STOCHASTIC), out=folder)
    return folder


# --- what is left ---------------------------------------------------------------------------------


def test_a_run_trains_and_saves_a_model_with_its_recipe(tmp_path: Path):
    recipe = short_recipe(steps=120, batch=30, lr=0.02, evaluate_every=60, checkpoint_every=50)
    result = train(Answered(), recipe=recipe, out=tmp_path)
    assert result.metrics["accuracy"] > 0.9
    assert result.metrics["exact_match"] >= 0.5
    assert json.loads((tmp_path / "final.json").read_text()) == result.data
    assert {"task": "answered", "steps": 120, "model": str(tmp_path)}.items() <= result.data.items()
    page = (tmp_path / "README.md").read_text()
    for options in (
        "The task is answered (seed=0, noise=0.0)",
        "lr = 0.02",
        "| accuracy |",
        "| 0.1000 |",
    ):
        assert options in page
    events = [record["event"] for record in read_lines(tmp_path / "metrics.jsonl")]
    assert [events.count(name) for name in ("run", "step", "evaluation", "end")] == [1, 120, 2, 1]
    check_same(weights(tmp_path), result.net.state_dict())


def test_a_run_draws_from_generators_of_its_own(tmp_path: Path):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train(Echo(), recipe=short_recipe(steps=1, dropout=0.5), out=tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_the_last_checkpoints_stay_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Held-out losses by the step: step 4 is the best, and its weights are the model."""
    script(monkeypatch, [5.0, 1.0, 3.0, 2.0, 4.0])
    result = train(
        Echo(),
        recipe=short_recipe(steps=10, evaluate_every=2, checkpoint_every=1, keep=3),
        out=tmp_path,
    )
    checkpoint_folder = CheckpointFolder(tmp_path / "checkpoint")
    assert [int(path.stem) for path in checkpoint_folder.paths] == [10, 9, 8, 4]
    assert result.best == 4
    check_same(
        weights(tmp_path),
        training_run.read_checkpoint(checkpoint_folder.path(4)).tensors_of_kind("model"),
    )


def script(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Held-out data gives these losses, one after the other; test data gives 0."""
    left = iter(losses)
    monkeypatch.setattr(
        TaskEvaluator,
        "compute_metrics",
        lambda self, net, split: {"loss": next(left) if split == "valid" else 0.0},
    )


def test_a_run_that_gets_no_better_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script(monkeypatch, [3.0, 2.0, 2.5, 2.0, 1.0])
    result = train(
        Echo(), recipe=short_recipe(steps=10, evaluate_every=2, patience=2), out=tmp_path
    )
    assert (result.steps, result.best) == (8, 4)


def test_a_model_that_is_given_goes_on_from_its_weights(tmp_path: Path):
    net = hw.build(Echo().model(), seed=5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    train(Echo(), net, short_recipe(steps=1, keep=9), out=tmp_path)
    check_same(
        training_run.read_checkpoint(
            tmp_path / "checkpoint" / "0000000000.safetensors"
        ).tensors_of_kind("model"),
        before,
    )


# --- going on -------------------------------------------------------------------------------------


def test_a_run_that_crashes_again_and_again_ends_with_the_same_bits(whole: Path, tmp_path: Path):
    for step in (1, 3, 4, 6):
        with pytest.raises(RuntimeError, match="a crash"):
            train(
                Echo(),
                recipe=short_recipe(**STOCHASTIC),
                out=tmp_path,
                resume="allowed",
                loggers=[CrashingLogger(step)],
            )
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "st')
    train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path, resume="allowed")
    check_same(weights(tmp_path), weights(whole))
    check_same(dict(newest(tmp_path).tensors), dict(newest(whole).tensors))
    assert trail(tmp_path) == trail(whole)


# Does once what a first run has to import, then forks a child for each number it reads. The child
# is killed with signal 9 at that call to the disk, a write half done; at 0 it is let be.
NURSERY = """
import os, signal, sys; sys.path[:0] = {paths!r}
import torch; torch.set_num_threads(1)
from support.small_training import Echo, short_recipe
from headwise.training import train
train(Echo(), recipe=short_recipe(steps=1), out=sys.argv[1] + ".first")
calls = 0

def deadly(name, last):
    call = getattr(os, name)
    def called(first, *rest):
        global calls
        calls += 1
        if calls == last:
            call(first, rest[0][: len(rest[0]) // 2]) if name == "write" else None
            os.kill(os.getpid(), signal.SIGKILL)
        return call(first, *rest)
    setattr(os, name, called)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        for name in ("write", "fsync", "replace", "unlink"):
            deadly(name, int(line))
        train(Echo(), recipe=short_recipe({options}), out=sys.argv[1], resume="allowed")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def killed_and_resumed(folder: Path, kills: int, value: str) -> list[int]:
    """Run, kill -9 at a random call to the disk, and again; at last let it be. The steps kept at
    each kill.
    """
    paths = [str(Path(__file__).parents[1]), str(Path(hw.__file__).parents[1])]
    command = [sys.executable, "-c", NURSERY.format(paths=paths, options=value), str(folder)]
    checkpoints, moment, steps = CheckpointFolder(folder / "checkpoint"), random.Random(0), []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for call in [*(moment.randrange(20, 60) for _ in range(kills)), 0]:
            nursery.stdin.write(f"{call}\n")
            assert int(nursery.stdout.readline()) == (-signal.SIGKILL if call else 0)
            found, damages = checkpoints.load_newest()
            assert found is not None
            assert not damages, "a kill damaged a checkpoint"
            steps.append(found.step)
    return steps


@pytest.mark.lengthy
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path, kills: int):
    """A checkpoint at every step; each kill falls into the writing of one, or of the lines and the
    model beside it.
    """
    steps = 10 * kills
    message = f"steps={steps}, checkpoint_every=1, evaluate_every=10, dropout=0.1"
    keep = killed_and_resumed(tmp_path / "killed", kills, message)
    train(
        Echo(),
        recipe=short_recipe(steps=steps, checkpoint_every=1, evaluate_every=10, dropout=0.1),
        out=tmp_path / "whole",
    )
    assert keep == sorted(keep)
    assert keep[-1] == steps
    assert len(set(keep)) > kills // 2, "hardly a kill left anything behind"
    check_same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    assert trail(tmp_path / "killed") == trail(tmp_path / "whole")


# --- what is refused ------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_not_restarted(whole: Path):
    with pytest.raises(
        SpecError, match="holds a run of 6 steps; continue it with resume='allowed'"
    ):
        train(Echo(), recipe=short_recipe(**STOCHASTIC), out=whole)


def test_a_folder_that_holds_a_model_is_not_written_over(tmp_path: Path):
    save(hw.build(Echo().model(), seed=1), tmp_path)
    before = weights(tmp_path)
    with pytest.raises(SpecError, match="already holds a model"):
        train(Echo(), recipe=short_recipe(), out=tmp_path, resume="allowed")
    check_same(weights(tmp_path), before)


@pytest.mark.parametrize(
    ("task", "options", "message"), refused_cases(__file__, "setups", globals(), 2)
)
def test_another_setup_is_refused_by_its_first_difference(whole, task, options, message):
    with pytest.raises(SpecError, match=message):
        train(task, recipe=short_recipe(**STOCHASTIC, **options), out=whole, resume="allowed")


class Changed(Echo):
    """The same fields, other data."""

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        return super().batch(index + 1, size, split)


def test_data_that_changed_under_a_run_is_noticed(whole: Path):
    with pytest.raises(SpecError, match=r"first batch was '.*', is now"):
        train(Changed(), recipe=short_recipe(**STOCHASTIC), out=whole, resume="allowed")


def test_two_runs_cannot_write_one_folder(tmp_path: Path):
    with (
        files.FolderLock(tmp_path),
        pytest.raises(SpecError, match=f"being written by process {os.getpid()}"),
    ):
        train(Echo(), recipe=short_recipe(), out=tmp_path)


class Wild(Echo):
    """An id beyond the table in batch 4."""

    wild = "x"

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        found = super().batch(index, size, split)
        getattr(found, self.wild)[1, 1] = 99 if index == 4 else 1
        return found


class WildLabel(Wild):
    """A label beyond the head in batch 4."""

    wild = "labels"


@pytest.mark.parametrize(
    ("task", "message"),
    [(Wild(), "batch 4 has the input id 99"), (WildLabel(), "batch 4 has the label 99")],
)
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, task: Echo, message: str):
    with pytest.raises(ValueError, match=f"{message}, but the model has 11 of them; use 0..10"):
        train(task, recipe=short_recipe(), out=tmp_path)
    assert newest(tmp_path).step == 4


def test_a_model_of_a_smaller_vocabulary_is_refused(tmp_path: Path):
    text = hw.model_spec.to_toml(Echo().model()).replace("11", "7")
    with pytest.raises(
        SpecError, match="the embedding of decoder has 7 rows, but the task has 11 ids"
    ):
        train(Echo(), hw.model_spec.from_toml(text), short_recipe(), tmp_path)


class Spelt(Echo):
    """With a tokenizer of eleven tokens."""

    tokenizer = "eleven"


def test_a_model_of_a_larger_vocabulary_than_a_tokenizer_is_refused(tmp_path: Path):
    text = hw.model_spec.to_toml(Echo().model()).replace("11", "13")
    with pytest.raises(
        SpecError, match="decoder has 13 rows, but the task's tokenizer has 11 tokens; use 11 rows"
    ):
        train(Spelt(), hw.model_spec.from_toml(text), short_recipe(), tmp_path)


# --- what is not finite ---------------------------------------------------------------------------


def poisoned(step: int, name: str, value: float):
    """A sink that sets a weight's first number after a step, as memory that breaks might."""

    class Poison(CrashingLogger):
        def write(self, record: dict) -> None:
            if record["event"] == "step" and record["step"] == step:
                with torch.no_grad():
                    self.net.get_parameter(name).view(-1)[0] = value

    return Poison(step)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "decoder.0.feed.up",
            float("nan"),
            r"the weight decoder.0.feed.up \(feed, decayed\) is the first with NaN or inf",
        ),
        (
            "decoder.0.feed.up",
            3e38,
            r"the output of decoder.0.feed \(feed, decayed\) is the first with NaN or inf",
        ),
        (
            "decoder.0.feed_norm.weight",
            3e38,
            r"the output of decoder.0.feed_norm \(norm, kept\) is the first",
        ),
    ],
)
def test_a_non_finite_loss_ends_a_run_and_names_its_origin(tmp_path, name, value, message):
    net, sink = hw.build(Echo().model(), seed=0), poisoned(5, name, value)
    sink.net = net
    with pytest.raises(
        TrainingDiverged,
        match=f"step 6: the loss is nan; {message}.*checkpoint of step 4 is in .*; train again",
    ):
        train(Echo(), net, short_recipe(), tmp_path, loggers=[sink])
    stored = newest(tmp_path)
    assert stored.step == 4
    assert all(tensor.isfinite().all() for tensor in stored.tensors.values())
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


class Steep(torch.autograd.Function):
    """The same number, with no finite way back."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


def test_a_gradient_that_is_not_finite_is_found_where_it_began(tmp_path, monkeypatch):
    """Behind the feed-forward: what comes after it, on the way back, is what it spoiled, and not
    the first.
    """
    net = hw.build(Echo().model(), seed=0)
    feed = net.get_submodule("decoder.0.feed")
    feed.register_forward_hook(lambda module, inputs, out: Steep.apply(out))
    with pytest.raises(
        TrainingDiverged, match=r"step 1: the gradient holds NaN or inf; .* of decoder.0.feed"
    ):
        train(Echo(), net, short_recipe(), tmp_path)


# --- what is damaged ------------------------------------------------------------------------------


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    else:
        data[data.index(b"seed") if how == "edited" else len(data) - 9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "empty", "edited", "flipped"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken(whole, tmp_path, how):
    with pytest.raises(RuntimeError, match="a crash"):
        train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path, loggers=[CrashingLogger(5)])
    before = CheckpointFolder(tmp_path / "checkpoint")
    assert [int(path.stem) for path in before.paths] == [4, 3]
    damaged(before.paths[0], how)
    train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path, resume="allowed")
    notes = [
        record["says"]
        for record in read_lines(tmp_path / "metrics.jsonl")
        if record["event"] == "note"
    ]
    assert any(note.startswith("0000000004.safetensors ") for note in notes)
    assert "resuming from step 3" in notes
    check_same(weights(tmp_path), weights(whole))


def test_training_does_not_start_without_an_intact_checkpoint(tmp_path: Path):
    with pytest.raises(RuntimeError, match="a crash"):
        train(Echo(), recipe=short_recipe(), out=tmp_path, loggers=[CrashingLogger(5)])
    for path in CheckpointFolder(tmp_path / "checkpoint").paths:
        damaged(path, "truncated")
    with pytest.raises(
        SpecError,
        match=(
            r"cannot read any checkpoint in .*: 0000000004.*; 0000000003.*; start again in "
            r"another"
        ),
    ):
        train(Echo(), recipe=short_recipe(), out=tmp_path, resume="allowed")


class Failing:
    """A call to the system that fails once, the n-th time."""

    def __init__(self, name: str, call: int) -> None:
        self.call, self.left = getattr(os, name), call

    def __call__(self, *args: object) -> object:
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")
        return self.call(*args)


def counted(name: str, folder: Path) -> int:
    """How often a run calls it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, counting := Failing(name, 0))
        train(Echo(), recipe=short_recipe(steps=1), out=folder)
    return -counting.left


FIRST = {"write": 2, "fsync": 2, "replace": 1}  # calls before there is a first checkpoint


@pytest.mark.parametrize("name", FIRST)
def test_whatever_call_fails_the_checkpoint_before_is_whole_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Each call of a run fails once: one line says so, no checkpoint is lost, and the same bits
    come out.
    """
    recipe = short_recipe(steps=1)
    calls = counted(name, tmp_path / "whole")
    expected = weights(tmp_path / "whole")
    for call in range(1, calls + 1):
        folder = tmp_path / str(call)
        checkpoints = CheckpointFolder(folder / "checkpoint")
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Failing(name, call))
            with pytest.raises(OSError, match="No space left on device") as refused:
                train(Echo(), recipe=recipe, out=folder)
        assert "\n" not in str(refused.value)
        assert not list(folder.rglob("*.tmp"))
        found, damages = checkpoints.load_newest()
        assert not damages
        assert found is not None or call <= FIRST[name]
        result = train(Echo(), recipe=recipe, out=folder, resume="allowed")
        check_same(weights(folder), expected)
        assert result.steps == 1


# --- Ctrl-C ---------------------------------------------------------------------------------------


class Interrupting(CrashingLogger):
    """A sink that presses Ctrl-C."""

    def write(self, record: dict) -> None:
        if record["event"] == "step" and record["step"] == self.step:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_saves_the_current_step(whole: Path, tmp_path: Path):
    before = signal.getsignal(
        signal.SIGINT
    )  # ignored, where tests run in the background of a shell
    with pytest.raises(KeyboardInterrupt, match="interrupted at step 5; the checkpoint is in"):
        train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path, loggers=[Interrupting(5)])
    assert newest(tmp_path).step == 5
    assert signal.getsignal(signal.SIGINT) is before
    train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path, resume="allowed")
    check_same(weights(tmp_path), weights(whole))


def test_the_second_interrupt_ends_at_once():
    with InterruptGuard() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.is_requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_before_the_first_step_ends_at_once(tmp_path, monkeypatch):
    """Choosing a precision and compiling may take minutes, and there is nothing to lose."""

    def press(*_: object) -> NoReturn:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was kept for later")

    monkeypatch.setattr(TrainingSetup, "start_run", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_long_step_is_undone_after_an_interrupt(whole, tmp_path, monkeypatch):
    compute = TrainStep.compute_gradients
    step = itertools.count(1)

    def compute_for_long(self: TrainStep, batch: Batch) -> torch.Tensor:
        loss = compute(self, batch)
        if next(step) == 6:
            signal.raise_signal(signal.SIGINT)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                time.sleep(0.01)
            pytest.fail("the step was not interrupted")
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute_gradients", compute_for_long)
        with pytest.raises(KeyboardInterrupt, match="interrupted at step 5; the checkpoint is in"):
            train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path)
    assert newest(tmp_path).step == 5
    train(Echo(), recipe=short_recipe(**STOCHASTIC), out=tmp_path, resume="allowed")
    check_same(weights(tmp_path), weights(whole))

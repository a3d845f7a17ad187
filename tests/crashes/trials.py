"""Trials: a command is ended or its disk fills; then its output is compared with the old and the
new one.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from crashes.injection import Fault, Run, run_forked
from crashes.workload import Command

OLD, NEW, CONTINUED = "old", "new", "continued"
SIGNALS = (*[signal.SIGKILL] * 6, signal.SIGTERM, signal.SIGINT)
ENDINGS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
FIRST_MOMENT = 0.05  # seconds after the fork, when the command has its signal handlers
# of the kills are after a random time, the others before a random file operation
SHARE_OF_TIMES = 0.4
LEAST_LENGTH = 0.9  # of a file, compared with that of another run
REPEAT_EVERY = 4  # trials after which a command whose output is replaced whole is given again
Files = Mapping[str, bytes]


Task, Result = TypeVar("Task"), TypeVar("Result")
INHERITED: list[Callable[[Any], Any]] = []  # what a fork runs, which cannot be pickled


class PlannedTrial(NamedTuple):
    """The kind of fault, the number of the trial among those of its kind and command, and the
    command.
    """

    kind: str
    number: int
    command: str


def plan_trials(
    commands: Mapping[str, Command], counts: Mapping[str, int], seed: int
) -> list[PlannedTrial]:
    """Return all trials in random order, at least as many as asked for; commands are tried by their
    shares.
    """
    total = sum(command.share for command in commands.values())
    planned = [
        PlannedTrial(kind, number, name)
        for kind, count in counts.items()
        for name, command in commands.items()
        for number in range(math.ceil(count * command.share / total))
    ]
    random.Random(seed).shuffle(planned)
    return planned


def run_in_processes(
    tasks: Sequence[Task], jobs: int, run: Callable[[Task], Result]
) -> Iterator[Result]:
    """Yield the result of every task, each from a fork of this process."""
    sys.stdout.flush()
    with multiprocessing.get_context("fork").Pool(jobs, INHERITED.append, (run,)) as pool:
        yield from pool.imap_unordered(_run_inherited, tasks)


def _run_inherited(task: Any) -> Any:
    return INHERITED[-1](task)


class Baseline(NamedTuple):
    """Runs without a fault: an older output, a newer one, that one written again, and the run that
    wrote the last.

    Files that differ between the last two, such as a verification report with times, are compared by their
    length.
    """

    old: Path
    new: Path
    again: Path
    run: Run

    @property
    def code(self) -> int:
        """The exit code: 1 is a verification report that does not hold."""
        return self.run.code


class Bench:
    """Runs trials of the commands below a folder."""

    def __init__(self, base: Path, commands: Mapping[str, Command], seed: int) -> None:
        self.base, self.commands, self.seed = base, commands, seed

    def measure(self, name: str) -> Baseline:
        """Run both variants of a command without a fault, unless one of the
        processes has done so.
        """
        command, folder = self.commands[name], self.base / "baselines" / name.replace(" ", "")
        paths, record = (
            [folder / f"{word}{command.suffix}" for word in (OLD, NEW, "again")],
            folder / "run.json",
        )
        if not record.exists():
            folder.mkdir(parents=True)
            actions = (*command.actions, command.actions[1])
            runs = [
                run_forked(partial(action, path), self.base)
                for action, path in zip(actions, paths, strict=True)
            ]
            if failed := [run.output for run in runs if run.code not in (0, 1)]:
                raise RuntimeError(f"{name} fails without a fault: {failed[0][-600:]}")
            record.write_text(json.dumps(runs[-1]._asdict()))
        old, new, again = paths
        return Baseline(old, new, again, Run(**json.loads(record.read_text())))

    def run(self, trial: PlannedTrial) -> dict[str, Any]:
        """Run a trial at a point that depends on the seed and the trial only.

        Returns the trial, its fault, its outcome, and what is wrong, "" if nothing is.
        """
        numbers = random.Random(f"{self.seed} {trial}")
        run = self.measure(trial.command).run
        if trial.kind == "full_disk":
            fault = Fault(disk_bytes=numbers.randrange(run.disk_bytes))
        elif numbers.random() < SHARE_OF_TIMES:
            seconds = numbers.uniform(FIRST_MOMENT, FIRST_MOMENT + run.seconds)
            fault = Fault(numbers.choice(SIGNALS), seconds=seconds)
        else:
            fault = Fault(numbers.choice(SIGNALS), operation=numbers.randint(1, run.operations))
        has_old, is_repeated = numbers.random() < 0.5, trial.number % REPEAT_EVERY == 0
        outcome, problem = self._try_fault(
            self.base / f"work{os.getpid()}", trial.command, fault, (has_old, is_repeated)
        )
        name = signal.Signals(fault.signal).name if fault.signal else ""
        return trial._asdict() | {
            "fault": str(fault),
            "signal": name,
            "outcome": outcome,
            "problem": problem,
        }

    def _try_fault(
        self, work: Path, name: str, fault: Fault, options: tuple[bool, bool]
    ) -> tuple[str, str]:
        """Run a command with a fault; return its outcome, and what is wrong with what it leaves and
        with a repetition.

        The options are whether an old output exists, and whether the command is given again.
        """
        command, baseline, (has_old, is_repeated) = self.commands[name], self.measure(name), options
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        out = work / f"out{command.suffix}"
        if has_old:
            (shutil.copytree if baseline.old.is_dir() else shutil.copy)(baseline.old, out)
        action: Callable[[], int] = partial(command.actions[1], out)
        run = run_forked(action, self.base, fault)
        checks = _check_parts(command, baseline, out) if _continues(command) else ""
        outcome, wrong = (
            (CONTINUED, checks) if _continues(command) else _compare(out, baseline, has_old)
        )
        problem = (
            _check_ending(run, fault, baseline, outcome) or _check_leftovers(work, run) or wrong
        )
        problem = problem or _find_damage(_read_files_beside(out))
        if not problem and (_continues(command) or is_repeated):
            problem = self._repeat(command, baseline, out, action)
        start = "over an old output" if has_old else "to a new path"
        return outcome, problem and f"{start}: {problem}: {run.output[-400:]}"

    def _repeat(
        self, command: Command, baseline: Baseline, out: Path, action: Callable[[], int]
    ) -> str:
        """Give the command again without a fault; returns what is wrong then."""
        again = run_forked(action, self.base)
        if again.code != baseline.code:
            return f"given again it ends with {again.code}: {again.output[-400:]}"
        if hidden := _list_leftovers(out.parent):
            return f"given again it leaves {hidden}"
        if not _continues(command):
            outcome, problem = _compare(out, baseline, has_old=False)
            return problem or ("" if outcome == NEW else "given again it writes nothing")
        if missing := [part for part in command.parts if not (out / part).exists()]:
            return f"given again it does not write {missing[0]}"
        different = [
            one
            for one in command.results
            if (out / one).read_bytes() != (baseline.new / one).read_bytes()
        ]
        if different:
            return f"given again, {different[0]} differs"
        return _check_parts(command, baseline, out)


def _continues(command: Command) -> bool:
    return bool(command.results or command.parts)


def _check_ending(run: Run, fault: Fault, baseline: Baseline, outcome: str) -> str:
    """What is wrong with the exit code and the messages of a run."""
    expected = {baseline.code, ENDINGS[signal.Signals(fault.signal)] if fault.signal else 2}
    # it may come when the command is over and does not handle it any more
    if fault.signal and outcome != OLD:
        expected.add(-fault.signal)
    if run.code not in expected:
        return f"it ends with {run.code}"
    if "Traceback" in run.output:
        return f"it prints a traceback: {run.output[run.output.index('Traceback') :][:800]}"
    lines = [line for line in run.output.splitlines() if line.startswith("headwise:")]
    if fault.disk_bytes >= 0 and run.code == 2:
        is_explained = len(lines) == 1 and (
            "cannot be written" in lines[0] or "no space left" in lines[0].lower()
        )
        return "" if is_explained else "it does not say in one line that the disk is full"
    return ""


def _check_leftovers(work: Path, run: Run) -> str:
    hidden = _list_leftovers(work)
    return f"it leaves {hidden}" if hidden and run.code != -signal.SIGKILL else ""


def _list_leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*.tmp")]


def read_files(path: Path) -> dict[str, bytes]:
    """The contents of a file or of the files of a folder, by name."""
    if not path.is_dir():
        return {path.suffix: path.read_bytes()} if path.exists() else {}
    return {
        one.relative_to(path).as_posix(): one.read_bytes()
        for one in sorted(path.rglob("*"))
        if one.is_file()
    }


def _read_files_beside(out: Path) -> dict[str, bytes]:
    """The contents of the other files in the folder of an output, such as a state to go on from."""
    files = [
        path
        for path in out.parent.iterdir()
        if path.is_file() and path != out and path.suffix != ".tmp"
    ]
    return {path.name: path.read_bytes() for path in files}


def _compare(out: Path, baseline: Baseline, has_old: bool) -> tuple[str, str]:
    """Whether an output is the old or the new one, whole, and what is wrong if it is neither."""
    files, old, new = read_files(out), read_files(baseline.old), read_files(baseline.new)
    if files == (old if has_old else {}):
        return OLD, "" if has_old or not out.exists() else "it leaves an empty folder"
    if set(files) != set(new):
        return "", f"its files are {sorted(set(files) ^ set(new))[:3]} more or less than expected"
    changed = [name for name in new if old.get(name) != new[name]]
    if has_old and any(files[name] == old.get(name) for name in changed):
        return (
            "",
            f"{[name for name in changed if files[name] == old.get(name)][:3]} are those of the "
            "old output",
        )
    return NEW, _find_cut(files, new, read_files(baseline.again)) or _find_damage(files)


def _find_cut(files: Files, new: Files, again: Files) -> str:
    """A file that is not the new one, or shorter where two runs give different files; "" if there
    is none.
    """
    for name, content in files.items():
        if new[name] == again[name] and content != new[name]:
            return f"{name} is neither the old nor the new file"
        if len(content) < LEAST_LENGTH * len(new[name]):
            return f"{name} is short"
    return ""


def _check_parts(command: Command, baseline: Baseline, out: Path) -> str:
    """What is wrong with the folders below an output that appear complete or not at all."""
    for part in command.parts:
        files = read_files(out / part)
        if (out / part).exists() and set(files) != set(read_files(baseline.new / part)):
            return f"{part} is not complete"
        if problem := _find_damage(files):
            return problem
    return ""


def _find_damage(files: Files) -> str:
    for name, content in files.items():
        if not content:
            return f"{name} is empty"
        if name.endswith(".json"):
            try:
                json.loads(content)
            except ValueError:
                return f"{name} is cut"
    return ""

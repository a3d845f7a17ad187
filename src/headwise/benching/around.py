"""What goes around every run: threads, states that are drawn from, the machine before it, and a folder after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from ..errors import SpecError
from ..files import FolderLock
from .limits import MachineLimits
from .machine import check_threads, describe_machine, use_threads
from .rows import CaseTimer, BenchmarkRow
from .turns import TimingPace

ProgressCallback = Callable[[str], None]
RowSource = Callable[[CaseTimer], Iterable[BenchmarkRow]]  # one after the other, so that an interrupt keeps those before it


class WritableReport(Protocol):
    """What is found, and can be written into a folder."""

    def write(self, folder: Path | str) -> None: ...


ReportT = TypeVar("K", bound=WritableReport)


def no_progress(said: str) -> None:
    """Nobody looks on."""


@dataclass(frozen=True)
class BenchmarkSession:
    """How many threads work, where what was found is written, and who looks on."""

    threads: int | None = None
    output_folder: Path | str | None = None
    progress: ProgressCallback = no_progress

    def run(self, pace: TimingPace, quick: bool, found: RowSource, made: Callable[[BenchmarkRow, list[BenchmarkRow]], ReportT]) -> ReportT:
        """Everything that is found, or what was until an interrupt, which is then said."""
        count = check_threads(self.threads)
        if self.output_folder is not None:
            _check_folder(self.output_folder)
        with use_threads(count), torch.random.fork_rng():
            how = CaseTimer(pace, MachineLimits.of_this_machine())
            begun = how.clock()
            self.progress("measuring the machine")
            told, each = describe_machine(how.limits, count) | {"quick": quick, "interrupted": False}, list[BenchmarkRow]()
            try:
                for one in found(how):
                    each.append(one)
            except KeyboardInterrupt:
                told["interrupted"] = True
            told["took"] = how.clock() - begun
        self.progress("")
        whole = made(told, each)
        if self.output_folder is not None:
            whole.write(self.output_folder)
        return whole


def _check_folder(folder: Path | str) -> None:
    """Refuse where nothing can be written, before anything is measured."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise SpecError(f"{folder} is no folder; give one that is, or a new name")
    with FolderLock(folder):
        pass

"""What goes around every run: threads, states that are drawn from, the machine before it, and a folder after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from ..errors import SpecError
from ..files import Lock
from .limits import Limits
from .machine import checked, machine, on_threads
from .rows import Bench, Row
from .turns import Pace

Tell = Callable[[str], None]
Found = Callable[[Bench], Iterable[Row]]  # one after the other, so that an interrupt keeps those before it


class Kept(Protocol):
    """What is found, and can be written into a folder."""

    def write(self, folder: Path | str) -> None: ...


K = TypeVar("K", bound=Kept)


def silent(said: str) -> None:
    """Nobody looks on."""


@dataclass(frozen=True)
class Around:
    """How many threads work, where what was found is written, and who looks on."""

    threads: int | None = None
    out: Path | str | None = None
    tell: Tell = silent

    def run(self, pace: Pace, quick: bool, found: Found, made: Callable[[Row, list[Row]], K]) -> K:
        """Everything that is found, or what was until an interrupt, which is then said."""
        count = checked(self.threads)
        if self.out is not None:
            _check(self.out)
        with on_threads(count), torch.random.fork_rng():
            how = Bench(pace, Limits.here())
            begun = how.clock()
            self.tell("measuring the machine")
            told, each = machine(how.limits, count) | {"quick": quick, "interrupted": False}, list[Row]()
            try:
                for one in found(how):
                    each.append(one)
            except KeyboardInterrupt:
                told["interrupted"] = True
            told["took"] = how.clock() - begun
        self.tell("")
        whole = made(told, each)
        if self.out is not None:
            whole.write(self.out)
        return whole


def _check(folder: Path | str) -> None:
    """Refuse where nothing can be written, before anything is measured."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise SpecError(f"{folder} is no folder; give one that is, or a new name")
    with Lock(folder):
        pass

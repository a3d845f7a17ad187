"""The way of a model through its steps of learning: what is told, what is kept, and who may interrupt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import Transformer
from ..training.interrupts import Interrupts
from .learning import Pupil


class Point(NamedTuple):
    """Where learning stood: the mean loss of the lessons since the point before, and that of texts held back.

    `opened` is how many gates are expected to be open, where there are any.
    """

    step: int
    loss: float | None
    held_out: float | None = None
    opened: float | None = None


Progress = Callable[[Point], None]


def unheard(point: Point) -> None:
    """Nobody asks how it goes."""


class Beside(ABC):
    """What learns beside a model's own tensors."""

    @abstractmethod
    def added(self, step: int) -> Tensor | float:
        """What joins the loss of a step."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Its own step."""

    @property
    @abstractmethod
    def opened(self) -> float | None:
        """How many gates are expected to be open."""


class Alone(Beside):
    """Nothing."""

    def added(self, step: int) -> float:
        return 0.0

    def step(self, step: int) -> None:
        pass

    @property
    def opened(self) -> None:
        return None


class Course:
    """The way of a pupil through its steps: the curve, and its tensors as they were at the point that is kept."""

    def __init__(self, pupil: Pupil, beside: Beside, progress: Progress, keep: str) -> None:
        self.pupil, self.beside, self.progress, self._keep = pupil, beside, progress, keep
        self.curve: list[Point] = []
        self.step = self.kept = 0  # how far it came, and the step whose tensors are kept
        self.ended = ""
        self._losses: list[float] = []
        self._tensors: dict[str, Tensor] = {}

    def go(self) -> None:
        """All steps, or until somebody interrupts; the model is then as it was kept."""
        stopped = False
        try:
            with Interrupts() as interrupts, seeded(self.pupil.how.seed), at_rest(self.pupil.teacher):
                self._look()
                while self.step < self.pupil.how.steps and not interrupts.asked:
                    self._take()
                if self._losses:
                    self._look()
        except KeyboardInterrupt:  # in the middle of a step: what was kept before it is whole
            stopped = True
        if stopped or self.step < self.pupil.how.steps:
            self.ended = f"interrupted at step {self.step} of {self.pupil.how.steps}"
        if not self._tensors:
            raise KeyboardInterrupt("interrupted before the first step; nothing was changed")
        self.pupil.net.load_state_dict(self._tensors)

    def _take(self) -> None:
        """One step, and a look at texts held back where one is due."""
        self.step += 1
        self._losses.append(self.pupil.step(self.step, lambda: self.beside.added(self.step)))
        self.beside.step(self.step)
        if self.step % self.pupil.how.every == 0:
            self._look()
        else:
            self.progress(Point(self.step, self._losses[-1], opened=self.beside.opened))

    def _look(self) -> None:
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        point = Point(self.step, mean, self.pupil.held_out(self.pupil.net), self.beside.opened)
        best = min((old.held_out for old in self.curve if old.held_out is not None), default=None)
        self.curve.append(point)
        if self._keep == "last" or best is None or (point.held_out is not None and point.held_out < best):
            self.kept = self.step
            self._tensors = {name: one.detach().clone() for name, one in self.pupil.net.state_dict().items()}
        self._losses = []
        self.progress(point)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Where numbers that torch draws follow from a seed; its own generators go on behind as if nothing had been."""
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(cards):
        torch.manual_seed(seed)
        yield


@contextmanager
def at_rest(net: Transformer | None) -> Iterator[None]:
    """Where a model drops nothing out."""
    was = net is not None and net.training
    if net is not None:
        net.eval()
    try:
        yield
    finally:
        if net is not None:
            net.train(was)

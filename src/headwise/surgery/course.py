"""The way of a model through its steps of learning: what is told, what is kept, and who may interrupt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..models import Transformer
from ..training.interrupts import InterruptGuard
from .learning import Student


class RetrainingPoint(NamedTuple):
    """Where learning stood: the mean loss of the lessons since the point before, and that of texts held back.

    `opened` is how many gates are expected to be open, where there are any.
    """

    step: int
    loss: float | None
    held_out: float | None = None
    num_open_gates: float | None = None


PointCallback = Callable[[RetrainingPoint], None]


def no_progress(point: RetrainingPoint) -> None:
    """Nobody asks how it goes."""


class AuxiliaryTraining(ABC):
    """What learns beside a model's own tensors."""

    @abstractmethod
    def extra_loss(self, step: int) -> Tensor | float:
        """What joins the loss of a step."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Its own step."""

    @property
    @abstractmethod
    def num_open_gates(self) -> float | None:
        """How many gates are expected to be open."""


class NoAuxiliaryTraining(AuxiliaryTraining):
    """Nothing."""

    def extra_loss(self, step: int) -> float:
        return 0.0

    def step(self, step: int) -> None:
        pass

    @property
    def num_open_gates(self) -> None:
        return None


class RetrainingLoop:
    """The way of a pupil through its steps: the curve, and its tensors as they were at the point that is kept."""

    def __init__(self, student: Student, auxiliary: AuxiliaryTraining, progress: PointCallback, keep: str) -> None:
        self.student, self.auxiliary, self.progress, self._keep = student, auxiliary, progress, keep
        self.curve: list[RetrainingPoint] = []
        self.step = self.saved_step = 0  # how far it came, and the step whose tensors are kept
        self.stop_reason = ""
        self._losses: list[float] = []
        self._tensors: dict[str, Tensor] = {}

    def run(self) -> None:
        """All steps, or until somebody interrupts; the model is then as it was kept."""
        stopped = False
        try:
            with InterruptGuard() as interrupts, fork_rng(self.student.options.seed), eval_mode(self.student.teacher):
                self._evaluate()
                while self.step < self.student.options.steps and not interrupts.is_requested:
                    self._train_step()
                if self._losses:
                    self._evaluate()
        except KeyboardInterrupt:  # in the middle of a step: what was kept before it is whole
            stopped = True
        if stopped or self.step < self.student.options.steps:
            self.stop_reason = f"interrupted at step {self.step} of {self.student.options.steps}"
        if not self._tensors:
            raise KeyboardInterrupt("interrupted before the first step; nothing was changed")
        self.student.net.load_state_dict(self._tensors)

    def _train_step(self) -> None:
        """One step, and a look at texts held back where one is due."""
        self.step += 1
        self._losses.append(self.student.step(self.step, lambda: self.auxiliary.extra_loss(self.step)))
        self.auxiliary.step(self.step)
        if self.step % self.student.options.every == 0:
            self._evaluate()
        else:
            self.progress(RetrainingPoint(self.step, self._losses[-1], num_open_gates=self.auxiliary.num_open_gates))

    def _evaluate(self) -> None:
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        point = RetrainingPoint(self.step, mean, self.student.held_out_loss(self.student.net), self.auxiliary.num_open_gates)
        best = min((old.held_out for old in self.curve if old.held_out is not None), default=None)
        self.curve.append(point)
        if self._keep == "last" or best is None or (point.held_out is not None and point.held_out < best):
            self.saved_step = self.step
            self._tensors = {name: one.detach().clone() for name, one in self.student.net.state_dict().items()}
        self._losses = []
        self.progress(point)


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Where numbers that torch draws follow from a seed; its own generators go on behind as if nothing had been."""
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(cards):
        torch.manual_seed(seed)
        yield


@contextmanager
def eval_mode(net: Transformer | None) -> Iterator[None]:
    """Where a model drops nothing out."""
    was = net is not None and net.training
    if net is not None:
        net.eval()
    try:
        yield
    finally:
        if net is not None:
            net.train(was)

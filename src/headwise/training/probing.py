"""The trial steps behind a choice of precision and compilation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..models import Transformer
from ..tasks import Batch
from .choosing import PROBE, Choice, faster, kept, worth_compiling
from .recipe import Recipe
from .stepping import Stepper

SHARE = 0.05  # of the run's own time, that trying may take at most


class Trial:
    """Trial steps of a model on a few batches, whose shapes may differ; none changes it, nor what is drawn later."""

    def __init__(self, net: Transformer, recipe: Recipe, device: torch.device, batches: Sequence[Batch]) -> None:
        self.net, self.recipe, self.device, self.batches = net, recipe, device, batches

    def choose(self) -> Stepper:
        """What steps as the recipe says; where it says "auto", as is fastest here, with the reasons."""
        precision, reason, seconds = self._precision()
        plain = Choice(precision, "off", (reason,))
        if self.recipe.compile != "auto":
            told = f"compile {self.recipe.compile}, as asked"
            return self._stepper(Choice(precision, self.recipe.compile, (reason, told)))
        if seconds is None:
            seconds = self._seconds(self._stepper(plain))
        shapes = {(batch.x.shape, batch.source.shape if batch.source is not None else None) for batch in self.batches}
        worth, told = worth_compiling(seconds, self.recipe.steps, len(shapes))
        if not worth:
            return self._stepper(Choice(precision, "off", (reason, told)))
        compiled = self._stepper(Choice(precision, "on"))
        took, failed = self._tried(compiled)
        if took is None:
            return self._stepper(Choice(precision, "off", (reason, f"not compiled, it fails: {failed}")))
        compile_, told = kept(seconds, took, self.recipe.steps)
        chosen = Choice(precision, compile_, (reason, told))
        if compile_ == "off":
            return self._stepper(chosen)
        compiled.choice = chosen
        return compiled

    def _precision(self) -> tuple[str, str, float | None]:
        """A precision, the reason, and the seconds of a step in it where they were measured."""
        if self.recipe.precision != "auto":
            return self.recipe.precision, f"{self.recipe.precision}, as asked", None
        exact = self._seconds(self._stepper(Choice("fp32", "off")))
        short, failed = self._tried(self._stepper(Choice("bf16", "off")))
        if short is None:
            return "fp32", f"fp32: a step in bf16 fails: {failed}", exact
        name, reason = faster(exact, short)
        return name, reason, min(exact, short) if name == "bf16" else exact

    def _stepper(self, choice: Choice) -> Stepper:
        return Stepper(self.net, self.recipe, choice, self.device)

    def _tried(self, stepper: Stepper) -> tuple[float | None, str]:
        """The seconds of a step; or none, and what was said when it failed."""
        try:
            return self._seconds(stepper), ""
        except RuntimeError as error:
            return None, str(error).strip().splitlines()[0]

    def _seconds(self, stepper: Stepper) -> float:
        devices = [self.device] if self.device.type == "cuda" else []
        self.net.train()
        try:
            with torch.random.fork_rng(devices):
                steps = self.recipe.steps // len(self.batches)
                return seconds_of(lambda: self._steps(stepper), self._wait, steps) / len(self.batches)
        finally:
            self.net.zero_grad(set_to_none=True)

    def _steps(self, stepper: Stepper) -> None:
        for batch in self.batches:
            self.net.zero_grad(set_to_none=True)
            stepper.gradients(batch)

    def _wait(self) -> None:
        wait_for(self.device)


def wait_for(device: torch.device) -> None:
    """Until what was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Callable[[], Any], wait: Callable[[], Any], steps: int, most: float = PROBE) -> float:
    """Seconds that a step takes after one that warms up: the least of as many as fit into `most` seconds, since
    whatever else runs on a machine only adds to them.

    Of a run of so many steps a small share is enough, but one step always is taken.
    """
    warm = _timed(step, wait)
    budget = min(most, SHARE * warm * steps)
    taken = [_timed(step, wait)]
    while sum(taken) < budget:
        taken.append(_timed(step, wait))
    return min(taken)


def _timed(step: Callable[[], Any], wait: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - begun


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of one large matrix product here: what a step is held against."""
    size = 8192 if device.type == "cuda" else 512
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: left @ right, lambda: wait_for(device), steps=1000, most=0.02)

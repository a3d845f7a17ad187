"""The trial steps behind a choice of precision and compilation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..data import Batch
from ..data.translation import UnpackableBatch, pack_batch, real_token_share
from ..distributed.sharded_model import BatchForward, wrap_single_process
from ..models import Transformer
from .recipe import Recipe
from .train_step import (
    TRIAL_SECONDS,
    StepOptions,
    TrainStep,
    choose_fastest,
    choose_row_layout,
    decide_compile,
    decide_compile_trial,
)

MAX_PLAIN_LENGTH = 512  # tokens of a row, up to which plain attention is tried
MAX_FILL_RATIO = 0.95  # of rows that are no padding, from which packing has nothing to gain
SHARE = 0.05  # of the run's own time, that trying may take at most


class StepTrial:
    """Trial steps of a model on a few batches, whose shapes may differ; none changes it, nor what is drawn later."""

    def __init__(self, net: Transformer, recipe: Recipe, device: torch.device, batches: Sequence[Batch]) -> None:
        self.holding = wrap_single_process(net, device)
        self.net, self.recipe, self.device, self.batches = net, recipe, device, batches

    def choose(self) -> StepOptions:
        """How to step: as the recipe says; where it says "auto", as is fastest here, with the reasons."""
        (precision, attention), reasons, seconds = self._choose_precision()
        plain = StepOptions(
            precision, "off", reasons, attention, "packed" if self.recipe.rows == "packed" else "padded"
        )
        if self.recipe.rows == "auto" and self.recipe.compile != "on":
            plain, seconds = self._try_packed(plain, seconds)
        if self.recipe.compile != "auto":
            told = f"compile {self.recipe.compile}, as asked"
            return replace(plain, compile=self.recipe.compile, reasons=(*plain.reasons, told))
        reasons = plain.reasons
        if seconds is None:
            seconds = self._seconds(self._make_step(plain))
        shapes = {(batch.x.shape, batch.source.shape if batch.source is not None else None) for batch in self.batches}
        worth, told = decide_compile_trial(seconds, self.recipe.steps, len(shapes))
        if not worth:
            return replace(plain, reasons=(*reasons, told))
        if self.recipe.rows == "packed":
            return replace(plain, reasons=(*reasons, "not compiled, for packed rows have another shape in every batch"))
        compiled = replace(plain, compile="on", rows="padded")
        took, failed = self._time_or_error(self._make_step(compiled))
        if took is None:
            return replace(plain, reasons=(*reasons, f"not compiled, it fails: {failed}"))
        compile_, told = decide_compile(seconds, took, self.recipe.steps)
        return replace(compiled if compile_ == "on" else plain, reasons=(*reasons, told))

    def _try_packed(self, padded: StepOptions, seconds: float | None) -> tuple[StepOptions, float | None]:
        """The same with texts one behind the other, where enough is padding and that is faster; its seconds a step."""
        full = sum(map(real_token_share, self.batches)) / len(self.batches)
        if full > MAX_FILL_RATIO:
            return padded, seconds
        try:
            for batch in self.batches:
                pack_batch(batch)
        except UnpackableBatch as why:
            return replace(padded, reasons=(*padded.reasons, f"rows are filled up: {why}")), seconds
        if seconds is None:
            seconds = self._seconds(self._make_step(padded))
        ways = {attention: replace(padded, attention=attention, rows="packed") for attention in self._attentions()}
        taken = {
            way: took for way, one in ways.items() if (took := self._time_or_error(self._make_step(one))[0]) is not None
        }
        return choose_row_layout(padded, seconds, {ways[way]: took for way, took in taken.items()}, full)

    def _choose_precision(self) -> tuple[tuple[str, str], tuple[str, ...], float | None]:
        """A precision and how to attend, the reasons, and the seconds of a step where they were measured."""
        ways = [(p, a) for p in self._precisions() for a in self._attentions()]
        rows = "packed" if self.recipe.rows == "packed" else "padded"
        if len(ways) == 1:
            asked = self.recipe.precision, self.recipe.attention
            return ways[0], tuple(f"{said}, as asked" for said in asked if said not in ("auto", "fused")), None
        seconds: dict[tuple[str, str], float] = {}
        failures: list[str] = []
        for way in ways:
            taken, failed = self._time_or_error(
                self._make_step(StepOptions(way[0], "off", attention=way[1], rows=rows))
            )
            if taken is None:
                failures.append(f"a step in {way[0]} fails: {failed}")
            else:
                seconds[way] = taken
        if not seconds:
            raise RuntimeError(failures[0])
        best, reason = choose_fastest(seconds)
        return best, (reason, *failures), seconds[best]

    def _precisions(self) -> tuple[str, ...]:
        return ("fp32", "bf16") if self.recipe.precision == "auto" else (self.recipe.precision,)

    def _attentions(self) -> tuple[str, ...]:
        """Plain attention holds every score, so only short rows are tried with it; elsewhere fused is what pays."""
        if self.recipe.attention != "auto":
            return (self.recipe.attention,)
        longest = max(x.shape[1] for batch in self.batches for x in (batch.x, batch.source) if x is not None)
        return ("fused", "plain") if self.device.type == "cpu" and longest <= MAX_PLAIN_LENGTH else ("fused",)

    def _make_step(self, choice: StepOptions) -> TrainStep:
        return TrainStep(replace(self.holding, path=BatchForward(self.net)), self.recipe, choice)

    def _time_or_error(self, stepper: TrainStep) -> tuple[float | None, str]:
        """The seconds of a step; or none, and what was said when it failed."""
        try:
            return self._seconds(stepper), ""
        except RuntimeError as error:
            return None, str(error).strip().splitlines()[0]

    def _seconds(self, stepper: TrainStep) -> float:
        devices = [self.device] if self.device.type == "cuda" else []
        self.net.train()
        try:
            with torch.random.fork_rng(devices):
                steps = self.recipe.steps // len(self.batches)
                return measure_step_seconds(lambda: self._steps(stepper), self._wait, steps) / len(self.batches)
        finally:
            self.net.zero_grad(set_to_none=True)

    def _steps(self, stepper: TrainStep) -> None:
        for batch in self.batches:
            self.net.zero_grad(set_to_none=True)
            stepper.compute_gradients(batch)

    def _wait(self) -> None:
        synchronise_device(self.device)


def synchronise_device(device: torch.device) -> None:
    """Until what was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_step_seconds(
    step: Callable[[], Any], wait: Callable[[], Any], steps: int, max_seconds: float = TRIAL_SECONDS
) -> float:
    """Seconds that a step takes after one that warms up: the least of as many as fit into `most` seconds, since
    whatever else runs on a machine only adds to them.

    Of a run of so many steps a small share is enough, but one step always is taken.
    """
    warm = _time_once(step, wait)
    budget = min(max_seconds, SHARE * warm * steps)
    taken = [_time_once(step, wait)]
    while sum(taken) < budget:
        taken.append(_time_once(step, wait))
    return min(taken)


def _time_once(step: Callable[[], Any], wait: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - begun


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of one large matrix product here: what a step is held against."""
    size = 8192 if device.type == "cuda" else 512
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    return (
        2
        * size**3
        / measure_step_seconds(lambda: left @ right, lambda: synchronise_device(device), steps=1000, max_seconds=0.02)
    )

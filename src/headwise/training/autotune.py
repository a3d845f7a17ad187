"""Autotuning: trial steps that choose precision, attention, row layout and compilation; the peak
FLOPs of a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..data import Batch
from ..data.task import UnpackableBatch, pack_batch, real_token_share
from ..distributed.sharded_model import BatchForward, wrap_single_process
from ..machine.takeover_points import current_points, takeover_size
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

MAX_PLAIN_LENGTH = 512  # longest rows for which plain attention is tried
MAX_FILL_RATIO = 0.95  # packing is not tried if a larger share of the rows is not padding
PEAK_SECONDS = 0.1  # time of the products of one size
MAX_TRIAL_SHARE = (
    0.05  # the trials of one option take at most this share of the run's estimated time
)


class Autotuner:
    """Chooses the options of training steps by timing trial steps on a few batches, whose shapes
    may differ.

    Trial steps change neither weights nor random states.
    """

    def __init__(
        self, net: Transformer, recipe: Recipe, device: torch.device, batches: Sequence[Batch]
    ) -> None:
        self.sharded_model = wrap_single_process(net, device)
        self.net, self.recipe, self.device, self.batches = net, recipe, device, batches

    def choose_options(self) -> StepOptions:
        """Options of the recipe, with each "auto" replaced by the fastest value, and the reasons
        for the choices.
        """
        (precision, attention), reasons, seconds = self._choose_precision()
        plain = StepOptions(
            precision,
            "off",
            reasons,
            attention,
            "packed" if self.recipe.rows == "packed" else "padded",
        )
        if self.recipe.rows == "auto" and self.recipe.compile != "on":
            plain, seconds = self._try_packed(plain, seconds)
        if self.recipe.compile != "auto":
            reason = f"compile {self.recipe.compile}, as set in the recipe"
            return replace(plain, compile=self.recipe.compile, reasons=(*plain.reasons, reason))
        reasons = plain.reasons
        if seconds is None:
            seconds = self._time_step(self._make_step(plain))
        shapes = {
            (batch.x.shape, batch.source.shape if batch.source is not None else None)
            for batch in self.batches
        }
        worth_trying, reason = decide_compile_trial(seconds, self.recipe.steps, len(shapes))
        if not worth_trying:
            return replace(plain, reasons=(*reasons, reason))
        if self.recipe.rows == "packed":
            reason = "not compiled: packed rows have another shape in every batch"
            return replace(plain, reasons=(*reasons, reason))
        compiled = replace(plain, compile="on", rows="padded")
        compiled_seconds, failure = self._time_or_error(self._make_step(compiled))
        if compiled_seconds is None:
            return replace(
                plain, reasons=(*reasons, f"not compiled: compilation failed: {failure}")
            )
        compile_mode, reason = decide_compile(seconds, compiled_seconds, self.recipe.steps)
        return replace(compiled if compile_mode == "on" else plain, reasons=(*reasons, reason))

    def _try_packed(
        self, padded: StepOptions, seconds: float | None
    ) -> tuple[StepOptions, float | None]:
        """Packed rows if enough of the batches is padding and packing is faster, and the seconds
        per step.
        """
        fill_ratio = sum(map(real_token_share, self.batches)) / len(self.batches)
        if fill_ratio > MAX_FILL_RATIO:
            return padded, seconds
        try:
            for batch in self.batches:
                pack_batch(batch)
        except UnpackableBatch as reason:
            return replace(
                padded, reasons=(*padded.reasons, f"padded rows, packing is not possible: {reason}")
            ), seconds
        if seconds is None:
            seconds = self._time_step(self._make_step(padded))
        packed_seconds: dict[StepOptions, float] = {}
        for attention in self._attention_candidates():
            packed = replace(padded, attention=attention, rows="packed")
            trial_seconds, _ = self._time_or_error(self._make_step(packed))
            if trial_seconds is not None:
                packed_seconds[packed] = trial_seconds
        return choose_row_layout(padded, seconds, packed_seconds, fill_ratio)

    def _choose_precision(self) -> tuple[tuple[str, str], tuple[str, ...], float | None]:
        """Precision and attention, the reasons, and the seconds per step if they were measured."""
        candidates = [
            (p, a) for p in self._precision_candidates() for a in self._attention_candidates()
        ]
        rows = "packed" if self.recipe.rows == "packed" else "padded"
        if len(candidates) == 1:
            values = self.recipe.precision, self.recipe.attention
            reasons = tuple(
                f"{value}, as set in the recipe"
                for value in values
                if value not in ("auto", "fused")
            )
            return candidates[0], (*self._reasons_against_bf16(), *reasons), None
        seconds: dict[tuple[str, str], float] = {}
        failures: list[str] = []
        for precision, attention in candidates:
            options = StepOptions(precision, "off", attention=attention, rows=rows)
            trial_seconds, failure = self._time_or_error(self._make_step(options))
            if trial_seconds is None:
                failures.append(f"a step in {precision} fails: {failure}")
            else:
                seconds[precision, attention] = trial_seconds
        if not seconds:
            raise RuntimeError(failures[0])
        best, reason = choose_fastest(seconds)
        return best, (reason, *self._reasons_against_bf16(), *failures), seconds[best]

    def _precision_candidates(self) -> tuple[str, ...]:
        """Candidates for `precision`; bf16 is not tried on a CPU that computes faster in fp32."""
        if self.recipe.precision != "auto":
            return (self.recipe.precision,)
        return ("fp32",) if self._reasons_against_bf16() else ("fp32", "bf16")

    def _reasons_against_bf16(self) -> tuple[str, ...]:
        """At most one reason not to try bf16; empty if it is tried, or if the recipe sets the
        precision.
        """
        if self.recipe.precision != "auto" or self.device.type != "cpu":
            return ()
        if sum(parameter.numel() for parameter in self.net.parameters()) >= takeover_size(
            "bf16_training"
        ):
            return ()
        points = current_points()
        is_measured = "bf16_training" in points.measured
        reason = "bf16 was measured to be slower" if is_measured else "bf16 was not measured"
        return (f"fp32: {reason} on this class of machine ({points.machine_class})",)

    def _attention_candidates(self) -> tuple[str, ...]:
        """Candidates for `attention`; "plain" stores all scores, so it is only tried for short rows
        on the CPU.
        """
        if self.recipe.attention != "auto":
            return (self.recipe.attention,)
        longest = max(
            x.shape[1] for batch in self.batches for x in (batch.x, batch.source) if x is not None
        )
        return (
            ("fused", "plain")
            if self.device.type == "cpu" and longest <= MAX_PLAIN_LENGTH
            else ("fused",)
        )

    def _make_step(self, options: StepOptions) -> TrainStep:
        return TrainStep(
            replace(self.sharded_model, forward=BatchForward(self.net)), self.recipe, options
        )

    def _time_or_error(self, train_step: TrainStep) -> tuple[float | None, str]:
        """Seconds per step and ""; or None and the first line of the error if the step failed."""
        try:
            return self._time_step(train_step), ""
        except RuntimeError as error:
            return None, str(error).strip().splitlines()[0]

    def _time_step(self, train_step: TrainStep) -> float:
        devices = [self.device] if self.device.type == "cuda" else []
        self.net.train()
        try:
            with torch.random.fork_rng(devices):
                steps = self.recipe.steps // len(self.batches)
                return measure_step_seconds(
                    lambda: self._run_steps(train_step), self._wait, steps
                ) / len(self.batches)
        finally:
            self.net.zero_grad(set_to_none=True)

    def _run_steps(self, train_step: TrainStep) -> None:
        for batch in self.batches:
            self.net.zero_grad(set_to_none=True)
            train_step.compute_gradients(batch)

    def _wait(self) -> None:
        synchronise_device(self.device)


def synchronise_device(device: torch.device) -> None:
    """Wait until all work of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_step_seconds(
    step: Callable[[], Any], wait: Callable[[], Any], steps: int, max_seconds: float = TRIAL_SECONDS
) -> float:
    """Seconds per step after a warm-up step: the minimum of repeated measurements.

    The minimum is used because other processes can only add to the time. Measurements stop after
    `max_seconds`, or after a small share of the time of a run of `steps` steps; at least one is
    made.
    """
    warmup_seconds = _time_once(step, wait)
    budget = min(max_seconds, MAX_TRIAL_SHARE * warmup_seconds * steps)
    measurements = [_time_once(step, wait)]
    while sum(measurements) < budget:
        measurements.append(_time_once(step, wait))
    return min(measurements)


def _time_once(step: Callable[[], Any], wait: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of the fastest of several matrix products: the reference for the MFU of a
    training step.

    It is measured once per process. Other processes on the machine may still disturb it, so a run
    that reaches more raises its own reference.
    """
    key = device, dtype, torch.get_num_threads()
    if key not in _PEAK_FLOPS:
        _PEAK_FLOPS[key] = _measure_peak_flops(device, dtype)
    return _PEAK_FLOPS[key]


_PEAK_FLOPS: dict[
    tuple[torch.device, torch.dtype, int], float
] = {}  # by device, precision and number of threads


def _measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    rates = list[float]()
    for size in (4096, 8192) if device.type == "cuda" else (384, 768, 1536):
        left, right = torch.ones(
            2, size, size, device=device, dtype=dtype
        )  # without drawing random numbers
        wait = partial(synchronise_device, device)
        seconds = measure_step_seconds(
            partial(torch.mm, left, right), wait, steps=10**6, max_seconds=PEAK_SECONDS
        )
        rates.append(2 * size**3 / seconds)
    return max(rates)

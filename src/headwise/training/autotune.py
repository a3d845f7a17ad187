"""Autotuning: trial steps that choose precision, attention, row layout and compilation; the peak
FLOPs of a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from ..kernels.takeover_points import current_points, takeover_size
from ..models import Transformer
from ..models.distributed.sharded_model import BatchForward, wrap_single_process
from .data import Batch
from .data.task import UnpackableBatch, pack_batch, real_token_share
from .recipe import Recipe
from .train_step import StepOptions, TrainStep

MAX_PLAIN_LENGTH = 512  # longest rows for which plain attention is tried
MAX_FILL_RATIO = 0.95  # packing is not tried if a larger share of the rows is not padding
COMPILE_SECONDS = 30.0  # to compile both passes for one batch shape on a few CPU cores
COMPILE_GAIN = 0.3  # share of the step time that compilation saves in good cases
MIN_GAIN = 0.05  # smaller gains, as a share of the step time, are treated as noise
TRIAL_SECONDS = 1.2  # time limit per option, so that all trials together take about five seconds
PEAK_SECONDS = 0.1  # time of the products of one size
MAX_TRIAL_SHARE = 0.05  # of the run's estimated time, for the trials of one option


class Autotuner:
    """Chooses the options of training steps by timing trial steps on a few batches, whose shapes
    may differ.

    Trial steps change neither weights nor random states.
    """

    def __init__(
        self, net: Transformer, recipe: Recipe, device: torch.device, batches: Sequence[Batch]
    ) -> None:
        self.sharded_model = wrap_single_process(net, device)
        self.net = net
        self.recipe = recipe
        self.device = device
        self.batches = batches
        self._reasons: list[str] = []
        self._seconds: dict[StepOptions, float] = {}  # per step, of the options that were timed

    def choose_options(self) -> StepOptions:
        """Options of the recipe, with each "auto" replaced by the fastest value, and the reasons
        for the choices.
        """
        recipe = self.recipe
        rows = "packed" if recipe.rows == "packed" else "padded"
        attentions = self._attentions()
        candidates = [
            StepOptions(precision, "off", attention=attention, rows=rows)
            for precision, attention in product(self._precisions(), attentions)
        ]
        options = self._choose_fastest(candidates)
        if self._can_pack():
            packed = [replace(options, attention=one, rows="packed") for one in attentions]
            options = self._choose_fastest([options, *packed])
        compiled = replace(options, compile="on")
        if recipe.compile == "on":
            options = compiled
        elif recipe.compile == "auto" and self._compilation_pays(options):
            options = self._choose_fastest([options, replace(compiled, rows="padded")])
        return replace(options, reasons=tuple(self._reasons))

    def _precisions(self) -> Sequence[str]:
        """Candidates for `precision`; bf16 is not tried on processors where it was not faster."""
        if self.recipe.precision != "auto":
            return [self.recipe.precision]
        num_parameters = sum(one.numel() for one in self.net.parameters())
        if self.device.type != "cpu" or num_parameters >= takeover_size("bf16_training"):
            return ["fp32", "bf16"]
        points = current_points()
        fact = "measured to be slower" if "bf16_training" in points.measured else "not measured"
        self._reasons.append(
            f"fp32: bf16 was {fact} on this class of machine ({points.machine_class})"
        )
        return ["fp32"]

    def _attentions(self) -> Sequence[str]:
        """Candidates for `attention`; "plain" stores all scores, so it is only tried for short rows
        on the CPU.
        """
        if self.recipe.attention != "auto":
            return [self.recipe.attention]
        inputs = [batch.x for batch in self.batches]
        inputs += [batch.source for batch in self.batches if batch.source is not None]
        is_short = max(x.shape[1] for x in inputs) <= MAX_PLAIN_LENGTH
        return ["fused", "plain"] if self.device.type == "cpu" and is_short else ["fused"]

    def _can_pack(self) -> bool:
        """True if the recipe allows packed rows, and enough of the padded rows is padding."""
        if self.recipe.rows != "auto" or self.recipe.compile == "on":
            return False
        if sum(map(real_token_share, self.batches)) / len(self.batches) > MAX_FILL_RATIO:
            return False
        try:
            for batch in self.batches:
                pack_batch(batch)
        except UnpackableBatch as reason:
            self._reasons.append(f"padded rows, packing is not possible: {reason}")
            return False
        return True

    def _compilation_pays(self, options: StepOptions) -> bool:
        """True if compiled steps may save more than twice the time to compile them."""
        if self.recipe.rows == "packed":
            self._reasons.append("not compiled: packed rows have another shape in every batch")
            return False
        shapes = {
            (one.x.shape, one.source is not None and one.source.shape) for one in self.batches
        }
        cost = COMPILE_SECONDS * len(shapes)
        gain = self._time(options) * self.recipe.steps * COMPILE_GAIN
        if gain <= 2 * cost:
            self._reasons.append(
                f"not compiled: could gain about {gain:.0f} s, compiling takes about {cost:.0f} s"
            )
        return gain > 2 * cost

    def _choose_fastest(self, candidates: Sequence[StepOptions]) -> StepOptions:
        """The first of the fastest options; differences below 5 % and failing steps are ignored."""
        if len(candidates) == 1:
            return candidates[0]
        timed: dict[StepOptions, float] = {}
        failures: list[str] = []
        for one in candidates:
            try:
                timed[one] = self._time(one)
            except RuntimeError as error:
                line = str(error).strip().splitlines()[0]
                failures.append(f"a step in {describe_options(one)} fails: {line}")
        if not timed:
            raise RuntimeError(failures[0])
        best = next(iter(timed))
        for one, seconds in timed.items():
            if seconds < timed[best] * (1 - MIN_GAIN):
                best = one
        others = [f"{describe_options(one)} {timed[one]:.4f}" for one in timed if one != best]
        reason = f"{describe_options(best)}: {timed[best]:.4f} s per step"
        self._reasons += [", ".join([reason, *others]), *failures]
        return best

    def _time(self, options: StepOptions) -> float:
        if options not in self._seconds:
            model = replace(self.sharded_model, forward=BatchForward(self.net))
            self._seconds[options] = self._time_step(TrainStep(model, self.recipe, options))
        return self._seconds[options]

    def _time_step(self, train_step: TrainStep) -> float:
        def run_steps() -> None:
            for batch in self.batches:
                self.net.zero_grad(set_to_none=True)
                train_step.compute_gradients(batch)

        wait = partial(synchronise_device, self.device)
        steps = self.recipe.steps // len(self.batches)
        devices = [self.device] if self.device.type == "cuda" else []
        self.net.train()
        try:
            with torch.random.fork_rng(devices):
                return measure_step_seconds(run_steps, wait, steps) / len(self.batches)
        finally:
            self.net.zero_grad(set_to_none=True)


def describe_options(options: StepOptions) -> str:
    """The options as text, defaults left out.

    >>> describe_options(StepOptions("bf16", "on", attention="plain"))
    'bf16, plain attention, compiled'
    """
    parts = [options.precision]
    parts += ["plain attention"] * (options.attention == "plain")
    parts += ["packed rows"] * (options.rows == "packed")
    parts += ["compiled"] * (options.compile == "on")
    return ", ".join(parts)


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
    key = (device, dtype, torch.get_num_threads())
    if key not in _PEAK_FLOPS:
        rates: list[float] = []
        for size in (4096, 8192) if device.type == "cuda" else (384, 768, 1536):
            # Without drawing random numbers.
            left, right = torch.ones(2, size, size, device=device, dtype=dtype)
            multiply = partial(torch.mm, left, right)
            wait = partial(synchronise_device, device)
            seconds = measure_step_seconds(multiply, wait, steps=10**6, max_seconds=PEAK_SECONDS)
            rates.append(2 * size**3 / seconds)
        _PEAK_FLOPS[key] = max(rates)
    return _PEAK_FLOPS[key]


# By device, precision and number of threads.
_PEAK_FLOPS: dict[tuple[torch.device, torch.dtype, int], float] = {}

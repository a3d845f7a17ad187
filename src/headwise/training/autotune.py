"""Autotuning: trial steps that choose precision, attention, row layout and compilation; the peak
FLOPs of a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
        options = self._choose_rows(self._choose_precision())
        return replace(self._choose_compile(options), reasons=tuple(self._reasons))

    def _choose_precision(self) -> StepOptions:
        """The fastest precision and attention."""
        recipe = self.recipe
        rows = "packed" if recipe.rows == "packed" else "padded"
        fact = self._bf16_refusal()
        precisions = [recipe.precision]
        if recipe.precision == "auto":
            precisions = ["fp32"] if fact else ["fp32", "bf16"]
        candidates = [
            StepOptions(precision, "off", (), attention, rows)
            for precision, attention in product(precisions, self._attentions())
        ]
        refusals = [fact] if fact else []
        if len(candidates) == 1:
            chosen = [recipe.precision, recipe.attention]
            set_values = [value for value in chosen if value not in ("auto", "fused")]
            self._reasons = [*refusals, *(f"{value}, as set in the recipe" for value in set_values)]
            return candidates[0]
        failures = [self._try(one) for one in candidates]
        failed = [
            f"a step in {one.precision} fails: {failure}"
            for one, failure in zip(candidates, failures, strict=True)
            if failure
        ]
        timed = {one: self._seconds[one] for one in candidates if one in self._seconds}
        if not timed:
            raise RuntimeError(failed[0])
        best, reason = choose_fastest(timed)
        self._reasons = [reason, *refusals, *failed]
        return best

    def _bf16_refusal(self) -> str:
        """The reason not to try bf16; empty if it is tried, or if the recipe sets the precision."""
        if self.recipe.precision != "auto" or self.device.type != "cpu":
            return ""
        if sum(one.numel() for one in self.net.parameters()) >= takeover_size("bf16_training"):
            return ""
        points = current_points()
        is_measured = "bf16_training" in points.measured
        reason = "bf16 was measured to be slower" if is_measured else "bf16 was not measured"
        return f"fp32: {reason} on this class of machine ({points.machine_class})"

    def _attentions(self) -> tuple[str, ...]:
        """Candidates for `attention`; "plain" stores all scores, so it is only tried for short rows
        on the CPU.
        """
        if self.recipe.attention != "auto":
            return (self.recipe.attention,)
        inputs = [batch.x for batch in self.batches]
        inputs += [batch.source for batch in self.batches if batch.source is not None]
        is_short = max(x.shape[1] for x in inputs) <= MAX_PLAIN_LENGTH
        return ("fused", "plain") if self.device.type == "cpu" and is_short else ("fused",)

    def _choose_rows(self, padded: StepOptions) -> StepOptions:
        """Packed rows if enough of the batches is padding and packing is faster."""
        fill_ratio = sum(map(real_token_share, self.batches)) / len(self.batches)
        is_free = self.recipe.rows == "auto" and self.recipe.compile != "on"
        if not is_free or fill_ratio > MAX_FILL_RATIO:
            return padded
        try:
            for batch in self.batches:
                pack_batch(batch)
        except UnpackableBatch as reason:
            self._reasons.append(f"padded rows, packing is not possible: {reason}")
            return padded
        seconds = self._time(padded)
        candidates = [replace(padded, attention=one, rows="packed") for one in self._attentions()]
        packed = [one for one in candidates if not self._try(one)]
        if not packed:
            self._reasons.append("padded rows: a step with packed rows fails")
            return padded
        best = min(packed, key=lambda one: self._seconds[one])
        fact = f"{100 * (1 - fill_ratio):.0f} % of the rows are padding"
        times = [f"{self._seconds[best]:.4f} s", f"{seconds:.4f} s"]
        if self._seconds[best] < seconds * (1 - MIN_GAIN):
            self._reasons.append(f"packed rows: {times[0]} per step, padded {times[1]}, {fact}")
            return best
        self._reasons.append(f"padded rows: {times[1]} per step, packed {times[0]}, {fact}")
        return padded

    def _choose_compile(self, options: StepOptions) -> StepOptions:
        """Compiled if the recipe says so, or if that gains more than it costs."""
        if self.recipe.compile != "auto":
            self._reasons.append(f"compile {self.recipe.compile}, as set in the recipe")
            return replace(options, compile=self.recipe.compile)
        steps = self.recipe.steps
        seconds = self._time(options)
        shapes = {
            (one.x.shape, None if one.source is None else one.source.shape) for one in self.batches
        }
        gain = seconds * steps * COMPILE_GAIN
        cost = COMPILE_SECONDS * len(shapes)
        if gain <= 2 * cost:
            self._reasons.append(
                f"not compiled: {steps} steps of {seconds:.4f} s could gain about {gain:.0f} s, "
                f"compiling takes about {cost:.0f} s"
            )
            return options
        if self.recipe.rows == "packed":
            self._reasons.append("not compiled: packed rows have another shape in every batch")
            return options
        compiled = replace(options, compile="on", rows="padded")
        failure = self._try(compiled)
        if failure:
            self._reasons.append(f"not compiled: compilation failed: {failure}")
            return options
        compiled_seconds = self._seconds[compiled]  # the time to compile is already spent
        if compiled_seconds < seconds * (1 - MIN_GAIN):
            self._reasons.append(
                f"compiled: {compiled_seconds:.4f} s per step instead of {seconds:.4f} s, saves "
                f"{(seconds - compiled_seconds) * steps:.0f} s over {steps} steps"
            )
            return compiled
        self._reasons.append(
            f"not compiled: {compiled_seconds:.4f} s per step compiled, {seconds:.4f} s without"
        )
        return options

    def _try(self, options: StepOptions) -> str:
        """Time the options; returns the first line of the error if a step failed, otherwise ""."""
        try:
            self._time(options)
        except RuntimeError as error:
            return str(error).strip().splitlines()[0]
        return ""

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


def choose_fastest(seconds: Mapping[StepOptions, float]) -> tuple[StepOptions, str]:
    """The options with the fewest seconds per step, and the reason; differences below 5 % are
    ignored.

    >>> fused, plain = (StepOptions("fp32", "off", attention=name) for name in ("fused", "plain"))
    >>> choose_fastest({fused: 0.2, plain: 0.199})[1]
    'fp32: 0.2000 s per step, fp32 with plain attention 0.1990'
    """
    best = next(iter(seconds))
    for option, option_seconds in seconds.items():
        if option_seconds < seconds[best] * (1 - MIN_GAIN):
            best = option
    others = [f"{_describe(one)} {seconds[one]:.4f}" for one in seconds if one != best]
    return best, ", ".join([f"{_describe(best)}: {seconds[best]:.4f} s per step", *others])


def _describe(options: StepOptions) -> str:
    is_plain = options.attention == "plain"
    return f"{options.precision} with plain attention" if is_plain else options.precision


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

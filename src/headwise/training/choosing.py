"""In which precision, how attended, whether compiled: measured on a run's first batches, decided by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

COMPILE_SECONDS = 30.0  # seconds that a first graph takes on few cores, backwards included
COMPILE_GAIN = 0.3  # the part of a step that compiling saves where it does well
MIN_GAIN = 0.05  # what is gained must be at least this part of a step, or it is noise
TRIAL_SECONDS = 1.2  # seconds that each way is tried for, so that all trials take about five


@dataclass(frozen=True)
class StepOptions:
    """A precision, "fp32" or "bf16"; compile, "on" or "off"; the reason for each; and how attention runs in training.

    "fused" leaves that to each layer, "plain" is one operation after the other: of short rows in bf16 often faster.
    `rows` are "padded", or "packed" with the texts of a batch one behind the other.
    """

    precision: str
    compile: str
    reasons: tuple[str, ...] = ()
    attention: str = "fused"
    rows: str = "padded"

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None for none."""
        return torch.bfloat16 if self.precision == "bf16" else None


def choose_fastest(seconds: Mapping[tuple[str, str], float]) -> tuple[tuple[str, str], str]:
    """The fastest of several ways (precision, attention) by their seconds a step, and why; of equals the first.

    >>> choose_fastest({("fp32", "fused"): 0.2, ("bf16", "fused"): 0.1})
    (('bf16', 'fused'), 'bf16: 0.1000 s a step, fp32 0.2000')
    >>> choose_fastest({("fp32", "fused"): 0.2, ("fp32", "plain"): 0.199})
    (('fp32', 'fused'), 'fp32: 0.2000 s a step, fp32 with plain attention 0.1990')
    """
    best = next(iter(seconds))
    for way, taken in seconds.items():
        if taken < seconds[best] * (1 - MIN_GAIN):
            best = way
    others = [f"{_describe_option(way)} {taken:.4f}" for way, taken in seconds.items() if way != best]
    return best, ", ".join([f"{_describe_option(best)}: {seconds[best]:.4f} s a step", *others])


def _describe_option(way: tuple[str, str]) -> str:
    precision, attention = way
    return precision if attention == "fused" else f"{precision} with plain attention"


def choose_row_layout(padded: StepOptions, seconds: float, packed_seconds: Mapping[StepOptions, float], fill_ratio: float) -> tuple[StepOptions, float]:
    """Rows filled up, or the fastest of those packed, if that gains enough; the reason, and the seconds of a step.

    >>> packed = StepOptions("fp32", "off", rows="packed")
    >>> choose_row_layout(StepOptions("fp32", "off"), 0.2, {packed: 0.1}, 0.5)[0].reasons
    ('packed: 0.1000 s a step instead of 0.2000 s, for 50 % of the rows are padding',)
    """
    if not packed_seconds:
        return replace(padded, reasons=(*padded.reasons, "rows are filled up: a step of packed ones fails")), seconds
    best = min(packed_seconds, key=lambda way: packed_seconds[way])
    took, share = packed_seconds[best], f"{1 - fill_ratio:.0%}".replace("%", " %")
    if took < seconds * (1 - MIN_GAIN):
        told = f"packed: {took:.4f} s a step instead of {seconds:.4f} s, for {share} of the rows are padding"
        return replace(best, reasons=(*padded.reasons, told)), took
    told = f"rows are filled up: {seconds:.4f} s a step, packed {took:.4f} s, though {share} of them are padding"
    return replace(padded, reasons=(*padded.reasons, told)), seconds


def decide_compile_trial(seconds: float, steps: int, num_shapes: int = 1) -> tuple[bool, str]:
    """Whether compiling is worth a trial, and why: what it may gain is twice its time, for it may gain nothing.

    Batches of other shapes are compiled anew, until a graph that takes any is made.

    >>> decide_compile_trial(0.1, steps=600)
    (False, 'not compiled: 600 steps of 0.1000 s could gain about 18 s, compiling takes about 30 s')
    >>> decide_compile_trial(0.1, steps=3000)[0], decide_compile_trial(0.1, steps=3000, shapes=3)[0]
    (True, False)
    """
    gain, cost = seconds * steps * COMPILE_GAIN, COMPILE_SECONDS * num_shapes
    worth = gain > 2 * cost
    told = f"{steps} steps of {seconds:.4f} s could gain about {gain:.0f} s, compiling takes about {cost:.0f} s"
    return worth, f"{'worth trying' if worth else 'not compiled'}: {told}"


def decide_compile(seconds: float, compiled: float, steps: int) -> tuple[str, str]:
    """Whether to go on with what was compiled; the time it took is spent either way.

    >>> decide_compile(0.2, 0.1, steps=50)
    ('on', 'compiled: 0.1000 s a step instead of 0.2000 s, 5 s gained over 50 steps')
    """
    if compiled < seconds * (1 - MIN_GAIN):
        gained = f"{(seconds - compiled) * steps:.0f} s gained over {steps} steps"
        return "on", f"compiled: {compiled:.4f} s a step instead of {seconds:.4f} s, {gained}"
    return "off", f"not compiled: {compiled:.4f} s a step when it is, {seconds:.4f} s when not"

"""In which precision, and whether compiled: measured on the run's own first batch, decided by plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COMPILING = 30.0  # seconds that a first graph takes on few cores, backwards included
GAIN = 0.3  # the part of a step that compiling saves where it does well
WORTH = 0.05  # what is gained must be at least this part of a step, or it is noise
PROBE = 1.6  # seconds that each precision is tried for, so that all trials take about five


@dataclass(frozen=True)
class Choice:
    """A precision, "fp32" or "bf16"; compile, "on" or "off"; and the reason for each."""

    precision: str
    compile: str
    reasons: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None for none."""
        return torch.bfloat16 if self.precision == "bf16" else None


def faster(fp32: float, bf16: float) -> tuple[str, str]:
    """The faster of two precisions by their seconds a step, and why; of equals fp32, which is exact.

    >>> faster(0.2, 0.1)
    ('bf16', 'bf16: 0.1000 s a step, fp32 0.2000')
    >>> faster(0.2, 0.199)[0]
    'fp32'
    """
    if bf16 < fp32 * (1 - WORTH):
        return "bf16", f"bf16: {bf16:.4f} s a step, fp32 {fp32:.4f}"
    return "fp32", f"fp32: {fp32:.4f} s a step, bf16 {bf16:.4f}"


def worth_compiling(seconds: float, steps: int, shapes: int = 1) -> tuple[bool, str]:
    """Whether compiling is worth a trial, and why: what it may gain is twice its time, for it may gain nothing.

    Batches of other shapes are compiled anew, until a graph that takes any is made.

    >>> worth_compiling(0.1, steps=600)
    (False, 'not compiled: 600 steps of 0.1000 s could gain about 18 s, compiling takes about 30 s')
    >>> worth_compiling(0.1, steps=3000)[0], worth_compiling(0.1, steps=3000, shapes=3)[0]
    (True, False)
    """
    gain, cost = seconds * steps * GAIN, COMPILING * shapes
    worth = gain > 2 * cost
    told = f"{steps} steps of {seconds:.4f} s could gain about {gain:.0f} s, compiling takes about {cost:.0f} s"
    return worth, f"{'worth trying' if worth else 'not compiled'}: {told}"


def kept(seconds: float, compiled: float, steps: int) -> tuple[str, str]:
    """Whether to go on with what was compiled; the time it took is spent either way.

    >>> kept(0.2, 0.1, steps=50)
    ('on', 'compiled: 0.1000 s a step instead of 0.2000 s, 5 s gained over 50 steps')
    """
    if compiled < seconds * (1 - WORTH):
        gained = f"{(seconds - compiled) * steps:.0f} s gained over {steps} steps"
        return "on", f"compiled: {compiled:.4f} s a step instead of {seconds:.4f} s, {gained}"
    return "off", f"not compiled: {compiled:.4f} s a step when it is, {seconds:.4f} s when not"

"""One forward call of a model, and where and in which formats it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..attention.masking.patterns import Pattern
from ..models.model_spec import WeightSpec
from .roofline import Device
from .weight_storage import FP8, WeightStorage


class ForwardCall(NamedTuple):
    """One forward call: `tokens` new tokens per row after `past` cached ones, and the length of the
    source sequence.

    mode="whole": all tokens in one call and logits for each, as in training; "prompt": all tokens
    in one call, logits for the last only; "steps": `tokens` decode steps of one token each, with
    the source cached before.
    """

    batch: int
    tokens: int
    past: int = 0
    source: int = 0
    mode: str = "whole"

    @property
    def encoder_call(self) -> ForwardCall:
        """The call that this makes to the encoder, or to any stack before the last one."""
        return self._replace(tokens=0 if self.mode == "steps" else self.source, past=0)


class ExecutionTarget(NamedTuple):
    """Where a call runs: the torch device type, and the precision."""

    device: str = "cpu"
    dtype: str = "fp32"


CPU_FP32 = ExecutionTarget()


class ExecutionFormats(NamedTuple):
    """The device of a call, and the formats of its products and weights."""

    device: Device
    dtype: str
    storage: WeightStorage

    def product_dtype(self, weights: Iterable[WeightSpec]) -> str:
        """Format of products with these weights: fp8 if a matrix has it and the device multiplies
        it. Matrices in other formats are converted first.
        """
        quantization = self.storage.quantization
        if quantization is None or quantization.format.name != FP8 or FP8 not in self.device.flops:
            return self.dtype
        return FP8 if any(map(quantization.covers, weights)) else self.dtype


class LayerOperation(NamedTuple):
    """One operation of one layer: FLOPs, bytes moved, and the format of its products."""

    name: str
    flops: int
    bytes_moved: int
    dtype: str


def cached_tokens_read(pattern: Pattern, past: int, steps: int) -> int:
    """Total number of cached tokens that `steps` decode steps read; a ring buffer holds only tokens
    in the window.
    """
    first, last = pattern.retention
    capacity = past + steps if last is None else min(past + steps, first + last)
    growing = max(capacity - past, 0)  # steps that read one token more than the step before
    return growing * past + growing * (growing + 1) // 2 + (steps - growing) * capacity

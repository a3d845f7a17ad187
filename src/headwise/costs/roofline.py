"""Roofline model: peak FLOP/s, bandwidth and memory of devices, lower bounds of operation times,
and the forward calls that run on a device.

Devices come from `hardware.toml`; the device "here" is the machine that runs this, which is
measured once in a process.
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.masking.patterns import Pattern
from ..kernels.capabilities import available_memory, this_machine
from ..kernels.compilation import compile_when_called
from ..kernels.devices import synchronize
from ..kernels.linear import linear
from ..models.model_spec import WeightSpec
from ..util.errors import SpecError, suggest
from .flops import TORCH_DTYPES
from .weight_storage import DTYPE_BYTES, FP8, WeightStorage

THIS_MACHINE = "here"
HARDWARE_TABLE = tomllib.loads(files("headwise.costs").joinpath("hardware.toml").read_text())


@dataclass(frozen=True)
class Device:
    """A device: peak FLOPs per second by precision, bandwidth in bytes per second, and memory in
    bytes.

    `flops` has "fp8" only if the device multiplies matrices in this format.
    """

    name: str
    description: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    kind: str = "cuda"  # torch.device.type

    @staticmethod
    def from_name(name: str) -> Device:
        """Return the device with this name; "here" is the machine that runs this, measured on first
        use.

        >>> round(Device.from_name("h200").ridge_point("bf16"), 1)
        206.0
        """
        if name == THIS_MACHINE:
            return measure_this_machine()
        if name not in HARDWARE_TABLE:
            raise SpecError(
                f"there is no device {name!r}; {suggest(name, [*HARDWARE_TABLE, THIS_MACHINE])}"
            )
        row = HARDWARE_TABLE[name]
        flops = {"bf16": row["bf16"] * 1e12, "fp16": row["bf16"] * 1e12, "fp32": row["fp32"] * 1e12}
        flops |= {FP8: row[FP8] * 1e12} if FP8 in row else {}
        kind = row.get("kind", "cuda")
        return Device(name, row["what"], flops, row["gbps"] * 1e9, row["gb"] * 1e9, kind)

    def ridge_point(self, dtype: str) -> float:
        """FLOPs per byte above which an operation is compute-bound."""
        return self.flops[dtype] / self.bandwidth

    def compute_bound_tokens(self, dtype: str) -> float:
        """Return the tokens per step that make the product with a weight matrix compute-bound.

        A token needs two FLOPs per weight, against the bytes of that weight; inputs and outputs are
        neglected.

        >>> [
        ...     round(Device.from_name(name).compute_bound_tokens("bf16"))
        ...     for name in ("a100", "h100", "h200")
        ... ]
        [153, 295, 206]
        """
        return self.ridge_point(dtype) * DTYPE_BYTES[dtype] / 2

    def min_seconds(self, flops: int, moved: int, dtype: str) -> float:
        """Lower bound of the time, in seconds, if compute and memory transfers
        overlap completely.
        """
        return max(flops / self.flops[dtype], moved / self.bandwidth)

    def limiting_resource(self, flops: int, moved: int, dtype: str) -> str:
        """The resource that limits the operation: "compute" or "memory"."""
        return "compute" if flops / self.flops[dtype] >= moved / self.bandwidth else "memory"


# --- Measuring the machine that runs this ---------------------------------------------------------

MEASURE_SECONDS = 0.25  # time limit of one measurement; there are about ten
MIN_RUNS = 5  # of a measurement: the fastest of fewer may be one that another process interrupted
MATRIX_SIZES = (
    128,
    512,
    2048,
    8192,
)  # measured in this order until the next one would exceed MEASURE_SECONDS
COPY_BYTES = 2**28  # larger than the caches of processors


def measure_this_machine() -> Device:
    """Return this machine, measured once in this process for each number of threads."""
    threads = torch.get_num_threads()
    name = f"{this_machine().processor}, {threads} thread{'s' if threads > 1 else ''}"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    return _measure_machine(f"this machine ({name}, torch {torch.__version__})")


@cache
def _measure_machine(description: str) -> Device:
    """Measure matrix products in each precision, the faster of a large copy and a large sum, and
    the memory.
    """
    kind = accelerator_type()
    memory = float(torch.cuda.mem_get_info()[1] if kind == "cuda" else available_memory())
    flops = {name: _measure_matmul_flops(dtype) for name, dtype in TORCH_DTYPES.items()}
    numbers = torch.ones(int(min(COPY_BYTES, memory / 16)) // 4, device=kind)
    copy = torch.empty_like(numbers)
    copied = 2 * numbers.nbytes / time_run(lambda: copy.copy_(numbers), MEASURE_SECONDS)
    summed = numbers.nbytes / time_run(numbers.sum, MEASURE_SECONDS)
    return Device(THIS_MACHINE, description, flops, max(copied, summed), memory, kind)


def _measure_matmul_flops(dtype: torch.dtype) -> float:
    """Best FLOP/s of square matrix products; larger sizes are tried until one would exceed
    MEASURE_SECONDS.
    """
    best = 0.0
    for size in MATRIX_SIZES:
        if best and 2 * size**3 > best * MEASURE_SECONDS:
            break
        a, b = (torch.randn(size, size, device=accelerator_type()).to(dtype) for _ in range(2))
        best = max(
            best, 2 * size**3 / time_run(lambda a=a, b=b: multiply_matrices(a, b), MEASURE_SECONDS)
        )
    return best


@torch.no_grad()
def multiply_matrices(a: Tensor, b: Tensor) -> Tensor:
    """Return a b^T by the path that headwise takes for linear layers without gradients, torch's or
    its own.

    >>> multiply_matrices(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).item()
    11.0
    """
    return linear(a, b)


@compile_when_called()
def time_run(run: Callable[[], Any], max_seconds: float) -> float:
    """Seconds of the fastest run: repeat for `max_seconds`, at least MIN_RUNS times, after one
    warm-up run.
    """
    device = torch.device(accelerator_type())
    run()
    synchronize(device)
    begun = time.perf_counter()
    best = math.inf
    count = 0
    while True:
        start = time.perf_counter()
        run()
        synchronize(device)
        now = time.perf_counter()
        best = min(best, max(now - start, 1e-9))
        count += 1
        if now - begun >= max_seconds and count >= MIN_RUNS:
            return best


def accelerator_type() -> str:
    """Type of the device to measure: "cuda" if torch has a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- The roofline ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RooflineOperation:
    """One operation of a call: FLOPs, bytes moved, and its time and limiting
    resource on a device.
    """

    name: str
    flops: int
    moved: int
    seconds: float
    bound: str

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.moved if self.moved else 0.0

    def repeated(self, times: int) -> RooflineOperation:
        """Return the operation of `times` equal layers."""
        costs = (times * self.flops, times * self.moved, times * self.seconds)
        return RooflineOperation(self.name, *costs, self.bound)


def merge_operations(name: str, operations: Iterable[RooflineOperation]) -> RooflineOperation:
    """Sum operations that run one after another; the sum is bound by the resource that limits most
    of its time.
    """
    operations = list(operations)
    seconds_by_bound = {"compute": 0.0, "memory": 0.0}
    for operation in operations:
        seconds_by_bound[operation.bound] += operation.seconds
    return RooflineOperation(
        name,
        sum(operation.flops for operation in operations),
        sum(operation.moved for operation in operations),
        sum(operation.seconds for operation in operations),
        max(seconds_by_bound, key=seconds_by_bound.__getitem__),
    )


# --- Memory of a device ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryShortfall:
    """A step that needs more memory than a device has: `contents` names what occupies the
    `needed_bytes`.

    >>> shortfall = MemoryShortfall(
    ...     "decode step", "weights and cache", 300 * 10**9, Device.from_name("h200")
    ... )
    >>> shortfall.missing_bytes, shortfall.min_devices
    (159000000000, 3)
    """

    step: str
    contents: str
    needed_bytes: int
    device: Device

    @property
    def missing_bytes(self) -> int:
        """Bytes that the device lacks."""
        return self.needed_bytes - int(self.device.memory)

    @property
    def min_devices(self) -> int:
        """Least number of devices that hold everything, if they divide it evenly."""
        return -(-self.needed_bytes // int(self.device.memory))

    def __str__(self) -> str:
        memory = format_gigabytes(int(self.device.memory))
        return (
            f"{self.device.description} is too small: {self.contents} need "
            f"{format_gigabytes(self.needed_bytes)}, "
            f"{format_gigabytes(self.missing_bytes)} more than its {memory}, so no time is "
            f"estimated ({self.step}); at "
            f"least {self.min_devices:,} such devices are needed"
        )


def format_gigabytes(count: int) -> str:
    """Format bytes in GB (10^9), or in MB if there are fewer.

    >>> format_gigabytes(16060522496), format_gigabytes(16777216)
    ('16.06 GB', '16.78 MB')
    """
    return f"{count / 1e9:,.2f} GB" if count >= 10**9 else f"{count / 1e6:,.2f} MB"


# --- One forward call, and where and in which formats it runs -------------------------------------


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

    def operation(self, name: str, flops: int, moved: int, dtype: str) -> RooflineOperation:
        """Return an operation of one layer, with products in the format `dtype`."""
        seconds = self.device.min_seconds(flops, moved, dtype)
        bound = self.device.limiting_resource(flops, moved, dtype)
        return RooflineOperation(name, flops, moved, seconds, bound)

    def product_dtype(self, weights: Iterable[WeightSpec]) -> str:
        """Format of products with these weights: fp8 if a matrix has it and the device multiplies
        it. Matrices in other formats are converted first.
        """
        quantization = self.storage.quantization
        if quantization is None or quantization.format.name != FP8 or FP8 not in self.device.flops:
            return self.dtype
        return FP8 if any(map(quantization.covers, weights)) else self.dtype


def cached_tokens_read(pattern: Pattern, past: int, steps: int) -> int:
    """Total number of cached tokens that `steps` decode steps read; a ring buffer holds only tokens
    in the window.
    """
    first, last = pattern.retention
    capacity = past + steps if last is None else min(past + steps, first + last)
    growing = max(capacity - past, 0)  # steps that read one token more than the step before
    return growing * past + growing * (growing + 1) // 2 + (steps - growing) * capacity

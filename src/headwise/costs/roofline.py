"""Roofline model: peak FLOP/s, bandwidth and memory of devices, and the least time that an
operation takes on one.

Devices come from `hardware.toml`; the device "here" is the machine that runs this, which is
measured once.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.capabilities import available_memory, this_machine, user_cache_folder
from ..kernels.compilation import compile_when_called
from ..kernels.linear import linear
from ..util.errors import SpecError, suggest
from ..util.files import write_atomically
from .flops import TORCH_DTYPES
from .weight_storage import DTYPE_BYTES, FP8

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
            return get_this_machine()
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
        """Number of tokens per step above which the product with a weight matrix is compute-bound.

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
        """Whether the operation is bound by "compute" or by "memory"."""
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
AGE_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))
_MEASURED_DEVICES: dict[
    str, Device
] = {}  # measured by this process, or read from the user's cache folder


@dataclass(frozen=True)
class DeviceMeasurement:
    """Measured rates and memory of a machine; `when` is the time of the measurement in seconds
    since 1970.
    """

    machine: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    when: float
    kind: str = "cpu"

    def to_device(self, now: float, note: str = "") -> Device:
        """Return the measurement as a device whose description includes its age."""
        what = f"this machine ({self.machine}), measured {format_age(now - self.when)}{note}"
        return Device(THIS_MACHINE, what, self.flops, self.bandwidth, self.memory, self.kind)


def get_this_machine() -> Device:
    """Return the last measurement of this machine, by this or an earlier process; measure it if
    there is none.
    """
    name = _machine_name()
    if name not in _MEASURED_DEVICES:
        measurement = _read_measurement(name)
        if measurement is None:
            _MEASURED_DEVICES[name] = _store_measurement(measure_machine(name))
        else:
            _MEASURED_DEVICES[name] = measurement.to_device(time.time())
    return _MEASURED_DEVICES[name]


def remeasure_this_machine() -> Device:
    """Measure this machine again and replace the stored measurement."""
    name = _machine_name()
    _MEASURED_DEVICES[name] = _store_measurement(measure_machine(name))
    return _MEASURED_DEVICES[name]


def format_age(seconds: float) -> str:
    """Format the age of a measurement.

    >>> format_age(5), format_age(7200), format_age(86400 * 3.5)
    ('just now', '2 hours ago', '3 days ago')
    """
    for unit, name in AGE_UNITS:
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def _machine_name() -> str:
    """Key of a measurement: the GPU, or the processor and torch's number of threads; and the
    version of torch.
    """
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return (
        f"{this_machine().processor}, {threads} thread{'s' if threads > 1 else ''}, torch "
        f"{torch.__version__}"
    )


def _measurement_path(machine: str) -> Path:
    return user_cache_folder() / f"machine-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _read_measurement(machine: str) -> DeviceMeasurement | None:
    """Read the stored measurement of this machine; None if there is none, or if it is of another
    machine or damaged.
    """
    try:
        fields: dict[str, Any] = json.loads(_measurement_path(machine).read_text())
        measurement = DeviceMeasurement(**fields)
        numbers = [
            *measurement.flops.values(),
            measurement.bandwidth,
            measurement.memory,
            measurement.when,
        ]
        is_valid = (
            all(
                isinstance(number, float) and math.isfinite(number) and number > 0
                for number in numbers
            )
            and set(measurement.flops) == set(DTYPE_BYTES)
            and measurement.machine == machine
            and measurement.kind in ("cpu", "cuda")
        )
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
    ):  # RuntimeError: no home folder
        return None
    return measurement if is_valid else None


def _store_measurement(measurement: DeviceMeasurement) -> Device:
    """Store a measurement in the user's cache folder; if that fails, the device's description
    includes the reason.
    """
    try:
        path = _measurement_path(measurement.machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(measurement)).encode())
    except (OSError, RuntimeError) as error:
        reason = str(error).partition(";")[0]
        return measurement.to_device(measurement.when, f", not stored for next time: {reason}")
    return measurement.to_device(measurement.when)


def measure_machine(machine: str) -> DeviceMeasurement:
    """Measure matrix products in each precision, the faster of a large copy and a large sum, and
    the memory.
    """
    kind = accelerator_type()
    memory = float(torch.cuda.mem_get_info()[1] if kind == "cuda" else available_memory())
    flops = {name: _measure_matmul_flops(dtype) for name, dtype in TORCH_DTYPES.items()}
    numbers = torch.ones(int(min(COPY_BYTES, memory / 16)) // 4, device=kind)
    copy = torch.empty_like(numbers)
    copied = 2 * numbers.nbytes / time_run(lambda: copy.copy_(numbers), MEASURE_SECONDS)
    return DeviceMeasurement(
        machine,
        flops,
        max(copied, numbers.nbytes / time_run(numbers.sum, MEASURE_SECONDS)),
        memory,
        time.time(),
        kind,
    )


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
    run()
    synchronize_device()
    begun = time.perf_counter()
    best = math.inf
    count = 0
    while True:
        start = time.perf_counter()
        run()
        synchronize_device()
        now = time.perf_counter()
        best = min(best, max(now - start, 1e-9))
        count += 1
        if now - begun >= max_seconds and count >= MIN_RUNS:
            return best


def accelerator_type() -> str:
    """Type of the device to measure: "cuda" if torch has a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize_device() -> None:
    """Wait until a GPU has finished its work; return at once on a CPU."""
    if accelerator_type() == "cuda":
        torch.cuda.synchronize()


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


def find_shortfall(
    step: str, contents: str, needed_bytes: int, device: Device
) -> MemoryShortfall | None:
    """Return by how much a device is too small; None if it is large enough."""
    return (
        MemoryShortfall(step, contents, needed_bytes, device)
        if needed_bytes > device.memory
        else None
    )


def format_gigabytes(count: int) -> str:
    """Format bytes in GB (10^9), or in MB if there are fewer.

    >>> format_gigabytes(16060522496), format_gigabytes(16777216)
    ('16.06 GB', '16.78 MB')
    """
    return f"{count / 1e9:,.2f} GB" if count >= 10**9 else f"{count / 1e6:,.2f} MB"

"""The machine that runs this, measured: a large product for each precision, a large copy, and its memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..files import write_atomically
from .devices import DTYPE_BYTES, THIS_MACHINE, Device

MEASURE_SECONDS = 0.25  # of one measurement: there are about ten
MATRIX_SIZES = (128, 512, 2048, 8192)  # rows of the matrices that are multiplied, while the next would not take too long
COPY_BYTES = 2**28  # bytes, more than processors keep near themselves
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CGROUP_MEMORY_FILE = Path("/sys/fs/cgroup/memory.max")
AGE_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))
_MEASURED_DEVICES: dict[str, Device] = {}  # measured in this process already, or read from the user's folder


@dataclass(frozen=True)
class DeviceMeasurement:
    """What was found of a machine, and when, in seconds since 1970."""

    machine: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    when: float
    kind: str = "cpu"

    def to_device(self, now: float, note: str = "") -> Device:
        """As a row of the table, with its age."""
        what = f"this machine ({self.machine}), measured {format_age(now - self.when)}{note}"
        return Device(THIS_MACHINE, what, self.flops, self.bandwidth, self.memory, self.kind)


def get_this_machine() -> Device:
    """This machine as it was measured last, by this process or an earlier one; measured now where it was not."""
    name = _machine_name()
    if name not in _MEASURED_DEVICES:
        found = _read_measurement(name)
        _MEASURED_DEVICES[name] = _store_measurement(measure_machine(name)) if found is None else found.to_device(time.min_seconds())
    return _MEASURED_DEVICES[name]


def remeasure_this_machine() -> Device:
    """This machine, measured now, whatever was known of it."""
    name = _machine_name()
    _MEASURED_DEVICES[name] = _store_measurement(measure_machine(name))
    return _MEASURED_DEVICES[name]


def format_age(seconds: float) -> str:
    """How long ago that was.

    >>> format_age(5), format_age(7200), format_age(86400 * 3.5)
    ('just now', '2 hours ago', '3 days ago')
    """
    for unit, name in AGE_UNITS:
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def _machine_name() -> str:
    """What measurements belong to: the processor, how many threads torch uses of it, and torch."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"


def processor_name() -> str:
    """The name of the processor, as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _measurement_path(machine: str) -> Path:
    return Path.home() / ".cache" / "headwise" / f"machine-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _read_measurement(machine: str) -> DeviceMeasurement | None:
    """What was kept of this machine; nothing where that is missing, of another, or damaged."""
    try:
        told: dict[str, Any] = json.loads(_measurement_path(machine).read_text())
        found = DeviceMeasurement(**told)
        rates = [*found.flops.values(), found.bandwidth, found.memory, found.when]
        sound = all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in rates)
        whole = sound and set(found.flops) == set(DTYPE_BYTES) and found.machine == machine and found.kind in ("cpu", "cuda")
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):  # RuntimeError: there is no home
        return None
    return found if whole else None


def _store_measurement(found: DeviceMeasurement) -> Device:
    """Written into the user's folder where that can be; where it cannot, the device says so."""
    try:
        path = _measurement_path(found.machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(found)).encode())
    except (OSError, RuntimeError) as error:
        reason = str(error).partition(";")[0]
        return found.to_device(found.when, f", not kept for the next time: {reason}")
    return found.to_device(found.when)


def measure_machine(machine: str) -> DeviceMeasurement:
    """A large product for each precision, the faster of a large copy and a large sum, and the memory there is."""
    kind = accelerator_type()
    memory = float(torch.cuda.mem_get_info()[1] if kind == "cuda" else _available_memory())
    flops = {name: _measure_matmul_flops(dtype) for name, dtype in TORCH_DTYPES.items()}
    numbers = torch.ones(int(min(COPY_BYTES, memory / 16)) // 4, device=kind)
    copy = torch.empty_like(numbers)
    copied = 2 * numbers.nbytes / time_run(lambda: copy.copy_(numbers), MEASURE_SECONDS)
    return DeviceMeasurement(
        machine, flops, max(copied, numbers.nbytes / time_run(numbers.sum, MEASURE_SECONDS)), memory, time.min_seconds(), kind
    )


def _measure_matmul_flops(dtype: torch.dtype) -> float:
    """FLOPs a second of square matrices, of the largest that do not take too long."""
    found = 0.0
    for size in MATRIX_SIZES:
        if found and 2 * size**3 > found * MEASURE_SECONDS:
            break
        a, b = (torch.randn(size, size, device=accelerator_type()).to(dtype) for _ in range(2))
        found = max(found, 2 * size**3 / time_run(lambda a=a, b=b: a @ b, MEASURE_SECONDS))
    return found


def time_run(run: Callable[[], Any], max_seconds: float) -> float:
    """Seconds of one run, at best of as many as the time allows, after one that does not count."""
    run()
    synchronize_device()
    begun, best = time.perf_counter(), math.inf
    while True:
        start = time.perf_counter()
        run()
        synchronize_device()
        now = time.perf_counter()
        best = min(best, max(now - start, 1e-9))
        if now - begun >= max_seconds:
            return best


def accelerator_type() -> str:
    """The kind of device that is measured: a GPU where torch has one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize_device() -> None:
    """Until a GPU has done all it was asked for; others have."""
    if accelerator_type() == "cuda":
        torch.cuda.synchronize()


def _available_memory() -> int:
    """Bytes of memory, or of the share that a container may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(CGROUP_MEMORY_FILE.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return whole

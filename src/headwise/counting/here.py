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
from .devices import BYTES, HERE, Device

SECONDS = 0.25  # of one measurement: there are about ten
SIZES = (128, 512, 2048, 8192)  # rows of the matrices that are multiplied, while the next would not take too long
COPIED = 2**28  # bytes, more than processors keep near themselves
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CGROUP = Path("/sys/fs/cgroup/memory.max")
AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))
_known: dict[str, Device] = {}  # measured in this process already, or read from the user's folder


@dataclass(frozen=True)
class Measured:
    """What was found of a machine, and when, in seconds since 1970."""

    machine: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    when: float
    kind: str = "cpu"

    def device(self, now: float, note: str = "") -> Device:
        """As a row of the table, with its age."""
        what = f"this machine ({self.machine}), measured {age(now - self.when)}{note}"
        return Device(HERE, what, self.flops, self.bandwidth, self.memory, self.kind)


def this_machine() -> Device:
    """This machine as it was measured last, by this process or an earlier one; measured now where it was not."""
    name = _machine()
    if name not in _known:
        found = _read(name)
        _known[name] = _kept(measured(name)) if found is None else found.device(time.time())
    return _known[name]


def measure_anew() -> Device:
    """This machine, measured now, whatever was known of it."""
    name = _machine()
    _known[name] = _kept(measured(name))
    return _known[name]


def age(seconds: float) -> str:
    """How long ago that was.

    >>> age(5), age(7200), age(86400 * 3.5)
    ('just now', '2 hours ago', '3 days ago')
    """
    for unit, name in AGES:
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def _machine() -> str:
    """What measurements belong to: the processor, how many threads torch uses of it, and torch."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"


def processor() -> str:
    """The name of the processor, as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _path(machine: str) -> Path:
    return Path.home() / ".cache" / "headwise" / f"machine-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def _read(machine: str) -> Measured | None:
    """What was kept of this machine; nothing where that is missing, of another, or damaged."""
    try:
        told: dict[str, Any] = json.loads(_path(machine).read_text())
        found = Measured(**told)
        rates = [*found.flops.values(), found.bandwidth, found.memory, found.when]
        sound = all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in rates)
        whole = sound and set(found.flops) == set(BYTES) and found.machine == machine and found.kind in ("cpu", "cuda")
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):  # RuntimeError: there is no home
        return None
    return found if whole else None


def _kept(found: Measured) -> Device:
    """Written into the user's folder where that can be; where it cannot, the device says so."""
    try:
        path = _path(found.machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(found)).encode())
    except (OSError, RuntimeError) as error:
        reason = str(error).partition(";")[0]
        return found.device(found.when, f", not kept for the next time: {reason}")
    return found.device(found.when)


def measured(machine: str) -> Measured:
    """A large product for each precision, the faster of a large copy and a large sum, and the memory there is."""
    kind = where()
    memory = float(torch.cuda.mem_get_info()[1] if kind == "cuda" else _memory())
    flops = {name: _products(dtype) for name, dtype in DTYPES.items()}
    numbers = torch.ones(int(min(COPIED, memory / 16)) // 4, device=kind)
    copy = torch.empty_like(numbers)
    copied = 2 * numbers.nbytes / seconds(lambda: copy.copy_(numbers), SECONDS)
    return Measured(
        machine, flops, max(copied, numbers.nbytes / seconds(numbers.sum, SECONDS)), memory, time.time(), kind
    )


def _products(dtype: torch.dtype) -> float:
    """FLOPs a second of square matrices, of the largest that do not take too long."""
    found = 0.0
    for size in SIZES:
        if found and 2 * size**3 > found * SECONDS:
            break
        a, b = (torch.randn(size, size, device=where()).to(dtype) for _ in range(2))
        found = max(found, 2 * size**3 / seconds(lambda a=a, b=b: a @ b, SECONDS))
    return found


def seconds(run: Callable[[], Any], most: float) -> float:
    """Seconds of one run, at best of as many as the time allows, after one that does not count."""
    run()
    wait()
    begun, best = time.perf_counter(), math.inf
    while True:
        start = time.perf_counter()
        run()
        wait()
        now = time.perf_counter()
        best = min(best, max(now - start, 1e-9))
        if now - begun >= most:
            return best


def where() -> str:
    """The kind of device that is measured: a GPU where torch has one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Until a GPU has done all it was asked for; others have."""
    if where() == "cuda":
        torch.cuda.synchronize()


def _memory() -> int:
    """Bytes of memory, or of the share that a container may use."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return whole

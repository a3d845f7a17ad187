"""The processor of this machine, its class, the cores that may be used, and its memory.

Crossover points are sizes from which (or up to which) headwise's path is faster than torch's. They
were measured on one processor of each class. On a class without a size, torch's path runs at every
size: a kernel that was not timed there is not preferred. Paths that run torch's own operations on
fewer numbers have one size for all classes.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

MACHINE_CLASSES = ("x86-avx2", "x86-avx512", "x86-avx512-bf16", "x86-amx", "aarch64", "other")
CGROUP = Path("/sys/fs/cgroup")


class MachineCapabilities(NamedTuple):
    """A processor as this process may use it."""

    processor: str
    machine_class: str  # one of MACHINE_CLASSES
    usable_processors: int
    l2_cache_bytes: int


def this_machine() -> MachineCapabilities:
    """The capabilities of the machine that runs this process."""
    capabilities = torch.cpu.get_capabilities()
    name = capabilities.get("cpu_name") or platform.processor() or platform.machine()
    machine_class = classify(capabilities, torch.backends.cpu.get_cpu_capability())
    cache = int(capabilities.get("l2_cache_size") or 2**20)
    return MachineCapabilities(str(name), machine_class, usable_processors(), cache)


def classify(capabilities: Mapping[str, Any], torch_level: str) -> str:
    """The class of a processor; `torch_level` is the instruction set that torch's kernels use.

    >>> classify({"architecture": "x86_64", "avx2": True, "avx512_f": True}, "AVX512")
    'x86-avx512'
    >>> classify({"architecture": "x86_64", "avx2": True, "avx512_f": True}, "AVX2")
    'x86-avx2'
    """
    architecture = capabilities.get("architecture") or platform.machine()
    if architecture in ("aarch64", "arm64"):
        return "aarch64"
    if not capabilities.get("avx2"):
        return "other"
    if torch_level.startswith("AVX512"):
        if capabilities.get("amx_bf16"):
            return "x86-amx"
        if capabilities.get("avx512_bf16"):
            return "x86-avx512-bf16"
        if capabilities.get("avx512_f"):
            return "x86-avx512"
    return "x86-avx2"


def usable_processors(cgroup: Path = CGROUP) -> int:
    """Processors that this process may use, by affinity and by the quota of its container."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        count = os.cpu_count() or 1
    quota, _, period = _read_text(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count)


def user_cache_folder() -> Path:
    """`headwise` in $XDG_CACHE_HOME, or in ~/.cache; RuntimeError without a home folder."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "headwise"


def available_memory() -> int:
    """Bytes of main memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_text(CGROUP / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch, and with it the kernels, use `count` threads inside the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


NEVER = math.inf  # of a size from which
ALWAYS = math.inf  # of a size up to which
MEASURED_ON = {
    "x86-avx512-bf16": "AMD EPYC (Zen 5), 2 cores, 32 MiB of L3 cache, AVX-512 bf16",
    "x86-avx512": "Intel Xeon with AVX-512 and VNNI without bf16, 2 cores",
    "x86-amx": "Intel Xeon (Emerald Rapids), 2 cores, 2 MiB of L2 cache each, AMX",
    "x86-avx2": "AMD EPYC with AVX2, 2 cores, 512 KiB of L2 cache each",
}
# Sizes on these classes; None was not measured. They count keys, bytes of weights (gemv: one
# token, gemm: several), bytes of keys and values (ragged), and parameters (bf16_training).
FROM: dict[str, tuple[float | None, ...]] = {
    "block_sparse": (370, 370, 460, None),
    "flash_cpu": (64, None, 128, NEVER),
    "flash_cpu_full": (64, None, NEVER, NEVER),  # where no pair is masked
    "routed": (1024, None, 750, NEVER),
    "bf16_matmul": (0, NEVER, NEVER, NEVER),
    "ragged_float32": (8388608, None, 12582912, 12582912),
    "ragged_bfloat16": (2097152, None, 8388608, 1048576),
    "gemv_float32": (1572864, NEVER, NEVER, 8388608),
    "gemv_bfloat16": (65536, NEVER, 65536, 8388608),
    "gemm_float32": (262144, NEVER, 4194304, 1048576),
    "gemm_bfloat16": (65536, NEVER, 65536, 524288),
    "bf16_training": (0, NEVER, 0, None),
}
UP_TO: dict[str, tuple[float | None, ...]] = {  # keys, and tokens of a product (gemm_tokens)
    "bf16_matmul_gradients": (ALWAYS, 0, 327, 0),
    "gemm_tokens_float32": (32768, 0, 64, 4),
    "gemm_tokens_bfloat16": (4, 0, 4, 64),
}
FROM_ANY_CLASS = {"block_sparse": 370.0}
ONE_THREAD: dict[str, dict[str, float]] = {  # where one thread has another size
    "x86-avx512-bf16": {"gemv_float32": 4194304},
    "x86-amx": {
        "block_sparse": 344,
        "routed": 539,
        "bf16_matmul_gradients": 604,
        "ragged_float32": 7672592,
        "ragged_bfloat16": 4960784,
    },
}
UP_TO_CROSSOVERS = tuple(UP_TO)


@dataclass(frozen=True)
class Crossovers:
    """The sizes in use; sizes not measured on this class keep torch's path."""

    machine_class: str
    sizes: Mapping[str, float]
    measured: frozenset[str]

    def with_sizes(self, **sizes: float) -> Crossovers:
        """The points with other sizes, as if they had been measured."""
        measured = self.measured | frozenset(sizes)
        return replace(self, sizes=dict(self.sizes) | sizes, measured=measured)

    @property
    def data(self) -> dict[str, object]:
        """Class, processor and sizes as plain values; null is infinity."""
        sizes = {name: None if size == math.inf else size for name, size in self.sizes.items()}
        measured_on = MEASURED_ON.get(self.machine_class)
        return {"class": self.machine_class, "measured_on": measured_on, "sizes": sizes}


def points_of_class(machine_class: str, threads: int | None = None) -> Crossovers:
    """The points of a class of processors.

    >>> points_of_class("other").sizes["flash_cpu"], points_of_class("x86-amx").sizes["flash_cpu"]
    (inf, 128)
    """
    measured = dict(FROM_ANY_CLASS)
    if machine_class in MEASURED_ON:
        column = list(MEASURED_ON).index(machine_class)
        for name, by_class in (FROM | UP_TO).items():
            size = by_class[column]
            if size is not None:
                measured[name] = size
    if threads == 1:
        measured |= ONE_THREAD.get(machine_class, {})
    unmeasured = dict.fromkeys(FROM, NEVER) | dict.fromkeys(UP_TO, 0.0)
    return Crossovers(machine_class, unmeasured | measured, frozenset(measured))


class _CurrentPoints:
    """The points of this process by torch's number of threads, or those that a context assumes."""

    def __init__(self) -> None:
        self.by_threads: dict[int, Crossovers] = {}
        self.assumed: Crossovers | None = None


_CURRENT = _CurrentPoints()


def current_points() -> Crossovers:
    """The points that apply now."""
    if _CURRENT.assumed is not None:
        return _CURRENT.assumed
    threads = torch.get_num_threads()
    if threads not in _CURRENT.by_threads:
        named = os.environ.get("HEADWISE_MACHINE_CLASS")  # tests choose alike on every machine
        points = points_of_class(named or this_machine().machine_class, None if named else threads)
        _CURRENT.by_threads[threads] = points
    return _CURRENT.by_threads[threads]


def crossover_size(name: str) -> float:
    """The size of one point. A compiled graph keeps the sizes that it was traced with."""
    return current_points().sizes[name]


def crossover_sizes() -> Mapping[str, float]:
    """The sizes of all points. A compiled graph keeps the sizes that it was traced with."""
    return current_points().sizes


# torch.compile reads these marks.
vars(crossover_size)["_dynamo_marked_constant"] = True
vars(crossover_sizes)["_dynamo_marked_constant"] = True


@contextmanager
def assume_points(points: Crossovers) -> Iterator[None]:
    """Let choices go by these points inside the context, in all threads.

    >>> with assume_points(points_of_class("x86-avx2")):
    ...     crossover_size("bf16_matmul")
    inf
    """
    previous = _CURRENT.assumed
    _CURRENT.assumed = points
    try:
        yield
    finally:
        _CURRENT.assumed = previous


def machine_notes() -> list[str]:
    """The processor and its class, and where the crossover points come from."""
    machine = this_machine()
    points = current_points()
    source = MEASURED_ON.get(points.machine_class)
    text = f"crossovers of {points.machine_class}: "
    text += f"measured on {source}" if source else "not measured, so headwise's CPU kernels are off"
    return [f"machine: {machine.processor} ({machine.machine_class})", text]

"""The processor of this machine, its class, the cores that may be used, and its memory."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

"""Capabilities of the processor: instruction sets, usable cores, caches and NUMA nodes, read once
per process.

Linux reports them in /proc and /sys, macOS by `sysctl`. A value that the system does not report is
left out, and nothing is assumed in its place. A container may show every processor of its host and
allow the time of a few: the processors of the affinity mask and the quota of the control group both
limit `usable_processors`.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

CGROUP_MEMORY_FILE = Path("/sys/fs/cgroup/memory.max")
# Instruction sets that decide which path is fastest, in the kernel's spelling, with the name that
# is printed.
X86_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
}
ARM_INSTRUCTIONS = {"asimd": "NEON", "sve": "SVE", "bf16": "bf16", "i8mm": "i8mm"}
MACOS_INSTRUCTIONS = {  # entries of sysctl
    "hw.optional.avx2_0": "AVX2",
    "hw.optional.avx512f": "AVX-512",
    "hw.optional.neon": "NEON",
    "hw.optional.AdvSIMD": "NEON",
    "hw.optional.arm.FEAT_BF16": "bf16",
}
MACOS_CACHES = {  # cache level by entry of sysctl; the performance cores' entries come first
    "hw.perflevel0.l1dcachesize": 1,
    "hw.l1dcachesize": 1,
    "hw.perflevel0.l2cachesize": 2,
    "hw.l2cachesize": 2,
    "hw.l3cachesize": 3,
}
TORCH_LEVELS_WITHOUT_AVX512 = (
    "AVX2",
    "DEFAULT",
    "NO AVX",
)  # of `torch.backends.cpu.get_cpu_capability`
MACHINE_CLASSES = (
    "x86-avx2",
    "x86-avx512",
    "x86-avx512-bf16",
    "x86-amx",
    "aarch64",
    "aarch64-bf16",
    "cuda",
    "other",
)
SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class CacheLevel(NamedTuple):
    """A data cache: its level, the bytes of one, and how many the machine has."""

    level: int
    size: int
    count: int

    def __str__(self) -> str:
        size = f"{self.size / 2**20:g} MiB" if self.size >= 2**20 else f"{self.size / 2**10:g} KiB"
        return f"L{self.level} {f'{self.count} x ' if self.count > 1 else ''}{size}"


@dataclass(frozen=True)
class MachineCapabilities:
    """A processor as this process may use it. Counts that the system does not report are None."""

    processor: str
    architecture: str
    instructions: tuple[str, ...]  # as printed
    visible_processors: int
    usable_processors: int
    quota: float | None = None  # processors' worth of time that the control group allows
    threads_per_core: int | None = None
    caches: tuple[CacheLevel, ...] = ()
    numa_nodes: int | None = None

    @property
    def machine_class(self) -> str:
        """The class of `MACHINE_CLASSES` whose take-over points apply to calls on the CPU."""
        have = set(self.instructions)
        if self.architecture in ("x86_64", "AMD64", "i386"):
            for instruction, name in (
                ("AMX bf16", "amx"),
                ("AVX-512 bf16", "avx512-bf16"),
                ("AVX-512", "avx512"),
            ):
                if instruction in have:
                    return f"x86-{name}"
            return "x86-avx2" if "AVX2" in have else "other"
        if self.architecture in ("aarch64", "arm64"):
            return "aarch64-bf16" if "bf16" in have else "aarch64"
        return "other"

    @property
    def last_level_cache_bytes(self) -> int | None:
        """Bytes of all caches of the highest level together, None if the system does not report
        them.
        """
        highest = max((one.level for one in self.caches), default=0)
        return sum(one.size * one.count for one in self.caches if one.level == highest) or None

    def cache_bytes(self, level: int) -> int | None:
        """Bytes of one cache of a level, None if the system does not report it."""
        return next((one.size for one in self.caches if one.level == level), None)

    @property
    def data(self) -> dict[str, object]:
        """The capabilities as plain values, ready for JSON."""
        return {
            "processor": self.processor,
            "architecture": self.architecture,
            "class": self.machine_class,
            "instructions": list(self.instructions),
            "visible_processors": self.visible_processors,
            "usable_processors": self.usable_processors,
            "quota": self.quota,
            "threads_per_core": self.threads_per_core,
            "caches": [one._asdict() for one in self.caches],
            "numa_nodes": self.numa_nodes,
        }

    def describe(self) -> str:
        """The processor, its class and instruction sets, and the cores, caches and NUMA nodes, in
        one line.
        """
        words = [
            f"{self.processor} ({self.machine_class})",
            ", ".join(self.instructions) or "no known instruction set",
        ]
        words.append(self._describe_processors())
        words += [", ".join(map(str, self.caches))] if self.caches else []
        words += (
            [f"{self.numa_nodes} NUMA nodes"]
            if self.numa_nodes is not None and self.numa_nodes > 1
            else []
        )
        return "; ".join(words)

    def notes(self, torch_threads: int) -> list[str]:
        """Advice about torch's number of threads: more threads than usable processors wait for each
        other.
        """
        if torch_threads > self.usable_processors:
            allowed = (
                f"{self.usable_processors} of {self.visible_processors} visible processors "
                "may be used"
            )
            return [
                f"torch has {torch_threads} threads, but {allowed}; call {self._set_threads_call}"
            ]
        if (self.threads_per_core or 1) > 1 and torch_threads > -(
            -self.usable_processors // self._threads_per_core
        ):
            return [
                f"torch has {torch_threads} threads on processors that are "
                f"{self.threads_per_core} hardware threads "
                f"per core; products may be faster with one thread per core"
            ]
        return []

    @property
    def _threads_per_core(self) -> int:
        return self.threads_per_core or 1

    @property
    def _set_threads_call(self) -> str:
        return f"torch.set_num_threads({self.usable_processors})"

    def _describe_processors(self) -> str:
        count = self.usable_processors
        text = f"{count} processor{'s' if count > 1 else ''}"
        if count < self.visible_processors:
            text = f"{count} of {self.visible_processors} visible processors"
            text += f" (quota {self.quota:g})" if self.quota is not None else " (affinity)"
        return text + (
            f", {self.threads_per_core} hardware threads per core"
            if self._threads_per_core > 1
            else ""
        )


_THIS_MACHINE: list[MachineCapabilities] = []  # one entry, once it was read


def this_machine() -> MachineCapabilities:
    """The capabilities of the machine that runs this process, read when first asked for."""
    if not _THIS_MACHINE:
        _THIS_MACHINE.append(read_macos() if platform.system() == "Darwin" else read_linux())
    return _THIS_MACHINE[0]


def read_linux(root: Path = Path("/"), torch_level: str | None = None) -> MachineCapabilities:
    """Read /proc and /sys below `root`. `torch_level` is the instruction set that torch's own
    kernels use.

    ATEN_CPU_CAPABILITY and old builds limit torch to AVX2 on processors that have more; then the
    class is that of AVX2.
    """
    level = torch.backends.cpu.get_cpu_capability() if torch_level is None else torch_level
    fields = _cpuinfo_fields(_read_text(root / "proc/cpuinfo"))
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    instructions = X86_INSTRUCTIONS if "flags" in fields else ARM_INSTRUCTIONS
    names = [name for flag, name in instructions.items() if flag in flags]
    if instructions is X86_INSTRUCTIONS and level in TORCH_LEVELS_WITHOUT_AVX512:
        names = [name for name in names if name == "AVX2"]
    visible = os.cpu_count() or 1 if root == Path("/") else max(1, int(fields.get("count", "1")))
    quota = read_cgroup_quota(root)
    affinity = len(os.sched_getaffinity(0)) if root == Path("/") else visible
    return MachineCapabilities(
        fields.get("model name", "") or platform.processor() or platform.machine(),
        platform.machine() if root == Path("/") else "x86_64" if "flags" in fields else "aarch64",
        tuple(names),
        visible,
        max(1, min(affinity, math.ceil(quota) if quota is not None else affinity)),
        quota,
        _threads_per_core(root),
        read_caches(root / "sys/devices/system/cpu"),
        len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
    )


def read_macos() -> MachineCapabilities:
    """Read the entries of sysctl; those that this Mac does not have are left out."""
    entries = _sysctl(("machdep.cpu.brand_string", *MACOS_INSTRUCTIONS, *MACOS_CACHES))
    caches: dict[int, CacheLevel] = {}
    for name, level in MACOS_CACHES.items():
        if int(entries.get(name, "0") or 0) > 0:
            caches.setdefault(level, CacheLevel(level, int(entries[name]), 1))
    count = os.cpu_count() or 1
    return MachineCapabilities(
        entries.get("machdep.cpu.brand_string", "") or platform.processor() or platform.machine(),
        platform.machine(),
        tuple(
            dict.fromkeys(
                label for name, label in MACOS_INSTRUCTIONS.items() if entries.get(name) == "1"
            )
        ),
        count,
        count,
        caches=tuple(caches.values()),
    )


def read_cgroup_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that this process's control group and those above it allow; None
    without a limit.
    """
    own = [line.rpartition(":")[2] for line in _read_text(root / "proc/self/cgroup").splitlines()]
    base = root / "sys/fs/cgroup"
    quotas: list[float] = []
    for group in {"/", *own}:
        folder = base / group.lstrip("/")
        for parent in (folder, *folder.parents):
            if not parent.is_relative_to(base):
                break
            quotas += _quotas_of_group(parent)
    for group in {"/", *own}:  # version 1 has a tree per controller
        quotas += _quotas_of_group(base / "cpu" / group.lstrip("/"))
    return min(quotas, default=None)


def read_caches(cpus: Path) -> tuple[CacheLevel, ...]:
    """The data caches below /sys/devices/system/cpu, smallest level first; caches that processors
    share count once.
    """
    sizes: dict[tuple[int, str], int] = {}  # bytes by level and sharing processors
    for index in sorted(cpus.glob("cpu[0-9]*/cache/index[0-9]*")):
        level, size, shared, kind = (
            _read_text(index / name) for name in ("level", "size", "shared_cpu_list", "type")
        )
        if kind != "Instruction" and level.isdigit() and (nbytes := parse_size(size)):
            sizes[int(level), shared] = nbytes
    kinds = dict.fromkeys((level, size) for (level, _), size in sizes.items())
    counts = {
        kind: sum((level, size) == kind for (level, _), size in sizes.items()) for kind in kinds
    }
    return tuple(CacheLevel(level, size, counts[level, size]) for level, size in sorted(kinds))


def parse_size(text: str) -> int:
    """Bytes of a size as the kernel writes it; 0 if it is none.

    >>> parse_size("32K"), parse_size("8M"), parse_size("some")
    (32768, 8388608, 0)
    """
    digits = text.rstrip("KMG")
    return int(digits) * SIZE_UNITS.get(text[-1:], 1) if digits.isdigit() else 0


def _quotas_of_group(folder: Path) -> list[float]:
    """The quota of one control group, of version 2 (cpu.max) or 1; an empty
    list without a limit.
    """
    parts = _read_text(folder / "cpu.max").split() or [
        _read_text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:
        return []  # "max", or -1 in version 1: no limit
    return [int(parts[0]) / int(parts[1])]


def _threads_per_core(root: Path) -> int | None:
    siblings = _read_text(root / "sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    return sum(1 for _ in _expand_list(siblings)) or None


def _expand_list(text: str) -> Iterable[int]:
    """The numbers of a list as the kernel writes it, such as "0-1,4"."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _cpuinfo_fields(text: str) -> Mapping[str, str]:
    """The fields of the first processor, and "count", the number of processors."""
    fields: dict[str, str] = {}
    lines = text.splitlines()
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields | {
        "count": str(sum(line.partition(":")[0].strip() == "processor" for line in lines))
    }


def _sysctl(names: Iterable[str]) -> dict[str, str]:
    values = {}
    for name in names:
        try:
            done = subprocess.run(
                ["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            values[name] = done.stdout.strip()
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def available_memory() -> int:
    """Bytes of main memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(CGROUP_MEMORY_FILE.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return total

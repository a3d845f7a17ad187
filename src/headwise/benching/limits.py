"""What the machine allows, measured beside the work: memory read once, and products of large matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..counting.here import time_run, accelerator_type
from .case import RequiredWork, TimedCall
from .turns import TimingSamples

READ_RUN, MATMUL_RUN = "(read)", "(products)"  # in brackets: no peer is called so
CACHE_MULTIPLE = 8  # times the last-level cache: so little of what is read can still be in it
ASSUMED_CACHE_BYTES = 2**25  # bytes of a last-level cache, where the system does not say
CPU_SYSFS = Path("/sys/devices/system/cpu")
MATRIX_SIZES = {"cpu": 2048, "cuda": 8192}  # rows of the matrices that are multiplied
HEADER_SECONDS = 0.2  # seconds of each rate of the machine
CACHE_KEYS = ("level", "size", "shared_cpu_list")  # what the system tells of a cache
RATE_KEYS = ("bytes_per_second", "flops_per_second")  # of memory, of compute
SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class LastLevelCache(NamedTuple):
    """The last-level caches of a machine together, in bytes, and whether the system said so."""

    size: int
    is_reported: bool


@dataclass(frozen=True)
class MachineLimits:
    """Runs that reach for what the machine can do, on buffers that are made once."""

    last_level_cache: LastLevelCache
    device_type: str = "cpu"
    _kept: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def of_this_machine() -> MachineLimits:
        """Of the machine that runs this."""
        return MachineLimits(find_last_level_cache(CPU_SYSFS), accelerator_type())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that is read."""
        return CACHE_MULTIPLE * self.last_level_cache.size

    def limit_runs(self, need: RequiredWork | None) -> dict[str, TimedCall]:
        """What is timed in turns with work that needs this."""
        runs: dict[str, TimedCall] = {}
        if need is not None and need.bytes_read:
            runs[READ_RUN] = self._buffer().sum
        if need is not None and need.flops:
            runs[MATMUL_RUN] = partial(torch.mm, *self._matrices(need.dtype))
        return runs

    def bound(self, need: RequiredWork, taken: Mapping[str, TimingSamples]) -> dict[str, Any]:
        """Seconds that the work takes at least, which of the two it waits for, and what was measured of the machine.

        >>> said = MachineLimits(LastLevelCache(2**20, True)).of(RequiredWork(reads=2**24), {READ_RUN: TimingSamples((0.5, 0.25, 1.0))})
        >>> said["seconds"], said["waits_for"]
        (1.0, 'memory')
        """
        waits = {"memory": READ_RUN, "compute": MATMUL_RUN}
        rates = {"memory": float(self.buffer_bytes), "compute": float(self.flops_per_product)}
        needs = {"memory": need.bytes_read, "compute": need.flops}
        least = {by: needs[by] * taken[run].median / rates[by] for by, run in waits.items() if needs[by]}
        longest = max(least, key=lambda by: least[by])
        told = {name: rates[by] / taken[run].median for (by, run), name in zip(waits.items(), RATE_KEYS, strict=True)
                if needs[by]}  # fmt: skip
        spread = taken[waits[longest]].spread
        needed = {"bytes": need.bytes_read, "flops": need.flops, "dtype": str(need.dtype).removeprefix("torch.")}
        return {"seconds": least[longest], "waits_for": longest, "spread": spread, **told, **needed}

    @property
    def flops_per_product(self) -> int:
        """FLOPs of one product."""
        return 2 * MATRIX_SIZES[self.device_type] ** 3

    def measure_rates(self) -> dict[str, float]:
        """What the machine does in a large read, a large copy, and large products, each measured for a moment."""
        source = self._buffer()
        there = torch.empty_like(source)
        rates = {
            "read_bytes_per_second": source.nbytes / time_run(source.sum, HEADER_SECONDS),
            "copy_bytes_per_second": 2 * source.nbytes / time_run(lambda: there.copy_(source), HEADER_SECONDS),
        }
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            one, other = self._matrices(dtype)
            rates[f"{name}_flops_per_second"] = self.flops_per_product / time_run(partial(torch.mm, one, other), HEADER_SECONDS)
        return rates

    def _buffer(self) -> Tensor:
        if READ_RUN not in self._kept:
            # ones and not zeros: memory that nobody wrote to is not read from memory
            self._kept[READ_RUN] = torch.ones(self.buffer_bytes // 4, device=self.device_type)
        return self._kept[READ_RUN]

    def _matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype not in self._kept:
            rows = MATRIX_SIZES[self.device_type]
            draw = torch.Generator(self.device_type).manual_seed(0)
            both = torch.randn(2, rows, rows, device=self.device_type, generator=draw).to(dtype)
            self._kept[dtype] = both.unbind()
        return self._kept[dtype]


def find_last_level_cache(system: Path) -> LastLevelCache:
    """The last-level caches of all processors together; what is assumed where the system says nothing of them."""
    found: dict[str, tuple[int, int]] = {}  # who shares it: its level, its bytes
    for index in sorted(system.glob("cpu[0-9]*/cache/index[0-9]*")):
        try:
            level, size, shared = (index.joinpath(name).read_text().strip() for name in CACHE_KEYS)
            found[f"{level} {shared}"] = int(level), int(size.rstrip("KMG")) * SIZE_UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    highest = max((level for level, _ in found.values()), default=0)
    size = sum(size for level, size in found.values() if level == highest)
    return LastLevelCache(size, True) if size else LastLevelCache(ASSUMED_CACHE_BYTES, False)

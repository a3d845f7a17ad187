"""What the machine allows, measured beside the work: memory read once, and products of large matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..counting.here import seconds, where
from .case import Need, Run
from .turns import Samples

READ, PRODUCTS = "(read)", "(products)"  # in brackets: no peer is called so
BEYOND = 8  # times the last-level cache: so little of what is read can still be in it
ASSUMED = 2**25  # bytes of a last-level cache, where the system does not say
CACHES = Path("/sys/devices/system/cpu")
SIZES = {"cpu": 2048, "cuda": 8192}  # rows of the matrices that are multiplied
HEADER = 0.2  # seconds of each rate of the machine
KEYS = ("level", "size", "shared_cpu_list")  # what the system tells of a cache
RATES = ("bytes_per_second", "flops_per_second")  # of memory, of compute
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Last(NamedTuple):
    """The last-level caches of a machine together, in bytes, and whether the system said so."""

    size: int
    told: bool


@dataclass(frozen=True)
class Limits:
    """Runs that reach for what the machine can do, on buffers that are made once."""

    last: Last
    kind: str = "cpu"
    _kept: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def here() -> Limits:
        """Of the machine that runs this."""
        return Limits(last_level(CACHES), where())

    @property
    def bytes_read(self) -> int:
        """Bytes of the buffer that is read."""
        return BEYOND * self.last.size

    def runs(self, need: Need | None) -> dict[str, Run]:
        """What is timed in turns with work that needs this."""
        runs: dict[str, Run] = {}
        if need is not None and need.reads:
            runs[READ] = self._buffer().sum
        if need is not None and need.flops:
            runs[PRODUCTS] = partial(torch.mm, *self._matrices(need.dtype))
        return runs

    def of(self, need: Need, taken: Mapping[str, Samples]) -> dict[str, Any]:
        """Seconds that the work takes at least, which of the two it waits for, and what was measured of the machine.

        >>> said = Limits(Last(2**20, True)).of(Need(reads=2**24), {READ: Samples((0.5, 0.25, 1.0))})
        >>> said["seconds"], said["waits_for"]
        (1.0, 'memory')
        """
        waits = {"memory": READ, "compute": PRODUCTS}
        rates = {"memory": float(self.bytes_read), "compute": float(self.flops)}
        needs = {"memory": need.reads, "compute": need.flops}
        least = {by: needs[by] * taken[run].median / rates[by] for by, run in waits.items() if needs[by]}
        longest = max(least, key=lambda by: least[by])
        told = {name: rates[by] / taken[run].median for (by, run), name in zip(waits.items(), RATES, strict=True)
                if needs[by]}  # fmt: skip
        spread = taken[waits[longest]].spread
        needed = {"bytes": need.reads, "flops": need.flops, "dtype": str(need.dtype).removeprefix("torch.")}
        return {"seconds": least[longest], "waits_for": longest, "spread": spread, **told, **needed}

    @property
    def flops(self) -> int:
        """FLOPs of one product."""
        return 2 * SIZES[self.kind] ** 3

    def header(self) -> dict[str, float]:
        """What the machine does in a large read, a large copy, and large products, each measured for a moment."""
        source = self._buffer()
        there = torch.empty_like(source)
        rates = {
            "read_bytes_per_second": source.nbytes / seconds(source.sum, HEADER),
            "copy_bytes_per_second": 2 * source.nbytes / seconds(lambda: there.copy_(source), HEADER),
        }
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            one, other = self._matrices(dtype)
            rates[f"{name}_flops_per_second"] = self.flops / seconds(partial(torch.mm, one, other), HEADER)
        return rates

    def _buffer(self) -> Tensor:
        if READ not in self._kept:
            # ones and not zeros: memory that nobody wrote to is not read from memory
            self._kept[READ] = torch.ones(self.bytes_read // 4, device=self.kind)
        return self._kept[READ]

    def _matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype not in self._kept:
            rows = SIZES[self.kind]
            draw = torch.Generator(self.kind).manual_seed(0)
            both = torch.randn(2, rows, rows, device=self.kind, generator=draw).to(dtype)
            self._kept[dtype] = both.unbind()
        return self._kept[dtype]


def last_level(system: Path) -> Last:
    """The last-level caches of all processors together; what is assumed where the system says nothing of them."""
    found: dict[str, tuple[int, int]] = {}  # who shares it: its level, its bytes
    for index in sorted(system.glob("cpu[0-9]*/cache/index[0-9]*")):
        try:
            level, size, shared = (index.joinpath(name).read_text().strip() for name in KEYS)
            found[f"{level} {shared}"] = int(level), int(size.rstrip("KMG")) * UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    highest = max((level for level, _ in found.values()), default=0)
    size = sum(size for level, size in found.values() if level == highest)
    return Last(size, True) if size else Last(ASSUMED, False)

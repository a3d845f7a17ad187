"""What machines can do at most, from a table, and what follows from it: the roofline."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from ..errors import SpecError, nearest

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Device:
    """FLOPs a second by precision, bytes a second, bytes of memory."""

    name: str
    what: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    kind: str = "cuda"  # what torch calls it

    @staticmethod
    def named(name: str) -> Device:
        """The machine of this name.

        >>> round(Device.named("h200").ridge("bf16"), 1)
        206.0
        """
        table = tomllib.loads(files("headwise.counting").joinpath("hardware.toml").read_text())
        if name not in table:
            raise SpecError(f"there is no device {name!r}; {nearest(name, table)}")
        row = table[name]
        flops = {"bf16": row["bf16"] * 1e12, "fp16": row["bf16"] * 1e12, "fp32": row["fp32"] * 1e12}
        return Device(name, row["what"], flops, row["gbps"] * 1e9, row["gb"] * 1e9, row.get("kind", "cuda"))

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte at which products begin to take longer than memory."""
        return self.flops[dtype] / self.bandwidth

    def time(self, flops: int, moved: int, dtype: str) -> float:
        """Seconds at least: products and memory overlap at best."""
        return max(flops / self.flops[dtype], moved / self.bandwidth)

    def bound(self, flops: int, moved: int, dtype: str) -> str:
        """Which of the two it waits for."""
        return "compute" if flops / self.flops[dtype] >= moved / self.bandwidth else "memory"


def bytes_of(dtype: str) -> int:
    """Bytes of one number.

    >>> bytes_of("bf16")
    2
    """
    if dtype not in BYTES:
        raise SpecError(f"dtype={dtype!r} is unknown; {nearest(dtype, BYTES)}")
    return BYTES[dtype]

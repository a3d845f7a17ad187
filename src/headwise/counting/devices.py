"""What machines can do at most, from a table, and what follows from it: the roofline."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from ..errors import SpecError, suggest

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STORAGE_BYTES = DTYPE_BYTES | {"int8": 1}
SCALE_BYTES = 4  # bytes of the float32 number that a row of int8 is multiplied with
THIS_MACHINE = "here"
HARDWARE_TABLE = tomllib.loads(files("headwise.counting").joinpath("hardware.toml").read_text())


@dataclass(frozen=True)
class Device:
    """FLOPs a second by precision, bytes a second, bytes of memory."""

    name: str
    description: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    kind: str = "cuda"  # what torch calls it

    @staticmethod
    def from_name(name: str) -> Device:
        """The machine of this name; "here" is the one that runs this, measured when first asked for.

        >>> round(Device.named("h200").ridge_point("bf16"), 1)
        206.0
        """
        if name == THIS_MACHINE:
            from .here import get_this_machine

            return get_this_machine()
        if name not in HARDWARE_TABLE:
            raise SpecError(f"there is no device {name!r}; {suggest(name, [*HARDWARE_TABLE, THIS_MACHINE])}")
        row = HARDWARE_TABLE[name]
        flops = {"bf16": row["bf16"] * 1e12, "fp16": row["bf16"] * 1e12, "fp32": row["fp32"] * 1e12}
        return Device(name, row["what"], flops, row["gbps"] * 1e9, row["gb"] * 1e9, row.get("kind", "cuda"))

    def with_efficiency(self, compute: float = 1.0, bandwidth: float = 1.0) -> Device:
        """The same machine when programs reach only these shares of its products and of its bandwidth.

        >>> Device.named("h200").reached(products=0.5).flops["bf16"]
        494500000000000.0
        """
        for name, share in (("products", compute), ("memory", bandwidth)):
            if not 0 < share <= 1:
                raise SpecError(f"{name}={share!r} is no share of what a machine can do; give more than 0, at most 1")
        flops = {dtype: rate * compute for dtype, rate in self.flops.items()}
        less = [
            f"{share:.0%} of its {name}" for name, share in (("products", compute), ("bandwidth", bandwidth)) if share < 1
        ]
        what = f"{self.description}, reaching {' and '.join(less)}" if less else self.description
        return replace(self, description=what, flops=flops, bandwidth=self.bandwidth * bandwidth)

    def ridge_point(self, dtype: str) -> float:
        """FLOPs a byte at which products begin to take longer than memory."""
        return self.flops[dtype] / self.bandwidth

    def compute_bound_tokens(self, dtype: str, weights: str = "") -> float:
        """Tokens in a step from which a product with a matrix waits for compute, its in- and output left out.

        Two FLOPs for each number of the matrix and token, against the bytes of that number:

        >>> [round(Device.named(name).critical("bf16")) for name in ("a100", "h100", "h200")]
        [153, 295, 206]
        >>> round(Device.named("h100").critical("bf16", weights="int8"))  # half as many bytes
        148
        """
        return self.ridge_point(dtype) * STORAGE_BYTES[weights or dtype] / 2

    def min_seconds(self, flops: int, moved: int, dtype: str) -> float:
        """Seconds at least: products and memory overlap at best."""
        return max(flops / self.flops[dtype], moved / self.bandwidth)

    def limiting_resource(self, flops: int, moved: int, dtype: str) -> str:
        """Which of the two it waits for."""
        return "compute" if flops / self.flops[dtype] >= moved / self.bandwidth else "memory"


@dataclass(frozen=True)
class NumberFormats:
    """How numbers are held: those that products are made of, those of weights, and those that are remembered.

    Weights and cache are held as products are made unless said; int8 has a float32 scale for each row.

    >>> NumberFormats("bf16", cache="int8")
    Formats(maths='bf16', weights='bf16', cache='int8')
    """

    compute: str = "bf16"
    weights: str = ""
    cache: str = ""

    def __post_init__(self) -> None:
        dtype_bytes(self.compute)
        for name in ("weights", "cache"):
            said = getattr(self, name) or self.compute
            if said not in STORAGE_BYTES:
                raise SpecError(f"{name}={said!r} is unknown; {suggest(said, STORAGE_BYTES)}")
            object.__setattr__(self, name, said)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number that products are made of.

    >>> dtype_bytes("bf16")
    2
    """
    if dtype not in DTYPE_BYTES:
        raise SpecError(f"dtype={dtype!r} is unknown; {suggest(dtype, DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor held so; of int8 each row along the last axis has a scale.

    Keys of 8 heads and 128 channels, of one token:

    >>> stored_bytes((8, 128), "bf16"), stored_bytes((8, 128), "int8")
    (2048, 1056)
    """
    scales = SCALE_BYTES * math.prod(shape[:-1]) if STORAGE_BYTES[dtype] == 1 else 0
    return math.prod(shape) * STORAGE_BYTES[dtype] + scales


DEFAULT_FORMATS = NumberFormats()

"""What machines can do at most, from a table, and what follows from it: the roofline."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from ..errors import SpecError, nearest

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
STORED = BYTES | {"int8": 1}
SCALE = 4  # bytes of the float32 number that a row of int8 is multiplied with
HERE = "here"
TABLE = tomllib.loads(files("headwise.counting").joinpath("hardware.toml").read_text())


@dataclass(frozen=True)
class Device:
    """FLOPs a second by precision, bytes a second, bytes of memory."""

    name: str
    what: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    kind: str = "cuda"  # what torch calls it

    @staticmethod
    def named(name: str) -> Device:
        """The machine of this name; "here" is the one that runs this, measured when first asked for.

        >>> round(Device.named("h200").ridge("bf16"), 1)
        206.0
        """
        if name == HERE:
            from .here import this_machine

            return this_machine()
        if name not in TABLE:
            raise SpecError(f"there is no device {name!r}; {nearest(name, [*TABLE, HERE])}")
        row = TABLE[name]
        flops = {"bf16": row["bf16"] * 1e12, "fp16": row["bf16"] * 1e12, "fp32": row["fp32"] * 1e12}
        return Device(name, row["what"], flops, row["gbps"] * 1e9, row["gb"] * 1e9, row.get("kind", "cuda"))

    def reached(self, products: float = 1.0, memory: float = 1.0) -> Device:
        """The same machine when programs reach only these shares of its products and of its bandwidth.

        >>> Device.named("h200").reached(products=0.5).flops["bf16"]
        494500000000000.0
        """
        for name, share in (("products", products), ("memory", memory)):
            if not 0 < share <= 1:
                raise SpecError(f"{name}={share!r} is no share of what a machine can do; give more than 0, at most 1")
        flops = {dtype: rate * products for dtype, rate in self.flops.items()}
        less = [
            f"{share:.0%} of its {name}" for name, share in (("products", products), ("bandwidth", memory)) if share < 1
        ]
        what = f"{self.what}, reaching {' and '.join(less)}" if less else self.what
        return replace(self, what=what, flops=flops, bandwidth=self.bandwidth * memory)

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte at which products begin to take longer than memory."""
        return self.flops[dtype] / self.bandwidth

    def critical(self, dtype: str, weights: str = "") -> float:
        """Tokens in a step from which a product with a matrix waits for compute, its in- and output left out.

        Two FLOPs for each number of the matrix and token, against the bytes of that number:

        >>> [round(Device.named(name).critical("bf16")) for name in ("a100", "h100", "h200")]
        [153, 295, 206]
        >>> round(Device.named("h100").critical("bf16", weights="int8"))  # half as many bytes
        148
        """
        return self.ridge(dtype) * STORED[weights or dtype] / 2

    def time(self, flops: int, moved: int, dtype: str) -> float:
        """Seconds at least: products and memory overlap at best."""
        return max(flops / self.flops[dtype], moved / self.bandwidth)

    def bound(self, flops: int, moved: int, dtype: str) -> str:
        """Which of the two it waits for."""
        return "compute" if flops / self.flops[dtype] >= moved / self.bandwidth else "memory"


@dataclass(frozen=True)
class Formats:
    """How numbers are held: those that products are made of, those of weights, and those that are remembered.

    Weights and cache are held as products are made unless said; int8 has a float32 scale for each row.

    >>> Formats("bf16", cache="int8")
    Formats(maths='bf16', weights='bf16', cache='int8')
    """

    maths: str = "bf16"
    weights: str = ""
    cache: str = ""

    def __post_init__(self) -> None:
        bytes_of(self.maths)
        for name in ("weights", "cache"):
            said = getattr(self, name) or self.maths
            if said not in STORED:
                raise SpecError(f"{name}={said!r} is unknown; {nearest(said, STORED)}")
            object.__setattr__(self, name, said)


def bytes_of(dtype: str) -> int:
    """Bytes of one number that products are made of.

    >>> bytes_of("bf16")
    2
    """
    if dtype not in BYTES:
        raise SpecError(f"dtype={dtype!r} is unknown; {nearest(dtype, BYTES)}")
    return BYTES[dtype]


def stored(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor held so; of int8 each row along the last axis has a scale.

    Keys of 8 heads and 128 channels, of one token:

    >>> stored((8, 128), "bf16"), stored((8, 128), "int8")
    (2048, 1056)
    """
    scales = SCALE * math.prod(shape[:-1]) if STORED[dtype] == 1 else 0
    return math.prod(shape) * STORED[dtype] + scales


PLAIN = Formats()

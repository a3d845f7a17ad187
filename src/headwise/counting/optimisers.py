"""Bytes that training keeps of every learned number, by the name of who counts so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SpecError, suggest

ADAM_MOMENT_BYTES = {"first moments": 4, "second moments": 4}


@dataclass(frozen=True)
class OptimiserMemory:
    """What is kept besides activations: bytes of each number by what they hold, and who says so."""

    name: str
    description: str
    bytes_by_tensor: Mapping[str, int]

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of a learned number in all."""
        return sum(self.bytes_by_tensor.values())

    @staticmethod
    def from_name(name: str) -> OptimiserMemory:
        """The convention of this name.

        >>> [OptimiserMemory.named(name).each for name in ("zero", "megatron", "zhihu-624740065", "adam-fp32", "muon")]
        [16, 18, 20, 16, 12]
        """
        if name not in OPTIMISERS:
            raise SpecError(f"there is no optimiser {name!r}; {suggest(name, OPTIMISERS)}")
        return OPTIMISERS[name]


_OPTIMISER_CONVENTIONS = (
    OptimiserMemory(
        "zero",
        "Adam in 16 bits, gradients too (1910.02054)",
        {"weights": 2, "gradients": 2, "master weights": 4} | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory(
        "megatron", "Adam in 16 bits, gradients in 32", {"weights": 2, "gradients": 4, "master weights": 4} | ADAM_MOMENT_BYTES
    ),
    OptimiserMemory(
        "zhihu-624740065",
        "Adam in 16 bits, gradients in 16 and in 32",
        {"weights": 2, "gradients": 2, "master weights": 4, "gradients again": 4} | ADAM_MOMENT_BYTES,
    ),
    OptimiserMemory("adam-fp32", "Adam in 32 bits (1412.6980)", {"weights": 4, "gradients": 4} | ADAM_MOMENT_BYTES),
    OptimiserMemory("sgd-momentum", "SGD with momentum, in 32 bits", {"weights": 4, "gradients": 4, "momentum": 4}),
    OptimiserMemory("muon", "Muon in 32 bits, as if all were matrices", {"weights": 4, "gradients": 4, "momentum": 4}),
)
OPTIMISERS: dict[str, OptimiserMemory] = {one.name: one for one in _OPTIMISER_CONVENTIONS}

"""Quantised checkpoints: the number format of their matrices, with scales, and which matrices have
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .components import SpecNode, WeightSpec

NESTED_SCALE_BITS = 32  # of the float32 scale of each group of quantised scales


@dataclass(frozen=True, repr=False)
class WeightFormat(SpecNode):
    """A number format of matrices: `bits` per weight, and a scale and a zero point for each block
    of weights.

    A block has `block_rows` rows (outputs) and `block_columns` columns (inputs); 0 means all of
    them. With order="flat" it has `block_columns` consecutive weights of the flattened matrix
    (bitsandbytes). `scales_per_group` scales share a float32 scale if they are quantised themselves
    (2305.14314). `column_bits` are stored for every input channel.

    >>> mxfp4 = WeightFormat("mxfp4", 4, block_rows=1, block_columns=32, scale_bits=8)
    >>> mxfp4.matrix_bytes(10, 64), mxfp4.bits_per_weight  # 320 bytes of weights and 20 of scales
    (340, 4.25)
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"order": ("grid", "flat")}
    name: str
    bits: int
    block_rows: int = 0
    block_columns: int = 0
    scale_bits: int = 0
    zero_bits: int = 0
    scales_per_group: int = 0
    column_bits: int = 0
    order: str = "grid"

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Count the bytes of a matrix with its scales and zero points."""
        if self.order == "flat":
            blocks = -(-rows * columns // (self.block_columns or rows * columns))
        else:
            blocks = -(-rows // (self.block_rows or rows)) * -(
                -columns // (self.block_columns or columns)
            )
        nested = (
            -(-blocks // self.scales_per_group) * NESTED_SCALE_BITS if self.scales_per_group else 0
        )
        sizes = (
            self.bits * rows * columns,
            self.scale_bits * blocks,
            self.zero_bits * blocks,
            nested,
            self.column_bits * columns,
        )
        return sum(-(-size // 8) for size in sizes)

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight with its share of the scales, if blocks do not span whole rows or
        columns.
        """
        if not self.block_columns or not (self.block_rows or self.order == "flat"):
            return float(self.bits)
        block = self.block_columns * (self.block_rows if self.order == "grid" else 1)
        nested = NESTED_SCALE_BITS / self.scales_per_group if self.scales_per_group else 0.0
        return self.bits + (self.scale_bits + self.zero_bits + nested) / block


# Formats by name, with the blocks of the checkpoints that use them most.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        # DeepSeek-V3, 2412.19437
        WeightFormat("fp8", 8, block_rows=128, block_columns=128, scale_bits=32),
        # one float32 scale per row, 2208.07339
        WeightFormat("int8", 8, block_rows=1, scale_bits=32),
        # OCP Microscaling, 2310.10537
        WeightFormat("mxfp4", 4, block_rows=1, block_columns=32, scale_bits=8),
        WeightFormat("nf4", 4, block_columns=64, scale_bits=32, order="flat"),  # 2305.14314
        # AWQ, 2306.00978
        WeightFormat("int4", 4, block_rows=1, block_columns=128, scale_bits=16, zero_bits=4),
    )
}
LAYER_MATRICES = ("*.*.attention", "*.*.cross", "*.*.feed")  # names that begin so, by default
# Matrices of attention that no quantiser converts, such as tables of position biases, are in none
# of these slots.
LINEAR_ROLE = "linear"
LINEAR_SLOTS = frozenset({"project", "output"})


@dataclass(frozen=True, repr=False)
class QuantizationSpec(SpecNode):
    """Which matrices of a model are stored in `format`: those named by `included` and not by
    `excluded`.

    A name is a beginning of a tensor's name by whole words, and `*` is any word. Vectors, routers
    and tables of embeddings are never quantised.

    >>> experts = QuantizationSpec(WEIGHT_FORMATS["mxfp4"], included=("*.*.feed.expert",))
    >>> (
    ...     experts.covers_name("decoder.3.feed.expert.up"),
    ...     experts.covers_name("decoder.3.attention.project.q"),
    ... )
    (True, False)
    """

    format: WeightFormat
    included: tuple[str, ...] = LAYER_MATRICES
    excluded: tuple[str, ...] = ()

    def covers_name(self, name: str) -> bool:
        """True if a linear map of this name is quantised."""
        return any(_begins_with(name, pattern) for pattern in self.included) and not any(
            _begins_with(name, pattern) for pattern in self.excluded
        )

    def covers(self, weight: WeightSpec) -> bool:
        """True if a tensor is quantised; a model counted from its modules says it by the role."""
        is_covered = is_linear(weight) and self.covers_name(weight.name)
        return weight.role == LINEAR_ROLE or is_covered


def is_linear(weight: WeightSpec) -> bool:
    """True if a tensor, with its full name, is the matrix of a linear map, or one for each expert.

    Routers are left out, because quantisers do not convert them.
    """
    words = weight.name.split(".")
    if len(weight.shape) < 2 + ("expert" in words):  # experts have a bias in each row of a matrix
        return False
    if {"attention", "cross"} & set(words):
        return bool(LINEAR_SLOTS & set(words))
    return words[-1] != "router" and ("feed" in words or words[0] == "head")


def _begins_with(name: str, pattern: str) -> bool:
    words = name.split(".")
    pattern_words = pattern.split(".")
    return len(words) >= len(pattern_words) and all(
        pattern_word in ("*", word)
        for pattern_word, word in zip(pattern_words, words, strict=False)
    )

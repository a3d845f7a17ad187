"""Attention masks and score biases in compact form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MASKED_BELOW = -1e4  # a bias of this or less is treated as a mask
PACKING_FORMS = ("bits", "band", "full")


@dataclass(frozen=True)
class PackedMask:
    """A mask or bias that is added to scores, [B or 1, H or 1, T or 1, S], in the most compact of three forms.

    "bits" adds 0 where the bit is set and `low` elsewhere. "band" has one number per offset (key minus query), the most
    negative offset first. "full" has one number per pair.

    >>> triangle = PackedMask.pack(np.tri(3, dtype=bool)[None, None])
    >>> triangle.form, triangle.unpack_rows(0, 0, 1, 3)
    ('bits', array([[  0.,   0., -inf],
           [  0.,   0.,   0.]], dtype=float32))
    >>> far = -np.abs(np.arange(3.0)[:, None] - np.arange(3.0))
    >>> PackedMask.pack(far[None, None]).form
    'band'
    """

    form: str
    shape: tuple[int, int, int, int]
    values: Array
    low: float = -np.inf

    @staticmethod
    def pack(a: Array) -> PackedMask:
        """Pack a boolean mask (true: attend) or a bias into its smallest form."""
        batch, heads, queries, keys = a.shape
        shape = batch, heads, queries, keys
        if a.dtype == np.bool_:
            return PackedMask("bits", shape, np.packbits(a, -1))
        masked = a <= MASKED_BELOW
        if not masked.any() and not a.any():
            return PackedMask("bits", (1, 1, 1, keys), np.packbits(np.ones((1, 1, 1, keys), bool), -1))
        low = float(a.min())
        if not np.any(a[~masked]) and np.all(a[masked] == low):
            return PackedMask("bits", shape, np.packbits(~masked, -1), low)
        if queries > 1 and np.array_equal(a[:, :, :-1, :-1], a[:, :, 1:, 1:]):
            band = np.concatenate([a[:, :, ::-1, 0], a[:, :, 0, 1:]], -1)
            return PackedMask("band", shape, band.astype(np.float32))
        return PackedMask("full", shape, np.ascontiguousarray(a, np.float32))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key for deduplication: equal for masks with equal content."""
        return self.form, self.shape, self.low, self.values.tobytes()

    def unpack_rows(self, row: int, head: int, first_query: int, end_query: int) -> Array:
        """The bias of one head for a range of queries, [T or 1, S]."""
        batch, heads, queries, keys = self.shape
        head_values = self.values[row if batch > 1 else 0, head if heads > 1 else 0]
        if self.form == "band":
            offset_of_key_0 = queries - 1 - np.arange(first_query, end_query)
            return head_values[offset_of_key_0[:, None] + np.arange(keys)]
        head_values = head_values[first_query:end_query] if queries > 1 else head_values
        if self.form == "full":
            return head_values
        allowed = np.unpackbits(head_values, axis=-1, count=keys).astype(bool)
        return np.where(allowed, np.float32(0), np.float32(self.low))

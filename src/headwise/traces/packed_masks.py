"""Numbers for pairs of a query and a key, kept as small as they allow: what a mask forbids, what a bias adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MASKED_BELOW = -1e4  # what adds this or less is meant as a mask
PACKING_FORMS = ("bits", "band", "full")


@dataclass(frozen=True)
class PackedMask:
    """What is added to scores [B or 1, H or 1, T or 1, S].

    As "bits" it adds nothing where one is set and `low` elsewhere; as a "band" one number for each distance of key and
    query, the most negative first; as "full" whatever stands there.

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
        """The smallest form of a mask, true where a pair counts, or of numbers to add."""
        batch, heads, queries, keys = a.shape
        shape = batch, heads, queries, keys
        if a.dtype == np.bool_:
            return PackedMask("bits", shape, np.packbits(a, -1))
        muted = a <= MASKED_BELOW
        if not muted.any() and not a.any():
            return PackedMask("bits", (1, 1, 1, keys), np.packbits(np.ones((1, 1, 1, keys), bool), -1))
        low = float(a.min())
        if not np.any(a[~muted]) and np.all(a[muted] == low):
            return PackedMask("bits", shape, np.packbits(~muted, -1), low)
        if queries > 1 and np.array_equal(a[:, :, :-1, :-1], a[:, :, 1:, 1:]):
            band = np.concatenate([a[:, :, ::-1, 0], a[:, :, 0, 1:]], -1)
            return PackedMask("band", shape, band.astype(np.float32))
        return PackedMask("full", shape, np.ascontiguousarray(a, np.float32))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two grids share that are the same."""
        return self.form, self.shape, self.low, self.values.tobytes()

    def unpack_rows(self, row: int, head: int, first_query: int, end_query: int) -> Array:
        """What it adds for some queries of one head, [T or 1, S]."""
        batch, heads, queries, keys = self.shape
        own = self.values[row if batch > 1 else 0, head if heads > 1 else 0]
        if self.form == "band":
            first = queries - 1 - np.arange(first_query, end_query)
            return own[first[:, None] + np.arange(keys)]
        own = own[first_query:end_query] if queries > 1 else own
        if self.form == "full":
            return own
        allowed = np.unpackbits(own, axis=-1, count=keys).astype(bool)
        return np.where(allowed, np.float32(0), np.float32(self.low))

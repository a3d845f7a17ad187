"""Kernels that torch has no operation for, compiled by Numba and handed to torch as operations of its own.

Importing this package compiles nothing; each operation does when it first runs.
"""

from .paged_decode import PagedDecodeOptions, attend_paged, attend_paged_reference
from .small_batch_ops import multiply_small_batch

__all__ = ["PagedDecodeOptions", "attend_paged", "attend_paged_reference", "multiply_small_batch"]

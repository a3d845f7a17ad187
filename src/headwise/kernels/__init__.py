"""Kernels that torch has no operation for, compiled by Numba and handed to torch as operations of its own.

Importing this package compiles nothing; each operation does when it first runs.
"""

from .decode import Beside, decode, plainly
from .thin import thin

__all__ = ["Beside", "decode", "plainly", "thin"]

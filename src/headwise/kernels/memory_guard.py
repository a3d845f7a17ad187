"""Debug build of the kernels: every load and store is checked against the memory of the current
call.

Set HEADWISE_DEBUG_KERNELS=1 before headwise is imported; it is meant for tests. Compiled kernels
then compare each address with the ranges of the call's tensors, scratch buffers and argument
record. An access outside goes to a spare buffer instead, and `run_checked` raises RuntimeError when
the kernel returns. Prefetches are not checked, as they cannot fault. Kernels run about ten times
slower and are not cached on disk. Calls run one at a time.

Without the variable the compiled code contains none of this.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from .kernel_args import KernelArgs, MemoryRange

DEBUG_KERNELS = os.environ.get("HEADWISE_DEBUG_KERNELS", "0") == "1"
ACCESSES = ("reads", "writes", "updates")
MAX_RANGES = 1024
MAX_ACCESS_BYTES = 128
MAX_ERRORS = 2**24  # then the kernel traps: it is caught in a loop over wrong numbers
# Words of the table that compiled kernels read and write; the pairs of begin and end follow.
NUM_RANGES_WORD, NUM_ERRORS_WORD, ADDRESS_WORD, SIZE_WORD, ACCESS_WORD, FIRST_RANGE_WORD = range(6)


class GuardMemory:
    """The table of allowed ranges, whose address is part of the compiled code, and the spare
    buffer.
    """

    def __init__(self) -> None:
        self.table = (ctypes.c_int64 * (FIRST_RANGE_WORD + 2 * MAX_RANGES))()
        self.spare = ctypes.create_string_buffer(2 * MAX_ACCESS_BYTES)
        self.lock = threading.Lock()

    @property
    def table_address(self) -> int:
        """Address of the table."""
        return ctypes.addressof(self.table)

    @property
    def spare_address(self) -> int:
        """Address of the spare buffer, a multiple of the largest access."""
        return -(-ctypes.addressof(self.spare) // MAX_ACCESS_BYTES) * MAX_ACCESS_BYTES


GUARD_MEMORY = GuardMemory()


class BadAccess(NamedTuple):
    """The first access of a kernel outside the memory of its call."""

    address: int
    size: int
    access: str

    def describe(self, ranges: list[MemoryRange]) -> str:
        """Return where the access is, relative to the nearest range."""
        nearest = min(
            ranges,
            key=lambda memory: max(memory.begin - self.address, self.address - memory.end + 1, 0),
        )
        offset = self.address - nearest.begin
        length = nearest.end - nearest.begin
        return (
            f"{self.access} {self.size} bytes at offset {offset} of {nearest.name}, which has "
            f"{length} bytes"
        )


def run_checked(
    kernel: str, dtype: torch.dtype | None, args: KernelArgs, run: Callable[[], None]
) -> None:
    """Call `run`, which runs a kernel with these arguments; raise RuntimeError if it leaves their
    memory.
    """
    args.check_each_tensor(dtype)
    ranges = args.memory_ranges()
    if len(ranges) > MAX_RANGES:
        raise ValueError(f"cannot check {len(ranges)} tensors: at most {MAX_RANGES} are allowed")
    with GUARD_MEMORY.lock:
        table = GUARD_MEMORY.table
        for n, memory in enumerate(ranges):
            table[FIRST_RANGE_WORD + 2 * n] = memory.begin
            table[FIRST_RANGE_WORD + 2 * n + 1] = memory.end
        table[NUM_RANGES_WORD] = len(ranges)
        table[NUM_ERRORS_WORD] = 0
        run()
        num_errors = table[NUM_ERRORS_WORD]
        error = BadAccess(table[ADDRESS_WORD], table[SIZE_WORD], ACCESSES[table[ACCESS_WORD]])
    if num_errors:
        raise RuntimeError(
            f"kernel {kernel} ({dtype}) {error.describe(ranges)} ({num_errors} such accesses)"
        )

"""Threads for kernels: those that torch computes with.

Two OpenMP runtimes in one process wait for work by spinning, each on the cores of the other. So kernels do not bring
threads of their own: they are run by the runtime that torch has loaded, through the entry that compilers call
(`GOMP_parallel`, part of the interface of GNU's and LLVM's runtimes).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types
from torch import Tensor

from .simd import fetch_and_increment, load_int64, storage_type

OPENMP_LIBRARIES = ("libgomp*.so*", "libomp*.so*", "libiomp5*.so*", "libomp*.dylib")


def _find_openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that lies beside torch, where it can be asked."""
    root = Path(torch.__file__).parent
    found = [
        path
        for folder in (root / "lib", root.parent / "torch.libs")
        for name in OPENMP_LIBRARIES
        for path in folder.glob(name)
    ]
    if not found or not torch.backends.openmp.is_available():
        return None
    library = ctypes.CDLL(str(found[0]))
    try:
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    except AttributeError:  # a runtime of other compilers, which has no such entry
        return None
    library.GOMP_parallel.restype = None
    return library


OPENMP_RUNTIME = _find_openmp()


def max_threads() -> int:
    """How many threads a kernel may use here: torch's, or one where its runtime cannot be asked."""
    return torch.get_num_threads() if OPENMP_RUNTIME is not None else 1


def run_in_threads(address: int, args_address: int, threads: int) -> None:
    """Call the compiled function at an address, in so many threads at once, each with the same argument."""
    if threads > 1 and OPENMP_RUNTIME is not None:
        OPENMP_RUNTIME.GOMP_parallel(address, args_address, threads, 0)
    else:
        KERNEL_CFUNCTYPE(address)(args_address)


KERNEL_CFUNCTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)

# --- Kernels by name -----------------------------------------------------------------------------------

COMPUTE_DTYPES = {torch.float32: "float32", torch.float64: "float64"}  # that are computed with as they lie
NUM_ITEMS_ARG = 2  # where a table says how many there are; then where desks lie, and the bytes of one
FIRST_KERNEL_ARG = (
    5  # numbers of a table of units that are the same for all: the next one, the next thread, how many, desks
)
ENTRY_SIGNATURE = types.void(types.int64)


def _hash_kernel_sources() -> int:
    """A number of all files that kernels are made of, never 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return 1 + int(sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12], 16)


KERNEL_SOURCE_HASH = _hash_kernel_sources()


class KernelSet:
    """Functions of one address, `register_jitable`, each compiled for every kind of numbers that it is asked for."""

    def __init__(self, kinds: Mapping[torch.dtype, str], **functions: Callable[..., None]) -> None:
        self.dtype_names, self.functions = kinds, functions
        self.compiled_functions: dict[
            tuple[str, torch.dtype | None], Any
        ] = {}  # an address is good as long as what was made lives

    def function_address(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Where this one lies once compiled; for a kind of numbers it is told their form before the address."""
        own, function = (name, dtype), self.functions[name]
        if (
            own not in self.compiled_functions
        ):  # of two threads that make it the first is kept: its address may be in use
            kind = "" if dtype is None else self.dtype_names[dtype]
            entry = (
                self.make_entry_point(function, kind, KERNEL_SOURCE_HASH)
                if kind
                else _entry_without_dtype(function, KERNEL_SOURCE_HASH)
            )
            self.compiled_functions.setdefault(own, _compile_entry_point(entry, f"{function.__module__}.{name}.{kind}"))
        return self.compiled_functions[own].address

    def make_entry_point(self, function: Callable[..., None], kind: str, mark: int) -> Any:
        """What is compiled: the function with the form."""

        def entry(table):
            if mark:
                function(storage_type(kind), table)

        return entry


class ParallelKernelSet(KernelSet):
    """Functions that do one unit of work: they are told its number, and where their thread may write meanwhile."""

    def launch(self, name: str, dtype: torch.dtype, work: tuple[int, int], *told: Tensor | int) -> None:
        """Do so many units, each with so many numbers to write on; what is told are addresses and numbers."""
        numbers = [0, 0, work[0], 0, work[1] * dtype.itemsize, *told]
        self.launch_table(name, dtype, array("q", [t.data_ptr() if isinstance(t, Tensor) else t for t in numbers]))

    def launch_table(self, name: str, dtype: torch.dtype, table: array) -> None:
        """Do the units of a table, in which only desks are missing."""
        many = num_threads_for(table[NUM_ITEMS_ARG])
        desks = torch.empty(many * table[NUM_ITEMS_ARG + 2], dtype=torch.uint8)
        table[NUM_ITEMS_ARG + 1] = desks.data_ptr()
        run_in_threads(self.function_address(name, dtype), table.buffer_info()[0], many)

    def make_entry_point(self, function: Callable[..., None], kind: str, mark: int) -> Any:
        """What is compiled: a thread takes one unit after the other, until there are no more."""

        def entry(table):
            if mark:
                desk = load_int64(table + 24) + load_int64(table + 32) * fetch_and_increment(table + 8)
                unit = fetch_and_increment(table)
                while unit < load_int64(table + 16):
                    function(storage_type(kind), table, unit, desk)
                    unit = fetch_and_increment(table)

        return entry


def num_threads_for(units: int) -> int:
    """How many threads take so many units on."""
    return max(1, min(units, max_threads()))


def _entry_without_dtype(function: Callable[..., None], mark: int) -> Any:
    def entry(table):
        if mark:
            function(table)

    return entry


def _compile_entry_point(entry: Any, name: str) -> Any:
    # Numba numbers what it keeps under one function's name, and two processes may give two kernels the same number.
    entry.__qualname__ = name
    try:
        return cfunc(ENTRY_SIGNATURE, cache=True)(entry)
    except RuntimeError:  # neither the package's folder nor the user's own can be written
        return cfunc(ENTRY_SIGNATURE)(entry)

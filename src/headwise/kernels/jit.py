"""Compile kernels with Numba and run them in torch's OpenMP thread pool.

Two OpenMP runtimes in one process wait for work by spinning, each on the cores of the other. The kernels therefore
start no threads of their own: they run in the runtime that torch has loaded, through the entry point that compilers
call (`GOMP_parallel`, part of the interface of GNU's and LLVM's runtimes).

A kernel takes one address: that of its kernel arguments, an int64 array of pointers, sizes and strides. A
`ParallelKernelSet` splits a kernel into work items. Each thread takes the next item from an atomic counter until none
is left, and has a scratch buffer of its own. The result of an item never depends on the thread that computes it.
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
    """Load the OpenMP runtime that is shipped with torch; None if there is none or it lacks `GOMP_parallel`."""
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
    except AttributeError:  # the runtime of another compiler, without this entry point
        return None
    library.GOMP_parallel.restype = None
    return library


OPENMP_RUNTIME = _find_openmp()


def max_threads() -> int:
    """Return the number of threads that a kernel may use: torch's, or 1 if its OpenMP runtime cannot be called."""
    return torch.get_num_threads() if OPENMP_RUNTIME is not None else 1


def run_in_threads(address: int, args_address: int, threads: int) -> None:
    """Call the compiled function at `address` in `threads` threads at once, each with the same argument address."""
    if threads > 1 and OPENMP_RUNTIME is not None:
        OPENMP_RUNTIME.GOMP_parallel(address, args_address, threads, 0)
    else:
        KERNEL_CFUNCTYPE(address)(args_address)


KERNEL_CFUNCTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)

# --- Kernels by name -----------------------------------------------------------------------------------

COMPUTE_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
}  # dtypes that kernels compute in without conversion
NUM_ITEMS_ARG = 2  # index of the number of work items; then the scratch buffers' address and bytes per thread
FIRST_KERNEL_ARG = (
    5  # header of every table: next item, next thread, number of items, scratch address, scratch bytes per thread
)
ENTRY_SIGNATURE = types.void(types.int64)


def _hash_kernel_sources() -> int:
    """Return a hash of all source files of this package; never 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return 1 + int(sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12], 16)


KERNEL_SOURCE_HASH = _hash_kernel_sources()


class KernelSet:
    """Kernels by name, compiled per storage dtype on first use; each takes the address of its arguments.

    The functions are decorated with `register_jitable`.
    """

    def __init__(self, kinds: Mapping[torch.dtype, str], **functions: Callable[..., None]) -> None:
        self.dtype_names, self.functions = kinds, functions
        self.compiled_functions: dict[
            tuple[str, torch.dtype | None], Any
        ] = {}  # keeps compiled functions alive, without which their addresses are invalid

    def function_address(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Return the address of the compiled kernel; with a dtype, the storage type is its first argument."""
        own, function = (name, dtype), self.functions[name]
        if (
            own not in self.compiled_functions
        ):  # if two threads compile it, setdefault keeps the first: its address may be in use
            kind = "" if dtype is None else self.dtype_names[dtype]
            entry = (
                self.make_entry_point(function, kind, KERNEL_SOURCE_HASH)
                if kind
                else _entry_without_dtype(function, KERNEL_SOURCE_HASH)
            )
            self.compiled_functions.setdefault(own, _compile_entry_point(entry, f"{function.__module__}.{name}.{kind}"))
        return self.compiled_functions[own].address

    def make_entry_point(self, function: Callable[..., None], kind: str, mark: int) -> Any:
        """Return the function to compile: it passes the storage type and the arguments' address on.

        `mark` is the hash of the kernel sources. Numba caches by the constants of a closure, so a changed source file
        invalidates the cache.
        """

        def entry(table):
            if mark:
                function(storage_type(kind), table)

        return entry


class ParallelKernelSet(KernelSet):
    """Kernels that compute one work item: they get the arguments, the item's number and a scratch buffer."""

    def launch(self, name: str, dtype: torch.dtype, work: tuple[int, int], *told: Tensor | int) -> None:
        """Run `work[0]` items with `work[1]` scratch elements per thread; the other arguments are tensors and integers.

        Tensors are passed as their addresses.
        """
        numbers = [0, 0, work[0], 0, work[1] * dtype.itemsize, *told]
        self.launch_table(name, dtype, array("q", [t.data_ptr() if isinstance(t, Tensor) else t for t in numbers]))

    def launch_table(self, name: str, dtype: torch.dtype, table: array) -> None:
        """Run the work items of a complete argument table; only the scratch buffers are allocated here."""
        many = num_threads_for(table[NUM_ITEMS_ARG])
        desks = torch.empty(many * table[NUM_ITEMS_ARG + 2], dtype=torch.uint8)
        table[NUM_ITEMS_ARG + 1] = desks.data_ptr()
        run_in_threads(self.function_address(name, dtype), table.buffer_info()[0], many)

    def make_entry_point(self, function: Callable[..., None], kind: str, mark: int) -> Any:
        """Return the function that every thread runs: take a scratch buffer, then work items until none is left."""

        def entry(table):
            if mark:
                desk = load_int64(table + 24) + load_int64(table + 32) * fetch_and_increment(table + 8)
                unit = fetch_and_increment(table)
                while unit < load_int64(table + 16):
                    function(storage_type(kind), table, unit, desk)
                    unit = fetch_and_increment(table)

        return entry


def num_threads_for(units: int) -> int:
    """Return the number of threads to run `units` work items with."""
    return max(1, min(units, max_threads()))


def _entry_without_dtype(function: Callable[..., None], mark: int) -> Any:
    def entry(table):
        if mark:
            function(table)

    return entry


def _compile_entry_point(entry: Any, name: str) -> Any:
    # Numba numbers the cache entries of one function name, and two processes may give two kernels one number:
    # a name of its own for every kernel avoids that.
    entry.__qualname__ = name
    try:
        return cfunc(ENTRY_SIGNATURE, cache=True)(entry)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return cfunc(ENTRY_SIGNATURE)(entry)

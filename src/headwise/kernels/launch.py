"""Run kernels in torch's OpenMP thread pool. This module, and every operation built on it, works without Numba.

Two OpenMP runtimes in one process wait for work by spinning, each on the cores of the other. The kernels therefore
start no threads of their own: they run in the runtime that torch has loaded, through the entry point that compilers
call (`GOMP_parallel`, part of the interface of GNU's and LLVM's runtimes).

A kernel takes one address: that of its kernel arguments, an int64 array of pointers, sizes and strides. A
`ParallelKernelSet` splits a kernel into work items. Each thread takes the next item from an atomic counter until none
is left, and has a scratch buffer of its own. The result of an item never depends on the thread that computes it.

Numba is imported, and a kernel compiled, when the kernel is first used (`compilation` chooses by whom).
`kernel_problem` returns why that is not possible on this machine; the backends and parts then use torch operations.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .compilation import STATE

SIMD_WIDTH = 16  # elements per vector
CACHE_LINE_BYTES = 64
COMPUTE_DTYPES = {torch.float32: "float32", torch.float64: "float64"}  # computed in without conversion
NUM_ITEMS_ARG = 2  # index of the number of work items; then the scratch buffers' address and bytes per thread
FIRST_KERNEL_ARG = 5  # after next item, next thread, number of items, scratch address, scratch bytes per thread


def round_up_to_simd(count: int) -> int:
    """Return the smallest multiple of 16 that is at least `count`."""
    return (count + SIMD_WIDTH - 1) // SIMD_WIDTH * SIMD_WIDTH


# --- Availability --------------------------------------------------------------------------------------


@cache
def _import_problem() -> str | None:
    if "numba" not in sys.modules and find_spec("numba") is None:
        return "needs Numba, which is not installed"
    try:
        import_module(f"{__package__}.jit")
    except Exception as error:  # a broken installation may raise anything
        return f"needs Numba, which cannot be imported ({type(error).__name__}: {error})"
    return None


def kernel_problem() -> str | None:
    """Return why kernels cannot be compiled here, as a property of the backend that needs them; None if they can."""
    if STATE.policy == "off":
        return "needs kernels, which HEADWISE_KERNELS=off switches off"
    return _import_problem()


kernel_problem._dynamo_marked_constant = True  # torch.compile evaluates it while tracing


def has_kernels() -> bool:
    """Return True if kernels can be compiled here."""
    return kernel_problem() is None


# --- Threads -------------------------------------------------------------------------------------------

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


def num_threads_for(num_items: int) -> int:
    """Return the number of threads to run `num_items` work items with."""
    return max(1, min(num_items, max_threads()))


# --- Kernels by name -----------------------------------------------------------------------------------


class KernelSet:
    """The kernels of one module, each compiled per storage dtype on first use; each takes the address of its arguments.

    `KernelSet("varlen_attention_kernel", dtypes, forward="varlen_forward")` names a module of this package, which is
    imported by the first call, and its functions, which are decorated with `register_jitable`.
    """

    def __init__(self, module: str, dtype_names: dict[torch.dtype, str], **functions: str) -> None:
        self.module, self.dtype_names, self.functions = module, dtype_names, functions
        self.compiled_functions: dict[tuple[str, torch.dtype | None], Any] = {}  # kept alive with their addresses
        self.usable_dtypes: set[torch.dtype | None] = set()

    @property
    def dtypes(self) -> list[torch.dtype | None]:
        """The storage dtypes of these kernels; only None for kernels that are independent of it."""
        return list(self.dtype_names) or [None]

    def task_name(self, dtype: torch.dtype | None) -> str:
        """Return the name under which a background process compiles these kernels for a dtype."""
        return f"{self.module}:{'+'.join(self.functions)}:{self._dtype_name(dtype)}"

    def is_usable(self, dtype: torch.dtype | None = None) -> bool:
        """Return True if a call may use these kernels: they are compiled, or the call is to compile them.

        If not, the caller uses torch operations, and a background process compiles the kernels for later calls.
        """
        if torch.compiler.is_compiling():  # the compiled graph runs later, and then compiles its kernels
            return has_kernels()
        return dtype in self.usable_dtypes or (has_kernels() and self._is_compiled_or_may_be(dtype))

    def _is_compiled_or_may_be(self, dtype: torch.dtype | None) -> bool:
        task = self.task_name(dtype)
        if all((name, dtype) in self.compiled_functions for name in self.functions):
            self.usable_dtypes.add(dtype)
        elif STATE.is_running(task):
            return False
        elif STATE.policy == "auto" and task not in STATE.failed and not self._load_all(dtype):
            STATE.start(task)
            return task in STATE.failed
        return True

    def _load_all(self, dtype: torch.dtype | None) -> bool:
        """Load the compiled kernels from disk; return False if one of them is not there."""
        for name in self.functions:
            if (name, dtype) not in self.compiled_functions:
                kernel = self.compile_kernel(name, self._dtype_name(dtype), only_from_disk=True)
                if kernel is None:
                    return False
                self.compiled_functions.setdefault((name, dtype), kernel)
        return True

    def compile_all(self, dtype: torch.dtype | None) -> None:
        """Compile the kernels for a dtype, or load them from disk."""
        for name in self.functions:
            self.function_address(name, dtype)

    def _dtype_name(self, dtype: torch.dtype | None) -> str:
        return "" if dtype is None else self.dtype_names[dtype]

    def function_address(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Return the address of the compiled kernel; with a dtype, the storage type is its first argument."""
        if (name, dtype) not in self.compiled_functions:
            compiled = self.compile_kernel(name, self._dtype_name(dtype))
            # If two threads compile it, setdefault keeps the first: its address may be in use.
            self.compiled_functions.setdefault((name, dtype), compiled)
        return self.compiled_functions[name, dtype].address

    def load_function(self, name: str) -> Any:
        """Import the kernels' module and return the Python function of a kernel."""
        return getattr(import_module(f"{__package__}.{self.module}"), self.functions[name])

    def compile_kernel(self, name: str, dtype_name: str, only_from_disk: bool = False) -> Any:
        """Return the compiled entry point of a kernel, whose only argument is the address of its arguments."""
        jit = import_module(f"{__package__}.jit")
        return jit.compile_kernel(self.load_function(name), name, dtype_name, only_from_disk)


class ParallelKernelSet(KernelSet):
    """Kernels that compute one work item: they get the arguments, the item's number and a scratch buffer."""

    def launch(self, name: str, dtype: torch.dtype, work: tuple[int, int], *args: Tensor | int) -> None:
        """Run `work[0]` items with `work[1]` scratch elements per thread; the other arguments are tensors and integers.

        Tensors are passed as their addresses.
        """
        numbers = [0, 0, work[0], 0, work[1] * dtype.itemsize, *args]
        self.launch_table(name, dtype, array("q", [t.data_ptr() if isinstance(t, Tensor) else t for t in numbers]))

    def launch_table(self, name: str, dtype: torch.dtype, table: array) -> None:
        """Run the work items of a complete argument table; only the scratch buffers are allocated here."""
        threads = num_threads_for(table[NUM_ITEMS_ARG])
        scratch = torch.empty(threads * table[NUM_ITEMS_ARG + 2], dtype=torch.uint8)
        table[NUM_ITEMS_ARG + 1] = scratch.data_ptr()
        run_in_threads(self.function_address(name, dtype), table.buffer_info()[0], threads)

    def compile_kernel(self, name: str, dtype_name: str, only_from_disk: bool = False) -> Any:
        """Return the compiled function that every thread runs."""
        jit = import_module(f"{__package__}.jit")
        return jit.compile_work_items(self.load_function(name), name, dtype_name, only_from_disk)

"""Run kernels in torch's OpenMP thread pool. This module, and every operation built on it, works
without Numba.

Two OpenMP runtimes in one process wait for work by spinning, each on the cores of the other. The
kernels therefore start no threads of their own: they run in the runtime that torch has loaded,
through the entry point that compilers call (`GOMP_parallel`, part of the interface of GNU's and
LLVM's runtimes).

A kernel takes one address: that of its argument record (`kernel_args`). A `ParallelKernelSet`
splits a kernel into work items. Each thread takes the next item from an atomic counter until none
is left, and has a scratch buffer of its own. The result of an item never depends on the thread that
computes it.

Numba is imported, and a kernel compiled, when the kernel is first used (`compilation` chooses the
process). `kernel_problem` returns why that is not possible on this machine; the backends and parts
then use torch operations.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd_guards import is_under_functorch
from .compilation import STATE
from .kernel_args import KernelArgs, ParallelKernelArgs

SIMD_WIDTH = 16  # elements per vector
CACHE_LINE_BYTES = 64
COMPUTE_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
}  # computed in without conversion


def round_up_to_simd(count: int) -> int:
    """Return the smallest multiple of 16 that is at least `count`."""
    return (count + SIMD_WIDTH - 1) // SIMD_WIDTH * SIMD_WIDTH


def pad_to_simd(t: Tensor) -> Tensor:
    """Return t contiguous, with its last axis padded to whole vectors."""
    padding = -t.shape[-1] % SIMD_WIDTH
    # F.pad may return permuted strides
    return (F.pad(t, (0, padding)) if padding else t).contiguous()


def unpad(t: Tensor, size: int) -> Tensor:
    """Return t contiguous, without the padding of its last axis."""
    return t if t.shape[-1] == size else t[..., :size].contiguous()


# --- Availability ---------------------------------------------------------------------------------


_IMPORT_PROBLEMS: list[str | None] = []  # one entry, once Numba was tried


def _import_problem() -> str | None:
    if "numba" not in sys.modules and find_spec("numba") is None:
        return "needs Numba, which is not installed"
    try:
        import_module(f"{__package__}.jit")
    except Exception as error:  # a broken installation may raise anything
        return f"needs Numba, which cannot be imported ({type(error).__name__}: {error})"
    return None


def kernel_problem() -> str | None:
    """Return why kernels cannot be compiled here, as a property of the backend that needs them;
    None if they can.
    """
    if STATE.policy == "off":
        return "needs Numba kernels, which HEADWISE_KERNELS=off disables"
    if not _IMPORT_PROBLEMS:
        _IMPORT_PROBLEMS.append(_import_problem())
    return _IMPORT_PROBLEMS[0]


kernel_problem._dynamo_marked_constant = True  # torch.compile evaluates it while tracing


def has_kernels() -> bool:
    """Return True if kernels can be compiled here."""
    return kernel_problem() is None


# --- Threads --------------------------------------------------------------------------------------

OPENMP_LIBRARIES = ("libgomp*.so*", "libomp*.so*", "libiomp5*.so*", "libomp*.dylib")


def _find_openmp() -> ctypes.CDLL | None:
    """Load the OpenMP runtime that is shipped with torch; None if there is none or it lacks
    `GOMP_parallel`.
    """
    root = Path(torch.__file__).parent
    paths = [
        path
        for folder in (root / "lib", root.parent / "torch.libs")
        for name in OPENMP_LIBRARIES
        for path in folder.glob(name)
    ]
    if not paths or not torch.backends.openmp.is_available():
        return None
    library = ctypes.CDLL(str(paths[0]))
    try:
        library.GOMP_parallel.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint,
            ctypes.c_uint,
        ]
    except AttributeError:  # the runtime of another compiler, without this entry point
        return None
    library.GOMP_parallel.restype = None
    return library


OPENMP_RUNTIME = _find_openmp()


def max_threads() -> int:
    """Return the number of threads that a kernel may use: torch's, or 1 if its OpenMP runtime
    cannot be called.
    """
    return torch.get_num_threads() if OPENMP_RUNTIME is not None else 1


# --- Kernels by name ------------------------------------------------------------------------------


KernelFunction = str | Callable[..., None]  # a kernel, or its name in the module of its set


class KernelSet:
    """The kernels of one module, each compiled per storage dtype on first use; each takes its
    argument record.

    `KernelSet("gemv_kernel", dtypes, gemv=("run_gemv", GemvArgs))` names a
    module of this package, which is imported by the first call, its functions, which are decorated
    with `register_jitable`, and their argument records.
    """

    def __init__(
        self,
        module: str,
        dtype_names: dict[torch.dtype, str],
        **functions: tuple[KernelFunction, type[KernelArgs]],
    ) -> None:
        self.module = module
        self.dtype_names = dtype_names
        self.functions = functions
        self.compiled_functions: dict[
            tuple[str, torch.dtype | None], Any
        ] = {}  # kept alive with their addresses
        self.usable_dtypes: set[torch.dtype | None] = set()

    @property
    def dtypes(self) -> list[torch.dtype | None]:
        """The storage dtypes of these kernels; only None for kernels that are independent of it."""
        return list(self.dtype_names) or [None]

    def task_name(self, dtype: torch.dtype | None) -> str:
        """Return the name under which a background process compiles these kernels for a dtype."""
        return f"{self.module}:{'+'.join(self.functions)}:{self._dtype_name(dtype)}"

    def is_usable(self, dtype: torch.dtype | None = None) -> bool:
        """Return True if a call may use these kernels: they are compiled, or the call compiles
        them.

        If not, the caller uses torch operations, and a background process compiles the kernels for
        later calls.
        """
        if (
            torch.compiler.is_compiling()
        ):  # the compiled graph runs later, and then compiles its kernels
            return has_kernels()
        return dtype in self.usable_dtypes or (has_kernels() and self._is_compiled_or_may_be(dtype))

    def _is_compiled_or_may_be(self, dtype: torch.dtype | None) -> bool:
        task = self.task_name(dtype)
        if all((name, dtype) in self.compiled_functions for name in self.functions):
            self.usable_dtypes.add(dtype)
        elif STATE.policy == "wait":
            self.usable_dtypes.add(
                dtype
            )  # later calls skip this check; `run` compiles missing kernels
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
            self.compiled_function(name, dtype)

    def _dtype_name(self, dtype: torch.dtype | None) -> str:
        return "" if dtype is None else self.dtype_names[dtype]

    def run(self, name: str, dtype: torch.dtype | None, args: KernelArgs, threads: int = 1) -> None:
        """Run a kernel in some threads; with a dtype, the storage type is its first argument."""
        compiled = self.compiled_functions.get((name, dtype)) or self.compiled_function(name, dtype)
        if threads > 1 and OPENMP_RUNTIME is not None:
            OPENMP_RUNTIME.GOMP_parallel(compiled.address, args.address, threads, 0)
        else:
            compiled.ctypes(args.address)

    def compiled_function(self, name: str, dtype: torch.dtype | None = None) -> Any:
        """Return the compiled entry point of a kernel."""
        if (name, dtype) not in self.compiled_functions:
            compiled = self.compile_kernel(name, self._dtype_name(dtype))
            # If two threads compile it, setdefault keeps the first: its address may be in use.
            self.compiled_functions.setdefault((name, dtype), compiled)
        return self.compiled_functions[name, dtype]

    def load_function(self, name: str) -> Any:
        """Import the kernels' module and return the Python function of a kernel."""
        function = self.functions[name][0]
        return (
            getattr(import_module(f"{__package__}.{self.module}"), function)
            if isinstance(function, str)
            else function
        )

    def compile_kernel(self, name: str, dtype_name: str, only_from_disk: bool = False) -> Any:
        """Return the compiled entry point of a kernel, whose only argument is the address of its
        record.
        """
        jit = import_module(f"{__package__}.jit")
        record_name = self.functions[name][1].record_name()
        function = self.load_function(name)
        is_parallel = isinstance(self, ParallelKernelSet)
        return jit.compile_kernel(
            function, record_name, name, dtype_name, is_parallel, only_from_disk
        )


class ParallelKernelSet(KernelSet):
    """Kernels that compute one work item: they get their record, the item's number and a scratch
    buffer.
    """

    def can_run(self, x: Tensor) -> bool:
        """Return True if these kernels may run on a tensor: float32 or float64 on the CPU, outside
        torch.func.
        """
        is_plain = x.device.type == "cpu" and x.dtype in COMPUTE_DTYPES
        return is_plain and not is_under_functorch() and self.is_usable(x.dtype)

    def launch(self, name: str, dtype: torch.dtype, args: ParallelKernelArgs) -> None:
        """Run the `args.num_items` work items, with a scratch buffer of `args.scratch_bytes` for
        each thread.
        """
        threads = max(1, min(args.num_items, max_threads()))
        args.allocate_scratch(threads)
        self.run(name, dtype, args, threads)

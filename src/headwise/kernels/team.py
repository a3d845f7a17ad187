"""Threads for kernels: those that torch computes with.

Two OpenMP runtimes in one process wait for work by spinning, each on the cores of the other. So kernels do not bring
threads of their own: they are run by the runtime that torch has loaded, through the entry that compilers call
(`GOMP_parallel`, part of the interface of GNU's and LLVM's runtimes).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

OPENMP_LIBRARIES = ("libgomp*.so*", "libomp*.so*", "libiomp5*.so*", "libomp*.dylib")


def _find_openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that lies beside torch, where it can be asked."""
    root = Path(torch.__file__).parent
    found = [
        path for folder in (root / "lib", root.parent / "torch.libs") for name in OPENMP_LIBRARIES for path in folder.glob(name)
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

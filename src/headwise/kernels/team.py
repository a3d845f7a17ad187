"""Threads for kernels: those that torch computes with.

Two OpenMP runtimes in one process wait for work by spinning, each on the cores of the other. So kernels do not bring
threads of their own: they are run by the runtime that torch has loaded, through the entry that compilers call
(`GOMP_parallel`, part of the interface of GNU's and LLVM's runtimes).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

NAMES = ("libgomp*.so*", "libomp*.so*", "libiomp5*.so*", "libomp*.dylib")


def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that lies beside torch, where it can be asked."""
    root = Path(torch.__file__).parent
    found = [
        path for folder in (root / "lib", root.parent / "torch.libs") for name in NAMES for path in folder.glob(name)
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


RUNTIME = _runtime()


def most() -> int:
    """How many threads a kernel may use here: torch's, or one where its runtime cannot be asked."""
    return torch.get_num_threads() if RUNTIME is not None else 1


def run(address: int, told: int, threads: int) -> None:
    """Call the compiled function at an address, in so many threads at once, each with the same argument."""
    if threads > 1 and RUNTIME is not None:
        RUNTIME.GOMP_parallel(address, told, threads, 0)
    else:
        CALL(address)(told)


CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64)

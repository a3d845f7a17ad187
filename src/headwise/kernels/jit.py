"""Compile kernels with Numba into functions that take the address of their argument record, cached on disk.

`launch` calls these and imports this module only then.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import types
from numba.core.ccallback import CFunc

from .args_pointer import args_field_address, args_from_address
from .compilation import STATE
from .memory_guard import DEBUG_KERNELS
from .simd import fetch_and_increment, storage_type

ENTRY_SIGNATURE = (types.int64,), types.void


def _hash_kernel_sources() -> int:
    """Return a hash of all source files of this package; never 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return 1 + int(sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12], 16)


# Numba caches by the constants of a closure: with this one, a changed source file invalidates the cache.
KERNEL_SOURCE_HASH = _hash_kernel_sources()


def compile_kernel(
    function: Callable[..., None], record_name: str, name: str, dtype_name: str, only_from_disk: bool = False
) -> Any:
    """Compile a kernel; with the name of a dtype, its first argument is that storage type.

    With `only_from_disk`, return None unless it was compiled before.
    """
    mark = KERNEL_SOURCE_HASH
    if dtype_name:

        def entry(address):
            if mark:
                function(storage_type(dtype_name), args_from_address(record_name, address))

    else:

        def entry(address):
            if mark:
                function(args_from_address(record_name, address))

    return _compile_entry_point(entry, f"{function.__module__}.{name}.{dtype_name}", only_from_disk)


def compile_work_items(
    function: Callable[..., None], record_name: str, name: str, dtype_name: str, only_from_disk: bool = False
) -> Any:
    """Compile what every thread runs: take a scratch buffer, then call the kernel for work items until none is left."""
    mark = KERNEL_SOURCE_HASH

    def entry(address):
        if mark:
            args = args_from_address(record_name, address)
            thread = fetch_and_increment(args_field_address(args, "next_thread"))
            scratch = args.scratch + args.scratch_bytes * thread
            item = fetch_and_increment(args_field_address(args, "next_item"))
            while item < args.num_items:
                function(storage_type(dtype_name), args, item, scratch)
                item = fetch_and_increment(args_field_address(args, "next_item"))

    return _compile_entry_point(entry, f"{function.__module__}.{name}.{dtype_name}", only_from_disk)


class _NotCompiledError(Exception):
    pass


class _KernelOnDisk(CFunc):
    """A compiled function that is only loaded from the cache on disk."""

    def _compile_uncached(self) -> Any:
        raise _NotCompiledError


def _compile_entry_point(entry: Any, name: str, only_from_disk: bool) -> Any:
    # Numba numbers the cache entries of one function name, and two processes may give two kernels one number:
    # a name of its own for every kernel avoids that.
    entry.__qualname__ = name
    # Debug builds contain addresses of this process, and the hash does not cover the sources of other packages.
    is_cached = name.startswith(f"{__package__}.") and not DEBUG_KERNELS
    kernel = (_KernelOnDisk if only_from_disk else CFunc)(entry, ENTRY_SIGNATURE, {}, {})
    try:
        if is_cached:
            kernel.enable_caching()
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        STATE.warn_without_cache()
        kernel = CFunc(entry, ENTRY_SIGNATURE, {}, {})
    try:
        kernel.compile()
    except _NotCompiledError:
        return None
    return kernel

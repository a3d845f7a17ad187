"""Compile kernels with Numba into functions that take the address of their arguments, and keep them
on disk.

Reading a field is one 64-bit load from a fixed offset. Tensors are their addresses, int64. Machine
code is kept in the user's cache folder, by the contents of the source files: checkouts and
environments with equal kernels share it, and the installed package is never written to.

`launch` imports this module when it first compiles a kernel.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr

from .capabilities import user_cache_folder
from .compilation import STATE
from .launch import WORD_BYTES, KernelArgs
from .simd import INT64, fetch_and_increment, intrinsic, ints, memory_pointer, storage_type

# --- Pointers to argument records -----------------------------------------------------------------


class ArgsPointer(types.Type):
    """Numba type of the address of a record."""

    def __init__(self, record_name: str) -> None:
        super().__init__(name=f"pointer to {record_name}")
        self.fields = KernelArgs.records[record_name].fields


@extending.register_model(ArgsPointer)
class ArgsPointerModel(models.PrimitiveModel):
    """Numba data model of `ArgsPointer`: the address."""

    def __init__(self, manager: Any, pointer: ArgsPointer) -> None:
        super().__init__(manager, pointer, INT64)


@infer_getattr
class ArgsAttribute(AttributeTemplate):
    """Types of fields: float64 for floats, int64 for integers and addresses."""

    key = ArgsPointer

    def generic_resolve(self, pointer: ArgsPointer, name: str) -> types.Type | None:
        """Return the type of a field; None, an error, if there is no such field."""
        field = pointer.fields.get(name)
        return None if field is None else types.float64 if field.kind == "float" else types.int64


@lower_getattr_generic(ArgsPointer)
def _load_field(context: Any, builder: Any, pointer: ArgsPointer, address: Any, name: str) -> Any:
    field = pointer.fields[name]
    word = ir.DoubleType() if field.kind == "float" else INT64
    return builder.load(
        memory_pointer(builder, _build_field_address(builder, address, field.index), word)
    )


def _build_field_address(builder: Any, address: Any, index: int) -> Any:
    return builder.add(address, INT64(WORD_BYTES * index))


@extending.intrinsic(prefer_literal=True)
def _args_from_address(typing: Any, record_name: Any, address: Any) -> Any:
    """Return the record at an address; `record_name` is a constant."""
    pointer = ArgsPointer(record_name.literal_value)
    return pointer(record_name, types.int64), lambda context, builder, signature, args: args[1]


@extending.intrinsic(prefer_literal=True)
def _args_field_address(typing: Any, args: Any, name: Any) -> Any:
    """Return the address of a field; `name` is a constant."""
    index = args.fields[name.literal_value].index

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _build_field_address(builder, values[0], index)

    return types.int64(args, name), code


@extending.intrinsic(prefer_literal=True)
def _store_arg(typing: Any, args: Any, name: Any, value: Any) -> Any:
    """Write an integer field; `name` is a constant."""
    index = args.fields[name.literal_value].index

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = context.cast(builder, values[2], value, types.int64)
        builder.store(
            word,
            memory_pointer(builder, _build_field_address(builder, values[0], index), INT64),
        )
        return context.get_dummy_value()

    return types.void(args, name, value), code


@intrinsic
def _args_at(typing: Any, args: Any, address: Any) -> Any:
    """Return the record at an address that has the type of `args`."""
    return args(args, types.int64), lambda context, builder, signature, values: values[1]


@intrinsic
def _args_address(typing: Any, args: Any) -> Any:
    return types.int64(args), lambda context, builder, signature, values: values[0]


@intrinsic
def _args_num_words(typing: Any, args: Any) -> Any:
    return types.int64(args), lambda context, builder, signature, values: INT64(len(args.fields))


# typed Any: intrinsics are called without their first parameter
args_from_address: Any = _args_from_address
args_field_address: Any = _args_field_address
store_arg: Any = _store_arg


@extending.register_jitable
def copy_args(args, target):
    """Copy a record to an address and return the copy."""
    words = ints(_args_address(args))
    to = ints(target)
    for n in range(_args_num_words(args)):
        to[n] = words[n]
    return _args_at(args, target)


# --- Compiled kernels on disk ---------------------------------------------------------------------

FOLDER_PREFIX = "headwise-kernels-"
MAX_UNCHANGED_DAYS = 30  # after which the kernels of another version are deleted


def _hash_kernel_sources() -> int:
    """Return a hash of all source files of this package; never 0."""
    sources = sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    return 1 + int(sources.hexdigest()[:12], 16)


# A changed source file makes another cache folder. Numba's key holds the constants of a closure,
# and so this one.
KERNEL_SOURCE_HASH = _hash_kernel_sources()


def _cache_folders() -> Iterator[Path]:
    """Yield the folders for compiled kernels: the user's, then a temporary one of this process."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
    with suppress(RuntimeError):  # no home folder
        yield user_cache_folder()
    temporary = STATE.temporary_folder()
    if temporary is not None:
        yield Path(temporary)


class KernelCacheLocator(_CacheLocator):
    """Places the compiled kernels of this version in the first folder that can be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"{FOLDER_PREFIX}{KERNEL_SOURCE_HASH:x}"

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> KernelCacheLocator | None:
        """Return the locator of a kernel; None if no folder can be written."""
        for folder in _cache_folders():
            locator = cls(folder)
            is_new = not locator.folder.exists()
            try:
                locator.ensure_cache_path()
            except OSError:
                continue
            if is_new:
                oldest = time.time() - MAX_UNCHANGED_DAYS * 24 * 3600
                for other in folder.glob(f"{FOLDER_PREFIX}*"):
                    if other.stat().st_mtime < oldest:
                        shutil.rmtree(other, ignore_errors=True)
            return locator
        return None

    def get_cache_path(self) -> str:
        """Return the folder of this version."""
        return str(self.folder)

    def get_source_stamp(self) -> int:
        """Return the hash of the source files."""
        return KERNEL_SOURCE_HASH

    def get_disambiguator(self) -> str:
        """Return a part of the file names; names of kernels are unique."""
        return "cpu"


class KernelCacheImpl(CompileResultCacheImpl):
    """Numba's files of compiled code, in our folder."""

    _locator_classes = (KernelCacheLocator,)


class KernelCache(FunctionCache):
    """A cache that is skipped on failure: a full disk or a damaged file must not end a call."""

    _impl_class = KernelCacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code, or None; a damaged index is emptied, so that the code can be
        written again.
        """
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling a damaged file may raise anything
            try:
                self.flush()
            except OSError:
                STATE.warn_without_cache()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the compiled code, if that is possible."""
        try:
            super().save_overload(sig, data)
        except OSError:
            STATE.warn_without_cache()


# --- Compilation ----------------------------------------------------------------------------------

ENTRY_SIGNATURE = (types.int64,), types.void


def compile_kernel(
    function: Callable[..., None],
    record_name: str,
    name: str,
    dtype_name: str,
    has_work_items: bool,
    only_from_disk: bool,
) -> Any:
    """Compile a kernel; with the name of a dtype, its first argument is that storage type.

    With work items, compile what every thread runs: take a scratch buffer, then call the kernel for
    work items until none is left. With `only_from_disk`, return None unless it was compiled before.
    """
    source_hash = KERNEL_SOURCE_HASH
    if has_work_items:

        def entry(address):
            if source_hash:
                args = args_from_address(record_name, address)
                thread = fetch_and_increment(args_field_address(args, "next_thread"))
                scratch = args.scratch + args.scratch_bytes * thread
                item = fetch_and_increment(args_field_address(args, "next_item"))
                while item < args.num_items:
                    function(storage_type(dtype_name), args, item, scratch)
                    item = fetch_and_increment(args_field_address(args, "next_item"))

    elif dtype_name:

        def entry(address):
            if source_hash:
                function(storage_type(dtype_name), args_from_address(record_name, address))

    else:

        def entry(address):
            if source_hash:
                function(args_from_address(record_name, address))

    return _compile_entry_point(entry, f"{function.__module__}.{name}.{dtype_name}", only_from_disk)


class _NotCompiledError(Exception):
    pass


class _KernelOnDisk(CFunc):
    """A compiled function that is only loaded from the cache on disk."""

    def _compile_uncached(self) -> Any:
        raise _NotCompiledError


def _compile_entry_point(entry: Any, name: str, only_from_disk: bool) -> Any:
    # Numba numbers the cache entries of one function name, and two processes may give two kernels
    # one number: a unique name per kernel avoids that.
    entry.__qualname__ = name
    # The hash does not cover the sources of other packages.
    is_cached = name.startswith(f"{__package__}.")
    kernel: Any = (_KernelOnDisk if only_from_disk else CFunc)(entry, ENTRY_SIGNATURE, {}, {})
    try:
        if is_cached:
            kernel._cache = KernelCache(entry)  # as `enable_caching` does
    except RuntimeError:  # no folder can be written
        STATE.warn_without_cache()
        kernel = CFunc(entry, ENTRY_SIGNATURE, {}, {})
    try:
        kernel.compile()
    except _NotCompiledError:
        return None
    return kernel

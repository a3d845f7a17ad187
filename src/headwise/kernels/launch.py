"""Run kernels in torch's OpenMP thread pool. This module, and every operation built on it, works
without Numba.

Two OpenMP runtimes in one process wait for work by spinning, each on the cores of the other. The
kernels therefore start no threads: they run in the runtime that torch has loaded,
through the entry point that compilers call (`GOMP_parallel`, part of the interface of GNU's and
LLVM's runtimes).

A kernel takes one address, of its argument record. A record is a class with one annotated
field per argument:

    class ScaleArgs(KernelArgs):
        x: TensorArg = None  # in the kernel: the address of its first element
        count: int = 0
        factor: float = 0.0

The operation builds it by keyword, `ScaleArgs.make(x=x, count=x.numel(), factor=2.0)`; the kernel
reads `args.x`, `args.count` and `args.factor` (see `jit`). In memory every field is one 64-bit
word, in the order of declaration. Fields that a call leaves out are 0. A record keeps its tensors
alive, and this module is the only one that takes their addresses. The operation has checked them
before (`operand_checks`).

A `ParallelKernelSet` splits a kernel into work items. Each thread has a separate scratch buffer and
takes the next item from an atomic counter until none is left. The result of an item never depends
on the thread that computes it.

Numba is imported, and a kernel compiled, when the kernel is first used (`compilation` chooses the
process). `kernel_problem` returns why that is not possible on this machine; the backends and parts
then use torch operations.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from struct import Struct, pack, unpack
from typing import Any, ClassVar, Self, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from .compilation import CHOICES, STATE
from .operand_checks import is_under_functorch

SIMD_WIDTH = 16  # elements per vector
CACHE_LINE_BYTES = 64
# computed in without conversion
COMPUTE_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


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
    """Return why kernels cannot be compiled here, as a backend property; None if they can."""
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
    """Load torch's OpenMP runtime; None if there is none or it lacks `GOMP_parallel`."""
    root = Path(torch.__file__).parent
    paths: list[Path] = []
    for folder in (root / "lib", root.parent / "torch.libs"):
        for name in OPENMP_LIBRARIES:
            paths += folder.glob(name)
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
    """Return the number of kernel threads: torch's, or 1 if its OpenMP runtime cannot be called."""
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
        # kept alive with their addresses
        self.compiled_functions: dict[tuple[str, torch.dtype | None], Any] = {}
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
        # the compiled graph runs later, and then compiles its kernels
        if torch.compiler.is_compiling():
            return has_kernels()
        choices = CHOICES.get()
        if choices is None:
            return self._is_usable_now(dtype)
        task = self.task_name(dtype)
        if task not in choices:
            choices[task] = self._is_usable_now(dtype)
        return choices[task]

    def _is_usable_now(self, dtype: torch.dtype | None) -> bool:
        return dtype in self.usable_dtypes or (has_kernels() and self._is_compiled_or_may_be(dtype))

    def _is_compiled_or_may_be(self, dtype: torch.dtype | None) -> bool:
        task = self.task_name(dtype)
        if all((name, dtype) in self.compiled_functions for name in self.functions):
            self.usable_dtypes.add(dtype)
        elif STATE.policy == "wait":
            # later calls skip this check; `run` compiles missing kernels
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

    def _dtype_name(self, dtype: torch.dtype | None) -> str:
        return "" if dtype is None else self.dtype_names[dtype]

    def run_kernel(
        self, name: str, dtype: torch.dtype | None, args: KernelArgs, threads: int = 1
    ) -> None:
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

    def compile_kernel(self, name: str, dtype_name: str, only_from_disk: bool = False) -> Any:
        """Return the compiled entry point of a kernel; it takes only the address of its record."""
        jit = import_module(f"{__package__}.jit")
        record_name = self.functions[name][1].record_name()
        function = self.functions[name][0]
        if isinstance(function, str):
            function = getattr(import_module(f"{__package__}.{self.module}"), function)
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
        self.run_kernel(name, dtype, args, threads)


WORD_BYTES = 8
TensorArg = Tensor | array | None  # a table may be an array of int64


class ArgField:
    """Descriptor of a field of a record: its word in memory, and its kind: "int", "float" or
    "tensor". It reads the word, and writes a number or the address of a tensor.
    """

    def __init__(self, index: int, kind: str) -> None:
        self.index = index
        self.kind = kind

    def __get__(self, record: KernelArgs | None, owner: Any) -> Any:
        if record is None:
            return self
        word = record.words[self.index]
        return unpack("=d", pack("=q", word))[0] if self.kind == "float" else word

    def __set__(self, record: KernelArgs, value: Any) -> None:
        if self.kind == "tensor":
            record.tensors.append(value)
            value = address_of(value)
        elif self.kind == "float":
            value = unpack("=q", pack("=d", value))[0]
        record.words[self.index] = value


def address_of(memory: TensorArg) -> int:
    """Return the address of the first element of a tensor or array; 0 for None."""
    if memory is None:
        return 0
    return memory.buffer_info()[0] if isinstance(memory, array) else memory.data_ptr()


def matrix_table(matrices: Sequence[Tensor]) -> array:
    """Return an array of pairs: the address of each matrix and its number of rows; the caller keeps
    them alive.
    """
    table = array("q")
    for matrix in matrices:
        table.extend((matrix.data_ptr(), matrix.shape[0]))
    return table


def _generate_make(record: type[KernelArgs]) -> Callable[..., Any]:
    """Return `KernelArgs.make` of a record, generated like the methods of dataclasses.

    It runs before every call of a kernel. A loop over the fields takes longer than a small kernel,
    and so does calling a class with many keywords.
    """
    fields = record.fields
    tensors = ", ".join(name for name, field in fields.items() if field.kind == "tensor")
    parameters = ", ".join(
        f"{name}={None if field.kind == 'tensor' else 0}" for name, field in fields.items()
    )
    words = ", ".join(
        f"address_of({name})" if field.kind == "tensor" else name for name, field in fields.items()
    )
    source = (
        f"def make(*, {parameters}):\n"
        "    args = new(record)\n"
        f"    args.tensors = [{tensors}]\n"
        f"    args.words = words = array('q', pack({words}))\n"
        "    args.address = words.buffer_info()[0]\n"
        "    return args\n"
    )
    format_codes = "".join("d" if field.kind == "float" else "q" for field in fields.values())
    namespace: dict[str, Any] = {
        "new": object.__new__,
        "record": record,
        "array": array,
        "pack": Struct("=" + format_codes).pack,
        "address_of": address_of,
    }
    exec(source, namespace)
    make: Callable[..., Any] = namespace["make"]
    return make


class KernelArgs:
    """Base class of argument records; subclasses declare fields (see the top of this module)."""

    __slots__ = ("address", "tensors", "words")
    fields: ClassVar[dict[str, ArgField]] = {}
    make: ClassVar[Callable[..., Self]]  # returns a record; its keyword parameters are the fields
    records: ClassVar[dict[str, type[KernelArgs]]] = {}  # all records by name
    words: array  # the record in memory
    address: int  # its address
    tensors: list[Any]  # kept alive; the kernel may read addresses in a table, too

    def __init_subclass__(cls) -> None:
        cls.fields = dict(cls.fields)
        kinds = get_type_hints(cls)
        for name in get_annotations(cls):
            kind = kinds[name].__name__ if kinds[name] in (int, float) else "tensor"
            cls.fields[name] = ArgField(len(cls.fields), kind)
            setattr(cls, name, cls.fields[name])
        cls.make = staticmethod(_generate_make(cls))
        cls.records[cls.record_name()] = cls

    @classmethod
    def record_name(cls) -> str:
        """Return the name under which compiled code finds the record."""
        return f"{cls.__module__}.{cls.__qualname__}"

    def replace(self, **values: Any) -> Self:
        """Return a copy with some fields changed."""
        copy = object.__new__(type(self))
        copy.words = self.words[:]
        copy.tensors = self.tensors[:]
        copy.address = copy.words.buffer_info()[0]
        for name, value in values.items():
            setattr(copy, name, value)
        return copy


class ParallelKernelArgs(KernelArgs):
    """Header of the records of kernels that several threads run; `launch` allocates the scratch
    buffers.
    """

    next_item: int = 0  # counters: the next work item, the next thread
    next_thread: int = 0
    num_items: int = 0  # work items
    scratch: TensorArg = None  # one buffer per thread
    scratch_bytes: int = 0  # bytes per thread

    def allocate_scratch(self, threads: int) -> None:
        """Allocate `scratch_bytes` for each of some threads."""
        self.scratch = torch.empty(threads * self.scratch_bytes, dtype=torch.uint8)

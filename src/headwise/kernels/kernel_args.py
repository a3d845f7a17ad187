"""Argument records: the typed interface between a torch operation and its kernel. Works without
Numba.

A kernel takes one address, that of its argument record. A record is a class with one annotated
field per argument:

    class ScaleArgs(KernelArgs):
        x: TensorArg = None  # in the kernel: the address of its first element
        count: int = 0
        factor: float = 0.0

The operation builds it by keyword, `ScaleArgs.make(x=x, count=x.numel(), factor=2.0)`; the kernel
reads `args.x`, `args.count` and `args.factor` (see `jit`). In memory every field is one 64-bit
word, in the order of declaration. Fields that a call leaves out are 0.

A record keeps its tensors alive, and this module is the only one that takes their addresses. The
operation has checked them before (`operand_checks`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from inspect import get_annotations
from struct import Struct, pack, unpack
from typing import Any, ClassVar, NamedTuple, Self, get_type_hints

import torch
from torch import Tensor

WORD_BYTES = 8
TensorArg = Tensor | array | None  # a table may be an array of int64


class ArgField(NamedTuple):
    """One field of a record: its word in memory, and its kind: "int", "float" or "tensor"."""

    index: int
    kind: str


class _Word:
    """Descriptor of a field: reads the word, writes a number or the address of a tensor."""

    def __init__(self, field: ArgField) -> None:
        self.field = field

    def __get__(self, record: KernelArgs | None, owner: Any) -> Any:
        if record is None:
            return self
        word = record.words[self.field.index]
        return unpack("=d", pack("=q", word))[0] if self.field.kind == "float" else word

    def __set__(self, record: KernelArgs, value: Any) -> None:
        if self.field.kind == "tensor":
            record.tensors.append(value)
            value = address_of(value)
        elif self.field.kind == "float":
            value = unpack("=q", pack("=d", value))[0]
        record.words[self.field.index] = value


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
            setattr(cls, name, _Word(cls.fields[name]))
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

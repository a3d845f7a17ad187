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

A record keeps its tensors alive, and this module is the only one that takes their addresses.
`check_tensors` compares each tensor with its annotation: device, dtype and memory layout.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from inspect import get_annotations
from struct import Struct, pack, unpack
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

import torch
from torch import Tensor

WORD_BYTES = 8
SCRATCH_WORD = 3
SCRATCH_BYTES_WORD = 4  # in `ParallelKernelArgs`


class TensorLayout(NamedTuple):
    """Dtype and strides of a tensor argument; dtype None is the dtype that the kernel is compiled
    for.
    """

    dtype: torch.dtype | str | None
    # or "last": the last axis has stride 1; or "any". Other fields then hold the strides
    strides: str = "contiguous"

    def expected_dtype(self, storage_dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype of the tensor, in a kernel that is compiled for a storage dtype; None if
        that may be any.
        """
        if self.dtype == "compute":
            if storage_dtype is None:  # a kernel for every dtype, which does not read this tensor
                return None
            return torch.float64 if storage_dtype is torch.float64 else torch.float32
        return self.dtype if isinstance(self.dtype, torch.dtype) else storage_dtype

    def problem(self, tensor: Tensor, storage_dtype: torch.dtype | None) -> str:
        """Return how a tensor differs from the layout, or an empty string."""
        dtype = self.expected_dtype(storage_dtype)
        if not tensor.is_cpu or dtype not in (None, tensor.dtype):
            return f"is {tensor.dtype} on {tensor.device}, not {dtype} on the CPU"
        if tensor.data_ptr() % tensor.itemsize:
            return "is not aligned to its elements"
        if tensor.is_contiguous() or self.strides == "any":
            return ""
        if self.strides == "last" and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1):
            return ""
        return f"has strides {tensor.stride()} for shape {list(tensor.shape)}"


# Annotations of fields. A tensor's field is the address of its first element in the kernel, 0
# without a tensor.
TensorArg = Annotated[
    Tensor | None, TensorLayout(None)
]  # contiguous, in the dtype that the kernel is compiled for
StridedArg = Annotated[Tensor | None, TensorLayout(None, "last")]
ComputeArg = Annotated[
    Tensor | None, TensorLayout("compute")
]  # float64 if stored in float64, else float32
StridedComputeArg = Annotated[Tensor | None, TensorLayout("compute", "any")]
Float32Arg = Annotated[Tensor | None, TensorLayout(torch.float32)]
StridedFloat32Arg = Annotated[Tensor | None, TensorLayout(torch.float32, "any")]
Float64Arg = Annotated[Tensor | None, TensorLayout(torch.float64)]
Int64Arg = Annotated[Tensor | None, TensorLayout(torch.int64)]
Int32Arg = Annotated[Tensor | None, TensorLayout(torch.int32)]
BoolArg = Annotated[Tensor | None, TensorLayout(torch.bool)]
TableArg = Annotated[
    Tensor | array | None, TensorLayout(torch.int64)
]  # may also be an array of int64


class MemoryRange(NamedTuple):
    """The memory of one argument, for checks of the debug build."""

    name: str
    begin: int
    end: int


def _memory_range(name: str, memory: Tensor | array) -> MemoryRange:
    begin = address_of(memory)
    itemsize = memory.itemsize
    if isinstance(memory, array):
        return MemoryRange(name, begin, begin + itemsize * len(memory))
    last_offset = sum(
        (n - 1) * stride for n, stride in zip(memory.shape, memory.stride(), strict=True)
    )
    return MemoryRange(
        f"{name} {list(memory.shape)}",
        begin,
        begin + itemsize * (last_offset + 1) * (memory.numel() > 0),
    )


class ArgField(NamedTuple):
    """One field of a record: its place in memory and, for a tensor, its place in
    `KernelArgs.tensors`.
    """

    index: int  # word of the record
    kind: str  # "int", "float", "tensor" or "table"
    slot: int = -1
    layout: TensorLayout | None = None


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
        if self.field.slot >= 0:
            record.tensors[self.field.slot] = value
            value = address_of(value)
        elif self.field.kind == "float":
            value = unpack("=q", pack("=d", value))[0]
        record.words[self.field.index] = value


def address_of(memory: Tensor | array | None) -> int:
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


def _make_field(annotation: Any, index: int, slot: int) -> ArgField:
    if annotation in (int, float):
        return ArgField(index, annotation.__name__)
    values, layout = get_args(annotation)
    return ArgField(index, "table" if values == get_args(TableArg)[0] else "tensor", slot, layout)


def _generate_make(record: type[KernelArgs]) -> Callable[..., Any]:
    """Return `KernelArgs.make` of a record, generated like the methods of dataclasses.

    It runs before every call of a kernel. A loop over the fields takes longer than a small kernel,
    and so does calling a class with many keywords.
    """
    fields = record.fields
    defaults = {"int": "0", "float": "0.0", "tensor": "None", "table": "None"}
    conversions = {
        "int": "{0}",
        "float": "{0}",
        "tensor": "0 if {0} is None else {0}.data_ptr()",
        "table": "address_of({0})",
    }
    parameters = ", ".join(f"{name}={defaults[field.kind]}" for name, field in fields.items())
    words = ", ".join(conversions[field.kind].format(name) for name, field in fields.items())
    tensors = ", ".join(name for name, field in fields.items() if field.slot >= 0)
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
    """Base class of argument records; subclasses declare fields (see the top of this module).

    `class Args(KernelArgs, is_checked=False)` leaves out `check_tensors` in normal builds: for
    operations whose few microseconds count, and which have checked their tensors before.
    """

    __slots__ = ("address", "tensors", "words")
    fields: ClassVar[dict[str, ArgField]] = {}
    layouts: ClassVar[
        dict[str, TensorLayout]
    ] = {}  # of the tensor fields, in the order of `tensors`
    tensor_places: ClassVar[dict[str, tuple[int, int]]] = {}  # slots and words of the tensor fields
    dtypes_by_storage: ClassVar[dict[torch.dtype | None, list[tuple[int, torch.dtype | None]]]] = {}
    is_checked: ClassVar[bool] = True
    make: ClassVar[Callable[..., Self]]  # returns a record; its keyword parameters are the fields
    records: ClassVar[dict[str, type[KernelArgs]]] = {}  # all records by name
    words: array  # the record in memory
    address: int  # its address
    tensors: list[
        Any
        # the tensors of the record, which it keeps alive; the kernel may read addresses in a table,
        # too
    ]

    def __init_subclass__(cls, is_checked: bool = True) -> None:
        cls.is_checked = is_checked
        cls.fields = dict(cls.fields)
        cls.layouts = dict(cls.layouts)
        cls.dtypes_by_storage = {}
        annotations = get_type_hints(cls, include_extras=True)
        for name in get_annotations(cls):
            field = cls.fields[name] = _make_field(
                annotations[name], len(cls.fields), len(cls.layouts)
            )
            if field.layout is not None:
                cls.layouts[name] = field.layout
            setattr(cls, name, _Word(field))
        tensor_fields = {
            name: field for name, field in cls.fields.items() if field.kind == "tensor"
        }
        cls.tensor_places = {
            name: (field.slot, field.index) for name, field in tensor_fields.items()
        }
        cls.make = staticmethod(_generate_make(cls))
        cls.records[cls.record_name()] = cls

    @classmethod
    def record_name(cls) -> str:
        """Return the name under which compiled code finds the record."""
        return f"{cls.__module__}.{cls.__qualname__}"

    def tensor(self, name: str) -> Any:
        """Return the tensor of a field."""
        return self.tensors[self.fields[name].slot]

    def replace(self, **values: Any) -> Self:
        """Return a copy with some fields changed."""
        copy = object.__new__(type(self))
        places = self.tensor_places
        words, tensors = copy.words, copy.tensors = self.words[:], self.tensors[:]
        copy.address = words.buffer_info()[0]
        for name, value in values.items():
            if name in places and value is not None:  # faster than the descriptor
                slot, index = places[name]
                tensors[slot], words[index] = value, value.data_ptr()
            else:
                setattr(copy, name, value)
        return copy

    def check_tensors(self, storage_dtype: torch.dtype | None) -> None:
        """Raise ValueError for a tensor that differs from its field's annotation."""
        tensors = self.tensors
        for slot, dtype in self.expected_dtypes(storage_dtype):
            tensor = tensors[
                slot
            ]  # the common case first: `problem` takes longer than some kernels
            if tensor is not None and not (
                tensor.dtype is dtype and tensor.is_contiguous() and tensor.is_cpu
            ):
                self.check_each_tensor(storage_dtype)
                return

    @classmethod
    def expected_dtypes(
        cls, storage_dtype: torch.dtype | None
    ) -> list[tuple[int, torch.dtype | None]]:
        """Return the tensor fields' places in the list of tensors, and their dtypes."""
        if storage_dtype not in cls.dtypes_by_storage:
            cls.dtypes_by_storage[storage_dtype] = [
                (field.slot, field.layout.expected_dtype(storage_dtype))
                for field in cls.fields.values()
                if field.kind == "tensor" and field.layout is not None
            ]
        return cls.dtypes_by_storage[storage_dtype]

    def check_each_tensor(self, storage_dtype: torch.dtype | None) -> None:
        """Raise ValueError for the first tensor that differs from its field's annotation."""
        for (name, layout), tensor in zip(self.layouts.items(), self.tensors, strict=False):
            if isinstance(tensor, Tensor) and (problem := layout.problem(tensor, storage_dtype)):
                raise ValueError(
                    f"cannot run a kernel with {type(self).__name__}: {name} {problem}"
                )

    def memory_ranges(self) -> list[MemoryRange]:
        """Return the memory that the kernel may read and write."""
        size = self.words.itemsize * len(self.words)
        ranges = [MemoryRange(type(self).__name__, self.address, self.address + size)]
        names = [
            *self.layouts,
            *(f"tensors[{n}]" for n in range(len(self.layouts), len(self.tensors))),
        ]
        return ranges + [
            _memory_range(name, memory)
            for name, memory in zip(names, self.tensors, strict=True)
            if memory is not None and len(memory)
        ]


class ParallelKernelArgs(KernelArgs):
    """Header of the records of kernels that several threads run; `launch` allocates the scratch
    buffers.
    """

    next_item: int = 0  # counters: the next work item, the next thread
    next_thread: int = 0
    num_items: int = 0  # work items
    scratch: Annotated[Tensor | None, TensorLayout(torch.uint8)] = None  # one buffer per thread
    scratch_bytes: int = 0  # bytes per thread

    def allocate_scratch(self, threads: int) -> None:
        """Allocate `scratch_bytes` for each of some threads."""
        scratch = torch.empty(threads * self.words[SCRATCH_BYTES_WORD], dtype=torch.uint8)
        self.tensors[0], self.words[SCRATCH_WORD] = scratch, scratch.data_ptr()

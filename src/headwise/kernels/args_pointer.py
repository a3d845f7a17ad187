"""Numba type of a pointer to an argument record, through which kernels read `args.num_keys` or `args.q`.

Reading a field is one 64-bit load from a fixed offset. Tensors are their addresses, int64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr

from .kernel_args import WORD_BYTES, KernelArgs
from .memory_pointer import INT64, memory_pointer
from .simd import intrinsic, load_int64, store_value


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
    return builder.load(memory_pointer(builder, _build_field_address(builder, address, field.index), word))


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
        builder.store(word, memory_pointer(builder, _build_field_address(builder, values[0], index), INT64, "writes"))
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


args_from_address: Any = _args_from_address  # typed Any: intrinsics are called without their first parameter
args_field_address: Any = _args_field_address
store_arg: Any = _store_arg


@extending.register_jitable
def copy_args(args, to):
    """Copy a record to an address and return the copy."""
    for n in range(_args_num_words(args)):
        store_value(to + WORD_BYTES * n, load_int64(_args_address(args) + WORD_BYTES * n))
    return _args_at(args, to)

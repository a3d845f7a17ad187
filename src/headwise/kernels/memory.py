"""Memory by its address: what kernels read and write."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel import models

from .lanes import SIMD_FLOAT32, SIMD_FLOAT64, INT32, INT64, SIMD_WIDTH, SimdVector, intrinsic, llvm_scalar_type

INT8 = ir.IntType(8)
STORAGE_LLVM_TYPES = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "bfloat16": ir.IntType(16), "int8": INT8}
STORAGE_ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "int8": 1}


def _typed_pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _widen(builder: ir.IRBuilder, raw: Any, kind: str, told: ir.Type) -> Any:
    """Numbers as they lie in memory, as numbers to compute with: one, or a vector of them."""
    if kind in ("float32", "float64"):
        return raw
    if kind == "int8":
        return builder.sitofp(raw, told)
    many = isinstance(told, ir.VectorType)
    wide, shift = (ir.VectorType(INT32, SIMD_WIDTH), [16] * SIMD_WIDTH) if many else (INT32, 16)
    # bfloat16 is the upper half of float32
    return builder.bitcast(builder.shl(builder.zext(raw, wide), ir.Constant(wide, shift)), told)


class StorageType(types.Type):
    """As what kind of numbers keys lie in memory. A kernel is handed one, and is compiled for each."""

    def __init__(self, kind: str) -> None:
        super().__init__(name=f"form of {kind}")
        self.kind, self.lanes = kind, SIMD_FLOAT64 if kind == "float64" else SIMD_FLOAT32


@extending.register_model(StorageType)
class StorageTypeModel(models.OpaqueModel):
    """There is nothing to hold: all that it says is in its type."""


@extending.intrinsic(prefer_literal=True)
def _storage_type(typing: Any, kind: Any) -> Any:
    return StorageType(kind.literal_value)(kind), lambda context, builder, signature, args: context.get_dummy_value()


storage_type: Any = _storage_type  # what it makes is called with one argument fewer


@intrinsic
def storage_itemsize(typing: Any, form: Any) -> Any:
    """The bytes of a number as it lies in memory."""
    return types.int64(form), lambda context, builder, signature, args: INT64(STORAGE_ITEMSIZES[form.kind])


@intrinsic
def compute_itemsize(typing: Any, form: Any) -> Any:
    """The bytes of a number to compute with."""
    return types.int64(form), lambda context, builder, signature, args: INT64(8 if form.lanes == SIMD_FLOAT64 else 4)


@intrinsic
def as_compute_scalar(typing: Any, form: Any, value: Any) -> Any:
    """A number to compute with."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], value, form.lanes.number)

    return form.lanes.number(form, value), code


def _make_load(many: bool, memory: bool) -> Any:
    """How to read numbers from an address on: sixteen or one, as they lie in memory or as they are computed with."""

    @intrinsic
    def read(typing: Any, form: Any, address: Any) -> Any:
        lanes = form.lanes
        kind = form.kind if memory else "float64" if lanes == SIMD_FLOAT64 else "float32"
        told = lanes.kind if many else llvm_scalar_type(lanes.number)
        raw = ir.VectorType(STORAGE_LLVM_TYPES[kind], SIMD_WIDTH) if many else STORAGE_LLVM_TYPES[kind]

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.load(_typed_pointer(builder, args[1], raw), align=STORAGE_ITEMSIZES[kind])
            return _widen(builder, found, kind, told)

        return (lanes if many else lanes.number)(form, types.int64), code

    return read


load_storage, load_storage_scalar = _make_load(True, True), _make_load(False, True)
load_vector, load_scalar = _make_load(True, False), _make_load(False, False)


def _make_bf16_load(odd: int) -> Any:
    """How to read sixteen of thirty-two numbers from an address on: of bfloat16, which lie two in each 32 bits, those
    that are all in upper or lower halves; of others the first, or the last, sixteen."""

    @intrinsic
    def half(typing: Any, form: Any, address: Any) -> Any:
        lanes, kind, pair = form.lanes, form.kind, ir.VectorType(INT32, SIMD_WIDTH)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if kind != "bfloat16":
                at = builder.add(args[1], INT64(odd * SIMD_WIDTH * STORAGE_ITEMSIZES[kind]))
                found = builder.load(_typed_pointer(builder, at, ir.VectorType(STORAGE_LLVM_TYPES[kind], SIMD_WIDTH)), align=STORAGE_ITEMSIZES[kind])
                return _widen(builder, found, kind, lanes.kind)
            found = builder.load(_typed_pointer(builder, args[1], pair), align=STORAGE_ITEMSIZES[kind])
            upper = ir.Constant(pair, [0xFFFF0000] * SIMD_WIDTH)
            told = builder.and_(found, upper) if odd else builder.shl(found, ir.Constant(pair, [16] * SIMD_WIDTH))
            return builder.bitcast(told, lanes.kind)

        return lanes(form, types.int64), code

    return half


load_bf16_even, load_bf16_odd = _make_bf16_load(0), _make_bf16_load(1)


@intrinsic
def load_int64(typing: Any, address: Any) -> Any:
    """The int64 at an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_typed_pointer(builder, args[0], INT64))

    return types.int64(types.int64), code


@intrinsic
def store_value(typing: Any, address: Any, value: Any) -> Any:
    """Write one number, or sixteen."""
    kind = value.llvm_type if isinstance(value, SimdVector) else llvm_scalar_type(value)
    align = 4 if value in (SIMD_FLOAT32, types.float32) else 8

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _typed_pointer(builder, args[0], kind), align=align)
        return context.get_dummy_value()

    return types.void(types.int64, value), code


@extending.intrinsic(prefer_literal=True)
def _store_quarter(typing: Any, address: Any, value: Any, which: Any) -> Any:
    """Write four numbers of sixteen: those of this quarter."""
    count = SIMD_WIDTH // 4
    first, kind = count * which.literal_value, ir.VectorType(llvm_scalar_type(value.number), count)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = ir.Constant(ir.VectorType(INT32, count), list(range(first, first + count)))
        found = builder.shuffle_vector(args[1], args[1], at)
        builder.store(found, _typed_pointer(builder, args[0], kind), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, value, which), code


store_quarter: Any = _store_quarter


def _round_to_bfloat16(builder: Any, told: Any, many: bool) -> Any:
    """Numbers of float32 as bits of bfloat16: to the nearest, to the even one between two."""

    def all_of(kind: ir.Type, bits: int) -> ir.Constant:
        return ir.Constant(ir.VectorType(kind, SIMD_WIDTH), [bits] * SIMD_WIDTH) if many else kind(bits)

    bits = builder.bitcast(told, ir.VectorType(INT32, SIMD_WIDTH) if many else INT32)
    half = builder.add(builder.and_(builder.lshr(bits, all_of(INT32, 16)), all_of(INT32, 1)), all_of(INT32, 0x7FFF))
    above = builder.lshr(builder.add(bits, half), all_of(INT32, 16))
    above = builder.select(builder.fcmp_unordered("uno", told, told), all_of(INT32, 0x7FC0), above)
    raw = STORAGE_LLVM_TYPES["bfloat16"]
    return builder.trunc(above, ir.VectorType(raw, SIMD_WIDTH) if many else raw)


@intrinsic
def store_storage(typing: Any, form: Any, address: Any, value: Any) -> Any:
    """Write one number, or sixteen, in the form in which others lie."""
    many = isinstance(value, SimdVector)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        told = _round_to_bfloat16(builder, args[2], many) if form.kind == "bfloat16" else args[2]
        raw = ir.VectorType(STORAGE_LLVM_TYPES[form.kind], SIMD_WIDTH) if many else STORAGE_LLVM_TYPES[form.kind]
        builder.store(told, _typed_pointer(builder, args[1], raw), align=STORAGE_ITEMSIZES[form.kind])
        return context.get_dummy_value()

    return types.void(form, types.int64, value if many else form.lanes.number), code


@intrinsic
def fetch_and_increment(typing: Any, address: Any) -> Any:
    """The int64 at an address, to which one is added; no two threads are given the same."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _typed_pointer(builder, args[0], INT64), INT64(1), "acq_rel")

    return types.int64(types.int64), code


def _make_prefetch(level: int) -> Any:
    """How to ask for memory that is soon read; the nearer to the processor the higher the level, which ends with 3.

    What level 0 brings stays in the first cache alone: read once, it drives nothing out of the second that is needed
    between kernels, torch's code and Python's.
    """

    @intrinsic
    def ask(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte = INT8.as_pointer()
            told = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
            ask = cgutils.get_or_insert_function(builder.module, told, "llvm.prefetch.p0")
            builder.call(ask, [builder.inttoptr(args[0], byte), INT32(0), INT32(level), INT32(1)])
            return context.get_dummy_value()

        return types.void(types.int64), code

    return ask


prefetch_l2, prefetch_l1, prefetch_nontemporal = _make_prefetch(2), _make_prefetch(3), _make_prefetch(0)


@extending.register_jitable
def load_arg(table, at):
    """The number that a kernel is told at a place of a table of int64."""
    return load_int64(table + 8 * at)

"""Memory by its address: what kernels read and write."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel import models

from .lanes import F32, F64, INT, LONG, WIDE, Lanes, intrinsic, scalar

BYTE = ir.IntType(8)
RAW = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "bfloat16": ir.IntType(16), "int8": BYTE}
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "int8": 1}


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _widened(builder: ir.IRBuilder, raw: Any, kind: str, told: ir.Type) -> Any:
    """Numbers as they lie in memory, as numbers to compute with: one, or a vector of them."""
    if kind in ("float32", "float64"):
        return raw
    if kind == "int8":
        return builder.sitofp(raw, told)
    many = isinstance(told, ir.VectorType)
    wide, shift = (ir.VectorType(INT, WIDE), [16] * WIDE) if many else (INT, 16)
    # bfloat16 is the upper half of float32
    return builder.bitcast(builder.shl(builder.zext(raw, wide), ir.Constant(wide, shift)), told)


class Form(types.Type):
    """As what kind of numbers keys lie in memory. A kernel is handed one, and is compiled for each."""

    def __init__(self, kind: str) -> None:
        super().__init__(name=f"form of {kind}")
        self.kind, self.lanes = kind, F64 if kind == "float64" else F32


@extending.register_model(Form)
class FormModel(models.OpaqueModel):
    """There is nothing to hold: all that it says is in its type."""


@extending.intrinsic(prefer_literal=True)
def _form(typing: Any, kind: Any) -> Any:
    return Form(kind.literal_value)(kind), lambda context, builder, signature, args: context.get_dummy_value()


form: Any = _form  # what it makes is called with one argument fewer


@intrinsic
def lies(typing: Any, form: Any) -> Any:
    """The bytes of a number as it lies in memory."""
    return types.int64(form), lambda context, builder, signature, args: LONG(SIZES[form.kind])


@intrinsic
def size(typing: Any, form: Any) -> Any:
    """The bytes of a number to compute with."""
    return types.int64(form), lambda context, builder, signature, args: LONG(8 if form.lanes == F64 else 4)


@intrinsic
def number(typing: Any, form: Any, value: Any) -> Any:
    """A number to compute with."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], value, form.lanes.number)

    return form.lanes.number(form, value), code


def _reader(many: bool, memory: bool) -> Any:
    """How to read numbers from an address on: sixteen or one, as they lie in memory or as they are computed with."""

    @intrinsic
    def read(typing: Any, form: Any, address: Any) -> Any:
        lanes = form.lanes
        kind = form.kind if memory else "float64" if lanes == F64 else "float32"
        told = lanes.kind if many else scalar(lanes.number)
        raw = ir.VectorType(RAW[kind], WIDE) if many else RAW[kind]

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.load(_pointer(builder, args[1], raw), align=SIZES[kind])
            return _widened(builder, found, kind, told)

        return (lanes if many else lanes.number)(form, types.int64), code

    return read


load, load_one = _reader(True, True), _reader(False, True)
read, read_one = _reader(True, False), _reader(False, False)


def _half(odd: int) -> Any:
    """How to read sixteen of thirty-two numbers from an address on: of bfloat16, which lie two in each 32 bits, those
    that are all in upper or lower halves; of others the first, or the last, sixteen."""

    @intrinsic
    def half(typing: Any, form: Any, address: Any) -> Any:
        lanes, kind, pair = form.lanes, form.kind, ir.VectorType(INT, WIDE)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if kind != "bfloat16":
                at = builder.add(args[1], LONG(odd * WIDE * SIZES[kind]))
                found = builder.load(_pointer(builder, at, ir.VectorType(RAW[kind], WIDE)), align=SIZES[kind])
                return _widened(builder, found, kind, lanes.kind)
            found = builder.load(_pointer(builder, args[1], pair), align=SIZES[kind])
            upper = ir.Constant(pair, [0xFFFF0000] * WIDE)
            told = builder.and_(found, upper) if odd else builder.shl(found, ir.Constant(pair, [16] * WIDE))
            return builder.bitcast(told, lanes.kind)

        return lanes(form, types.int64), code

    return half


evens, odds = _half(0), _half(1)


@intrinsic
def whole(typing: Any, address: Any) -> Any:
    """The int64 at an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], LONG))

    return types.int64(types.int64), code


@intrinsic
def put(typing: Any, address: Any, value: Any) -> Any:
    """Write one number, or sixteen."""
    kind = value.kind if isinstance(value, Lanes) else scalar(value)
    align = 4 if value in (F32, types.float32) else 8

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], kind), align=align)
        return context.get_dummy_value()

    return types.void(types.int64, value), code


@extending.intrinsic(prefer_literal=True)
def _put_quarter(typing: Any, address: Any, value: Any, which: Any) -> Any:
    """Write four numbers of sixteen: those of this quarter."""
    count = WIDE // 4
    first, kind = count * which.literal_value, ir.VectorType(scalar(value.number), count)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = ir.Constant(ir.VectorType(INT, count), list(range(first, first + count)))
        found = builder.shuffle_vector(args[1], args[1], at)
        builder.store(found, _pointer(builder, args[0], kind), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, value, which), code


put_quarter: Any = _put_quarter


def _rounded(builder: Any, told: Any, many: bool) -> Any:
    """Numbers of float32 as bits of bfloat16: to the nearest, to the even one between two."""

    def all_of(kind: ir.Type, bits: int) -> ir.Constant:
        return ir.Constant(ir.VectorType(kind, WIDE), [bits] * WIDE) if many else kind(bits)

    bits = builder.bitcast(told, ir.VectorType(INT, WIDE) if many else INT)
    half = builder.add(builder.and_(builder.lshr(bits, all_of(INT, 16)), all_of(INT, 1)), all_of(INT, 0x7FFF))
    above = builder.lshr(builder.add(bits, half), all_of(INT, 16))
    above = builder.select(builder.fcmp_unordered("uno", told, told), all_of(INT, 0x7FC0), above)
    raw = RAW["bfloat16"]
    return builder.trunc(above, ir.VectorType(raw, WIDE) if many else raw)


@intrinsic
def store(typing: Any, form: Any, address: Any, value: Any) -> Any:
    """Write one number, or sixteen, in the form in which others lie."""
    many = isinstance(value, Lanes)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        told = _rounded(builder, args[2], many) if form.kind == "bfloat16" else args[2]
        raw = ir.VectorType(RAW[form.kind], WIDE) if many else RAW[form.kind]
        builder.store(told, _pointer(builder, args[1], raw), align=SIZES[form.kind])
        return context.get_dummy_value()

    return types.void(form, types.int64, value if many else form.lanes.number), code


@intrinsic
def take(typing: Any, address: Any) -> Any:
    """The int64 at an address, to which one is added; no two threads are given the same."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], LONG), LONG(1), "acq_rel")

    return types.int64(types.int64), code


def _asker(level: int) -> Any:
    """How to ask for memory that is soon read; the nearer to the processor the higher the level, which ends with 3.

    What level 0 brings stays in the first cache alone: read once, it drives nothing out of the second that is needed
    between kernels, torch's code and Python's.
    """

    @intrinsic
    def ask(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte = BYTE.as_pointer()
            told = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
            ask = cgutils.get_or_insert_function(builder.module, told, "llvm.prefetch.p0")
            builder.call(ask, [builder.inttoptr(args[0], byte), INT(0), INT(level), INT(1)])
            return context.get_dummy_value()

        return types.void(types.int64), code

    return ask


ahead, soon, once = _asker(2), _asker(3), _asker(0)


@extending.register_jitable
def told(table, at):
    """The number that a kernel is told at a place of a table of int64."""
    return whole(table + 8 * at)

"""Sixteen numbers at once, and memory by its address: what kernels are written in.

LLVM turns a loop over numbers into vectors only where it can prove that memories do not overlap and that sums may be
reordered. Written in vectors nothing has to be proved, no `fastmath` is asked for, and infinities and NaN keep their
rules. Wider or narrower machines split or pair them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

WIDE = 16
BYTE, INT, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
MASK = ir.VectorType(INT, WIDE)


class Lanes(types.Type):
    """So many numbers of one type, in a register."""

    def __init__(self, number: types.Float) -> None:
        super().__init__(name=f"{WIDE} x {number}")
        self.number = number

    @property
    def told(self) -> ir.VectorType:
        """The same to LLVM."""
        return ir.VectorType(_told(self.number), WIDE)


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """How Numba holds them."""

    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.told)


F32, F64 = Lanes(types.float32), Lanes(types.float64)


def _told(number: types.Type) -> ir.Type:
    return {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}.get(number, LONG)


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def _splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(MASK, [0] * WIDE))


def _widened(builder: ir.IRBuilder, raw: ir.Value, kind: str, told: ir.Type) -> ir.Value:
    """Numbers as they lie in memory, as numbers to compute with: one, or a vector of them."""
    if kind in ("float32", "float64"):
        return raw
    if kind == "int8":
        return builder.sitofp(raw, told)
    wide = ir.VectorType(INT, WIDE) if isinstance(told, ir.VectorType) else INT
    shift = ir.Constant(wide, [16] * WIDE) if isinstance(told, ir.VectorType) else INT(16)
    return builder.bitcast(builder.shl(builder.zext(raw, wide), shift), told)  # bfloat16 is the upper half of float32


RAW = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "bfloat16": ir.IntType(16), "int8": BYTE}
SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "int8": 1}


class Form(types.Type):
    """As what kind of numbers keys lie in memory. A kernel is handed one, and is compiled for each."""

    def __init__(self, kind: str) -> None:
        super().__init__(name=f"form of {kind}")
        self.kind, self.lanes = kind, F64 if kind == "float64" else F32


@register_model(Form)
class FormModel(models.OpaqueModel):
    """There is nothing to hold: all that it says is in its type."""


def _form(kind: str) -> Any:
    @intrinsic
    def form(typing: Any) -> Any:
        return Form(kind)(), lambda context, builder, signature, args: context.get_dummy_value()

    return form


float32, float64, bfloat16, int8 = _form("float32"), _form("float64"), _form("bfloat16"), _form("int8")


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
    told = _told(form.lanes.number)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], value, form.lanes.number)

    assert told is not LONG
    return form.lanes.number(form, value), code


def _reader(many: bool, memory: bool) -> Any:
    """How to read numbers from an address on: sixteen or one, as they lie in memory or as they are computed with."""

    @intrinsic
    def read(typing: Any, form: Any, address: Any) -> Any:
        lanes = form.lanes
        kind = form.kind if memory else "float64" if lanes == F64 else "float32"
        told = lanes.told if many else _told(lanes.number)
        raw = ir.VectorType(RAW[kind], WIDE) if many else RAW[kind]

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.load(_pointer(builder, args[1], raw), align=SIZES[kind])
            return _widened(builder, found, kind, told)

        return (lanes if many else lanes.number)(form, types.int64), code

    return read


load, load_one = _reader(True, True), _reader(False, True)
read, read_one = _reader(True, False), _reader(False, False)


@intrinsic
def whole(typing: Any, address: Any) -> Any:
    """The int64 at an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], LONG))

    return types.int64(types.int64), code


@intrinsic
def put(typing: Any, address: Any, value: Any) -> Any:
    """Write one number, or sixteen."""
    kind = value.told if isinstance(value, Lanes) else _told(value)
    size = 4 if value in (F32, types.float32) else 8

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], kind), align=size)
        return context.get_dummy_value()

    return types.void(types.int64, value), code


@intrinsic
def take(typing: Any, address: Any) -> Any:
    """The int64 at an address, to which one is added; no two threads are given the same."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], LONG), LONG(1), "acq_rel")

    return types.int64(types.int64), code


@intrinsic
def ahead(typing: Any, address: Any) -> Any:
    """Ask for the memory at an address, which is soon read."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = BYTE.as_pointer()
        told = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
        ask = cgutils.get_or_insert_function(builder.module, told, "llvm.prefetch.p0")
        builder.call(ask, [builder.inttoptr(args[0], byte), INT(0), INT(2), INT(1)])
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """One number sixteen times."""
    lanes = F64 if value == types.float64 else F32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], lanes.told)

    return lanes(value), code


def _called(name: str, count: int) -> Any:
    """LLVM's operation of this name on so many vectors."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type.told
        letter = "f64" if signature.return_type == F64 else "f32"
        told = ir.FunctionType(kind, [kind] * count)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, told, f"llvm.{name}.v{WIDE}{letter}"), list(args)
        )

    return code


def _reduced(name: str, start: bool) -> Any:
    """LLVM's operation of this name over the numbers of a vector, in whatever order is fastest."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, vector = _told(signature.return_type), signature.args[0].told
        letter = "f64" if signature.return_type == types.float64 else "f32"
        told = ir.FunctionType(number, [number, vector] if start else [vector])
        call = cgutils.get_or_insert_function(builder.module, told, f"llvm.vector.reduce.{name}.v{WIDE}{letter}")
        given = [ir.Constant(number, -0.0), args[0]] if start else [args[0]]
        return builder.call(call, given, fastmath=["reassoc"] if start else [])

    return code


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c."""
    return a(a, b, c), _called("fma", 3)


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each two; NaN is never the larger."""
    return a(a, b), _called("maxnum", 2)


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of all sixteen."""
    return a.number(a), _reduced("fadd", start=True)


@intrinsic
def largest(typing: Any, a: Any) -> Any:
    """The largest of all sixteen; NaN is never it."""
    return a.number(a), _reduced("fmax", start=False)


@intrinsic
def plus(typing: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def minus(typing: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return a(a, b), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def times(typing: Any, a: Any, b: Any) -> Any:
    """a b."""
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def where_below(typing: Any, a: Any, bound: Any, low: Any, high: Any) -> Any:
    """`low` where a is below its bound, else `high`: also where a is NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return a(a, a, a, a), code


@intrinsic
def power(typing: Any, shifted: Any) -> Any:
    """2^n, where n was added to 1.5 x 2^23 and so stands in the last bits of the sum."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(INT, WIDE)
        bits = builder.shl(builder.bitcast(args[0], kind), ir.Constant(kind, [23] * WIDE))
        return builder.bitcast(builder.add(bits, ir.Constant(kind, [127 << 23] * WIDE)), F32.told)

    return F32(F32), code


@intrinsic
def _each_exp(typing: Any, a: Any) -> Any:
    return a(a), _called("exp", 1)


_LOG2E, _SHIFT, _LEAST = np.float32(1 / math.log(2)), np.float32(1.5 * 2**23), np.float32(-87.0)
# ln 2 in two pieces, the first with few bits: so many times it is exact.
_HIGH, _LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))


@njit
def _exp32(x):
    """e^x of numbers not above 0, to 2 units in the last place; 0 below -87.

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series up to r^7 / 7!, whose rest is below 1e-8.
    """
    shifted = fma(x, splat(_LOG2E), splat(_SHIFT))
    n = minus(shifted, splat(_SHIFT))
    r = fma(n, splat(_LOW), fma(n, splat(_HIGH), x))
    e = splat(_SERIES[0])
    for term in _SERIES[1:]:
        e = fma(e, r, splat(term))
    return where_below(x, splat(_LEAST), splat(np.float32(0.0)), times(e, power(shifted)))


def exp(x):
    """e^x of sixteen numbers not above 0."""
    raise NotImplementedError("only compiled code calls it")


@overload(exp)
def _exp(x):
    if x == F32:
        return lambda x: _exp32(x)
    return lambda x: _each_exp(x)

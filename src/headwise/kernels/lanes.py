"""Sixteen numbers at once: what kernels compute with.

LLVM turns a loop over numbers into vectors only where it can prove that memories do not overlap and that sums may be
reordered. Written in vectors nothing has to be proved, no `fastmath` is asked for, and infinities and NaN keep their
rules. Wider or narrower machines split or pair them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.core.datamodel import models

WIDE = 16
INT, LONG = ir.IntType(32), ir.IntType(64)
MASK = ir.VectorType(INT, WIDE)
intrinsic: Any = extending.intrinsic  # what it makes is called with fewer arguments than it is written with


@extending.register_jitable
def wide(count: int) -> int:
    """The next multiple of a vector's numbers."""
    return (count + WIDE - 1) // WIDE * WIDE


class Lanes(types.Type):
    """So many numbers of one type, in a register."""

    def __init__(self, number: types.Float) -> None:
        super().__init__(name=f"{WIDE} x {number}")
        self.number = number

    @property
    def kind(self) -> ir.VectorType:
        """The same to LLVM."""
        return ir.VectorType(scalar(self.number), WIDE)


@extending.register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """How Numba holds them."""

    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.kind)


F32, F64 = Lanes(types.float32), Lanes(types.float64)


def scalar(number: types.Type) -> ir.Type:
    """A number to LLVM."""
    return {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}.get(number, LONG)


def _splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(MASK, [0] * WIDE))


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """One number sixteen times."""
    lanes = F64 if value == types.float64 else F32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], lanes.kind)

    return lanes(value), code


def called(name: str, count: int) -> Any:
    """LLVM's operation of this name on so many vectors."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type.kind
        letter = "f64" if signature.return_type == F64 else "f32"
        told = ir.FunctionType(kind, [kind] * count)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, told, f"llvm.{name}.v{WIDE}{letter}"), list(args)
        )

    return code


def _reduced(name: str, start: bool) -> Any:
    """LLVM's operation of this name over the numbers of a vector, in whatever order is fastest."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, vector = scalar(signature.return_type), signature.args[0].kind
        letter = "f64" if signature.return_type == types.float64 else "f32"
        told = ir.FunctionType(number, [number, vector] if start else [vector])
        call = cgutils.get_or_insert_function(builder.module, told, f"llvm.vector.reduce.{name}.v{WIDE}{letter}")
        given = [ir.Constant(number, -0.0), args[0]] if start else [args[0]]
        return builder.call(call, given, fastmath=["reassoc"] if start else [])

    return code


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c."""
    return a(a, b, c), called("fma", 3)


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each two; NaN is never the larger."""
    return a(a, b), called("maxnum", 2)


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of all sixteen."""
    return a.number(a), _reduced("fadd", start=True)


def _folded(builder: Any, a: Any, b: Any, low: list[int], high: list[int]) -> Any:
    """Some numbers of two vectors plus others of them."""
    first, second = (builder.shuffle_vector(a, b, ir.Constant(MASK, at)) for at in (low, high))
    return builder.fadd(first, second)


_QUARTERS = [4 * n for n in range(4)]
_HALVES = [[*range(n, n + 8), *range(n + 16, n + 24)] for n in (0, 8)]
_APART = [[m for n in (start, start + 8, start + 16, start + 24) for m in range(n, n + 4)] for start in (0, 4)]
_PAIRS = [[m for n in _QUARTERS for m in (n + at, n + at + 1, n + at + 16, n + at + 17)] for at in (0, 2)]
_SINGLES = [[m for n in _QUARTERS for m in (n + at, n + at + 2, n + at + 16, n + at + 18)] for at in (0, 1)]


@intrinsic
def totals(typing: Any, a: Any) -> Any:
    """The sums of four times four vectors, side by side; halves are added to halves, without leaving registers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [cgutils.unpack_tuple(builder, row) for row in cgutils.unpack_tuple(builder, args[0])]
        singles = []
        for column in zip(*rows, strict=True):
            halves = [_folded(builder, *column[n : n + 2], *_HALVES) for n in (0, 2)]
            singles.append(_folded(builder, *halves, *_APART))
        pairs = [_folded(builder, *singles[n : n + 2], *_PAIRS) for n in (0, 2)]
        return _folded(builder, *pairs, *_SINGLES)

    return a.dtype.dtype(a), code


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
def over(typing: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return a(a, b), lambda context, builder, signature, args: builder.fdiv(*args)


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
        return builder.bitcast(builder.add(bits, ir.Constant(kind, [127 << 23] * WIDE)), F32.kind)

    return F32(F32), code


def _parted(mantissa: bool) -> Any:
    """Of numbers above 0 as m 2^n with m from the root of a half to that of 2: every m, or every n."""

    @intrinsic
    def parted(typing: Any, a: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.VectorType(INT, WIDE)
            bits, bit = builder.bitcast(args[0], kind), ir.Constant(kind, [23] * WIDE)
            n = builder.ashr(builder.sub(bits, ir.Constant(kind, [_ROOT_BITS] * WIDE)), bit)
            if mantissa:
                return builder.bitcast(builder.sub(bits, builder.shl(n, bit)), F32.kind)
            return builder.sitofp(n, F32.kind)

        return F32(F32), code

    return parted


_ROOT_BITS = int(np.float32(math.sqrt(0.5)).view(np.int32))
_mantissa, _exponent = _parted(mantissa=True), _parted(mantissa=False)


@intrinsic
def _each_exp(typing: Any, a: Any) -> Any:
    return a(a), called("exp", 1)


@intrinsic
def _each_log(typing: Any, a: Any) -> Any:
    return a(a), called("log", 1)


_LOG2E, _SHIFT, _LEAST = np.float32(1 / math.log(2)), np.float32(1.5 * 2**23), np.float32(-87.33)
# ln 2 in two pieces, the first with few bits: so many times it is exact.
_HIGH, _LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))


@njit
def _exp32(x):
    """e^x of numbers not above 88, to 2 units in the last place; 0 below -87.33, where normal numbers end.

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
    """e^x of sixteen numbers not above 88."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(exp)
def _exp(x):
    if x == F32:
        return lambda x: _exp32(x)
    return lambda x: _each_exp(x)


_ODD = tuple(np.float32(2 / n) for n in (9, 7, 5, 3, 1))


@njit
def _log32(x):
    """The natural logarithm of numbers above 0, to 2 units in the last place.

    x = m 2^n, and log m = 2 artanh z with z = (m - 1) / (m + 1), |z| < 0.172, by its series up to z^9 / 9, whose rest
    is below 4e-10.
    """
    m, n, one = _mantissa(x), _exponent(x), splat(np.float32(1.0))
    z = over(minus(m, one), plus(m, one))
    square, sums = times(z, z), splat(_ODD[0])
    for term in _ODD[1:]:
        sums = fma(sums, square, splat(term))
    return fma(n, splat(-_HIGH), fma(n, splat(-_LOW), times(sums, z)))


def log(x):
    """The natural logarithm of sixteen numbers above 0."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(log)
def _log(x):
    if x == F32:
        return lambda x: _log32(x)
    return lambda x: _each_log(x)

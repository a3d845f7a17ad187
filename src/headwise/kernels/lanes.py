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

SIMD_WIDTH = 16
INT32, INT64 = ir.IntType(32), ir.IntType(64)
LANE_MASK = ir.VectorType(INT32, SIMD_WIDTH)
intrinsic: Any = extending.intrinsic  # what it makes is called with fewer arguments than it is written with


@extending.register_jitable
def round_up_to_simd(count: int) -> int:
    """The next multiple of a vector's numbers."""
    return (count + SIMD_WIDTH - 1) // SIMD_WIDTH * SIMD_WIDTH


class SimdVector(types.Type):
    """So many numbers of one type, in a register."""

    def __init__(self, number: types.Float) -> None:
        super().__init__(name=f"{SIMD_WIDTH} x {number}")
        self.number = number

    @property
    def llvm_type(self) -> ir.VectorType:
        """The same to LLVM."""
        return ir.VectorType(llvm_scalar_type(self.number), SIMD_WIDTH)


@extending.register_model(SimdVector)
class SimdVectorModel(models.PrimitiveModel):
    """How Numba holds them."""

    def __init__(self, manager: Any, kind: SimdVector) -> None:
        super().__init__(manager, kind, kind.llvm_type)


SIMD_FLOAT32, SIMD_FLOAT64 = SimdVector(types.float32), SimdVector(types.float64)


def llvm_scalar_type(number: types.Type) -> ir.Type:
    """A number to LLVM."""
    return {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}.get(number, INT64)


def _build_splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(LANE_MASK, [0] * SIMD_WIDTH))


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """One number sixteen times."""
    lanes = SIMD_FLOAT64 if value == types.float64 else SIMD_FLOAT32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _build_splat(builder, args[0], lanes.kind)

    return lanes(value), code


def llvm_elementwise(name: str, count: int) -> Any:
    """LLVM's operation of this name on so many vectors."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type.kind
        letter = "f64" if signature.return_type == SIMD_FLOAT64 else "f32"
        told = ir.FunctionType(kind, [kind] * count)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, told, f"llvm.{name}.v{SIMD_WIDTH}{letter}"), list(args)
        )

    return code


def _llvm_reduction(name: str, start: bool) -> Any:
    """LLVM's operation of this name over the numbers of a vector, in whatever order is fastest."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, vector = llvm_scalar_type(signature.return_type), signature.args[0].kind
        letter = "f64" if signature.return_type == types.float64 else "f32"
        told = ir.FunctionType(number, [number, vector] if start else [vector])
        call = cgutils.get_or_insert_function(builder.module, told, f"llvm.vector.reduce.{name}.v{SIMD_WIDTH}{letter}")
        given = [ir.Constant(number, -0.0), args[0]] if start else [args[0]]
        return builder.call(call, given, fastmath=["reassoc"] if start else [])

    return code


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c."""
    return a(a, b, c), llvm_elementwise("fma", 3)


@intrinsic
def vec_max(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each two; NaN is never the larger."""
    return a(a, b), llvm_elementwise("maxnum", 2)


@intrinsic
def reduce_sum(typing: Any, a: Any) -> Any:
    """The sum of all sixteen."""
    return a.number(a), _llvm_reduction("fadd", start=True)


def _add_shuffled(builder: Any, a: Any, b: Any, low: list[int], high: list[int]) -> Any:
    """Some numbers of two vectors plus others of them."""
    first, second = (builder.shuffle_vector(a, b, ir.Constant(LANE_MASK, at)) for at in (low, high))
    return builder.fadd(first, second)


_QUARTERS = [4 * n for n in range(4)]
_HALVES = [[*range(n, n + 8), *range(n + 16, n + 24)] for n in (0, 8)]
_EIGHTHS = [[m for n in (start, start + 8, start + 16, start + 24) for m in range(n, n + 4)] for start in (0, 4)]
_PAIRS = [[m for n in _QUARTERS for m in (n + at, n + at + 1, n + at + 16, n + at + 17)] for at in (0, 2)]
_SINGLES = [[m for n in _QUARTERS for m in (n + at, n + at + 2, n + at + 16, n + at + 18)] for at in (0, 1)]


@intrinsic
def reduce_sum_16(typing: Any, a: Any) -> Any:
    """The sums of four times four vectors, side by side; halves are added to halves, without leaving registers."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [cgutils.unpack_tuple(builder, row) for row in cgutils.unpack_tuple(builder, args[0])]
        singles = []
        for column in zip(*rows, strict=True):
            halves = [_add_shuffled(builder, *column[n : n + 2], *_HALVES) for n in (0, 2)]
            singles.append(_add_shuffled(builder, *halves, *_EIGHTHS))
        pairs = [_add_shuffled(builder, *singles[n : n + 2], *_PAIRS) for n in (0, 2)]
        return _add_shuffled(builder, *pairs, *_SINGLES)

    return a.dtype.dtype(a), code


@intrinsic
def reduce_max(typing: Any, a: Any) -> Any:
    """The largest of all sixteen; NaN is never it."""
    return a.number(a), _llvm_reduction("fmax", start=False)


@intrinsic
def vec_add(typing: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def vec_sub(typing: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return a(a, b), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def vec_mul(typing: Any, a: Any, b: Any) -> Any:
    """a b."""
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def vec_div(typing: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return a(a, b), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def select_below(typing: Any, a: Any, bound: Any, low: Any, high: Any) -> Any:
    """`low` where a is below its bound, else `high`: also where a is NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return a(a, a, a, a), code


@intrinsic
def exp2_from_shifted(typing: Any, shifted: Any) -> Any:
    """2^n, where n was added to 1.5 x 2^23 and so stands in the last bits of the sum."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(INT32, SIMD_WIDTH)
        bits = builder.shl(builder.bitcast(args[0], kind), ir.Constant(kind, [23] * SIMD_WIDTH))
        return builder.bitcast(builder.add(bits, ir.Constant(kind, [127 << 23] * SIMD_WIDTH)), SIMD_FLOAT32.kind)

    return SIMD_FLOAT32(SIMD_FLOAT32), code


def _split_float(mantissa: bool) -> Any:
    """Of numbers above 0 as m 2^n with m from the root of a half to that of 2: every m, or every n."""

    @intrinsic
    def parted(typing: Any, a: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.VectorType(INT32, SIMD_WIDTH)
            bits, bit = builder.bitcast(args[0], kind), ir.Constant(kind, [23] * SIMD_WIDTH)
            n = builder.ashr(builder.sub(bits, ir.Constant(kind, [_ROOT_BITS] * SIMD_WIDTH)), bit)
            if mantissa:
                return builder.bitcast(builder.sub(bits, builder.shl(n, bit)), SIMD_FLOAT32.kind)
            return builder.sitofp(n, SIMD_FLOAT32.kind)

        return SIMD_FLOAT32(SIMD_FLOAT32), code

    return parted


_ROOT_BITS = int(np.float32(math.sqrt(0.5)).view(np.int32))
_mantissa, _exponent = _split_float(mantissa=True), _split_float(mantissa=False)


@intrinsic
def _exp_elementwise(typing: Any, a: Any) -> Any:
    return a(a), llvm_elementwise("exp", 1)


@intrinsic
def _log_elementwise(typing: Any, a: Any) -> Any:
    return a(a), llvm_elementwise("log", 1)


_LOG2E, _SHIFT, _EXP_UNDERFLOW = np.float32(1 / math.log(2)), np.float32(1.5 * 2**23), np.float32(-87.33)
# ln 2 in two pieces, the first with few bits: so many times it is exact.
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_EXP_COEFFICIENTS = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))


@njit
def _exp_float32(x):
    """e^x of numbers not above 88, to 2 units in the last place; 0 below -87.33, where normal numbers end.

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series up to r^7 / 7!, whose rest is below 1e-8.
    """
    shifted = fma(x, splat(_LOG2E), splat(_SHIFT))
    n = vec_sub(shifted, splat(_SHIFT))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), x))
    e = splat(_EXP_COEFFICIENTS[0])
    for term in _EXP_COEFFICIENTS[1:]:
        e = fma(e, r, splat(term))
    return select_below(x, splat(_EXP_UNDERFLOW), splat(np.float32(0.0)), vec_mul(e, exp2_from_shifted(shifted)))


def vec_exp(x):
    """e^x of sixteen numbers not above 88."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(vec_exp)
def _overload_exp(x):
    if x == SIMD_FLOAT32:
        return lambda x: _exp_float32(x)
    return lambda x: _exp_elementwise(x)


_LOG_COEFFICIENTS = tuple(np.float32(2 / n) for n in (9, 7, 5, 3, 1))


@njit
def _log_float32(x):
    """The natural logarithm of numbers above 0, to 2 units in the last place.

    x = m 2^n, and log m = 2 artanh z with z = (m - 1) / (m + 1), |z| < 0.172, by its series up to z^9 / 9, whose rest
    is below 4e-10.
    """
    m, n, one = _mantissa(x), _exponent(x), splat(np.float32(1.0))
    z = vec_div(vec_sub(m, one), vec_add(m, one))
    square, sums = vec_mul(z, z), splat(_LOG_COEFFICIENTS[0])
    for term in _LOG_COEFFICIENTS[1:]:
        sums = fma(sums, square, splat(term))
    return fma(n, splat(-_LN2_HIGH), fma(n, splat(-_LN2_LOW), vec_mul(sums, z)))


def vec_log(x):
    """The natural logarithm of sixteen numbers above 0."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(vec_log)
def _overload_log(x):
    if x == SIMD_FLOAT32:
        return lambda x: _log_float32(x)
    return lambda x: _log_elementwise(x)

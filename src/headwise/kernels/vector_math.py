"""exp and log of 16-wide vectors, for Numba kernels; float32 by series, float64 by LLVM.

    e^x = 2^n e^r,                with x = n ln 2 + r and |r| <= ln 2 / 2
    log x = n ln 2 + 2 artanh z,  with x = m 2^n, sqrt(1/2) <= m < sqrt(2), z = (m - 1) / (m + 1)

The series of e^r ends at r^7, and the one of artanh z at z^9. In plain PyTorch, on tensors of 16
elements: `x.exp()` and `x.log()`.

Loop order: none; each function computes one vector in registers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit

from .launch import SIMD_WIDTH
from .simd import INT32, SIMD_FLOAT32, fma, intrinsic, llvm_elementwise, select_below


@intrinsic
def exp2_from_shifted(typing: Any, shifted: Any) -> Any:
    """Return 2^n for n + 1.5 x 2^23, which has n in its last bits."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(INT32, SIMD_WIDTH)
        bits = builder.shl(builder.bitcast(args[0], kind), ir.Constant(kind, [23] * SIMD_WIDTH))
        return builder.bitcast(
            builder.add(bits, ir.Constant(kind, [127 << 23] * SIMD_WIDTH)), SIMD_FLOAT32.llvm_type
        )

    return SIMD_FLOAT32(SIMD_FLOAT32), code


def _split_float(mantissa: bool) -> Any:
    """Return an intrinsic that splits positive numbers into m 2^n, sqrt(1/2) <= m < sqrt(2), and
    returns m or n.
    """

    @intrinsic
    def split_float(typing: Any, a: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.VectorType(INT32, SIMD_WIDTH)
            bits = builder.bitcast(args[0], kind)
            shift = ir.Constant(kind, [23] * SIMD_WIDTH)
            n = builder.ashr(builder.sub(bits, ir.Constant(kind, [_ROOT_BITS] * SIMD_WIDTH)), shift)
            if mantissa:
                return builder.bitcast(
                    builder.sub(bits, builder.shl(n, shift)), SIMD_FLOAT32.llvm_type
                )
            return builder.sitofp(n, SIMD_FLOAT32.llvm_type)

        return SIMD_FLOAT32(SIMD_FLOAT32), code

    return split_float


_ROOT_BITS = int(np.float32(math.sqrt(0.5)).view(np.int32))
_mantissa = _split_float(mantissa=True)
_exponent = _split_float(mantissa=False)


@intrinsic
def _exp_elementwise(typing: Any, a: Any) -> Any:
    return a(a), llvm_elementwise("exp")


@intrinsic
def _log_elementwise(typing: Any, a: Any) -> Any:
    return a(a), llvm_elementwise("log")


_LOG2E = np.float32(1 / math.log(2))
_SHIFT = np.float32(1.5 * 2**23)
_EXP_UNDERFLOW = np.float32(-87.33)
# ln 2 in two parts; the first has few bits, so that n times it is exact.
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_EXP_COEFFICIENTS = tuple(map(np.float32, [1 / math.factorial(n) for n in range(7, -1, -1)]))


@njit
def _exp_float32(x):
    """Return e^x for x <= 88, to 2 units in the last place; 0 below -87.33, where normal numbers
    end.

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series up to r^7 / 7!; the remainder
    is below 1e-8.
    """
    shifted = fma(x, _LOG2E, _SHIFT)
    n = shifted - _SHIFT
    r = fma(n, _LN2_LOW, fma(n, _LN2_HIGH, x))
    e = fma(r, _EXP_COEFFICIENTS[0], _EXP_COEFFICIENTS[1])
    for term in _EXP_COEFFICIENTS[2:]:
        e = fma(e, r, term)
    return select_below(x, _EXP_UNDERFLOW, 0.0, e * exp2_from_shifted(shifted))


def vec_exp(x):
    """Return e^x of 16 numbers, each at most 88."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(vec_exp)
def _overload_exp(x):
    if x == SIMD_FLOAT32:
        return lambda x: _exp_float32(x)
    return lambda x: _exp_elementwise(x)


_LOG_COEFFICIENTS = tuple(map(np.float32, (2 / 9, 2 / 7, 2 / 5, 2 / 3, 2)))


@njit
def _log_float32(x):
    """Return the natural logarithm of positive numbers, to 2 units in the last place.

    x = m 2^n, and log m = 2 artanh z with z = (m - 1) / (m + 1), |z| < 0.172, by its series up to
    z^9 / 9; the remainder is below 4e-10.
    """
    m = _mantissa(x)
    n = _exponent(x)
    z = (m - np.float32(1.0)) / (m + np.float32(1.0))
    square = z * z
    sums = fma(square, _LOG_COEFFICIENTS[0], _LOG_COEFFICIENTS[1])
    for term in _LOG_COEFFICIENTS[2:]:
        sums = fma(sums, square, term)
    return fma(n, -_LN2_HIGH, fma(n, -_LN2_LOW, sums * z))


def vec_log(x):
    """Return the natural logarithm of 16 positive numbers."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(vec_log)
def _overload_log(x):
    if x == SIMD_FLOAT32:
        return lambda x: _log_float32(x)
    return lambda x: _log_elementwise(x)

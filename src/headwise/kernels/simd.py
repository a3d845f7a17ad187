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
        return _build_splat(builder, args[0], lanes.llvm_type)

    return lanes(value), code


def llvm_elementwise(name: str, count: int) -> Any:
    """LLVM's operation of this name on so many vectors."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type.llvm_type
        letter = "f64" if signature.return_type == SIMD_FLOAT64 else "f32"
        told = ir.FunctionType(kind, [kind] * count)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, told, f"llvm.{name}.v{SIMD_WIDTH}{letter}"), list(args)
        )

    return code


def _llvm_reduction(name: str, start: bool) -> Any:
    """LLVM's operation of this name over the numbers of a vector, in whatever order is fastest."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, vector = llvm_scalar_type(signature.return_type), signature.args[0].llvm_type
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
        return builder.bitcast(builder.add(bits, ir.Constant(kind, [127 << 23] * SIMD_WIDTH)), SIMD_FLOAT32.llvm_type)

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
                return builder.bitcast(builder.sub(bits, builder.shl(n, bit)), SIMD_FLOAT32.llvm_type)
            return builder.sitofp(n, SIMD_FLOAT32.llvm_type)

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


# --- Memory by its address -----------------------------------------------------------------------------

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
        told = lanes.llvm_type if many else llvm_scalar_type(lanes.number)
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
                found = builder.load(
                    _typed_pointer(builder, at, ir.VectorType(STORAGE_LLVM_TYPES[kind], SIMD_WIDTH)),
                    align=STORAGE_ITEMSIZES[kind],
                )
                return _widen(builder, found, kind, lanes.llvm_type)
            found = builder.load(_typed_pointer(builder, args[1], pair), align=STORAGE_ITEMSIZES[kind])
            upper = ir.Constant(pair, [0xFFFF0000] * SIMD_WIDTH)
            told = builder.and_(found, upper) if odd else builder.shl(found, ir.Constant(pair, [16] * SIMD_WIDTH))
            return builder.bitcast(told, lanes.llvm_type)

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


# --- Which of sixteen numbers count, and these side by side --------------------------------------------


@intrinsic
def load_masked(typing: Any, form: Any, address: Any, x: Any, low: Any) -> Any:
    """x where the byte at its place is set, else `low`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), SIMD_WIDTH)
        place = builder.inttoptr(args[1], kind.as_pointer())
        found = builder.load(place, align=1)
        return builder.select(builder.icmp_unsigned("!=", found, ir.Constant(kind, [0] * SIMD_WIDTH)), args[2], args[3])

    return x(form, address, x, low), code


@intrinsic
def is_byte_set(typing: Any, address: Any) -> Any:
    """Whether the byte at an address is set."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        return builder.zext(builder.load(builder.inttoptr(args[0], byte.as_pointer()), align=1), INT64)

    return types.int64(types.int64), code


@intrinsic
def compress_store(typing: Any, x: Any, least: Any, where: Any, to: Any, places: Any) -> Any:
    """Write those of sixteen numbers that are above `least`, or no numbers, side by side; how many they are.

    What lies at `where`, an int32 for each, is written to `places` beside them.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.VectorType(INT32, SIMD_WIDTH)
        counts = builder.fcmp_unordered(">", args[0], args[1])
        letter = "f64" if signature.args[0] == SIMD_FLOAT64 else "f32"
        stood = builder.load(builder.inttoptr(args[2], whole.as_pointer()), align=4)
        for given, kind, address in ((args[0], letter, args[3]), (stood, "i32", args[4])):
            to = builder.inttoptr(address, given.type.element.as_pointer())
            told = ir.FunctionType(ir.VoidType(), [given.type, to.type, counts.type])
            name = f"llvm.masked.compressstore.v{SIMD_WIDTH}{kind}"
            builder.call(cgutils.get_or_insert_function(builder.module, told, name), [given, to, counts])
        return builder.zext(builder.ctpop(builder.bitcast(counts, ir.IntType(SIMD_WIDTH))), INT64)

    return types.int64(x, x, types.int64, types.int64, types.int64), code


@intrinsic
def load_int32(typing: Any, address: Any) -> Any:
    """The int32 at an address, as an int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], INT32.as_pointer()), align=4), INT64)

    return types.int64(types.int64), code

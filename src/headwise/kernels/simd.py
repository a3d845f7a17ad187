"""16-wide vectors for Numba kernels: arithmetic, exp and log, and loads and stores by address.

LLVM vectorises a loop over scalars only if it can prove that memory does not overlap and that sums
may be reordered. With explicit vectors nothing has to be proved, `fastmath` is not needed, and
infinities and NaN keep their semantics. On machines with wider or narrower registers LLVM combines
or splits the vectors.

Most functions are one LLVM instruction. Their equivalents on PyTorch tensors of 16 elements:
`fma(a, b, c)` is `torch.addcmul(c, a, b)`, `vec_max` is `torch.fmax`, `reduce_sum` is `x.sum()`,
`select_below` is `torch.where(a < bound, low, high)`. There are no loops. A kernel's first argument
`dtype` is a `StorageType`: the dtype of its tensors in memory. Numbers are computed in float64 if
they are stored in float64, else in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.core.datamodel import models

from .launch import SIMD_WIDTH, round_up_to_simd
from .memory_guard import DEBUG_KERNELS
from .memory_pointer import INT64, llvm_itemsize, memory_pointer, prefetch_pointer

INT32 = ir.IntType(32)
LANE_MASK = ir.VectorType(INT32, SIMD_WIDTH)
intrinsic: Any = (
    extending.intrinsic
)  # typed Any: intrinsics are called without their first parameter


extending.register_jitable(round_up_to_simd)


class SimdVector(types.Type):
    """Numba type of a vector of 16 numbers of one type."""

    def __init__(self, scalar_type: types.Float) -> None:
        super().__init__(name=f"{SIMD_WIDTH} x {scalar_type}")
        self.scalar_type = scalar_type

    @property
    def llvm_type(self) -> ir.VectorType:
        """The corresponding LLVM vector type."""
        return ir.VectorType(llvm_scalar_type(self.scalar_type), SIMD_WIDTH)


@extending.register_model(SimdVector)
class SimdVectorModel(models.PrimitiveModel):
    """Numba data model of `SimdVector`: an LLVM vector value."""

    def __init__(self, manager: Any, kind: SimdVector) -> None:
        super().__init__(manager, kind, kind.llvm_type)


SIMD_FLOAT32 = SimdVector(types.float32)
SIMD_FLOAT64 = SimdVector(types.float64)


def llvm_scalar_type(scalar_type: types.Type) -> ir.Type:
    """Return the LLVM type of a Numba scalar type."""
    return {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}.get(scalar_type, INT64)


def _build_splat(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(
        one, ir.Constant(kind, ir.Undefined), ir.Constant(LANE_MASK, [0] * SIMD_WIDTH)
    )


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """Broadcast one number to a vector."""
    vector_type = SIMD_FLOAT64 if value == types.float64 else SIMD_FLOAT32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _build_splat(builder, args[0], vector_type.llvm_type)

    return vector_type(value), code


def llvm_elementwise(name: str, count: int) -> Any:
    """Return the code generator of the LLVM intrinsic `name` on `count` vectors."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type.llvm_type
        suffix = "f64" if signature.return_type == SIMD_FLOAT64 else "f32"
        function_type = ir.FunctionType(kind, [kind] * count)
        return builder.call(
            cgutils.get_or_insert_function(
                builder.module, function_type, f"llvm.{name}.v{SIMD_WIDTH}{suffix}"
            ),
            list(args),
        )

    return code


def _llvm_reduction(name: str, start: bool) -> Any:
    """Return the code generator of LLVM's reduction `name` of a vector, in the fastest order."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = llvm_scalar_type(signature.return_type)
        vector = signature.args[0].llvm_type
        suffix = "f64" if signature.return_type == types.float64 else "f32"
        function_type = ir.FunctionType(number, [number, vector] if start else [vector])
        call = cgutils.get_or_insert_function(
            builder.module, function_type, f"llvm.vector.reduce.{name}.v{SIMD_WIDTH}{suffix}"
        )
        operands = [ir.Constant(number, -0.0), args[0]] if start else [args[0]]
        return builder.call(call, operands, fastmath=["reassoc"] if start else [])

    return code


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c."""
    return a(a, b, c), llvm_elementwise("fma", 3)


@intrinsic
def vec_max(typing: Any, a: Any, b: Any) -> Any:
    """Return the elementwise maximum; where one number is NaN, the other one."""
    return a(a, b), llvm_elementwise("maxnum", 2)


@intrinsic
def reduce_sum(typing: Any, a: Any) -> Any:
    """Return the sum of all 16 elements."""
    return a.scalar_type(a), _llvm_reduction("fadd", start=True)


def _add_shuffled(builder: Any, a: Any, b: Any, low: list[int], high: list[int]) -> Any:
    """Return the sum of two shuffles of vectors a and b."""
    first, second = (
        builder.shuffle_vector(a, b, ir.Constant(LANE_MASK, mask)) for mask in (low, high)
    )
    return builder.fadd(first, second)


_QUARTERS = [4 * n for n in range(4)]
_HALVES = [[*range(n, n + 8), *range(n + 16, n + 24)] for n in (0, 8)]
_EIGHTHS = [
    [m for n in (start, start + 8, start + 16, start + 24) for m in range(n, n + 4)]
    for start in (0, 4)
]
_PAIRS = [
    [m for n in _QUARTERS for m in (n + at, n + at + 1, n + at + 16, n + at + 17)] for at in (0, 2)
]
_SINGLES = [
    [m for n in _QUARTERS for m in (n + at, n + at + 2, n + at + 16, n + at + 18)] for at in (0, 1)
]


@intrinsic
def reduce_sum_16(typing: Any, a: Any) -> Any:
    """Return the sums of four tuples of four vectors as one vector; adds halves to halves within
    registers.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [
            cgutils.unpack_tuple(builder, row) for row in cgutils.unpack_tuple(builder, args[0])
        ]
        singles = []
        for column in zip(*rows, strict=True):
            halves = [_add_shuffled(builder, *column[n : n + 2], *_HALVES) for n in (0, 2)]
            singles.append(_add_shuffled(builder, *halves, *_EIGHTHS))
        pairs = [_add_shuffled(builder, *singles[n : n + 2], *_PAIRS) for n in (0, 2)]
        return _add_shuffled(builder, *pairs, *_SINGLES)

    return a.dtype.dtype(a), code


@intrinsic
def reduce_max(typing: Any, a: Any) -> Any:
    """Return the maximum of all 16 elements, ignoring NaN."""
    return a.scalar_type(a), _llvm_reduction("fmax", start=False)


@intrinsic
def vec_add(typing: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def vec_sub(typing: Any, a: Any, b: Any) -> Any:
    """Return a - b."""
    return a(a, b), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def vec_mul(typing: Any, a: Any, b: Any) -> Any:
    """Return a * b."""
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def vec_div(typing: Any, a: Any, b: Any) -> Any:
    """Return a / b."""
    return a(a, b), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def select_below(typing: Any, a: Any, bound: Any, low: Any, high: Any) -> Any:
    """Return `low` where a < bound, else `high`, also where a is NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return a(a, a, a, a), code


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
    return a(a), llvm_elementwise("exp", 1)


@intrinsic
def _log_elementwise(typing: Any, a: Any) -> Any:
    return a(a), llvm_elementwise("log", 1)


_LOG2E = np.float32(1 / math.log(2))
_SHIFT = np.float32(1.5 * 2**23)
_EXP_UNDERFLOW = np.float32(-87.33)
# ln 2 in two parts; the first has few bits, so that n times it is exact.
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_EXP_COEFFICIENTS = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))


@njit
def _exp_float32(x):
    """Return e^x for x <= 88, to 2 units in the last place; 0 below -87.33, where normal numbers
    end.

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series up to r^7 / 7!, whose
    remainder is below 1e-8.
    """
    shifted = fma(x, splat(_LOG2E), splat(_SHIFT))
    n = vec_sub(shifted, splat(_SHIFT))
    r = fma(n, splat(_LN2_LOW), fma(n, splat(_LN2_HIGH), x))
    e = splat(_EXP_COEFFICIENTS[0])
    for term in _EXP_COEFFICIENTS[1:]:
        e = fma(e, r, splat(term))
    return select_below(
        x, splat(_EXP_UNDERFLOW), splat(np.float32(0.0)), vec_mul(e, exp2_from_shifted(shifted))
    )


def vec_exp(x):
    """Return e^x of 16 numbers, each at most 88."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(vec_exp)
def _overload_exp(x):
    if x == SIMD_FLOAT32:
        return lambda x: _exp_float32(x)
    return lambda x: _exp_elementwise(x)


_LOG_COEFFICIENTS = tuple(np.float32(2 / n) for n in (9, 7, 5, 3, 1))


@njit
def _log_float32(x):
    """Return the natural logarithm of positive numbers, to 2 units in the last place.

    x = m 2^n, and log m = 2 artanh z with z = (m - 1) / (m + 1), |z| < 0.172, by its series up to
    z^9 / 9, whose remainder is below 4e-10.
    """
    m = _mantissa(x)
    n = _exponent(x)
    one = splat(np.float32(1.0))
    z = vec_div(vec_sub(m, one), vec_add(m, one))
    square = vec_mul(z, z)
    sums = splat(_LOG_COEFFICIENTS[0])
    for term in _LOG_COEFFICIENTS[1:]:
        sums = fma(sums, square, splat(term))
    return fma(n, splat(-_LN2_HIGH), fma(n, splat(-_LN2_LOW), vec_mul(sums, z)))


def vec_log(x):
    """Return the natural logarithm of 16 positive numbers."""
    raise NotImplementedError("only compiled code calls it")


@extending.overload(vec_log)
def _overload_log(x):
    if x == SIMD_FLOAT32:
        return lambda x: _log_float32(x)
    return lambda x: _log_elementwise(x)


# --- Loads and stores -----------------------------------------------------------------------------

INT8 = ir.IntType(8)
STORAGE_LLVM_TYPES = {
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
    "bfloat16": ir.IntType(16),
    "int8": INT8,
}
STORAGE_ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "int8": 1}


def _widen(builder: ir.IRBuilder, raw: Any, kind: str, target: ir.Type) -> Any:
    """Convert a number, or a vector, from its dtype in memory to the dtype for
    computing, `target`.
    """
    if kind in ("float32", "float64"):
        return raw
    if kind == "int8":
        return builder.sitofp(raw, target)
    is_vector = isinstance(target, ir.VectorType)
    wide, shift = (
        (ir.VectorType(INT32, SIMD_WIDTH), [16] * SIMD_WIDTH) if is_vector else (INT32, 16)
    )
    # bfloat16 is the upper half of float32
    return builder.bitcast(builder.shl(builder.zext(raw, wide), ir.Constant(wide, shift)), target)


class StorageType(types.Type):
    """Numba type for the dtype in which a kernel's tensors are stored; kernels are compiled once
    per storage type.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(name=f"storage dtype {kind}")
        self.kind = kind
        self.vector_type = SIMD_FLOAT64 if kind == "float64" else SIMD_FLOAT32


@extending.register_model(StorageType)
class StorageTypeModel(models.OpaqueModel):
    """Numba data model of `StorageType`, which has no value at run time."""


@extending.intrinsic(prefer_literal=True)
def _storage_type(typing: Any, kind: Any) -> Any:
    return StorageType(kind.literal_value)(
        kind
    ), lambda context, builder, signature, args: context.get_dummy_value()


storage_type: Any = _storage_type  # typed Any: it is called without its first parameter


@intrinsic
def storage_itemsize(typing: Any, dtype: Any) -> Any:
    """Return the bytes per element in memory."""
    return types.int64(dtype), lambda context, builder, signature, args: INT64(
        STORAGE_ITEMSIZES[dtype.kind]
    )


@intrinsic
def compute_itemsize(typing: Any, dtype: Any) -> Any:
    """Return the bytes per element in computations."""
    return types.int64(dtype), lambda context, builder, signature, args: INT64(
        8 if dtype.vector_type == SIMD_FLOAT64 else 4
    )


@intrinsic
def as_compute_scalar(typing: Any, dtype: Any, value: Any) -> Any:
    """Convert a number to the dtype for computing."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], value, dtype.vector_type.scalar_type)

    return dtype.vector_type.scalar_type(dtype, value), code


def _make_load(is_vector: bool, is_stored: bool) -> Any:
    """Return an intrinsic that loads 16 elements or one, in the storage dtype (`is_stored`) or that
    for computing.
    """

    @intrinsic
    def load(typing: Any, dtype: Any, address: Any) -> Any:
        vector_type = dtype.vector_type
        kind = dtype.kind if is_stored else "float64" if vector_type == SIMD_FLOAT64 else "float32"
        target = vector_type.llvm_type if is_vector else llvm_scalar_type(vector_type.scalar_type)
        raw = (
            ir.VectorType(STORAGE_LLVM_TYPES[kind], SIMD_WIDTH)
            if is_vector
            else STORAGE_LLVM_TYPES[kind]
        )

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(
                memory_pointer(builder, args[1], raw), align=STORAGE_ITEMSIZES[kind]
            )
            return _widen(builder, value, kind, target)

        return (vector_type if is_vector else vector_type.scalar_type)(dtype, types.int64), code

    return load


load_storage = _make_load(True, True)
load_storage_scalar = _make_load(False, True)
load_vector = _make_load(True, False)
load_scalar = _make_load(False, False)


def _make_bf16_load(odd: int) -> Any:
    """Return an intrinsic that loads 16 of 32 adjacent elements.

    For bfloat16 these are the even or the odd elements, as the lower and upper halves of 32-bit
    words: this needs no shuffle. For other dtypes they are the first or the last 16.
    """

    @intrinsic
    def load_half(typing: Any, dtype: Any, address: Any) -> Any:
        vector_type = dtype.vector_type
        kind = dtype.kind
        words = ir.VectorType(INT32, SIMD_WIDTH)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if kind != "bfloat16":
                begin = builder.add(args[1], INT64(odd * SIMD_WIDTH * STORAGE_ITEMSIZES[kind]))
                value = builder.load(
                    memory_pointer(
                        builder, begin, ir.VectorType(STORAGE_LLVM_TYPES[kind], SIMD_WIDTH)
                    ),
                    align=STORAGE_ITEMSIZES[kind],
                )
                return _widen(builder, value, kind, vector_type.llvm_type)
            value = builder.load(
                memory_pointer(builder, args[1], words), align=STORAGE_ITEMSIZES[kind]
            )
            upper = ir.Constant(words, [0xFFFF0000] * SIMD_WIDTH)
            bits = (
                builder.and_(value, upper)
                if odd
                else builder.shl(value, ir.Constant(words, [16] * SIMD_WIDTH))
            )
            return builder.bitcast(bits, vector_type.llvm_type)

        return vector_type(dtype, types.int64), code

    return load_half


load_bf16_even = _make_bf16_load(0)
load_bf16_odd = _make_bf16_load(1)


@intrinsic
def load_int64(typing: Any, address: Any) -> Any:
    """Load an int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(memory_pointer(builder, args[0], INT64))

    return types.int64(types.int64), code


@intrinsic
def store_value(typing: Any, address: Any, value: Any) -> Any:
    """Store one number or a vector, in the dtype for computing."""
    kind = value.llvm_type if isinstance(value, SimdVector) else llvm_scalar_type(value)
    align = 4 if value in (SIMD_FLOAT32, types.float32) else 8

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], memory_pointer(builder, args[0], kind, "writes"), align=align)
        return context.get_dummy_value()

    return types.void(types.int64, value), code


@extending.intrinsic(prefer_literal=True)
def _store_quarter(typing: Any, address: Any, value: Any, quarter: Any) -> Any:
    """Store four elements of a vector: those of quarter `quarter`."""
    count = SIMD_WIDTH // 4
    first = count * quarter.literal_value
    kind = ir.VectorType(llvm_scalar_type(value.scalar_type), count)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        indices = ir.Constant(ir.VectorType(INT32, count), list(range(first, first + count)))
        elements = builder.shuffle_vector(args[1], args[1], indices)
        builder.store(elements, memory_pointer(builder, args[0], kind, "writes"), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, value, quarter), code


store_quarter: Any = _store_quarter


def _round_to_bfloat16(builder: Any, value: Any, is_vector: bool) -> Any:
    """Round float32 to bfloat16 bits, to nearest, ties to even; NaN stays NaN."""

    def constant(kind: ir.Type, bits: int) -> ir.Constant:
        return (
            ir.Constant(ir.VectorType(kind, SIMD_WIDTH), [bits] * SIMD_WIDTH)
            if is_vector
            else kind(bits)
        )

    bits = builder.bitcast(value, ir.VectorType(INT32, SIMD_WIDTH) if is_vector else INT32)
    rounding = builder.add(
        builder.and_(builder.lshr(bits, constant(INT32, 16)), constant(INT32, 1)),
        constant(INT32, 0x7FFF),
    )
    rounded = builder.lshr(builder.add(bits, rounding), constant(INT32, 16))
    rounded = builder.select(
        builder.fcmp_unordered("uno", value, value), constant(INT32, 0x7FC0), rounded
    )
    raw = STORAGE_LLVM_TYPES["bfloat16"]
    return builder.trunc(rounded, ir.VectorType(raw, SIMD_WIDTH) if is_vector else raw)


@intrinsic
def store_storage(typing: Any, dtype: Any, address: Any, value: Any) -> Any:
    """Store one number or a vector in the storage dtype."""
    is_vector = isinstance(value, SimdVector)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw_value = (
            _round_to_bfloat16(builder, args[2], is_vector) if dtype.kind == "bfloat16" else args[2]
        )
        raw = (
            ir.VectorType(STORAGE_LLVM_TYPES[dtype.kind], SIMD_WIDTH)
            if is_vector
            else STORAGE_LLVM_TYPES[dtype.kind]
        )
        builder.store(
            raw_value,
            memory_pointer(builder, args[1], raw, "writes"),
            align=STORAGE_ITEMSIZES[dtype.kind],
        )
        return context.get_dummy_value()

    return types.void(
        dtype, types.int64, value if is_vector else dtype.vector_type.scalar_type
    ), code


@intrinsic
def fetch_and_increment(typing: Any, address: Any) -> Any:
    """Add one to an int64 atomically and return its old value; no two threads
    get the same value.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw(
            "add", memory_pointer(builder, args[0], INT64, "updates"), INT64(1), "acq_rel"
        )

    return types.int64(types.int64), code


def _make_prefetch(level: int) -> Any:
    """Return an intrinsic that prefetches one address; level 3 goes nearest to the processor.

    Level 0 (non-temporal) fills the first-level cache only: data that is read once then does not
    evict from the second-level cache what torch and Python need between kernels.
    """

    @intrinsic
    def prefetch(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte = prefetch_pointer(builder, args[0])
            function_type = ir.FunctionType(ir.VoidType(), [byte.type, INT32, INT32, INT32])
            function = cgutils.get_or_insert_function(
                builder.module, function_type, "llvm.prefetch.p0"
            )
            builder.call(function, [byte, INT32(0), INT32(level), INT32(1)])
            return context.get_dummy_value()

        return types.void(types.int64), code

    return prefetch


prefetch_l2 = _make_prefetch(2)
prefetch_l1 = _make_prefetch(3)
prefetch_nontemporal = _make_prefetch(0)


# --- Masks and stream compaction ------------------------------------------------------------------


@intrinsic
def load_masked(typing: Any, dtype: Any, address: Any, x: Any, low: Any) -> Any:
    """Return x where the mask byte at `address` is set, else `low`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), SIMD_WIDTH)
        mask = builder.load(memory_pointer(builder, args[1], kind), align=1)
        return builder.select(
            builder.icmp_unsigned("!=", mask, ir.Constant(kind, [0] * SIMD_WIDTH)), args[2], args[3]
        )

    return x(dtype, address, x, low), code


@intrinsic
def is_byte_set(typing: Any, address: Any) -> Any:
    """Return 1 if the byte at an address is set, else 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(memory_pointer(builder, args[0], INT8), align=1), INT64)

    return types.int64(types.int64), code


@intrinsic
def compress_store(
    typing: Any, x: Any, bound: Any, source_indices: Any, target: Any, target_indices: Any
) -> Any:
    """Store the elements of x that are above `bound`, or NaN, adjacently; return how many they are.

    Of the 16 int32 at `source_indices`, those of these elements are stored adjacently to
    `target_indices`.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index_vector = ir.VectorType(INT32, SIMD_WIDTH)
        selected = builder.fcmp_unordered(">", args[0], args[1])
        suffix = "f64" if signature.args[0] == SIMD_FLOAT64 else "f32"
        num_stored = builder.zext(
            builder.ctpop(builder.bitcast(selected, ir.IntType(SIMD_WIDTH))), INT64
        )
        indices = builder.load(memory_pointer(builder, args[2], index_vector), align=4)
        for vector, kind, address in ((args[0], suffix, args[3]), (indices, "i32", args[4])):
            element = vector.type.element
            size = builder.mul(num_stored, INT64(llvm_itemsize(element))) if DEBUG_KERNELS else None
            target = memory_pointer(builder, address, element, "writes", size)
            store_type = ir.FunctionType(ir.VoidType(), [vector.type, target.type, selected.type])
            name = f"llvm.masked.compressstore.v{SIMD_WIDTH}{kind}"
            store = cgutils.get_or_insert_function(builder.module, store_type, name)
            builder.call(store, [vector, target, selected])
        return num_stored

    return types.int64(x, x, types.int64, types.int64, types.int64), code


@intrinsic
def load_int32(typing: Any, address: Any) -> Any:
    """Load an int32 as an int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(memory_pointer(builder, args[0], INT32), align=4), INT64)

    return types.int64(types.int64), code

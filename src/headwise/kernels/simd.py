"""16-wide vectors for Numba kernels: arithmetic, and loads and stores by address.

LLVM vectorises a loop over scalars only if it can prove that memory does not overlap and that sums
may be reordered. With explicit vectors nothing has to be proved, `fastmath` is not needed, and
infinities and NaN keep their semantics. On machines with wider or narrower registers LLVM combines
or splits the vectors.

Kernels read and write memory through a `Pointer`, as C does: `p + n` is n numbers further, `p[n]` a
number, `vec(p, n)` the 16 numbers from there on, and `p[n] = x` writes a number or a vector.
Vectors have the operators + - * /; where a function takes vectors, a number stands for 16 equal
ones.

Most functions are one LLVM instruction. Their equivalents on PyTorch tensors of 16 elements:
`fma(a, b, c)` is `torch.addcmul(c, a, b)`, `vec_max` is `torch.fmax`, `reduce_sum` is `x.sum()`,
`select_below` is `torch.where(a < bound, low, high)`. None contains a loop. A kernel's first
argument `dtype` is a `StorageType`: the dtype of its tensors in memory. Numbers are computed in
float64 if they are stored in float64, else in float32.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, builtin_registry, signature as typed

from .launch import SIMD_WIDTH, round_up_to_simd

INT8, INT32, INT64 = (ir.IntType(bits) for bits in (8, 32, 64))
LANE_MASK = ir.VectorType(INT32, SIMD_WIDTH)
# typed Any: intrinsics are called without their first parameter
intrinsic: Any = extending.intrinsic


extending.register_jitable(round_up_to_simd)


def memory_pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> Any:
    """Return a pointer to a value of type `kind` at an address."""
    return builder.inttoptr(address, kind.as_pointer())


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


types_of: Any = builtin_registry.register_global  # numba annotates no result of it
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


def as_vector(builder: ir.IRBuilder, value: Any, kind: SimdVector) -> Any:
    """Return the value itself if it is a vector, or the number 16 times."""
    is_vector = isinstance(value.type, ir.VectorType)
    return value if is_vector else _build_splat(builder, value, kind.llvm_type)


def _elementwise_signature(args: Any) -> Any:
    """The vector type of an operation, with its operands: vectors, or numbers of the same type."""
    vectors = [kind for kind in args if isinstance(kind, SimdVector)]
    if not vectors:
        return None
    kind = vectors[0]
    return kind(*(a if isinstance(a, SimdVector) else kind.scalar_type for a in args))


def llvm_elementwise(name: str) -> Any:
    """Return the code generator of the LLVM intrinsic `name` on vectors."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        vectors = [as_vector(builder, value, kind) for value in args]
        suffix = "f64" if kind == SIMD_FLOAT64 else "f32"
        function_type = ir.FunctionType(kind.llvm_type, [kind.llvm_type] * len(vectors))
        name_of_type = f"llvm.{name}.v{SIMD_WIDTH}{suffix}"
        function = cgutils.get_or_insert_function(builder.module, function_type, name_of_type)
        return builder.call(function, vectors)

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
    return _elementwise_signature((a, b, c)), llvm_elementwise("fma")


@intrinsic
def vec_max(typing: Any, a: Any, b: Any) -> Any:
    """Return the elementwise maximum; where one number is NaN, the other one."""
    return _elementwise_signature((a, b)), llvm_elementwise("maxnum")


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


# Elements of two vectors that each shuffle takes: every start plus every offset, start by start.
_HALVES = [np.add.outer((0, 16), range(n, n + 8)).ravel().tolist() for n in (0, 8)]
_EIGHTHS = [np.add.outer((0, 8, 16, 24), range(n, n + 4)).ravel().tolist() for n in (0, 4)]
_PAIRS = [np.add.outer((0, 4, 8, 12), (n, n + 1, n + 16, n + 17)).ravel().tolist() for n in (0, 2)]
_SINGLES = [
    np.add.outer((0, 4, 8, 12), (n, n + 2, n + 16, n + 18)).ravel().tolist() for n in (0, 1)
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


_OPERATIONS = {
    operator.add: ir.IRBuilder.fadd,
    operator.sub: ir.IRBuilder.fsub,
    operator.mul: ir.IRBuilder.fmul,
    operator.truediv: ir.IRBuilder.fdiv,
}


def _register_operator(function: Any) -> None:
    """Let an operator take vectors, or a vector and a number."""

    @types_of(function)
    class VectorOperator(AbstractTemplate):
        """Types of the operator."""

        def generic(self, args: Any, kws: Any) -> Any:
            """Return the signature for these operands, if any."""
            return _elementwise_signature(args)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = (as_vector(builder, value, signature.return_type) for value in args)
        return _OPERATIONS[function](builder, *vectors)

    for kinds in ((SimdVector, SimdVector), (SimdVector, types.Float), (types.Float, SimdVector)):
        lower_builtin(function, *kinds)(code)


for _operator in _OPERATIONS:
    _register_operator(_operator)


@intrinsic
def select_below(typing: Any, a: Any, bound: Any, low: Any, high: Any) -> Any:
    """Return `low` where a < bound, else `high`, also where a is NaN."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c, d = (as_vector(builder, value, signature.return_type) for value in args)
        return builder.select(builder.fcmp_ordered("<", a, b), c, d)

    return _elementwise_signature((a, bound, low, high)), code


# --- Pointers -------------------------------------------------------------------------------------

# LLVM type of a number in memory, its bytes, and the type of its value.
MEMORY_TYPES = {
    "float32": (ir.FloatType(), 4, types.float32),
    "float64": (ir.DoubleType(), 8, types.float64),
    "bfloat16": (ir.IntType(16), 2, types.float32),
    "int8": (INT8, 1, types.float32),
    "int32": (INT32, 4, types.int64),
    "int64": (INT64, 8, types.int64),
}


class Pointer(types.Type):
    """Numba type of the address of numbers of one type in memory."""

    def __init__(self, kind: str) -> None:
        super().__init__(name=f"pointer to {kind}")
        self.kind = kind
        self.memory_type, self.itemsize, self.scalar_type = MEMORY_TYPES[kind]
        self.vector_type = SIMD_FLOAT64 if kind == "float64" else SIMD_FLOAT32


@extending.register_model(Pointer)
class PointerModel(models.PrimitiveModel):
    """Numba data model of `Pointer`: an address."""

    def __init__(self, manager: Any, pointer: Pointer) -> None:
        super().__init__(manager, pointer, INT64)


POINTERS = {kind: Pointer(kind) for kind in MEMORY_TYPES}


class StorageType(types.Type):
    """Numba type for the storage dtype of a kernel's tensors; one compiled kernel per type."""

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


def _make_pointer_intrinsic(pointer_of: Any) -> Any:
    """Return an intrinsic that takes an address for a pointer of a kind given by its first
    argument.
    """

    @intrinsic
    def make(typing: Any, like: Any, address: Any) -> Any:
        return pointer_of(like)(like, types.int64), lambda context, builder, signature, args: args[
            1
        ]

    return make


# A pointer to numbers in the dtype for computing, or in the storage dtype; the first argument is
# a `StorageType` or another pointer.
floats = _make_pointer_intrinsic(
    lambda like: POINTERS["float64" if like.vector_type == SIMD_FLOAT64 else "float32"]
)
stored = _make_pointer_intrinsic(lambda like: POINTERS[like.kind])


@intrinsic
def ints(typing: Any, address: Any) -> Any:
    """Return a pointer to int64."""
    return POINTERS["int64"](types.int64), lambda context, builder, signature, args: args[0]


@intrinsic
def short_ints(typing: Any, address: Any) -> Any:
    """Return a pointer to int32."""
    return POINTERS["int32"](types.int64), lambda context, builder, signature, args: args[0]


@intrinsic
def address_of(typing: Any, pointer: Any) -> Any:
    """Return the address that a pointer holds."""
    return types.int64(pointer), lambda context, builder, signature, args: args[0]


@intrinsic
def itemsize(typing: Any, pointer: Any) -> Any:
    """Return the bytes of a number in memory."""
    return types.int64(pointer), lambda context, builder, signature, args: INT64(pointer.itemsize)


def _advance(builder: Any, pointer: Pointer, address: Any, index: Any) -> Any:
    return builder.add(address, builder.mul(index, INT64(pointer.itemsize)))


def _widen(builder: ir.IRBuilder, raw: Any, kind: str, target: ir.Type) -> Any:
    """Convert a loaded number or vector to the LLVM type of its value."""
    if kind in ("float32", "float64", "int64"):
        return raw
    if kind == "int32":
        return builder.sext(raw, target)
    if kind == "int8":
        return builder.sitofp(raw, target)
    is_vector = isinstance(target, ir.VectorType)
    wide = ir.VectorType(INT32, SIMD_WIDTH) if is_vector else INT32
    shift = ir.Constant(wide, [16] * SIMD_WIDTH if is_vector else 16)
    # bfloat16 is the upper half of float32
    return builder.bitcast(builder.shl(builder.zext(raw, wide), shift), target)


def _load(builder: Any, pointer: Pointer, address: Any, is_vector: bool) -> Any:
    raw = pointer.memory_type
    target = llvm_scalar_type(pointer.scalar_type)
    if is_vector:
        raw = ir.VectorType(raw, SIMD_WIDTH)
        target = pointer.vector_type.llvm_type
    value = builder.load(memory_pointer(builder, address, raw), align=pointer.itemsize)
    return _widen(builder, value, pointer.kind, target)


@intrinsic
def vec(typing: Any, pointer: Any, index: Any) -> Any:
    """Return the 16 numbers from index on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, pointer, _advance(builder, pointer, *args), is_vector=True)

    return pointer.vector_type(pointer, types.int64), code


@types_of(operator.add)
class PointerAdd(AbstractTemplate):
    """Types of `pointer + n`."""

    def generic(self, args: Any, kws: Any) -> Any:
        """Return the signature for these operands, if any."""
        if isinstance(args[0], Pointer) and isinstance(args[1], types.Integer):
            return typed(args[0], args[0], types.int64)
        return None


@types_of(operator.getitem)
class PointerGetItem(AbstractTemplate):
    """Types of `pointer[n]`."""

    def generic(self, args: Any, kws: Any) -> Any:
        """Return the signature for these operands, if any."""
        if isinstance(args[0], Pointer) and isinstance(args[1], types.Integer):
            return typed(args[0].scalar_type, args[0], types.int64)
        return None


@types_of(operator.setitem)
class PointerSetItem(AbstractTemplate):
    """Types of `pointer[n] = number or vector`."""

    def generic(self, args: Any, kws: Any) -> Any:
        """Return the signature for these operands, if any."""
        if not isinstance(args[0], Pointer):
            return None
        value = args[2] if isinstance(args[2], SimdVector) else args[0].scalar_type
        return typed(types.none, args[0], types.int64, value)


@lower_builtin(operator.add, Pointer, types.Integer)
def _pointer_add(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return _advance(builder, signature.args[0], *args)


@lower_builtin(operator.getitem, Pointer, types.Integer)
def _pointer_getitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    pointer = signature.args[0]
    return _load(builder, pointer, _advance(builder, pointer, *args), is_vector=False)


@lower_builtin(operator.setitem, Pointer, types.Integer, types.Any)
def _pointer_setitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    pointer = signature.args[0]
    is_vector = isinstance(signature.args[2], SimdVector)
    raw = ir.VectorType(pointer.memory_type, SIMD_WIDTH) if is_vector else pointer.memory_type
    is_rounded = pointer.kind == "bfloat16"
    value = _round_to_bfloat16(builder, args[2], is_vector) if is_rounded else args[2]
    address = _advance(builder, pointer, *args[:2])
    builder.store(value, memory_pointer(builder, address, raw), align=pointer.itemsize)


@intrinsic
def number(typing: Any, like: Any, value: Any) -> Any:
    """Convert a number to the dtype for computing."""
    scalar_type = like.vector_type.scalar_type

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], value, scalar_type)

    return scalar_type(like, value), code


@intrinsic
def splat(typing: Any, like: Any, value: Any) -> Any:
    """Return a vector with 16 copies of a number, in the dtype for computing."""
    kind = like.vector_type

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _build_splat(builder, args[1], kind.llvm_type)

    return kind(like, kind.scalar_type), code


def _make_bf16_load(odd: int) -> Any:
    """Return an intrinsic that loads one half of the 32 numbers of a step.

    Of bfloat16 these are the even (0) or odd (1) ones: one instruction widens 16 of 32 numbers if
    they are not adjacent. Of other dtypes these are the first or last 16.
    """

    @intrinsic
    def load_half(typing: Any, pointer: Any) -> Any:
        words = ir.VectorType(INT32, SIMD_WIDTH)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if pointer.kind != "bfloat16":
                begin = _advance(builder, pointer, args[0], INT64(odd * SIMD_WIDTH))
                return _load(builder, pointer, begin, is_vector=True)
            value = builder.load(memory_pointer(builder, args[0], words), align=2)
            if odd:
                bits = builder.and_(value, ir.Constant(words, [0xFFFF0000] * SIMD_WIDTH))
            else:
                bits = builder.shl(value, ir.Constant(words, [16] * SIMD_WIDTH))
            return builder.bitcast(bits, pointer.vector_type.llvm_type)

        return pointer.vector_type(pointer), code

    return load_half


load_bf16_even = _make_bf16_load(0)
load_bf16_odd = _make_bf16_load(1)


@extending.intrinsic(prefer_literal=True)
def _store_quarter(typing: Any, pointer: Any, value: Any, quarter: Any) -> Any:
    """Store quarter `quarter` of a vector: four elements."""
    count = SIMD_WIDTH // 4
    first = count * quarter.literal_value
    kind = ir.VectorType(llvm_scalar_type(value.scalar_type), count)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        indices = ir.Constant(ir.VectorType(INT32, count), list(range(first, first + count)))
        elements = builder.shuffle_vector(args[1], args[1], indices)
        builder.store(elements, memory_pointer(builder, args[0], kind), align=4)
        return context.get_dummy_value()

    return types.void(pointer, value, quarter), code


store_quarter: Any = _store_quarter


def _round_to_bfloat16(builder: Any, value: Any, is_vector: bool) -> Any:
    """Round float32 to bfloat16 bits, to nearest, ties to even; NaN stays NaN."""

    def constant(kind: ir.Type, bits: int) -> ir.Constant:
        if is_vector:
            return ir.Constant(ir.VectorType(kind, SIMD_WIDTH), [bits] * SIMD_WIDTH)
        return kind(bits)

    bits = builder.bitcast(value, ir.VectorType(INT32, SIMD_WIDTH) if is_vector else INT32)
    rounding = builder.add(
        builder.and_(builder.lshr(bits, constant(INT32, 16)), constant(INT32, 1)),
        constant(INT32, 0x7FFF),
    )
    rounded = builder.lshr(builder.add(bits, rounding), constant(INT32, 16))
    rounded = builder.select(
        builder.fcmp_unordered("uno", value, value), constant(INT32, 0x7FC0), rounded
    )
    raw = MEMORY_TYPES["bfloat16"][0]
    return builder.trunc(rounded, ir.VectorType(raw, SIMD_WIDTH) if is_vector else raw)


@intrinsic
def fetch_and_increment(typing: Any, address: Any) -> Any:
    """Add one to an int64 atomically and return its old value; no two threads
    get the same value.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw(
            "add", memory_pointer(builder, args[0], INT64), INT64(1), "acq_rel"
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
            byte = memory_pointer(builder, args[0], INT8)
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

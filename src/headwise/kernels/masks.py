"""Which of sixteen numbers count, and these side by side."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .lanes import SIMD_FLOAT64, INT32, INT64, SIMD_WIDTH, intrinsic


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

"""Which of sixteen numbers count, told by a byte each; and their roots."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .lanes import LONG, WIDE, called, intrinsic


@intrinsic
def allowed(typing: Any, form: Any, address: Any, x: Any, low: Any) -> Any:
    """x where the byte at its place is set, else `low`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), WIDE)
        place = builder.inttoptr(args[1], kind.as_pointer())
        found = builder.load(place, align=1)
        return builder.select(builder.icmp_unsigned("!=", found, ir.Constant(kind, [0] * WIDE)), args[2], args[3])

    return x(form, address, x, low), code


@intrinsic
def marked(typing: Any, address: Any) -> Any:
    """Whether the byte at an address is set."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        return builder.zext(builder.load(builder.inttoptr(args[0], byte.as_pointer()), align=1), LONG)

    return types.int64(types.int64), code


@intrinsic
def root(typing: Any, a: Any) -> Any:
    """The square root of each."""
    return a(a), called("sqrt", 1)

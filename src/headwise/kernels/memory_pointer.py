"""Pointers of all loads and stores in kernels; the debug build checks the memory behind them (see
`memory_guard`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .memory_guard import (
    ACCESS_WORD,
    ACCESSES,
    ADDRESS_WORD,
    DEBUG_KERNELS,
    FIRST_RANGE_WORD,
    GUARD_MEMORY,
    MAX_ERRORS,
    NUM_ERRORS_WORD,
    NUM_RANGES_WORD,
    SIZE_WORD,
)

INT64 = ir.IntType(64)


def memory_pointer(
    builder: ir.IRBuilder,
    address: ir.Value,
    kind: ir.Type,
    access: str = "reads",
    size: ir.Value | None = None,
) -> Any:
    """Return a pointer to a value of type `kind` at an address; the debug build checks `size` bytes
    there.
    """
    if DEBUG_KERNELS:
        check = _address_check(builder.module)
        size = INT64(llvm_itemsize(kind)) if size is None else size
        address = builder.call(check, [address, size, INT64(ACCESSES.index(access))])
    return builder.inttoptr(address, kind.as_pointer())


def prefetch_pointer(builder: ir.IRBuilder, address: ir.Value) -> Any:
    """Return a pointer to a byte that is only prefetched; it may lie outside of all tensors."""
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def llvm_itemsize(kind: Any) -> int:
    """Return the bytes of a number or vector."""
    if isinstance(kind, ir.VectorType):
        return kind.count * llvm_itemsize(kind.element)
    return {ir.FloatType(): 4, ir.DoubleType(): 8}.get(kind) or kind.width // 8


def _address_check(module: Any) -> Any:
    """Return the LLVM function (address, size, access) -> address: the given one, or that of the
    spare buffer.
    """
    name = "headwise_checked_address"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(INT64, [INT64] * 3), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    address, size, access = function.args
    entry, search, compare, advance, inside, outside, report, trap, redirect = (
        function.append_basic_block(block)
        for block in (
            "entry",
            "search",
            "compare",
            "advance",
            "inside",
            "outside",
            "report",
            "trap",
            "redirect",
        )
    )
    builder = ir.IRBuilder(entry)

    def word(index: Any) -> Any:
        offset = builder.mul(index, INT64(8))
        return builder.inttoptr(
            builder.add(INT64(GUARD_MEMORY.table_address), offset), INT64.as_pointer()
        )

    num_ranges = builder.load(word(INT64(NUM_RANGES_WORD)))
    end = builder.add(address, size)
    builder.branch(search)
    builder.position_at_end(search)
    n = builder.phi(INT64)
    n.add_incoming(INT64(0), entry)
    builder.cbranch(builder.icmp_signed("<", n, num_ranges), compare, outside)
    builder.position_at_end(compare)
    pair = builder.add(builder.mul(n, INT64(2)), INT64(FIRST_RANGE_WORD))
    is_behind_begin = builder.icmp_signed("<=", builder.load(word(pair)), address)
    is_before_end = builder.icmp_signed("<=", end, builder.load(word(builder.add(pair, INT64(1)))))
    builder.cbranch(builder.and_(is_behind_begin, is_before_end), inside, advance)
    builder.position_at_end(advance)
    n.add_incoming(builder.add(n, INT64(1)), advance)
    builder.branch(search)
    builder.position_at_end(inside)
    builder.ret(address)
    builder.position_at_end(outside)
    builder.cbranch(
        builder.icmp_signed("==", size, INT64(0)), inside, report
    )  # a masked store of no element
    builder.position_at_end(report)
    num_errors = builder.atomic_rmw("add", word(INT64(NUM_ERRORS_WORD)), INT64(1), "acq_rel")
    with builder.if_then(builder.icmp_signed("==", num_errors, INT64(0))):
        for index, value in ((ADDRESS_WORD, address), (SIZE_WORD, size), (ACCESS_WORD, access)):
            builder.store(value, word(INT64(index)))
    builder.cbranch(builder.icmp_signed(">", num_errors, INT64(MAX_ERRORS)), trap, redirect)
    builder.position_at_end(trap)
    builder.call(module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
    builder.unreachable()
    builder.position_at_end(redirect)
    builder.ret(INT64(GUARD_MEMORY.spare_address))
    return function

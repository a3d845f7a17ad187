"""Checks of the operands of an operation, before their addresses reach a kernel.

A kernel reads and writes memory by address and checks nothing. So every operation names the axes
and dtypes of its tensors once, and checks each call:

    CHECKS = OperandChecks("scale_rows", x=FLOAT + "R C", factors=FLOAT + "R", rows="int64: N")
    CHECKS.check(x, factors, rows)      # same sizes for same letters, dtypes, memory that is there
    check_indices("scale_rows", "rows", rows, x.shape[0])

The dispatcher of torch resolves tensors with the negative or conjugate bit, and tensors of zeros
without memory; `can_skip_dispatcher` sends such tensors there. The last section lists unsupported
features: double backward, forward-mode derivatives and torch.func transforms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

MAX_ACCEPTED = 1024  # accepted signatures of an operation; then they are cleared
# dtypes of the first operand of most operations; the others have the same
FLOAT = "float32 float64: "


class Operand(NamedTuple):
    """One tensor of an operation: axes, dtypes (empty: same as the first operand) and count.

    `count` is "" for one, "?" for one or none, and "+" for any number of tensors at the end of the
    call.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    count: str

    @staticmethod
    def parse(name: str, form: str) -> Operand:
        """Return the operand that a form such as "int64: 1|B T 2" describes; a form ends in ? or +,
        or in neither.

        An axis is a letter, a number, a choice of two, or * for any size.
        """
        count = form[-1] if form[-1] in "?+" else ""
        dtypes, _, axes = form.removesuffix(count).rpartition(":")
        return Operand(
            name,
            tuple(axes.split()),
            tuple(getattr(torch, dtype) for dtype in dtypes.split()),
            count,
        )

    def matches_shape(self, shape: torch.Size, sizes: dict[str, int]) -> bool:
        """Return whether a shape fits the axes; writes the sizes of new letters."""
        if len(shape) != len(self.axes):
            return False
        for axis, size in zip(self.axes, shape, strict=True):
            choices = axis.split("|")
            if axis.isalpha():
                choices = [str(sizes.setdefault(axis, size))]
            if axis != "*" and str(size) not in [
                str(sizes.get(choice, choice)) for choice in choices
            ]:
                return False
        return True

    def expected(self, dtypes: tuple[torch.dtype, ...], sizes: dict[str, int]) -> str:
        """Return dtypes and shape as text, with the sizes that are known."""
        shape = re.sub(r"\w+", lambda m: str(sizes.get(m[0], m[0])), ", ".join(self.axes))
        return f"{' or '.join(str(dtype) for dtype in dtypes)} [{shape}]"


def refuse_operands(operation: str, fact: str, remedy: str) -> NoReturn:
    """Raise ValueError for operands that do not fit."""
    raise ValueError(f"cannot run headwise::{operation}: {fact}; {remedy}")


class OperandChecks:
    """The operands of one operation; `check` takes them in declaration order.

    >>> checks = OperandChecks("scale_rows", x=FLOAT + "R C", factors="R")
    >>> checks.check(torch.ones(2, 3), torch.ones(2))
    >>> checks.check(torch.ones(2, 3), torch.ones(4))
    Traceback (most recent call last):
    ValueError: cannot run headwise::scale_rows: factors is torch.float32 [4]; give torch.float32
    [2]
    """

    def __init__(self, operation: str, **forms: str) -> None:
        self.operation = operation
        self.operands = [Operand.parse(name, form) for name, form in forms.items()]
        self.accepted: set[tuple[Any, ...]] = set()

    def check(self, *tensors: Tensor | None) -> None:
        """Raise ValueError for the first tensor with a wrong dtype, shape, device or memory size.

        Shapes, dtypes and devices that were accepted before are not compared again: this runs
        before every call of a kernel.
        """
        signature = tuple([t if t is None else (t.shape, t.dtype, t.device) for t in tensors])
        if signature not in self.accepted:
            self._check_signature(tensors)
            if len(self.accepted) >= MAX_ACCEPTED:
                self.accepted.clear()
            self.accepted.add(signature)
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                is_whole = tensor.is_contiguous() and not tensor.storage_offset()
                if not is_whole or tensor.untyped_storage().nbytes() < tensor.nbytes:
                    self.check_memory(
                        self.operands[min(number, len(self.operands) - 1)].name, tensor
                    )

    def _check_signature(self, tensors: Sequence[Tensor | None]) -> None:
        operands = self.operands
        if operands[-1].count == "+":
            operands = operands[:-1] + [operands[-1]] * (len(tensors) - len(operands) + 1)
        if len(tensors) != len(operands):
            refuse_operands(
                self.operation, f"there are {len(tensors)} tensors", f"give {len(operands)}"
            )
        sizes: dict[str, int] = {}
        for operand, tensor in zip(operands, tensors, strict=True):
            if tensor is None:
                if operand.count != "?":
                    refuse_operands(self.operation, f"{operand.name} is missing", "give a tensor")
                continue
            first = tensors[0]
            dtypes = operand.dtypes or (() if first is None else (first.dtype,))
            if tensor.dtype not in dtypes or not operand.matches_shape(tensor.shape, sizes):
                fact = f"{operand.name} is {tensor.dtype} {list(tensor.shape)}"
                refuse_operands(self.operation, fact, f"give {operand.expected(dtypes, sizes)}")
            if first is not None and tensor.device != first.device:
                fact = f"{operand.name} {list(tensor.shape)} is on {tensor.device}"
                refuse_operands(self.operation, fact, f"give a tensor on {first.device}")

    def check_memory(self, name: str, tensor: Tensor) -> None:
        """Raise ValueError if the storage of a tensor is too small for it."""
        size = tensor.untyped_storage().nbytes()
        needed = _end_in_storage(tensor)
        if size < needed:
            fact = f"{name} {list(tensor.shape)} needs {needed} bytes of a storage of {size}"
            refuse_operands(self.operation, fact, "give a tensor whose storage was not resized")


def _end_in_storage(tensor: Tensor) -> int:
    """Return the number of bytes from the begin of a tensor's storage to the end of its last
    element.
    """
    last = int(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not size:
            return 0
        last += (size - 1) * stride
    return (last + 1) * tensor.itemsize


def check_groups(operation: str, heads: int, num_kv_heads: int) -> None:
    """Raise ValueError if the heads do not share the key heads evenly."""
    if num_kv_heads < 1 or heads % num_kv_heads:
        fact = f"{heads} heads do not share {num_kv_heads} key heads evenly"
        refuse_operands(operation, fact, "give a multiple of the key heads")


def check_indices(operation: str, name: str, table: Tensor, end: int) -> None:
    """Raise ValueError if a table holds a number outside 0 to end - 1.

    >>> check_indices("scale_rows", "rows", torch.tensor([0, 3]), 3)
    Traceback (most recent call last):
    ValueError: cannot run headwise::scale_rows: rows holds 0 to 3; give numbers from 0 to 2
    """
    if table.numel():
        low, high = (int(bound) for bound in table.aminmax())
        if low < 0 or high >= end:
            refuse_operands(
                operation, f"{name} holds {low} to {high}", f"give numbers from 0 to {end - 1}"
            )


def check_ranges(operation: str, name: str, begin: Tensor, count: Tensor, end: int) -> None:
    """Raise ValueError if a range of `count` numbers from `begin` is negative or goes beyond `end`.

    >>> check_ranges("scale_rows", "rows", torch.tensor([0, 2]), torch.tensor([2, 2]), 3)
    Traceback (most recent call last):
    ValueError: cannot run headwise::scale_rows: rows holds 2 numbers from 2; give ranges within 0
    to 3
    """
    is_outside = (begin < 0) | (count < 0) | (count > end) | (begin > end - count)
    if bool(is_outside.any()):
        n = int(is_outside.nonzero()[0])
        refuse_operands(
            operation,
            f"{name} holds {int(count[n])} numbers from {int(begin[n])}",
            f"give ranges within 0 to {end}",
        )


# --- Operations of `flash_attention` --------------------------------------------------------------

FLASH_CHECKS = OperandChecks(
    "flash_attention",
    q=FLOAT + "B T H K",
    k="B S G K",
    v="B S G V",
    out="B T H V?",
    lse="B T H?",
    grad="B T H V?",
    ends="int64: 1|B T 2?",
    query_rows="int64: R?",
    forward_items="int64: * 6?",
    backward_items="int64: * 6?",
)


def check_flash_operands(
    tensors: Sequence[Tensor], ends: Tensor | None, tables: Sequence[Tensor], tile_rows: int
) -> None:
    """Raise ValueError for tensors that do not fit each other, or for indices outside them.

    `tensors` holds q, k, v and, in a backward pass, output, log-sum-exp and gradient. `tables` is
    empty or holds query rows and the work items of both passes; an item of the forward pass has at
    most `tile_rows` rows.
    """
    name = FLASH_CHECKS.operation
    q, k, *_ = tensors
    saved = (None,) * 3 if len(tensors) == 3 else ()
    FLASH_CHECKS.check(*tensors, *saved, ends, *(tables or (None,) * 3))
    check_groups(name, q.shape[2], k.shape[2])
    if ends is not None:
        check_indices(name, "ends", ends, k.shape[1] + 1)
    if not tables:
        return
    query_rows, *items = tables
    if ends is None:
        refuse_operands(name, "there are query rows without key ranges", "give ends")
    check_indices(name, "query_rows", query_rows, q.shape[:3].numel())
    kv_rows = len(k) * k.shape[2]
    num_parts, remainder = divmod(len(items[1]), max(1, kv_rows))
    if num_parts < 1 or remainder:
        refuse_operands(
            name,
            f"there are {len(items[1])} backward_items",
            f"give a multiple of {kv_rows} key heads of rows",
        )
    for n, table in enumerate(items):
        kv_row, first, rows, begin, end, part = table.unbind(1)
        check_indices(name, "column 0 of the items", kv_row, kv_rows)
        check_ranges(name, "the items", first, rows, len(query_rows))
        check_ranges(name, "the keys of the items", begin, end - begin, k.shape[1])
        check_indices(
            name, "column 2 of the items", rows, len(query_rows) + 1 if n else tile_rows + 1
        )
        check_indices(name, "column 5 of the items", part, num_parts if n else 2**62)


# subclasses may override operations through __torch_function__
PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter)
NO_DOUBLE_BACKWARD_REMEDY = "leave out create_graph, or build the layer with backend='dense'"


def is_under_functorch() -> bool:
    """Return True inside a torch.func transform or at a forward-mode level; plain torch operations
    must be used there.

    >>> (
    ...     is_under_functorch(),
    ...     torch.func.grad(lambda x: x * is_under_functorch())(torch.tensor(2.0)).item(),
    ... )
    (False, 1.0)
    """
    # Both are private; torch has no public equivalent.
    has_transform = forward_ad._current_level >= 0 or peek_interpreter_stack() is not None
    return has_transform and not torch.compiler.is_compiling()


def _has_transform() -> bool:
    # Both are private; torch has no public equivalent.
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def can_skip_dispatcher(*tensors: Tensor) -> bool:
    """Return True if autograd, torch.compile, transforms, modes, tracing and the profiler are all
    off.

    The tensors must also be plain CPU tensors with their actual numbers in memory: the dispatcher
    resolves the negative bit, and allocates tensors of zeros without memory. The function behind a
    custom operation can then be called directly. Dispatching to an operation that is written in
    Python takes longer than a small operation itself, and longer still after a large read from
    memory.

    >>> can_skip_dispatcher(torch.ones(1))
    False
    >>> with torch.no_grad():
    ...     can_skip_dispatcher(torch.ones(1))
    True
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _has_transform()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_tracing()
        or _profiler_enabled()
    ) and all(
        type(t) in PLAIN_TENSOR_TYPES and t.is_cpu and not (t.is_neg() or t._is_zerotensor())
        for t in tensors
    )


def forbid_double_backward(remedy: str) -> None:
    """Raise RuntimeError in a backward pass that runs with create_graph=True; the message ends with
    `remedy`.

    torch's `once_differentiable` raises only if the second backward pass reaches the function. A
    second pass that is restricted to some inputs can go around it, and would then silently leave
    out a part of the gradient.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _has_transform():
        raise RuntimeError(
            "cannot differentiate this gradient again (create_graph=True): its kernel has no "
            f"double backward; {remedy}"
        )

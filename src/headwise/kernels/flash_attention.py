"""FlashAttention on the CPU: every query reads one range of keys; torch operations with gradients.

For batch b, query head h, its key head g and a query t that may read the keys first <= j < end:

    s[j] = scale * q[t] . k[j]        o[t] = sum_j softmax(s)[j] v[j]        lse[t] = log sum_j exp(s[j])

With the ranges as a mask this is `F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale,
enable_gqa=True)` on transposed tensors; queries without keys return zeros. The backward pass computes the scores again
from lse (FlashAttention, 2205.14135). `flash_attention_kernel` holds the kernels and their loop order.

- `gathered_attention`: only some queries attend, given as work items by the caller
- `attend_key_ranges`: all queries attend, by key ranges or causally; the work items are made here and cached

Both run the same kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum, auto
from math import gcd
from struct import pack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward
from .flash_attention_reference import attend_key_ranges_backward_reference, attend_key_ranges_reference
from .launch import COMPUTE_DTYPES, FIRST_KERNEL_ARG, NUM_ITEMS_ARG, SIMD_WIDTH, ParallelKernelSet, round_up_to_simd

QUERY_TILE_ROWS = 4 * SIMD_WIDTH  # queries per tile, which are the columns of a score tile
GEMM_ROW_PADDING = 3  # rows behind the last that may be written, because products are computed four rows at a time
FLASH_KEY_BLOCK_SIZE = 64  # keys whose scores are computed before their values are read


class FlashAttentionArgs(IntEnum):
    """Kernel arguments: indices into an int64 array. Addresses and strides count bytes, sizes count elements."""

    WORK_ITEMS = (
        FIRST_KERNEL_ARG  # int64 [items, 6]: row x G + key head, first query row, number, first key, end of keys, part
    )
    QUERY_ROWS = auto()  # int64: indices among all (b, t, h) of the queries, sorted by row and key head
    KEY_RANGES = auto()  # [1 or B, T, 2], int64: the first key that a token reads and the one behind its last
    NUM_KEY_RANGE_ROWS = auto()  # size of their first axis
    Q = auto()  # [B, T, H, dim]
    SCALE = auto()  # the floating-point number itself, in the first bytes of its slot
    K = auto()
    V = auto()
    T = auto()
    H = auto()
    S = auto()
    GROUPS = auto()  # key heads
    DIM = auto()
    VDIM = auto()
    K_ROW_STRIDE = auto()  # bytes from one row, key and head to the next
    K_KEY_STRIDE = auto()
    K_HEAD_STRIDE = auto()
    V_ROW_STRIDE = auto()
    V_KEY_STRIDE = auto()
    V_HEAD_STRIDE = auto()
    OUT = auto()  # [B, T, H, vdim]
    LSE = auto()  # [B, T, H]
    GRAD = auto()  # [B, T, H, vdim]
    NUM_QUERY_ROWS = auto()  # B T H
    D_Q = auto()  # [parts, B, T, H, dim]
    D_K = auto()  # [B, GROUPS, PADDED_KEYS, dim padded to whole vectors]
    D_V = auto()
    PADDED_KEYS = auto()  # S + GEMM_ROW_PADDING


NUM_ROW_STATE_VECTORS = (
    5  # rows of 64 at the start of a scratch buffer: first keys, ends, maxima, sums, rescaling factors
)


def flash_scratch_size(dim: int, vdim: int) -> int:
    """Return the scratch elements per thread; sized for the backward pass, which needs more than the forward pass."""
    return QUERY_TILE_ROWS * (
        NUM_ROW_STATE_VECTORS
        + 1
        + 2 * (dim + GEMM_ROW_PADDING)
        + vdim
        + GEMM_ROW_PADDING
        + 2 * (FLASH_KEY_BLOCK_SIZE + GEMM_ROW_PADDING)
        + round_up_to_simd(dim)
        + round_up_to_simd(vdim)
    )


FLASH_ATTENTION_KERNELS = ParallelKernelSet(
    "flash_attention_kernel", COMPUTE_DTYPES, forward="flash_forward", backward="flash_backward"
)

KernelTable = array
TENSOR_ARGS = tuple(
    map(
        int,
        (
            FlashAttentionArgs.Q,
            FlashAttentionArgs.K,
            FlashAttentionArgs.V,
            FlashAttentionArgs.OUT,
            FlashAttentionArgs.LSE,
            FlashAttentionArgs.GRAD,
            FlashAttentionArgs.D_Q,
            FlashAttentionArgs.D_K,
            FlashAttentionArgs.D_V,
        ),
    )
)
MAX_INDEX_BY_DTYPE = {torch.float32: 2**24, torch.float64: 2**53}  # largest key index that the dtype represents exactly


@torch.library.custom_op("headwise::read_lines", mutates_args=(), device_types="cpu")
def gathered_attention(q: Tensor, k: Tensor, v: Tensor, told: list[Tensor], scale: float, formed: int) -> list[Tensor]:
    """Return the attention of selected queries, [B, T, H, vdim], zeros for the others, and the log-sum-exp [B, T, H].

    The queries are q [B, T, H, dim]; keys and values are k and v [B, S, G, dim or vdim]. `told` holds four int64
    tensors: the indices of the selected queries among all (b, t, h), sorted by row and key head; the key ranges [1 or
    B, T, 2], each the first key that a token reads and the one behind its last; the work items of the forward pass and
    those of the backward pass, laid out as `FlashAttentionArgs.WORK_ITEMS` describes. `formed` is the number of
    query-key pairs computed, which only the FLOP counter uses.
    """
    return [*run_forward(q, k, v, told, scale, q.new_zeros)]


@torch.library.custom_op("headwise::read_lines_backward", mutates_args=(), device_types="cpu")
def gathered_attention_backward(
    grad: Tensor, given: list[Tensor], told: list[Tensor], scale: float, formed: int
) -> list[Tensor]:
    """Return the gradients of q, k and v; `given` holds q, k, v, the output and the log-sum-exp."""
    return [*run_backward(grad, given, told, scale, given[0].new_zeros)]


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, told: list[Tensor], scale: float, make: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the selected queries; `make` allocates both tensors."""
    q, k, v = make_contiguous(q, k, v)
    o, lse = make(*q.shape[:3], v.shape[-1]), make(q.shape[:3])
    lines, ends, units, _ = told
    launch_flash_kernel("forward", make_kernel_table(q, k, v, (units, lines, ends), scale), q, k, v, o, lse)
    return o, lse


def run_backward(
    grad: Tensor, given: list[Tensor], told: list[Tensor], scale: float, make: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `make` allocates that of q."""
    q, k, v, o, lse = given
    q, k, v = make_contiguous(q, k, v)
    lines, ends, _, units = told
    grads = allocate_gradients(q, k, v, len(units) // (len(k) * k.shape[2]), make)
    known = make_kernel_table(q, k, v, (units, lines, ends), scale)
    launch_flash_kernel("backward", known, q, k, v, o, lse, grad.contiguous(), *grads)
    return reduce_gradients(grads, k, v)


def make_contiguous(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q contiguous, and k and v with stride 1 along their channels."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    return q.contiguous(), k, v


def make_kernel_table(q: Tensor, k: Tensor, v: Tensor, told: tuple[Tensor, ...], scale: float) -> KernelTable:
    """Return the kernel arguments of a call, all but the addresses of its tensors."""
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give all in one")
    if k.shape[1] > MAX_INDEX_BY_DTYPE[q.dtype]:
        raise ValueError(
            f"{k.shape[1]:,} keys are more than {MAX_INDEX_BY_DTYPE[q.dtype]:,} in {q.dtype}; use another backend"
        )
    units, lines, ends = told
    numbers, size = array("q", [0] * (len(FlashAttentionArgs) + FIRST_KERNEL_ARG)), q.element_size()
    sizes = [*q.shape[1:3], *k.shape[1:3], q.shape[3], v.shape[3]]
    strides = [step * size for t in (k, v) for step in t.stride()[:3]]
    numbers[NUM_ITEMS_ARG], numbers[NUM_ITEMS_ARG + 2] = len(units), flash_scratch_size(q.shape[3], v.shape[3]) * size
    lie = [units.data_ptr(), lines.data_ptr(), ends.data_ptr(), len(ends)]
    numbers[FlashAttentionArgs.WORK_ITEMS : FlashAttentionArgs.NUM_KEY_RANGE_ROWS + 1] = array("q", lie)
    numbers[FlashAttentionArgs.SCALE : FlashAttentionArgs.SCALE + 1] = array(
        "q", pack("d" if size == 8 else "f4x", scale)
    )
    numbers[FlashAttentionArgs.T : FlashAttentionArgs.V_HEAD_STRIDE + 1] = array("q", sizes + strides)
    numbers[FlashAttentionArgs.NUM_QUERY_ROWS], numbers[FlashAttentionArgs.PADDED_KEYS] = (
        q.shape[:3].numel(),
        k.shape[1] + GEMM_ROW_PADDING,
    )
    return numbers


def launch_flash_kernel(which: str, known: KernelTable, *tensors: Tensor) -> None:
    """Write the tensors' addresses into the kernel arguments and run the kernel.

    The tensors are q, k, v, the output and the log-sum-exp; for the backward pass also the output's gradient and the
    gradients to write. The parameters keep every tensor alive until the kernel has finished.
    """
    for at, tensor in zip(TENSOR_ARGS, tensors, strict=False):
        known[at] = tensor.data_ptr()
    FLASH_ATTENTION_KERNELS.launch_table(which, tensors[0].dtype, known)


def allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, parts: int, make: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients: that of q once per part of the keys, those of k and v with padded rows."""
    batch, keys, groups, _ = k.shape
    d_k, d_v = (t.new_empty(batch, groups, keys + GEMM_ROW_PADDING, round_up_to_simd(t.shape[3])) for t in (k, v))
    return make(parts, *q.shape), d_k, d_v


def reduce_gradients(grads: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the gradients of q over the parts; return those of k and v in the layout of k and v, without padding."""
    d_q, *others = grads
    d_k, d_v = (d[:, :, : t.shape[1], : t.shape[3]].transpose(1, 2) for d, t in zip(others, (k, v), strict=True))
    return d_q.sum(0) if len(d_q) > 1 else d_q[0], d_k, d_v


@gathered_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, told: list[Tensor], scale: float, formed: int) -> list[Tensor]:
    return [q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])]


@gathered_attention_backward.register_fake
def _(grad: Tensor, given: list[Tensor], told: list[Tensor], scale: float, formed: int) -> list[Tensor]:
    q, k, v, *_ = given
    return [*reduce_gradients(allocate_gradients(q, k, v, 1, q.new_empty), k, v)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, told, ctx.scale, ctx.num_pairs = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *told)


def _gathered_attention_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    saved = list(ctx.saved_tensors)  # read once: activation checkpointing unpacks saved tensors only once
    told = saved[5:]
    d_q, d_k, d_v = gathered_attention_backward(grads[0], saved[:5], told, ctx.scale, ctx.num_pairs)
    return d_q, d_k, d_v, [None] * len(told), None, None


gathered_attention.register_autograd(_gathered_attention_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.read_lines)
def _gathered_attention_flops(q: Any, k: Any, v: Any, told: Any, scale: float, formed: int, **said: Any) -> int:
    return 2 * formed * (q[3] + v[3])


@register_flop_formula(torch.ops.headwise.read_lines_backward)
def _gathered_attention_backward_flops(grad: Any, given: Any, told: Any, scale: float, formed: int, **said: Any) -> int:
    """Count the scores computed again, and two gradients for each of the two products."""
    q, _, v, *_ = given
    return 2 * formed * (3 * q[3] + 2 * v[3])


# --- Every query attends: plans, work items and the operations -----------------------------------------

MIN_KEYS_PER_PART = 512  # minimum number of keys in a part of the backward pass
MAX_KEY_PARTS, TARGET_WORK_ITEMS = 4, 16  # maximum number of parts, made to reach this many work items
MAX_CACHED_PLANS = 16  # the cache is cleared when it holds this many plans


class FlashAttentionShape(NamedTuple):
    """Sizes of a call: batch, queries, query heads, keys and key heads."""

    batch: int
    queries: int
    heads: int
    keys: int
    num_kv_heads: int

    @staticmethod
    def from_tensors(q: Tensor, k: Tensor) -> FlashAttentionShape:
        """Return the shape of a call with queries [B, T, H, dim] and keys [B, S, G, dim]."""
        return FlashAttentionShape(*q.shape[:3], *k.shape[1:3])

    @property
    def group_size(self) -> int:
        """Number of query heads per key head."""
        return self.heads // self.num_kv_heads


class FlashAttentionPlan(NamedTuple):
    """Kernel arguments for one call signature, forward and backward, and the tensors whose addresses they contain."""

    forward_table: KernelTable
    backward_table: KernelTable
    num_key_parts: int
    pinned_tensors: list[Tensor]

    @staticmethod
    def from_tensors(q: Tensor, k: Tensor, v: Tensor, ahead: int | None, scale: float) -> FlashAttentionPlan:
        """Return the plan for these tensors, cached by signature: making one takes longer than a short call."""
        kinds = q.dtype, k.dtype, v.dtype
        key = q.shape, k.shape, v.shape, k.stride(), v.stride(), kinds, ahead, scale
        found = _PLAN_CACHE.get(key)  # looked up once: another thread may clear the cache at any time
        if found is None:
            if len(_PLAN_CACHE) >= MAX_CACHED_PLANS:
                _PLAN_CACHE.clear()
            size = FlashAttentionShape.from_tensors(q, k)
            lines, ends, *units = held = [
                torch.from_numpy(np.ascontiguousarray(t)) for t in _make_work_items(size, ahead)
            ]
            forth, back = (make_kernel_table(q, k, v, (some, lines, ends), scale) for some in units)
            found = _PLAN_CACHE[key] = FlashAttentionPlan(
                forth, back, len(units[1]) // (size.batch * size.num_kv_heads), held
            )
        return found


def _with_key_ranges(known: KernelTable, ends: Tensor | None) -> KernelTable:
    """Return a copy of the kernel arguments, with the caller's key ranges if there are any."""
    known = known[:]
    if ends is not None:
        known[FlashAttentionArgs.KEY_RANGES], known[FlashAttentionArgs.NUM_KEY_RANGE_ROWS] = ends.data_ptr(), len(ends)
    return known


_PLAN_CACHE: dict[tuple[Any, ...], FlashAttentionPlan] = {}


def _make_work_items(size: FlashAttentionShape, ahead: int | None) -> list[Any]:
    batch, queries, heads, keys, kept = size
    lines = np.arange(batch * queries * heads).reshape(batch, queries, kept, size.group_size).swapaxes(1, 2).ravel()
    last = np.minimum(np.arange(queries) + (keys if ahead is None else ahead) + 1, keys)
    return [lines, np.stack([0 * last, last], 1)[None], _forward_work_items(size), _backward_work_items(size)]


def _forward_work_items(size: FlashAttentionShape) -> Any:
    """Return work items of up to 64 queries each; the last queries, which read the most keys, come first."""
    rows, whose = size.queries * size.group_size, np.arange(size.batch * size.num_kv_heads)
    first = np.arange(0, rows, QUERY_TILE_ROWS)[::-1]
    units = np.zeros((len(first), len(whose), 6), np.int64)
    units[..., 0], units[..., 1] = whose, whose * rows + first[:, None]
    units[..., 2], units[..., 4] = np.minimum(rows - first, QUERY_TILE_ROWS)[:, None], size.keys
    return units.reshape(-1, 6)


def _backward_work_items(size: FlashAttentionShape) -> Any:
    """Return work items of all queries of a key head with one part of its keys; the first keys have the most work."""
    rows, whose = size.queries * size.group_size, np.arange(size.batch * size.num_kv_heads)
    parts = max(1, min(MAX_KEY_PARTS, TARGET_WORK_ITEMS // len(whose), size.keys // MIN_KEYS_PER_PART))
    cuts = np.array(
        [*(size.keys * part // parts // 4 * 4 for part in range(parts)), size.keys]
    )  # multiples of the kernel's four-row tiles
    units = np.zeros((parts, len(whose), 6), np.int64)
    units[..., 0], units[..., 1], units[..., 2] = whose, whose * rows, rows
    units[..., 3], units[..., 4], units[..., 5] = cuts[:-1, None], cuts[1:, None], np.arange(parts)[:, None]
    return units.reshape(-1, 6)


# Defined without `custom_op`, whose two Python wrappers per call take as long as a short call itself.
_LIBRARY = torch.library.Library("headwise", "FRAGMENT")
_LIBRARY.define(
    "read_every(Tensor q, Tensor k, Tensor v, Tensor? ends, SymInt? ahead, float scale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "read_every_backward(Tensor grad, Tensor[] given, Tensor? ends, SymInt? ahead, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
FLASH_FORWARD_OP, FLASH_BACKWARD_OP = (
    torch.ops.headwise.read_every.default,
    torch.ops.headwise.read_every_backward.default,
)


def attend_key_ranges(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float) -> Tensor:
    """Return the attention of queries q [B, T, H, dim] over k and v [B, S, G, dim or vdim].

    `ends`, int64 [1 or B, T, 2], holds for each token the first key that it reads and the one behind its last. Without
    it, token t reads the keys up to t + ahead, or all keys if `ahead` is None.

    >>> q, k = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    >>> attend_key_ranges(q, k, torch.arange(3.0).view(1, 3, 1, 1), None, 0, 1.0).flatten().tolist()
    [0.0, 0.5, 1.0]
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        read: Tensor = _FlashAttention.apply(q, k, v, ends, ahead, scale)
        return read
    return FLASH_FORWARD_OP(q, k, v, ends, ahead, scale)[0]


class _FlashAttention(torch.autograd.Function):
    """Autograd function; the backward pass computes the scores again from the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        o, lse = FLASH_FORWARD_OP(q, k, v, *how)
        ctx.save_for_backward(q, k, v, o, lse, how[0])
        ctx.how = how[1:]
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        *given, ends = ctx.saved_tensors
        return *FLASH_BACKWARD_OP(grads[0], given, ends, *ctx.how), None, None, None


@torch.library.impl(_LIBRARY, "read_every", "CPU")
def _flash_forward_op(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores, [B, T, H]."""
    if not FLASH_ATTENTION_KERNELS.is_usable(q.dtype):
        return attend_key_ranges_reference(q, k, v, ends, ahead, scale)
    q, k, v = make_contiguous(q, k, v)
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    plan = FlashAttentionPlan.from_tensors(q, k, v, ahead, scale)
    launch_flash_kernel("forward", _with_key_ranges(plan.forward_table, ends), q, k, v, o, lse)
    return o, lse


@torch.library.impl(_LIBRARY, "read_every_backward", "CPU")
def _flash_backward_op(
    grad: Tensor, given: list[Tensor], ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `given` holds q, k, v, the output and the log-sum-exp."""
    if not FLASH_ATTENTION_KERNELS.is_usable(grad.dtype):
        return attend_key_ranges_backward_reference(grad, given, ends, ahead, scale)
    q, k, v, o, lse = given
    q, k, v = make_contiguous(q, k, v)
    plan = FlashAttentionPlan.from_tensors(q, k, v, ahead, scale)
    # A tile that reads no key of a part does not write its gradients for that part.
    make = q.new_empty if ends is None and plan.num_key_parts == 1 else q.new_zeros
    grads = allocate_gradients(q, k, v, plan.num_key_parts, make)
    launch_flash_kernel(
        "backward", _with_key_ranges(plan.backward_table, ends), q, k, v, o, lse, grad.contiguous(), *grads
    )
    return reduce_gradients(grads, k, v)


@torch.library.register_fake("headwise::read_every")
def _(q: Tensor, k: Tensor, v: Tensor, ends: Any, ahead: Any, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@torch.library.register_fake("headwise::read_every_backward")
def _(grad: Tensor, given: list[Tensor], ends: Any, ahead: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = given
    return reduce_gradients(allocate_gradients(q, k, v, 1, q.new_empty), k, v)


def count_executed_pairs(size: FlashAttentionShape, ends: Tensor | None, ahead: int | None) -> int:
    """Return how many query-key pairs the kernel computes.

    These are whole tiles of 64 queries, each with all keys from the first to the last that one of its queries reads.

    >>> (
    ...     count_executed_pairs(FlashAttentionShape(1, 128, 1, 128, 1), None, 0),
    ...     count_executed_pairs(FlashAttentionShape(1, 128, 1, 128, 1), None, None),
    ... )
    (12288, 16384)
    """
    if ends is not None:
        return _count_pairs_in_ranges(size, ends)
    each, units = size.group_size, -(-size.queries * size.group_size // QUERY_TILE_ROWS)
    if ahead is None:
        return QUERY_TILE_ROWS * size.batch * size.num_kv_heads * units * size.keys
    inner = max(
        0, min(units - 1, (size.keys - ahead) * each // QUERY_TILE_ROWS)
    )  # tiles whose last row reads fewer than all keys
    keys = _last_tokens(inner, each) + inner * (ahead + 1) + (units - 1 - inner) * size.keys
    return QUERY_TILE_ROWS * size.batch * size.num_kv_heads * (keys + min(size.queries + ahead, size.keys))


def _last_tokens(units: int, each: int) -> int:
    """Return the sum over `units` tiles of the token of each tile's last row.

    The tokens are periodic up to a constant rise per period, so the sum has a closed form.
    """
    period = each // gcd(each, QUERY_TILE_ROWS)
    first, (times, rest) = [(QUERY_TILE_ROWS * (n + 1) - 1) // each for n in range(period)], divmod(units, period)
    rise = QUERY_TILE_ROWS * period // each
    every = times * sum(first) + period * rise * times * (times - 1) // 2
    return every + sum(first[:rest]) + rest * rise * times


def _count_pairs_in_ranges(size: FlashAttentionShape, ends: Tensor) -> int:
    rows = ends.repeat_interleave(size.group_size, 1)
    rows = torch.cat([rows, rows[:, -1:].expand(-1, -rows.shape[1] % QUERY_TILE_ROWS, -1)], 1).unflatten(
        1, (-1, QUERY_TILE_ROWS)
    )
    keys = (rows[..., 1].amax(-1) - rows[..., 0].amin(-1)).clamp(min=0).sum()
    return QUERY_TILE_ROWS * size.num_kv_heads * int(keys) * (size.batch // len(ends))


@register_flop_formula(torch.ops.headwise.read_every, get_raw=True)
def _flash_attention_flops(q: Tensor, k: Tensor, v: Tensor, ends: Any, ahead: Any, scale: float, **said: Any) -> int:
    return 2 * count_executed_pairs(FlashAttentionShape.from_tensors(q, k), ends, ahead) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.read_every_backward, get_raw=True)
def _flash_attention_backward_flops(grad: Any, given: Any, ends: Any, ahead: Any, scale: float, **said: Any) -> int:
    """Count the scores computed again, and two gradients for each of the two products."""
    q, k, v, *_ = given
    return (
        2
        * count_executed_pairs(FlashAttentionShape.from_tensors(q, k), ends, ahead)
        * (3 * q.shape[3] + 2 * v.shape[3])
    )

"""FlashAttention on the CPU: every query reads one range of keys.

`flash_attention_reference` has the same as torch operations, which run while the kernels are being
compiled. The tests compare the kernels with them.

For batch b, query head h, its key head g and a query t that may read the keys first <= j < end:

    s[j] = scale * q[t] . k[j]        o[t] = sum_j softmax(s)[j] v[j]        lse[t] = log sum_j
    exp(s[j])

With the ranges as a mask this is `F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
scale=scale, enable_gqa=True)` on transposed tensors; queries without keys return zeros. The
backward pass recomputes the scores from lse (FlashAttention, 2205.14135). `flash_attention_kernel`
holds the kernels and their loop order.

- `attend_key_ranges`: all queries attend, by key ranges or causally; the work items are cached
- `gathered_attention`: only the queries of the caller's work items attend

Both are the operation `headwise::flash_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .flash_attention_reference import (
    attend_key_ranges_backward_reference,
    attend_key_ranges_reference,
)
from .launch import (
    COMPUTE_DTYPES,
    SIMD_WIDTH,
    ParallelKernelArgs,
    ParallelKernelSet,
    TensorArg,
    round_up_to_simd,
)
from .operand_checks import NO_DOUBLE_BACKWARD_REMEDY, check_flash_operands, forbid_double_backward

# --- Kernel calls ---------------------------------------------------------------------------------

QUERY_TILE_ROWS = 4 * SIMD_WIDTH  # queries per tile, which are the columns of a score tile
FLASH_KEY_BLOCK_SIZE = 64  # keys that are scored before their values are read


class FlashAttentionArgs(ParallelKernelArgs):
    """Kernel arguments; strides count bytes. `make_contiguous` and `make_args` check the tensors.

    A work item lists its row x num_kv_heads + key head, first query row, number of query rows,
    first key, end of keys and part of the keys.
    """

    work_items: TensorArg = None  # [items, 6]
    # indices among all (b, t, h) of the queries, sorted by row and key head
    query_rows: TensorArg = None
    key_ranges: TensorArg = None  # [1 or B, T, 2]: first key of a token and the end of its keys
    num_key_range_rows: int = 0  # size of their first axis
    q: TensorArg = None  # [B, T, H, dim]
    k: TensorArg = None  # [B, S, num_kv_heads, dim]
    v: TensorArg = None  # [B, S, num_kv_heads, vdim]
    scale: float = 0.0
    num_queries: int = 0  # T
    num_heads: int = 0  # H
    num_keys: int = 0  # S
    num_kv_heads: int = 0
    dim: int = 0
    vdim: int = 0
    k_row_stride: int = 0
    k_key_stride: int = 0
    k_head_stride: int = 0
    v_row_stride: int = 0
    v_key_stride: int = 0
    v_head_stride: int = 0
    out: TensorArg = None  # [B, T, H, vdim]
    lse: TensorArg = None  # [B, T, H]
    grad: TensorArg = None  # [B, T, H, vdim]
    num_query_rows: int = 0  # B T H
    d_q: TensorArg = None  # [parts, B, T, H, dim]
    d_k: TensorArg = None  # [B, num_kv_heads, S, dim padded to whole vectors]
    d_v: TensorArg = None


# rows of 64 at the start of a scratch buffer: first keys, ends, maxima, sums, rescaling factors
NUM_ROW_STATE_VECTORS = 5


def flash_scratch_size(dim: int, vdim: int) -> int:
    """Return the scratch elements per thread; sized for the backward pass, which needs more than
    the forward pass.
    """
    blocks = NUM_ROW_STATE_VECTORS + 1 + 2 * FLASH_KEY_BLOCK_SIZE
    return QUERY_TILE_ROWS * (
        blocks + 2 * dim + vdim + round_up_to_simd(dim) + round_up_to_simd(vdim)
    )


FLASH_ATTENTION_KERNELS = ParallelKernelSet(
    "flash_attention_kernel",
    COMPUTE_DTYPES,
    forward=("flash_forward", FlashAttentionArgs),
    backward=("flash_backward", FlashAttentionArgs),
)

# largest key index that the dtype represents exactly
MAX_INDEX_BY_DTYPE = {torch.float32: 2**24, torch.float64: 2**53}


def make_contiguous(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q contiguous, and k and v with stride 1 along their channels."""
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    return q.contiguous(), k, v


def make_args(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, ...], scale: float
) -> FlashAttentionArgs:
    """Return the kernel arguments for tensors of these shapes, without the tensors themselves.

    `tables` holds the work items, the query rows and the key ranges.
    """
    if k.shape[1] > MAX_INDEX_BY_DTYPE[q.dtype]:
        raise ValueError(
            f"{k.shape[1]:,} keys are more than {MAX_INDEX_BY_DTYPE[q.dtype]:,} in {q.dtype}; use "
            "another backend"
        )
    (work_items, query_rows, key_ranges) = [table.contiguous() for table in tables]
    (_, queries, heads, dim) = q.shape
    (_, keys, num_kv_heads, vdim) = v.shape
    return FlashAttentionArgs.make(
        num_items=len(work_items),
        scratch_bytes=flash_scratch_size(dim, vdim) * q.itemsize,
        work_items=work_items,
        query_rows=query_rows,
        key_ranges=key_ranges,
        num_key_range_rows=len(key_ranges),
        scale=scale,
        num_queries=queries,
        num_heads=heads,
        num_keys=keys,
        num_kv_heads=num_kv_heads,
        dim=dim,
        vdim=vdim,
        k_row_stride=k.stride(0),
        k_key_stride=k.stride(1),
        k_head_stride=k.stride(2),
        v_row_stride=v.stride(0),
        v_key_stride=v.stride(1),
        v_head_stride=v.stride(2),
        num_query_rows=q.shape[:3].numel(),
    )


def allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, num_parts: int, is_written: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate gradients: d_q once per part of the keys, d_k and d_v with rows of whole vectors."""
    batch, keys, groups, _ = k.shape
    d_k, d_v = (t.new_empty(batch, groups, keys, round_up_to_simd(t.shape[3])) for t in (k, v))
    allocate = q.new_empty if is_written else q.new_zeros
    return allocate(num_parts, *q.shape), d_k, d_v


def reduce_gradients(
    grads: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum d_q over the parts; return d_k and d_v in the layout of k and v, without padding."""
    d_q, *kv_grads = grads
    d_k, d_v = (
        d[:, :, : t.shape[1], : t.shape[3]].transpose(1, 2)
        for d, t in zip(kv_grads, (k, v), strict=True)
    )
    return d_q.sum(0) if len(d_q) > 1 else d_q[0], d_k, d_v


# --- Work items -----------------------------------------------------------------------------------

# The backward pass splits the keys into parts of at least this size, so that there are enough work
# items.
MIN_KEYS_PER_PART = 512
MAX_KEY_PARTS = 4
TARGET_WORK_ITEMS = 16
MAX_CACHED_PLANS = 16  # the cache is cleared when it holds this many plans


class WorkItems(NamedTuple):
    """Tables of the kernel arguments for the queries that attend, and the number of scores computed
    in whole tiles.
    """

    query_rows: Tensor
    key_ranges: Tensor
    forward: Tensor
    backward: Tensor
    num_pairs: int

    @staticmethod
    def from_open_heads(open_BTH: Tensor, num_kv_heads: int, ends: Tensor, keys: int) -> WorkItems:
        """Return the work items of the open queries; those with most keys come first, so that
        threads end together.

        `ends` [1 or B, T, 2] holds the first key of each token and the end of its keys.
        """
        batch, queries, heads = open_BTH.shape
        group_size = heads // num_kv_heads
        by_key = open_BTH.view(batch, queries, num_kv_heads, group_size).transpose(1, 2)
        b, g, t, h = by_key.nonzero(as_tuple=True)
        counts = by_key.sum((2, 3)).flatten()
        tiles = (counts + QUERY_TILE_ROWS - 1).div(QUERY_TILE_ROWS, rounding_mode="floor")
        kv_row = torch.arange(len(counts), device=counts.device).repeat_interleave(tiles)
        number = torch.arange(len(kv_row), device=counts.device) - (tiles.cumsum(0) - tiles)[kv_row]
        begins = counts.cumsum(0) - counts
        first = begins[kv_row] + QUERY_TILE_ROWS * number
        rows = (counts[kv_row] - QUERY_TILE_ROWS * number).clamp(max=QUERY_TILE_ROWS)
        token = b % len(ends) * queries + t
        low = ends.view(-1, 2)[token[first], 0]
        high = ends.view(-1, 2)[token[first + rows - 1], 1]
        none = torch.zeros_like(rows)
        forward = torch.stack([kv_row, first, rows, none, none + keys, none], 1)
        return WorkItems(
            (b * queries + t) * heads + g * group_size + h,
            ends.contiguous(),
            forward[torch.argsort(high - low, descending=True, stable=True)].contiguous(),
            _backward_work_items(counts, begins, keys),
            QUERY_TILE_ROWS * int((high - low).sum()),
        )


def _backward_work_items(counts: Tensor, begins: Tensor, keys: int) -> Tensor:
    """Return work items of all rows of a KV head with a part of its keys."""
    parts = max(1, min(MAX_KEY_PARTS, TARGET_WORK_ITEMS // len(counts), keys // MIN_KEYS_PER_PART))
    # Parts begin at multiples of four keys, which the kernel writes together.
    cuts = [*(keys * part // parts // 4 * 4 for part in range(parts)), keys]
    order = torch.argsort(counts, descending=True, stable=True)
    of_part = torch.stack([order, begins[order], counts[order]], 1)
    items = [
        torch.cat([of_part, of_part.new_tensor([[*cuts[n : n + 2], n]]).expand(len(order), 3)], 1)
        for n in range(parts)
    ]
    return torch.cat(items).contiguous()


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
    """Kernel arguments for one call signature, forward and backward, without the tensors of a call;
    and the number of parts of the keys in the backward pass.
    """

    forward_args: FlashAttentionArgs
    backward_args: FlashAttentionArgs
    num_key_parts: int

    @staticmethod
    def from_tables(
        q: Tensor, k: Tensor, v: Tensor, tables: Sequence[Tensor], scale: float
    ) -> FlashAttentionPlan:
        """Return the plan of a call with these query rows, key ranges and work items."""
        query_rows, key_ranges, *items_per_pass = tables
        forward_args, backward_args = (
            make_args(q, k, v, (items, query_rows, key_ranges), scale) for items in items_per_pass
        )
        num_key_parts = len(items_per_pass[1]) // max(1, len(k) * k.shape[2])
        return FlashAttentionPlan(forward_args, backward_args, num_key_parts)

    @staticmethod
    def from_tensors(
        q: Tensor, k: Tensor, v: Tensor, ahead: int | None, scale: float
    ) -> FlashAttentionPlan:
        """Return the plan for these tensors, cached by signature, as building it takes longer than
        a short call.
        """
        dtypes = q.dtype, k.dtype, v.dtype
        key = q.shape, k.shape, v.shape, k.stride(), v.stride(), dtypes, ahead, scale
        # looked up once: another thread may clear the cache at any time
        plan = _PLAN_CACHE.get(key)
        if plan is None:
            if len(_PLAN_CACHE) >= MAX_CACHED_PLANS:
                _PLAN_CACHE.clear()
            keys = k.shape[1]
            all_heads = torch.ones(q.shape[:3], dtype=torch.bool, device="cpu")
            last = torch.arange(q.shape[1], device="cpu") + (keys if ahead is None else ahead)
            key_ends = (last + 1).clamp(max=keys)
            ends = torch.stack([0 * key_ends, key_ends], 1)[None]
            tables = WorkItems.from_open_heads(all_heads, k.shape[2], ends, keys)[:4]
            plan = FlashAttentionPlan.from_tables(q, k, v, tables, scale)
            _PLAN_CACHE[key] = plan
        return plan


_PLAN_CACHE: dict[tuple[Any, ...], FlashAttentionPlan] = {}

# --- The operation --------------------------------------------------------------------------------

# Defined without `custom_op`: its two Python wrappers per call take as long as a short call itself.
_LIBRARY = torch.library.Library("headwise", "FRAGMENT")
OPTIONS_SCHEMA = "Tensor? ends, SymInt? ahead, Tensor[] tables, float scale, SymInt? num_pairs"
_LIBRARY.define(
    f"flash_attention(Tensor q, Tensor k, Tensor v, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    f"flash_attention_backward(Tensor grad, Tensor[] tensors, {OPTIONS_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
FLASH_FORWARD_OP = torch.ops.headwise.flash_attention.default
FLASH_BACKWARD_OP = torch.ops.headwise.flash_attention_backward.default


def attend_key_ranges(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float
) -> Tensor:
    """Return the attention of queries q [B, T, H, dim] over k and v [B, S, G, dim or vdim].

    `ends`, int64 [1 or B, T, 2], holds for each token its first key and the end of its keys.
    Without it, token t reads the keys up to t + ahead, or all keys if `ahead` is None.

    >>> q, k = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    >>> attend_key_ranges(q, k, torch.arange(3.0).view(1, 3, 1, 1), None, 0, 1.0).flatten().tolist()
    [0.0, 0.5, 1.0]
    """
    return _attend(q, k, v, ends, ahead, [], scale, None)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, items: WorkItems, scale: float) -> Tensor:
    """Return the attention of the queries of these work items, and zeros for the others."""
    tables = [items.query_rows, items.forward, items.backward]
    return _attend(q, k, v, items.key_ranges, None, tables, scale, items.num_pairs)


def _attend(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        output: Tensor = _FlashAttention.apply(q, k, v, *options)
        return output
    return FLASH_FORWARD_OP(q, k, v, *options)[0]


class _FlashAttention(torch.autograd.Function):
    """Autograd function; the backward pass recomputes the scores from the
    log-sum-exp of each row.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        o, lse = FLASH_FORWARD_OP(q, k, v, *options)
        ends, ahead, tables, *ctx.options = options
        ctx.ahead = ahead
        ctx.save_for_backward(q, k, v, o, lse, ends, *tables)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        q, k, v, o, lse, ends, *tables = ctx.saved_tensors
        options = ends, ctx.ahead, tables, *ctx.options
        return *FLASH_BACKWARD_OP(grads[0], [q, k, v, o, lse], *options), *[None] * len(options)


def _make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor | None,
    ahead: int | None,
    tables: Sequence[Tensor],
    scale: float,
) -> FlashAttentionPlan:
    if tables and ends is not None:
        return FlashAttentionPlan.from_tables(q, k, v, (tables[0], ends, *tables[1:]), scale)
    plan = FlashAttentionPlan.from_tensors(q, k, v, ahead, scale)
    if ends is None:
        return plan
    ranges = {"key_ranges": ends.contiguous(), "num_key_range_rows": len(ends)}
    forward_args, backward_args = (args.replace(**ranges) for args in plan[:2])
    return FlashAttentionPlan(forward_args, backward_args, plan.num_key_parts)


@torch.library.impl(_LIBRARY, "flash_attention", "CPU")
def _flash_forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor | None,
    ahead: int | None,
    tables: list[Tensor],
    scale: float,
    num_pairs: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores, [B, T, H].

    `tables` is empty, or holds the query rows and the work items of both passes, as
    `FlashAttentionArgs` describes them; then `ends` are its key ranges. Queries without a work item
    return zeros. Only the FLOP counter uses `num_pairs`.
    """
    check_flash_operands((q, k, v), ends, tables, QUERY_TILE_ROWS)
    if not tables and not FLASH_ATTENTION_KERNELS.is_usable(q.dtype):
        return attend_key_ranges_reference(q, k, v, ends, ahead, scale)
    q, k, v = make_contiguous(q, k, v)
    allocate = q.new_zeros if tables else q.new_empty
    o = allocate(*q.shape[:3], v.shape[3])
    lse = allocate(q.shape[:3])
    plan = _make_plan(q, k, v, ends, ahead, tables, scale)
    args = plan.forward_args.replace(q=q, k=k, v=v, out=o, lse=lse)
    FLASH_ATTENTION_KERNELS.launch("forward", q.dtype, args)
    return o, lse


@torch.library.impl(_LIBRARY, "flash_attention_backward", "CPU")
def _flash_backward_op(
    grad: Tensor,
    tensors: list[Tensor],
    ends: Tensor | None,
    ahead: int | None,
    tables: list[Tensor],
    scale: float,
    num_pairs: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `tensors` holds q, k, v, the output
    and the log-sum-exp.
    """
    check_flash_operands((*tensors, grad), ends, tables, QUERY_TILE_ROWS)
    if not tables and not FLASH_ATTENTION_KERNELS.is_usable(grad.dtype):
        return attend_key_ranges_backward_reference(grad, tensors, ends, ahead, scale)
    q, k, v, o, lse = tensors
    q, k, v = make_contiguous(q, k, v)
    plan = _make_plan(q, k, v, ends, ahead, tables, scale)
    # A tile that reads no key of a part does not write its gradients for that part.
    grads = d_q, d_k, d_v = allocate_gradients(
        q, k, v, plan.num_key_parts, ends is None and plan.num_key_parts == 1
    )
    args = plan.backward_args.replace(
        q=q,
        k=k,
        v=v,
        out=o.contiguous(),
        lse=lse.contiguous(),
        grad=grad.contiguous(),
        d_q=d_q,
        d_k=d_k,
        d_v=d_v,
    )
    FLASH_ATTENTION_KERNELS.launch("backward", q.dtype, args)
    return reduce_gradients(grads, k, v)


@torch.library.register_fake("headwise::flash_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@torch.library.register_fake("headwise::flash_attention_backward")
def _(grad: Tensor, tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = tensors
    return reduce_gradients(allocate_gradients(q, k, v, 1, True), k, v)


def count_executed_pairs(shape: FlashAttentionShape, ends: Tensor | None, ahead: int | None) -> int:
    """Return the number of query-key pairs that the kernel computes.

    These are whole tiles of 64 queries, each with all keys from the first to the last that one of
    its queries reads.

    >>> (
    ...     count_executed_pairs(FlashAttentionShape(1, 128, 1, 128, 1), None, 0),
    ...     count_executed_pairs(FlashAttentionShape(1, 128, 1, 128, 1), None, None),
    ... )
    (12288, 16384)
    """
    if ends is not None:
        return _count_pairs_in_ranges(shape, ends)
    group_size = shape.group_size
    num_tiles = -(-shape.queries * shape.group_size // QUERY_TILE_ROWS)
    if ahead is None:
        return QUERY_TILE_ROWS * shape.batch * shape.num_kv_heads * num_tiles * shape.keys
    num_causal_tiles = max(
        0, min(num_tiles - 1, (shape.keys - ahead) * group_size // QUERY_TILE_ROWS)
    )  # tiles with a last row that reads fewer than all keys
    keys = (
        _sum_last_tokens(num_causal_tiles, group_size)
        + num_causal_tiles * (ahead + 1)
        + (num_tiles - 1 - num_causal_tiles) * shape.keys
    )
    return (
        QUERY_TILE_ROWS
        * shape.batch
        * shape.num_kv_heads
        * (keys + min(shape.queries + ahead, shape.keys))
    )


def _sum_last_tokens(num_tiles: int, group_size: int) -> int:
    """Return the sum over `num_tiles` tiles of the token of each tile's last row.

    The tokens are periodic up to a constant rise per period, so the sum has a closed form.
    """
    period = group_size // gcd(group_size, QUERY_TILE_ROWS)
    first_period = [(QUERY_TILE_ROWS * (n + 1) - 1) // group_size for n in range(period)]
    (num_periods, remainder) = divmod(num_tiles, period)
    tokens_per_period = QUERY_TILE_ROWS * period // group_size
    full_periods_sum = (
        num_periods * sum(first_period)
        + period * tokens_per_period * num_periods * (num_periods - 1) // 2
    )
    return (
        full_periods_sum
        + sum(first_period[:remainder])
        + remainder * tokens_per_period * num_periods
    )


def _count_pairs_in_ranges(shape: FlashAttentionShape, ends: Tensor) -> int:
    rows = ends.repeat_interleave(shape.group_size, 1)
    rows = torch.cat(
        [rows, rows[:, -1:].expand(-1, -rows.shape[1] % QUERY_TILE_ROWS, -1)], 1
    ).unflatten(1, (-1, QUERY_TILE_ROWS))
    keys = (rows[..., 1].amax(-1) - rows[..., 0].amin(-1)).clamp(min=0).sum()
    return QUERY_TILE_ROWS * shape.num_kv_heads * int(keys) * (shape.batch // len(ends))


def _count_call_pairs(
    q: Tensor, k: Tensor, ends: Any, ahead: Any, tables: Any, scale: float, num_pairs: Any
) -> int:
    if num_pairs is not None:
        return num_pairs
    return count_executed_pairs(FlashAttentionShape.from_tensors(q, k), ends, ahead)


@register_flop_formula(torch.ops.headwise.flash_attention, get_raw=True)
def _flash_attention_flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, **kwargs: Any) -> int:
    return 2 * _count_call_pairs(q, k, *options) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.flash_attention_backward, get_raw=True)
def _flash_attention_backward_flops(grad: Any, tensors: Any, *options: Any, **kwargs: Any) -> int:
    """Count the recomputed scores, and two gradients for each of the two products."""
    q, k, v, *_ = tensors
    return 2 * _count_call_pairs(q, k, *options) * (3 * q.shape[3] + 2 * v.shape[3])

"""FlashAttention on the CPU: every query reads one range of keys; torch operations with gradients.

They run in place of the kernels while these are being compiled, and are what the tests compare the
kernels with.

For batch b, query head h, its key head g and a query t that may read the keys first <= j < end:

    s[j] = scale * q[t] . k[j]        o[t] = sum_j softmax(s)[j] v[j]        lse[t] = log sum_j exp(s[j])

With the ranges as a mask this is `F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
scale=scale, enable_gqa=True)` on transposed tensors; queries without keys return zeros. The
backward pass recomputes the scores from lse (FlashAttention, 2205.14135). `flash_attention_kernel`
holds the kernels and their loop order.

- `gathered_attention`: only some queries attend, given as work items by the caller
- `attend_key_ranges`: all queries attend, by key ranges or causally; the work items are made here
  and cached

Both run the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward
from .kernel_args import ParallelKernelArgs, TensorArg
from .launch import COMPUTE_DTYPES, SIMD_WIDTH, ParallelKernelSet, round_up_to_simd
from .operand_checks import check_flash_operands, check_gathered_operands

QUERIES_PER_CHUNK = 128


def attend_key_ranges_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, vdim] and the log-sum-exp [B, T, H]; the arguments are those of
    `attend_key_ranges`.

    >>> q, k = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    >>> attend_key_ranges_reference(q, k, torch.arange(3.0).view(1, 3, 1, 1), None, 0, 1.0)[
    ...     0
    ... ].flatten()
    tensor([0.0000, 0.5000, 1.0000])
    """
    output_chunks = []
    lse_chunks = []
    for rows, allowed in _query_chunks(q, k, ends, ahead):
        scores = _masked_scores(q[:, rows], k, allowed, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - _finite(lse)[..., None]).exp()
        output_chunks.append(torch.einsum("bgrts,bsgv->btgrv", weights, v).flatten(2, 3))
        lse_chunks.append(lse.permute(0, 3, 1, 2).flatten(2))
    return torch.cat(output_chunks, 1), torch.cat(lse_chunks, 1)


def attend_key_ranges_backward_reference(
    grad: Tensor, tensors: list[Tensor], ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `tensors` holds q, k, v, the output and the log-sum-exp.

    With P = exp(S - lse) and D = rowsum(output * grad): dV = P^T grad, dS = P * (grad V^T - D), dQ
    = dS K * scale and dK = dS^T Q * scale.
    """
    q, k, v, o, lse = tensors
    groups = k.shape[2]
    d_q = torch.empty_like(q)
    d_k = torch.zeros_like(k)
    d_v = torch.zeros_like(v)
    for rows, allowed in _query_chunks(q, k, ends, ahead):
        queries, grads = (t[:, rows].unflatten(2, (groups, -1)) for t in (q, grad))
        row_lse = lse[:, rows].unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        row_dots = (o * grad)[:, rows].sum(-1).unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        weights = (
            _masked_scores(q[:, rows], k, allowed, scale) - _finite(row_lse)[..., None]
        ).exp()
        d_v += torch.einsum("bgrts,btgrv->bsgv", weights, grads)
        d_scores = (
            weights * (torch.einsum("btgrv,bsgv->bgrts", grads, v) - row_dots[..., None]) * scale
        )
        d_q[:, rows] = torch.einsum("bgrts,bsgk->btgrk", d_scores, k).flatten(2, 3)
        d_k += torch.einsum("bgrts,btgrk->bsgk", d_scores, queries)
    return d_q, d_k, d_v


def _query_chunks(
    q: Tensor, k: Tensor, ends: Tensor | None, ahead: int | None
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield slices of the queries, and the mask [1 or B, 1, 1, t, S] of their allowed keys; None
    allows all.
    """
    keys = torch.arange(k.shape[1], device=q.device)
    for start in range(0, q.shape[1], QUERIES_PER_CHUNK):
        rows = slice(start, min(start + QUERIES_PER_CHUNK, q.shape[1]))
        if ends is not None:
            first = ends[:, rows, 0, None]
            end = ends[:, rows, 1, None]
            yield rows, ((first <= keys) & (keys < end))[:, None, None]
        elif ahead is not None:
            yield (
                rows,
                (keys <= torch.arange(rows.start, rows.stop)[:, None] + ahead)[None, None, None],
            )
        else:
            yield rows, None


def _masked_scores(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Return the scores [B, G, heads per key head, t, S], -inf where a key is not allowed."""
    scores = torch.einsum("btgrk,bsgk->bgrts", q.unflatten(2, (k.shape[2], -1)), k) * scale
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """Replace the -inf of rows without keys, whose weights exp(-inf - lse) are then zero."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


# --- Kernel calls ---------------------------------------------------------------------------------

QUERY_TILE_ROWS = 4 * SIMD_WIDTH  # queries per tile, which are the columns of a score tile
FLASH_KEY_BLOCK_SIZE = 64  # keys whose scores are computed before their values are read


class FlashAttentionArgs(ParallelKernelArgs):
    """Kernel arguments; strides count bytes. `make_contiguous` and `make_args` check the tensors.

    A work item lists its row x num_kv_heads + key head, first query row, number of query rows,
    first key, end of keys and part of the keys.
    """

    work_items: TensorArg = None  # [items, 6]
    query_rows: TensorArg = (
        None  # indices among all (b, t, h) of the queries, sorted by row and key head
    )
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

MAX_INDEX_BY_DTYPE = {
    torch.float32: 2**24,
    torch.float64: 2**53,
}  # largest key index that the dtype represents exactly


@torch.library.custom_op("headwise::gathered_attention", mutates_args=(), device_types="cpu")
def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, num_pairs: int
) -> list[Tensor]:
    """Return the attention of selected queries, [B, T, H, vdim], zeros for the others, and the
    log-sum-exp [B, T, H].

    The queries are q [B, T, H, dim]; keys and values are k and v [B, S, G, dim or vdim]. `tables`
    holds four int64 tensors: the indices of the selected queries among all (b, t, h), sorted by row
    and key head; the key ranges [1 or B, T, 2], each the first key of a token and the end of its
    keys; the work items of the forward pass and those of the backward pass, as `FlashAttentionArgs`
    describes them. `num_pairs` is the number of query-key pairs computed, which only the FLOP
    counter uses.
    """
    check_gathered_operands((q, k, v), tables[:3], QUERY_TILE_ROWS)
    return [*run_forward(q, k, v, tables, scale, q.new_zeros)]


@torch.library.custom_op(
    "headwise::gathered_attention_backward", mutates_args=(), device_types="cpu"
)
def gathered_attention_backward(
    grad: Tensor, tensors: list[Tensor], tables: list[Tensor], scale: float, num_pairs: int
) -> list[Tensor]:
    """Return the gradients of q, k and v; `tensors` holds q, k, v, the output
    and the log-sum-exp.
    """
    check_gathered_operands((*tensors, grad), [*tables[:2], tables[3]])
    return [*run_backward(grad, tensors, tables, scale, tensors[0].new_zeros)]


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    scale: float,
    allocate: Callable[..., Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the selected queries; `allocate` allocates both
    tensors.
    """
    q, k, v = make_contiguous(q, k, v)
    o = allocate(*q.shape[:3], v.shape[-1])
    lse = allocate(q.shape[:3])
    query_rows, key_ranges, items, _ = tables
    args = make_args(q, k, v, (items, query_rows, key_ranges), scale).replace(
        q=q, k=k, v=v, out=o, lse=lse
    )
    FLASH_ATTENTION_KERNELS.launch("forward", q.dtype, args)
    return o, lse


def run_backward(
    grad: Tensor,
    tensors: list[Tensor],
    tables: list[Tensor],
    scale: float,
    allocate: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `allocate` allocates that of q."""
    q, k, v, o, lse = tensors
    q, k, v = make_contiguous(q, k, v)
    query_rows, key_ranges, _, items = tables
    grads = d_q, d_k, d_v = allocate_gradients(
        q, k, v, len(items) // (len(k) * k.shape[2]), allocate
    )
    args = make_args(q, k, v, (items, query_rows, key_ranges), scale).replace(
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
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give all in one")
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
    q: Tensor, k: Tensor, v: Tensor, num_parts: int, allocate: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients: that of q once per part of the keys, those of k and v with rows of
    whole vectors.
    """
    batch, keys, groups, _ = k.shape
    d_k, d_v = (t.new_empty(batch, groups, keys, round_up_to_simd(t.shape[3])) for t in (k, v))
    return allocate(num_parts, *q.shape), d_k, d_v


def reduce_gradients(
    grads: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the gradients of q over the parts; return those of k and v in the layout of k and v,
    without padding.
    """
    d_q, *kv_grads = grads
    d_k, d_v = (
        d[:, :, : t.shape[1], : t.shape[3]].transpose(1, 2)
        for d, t in zip(kv_grads, (k, v), strict=True)
    )
    return d_q.sum(0) if len(d_q) > 1 else d_q[0], d_k, d_v


@gathered_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], scale: float, num_pairs: int
) -> list[Tensor]:
    return [q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])]


@gathered_attention_backward.register_fake
def _(
    grad: Tensor, tensors: list[Tensor], tables: list[Tensor], scale: float, num_pairs: int
) -> list[Tensor]:
    q, k, v, *_ = tensors
    return [*reduce_gradients(allocate_gradients(q, k, v, 1, q.new_empty), k, v)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, tables, ctx.scale, ctx.num_pairs = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *tables)


def _gathered_attention_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
    tensors = list(
        ctx.saved_tensors
    )  # read once: activation checkpointing unpacks saved tensors only once
    tables = tensors[5:]
    d_q, d_k, d_v = gathered_attention_backward(
        grads[0], tensors[:5], tables, ctx.scale, ctx.num_pairs
    )
    return d_q, d_k, d_v, [None] * len(tables), None, None


gathered_attention.register_autograd(_gathered_attention_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.gathered_attention)
def _gathered_attention_flops(
    q: Any, k: Any, v: Any, tables: Any, scale: float, num_pairs: int, **kwargs: Any
) -> int:
    return 2 * num_pairs * (q[3] + v[3])


@register_flop_formula(torch.ops.headwise.gathered_attention_backward)
def _gathered_attention_backward_flops(
    grad: Any, tensors: Any, tables: Any, scale: float, num_pairs: int, **kwargs: Any
) -> int:
    """Count the recomputed scores, and two gradients for each of the two products."""
    q, _, v, *_ = tensors
    return 2 * num_pairs * (3 * q[3] + 2 * v[3])


# --- Attention of all queries: plans, work items and the operations -------------------------------

MIN_KEYS_PER_PART = 512  # minimum number of keys in a part of the backward pass
MAX_KEY_PARTS = 4
TARGET_WORK_ITEMS = 16  # maximum number of parts, made to reach this many work items
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
    """Kernel arguments for one call signature, forward and backward, without
    the tensors of a call.
    """

    forward_args: FlashAttentionArgs
    backward_args: FlashAttentionArgs
    num_key_parts: int

    @staticmethod
    def from_tensors(
        q: Tensor, k: Tensor, v: Tensor, ahead: int | None, scale: float
    ) -> FlashAttentionPlan:
        """Return the plan for these tensors, cached by signature, as building it takes longer than
        a short call.
        """
        dtypes = q.dtype, k.dtype, v.dtype
        key = q.shape, k.shape, v.shape, k.stride(), v.stride(), dtypes, ahead, scale
        plan = _PLAN_CACHE.get(
            key
        )  # looked up once: another thread may clear the cache at any time
        if plan is None:
            if len(_PLAN_CACHE) >= MAX_CACHED_PLANS:
                _PLAN_CACHE.clear()
            shape = FlashAttentionShape.from_tensors(q, k)
            tables = [
                torch.from_numpy(np.ascontiguousarray(t)) for t in _make_work_items(shape, ahead)
            ]
            query_rows, key_ranges, *items_per_pass = tables
            forward_args, backward_args = (
                make_args(q, k, v, (items, query_rows, key_ranges), scale)
                for items in items_per_pass
            )
            num_key_parts = len(items_per_pass[1]) // (shape.batch * shape.num_kv_heads)
            plan = _PLAN_CACHE[key] = FlashAttentionPlan(forward_args, backward_args, num_key_parts)
        return plan


def _with_key_ranges(args: FlashAttentionArgs, key_ranges: Tensor | None) -> FlashAttentionArgs:
    """Write the caller's key ranges into the kernel arguments, if there are any."""
    if key_ranges is not None:
        args.key_ranges = key_ranges.contiguous()
        args.num_key_range_rows = len(key_ranges)
    return args


_PLAN_CACHE: dict[tuple[Any, ...], FlashAttentionPlan] = {}


def _make_work_items(shape: FlashAttentionShape, ahead: int | None) -> list[Any]:
    batch, queries, heads, keys, num_kv_heads = shape
    query_rows = (
        np.arange(batch * queries * heads)
        .reshape(batch, queries, num_kv_heads, shape.group_size)
        .swapaxes(1, 2)
        .ravel()
    )
    key_ends = np.minimum(np.arange(queries) + (keys if ahead is None else ahead) + 1, keys)
    return [
        query_rows,
        np.stack([0 * key_ends, key_ends], 1)[None],
        _forward_work_items(shape),
        _backward_work_items(shape),
    ]


def _forward_work_items(shape: FlashAttentionShape) -> Any:
    """Return work items of up to 64 queries each; the last queries, which read the most keys, come
    first.
    """
    rows = shape.queries * shape.group_size
    kv_rows = np.arange(shape.batch * shape.num_kv_heads)
    first_rows = np.arange(0, rows, QUERY_TILE_ROWS)[::-1]
    work_items = np.zeros((len(first_rows), len(kv_rows), 6), np.int64)
    work_items[..., 0], work_items[..., 1] = kv_rows, kv_rows * rows + first_rows[:, None]
    work_items[..., 2] = np.minimum(rows - first_rows, QUERY_TILE_ROWS)[:, None]
    work_items[..., 4] = shape.keys
    return work_items.reshape(-1, 6)


def _backward_work_items(shape: FlashAttentionShape) -> Any:
    """Return work items of all queries of a key head with one part of its keys; the first keys have
    the most work.
    """
    rows = shape.queries * shape.group_size
    kv_rows = np.arange(shape.batch * shape.num_kv_heads)
    num_parts = max(
        1, min(MAX_KEY_PARTS, TARGET_WORK_ITEMS // len(kv_rows), shape.keys // MIN_KEYS_PER_PART)
    )
    part_bounds = np.array(
        [*(shape.keys * part // num_parts // 4 * 4 for part in range(num_parts)), shape.keys]
    )  # multiples of the kernel's four-row tiles
    work_items = np.zeros((num_parts, len(kv_rows), 6), np.int64)
    work_items[..., 0] = kv_rows
    work_items[..., 1] = kv_rows * rows
    work_items[..., 2] = rows
    work_items[..., 3], work_items[..., 4], work_items[..., 5] = (
        part_bounds[:-1, None],
        part_bounds[1:, None],
        np.arange(num_parts)[:, None],
    )
    return work_items.reshape(-1, 6)


# Defined without `custom_op`, whose two Python wrappers per call take as long as a short call
# itself.
_LIBRARY = torch.library.Library("headwise", "FRAGMENT")
_LIBRARY.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? ends, SymInt? ahead, float scale) -> "
    "(Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    "flash_attention_backward(Tensor grad, Tensor[] tensors, Tensor? ends, SymInt? ahead, float "
    "scale)"
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
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        output: Tensor = _FlashAttention.apply(q, k, v, ends, ahead, scale)
        return output
    return FLASH_FORWARD_OP(q, k, v, ends, ahead, scale)[0]


class _FlashAttention(torch.autograd.Function):
    """Autograd function; the backward pass recomputes the scores from the
    log-sum-exp of each row.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        o, lse = FLASH_FORWARD_OP(q, k, v, *options)
        ctx.save_for_backward(q, k, v, o, lse, options[0])
        ctx.options = options[1:]
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        *tensors, ends = ctx.saved_tensors
        return *FLASH_BACKWARD_OP(grads[0], tensors, ends, *ctx.options), None, None, None


@torch.library.impl(_LIBRARY, "flash_attention", "CPU")
def _flash_forward_op(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores, [B, T, H]."""
    check_flash_operands((q, k, v), ends)
    if not FLASH_ATTENTION_KERNELS.is_usable(q.dtype):
        return attend_key_ranges_reference(q, k, v, ends, ahead, scale)
    q, k, v = make_contiguous(q, k, v)
    o = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3])
    plan = FlashAttentionPlan.from_tensors(q, k, v, ahead, scale)
    args = _with_key_ranges(plan.forward_args.replace(q=q, k=k, v=v, out=o, lse=lse), ends)
    FLASH_ATTENTION_KERNELS.launch("forward", q.dtype, args)
    return o, lse


@torch.library.impl(_LIBRARY, "flash_attention_backward", "CPU")
def _flash_backward_op(
    grad: Tensor, tensors: list[Tensor], ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `tensors` holds q, k, v, the output
    and the log-sum-exp.
    """
    check_flash_operands((*tensors, grad), ends)
    if not FLASH_ATTENTION_KERNELS.is_usable(grad.dtype):
        return attend_key_ranges_backward_reference(grad, tensors, ends, ahead, scale)
    q, k, v, o, lse = tensors
    q, k, v = make_contiguous(q, k, v)
    plan = FlashAttentionPlan.from_tensors(q, k, v, ahead, scale)
    # A tile that reads no key of a part does not write its gradients for that part.
    allocate = q.new_empty if ends is None and plan.num_key_parts == 1 else q.new_zeros
    grads = d_q, d_k, d_v = allocate_gradients(q, k, v, plan.num_key_parts, allocate)
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
    FLASH_ATTENTION_KERNELS.launch("backward", q.dtype, _with_key_ranges(args, ends))
    return reduce_gradients(grads, k, v)


@torch.library.register_fake("headwise::flash_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, ends: Any, ahead: Any, scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])


@torch.library.register_fake("headwise::flash_attention_backward")
def _(
    grad: Tensor, tensors: list[Tensor], ends: Any, ahead: Any, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = tensors
    return reduce_gradients(allocate_gradients(q, k, v, 1, q.new_empty), k, v)


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
    )  # tiles whose last row reads fewer than all keys
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


@register_flop_formula(torch.ops.headwise.flash_attention, get_raw=True)
def _flash_attention_flops(
    q: Tensor, k: Tensor, v: Tensor, ends: Any, ahead: Any, scale: float, **kwargs: Any
) -> int:
    return (
        2
        * count_executed_pairs(FlashAttentionShape.from_tensors(q, k), ends, ahead)
        * (q.shape[3] + v.shape[3])
    )


@register_flop_formula(torch.ops.headwise.flash_attention_backward, get_raw=True)
def _flash_attention_backward_flops(
    grad: Any, tensors: Any, ends: Any, ahead: Any, scale: float, **kwargs: Any
) -> int:
    """Count the recomputed scores, and two gradients for each of the two products."""
    q, k, v, *_ = tensors
    return (
        2
        * count_executed_pairs(FlashAttentionShape.from_tensors(q, k), ends, ahead)
        * (3 * q.shape[3] + 2 * v.shape[3])
    )

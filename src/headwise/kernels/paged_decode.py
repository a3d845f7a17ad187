"""Attention of one query per row over a paged KV cache, as a torch operation.

For row b and head h, with g = h // (H / G) and the keys j that the spans of row b list in pages:

    s[j] = scale * q[b, h] . k[j, g]                  (* key scale, then softcap, then + bias)
    o[b, h] = sum_j softmax(s)[j] v[j, g]             lse[b, h] = log sum_j exp(s[j])

`attend_paged_reference` computes this in plain PyTorch: it gathers the pages and keeps all scores,
and runs where a gradient is needed. The kernel reads pages in place. One call runs two kernels:
`plan` (see `split_kv_schedule`) splits the keys of every row into chunks of 256 and groups rows
that share a prefix, then all threads of the pool run `attend` (see `paged_decode_kernel`): for each
work item, for each block of 64 keys: scores, online softmax, weighted values. The last thread to
finish a row combines its splits (Flash-Decoding).

Kernels read memory by address, so shapes, dtypes and spans are checked here first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import launch
from .launch import (
    CACHE_LINE_BYTES,
    SIMD_WIDTH,
    WORD_BYTES,
    KernelSet,
    ParallelKernelArgs,
    TensorArg,
    pad_to_simd,
    round_up_to_simd,
)
from .operand_checks import (
    OperandChecks,
    can_skip_dispatcher,
    check_groups,
    is_under_functorch,
    refuse_operands,
)

KV_BLOCK_SIZE = 64
KV_SPLIT_SIZE = 256  # keys per block; keys per split, the unit of work of a thread
PLAN_ENTRY_FIELDS = 6  # int64 per entry of the plan
MAX_ROWS_TOGETHER = 8  # maximum number of rows that read a shared prefix together


class PagedDecodeArgs(ParallelKernelArgs):
    """Arguments of the kernels `plan` and `attend`; strides count bytes.

    A key is at `k + page x k_page_stride + head x k_head_stride + slot x k_slot_stride`; values and
    scales are stored by the same rule. The bias of a key is at `bias + row x bias_row_stride + head
    x bias_head_stride + column x bias_key_stride`. `num_items` is the number of threads before
    planning, and the number of work items afterwards.
    """

    # before planning the maximum number of splits, afterwards the maximum number of rows that share
    # a prefix
    max_splits: int = 0
    q: TensorArg = None  # [B, H, dim padded], already scaled
    k: TensorArg = None
    v: TensorArg = None
    spans: TensorArg = None  # [B, N, 3]: page, first slot, end
    bias: TensorArg = None
    sink: TensorArg = None  # [H]
    k_scale: TensorArg = None
    v_scale: TensorArg = None
    softcap: float = 0.0
    out: TensorArg = None  # [B, H, V]
    lse: TensorArg = None  # [B, H]
    # plan entries (see `split_kv_schedule`), one per work item, then the three tables below
    plan: TensorArg = None
    # address of [splits, 3]: span, slot, whether an earlier row's work item reads it too
    split_starts: int = 0
    row_splits: int = 0  # address of [B, 3]: first split, number of splits, splits done
    # address of [B, 3]: row, keys shared with the previous row in this order, keys
    row_order: int = 0
    # [splits, H, vdim padded + 2]: output, maximum and sum of each split
    partial_outputs: TensorArg = None
    batch: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    dim: int = 0
    vdim: int = 0
    num_spans: int = 0  # N
    num_pages: int = 0
    page_size: int = 0
    first_invalid: int = 0  # output: index of the first span outside its page, or -1
    k_page_stride: int = 0
    k_head_stride: int = 0
    k_slot_stride: int = 0
    v_page_stride: int = 0
    v_head_stride: int = 0
    v_slot_stride: int = 0
    bias_row_stride: int = 0
    bias_head_stride: int = 0
    bias_key_stride: int = 0
    scale_page_stride: int = 0
    scale_head_stride: int = 0
    scale_slot_stride: int = 0


def decode_scratch_bytes(heads: int, itemsize: int, rows: int = 1, qv_width: int = 0) -> int:
    """Return the scratch bytes per thread: addresses of two blocks, scores and factors by head, one
    vector.

    If several rows read a shared prefix together, it also holds their queries and partial outputs,
    `qv_width` elements per head, and a copy of the argument record.
    """
    lists = 2 * 4 * 8 * KV_BLOCK_SIZE
    record = WORD_BYTES * (len(PagedDecodeArgs.fields) + 1) if rows > 1 else 0
    heads *= rows
    numbers = (
        heads * KV_BLOCK_SIZE
        + round_up_to_simd(heads)
        + SIMD_WIDTH
        + (heads * qv_width if rows > 1 else 0)
    )
    return (
        (lists + numbers * itemsize + record + CACHE_LINE_BYTES - 1)
        // CACHE_LINE_BYTES
        * CACHE_LINE_BYTES
    )


def num_kv_splits(keys: int) -> int:
    """Return the number of splits of a row's keys; a row without keys has one empty split."""
    return max(1, -(-keys // KV_SPLIT_SIZE))


def plan_size(batch: int, max_splits: int) -> int:
    """Return the maximum number of int64 of a plan for `batch` rows and `max_splits` splits."""
    return (PLAN_ENTRY_FIELDS + 3) * max_splits + 6 * batch


KV_STORAGE_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
}
PAGED_DECODE_KERNELS = KernelSet(
    "paged_decode_kernel", KV_STORAGE_DTYPES, attend=("run_work_items", PagedDecodeArgs)
)
SCHEDULE_KERNELS = KernelSet("split_kv_schedule", {}, plan=("plan_split_kv", PagedDecodeArgs))

# --- The operation `headwise::paged_decode` -------------------------------------------------------


class PagedDecodeOptions(NamedTuple):
    """Optional inputs of `attend_paged`.

    - `bias` [B or 1, H or 1, N x S] is added to the score of the key in each column; -inf masks the
      key.
    - `sink` [H] adds one score per head that has no value (attention sinks, 2508.10925).
    - `k_scale` and `v_scale` [P, G, S], float32, multiply the keys and values of int8 pages.
    - `softcap` limits scores to +-softcap by tanh (2408.00118); 0 turns it off.
    """

    bias: Tensor | None = None
    sink: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    softcap: float = 0.0


DEFAULT_OPTIONS = PagedDecodeOptions()
EMPTY_TENSOR = torch.empty(0)
FLOATS = "float32 float64 bfloat16 float16: "
CHECKS = OperandChecks(
    "paged_decode",
    q=FLOATS + "B H K",
    k="float32 float64 bfloat16 int8: P G S K",
    v="float32 float64 bfloat16 int8: P G S V",
    spans="int64: B N 3?",
    bias=FLOATS + "1|B 1|H *?",
    sink=FLOATS + "H?",
    k_scale="float32: P G S?",
    v_scale="float32: P G S?",
)


def attend_paged(
    q_BHK: Tensor,
    k_PGSK: Tensor,
    v_PGSV: Tensor,
    spans_BN3: Tensor | None,
    *,
    scale: float,
    options: PagedDecodeOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Return o [B, H, V], the attention of one query per row and head over paged keys, and the
    log-sum-exp [B, H].

    `k_PGSK` and `v_PGSV` are P pages with S slots for each of G key heads, in any strides with
    last stride 1. `PagePool.views[layer]["k"]` has this layout, and a dense cache [B, S, G, K] has
    it when transposed: one page per row. H is a multiple of G, and neighbouring heads share a key
    head. V may differ from K.

    `spans_BN3` (int64) is the block table. Its entry (b, n) is `page, begin, end`: row b attends to
    slots begin to end
    - 1 of that page. A page may occur in several rows. A span with begin >= end is empty, and a row
      with only empty
    spans returns zeros. Spans are read in order, and the column of a key in `bias` is n x S + its
    slot. Keys of a prefix that several rows share are read once for all of them, 256 at a time.
    Without a table, row b attends to all of page b.

    The query has the dtype of the pages (float32 or bfloat16 for int8 pages), and so has the
    output. Sums are float32, or float64 for float64 pages. The result of a row depends neither on
    the number of threads nor on other rows, bit for bit. Where a gradient is needed, plain
    operations run, which store all scores.

    >>> import torch
    >>> k, v = (
    ...     torch.randn(5, 2, 4, 16),
    ...     torch.randn(5, 2, 4, 16),
    ... )  # five pages of four slots, two key heads
    >>> table = torch.tensor(
    ...     [[[3, 0, 4], [1, 0, 2]], [[3, 0, 4], [0, 0, 0]]]
    ... )  # six keys and four; page 3 is shared
    >>> o, lse = attend_paged(torch.randn(2, 6, 16), k, v, table, scale=0.25)
    >>> o.shape, lse.shape
    (torch.Size([2, 6, 16]), torch.Size([2, 6]))
    """
    tensors = _options_to_tensors(options)
    operands = (q_BHK, k_PGSK, v_PGSV, *tensors)
    if (
        (torch.is_grad_enabled() and any(t.requires_grad for t in operands))
        or is_under_functorch()
        or k_PGSK.dtype not in KV_STORAGE_DTYPES
        or not (SCHEDULE_KERNELS.is_usable() and PAGED_DECODE_KERNELS.is_usable(k_PGSK.dtype))
    ):
        return attend_paged_reference(
            q_BHK, k_PGSK, v_PGSV, spans_BN3, scale=scale, options=options
        )
    table = () if spans_BN3 is None else (spans_BN3,)
    run = _launch_paged_decode if can_skip_dispatcher(*operands, *table) else _attend_paged_op
    return run(q_BHK, k_PGSK, v_PGSV, spans_BN3, tensors, scale, options.softcap)


def _options_to_tensors(options: PagedDecodeOptions) -> list[Tensor]:
    """Replace None options by empty tensors: an operation's tensor list cannot hold None."""
    return [EMPTY_TENSOR if t is None else t for t in options[:4]]


@torch.library.custom_op("headwise::paged_decode", mutates_args=(), device_types="cpu")
def _attend_paged_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor | None,
    option_tensors: Sequence[Tensor],
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    return _launch_paged_decode(q, k, v, spans, option_tensors, scale, softcap)


def _launch_paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor | None,
    option_tensors: Sequence[Tensor],
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _check_operands(q, k, v, spans, option_tensors)
    batch, heads, dim = q.shape
    pages, num_kv_heads, page_size, vdim = v.shape
    dtype = _compute_dtype(k)
    out = q.new_empty(batch, heads, vdim, dtype=dtype)
    lse = q.new_empty(batch, heads, dtype=dtype)
    if not out.numel():
        return out.to(q.dtype), lse.fill_(-torch.inf)
    num_spans = 1 if spans is None else spans.shape[1]
    padded_q = pad_to_simd(q.to(dtype) * scale)
    k = _contiguous_channels(k)
    v = _contiguous_channels(v)
    max_splits = batch * num_kv_splits(num_spans * page_size)
    args = PagedDecodeArgs.make(
        num_items=launch.max_threads(),
        max_splits=max_splits,
        q=padded_q,
        k=k,
        v=v,
        spans=_row_table(batch, page_size) if spans is None else spans.contiguous(),
        out=out,
        lse=lse,
        plan=torch.empty(plan_size(batch, max_splits), dtype=torch.int64),
        partial_outputs=out.new_empty(max_splits * heads * (round_up_to_simd(vdim) + 2)),
        batch=batch,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        dim=dim,
        vdim=vdim,
        num_spans=num_spans,
        num_pages=pages,
        page_size=page_size,
        k_page_stride=k.stride(0) * k.itemsize,
        k_head_stride=k.stride(1) * k.itemsize,
        k_slot_stride=k.stride(2) * k.itemsize,
        v_page_stride=v.stride(0) * v.itemsize,
        v_head_stride=v.stride(1) * v.itemsize,
        v_slot_stride=v.stride(2) * v.itemsize,
        softcap=softcap,
    )
    _set_options(args, option_tensors, dtype)
    SCHEDULE_KERNELS.run_kernel("plan", None, args)
    if spans is not None and args.first_invalid >= 0:
        raise ValueError(_invalid_span_message(spans.reshape(-1, 3)[args.first_invalid], k))
    threads = min(launch.max_threads(), args.num_items)
    args.scratch_bytes = decode_scratch_bytes(
        heads, dtype.itemsize, args.max_splits, round_up_to_simd(dim) + round_up_to_simd(vdim) + 2
    )
    args.allocate_scratch(threads)
    PAGED_DECODE_KERNELS.run_kernel("attend", k.dtype, args, threads)
    return out.to(q.dtype), lse


def _compute_dtype(k: Tensor) -> torch.dtype:
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def _check_operands(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, option_tensors: Sequence[Tensor]
) -> None:
    """Raise ValueError for tensors that do not fit each other."""
    CHECKS.check(q, k, v, spans, *(t if t.numel() else None for t in option_tensors))
    check_groups("paged_decode", q.shape[1], k.shape[1])
    if k.dtype != v.dtype:
        refuse_operands("paged_decode", f"k, v are {k.dtype}, {v.dtype}", "give one dtype")
    if spans is None and len(q) != len(k):
        refuse_operands("paged_decode", f"there are {len(q)} rows and {len(k)} pages", "give spans")
    bias, _, *scales = option_tensors
    columns = (1 if spans is None else spans.shape[1]) * k.shape[2]
    if bias.numel() and bias.shape[2] not in (1, columns):
        fact = f"the bias is {list(bias.shape)}"
        refuse_operands("paged_decode", fact, f"give [B, H, N x S] with N x S = {columns}")
    num_scales = sum(t.numel() > 0 for t in scales)
    if k.numel() and num_scales != 2 * (k.dtype == torch.int8):
        fact = f"k and v are {k.dtype} and have {num_scales} scales"
        refuse_operands("paged_decode", fact, "give both scales for int8, none for other dtypes")


def _row_table(rows: int, slots: int) -> array[int]:
    """Return a block table in which each row attends to all of one page.

    It is an array: allocating a tensor takes longer than reading the table.
    """
    table = array("q")
    for row in range(rows):
        table.extend((row, 0, slots))
    return table


def _invalid_span_message(span: Tensor, k: Tensor) -> str:
    return (
        f"spans hold {span.tolist()}; give page, begin, end within {k.shape[0]} pages of "
        f"{k.shape[2]} slots"
    )


def _check_spans(spans: Tensor, k: Tensor) -> Tensor:
    """Return the spans with page 0 for empty ones; raise ValueError if one exceeds the pages."""
    page, begin, end = spans.unbind(-1)
    is_empty = begin >= end
    is_valid = is_empty | ((begin >= 0) & (end <= k.shape[2]) & (page >= 0) & (page < k.shape[0]))
    if not bool(is_valid.all()):
        raise ValueError(_invalid_span_message(spans[~is_valid][0], k))
    return spans.masked_fill(is_empty[..., None], 0)


def _set_options(
    args: PagedDecodeArgs, option_tensors: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Write the tensor options into the kernel arguments."""
    bias, sink, k_scale, v_scale = option_tensors
    if bias.numel():
        args.bias = bias = bias.to(dtype)
        args.bias_row_stride, args.bias_head_stride, args.bias_key_stride = (
            0 if bias.shape[n] == 1 else bias.stride(n) for n in range(3)
        )
    if sink.numel():
        args.sink = sink.to(dtype).contiguous()
    if k_scale.numel():
        if k_scale.stride() != v_scale.stride():
            k_scale = k_scale.contiguous()
            v_scale = v_scale.contiguous()
        args.k_scale = k_scale
        args.v_scale = v_scale
        args.scale_page_stride, args.scale_head_stride, args.scale_slot_stride = k_scale.stride()


def _contiguous_channels(t: Tensor) -> Tensor:
    """Return t with stride 1 along its channels."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


@_attend_paged_op.register_fake
def _fake_attend_paged(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2])


@register_flop_formula(torch.ops.headwise.paged_decode)
def _flops(
    q: Any, k: Any, v: Any, spans: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Count both products over every slot of the table; how many slots the spans skip is only known
    from the data.
    """
    return 2 * q[0] * q[1] * (1 if spans is None else spans[1]) * k[2] * (q[2] + v[3])


def attend_paged_reference(
    q_BHK: Tensor,
    k_PGSK: Tensor,
    v_PGSV: Tensor,
    spans_BN3: Tensor | None,
    *,
    scale: float,
    options: PagedDecodeOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """Compute `attend_paged` in plain PyTorch: gathers every slot of the table and keeps all
    scores.
    """
    option_tensors = _options_to_tensors(options)
    k, v, spans = k_PGSK, v_PGSV, spans_BN3
    if torch.compiler.is_compiling():  # a graph reads no value, so it only empties unused spans
        if spans is not None:
            spans = spans.masked_fill(spans[..., 1:2] >= spans[..., 2:3], 0)
    elif not is_under_functorch():
        _check_operands(q_BHK, k, v, spans, option_tensors)
        spans = None if spans is None else _check_spans(spans, k)
    q = q_BHK.to(_compute_dtype(k)) * scale
    softcap = options.softcap
    if spans is None:
        row = torch.arange(len(q), device=k.device)
        spans = torch.stack([row, torch.zeros_like(row), torch.full_like(row, k.shape[2])], -1)[
            :, None
        ]
    bias, sink, k_scale, v_scale = option_tensors
    slot = torch.arange(k.shape[2], device=k.device)
    allowed = ((slot >= spans[..., 1:2]) & (slot < spans[..., 2:3])).flatten(1)[:, None]
    # Slots outside the spans may hold NaN or inf, and 0 x NaN is NaN in gradients: zero them first.
    page_lists = (
        _gather_pages(t, scale, spans[..., 0], q.dtype) for t, scale in ((k, k_scale), (v, v_scale))
    )
    keys, values = (t.masked_fill(~allowed[..., None], 0.0) for t in page_lists)
    group_size = q.shape[1] // k.shape[1]
    s_BHS = (q.unflatten(1, (-1, group_size)) @ keys.transpose(-1, -2)).flatten(1, 2)
    if softcap:
        s_BHS = torch.tanh(s_BHS / softcap) * softcap
    if bias.numel():
        s_BHS = s_BHS + bias.to(q.dtype)
        allowed = allowed & (bias != -torch.inf)
    s_BHS = s_BHS.masked_fill(~allowed, -torch.inf)
    scores_and_sink = s_BHS
    if sink.numel():
        scores_and_sink = torch.cat([s_BHS, sink.to(q.dtype)[:, None].expand(len(q), -1, 1)], -1)
    log_sums = scores_and_sink.logsumexp(-1)
    w_BHS = (s_BHS - log_sums.masked_fill(log_sums == -torch.inf, 0.0)[..., None]).exp()
    o = (w_BHS.unflatten(1, (-1, group_size)) @ values).flatten(1, 2)
    return o.to(q_BHK.dtype), s_BHS.logsumexp(-1)


def _gather_pages(t: Tensor, scale: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the pages of each row concatenated, [B, G, N x S, K], in the dtype for computing."""
    numbers = t.to(dtype) if not scale.numel() else t.to(dtype) * scale[..., None]
    return numbers[pages].transpose(1, 2).flatten(2, 3)

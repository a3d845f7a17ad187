"""Whether spans lie within the pages that there are: who reads memory by its address looks first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numba import extending
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import jit
from .autograd_guards import can_skip_dispatcher, is_under_functorch
from .jit import KernelSet
from .kv_block_attention import PagedDecodeArgs, decode_scratch_bytes, num_kv_splits, plan_size
from .paged_decode_kernel import PAGED_DECODE_KERNELS
from .simd import SIMD_WIDTH, load_int64, round_up_to_simd, store_value
from .small_batch_ops import is_small_batch, scale_to_float32


def find_invalid_span(spans_BN3: Tensor, pages: int, slots: int) -> int:
    """The first span that names some slots and not only such as there are; -1 where there is none.

    >>> import torch
    >>> find_invalid_span(torch.tensor([[[1, 0, 4], [9, 2, 2], [1, 0, 5]]]), pages=2, slots=4)
    2
    """
    held = spans_BN3.contiguous()
    table = array("q", (held.data_ptr(), held.numel() // 3, pages, slots, -1))
    jit.run_in_threads(SPAN_CHECK_KERNELS.function_address("search"), table.buffer_info()[0], 1)
    return table[4]


@extending.register_jitable
def search_invalid_span(table):
    """Go through all spans, from the last to the first."""
    first, count, pages, slots = (
        load_int64(table),
        load_int64(table + 8),
        load_int64(table + 16),
        load_int64(table + 24),
    )
    for n in range(count - 1, -1, -1):
        page, begin, end = load_int64(first + 24 * n), load_int64(first + 24 * n + 8), load_int64(first + 24 * n + 16)
        if begin < end and (begin < 0 or end > slots or page < 0 or page >= pages):
            store_value(table + 32, n)


SPAN_CHECK_KERNELS = KernelSet({}, search=search_invalid_span)

# --- `decode` ------------------------------------------------------------------------------------------


class PagedDecodeOptions(NamedTuple):
    """What only some calls have: `bias` [B or 1, H or 1, N x S] is added to the score of the key in each column, where
    -inf hides it; `sink` [H] is one score more, without a value (2508.10925); `scales` of keys and of values, both
    [P, G, S] in float32, are what pages of int8 are multiplied with; scores saturate at +-`cap` (2408.00118), if not 0.
    """

    bias: Tensor | None = None
    sink: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    softcap: float = 0.0


DEFAULT_OPTIONS, EMPTY_TENSOR = PagedDecodeOptions(), torch.empty(0)
KV_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8)


def attend_paged(
    q_BHK: Tensor,
    k_PGSK: Tensor,
    v_PGSV: Tensor,
    spans_BN3: Tensor | None,
    *,
    scale: float,
    options: PagedDecodeOptions = DEFAULT_OPTIONS,
) -> tuple[Tensor, Tensor]:
    """What one query of every head of every row reads, o [B, H, V], and the log-sum-exp of its scores, [B, H].

    Keys lie in pages: `k_PGSK` and `v_PGSV` are P pages with S slots for each of G key heads, in any strides whose last
    is 1. `Pool.views[layer]["k"]` is such a tensor as it stands, and a dense cache [B, S, G, K] is one when transposed:
    a page for each row. H is a multiple of G, and neighbouring heads share a key head. V may differ from K.

    `spans_BN3` (int64) is the table: for each n, row b reads the slots from `begin` to before `end` of a page, told as
    `page, begin, end`. A page may stand in several rows. A span with begin >= end is nothing, and a row that has
    nothing else reads zero. Spans are read in order, and the column of a key is n x S + its slot. Keys that tables of
    several rows begin with are read once for all of them, in blocks. Without a table every row reads all of a page of
    its own.

    The query is of the dtype of the pages (with int8, float32 or bfloat16), and so is what it reads; sums are float32,
    of float64 float64. What a row reads depends neither on the number of threads nor on other rows, bit for bit.
    Gradients reach the query, pages, bias and sink by a second pass in plain operations, which keeps every score.

    >>> import torch
    >>> k, v = torch.randn(5, 2, 4, 16), torch.randn(5, 2, 4, 16)  # five pages of four slots, two key heads
    >>> table = torch.tensor([[[3, 0, 4], [1, 0, 2]], [[3, 0, 4], [0, 0, 0]]])  # six keys and four; page 3 is shared
    >>> o, lse = attend_paged(torch.randn(2, 6, 16), k, v, table, scale=0.25)
    >>> o.shape, lse.shape
    (torch.Size([2, 6, 16]), torch.Size([2, 6]))
    """
    if reason := _unsupported_reasons(q_BHK, k_PGSK, v_PGSV, spans_BN3, options):
        raise ValueError(reason)
    if is_under_functorch():
        return attend_paged_reference(q_BHK, k_PGSK, v_PGSV, spans_BN3, scale=scale, options=options)
    exact = torch.float64 if k_PGSK.dtype == torch.float64 else torch.float32
    told, table = _options_to_tensors(options), () if spans_BN3 is None else (spans_BN3,)
    run = _launch_paged_decode if can_skip_dispatcher(q_BHK, k_PGSK, v_PGSV, *told, *table) else _attend_paged_op
    q = (
        scale_to_float32(q_BHK, scale)
        if run is _launch_paged_decode and is_small_batch(q_BHK)
        else q_BHK.to(exact) * scale
    )
    o, lse = run(q, k_PGSK, v_PGSV, spans_BN3, told, options.softcap)
    return o.to(q_BHK.dtype), lse


def _unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, beside: PagedDecodeOptions) -> str:
    """Why the kernel, which reads memory by its address, would read something else."""
    (rows, heads, dim), pages = q.shape, k.shape
    if heads % pages[1] or dim != pages[3] or pages[:3] != v.shape[:3]:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        return f"q, k, v are {shapes}; give [B, H, K], [P, G, S, K], [P, G, S, V] with H a multiple of G"
    if k.dtype not in KV_DTYPES or k.dtype != v.dtype or (k.dtype == torch.int8) == (beside.k_scale is None):
        return f"keys are {k.dtype}, values {v.dtype}; give both in one of {KV_DTYPES}, int8 with scales"
    if spans is None:
        return "" if rows == pages[0] else f"there are {rows} rows and {pages[0]} pages; give spans"
    if spans.dtype != torch.int64 or spans.shape[::2] != (rows, 3):
        return f"spans are {spans.dtype} {list(spans.shape)}; give int64 [{rows}, N, 3]"
    return ""


def _options_to_tensors(beside: PagedDecodeOptions) -> list[Tensor]:
    """The tensors of it; nothing stands for those that it does not have, as an operation's list has no gaps."""
    return [EMPTY_TENSOR if t is None else t for t in beside[:4]]


@torch.library.custom_op("headwise::decode", mutates_args=(), device_types="cpu")
def _attend_paged_op(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, more: Sequence[Tensor], cap: float
) -> tuple[Tensor, Tensor]:
    return _launch_paged_decode(q, k, v, spans, more, cap)


def _launch_paged_decode(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, more: Sequence[Tensor], cap: float
) -> tuple[Tensor, Tensor]:
    (batch, heads, dim), (_, groups, page, vdim), size = q.shape, v.shape, q.itemsize
    out, lse = q.new_empty(batch, heads, vdim), q.new_empty(batch, heads)
    if not out.numel():
        return out, lse.fill_(-torch.inf)
    table, count = _block_table(spans, batch, k)
    _check_bounds(q, k, count, more)
    q, k, v = _pad_channels(q).contiguous(), _contiguous_channels(k), _contiguous_channels(v)
    most = batch * num_kv_splits(count * page)
    notes = torch.empty(plan_size(batch, most), dtype=torch.int64)
    parts = q.new_empty(most * heads * (round_up_to_simd(vdim) + 2))
    told = array("q", bytes(8 * len(PagedDecodeArgs)))
    kept = _write_option_args(told, more, cap, q.dtype)
    for at, tensor in (
        (PagedDecodeArgs.Q, q),
        (PagedDecodeArgs.K, k),
        (PagedDecodeArgs.V, v),
        (PagedDecodeArgs.OUT, out),
        (PagedDecodeArgs.LSE, lse),
    ):
        told[at // 8] = tensor.data_ptr()
    told[PagedDecodeArgs.SPANS // 8] = table.buffer_info()[0] if isinstance(table, array) else table.data_ptr()
    (
        told[PagedDecodeArgs.PLAN // 8],
        told[PagedDecodeArgs.MAX_SPLITS // 8],
        told[PagedDecodeArgs.NUM_WORK_ITEMS // 8],
    ) = notes.data_ptr(), most, jit.max_threads()
    told[PagedDecodeArgs.BATCH // 8 : PagedDecodeArgs.PAGE_SIZE // 8 + 1] = array(
        "q", (batch, heads, groups, dim, vdim, count, page)
    )
    told[PagedDecodeArgs.K_PAGE_STRIDE // 8 : PagedDecodeArgs.V_SLOT_STRIDE // 8 + 1] = array(
        "q", [t.stride(n) * t.itemsize for t in (k, v) for n in range(3)]
    )
    address = told.buffer_info()[0]
    jit.run_in_threads(PAGED_DECODE_KERNELS.function_address("plan"), address, 1)
    threads = min(jit.max_threads(), told[PagedDecodeArgs.NUM_WORK_ITEMS // 8])
    own = decode_scratch_bytes(
        heads, size, told[PagedDecodeArgs.MAX_SPLITS // 8], round_up_to_simd(dim) + round_up_to_simd(vdim) + 2
    )
    desks = torch.empty(threads * own, dtype=torch.uint8)
    (
        told[PagedDecodeArgs.PARTIAL_OUTPUTS // 8],
        told[PagedDecodeArgs.SCRATCH // 8],
        told[PagedDecodeArgs.SCRATCH_BYTES // 8],
    ) = parts.data_ptr(), desks.data_ptr(), own
    jit.run_in_threads(PAGED_DECODE_KERNELS.function_address("work", k.dtype), address, threads)
    del kept, table  # till here what they hold had to live
    return out, lse


def _block_table(spans: Tensor | None, rows: int, k: Tensor) -> tuple[Tensor | array[int], int]:
    """The table, refused where it names what lies beside the pages, and how many spans a row has in it.

    One that is not given is no tensor: those take longer to make than to read.
    """
    pages, _, slots, _ = k.shape
    if spans is None:
        return array("q", [number for row in range(rows) for number in (row, 0, slots)]), 1
    if (n := find_invalid_span(spans, pages, slots)) >= 0:
        told = spans.reshape(-1, 3)[n].tolist()
        raise ValueError(f"spans hold {told}; give page, begin, end within {pages} pages of {slots} slots")
    return spans.contiguous(), spans.shape[1]


def _check_bounds(q: Tensor, k: Tensor, count: int, more: Sequence[Tensor]) -> None:
    """Refuse what lies beside the memory of a call: here, where numbers are known of a compiled graph too."""
    (rows, heads, _), (pages, groups, slots, _), (bias, sink, *scales) = q.shape, k.shape, more
    whole = rows, heads, count * slots
    if bias.numel() and any(n not in (1, most) for n, most in zip(bias.shape, whole, strict=True)):
        raise ValueError(f"the bias is {list(bias.shape)}; give [B, H, N x S] as {list(whole)}, or 1 for what is alike")
    if sink.numel() not in (0, heads):
        raise ValueError(f"there are {sink.numel()} sinks; give one for each of {heads} heads")
    if any(t.numel() and (t.shape != (pages, groups, slots) or t.dtype != torch.float32) for t in scales):
        told = ", ".join(f"{t.dtype} {list(t.shape)}" for t in scales)
        raise ValueError(f"scales are {told}; give float32 [{pages}, {groups}, {slots}]")


def _write_option_args(told: array[int], more: Sequence[Tensor], cap: float, exact: torch.dtype) -> list[Tensor]:
    """Write down what only some calls have; the tensors that are pointed to."""
    bias, sink, k_scale, v_scale = more
    kept: list[Tensor] = []
    if bias.numel():
        kept.append(bias := bias.to(exact))
        strides = [0 if bias.shape[n] == 1 else bias.stride(n) * bias.itemsize for n in range(3)]
        (
            told[PagedDecodeArgs.BIAS // 8],
            told[PagedDecodeArgs.BIAS_ROW_STRIDE // 8 : PagedDecodeArgs.BIAS_KEY_STRIDE // 8 + 1],
        ) = bias.data_ptr(), array("q", strides)
    if sink.numel():
        kept.append(sink := sink.to(exact).contiguous())
        told[PagedDecodeArgs.SINK // 8] = sink.data_ptr()
    if cap:
        kept.append(limit := torch.tensor([cap], dtype=exact))
        told[PagedDecodeArgs.SOFTCAP // 8] = limit.data_ptr()
    if k_scale.numel():
        if k_scale.stride() != v_scale.stride():
            k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
        kept += [k_scale, v_scale]
        told[PagedDecodeArgs.K_SCALE // 8], told[PagedDecodeArgs.V_SCALE // 8] = k_scale.data_ptr(), v_scale.data_ptr()
        told[PagedDecodeArgs.SCALE_PAGE_STRIDE // 8 : PagedDecodeArgs.SCALE_SLOT_STRIDE // 8 + 1] = array(
            "q", [k_scale.stride(n) * 4 for n in range(3)]
        )
    return kept


def _pad_channels(q: Tensor) -> Tensor:
    """The same with its channels in whole vectors."""
    lacking = -q.shape[-1] % SIMD_WIDTH
    return F.pad(q, (0, lacking)) if lacking else q


def _contiguous_channels(t: Tensor) -> Tensor:
    """The same with its channels side by side."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


@_attend_paged_op.register_fake
def _fake_attend_paged(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2])


@register_flop_formula(torch.ops.headwise.decode)
def _flops(q: Any, k: Any, v: Any, spans: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
    """Both products over all slots that the table names, read or not: what a span leaves out only the data say."""
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
    """The same in plain operations: every slot of the table is gathered, every score formed."""
    exact = torch.float64 if k_PGSK.dtype == torch.float64 else torch.float32
    o, lse = _attend_paged_reference(
        q_BHK.to(exact) * scale, k_PGSK, v_PGSV, spans_BN3, _options_to_tensors(options), options.softcap
    )
    return o.to(q_BHK.dtype), lse


def _attend_paged_reference(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, more: Sequence[Tensor], cap: float
) -> tuple[Tensor, Tensor]:
    if spans is None:
        row = torch.arange(len(q), device=k.device)
        spans = torch.stack([row, torch.zeros_like(row), torch.full_like(row, k.shape[2])], -1)[:, None]
    bias, sink, k_scale, v_scale = more
    slot = torch.arange(k.shape[2], device=k.device)
    allowed = ((slot >= spans[..., 1:2]) & (slot < spans[..., 2:3])).flatten(1)[:, None]
    # What nobody reads may be anything, and would be NaN in gradients: times nothing.
    told = (_gather_pages(t, scale, spans[..., 0], q.dtype) for t, scale in ((k, k_scale), (v, v_scale)))
    keys, values = (t.masked_fill(~allowed[..., None], 0.0) for t in told)
    each = q.shape[1] // k.shape[1]
    s_BHS = (q.unflatten(1, (-1, each)) @ keys.transpose(-1, -2)).flatten(1, 2)
    if cap:
        s_BHS = torch.tanh(s_BHS / cap) * cap
    if bias.numel():
        s_BHS, allowed = s_BHS + bias.to(q.dtype), allowed & (bias != -torch.inf)
    s_BHS = s_BHS.masked_fill(~allowed, -torch.inf)
    ends = s_BHS if not sink.numel() else torch.cat([s_BHS, sink.to(q.dtype)[:, None].expand(len(q), -1, 1)], -1)
    whole = ends.logsumexp(-1)
    w_BHS = (s_BHS - whole.masked_fill(whole == -torch.inf, 0.0)[..., None]).exp()
    return (w_BHS.unflatten(1, (-1, each)) @ values).flatten(1, 2), s_BHS.logsumexp(-1)


def _gather_pages(t: Tensor, scale: Tensor, pages: Tensor, exact: torch.dtype) -> Tensor:
    """[B, G, N x S, K]: the pages of each row, one after the other."""
    told = t.to(exact) if not scale.numel() else t.to(exact) * scale[..., None]
    return told[pages].transpose(1, 2).flatten(2, 3)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, spans, more, ctx.cap = inputs
    ctx.save_for_backward(q, k, v, spans, *more)


def _attend_paged_backward(ctx: Any, o_grad: Tensor, lse_grad: Tensor) -> tuple[Any, ...]:
    """The gradient of the plain form, formed anew."""
    q, k, v, spans, *more = ctx.saved_tensors
    needed, again = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[4]], torch.is_grad_enabled()
    given = [
        t.view_as(t) if again and need else t.detach().requires_grad_(need)  # a view has no hooks of its own
        for t, need in zip([q, k, v, *more], needed, strict=True)
    ]
    with torch.enable_grad():
        found = _attend_paged_reference(given[0], given[1], given[2], spans, given[3:], ctx.cap)
    wanted, told = [t for t in given if t.requires_grad], zip(found, (o_grad, lse_grad), strict=True)
    made, slopes = zip(*((t, grad) for t, grad in told if t.requires_grad), strict=True)  # lse sees no values
    grads = iter(torch.autograd.grad(made, wanted, slopes, allow_unused=True, create_graph=again))
    each = [next(grads) if t.requires_grad else None for t in given]
    return *each[:3], None, each[3:], None


_attend_paged_op.register_autograd(_attend_paged_backward, setup_context=_save_for_backward)

"""`decode`: one query of each row reads keys wherever they lie. A custom operation of torch."""

from __future__ import annotations

from array import array
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import team

KINDS = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.int8: "int8"}


def decode(
    q_BHK: Tensor,
    k_PGSK: Tensor,
    v_PGSV: Tensor,
    spans_BN3: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    cap: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """What one query of every head of every row reads, o [B, H, V], and the log-sum-exp of its scores, [B, H].

    Keys lie in pages: `k_PGSK` and `v_PGSV` are P pages with S slots for each of G key heads, in any strides whose last
    is 1; `Pool.views[layer]["k"]` is one such tensor as it stands, and a dense cache [B, S, G, K] is one when transposed,
    a page for each row. H is a multiple of G, and neighbouring heads share a key head. V may differ from K.

    `spans_BN3` (int64) is the table: row b reads, for each n, slots `begin` to `end` (not included) of a page, as
    `page, begin, end`. A page may stand in several rows; a span with begin >= end is nothing, and a row that has nothing
    else reads zero. Spans are read in order, and a key's column is n x S + its slot.

    A score is scale q k, saturated at +-cap where that is not 0 (2408.00118), plus `bias` [B or 1, H or 1, N x S] at the
    key's column; -inf hides it. `sink` [H] is one score more that has no value (2508.10925). Pages of int8 have `scales`
    of keys and values [P, G, S], float32, by which each of their numbers is multiplied.

    The query is of the pages' dtype (with int8, float32 or bfloat16), and so is what it reads; sums are float32, or
    float64 for float64. Results do not depend on the number of threads, bit for bit. Gradients reach q, k, v, bias and
    sink, by a second pass in plain operations that keeps every score.

    >>> import torch
    >>> k, v = torch.randn(5, 2, 4, 16), torch.randn(5, 2, 4, 16)  # five pages of four slots, two key heads
    >>> table = torch.tensor([[[3, 0, 4], [1, 0, 2]], [[3, 0, 4], [0, 0, 0]]])  # six keys and four; page 3 is shared
    >>> o, lse = decode(torch.randn(2, 6, 16), k, v, table, scale=0.25)
    >>> o.shape, lse.shape
    (torch.Size([2, 6, 16]), torch.Size([2, 6]))
    """
    k_scale, v_scale = (None, None) if scales is None else scales
    return _decode(q_BHK, k_PGSK, v_PGSV, spans_BN3, scale, bias, sink, cap, k_scale, v_scale)


@torch.library.custom_op("headwise::decode", mutates_args=(), device_types="cpu")
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    scale: float,
    bias: Tensor | None,
    sink: Tensor | None,
    cap: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from .decoding import entry  # here: Numba takes a second to import
    from .told import At, desk, pieces, wide

    exact = torch.float64 if k.dtype == torch.float64 else torch.float32
    (batch, heads, dim), (_, groups, page, vdim), size = q.shape, v.shape, exact.itemsize
    out, lse = q.new_empty(batch, heads, vdim, dtype=exact), q.new_empty(batch, heads, dtype=exact)
    if not out.numel():
        return out.to(q.dtype), lse.fill_(-torch.inf)
    given, q = q.dtype, F.pad(q.to(exact) * scale, (0, wide(dim) - dim)).contiguous()
    k, v, spans = _steady(k), _steady(v), spans.contiguous()
    most = batch * pieces(spans.shape[1] * page)
    threads, own = min(team.most(), most), desk(heads, size)
    notes = torch.empty(4 * most + 3 * batch, dtype=torch.int64)
    parts = torch.empty(most * heads * (wide(vdim) + 2), dtype=exact)
    desks = torch.empty(threads * own, dtype=torch.uint8)
    told = array("q", bytes(8 * len(At)))
    more = _extras(told, (bias, sink, cap, k_scale, v_scale), (heads, spans.shape[1] * page), exact)
    for at, tensor in ((At.Q, q), (At.K, k), (At.V, v), (At.SPANS, spans), (At.OUT, out), (At.LSE, lse)):
        told[at // 8] = tensor.data_ptr()
    told[At.PLAN // 8], told[At.ROWS // 8] = notes.data_ptr(), notes.data_ptr() + 32 * most
    told[At.PARTS // 8], told[At.DESK // 8], told[At.DESK_SIZE // 8] = parts.data_ptr(), desks.data_ptr(), own
    sizes = (batch, heads, groups, dim, vdim, spans.shape[1], page)
    told[At.BATCH // 8 : At.PAGE // 8 + 1] = array("q", sizes)
    told[At.K_PAGE // 8 : At.V_SLOT // 8 + 1] = array("q", [t.stride(n) * t.itemsize for t in (k, v) for n in range(3)])
    address = told.buffer_info()[0]
    team.run(entry("plan"), address, 1)
    team.run(entry(KINDS[k.dtype]), address, threads)
    del more  # it had to live as long
    return out.to(given), lse


def _extras(told: array[int], given: tuple[Any, ...], shape: tuple[int, int], exact: torch.dtype) -> list[Tensor]:
    """Write down what only some calls have; the tensors that it points to."""
    from .told import At

    bias, sink, cap, k_scale, v_scale = given
    kept: list[Tensor] = []
    if bias is not None:
        bias = bias.to(exact)
        kept.append(bias)
        strides = [0 if bias.shape[n] == 1 else bias.stride(n) * bias.itemsize for n in range(2)]
        told[At.BIAS // 8] = bias.data_ptr()
        told[At.BIAS_ROW // 8 : At.BIAS_KEY // 8 + 1] = array("q", [*strides, bias.stride(2) * bias.itemsize])
    if sink is not None:
        kept.append(sink.to(exact).contiguous())
        told[At.SINK // 8] = kept[-1].data_ptr()
    if cap:
        kept.append(torch.tensor([cap], dtype=exact))
        told[At.CAP // 8] = kept[-1].data_ptr()
    if k_scale is not None and v_scale is not None:
        if k_scale.stride() != v_scale.stride():
            k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
        kept += [k_scale, v_scale]
        told[At.K_SCALE // 8], told[At.V_SCALE // 8] = k_scale.data_ptr(), v_scale.data_ptr()
        told[At.SCALE_PAGE // 8 : At.SCALE_SLOT // 8 + 1] = array("q", [k_scale.stride(n) * 4 for n in range(3)])
    return kept


def _steady(t: Tensor) -> Tensor:
    """The same with its channels side by side."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


@_decode.register_fake
def _shapes(q, k, v, spans, scale, bias, sink, cap, k_scale, v_scale):
    exact = torch.float64 if k.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=exact)


@register_flop_formula(torch.ops.headwise.decode)
def _flops(q, k, v, spans, *rest, out_shape=None, **more) -> int:
    """Both products over all slots that the table names, read or not: what a span leaves out only the data say."""
    return 2 * q[0] * q[1] * spans[1] * k[2] * (q[2] + v[3])


def plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    scale: float,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain operations: every slot of the table is gathered, every score formed."""
    exact = torch.float64 if k.dtype == torch.float64 else torch.float32
    slot = torch.arange(k.shape[2], device=k.device)
    allowed = ((slot >= spans[..., 1:2]) & (slot < spans[..., 2:3])).flatten(1)[:, None]
    keys, values = (_laid(t, s, spans[..., 0], exact) for t, s in ((k, k_scale), (v, v_scale)))
    each = q.shape[1] // k.shape[1]
    s_BHS = (q.to(exact).unflatten(1, (-1, each)) @ keys.transpose(-1, -2)).flatten(1, 2) * scale
    if cap:
        s_BHS = torch.tanh(s_BHS / cap) * cap
    if bias is not None:
        s_BHS = s_BHS + bias.to(exact)
    s_BHS = s_BHS.masked_fill(~allowed, -torch.inf)
    ends = s_BHS if sink is None else torch.cat([s_BHS, sink.to(exact)[:, None].expand(len(q), -1, 1)], -1)
    lse = ends.logsumexp(-1)
    w_BHS = (s_BHS - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    o = (w_BHS.unflatten(1, (-1, each)) @ values).flatten(1, 2)
    return o.to(q.dtype), lse


def _laid(t: Tensor, scale: Tensor | None, pages: Tensor, exact: torch.dtype) -> Tensor:
    """[B, G, N x S, K]: the pages of each row, one after the other."""
    told = t.to(exact) if scale is None else t.to(exact) * scale[..., None]
    return told[pages].transpose(1, 2).flatten(2, 3)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(given if isinstance(given, Tensor) else None for given in inputs))
    ctx.plain = {n: given for n, given in enumerate(inputs) if not isinstance(given, Tensor)}


def _back(ctx: Any, o_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
    given = list(ctx.saved_tensors)
    wanted = [n for n, needed in enumerate(ctx.needs_input_grad) if needed]
    with torch.enable_grad():
        told = [ctx.plain.get(n, None if t is None else t.detach()) for n, t in enumerate(given)]
        for n in wanted:
            told[n].requires_grad_()
        found = plainly(*told)
    grads = torch.autograd.grad(found, [told[n] for n in wanted], [o_grad, lse_grad], allow_unused=True)
    return tuple(grads[wanted.index(n)] if n in wanted else None for n in range(len(given)))


_decode.register_autograd(_back, setup_context=_keep)

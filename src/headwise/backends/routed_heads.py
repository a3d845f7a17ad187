"""Mixture of heads: heads that are closed for a token skip its query, in the forward and the
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interfaces import Gate, OutputStep, ScoreStep
from ..interfaces.core_types import CallSize, Probe
from ..kernels.autograd_guards import NO_DOUBLE_BACKWARD_REMEDY, forbid_double_backward
from ..kernels.flash_attention import FLASH_ATTENTION_KERNELS, QUERY_TILE_ROWS, gathered_attention
from ..kernels.launch import COMPUTE_DTYPES, has_kernels
from ..masking.patterns import Causal, Full
from ..masking.sequence_info import AttentionMask
from ..parts.softmax import Softmax
from . import sdpa
from .core_interface import CallSignature, CoreInputs, CoreSteps, no_tensor_conflicts

QUERIES_PER_CHUNK = 64  # about this many queries of a KV head share a masked call
UNMASKED_CHUNKS_PER_CALL = (
    4  # chunks that share a call over keys which all of their queries may attend to
)
BACKWARD_KEYS_PER_CALL = 256  # keys per call of the backward pass
MIN_FILL_RATIO = (
    0.8  # heads that are packed together have at least this share of the rows of the longest
)


class PackedQueries(NamedTuple):
    """The open queries of some KV heads, [B, KV heads, rows], in chunks of equal length.

    All heads have the same number of chunks, so that chunk n of each covers about the same tokens.
    `flat_index` is the index of each row among all (b, t, h), `position_BGR` its t. Rows that are
    not `is_valid_BGR` are padding: their index is one past the end, and their position that of the
    row before. `chunk_spans` has the first and last t of each chunk. `is_complete` says that the
    rows are all tokens in order.
    """

    heads: tuple[int, ...]
    flat_index: Tensor
    position_BGR: Tensor
    is_valid_BGR: Tensor
    chunk_spans: tuple[tuple[int, int], ...]
    is_complete: bool

    @property
    def num_rows(self) -> int:
        """Number of rows of each head."""
        return self.position_BGR.shape[2]


def pack_open_queries(
    open_BTH: Tensor, num_kv_heads: int, is_plain_mask: bool
) -> list[PackedQueries]:
    """Pack the open queries by KV head; KV heads with similar numbers of rows share a pack.

    With `is_plain_mask` (full or causal) a KV head whose single query head is always open is one
    complete chunk.
    """
    batch, queries, heads = open_BTH.shape
    each = heads // num_kv_heads
    open_BGX = open_BTH.view(batch, queries, num_kv_heads, each).transpose(1, 2).flatten(2)
    loads: list[int] = open_BGX.sum(-1).amax(0).tolist()
    return [
        _pack_group(open_BGX[:, list(group)], group, (heads, each), is_plain_mask)
        for group in group_heads_by_load(loads)
    ]


def group_heads_by_load(loads: Sequence[int]) -> list[tuple[int, ...]]:
    """Group heads with similar numbers of rows; heads without rows are left out.

    >>> group_heads_by_load([1024, 300, 0, 990, 310])
    [(0, 3), (1, 4)]
    """
    groups: list[list[int]] = []
    for head in sorted(range(len(loads)), key=lambda head: -loads[head]):
        if groups and loads[head] >= MIN_FILL_RATIO * loads[groups[-1][0]]:
            groups[-1].append(head)
        elif loads[head]:
            groups.append([head])
    return [tuple(sorted(group)) for group in groups if loads[group[0]]]


def _pack_group(
    open_BGX: Tensor, group: tuple[int, ...], sizes: tuple[int, int], plain: bool
) -> PackedQueries:
    heads, each = sizes
    batch, num_heads, queries = open_BGX.shape[0], len(group), open_BGX.shape[2] // each
    rank_BGX = open_BGX.cumsum(-1)
    counts_BG = rank_BGX[..., -1]
    most = int(counts_BG.max())
    b, g, x = open_BGX.nonzero(as_tuple=True)
    whole = plain and each == 1 and len(x) == open_BGX.numel()
    count = 1 if whole else num_chunks(most)
    rows = -(-most // count)
    rank, own = rank_BGX[b, g, x], counts_BG[b, g]
    chunk = (rank * count - 1) // own  # rank is counted from 1
    slot = ((b * num_heads + g) * count + chunk) * rows + rank - 1 - chunk * own // count
    head = torch.tensor(group, device=x.device)[g] * each + x % each
    line = torch.full((batch * num_heads * count * rows,), batch * queries * heads, device=x.device)
    line[slot] = (b * queries + x // each) * heads + head
    place = torch.full_like(line, -1)
    place[slot] = x // each
    place_BGCR = place.view(batch, num_heads, count, rows)
    firsts = place_BGCR.masked_fill(place_BGCR < 0, queries).amin((0, 1, 3))
    spans = tuple(zip(firsts.tolist(), place_BGCR.amax((0, 1, 3)).tolist(), strict=True))
    place_BGR = place_BGCR.flatten(2)
    return PackedQueries(
        group, line, place_BGR.cummax(-1).values.clamp_(min=0), place_BGR >= 0, spans, whole
    )


def num_chunks(rows: int) -> int:
    """Number of chunks for this many rows."""
    return max(1, round(rows / QUERIES_PER_CHUNK))


class MaskedRectangle(NamedTuple):
    """Rows and keys of one fused call, whether it needs a mask, and whether it is the first call of
    its rows.

    With `is_causal_square` the call uses the causal flag of the kernel instead of a mask.
    """

    rows: slice
    keys: slice
    is_masked: bool
    is_first_of_rows: bool = False
    is_causal_square: bool = False


class KeyVisibility:
    """Which keys each query of a call may attend to, by their indices within the call: all, those
    up to the query, or those that the mask allows.
    """

    def __init__(self, attention_mask: AttentionMask, dtype: torch.dtype) -> None:
        first_query, first_key = attention_mask.queries.start, attention_mask.keys.start
        self.attention_mask, self.dtype, self.keys = (
            attention_mask,
            dtype,
            attention_mask.keys.count,
        )
        # Number of keys before the first query; -1 if unknown.
        self.query_offset = (
            -1 if first_query is None or first_key is None else first_query - first_key
        )
        self.is_full = attention_mask.shape == "full"
        self.is_full_or_causal = self.is_full or attention_mask.shape == "triangle"
        self.is_causal = (
            not self.is_full and self.query_offset >= 0 and attention_mask.pattern == Causal()
        )
        self._extents: tuple[Tensor, Tensor] | None = None

    def forward_rectangles(self, pack: PackedQueries) -> Iterator[MaskedRectangle]:
        """The calls of the forward pass. In the first call of a row, the row has at least one
        allowed key.
        """
        if self._once(pack):
            yield MaskedRectangle(
                slice(0, pack.num_rows), slice(0, self.keys), False, True, not self.is_full
            )
            return
        each, before = pack.num_rows // len(pack.chunk_spans), 0
        for n, (first, last) in enumerate(pack.chunk_spans):
            rows = slice(n * each, (n + 1) * each)
            if not self.is_causal:
                yield MaskedRectangle(rows, self.key_slice(first, last), True, True)
                continue
            own = min(
                first + self.query_offset, self.keys - 1
            )  # all rows may attend to the keys before this one
            before = before if n % UNMASKED_CHUNKS_PER_CALL else own
            yield MaskedRectangle(
                rows, slice(own, min(last + self.query_offset + 1, self.keys)), True, True
            )
            yield MaskedRectangle(rows, slice(before, own), False)
            if (
                n % UNMASKED_CHUNKS_PER_CALL == UNMASKED_CHUNKS_PER_CALL - 1
                or n == len(pack.chunk_spans) - 1
            ):
                yield MaskedRectangle(
                    slice(
                        n // UNMASKED_CHUNKS_PER_CALL * UNMASKED_CHUNKS_PER_CALL * each, rows.stop
                    ),
                    slice(0, before),
                    False,
                )

    def _once(self, pack: PackedQueries) -> bool:
        """Whether a single call computes all rows."""
        return self.is_full or pack.is_complete

    def backward_rectangles(self, pack: PackedQueries) -> Iterator[MaskedRectangle]:
        """The calls of the backward pass: few keys with many rows, so that few gradients of keys
        have to be added.
        """
        if self._once(pack) or not self.is_causal:
            yield from self.forward_rectangles(pack)
            return
        ends = [*range(0, self.keys, BACKWARD_KEYS_PER_CALL), self.keys]
        queries = torch.tensor(
            [end - self.query_offset for end in ends], device=pack.position_BGR.device
        )
        queries = queries.expand(*pack.position_BGR.shape[:2], -1).contiguous()
        first_rows: list[int] = torch.searchsorted(pack.position_BGR, queries).amin((0, 1)).tolist()
        open_rows: list[int] = (
            torch.searchsorted(pack.position_BGR, queries - 1).amax((0, 1)).tolist()
        )
        # Rows from `first_row` may attend to some of the keys, rows from `open_row` to all of them.
        for (start, stop), first_row, open_row in zip(
            pairwise(ends), first_rows, open_rows[1:], strict=False
        ):
            yield MaskedRectangle(slice(first_row, open_row), slice(start, stop), True)
            yield MaskedRectangle(slice(open_row, pack.num_rows), slice(start, stop), False)

    def key_ranges(self, queries: int) -> Tensor | None:
        """The first key and the end of the keys of each query, [1 or B, T, 2]; None if some query's
        keys have gaps.
        """
        device = self.attention_mask.keys.position.device
        if self.is_full or self.is_causal:
            last = torch.full((queries,), self.keys, device=device)
            if not self.is_full:
                last = (torch.arange(queries, device=device) + self.query_offset + 1).clamp_(
                    max=self.keys
                )
            return torch.stack([torch.zeros_like(last), last], -1)[None]
        allowed_BTS = self.attention_mask.allowed[:, 0]
        count, first = allowed_BTS.sum(-1), allowed_BTS.to(torch.uint8).argmax(-1)
        last = self.keys - allowed_BTS.flip(-1).to(torch.uint8).argmax(-1)
        last = torch.where(count > 0, last, first)
        return torch.stack([first, last], -1) if bool((last - first == count).all()) else None

    def key_slice(self, first: int, last: int) -> slice:
        """The range of keys that the queries from `first` to `last` may attend to."""
        if self._extents is None:
            allowed_TS = self.attention_mask.allowed[:, 0].any(0)
            key = torch.arange(self.keys, device=allowed_TS.device)
            low, high = (
                torch.where(allowed_TS, key, self.keys).amin(-1),
                torch.where(allowed_TS, key + 1, 0).amax(-1),
            )
            self._extents = low, high
        low, high = (extent[first : last + 1] for extent in self._extents)
        start, stop = int(low.min()), int(high.max())
        return slice(start, max(start, stop))

    def mask_bias(self, place_BGR: Tensor, keys: slice) -> Tensor:
        """The additive mask of queries at these positions, [B, G, R, S]: 0 or -inf."""
        if self.is_causal:
            return self._triangle(
                place_BGR + self.query_offset + 1 - keys.start, keys.stop - keys.start
            )
        allowed = self._rows(place_BGR)[..., keys]
        return torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device).masked_fill_(
            ~allowed, -torch.inf
        )

    def _triangle(self, count_BGR: Tensor, wide: int) -> Tensor:
        """Additive masks that allow the first `count_BGR` keys: windows of a vector of zeros
        followed by -inf.
        """
        line = torch.zeros(2 * wide, dtype=self.dtype, device=count_BGR.device)
        line[wide:] = -torch.inf
        starts = wide - count_BGR.clamp(0, wide)
        rows = (
            line.as_strided((wide + 1, wide), (1, 1)).contiguous().index_select(0, starts.flatten())
        )
        return rows.view(*count_BGR.shape, wide)

    def _rows(self, place_BGR: Tensor) -> Tensor:
        """The allowed keys of queries at these positions."""
        allowed_BTS = self.attention_mask.allowed[:, 0]
        row = torch.arange(place_BGR.shape[0], device=place_BGR.device) % allowed_BTS.shape[0]
        flat = (row[:, None, None] * allowed_BTS.shape[1] + place_BGR).flatten()
        return allowed_BTS.flatten(0, 1).index_select(0, flat).view(*place_BGR.shape, self.keys)


# --- Work items of the kernel ---------------------------------------------------------------------

# The backward pass splits the keys into parts of at least this size, so that there are enough work
# items.
MIN_KEYS_PER_PART = 512
MAX_KEY_PARTS, TARGET_WORK_ITEMS = 4, 16


class RoutedWorkItems(NamedTuple):
    """Arguments of `gathered_attention` (query rows, key ranges, work items) and the number of
    scores it computes.
    """

    kernel_args: list[Tensor]
    num_pairs: int

    @staticmethod
    def from_open_heads(
        open_BTH: Tensor, num_open: int, ends: Tensor, keys: int
    ) -> RoutedWorkItems:
        """Work items for the open queries; the items with most keys come first, so that threads end
        together.
        """
        batch, queries, heads = open_BTH.shape
        by_key = open_BTH.view(batch, queries, num_open, heads // num_open).transpose(1, 2)
        b, g, t, h = by_key.nonzero(as_tuple=True)
        lines = (b * queries + t) * heads + g * (heads // num_open) + h
        counts = by_key.sum((2, 3)).flatten()
        whose, first, rows = _make_forward_items(counts)
        last = first + rows - 1
        token = b % len(ends) * queries + t
        low, high = (ends.view(-1, 2)[token[n], side] for n, side in ((first, 0), (last, 1)))
        forth = torch.stack([whose, first, rows, 0 * rows, 0 * rows + keys, 0 * rows], 1)
        forth = forth[torch.argsort(high - low, descending=True)]
        formed = QUERY_TILE_ROWS * int((high - low).sum())
        return RoutedWorkItems(
            [lines, ends.contiguous(), forth.contiguous(), _make_backward_items(counts, keys)],
            formed,
        )


def _make_forward_items(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of consecutive query rows: the KV head of each, its first row, and
    its number of rows.
    """
    units = (counts + QUERY_TILE_ROWS - 1).div(QUERY_TILE_ROWS, rounding_mode="floor")
    whose = torch.arange(len(counts), device=counts.device).repeat_interleave(units)
    number = torch.arange(len(whose), device=counts.device) - (units.cumsum(0) - units)[whose]
    first = (counts.cumsum(0) - counts)[whose] + QUERY_TILE_ROWS * number
    return whose, first, (counts[whose] - QUERY_TILE_ROWS * number).clamp(max=QUERY_TILE_ROWS)


def _make_backward_items(counts: Tensor, keys: int) -> Tensor:
    """Work items of the backward pass: all rows of a KV head with a part of its keys."""
    parts = max(1, min(MAX_KEY_PARTS, TARGET_WORK_ITEMS // len(counts), keys // MIN_KEYS_PER_PART))
    # Parts begin at multiples of four keys, which the kernel writes together.
    cuts = [*(keys * part // parts // 4 * 4 for part in range(parts)), keys]
    order = torch.argsort(counts, descending=True)
    first = (counts.cumsum(0) - counts)[order]
    some = [
        torch.stack(
            [
                order,
                first,
                counts[order],
                *(torch.full_like(order, n) for n in (cuts[p], cuts[p + 1], p)),
            ],
            1,
        )
        for p in range(parts)
    ]
    return torch.cat(some).contiguous()


# --- The backend ----------------------------------------------------------------------------------


def boundary_lengths() -> tuple[int, ...]:
    """Lengths at which the numbers of work items, chunks and key blocks change."""
    return QUERY_TILE_ROWS - 1, QUERY_TILE_ROWS, QUERY_TILE_ROWS + 1, 259


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    spec, reasons = call.spec, sdpa.fused_call_conflicts(call)
    if not any(gate.open_fractions(spec) for _, gate in spec.parts_of(Gate)):
        reasons.append("no part routes tokens to heads, so every head is needed")
    elif not any(_open_shares(call)):
        reasons.append("gradients pass the gates of closed heads, so their outputs are needed")
    elif call.head_group is not None:
        reasons.append("packs all heads of a layer, which must have the same pattern")
    if any(isinstance(part, ScoreStep) for _, part in spec.parts()) or not isinstance(
        spec.normaliser, Softmax
    ):
        reasons.append("needs a plain softmax over scaled dot products, with nothing added")
    if any(
        step.combines_rows or step.required_score_heads(spec, frozenset({0})) != {0}
        for _, step in spec.parts_of(OutputStep)
    ):
        reasons.append("an output step combines heads before the gates")
    if call.pattern not in (Full(), Causal()):
        reasons.append(f"{call.pattern.text} hides keys, which saves as much without packing heads")
    if call.single_query:
        reasons.append("for a single query, computing all heads is faster")
    if call.is_compiling:
        reasons.append(
            "the queries of a head are counted at run time, so torch.compile is not supported"
        )
    if "lse" in call.probed_tensors:
        reasons.append("returns the log-sum-exp of open heads only")
    return [*reasons, *_unsupported_kernel_reasons(call)]


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size."""
    return call.slower_below("routed", size, "all heads take less time")


def _unsupported_kernel_reasons(call: CallSignature) -> list[str]:
    reasons = []
    if call.device != "cpu":
        reasons.append(f"has a kernel for the CPU only, not {call.device}")
    if call.core.dim != call.core.vdim:
        reasons.append("needs dim = vdim")
    if not call.group_size:
        reasons.append("needs the same number of query heads in every key-value group")
    return reasons


def _open_shares(call: CallSignature) -> list[tuple[Fraction, ...] | None]:
    """For each gate, the share of tokens for which each head is open; None if outputs of closed
    heads are needed.
    """
    gates = (gate for _, gate in call.spec.parts_of(Gate))
    return [
        gate.open_fractions(call.spec)
        if gate.blocks_gradient_when_closed() or not call.needs_grad
        else None
        for gate in gates
    ]


tensor_conflicts = no_tensor_conflicts


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs if every head is open for its gate's share of the tokens, evenly spaced."""
    shares, causal = min(filter(None, _open_shares(call)), key=sum), call.pattern == Causal()
    formed = _pairs_of_work_items if _has_kernel(call) else _pairs_of_chunks
    pairs = sum(
        formed(share * call.group_size, size, causal)
        for share in _share_per_kv_head(shares, call.group_size)
    )
    return int(call.core.flops(size.batch) * pairs / len(call.core.key_head_of_query))


def _has_kernel(call: CallSignature) -> bool:
    """Whether the kernel supports the dtype; other dtypes run chunk by chunk through torch's fused
    call.
    """
    return call.device == "cpu" and call.dtype in COMPUTE_DTYPES and has_kernels()


def _share_per_kv_head(shares: tuple[Fraction, ...], each: int) -> list[Fraction]:
    """The mean share of open tokens over the query heads of each KV head."""
    return [sum(shares[n : n + each], Fraction(0)) / each for n in range(0, len(shares), each)]


def _pairs_of_work_items(rate: Fraction, size: CallSize, causal: bool) -> Fraction:
    """Scores of a KV head with `rate` open rows per token: whole tiles, each with the keys of its
    last row.
    """
    units = -(-math.ceil(rate * size.queries) // QUERY_TILE_ROWS)
    if not causal or not units:
        return Fraction(QUERY_TILE_ROWS * units * size.keys)
    own = QUERY_TILE_ROWS * Fraction(units * (units - 1), 2) / rate + size.queries
    return QUERY_TILE_ROWS * (own + units * (size.keys - size.queries))


def _pairs_of_chunks(rate: Fraction, size: CallSize, causal: bool) -> Fraction:
    """Scores of a KV head with `rate` open rows per token, computed in chunks."""
    rows = rate * size.queries
    if not causal or not rows or (rate == 1 and size.keys == size.queries):
        return rows * size.keys
    count = num_chunks(math.ceil(rows))
    each = Fraction(math.ceil(rows / count))
    return each * (count * (size.keys - size.queries) + Fraction(size.queries * (count + 1), 2))


def attend(
    call: CallSignature,
    attention_mask: AttentionMask,
    inputs: CoreInputs,
    steps: CoreSteps,
    probe: Probe | None,
) -> Tensor:
    """Per-head outputs o_BTRV, zero for closed heads."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    with torch.no_grad():
        reading, opened = KeyVisibility(attention_mask, q.dtype), _open_heads(call, inputs)
        has_kernel = q.dtype in COMPUTE_DTYPES and FLASH_ATTENTION_KERNELS.is_usable(q.dtype)
        ends = reading.key_ranges(q.shape[1]) if has_kernel else None
        lines = (
            None
            if ends is None
            else RoutedWorkItems.from_open_heads(opened, k.shape[2], ends, k.shape[1])
        )
        packed = (
            pack_open_queries(opened, k.shape[2], reading.is_full_or_causal)
            if lines is None
            else []
        )
    if lines is not None:
        return gathered_attention(
            q, k, v, lines.kernel_args, inputs.query_context.scale, lines.num_pairs
        )[0]
    o_BTRV: Tensor = _RoutedAttention.apply(q, k, v, packed, (reading, inputs.query_context.scale))
    return o_BTRV


def _open_heads(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Whether each head is open for each token, [B, T, H]: no gate that closes
    heads is zero there.
    """
    opened = torch.ones(inputs.q.shape[:3], dtype=torch.bool, device=inputs.q.device)
    for shares, gate in zip(_open_shares(call), inputs.gates, strict=True):
        if shares is not None:
            opened &= gate[..., 0] != 0
    return opened


class _RoutedAttention(torch.autograd.Function):
    """Packed attention; the backward pass recomputes the weights from the
    log-sum-exp of each row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        packed: list[PackedQueries],
        how: tuple[KeyVisibility, float],
    ) -> Tensor:
        batch, queries, heads = q.shape[:3]
        line = v.new_zeros(batch * queries * heads + 1, v.shape[-1])
        saved = []
        for pack in packed:
            packed_call = _PackedCall(pack, q, k, v, how)
            o_BGRV, lse_BGR = packed_call.forward()
            line.index_copy_(0, pack.flat_index, o_BGRV.view(-1, v.shape[-1]))
            saved += [o_BGRV, lse_BGR]
        ctx.packed, ctx.how = packed, how
        ctx.save_for_backward(q, k, v, *saved)
        return line[:-1].view(batch, queries, heads, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward(NO_DOUBLE_BACKWARD_REMEDY)
        q, k, v, *saved = ctx.saved_tensors
        dq = q.new_zeros(q.shape[:3].numel() + 1, q.shape[-1])
        dk, dv = (t.new_zeros(t.transpose(1, 2).shape) for t in (k, v))
        for n, pack in enumerate(ctx.packed):
            packed_call = _PackedCall(pack, q, k, v, ctx.how)
            dq_BGRK, dk_BGSK, dv_BGSV = packed_call.backward(
                grads[0], saved[2 * n], saved[2 * n + 1]
            )
            dq.index_copy_(0, pack.flat_index, dq_BGRK.view(-1, q.shape[-1]).to(q.dtype))
            dk[:, pack.heads], dv[:, pack.heads] = dk_BGSK.to(k.dtype), dv_BGSV.to(v.dtype)
        return dq[:-1].view(q.shape), dk.transpose(1, 2), dv.transpose(1, 2), None, None


class _PackedCall:
    """The fused calls of one pack: its rows with their keys and values."""

    def __init__(
        self, pack: PackedQueries, q: Tensor, k: Tensor, v: Tensor, how: tuple[KeyVisibility, float]
    ) -> None:
        self.pack, (self.reading, self.scale) = pack, how
        self.q_BGRK = self._packed(q)
        self.k_BGSK, self.v_BGSV = (_select_heads(t.transpose(1, 2), pack.heads) for t in (k, v))

    def _packed(self, x_BTHK: Tensor) -> Tensor:
        if self.pack.is_complete:
            return _select_heads(x_BTHK.transpose(1, 2), self.pack.heads)
        line = x_BTHK.reshape(-1, x_BTHK.shape[-1])
        rows = line.index_select(0, self.pack.flat_index.clamp(max=len(line) - 1))
        return rows.view(*self.pack.position_BGR.shape, -1)

    def _bars(self, piece: MaskedRectangle) -> Tensor | None:
        return (
            self.reading.mask_bias(self.pack.position_BGR[..., piece.rows], piece.keys)
            if piece.is_masked
            else None
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Outputs of the rows and the log-sum-exp of their scores."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        exact = torch.promote_types(self.q_BGRK.dtype, torch.float32)
        o_BGRV = self.v_BGSV.new_zeros(*self.pack.position_BGR.shape, self.v_BGSV.shape[-1])
        lse_BGR = o_BGRV.new_zeros(o_BGRV.shape[:-1], dtype=exact)
        for piece in self.reading.forward_rectangles(self.pack):
            if piece.keys.start >= piece.keys.stop:
                continue
            q, k, v = (
                self.q_BGRK[:, :, piece.rows],
                self.k_BGSK[:, :, piece.keys],
                self.v_BGSV[:, :, piece.keys],
            )
            o, lse = kernel(
                q, k, v, 0.0, piece.is_causal_square, attn_mask=self._bars(piece), scale=self.scale
            )
            if not piece.is_first_of_rows:
                before, o = o_BGRV[:, :, piece.rows].to(exact), o.to(exact)
                apart = lse - lse_BGR[:, :, piece.rows]
                o = torch.lerp(before, o, torch.sigmoid(apart)[..., None])
                lse = torch.logaddexp(lse, lse_BGR[:, :, piece.rows])
            o_BGRV[:, :, piece.rows], lse_BGR[:, :, piece.rows] = o, lse
        return o_BGRV, lse_BGR.masked_fill_(
            ~self.pack.is_valid_BGR, torch.inf
        )  # padding rows have weight 0 in the backward pass

    def backward(
        self, grad_BTHV: Tensor, o_BGRV: Tensor, lse_BGR: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of rows, keys and values."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        exact = torch.promote_types(self.q_BGRK.dtype, torch.float32)
        to_BGRV = self._packed(grad_BTHV)
        dq, dk, dv = (
            t.new_zeros(t.shape, dtype=exact) for t in (self.q_BGRK, self.k_BGSK, self.v_BGSV)
        )
        for piece in self.reading.backward_rectangles(self.pack):
            rows, keys = piece.rows, piece.keys
            if rows.start >= rows.stop or keys.start == keys.stop:
                continue
            q, o, lse, to = (t[:, :, rows] for t in (self.q_BGRK, o_BGRV, lse_BGR, to_BGRV))
            k, v = self.k_BGSK[:, :, keys], self.v_BGSV[:, :, keys]
            gradients = kernel(
                to,
                q,
                k,
                v,
                o,
                lse,
                0.0,
                piece.is_causal_square,
                attn_mask=self._bars(piece),
                scale=self.scale,
            )
            for total, some, part in zip((dq, dk, dv), (rows, keys, keys), gradients, strict=True):
                total[:, :, some] += part
        return dq, dk, dv


def _select_heads(x_BGSK: Tensor, heads: Sequence[int]) -> Tensor:
    """The tensors of these heads; a view if they are at equal distances."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    regular = range(heads[0], heads[-1] + 1, step)
    if list(heads) == list(regular):
        return x_BGSK[:, regular.start : regular.stop : step]
    return x_BGSK[:, list(heads)]

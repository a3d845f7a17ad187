"""Fused attention in blocks of queries: keys that no query of a block may attend to are never touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..interfaces import ScoreStep
from ..interfaces.core_types import CallSize, Probe
from ..kernels.autograd_guards import is_under_functorch
from ..masking.patterns import Causal, Full, parse_pattern
from ..masking.sequence_info import AttentionMask
from ..parts.sink_softmax import SinkSoftmax
from . import query_blocks, sdpa
from .core_interface import CallSignature, CoreInputs, CoreSteps, expand_kv_heads, no_tensor_conflicts
from .query_blocks import (
    QUERY_BLOCK_SIZE,
    BlockBatch,
    CallBlocks,
    KeyRanges,
    TokenAxis,
    count_batch_pairs,
    gather_slices,
    plan_block_batches,
)

MAX_TOKEN_RUNS = (
    16  # tokens that are neighbours at least, on average, or else nothing is gained by looking for neighbours
)

TokenRun = tuple[int, TokenAxis]  # a segment, and tokens of it


def find_token_runs(
    tokens: Sequence[Tensor], batch: int
) -> list[tuple[Sequence[int], TokenAxis, tuple[TokenAxis, ...]]] | None:
    """Queries that stand together, with all keys of their segment, for each row of the batch or for all alike.

    `tokens` are position and segment of queries and of keys, each [B, T], or [1, T] where all rows are alike. None
    where they stand so much anywhere that each would be on its own.
    """
    asks, told = (_scan_token_runs(*some) for some in (tokens[:2], tokens[2:]))
    if any(
        len(row) > MAX_TOKEN_RUNS + some.shape[1] // MAX_TOKEN_RUNS
        for every, some in ((asks, tokens[0]), (told, tokens[2]))
        for row in every
    ):
        return None
    alike = len(asks) == len(told) == 1
    return [
        (range(batch) if alike else (row,), axis, tuple(other for same, other in told[row % len(told)] if same == own))
        for row in range(1 if alike else batch)
        for own, axis in asks[row % len(asks)]
    ]


def _scan_token_runs(position_BT: Tensor, segment_BT: Tensor) -> list[list[TokenRun]]:
    """The runs of each row, without padding."""
    if not position_BT.shape[1]:
        return [[] for _ in position_BT]
    begins = torch.ones_like(position_BT, dtype=torch.bool)
    begins[:, 1:] = (position_BT.diff() != 1) | (segment_BT.diff() != 0)
    row, slot = begins.nonzero(as_tuple=True)
    listed = zip(*(t.tolist() for t in (row, slot, position_BT[row, slot], segment_BT[row, slot])), strict=True)
    found: list[list[TokenRun]] = [[] for _ in position_BT]
    ends: list[tuple[int, int]] = [*zip(row.tolist()[1:], slot.tolist()[1:], strict=True), (-1, 0)]
    for (here, first, place, segment), (other, end) in zip(listed, ends, strict=True):
        count = (end if other == here else position_BT.shape[1]) - first
        if segment >= 0:
            found[here].append((segment, TokenAxis(range(place, place + count), first)))
    return found


# --- Blocks of one call laid side by side in memory that is already there, and what they give put back ---

MAX_CALL_BYTES = (
    2**24
)  # bytes of keys and values that one call reads: more would be written and read again from far away


class BatchedBlocks(NamedTuple):
    """Blocks that one fused call runs: several of one row of the batch, or with row=None one of all rows."""

    batch_row: int | None
    queries: Sequence[range]
    keys: Sequence[KeyRanges]

    def gather_queries(self, x_BTHD: Tensor) -> Tensor:
        """x_NHRD: the queries of each block; a view."""
        return self._view(x_BTHD, self.queries).transpose(1, 2)

    def gather_keys(self, x_BSGD: Tensor) -> Tensor:
        """x_NGWD: the keys that each block reads; a view where these are one range."""
        if len(self.keys[0]) == 1:
            return self._view(x_BSGD, [only for (only,) in self.keys]).transpose(1, 2)
        if self.batch_row is None:
            return torch.cat([x_BSGD[:, _range_to_slice(some)] for some in self.keys[0]], 1).transpose(1, 2)
        every = [x_BSGD[self.batch_row, _range_to_slice(some)] for ranges in self.keys for some in ranges]
        return torch.cat(every).unflatten(0, (len(self.keys), -1)).transpose(1, 2)

    def scatter_queries(self, into_BTHD: Tensor, x_NHRD: Tensor) -> None:
        """Write what each block's queries got to where these stand."""
        self.gather_queries(into_BTHD).copy_(x_NHRD)

    def add_to_keys(self, into_BSGD: Tensor, x_NGWD: Tensor) -> None:
        """Add what each block says of its keys to where these stand."""
        x_NWGD = x_NGWD.transpose(1, 2)
        if self.batch_row is None:
            _add_to_ranges(into_BSGD.transpose(0, 1), x_NWGD.transpose(0, 1), self.keys[0])
        elif len(self.keys[0]) == 1 and len(self.keys) > 1:
            self._overlap(into_BSGD, x_NWGD, [only for (only,) in self.keys])
        else:
            for ranges, x_WGD in zip(self.keys, x_NWGD, strict=True):
                _add_to_ranges(into_BSGD[self.batch_row], x_WGD, ranges)

    def _overlap(self, into_BSGD: Tensor, x_NWGD: Tensor, ranges: Sequence[range]) -> None:
        """Add windows that overlap: as many of their columns at once as no two blocks share."""
        gap, step, width = ranges[1].start - ranges[0].start, ranges[0].step, len(ranges[0])
        if gap == 0:
            into_BSGD[self.batch_row, _range_to_slice(ranges[0])] += x_NWGD.sum(0)
            return
        apart = len(ranges) * gap <= step  # each between the tokens of the others
        each = width if apart else gap // step
        for begin in range(0, width, each):
            columns = [some[begin : begin + each] for some in ranges]
            self._view(into_BSGD, columns).add_(x_NWGD[:, begin : begin + each])

    def _view(self, x_BTHD: Tensor, ranges: Sequence[range]) -> Tensor:
        if self.batch_row is None:
            return x_BTHD[:, _range_to_slice(ranges[0])]
        _, along, head, channel = x_BTHD.stride()
        start, step = ranges[0].start, ranges[0].step
        gap = ranges[1].start - start if len(ranges) > 1 else 0
        shape = (len(ranges), len(ranges[0]), *x_BTHD.shape[2:])
        offset = x_BTHD.storage_offset() + self.batch_row * x_BTHD.stride(0) + start * along
        return x_BTHD.as_strided(shape, (gap * along, step * along, head, channel), offset)


def batch_blocks(piece: BlockBatch, rows: Sequence[int], nbytes: int) -> Iterator[BatchedBlocks]:
    """The calls in which a piece runs over these rows of the batch, given the bytes of a token's key and value."""
    blocks = list(zip(piece.queries, piece.keys, strict=True))
    if 1 < len(rows) >= len(blocks):  # several are all
        yield from (BatchedBlocks(None, [queries], [keys]) for queries, keys in blocks)
        return
    most = max(1, MAX_CALL_BYTES // (nbytes * sum(map(len, blocks[0][1]))))
    even = min((_evenly_spaced_runs(order) for order in (blocks, sorted(blocks, key=_block_start))), key=len)
    for row in rows:
        for run in even:
            for begin in range(0, len(run), most):
                queries, keys = zip(*run[begin : begin + most], strict=True)
                yield BatchedBlocks(row, queries, keys)


def _block_start(block: tuple[range, KeyRanges]) -> int:
    return block[0].start


def _evenly_spaced_runs(blocks: Sequence[tuple[range, KeyRanges]]) -> list[list[tuple[range, KeyRanges]]]:
    """The blocks in runs that begin at equal distances; their keys too, where these are one range."""
    found: list[list[tuple[range, KeyRanges]]] = []
    gaps: tuple[int, ...] | None = None
    for block in blocks:
        gap = None if not found else _block_distance(found[-1][-1], block)
        if gap is None or (gaps is not None and gap != gaps) or min(gap) < 0:
            found.append([block])
            gaps = None
        else:
            found[-1].append(block)
            gaps = gap
    return found


def _block_distance(one: tuple[range, KeyRanges], other: tuple[range, KeyRanges]) -> tuple[int, ...]:
    asked = other[0].start - one[0].start
    return (asked, other[1][0].start - one[1][0].start) if len(one[1]) == 1 else (asked,)


def _add_to_ranges(into: Tensor, some: Tensor, ranges: KeyRanges) -> None:
    """Add along the first axis, the tokens."""
    for where, part in zip(ranges, some.split([len(one) for one in ranges]), strict=True):
        into[_range_to_slice(where)] += part


def _range_to_slice(some: range) -> slice:
    return slice(some.start, some.stop, some.step)


# --- The fused kernel of the CPU over pieces of a call, forward and backward, as one operation that ----

FLASH_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
OP_INPUT_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] tokens, int[] starts, str pattern, float scale"
MAX_CACHED_PLANS = 256  # more kinds of calls than this are forgotten

_PLAN_CACHE: dict[tuple[str, TokenAxis, tuple[TokenAxis, ...]], list[BlockBatch]] = {}


def cached_block_batches(pattern: str, query_axis: TokenAxis, key_axes: tuple[TokenAxis, ...]) -> list[BlockBatch]:
    """The pieces of one call, kept for the next of its kind."""
    key = pattern, query_axis, key_axes
    found = _PLAN_CACHE.get(key)  # once: another thread may forget all plans at any time
    if found is None:
        if len(_PLAN_CACHE) >= MAX_CACHED_PLANS:
            _PLAN_CACHE.clear()
        found = _PLAN_CACHE[key] = plan_block_batches(parse_pattern(pattern), query_axis, key_axes)
    return found


class BlockSparseArgs(NamedTuple):
    """What decides who reads whom in a call, and the scale of its scores.

    `starts` are the places of the first query and the first key, where all rows hold neighbours of one text; else
    `tokens` are position and segment of queries and of keys.
    """

    tokens: Sequence[Tensor]
    first_positions: Sequence[int]
    pattern: str
    scale: float


class BlockSparseCall:
    """The calls of the kernel that make up one attention."""

    def __init__(self, q: Tensor, k: Tensor, how: BlockSparseArgs) -> None:
        self.q, self.k, self.args, self.pattern = q, k, how, parse_pattern(how.pattern)
        self.block_batches = self._pieces()

    def _pieces(self) -> list[tuple[BlockBatch, Sequence[int]]] | None:
        """Each piece, with the rows of the batch that have it; None where tokens stand anywhere."""
        (batch, queries), keys = self.q.shape[:2], self.k.shape[1]
        if self.args.first_positions:
            asks, told = (
                TokenAxis(range(at, at + n)) for at, n in zip(self.args.first_positions, (queries, keys), strict=True)
            )
            return [(piece, range(batch)) for piece in cached_block_batches(self.args.pattern, asks, (told,))]
        if (found := find_token_runs(self.args.tokens, batch)) is None:
            return None
        return [
            (piece, rows) for rows, asks, told in found for piece in cached_block_batches(self.args.pattern, asks, told)
        ]

    def __iter__(self) -> Iterator[tuple[BatchedBlocks, Tensor | None]]:
        """What each call reads, and what it adds to its scores."""
        if self.block_batches is None:
            yield from self._anywhere()
            return
        nbytes = 2 * self.k.shape[2] * self.k.shape[3] * self.k.element_size()
        for piece, rows in self.block_batches:
            mask = self._mask(piece)
            yield from ((fold, mask) for fold in batch_blocks(piece, rows, nbytes))

    def _mask(self, piece: BlockBatch) -> Tensor | None:
        if piece.first_block_positions is None:
            return None
        asks, told = piece.first_block_positions
        i = torch.arange(asks.start, asks.stop, asks.step)
        j = torch.cat([torch.arange(some.start, some.stop, some.step) for some in told])
        allowed = self.pattern.allows(i[:, None], j)
        return self._added(allowed[None, None])

    def _anywhere(self) -> Iterator[tuple[BatchedBlocks, Tensor]]:
        """Blocks of queries that may each read every key."""
        place, segment, other, same = (t[:, None, None] for t in self.args.tokens)
        for start in range(0, self.q.shape[1], QUERY_BLOCK_SIZE):
            asks = range(start, min(start + QUERY_BLOCK_SIZE, self.q.shape[1]))
            i, own = (t.transpose(2, 3)[:, :, asks.start : asks.stop] for t in (place, segment))
            allowed = (own == same) & (own >= 0) & self.pattern.allows(i, other)
            yield BatchedBlocks(None, [asks], [(range(self.k.shape[1]),)]), self._added(allowed)

    def _added(self, allowed: Tensor) -> Tensor:
        return self.q.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)

    @property
    def num_pairs(self) -> int:
        """The scores that all rows form for each head."""
        if self.block_batches is None:
            return self.q.shape[0] * self.q.shape[1] * self.k.shape[1]
        return sum(piece.num_pairs * len(rows) for piece, rows in self.block_batches)


def run_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *said: Any) -> tuple[Tensor, Tensor]:
    """o_BTHV and the log-sum-exp l_BTH, of queries q_BTHK that read k_BSGK and v_BSGV; the rest is `How`.

    `sinks` are one more score in every row of a head, whose value is nothing.
    """
    how = BlockSparseArgs(*said)
    q, k, v = _contiguous_channels(q), _contiguous_channels(k), _contiguous_channels(v)
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for fold, mask in BlockSparseCall(q, k, how):
        part, sums = FLASH_FORWARD(
            fold.gather_queries(q),
            fold.gather_keys(k),
            fold.gather_keys(v),
            0.0,
            False,
            attn_mask=mask,
            scale=how.scale,
        )
        if mask is not None:
            sums = sums.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        fold.scatter_queries(o, part)
        fold.scatter_queries(lse[..., None], sums[..., None])
    if sinks is None:
        return o, lse
    every = torch.logaddexp(lse, sinks.to(lse.dtype))
    return o * (lse - every).exp()[..., None].to(o.dtype), every


def run_backward(
    grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *said: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    v, _, how = said[0], said[1], BlockSparseArgs(*said[2:])
    grad, q, k, v = (_contiguous_channels(x) for x in (grad, q, k, v))
    asked, keys, values = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    lse = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]  # of no keys: every weight is exp(-inf - 0)
    for fold, mask in BlockSparseCall(q, k, how):
        got = (
            fold.gather_queries(grad),
            fold.gather_queries(q),
            fold.gather_keys(k),
            fold.gather_keys(v),
            fold.gather_queries(o),
            fold.gather_queries(lse)[..., 0],
        )
        parts = FLASH_BACKWARD(*got, 0.0, False, attn_mask=mask, scale=how.scale)
        fold.scatter_queries(asked, parts[0])
        fold.add_to_keys(keys, parts[1])
        fold.add_to_keys(values, parts[2])
    return asked, keys, values


def _contiguous_channels(x: Tensor) -> Tensor:
    """The same with the channels of a head side by side, as the kernel wants them."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Their names are how compilers and counters know them; what happens inside is not theirs to see.
block_sparse_attention = torch.library.custom_op(
    "headwise::banded", run_forward, mutates_args=(), schema=f"({OP_INPUT_SCHEMA}) -> (Tensor, Tensor)"
)
block_sparse_attention_backward = torch.library.custom_op(
    "headwise::banded_backward",
    run_backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor o, Tensor lse, {OP_INPUT_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


@block_sparse_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=exact)


@block_sparse_attention_backward.register_fake
def _(grad: Tensor, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:3])
    return q, k, v


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, tokens, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, *([] if sinks is None else [sinks]), *tokens)
    ctx.sunk = sinks is not None
    ctx.mark_non_differentiable(output[1])


def _run_autograd_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, *rest = ctx.saved_tensors
    sinks = rest.pop(0) if ctx.sunk else None
    grads = block_sparse_attention_backward(grad, o, lse, q, k, v, sinks, list(rest), *ctx.how)
    sunk = None
    if sinks is not None:
        # A sink's weight reads nothing, so its score goes down with all that the others read.
        weight = (sinks - lse).exp()
        sunk = -(weight * (grad * o).sum(-1)).sum((0, 1)).to(sinks.dtype)
    return *grads, sunk, [None] * len(rest), None if ctx.how[0] else [], None, None  # of lists, lists


block_sparse_attention.register_autograd(_run_autograd_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.banded, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, sinks: Any, *said: Any, **_: Any) -> int:
    return 2 * _count_call_pairs(q, k, BlockSparseArgs(*said)) * q.shape[2] * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.banded_backward, get_raw=True)
def _backward_flops(grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *said: Any, **_: Any) -> int:
    # Scores once more, their gradients and those of queries and keys; of weights and of values.
    return 2 * _count_call_pairs(q, k, BlockSparseArgs(*said[2:])) * q.shape[2] * (3 * q.shape[3] + 2 * o.shape[3])


def _count_call_pairs(q: Tensor, k: Tensor, how: BlockSparseArgs) -> int:
    if not how.first_positions:
        return BlockSparseCall(q, k, how).num_pairs
    asks, told = (range(at, at + x.shape[1]) for at, x in zip(how.first_positions, (q, k), strict=True))
    return q.shape[0] * count_batch_pairs(parse_pattern(how.pattern), asks, told)


# --- Fused attention in blocks of queries --------------------------------------------------------------

MIN_KEYS = 370  # keys from which on it was measured to be faster: docs/backends.md


def boundary_lengths() -> tuple[int, ...]:
    """The lengths at which a block more is begun."""
    return query_blocks.QUERY_BLOCK_LENGTHS


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = sdpa.fused_call_conflicts(call)
    if call.single_query:
        reasons.append("needs more than one query per row")
    if call.spec.pattern in (Full(), Causal()):
        reasons.append(f"{call.spec.pattern.text} hides no block of keys that one fused call would not skip")
    if "lse" in call.probed_tensors:
        reasons.append("returns a log-sum-exp for each block only")
    return reasons


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size."""
    if _has_cpu_kernel(call) and mask_shape != "any":
        return [f"{call.spec.pattern.text} hides no key of this call that one fused call would not skip"]
    return call.slower_below(MIN_KEYS, size, "one call with a mask takes less time")


tensor_conflicts = no_tensor_conflicts


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """The products of every block with the keys that some of its queries may read, and of a sink's own column."""
    columns = 0 if _has_cpu_kernel(call) else sdpa.num_sink_columns(call) * size.queries
    return call.core.flops(size.batch * (count_formed_pairs(call, size) + columns))


def count_formed_pairs(call: CallSignature, size: CallSize) -> int:
    """The pairs of one row whose scores are computed, for queries that are the last of the keys."""
    if _has_cpu_kernel(call):
        return query_blocks.count_batch_pairs(call.spec.pattern, *_position_ranges(call, size))
    if size.queries <= QUERY_BLOCK_SIZE:
        return size.queries * size.keys
    return query_blocks.count_formed_pairs(call, size)


def attend(
    call: CallSignature, attention_mask: AttentionMask, inputs: CoreInputs, steps: CoreSteps, probe: Probe | None
) -> Tensor:
    """Per-head outputs o_BTHV."""
    if not _has_cpu_kernel(call) or is_under_functorch():
        return _attend_per_block(call, attention_mask, inputs, steps)
    asks, told = attention_mask.queries, attention_mask.keys
    k, v = inputs.k, inputs.v
    if not call.group_size:
        k, v = (
            expand_kv_heads(x, by).transpose(1, 2)
            for x, by in ((k, call.core.key_head_of_query), (v, call.core.value_head_of_row))
        )
    known = asks.start is not None and told.start is not None
    tokens = [] if known else [asks.position, asks.segment, told.position, told.segment]
    sinks = (
        steps.normaliser_p.broadcast_over_scores()["sink"].flatten()
        if isinstance(steps.normaliser, SinkSoftmax)
        else None
    )
    starts = [asks.start, told.start] if known else []
    return block_sparse_attention(
        inputs.q, k, v, sinks, tokens, starts, steps.pattern_text, inputs.query_context.scale
    )[0]


def _has_cpu_kernel(call: CallSignature) -> bool:
    """Whether the kernel of the CPU can run it, forward and backward."""
    steps = any(isinstance(part, ScoreStep) for _, part in call.spec.parts())
    return call.device == "cpu" and call.core.dim == call.core.vdim and not steps


def _position_ranges(call: CallSignature, size: CallSize) -> tuple[range, range]:
    # Tokens of a source are counted from 0 like those that ask.
    first = size.keys - size.queries if call.spec.source is None else 0
    return range(first, first + size.queries), range(size.keys)


def _attend_per_block(
    call: CallSignature, attention_mask: AttentionMask, inputs: CoreInputs, steps: CoreSteps
) -> Tensor:
    cut = CallBlocks(attention_mask, inputs)
    if len(cut.all) == 1:
        return sdpa.fused_attention(call, attention_mask, inputs, steps, None)
    read, asking = [block.keys for block in cut.all], [(block.queries,) for block in cut.all]
    queries, keys, values = (
        gather_slices(x, some) for x, some in ((inputs.q, asking), (inputs.k, read), (inputs.v, read))
    )
    asked = (gather_slices(x, asking) for x in (inputs.query_context.x_BTD, inputs.query_context.q_BTHK))
    parts = [
        sdpa.fused_attention(call, cut.mask_of(block), _block_inputs(cut.inputs_of(block), *given), steps, None)
        for block, *given in zip(cut.all, queries, keys, values, *asked, strict=True)
    ]
    return torch.cat(parts, 1)


def _block_inputs(inputs: CoreInputs, q: Tensor, k: Tensor, v: Tensor, x_BTD: Tensor, q_BTHK: Tensor) -> CoreInputs:
    """The tensors of a block, those that learn in the slices made for all blocks."""
    return inputs._replace(q=q, k=k, v=v, query_context=inputs.query_context._replace(x_BTD=x_BTD, q_BTHK=q_BTHK))

"""Fused attention in blocks of queries: keys that no query of a block may
attend to are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..interfaces import ScoreStep
from ..interfaces.core_types import CallSize
from ..masking.patterns import Causal, Full, parse_pattern
from . import query_blocks, sdpa
from .core_interface import (
    CallSignature,
    CoreInputs,
    kv_of_even_groups,
    no_mask_conflicts,
)
from .query_blocks import (
    QUERY_BLOCK_SIZE,
    BlockBatch,
    GatherSlices,
    KeyRanges,
    TokenAxis,
    add_to_ranges,
    count_batch_pairs,
    plan_block_batches,
    range_to_slice,
    slice_inputs,
)

# average length of runs of consecutive tokens below which blocks of runs do not pay
MIN_RUN_LENGTH = 16

TokenRun = tuple[int, TokenAxis]  # a segment, and consecutive tokens of it


def find_token_runs(
    tokens: Sequence[Tensor], batch: int
) -> list[tuple[Sequence[int], TokenAxis, tuple[TokenAxis, ...]]] | None:
    """Find runs of consecutive queries: (rows of the batch, queries, keys of the same segment).

    `tokens` are position and segment of queries and of keys, each [B, T], or [1, T] if all rows are
    equal. Returns None if the runs are too short.
    """
    query_runs = _scan_token_runs(*tokens[:2])
    key_runs = _scan_token_runs(*tokens[2:])
    for runs_by_row, positions in ((query_runs, tokens[0]), (key_runs, tokens[2])):
        if (
            max(map(len, runs_by_row), default=0)
            > MIN_RUN_LENGTH + positions.shape[1] // MIN_RUN_LENGTH
        ):
            return None
    rows_are_equal = len(query_runs) == len(key_runs) == 1
    runs: list[tuple[Sequence[int], TokenAxis, tuple[TokenAxis, ...]]] = []
    for row in range(1 if rows_are_equal else batch):
        row_keys = key_runs[row % len(key_runs)]
        for segment, queries in query_runs[row % len(query_runs)]:
            keys = tuple(axis for key_segment, axis in row_keys if key_segment == segment)
            runs.append((range(batch) if rows_are_equal else (row,), queries, keys))
    return runs


def _scan_token_runs(position_BT: Tensor, segment_BT: Tensor) -> list[list[TokenRun]]:
    """The runs of consecutive tokens of each row, without padding."""
    if not position_BT.shape[1]:
        return [[] for _ in position_BT]
    begins = torch.ones_like(position_BT, dtype=torch.bool)
    begins[:, 1:] = (position_BT.diff() != 1) | (segment_BT.diff() != 0)
    rows, slots = begins.nonzero(as_tuple=True)
    columns = (t.tolist() for t in (rows, slots, position_BT[rows, slots], segment_BT[rows, slots]))
    runs: list[list[TokenRun]] = [[] for _ in position_BT]
    next_begins: list[tuple[int, int]] = [
        *zip(rows.tolist()[1:], slots.tolist()[1:], strict=True),
        (-1, 0),
    ]
    for (row, slot, position, segment), (next_row, next_slot) in zip(
        zip(*columns, strict=True), next_begins, strict=True
    ):
        count = (next_slot if next_row == row else position_BT.shape[1]) - slot
        if segment >= 0:
            runs[row].append((segment, TokenAxis(range(position, position + count), slot)))
    return runs


# --- Batches of blocks as views of q, k and v -----------------------------------------------------

# bytes of keys and values per fused call, so that its gathered copies stay in the cache
MAX_CALL_BYTES = 2**24


class BatchedBlocks(NamedTuple):
    """The blocks of one fused call: several blocks of one row of the batch, or (row None) one block
    of all rows.
    """

    batch_row: int | None
    queries: Sequence[range]
    keys: Sequence[KeyRanges]

    def gather_queries(self, x_BTHD: Tensor) -> Tensor:
        """The queries of each block, x_NHRD, as a view."""
        return self._view(x_BTHD, self.queries).transpose(1, 2)

    def gather_keys(self, x_BSGD: Tensor) -> Tensor:
        """The keys (or values) of each block, x_NGWD; a view if they are one range."""
        if len(self.keys[0]) == 1:
            return self._view(x_BSGD, [key_range for (key_range,) in self.keys]).transpose(1, 2)
        if self.batch_row is None:
            return torch.cat(
                [x_BSGD[:, range_to_slice(keys)] for keys in self.keys[0]], 1
            ).transpose(1, 2)
        parts = [
            x_BSGD[self.batch_row, range_to_slice(keys)] for keys in chain.from_iterable(self.keys)
        ]
        return torch.cat(parts).unflatten(0, (len(self.keys), -1)).transpose(1, 2)

    def scatter_queries(self, into_BTHD: Tensor, x_NHRD: Tensor) -> None:
        """Write the results of each block's queries to their positions."""
        self.gather_queries(into_BTHD).copy_(x_NHRD)

    def add_to_keys(self, into_BSGD: Tensor, x_NGWD: Tensor) -> None:
        """Add the gradients of each block's keys to their positions."""
        x_NWGD = x_NGWD.transpose(1, 2)
        if self.batch_row is None:
            add_to_ranges(into_BSGD.transpose(0, 1), x_NWGD.transpose(0, 1), self.keys[0])
        elif len(self.keys[0]) == 1 and len(self.keys) > 1:
            self._overlap(into_BSGD, x_NWGD, [key_range for (key_range,) in self.keys])
        else:
            for ranges, x_WGD in zip(self.keys, x_NWGD, strict=True):
                add_to_ranges(into_BSGD[self.batch_row], x_WGD, ranges)

    def _overlap(self, into_BSGD: Tensor, x_NWGD: Tensor, ranges: Sequence[range]) -> None:
        """Add gradients of overlapping key ranges, in slices of columns that no
        two blocks share.
        """
        gap = ranges[1].start - ranges[0].start
        step = ranges[0].step
        width = len(ranges[0])
        if gap == 0:
            into_BSGD[self.batch_row, range_to_slice(ranges[0])] += x_NWGD.sum(0)
            return
        # each range lies between the tokens of the others
        is_interleaved = len(ranges) * gap <= step
        slice_width = width if is_interleaved else gap // step
        for begin in range(0, width, slice_width):
            columns = [keys[begin : begin + slice_width] for keys in ranges]
            self._view(into_BSGD, columns).add_(x_NWGD[:, begin : begin + slice_width])

    def _view(self, x_BTHD: Tensor, ranges: Sequence[range]) -> Tensor:
        if self.batch_row is None:
            return x_BTHD[:, range_to_slice(ranges[0])]
        _, token, head, channel = x_BTHD.stride()
        start = ranges[0].start
        step = ranges[0].step
        gap = ranges[1].start - start if len(ranges) > 1 else 0
        shape = (len(ranges), len(ranges[0]), *x_BTHD.shape[2:])
        offset = x_BTHD.storage_offset() + self.batch_row * x_BTHD.stride(0) + start * token
        return x_BTHD.as_strided(shape, (gap * token, step * token, head, channel), offset)


def batch_blocks(
    block_batch: BlockBatch, rows: Sequence[int], nbytes: int
) -> Iterator[BatchedBlocks]:
    """The fused calls for these blocks over these rows of the batch; a key and its value take
    `nbytes`.
    """
    blocks = list(zip(block_batch.queries, block_batch.keys, strict=True))
    if 1 < len(rows) >= len(blocks):  # then `rows` are all rows of the batch
        yield from (BatchedBlocks(None, [queries], [keys]) for queries, keys in blocks)
        return
    max_blocks = max(1, MAX_CALL_BYTES // (nbytes * sum(map(len, blocks[0][1]))))
    runs = min(
        (
            _evenly_spaced_runs(order)
            for order in (blocks, sorted(blocks, key=lambda block: block[0].start))
        ),
        key=len,
    )
    for row in rows:
        for run in runs:
            for begin in range(0, len(run), max_blocks):
                queries, keys = zip(*run[begin : begin + max_blocks], strict=True)
                yield BatchedBlocks(row, queries, keys)


def _evenly_spaced_runs(
    blocks: Sequence[tuple[range, KeyRanges]],
) -> list[list[tuple[range, KeyRanges]]]:
    """Split the blocks into runs of evenly spaced query starts; keys too, if they are one range."""
    runs: list[list[tuple[range, KeyRanges]]] = []
    run_distance: tuple[int, ...] | None = None
    for block in blocks:
        distance = None if not runs else _block_distance(runs[-1][-1], block)
        if (
            distance is None
            or (run_distance is not None and distance != run_distance)
            or min(distance) < 0
        ):
            runs.append([block])
            run_distance = None
        else:
            runs[-1].append(block)
            run_distance = distance
    return runs


def _block_distance(
    block: tuple[range, KeyRanges], next_block: tuple[range, KeyRanges]
) -> tuple[int, ...]:
    (queries, keys) = block
    (next_queries, next_keys) = next_block
    distance = next_queries.start - queries.start
    return (distance, next_keys[0].start - keys[0].start) if len(keys) == 1 else (distance,)


# --- The operation: torch's fused CPU kernel over all blocks, forward and backward ----------------

FLASH_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
OP_INPUT_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] tokens, int[] starts, "
    "str pattern, float scale"
)
MAX_CACHED_PLANS = 256  # the cache is cleared when it holds as many

_PLAN_CACHE: dict[tuple[str, TokenAxis, tuple[TokenAxis, ...]], list[BlockBatch]] = {}


def plan_batches(
    q: Tensor, k: Tensor, tokens: Sequence[Tensor], first_positions: Sequence[int], pattern: str
) -> list[tuple[BlockBatch, Sequence[int]]] | None:
    """The batches of blocks of a call, each with its rows of the batch; None if tokens are in no
    order.

    `first_positions` are the positions of the first query and key if all rows hold consecutive
    tokens of one segment. Otherwise `tokens` are position and segment of queries and of keys.
    """
    batch = q.shape[0]
    if first_positions:
        queries, keys = (
            TokenAxis(range(first, first + x.shape[1]))
            for first, x in zip(first_positions, (q, k), strict=True)
        )
        runs = [(range(batch), queries, (keys,))]
    else:
        runs = find_token_runs(tokens, batch)
        if runs is None:
            return None
    batches: list[tuple[BlockBatch, Sequence[int]]] = []
    for rows, queries, key_axes in runs:
        key = pattern, queries, key_axes
        # Looked up once, because another thread may clear the cache at any time.
        plan = _PLAN_CACHE.get(key)
        if plan is None:
            if len(_PLAN_CACHE) >= MAX_CACHED_PLANS:
                _PLAN_CACHE.clear()
            plan = _PLAN_CACHE[key] = plan_block_batches(parse_pattern(pattern), queries, key_axes)
        batches += [(blocks, rows) for blocks in plan]
    return batches


def iter_calls(
    q: Tensor, k: Tensor, tokens: Sequence[Tensor], first_positions: Sequence[int], pattern: str
) -> Iterator[tuple[BatchedBlocks, Tensor | None]]:
    """The blocks of each fused call, and its additive mask (None: all pairs are allowed)."""

    def additive_mask(allowed: Tensor) -> Tensor:
        return q.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)

    allows = parse_pattern(pattern).allows
    batches = plan_batches(q, k, tokens, first_positions, pattern)
    if batches is not None:
        nbytes = 2 * k.shape[2] * k.shape[3] * k.element_size()
        for block_batch, rows in batches:
            mask = None
            if block_batch.first_block_positions is not None:
                queries, keys = block_batch.first_block_positions
                i = torch.arange(queries.start, queries.stop, queries.step)
                j = torch.cat([torch.arange(part.start, part.stop, part.step) for part in keys])
                mask = additive_mask(allows(i[:, None], j)[None, None])
            yield from ((blocks, mask) for blocks in batch_blocks(block_batch, rows, nbytes))
        return
    # Blocks of queries with all keys, for tokens in no order.
    position, segment, key_position, key_segment = (t[:, None, None] for t in tokens)
    for queries in query_blocks.split_range(q.shape[1]):
        i, own_segment = (
            t.transpose(2, 3)[:, :, queries.start : queries.stop] for t in (position, segment)
        )
        allowed = (own_segment == key_segment) & (own_segment >= 0) & allows(i, key_position)
        yield BatchedBlocks(None, [queries], [(range(k.shape[1]),)]), additive_mask(allowed)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """Outputs o_BTRV and the log-sum-exp l_BTH of the scores, for q_BTHK, k_BSGK and v_BSGV.

    `sinks` [H] adds one score per head to every row of scores; it has no value. `options` are the
    arguments of `plan_batches` and the scale.
    """
    *where, scale = options
    q = _contiguous_channels(q)
    k = _contiguous_channels(k)
    v = _contiguous_channels(v)
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for blocks, mask in iter_calls(q, k, *where):
        block_qkv = blocks.gather_queries(q), blocks.gather_keys(k), blocks.gather_keys(v)
        block_o, block_lse = FLASH_FORWARD(*block_qkv, 0.0, False, attn_mask=mask, scale=scale)
        if mask is not None:
            block_lse = block_lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        blocks.scatter_queries(o, block_o)
        blocks.scatter_queries(lse[..., None], block_lse[..., None])
    if sinks is None:
        return o, lse
    lse_with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    return o * (lse - lse_with_sinks).exp()[..., None].to(o.dtype), lse_with_sinks


def run_backward(
    grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; `rest` is v, the sinks and the options of `run_forward`."""
    v, _, *where, scale = rest
    grad, q, k, v = (_contiguous_channels(x) for x in (grad, q, k, v))
    q_grad, k_grad, v_grad = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    # rows without keys: every weight is exp(-inf - 0)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    for blocks, mask in iter_calls(q, k, *where):
        tensors = (
            blocks.gather_queries(grad),
            blocks.gather_queries(q),
            blocks.gather_keys(k),
            blocks.gather_keys(v),
            blocks.gather_queries(o),
            blocks.gather_queries(lse)[..., 0],
        )
        block_grads = FLASH_BACKWARD(*tensors, 0.0, False, attn_mask=mask, scale=scale)
        blocks.scatter_queries(q_grad, block_grads[0])
        blocks.add_to_keys(k_grad, block_grads[1])
        blocks.add_to_keys(v_grad, block_grads[2])
    return q_grad, k_grad, v_grad


def _contiguous_channels(x: Tensor) -> Tensor:
    """x with contiguous channels of each head, which the kernel requires."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Custom operations, so that torch.compile and FLOP counters see one operation with a name.
block_sparse_attention = torch.library.custom_op(
    "headwise::block_sparse_attention",
    run_forward,
    mutates_args=(),
    schema=f"({OP_INPUT_SCHEMA}) -> (Tensor, Tensor)",
)
block_sparse_attention_backward = torch.library.custom_op(
    "headwise::block_sparse_attention_backward",
    run_backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor o, Tensor lse, {OP_INPUT_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


@block_sparse_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[:3], dtype=exact
    )


@block_sparse_attention_backward.register_fake
def _(grad: Tensor, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:3])
    return q, k, v


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, tokens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, *([] if sinks is None else [sinks]), *tokens)
    ctx.has_sinks = sinks is not None
    ctx.mark_non_differentiable(output[1])


def _run_autograd_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, *rest = ctx.saved_tensors
    sinks = rest.pop(0) if ctx.has_sinks else None
    grads = block_sparse_attention_backward(grad, o, lse, q, k, v, sinks, list(rest), *ctx.options)
    sinks_grad = None
    if sinks is not None:
        # A sink has no value, so the gradient of its score is -weight * (grad . o).
        weight = (sinks - lse).exp()
        sinks_grad = -(weight * (grad * o).sum(-1)).sum((0, 1)).to(sinks.dtype)
    # the gradient of a list is a list
    return (*grads, sinks_grad, [None] * len(rest), None if ctx.options[0] else [], None, None)


block_sparse_attention.register_autograd(_run_autograd_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.headwise.block_sparse_attention, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, sinks: Any, *options: Any, **_: Any) -> int:
    return 2 * _count_call_pairs(q, k, *options) * q.shape[2] * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.headwise.block_sparse_attention_backward, get_raw=True)
def _backward_flops(
    grad: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, *rest: Any, **_: Any
) -> int:
    # Products with the head dimension: recomputed scores, gradients of queries and keys; with the
    # value dimension: gradients of weights and values.
    pairs = _count_call_pairs(q, k, *rest[2:])
    return 2 * pairs * q.shape[2] * (3 * q.shape[3] + 2 * o.shape[3])


def _count_call_pairs(
    q: Tensor,
    k: Tensor,
    tokens: Sequence[Tensor],
    first_positions: Sequence[int],
    pattern: str,
    scale: float,
) -> int:
    """The number of scores per head, over all rows of the batch."""
    if first_positions:
        queries, keys = (
            range(first, first + x.shape[1])
            for first, x in zip(first_positions, (q, k), strict=True)
        )
        return q.shape[0] * count_batch_pairs(parse_pattern(pattern), queries, keys)
    batches = plan_batches(q, k, tokens, first_positions, pattern)
    if batches is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    return sum(blocks.num_pairs * len(rows) for blocks, rows in batches)


# --- Fused attention in blocks of queries ---------------------------------------------------------


def boundary_lengths() -> tuple[int, ...]:
    """Lengths where the number of blocks changes."""
    return query_blocks.QUERY_BLOCK_LENGTHS


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    reasons = sdpa.fused_call_conflicts(call)
    if call.single_query:
        reasons.append("needs more than one query per row")
    if call.pattern == Full():
        reasons.append("full() hides no keys, so there is nothing to skip")
    if call.pattern == Causal():
        reasons.append("one fused call already skips every block of keys that causal() hides")
    return reasons


def slower_reasons(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """Why another backend is preferred at this size."""
    if _has_cpu_kernel(call) and mask_shape != "any":
        return [
            f"one fused call already skips the keys of this call that {call.pattern.text} hides"
        ]
    return call.slower_below("block_sparse", size, "one call with a mask takes less time")


mask_conflicts = no_mask_conflicts


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of all blocks with the keys that any of their queries may attend to, and of the column
    of a sink.
    """
    columns = 0 if _has_cpu_kernel(call) else sdpa.num_sink_columns(call) * size.queries
    return call.core.flops(size.batch * (count_formed_pairs(call, size) + columns))


def count_formed_pairs(call: CallSignature, size: CallSize) -> int:
    """Number of computed scores per head and row of the batch; the queries are the last tokens of
    the keys.
    """
    if _has_cpu_kernel(call):
        # Source positions start at 0, and so do query positions.
        first = size.keys - size.queries if call.spec.source is None else 0
        return query_blocks.count_batch_pairs(
            call.pattern, range(first, first + size.queries), range(size.keys)
        )
    if size.queries <= QUERY_BLOCK_SIZE:
        return size.queries * size.keys
    return query_blocks.count_formed_pairs(call, size)


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV."""
    if not _has_cpu_kernel(call):
        return _attend_per_block(call, inputs)
    queries = inputs.mask.queries
    keys = inputs.mask.keys
    k, v = kv_of_even_groups(call, inputs)
    is_contiguous = queries.start is not None and keys.start is not None
    tokens = (
        [] if is_contiguous else [queries.position, queries.segment, keys.position, keys.segment]
    )
    first_positions = [queries.start, keys.start] if is_contiguous else []
    return block_sparse_attention(
        inputs.q,
        k,
        v,
        inputs.steps.sinks,
        tokens,
        first_positions,
        inputs.steps.pattern_text,
        inputs.query_context.scale,
    )[0]


def _has_cpu_kernel(call: CallSignature) -> bool:
    """True if the operation above supports the call, forward and backward."""
    steps = any(isinstance(part, ScoreStep) for _, part in call.spec.parts())
    return call.device == "cpu" and call.core.dim == call.core.vdim and not steps


def _attend_per_block(call: CallSignature, inputs: CoreInputs) -> Tensor:
    blocks = query_blocks.split_call(inputs.mask)
    query_ranges = [(block.queries,) for block in blocks]
    key_ranges = [block.keys for block in blocks]
    context = inputs.query_context
    by_queries = inputs.q, context.x_BTD, context.q_BTHK
    slices: list[Any] = [GatherSlices.apply(x, query_ranges) for x in by_queries]
    slices += [GatherSlices.apply(x, key_ranges) for x in (inputs.k, inputs.v)]
    outputs = []
    for block, q, x_BTD, raw_q_BTHK, k, v in zip(blocks, *slices, strict=True):
        part = slice_inputs(inputs, block)
        context = part.query_context._replace(x_BTD=x_BTD, q_BTHK=raw_q_BTHK)
        part = part._replace(q=q, k=k, v=v, query_context=context)
        outputs.append(sdpa.fused_attention(call, part))
    return torch.cat(outputs, 1)

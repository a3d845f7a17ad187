"""torch's FlexAttention: compiles elementwise score steps (ALiBi, soft-capping, ...) into one fused
kernel.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..interfaces import JointStep, ScoreStep, ValueStep
from ..interfaces.core_types import CallSize
from ..masking.patterns import Causal, Full, Pattern
from ..masking.sequence_info import AttentionMask, SequenceInfo
from ..parts.dot_product import DotProduct
from ..parts.softmax import SinkSoftmax, Softmax, WeightDropout
from .core_interface import CallSignature, CoreInputs, never_slower, no_mask_conflicts

FLEX_BLOCK_SIZE = 128  # queries and keys of a block of its kernels
FLEX_BLOCK_LENGTHS = (127, 128, 129)  # lengths around it, for tests


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    spec = call.spec
    reasons = []
    if call.has_recurrent_state:
        reasons.append("needs cached keys and values; this layer caches a recurrent state")
    if call.single_query:
        reasons.append("would compile a kernel for every cache length")
    is_softmax = isinstance(spec.normaliser, (Softmax, SinkSoftmax))
    if not isinstance(spec.similarity, DotProduct) or not is_softmax:
        reasons.append("needs a softmax over scaled dot products")
    for _, part in spec.parts():
        if isinstance(part, (JointStep, ValueStep)):
            reasons.append(
                f"{type(part).__name__} needs all scores or the weights; the kernel sees one score"
            )
        elif isinstance(part, WeightDropout) and call.training and part.rate > 0:
            reasons.append("does not support dropout")
    unseen = sorted(call.probed_tensors & {"scores", "weights", "lse"})
    if unseen:
        reasons.append(f"cannot show {', '.join(unseen)}")
    if call.has_caller_mask:
        reasons.append("does not support a mask given by the caller; dense does")
    if not call.heads_in_order:
        reasons.append("needs one output head per query head, in order")
    if not call.group_size:
        reasons.append("needs the same number of query heads in every key-value group")
    return [*reasons, *_unsupported_device_reasons(call)]


def _unsupported_device_reasons(call: CallSignature) -> list[str]:
    if call.device not in ("cpu", "cuda"):
        return [f"has no kernel for {call.device}"]
    reasons = ["does not support float64"] if call.dtype == torch.float64 else []
    if call.device == "cuda":
        sizes = (call.core.dim, call.core.vdim)
        # Larger kernels need more shared memory than an H100 has, and fail when they are compiled.
        most = 128 if call.dtype == torch.float32 else 256
        if min(sizes) < 16:
            reasons.append(f"needs heads of at least 16 channels on CUDA, not {min(sizes)}")
        if max(sizes) > most:
            reasons.append(
                f"needs more shared memory than a GPU has for {max(sizes)} channels (up to {most} "
                f"in {str(call.dtype).removeprefix('torch.')})"
            )
        return reasons
    if call.grad_enabled:
        reasons.append("has no backward pass on the CPU")
    if isinstance(call.spec.normaliser, SinkSoftmax):
        reasons.append("needs sums of exponentials for sinks, which it does not return on the CPU")
    if call.core.dim != call.core.vdim:
        reasons.append("needs dim = vdim on the CPU")
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        reasons.append("needs a C++ compiler on the CPU")
    return reasons


def is_preferred(call: CallSignature) -> bool:
    """True if it comes before every other fused call: on CUDA, for patterns that hide keys, for
    score steps and for sinks.

    One kernel skips the hidden blocks and computes the steps, where others loop over blocks in
    Python or store a bias.
    """
    if call.device != "cuda":
        return False
    has_steps = any(isinstance(part, ScoreStep) for _, part in call.spec.parts())
    has_sinks = isinstance(call.spec.normaliser, SinkSoftmax)
    return has_steps or has_sinks or call.pattern not in (Full(), Causal())


mask_conflicts = no_mask_conflicts
slower_reasons = never_slower


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of the allowed pairs, a lower bound: the kernel computes whole blocks of 128 x 128
    pairs.
    """
    return call.core.flops(size.batch * size.pairs)


class _FlexPair:
    """One (query, key) pair inside the compiled kernel, as the `ScorePosition` that score steps
    take.
    """

    def __init__(self, i: Tensor, j: Tensor, b: Tensor, h: Tensor, t: Tensor) -> None:
        self.i = i
        self.j = j
        self._at = (b, t, h)

    def take(self, factors: Tensor, index: Tensor) -> Tensor:
        """factors [B, T, H, R] of this pair's query and head at an index."""
        b, t, h = self._at
        return factors[b, t, h, index]


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV."""
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    batch = q.shape[0]
    query_position, key_position = (
        sequence.position.expand(batch, -1) for sequence in (inputs.mask.queries, inputs.mask.keys)
    )
    blocks = block_mask(inputs.mask, batch, str(q.device))
    score_steps = [
        (step, p, step.query_factors(inputs.query_context, p))
        for step, p in inputs.steps.elementwise
    ]

    def score(s: Tensor, b: Tensor, h: Tensor, t: Tensor, n: Tensor) -> Tensor:
        pair = _FlexPair(query_position[b, t], key_position[b, n], b, h, t)
        for step, p, factors in score_steps:
            s = step.score(s, pair, factors, p.head(h))
        return s

    from torch.nn.attention.flex_attention import AuxRequest

    options: dict[str, Any] = {"score_mod": score if score_steps else None, "block_mask": blocks}
    options |= {"scale": inputs.query_context.scale, "enable_gqa": call.group_size > 1}
    sinks_H = inputs.steps.sinks
    if sinks_H is None:
        return _run_compiled(q, k, v, options).transpose(1, 2)
    o_BHTV, sums = _run_compiled(q, k, v, options | {"return_aux": AuxRequest(lse=True)})
    # a sink has no value, so that it only takes its share of every row
    share_BHT = torch.sigmoid(sums.lse - sinks_H[:, None].to(sums.lse.dtype))
    return (o_BHTV * share_BHT[..., None].to(o_BHTV.dtype)).transpose(1, 2)


MAX_CACHED_MASKS = 64  # the cache is cleared when it holds as many
_MASK_CACHE: dict[tuple[object, ...], Any] = {}


def block_mask(attention_mask: AttentionMask, batch: int, device: str) -> Any:
    """The blocks of pairs that a pattern allows, as FlexAttention's `BlockMask`.

    Sequences of consecutive positions share one mask for all rows, which is kept for later calls of
    these lengths; for others the mask is kept with the positions of the queries, so that the layers
    of a model make it once.
    """
    queries = attention_mask.queries
    keys = attention_mask.keys
    pattern = attention_mask.pattern
    if torch.compiler.is_compiling():
        return _make_block_mask(
            _pairs_by_tensors(attention_mask, batch), batch, attention_mask, device
        )
    if queries.start is None or keys.start is None:
        for plan in queries.backend_plans:
            if (
                isinstance(plan, _SequenceBlockMask)
                and plan.keys is keys
                and plan.key == (pattern, batch, device)
            ):
                return plan.mask
        mask = _make_block_mask(
            _pairs_by_tensors(attention_mask, batch), batch, attention_mask, device
        )
        queries.backend_plans.append(_SequenceBlockMask(keys, (pattern, batch, device), mask))
        return mask
    query_start = queries.start
    key_start = keys.start
    key = pattern.text, query_start, queries.count, key_start, keys.count, device
    # looked up once, because another thread may clear the cache at any time
    mask = _MASK_CACHE.get(key)
    if mask is None:
        if len(_MASK_CACHE) >= MAX_CACHED_MASKS:
            _MASK_CACHE.clear()

        query_positions = range(query_start, query_start + queries.count)
        key_positions = range(key_start, key_start + keys.count)
        mask = _MASK_CACHE[key] = _blocks_of_pattern(
            pattern, query_positions, key_positions, device
        )
    return mask


def _blocks_of_pattern(pattern: Pattern, queries: range, keys: range, device: str) -> Any:
    """The block mask of consecutive positions, from the pattern's own ranges of keys: it never
    holds a pair of tokens, of which 100,000 have 10^10.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def allowed(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return pattern.allows(t + queries.start, s + keys.start)

    size = FLEX_BLOCK_SIZE
    shape = -(-len(queries) // size), -(-len(keys) // size)
    is_read, is_whole = np.zeros(shape, bool), np.zeros(shape, bool)
    for row in range(shape[0]):
        own = queries[row * size : (row + 1) * size]
        for span in pattern.visible_keys(own, keys):
            start, stop = span.start - keys.start, span.stop - keys.start
            is_read[row, start // size : -(-stop // size)] = True
        for span in pattern.shared_keys(own, keys) if len(own) == size else ():
            start, stop = span.start - keys.start, span.stop - keys.start
            is_whole[row, -(-start // size) : stop // size] = True
    return BlockMask.from_kv_blocks(
        *_list_blocks(is_read & ~is_whole, device),
        *_list_blocks(is_whole, device),
        BLOCK_SIZE=size,
        mask_mod=allowed,
        seq_lengths=(len(queries), len(keys)),
    )


def _list_blocks(is_listed: NDArray[np.bool_], device: str) -> tuple[Tensor, Tensor]:
    """The number of listed blocks in each row, and their columns in order, before all others."""
    columns = np.argsort(~is_listed, axis=1, kind="stable").astype(np.int32)
    counts, columns = map(torch.from_numpy, (is_listed.sum(1, dtype=np.int32), columns))
    return counts[None, None].to(device), columns[None, None].to(device)


class _SequenceBlockMask(NamedTuple):
    """A block mask that is kept with the positions of its queries."""

    keys: SequenceInfo
    key: tuple[object, ...]
    mask: Any


def _pairs_by_tensors(attention_mask: AttentionMask, batch: int) -> Callable[..., Tensor]:
    """A function that tests pairs by the positions and segments of both tokens."""
    (query_position, query_segment), (key_position, key_segment) = (
        (sequence.position.expand(batch, -1), sequence.segment.expand(batch, -1))
        for sequence in (attention_mask.queries, attention_mask.keys)
    )

    def allowed(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        same_segment = (query_segment[b, t] == key_segment[b, s]) & (key_segment[b, s] >= 0)
        return same_segment & attention_mask.pattern.allows(
            query_position[b, t], key_position[b, s]
        )

    return allowed


def _make_block_mask(
    allowed: Callable[..., Tensor], batch: int | None, attention_mask: AttentionMask, device: str
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        allowed, batch, None, attention_mask.queries.count, attention_mask.keys.count, device
    )


_COMPILED_KERNELS: dict[str, Any] = {}


def _run_compiled(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """Run `flex_attention` compiled for these shapes; uncompiled it would compute every score, as
    `dense` does. Returns o_BHTV, with `return_aux` also what it asks for.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    kind = q.device.type
    if kind not in _COMPILED_KERNELS:
        # On the CPU each length compiles its own kernel, because the code generator fails on
        # symbolic lengths. On CUDA the second length compiles a kernel for all lengths.
        _COMPILED_KERNELS[kind] = torch.compile(
            flex_attention, dynamic=False if kind == "cpu" else None, fullgraph=True
        )
    # The compiler's default limit of 8 recompilations is too low for a kernel per length.
    with torch._dynamo.config.patch(recompile_limit=128):
        return _COMPILED_KERNELS[kind](q, k, v, **options)

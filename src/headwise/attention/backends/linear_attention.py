"""Linear attention: sums over tokens instead of scores, with linear cost; decoding keeps a
recurrent state.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from ..interfaces.core_types import CallSize
from ..masking.patterns import Causal, Full
from ..spec.attention_spec import AttentionSpec
from .core_interface import (
    CallSignature,
    CoreInputs,
    expand_kv_heads,
    never_slower,
    no_mask_conflicts,
)

CHUNK_SIZE = 64  # tokens that are scored before they are added to the state
CHUNKS_TOGETHER = 32  # most chunks whose states are in memory together, as rows of a batch


def boundary_lengths() -> tuple[int, ...]:
    """Lengths where the number of chunks changes."""
    return CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE + 3


def unsupported_reasons(call: CallSignature) -> list[str]:
    """Why this call cannot run here."""
    spec = call.spec
    reasons = []
    if spec.recurrent_part is None:
        reasons.append("no part of the spec has a recurrent form (linear attention)")
    if not call.has_recurrent_state and call.pattern not in (Causal(), Full()):
        reasons.append(f"a recurrent state cannot forget tokens, as {call.pattern.text} must")
    if call.head_group is not None:
        reasons.append("a recurrent state has all heads of a layer")
    if call.has_caller_mask:
        reasons.append("does not support a mask given by the caller")
    unseen = sorted(call.probed_tensors & {"scores", "weights", "lse"})
    if unseen:
        reasons.append(f"cannot show {', '.join(unseen)}")
    return reasons


slower_reasons = never_slower
mask_conflicts = no_mask_conflicts


def executed_flops(call: CallSignature, size: CallSize) -> int:
    """FLOPs of the scores within each chunk, of updates of the state, and of each query's product
    with the state.
    """
    assert call.spec.recurrent_part is not None
    rows = len(call.core.value_head_of_row)
    features = call.spec.recurrent_part[1].num_state_features(call.core)
    vdim = call.core.vdim
    queries = size.queries
    keys = size.keys
    if call.has_recurrent_state:
        pairs = queries * queries
        state_updates = 0
        state_reads = queries
    elif call.pattern == Full() or queries == keys == 1:
        pairs = 0
        state_updates = keys
        state_reads = queries
    elif call.spec.source is not None:
        # The order of queries and source tokens depends on the data: one chunk.
        pairs = queries * keys
        state_updates = 0
        state_reads = 0
    else:
        full, rest = divmod(queries, CHUNK_SIZE)
        pairs = full * CHUNK_SIZE**2 + rest**2
        state_reads = max(queries - CHUNK_SIZE, 0)
        state_updates = max(queries - 1, 0) // CHUNK_SIZE * CHUNK_SIZE
    per_row = (
        pairs * (features + vdim)
        + state_updates * features * vdim
        + state_reads * features * (vdim + 1)
    )
    return 2 * size.batch * rows * per_row


def empty_state(
    spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The state before any token; at least float32, because it sums over thousands of tokens."""
    assert spec.recurrent_part is not None
    part = spec.recurrent_part[1]
    exact = torch.promote_types(dtype, torch.float32)
    sizes = spec.sizes_of(part)
    return {
        name: torch.zeros(batch, *layout.unmerged_shape(sizes), dtype=exact, device=device)
        for name, layout in part.state_layouts(spec).items()
    }


def values_per_row(inputs: CoreInputs, call: CallSignature) -> tuple[Tensor, Tensor]:
    """Keys k_BRSK and values v_BRSV of each row of weights."""
    core = dict(zip(call.score_heads, call.core.key_head_of_query, strict=True))
    keys = tuple(core[head] for head in call.score_head_of_row)
    return expand_kv_heads(inputs.k, keys), expand_kv_heads(inputs.v, call.core.value_head_of_row)


def attend(call: CallSignature, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTRV: weighted sums of values, over the state and the keys, divided by the
    sums of weights.
    """
    q_BHTK = inputs.q.transpose(1, 2)
    rows = inputs.steps.selected_rows
    if rows is not None:
        q_BHTK = q_BHTK.index_select(1, torch.tensor(rows, device=q_BHTK.device))
    k_BHSK, v_BHSV = values_per_row(inputs, call)
    reader = _StateReader(inputs, v_BHSV.dtype)
    if call.has_recurrent_state:
        o_BHTV = reader.read_state_and_keys(
            q_BHTK,
            k_BHSK,
            v_BHSV,
            inputs.mask.allowed,
            inputs.state,
            inputs.mask.queries.is_real,
        )
    elif inputs.mask.shape == "any":  # the mask depends on the data: one chunk, without a state
        o_BHTV = reader.read_state_and_keys(q_BHTK, k_BHSK, v_BHSV, inputs.mask.allowed)
    else:
        state = empty_state(call.spec, q_BHTK.shape[0], q_BHTK.dtype, q_BHTK.device)
        read = reader.read_all_keys if inputs.mask.shape == "full" else reader.read_causal_chunks
        o_BHTV = read(q_BHTK, k_BHSK, v_BHSV, state)
    return o_BHTV.transpose(1, 2)


class _StateReader:
    """Computes outputs from a recurrent state, from keys, or from both."""

    def __init__(self, inputs: CoreInputs, dtype: torch.dtype) -> None:
        assert inputs.steps.recurrent_part is not None
        self.normaliser = inputs.steps.normaliser
        (self.part, self.p) = inputs.steps.recurrent_part
        self.scale = inputs.query_context.scale
        self.dtype = dtype

    def read_state_and_keys(
        self,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        v_BHSV: Tensor,
        allowed: Tensor,
        state: Mapping[str, Tensor] | None = None,
        live_BT: Tensor | None = None,
    ) -> Tensor:
        """o_BHTV over the allowed keys and, if there is one, the state. `live_BT` is False for
        padding.
        """
        w_BHTS = self.part.unnormalised_weights(q_BHTK, k_BHSK, self.scale, self.p).masked_fill(
            ~allowed, 0.0
        )
        # sums over thousands of tokens
        w_BHTS = w_BHTS.to(torch.promote_types(w_BHTS.dtype, torch.float32))
        value_BHTV = torch.matmul(w_BHTS, v_BHSV.to(w_BHTS.dtype))
        total = w_BHTS.sum(-1)
        if state is not None:
            past_BHTV, past_total = self.part.read_state(q_BHTK, state, self.p)
            if live_BT is not None:
                live = live_BT[:, None, :]
                past_BHTV = past_BHTV.masked_fill(~live[..., None], 0.0)
                past_total = past_total.masked_fill(~live, 0.0)
            value_BHTV = value_BHTV + past_BHTV
            total = total + past_total
        return self._divide(value_BHTV, total)

    def read_all_keys(
        self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """o_BHTV of queries that attend to every key."""
        state = self._update_state(state, k_BHSK, v_BHSV)
        return self._divide(*self.part.read_state(q_BHTK, state, self.p))

    def read_causal_chunks(
        self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """o_BHTV under a causal mask: the scores of each chunk, and the state of all tokens before
        it. Whole chunks behind the first are rows of a batch: `CHUNKS_TOGETHER` at a time, or fewer
        if their states were larger than the keys and values of so many.
        """
        count = q_BHTK.shape[2]
        whole = count // CHUNK_SIZE * CHUNK_SIZE
        state_size = sum(one[0].numel() for one in state.values())
        chunk_size = sum(one[0, :, :CHUNK_SIZE].numel() for one in (k_BHSK, v_BHSV))
        together = min(CHUNKS_TOGETHER, max(1, CHUNKS_TOGETHER * chunk_size // max(1, state_size)))
        bounds = [0, *range(CHUNK_SIZE, whole, together * CHUNK_SIZE), whole, count]
        outputs: list[Tensor] = []
        for start, end in pairwise(bounds):
            if start < end:
                chunks = [_split_chunks(one[:, :, start:end]) for one in (q_BHTK, k_BHSK, v_BHSV)]
                before, state = self._states_of_chunks(state, chunks, is_last=end == count)
                outputs.append(self._read_chunks(chunks, before if start else None))
        return torch.cat(outputs, 2) if outputs else torch.zeros_like(v_BHSV)

    def _read_chunks(self, chunks: list[Tensor], before: dict[str, Tensor] | None) -> Tensor:
        """o_BHTV of the queries of these chunks, with the states before them."""
        q, k, v = (one.flatten(0, 1) for one in chunks)
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        state = before and {name: one.flatten(0, 1) for name, one in before.items()}
        o = self.read_state_and_keys(q, k, v, causal, state)
        return o.unflatten(0, chunks[0].shape[:2]).transpose(1, 2).flatten(2, 3)

    def _states_of_chunks(
        self, state: Mapping[str, Tensor], chunks: list[Tensor], is_last: bool
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """The state before each chunk, [B, C, ...], and that after all; of the last chunk of a text
        nothing is added.
        """
        batch, count = chunks[0].shape[:2]
        added = count - is_last
        if not added:
            return {name: tensor[:, None] for name, tensor in state.items()}, state
        k, v = (one[:, :added].flatten(0, 1) for one in chunks[1:])
        zeros = {
            name: torch.zeros_like(tensor[:1]).expand(len(k), *tensor.shape[1:])
            for name, tensor in state.items()
        }
        sums = self._update_state(zeros, k, v)
        states = {
            name: torch.cat([tensor[:, None], sums[name].unflatten(0, (batch, added))], 1).cumsum(1)
            for name, tensor in state.items()
        }
        before = {name: tensor[:, :count] for name, tensor in states.items()}
        return before, {name: tensor[:, -1] for name, tensor in states.items()}

    def _update_state(
        self, state: Mapping[str, Tensor], k_BHSK: Tensor, v_BHSV: Tensor
    ) -> dict[str, Tensor]:
        live_BS = torch.ones(
            k_BHSK.shape[0], k_BHSK.shape[2], dtype=torch.bool, device=k_BHSK.device
        )
        return self.part.update_state(state, k_BHSK, v_BHSV, live_BS, self.p)

    def _divide(self, value_BHTV: Tensor, total: Tensor) -> Tensor:
        return (value_BHTV / self.normaliser.divisor(total)[..., None]).to(self.dtype)


def _split_chunks(x_BHTK: Tensor) -> Tensor:
    """Whole chunks, or one shorter chunk, [B, C, H, T, K]."""
    size = min(CHUNK_SIZE, x_BHTK.shape[2])
    return x_BHTK.unflatten(2, (-1, size)).transpose(1, 2)

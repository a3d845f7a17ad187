"""Packed rows: several sequences in one row, and attention within each sequence.

Sequences of similar lengths form groups, and each group runs as a padded batch on any backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.operand_checks import is_under_functorch
from ..masking.sequence_info import AttentionMask, SequenceInfo
from .core_interface import CoreInputs

# Sequences of different lengths share a group while padding adds at most this share of the needed
# pairs.
MAX_WASTED_PAIRS_RATIO = 0.25
FREE_PAIRS = 4096  # padded pairs that take less time than one more call
# tensors that a probe can observe in packed rows
PROBED_TENSORS = frozenset({"q", "k", "v", "heads"})
# Plans kept per SequenceInfo: for self-attention and for a source.
MAX_PLANS_PER_SEQUENCE = 4
IntArray = NDArray[np.int64]


class TokenSlots(NamedTuple):
    """The slots of tokens in padded groups, as index tensors.

    `token_of_slot[s]` is the token in slot s, and `slot_of_token[n]` the slot of the n-th token
    that is not padding. `live_tokens` are the indices of these tokens among all `num_tokens`; None
    if no token is padding. A padding slot of a group holds the first token of its sequence; its
    result is not used.
    """

    token_of_slot: Tensor
    slot_of_token: Tensor
    live_tokens: Tensor | None
    num_tokens: int
    shapes: tuple[tuple[int, int], ...]  # sequences and tokens of each group

    def gather_groups(self, x: Tensor) -> list[Tensor]:
        """Gather x [B, T, ...] into one tensor [sequences, tokens, ...] per group."""
        slots = x.flatten(0, 1).index_select(0, self.token_of_slot)
        parts = slots.split([sequences * tokens for sequences, tokens in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def scatter_groups(self, groups: Sequence[Tensor]) -> Tensor:
        """Put the groups back into one tensor [B x T, ...] with zeros at padding tokens."""
        slots = torch.cat([group.flatten(0, 1) for group in groups])
        tokens = slots.index_select(0, self.slot_of_token)
        if self.live_tokens is None:
            return tokens
        zeros = tokens.new_zeros(self.num_tokens, *tokens.shape[1:])
        return zeros.index_copy(0, self.live_tokens, tokens)


class VarlenPlan(NamedTuple):
    """The groups of one call: query and key positions of each group, and the slots of queries and
    keys.
    """

    groups: tuple[tuple[SequenceInfo, SequenceInfo], ...]
    queries: TokenSlots
    keys: TokenSlots


def has_known_lengths(
    query_sequence: SequenceInfo, key_sequence: SequenceInfo | None, batch_size: int
) -> bool:
    """True if the lengths of all packed sequences are known, for queries and for keys, in every
    row.
    """
    all_lengths = [
        tokens.lengths for tokens in (query_sequence, key_sequence) if tokens is not None
    ]
    return (
        key_sequence is not None
        and not is_under_functorch()
        and all(
            lengths is not None and len(lengths) == batch_size and sum(map(sum, lengths))
            for lengths in all_lengths
        )
    )


def group_inputs(plan: VarlenPlan, inputs: CoreInputs) -> Iterator[CoreInputs]:
    """Yield the inputs of each group.

    Tensors other than q, k and v are only gathered if a part of the spec uses them.
    """
    query_context = inputs.query_context
    needs_context = bool(inputs.steps.scores or inputs.steps.weights)
    q_groups = plan.queries.gather_groups(inputs.q)
    k_groups = plan.keys.gather_groups(inputs.k)
    v_groups = plan.keys.gather_groups(inputs.v)
    shares_q = query_context.q_BTHK is inputs.q or not needs_context
    raw_q_groups = q_groups if shares_q else plan.queries.gather_groups(query_context.q_BTHK)
    x_groups = plan.queries.gather_groups(query_context.x_BTD) if needs_context else raw_q_groups
    entry_groups = {}
    if needs_context:
        entry_groups = {
            name: plan.keys.gather_groups(entry) for name, entry in inputs.kv_entry.items()
        }
    gate_groups = [
        plan.queries.gather_groups(gate.detach()) if gate.dim() > 3 else [gate] * len(plan.groups)
        for gate in inputs.gates
    ]
    for n, (query_sequence, key_sequence) in enumerate(plan.groups):
        context = query_context._replace(
            x_BTD=x_groups[n], q_BTHK=raw_q_groups[n], sequence=query_sequence
        )
        yield inputs._replace(
            q=q_groups[n],
            k=k_groups[n],
            v=v_groups[n],
            mask=AttentionMask(query_sequence, key_sequence, inputs.mask.pattern),
            query_context=context,
            kv_entry={name: groups[n] for name, groups in entry_groups.items()},
            gates=[groups[n] for groups in gate_groups],
            probe=None,
            kv_by_heads=(),
        )


def group_plan(attention_mask: AttentionMask) -> VarlenPlan:
    """Group the sequences of a call; computed once for all layers with the same tokens."""
    reads_future = attention_mask.pattern.tokens_before_decode != 0
    queries = attention_mask.queries
    keys = attention_mask.keys
    source = None if keys is queries else keys  # None, so that a sequence does not refer to itself
    for plan_source, plan_reads_future, plan in queries.backend_plans:
        if plan_source is source and plan_reads_future == reads_future:
            return plan
    plan = _make_group_plan(queries, keys, reads_future)
    older = queries.backend_plans[: MAX_PLANS_PER_SEQUENCE - 1]
    queries.backend_plans[:] = [(source, reads_future, plan), *older]
    return plan


def _make_group_plan(
    query_sequence: SequenceInfo, key_sequence: SequenceInfo, reads_future: bool
) -> VarlenPlan:
    query_offsets = _sequence_offsets(query_sequence)
    key_offsets = _sequence_offsets(key_sequence, query_sequence)
    members = [
        np.array(group)
        for group in group_by_length(query_offsets[0].tolist(), key_offsets[0].tolist())
    ]
    device = query_sequence.position.device
    is_self = key_sequence is query_sequence
    groups = list[tuple[SequenceInfo, SequenceInfo]]()
    for group in members:
        queries = SequenceInfo.contiguous(0, int(query_offsets[0][group].max()), device)
        lengths = key_offsets[0][group]
        longest = max(1, int(lengths.max()))
        # Padding keys come after all real keys, so a pattern without future keys needs no mask for
        # them.
        if (lengths == longest).all() or (is_self and not reads_future):
            groups.append(
                (queries, queries if is_self else SequenceInfo.contiguous(0, longest, device))
            )
        else:
            position = torch.arange(longest)[None]
            live = position < torch.from_numpy(lengths)[:, None]
            keys = SequenceInfo(position.expand(live.shape), live.long() - 1, checked=True).to(
                device
            )
            groups.append((queries, keys))
    slots = _make_token_slots(query_offsets, members, query_sequence)
    key_slots = slots if is_self else _make_token_slots(key_offsets, members, key_sequence)
    return VarlenPlan(tuple(groups), slots, key_slots)


def _sequence_offsets(
    tokens: SequenceInfo, like: SequenceInfo | None = None
) -> tuple[IntArray, IntArray]:
    """Return the length of every sequence and the index of its first token among all rows.

    Each row gets as many sequences as it has in `like`; missing ones have length 0.
    """
    assert tokens.lengths is not None
    template_lengths = tokens.lengths if like is None or like.lengths is None else like.lengths
    lengths = list[int]()
    begins = list[int]()
    for n, (row, template_row) in enumerate(zip(tokens.lengths, template_lengths, strict=True)):
        row = (*row, *[0] * len(template_row))[: len(template_row)]
        lengths += row
        begins += [n * tokens.count + before for before in accumulate(row, initial=0)][: len(row)]
    return np.array(lengths, np.int64), np.array(begins, np.int64)


def group_by_length(num_queries: Sequence[int], num_keys: Sequence[int]) -> Iterator[list[int]]:
    """Group sequences of similar lengths, the longest first, so that little is computed for
    padding.

    Sequences without queries are left out.

    >>> list(group_by_length([900, 100, 899, 0], [900, 100, 899, 5]))
    [[0, 2], [1]]
    """
    group = list[int]()
    max_queries = 0
    max_keys = 0
    needed_pairs = 0
    for n in sorted(range(len(num_queries)), key=lambda n: (-num_queries[n], -num_keys[n])):
        if not num_queries[n]:
            continue
        own_pairs = num_queries[n] * num_keys[n]
        max_queries = max(max_queries, num_queries[n])
        max_keys = max(max_keys, num_keys[n], 1)
        needed_pairs += own_pairs
        wasted_pairs = (len(group) + 1) * max_queries * max_keys - needed_pairs
        if group and wasted_pairs > max(FREE_PAIRS, MAX_WASTED_PAIRS_RATIO * needed_pairs):
            yield group
            group = []
            max_queries = num_queries[n]
            max_keys = max(num_keys[n], 1)
            needed_pairs = own_pairs
        group = [*group, n]
    if group:
        yield group


def _make_token_slots(
    offsets: tuple[IntArray, IntArray], groups: Sequence[IntArray], sequence: SequenceInfo
) -> TokenSlots:
    lengths, begins = offsets
    slot_tokens = list[IntArray]()
    live = list[IntArray]()
    live_slots = list[IntArray]()
    shapes = list[tuple[int, int]]()
    first_slot = 0
    total = len(sequence.position) * sequence.count
    for group in groups:
        longest = max(1, int(lengths[group].max()))
        first = begins[group][:, None]
        place = np.arange(longest)[None]
        is_live = place < lengths[group][:, None]
        tokens = np.where(is_live, first + place, np.minimum(first, total - 1))
        slot_tokens.append(tokens.ravel())
        live.append(tokens[is_live])
        live_slots.append(first_slot + np.flatnonzero(is_live))
        shapes.append((len(group), longest))
        first_slot += tokens.size
    device = sequence.position.device
    unsorted_tokens = np.concatenate(live)
    order = np.argsort(unsorted_tokens)
    live_tokens = (
        None if len(order) == total else torch.from_numpy(unsorted_tokens[order]).to(device)
    )
    token_of_slot, slots = (
        torch.from_numpy(np.concatenate(parts)) for parts in (slot_tokens, live_slots)
    )
    slot_of_token = slots[torch.from_numpy(order)]
    return TokenSlots(
        token_of_slot.to(device), slot_of_token.to(device), live_tokens, total, tuple(shapes)
    )

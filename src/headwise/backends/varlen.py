"""Packed rows: several sequences in one row, each attending to itself alone.

Plain attention of short texts on a CPU is one kernel, which reads tokens where they lie. Anything else runs in groups
of about one length, each a batch of its own for any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.autograd_guards import is_under_functorch
from ..kernels.launch import has_kernels
from ..kernels.varlen_attention import attend_varlen
from ..masking.patterns import Causal
from ..masking.sequence_info import AttentionMask, SequenceInfo
from . import sdpa
from .core_interface import CallSignature, CoreInputs, CoreSteps

MAX_WASTED_PAIRS_RATIO = (
    0.25  # of the pairs that are read, as many more may be formed so that texts of two lengths share a call
)
FREE_PAIRS = 4096  # pairs that are formed in less time than another call takes
PROBED_TENSORS = frozenset({"q", "k", "v", "heads"})  # what can be seen of texts that run apart
MAX_KERNEL_LENGTH = 256  # tokens of a text, up to which the kernel takes less time than fused calls for groups
KERNEL_DTYPES = (torch.float32, torch.float64)  # what it computes in; what is coarser is widened
MAX_PLANS_PER_SEQUENCE = (
    4  # plans of one set of tokens: of a text that reads itself, and a source, each for the kernel and in groups
)
IntArray = NDArray[np.int64]
SlotMap = tuple[Tensor, Tensor, Tensor | None, int]


class TokenSlots(NamedTuple):
    """Where tokens of rows go when texts are put into groups: `of[slot]` is the token there, `to[n]` the slot of the
    n-th live token, `live` which these are unless it is every one, of `count`. What a slot too many holds is the first
    token of its text, which nobody reads there."""

    token_of_slot: Tensor
    slot_of_token: Tensor
    live_tokens: Tensor | None
    num_tokens: int
    shapes: tuple[tuple[int, int], ...]  # of each group: texts, tokens

    def gather_groups(self, x: Tensor) -> list[Tensor]:
        """x [B, T, ...] as [texts, tokens, ...] of each group."""
        slots = cast(Tensor, _GatherTokens.apply(x.flatten(0, 1), *self[:4]))
        parts = slots.split([texts * tokens for texts, tokens in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def scatter_groups(self, groups: Sequence[Tensor]) -> Tensor:
        """Tokens [B x T, ...] again; zeros where there is none."""
        return cast(Tensor, _ScatterTokens.apply(torch.cat([group.flatten(0, 1) for group in groups]), *self[:4]))


class _GatherTokens(torch.autograd.Function):
    """Every slot takes its token; backwards a token has the gradient of its own slot alone, for no other is read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *places: *SlotMap) -> Tensor:
        ctx.places = places
        return x.index_select(0, places[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return cast(Tensor, _ScatterTokens.apply(grads[0], *ctx.places)), None, None, None, None


class _ScatterTokens(torch.autograd.Function):
    """Every live token takes its slot; backwards a slot that is none's has no gradient."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, *places: *SlotMap) -> Tensor:
        _, to, live, count = places
        ctx.places, ctx.slots = places, slots.shape
        found = slots.index_select(0, to)
        return found if live is None else found.new_zeros(count, *found.shape[1:]).index_copy_(0, live, found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, to, live, _ = ctx.places
        grad = grads[0] if live is None else grads[0].index_select(0, live)
        return grad.new_zeros(ctx.slots).index_copy_(0, to, grad), None, None, None, None


class VarlenPlan(NamedTuple):
    """The groups of one call: who asks and who is told in each, and where tokens go."""

    groups: tuple[tuple[SequenceInfo, SequenceInfo], ...]
    queries: TokenSlots
    keys: TokenSlots


def has_known_lengths(query_sequence: SequenceInfo, key_sequence: SequenceInfo | None, batch_size: int) -> bool:
    """Whether the texts of such a call are known apart: of queries, and of the keys they read, in each of the rows."""
    known = [tokens.lengths for tokens in (query_sequence, key_sequence) if tokens is not None]
    return (
        key_sequence is not None
        and not is_under_functorch()
        and all(one is not None and len(one) == batch_size and sum(map(sum, one)) for one in known)
    )


def longest_sequence(tokens: SequenceInfo) -> int:
    """The tokens of the longest text."""
    return max((length for row in tokens.lengths or () for length in row), default=0)


class VarlenTable(NamedTuple):
    """For the kernel: the first query of each text, how many there are, its first key, how many; the most of them."""

    table: Tensor
    longest: int


def supports_kernel(call: CallSignature) -> bool:
    """Whether the kernel computes what such a call asks for: plain softmax attention in equal groups of heads."""
    return call.device == "cpu" and call.group_size > 0 and not sdpa.plain_softmax_conflicts(call) and has_kernels()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernel computes in for tensors of this dtype."""
    return dtype if dtype in KERNEL_DTYPES else torch.float32


def attend_by_kernel(attention_mask: AttentionMask, inputs: CoreInputs) -> Tensor:
    """Per-head outputs o_BTHV of all sequences, in one call of the kernel."""
    qkv = [t.flatten(0, 1).to(compute_dtype(inputs.q.dtype)) for t in inputs[:3]]
    causal, scale = attention_mask.pattern == Causal(), inputs.query_context.scale
    o = attend_varlen(qkv, *kernel_plan(attention_mask), causal, scale)
    return o.to(inputs.v.dtype).unflatten(0, inputs.q.shape[:2])


def group_inputs(plan: VarlenPlan, inputs: CoreInputs, steps: CoreSteps) -> Iterator[CoreInputs]:
    """What each group is handed: beside q, k and v only what some part will ask for."""
    q, k, v, asked, entry, state, gates = inputs
    asks = bool(steps.scores or steps.weights)
    own = [plan.queries.gather_groups(q), plan.keys.gather_groups(k), plan.keys.gather_groups(v)]
    before = own[0] if asked.q_BTHK is q or not asks else plan.queries.gather_groups(asked.q_BTHK)
    x = plan.queries.gather_groups(asked.x_BTD) if asks else before
    kept = {name: plan.keys.gather_groups(held) for name, held in entry.items()} if asks else {}
    opened = [
        plan.queries.gather_groups(gate.detach()) if gate.dim() > 3 else [gate] * len(plan.groups) for gate in gates
    ]
    for n, (at, _) in enumerate(plan.groups):
        told = asked._replace(x_BTD=x[n], q_BTHK=before[n], sequence=at)
        beside = {name: held[n] for name, held in kept.items()}
        yield CoreInputs(own[0][n], own[1][n], own[2][n], told, beside, state, [gate[n] for gate in opened])


def group_plan(attention_mask: AttentionMask) -> VarlenPlan:
    """The plan of a call in groups, made once for all layers that are told the same tokens."""
    ahead = attention_mask.pattern.tokens_before_decode != 0
    return _cached_plan(
        attention_mask, f"groups, {ahead}", lambda: _make_group_plan(attention_mask.queries, attention_mask.keys, ahead)
    )


def kernel_plan(attention_mask: AttentionMask) -> VarlenTable:
    """The plan of a call of the kernel, made once as well."""
    return _cached_plan(attention_mask, "where", lambda: _make_kernel_plan(attention_mask.queries, attention_mask.keys))


def _cached_plan(attention_mask: AttentionMask, kind: str, make: Callable[[], Any]) -> Any:
    at, told = attention_mask.queries, attention_mask.keys
    other = None if told is at else told  # of itself none: no cycle
    for source, known, plan in at.backend_plans:
        if source is other and known == kind:
            return plan
    plan = make()
    at.backend_plans[:] = [(other, kind, plan), *at.backend_plans[: MAX_PLANS_PER_SEQUENCE - 1]]
    return plan


def _make_kernel_plan(at: SequenceInfo, told: SequenceInfo) -> VarlenTable:
    (asks, first), (keys, begin) = _sequence_offsets(at), _sequence_offsets(told, at)
    own = np.stack([first, asks, begin, keys], 1)[asks > 0]
    return VarlenTable(torch.from_numpy(own), int(own[:, 1::2].max(initial=0)))


def _make_group_plan(at: SequenceInfo, told: SequenceInfo, ahead: bool) -> VarlenPlan:
    asks, keys = _sequence_offsets(at), _sequence_offsets(told, at)
    chosen = [np.array(group) for group in group_by_length(asks[0].tolist(), keys[0].tolist())]
    device, itself, groups = at.position.device, told is at, list[tuple[SequenceInfo, SequenceInfo]]()
    for own in chosen:
        queries = SequenceInfo.contiguous(0, int(asks[0][own].max()), device)
        lengths = keys[0][own]
        longest = max(1, int(lengths.max()))
        # A key too many stands behind all that are real, where who never looks ahead does not see it.
        if (lengths == longest).all() or (itself and not ahead):
            groups.append((queries, queries if itself else SequenceInfo.contiguous(0, longest, device)))
        else:
            place = torch.arange(longest)[None]
            live = place < torch.from_numpy(lengths)[:, None]
            groups.append((queries, SequenceInfo(place.expand(live.shape), live.long() - 1, checked=True).to(device)))
    slots = _make_token_slots(asks, chosen, at)
    return VarlenPlan(tuple(groups), slots, slots if itself else _make_token_slots(keys, chosen, told))


def _sequence_offsets(tokens: SequenceInfo, like: SequenceInfo | None = None) -> tuple[IntArray, IntArray]:
    """The length of every text, and which token of all rows it begins with; as many in each row as another has."""
    assert tokens.lengths is not None
    wanted = tokens.lengths if like is None or like.lengths is None else like.lengths
    lengths, begins = list[int](), list[int]()
    for n, (row, other) in enumerate(zip(tokens.lengths, wanted, strict=True)):
        row = (*row, *[0] * len(other))[: len(other)]
        lengths += row
        begins += [n * tokens.count + before for before in accumulate(row, initial=0)][: len(row)]
    return np.array(lengths, np.int64), np.array(begins, np.int64)


def group_by_length(asks: Sequence[int], keys: Sequence[int]) -> Iterator[list[int]]:
    """Texts that share a call, as long as little is formed that nobody reads: the longest first, none without queries.

    >>> list(group_by_length([900, 100, 899, 0], [900, 100, 899, 5]))
    [[0, 2], [1]]
    """
    own, wide, deep, read = list[int](), 0, 0, 0
    for n in sorted(range(len(asks)), key=lambda n: (-asks[n], -keys[n])):
        if not asks[n]:
            continue
        wider, more = max(wide, asks[n]), read + asks[n] * keys[n]
        deeper = max(deep, keys[n], 1)
        if own and (len(own) + 1) * wider * deeper - more > max(FREE_PAIRS, MAX_WASTED_PAIRS_RATIO * more):
            yield own
            own, wider, deeper, more = [], asks[n], max(keys[n], 1), asks[n] * keys[n]
        own, wide, deep, read = [*own, n], wider, deeper, more
    if own:
        yield own


def _make_token_slots(texts: tuple[IntArray, IntArray], chosen: Sequence[IntArray], tokens: SequenceInfo) -> TokenSlots:
    lengths, begins = texts
    of, live, slots, shapes, at = list[IntArray](), list[IntArray](), list[IntArray](), list[tuple[int, int]](), 0
    total = len(tokens.position) * tokens.count
    for own in chosen:
        longest = max(1, int(lengths[own].max()))
        first, place = begins[own][:, None], np.arange(longest)[None]
        real = place < lengths[own][:, None]
        those = np.where(real, first + place, np.minimum(first, total - 1))
        of.append(those.ravel())
        live.append(those[real])
        slots.append(at + np.flatnonzero(real))
        shapes.append((len(own), longest))
        at += those.size
    which = np.concatenate(live)
    order = np.argsort(which)
    every = None if len(which) == total else torch.from_numpy(which[order]).to(tokens.position.device)
    there, back = (torch.from_numpy(np.concatenate(one)) for one in (of, slots))
    device = tokens.position.device
    return TokenSlots(there.to(device), back[torch.from_numpy(order)].to(device), every, total, tuple(shapes))

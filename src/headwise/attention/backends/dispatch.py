"""Chooses the backend that computes the core of a call, and runs it. The choice is made only here;
a backend may use another's function for its blocks.

1. By kind, before any tensor is computed: `make_dispatch` keeps the backends that support the
   `CallSignature` (spec, dtype, device, gradients, probes), in order of preference up to `dense`,
   and refuses the call if none does.
2. By size and mask, once queries and keys exist: `CoreDispatch.select` skips backends that cannot
   run this mask (`mask_conflicts`) or were measured to be slower for this size
   (`slower_reasons`). The first that remains runs.

A backend that the caller names runs at any size, or the call is refused. `check_mask` refuses it
before a cache stores the tokens.

Packed rows with known lengths are cut into sequences here. These run in groups of similar length,
and each group gets a backend.

If heads have different patterns, each group of heads with one pattern runs as a separate call, and
`plan_dispatch` chooses its backend. One call computes all heads, with a mask for each, if heads are
mixed, if a probe reads scores or weights, or if the caller names a backend that supports such
masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.capabilities import UP_TO_CROSSOVERS, Crossovers, crossover_size, current_points
from ...util.errors import NoBackend, suggest
from ..interfaces.core_types import CallSize, CoreShape, Probe
from ..masking.patterns import Causal, Full, Pattern, PerHead, count_pairs_by_head
from ..masking.sequence_info import AttentionMask, SequenceInfo, mask_shape
from . import (
    bf16_matmul,
    block_sparse,
    chunked_attention,
    dense,
    flash_cpu,
    flex,
    linear_attention,
    paged_decode,
    ragged_decode,
    routed_heads,
    sdpa,
    varlen,
)
from .core_interface import (
    CallSignature,
    CoreInputs,
    CoreSteps,
    HeadGroup,
    HeadsKV,
    list_head_groups,
    no_mask_conflicts,
    take_heads,
)
from .query_blocks import QUERY_BLOCK_SIZE, slice_rows, slice_sequence

# In order of preference; see `preference_order` for the two that some calls try last.
BACKENDS: dict[str, ModuleType] = {
    "paged": paged_decode,
    "ragged": ragged_decode,
    "routed": routed_heads,
    "block_sparse": block_sparse,
    "bf16_matmul": bf16_matmul,
    "flash_cpu": flash_cpu,
    "sdpa": sdpa,
    "linear": linear_attention,
    "flex": flex,
    "chunked": chunked_attention,
    "dense": dense,
}

SLOWER_THAN_DENSE_IF_SHORT = ("sdpa", "bf16_matmul", "flash_cpu", "block_sparse")
# Crossover points that are numbers of keys.
POINTS_IN_KEYS = (
    "block_sparse",
    "linear",
    "routed",
    "flash_cpu",
    "flash_cpu_full",
    "bf16_matmul",
    "bf16_matmul_gradients",
)
MASK_PER_HEAD_BACKENDS = (
    "chunked",
    "dense",
)  # those that support heads with different patterns in one call
LENGTHS_TOGETHER = 32
MAX_KEPT_SIZES = 1024
LONGEST = CallSize(1, 2**62, 2**62, 2**62)  # a size beyond every finite crossover point
MAX_COUNTED_KEYS = (
    2**14
)  # keys up to which the pairs of a pattern are counted to know the shape of its mask
MAX_DENSE_LENGTH = (
    32  # tokens of a packed sequence up to which plain operations take less time on a CPU
)


class _ChosenBackend(NamedTuple):
    """The backend of one size, and the crossover points that decided it."""

    name: str
    points: Crossovers
    may_conflict: bool  # with the mask of a later call of this size


@dataclass(frozen=True)
class CoreDispatch:
    """The names of the backends that support one kind of call, the preferred first.

    It holds names and not modules, so that a layer which keeps one can be copied and pickled.
    """

    signature: CallSignature
    backend_names: tuple[str, ...]
    is_named_by_caller: bool = False
    # what the size alone decided, by batch, queries, keys and shape of the mask
    _by_size: dict[tuple[int, int, int, str], _ChosenBackend] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    def attend(
        self,
        attention_mask: AttentionMask,
        inputs: CoreInputs,
        steps: CoreSteps,
        probe: Probe | None,
    ) -> Tensor:
        """Per-head outputs o_BTRV, computed by the backend that `select` names."""
        backend = BACKENDS[self.select(attention_mask, inputs)]
        outputs: Tensor = backend.attend(self.signature, attention_mask, inputs, steps, probe)
        return outputs

    @property
    def may_refuse(self) -> bool:
        """True if every backend of this call has masks that it cannot run."""
        return all(
            BACKENDS[name].mask_conflicts is not no_mask_conflicts for name in self.backend_names
        )

    def check_mask(self, attention_mask: AttentionMask, batch: int) -> None:
        """Raise NoBackend if no backend can run this mask."""
        self._select(attention_mask, batch, attention_mask.queries.count)

    def select(self, attention_mask: AttentionMask, inputs: CoreInputs) -> str:
        """The name of the backend that runs these tensors."""
        batch, queries = inputs.q.shape[:2]
        if self.signature.is_compiling:
            return self._select(attention_mask, batch, queries)
        keys = attention_mask.keys.count
        is_step = self.signature.single_query
        key = (
            batch,
            queries,
            # A decode step has another length each time: 32 lengths share what both ends choose.
            keys // LENGTHS_TOGETHER if is_step else keys,
            "" if is_step else attention_mask.shape,  # decode steps are keyed without it
        )
        points = current_points()
        chosen = self._by_size.get(key)
        if chosen is not None and chosen.points is points:
            check = BACKENDS[chosen.name].mask_conflicts
            if not (chosen.may_conflict and check(self.signature, attention_mask)):
                return chosen.name
        name = self._select(attention_mask, batch, queries)
        if batch and queries and keys and self._decides_by_size(key, name):
            if len(self._by_size) >= MAX_KEPT_SIZES:
                self._by_size.clear()
            may_conflict = BACKENDS[name].mask_conflicts is not no_mask_conflicts
            self._by_size[key] = _ChosenBackend(name, points, may_conflict)
        return name

    def _decides_by_size(self, key: tuple[int, int, int, str], name: str) -> bool:
        """True if this backend is the first that is not slower at these sizes, so that the mask had
        no part in the choice.
        """
        if self.is_named_by_caller:
            return True
        batch, queries, keys, shape = key
        ends = [keys]
        if self.signature.single_query:
            ends = [max(1, keys * LENGTHS_TOGETHER), (keys + 1) * LENGTHS_TOGETHER - 1]
        for end in ends:
            size = CallSize(batch, queries, 0, end)
            # the first backend that is not slower, so that no conflict excluded another
            names = (
                other
                for other in self.backend_names
                if not BACKENDS[other].slower_reasons(self.signature, size, shape)
            )
            if next(names, None) != name:
                return False
        return True

    def _select(self, attention_mask: AttentionMask, batch: int, queries: int) -> str:
        is_empty = not (batch and queries and attention_mask.keys.count)
        if is_empty and not dense.unsupported_reasons(self.signature):
            return "dense"  # nothing is computed, and the kernels need not know such calls
        size, shape = self._size_and_mask_shape(attention_mask, batch, queries)
        conflicts: dict[str, list[str]] = {}
        for name in self.backend_names:
            backend = BACKENDS[name]
            if not self.is_named_by_caller and backend.slower_reasons(self.signature, size, shape):
                continue
            reasons = backend.mask_conflicts(self.signature, attention_mask)
            if not reasons:
                return name
            conflicts[name] = reasons
        raise NoBackend(_refusal(conflicts, self.is_named_by_caller))

    def reasons_against(
        self, attention_mask: AttentionMask, inputs: CoreInputs
    ) -> dict[str, list[str]]:
        """Why each backend does not run these tensors; no reasons for the one that does, and for
        those behind it.
        """
        selected = self.select(attention_mask, inputs)
        names = preference_order(self.signature)
        batch, queries = inputs.q.shape[:2]
        if not (batch and queries and attention_mask.keys.count):
            return {
                name: [] if name == selected else ["there is nothing to compute"] for name in names
            }
        if self.is_named_by_caller:
            return {
                name: [] if name == selected else [f"the layer names {selected}"] for name in names
            }
        size, shape = self._size_and_mask_shape(attention_mask, batch, queries)
        return {
            name: unsupported_reasons(name, self.signature)
            or BACKENDS[name].slower_reasons(self.signature, size, shape)
            or (
                BACKENDS[name].mask_conflicts(self.signature, attention_mask)
                if name != selected
                else []
            )
            for name in names
        }

    def select_for_size(self, size: CallSize) -> str:
        """The name of the backend for a call of this size, considering only the size."""
        if self.is_named_by_caller:
            return self.backend_names[0]
        size = self._decisive_size(size)
        shape = "any" if size is LONGEST else contiguous_mask_shape(self.signature, size)
        fitting = (
            n
            for n in self.backend_names
            if not BACKENDS[n].slower_reasons(self.signature, size, shape)
        )
        return next(fitting, self.backend_names[-1])

    def _size_and_mask_shape(
        self, attention_mask: AttentionMask, batch: int, queries: int
    ) -> tuple[CallSize, str]:
        """The size and the shape of the mask by which the call is chosen."""
        size = self._decisive_size(CallSize(batch, queries, 0, attention_mask.keys.count))
        return (
            size,
            "any"
            if size is LONGEST
            else ""
            if self.signature.single_query
            else attention_mask.shape,
        )

    def _decisive_size(self, size: CallSize) -> CallSize:
        # A compiled graph serves every length, so a choice by length would recompile it for each.
        return LONGEST if self.signature.is_compiling or self.is_named_by_caller else size


@dataclass(frozen=True)
class PackedDispatch:
    """Runs every sequence of packed rows on its own, in groups of similar length.

    `groups` selects a backend for each group. A backend that the caller names runs every group;
    otherwise `dense` runs groups of short sequences.
    """

    groups: CoreDispatch

    def attend(
        self,
        attention_mask: AttentionMask,
        inputs: CoreInputs,
        steps: CoreSteps,
        probe: Probe | None,
    ) -> Tensor:
        """Per-head outputs o_BTRV."""
        plan = varlen.group_plan(attention_mask)
        outputs = list[Tensor]()
        for (queries, keys), group in zip(
            plan.groups, varlen.group_inputs(plan, inputs, steps), strict=True
        ):
            group_mask = AttentionMask(queries, keys, attention_mask.pattern)
            backend = BACKENDS[self._select_for_group(group_mask, group)]
            outputs.append(backend.attend(self.groups.signature, group_mask, group, steps, None))
        return plan.queries.scatter_groups(outputs).unflatten(0, inputs.q.shape[:2])

    def _select_for_group(self, group_mask: AttentionMask, group: CoreInputs) -> str:
        name = self.groups.select(group_mask, group)
        longest = max(group_mask.queries.count, group_mask.keys.count)
        short = longest <= MAX_DENSE_LENGTH and self.groups.signature.device == "cpu"
        return (
            "dense"
            if short and name in SLOWER_THAN_DENSE_IF_SHORT and not self.groups.is_named_by_caller
            else name
        )


def make_dispatch(call: CallSignature, backend_name: str | None = None) -> CoreDispatch:
    """Return the backends that support a call, or the named one; raise if there is none."""
    check_backend_name(backend_name)
    refusals = {}
    supported = []
    for name in [backend_name] if backend_name else preference_order(call):
        reasons = unsupported_reasons(name, call)
        if reasons:
            refusals[name] = reasons
        else:
            supported.append(name)
            if name == "dense" or (name == "linear" and call.has_recurrent_state):
                break  # it runs any tensors at any size, so those behind it are never reached
    if not supported:
        raise NoBackend(_refusal(refusals, backend_name is not None))
    return CoreDispatch(call, tuple(supported), backend_name is not None)


def choose_backend(call: CallSignature, size: CallSize | None = None) -> ModuleType:
    """Return the backend of a call; without a size, the preferred one."""
    dispatch = make_dispatch(call)
    return BACKENDS[dispatch.backend_names[0] if size is None else dispatch.select_for_size(size)]


def check_backend_name(name: str | None) -> None:
    """Raise NoBackend for an unknown backend name."""
    if name is not None and name not in BACKENDS:
        raise NoBackend(f"there is no backend {name!r}; {suggest(str(name), BACKENDS)}")


def preference_order(call: CallSignature) -> list[str]:
    """Return all backend names, preferred first."""
    last: list[str] = []  # even behind `dense`
    if not bf16_matmul.is_preferred(call):
        last.append("bf16_matmul")
    if call.device == "cpu":  # it compiles for seconds, and then computes every score
        last.append("flex")
    names = [name for name in BACKENDS if name not in last] + last
    if flex.is_preferred(call):
        names.remove("flex")
        names.insert(names.index("block_sparse"), "flex")
    return names


def unsupported_reasons_by_backend(call: CallSignature) -> dict[str, list[str]]:
    """The reasons of every backend not to support a call, in order of preference; an empty list
    means that it does.
    """
    return {name: unsupported_reasons(name, call) for name in preference_order(call)}


def unsupported_reasons(name: str, call: CallSignature) -> list[str]:
    """The reasons of one backend not to support a call; an empty list means that it does."""
    if isinstance(call.pattern, PerHead) and name not in MASK_PER_HEAD_BACKENDS:
        return ["runs heads with one pattern, and these have several"]
    return list(dict.fromkeys(BACKENDS[name].unsupported_reasons(call)))


def slower_reasons_by_backend(call: CallSignature, size: CallSize) -> dict[str, list[str]]:
    """Why another backend is preferred for a call of this size, for every backend."""
    shape = contiguous_mask_shape(call, size)
    return {name: backend.slower_reasons(call, size, shape) for name, backend in BACKENDS.items()}


def never_preferred_reasons(name: str, call: CallSignature) -> list[str]:
    """Why a backend is not preferred at any size on this machine; empty if it
    is from some size on.
    """
    size = replace(LONGEST, queries=1) if call.single_query else LONGEST
    return BACKENDS[name].slower_reasons(call, size, "any")


def backends_by_length(call: CallSignature) -> list[tuple[int, str]]:
    """Return pairs (least number of tokens, backend) for a call of one row as it grows longer."""
    try:
        dispatch = make_dispatch(call)
    except NoBackend:
        return []
    ranges: list[tuple[int, str]] = []
    for length in _deciding_lengths(call):
        queries = 1 if call.single_query else length
        name = dispatch.select_for_size(CallSize(1, queries, queries, length))
        if not ranges or ranges[-1][1] != name:
            ranges.append((0 if not ranges else length, name))
    return ranges


def backend_notes(name: str, call: CallSignature) -> list[str]:
    """Properties of this backend that concern this call only."""
    return chunked_attention.notes(call) if BACKENDS[name] is chunked_attention else []


def reads_cache_in_place(backend_name: str, call: CallSignature) -> bool:
    """True if a backend reads a cache in its storage format.

    Other backends receive full-precision tensors.
    """
    return backend_name == "paged" or (
        backend_name == "ragged" and ragged_decode.reads_quantized_cache(call)
    )


def recomputed_flops(
    backend: ModuleType, call: CallSignature, size: CallSize, core_flops: int
) -> int:
    """How many of the core's FLOPs a backend executes once more in the backward pass, on scores
    that it did not keep.

    Fused kernels keep none (2205.14135), and `chunked` keeps none of a call that it cut into
    blocks.
    """
    if backend in (dense, linear_attention) or (
        backend is chunked_attention and size.queries <= QUERY_BLOCK_SIZE
    ):
        return 0
    if backend is bf16_matmul and bf16_matmul.saves_weights_for_backward(size.keys):
        return 0
    scores = call.core.score_dim * len(call.core.key_head_of_query)
    values = call.core.vdim * len(call.core.value_head_of_row)
    return core_flops * scores // (scores + values)


def contiguous_mask_shape(call: CallSignature, size: CallSize) -> str:
    """The `AttentionMask.shape` if queries are the last keys, or come from another sequence."""
    pattern = call.pattern
    if size.keys > MAX_COUNTED_KEYS:
        first, last = pattern.retention
        return (
            "triangle" if last is not None and first + last >= size.keys == size.queries else "any"
        )
    start = max(size.keys - size.queries, 0) if call.spec.source is None else 0
    queries = range(start, start + size.queries)
    keys = range(size.keys)
    return mask_shape(pattern, queries, keys, count_pairs_by_head(pattern, queries, keys)[0])


def _deciding_lengths(call: CallSignature) -> list[int]:
    first, last = call.pattern.retention
    sizes = [crossover_size(point) + (point in UP_TO_CROSSOVERS) for point in POINTS_IN_KEYS]
    per_token = ragged_decode.bytes_per_token(call)
    if per_token:
        sizes.append(ragged_decode.min_bytes(call) / per_token)
    lengths = {1, *(math.ceil(size) for size in sizes if 0 < size < math.inf)}
    return sorted(lengths | {first + last + 1} if last is not None else lengths)


def _refusal(reasons_by_backend: dict[str, list[str]], is_named: bool) -> str:
    listed = "; ".join(
        f"{name}: {', '.join(reasons)}" for name, reasons in reasons_by_backend.items()
    )
    return (
        f"the requested backend does not support this call: {listed}"
        if is_named
        else f"no backend supports this call: {listed}"
    )


PROBED_BY_ALL_HEADS = frozenset({"scores", "weights", "lse"})


def split_by_pattern(
    call: CallSignature, backend_name: str | None = None
) -> tuple[CallSignature, ...]:
    """Split a call into one call per head pattern; with one pattern return it unchanged."""
    if call.probed_tensors & PROBED_BY_ALL_HEADS or backend_name in MASK_PER_HEAD_BACKENDS:
        return (call,)
    groups = list_head_groups(call.spec) if call.head_group is None else ()
    return tuple(_call_of_group(call, group) for group in groups) or (call,)


def _call_of_group(call: CallSignature, group: HeadGroup) -> CallSignature:
    heads = GroupHeads.from_call(call, group)
    core = call.core
    own_core = CoreShape(
        tuple(heads.keys.index(core.key_head_of_query[n]) for n in heads.queries),
        tuple(heads.values.index(core.value_head_of_row[n]) for n in heads.rows),
        core.dim,
        core.vdim,
        core.scale,
        core.score_dim,
    )
    # Heads are taken from keys and values that the cache gathered and dequantised.
    return replace(call, core=own_core, head_group=group, has_paged_cache=False, cache_format=None)


def plan_dispatch(
    call: CallSignature, backend_name: str | None = None
) -> CoreDispatch | PackedDispatch | HeadGroupDispatch:
    """How a call runs: on one backend, or on one for each pattern of its heads."""
    calls = split_by_pattern(call, backend_name)
    dispatches = [_dispatch_of(own_call, backend_name) for own_call in calls]
    if len(dispatches) == 1 and calls[0].head_group is None:
        return dispatches[0]
    heads = [
        GroupHeads.from_call(call, own_call.head_group)
        for own_call in calls
        if own_call.head_group is not None
    ]
    rows: list[int] = []
    for own in heads:
        rows += own.rows
    order = tuple(rows.index(row) for row in range(len(rows)))
    return HeadGroupDispatch(tuple(zip(heads, dispatches, strict=True)), order)


def _dispatch_of(call: CallSignature, backend_name: str | None) -> CoreDispatch | PackedDispatch:
    dispatch = make_dispatch(call, backend_name)
    return PackedDispatch(dispatch) if call.is_packed else dispatch


@dataclass(frozen=True)
class GroupHeads:
    """The pattern of a group, and the indices of its queries, keys, values and rows in the call."""

    pattern: Pattern
    score_heads: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    rows: tuple[int, ...]

    @staticmethod
    def from_call(call: CallSignature, group: HeadGroup) -> GroupHeads:
        """Find the indices of a group's heads in the call of all heads."""
        spec = call.spec
        core = call.core
        own = frozenset(group.score_heads)
        queries = tuple(index for index, head in enumerate(spec.core_score_heads) if head in own)
        rows = tuple(row for row, head in enumerate(spec.score_head_of_row) if head in own)
        keys = sorted({core.key_head_of_query[n] for n in queries})
        values = sorted({core.value_head_of_row[n] for n in rows})
        return GroupHeads(
            group.pattern, group.score_heads, queries, tuple(keys), tuple(values), rows
        )

    def select(
        self, attention_mask: AttentionMask, inputs: CoreInputs
    ) -> tuple[AttentionMask, CoreInputs]:
        """The mask and the inputs of the group.

        A single query at a known position gets only the keys that it may attend to, so that heads
        with a window do not read the whole cache.
        """
        context = inputs.query_context
        kv = self._read_kv(attention_mask.keys, inputs)
        own_inputs = inputs._replace(
            q=take_heads(inputs.q, self.queries),
            k=kv.k,
            v=kv.v,
            query_context=context._replace(q_BTHK=take_heads(context.q_BTHK, self.queries)),
            gates=(),
            kv_by_heads=(),
        )
        queries = attention_mask.queries
        keys = kv.sequence
        mask = attention_mask.mask
        if mask is not None:
            own_mask = mask if mask.shape[1] == 1 else mask[:, list(self.queries)]
            return AttentionMask(queries, keys, self.pattern, own_mask), own_inputs
        if keys.num_visible is not None and keys.start is not None and queries.start is not None:
            visible = self.pattern.visible_keys(_positions(queries), _positions(keys))
            ranges = [range(part.start - keys.start, part.stop - keys.start) for part in visible]
            own_inputs = own_inputs._replace(
                k=slice_rows(own_inputs.k, ranges), v=slice_rows(own_inputs.v, ranges)
            )
            own_keys = slice_sequence(keys, ranges)
            own_keys = SequenceInfo(
                own_keys.position,
                torch.zeros_like(own_keys.segment),
                checked=True,
                num_visible=own_keys.count,
            )
            return AttentionMask(queries, own_keys, self.pattern), own_inputs
        own_keys = keys if kv.pattern == self.pattern else _keys_of_pattern(keys, self.pattern)
        return AttentionMask(queries, own_keys, self.pattern), own_inputs

    def _read_kv(self, keys: SequenceInfo, inputs: CoreInputs) -> HeadsKV:
        """The keys and values of the group's heads: of the call, or of the heads that are cached
        together.
        """
        for kv in inputs.kv_by_heads:
            if self.keys[0] in kv.kv_heads:
                key_places = tuple(map(kv.kv_heads.index, self.keys))
                value_places = tuple(map(kv.kv_heads.index, self.values))
                k = take_heads(kv.k, key_places)
                return kv._replace(k=k, v=take_heads(kv.v, value_places))
        return HeadsKV(
            self.keys,
            None,
            take_heads(inputs.k, self.keys),
            take_heads(inputs.v, self.values),
            keys,
        )


def _positions(sequence: SequenceInfo) -> range:
    assert sequence.start is not None
    return range(sequence.start, sequence.start + sequence.count)


def _keys_of_pattern(keys: SequenceInfo, pattern: Pattern) -> SequenceInfo:
    """The keys without the fields that a cache sets for the union of all patterns, if this pattern
    allows fewer.
    """
    if (keys.num_visible is None and keys.visible_per_row is None) or pattern in (Causal(), Full()):
        return keys
    segment = keys.segment
    if (
        keys.num_visible is not None
    ):  # rows are uniform, and the cache may not have written their segments
        slot = torch.arange(keys.count, device=segment.device)
        segment = ((slot < keys.num_visible).long() - 1).expand_as(segment)
    return SequenceInfo(keys.position, segment, checked=True)


@dataclass(frozen=True)
class HeadGroupDispatch:
    """Runs each group of heads with one pattern on a separate backend.

    Row n of the weights of all heads is row ``order[n]`` of the concatenated groups.
    """

    groups: tuple[tuple[GroupHeads, CoreDispatch | PackedDispatch], ...]
    order: tuple[int, ...]

    def attend(
        self,
        attention_mask: AttentionMask,
        inputs: CoreInputs,
        steps: CoreSteps,
        probe: Probe | None,
    ) -> Tensor:
        """Per-head outputs o_BTHV."""
        outputs = [
            dispatch.attend(*heads.select(attention_mask, inputs), own_steps, None)
            for (heads, dispatch), own_steps in zip(self.groups, steps.of_groups, strict=True)
        ]
        return take_heads(torch.cat(outputs, 2), self.order)

"""The properties of a call that a backend is chosen by, and the tensors that it receives when it
runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...kernels.capabilities import crossover_size, current_points
from ...kernels.launch import kernel_problem
from ..interfaces import (
    JointStep,
    Mix,
    Normaliser,
    Part,
    RecurrentPart,
    RowFactors,
    RowStep,
    ScoreStep,
    Similarity,
    ValueStep,
    WeightStep,
)
from ..interfaces.core_types import CallSize, CoreShape, PartParams, Phase, Probe, QueryContext
from ..interfaces.part_types import MixFactors
from ..masking.patterns import Pattern, PerHead
from ..masking.sequence_info import AttentionMask, SequenceInfo
from ..parts.softmax import SinkSoftmax
from ..spec.attention_spec import AttentionSpec


@dataclass(frozen=True)
class HeadGroup:
    """Score heads with the same pattern, in a layer with several patterns (`PerHead`)."""

    pattern: Pattern
    score_heads: tuple[int, ...]


def list_head_groups(spec: AttentionSpec) -> tuple[HeadGroup, ...]:
    """The groups of score heads that can be computed apart; empty if all have one pattern, or if
    heads are computed together.

    Heads of the core without a row of weights are in none.
    """
    if not isinstance(spec.pattern, PerHead) or spec.computes_heads_together:
        return ()
    rows = frozenset(spec.score_head_of_row)
    groups: list[HeadGroup] = []
    for pattern, heads in spec.pattern.groups:
        own = tuple(h for h in heads if h in rows)
        if own:
            groups.append(HeadGroup(pattern, own))
    return tuple(groups)


@dataclass(frozen=True)
class CallSignature:
    """One kind of call: everything known without reading a tensor's values.

    Reading values would wait for the device.
    """

    spec: AttentionSpec
    core: CoreShape
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    grad_enabled: bool = False
    single_query: bool = False  # a single query per row
    # the cache holds a recurrent state instead of keys and values
    has_recurrent_state: bool = False
    has_paged_cache: bool = False  # the cache holds pages, which rows may share
    has_caller_mask: bool = False  # the caller passes a mask
    training: bool = False
    probed_tensors: frozenset[str] = field(default_factory=frozenset)
    is_compiling: bool = False  # traced by torch.compile, so values of tensors are unknown
    cache_format: str | None = None  # how cached tensors are stored, if not in `dtype`: "int8"
    # inside torch.func or a forward-mode derivative, which see plain operations only
    is_transformed: bool = False
    # rows hold several sequences of known lengths, which are computed separately
    is_packed: bool = False
    head_group: HeadGroup | None = None  # the heads that this call computes, if not all

    pattern: Pattern = field(init=False)  # of the heads that the call computes
    # one row of weights per query head of the core, in order
    heads_in_order: bool = field(init=False)
    # query heads per key head, or 0 if the groups differ in size
    group_size: int = field(init=False)

    def __post_init__(self) -> None:
        group = self.head_group
        pattern = self.spec.core_pattern if group is None else group.pattern
        object.__setattr__(self, "pattern", pattern)
        keys = self.core.key_head_of_query
        kv_heads = max(keys) + 1
        size = len(keys) // kv_heads
        groups = [head // size for head in range(size * kv_heads)]
        is_even = keys == self.core.value_head_of_row and keys == tuple(groups)
        object.__setattr__(self, "group_size", size if is_even else 0)
        object.__setattr__(self, "heads_in_order", self.score_head_of_row == self.score_heads)

    @property
    def score_heads(self) -> tuple[int, ...]:
        """The score heads that the call computes, in order."""
        return (
            self.spec.core_score_heads if self.head_group is None else self.head_group.score_heads
        )

    @property
    def score_head_of_row(self) -> tuple[int, ...]:
        """The score head of each row of weights of the call."""
        computed = frozenset(self.score_heads)
        return tuple(filter(computed.__contains__, self.spec.score_head_of_row))

    def slower_below(
        self, point: str, size: CallSize, faster: str, is_upper: bool = False
    ) -> list[str]:
        """Why another backend runs a call with few keys: `faster` wins below this crossover point.

        With `is_upper`, `faster` wins above it. Only a preference: measured on the CPU with
        more than one query.
        """
        bound = crossover_size(point)
        is_preferred = size.keys <= bound if is_upper else size.keys >= bound
        if self.device != "cpu" or self.single_query or is_preferred:
            return []
        if not bound or math.isinf(bound):
            return [slower_at_every_size(point, faster)]
        side = "above" if is_upper else "below"
        return [f"{faster} {side} {int(bound):,} keys; this call has {size.keys:,}"]


class HeadsKV(NamedTuple):
    """Keys and values of some key-value heads, with their own tokens.

    `pattern` is the pattern of all their query heads: a cache uses it to find the tokens that the
    last query attends to. It is None if all heads share these tokens.
    """

    kv_heads: tuple[int, ...]
    pattern: Pattern | None
    k: Tensor
    v: Tensor
    sequence: SequenceInfo

    @property
    def entry(self) -> dict[str, Tensor]:
        """The keys and values as a kv entry."""
        return {"k": self.k, "v": self.v}


class CoreInputs(NamedTuple):
    """One call of the core: q_BTHK, k_BSGK, v_BSGV, the mask, the steps between them and the head
    outputs, the context of the queries, the kv entry, and the probe of intermediate tensors.

    Queries, also in the context, cover only `AttentionSpec.core_score_heads`. `gates` are the gate
    values in the order of the spec, broadcastable to [B, T, O, V]; outputs are multiplied by them.
    With a block table (`SequenceInfo.block_table`), k and v have one row per page of the pool.
    `kv_by_heads` holds keys and values of head groups with different tokens; then k and v belong to
    the first group alone. `carried` has what row steps computed for the queries of the sequence
    before these, and takes what they compute for the queries after them; see `RowFactors`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    steps: CoreSteps
    query_context: QueryContext
    kv_entry: Mapping[str, Tensor]
    probe: Probe | None = None
    state: Mapping[str, Tensor] = MappingProxyType({})
    gates: Sequence[Tensor] = ()
    kv_by_heads: Sequence[HeadsKV] = ()
    carried: dict[str, Tensor] | None = None


def no_mask_conflicts(call: CallSignature, attention_mask: AttentionMask) -> list[str]:
    """`mask_conflicts` of backends that run every mask of the calls they support."""
    return []


def cpu_kernel_conflicts(call: CallSignature) -> list[str]:
    """Why kernels of the CPU cannot run a call."""
    problem = kernel_problem()
    reasons = [problem] if problem else []
    if call.device != "cpu":
        reasons.append(f"has a kernel for the CPU only, not {call.device}")
    return reasons


def slower_at_every_size(point: str, faster: str) -> str:
    """Why the path of a crossover point is never chosen on this class of machine."""
    points = current_points()
    reason = faster if point in points.measured else "not measured"
    return f"{reason} on this class of machine ({points.machine_class})"


# torch.compile reads this mark.
vars(slower_at_every_size)["_dynamo_marked_constant"] = True


def never_slower(call: CallSignature, size: CallSize, mask_shape: str) -> list[str]:
    """`slower_reasons` of backends that are preferred at every size to those after them in
    `BACKENDS`.
    """
    return []


def flops_of_all_pairs(call: CallSignature, size: CallSize) -> int:
    """`executed_flops` of backends that compute every (query, key) pair, also masked ones."""
    return call.core.flops(size.batch * size.queries * size.keys)


# --- The parts that run inside the core, each with its weights, in the order in which they act ----

GatherFunction = Callable[[Tensor, Tensor, Tensor, tuple[int, ...], PartParams], Tensor]
CORE_PART_TYPES = (Similarity, Normaliser, ScoreStep, JointStep, WeightStep, ValueStep)


@runtime_checkable
class ScoreTransform(Protocol):
    """One change of a tensor [B, H, T, S] of scores or weights."""

    def __call__(self, a_BHTS: Tensor, inputs: CoreInputs, /) -> Tensor: ...


@dataclass(frozen=True)
class CoreSteps:
    """The parts of a spec that a backend runs between q, k, v and the per-head outputs, bound to
    their weights.
    """

    similarity: Similarity
    similarity_p: PartParams
    # the part with a state of fixed size (linear attention)
    recurrent_part: tuple[RecurrentPart, PartParams] | None
    scores: Sequence[ScoreTransform]
    normaliser: Normaliser
    normaliser_p: PartParams
    has_sinks: bool  # the normaliser adds a sink to every row
    normalise: Callable[[Tensor, Tensor, PartParams], Tensor]
    gather_values: GatherFunction | None  # normalises and gathers values in one step
    weights: Sequence[ScoreTransform]
    values: Sequence[tuple[ValueStep, PartParams]]
    elementwise: Sequence[tuple[ScoreStep, PartParams]]
    selected_rows: tuple[int, ...] | None  # rows of weights that read values; None: all rows
    part_weights: Sequence[PartParams]  # the weights of all these parts
    weights_unmodified: bool  # no part changes weights after normalisation
    # the pattern as text, which an operation registered with torch can take as an argument
    pattern_text: str
    of_groups: tuple[CoreSteps, ...] = ()  # the steps of each of `list_head_groups`

    @staticmethod
    def from_spec(spec: AttentionSpec, p: Mapping[str, PartParams]) -> CoreSteps:
        """Bind the parts of a spec to their weights."""
        steps = CoreSteps._of_heads(spec, p, HeadGroup(spec.pattern, spec.core_score_heads))
        groups = list_head_groups(spec)
        return replace(
            steps, of_groups=tuple(CoreSteps._of_heads(spec, p, group) for group in groups)
        )

    @staticmethod
    def _of_heads(spec: AttentionSpec, p: Mapping[str, PartParams], group: HeadGroup) -> CoreSteps:
        core = group.score_heads
        if core != tuple(range(spec.heads.q)):
            p = {
                name: SelectedHeadParams(spec, part, p[name], core)
                for name, part in spec.parts_of(Part)
            }
        rows = core if spec.heads.rows == spec.heads.q else spec.core_rows
        index_of_row = {row: index for index, row in enumerate(rows)}
        own_rows = tuple(row for row in spec.score_head_of_row if row in index_of_row)
        acts: dict[Phase, list[ScoreTransform]] = {Phase.SCORES: [], Phase.WEIGHTS: []}
        for name, part in spec.parts():
            if isinstance(part, (ScoreStep, JointStep, WeightStep)) and part.phase in acts:
                acts[part.phase].append(_make_transform(spec, name, part, p[name]))
        mixed = any(
            isinstance(part, Mix) and part.phase is Phase.WEIGHTS for _, part in spec.parts()
        )
        every = mixed or own_rows == rows
        return CoreSteps(
            similarity=spec.similarity,
            similarity_p=p["similarity"],
            recurrent_part=spec.recurrent_part
            and (spec.recurrent_part[1], p[spec.recurrent_part[0]]),
            scores=acts[Phase.SCORES],
            normaliser=spec.normaliser,
            normaliser_p=p["normaliser"],
            has_sinks=isinstance(spec.normaliser, SinkSoftmax),
            normalise=spec.normaliser.normalise,
            gather_values=None,
            weights_unmodified=own_rows == rows and has_unmodified_weights(spec),
            weights=acts[Phase.WEIGHTS],
            values=[(step, p[name]) for name, step in spec.parts_of(ValueStep)],
            elementwise=[(step, p[name]) for name, step in spec.parts_of(ScoreStep)],
            selected_rows=None if every else tuple(index_of_row[row] for row in own_rows),
            part_weights=[
                p[name] for name, part in spec.parts() if isinstance(part, CORE_PART_TYPES)
            ],
            pattern_text=group.pattern.text,
        )

    def with_fused_kernels(self) -> CoreSteps:
        """Copy that mixes heads and normalises scores by fused kernels, for parts that have one."""
        gather = self.normaliser.gather_values if self.weights_unmodified else None
        normalise = self.normaliser.fused_normalise
        return replace(self.with_fused_mixes(), normalise=normalise, gather_values=gather)

    def with_fused_mixes(self) -> CoreSteps:
        """Copy that mixes heads by fused kernels, for parts that have one."""
        scores = [*map(_use_fused_kernel, self.scores)]
        return replace(self, scores=scores, weights=[*map(_use_fused_kernel, self.weights)])

    @property
    def sinks(self) -> Tensor | None:
        """The score [H] of the sink of each head, if the normaliser has sinks."""
        if not self.has_sinks:
            return None
        return self.normaliser_p.broadcast_over_scores()["sink"].flatten()

    def additive_bias(self, inputs: CoreInputs) -> Tensor:
        """Sum all additive score steps, [B or 1, H or 1, T, S]: their result for zero scores."""
        zero = inputs.q.new_zeros(1, 1, inputs.mask.queries.count, inputs.mask.keys.count)
        for act in self.scores:
            zero = act(zero, inputs)
        return zero


class SelectedHeadParams:
    """`PartParams` of one part for some of its score heads: of the core, or of one pattern group.

    Selected in every call, so that training changes the weights of the layer.
    """

    def __init__(
        self, spec: AttentionSpec, part: Part, every: PartParams, heads: tuple[int, ...]
    ) -> None:
        self.every = every
        self.heads = heads
        self.sizes: Mapping[str, int] = {**every.sizes, "q": len(heads)}
        self.kv_head_of_query = tuple(every.kv_head_of_query[head] for head in heads)
        self.cached: dict[Any, Any] = {}
        layouts = {name: param.layout for name, param in part.params(spec).items()}
        # Shapes are found here, because compiled graphs call the other methods and cannot trace
        # layouts.
        self._shapes = {
            name: (
                layout.axes.index("q"),
                layout.unmerged_shape(every.sizes),
                layout.shape(self.sizes),
            )
            for name, layout in layouts.items()
            if "q" in layout.axes
        }
        self._by_head = {name: layout.dims[:1] == (("q",),) for name, layout in layouts.items()}
        self._is_scalar = {name: layout.axes == ("q",) for name, layout in layouts.items()}

    @property
    def training(self) -> bool:
        """True if the layer is in training mode."""
        return self.every.training

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.every[name]
        if name not in self._shapes:
            return tensor
        axis, every_shape, shape = self._shapes[name]
        index = torch.tensor(self.heads, device=tensor.device)
        return tensor.reshape(every_shape).index_select(axis, index).reshape(shape)

    def __contains__(self, name: str) -> bool:
        return name in self.every

    def head(self, h: Any) -> Mapping[str, Tensor]:
        """All tensors; those with a leading axis of score heads are indexed by h, a head of the
        core.
        """
        return {
            name: self[name][h] if by_head else self[name]
            for name, by_head in self._by_head.items()
        }

    def broadcast_over_scores(self) -> Mapping[str, Tensor]:
        """All tensors; those with one number per score head are shaped [H, 1, 1], to broadcast over
        s_BHTS.
        """
        scalars = self._is_scalar.items()
        return {
            name: self[name][:, None, None] if is_scalar else self[name]
            for name, is_scalar in scalars
        }

    def trainable(self) -> list[Tensor]:
        """All parameters of the part."""
        return self.every.trainable()


class PairPositions:
    """`ScorePosition` of all pairs of a call: positions `i` [B, 1, T, 1] of queries and `j` [B, 1,
    1, S] of keys.
    """

    def __init__(self, attention_mask: AttentionMask) -> None:
        self.i = attention_mask.i
        self.j = attention_mask.j

    def take(self, factors: Tensor, index: Tensor) -> Tensor:
        """Select from factors [B, T, H, R] by index [B, 1, T, S]; returns [B, H, T, S]."""
        by_head = factors.transpose(1, 2)
        return by_head.gather(-1, index.expand(*by_head.shape[:3], index.shape[-1]))


def has_unmodified_weights(spec: AttentionSpec) -> bool:
    """True if no part changes or selects rows of weights after normalisation."""
    acts = (
        part
        for part in spec.modifiers
        if part.phase is Phase.WEIGHTS or isinstance(part, ValueStep)
    )
    return spec.score_head_of_row == spec.core_rows and not any(acts)


def _make_transform(spec: AttentionSpec, name: str, part: Part, p: PartParams) -> ScoreTransform:
    # Partials and not closures: a copy of a layer must act with its own weights, and only these are
    # copied.
    names = {key: f"{name}.{key}" for key in part.kv_entry_layouts(spec)}
    if isinstance(part, Mix):
        return partial(_apply_mix, part, p, names)
    if isinstance(part, RowStep):
        key_heads = spec.core.key_head_of_query
        return partial(_apply_row_step, part, p, name, names, key_heads)
    if isinstance(part, ScoreStep):
        return partial(_apply_score_step, part, p)
    assert isinstance(part, WeightStep)
    return partial(_apply_weight_step, part, p)


def _use_fused_kernel(act: ScoreTransform) -> ScoreTransform:
    is_mix = isinstance(act, partial) and act.func is _apply_mix
    return partial(act, is_fused=True) if is_mix else act


def _apply_mix(
    part: Mix,
    p: PartParams,
    names: Mapping[str, str],
    a: Tensor,
    inputs: CoreInputs,
    is_fused: bool = False,
) -> Tensor:
    query_factors = part.query_factors(inputs.query_context.x_BTD, p)
    factors = MixFactors(query_factors, {key: inputs.kv_entry[name] for key, name in names.items()})
    mixed = (part.fused_mix if is_fused else part.mix)(a, factors, p)
    bias = part.pair_bias(p)
    if bias is None:
        return mixed
    bias_H11 = bias.to(mixed.dtype)[:, None, None]
    if part.phase is Phase.SCORES:
        return mixed + bias_H11
    # Mixed weights have the keys of all heads.
    return mixed + torch.where(inputs.mask.allowed.any(1, keepdim=True), bias_H11, 0.0)


def _apply_row_step(
    part: RowStep,
    p: PartParams,
    name: str,
    names: Mapping[str, str],
    key_heads: tuple[int, ...],
    s: Tensor,
    inputs: CoreInputs,
) -> Tensor:
    mask = inputs.mask
    carried = 0.0 if mask.has_all_queries else None
    factors = RowFactors(
        part.query_factors(inputs.query_context, p),
        {key: inputs.kv_entry[entry_name] for key, entry_name in names.items()},
        PairPositions(mask),
        inputs.k,
        key_heads,
        inputs.query_context.scale,
        mask.allowed,
        carried if inputs.carried is None else inputs.carried.get(name, 0.0),
    )
    if inputs.carried is not None:
        carried = part.carry(s, factors, p)
        inputs.carried.update({} if carried is None else {name: carried})
    return torch.where(mask.allowed, part.change_rows(s, factors, p), s)


def _apply_score_step(part: ScoreStep, p: PartParams, s: Tensor, inputs: CoreInputs) -> Tensor:
    return part.score(
        s,
        PairPositions(inputs.mask),
        part.query_factors(inputs.query_context, p),
        p.broadcast_over_scores(),
    )


def _apply_weight_step(part: WeightStep, p: PartParams, w: Tensor, inputs: CoreInputs) -> Tensor:
    return part.transform_weights(w, p)


def expand_kv_heads(x_BSGK: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Repeat key-value heads for query heads: head h of the result is head `heads[h]` of x.

    A view for MHA and MQA.
    """
    x_BGSK = x_BSGK.transpose(1, 2)
    if heads == tuple(range(x_BGSK.shape[1])):
        return x_BGSK
    if x_BGSK.shape[1] == 1:
        return x_BGSK.expand(-1, len(heads), -1, -1)
    return x_BGSK.index_select(1, torch.tensor(heads, device=x_BGSK.device))


def kv_of_even_groups(call: CallSignature, inputs: CoreInputs) -> tuple[Tensor, Tensor]:
    """k and v, with heads of unequal groups repeated for each query head."""
    if call.group_size:
        return inputs.k, inputs.v
    keys = expand_kv_heads(inputs.k, call.core.key_head_of_query)
    values = expand_kv_heads(inputs.v, call.core.value_head_of_row)
    return keys.transpose(1, 2), values.transpose(1, 2)


def heads_to_rows(x_BHTK: Tensor, group_size: int) -> Tensor:
    """[B, heads / group_size, group_size x T, K]: the queries of a group as rows of one product
    with its key head.
    """
    batch, heads, queries, channels = x_BHTK.shape
    return x_BHTK.reshape(batch, heads // group_size, group_size * queries, channels)


def rows_to_heads(rows: Tensor, group_size: int) -> Tensor:
    """Inverse of `heads_to_rows`."""
    batch, groups, num_rows, channels = rows.shape
    return rows.reshape(batch, groups * group_size, num_rows // group_size, channels)


def take_heads(x_BTHK: Tensor, heads: Sequence[int]) -> Tensor:
    """These heads; a view if they are at equal distances."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if list(heads) == list(range(heads[0], heads[-1] + 1, step)):
        return x_BTHK[:, :, heads[0] : heads[-1] + 1 : step]
    return x_BTHK.index_select(2, torch.tensor(list(heads), device=x_BTHK.device))

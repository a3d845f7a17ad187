"""The attention layer: it owns the weights and runs the steps of attention in order.

     1 project      x to queries, keys and values; a cache stores the last two
     2 transform    queries and keys, by position or norm (RoPE, QK-norm)
     3 compare      similarity scores of every query with every key
     4 change       scores (ALiBi, softcap, talking heads)
     5 mask         keys that a query may not attend to
     6 normalise    scores to weights (softmax)
     7 change       weights (talking heads, dropout)
     8 gather       values, weighted
     9 change       head outputs (differential attention, norm per head)
    10 gate         heads
    11 merge        head outputs to the model's width

`Attention` runs 1, 2 and 9 to 11 itself. Steps 3 to 8 are the core: `attention/backends/dense.py` writes them
out in plain tensor operations, and the backend that `attention/backends/dispatch.py` selects computes the
same result, usually faster. Before step 1, `CallPlanner.prepare` in `attention_call` checks the
arguments and lists the backends that support the call.

So `layer(x)` reaches a kernel by `forward`, `head_outputs_and_gates`, `attend`,
`CoreDispatch.attend`, and the `attend` of one backend, which calls torch or a kernel of
`headwise.kernels`.

Shapes: B batch, T queries, S keys, H query heads, G key-value heads, R rows of weights, O output
heads, K and V channels of a key and a value, D model width. H, R and O are equal unless a part
mixes or combines heads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import backends
from .attention_call import (
    AttentionArguments,
    CallPlanner,
    PlannedCall,
    check_source,
    copy_cache,
)
from .backends import CoreInputs, CoreSteps, HeadsKV
from .backends.backend_report import BackendReport, explain_call
from .bound_parts import (
    NO_SHARED,
    BoundParts,
    PartWeights,
    StepObserver,
    check_shared,
    shared_within,
)
from .cache import (
    HeadGroupCache,
    KVCache,
    KVEntry,
    ProjectedSource,
    RecurrentStateCache,
    make_cache,
)
from .interfaces import Mix
from .interfaces.core_types import (
    NO_CONTEXT,
    SINGLE_PROCESS,
    HasParallelContext,
    PartParams,
    Probe,
    QueryContext,
)
from .masking.sequence_info import AttentionMask, SequenceInfo
from .spec.attention_spec import AttentionSpec

NO_STATE: Mapping[str, Tensor] = {}


class Attention(HasParallelContext, nn.Module):
    """Multi-head attention as its spec describes it, run by the first backend that supports the
    call.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, pattern="causal"))
    >>> x = torch.randn(1, 5, 8)
    >>> cache = layer.cache(batch=1, capacity=16)
    >>> steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        backend: str | None = None,
        shared: Mapping[str, PartWeights] = NO_SHARED,
    ) -> None:
        """`shared` are weights that another layer owns, of a whole part ("output") or one tensor
        ("t5_bias.table"): they are used here, but saved, moved and trained there.
        """
        super().__init__()
        if not isinstance(spec, AttentionSpec):
            raise ValueError(
                f"spec is of type {type(spec).__name__}; make one with hw.design(model=..., "
                "heads=...)"
            )
        backends.check_backend_name(backend)
        check_shared(spec, shared)
        self.spec = spec
        self.backend_name = backend
        for name, part in spec.parts():
            if name not in shared:
                self.add_module(name, PartWeights(spec, part, shared_within(shared, name)))
        own = dict(self.named_children())
        weights = {
            name: shared[name] if name in shared else cast(PartWeights, own[name])
            for name, _ in spec.parts()
        }
        self.parts = BoundParts(spec, weights)
        self.planner = CallPlanner(spec)

    def forward(
        self,
        x: Tensor,
        *,
        source: Tensor | ProjectedSource | None = None,
        cache: KVCache | None = None,
        sequence: SequenceInfo | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """y [B, T, model]: attention of each token of x over x itself, or over `source`
        (cross-attention).

        `cache` keeps the tokens of x for later calls; `sequence` gives positions and marks padding;
        `mask` [B, H, T, S] is True where a key may be attended to; `probe` reads or changes tensors
        inside the layer.
        """
        o_BTOV, _ = self.head_outputs_and_gates(
            AttentionArguments(x, source, cache, sequence, mask, probe)
        )
        return self.merge_heads(o_BTOV)

    def head_outputs(
        self,
        x: Tensor,
        *,
        source: Tensor | ProjectedSource | None = None,
        cache: KVCache | None = None,
        sequence: SequenceInfo | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """o [B, T, O, vdim]: the output of each head, before the merge."""
        return self.head_outputs_and_gates(
            AttentionArguments(x, source, cache, sequence, mask, probe)
        )[0]

    def head_outputs_and_gates(
        self, arguments: AttentionArguments
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Gated head outputs o [B, T, O, vdim] and the values of the gates: steps 1 to 10 of the
        module's docstring.
        """
        call = self.planner.prepare(arguments, self)  # raises before a cache changes
        parts = self.parts
        project = call.plan.project
        probe = call.probe
        is_sharded = self.parallel is not SINGLE_PROCESS
        x_BTD = self.parallel.copy_to_heads(call.x) if is_sharded else call.x

        # 1 project, 2 transform
        q_BTHK, kv_entry, kv_sequence, kv_by_heads = self.project_queries_and_kv(x_BTD, call)
        if project.caches_keys_and_values:
            k_BSGK = kv_entry["k"]
            v_BSGV = kv_entry["v"]
        else:
            kv_transforms = parts.qk_transforms(kv_sequence, call.plan.signature)
            k_BSGK, v_BSGV = project.expand_kv(kv_entry, kv_transforms, parts.weights["project"])
        if probe.points:
            q_BTHK = probe("q", q_BTHK)
            k_BSGK = probe("k", k_BSGK)
            v_BSGV = probe("v", v_BSGV)

        # 3 to 8, the core; it receives the values of the gates, so that a backend can skip closed
        # heads
        with self.parallel.head_local_rng(self.training) if is_sharded else NO_CONTEXT:
            losses = self.parallel.aux_losses(probe.aux_losses) if is_sharded else probe.aux_losses
            context = QueryContext(x_BTD, q_BTHK, call.plan.scale, call.sequence)
            gates = parts.gate_values(context, losses) if parts.has_gates else []
            core_q_BTHK = q_BTHK
            mask = call.mask
            if len(parts.core_score_heads) != q_BTHK.shape[2]:
                core_q_BTHK, mask = parts.select_core_heads(q_BTHK, mask)
                context = context._replace(q_BTHK=core_q_BTHK)
            if parts.maps_features:
                core_q_BTHK = parts.feature_map(core_q_BTHK, "q")
                k_BSGK = parts.feature_map(k_BSGK, "k")
            state = call.recurrent_state if call.plan.signature.has_recurrent_state else NO_STATE
            inputs = CoreInputs(
                core_q_BTHK, k_BSGK, v_BSGV, context, kv_entry, state, gates, kv_by_heads
            )
            attention_mask = AttentionMask(call.sequence, kv_sequence, parts.core_pattern, mask)
            o_BTRV = self.attend(call, attention_mask, inputs)
        if call.plan.signature.has_recurrent_state:
            self._update_recurrent_state(call, inputs, kv_sequence)

        # 9 change outputs, 10 gate
        o_BTRV = project.project_heads(o_BTRV, parts.score_head_of_row, parts.weights["project"])
        o_BTOV = parts.finish_outputs(o_BTRV, x_BTD, gates) if parts.changes_outputs else o_BTRV
        return probe("heads", o_BTOV) if probe.points else o_BTOV, gates

    def project_queries_and_kv(
        self, x_BTD: Tensor, call: PlannedCall
    ) -> tuple[Tensor, KVEntry, SequenceInfo, Sequence[HeadsKV]]:
        """Queries of x, and what they attend to with its positions: x and the cached tokens, or the
        source.

        If groups of heads cache different tokens, the entry is that of the first group, and all
        groups follow.
        """
        project = call.plan.project
        transforms = self.parts.qk_transforms(call.sequence, call.plan.signature)
        if call.source is None:
            q_BTHK, kv_entry = self.parts.project_qkv(project, x_BTD, transforms)
            if call.reads_cache_by_heads:
                return q_BTHK, *self._extend_by_heads(kv_entry, call)
            return q_BTHK, *self.extend_kv(kv_entry, call), ()
        q_BTHK = project.project_query(x_BTD, transforms, self.weights["project"])
        source = (
            self.project_source(call.source) if isinstance(call.source, Tensor) else call.source
        )
        return q_BTHK, source.entry, source.sequence, ()

    def _extend_by_heads(
        self, kv_entry: KVEntry, call: PlannedCall
    ) -> tuple[KVEntry, SequenceInfo, Sequence[HeadsKV]]:
        """The kv entry of the first group of heads in a `HeadGroupCache`, and the keys and values
        of all groups.
        """
        assert isinstance(call.cache, HeadGroupCache)
        cached = call.cache.extend_by_heads(*self.parallel.gather_tokens(kv_entry, call.sequence))
        kv_by_heads: list[HeadsKV] = []
        for own in cached:
            k_BSGK = self.parts.feature_map(own.entry["k"], "k")
            kv_by_heads.append(
                HeadsKV(own.kv_heads, own.spec.pattern, k_BSGK, own.entry["v"], own.sequence)
            )
        return cached[0].entry, cached[0].sequence, kv_by_heads

    def extend_kv(self, kv_entry: KVEntry, call: PlannedCall) -> tuple[KVEntry, SequenceInfo]:
        """The kv entries that queries attend to, with positions: of new tokens, of other ranks, and
        from the cache.
        """
        sequence = call.sequence
        if self.parallel is not SINGLE_PROCESS:
            kv_entry, sequence = self.parallel.gather_tokens(kv_entry, sequence)
        if call.cache is None:
            return kv_entry, sequence
        extend = call.cache.extend_in_place if call.plan.reads_cache_in_place else call.cache.extend
        return extend(kv_entry, sequence)

    def attend(
        self, call: PlannedCall, attention_mask: AttentionMask, inputs: CoreInputs
    ) -> Tensor:
        """The core (steps 3 to 8), o [B, T, R, vdim], on the backend that `plan.dispatch` selects
        for these tensors.
        """
        return call.plan.dispatch.attend(attention_mask, inputs, self.parts.core_steps, call.probe)

    def why(self, x: Tensor, *, cache: KVCache | None = None, **options: Any) -> BackendReport:
        """Which backend runs a call with these arguments of `forward`, and why the others do not.

        The call runs, on a copy of the cache and without hooks.

        >>> import headwise as hw
        >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2), backend="sdpa")
        >>> report = layer.why(torch.randn(1, 5, 8))
        >>> report.backend, report.reasons_against["dense"]
        ('sdpa', ['the layer names sdpa'])
        """
        reports: list[BackendReport] = []

        def attend(call: PlannedCall, attention_mask: AttentionMask, inputs: CoreInputs) -> Tensor:
            reports.append(
                explain_call(call.plan.dispatch, call.plan.signature, attention_mask, inputs)
            )
            return self.attend(call, attention_mask, inputs)

        observed = copy.copy(self)
        observed.attend = attend
        observed.forward(x, cache=copy_cache(cache), **options)
        return reports[0]

    def merge_heads(self, o_BTOV: Tensor) -> Tensor:
        """y [B, T, model] from head outputs, summed over tensor-parallel ranks."""
        merge = self.spec.merge
        p = self.parts.weights["output"]
        y_BTD = merge.merge(o_BTOV, p)
        if self.parallel is SINGLE_PROCESS:
            return y_BTD
        if not self.parallel.adds_output_bias:  # one rank adds the bias, the merge of zeros
            y_BTD = y_BTD - merge.merge(torch.zeros_like(o_BTOV[:1, :1]), p)
        return self.parallel.reduce_from_heads(y_BTD)

    def project_source(self, z: Tensor, *, sequence: SequenceInfo | None = None) -> ProjectedSource:
        """Keys and values of another sequence, projected once; pass them as `source` to any number
        of calls.
        """
        check_source(self.spec, z, sequence, self.first_parameter)
        sequence = sequence or SequenceInfo.contiguous(0, z.shape[1], z.device)
        self.planner.check_positions(sequence)
        transforms = self.parts.qk_transforms(sequence, None)
        kv_entry = self.parts.project_kv(
            self.spec.project, self.parallel.copy_to_heads(z), transforms
        )
        return ProjectedSource(*self.parallel.gather_tokens(kv_entry, sequence), self.spec)

    def cache(self, *, batch: int, capacity: int, storage_format: str | None = None) -> KVCache:
        """An empty cache for this layer, in its dtype and on its device; storage_format="int8"
        stores 8-bit keys and values.
        """
        weight = self.first_parameter
        return make_cache(
            self.spec,
            batch=batch,
            capacity=capacity,
            dtype=weight.dtype,
            device=str(weight.device),
            storage_format=storage_format,
        )

    def observed(self, observe: StepObserver) -> Attention:
        """A layer with the same weights that runs in plain tensor operations and calls `observe`
        after each part.

        >>> import headwise as hw
        >>> layer, seen = (
        ...     hw.Attention(hw.design(model=8, heads=2, modifiers=(hw.Softcap(5.0),))),
        ...     [],
        ... )
        >>> _ = layer.observed(lambda name, side, before, after: seen.append((name, side)))(
        ...     torch.randn(1, 3, 8)
        ... )
        >>> seen
        [('softcap', 'scores')]
        """
        layer = copy.copy(self)
        layer.parts = self.parts.observed(observe)
        layer.backend_name = "dense"
        return layer

    @property
    def weights(self) -> Mapping[str, PartWeights]:
        """The weights of each part by its name, those of other layers included."""
        return self.parts.weights

    @property
    def mixes(self) -> Sequence[tuple[str, Mix, PartParams]]:
        """The parts that mix heads, each with its name and weights."""
        return self.parts.mixes

    @property
    def core_steps(self) -> CoreSteps:
        """The steps that a backend runs between queries, keys and values and the head outputs."""
        return self.parts.core_steps

    @property
    def first_parameter(self) -> Tensor:
        """The first parameter of the projection, from which callers read dtype and device."""
        return self.parts.weights["project"].first_parameter

    def _update_recurrent_state(
        self, call: PlannedCall, inputs: CoreInputs, sequence: SequenceInfo
    ) -> None:
        """Keep the state after these tokens, if the cache holds a state instead
        of keys and values.
        """
        assert isinstance(call.cache, RecurrentStateCache)
        assert self.core_steps.recurrent_part is not None
        part, p = self.core_steps.recurrent_part
        values = backends.values_per_row(inputs, call.plan.signature)
        call.cache.set_state(part.update_state(inputs.state, *values, sequence.is_real, p))

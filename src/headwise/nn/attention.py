"""The only attention module: it owns the parameters and calls the parts in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import backends
from ..backends import AttendFunction, CallSignature, CoreInputs, CoreSteps, varlen
from ..cache import KVCache, KVEntry, PagedCache, ProjectedSource, RecurrentStateCache
from ..interfaces import Gate, Mix, OutputStep, Project, QKTransform
from ..interfaces.core_types import PartParams, QueryContext
from ..interfaces.probe import Probe
from ..masking.sequence_info import AttentionMask, SequenceInfo
from ..spec.attention_spec import AttentionSpec
from . import call_validation
from .parallel_context import HasParallelContext
from .part_weights import NO_SHARED, PartWeights, check_shared

NO_PROBES: frozenset[str] = frozenset()
AppendToCache = Callable[
    [KVEntry, SequenceInfo], tuple[KVEntry, SequenceInfo]
]  # of a cache: remember these, tell what may be read
ProjectedEntry = tuple[
    dict[str, Tensor] | None, AppendToCache | None
]  # the entry where it was made with the queries; how to keep it


class ExecutionPlan(NamedTuple):
    """How one kind of call runs: the form of the project, the job, and who does it."""

    project: Project
    job: CallSignature
    attend: AttendFunction
    reads_cache_in_place: bool  # it reads a cache as that keeps it, where it lies
    scale: float
    score_head_of_row: tuple[int, ...]

    def append(self, cache: KVCache | None) -> AppendToCache | None:
        """How the cache is to remember, if there is one."""
        if self.reads_cache_in_place and isinstance(cache, PagedCache):
            return cache.append_in_place
        return None if cache is None else cache.append


class QKTransforms:
    """The turns of each side, at the positions in hand; what they need of these is worked out once."""

    def __init__(self, turns: Mapping[str, Sequence[tuple[str, QKTransform, PartParams]]], position_BT: Tensor) -> None:
        self.turns, self.position_BT = turns, position_BT
        self.placed: dict[str, Any] = {}

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor:
        for name, turn, p in self.turns[side]:
            if name not in self.placed:
                exact = torch.promote_types(x_BTHK.dtype, torch.float32)
                self.placed[name] = turn.precompute(self.position_BT, exact, p)
            x_BTHK = turn.transform(x_BTHK, side, self.placed[name], p)
        return x_BTHK


class Attention(HasParallelContext, nn.Module):
    """An attention layer: what its spec says, run by whichever backend takes the call.

    >>> import headwise as hw, torch
    >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2, pattern="causal"))
    >>> x = torch.randn(1, 5, 8)
    >>> cache = layer.cache(batch=1, capacity=16)
    >>> steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self, spec: AttentionSpec, *, backend: str | None = None, shared: Mapping[str, PartWeights] = NO_SHARED
    ) -> None:
        """`shares` are weights that another layer owns, of a whole part, "output", or one tensor, "t5_bias.table": used
        here, but saved, moved and trained there."""
        super().__init__()
        if not isinstance(spec, AttentionSpec):
            raise ValueError(f"spec is of type {type(spec).__name__}; make one with hw.design(model=..., heads=...)")
        backends.check_backend_name(backend)
        check_shared(spec, shared)
        self.spec, self.backend_name, self._shares = spec, backend, dict(shared)
        for name, part in spec.parts():
            if name not in shared:
                self.add_module(name, PartWeights(spec, part, _shared_within(shared, name)))
        self._plans: dict[tuple[object, ...], ExecutionPlan] = {}
        self._bind()

    def _bind(self) -> None:
        spec, own = self.spec, dict(self.named_children())
        p = {
            name: self._shares[name] if name in self._shares else cast(PartWeights, own[name])
            for name, _ in spec.parts()
        }
        turns = spec.parts_of(QKTransform)
        self._turns = {s: [(n, t, p[n]) for n, t in turns if s in t.transformed_sides(spec)] for s in "qkv"}
        self._mixes = [(name, mix, p[name]) for name, mix in spec.parts_of(Mix)]
        self._outputs = [(step, p[name]) for name, step in spec.parts_of(OutputStep)]
        self._gates = [(gate, p[name]) for name, gate in spec.parts_of(Gate)]
        self._bound = CoreSteps.from_spec(spec, p)
        self._forms = {
            one: spec.projection_form(one) for one in (False, True)
        }  # made here: making parts cannot be traced
        self._limit = call_validation.PositionLimit.of(spec)
        self._p = p

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
        """y [B, T, model]: what each token of x reads, of x itself or of `source`.

        `cache` remembers x for later calls; `tokens` says where x stands and what is padding; `mask` [B, H, T, S]
        is True where a key may be read; `probe` looks in.
        """
        o_BTOV = self.head_outputs(x, source=source, cache=cache, sequence=sequence, mask=mask, probe=probe)
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
        """o [B, T, O, vdim]: what each output head reads, before the merge."""
        return self.head_outputs_and_gates(x, source=source, cache=cache, sequence=sequence, mask=mask, probe=probe)[0]

    def head_outputs_and_gates(
        self,
        x: Tensor,
        *,
        source: Tensor | ProjectedSource | None = None,
        cache: KVCache | None = None,
        sequence: SequenceInfo | None = None,
        mask: Tensor | None = None,
        probe: Probe | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The same, and the gates that it was multiplied with, for whoever puts other outputs in its place."""
        call_validation.check_call(self.spec, x, source, cache, sequence, self._like)
        if mask is not None:
            call_validation.check_mask(self.spec, mask, x, source, cache, self.parallel.num_token_shards)
        state = {} if cache is None else cache.state
        at = sequence or (
            SequenceInfo.contiguous(0, x.shape[1], x.device) if cache is None else cache.next_positions(x.shape[1])
        )
        apart = cache is None and mask is None and self._apart(x, at, source, probe)
        keys = self._keys(x, at, source, cache, apart)
        plan = self._plan(x, cache, mask is not None, apart, probe, keys)  # may refuse before anything is remembered
        if self._limit is not None:
            call_validation.check_positions(self._limit, at)
        x, turning, p = self.parallel.copy_to_heads(x), QKTransforms(self._turns, at.position), self._p["project"]
        both = plan.project.project_qkv(x, turning, p) if source is None and plan.project is self.spec.project else None
        entry, told = self._remembered(x, at, turning, source, (both and both[1], plan.append(cache)))
        if cache is not None and at.count == 1 and not plan.reads_cache_in_place:
            entry = cache.dequantised(entry)
        q_BTHK = both[0] if both else plan.project.project_query(x, turning, p)
        k_BSGK, v_BSGV = plan.project.expand_kv(entry, QKTransforms(self._turns, told.position), p)
        if probe is not None:
            q_BTHK, k_BSGK, v_BSGV = probe("q", q_BTHK), probe("k", k_BSGK), probe("v", v_BSGV)
        asked = QueryContext(x, q_BTHK, plan.scale, at)
        sight = AttentionMask(at, told, self.spec.pattern, mask)
        with self.parallel.head_local_rng(self.training):
            gates = self._opened(asked, probe)
            job_inputs = CoreInputs(
                self._lift(q_BTHK, "q"), self._lift(k_BSGK, "k"), v_BSGV, asked, entry, state, gates
            )
            o_BTHV = plan.attend(plan.job, sight, job_inputs, self._bound, probe)
        if isinstance(cache, RecurrentStateCache):
            cache.set_state(self._folded(plan.job, job_inputs, told))
        o_BTOV = self._finished(plan.project.project_heads(o_BTHV, plan.score_head_of_row, p), x, gates)
        return (o_BTOV if probe is None else probe("heads", o_BTOV)), gates

    def _finished(self, o_BTOV: Tensor, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        for step, own in self._outputs:
            o_BTOV = step.transform_outputs(o_BTOV, x, own)
        for gate in gates:
            o_BTOV = o_BTOV * gate
        return o_BTOV

    def merge_heads(self, o_BTOV: Tensor) -> Tensor:
        """y_BTD from per-head outputs."""
        merge, p = self.spec.merge, self._p["output"]
        y_BTD = merge.merge(o_BTOV, p)
        if not self.parallel.adds_output_bias:  # what a merge says of silence is added once
            y_BTD = y_BTD - merge.merge(torch.zeros_like(o_BTOV[:1, :1]), p)
        return self.parallel.reduce_from_heads(y_BTD)

    def project_source(self, z: Tensor, *, sequence: SequenceInfo | None = None) -> ProjectedSource:
        """Another sequence, projected once: hand it over as `source` as often as you like."""
        call_validation.check_source(self.spec, z, sequence, self._like)
        at = sequence or SequenceInfo.contiguous(0, z.shape[1], z.device)
        if self._limit is not None:
            call_validation.check_positions(self._limit, at)
        entry = self._entry(self.parallel.copy_to_heads(z), QKTransforms(self._turns, at.position))
        return ProjectedSource(*self.parallel.gather_tokens(entry, at), self.spec)

    @property
    def weights(self) -> Mapping[str, PartWeights]:
        """The weights of each part by its name, its own and those it shares."""
        return self._p

    @property
    def mixes(self) -> Sequence[tuple[str, Mix, PartParams]]:
        """What mixes heads, by its name, with its weights."""
        return self._mixes

    @property
    def core_steps(self) -> CoreSteps:
        """What a backend runs between queries, keys and values and the per-head outputs."""
        return self._bound

    def cache(self, *, batch: int, capacity: int, storage_format: str | None = None) -> KVCache:
        """A fresh cache for this layer, in its dtype and on its device; storage_format="int8" keeps keys and values
        in 8 bits
        each."""
        like, device = self._like, str(self._like.device)
        return KVCache.for_spec(
            self.spec, batch=batch, capacity=capacity, dtype=like.dtype, device=device, storage_format=storage_format
        )

    @property
    def _like(self) -> Tensor:
        return self._p["project"].first_parameter

    def _remembered(
        self,
        x_BTD: Tensor,
        at: SequenceInfo,
        turning: QKTransforms,
        source: Tensor | ProjectedSource | None,
        made: ProjectedEntry,
    ) -> tuple[dict[str, Tensor], SequenceInfo]:
        if isinstance(source, Tensor):
            source = self.project_source(source)
        if source is not None:
            return source.entry, source.sequence
        own, append = made
        entry, told = self.parallel.gather_tokens(self._entry(x_BTD, turning, own), at)
        if append is None:
            return entry, told
        entry, told = append(entry, told)
        if told.num_visible is None or torch.compiler.is_compiling():  # a compiled step keeps its shapes
            return entry, told
        return {name: held[:, : told.num_visible] for name, held in entry.items()}, told.trimmed()

    def _entry(self, z_BSE: Tensor, turning: QKTransforms, own: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        entry = self.spec.project.project_kv(z_BSE, turning, self._p["project"]) if own is None else own
        for name, mix, p in self._mixes:
            entry |= {f"{name}.{key}": factor for key, factor in mix.key_factors(z_BSE, p).items()}
        return entry

    def _opened(self, asked: QueryContext, probe: Probe | None) -> list[Tensor]:
        ledger = None if probe is None or probe.aux_losses is None else self.parallel.aux_losses(probe.aux_losses)
        return [gate.gate(asked, own, ledger) for gate, own in self._gates]

    def _lift(self, x_BTHK: Tensor, side: str) -> Tensor:
        return self._bound.similarity.feature_map(x_BTHK, side, self._bound.similarity_p)

    def _folded(self, job: CallSignature, given: CoreInputs, told: SequenceInfo) -> dict[str, Tensor]:
        assert self._bound.recurrent_part is not None
        folder, p = self._bound.recurrent_part
        return folder.update_state(given.state, *backends.values_per_row(given, job), told.is_real, p)

    def _apart(self, x: Tensor, at: SequenceInfo, source: Tensor | ProjectedSource | None, probe: Probe | None) -> bool:
        """Whether every packed text runs by itself; compiled, whose shapes may not follow the lengths, none does."""
        if torch.compiler.is_compiling() or self.parallel.num_token_shards > 1 or at.lengths is None:
            return False
        seen = probe is None or call_validation.check_probe(probe).points <= varlen.PROBED_TENSORS
        told = source.sequence if isinstance(source, ProjectedSource) else at if source is None else None
        return seen and varlen.has_known_lengths(at, told, x.shape[0])

    def _keys(
        self, x: Tensor, at: SequenceInfo, source: Tensor | ProjectedSource | None, cache: KVCache | None, apart: bool
    ) -> int | None:
        """The length that a backend is chosen by. A single query has its own, and a graph keeps one for all lengths."""
        if x.shape[1] == 1 or self.backend_name is not None or torch.compiler.is_compiling():
            return None
        told = source.sequence if isinstance(source, ProjectedSource) else at
        count = (
            source.shape[1] if isinstance(source, Tensor) else varlen.longest_sequence(told) if apart else told.count
        )
        return backends.preference_length(count * self.parallel.num_token_shards + (0 if cache is None else cache.used))

    def _plan(
        self, x: Tensor, cache: KVCache | None, masked: bool, apart: bool, probe: Probe | None, keys: int | None
    ) -> ExecutionPlan:
        wants = NO_PROBES if probe is None else call_validation.check_probe(probe).points
        grad, one, compiled = torch.is_grad_enabled(), x.shape[1] == 1, torch.compiler.is_compiling()
        stated, store = cache is not None and bool(cache.state), None if cache is None else cache.storage_format
        paged = isinstance(cache, PagedCache)
        kind = x.device.type, call_validation.compute_dtype(x)
        facts = (*kind, grad, one, stated, paged, masked, self.training, wants, compiled, store, keys)
        key = (self.backend_name, apart, *facts)
        if key in self._plans:
            return self._plans[key]
        project = self._forms[one]
        job = CallSignature(self.spec, self.spec.core_of(project), *facts)
        backend, scale = backends.choose_backend(job, self.backend_name), self.spec.similarity.score_scale(job.core)
        attend = varlen.VarlenRunner.from_backend(backend, job, self.backend_name).attend if apart else backend.attend
        raw = backends.reads_quantized_cache(backend, job)
        plan = ExecutionPlan(project, job, attend, raw, scale, self.spec.score_head_of_row)
        if not compiled:  # a graph that saw none would be made anew once there is one
            self._plans[key] = plan
        return plan


def _shared_within(shares: Mapping[str, PartWeights], part: str) -> dict[str, PartWeights]:
    """Those of one part's tensors that are shared one by one, by their names in it."""
    return {name.removeprefix(f"{part}."): owner for name, owner in shares.items() if name.startswith(f"{part}.")}

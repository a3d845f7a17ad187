"""Planning of a call of an attention layer: arguments checked and completed, and the backends that may run its core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import CallSignature, CoreDispatch, HeadGroupDispatch, PackedDispatch, varlen
from ..cache import HeadGroupCache, KVCache, PagedCache, ProjectedSource
from ..interfaces import Project
from ..interfaces.core_types import Probe
from ..kernels.autograd_guards import is_under_functorch
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from . import call_validation

NO_PROBE = Probe()


class AttentionArguments(NamedTuple):
    """Arguments of `Attention.forward`."""

    x: Tensor
    source: Tensor | ProjectedSource | None = None
    cache: KVCache | None = None
    sequence: SequenceInfo | None = None
    mask: Tensor | None = None
    probe: Probe | None = None


class LayerState(NamedTuple):
    """State of a layer that a call depends on: one of its weights (for dtype and device), mode, and parallelism."""

    weight: Tensor
    backend_name: str | None
    training: bool
    num_token_shards: int


class ExecutionPlan(NamedTuple):
    """How one kind of call runs, the same for all calls with this signature.

    `project` is `spec.project`, or its form for a single query: MLA then compares queries with the cached latents.
    `dispatch` holds the backends that support the call, and `scale` multiplies the scores. With `reads_cache_in_place`
    the backend reads cached tensors in the format in which they are stored (pages, int8).
    """

    project: Project
    signature: CallSignature
    dispatch: CoreDispatch | PackedDispatch | HeadGroupDispatch
    reads_cache_in_place: bool
    scale: float


class PlannedCall(NamedTuple):
    """One call of the layer: its arguments, checked and completed, and the plan by which it runs."""

    x: Tensor
    source: Tensor | ProjectedSource | None
    cache: KVCache | None
    sequence: SequenceInfo
    mask: Tensor | None
    probe: Probe
    plan: ExecutionPlan

    @property
    def recurrent_state(self) -> Mapping[str, Tensor]:
        """The state that the cache holds instead of keys and values (linear attention); empty for other caches."""
        return {} if self.cache is None else self.cache.state

    @property
    def reads_cache_by_heads(self) -> bool:
        """Whether groups of heads read their own caches; a mask, or a probe of keys or values, needs one set."""
        is_grouped = isinstance(self.cache, HeadGroupCache) and isinstance(self.plan.dispatch, HeadGroupDispatch)
        return is_grouped and self.mask is None and not self.plan.signature.probed_tensors & {"k", "v"}


class CallPlanner:
    """Checks the calls of one layer, and plans each kind of call once."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._form_for_single_query = {single: spec.projection_form(single) for single in (False, True)}
        self._position_limit = call_validation.PositionLimit.of(spec)
        self._plans: dict[tuple[object, ...], ExecutionPlan] = {}

    def prepare(self, arguments: AttentionArguments, layer: LayerState) -> PlannedCall:
        """Check and complete the arguments of a call; errors about them are raised here, before a cache changes."""
        x, source, cache, sequence, mask, _ = arguments
        call_validation.check_call(self.spec, x, source, cache, sequence, layer.weight)
        if mask is not None:
            call_validation.check_mask(self.spec, mask, x, source, cache, layer.num_token_shards)
        probe = NO_PROBE if arguments.probe is None else call_validation.check_probe(arguments.probe)
        if sequence is None and cache is None:
            sequence = SequenceInfo.contiguous(0, x.shape[1], x.device)
        elif sequence is None and cache is not None:
            sequence = cache.next_positions(x.shape[1])
        assert sequence is not None
        call = PlannedCall(x, source, cache, sequence, mask, probe, self._plan(arguments, sequence, layer))
        self.check_positions(sequence)
        return call

    def check_positions(self, sequence: SequenceInfo) -> None:
        """Raise ValueError for positions beyond those that the parts support."""
        if self._position_limit is not None:
            call_validation.check_positions(self._position_limit, sequence)

    def _plan(self, arguments: AttentionArguments, sequence: SequenceInfo, layer: LayerState) -> ExecutionPlan:
        x, _, cache, _, mask, probe = arguments
        single_query = x.shape[1] == 1
        properties = {
            "device": x.device.type,
            "dtype": call_validation.compute_dtype(x),
            "needs_grad": torch.is_grad_enabled(),
            "single_query": single_query,
            "has_recurrent_state": cache is not None and bool(cache.state),
            "has_paged_cache": isinstance(cache, PagedCache),
            "has_caller_mask": mask is not None,
            "training": layer.training,
            "probed_tensors": NO_PROBE.points if probe is None else probe.points,
            "is_compiling": torch.compiler.is_compiling(),
            "cache_format": None if cache is None else cache.storage_format,
            "is_transformed": is_under_functorch(),
            "is_packed": self._splits_packed_rows(arguments, sequence, layer),
        }
        key = (layer.backend_name, *properties.values())
        if key in self._plans:
            return self._plans[key]
        project = self._form_for_single_query[single_query]
        signature = CallSignature(self.spec, self.spec.core_of(project), **properties)
        dispatch = backends.plan_dispatch(signature, layer.backend_name)
        names = dispatch.backend_names if isinstance(dispatch, CoreDispatch) else ()
        plan = ExecutionPlan(
            project=project,
            signature=signature,
            dispatch=dispatch,
            reads_cache_in_place=bool(names) and backends.reads_cache_in_place(names[0], signature),
            scale=self.spec.similarity.score_scale(signature.core),
        )
        if not signature.is_compiling:  # a plan made in a graph would be a new constant, and recompile it
            self._plans[key] = plan
        return plan

    def _splits_packed_rows(self, arguments: AttentionArguments, sequence: SequenceInfo, layer: LayerState) -> bool:
        """Whether the sequences of packed rows are computed separately; never in a compiled graph, whose shapes may not
        depend on their lengths."""
        x, source, cache, _, mask, probe = arguments
        if cache is not None or mask is not None or sequence.lengths is None:
            return False
        if torch.compiler.is_compiling() or layer.num_token_shards > 1:
            return False
        if probe is not None and not probe.points <= varlen.PROBED_TENSORS:
            return False
        key_sequence = source.sequence if isinstance(source, ProjectedSource) else sequence if source is None else None
        return varlen.has_known_lengths(sequence, key_sequence, x.shape[0])

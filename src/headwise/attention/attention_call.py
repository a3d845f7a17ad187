"""Planning of a call of an attention layer: arguments checked and completed, and the backends that
may run its core.

Each error about an argument gives the fact, the values and a remedy.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.operand_checks import is_under_functorch
from . import backends
from .backends import CallSignature, CoreDispatch, HeadGroupDispatch, PackedDispatch, varlen
from .bound_parts import BoundParts
from .cache import HeadGroupCache, KVCache, PagedCache, ProjectedSource
from .interfaces import Project, RowStep
from .interfaces.core_types import ParallelContext, Phase, Probe
from .masking.patterns import Full
from .masking.sequence_info import SequenceInfo
from .spec.attention_spec import AttentionSpec

NO_PROBE = Probe()


class AttentionArguments(NamedTuple):
    """Arguments of `Attention.forward`."""

    x: Tensor
    source: Tensor | ProjectedSource | None = None
    cache: KVCache | None = None
    sequence: SequenceInfo | None = None
    mask: Tensor | None = None
    probe: Probe | None = None


class PlannedLayer(Protocol):
    """Layer properties that the plan of a call depends on."""

    spec: AttentionSpec
    backend_name: str | None
    training: bool
    parallel: ParallelContext
    parts: BoundParts


class ExecutionPlan(NamedTuple):
    """How one kind of call runs, the same for all calls with this signature.

    `project` is `spec.project`, or its form for a single query: MLA then compares queries with the
    cached latents. `dispatch` holds the backends that support the call, and `scale` multiplies the
    scores. With `reads_cache_in_place` the backend reads cached tensors in their storage format
    (pages, int8). With `reads_cache_by_heads` each group of heads reads a separate cache. With
    `may_refuse_mask` the mask is checked before a cache changes. With `keeps_angles` tensors that
    depend only on positions are kept for later calls.
    """

    project: Project
    signature: CallSignature
    dispatch: CoreDispatch | PackedDispatch | HeadGroupDispatch
    scale: float
    reads_cache_in_place: bool
    reads_cache_by_heads: bool
    may_refuse_mask: bool
    keeps_angles: bool


class PlannedCall(NamedTuple):
    """One call of the layer: checked and completed arguments, and the plan that runs them."""

    x: Tensor
    source: Tensor | ProjectedSource | None
    cache: KVCache | None
    sequence: SequenceInfo
    mask: Tensor | None
    probe: Probe
    plan: ExecutionPlan


class CallPlanner:
    """Checks the calls of one layer, and plans each kind of call once."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._form_for_single_query = {
            single: spec.projection_form(single) for single in (False, True)
        }
        self._needs_source = spec.source is not None and spec.source != spec.model
        self._position_limit = PositionLimit.from_spec(spec)
        self._plans: dict[tuple[object, ...], ExecutionPlan] = {}

    def plan_call(self, arguments: AttentionArguments, layer: PlannedLayer) -> PlannedCall:
        """Check and complete the arguments of a call; errors about them are raised here, before a
        cache changes.
        """
        x, source, cache, sequence, mask, probe = arguments
        check_tensor("x", x, self.spec.model, layer.parts.weights["project"].first_parameter)
        has_options = not (
            source is None and cache is None and sequence is None and mask is None and probe is None
        )
        if has_options or self._needs_source:
            check_options(self.spec, arguments, layer.parallel.num_token_shards)
        is_compiling = torch.compiler.is_compiling()
        if sequence is None:
            count = x.shape[1]
            sequence = (
                SequenceInfo.contiguous(0, count, x.device)
                if cache is None
                else cache.next_positions(count)
            )
        is_packed = sequence.lengths is not None and self._splits_packed_rows(
            arguments, sequence, layer
        )
        key = (
            layer.backend_name,
            layer.training,
            x.device.type,
            compute_dtype(x),
            torch.is_grad_enabled(),
            x.shape[1] == 1,
            mask is not None,
            None if probe is None else probe.points,
            is_under_functorch(),
            is_compiling,
            is_packed,
            None if cache is None else (type(cache), bool(cache.state), cache.storage_format),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(arguments, layer, is_compiling, is_packed)
            if not is_compiling:  # made in a graph, a plan would be a new constant and recompile it
                self._plans[key] = plan
        if self._position_limit is not None:
            check_positions(self._position_limit, sequence)
        return PlannedCall(x, source, cache, sequence, mask, probe or NO_PROBE, plan)

    def check_positions(self, sequence: SequenceInfo) -> None:
        """Raise ValueError for positions beyond those that the parts support."""
        if self._position_limit is not None:
            check_positions(self._position_limit, sequence)

    def _make_plan(
        self,
        arguments: AttentionArguments,
        layer: PlannedLayer,
        is_compiling: bool,
        is_packed: bool,
    ) -> ExecutionPlan:
        x, _, cache, _, mask, probe = arguments
        project = self._form_for_single_query[x.shape[1] == 1]
        signature = CallSignature(
            self.spec,
            self.spec.core_of(project),
            device=x.device.type,
            dtype=compute_dtype(x),
            grad_enabled=torch.is_grad_enabled(),
            single_query=x.shape[1] == 1,
            has_recurrent_state=cache is not None and bool(cache.state),
            has_paged_cache=isinstance(cache, PagedCache),
            has_caller_mask=mask is not None,
            training=layer.training,
            probed_tensors=NO_PROBE.points if probe is None else probe.points,
            is_compiling=is_compiling,
            cache_format=None if cache is None else cache.storage_format,
            is_transformed=is_under_functorch(),
            is_packed=is_packed,
        )
        dispatch = backends.plan_dispatch(signature, layer.backend_name)
        names = dispatch.backend_names if isinstance(dispatch, CoreDispatch) else ()
        return ExecutionPlan(
            project=project,
            signature=signature,
            dispatch=dispatch,
            scale=self.spec.similarity.score_scale(signature.core),
            reads_cache_in_place=bool(names) and backends.reads_cache_in_place(names[0], signature),
            # a mask, or a probe of keys or values, needs one set of keys for all heads
            reads_cache_by_heads=isinstance(dispatch, HeadGroupDispatch)
            and isinstance(cache, HeadGroupCache)
            and mask is None
            and not signature.probed_tensors & {"k", "v"},
            may_refuse_mask=isinstance(dispatch, CoreDispatch)
            and dispatch.may_refuse
            and not is_compiling,  # an error while tracing leaves the cache as it was
            keeps_angles=not (signature.grad_enabled or is_compiling or signature.is_transformed),
        )

    def _splits_packed_rows(
        self, arguments: AttentionArguments, sequence: SequenceInfo, layer: PlannedLayer
    ) -> bool:
        """True if the sequences of packed rows are computed separately.

        Never in a compiled graph: its shapes may not depend on the lengths.
        """
        x, source, cache, _, mask, probe = arguments
        if cache is not None or mask is not None:
            return False
        if torch.compiler.is_compiling() or layer.parallel.num_token_shards > 1:
            return False
        if probe is not None and not probe.points <= varlen.PROBED_TENSORS:
            return False
        key_sequence = sequence if source is None else None
        if isinstance(source, ProjectedSource):
            key_sequence = source.sequence
        return varlen.has_known_lengths(sequence, key_sequence, x.shape[0])


def check_options(spec: AttentionSpec, arguments: AttentionArguments, spans: int) -> None:
    """Raise ValueError for arguments that do not fit x or each other; the keys of a row come from
    `spans` ranks.
    """
    x, source, cache, sequence, mask, probe = arguments
    if source is not None:
        _check_type("source", source, Tensor, ProjectedSource)
        _check_source_or_cache(spec, x, source, cache)
    elif spec.source is not None and spec.source != spec.model:
        raise ValueError(f"this layer reads a source of width {spec.source}; pass it as source=z")
    if cache is not None:
        if not isinstance(cache, KVCache):
            _check_type("cache", cache, KVCache)
        cache.check_input(spec, x)
    if sequence is not None:
        _check_sequence("x", x, sequence)
        if spec.depends_on_key_order and not sequence.in_order:
            raise ValueError(
                "this layer sums over keys in order, but positions of `sequence` fall within a "
                "segment; sort the tokens of each segment by position"
            )
    if mask is not None:
        check_mask(spec, mask, x, source, cache, spans)
    if probe is not None:
        _check_type("probe", probe, Probe)


def check_source(
    spec: AttentionSpec, z: Tensor, sequence: SequenceInfo | None, like: Tensor
) -> None:
    """Raise ValueError for a source that does not fit the layer."""
    check_tensor("source", z, spec.source or spec.model, like)
    if sequence is not None:
        _check_sequence("source", z, sequence)


class PositionLimit(NamedTuple):
    """The number of positions that a layer supports, and the part that limits it."""

    max_positions: int
    part: str

    @staticmethod
    def from_spec(spec: AttentionSpec) -> PositionLimit | None:
        """The smallest limit of all parts; the part is stored as text, because torch.compile cannot
        trace its repr.
        """
        limits = [(part.max_positions(spec), repr(part)) for _, part in spec.parts()]
        return min(
            (PositionLimit(limit, part) for limit, part in limits if limit is not None),
            default=None,
        )


def check_positions(limit: PositionLimit, at: SequenceInfo) -> None:
    """Raise ValueError for positions beyond the limit; a compiled call checks only positions known
    without a wait for the device.
    """
    last = at.position_beyond(limit.max_positions)
    if last is not None:
        raise ValueError(
            f"{limit.part} knows no position {last}, its last one is {limit.max_positions - 1}; "
            f"give it a length of {last + 1}, or give shorter input"
        )


def check_mask(
    spec: AttentionSpec,
    mask: Tensor,
    x: Tensor,
    source: Tensor | ProjectedSource | None,
    cache: KVCache | None,
    spans: int,
) -> None:
    """Raise ValueError for a mask that does not fit the call; the keys of a row come from `spans`
    ranks.
    """
    _check_type("mask", mask, Tensor)
    if cache is not None:
        raise ValueError(
            "cannot use mask= with cache=: the slots of a cache are not the columns of a mask; "
            "mark padding with "
            "sequence=SequenceInfo.from_batch(x, ...)"
        )
    own = x if source is None else source
    keys = own.sequence.count if isinstance(own, ProjectedSource) else own.shape[1] * spans
    expected = (x.shape[0], spec.num_heads_after(Phase.SCORES), x.shape[1], keys)
    fits = mask.dim() == 4 and all(
        size in (1, full) for size, full in zip(mask.shape, expected, strict=True)
    )
    if mask.dtype != torch.bool or not fits or mask.device != x.device:
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}; give True where a key "
            "may be read, as "
            f"torch.bool [{expected[0]} or 1, {expected[1]} or 1, {expected[2]} or 1, "
            f"{expected[3]} or 1] on {x.device}"
        )
    steps = [type(step).__name__ for _, step in spec.parts_of(RowStep) if step.needs_one_mask]
    if steps and mask.shape[1] != 1:
        raise ValueError(
            f"{steps[0]} needs one mask for all heads, but mask is {tuple(mask.shape)}; give one "
            "with 1 in the place of the heads"
        )


def _check_type(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name}={value!r} is of type {type(value).__name__}; give a {expected}")


def _check_source_or_cache(
    spec: AttentionSpec, x: Tensor, source: Tensor | ProjectedSource, cache: KVCache | None
) -> None:
    if cache is not None:
        raise ValueError(
            "keys and values of a source come from layer.project_source(z), not from a cache; "
            "pass one of the two"
        )
    is_own = isinstance(source, ProjectedSource) and source.is_own_sequence
    if spec.source is None and spec.positional and not is_own:
        by = [spec.pattern.text] * (spec.pattern != Full())
        by += [type(part).__name__ for _, part in spec.parts() if part.positional]
        raise ValueError(
            f"{' and '.join(by)} compare{'s' * (len(by) == 1)} positions of x with those of a "
            "source, but the spec is "
            f"one of self-attention; set source={spec.model} in the spec if you mean it, or use "
            "pattern full() and no "
            "positional parts"
        )
    if isinstance(source, Tensor):
        batch = source.shape[0] if source.dim() else 0
    elif source.spec is spec or source.spec == spec:
        entry = next(iter(source.entry.values()))
        batch = entry.shape[0]
        if entry.device != x.device or (entry.dtype != x.dtype and not _autocasts(x)):
            raise ValueError(
                f"source was projected in {entry.dtype} on {entry.device} but x is {x.dtype} on "
                f"{x.device}; "
                "call project_source(z) again"
            )
    else:
        raise ValueError(
            "this source was projected by a layer of another spec; use this layer's own "
            "project_source(z)"
        )
    if batch != x.shape[0]:
        raise ValueError(
            f"source has {batch} rows but x has {x.shape[0]}; give one source row for each row of x"
        )


def check_tensor(name: str, x: Tensor, width: int, like: Tensor) -> None:
    """Raise ValueError for an input that is not [batch, tokens, width] in the dtype and on the
    device of the weight `like`.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; give a tensor [batch, tokens, {width}]")
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; give [batch, tokens, {width}]")
    if not x.is_floating_point():
        raise ValueError(
            f"{name} is {x.dtype}; give floating-point numbers, {like.dtype} as the layer's weights"
        )
    if x.device != like.device:
        raise ValueError(
            f"{name} is on {x.device} but the layer is on {like.device}; move one of them"
        )
    if x.dtype != like.dtype and not _autocasts(x):
        raise ValueError(
            f"{name} is {x.dtype} but the layer is {like.dtype}; convert one, or use autocast"
        )


def _autocasts(x: Tensor) -> bool:
    """True if autocast converts the operands of matrix products."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x."""
    device = x.device.type
    is_cast = device != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def _check_sequence(name: str, x: Tensor, sequence: SequenceInfo) -> None:
    _check_type("sequence", sequence, SequenceInfo)
    shape = tuple(sequence.position.shape)
    if shape[0] not in (1, x.shape[0]) or shape[1] != x.shape[1]:
        raise ValueError(
            f"sequence is {list(shape)} but {name} is {list(x.shape[:2])}; give "
            f"SequenceInfo.from_batch({name}, ...)"
        )
    if sequence.position.device != x.device:
        raise ValueError(
            f"sequence is on {sequence.position.device} but {name} is on {x.device}; move one of "
            "them"
        )


def copy_cache(cache: KVCache | None) -> KVCache | None:
    """A copy of a cache; paged ones share the memory of an engine and are not copied."""
    caches = cache.caches if isinstance(cache, HeadGroupCache) else (cache,)
    if any(isinstance(one, PagedCache) for one in caches):
        raise ValueError(
            "a paged cache is not copied; use hw.why(layer.spec, tokens=..., when=['paged'])"
        )
    try:
        return copy.deepcopy(cache)
    except RuntimeError:  # torch refuses to copy tensors that have a gradient function
        raise ValueError(
            "the cache was filled while gradients were on, so it cannot be copied; fill it under "
            "torch.no_grad()"
        ) from None

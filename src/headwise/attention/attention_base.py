"""Base class of the attention layer: create its weights and caches, explain and observe its
calls.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from torch import Tensor, nn

from . import backends
from .attention_call import AttentionArguments, CallPlanner, PlannedCall, check_source, copy_cache
from .backends import CoreInputs, CoreSteps
from .backends.backend_report import BackendReport, explain_call
from .bound_parts import (
    NO_SHARED,
    BoundParts,
    PartWeights,
    QKTransforms,
    StepObserver,
    check_shared,
    shared_within,
)
from .cache import KVCache, ProjectedSource, make_cache
from .interfaces import Mix
from .interfaces.core_types import HasParallelContext, PartParams, Probe
from .masking.sequence_info import SequenceInfo
from .spec.attention_spec import AttentionSpec


class AttentionBase(HasParallelContext, nn.Module):
    """The weights and the planner of an attention layer; `Attention` adds the forward pass."""

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

    @abstractmethod
    def head_outputs_and_gates(
        self, arguments: AttentionArguments
    ) -> tuple[Tensor, Sequence[Tensor]]: ...

    @abstractmethod
    def attend(self, call: PlannedCall, inputs: CoreInputs) -> Tensor: ...

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

    def why(self, x: Tensor, *, cache: KVCache | None = None, **options: Any) -> BackendReport:
        """Which backend runs a call with these arguments of `forward`, and why the others do not.

        The call runs, on a copy of the cache and without hooks.

        >>> import headwise as hw, torch
        >>> layer = hw.Attention(hw.design(model=8, heads=4, kv=2), backend="sdpa")
        >>> report = layer.why(torch.randn(1, 5, 8))
        >>> report.backend, report.reasons_against["dense"]
        ('sdpa', ['the layer names sdpa'])
        """
        reports: list[BackendReport] = []

        def attend(call: PlannedCall, inputs: CoreInputs) -> Tensor:
            reports.append(explain_call(call.plan.dispatch, call.plan.signature, inputs))
            return self.attend(call, inputs)

        observed = copy.copy(self)
        observed.attend = attend
        observed.forward(x, cache=copy_cache(cache), **options)
        return reports[0]

    def project_source(self, z: Tensor, *, sequence: SequenceInfo | None = None) -> ProjectedSource:
        """Keys and values of another sequence, projected once; pass them as `source` to any number
        of calls.
        """
        check_source(self.spec, z, sequence, self.first_parameter)
        sequence = sequence or SequenceInfo.contiguous(0, z.shape[1], z.device)
        self.planner.check_positions(sequence)
        transforms = QKTransforms(self.parts, sequence)
        kv_entry = self.parts.project_kv(
            self.spec.project, self.parallel.copy_to_heads(z), transforms
        )
        return ProjectedSource(*self.parallel.gather_tokens(kv_entry, sequence), self.spec)

    def extend_own_sequence(
        self, new: ProjectedSource, cache: KVCache | None, x: Tensor
    ) -> ProjectedSource:
        """Keys and values of the cached tokens of x and of the new ones, which the cache keeps:
        what this layer attends to, and layers that read it.
        """
        entry, sequence = new.entry, new.sequence
        if cache is not None:
            cache.check_input(self.spec, x)
            entry, sequence = cache.extend(entry, sequence)
            if cache.reuses_memory:
                entry = {name: tensor.clone() for name, tensor in entry.items()}
        return ProjectedSource(entry, sequence, self.spec, is_own_sequence=True)

    def cache(
        self,
        *,
        batch: int,
        capacity: int,
        storage_format: str | None = None,
        kind: str = "smallest",
    ) -> KVCache:
        """An empty cache for this layer, in its dtype and on its device; storage_format="int8"
        stores 8-bit keys and values, kind="static" is for compiled decode steps (`StaticCache`).
        """
        weight = self.first_parameter
        return make_cache(
            self.spec,
            batch=batch,
            capacity=capacity,
            dtype=weight.dtype,
            device=str(weight.device),
            storage_format=storage_format,
            kind=kind,
        )

    def observed(self, observe: StepObserver) -> Self:
        """A layer with the same weights that runs in plain tensor operations and calls `observe`
        after each part.

        >>> import headwise as hw, torch
        >>> layer, seen = (
        ...     hw.Attention(hw.design(model=8, heads=2, modifiers=(hw.parts.Softcap(5.0),))),
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
        """The weights of each part by name, including weights shared from other layers."""
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

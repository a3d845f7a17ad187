"""The parts of one layer's spec with their weights, in the order in which `Attention` uses them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..kernels.devices import has_dtype
from ..util.errors import SpecError, suggest
from .backends import CoreInputs, CoreSteps
from .backends.core_interface import ScoreTransform
from .interfaces import (
    Gate,
    JointStep,
    Mix,
    OutputStep,
    Part,
    Project,
    QKTransform,
    RowStep,
    ScoreStep,
    Similarity,
    WeightStep,
)
from .interfaces.core_types import AuxLosses, PartParams, Phase, QueryContext
from .masking.sequence_info import AttentionMask, SequenceInfo
from .spec.attention_spec import AttentionSpec

NO_SHARED: Mapping[str, PartWeights] = MappingProxyType({})


def check_shared(spec: AttentionSpec, shares: Mapping[str, PartWeights]) -> None:
    """Raise SpecError if shared weights of another layer do not have the shapes that this spec
    declares.
    """
    parts = dict(spec.parts())
    for shared, owner in shares.items():
        name, _, tensor_name = shared.partition(".")
        declared = parts[name].params(spec) if name in parts else {}
        if name not in parts or (tensor_name and tensor_name not in declared):
            raise SpecError(
                f"this layer has no {shared!r} to share; "
                f"{suggest(shared, [*parts, *spec.params()])}"
            )
        sizes = spec.sizes_of(parts[name])
        for key, param in (
            declared.items() if not tensor_name else [(tensor_name, declared[tensor_name])]
        ):
            expected = param.layout.shape(sizes)
            actual = tuple(owner[key].shape) if key in owner else None
            if actual != expected:
                raise SpecError(
                    f"cannot share {name}.{key}: it is {list(expected)} in this layer and "
                    f"{actual and list(actual)} in the layer that owns it; use specs that declare "
                    "equal shapes"
                )


def shared_within(shared: Mapping[str, PartWeights], part: str) -> dict[str, PartWeights]:
    """The single tensors of one part that are shared, by their names within the part."""
    return {
        name.removeprefix(f"{part}."): owner
        for name, owner in shared.items()
        if name.startswith(f"{part}.")
    }


class PartWeights(nn.Module):
    """Parameters and constants of one part; see `PartParams` for how parts read them.

    Tensors named in `borrowed` belong to another layer: they are used here, but saved and moved
    there.
    """

    def __init__(
        self, spec: AttentionSpec, part: Part, borrowed: Mapping[str, PartWeights] = NO_SHARED
    ) -> None:
        super().__init__()
        self.sizes: Mapping[str, int] = spec.sizes_of(part)
        self.kv_head_of_query = spec.heads.kv_head_of_query
        self._borrowed = dict(borrowed)
        self.cached: dict[Any, Any] = {}
        params = part.params(spec)
        self._by_head = [
            name for name, param in params.items() if param.layout.dims[:1] == (("q",),)
        ]
        self._scalars = [name for name in self._by_head if params[name].layout.axes == ("q",)]
        for name, param in params.items():
            if name not in borrowed:
                shape = param.layout.shape(self.sizes)
                tensor = param.init(shape)
                if tensor.shape != shape:
                    raise SpecError(
                        f"the initialiser of {name!r} returned the shape {tuple(tensor.shape)}, "
                        f"but its layout has {shape}; return a tensor of the shape that it is given"
                    )
                if param.trainable:
                    self.register_parameter(name, nn.Parameter(tensor))
                else:
                    self.register_buffer(name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._borrowed:
            return self._borrowed[name][name]
        if name not in self._parameters and name not in self._buffers:
            names = ", ".join(self._names) or "none"
            raise KeyError(f"there is no parameter {name!r}; params() declares {names}")
        tensor = self._parameters[name] if name in self._parameters else self._buffers[name]
        assert tensor is not None
        return tensor

    def trainable(self) -> list[Tensor]:
        """All parameters, including borrowed ones."""
        own = [t for t in self._parameters.values() if t is not None]
        return own + [owner[name] for name, owner in self._borrowed.items()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cached": {}}  # a copy computes these values again

    @property
    def first_parameter(self) -> Tensor:
        """The first parameter, from which callers read dtype and device."""
        for tensor in self._parameters.values():
            assert tensor is not None
            return tensor
        raise LookupError("a part without parameters")

    def __contains__(self, name: str) -> bool:
        return name in self._parameters or name in self._buffers or name in self._borrowed

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self._parameters, *self._buffers, *self._borrowed)

    def extra_repr(self) -> str:
        """Names and shapes, as `print(layer)` shows them."""
        every = {**self._parameters, **self._buffers}
        return ", ".join(
            f"{name} {list(tensor.shape)}" for name, tensor in every.items() if tensor is not None
        )

    def head(self, h: Any) -> Mapping[str, Tensor]:
        """All tensors; those with a leading axis of score heads are indexed by h."""
        return {n: self[n][h] if n in self._by_head else self[n] for n in self._names}

    def broadcast_over_scores(self) -> Mapping[str, Tensor]:
        """All tensors; those with one number per score head are shaped [H, 1, 1], to broadcast over
        s_BHTS.
        """
        return {n: self[n][:, None, None] if n in self._scalars else self[n] for n in self._names}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Constants move between devices but keep their dtype: angles and slopes rounded to bfloat16
        # would encode other positions. On a device without float64 they stay on the CPU.
        exact = dict(self._buffers)
        on_cpu = {
            name: tensor
            for name, tensor in exact.items()
            if tensor is not None
            and tensor.dtype == torch.float64
            and not has_dtype(fn(tensor.new_empty(0, dtype=torch.float32)).device, tensor.dtype)
        }
        self._buffers.update(dict.fromkeys(on_cpu))
        super()._apply(fn, recurse)
        self.cached.clear()
        for name, before in exact.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        for name, tensor in on_cpu.items():
            self._buffers[name] = tensor.cpu()
        return self


class StepObserver(Protocol):
    """Receives what a part changes: the part's name in the spec, what it acts on, and the tensor
    before and after.

    `side` is "q", "k" or "v" for query and key transforms, "scores", "weights", "outputs" or
    "gates".
    """

    def __call__(self, name: str, side: str, before: Tensor, after: Tensor, /) -> object: ...


class QKTransforms:
    """Applies RoPE, QK-norm and the like of a layer's parts to queries, keys or values at given
    positions.

    Tensors that depend on positions, such as angles, are computed once, for the first side that
    needs them. With `keeps_angles` they may be kept for later calls.
    """

    def __init__(
        self, parts: BoundParts, sequence: SequenceInfo, keeps_angles: bool = False
    ) -> None:
        self.parts = parts
        self.sequence = sequence
        self.keeps_angles = keeps_angles
        self._precomputed: dict[str, Any] = {}

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor:
        for name, transform, p in self.parts.transforms[side]:
            if name not in self._precomputed:
                table_dtype = torch.promote_types(x_BTHK.dtype, torch.float32)
                self._precomputed[name] = transform.precompute(
                    self.sequence, table_dtype, p, self.keeps_angles
                )
            before = x_BTHK
            x_BTHK = transform.transform(before, side, self._precomputed[name], p)
            if self.parts.observe is not None:
                self.parts.observe(name, side, before, x_BTHK)
        return x_BTHK


class BoundParts:
    """Every part of a spec, bound to its weights."""

    def __init__(self, spec: AttentionSpec, weights: Mapping[str, PartWeights]) -> None:
        self.spec = spec
        self.weights: Mapping[str, PartWeights] = dict(weights)
        self.transforms: dict[str, list[tuple[str, QKTransform, PartParams]]] = {
            "q": [],
            "k": [],
            "v": [],
        }
        for name, part in spec.parts_of(QKTransform):
            for side in part.transformed_sides(spec):
                self.transforms[side].append((name, part, weights[name]))
        self.core_steps = CoreSteps.from_spec(spec, self.weights)
        self.mixes = [(name, part, weights[name]) for name, part in spec.parts_of(Mix)]
        self.row_steps = [(name, part, weights[name]) for name, part in spec.parts_of(RowStep)]
        self._output_steps = [
            (name, part, weights[name]) for name, part in spec.parts_of(OutputStep)
        ]
        self._gates = [(name, part, weights[name]) for name, part in spec.parts_of(Gate)]
        self.score_head_of_row = spec.score_head_of_row
        self.core_pattern = spec.core_pattern
        self.changes_outputs = bool(self._output_steps or self._gates)
        self.maps_features = type(spec.similarity).feature_map is not Similarity.feature_map
        self.core_score_heads = spec.core_score_heads
        self.has_extras = bool(
            self._gates
            or self.maps_features
            or spec.is_recurrent
            or len(self.core_score_heads) != spec.heads.q
        )
        self.observe: StepObserver | None = None

    def observed(self, observe: StepObserver) -> BoundParts:
        """These parts with these weights, which call `observe` after each part."""
        parts = copy.copy(self)
        parts.observe = observe
        steps = self.core_steps
        observed_acts = {
            side: [
                partial(_act_observed, partial(observe, name, side), act)
                for name, act in zip(self._names_in(phase), acts, strict=True)
            ]
            for side, phase, acts in (
                ("scores", Phase.SCORES, steps.scores),
                ("weights", Phase.WEIGHTS, steps.weights),
            )
        }
        parts.core_steps = replace(steps, **observed_acts)
        return parts

    def _names_in(self, phase: Phase) -> list[str]:
        """Names of the parts that change scores or weights in this phase, in order."""
        return [
            name
            for name, part in self.spec.parts()
            if isinstance(part, (ScoreStep, JointStep, WeightStep)) and part.phase is phase
        ]

    def project_kv(
        self, project: Project, z_BSE: Tensor, transforms: QKTransforms
    ) -> dict[str, Tensor]:
        """The kv entry of these tokens: what a cache would keep of them."""
        entry = project.project_kv(z_BSE, transforms, self.weights["project"])
        return entry | self._key_factors(z_BSE) if self.mixes else entry

    def project_qkv(
        self, project: Project, x_BTD: Tensor, transforms: QKTransforms
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Queries q_BTHK of these tokens, and their kv entry."""
        q_BTHK, entry = project.project_qkv(x_BTD, transforms, self.weights["project"])
        entry = entry | self._key_factors(x_BTD) if self.mixes else entry
        return q_BTHK, entry | self.row_factors(x_BTD, q_BTHK) if self.row_steps else entry

    def select_core_heads(self, inputs: CoreInputs) -> CoreInputs:
        """Select the queries of the heads that the core scores, and the caller's mask for these
        heads.
        """
        heads = list(self.core_score_heads)
        q_BTHK = inputs.q[:, :, heads]
        context = inputs.query_context._replace(q_BTHK=q_BTHK)
        whole = inputs.mask
        mask = whole.mask
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, heads]
        own_mask = AttentionMask(whole.queries, whole.keys, whole.pattern, mask)
        return inputs._replace(q=q_BTHK, mask=own_mask, query_context=context)

    def feature_map(self, x_BTHK: Tensor, side: str) -> Tensor:
        """Map queries or keys to features in linear attention; return them unchanged otherwise."""
        return self.core_steps.similarity.feature_map(x_BTHK, side, self.core_steps.similarity_p)

    def gate_values(self, context: QueryContext, aux_losses: AuxLosses | None) -> list[Tensor]:
        """The value of every gate for every token and head."""
        return [gate.gate(context, p, aux_losses) for _, gate, p in self._gates]

    def finish_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """Head outputs o_BTOV after the output steps and the gates."""
        o_BTOV = o_BTRV
        for name, step, p in self._output_steps:
            before = o_BTOV
            o_BTOV = step.transform_outputs(before, x_BTD, p)
            if self.observe is not None:
                self.observe(name, "outputs", before, o_BTOV)
        for (name, _, _), gate in zip(self._gates, gates, strict=True):
            before = o_BTOV
            o_BTOV = before * gate
            if self.observe is not None:
                self.observe(name, "gates", before, o_BTOV)
        return o_BTOV

    def row_factors(self, x_BTD: Tensor, q_BTHK: Tensor) -> dict[str, Tensor]:
        """The factors of each key that `RowStep` parts cache along with keys and values."""
        return {
            f"{name}.{key}": factor
            for name, step, p in self.row_steps
            for key, factor in step.key_factors(x_BTD, q_BTHK, p).items()
        }

    def _key_factors(self, z_BSE: Tensor) -> dict[str, Tensor]:
        """The factors of each key that `Mix` parts cache along with keys and values."""
        return {
            f"{name}.{key}": factor
            for name, mix, p in self.mixes
            for key, factor in mix.key_factors(z_BSE, p).items()
        }


def _act_observed(
    report: Callable[[Tensor, Tensor], object],
    act: ScoreTransform,
    a_BHTS: Tensor,
    inputs: CoreInputs,
) -> Tensor:
    after = act(a_BHTS, inputs)
    report(a_BHTS, after)
    return after

"""What a layer or a model costs before it runs: items, bytes, and seconds at least on a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..spec import AttentionSpec
from . import cache_bytes
from .bills import CostBreakdown, cached_numbers
from .calls import Workload, list_calls, counted_flops_by_call, executed_flops_by_call
from .devices import Device, dtype_bytes
from .nets import ActivationSettings, activation_memory
from .operations import RooflineOperation, merge_operations, list_operations
from .reading import ForwardCall, ExecutionTarget, AttentionComponent
from .scopes import list_assumptions
from .symbols import SymbolicInt
from .whole import SpecOrModel, ModelComponent, active_parameters, parameter_terms, list_components

__all__ = ["Workload", "CostEstimate", "estimate_cost"]


@dataclass(frozen=True)
class CostEstimate:
    """One layer, or one model, under one load.

    Bills say what is asked for; `spent` and `counted` the totals of the same calls as a backend executes and as torch's
    counter sees them. `kept` are numbers of one token (of a state, all of it), `told` of one token of a source;
    `kept_each` is bytes that one more token adds while no window is full, None where it adds none.
    """

    name: str
    spec_or_model: SpecOrModel
    workload: Workload
    full_call: ForwardCall
    parameters: CostBreakdown
    active_parameters: int
    flops_by_call: Mapping[str, CostBreakdown]
    executed_flops: Mapping[str, int | None]
    counted_flops: Mapping[str, int | None]
    cache_numbers: CostBreakdown
    source_cache_numbers: CostBreakdown
    cache_bytes_per_token: int | None
    cache_bytes: int
    operations: Mapping[str, tuple[RooflineOperation, ...]]
    notes: tuple[str, ...] = ()

    @property
    def prefill_flops(self) -> CostBreakdown:
        """FLOPs of all tokens at once."""
        return self.flops_by_call["prefill"]

    @property
    def backward_flops(self) -> CostBreakdown:
        """FLOPs of the gradients behind them."""
        return self.flops_by_call["backward"]

    @property
    def decode_flops(self) -> CostBreakdown | None:
        """FLOPs of the last token alone, the others remembered; None where that is not the same."""
        return self.flops_by_call.get("decode")

    @property
    def required_flops(self) -> dict[str, int | None]:
        """FLOPs asked for in every call."""
        return _add_generation_total({call: bill.total for call, bill in self.flops_by_call.items()})

    @property
    def source_cache_bytes_per_token(self) -> int | None:
        """Bytes that every token of the source adds; None where nothing reads one."""
        return self.source_cache_numbers.total * dtype_bytes(self.workload.dtype) or None

    @property
    def attention_specs(self) -> dict[str, AttentionSpec]:
        """Every attention that differs from those before it, by where it stands."""
        found = {p.spec: p for p in reversed(list_components(self.spec_or_model)) if isinstance(p, AttentionComponent)}
        return {piece.name or self.name: spec for spec, piece in reversed(found.items())}

    def seconds(self, phase: str) -> float:
        """Seconds at least of a phase: its operations one after the other."""
        return self.total_operation(phase).seconds

    def total_operation(self, phase: str) -> RooflineOperation:
        """All operations of a phase as one."""
        return merge_operations(phase, self.operations[phase])

    @property
    def core_operation(self) -> RooflineOperation:
        """The cores of a decoding step, or of all tokens where there is none; without attention, all there is."""
        phase = "decode" if self.decode_flops is not None else "prefill"
        cores = [one for one in self.operations[phase] if one.name.endswith("core")]
        return merge_operations("core", cores or self.operations[phase])

    @property
    def weights_bytes(self) -> int:
        """Bytes of the learned numbers, as they are read."""
        return self.parameters.total * dtype_bytes(self.workload.dtype)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes kept for the gradients in training, as it usually runs there; None where a load names no such run."""
        try:
            return activation_memory(self.spec_or_model, self.workload, ActivationSettings(source=self.workload.source)).total
        except SpecError:
            return None

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        bills = {"parameters": self.parameters, **self.flops_by_call, "cache": self.cache_numbers, "source_cache": self.source_cache_numbers}
        operations = {
            phase: [{**vars(one), "intensity": one.intensity} for one in each]
            for phase, each in self.operations.items()
        }
        return {
            "name": self.name,
            "params": self.parameters.total,
            "active_params": self.active_parameters,
            "weights_bytes": self.weights_bytes,
            "flops": self.required_flops,
            "spent": dict(self.executed_flops),
            "counted": dict(self.counted_flops),
            "kv_bytes_per_token": self.cache_bytes_per_token,
            "kv_bytes_per_source_token": self.source_cache_bytes_per_token,
            "kv_bytes": self.cache_bytes,
            "activation_bytes": self.activation_bytes,
            "seconds": {phase: self.seconds(phase) for phase in self.operations},
            "intensity": self.core_operation.intensity,
            "bound": self.core_operation.bound,
            "operations": operations,
            "notes": list(self.notes),
            "terms": [{"bill": bill, **term._asdict()} for bill, each in bills.items() for term in each.terms],
        }


def estimate_cost(spec_or_model: SpecOrModel, workload: Workload, name: str = "") -> CostEstimate:
    """Everything that a layer or a model costs under a load; nothing is built.

    >>> import headwise as hw
    >>> gqa = estimate_cost(hw.design(preset="gqa", model=4096, heads=32), Workload(batch=16, context=32768))
    >>> gqa.kept.total * 2, gqa.operations["decode"][1].intensity  # bytes a token; 4 heads read each key
    (4096, 3.9995117783473697)
    """
    every = list_components(spec_or_model)
    calls = list_calls(spec_or_model, every, workload, name)
    readers = [piece for piece in every if isinstance(piece, AttentionComponent) and not piece.before_last_stack and "decode" in calls]
    own, told = ([piece for piece in readers if piece.role == role] for role in ("attention", "cross"))
    bills = {phase: _required_breakdown(*call) for phase, call in calls.items()}
    runs = ExecutionTarget(Device.from_name(workload.device).kind, workload.dtype)
    prefill = calls["prefill"]
    return CostEstimate(
        name=name,
        spec_or_model=spec_or_model,
        workload=workload,
        full_call=prefill[1],
        parameters=parameter_terms(spec_or_model),
        active_parameters=active_parameters(spec_or_model),
        flops_by_call={"prefill": bills.pop("prefill"), "backward": _gradient_breakdown(*prefill), **bills},
        executed_flops=_add_generation_total(executed_flops_by_call(calls, runs)),
        counted_flops=_add_generation_total(counted_flops_by_call(calls)),
        cache_numbers=_cache_numbers_of(own),
        source_cache_numbers=_cache_numbers_of(told),
        cache_bytes_per_token=_cache_numbers_of(piece for piece in own if not piece.spec.is_recurrent).total * dtype_bytes(workload.dtype) or None,
        cache_bytes=_cache_bytes_of(own, workload, workload.cached_tokens) + _cache_bytes_of(told, workload, prefill[1].source),
        operations={
            phase: list_operations(*calls[phase], workload.dtype, workload.device)
            for phase in ("prefill", "decode")
            if phase in calls
        },
        notes=tuple(list_assumptions(spec_or_model)),
    )


def _add_generation_total(totals: Mapping[str, int | None]) -> dict[str, int | None]:
    """With the whole of a generation: its prompt, and its steps."""
    prompt, steps = totals.get("prompt"), totals.get("steps")
    whole = {} if "steps" not in totals else {"generate": None if prompt is None or steps is None else prompt + steps}
    return {**totals, **whole}


def _required_breakdown(some: Iterable[ModelComponent], call: ForwardCall) -> CostBreakdown:
    """What is asked for in a call."""
    return CostBreakdown.from_repeated_items((_qualified_name(p.name, one.name), one.flops, p.times) for p in some for one in p.required_products(call))


def _gradient_breakdown(some: Iterable[ModelComponent], call: ForwardCall) -> CostBreakdown:
    """What its gradients ask for: of each product as many as factors that have one."""
    products = ((piece, one) for piece in some for one in piece.required_products(call))
    return CostBreakdown.from_repeated_items((_qualified_name(p.name, one.name), one.num_grad_factors * one.flops, p.times) for p, one in products)


def _qualified_name(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _cache_numbers_of(some: Iterable[AttentionComponent]) -> CostBreakdown:
    """Numbers that attentions remember of one token."""
    return CostBreakdown.from_repeated_items(
        (_qualified_name(piece.name, term.name), SymbolicInt.of(term.value, term.formula), piece.times)
        for piece in some
        for term in cached_numbers(piece.spec).terms
    )


def _cache_bytes_of(some: Iterable[AttentionComponent], load: Workload, tokens: int) -> int:
    """Bytes that they hold of so many tokens: rings where patterns forget."""
    each = dtype_bytes(load.dtype)
    return sum(
        piece.times * cache_bytes(piece.spec, batch=load.batch, capacity=tokens, bytes_per_number=each) for piece in some
    )

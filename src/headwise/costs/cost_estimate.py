"""The cost estimate of one layer or model before it runs: parameters, FLOPs, bytes and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..attention.spec.attention_spec import AttentionSpec
from ..util.errors import SpecError
from .components import (
    AttentionComponent,
    ModelComponent,
    SpecOrModel,
    list_attentions,
    list_components,
    list_operations,
)
from .counted_model import CountedCore, CountedModel
from .flops import CostBreakdown
from .roofline import (
    Device,
    ExecutionFormats,
    ExecutionTarget,
    ForwardCall,
    MemoryShortfall,
    RooflineOperation,
    merge_operations,
)
from .training_memory import ActivationSettings, activation_memory
from .weight_storage import active_parameters, dtype_bytes, parameter_terms, total_weight_bytes
from .workload import (
    CallsByPhase,
    Workload,
    list_assumptions,
    list_calls,
)

PAGE_TOKENS = 16  # tokens of a page of the KV cache, as in vLLM and SGLang by default
CALL_LABELS = {
    "prefill": "prefill",
    "backward": "backward",
    "decode": "decode step",
    "prompt": "prompt",
    "steps": "decode steps",
}
Totals = dict[str, int | None]


@dataclass(frozen=True)
class CostEstimate:
    """Cost of one layer or model under one workload, computed when it is asked for.

    `calls` has the components and the forward call of each phase: "prefill", "decode" (one step at
    full context) for a causal spec, "prompt" and "steps" if tokens are generated.
    """

    name: str
    spec_or_model: SpecOrModel
    workload: Workload
    calls: CallsByPhase

    @property
    def full_call(self) -> ForwardCall:
        """The forward call over all tokens."""
        return self.calls["prefill"][1]

    @property
    def device(self) -> Device:
        """The device of the workload."""
        return Device.from_name(self.workload.device)

    @cached_property
    def parameters(self) -> CostBreakdown:
        """Trainable parameters, one term per tensor."""
        model = self.spec_or_model
        return model.parameters if isinstance(model, CountedModel) else parameter_terms(model)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that are active for one token."""
        model = self.spec_or_model
        is_counted = isinstance(model, CountedModel)
        return model.active_parameters() if is_counted else active_parameters(model)

    @cached_property
    def active_parameters_without_embeddings(self) -> int:
        """`active_parameters` without the embedding tables that are only looked up."""
        model = self.spec_or_model
        if isinstance(model, CountedModel):
            return model.active_parameters(embeddings=False)
        return active_parameters(model, embeddings=False)

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the parameters as they are stored: quantised, or in the precision of the
        workload.
        """
        model = self.spec_or_model
        storage = self.workload.storage(model)
        if isinstance(model, CountedModel):
            return model.weight_bytes(storage)
        return total_weight_bytes(model, storage)

    @cached_property
    def flops_by_call(self) -> Mapping[str, CostBreakdown]:
        """Required FLOPs of each call, term by term. The backward pass of prefill counts each
        product once for each factor that needs a gradient.
        """
        breakdowns: dict[str, CostBreakdown] = {}
        for phase in self.calls:
            breakdowns[phase] = self._required_breakdown(phase)
            if phase == "prefill":
                breakdowns["backward"] = self._required_breakdown(phase, backward=True)
        return breakdowns

    def _required_breakdown(self, phase: str, backward: bool = False) -> CostBreakdown:
        components, call = self.calls[phase]
        items: list[tuple[str, int, int]] = []
        for component in components:
            for product in component.required_products(call):
                flops = product.flops * (product.num_grad_factors if backward else 1)
                name = f"{component.name}.{product.name}".lstrip(".")
                items.append((name, flops, component.times))
        return CostBreakdown.from_repeated_items(items)

    @property
    def required_flops(self) -> Totals:
        """Required FLOPs of every call; None for a model that could not be run."""
        totals: Totals = {}
        for call, breakdown in self.flops_by_call.items():
            totals[call] = breakdown.total if self.has_flops else None
        return _add_generation(totals)

    @property
    def has_flops(self) -> bool:
        """True if FLOPs and times are known."""
        model = self.spec_or_model
        return not isinstance(model, CountedModel) or bool(model.components)

    @cached_property
    def executed_flops(self) -> Totals:
        """FLOPs of every call that backends execute."""
        target = ExecutionTarget(self.device.kind, self.workload.dtype)

        def count(component: ModelComponent, call: ForwardCall, backward: bool) -> int:
            if backward:
                return component.executed_backward_flops(call, target)
            return component.executed_flops(call, target)

        return self._sum_over_components(count)

    @cached_property
    def counted_flops(self) -> Totals:
        """FLOPs of every call that `FlopCounterMode` counts; None for a call without a dense
        form.
        """

        def count(component: ModelComponent, call: ForwardCall, backward: bool) -> int | None:
            products = component.counted_products(call)
            if products is None:
                return None
            return sum(one.flops * (one.num_grad_factors if backward else 1) for one in products)

        return self._sum_over_components(count)

    def _sum_over_components(
        self, count: Callable[[ModelComponent, ForwardCall, bool], int | None]
    ) -> Totals:
        """Sum a count over the components of every call, and of the backward pass of prefill; None
        if a component has none.
        """
        totals: Totals = {}
        for phase in dict.fromkeys(("prefill", "backward", *self.calls)):
            components, call = self.calls["prefill" if phase == "backward" else phase]
            total: int | None = 0 if self.has_flops else None
            for component in components:
                number = count(component, call, phase == "backward")
                if number is None or total is None:
                    total = None
                else:
                    total += component.times * number
            totals[phase] = total
        return _add_generation(totals)

    @property
    def prefill_flops(self) -> CostBreakdown:
        """Required FLOPs of a forward pass over all tokens."""
        return self.flops_by_call["prefill"]

    @property
    def backward_flops(self) -> CostBreakdown:
        """Required FLOPs of the backward pass that belongs to prefill."""
        return self.flops_by_call["backward"]

    @property
    def decode_flops(self) -> CostBreakdown | None:
        """Required FLOPs of decoding the last token with the others cached; None for specs that are
        not causal.
        """
        return self.flops_by_call.get("decode")

    # --- Cache and memory ---

    @property
    def has_cache(self) -> bool:
        """True if tokens are decoded with a cache."""
        return "decode" in self.calls or "steps" in self.calls

    def _cached_layers(self, role: str) -> list[AttentionComponent | CountedCore]:
        attentions: list[AttentionComponent | CountedCore] = []
        for component in self.calls["prefill"][0] if self.has_cache else ():
            is_attention = isinstance(component, AttentionComponent | CountedCore)
            if is_attention and not component.before_last_stack and component.role == role:
                attentions.append(component)
        return attentions

    @cached_property
    def cache_numbers(self) -> CostBreakdown:
        """Values cached per token; for a recurrent layer, its whole state."""
        return _cached_values(self._cached_layers("attention"))

    @cached_property
    def source_cache_numbers(self) -> CostBreakdown:
        """Values cached per token of a source sequence."""
        return _cached_values(self._cached_layers("cross"))

    @property
    def cache_bytes_per_token(self) -> int | None:
        """Bytes that one more token adds while no window is full; None if it adds nothing."""
        layers = self._cached_layers("attention")
        growing = sum(one.times * one.growing_values() for one in layers)
        return growing * dtype_bytes(self.workload.dtype) or None

    @property
    def source_cache_bytes_per_token(self) -> int | None:
        """Bytes that each token of the source adds to the cache; None if nothing reads a source."""
        return self.source_cache_numbers.total * dtype_bytes(self.workload.dtype) or None

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the cache for all tokens; windowed patterns have ring buffers."""
        number_bytes = dtype_bytes(self.workload.dtype)
        total = 0
        for component, tokens in self._tokens_cached():
            total += component.times * component.cached_bytes(tokens, number_bytes)
        return self.workload.batch * total

    @cached_property
    def reserved_cache_bytes(self) -> int:
        """Bytes that serving engines reserve: pages of 16 tokens; for windows as for all tokens, if
        other layers have none, because layers share pages of one size.
        """
        number_bytes = dtype_bytes(self.workload.dtype)
        layers = list(self._tokens_cached())
        is_mixed = any(one.growing_values() and one.num_slots is None for one, _ in layers)
        total = 0
        for component, tokens in layers:
            slots = component.num_slots
            tokens = tokens if is_mixed or slots is None else min(tokens, slots)
            growing = component.growing_values() * number_bytes
            pages = -(-tokens // PAGE_TOKENS)
            reserved = component.state_bytes(number_bytes) + growing * PAGE_TOKENS * pages
            total += component.times * reserved
        return self.workload.batch * total

    def _tokens_cached(self) -> Iterator[tuple[AttentionComponent | CountedCore, int]]:
        """Yield the layers with a cache, and how many tokens it holds at the end."""
        lengths = {"attention": self.workload.cached_tokens, "cross": self.full_call.source}
        for role, tokens in lengths.items():
            for component in self._cached_layers(role):
                yield component, tokens

    @property
    def activation_bytes(self) -> int | None:
        """Bytes saved for the backward pass with the default settings; None if these do not support
        the workload.
        """
        settings = ActivationSettings(source=self.workload.source)
        model = self.spec_or_model
        if isinstance(model, CountedModel):
            return None
        try:
            return activation_memory(model, self.workload, settings).total
        except SpecError:
            return None

    def shortfall(self, phase: str) -> MemoryShortfall | None:
        """By how much the device is too small for a phase: prefill needs the weights, a decode step
        also the cache.
        """
        needed = self.weights_bytes
        contents = "weights"
        if phase == "decode" and self.cache_bytes:
            needed += self.cache_bytes
            contents = "weights and cache"
        return (
            MemoryShortfall(CALL_LABELS[phase], contents, needed, self.device)
            if needed > self.device.memory
            else None
        )

    # --- Lower bounds of times ---

    @cached_property
    def operations(self) -> Mapping[str, tuple[RooflineOperation, ...]]:
        """Operations of prefill and of a decode step, with lower bounds of times on the device."""
        storage = self.workload.storage(self.spec_or_model)
        formats = ExecutionFormats(self.device, self.workload.dtype, storage)
        phases = [phase for phase in ("prefill", "decode") if phase in self.calls]
        phases = phases if self.has_flops else []
        return {phase: list_operations(*self.calls[phase], formats) for phase in phases}

    def seconds(self, phase: str) -> float | None:
        """Lower bound of the time of a phase: the sum over its operations; None if the device
        cannot hold it.
        """
        return None if self.shortfall(phase) else self.total_operation(phase).seconds

    def total_operation(self, phase: str) -> RooflineOperation:
        """Sum all operations of a phase."""
        return merge_operations(phase, self.operations[phase])

    @property
    def core_operation(self) -> RooflineOperation:
        """Attention cores of a decode step, or of prefill without one; all operations without
        attention.
        """
        operations = self.operations.get("decode", self.operations.get("prefill", ()))
        cores = [operation for operation in operations if operation.name.endswith("core")]
        return merge_operations("core", cores or operations)

    @property
    def attention_specs(self) -> dict[str, AttentionSpec]:
        """The distinct attention specs, each under the name of the first layer that has it."""
        names: dict[AttentionSpec, str] = {}
        for component in list_attentions(self.spec_or_model):
            names.setdefault(component.spec, component.name or self.name)
        return {name: spec for spec, name in names.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Parts that the estimate leaves out or approximates."""
        return tuple(list_assumptions(self.spec_or_model))

    @property
    def breakdowns(self) -> dict[str, CostBreakdown]:
        """All sums of terms, by name."""
        return {
            "parameters": self.parameters,
            **self.flops_by_call,
            "cache": self.cache_numbers,
            "source_cache": self.source_cache_numbers,
        }

    @property
    def data(self) -> dict[str, Any]:
        """The estimate as plain values that can be written as JSON."""
        operations: dict[str, Any] = {}
        seconds: dict[str, float | None] = {}
        missing: dict[str, int] = {}
        devices = [1]
        for phase, of_phase in self.operations.items():
            operations[phase] = [{**vars(one), "intensity": one.intensity} for one in of_phase]
            seconds[phase] = self.seconds(phase)
            shortfall = self.shortfall(phase)
            missing[phase] = shortfall.missing_bytes if shortfall else 0
            devices += [shortfall.min_devices] if shortfall else []
        terms: list[dict[str, Any]] = []
        for name, breakdown in self.breakdowns.items():
            terms += [{"breakdown": name, **term._asdict()} for term in breakdown.terms]
        return {
            "name": self.name,
            "params": self.parameters.total,
            "active_params": self.active_parameters,
            "active_params_without_embeddings": self.active_parameters_without_embeddings,
            "weights_bytes": self.weights_bytes,
            "flops": self.required_flops,
            "executed_flops": self.executed_flops,
            "counted_flops": self.counted_flops,
            "kv_bytes_per_token": self.cache_bytes_per_token,
            "kv_bytes_per_source_token": self.source_cache_bytes_per_token,
            "kv_bytes": self.cache_bytes,
            "kv_reserved_bytes": self.reserved_cache_bytes,
            "activation_bytes": self.activation_bytes,
            "seconds": seconds,
            "missing_bytes": missing,
            "devices": max(devices),
            "intensity": self.core_operation.intensity,
            "bound": self.core_operation.bound,
            "operations": operations,
            "notes": list(self.notes),
            "terms": terms,
        }


def estimate_cost(spec_or_model: SpecOrModel, workload: Workload, name: str = "") -> CostEstimate:
    """Estimate the cost of a layer or a model under a workload; no module is built.

    >>> import headwise as hw
    >>> gqa = estimate_cost(
    ...     hw.design(preset="gqa", model=4096, heads=32), Workload(batch=16, context=32768)
    ... )
    >>> (
    ...     gqa.cache_numbers.total * 2,
    ...     gqa.operations["decode"][1].intensity,
    ... )  # bytes per token; 4 query heads per key head
    (4096, 3.9995117783473697)
    """
    workload = workload.fitted_to([spec_or_model])
    calls = list_calls(spec_or_model, list_components(spec_or_model), workload, name)
    return CostEstimate(name, spec_or_model, workload, calls)


def _add_generation(totals: Totals) -> Totals:
    """Add "generate", the sum of the prompt and the decode steps, if there are any."""
    if "steps" not in totals:
        return totals
    prompt = totals["prompt"]
    steps = totals["steps"]
    return {**totals, "generate": None if prompt is None or steps is None else prompt + steps}


def _cached_values(components: Iterable[AttentionComponent | CountedCore]) -> CostBreakdown:
    """Values that attention layers cache per token."""
    items: list[tuple[str, int, int]] = []
    for component in components:
        items += [(name, value, component.times) for name, value in component.cached_terms()]
    return CostBreakdown.from_repeated_items(items)

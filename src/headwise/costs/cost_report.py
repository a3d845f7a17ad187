"""Cost estimates of layers and models before they run: parameters, FLOPs, bytes and time; as text
and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import SpecError, pluralise, suggest
from ..model_spec import ModelSpec
from ..spec.attention_spec import AttentionSpec
from ..translation.terminal_text import TERMINAL_WIDTH, pad, pad_left, wrap
from . import cache_bytes
from .flops import (
    AttentionComponent,
    CostBreakdown,
    ExecutionTarget,
    ForwardCall,
    ModelComponent,
    SpecOrModel,
    cached_numbers,
    list_components,
)
from .parameter_counts import active_parameters, parameter_terms
from .roofline import (
    Device,
    ExecutionFormats,
    MemoryShortfall,
    RooflineOperation,
    dtype_bytes,
    find_shortfall,
    list_operations,
    merge_operations,
)
from .symbolic_int import SymbolicInt
from .training_memory import ActivationSettings, activation_memory
from .weight_storage import total_weight_bytes
from .workload import (
    Workload,
    counted_flops_by_call,
    executed_flops_by_call,
    image_tokens,
    list_assumptions,
    list_calls,
)

__all__ = ["CostEstimate", "Workload", "estimate_cost"]


@dataclass(frozen=True)
class CostEstimate:
    """Cost of one layer or model under one workload.

    `flops_by_call` has the required FLOPs term by term, `executed_flops` and `counted_flops` the
    totals that a backend executes and that torch's `FlopCounterMode` counts in the same calls.
    `cache_numbers` are the values cached per token (for a recurrent layer, its whole state),
    `source_cache_numbers` those per token of a source sequence. `cache_bytes_per_token` is what one
    more token adds while no window is full; None if it adds nothing.
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

    @property
    def has_cache(self) -> bool:
        """True if tokens are decoded with a cache."""
        return "decode" in self.flops_by_call or "steps" in self.flops_by_call

    @property
    def required_flops(self) -> dict[str, int | None]:
        """Required FLOPs of every call."""
        return _add_generation_total(
            {call: breakdown.total for call, breakdown in self.flops_by_call.items()}
        )

    @property
    def source_cache_bytes_per_token(self) -> int | None:
        """Bytes that each token of the source adds to the cache; None if nothing reads a source."""
        return self.source_cache_numbers.total * dtype_bytes(self.workload.dtype) or None

    @property
    def attention_specs(self) -> dict[str, AttentionSpec]:
        """The distinct attention specs, each under the name of the first layer that has it."""
        first_with_spec: dict[AttentionSpec, AttentionComponent] = {}
        for component in reversed(list_components(self.spec_or_model)):
            if isinstance(component, AttentionComponent):
                first_with_spec[component.spec] = component
        return {
            component.name or self.name: spec
            for spec, component in reversed(first_with_spec.items())
        }

    def seconds(self, phase: str) -> float | None:
        """Lower bound of the time of a phase: the sum over its operations; None if the device
        cannot hold it.
        """
        return None if self.shortfall(phase) else self.total_operation(phase).seconds

    def shortfall(self, phase: str) -> MemoryShortfall | None:
        """By how much the device is too small for a phase: prefill needs the weights, a decode step
        also the cache.
        """
        decodes = phase == "decode"
        contents = "weights and cache" if decodes and self.cache_bytes else "weights"
        needed = self.weights_bytes + (self.cache_bytes if decodes else 0)
        return find_shortfall(
            CALL_LABELS[phase], contents, needed, Device.from_name(self.workload.device)
        )

    def total_operation(self, phase: str) -> RooflineOperation:
        """Sum of all operations of a phase."""
        return merge_operations(phase, self.operations[phase])

    @property
    def core_operation(self) -> RooflineOperation:
        """Attention cores of a decode step, or of prefill if there is none; all operations if there
        is no attention.
        """
        phase = "decode" if self.decode_flops is not None else "prefill"
        cores = [
            operation for operation in self.operations[phase] if operation.name.endswith("core")
        ]
        return merge_operations("core", cores or self.operations[phase])

    @property
    def weights_bytes(self) -> int:
        """Bytes of the parameters as they are stored: quantised, or in the precision of the
        workload.
        """
        return total_weight_bytes(self.spec_or_model, self.workload.storage(self.spec_or_model))

    @property
    def active_parameters_without_embeddings(self) -> int:
        """`active_parameters` without the embedding tables that are only looked up."""
        return active_parameters(self.spec_or_model, embeddings=False)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes saved for the backward pass with the default settings; None if these do not support
        the workload.
        """
        try:
            return activation_memory(
                self.spec_or_model, self.workload, ActivationSettings(source=self.workload.source)
            ).total
        except SpecError:
            return None

    @property
    def data(self) -> dict[str, Any]:
        """The estimate as plain values that can be written as JSON."""
        breakdowns = {
            "parameters": self.parameters,
            **self.flops_by_call,
            "cache": self.cache_numbers,
            "source_cache": self.source_cache_numbers,
        }
        operations = {
            phase: [
                {**vars(operation), "intensity": operation.intensity}
                for operation in operations_of_phase
            ]
            for phase, operations_of_phase in self.operations.items()
        }
        return {
            "name": self.name,
            "params": self.parameters.total,
            "active_params": self.active_parameters,
            "active_params_without_embeddings": self.active_parameters_without_embeddings,
            "weights_bytes": self.weights_bytes,
            "flops": self.required_flops,
            "executed_flops": dict(self.executed_flops),
            "counted_flops": dict(self.counted_flops),
            "kv_bytes_per_token": self.cache_bytes_per_token,
            "kv_bytes_per_source_token": self.source_cache_bytes_per_token,
            "kv_bytes": self.cache_bytes,
            "activation_bytes": self.activation_bytes,
            "seconds": {phase: self.seconds(phase) for phase in self.operations},
            "missing_bytes": {
                phase: shortfall.missing_bytes if (shortfall := self.shortfall(phase)) else 0
                for phase in self.operations
            },
            "devices": max(
                shortfall.min_devices if (shortfall := self.shortfall(phase)) else 1
                for phase in self.operations
            ),
            "intensity": self.core_operation.intensity,
            "bound": self.core_operation.bound,
            "operations": operations,
            "notes": list(self.notes),
            "terms": [
                {"breakdown": name, **term._asdict()}
                for name, breakdown in breakdowns.items()
                for term in breakdown.terms
            ],
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
    components, workload = list_components(spec_or_model), workload.fitted_to([spec_or_model])
    calls = list_calls(spec_or_model, components, workload, name)
    cached = [
        component
        for component in components
        if isinstance(component, AttentionComponent)
        and not component.before_last_stack
        and ("decode" in calls or "steps" in calls)
    ]
    self_attention = [component for component in cached if component.role == "attention"]
    cross_attention = [component for component in cached if component.role == "cross"]
    non_recurrent = [component for component in self_attention if not component.spec.is_recurrent]
    breakdowns = {phase: _required_breakdown(*call) for phase, call in calls.items()}
    target = ExecutionTarget(Device.from_name(workload.device).kind, workload.dtype)
    prefill = calls["prefill"]
    formats = ExecutionFormats(
        Device.from_name(workload.device), workload.dtype, workload.storage(spec_or_model)
    )
    return CostEstimate(
        name=name,
        spec_or_model=spec_or_model,
        workload=workload,
        full_call=prefill[1],
        parameters=parameter_terms(spec_or_model),
        active_parameters=active_parameters(spec_or_model),
        flops_by_call={
            "prefill": breakdowns.pop("prefill"),
            "backward": _gradient_breakdown(*prefill),
            **breakdowns,
        },
        executed_flops=_add_generation_total(executed_flops_by_call(calls, target)),
        counted_flops=_add_generation_total(counted_flops_by_call(calls)),
        cache_numbers=_cache_numbers_of(self_attention),
        source_cache_numbers=_cache_numbers_of(cross_attention),
        cache_bytes_per_token=_cache_numbers_of(non_recurrent).total * dtype_bytes(workload.dtype)
        or None,
        cache_bytes=_cache_bytes_of(self_attention, workload, workload.cached_tokens)
        + _cache_bytes_of(cross_attention, workload, prefill[1].source),
        operations={
            phase: list_operations(*calls[phase], formats)
            for phase in ("prefill", "decode")
            if phase in calls
        },
        notes=tuple(list_assumptions(spec_or_model)),
    )


def _add_generation_total(totals: Mapping[str, int | None]) -> dict[str, int | None]:
    """Add "generate", the sum of the prompt and the decode steps, if there are any."""
    if "steps" not in totals:
        return dict(totals)
    prompt, steps = totals.get("prompt"), totals.get("steps")
    return {**totals, "generate": None if prompt is None or steps is None else prompt + steps}


def _required_breakdown(components: Iterable[ModelComponent], call: ForwardCall) -> CostBreakdown:
    """Required FLOPs of a forward call."""
    return CostBreakdown.from_repeated_items(
        (_qualified_name(component.name, product.name), product.flops, component.times)
        for component in components
        for product in component.required_products(call)
    )


def _gradient_breakdown(components: Iterable[ModelComponent], call: ForwardCall) -> CostBreakdown:
    """Required FLOPs of a backward pass: each product counts once for each factor that needs a
    gradient.
    """
    return CostBreakdown.from_repeated_items(
        (
            _qualified_name(component.name, product.name),
            product.num_grad_factors * product.flops,
            component.times,
        )
        for component in components
        for product in component.required_products(call)
    )


def _qualified_name(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def _cache_numbers_of(components: Iterable[AttentionComponent]) -> CostBreakdown:
    """Values that attention layers cache per token."""
    return CostBreakdown.from_repeated_items(
        (
            _qualified_name(component.name, term.name),
            SymbolicInt.of(term.value, term.formula),
            component.times,
        )
        for component in components
        for term in cached_numbers(component.spec).terms
    )


def _cache_bytes_of(
    components: Iterable[AttentionComponent], workload: Workload, tokens: int
) -> int:
    """Bytes of the caches for this number of tokens; windowed patterns have ring buffers."""
    number_bytes = dtype_bytes(workload.dtype)
    return sum(
        component.times
        * cache_bytes(
            component.spec, batch=workload.batch, capacity=tokens, bytes_per_number=number_bytes
        )
        for component in components
    )


# --- The report: estimates side by side -----------------------------------------------------------

NAME_WIDTH, COLUMN_WIDTH = 25, 11  # characters of a row's name, and of each spec's number
CALL_LABELS = {
    "prefill": "prefill",
    "backward": "backward",
    "decode": "decode step",
    "prompt": "prompt",
    "steps": "decode steps",
}
UNIT_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
FORMAT_VERSION = 1  # of the JSON document


@dataclass(frozen=True)
class CostReport:
    """Cost estimates under one workload; `print` shows them side by side.

    A report iterates over its estimates and can be indexed by name.
    """

    estimates: tuple[CostEstimate, ...]

    def __iter__(self) -> Iterator[CostEstimate]:
        return iter(self.estimates)

    def __getitem__(self, name: str) -> CostEstimate:
        by_name = {estimate.name: estimate for estimate in self.estimates}
        if name not in by_name:
            raise SpecError(f"the report has no estimate {name!r}; {suggest(name, by_name)}")
        return by_name[name]

    def __str__(self) -> str:
        return "\n".join(_format_table(self.estimates))

    @property
    def terms(self) -> str:
        """All terms of parameters, FLOPs and cache, with the formula of each, as text."""
        return "\n".join(_format_terms(self.estimates)).lstrip("\n")

    @property
    def operations(self) -> str:
        """Table of the operations: FLOPs, bytes moved, lower bound of the time, and limiting
        resource, as text.
        """
        return "\n".join(_format_operations(self.estimates)).lstrip("\n")

    @property
    def data(self) -> dict[str, Any]:
        """The report as plain values: {"version", "device", "workload", "rows"}."""
        workload = asdict(self.estimates[0].workload) if self.estimates else {"device": None}
        return {
            "version": FORMAT_VERSION,
            "device": workload["device"],
            "workload": workload,
            "rows": [estimate.data for estimate in self.estimates],
        }


def cost(
    spec_or_model: SpecOrModel | Mapping[str, SpecOrModel], workload: Workload | None = None
) -> CostReport:
    """Estimate the cost of layers and models before they run; no module is built.

    Pass one spec or model, or several by name, and a workload (default: one row of 2,048 tokens in
    bf16, or of the maximum length that all of them support if that is less).

    >>> import headwise as hw
    >>> specs = {name: hw.design(preset=name, model=4096, heads=32) for name in ("gqa", "mla")}
    >>> {
    ...     estimate.name: estimate.data["kv_bytes_per_token"]
    ...     for estimate in cost(specs, hw.Workload(context=8192))
    ... }
    {'gqa': 4096, 'mla': 1152}
    """
    named: Any = spec_or_model
    if isinstance(spec_or_model, AttentionSpec | ModelSpec):
        named = {
            spec_or_model.name if isinstance(spec_or_model, ModelSpec) else "spec": spec_or_model
        }
    is_valid = isinstance(named, Mapping) and all(
        isinstance(spec, AttentionSpec | ModelSpec) for spec in named.values()
    )
    if not is_valid or not named:
        remedy = "give a spec or a model, or specs by name as in {'gqa': hw.design(...)}"
        raise SpecError(f"cannot estimate the cost of {spec_or_model!r}; {remedy}")
    workload = (workload or Workload()).fitted_to(named.values())
    return CostReport(tuple(estimate_cost(spec, workload, name) for name, spec in named.items()))


def _format_table(estimates: Sequence[CostEstimate]) -> list[str]:
    """Lines of the table; estimates that do not fit side by side into a terminal follow below."""
    lines = _format_header(estimates)
    rows = [
        (name, cell)
        for name, cell in TABLE_ROWS
        if name not in OPTIONAL_ROWS or any(cell(estimate) != "-" for estimate in estimates)
    ]
    max_columns = (TERMINAL_WIDTH - NAME_WIDTH) // COLUMN_WIDTH
    for start in range(0, len(estimates), max_columns):
        group = estimates[start : start + max_columns]
        width = COLUMN_WIDTH
        if len(estimates) < max_columns:
            width = min((TERMINAL_WIDTH - NAME_WIDTH) // len(group), 2 * COLUMN_WIDTH)
        lines += ["", _format_row("", [estimate.name[-width + 1 :] for estimate in group], width)]
        lines += [
            _format_row(name.rstrip("."), [cell(estimate) for estimate in group], width)
            for name, cell in rows
        ]
    lines.append("")
    notes = [f"{estimate.name}: {note}" for estimate in estimates for note in _list_notes(estimate)]
    for note in notes:
        lines += wrap(note)
    if notes:
        lines.append("")
    return lines + wrap(FOOTNOTE)


def _list_notes(estimate: CostEstimate) -> Iterator[str]:
    """Yield the notes of an estimate, and one if the device cannot hold the
    larger of its phases.
    """
    shortfalls = [
        shortfall for phase in estimate.operations if (shortfall := estimate.shortfall(phase))
    ]
    yield from estimate.notes
    yield from (str(shortfall) for shortfall in shortfalls[-1:])


def _format_header(estimates: Sequence[CostEstimate]) -> list[str]:
    """Lines that describe the workload, and the models if there are any."""
    workload = estimates[0].workload
    rows, tokens = pluralise(workload.batch, "row"), pluralise(workload.context, "token")
    tokens += f" and {workload.generate:,} generated" if workload.generate else ""
    header = (
        f"{rows} of {tokens}, {workload.dtype}, {Device.from_name(workload.device).description}"
    )
    if all(isinstance(estimate.spec_or_model, AttentionSpec) for estimate in estimates):
        return wrap(f"one layer, {header}")
    lines = wrap(header)
    for estimate in estimates:
        lines += wrap(f"{estimate.name}: {_describe_estimate(estimate)}")
    return lines


def _describe_estimate(estimate: CostEstimate) -> str:
    if isinstance(estimate.spec_or_model, AttentionSpec):
        return "one layer"
    model, call = estimate.spec_or_model, estimate.full_call
    layers = " + ".join(str(len(stack.layers)) for stack in model.stacks)
    tokens = f", {call.tokens:,} tokens per image" if image_tokens(model)[-1] else ""
    source = f", {call.source:,} source tokens" if len(model.stacks) > 1 else ""
    return f"{model.kind} of {layers} {'layer' if layers == '1' else 'layers'}{tokens}{source}"


Cell = Callable[[CostEstimate], str]


def _flops_rows(call: str) -> Iterator[tuple[str, Cell]]:
    """The FLOP rows of one call: required, executed, counted."""
    labels = {
        "required_flops": f"{call}, FLOPs required",
        "executed_flops": "  executed" + "." * len(call),
        "counted_flops": "  counted" + "." * len(call),
    }
    for attribute, label in labels.items():

        def cell(estimate: CostEstimate, attribute: str = attribute) -> str:
            number = getattr(estimate, attribute).get(call)
            return "-" if number is None else format_count(number)

        yield label, cell


def _time_rows(phase: str) -> Iterator[tuple[str, Cell]]:
    """The rows of the time that a phase takes."""

    def seconds(estimate: CostEstimate) -> str:
        time = estimate.seconds(phase) if phase in estimate.operations else math.inf
        return "too large" if time is None else "-" if time == math.inf else format_seconds(time)

    def bound(estimate: CostEstimate) -> str:
        is_timed = phase in estimate.operations and estimate.shortfall(phase) is None
        return estimate.total_operation(phase).bound if is_timed else "-"

    yield f"{phase}, least time", seconds
    yield "  bound by" + "." * len(phase), bound


def _cache_per_token_cell(estimate: CostEstimate) -> str:
    if not estimate.has_cache:
        return "-"
    if estimate.cache_bytes_per_token is None and estimate.cache_numbers.terms:
        return "a state"
    return format_count(estimate.cache_bytes_per_token or 0)


def _active_cell(estimate: CostEstimate, number: int) -> str:
    return "-" if estimate.active_parameters == estimate.parameters.total else format_count(number)


# Trailing dots distinguish rows with equal labels and are not printed.
TABLE_ROWS: list[tuple[str, Cell]] = [
    ("parameters", lambda estimate: format_count(estimate.parameters.total)),
    ("  active per token", lambda estimate: _active_cell(estimate, estimate.active_parameters)),
    (
        "    without embeddings",
        lambda estimate: _active_cell(estimate, estimate.active_parameters_without_embeddings),
    ),
    ("weights, bytes", lambda estimate: format_count(estimate.weights_bytes)),
    *(row for call in ("prefill", "backward", "decode", "generate") for row in _flops_rows(call)),
    ("cache, bytes per token", _cache_per_token_cell),
    (
        "  per source token",
        lambda estimate: (
            format_count(estimate.source_cache_bytes_per_token)
            if estimate.source_cache_bytes_per_token
            else "-"
        ),
    ),
    (
        "cache, total bytes",
        lambda estimate: format_count(estimate.cache_bytes) if estimate.has_cache else "-",
    ),
    *(row for phase in ("prefill", "decode") for row in _time_rows(phase)),
    (
        "  core, FLOPs per byte",
        lambda estimate: (
            f"{estimate.core_operation.intensity:.1f}" if estimate.decode_flops else "-"
        ),
    ),
    (
        "  core bound by",
        lambda estimate: estimate.core_operation.bound if estimate.decode_flops else "-",
    ),
]
# Rows that are left out if no estimate has the number.
OPTIONAL_ROWS = {name for name, _ in [*TABLE_ROWS[1:3], *_flops_rows("generate")]} | {
    "  per source token"
}
FOOTNOTE = (
    "FLOPs required: of allowed query-key pairs only; executed: by the backend that the layer "
    "would choose; counted: "
    "by torch's FlopCounterMode, all pairs. Times are lower bounds: peak FLOP/s or bandwidth, "
    "fully overlapped. "
    "k, M, G, T, P are powers of 1000."
)


def _format_operations(estimates: Sequence[CostEstimate]) -> Iterator[str]:
    """Lines of one table for each estimate and phase."""
    headers = ("FLOPs", "bytes", "FLOPs/byte", "least time", "bound by")
    for estimate in estimates:
        for phase, operations in estimate.operations.items():
            title = f"{estimate.name}: {CALL_LABELS[phase]}"
            yield ""
            yield pad(title, NAME_WIDTH) + "".join(
                pad_left(header, COLUMN_WIDTH) for header in headers
            )
            for operation in (*operations, estimate.total_operation(phase)):
                label = "total" if operation.name == phase else operation.name
                is_untimed = operation.name == phase and estimate.shortfall(phase) is not None
                cells = [
                    format_count(operation.flops),
                    format_count(operation.moved),
                    f"{operation.intensity:.1f}",
                    "too large" if is_untimed else format_seconds(operation.seconds),
                    operation.bound,
                ]
                yield _format_row(f"  {label}", cells, COLUMN_WIDTH)


TERMS_LEGEND = (
    "In formulas: B rows, T queries, S keys that a row attends to, new tokens whose keys and "
    "values are computed, "
    "pairs of a query and a key that the pattern allows in a row; other names are sizes of the "
    "spec, such as q and dim."
)


def _format_terms(estimates: Sequence[CostEstimate]) -> list[str]:
    """Lines with the legend, and every term of every breakdown."""
    lines = wrap(TERMS_LEGEND)
    for estimate in estimates:
        breakdowns = {
            "parameters": estimate.parameters,
            **{
                f"{CALL_LABELS[call]} FLOPs": breakdown
                for call, breakdown in estimate.flops_by_call.items()
            },
            "cached values per token": estimate.cache_numbers,
            "cached values per source token": estimate.source_cache_numbers,
        }
        for name, breakdown in breakdowns.items():
            if not breakdown.terms:
                continue
            lines += ["", f"{estimate.name}: {name}, {breakdown.total:,}"]
            for term in breakdown.terms:
                lines += wrap(
                    f"{term.name} = {term.formula} = {term.value:,}",
                    TERMINAL_WIDTH - 2,
                    indent="  ",
                    hanging="      ",
                )
    return lines


def format_count(number: int) -> str:
    """Format a whole number with three significant digits or more and a unit prefix.

    >>> (
    ...     format_count(67108864),
    ...     format_count(999),
    ...     format_count(2 * 10**15),
    ...     format_count(2345 * 10**27),
    ... )
    ('67.11 M', '999', '2.00 P', '2.34e30')
    """
    if number < 10_000:
        return f"{number:,}"
    digits = str(number)
    power = (len(digits) - 1) // 3
    if power >= len(UNIT_PREFIXES):
        return f"{digits[0]}.{digits[1:3]}e{len(digits) - 1}"
    return f"{number / 1000**power:.2f} {UNIT_PREFIXES[power]}"


def format_seconds(seconds: float) -> str:
    """Format a time with a suitable unit.

    >>> format_seconds(0.00012), format_seconds(3.5)
    ('120.0 us', '3.50 s')
    """
    for scale, unit, digits in ((1.0, "s", 2), (1e-3, "ms", 1), (1e-6, "us", 1)):
        if seconds >= scale:
            return f"{seconds / scale:.{digits}f} {unit}"
    return f"{seconds / 1e-9:.1f} ns"


def _format_row(name: str, cells: Sequence[str], width: int) -> str:
    return (pad(name, NAME_WIDTH) + "".join(pad_left(cell, width) for cell in cells)).rstrip()

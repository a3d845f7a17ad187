"""What a layer or a model costs before it runs: items, bytes, and seconds at least on a machine."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, suggest
from ..model_spec import ModelSpec
from ..spec.attention_spec import AttentionSpec
from . import cache_bytes
from .flops import (
    AttentionComponent,
    CostBreakdown,
    ExecutionTarget,
    ForwardCall,
    ModelComponent,
    SpecOrModel,
    active_parameters,
    cached_numbers,
    list_components,
    parameter_terms,
)
from .roofline import Device, RooflineOperation, dtype_bytes, list_operations, merge_operations
from .symbolic_int import SymbolicInt
from .training_memory import ActivationSettings, activation_memory
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
            return activation_memory(
                self.spec_or_model, self.workload, ActivationSettings(source=self.workload.source)
            ).total
        except SpecError:
            return None

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        bills = {
            "parameters": self.parameters,
            **self.flops_by_call,
            "cache": self.cache_numbers,
            "source_cache": self.source_cache_numbers,
        }
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
    >>> gqa.cache_numbers.total * 2, gqa.operations["decode"][1].intensity  # bytes a token; 4 heads read each key
    (4096, 3.9995117783473697)
    """
    every = list_components(spec_or_model)
    calls = list_calls(spec_or_model, every, workload, name)
    readers = [
        piece
        for piece in every
        if isinstance(piece, AttentionComponent) and not piece.before_last_stack and "decode" in calls
    ]
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
        cache_bytes_per_token=_cache_numbers_of(piece for piece in own if not piece.spec.is_recurrent).total
        * dtype_bytes(workload.dtype)
        or None,
        cache_bytes=_cache_bytes_of(own, workload, workload.cached_tokens)
        + _cache_bytes_of(told, workload, prefill[1].source),
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
    return CostBreakdown.from_repeated_items(
        (_qualified_name(p.name, one.name), one.flops, p.times) for p in some for one in p.required_products(call)
    )


def _gradient_breakdown(some: Iterable[ModelComponent], call: ForwardCall) -> CostBreakdown:
    """What its gradients ask for: of each product as many as factors that have one."""
    products = ((piece, one) for piece in some for one in piece.required_products(call))
    return CostBreakdown.from_repeated_items(
        (_qualified_name(p.name, one.name), one.num_grad_factors * one.flops, p.times) for p, one in products
    )


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
        piece.times * cache_bytes(piece.spec, batch=load.batch, capacity=tokens, bytes_per_number=each)
        for piece in some
    )


# --- What several layers cost, side by side ------------------------------------------------------------

TERMINAL_WIDTH = 80  # columns of a terminal
NAME_WIDTH, COLUMN_WIDTH = 25, 11  # characters of a row's name, and of each spec's number
CALL_LABELS = {
    "prefill": "prefill",
    "backward": "gradients",
    "decode": "a step",
    "prompt": "the prompt",
    "steps": "steps",
}
UNIT_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
FORMAT_VERSION = 1  # of the JSON document


@dataclass(frozen=True)
class CostReport:
    """Prices under one load, in order; printed, they stand side by side."""

    estimates: tuple[CostEstimate, ...]

    def __iter__(self) -> Iterator[CostEstimate]:
        return iter(self.estimates)

    def __getitem__(self, name: str) -> CostEstimate:
        named = {price.name: price for price in self.estimates}
        if name not in named:
            raise SpecError(f"nothing named {name!r} was priced; {suggest(name, named)}")
        return named[name]

    def __str__(self) -> str:
        return "\n".join(_format_table(self.estimates))

    @property
    def terms(self) -> str:
        """Every item of every bill, with the formula that computed it."""
        return "\n".join(_format_terms(self.estimates)).lstrip("\n")

    @property
    def operations(self) -> str:
        """Every operation: what it computes and moves, how long that takes at least, and what it waits for."""
        return "\n".join(_format_operations(self.estimates)).lstrip("\n")

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values: {"version", "device", "load", "rows"}."""
        load = vars(self.estimates[0].workload) if self.estimates else {"device": None}
        return {
            "version": FORMAT_VERSION,
            "device": load["device"],
            "load": load,
            "rows": [one.data for one in self.estimates],
        }


def cost(spec_or_model: SpecOrModel | Mapping[str, SpecOrModel], workload: Workload | None = None) -> CostReport:
    """What layers and models cost before they run; nothing is built.

    >>> import headwise as hw
    >>> told = cost({n: hw.design(preset=n, model=4096, heads=32) for n in ("gqa", "mla")}, hw.Workload(context=8192))
    >>> {estimate_cost.name: estimate_cost.data["kv_bytes_per_token"] for estimate_cost in told}
    {'gqa': 4096, 'mla': 1152}
    """
    named: Any = spec_or_model
    if isinstance(spec_or_model, AttentionSpec | ModelSpec):
        named = {spec_or_model.name if isinstance(spec_or_model, ModelSpec) else "spec": spec_or_model}
    known = isinstance(named, Mapping) and all(isinstance(one, AttentionSpec | ModelSpec) for one in named.values())
    if not known or not named:
        told = "give a spec or a model, or specs by name as in {'gqa': hw.design(...)}"
        raise SpecError(f"cost was given {spec_or_model!r}; {told}")
    return CostReport(tuple(estimate_cost(one, workload or Workload(), name) for name, one in named.items()))


def _format_table(prices: Sequence[CostEstimate]) -> list[str]:
    """What is priced side by side, as many as a terminal holds."""
    load, each = prices[0].workload, (TERMINAL_WIDTH - NAME_WIDTH) // COLUMN_WIDTH
    rows = "row" if load.batch == 1 else "rows"
    tokens = f"{load.context:,} tokens" + (f" and {load.generate:,} written" if load.generate else "")
    told = f"{load.batch:,} {rows} of {tokens}, {load.dtype}, {Device.from_name(load.device).description}"
    only = all(isinstance(one.spec_or_model, AttentionSpec) for one in prices)
    lines = textwrap.wrap(f"one layer, {told}" if only else told, TERMINAL_WIDTH)
    lines += [
        line
        for one in prices
        if not only
        for line in textwrap.wrap(f"{one.name}: {_describe_estimate(one)}", TERMINAL_WIDTH)
    ]
    cells = [
        (name, cell)
        for name, cell in TABLE_ROWS
        if name not in OPTIONAL_ROWS or any(cell(one) != "-" for one in prices)
    ]
    for start in range(0, len(prices), each):
        some = prices[start : start + each]
        wide = min((TERMINAL_WIDTH - NAME_WIDTH) // len(some), 2 * COLUMN_WIDTH) if len(prices) < each else COLUMN_WIDTH
        lines += ["", _format_row("", [one.name[-wide + 1 :] for one in some], wide)]
        lines += [_format_row(name.rstrip("."), [cell(one) for one in some], wide) for name, cell in cells]
    notes = [f"{one.name}: {note}" for one in prices for note in one.notes]
    said = [
        [],
        *(textwrap.wrap(note, TERMINAL_WIDTH) for note in notes),
        *([[]] if notes else []),
        textwrap.wrap(FOOTNOTE, TERMINAL_WIDTH),
    ]
    return [*lines, *(line for told in said for line in told or [""])]


def _describe_estimate(one: CostEstimate) -> str:
    """What a price is of, in a few words."""
    if isinstance(one.spec_or_model, AttentionSpec):
        return "one layer"
    model, call = one.spec_or_model, one.full_call
    layers = " + ".join(str(len(stack.layers)) for stack in model.stacks)
    tokens = f", {call.tokens:,} tokens an image" if image_tokens(model)[-1] else ""
    source = f", {call.source:,} tokens of a source" if len(model.stacks) > 1 else ""
    return f"{model.kind} of {layers} {'layer' if layers == '1' else 'layers'}{tokens}{source}"


Cell = Callable[[CostEstimate], str]


def _flops_rows(call: str) -> Iterator[tuple[str, Cell]]:
    """The FLOP rows of one call: required, executed, counted."""
    name = {"prefill": "prefill", "backward": "backward", "decode": "a step", "generate": "writing"}[call]
    ways = {"FLOP required": "required_flops", "  executed": "executed_flops", "  counted": "counted_flops"}
    for told, way in ways.items():

        def cell(one: CostEstimate, way: str = way) -> str:
            number = getattr(one, way).get(call)
            return "-" if number is None else format_count(number)

        yield (f"{name}, {told}" if way == "required_flops" else told + "." * len(call)), cell


def _time_rows(phase: str) -> Iterator[tuple[str, Cell]]:
    """The rows of the time that a phase takes."""
    name = {"prefill": "prefill", "decode": "a step"}[phase]
    yield f"{name}, seconds", lambda one: format_seconds(one.seconds(phase)) if phase in one.operations else "-"
    yield (
        "  waits for" + "." * len(phase),
        lambda one: one.total_operation(phase).bound if phase in one.operations else "-",
    )


def _cache_per_token_cell(one: CostEstimate) -> str:
    told = one.cache_bytes_per_token
    return (
        "-"
        if one.decode_flops is None
        else "a state"
        if told is None and one.cache_numbers.terms
        else format_count(told or 0)
    )


# The dots at the end of a name tell rows of one name apart, and are not shown.
TABLE_ROWS: list[tuple[str, Cell]] = [
    ("parameters", lambda one: format_count(one.parameters.total)),
    (
        "  met by a token",
        lambda one: format_count(one.active_parameters) if one.active_parameters != one.parameters.total else "-",
    ),
    ("weights, bytes", lambda one: format_count(one.weights_bytes)),
    *(row for call in ("prefill", "backward", "decode", "generate") for row in _flops_rows(call)),
    ("cache, bytes a token", _cache_per_token_cell),
    (
        "  a token of the source",
        lambda one: format_count(one.source_cache_bytes_per_token) if one.source_cache_bytes_per_token else "-",
    ),
    ("cache, bytes in all", lambda one: format_count(one.cache_bytes) if one.decode_flops else "-"),
    *(row for phase in ("prefill", "decode") for row in _time_rows(phase)),
    ("its core, FLOP/byte", lambda one: f"{one.core_operation.intensity:.1f}" if one.decode_flops else "-"),
    ("  waits for", lambda one: one.core_operation.bound if one.decode_flops else "-"),
]
OPTIONAL_ROWS = {name for name, _ in [TABLE_ROWS[1], *_flops_rows("generate")]} | {"  a token of the source"}
FOOTNOTE = (
    "Asked: allowed pairs only; spent: by the backend that runs it; counted: by torch, every pair. Times are lower "
    "bounds: products and memory at their largest, overlapping. k, M, G, T, P are powers of 1000."
)


def _format_operations(prices: Sequence[CostEstimate]) -> Iterator[str]:
    """Every operation of every phase."""
    heads = ("FLOP", "bytes", "FLOP/byte", "at least", "waits for")
    for one in prices:
        for phase, every in one.operations.items():
            name = {"prefill": "all tokens", "decode": "a step"}[phase]
            yield from (
                "",
                f"{one.name}: {name}".ljust(NAME_WIDTH) + "".join(head.rjust(COLUMN_WIDTH) for head in heads),
            )
            for each in (*every, one.total_operation(phase)):
                told = "together" if each.name == phase else each.name
                numbers = (
                    format_count(each.flops),
                    format_count(each.moved),
                    f"{each.intensity:.1f}",
                    format_seconds(each.seconds),
                )
                yield _format_row(f"  {told}", [*numbers, each.bound], COLUMN_WIDTH)


def _format_terms(prices: Sequence[CostEstimate]) -> list[str]:
    """Every item of every bill."""
    lines: list[str] = []
    for one in prices:
        bills = {"parameters": one.parameters, **{CALL_LABELS[name]: bill for name, bill in one.flops_by_call.items()}}
        bills |= {
            "cache, numbers a token": one.cache_numbers,
            "cache, numbers a token of the source": one.source_cache_numbers,
        }
        for name, bill in ((name, bill) for name, bill in bills.items() if bill.terms):
            lines += ["", f"{one.name}: {name}, {bill.total:,}"]
            for term in bill.terms:
                lines += textwrap.wrap(
                    f"{term.name} = {term.formula} = {term.value:,}",
                    TERMINAL_WIDTH - 2,
                    initial_indent="  ",
                    subsequent_indent="      ",
                )
    return lines


def format_count(number: int) -> str:
    """A whole number in a few characters.

    >>> format_count(67108864), format_count(999), format_count(2 * 10**15), format_count(2345 * 10**27)
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
    """Seconds in a few characters.

    >>> format_seconds(0.00012), format_seconds(3.5)
    ('120.0 us', '3.50 s')
    """
    for scale, unit, digits in ((1.0, "s", 2), (1e-3, "ms", 1), (1e-6, "us", 1)):
        if seconds >= scale:
            return f"{seconds / scale:.{digits}f} {unit}"
    return f"{seconds / 1e-9:.1f} ns"


def _format_row(name: str, cells: Sequence[str], wide: int) -> str:
    return (name.ljust(NAME_WIDTH) + "".join(cell.rjust(wide) for cell in cells)).rstrip()


# --- Rows of plain values as a sheet -------------------------------------------------------------------


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for each row under the names of all that is a single value, as RFC 4180 has it.

    What stands inside a table is named with a dot; lists are left out; nothing stands where a row has no such value.

    >>> to_csv([{"name": "a, b", "flops": {"prefill": 2**70}, "terms": []}, {"name": "c", "bound": None}]).split(
    ...     "\\r\\n"
    ... )
    ['name,flops.prefill,bound', '"a, b",1180591620717411303424,', 'c,,', '']
    """
    flat = [dict(_flatten_values("", row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    written = io.StringIO()
    writer = csv.DictWriter(written, names, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def _flatten_values(inside: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten_values(f"{inside}{key}.", value)
        elif not isinstance(value, list | tuple):
            yield inside + key, value

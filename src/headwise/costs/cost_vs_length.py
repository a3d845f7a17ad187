"""Cost as a function of the context length, and the lengths at which one spec is cheaper than
another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import SpecError
from ..masking.patterns import Pattern
from ..translation.terminal_text import pad, wrap
from . import cache_bytes
from .flops import AttentionComponent, SpecOrModel, list_components
from .roofline import Device, ExecutionFormats, dtype_bytes, list_operations
from .workload import CallsByPhase, Workload, list_calls, max_lengths

MAX_TOKENS = 2**40
MAX_PATTERN_TOKENS = (
    2**14
)  # limit for patterns whose number of row segments grows with the length, such as blocks


class LengthCost(NamedTuple):
    """Cost at one length: of prefill, of the decode step for its last token, and of the cache.

    Specs that are not causal have no decode step and no cache.
    """

    prefill_flops: int
    step_flops: int | None
    cache_bytes: int | None
    prefill_seconds: float
    step_seconds: float | None


# Labels of the fields of LengthCost in printed tables.
QUANTITY_LABELS = {
    "prefill_flops": "prefill FLOPs",
    "step_flops": "decode FLOPs",
    "cache_bytes": "cache bytes",
    "prefill_seconds": "prefill time",
    "step_seconds": "decode time",
}


@dataclass(frozen=True)
class CostByLength:
    """Costs of several specs or models by length, under one workload; results are cached.

    >>> import headwise as hw
    >>> along = CostByLength({"gqa": hw.design(preset="gqa", model=4096, heads=32)}, Workload())
    >>> [along.at("gqa", tokens).cache_bytes for tokens in (1, 1000)]
    [4096, 4096000]
    """

    specs: Mapping[str, SpecOrModel]
    workload: Workload
    cached: dict[tuple[str, int], LengthCost] = field(
        default_factory=dict[tuple[str, int], LengthCost], compare=False
    )

    def at(self, name: str, tokens: int) -> LengthCost:
        """Return the cost of one spec at this length."""
        if (name, tokens) not in self.cached:
            self.cached[name, tokens] = cost_at_length(
                self.specs[name], replace(self.workload, context=tokens)
            )
        return self.cached[name, tokens]

    def max_length(self, *names: str) -> int:
        """Return the greatest length that all of these specs support."""
        return min(_max_length(self.specs[name]) for name in names)


def cost_at_length(spec_or_model: SpecOrModel, workload: Workload) -> LengthCost:
    """Return the totals of one spec or model under a workload.

    >>> import headwise as hw
    >>> cost_at_length(
    ...     hw.design(model=8, heads=2), Workload(context=4)
    ... ).prefill_flops == 8 * 4 * 8**2 + 4 * 4**2 * 8
    True
    """
    calls = _calls_of_workload(spec_or_model, workload)
    formats = ExecutionFormats(
        Device.from_name(workload.device), workload.dtype, workload.storage(spec_or_model)
    )
    operations = {phase: list_operations(*calls[phase], formats) for phase in calls}
    flops = {phase: sum(operation.flops for operation in operations[phase]) for phase in calls}
    seconds = {phase: sum(operation.seconds for operation in operations[phase]) for phase in calls}
    return LengthCost(
        flops["prefill"],
        flops.get("decode"),
        _cached_bytes_of_calls(calls, workload),
        seconds["prefill"],
        seconds.get("decode"),
    )


def prefill_flops(spec_or_model: SpecOrModel, workload: Workload) -> int:
    """Required FLOPs of a forward pass over all tokens."""
    components, call = _calls_of_workload(spec_or_model, workload)["prefill"]
    return sum(
        component.times * product.flops
        for component in components
        for product in component.required_products(call)
    )


def cached_bytes(spec_or_model: SpecOrModel, workload: Workload) -> int | None:
    """Bytes of the cache for all tokens and those of a source; None for a spec
    that is not causal.
    """
    return _cached_bytes_of_calls(_calls_of_workload(spec_or_model, workload), workload)


def _calls_of_workload(spec_or_model: SpecOrModel, workload: Workload) -> CallsByPhase:
    return list_calls(
        spec_or_model, list_components(spec_or_model), replace(workload, generate=0), ""
    )


def _cached_bytes_of_calls(calls: CallsByPhase, workload: Workload) -> int | None:
    if "decode" not in calls:
        return None
    tokens = {"attention": workload.context, "cross": calls["prefill"][1].source}
    number_bytes = dtype_bytes(workload.dtype)
    total = 0
    for component in calls["decode"][0]:
        if isinstance(component, AttentionComponent):
            total += component.times * cache_bytes(
                component.spec,
                batch=workload.batch,
                capacity=tokens[component.role],
                bytes_per_number=number_bytes,
            )
    return total


def _max_length(spec_or_model: SpecOrModel) -> int:
    patterns = [
        component.spec.pattern
        for component in list_components(spec_or_model)
        if isinstance(component, AttentionComponent)
    ]
    grows = any(
        _num_pattern_lines(pattern, 1024) > _num_pattern_lines(pattern, 512) for pattern in patterns
    )
    return min(
        MAX_PATTERN_TOKENS if grows else MAX_TOKENS, max_lengths(spec_or_model).own or MAX_TOKENS
    )


def _num_pattern_lines(pattern: Pattern, tokens: int) -> int:
    return sum(map(len, pattern.lines(range(tokens), range(tokens))))


# --- Crossovers: the lengths at which one spec costs less than another ----------------------------

NEAR_LENGTHS = (
    16  # all lengths up to this are evaluated, then only powers of two and those halfway between
)
RELATIVE_TOLERANCE = (
    1e-12  # times are sums of rounded quotients: a smaller relative difference counts as equal
)
MAX_RANGES_SHOWN = 3  # ranges that are printed; more are only counted


class LengthRange(NamedTuple):
    """A range of lengths, both ends included; `last` is None if no end was found."""

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first:,} on"
        return (
            f"at {self.first:,}"
            if self.first == self.last
            else f"from {self.first:,} to {self.last:,}"
        )


@dataclass(frozen=True)
class Crossover:
    """The lengths, up to `checked_up_to`, at which `name` costs less than `baseline` in one
    quantity.

    `differs` is whether the two ever differ; None if one of them has no such quantity.
    """

    name: str
    baseline: str
    quantity: str
    ranges: tuple[LengthRange, ...]
    differs: bool | None
    checked_up_to: int

    def __str__(self) -> str:
        if self.differs is None:
            return "-"
        if not self.ranges:
            return "never" if self.differs else "never: equal"
        if self.ranges == (LengthRange(1, None),):
            return "always"
        more = len(self.ranges) - MAX_RANGES_SHOWN
        text = ", ".join(map(str, self.ranges[:MAX_RANGES_SHOWN])) + (
            f", and {more} more ranges" if more > 0 else ""
        )
        return text.replace("from 1 to", "up to")

    @property
    def data(self) -> dict[str, Any]:
        """The crossover as plain values."""
        return {
            "name": self.name,
            "against": self.baseline,
            "quantity": self.quantity,
            "checked_up_to": self.checked_up_to,
            "cheaper": None
            if self.differs is None
            else [length_range._asdict() for length_range in self.ranges],
            "summary": str(self),
        }


@dataclass(frozen=True)
class CrossoverReport:
    """The lengths at which each of several specs costs less than the first,
    quantity by quantity.
    """

    workload: Workload
    crossovers: tuple[Crossover, ...]

    def __str__(self) -> str:
        workload, first = self.workload, self.crossovers[0].baseline
        rows = "row" if workload.batch == 1 else "rows"
        lines = [f"Lengths at which each costs less than {first}"]
        lines += wrap(
            f"{workload.batch:,} {rows}, {workload.dtype}, "
            f"{Device.from_name(workload.device).description}"
        )
        for name in dict.fromkeys(crossover.name for crossover in self.crossovers):
            crossovers = [crossover for crossover in self.crossovers if crossover.name == name]
            lines += [
                "",
                f"{name} (checked up to {crossovers[0].checked_up_to:,} tokens)",
            ]
            lines += [
                pad(f"  {QUANTITY_LABELS[one.quantity]}", 22) + str(one) for one in crossovers
            ]
        return "\n".join(lines)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The crossovers as plain values."""
        return [crossover.data for crossover in self.crossovers]


def find_crossovers(
    specs: Mapping[str, SpecOrModel], workload: Workload | None = None
) -> CrossoverReport:
    """Find the lengths at which each spec costs less than the first: FLOPs, cache bytes, and least
    time on the device.

    The search compares all lengths up to 16, then powers of two and the lengths halfway between,
    and bisects every change to the token. It misses two changes between the same two neighbours.

    >>> import headwise as hw
    >>> specs = {
    ...     name: hw.design(preset=name, model=4096, heads=32) for name in ("gqa", "mla", "linear")
    ... }
    >>> {
    ...     row.name: str(row)
    ...     for row in find_crossovers(specs).crossovers
    ...     if row.quantity == "cache_bytes"
    ... }
    {'mla': 'always', 'linear': 'from 517 on'}
    """
    by_name = specs if isinstance(specs, Mapping) else {f"{specs!r}"[:40]: specs}
    if len(by_name) < 2:
        names = ", ".join(by_name) or "nothing"
        raise SpecError(
            f"cannot find crossovers of {names}: it takes two specs; give two or more by name"
        )
    costs = CostByLength(specs, (workload or Workload()).fitted_to(specs.values()))
    baseline, *others = specs
    crossovers = [
        find_crossover(costs, name, baseline, quantity)
        for name in others
        for quantity in QUANTITY_LABELS
    ]
    return CrossoverReport(costs.workload, tuple(crossovers))


def find_crossover(
    costs: CostByLength, name: str, baseline: str, quantity: str, max_length: int = MAX_TOKENS
) -> Crossover:
    """Find the lengths, up to `max_length`, at which one spec costs less than another in one
    quantity.
    """
    max_length = min(max_length, costs.max_length(name, baseline))

    def saving(tokens: int) -> float:
        """How much less `name` costs than `baseline`."""
        own, other = (
            getattr(costs.at(spec_name, tokens), quantity) for spec_name in (name, baseline)
        )
        return (
            0
            if type(own) is float and math.isclose(own, other, rel_tol=RELATIVE_TOLERANCE)
            else other - own
        )

    if None in (getattr(costs.at(spec_name, 1), quantity) for spec_name in (name, baseline)):
        return Crossover(name, baseline, quantity, (), None, max_length)
    differs = any(saving(tokens) for tokens in _sampled_lengths(max_length))
    ranges = find_ranges(lambda tokens: saving(tokens) > 0, max_length)
    return Crossover(name, baseline, quantity, ranges, differs, max_length)


def find_ranges(holds: Callable[[int], bool], max_length: int) -> tuple[LengthRange, ...]:
    """Find the ranges of lengths, up to `max_length`, at which a condition holds.

    >>> [
    ...     str(lengths)
    ...     for lengths in find_ranges(lambda tokens: tokens < 5 or tokens**2 > 10**9, 2**40)
    ... ]
    ['from 1 to 4', 'from 31,623 on']
    """
    return tuple(
        _ranges_from_samples(
            holds, {tokens: holds(tokens) for tokens in _sampled_lengths(max_length)}
        )
    )


def _sampled_lengths(max_length: int) -> Iterator[int]:
    """All lengths up to NEAR_LENGTHS, then those of `bisection_lengths`."""
    yield from range(1, min(NEAR_LENGTHS, max_length))
    yield from bisection_lengths(NEAR_LENGTHS, max_length)


def bisection_lengths(first: int, max_length: int) -> Iterator[int]:
    """Yield `first` times each power of two, the lengths halfway between two of these, and at last
    `max_length`.

    >>> list(bisection_lengths(16, 50))
    [16, 24, 32, 48, 50]
    """
    size = first
    while size < max_length:
        yield size
        if 3 * size // 2 < max_length:
            yield 3 * size // 2
        size *= 2
    yield max_length


def _ranges_from_samples(
    holds: Callable[[int], bool], samples: Mapping[int, bool]
) -> Iterator[LengthRange]:
    """Yield the ranges at which a condition holds; between two samples that differ, the change is
    bisected.
    """
    start = 1 if samples[1] else None
    for low, high in pairwise(samples):
        if samples[low] == samples[high]:
            continue
        change = _bisect_change(holds, low, high, samples[high])
        if samples[high]:
            start = change
        elif start is not None:
            yield LengthRange(start, change - 1)
            start = None
    if start is not None:
        yield LengthRange(start, None)


def _bisect_change(holds: Callable[[int], bool], low: int, high: int, value_at_high: bool) -> int:
    """Return the first length after `low` at which the condition has the value that it has at
    `high`.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle) == value_at_high:
            high = middle
        else:
            low = middle
    return high

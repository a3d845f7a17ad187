"""What a layer or a model costs at one length after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import SpecError
from ..masking.patterns import Pattern
from . import cache_bytes
from .flops import AttentionComponent, SpecOrModel, list_components
from .roofline import Device, dtype_bytes, list_operations
from .workload import PricedCalls, Workload, list_calls, max_lengths

MAX_TOKENS = 2**40  # tokens
MAX_PATTERN_TOKENS = (
    2**14
)  # tokens of a pattern whose ends of rows grow in number with the rows: it is counted end by end


class LengthCost(NamedTuple):
    """What one length costs: all tokens at once, one more behind the others, and what is remembered of them.

    What reads ahead writes no token alone, so that nothing is remembered of it.
    """

    prefill_flops: int
    step_flops: int | None
    cache_bytes: int | None
    prefill_seconds: float
    step_seconds: float | None


# How each quantity of a sample is called on paper.
QUANTITY_LABELS = {
    "prefill_flops": "prefill, FLOP",
    "step_flops": "a step, FLOP",
    "cache_bytes": "cache, bytes",
    "prefill_seconds": "prefill, seconds",
    "step_seconds": "a step, seconds",
}


@dataclass(frozen=True)
class CostByLength:
    """Descriptions by name under one load, at whatever length; nothing is worked out twice.

    >>> import headwise as hw
    >>> along = CostByLength({"gqa": hw.design(preset="gqa", model=4096, heads=32)}, Workload())
    >>> [along.at("gqa", tokens).cache_bytes for tokens in (1, 1000)]
    [4096, 4096000]
    """

    specs: Mapping[str, SpecOrModel]
    workload: Workload
    cached: dict[tuple[str, int], LengthCost] = field(default_factory=dict[tuple[str, int], LengthCost], compare=False)

    def at(self, name: str, tokens: int) -> LengthCost:
        """What it costs at this length."""
        if (name, tokens) not in self.cached:
            self.cached[name, tokens] = cost_at_length(self.specs[name], replace(self.workload, context=tokens))
        return self.cached[name, tokens]

    def max_length(self, *names: str) -> int:
        """The length up to which all of these can be asked."""
        return min(_max_length(self.specs[name]) for name in names)


def cost_at_length(spec_or_model: SpecOrModel, workload: Workload) -> LengthCost:
    """What a load costs, in its totals alone.

    >>> import headwise as hw
    >>> cost_at_length(hw.design(model=8, heads=2), Workload(context=4)).prefill_flops == 8 * 4 * 8**2 + 4 * 4**2 * 8
    True
    """
    calls = _calls_of_workload(spec_or_model, workload)
    ran = {phase: list_operations(*calls[phase], workload.dtype, workload.device) for phase in calls}
    flops = {phase: sum(one.flops for one in each) for phase, each in ran.items()}
    seconds = {phase: sum(one.seconds for one in each) for phase, each in ran.items()}
    return LengthCost(
        flops["prefill"],
        flops.get("decode"),
        _cached_bytes_of_calls(calls, workload),
        seconds["prefill"],
        seconds.get("decode"),
    )


def prefill_flops(spec_or_model: SpecOrModel, workload: Workload) -> int:
    """FLOPs of all tokens at once."""
    every, call = _calls_of_workload(spec_or_model, workload)["prefill"]
    return sum(piece.times * one.flops for piece in every for one in piece.required_products(call))


def cached_bytes(spec_or_model: SpecOrModel, workload: Workload) -> int | None:
    """Bytes held of all tokens, and of those of a source; None of what reads ahead, and so cannot go on from them."""
    return _cached_bytes_of_calls(_calls_of_workload(spec_or_model, workload), workload)


def _calls_of_workload(described: SpecOrModel, load: Workload) -> PricedCalls:
    return list_calls(described, list_components(described), replace(load, generate=0), "")


def _cached_bytes_of_calls(calls: PricedCalls, load: Workload) -> int | None:
    if "decode" not in calls:
        return None
    tokens = {"attention": load.context, "cross": calls["prefill"][1].source}
    each = dtype_bytes(load.dtype)
    readers = [piece for piece in calls["decode"][0] if isinstance(piece, AttentionComponent)]
    return sum(
        one.times * cache_bytes(one.spec, batch=load.batch, capacity=tokens[one.role], bytes_per_number=each)
        for one in readers
    )


def _max_length(described: SpecOrModel) -> int:
    readers = [piece for piece in list_components(described) if isinstance(piece, AttentionComponent)]
    grows = any(_pattern_lines(one.spec.pattern, 1024) > _pattern_lines(one.spec.pattern, 512) for one in readers)
    return min(MAX_PATTERN_TOKENS if grows else MAX_TOKENS, max_lengths(described).own or MAX_TOKENS)


def _pattern_lines(pattern: Pattern, tokens: int) -> int:
    return sum(map(len, pattern.lines(range(tokens), range(tokens))))


# --- From which length on a layer costs less than another ----------------------------------------------

NEAR_LENGTHS = 16  # lengths that are all looked at, before they are doubled
RELATIVE_TOLERANCE = 1e-12  # seconds are sums of rounded quotients: what is nearer than this share is equal
MAX_RANGES_SHOWN = 3  # spans of lengths that are told one by one


class LengthRange(NamedTuple):
    """Lengths one after another, both ends included; `last` is None where no end was found."""

    first: int
    last: int | None

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first:,} on"
        return f"at {self.first:,}" if self.first == self.last else f"from {self.first:,} to {self.last:,}"


@dataclass(frozen=True)
class Crossover:
    """The lengths at which one costs less than another in one quantity, as far as was looked.

    `unlike` says whether they ever differ; None where one of the two has no such quantity.
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
        told = ", ".join(map(str, self.ranges[:MAX_RANGES_SHOWN])) + (f", and {more} spans more" if more > 0 else "")
        return told.replace("from 1 to", "up to")

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        told = {
            "name": self.name,
            "against": self.baseline,
            "quantity": self.quantity,
            "checked_up_to": self.checked_up_to,
        }
        return told | {
            "cheaper": None if self.differs is None else [span._asdict() for span in self.ranges],
            "said": str(self),
        }


@dataclass(frozen=True)
class CrossoverReport:
    """Where each of several costs less than the first of them, quantity by quantity."""

    workload: Workload
    crossovers: tuple[Crossover, ...]

    def __str__(self) -> str:
        load, first = self.workload, self.crossovers[0].baseline
        rows = "row" if load.batch == 1 else "rows"
        lines = [f"Lengths at which each costs less than {first}"]
        lines += [f"{load.batch:,} {rows}, {load.dtype}, {Device.from_name(load.device).description}"]
        for name in dict.fromkeys(row.name for row in self.crossovers):
            mine = [row for row in self.crossovers if row.name == name]
            lines += ["", f"{name} (looked at up to {mine[0].checked_up_to:,} tokens)"]
            lines += [f"  {QUANTITY_LABELS[row.quantity]:<20}{row}" for row in mine]
        return "\n".join(lines)

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [row.data for row in self.crossovers]


def find_crossovers(specs: Mapping[str, SpecOrModel], workload: Workload | None = None) -> CrossoverReport:
    """The lengths at which each costs less than the first: FLOPs, cache, and seconds at least on the device.

    Every change is found to the token, between lengths that are doubled and their halves; of two changes between the
    same neighbours none is seen.

    >>> import headwise as hw
    >>> told = find_crossovers({n: hw.design(preset=n, model=4096, heads=32) for n in ("gqa", "mla", "linear")})
    >>> {row.name: str(row) for row in told.crossovers if row.quantity == "cache_bytes"}
    {'mla': 'always', 'linear': 'from 517 on'}
    """
    known = specs if isinstance(specs, Mapping) else {f"{specs!r}"[:40]: specs}
    if len(known) < 2:
        raise SpecError(f"{', '.join(known) or 'nothing'} has nothing to break even with; give two or more by name")
    along = CostByLength(specs, workload or Workload())
    first, *others = specs
    rows = [find_crossover(along, name, first, quantity) for name in others for quantity in QUANTITY_LABELS]
    return CrossoverReport(along.workload, tuple(rows))


def find_crossover(
    costs: CostByLength, name: str, baseline: str, quantity: str, max_length: int = MAX_TOKENS
) -> Crossover:
    """The lengths, up to `farthest`, at which one costs less than another in one quantity."""
    max_length = min(max_length, costs.max_length(name, baseline))

    def gain(tokens: int) -> float:
        """What one costs less than the other."""
        one, other = (getattr(costs.at(each, tokens), quantity) for each in (name, baseline))
        return 0 if type(one) is float and math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE) else other - one

    if None in (getattr(costs.at(each, 1), quantity) for each in (name, baseline)):
        return Crossover(name, baseline, quantity, (), None, max_length)
    unlike = any(gain(tokens) for tokens in _sampled_lengths(max_length))
    return Crossover(
        name, baseline, quantity, find_ranges(lambda tokens: gain(tokens) > 0, max_length), unlike, max_length
    )


def find_ranges(holds: Callable[[int], bool], max_length: int) -> tuple[LengthRange, ...]:
    """The lengths at which it holds, as far as was looked.

    >>> [str(span) for span in find_ranges(lambda tokens: tokens < 5 or tokens**2 > 10**9, 2**40)]
    ['from 1 to 4', 'from 31,623 on']
    """
    return tuple(_ranges_from_samples(holds, {tokens: holds(tokens) for tokens in _sampled_lengths(max_length)}))


def _sampled_lengths(farthest: int) -> Iterator[int]:
    """Every short length, then fewer and fewer."""
    yield from range(1, min(NEAR_LENGTHS, farthest))
    yield from bisection_lengths(NEAR_LENGTHS, farthest)


def bisection_lengths(first: int, max_length: int) -> Iterator[int]:
    """A length doubled again and again, and what lies halfway between two of these; then the last.

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


def _ranges_from_samples(holds: Callable[[int], bool], found: Mapping[int, bool]) -> Iterator[LengthRange]:
    """The lengths at which it holds, given where it was looked: between two that differ, the first like the second."""
    start = 1 if found[1] else None
    for low, high in pairwise(found):
        if found[low] == found[high]:
            continue
        change = _bisect_change(holds, low, high, found[high])
        if found[high]:
            start = change
        elif start is not None:
            yield LengthRange(start, change - 1)
            start = None
    if start is not None:
        yield LengthRange(start, None)


def _bisect_change(holds: Callable[[int], bool], low: int, high: int, after: bool) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) == after else (middle, high)
    return high

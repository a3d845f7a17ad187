"""Match the size of one spec to another: choose a dimension so that parameters, FLOPs or cache
bytes are nearest.

`SizeSearch` finds the size with the count nearest to a number; `match_size` applies it to a spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

from ..attention.interfaces import Modifier, Part
from ..attention.spec.attention_spec import SLOTS, AttentionSpec
from ..util.errors import SpecError, suggest
from . import count_parameters
from .cost_estimate import estimate_cost
from .workload import Workload

EXHAUSTIVE_SIZES = 192  # all sizes up to this are tried; above it a monotonic count is bisected
MAX_SEARCH_SIZE = 2**14  # all sizes up to this are tried if the count is not monotonic
MAX_DOUBLINGS = 256
# Doublings with equal counts, after which the count is taken not to depend on the size.
MAX_EQUAL_COUNTS = 6
# Places at which neighbouring counts are compared before a count is taken as monotonic.
NUM_MONOTONICITY_PROBES = 24


@dataclass
class SizeSearch:
    """Search for the size with a given count; `count(size)` is None for a size that is not valid.

    `start` is a valid size to begin from. After `gap` invalid sizes in a row, larger sizes are
    taken to be invalid.

    >>> squares = SizeSearch(lambda size: size**2 if size and size % 6 == 0 else None, start=6)
    >>> squares.nearest(10**6), squares.is_bracketed(10**6), len(squares.counts) < 500
    ((1002, 1004004), True, True)
    """

    count: Callable[[int], int | None]
    start: int
    gap: int = 64
    counts: dict[int, int | None] = field(default_factory=dict[int, "int | None"])

    def nearest(self, target: int) -> tuple[int, int]:
        """Return the size with the nearest count, and that count; of equal ones the size nearest to
        `start`.
        """
        top = self._upper_bound(target)
        if top <= EXHAUSTIVE_SIZES or not self._is_monotonic(top):
            if top > MAX_SEARCH_SIZE + self.gap:
                fact = f"the count is not monotonic, and {top} sizes are too many to try"
                raise SpecError(f"{fact}; start from a smaller size")
            for size in range(top + 1):
                self._at(size)
        else:
            self._bisect(target)
        return min(
            self.valid_counts,
            key=lambda pair: (abs(pair[1] - target), abs(pair[0] - self.start), pair[0]),
        )

    def is_bracketed(self, target: int) -> bool:
        """True if the counts found so far include values at or below and at or above the target."""
        counts = [count for _, count in self.valid_counts]
        return min(counts) <= target <= max(counts)

    @property
    def valid_counts(self) -> list[tuple[int, int]]:
        """The valid sizes that were tried, with their counts, in order of size."""
        return sorted((size, count) for size, count in self.counts.items() if count is not None)

    def _at(self, size: int) -> int | None:
        if size not in self.counts:
            self.counts[size] = self.count(size)
        return self.counts[size]

    def _first_valid(self, sizes: range) -> int | None:
        """Return the first valid size of a range."""
        return next((size for size in sizes if self._at(size) is not None), None)

    def _last_valid(self, size: int, end: int) -> int:
        """Return the greatest valid size below `end`, by bisection from a valid size."""
        while end - size > 1:
            middle = (size + end) // 2
            larger = self._first_valid(range(middle, min(middle + self.gap + 1, end)))
            if larger is None:
                end = middle
            else:
                size = larger
        return size

    def _upper_bound(self, target: int) -> int:
        """Return a size above which no count is nearer; found by doubling, which preserves
        divisibility by heads.
        """
        size = self.start
        num_equal = 0
        first_count = self._valid_count(size)
        for _ in range(MAX_DOUBLINGS if first_count != target else 0):
            larger = self._first_valid(range(2 * size, 2 * size + self.gap + 1))
            if larger is None:
                return self._last_valid(size, 2 * size)
            size = larger
            count = self._valid_count(size)
            num_equal = num_equal + 1 if count == first_count else 0
            moves_away = abs(count - target) > abs(first_count - target)
            is_bracketed = min(first_count, count) <= target <= max(first_count, count)
            if moves_away or num_equal == MAX_EQUAL_COUNTS or is_bracketed:
                break
        return size

    def _valid_count(self, size: int) -> int:
        count = self._at(size)
        if count is None:
            raise SpecError(
                f"cannot search from size {size}, which is not valid; start from a valid one"
            )
        return count

    def _is_monotonic(self, top: int) -> bool:
        """True if the count seems to only rise or only fall, from pairs of neighbours throughout
        the range.
        """
        for place in range(0, top, max(top // NUM_MONOTONICITY_PROBES, 1)):
            size = self._first_valid(range(place, min(place + self.gap, top)))
            if size is not None:
                self._first_valid(range(size + 1, min(size + self.gap, top)))
        counts = [count for _, count in self.valid_counts]
        directions = {after > before for before, after in pairwise(counts) if after != before}
        return len(directions) < 2

    def _bisect(self, target: int) -> None:
        """Bisect between two sizes with counts that bracket the target, until no valid size is left
        between them.
        """
        if not self.is_bracketed(target):
            return
        low, high = next(
            (size, next_size)
            for (size, count), (next_size, next_count) in pairwise(self.valid_counts)
            if min(count, next_count) <= target <= max(count, next_count)
        )
        is_rising = self._valid_count(low) <= self._valid_count(high)
        while high - low > 1:
            middle = (low + high) // 2
            size = self._first_valid(range(middle, high))
            if size is None:
                high = middle
                size = self._first_valid(range(middle - 1, low, -1))
                if size is None:
                    return
            if (self._valid_count(size) < target) == is_rising:
                low = size
            else:
                high = size


# --- Matching the size of a spec to another -------------------------------------------------------

MOST_HEADS = 2**14  # greatest number to try; head maps are tuples with one element per head


def _prefill_flops(spec: AttentionSpec, workload: Workload) -> int:
    return estimate_cost(spec, replace(workload, generate=0)).prefill_flops.total


def _cached_bytes(spec: AttentionSpec, workload: Workload) -> int:
    estimate = estimate_cost(spec, replace(workload, generate=0))
    if not estimate.has_cache:
        fact = f"pattern={spec.pattern.text} is not causal, so that there is no KV cache"
        raise SpecError(f"{fact}; match by params or flops, or give it pattern='causal()'")
    return estimate.cache_bytes


# The quantities that can be matched: a function and a label.
MATCH_QUANTITIES: dict[str, tuple[Callable[[AttentionSpec, Workload], int], str]] = {
    "params": (lambda spec, workload: count_parameters(spec), "parameters"),
    "flops": (_prefill_flops, "FLOPs of prefill"),
    "kv": (_cached_bytes, "bytes of cache"),
}


@dataclass(frozen=True)
class SizeMatch:
    """A spec with one size changed to match another spec.

    The size `free` changed from `was` to `chosen`; the quantity `by` is `reached` instead of
    `target`.
    """

    spec: AttentionSpec
    by: str
    free: str
    was: int
    chosen: int
    target: int
    reached: int

    @property
    def difference(self) -> float:
        """Relative difference from the target quantity; negative if the matched spec is smaller."""
        return (self.reached - self.target) / self.target

    @property
    def data(self) -> dict[str, Any]:
        """The match as plain values, without the spec."""
        values = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "spec"
        }
        return values | {"difference": self.difference}

    def __str__(self) -> str:
        size = (
            f"stays {self.was:,}"
            if self.chosen == self.was
            else f"{self.chosen:,}, was {self.was:,}"
        )
        share = max(abs(self.difference), 1e-4)
        bound = "less than " if abs(self.difference) < share else ""
        comparison = (
            f"{bound}{share:.2%} {'more' if self.difference > 0 else 'fewer'} than {self.target:,}"
        )
        if self.reached == self.target:
            comparison = "equal"
        return f"{self.free} {size}: {self.reached:,} {MATCH_QUANTITIES[self.by][1]}, {comparison}"


def match_size(
    spec: AttentionSpec,
    *,
    like: AttentionSpec,
    by: str = "params",
    free: str | None = None,
    workload: Workload | None = None,
) -> SizeMatch:
    """Change one size of a spec so that it is nearest to another: by "params", "flops" (of prefill)
    or "kv" (cache).

    `free` is the size to change: "dim", "vdim", "kv", "q", "model", or a number of a part such as
    "project.rank"; by default the first that can reach the goal. Dependent sizes follow: `vdim` if
    it is a multiple of `dim`, `kv` if it equals `q`, and head dimensions if they are a fraction of
    `model`. FLOPs and bytes are counted for the workload.

    >>> import headwise as hw
    >>> mha = hw.design(model=512, heads=8)
    >>> grouped = match_size(
    ...     hw.design(model=512, heads=8, kv=2), like=mha
    ... )  # 4 d^2 = 2 d k (q + kv)
    >>> grouped.free, grouped.chosen, grouped.difference
    ('dim', 102, -0.00390625)
    """
    for name, value in {"spec": spec, "like": like}.items():
        if not isinstance(value, AttentionSpec):
            raise SpecError(
                f"{name} must be the spec of a layer, got {value!r}; use hw.design(...)"
            )
    if by not in MATCH_QUANTITIES:
        raise SpecError(f"cannot match by={by!r}; {suggest(by, MATCH_QUANTITIES)}")
    workload = workload or Workload()
    sizes = list_sizes(spec)
    if free is not None and free not in sizes:
        raise SpecError(f"the spec has no size {free!r} to change; {suggest(free, sizes)}")
    count, label = MATCH_QUANTITIES[by]
    target = count(like, workload)
    count(spec, workload)  # raises an error if the quantity does not apply to the spec at any size
    nearest: dict[str, tuple[int, int]] = {}
    for name in sizes if free is None else [free]:
        # Valid sizes may be multiples of a divisor of the size, or divisors of the number of heads:
        # the gap covers both.
        gap = max(sizes[name], spec.heads.q, 16)
        search = SizeSearch(partial(_count_with_size, spec, by, workload, name), sizes[name], gap)
        chosen, reached = nearest[name] = search.nearest(target)
        if search.is_bracketed(target):
            matched = with_size(spec, name, chosen)
            return SizeMatch(matched, by, name, sizes[name], chosen, target, reached)
    name = min(nearest, key=lambda name: abs(nearest[name][1] - target))
    size, reached = nearest[name]
    subject = f"no {name} gives" if len(nearest) == 1 else "no single size reaches"
    remedy = "free another size, or change the other spec"
    fact = f"{subject} {target:,} {label}; nearest is {reached:,} with {name}={size}"
    raise SpecError(f"{fact}; {remedy}")


def _count_with_size(
    spec: AttentionSpec, by: str, workload: Workload, free: str, size: int
) -> int | None:
    """Return the count with this size, or None if the size is not valid."""
    if size < 1 or (free in ("q", "kv") and size > MOST_HEADS):
        return None
    try:
        return MATCH_QUANTITIES[by][0](with_size(spec, free, size), workload)
    except SpecError:
        return None


def list_sizes(spec: AttentionSpec) -> dict[str, int]:
    """Return the sizes that can be changed, with their values, in the order in which `match_size`
    tries them.

    >>> import headwise as hw
    >>> list_sizes(hw.design(preset="dcmha"))["dynamic_composition_2.rank"]
    2
    """
    parts = {slot: getattr(spec, slot) for slot in PART_SLOTS} | dict(spec.parts_of(Modifier))
    values: dict[str, Any] = {}
    for name, part in parts.items():
        for one in fields(part):
            values[f"{name}.{one.name}"] = getattr(part, one.name)
    # Of a pattern, `keys` is the number of visible keys; other numbers have other purposes.
    if any(one.name == "keys" for one in fields(spec.pattern)):
        values["pattern.keys"] = getattr(spec.pattern, "keys")  # noqa: B009 - not in every pattern
    part_sizes = {name: size for name, size in values.items() if type(size) is int and size > 0}
    heads = spec.heads
    return {
        "dim": heads.dim,
        "vdim": heads.vdim,
        **part_sizes,
        "kv": heads.kv,
        "q": heads.q,
        "model": spec.model,
    }


def with_size(spec: AttentionSpec, name: str, size: int) -> AttentionSpec:
    """Return the spec with one size changed, and with it the sizes that depend on it.

    >>> import headwise as hw
    >>> with_size(hw.design(model=512, heads=8), "model", 1024).heads
    Heads.grouped(q=8, kv=8, dim=128)
    """
    if list_sizes(spec)[name] == size:
        return spec
    owner, _, key = name.rpartition(".")
    changes: dict[str, Any] = {slot: getattr(spec, slot) for slot in SLOTS} | {
        "model": spec.model,
        "heads": spec.heads,
    }
    modifiers = dict(spec.parts_of(Modifier))
    if owner in modifiers:
        modifiers[owner] = replace(modifiers[owner], **{key: size})
    elif owner:
        changes[owner] = replace(changes[owner], **{key: size})
    else:
        changes |= RESIZERS[name](spec, size)
    parts: list[Part] = [*(changes[slot] for slot in PART_SLOTS), *modifiers.values()]
    for part in parts:
        changes["heads"] = part.widen_heads(changes["heads"])
    return replace(spec, modifiers=tuple(modifiers.values()), **changes)


def _resize_dim(spec: AttentionSpec, dim: int) -> dict[str, Any]:
    """Change `dim`; a `vdim` that is a multiple of it stays so."""
    multiple, remainder = divmod(spec.heads.vdim, spec.heads.dim)
    return {
        "heads": replace(spec.heads, dim=dim, vdim=spec.heads.vdim if remainder else multiple * dim)
    }


def _resize_q_heads(spec: AttentionSpec, q: int) -> dict[str, Any]:
    """Change `q`; a `kv` equal to it stays so."""
    kv = q if spec.heads.kv == spec.heads.q else spec.heads.kv
    return {"heads": spec.with_heads(q=q, kv=kv).heads}


def _resize_model(spec: AttentionSpec, model: int) -> dict[str, Any]:
    """Change `model`; head dimensions that divide it stay the same fraction of it."""
    widths = {"dim": spec.heads.dim, "vdim": spec.heads.vdim}
    for name, width in widths.items():
        if spec.model % width == 0:
            fraction = spec.model // width
            widths[name], remainder = divmod(model, fraction)
            if remainder:
                raise SpecError(
                    f"model={model} does not divide into {name} x {fraction}; give a multiple of "
                    f"{fraction}"
                )
    return {"model": model, "heads": replace(spec.heads, **widths)}


PART_SLOTS = [slot for slot in SLOTS if slot != "pattern"]
RESIZERS: dict[str, Callable[[AttentionSpec, int], dict[str, Any]]] = {
    "dim": _resize_dim,
    "vdim": lambda spec, vdim: {"heads": replace(spec.heads, vdim=vdim)},
    "kv": lambda spec, kv: {"heads": spec.with_heads(kv=kv).heads},
    "q": _resize_q_heads,
    "model": _resize_model,
}

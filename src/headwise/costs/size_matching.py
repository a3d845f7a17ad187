"""The size at which a count comes nearest to a number, among the whole numbers that can be a size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from ..errors import SpecError, suggest
from ..interfaces import Modifier, Part
from ..masking.patterns import Pattern
from ..spec.attention_spec import SLOTS, AttentionSpec
from . import count_parameters
from .cost_vs_length import cached_bytes, prefill_flops
from .workload import Workload

EXHAUSTIVE_SIZES = 192  # sizes that are tried one by one; in a longer row those between which the number lies
MAX_SEARCH_SIZE = 2**14  # sizes that are tried one by one where the count goes up and down
MAX_DOUBLINGS = 256  # of a size, at most
MAX_EQUAL_COUNTS = 6  # doublings that change nothing, before the count is taken not to follow the size
NUM_MONOTONICITY_PROBES = (
    24  # places where neighbours are held against each other before a count is taken to be monotone
)


@dataclass
class SizeSearch:
    """Sizes that were tried, each with its count, or None where there can be no such size.

    `gap` is how many in a row may be impossible before there are taken to be no more.

    >>> squares = SizeSearch(lambda size: size**2 if size and size % 6 == 0 else None, start=6)
    >>> squares.nearest(10**6), squares.is_bracketed(10**6), len(squares.counts) < 500
    ((1002, 1004004), True, True)
    """

    count: Callable[[int], int | None]
    start: int
    gap: int = 64
    counts: dict[int, int | None] = field(default_factory=dict[int, "int | None"])

    def nearest(self, wanted: int) -> tuple[int, int]:
        """The size that comes nearest, and its count; of equals the one that changes least, then the smaller."""
        top = self._upper_bound(wanted)
        if top <= EXHAUSTIVE_SIZES or not self._is_monotonic(top):
            self._scan(top)
        else:
            self._bisect(wanted)
        return min(self.valid_counts, key=lambda one: (abs(one[1] - wanted), abs(one[0] - self.start), one[0]))

    def is_bracketed(self, wanted: int) -> bool:
        """Whether there are counts on both sides of the wanted one."""
        counts = [count for _, count in self.valid_counts]
        return min(counts) <= wanted <= max(counts)

    @property
    def valid_counts(self) -> list[tuple[int, int]]:
        """Every possible size that was tried, with its count, in order."""
        return sorted((size, count) for size, count in self.counts.items() if count is not None)

    def _at(self, size: int) -> int | None:
        if size not in self.counts:
            self.counts[size] = self.count(size)
        return self.counts[size]

    def _next(self, some: range) -> int | None:
        """The first possible size of these."""
        return next((size for size in some if self._at(size) is not None), None)

    def _upper_bound(self, wanted: int) -> int:
        """A size beyond which nothing comes nearer; it is doubled, which keeps what heads divide by."""
        size, level = self.start, 0
        begun = self._counted(size)
        for _ in range(MAX_DOUBLINGS if begun != wanted else 0):
            above = self._next(range(2 * size, 4 * size + self.gap))
            if above is None:
                return self._next(range(2 * size - 1, size, -1)) or size
            size, reached = above, self._counted(above)
            level = level + 1 if reached == begun else 0
            away = abs(reached - wanted) > abs(begun - wanted)
            if away or level == MAX_EQUAL_COUNTS or min(begun, reached) <= wanted <= max(begun, reached):
                break
        return size

    def _counted(self, size: int) -> int:
        count = self._at(size)
        if count is None:
            raise SpecError(f"there can be no size {size}; begin from one that there can be")
        return count

    def _is_monotonic(self, top: int) -> bool:
        """Whether the count only rises, or only falls, as far as can be told: over all that range, and in the small."""
        for place in range(0, top, max(top // NUM_MONOTONICITY_PROBES, 1)):
            one = self._next(range(place, min(place + self.gap, top)))
            _ = None if one is None else self._next(range(one + 1, min(one + self.gap, top)))
        counts = [count for _, count in self.valid_counts]
        ups = {other > one for one, other in pairwise(counts) if other != one}
        return len(ups) < 2

    def _bisect(self, wanted: int) -> None:
        """Try sizes between the two that enclose the wanted count, until there is none between them."""
        if not self.is_bracketed(wanted):
            return
        sides = pairwise(self.valid_counts)
        low, high = next((a, b) for (a, one), (b, other) in sides if min(one, other) <= wanted <= max(one, other))
        rises = self._counted(low) <= self._counted(high)
        while high - low > 1:
            middle = (low + high) // 2
            found = self._next(range(middle, high))
            if found is None:
                high, found = middle, self._next(range(middle - 1, low, -1))
                if found is None:
                    return
            if (self._counted(found) < wanted) == rises:
                low = found
            else:
                high = found

    def _scan(self, top: int) -> None:
        if top > MAX_SEARCH_SIZE + self.gap:
            raise SpecError(
                f"the count goes up and down up to {top}, which is too far to look; begin from a smaller size"
            )
        for size in range(top + 1):
            self._at(size)


# --- One layer made as large as another ----------------------------------------------------------------

MOST_HEADS = 2**14  # more are tried of no layer: each has a place in a tuple


def _cached_bytes(spec: AttentionSpec, load: Workload) -> int:
    held = cached_bytes(spec, load)
    if held is None:
        told = f"pattern={spec.pattern.text} reads ahead, so that nothing is remembered"
        raise SpecError(f"{told}; match by params or flops, or give it pattern='causal()'")
    return held


# What can be made equal: how it is counted, and what it is called.
MATCH_QUANTITIES: dict[str, tuple[Callable[[AttentionSpec, Workload], int], str]] = {
    "params": (lambda spec, load: count_parameters(spec), "parameters"),
    "flops": (prefill_flops, "FLOP of prefill"),
    "kv": (_cached_bytes, "bytes of cache"),
}


@dataclass(frozen=True)
class SizeMatch:
    """A spec with one size changed, so that it comes nearest to another."""

    spec: AttentionSpec
    by: str
    free: str
    was: int
    chosen: int
    wanted: int
    reached: int

    @property
    def difference(self) -> float:
        """How far it is off, as a share of what was wanted; below zero where it is smaller."""
        return (self.reached - self.wanted) / self.wanted

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        told = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spec"}
        return told | {"difference": self.difference}

    def __str__(self) -> str:
        off = max(abs(self.difference), 1e-4)
        less = "less than " if abs(self.difference) < off else ""
        told = f"{less}{off:.2%} {'more' if self.difference > 0 else 'fewer'} than the {self.wanted:,} wanted"
        size = f"stays {self.was:,}" if self.chosen == self.was else f"{self.chosen:,}, was {self.was:,}"
        same = "as many as wanted" if self.reached == self.wanted else told
        return f"{self.free} {size}: {self.reached:,} {MATCH_QUANTITIES[self.by][1]}, {same}"


def match_size(
    spec: AttentionSpec,
    *,
    like: AttentionSpec,
    by: str = "params",
    free: str | None = None,
    workload: Workload | None = None,
) -> SizeMatch:
    """The spec with one size chosen so that it comes nearest to another: by "params", "flops" (prefill) or "kv".

    `free` is "dim", "vdim", "kv", "q", "model" or a number of a part, "project.rank"; the first that can reach it where
    nothing is said. What hangs on the size follows: widths of values that were as wide as keys, key-value heads where
    every head had its own, widths of heads when the model's changes. FLOPs and bytes are those under the load.

    >>> import headwise as hw
    >>> usual = hw.design(model=512, heads=8)
    >>> grouped = match_size(hw.design(model=512, heads=8, kv=2), like=usual)  # 4 d^2 = 2 d k (q + kv)
    >>> grouped.free, grouped.chosen, grouped.difference
    ('dim', 102, -0.00390625)
    """
    for name, given in {"spec": spec, "like": like}.items():
        if not isinstance(given, AttentionSpec):
            raise SpecError(f"{name}={given!r} is no spec; only layers are matched, as hw.design describes them")
    if by not in MATCH_QUANTITIES:
        raise SpecError(f"nothing is matched by {by!r}; {suggest(by, MATCH_QUANTITIES)}")
    workload, known = workload or Workload(), list_sizes(spec)
    if free is not None and free not in known:
        raise SpecError(f"the spec has no size {free!r} that could be free; {suggest(free, known)}")
    goal = _MatchGoal(spec, by, MATCH_QUANTITIES[by][0](like, workload), workload)
    _ = goal.count(spec)  # what cannot be counted says so now, and not of every size that is tried
    for name in known if free is None else [free]:
        if found := goal.match(name):
            return found
    raise SpecError(goal.no_match_reason(free, known))


def list_sizes(spec: AttentionSpec) -> dict[str, int]:
    """Every size that may be free, as it is, in the order in which they are tried.

    >>> import headwise as hw
    >>> list_sizes(hw.design(preset="dcmha"))["dynamic_2.rank"]
    2
    """
    held = {slot: getattr(spec, slot) for slot in PART_SLOTS} | dict(spec.parts_of(Modifier))
    numbers = {f"{name}.{field.name}": getattr(one, field.name) for name, one in held.items() for field in fields(one)}
    numbers |= {f"pattern.{field.name}": getattr(spec.pattern, field.name) for field in _key_count_fields(spec.pattern)}
    counts = {name: size for name, size in numbers.items() if type(size) is int and size > 0}
    heads = spec.heads
    return {"dim": heads.dim, "vdim": heads.vdim, **counts, "kv": heads.kv, "q": heads.q, "model": spec.model}


def with_size(spec: AttentionSpec, name: str, size: int) -> AttentionSpec:
    """The same spec with one of its sizes changed, and with it what hangs on it.

    >>> import headwise as hw
    >>> with_size(hw.design(model=512, heads=8), "model", 1024).heads
    Heads.grouped(q=8, kv=8, dim=128)
    """
    if list_sizes(spec)[name] == size:
        return spec
    owner, _, key = name.rpartition(".")
    said: dict[str, Any] = {slot: getattr(spec, slot) for slot in SLOTS} | {"model": spec.model, "heads": spec.heads}
    modifiers = dict(spec.parts_of(Modifier))
    if owner in modifiers:
        modifiers[owner] = replace(modifiers[owner], **{key: size})
    else:
        said |= {owner: replace(said[owner], **{key: size})} if owner else RESIZERS[name](spec, size)
    parts: list[Part] = [*(said[slot] for slot in PART_SLOTS), *modifiers.values()]
    for part in parts:
        said["heads"] = part.widen_heads(said["heads"])
    return replace(spec, modifiers=tuple(modifiers.values()), **said)


def _key_count_fields(pattern: Pattern) -> list[Field[Any]]:
    """How many keys are read, where a pattern says that at once: what else it has, it has for other reasons."""
    return [field for field in fields(pattern) if field.name == "keys"]


def _resize_dim(spec: AttentionSpec, dim: int) -> dict[str, Any]:
    """Values as wide as keys, or so many times as wide, stay so."""
    times, rest = divmod(spec.heads.vdim, spec.heads.dim)
    return {"heads": replace(spec.heads, dim=dim, vdim=spec.heads.vdim if rest else times * dim)}


def _resize_q_heads(spec: AttentionSpec, q: int) -> dict[str, Any]:
    """Heads that have keys and values of their own keep having them."""
    return {
        "heads": replace(spec.heads, q=q, kv=q if spec.heads.kv == spec.heads.q else spec.heads.kv, **DEFAULT_HEAD_MAPS)
    }


def _resize_model(spec: AttentionSpec, model: int) -> dict[str, Any]:
    """Heads that are a whole fraction of the model wide stay so."""
    widths = {"dim": spec.heads.dim, "vdim": spec.heads.vdim}
    for name, width in widths.items():
        if spec.model % width == 0:
            widths[name], rest = divmod(model, spec.model // width)
            if rest:
                raise SpecError(f"a model of {model} has no heads of 1/{spec.model // width}; give a multiple of it")
    return {"model": model, "heads": replace(spec.heads, **widths)}


PART_SLOTS = [slot for slot in SLOTS if slot != "pattern"]
DEFAULT_HEAD_MAPS: dict[str, Any] = {"reads": (), "values": (), "speaks": ()}  # who reads whom, in equal groups again
RESIZERS: dict[str, Callable[[AttentionSpec, int], dict[str, Any]]] = {
    "dim": _resize_dim,
    "vdim": lambda spec, vdim: {"heads": replace(spec.heads, vdim=vdim)},
    "kv": lambda spec, kv: {"heads": replace(spec.heads, kv=kv, **DEFAULT_HEAD_MAPS)},
    "q": _resize_q_heads,
    "model": _resize_model,
}


@dataclass(frozen=True)
class _MatchGoal:
    """A number that a spec is to have, whichever of its sizes is free."""

    spec: AttentionSpec
    by: str
    target: int
    workload: Workload

    def count(self, spec: AttentionSpec) -> int:
        return MATCH_QUANTITIES[self.by][0](spec, self.workload)

    def match(self, free: str) -> SizeMatch | None:
        """The nearest there is, unless the number lies beyond all that can be reached."""
        search = self._search(free)
        chosen, reached = search.nearest(self.target)
        if not search.is_bracketed(self.target):
            return None
        spec = with_size(self.spec, free, chosen)
        return SizeMatch(spec, self.by, free, search.start, chosen, self.target, reached)

    def no_match_reason(self, free: str | None, known: dict[str, int]) -> str:
        """Why nothing comes near, what the nearest numbers are, and what could be free instead."""
        goal = f"{self.target:,} {MATCH_QUANTITIES[self.by][1]}"
        if free is None:
            nearby = {name: self._search(name).nearest(self.target) for name in known}
            name = min(nearby, key=lambda one: abs(nearby[one][1] - self.target))
            size, count = nearby[name]
            return f"no size of it reaches {goal}; nearest is {count:,} with {name}={size}, so change two, or the other"
        search = self._search(free)
        search.nearest(self.target)
        counts = sorted({(count, size) for size, count in search.valid_counts})
        if counts[0][0] == counts[-1][0]:
            fact = f"{free} has no say in it and leaves {counts[0][0]:,}"
        else:
            least, most = (f"{count:,} with {free}={size}" for count, size in (counts[0], counts[-1]))
            fact = f"it reaches {least}" if self.target < counts[0][0] else f"it reaches {most} at most"
        others = [name for name in known if name != free and self.match(name)]
        remedy = f"free {' or '.join(others)}" if others else "nothing else of it alone gets there; change the other"
        return f"no {free} gives it {goal}: {fact}; {remedy}"

    def _search(self, free: str) -> SizeSearch:
        start = list_sizes(self.spec)[free]
        # Where only multiples can be, the size is one of them; what divides heads is found among their number.
        return SizeSearch(lambda size: self._count_with_size(free, size), start, max(start, self.spec.heads.q, 16))

    def _count_with_size(self, free: str, size: int) -> int | None:
        """The count with a size, or None where there can be no such layer."""
        if size < 1 or (free in ("q", "kv") and size > MOST_HEADS):
            return None
        try:
            return self.count(with_size(self.spec, free, size))
        except SpecError:
            return None

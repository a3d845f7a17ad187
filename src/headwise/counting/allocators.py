"""What remembered tokens take in memory: how it is handed out, and to how many rows of which length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..blueprint import Model
from ..boxes import Memory
from ..errors import SpecError, nearest
from ..layout import Layout
from ..spec import AttentionSpec
from .bills import Term
from .calls import LARGEST
from .devices import STORED, Formats, stored
from .layers import Layers, attentions

STATE = 4  # bytes at least of a number that adds up thousands of tokens


class Manner(NamedTuple):
    """Whether what a pattern forgets is given back, and whether rows can keep a common beginning once."""

    forgets: bool
    shares: bool


MANNERS = {
    "ideal": Manner(forgets=True, shares=True),
    "ring": Manner(forgets=True, shares=False),
    "paged": Manner(forgets=True, shares=True),
    "unified": Manner(forgets=False, shares=True),
}


@dataclass(frozen=True)
class Allocator:
    """Who hands out memory to remembered tokens, in pages of so many.

    "ideal": a slot for each token that later queries may still read. "ring": the same slots, each row its own, as
    the caches of this library hold them. "paged": pages of `page` tokens, given back when all of theirs are
    forgotten. "unified": pages alike for all layers, so that a window gives nothing back.

    >>> window = Memory(first=0, last=512)  # no first token for ever, the latest 512
    >>> [Allocator.named(text).slots(window, 1000) for text in ("ideal", "paged(16)", "unified")]
    [512, 528, 1000]
    """

    kind: str = "ideal"
    page: int = 1

    def __post_init__(self) -> None:
        if self.kind not in MANNERS:
            raise SpecError(f"there is no allocator {self.kind!r}; {nearest(self.kind, MANNERS)}")
        if type(self.page) is not int or not 1 <= self.page <= LARGEST:
            raise SpecError(f"{self.kind}({self.page!r}) has no pages; give tokens of a page, as in paged(16)")
        if self.page > 1 and self.kind in ("ideal", "ring"):
            raise SpecError(f"{self.kind} has no pages, and so none of {self.page} tokens; use paged({self.page})")

    @staticmethod
    def named(text: str) -> Allocator:
        """The allocator that a text such as "paged(16)" says.

        >>> Allocator.named("paged(16)")
        Allocator(kind='paged', page=16)
        """
        found = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(-?\d{1,30})\s*\))?\s*", text)
        if not found:
            raise SpecError(f"{text!r} is no allocator; write ideal, ring, paged(16) or unified")
        kind, page = found.groups()
        if kind == "paged" and page is None:
            raise SpecError("paged says nothing of its pages; write tokens of a page, as in paged(16)")
        return Allocator(kind, 1 if page is None else int(page))

    def __str__(self) -> str:
        return f"{self.kind}({self.page})" if self.page > 1 or self.kind == "paged" else self.kind

    def slots(self, memory: Memory, length: int) -> int:
        """Slots that one row needs, at most on its way to this length: the latest tokens may lie across pages."""
        first, last = memory
        pages = _up(length, self.page)
        if MANNERS[self.kind].forgets and last is not None:
            pages = min(pages, _up(first, self.page) + _up(last - 1, self.page) + 1)
        return pages * self.page

    def common(self, memory: Memory, length: int, prefix: int) -> int:
        """Slots among these that hold a beginning which all rows have alike: whole pages of it, still in use."""
        if not MANNERS[self.kind].shares:
            return 0
        first, last = memory
        pages = min(prefix, length) // self.page
        if not MANNERS[self.kind].forgets or last is None:
            return pages * self.page
        kept = min(pages, _up(first, self.page))
        return (kept + max(0, pages - max(kept, max(length - last, 0) // self.page))) * self.page


IDEAL = Allocator()


def _up(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True)
class Rows:
    """Sequences in memory: so many of each length, the first `shared` tokens alike, and a source of its own each.

    >>> Rows.alike(16, 2048).count, Rows.of([7, 9, 7]).each
    (16, ((7, 2), (9, 1)))
    """

    each: tuple[tuple[int, int], ...] = field(default=((2048, 1),))
    shared: int = 0
    source: int = 0

    def __post_init__(self) -> None:
        if not self.each:
            raise SpecError("there are no rows; give one length or more")
        for length, times in self.each:
            _checked("length", length, 1)
            _checked("batch", times, 1)
        _checked("shared", self.shared, 0)
        _checked("source", self.source, 0)
        if self.shared > (shortest := min(length for length, _ in self.each)):
            raise SpecError(f"rows of {shortest:,} tokens cannot share {self.shared:,}; share at most {shortest:,}")

    @staticmethod
    def alike(batch: int, length: int, shared: int = 0, source: int = 0) -> Rows:
        """So many rows of one length."""
        return Rows(((length, batch),), shared, source)

    @staticmethod
    def of(lengths: Iterable[int], shared: int = 0, source: int = 0) -> Rows:
        """A row of each of these lengths."""
        found: dict[int, int] = {}
        for length in lengths:
            found[length] = found.get(length, 0) + 1
        return Rows(tuple(found.items()), shared, source)

    @property
    def count(self) -> int:
        """How many rows."""
        return sum(times for _, times in self.each)


def _checked(name: str, size: object, least: int) -> None:
    if type(size) is not int or not least <= size <= LARGEST:
        raise SpecError(f"{name}={size!r} is no load; give a whole number from {least} to {LARGEST}")


def cache_terms(layers: Iterable[Layers], rows: Rows, allocator: Allocator, formats: Formats) -> list[Term]:
    """Bytes that these layers remember, kind by kind of layer.

    Two layers with a window of 512 and 1 that reads everything, a key and a value head of 64 channels, in bfloat16:

    >>> import headwise as hw
    >>> spec = hw.design(model=64, heads=1, pattern="causal")
    >>> local = hw.design(model=64, heads=1, pattern="window(512)")
    >>> layers = (Layers("local", local, 2), Layers("full", spec))
    >>> for term in cache_terms(layers, Rows.alike(3, 1000), Allocator(), Formats()):
    ...     print(*term)
    local 2 layers x 1,536 tokens x 256 bytes 786432
    full 1 layer x 3,000 tokens x 256 bytes 768000
    """
    if rows.shared and not MANNERS[allocator.kind].shares:
        raise SpecError(f"a {allocator} keeps every row apart and cannot share {rows.shared:,} tokens; use paged(16)")
    return [_term(each, rows, allocator, formats) for each in layers]


def cached(
    described: AttentionSpec | Model, rows: Rows, allocator: str = "ideal", dtype: str = "bf16", layers: int = 1
) -> int:
    """Bytes that a spec, in so many layers, or a model remembers of these rows.

    Llama-3-8B remembers 131,072 bytes of a token:

    >>> import headwise as hw
    >>> cached(hw.design(preset="gqa", model=4096, heads=32, kv=8), Rows.alike(1, 1), layers=32)
    131072
    """
    maths = dtype if dtype != "int8" else "bf16"
    terms = cache_terms(attentions(described, layers), rows, Allocator.named(allocator), Formats(maths, cache=dtype))
    return sum(term.value for term in terms)


def _term(layers: Layers, rows: Rows, allocator: Allocator, formats: Formats) -> Term:
    spec, many = layers.spec, f"{layers.times:,} layer{'s' if layers.times > 1 else ''}"
    if layers.reads == "source":
        if not rows.source:
            raise SpecError("it reads another sequence of a length that nothing says; give source, in tokens")
        return _counted(layers, rows.count * allocator.slots(Memory(0, None), rows.source), many, formats)
    if spec.pattern.opening is None:
        raise SpecError(
            f"pattern {spec.pattern.text} reads tokens that have not come yet, so nothing is remembered and nothing "
            "answered token by token; use a causal pattern such as causal()"
        )
    if spec.stateful:
        each = state_bytes(spec, formats.cache)
        value = layers.times * rows.count * each
        return Term(layers.name, f"{many} x {rows.count:,} states x {each:,} bytes", value)
    return _counted(layers, _slots(spec.pattern.memory, rows, allocator), many, formats)


def _counted(layers: Layers, slots: int, many: str, formats: Formats) -> Term:
    each = token_bytes(layers.spec, formats.cache)
    return Term(layers.name, f"{many} x {slots:,} tokens x {each:,} bytes", layers.times * slots * each)


def _slots(memory: Memory, rows: Rows, allocator: Allocator) -> int:
    """Slots of all rows; of a beginning they have alike, what some row still needs is there once."""
    own = sum(times * allocator.slots(memory, length) for length, times in rows.each)
    if not rows.shared:
        return own
    common = [(allocator.common(memory, length, rows.shared), times) for length, times in rows.each]
    return own - sum(times * slots for slots, times in common) + max(slots for slots, _ in common)


def token_bytes(spec: AttentionSpec, dtype: str) -> int:
    """Bytes that one layer keeps of one token.

    >>> import headwise as hw
    >>> gqa = hw.design(preset="gqa", model=4096, heads=32, kv=8)
    >>> token_bytes(gqa, "bf16"), token_bytes(gqa, "int8")  # 2 x 8 heads x (128 + a scale of 4)
    (4096, 2112)
    """
    return sum(stored(shape, dtype) for shape in spec.entry().values())


def state_bytes(spec: AttentionSpec, dtype: str) -> int:
    """Bytes of the state that one layer keeps in the place of tokens; never less than 4 a number."""
    return sum(max(STORED[dtype], STATE) * layout.numel(sizes) for layout, sizes in _state(spec))


def _state(spec: AttentionSpec) -> Iterable[tuple[Layout, Mapping[str, int]]]:
    if spec.folder is None:
        return ()
    part = spec.folder[1]
    return ((layout, spec.sizes_of(part)) for layout in part.state(spec).values())

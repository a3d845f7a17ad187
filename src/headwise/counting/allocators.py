"""What remembered tokens take in memory: how it is handed out, and to how many rows of which length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..blueprint import ModelSpec
from ..boxes import KeyRetention
from ..errors import SpecError, suggest
from ..layout import AxisLayout
from ..spec import AttentionSpec
from .bills import CostTerm
from .calls import MAX_SIZE
from .devices import STORAGE_BYTES, NumberFormats, stored_bytes
from .layers import AttentionGroup, group_attentions

MIN_STATE_BYTES = 4  # bytes at least of a number that adds up thousands of tokens


class AllocationPolicy(NamedTuple):
    """Whether what a pattern forgets is given back, and whether rows can keep a common beginning once."""

    frees_evicted: bool
    shares_prefix: bool


ALLOCATION_POLICIES = {
    "ideal": AllocationPolicy(frees_evicted=True, shares_prefix=True),
    "ring": AllocationPolicy(frees_evicted=True, shares_prefix=False),
    "paged": AllocationPolicy(frees_evicted=True, shares_prefix=True),
    "unified": AllocationPolicy(frees_evicted=False, shares_prefix=True),
}


@dataclass(frozen=True)
class CacheAllocator:
    """Who hands out memory to remembered tokens, in pages of so many.

    "ideal": a slot for each token that later queries may still read. "ring": the same slots, each row its own, as
    the caches of this library hold them. "paged": pages of `page` tokens, given back when all of theirs are
    forgotten. "unified": pages alike for all layers, so that a window gives nothing back.

    >>> window = KeyRetention(first=0, last=512)  # no first token for ever, the latest 512
    >>> [CacheAllocator.named(text).slots(window, 1000) for text in ("ideal", "paged(16)", "unified")]
    [512, 528, 1000]
    """

    kind: str = "ideal"
    page_size: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ALLOCATION_POLICIES:
            raise SpecError(f"there is no allocator {self.kind!r}; {suggest(self.kind, ALLOCATION_POLICIES)}")
        if type(self.page_size) is not int or not 1 <= self.page_size <= MAX_SIZE:
            raise SpecError(f"{self.kind}({self.page_size!r}) has no pages; give tokens of a page, as in paged(16)")
        if self.page_size > 1 and self.kind in ("ideal", "ring"):
            raise SpecError(f"{self.kind} has no pages, and so none of {self.page_size} tokens; use paged({self.page_size})")

    @staticmethod
    def from_text(text: str) -> CacheAllocator:
        """The allocator that a text such as "paged(16)" says.

        >>> CacheAllocator.named("paged(16)")
        Allocator(kind='paged', page=16)
        """
        found = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(-?\d{1,30})\s*\))?\s*", text)
        if not found:
            raise SpecError(f"{text!r} is no allocator; write ideal, ring, paged(16) or unified")
        kind, page = found.groups()
        if kind == "paged" and page is None:
            raise SpecError("paged says nothing of its pages; write tokens of a page, as in paged(16)")
        return CacheAllocator(kind, 1 if page is None else int(page))

    def __str__(self) -> str:
        return f"{self.kind}({self.page_size})" if self.page_size > 1 or self.kind == "paged" else self.kind

    def num_slots(self, memory: KeyRetention, length: int) -> int:
        """Slots that one row needs, at most on its way to this length: the latest tokens may lie across pages."""
        first, last = memory
        pages = _ceil_div(length, self.page_size)
        if ALLOCATION_POLICIES[self.kind].frees_evicted and last is not None:
            pages = min(pages, _ceil_div(first, self.page_size) + _ceil_div(last - 1, self.page_size) + 1)
        return pages * self.page_size

    def num_shared_slots(self, memory: KeyRetention, length: int, prefix: int) -> int:
        """Slots among these that hold a beginning which all rows have alike: whole pages of it, still in use."""
        if not ALLOCATION_POLICIES[self.kind].shares_prefix:
            return 0
        first, last = memory
        pages = min(prefix, length) // self.page_size
        if not ALLOCATION_POLICIES[self.kind].frees_evicted or last is None:
            return pages * self.page_size
        kept = min(pages, _ceil_div(first, self.page_size))
        return (kept + max(0, pages - max(kept, max(length - last, 0) // self.page_size))) * self.page_size


IDEAL_ALLOCATOR = CacheAllocator()


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True)
class RequestBatch:
    """Sequences in memory: so many of each length, the first `shared` tokens alike, and a source of its own each.

    >>> RequestBatch.alike(16, 2048).count, RequestBatch.of([7, 9, 7]).each
    (16, ((7, 2), (9, 1)))
    """

    counts_by_length: tuple[tuple[int, int], ...] = field(default=((2048, 1),))
    shared_prefix: int = 0
    source_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.counts_by_length:
            raise SpecError("there are no rows; give one length or more")
        for length, times in self.counts_by_length:
            _check_size("length", length, 1)
            _check_size("batch", times, 1)
        _check_size("shared", self.shared_prefix, 0)
        _check_size("source", self.source_tokens, 0)
        if self.shared_prefix > (shortest := min(length for length, _ in self.counts_by_length)):
            raise SpecError(f"rows of {shortest:,} tokens cannot share {self.shared_prefix:,}; share at most {shortest:,}")

    @staticmethod
    def uniform(batch: int, length: int, shared: int = 0, source: int = 0) -> RequestBatch:
        """So many rows of one length."""
        return RequestBatch(((length, batch),), shared, source)

    @staticmethod
    def from_lengths(lengths: Iterable[int], shared: int = 0, source: int = 0) -> RequestBatch:
        """A row of each of these lengths."""
        found: dict[int, int] = {}
        for length in lengths:
            found[length] = found.get(length, 0) + 1
        return RequestBatch(tuple(found.items()), shared, source)

    @property
    def num_requests(self) -> int:
        """How many rows."""
        return sum(times for _, times in self.counts_by_length)


def _check_size(name: str, size: object, least: int) -> None:
    if type(size) is not int or not least <= size <= MAX_SIZE:
        raise SpecError(f"{name}={size!r} is no load; give a whole number from {least} to {MAX_SIZE}")


def list_cache_terms(groups: Iterable[AttentionGroup], requests: RequestBatch, allocator: CacheAllocator, formats: NumberFormats) -> list[CostTerm]:
    """Bytes that these layers remember, kind by kind of layer.

    Two layers with a window of 512 and 1 that reads everything, a key and a value head of 64 channels, in bfloat16:

    >>> import headwise as hw
    >>> spec = hw.design(model=64, heads=1, pattern="causal")
    >>> local = hw.design(model=64, heads=1, pattern="window(512)")
    >>> layers = (AttentionGroup("local", local, 2), AttentionGroup("full", spec))
    >>> for term in list_cache_terms(layers, RequestBatch.alike(3, 1000), CacheAllocator(), NumberFormats()):
    ...     print(*term)
    local 2 layers x 1,536 tokens x 256 bytes 786432
    full 1 layer x 3,000 tokens x 256 bytes 768000
    """
    if requests.shared_prefix and not ALLOCATION_POLICIES[allocator.kind].shares_prefix:
        raise SpecError(f"a {allocator} keeps every row apart and cannot share {requests.shared_prefix:,} tokens; use paged(16)")
    return [_cache_term(each, requests, allocator, formats) for each in groups]


def kv_cache_bytes(
    spec_or_model: AttentionSpec | ModelSpec, requests: RequestBatch, allocator: str = "ideal", dtype: str = "bf16", num_layers: int = 1
) -> int:
    """Bytes that a spec, in so many layers, or a model remembers of these rows.

    Llama-3-8B remembers 131,072 bytes of a token:

    >>> import headwise as hw
    >>> kv_cache_bytes(hw.design(preset="gqa", model=4096, heads=32, kv=8), RequestBatch.alike(1, 1), layers=32)
    131072
    """
    maths = dtype if dtype != "int8" else "bf16"
    terms = list_cache_terms(group_attentions(spec_or_model, num_layers), requests, CacheAllocator.from_text(allocator), NumberFormats(maths, cache=dtype))
    return sum(term.value for term in terms)


def _cache_term(layers: AttentionGroup, rows: RequestBatch, allocator: CacheAllocator, formats: NumberFormats) -> CostTerm:
    spec, many = layers.spec, f"{layers.num_layers:,} layer{'s' if layers.num_layers > 1 else ''}"
    if layers.kv_source == "source":
        if not rows.source_tokens:
            raise SpecError("it reads another sequence of a length that nothing says; give source, in tokens")
        return _describe_slots(layers, rows.num_requests * allocator.num_slots(KeyRetention(0, None), rows.source_tokens), many, formats)
    if spec.pattern.tokens_before_decode is None:
        raise SpecError(
            f"pattern {spec.pattern.text} reads tokens that have not come yet, so nothing is remembered and nothing "
            "answered token by token; use a causal pattern such as causal()"
        )
    if spec.is_recurrent:
        each = state_bytes(spec, formats.cache)
        value = layers.num_layers * rows.num_requests * each
        return CostTerm(layers.name, f"{many} x {rows.num_requests:,} states x {each:,} bytes", value)
    return _describe_slots(layers, _total_slots(spec.pattern.retention, rows, allocator), many, formats)


def _describe_slots(layers: AttentionGroup, slots: int, many: str, formats: NumberFormats) -> CostTerm:
    each = cache_bytes_per_token(layers.spec, formats.cache)
    return CostTerm(layers.name, f"{many} x {slots:,} tokens x {each:,} bytes", layers.num_layers * slots * each)


def _total_slots(memory: KeyRetention, rows: RequestBatch, allocator: CacheAllocator) -> int:
    """Slots of all rows; of a beginning they have alike, what some row still needs is there once."""
    own = sum(times * allocator.num_slots(memory, length) for length, times in rows.counts_by_length)
    if not rows.shared_prefix:
        return own
    common = [(allocator.num_shared_slots(memory, length, rows.shared_prefix), times) for length, times in rows.counts_by_length]
    return own - sum(times * slots for slots, times in common) + max(slots for slots, _ in common)


def cache_bytes_per_token(spec: AttentionSpec, dtype: str) -> int:
    """Bytes that one layer keeps of one token.

    >>> import headwise as hw
    >>> gqa = hw.design(preset="gqa", model=4096, heads=32, kv=8)
    >>> cache_bytes_per_token(gqa, "bf16"), cache_bytes_per_token(gqa, "int8")  # 2 x 8 heads x (128 + a scale of 4)
    (4096, 2112)
    """
    return sum(stored_bytes(shape, dtype) for shape in spec.kv_entry_shapes().values())


def state_bytes(spec: AttentionSpec, dtype: str) -> int:
    """Bytes of the state that one layer keeps in the place of tokens; never less than 4 a number."""
    return sum(max(STORAGE_BYTES[dtype], MIN_STATE_BYTES) * layout.numel(sizes) for layout, sizes in _state_numbers(spec))


def _state_numbers(spec: AttentionSpec) -> Iterable[tuple[AxisLayout, Mapping[str, int]]]:
    if spec.recurrent_part is None:
        return ()
    part = spec.recurrent_part[1]
    return ((layout, spec.sizes_of(part)) for layout in part.state_layouts(spec).values())

"""Page allocation for paged KV caches: block tables, reference counts and prefix sharing."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import lcm, prod
from typing import NamedTuple

from ...util.errors import CacheFull, SpecError
from ..masking.key_intervals import KeyRetention
from ..spec.attention_spec import AttentionSpec


class PageAllocator:
    """Reference-counted allocator of `count` pages, numbered from 0.

    A named page keeps its contents when it is released: `find` returns it until it is allocated
    again. Unnamed free pages are allocated first, then pages that were never used, then the named
    page that was released longest ago.

    >>> pages = PageAllocator(3)
    >>> first, second = pages.allocate(), pages.allocate()
    >>> pages.name(first, "once upon")
    >>> pages.release(first), pages.num_allocated
    (None, 1)
    >>> pages.add_reference(pages.find("once upon")), pages.num_allocated
    (None, 2)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders: dict[int, int] = {}  # references of the allocated pages
        self._num_touched = 0  # pages that were ever allocated; these are the first ones
        self._free_unnamed: list[int] = []  # released last is allocated first
        self._free_named: OrderedDict[int, None] = OrderedDict()  # in the order of their release
        self._names: dict[int, Hashable] = {}
        self._named: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return self.count - len(self._holders)

    @property
    def num_allocated(self) -> int:
        """Number of allocated pages; a shared page counts once."""
        return len(self._holders)

    def holders(self, page: int) -> int:
        """Return the reference count of a page."""
        return self._holders.get(page, 0)

    def allocate(self) -> int:
        """Return a free page with one reference; its name is removed, so its old contents are no
        longer found.
        """
        if self._free_unnamed:
            page = self._free_unnamed.pop()
        elif self._num_touched < self.count:
            page = self._num_touched
            self._num_touched = self._num_touched + 1
        elif self._free_named:
            page, _ = self._free_named.popitem(last=False)
            del self._named[self._names.pop(page)]
        else:
            raise CacheFull(
                f"all {self.count:,} pages are in use; wait until a sequence is freed, or give a "
                "larger budget"
            )
        self._holders[page] = 1
        return page

    def add_reference(self, page: int) -> None:
        """Increment the reference count of a page that is allocated, or free and named."""
        self._holders[page] = self.holders(page) + 1
        self._free_named.pop(page, None)

    def release(self, page: int) -> None:
        """Decrement the reference count of a page; at 0 the page is free."""
        if not self.holders(page):
            raise ValueError(f"page {page} was given back twice; release a page once per reference")
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            if page in self._names:
                self._free_named[page] = None
            else:
                self._free_unnamed.append(page)

    def name(self, page: int, name: Hashable) -> None:
        """Name a page for `find`; do nothing if the page has a name or the name is taken."""
        if name not in self._named and page not in self._names:
            self._names[page] = name
            self._named[name] = page

    def find(self, name: Hashable) -> int | None:
        """Return the page of this name, allocated or free; None if its contents are gone."""
        return self._named.get(name)


# --- Page layout of a model -----------------------------------------------------------------------


class RetentionGroup(NamedTuple):
    """Layers with the same `KeyRetention`: the `first` tokens and the latest `last` (None: all).

    Their tokens are stored in pages of `page` tokens.
    """

    first: int
    last: int | None
    page: int

    def visible_pages(self, length: int) -> Iterator[int]:
        """Yield the indices of the pages that queries from position `length` on can attend to.

        >>> (
        ...     list(RetentionGroup(first=1, last=5, page=4).visible_pages(20)),
        ...     list(RetentionGroup(0, None, 4).visible_pages(9)),
        ... )
        ([0, 4], [0, 1, 2])
        """
        num_pages = -(-length // self.page)
        if self.last is None:
            yield from range(num_pages)
            return
        begin = -(-min(self.first, length) // self.page)
        yield from range(begin)
        yield from range(max(begin, (length - self.last + 1) // self.page), num_pages)

    def max_pages(self, length: int, chunk: int) -> int:
        """Return the most pages that a row holds at any time while it grows to `length`, `chunk`
        tokens at a time.

        >>> (
        ...     RetentionGroup(0, None, 16).max_pages(1000, chunk=1),
        ...     RetentionGroup(0, 512, 16).max_pages(1000, chunk=1),
        ... )
        (63, 33)
        """
        whole = -(-length // self.page)
        if self.last is None:
            return whole
        latest = self.last - 1 + min(chunk, length)
        return min(whole, -(-self.first // self.page) + -(-(latest - 1) // self.page) + 1)


class TensorPlacement(NamedTuple):
    """Location of one tensor of a kv entry in a page: `start` is its offset, the layout is [heads,
    tokens, width].
    """

    group: int
    start: int
    heads: int
    width: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PageLayout:
    """Layout of a page: the retention groups of the layers, and the location of each layer's
    tensors by name.

    All pages have `numel` elements: `page` tokens of the group with the most elements per token.
    Groups with fewer elements per token store more tokens in a page.

    >>> import headwise as hw
    >>> near, far = (
    ...     hw.design(model=8, heads=2, pattern=pattern) for pattern in ("window(5)", "causal")
    ... )
    >>> paging = PageLayout.for_specs([near, near, far], page=4)
    >>> paging.groups, paging.numel  # 2 layers x 16 elements x 4 tokens
    ((RetentionGroup(first=0, last=5, page=4), RetentionGroup(first=0, last=None, page=8)), 128)
    >>> paging.layers[1]["v"]
    TensorPlacement(group=0, start=96, heads=2, width=4, shape=(2, 4))
    """

    groups: tuple[RetentionGroup, ...]
    layers: tuple[Mapping[str, TensorPlacement], ...]
    numel: int
    page: int

    @staticmethod
    def for_specs(specs: Sequence[AttentionSpec], page: int) -> PageLayout:
        """Return the layout for layers with these specs, in order."""
        if type(page) is not int or page < 1:
            raise SpecError(
                f"page={page!r} is not a number of tokens; give a positive integer such as 16"
            )
        widths: dict[KeyRetention, int] = {}
        for spec in specs:
            retention = spec.pattern.retention
            width = sum(map(prod, spec.kv_entry_shapes().values()))
            widths[retention] = widths.get(retention, 0) + width
        retentions = list(widths)
        numel = page * max(widths.values(), default=0)
        groups = [
            RetentionGroup(*retention, numel // (page * width) * page)
            for retention, width in widths.items()
        ]
        starts = [0] * len(groups)
        layers: list[Mapping[str, TensorPlacement]] = []
        for spec in specs:
            index = retentions.index(spec.pattern.retention)
            places = dict[str, TensorPlacement]()
            for name, shape in spec.kv_entry_shapes().items():
                heads = shape[0] if len(shape) > 1 else 1
                places[name] = TensorPlacement(
                    index, starts[index], heads, prod(shape) // heads, shape
                )
                starts[index] += groups[index].page * prod(shape)
            layers.append(places)
        return PageLayout(tuple(groups), tuple(layers), numel, page)

    @property
    def widest(self) -> int:
        """Largest number of elements of one page that belong to one layer, or to one group of its
        heads.
        """
        widest = 0
        for places in self.layers:
            sizes = (self.groups[p.group].page * p.heads * p.width for p in places.values())
            widest = max(widest, sum(sizes))
        return widest


@dataclass(eq=False)
class PagedSequence:
    """One sequence: its length in cached tokens, and per retention group a table from page index to
    page.

    `reserved_pages` is the number of pages of each group that it may come to hold, for admission
    control.
    """

    tables: tuple[dict[int, int], ...]
    reserved_pages: tuple[int, ...] = ()
    length: int = 0
    # Hash of all ids up to the end of each block of `page` tokens, the smallest page size.
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0


class BlockTables:
    """Block tables of all rows: pages are added as tokens arrive, shared for equal prefixes, and
    freed when unreadable.

    >>> block_tables = BlockTables(
    ...     PageLayout((RetentionGroup(0, None, 4),), (), 0, page=4), count=9
    ... )
    >>> one = block_tables.new_sequence()
    >>> _ = block_tables.append_slots([one], [10])
    >>> one.length = 10
    >>> block_tables.publish_prefix(one, range(10))
    >>> two = block_tables.new_sequence()
    >>> length = block_tables.find_prefix(
    ...     two, [*range(9), 77]
    ... )  # the third page is not full, so it is not shared
    >>> block_tables.reuse_prefix(two, length)
    >>> two.length, block_tables.pages.num_allocated
    (8, 3)
    """

    def __init__(self, paging: PageLayout, count: int) -> None:
        self.groups, self.page, self.pages = paging.groups, paging.page, PageAllocator(count)
        self._unit = lcm(*(group.page for group in paging.groups))

    def new_sequence(self, reserved_pages: tuple[int, ...] = ()) -> PagedSequence:
        """Return a row without tokens."""
        return PagedSequence(tuple({} for _ in self.groups), reserved_pages)

    def append_slots(
        self, rows: Sequence[PagedSequence], counts: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Free pages that no later query attends to and allocate pages for `counts` new tokens; all
        or nothing.

        Return what to do before tokens are written: pages to fill with zeros, and pages to copy as
        (from, to).
        """
        for row in rows:
            for group, table in zip(self.groups, row.tables, strict=True):
                if group.last is not None:
                    visible = set(group.visible_pages(row.length))
                    for number in [number for number in table if number not in visible]:
                        self.pages.release(table.pop(number))
        fresh: list[tuple[PagedSequence, int, int, int]] = []
        shared: list[tuple[PagedSequence, int, int]] = []
        for row, count in zip(rows, counts, strict=True):
            end = row.length + count
            for index, group in enumerate(self.groups):
                for number in range(row.length // group.page, -(-end // group.page)):
                    page = row.tables[index].get(number)
                    if page is None:
                        fresh.append((row, index, number, end))
                    elif self._shared(page):
                        shared.append((row, index, number))
        num_needed = len(fresh) + len(shared)
        if num_needed > self.pages.num_free:
            raise CacheFull(
                f"{num_needed:,} more pages are needed and {self.pages.num_free:,} of "
                f"{self.pages.count:,} are free; "
                "wait until a sequence is freed, or make a pool with more pages"
            )
        emptied: list[int] = []
        copied: list[tuple[int, int]] = []
        for row, index, number, end in fresh:
            row.tables[index][number] = page = self.pages.allocate()
            if (number + 1) * self.groups[index].page > end:
                emptied.append(page)  # stale values may be NaN, and NaN times a zero weight is NaN
        for row, index, number in shared:
            if self._shared(old := row.tables[index][number]):  # the last holder keeps the page
                row.tables[index][number] = new = self.pages.allocate()
                self.pages.release(old)
                copied.append((old, new))
        return emptied, copied

    def _shared(self, page: int) -> bool:
        return self.pages.holders(page) > 1

    def fork(self, row: PagedSequence) -> PagedSequence:
        """Return a copy of a row that shares its pages; a shared page is copied on write."""
        for page in _all_pages(row):
            self.pages.add_reference(page)
        tables = tuple(dict(table) for table in row.tables)
        return PagedSequence(
            tables,
            row.reserved_pages,
            row.length,
            list(row.block_hashes),
            row.num_published,
        )

    def free_sequence(self, row: PagedSequence) -> None:
        """Release all pages of a row, the last first, so that prefixes stay findable longest."""
        for page in reversed(list(_all_pages(row))):
            self.pages.release(page)
        row.tables = tuple({} for _ in self.groups)

    def find_prefix(self, row: PagedSequence, ids: Sequence[int], min_length: int = 0) -> int:
        """Return the length of the longest cached prefix of these ids, in full pages and shorter
        than all ids.

        A prefix shorter than `min_length` counts as 0, because those tokens must be appended
        together.
        """
        if not self.groups:
            return 0
        self._hash(row, ids)
        most = (len(ids) - 1) // self._unit * self._unit
        for index, group in enumerate(self.groups):
            if group.last is None:
                missing = (
                    n for n in range(most // group.page) if self._find(row, index, n) is None
                )
                most = next(missing, most // group.page) * group.page // self._unit * self._unit
        ends = range(most, max(min_length, 1) - 1, -self._unit)
        for end in ends:
            if all(page is not None for _, _, page in self._prefix_pages(row, end)):
                return end
        return 0

    def reuse_prefix(self, row: PagedSequence, length: int) -> None:
        """Start a row with the `length` prefix tokens that `find_prefix` has found."""
        for index, number, page in list(self._prefix_pages(row, length)):
            assert page is not None
            self.pages.add_reference(page)
            row.tables[index][number] = page
        row.length = row.num_published = length

    def next_hashes(self, row: PagedSequence, ids: Sequence[int], length: int) -> bytes | None:
        """Return the hash of the block after `length` tokens; None if it is not a full block that
        can be shared.
        """
        end = length + self._unit
        if length % self._unit or end >= len(ids):
            return None
        self._hash(row, ids)
        return row.block_hashes[end // self.page - 1]

    def publish_prefix(self, row: PagedSequence, ids: Sequence[int]) -> None:
        """Name the full pages of a row by the hash of their ids, so that
        `find_prefix` finds them.
        """
        self._hash(row, ids)
        for index, group in enumerate(self.groups):
            for number in range(row.num_published // group.page, row.length // group.page):
                if number in row.tables[index]:
                    self.pages.name(
                        row.tables[index][number], (index, self._block_hash(row, index, number))
                    )
        row.num_published = row.length

    def num_reserved_pages(self, rows: Iterable[PagedSequence]) -> int:
        """Return the number of pages that these rows hold or may come to hold, by their
        reservations.

        Without a window, a shared page counts once. With a window, each row may come to hold all of
        its reservation alone, and a page that is shared now may outlast one of its holders, so it
        counts in addition.
        """
        rows = list(rows)
        total = 0
        for index, group in enumerate(self.groups):
            tables = (row.tables[index].values() for row in rows)
            references = Counter(chain.from_iterable(tables))
            total += sum(row.reserved_pages[index] for row in rows)
            if group.last is None:
                total += len(references) - references.total()
            else:
                total += sum(count > 1 for count in references.values())
        return total

    def _prefix_pages(
        self, row: PagedSequence, length: int
    ) -> Iterator[tuple[int, int, int | None]]:
        """Yield the group's index, page index and cached page (or None) of all pages visible after
        `length` tokens.
        """
        for index, group in enumerate(self.groups):
            for number in group.visible_pages(length):
                yield index, number, self._find(row, index, number)

    def _find(self, row: PagedSequence, index: int, number: int) -> int | None:
        return self.pages.find((index, self._block_hash(row, index, number)))

    def _block_hash(self, row: PagedSequence, index: int, number: int) -> bytes:
        return row.block_hashes[(number + 1) * self.groups[index].page // self.page - 1]

    def _hash(self, row: PagedSequence, ids: Sequence[int]) -> None:
        for start in range(len(row.block_hashes) * self.page, len(ids) - self.page + 1, self.page):
            before = row.block_hashes[-1] if row.block_hashes else b""
            row.block_hashes.append(
                hashlib.sha256(
                    before + array("q", ids[start : start + self.page]).tobytes()
                ).digest()
            )


def _all_pages(row: PagedSequence) -> Iterator[int]:
    return chain.from_iterable(table.values() for table in row.tables)

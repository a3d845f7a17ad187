"""Who holds which page: handed out, shared and given back, whatever lies in it."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import NamedTuple

from ..errors import CacheFull, SpecError
from ..spec.attention_spec import AttentionSpec


class PageAllocator:
    """So many pages by their numbers; each is free, or held by one row or by several.

    A page that was given a name keeps what lies in it when it is given back: until it is handed out anew, whoever knows
    the name may hold it again. Those without a name are handed out first, then the one given back longest ago.

    >>> pages = PageAllocator(3)
    >>> first, second = pages.allocate(), pages.allocate()
    >>> pages.name(first, "once upon")
    >>> pages.release(first), pages.num_held
    (None, 1)
    >>> pages.add_reference(pages.find("once upon")), pages.num_held
    (None, 2)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))  # in the order of being handed out
        self._names: dict[int, Hashable] = {}
        self._named: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many somebody holds; one that is shared counts once."""
        return self.count - len(self._free)

    def holders(self, page: int) -> int:
        """How many rows hold it."""
        return self._holders[page]

    def allocate(self) -> int:
        """A page that nobody holds and that now has one holder; what lay in it is forgotten."""
        if not self._free:
            raise CacheFull(f"all {self.count:,} pages are held; wait until a row leaves, or give a larger budget")
        page, _ = self._free.popitem(last=False)
        if page in self._names:
            del self._named[self._names.pop(page)]
        self._holders[page] = 1
        return page

    def add_reference(self, page: int) -> None:
        """One holder more."""
        self._holders[page] += 1
        self._free.pop(page, None)

    def release(self, page: int) -> None:
        """One holder less; the last one's page is free."""
        if not self._holders[page]:
            raise ValueError(f"page {page} was given back twice; only who holds a page gives it back")
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free[page] = None
            self._free.move_to_end(page, last=page in self._names)

    def name(self, page: int, name: Hashable) -> None:
        """Let what lies in it be found; a name that another page has stays there."""
        if name not in self._named and page not in self._names:
            self._names[page], self._named[name] = name, page

    def find(self, name: Hashable) -> int | None:
        """The page of this name, held or not, while what lies in it is known."""
        return self._named.get(name)


# --- Which pages hold the tokens of which row ----------------------------------------------------------


class RetentionGroup(NamedTuple):
    """What layers that keep alike remember, in pages of so many tokens: the `first` for ever, and the latest `last`."""

    first: int
    last: int | None
    page: int

    def visible_pages(self, length: int) -> Iterator[int]:
        """The numbers of the pages that queries from position `length` on may still read.

        >>> (
        ...     list(RetentionGroup(first=1, last=5, page=4).visible_pages(20)),
        ...     list(RetentionGroup(0, None, 4).visible_pages(9)),
        ... )
        ([0, 4], [0, 1, 2])
        """
        held = -(-length // self.page)
        if self.last is None:
            yield from range(held)
            return
        begin = -(-min(self.first, length) // self.page)
        yield from range(begin)
        yield from range(max(begin, (length - self.last + 1) // self.page), held)

    def max_pages(self, length: int, chunk: int) -> int:
        """The pages that a row holds at most at any time on its way to this length, so many tokens at once.

        >>> RetentionGroup(0, None, 16).max_pages(1000, chunk=1), RetentionGroup(0, 512, 16).max_pages(1000, chunk=1)
        (63, 33)
        """
        whole = -(-length // self.page)
        if self.last is None:
            return whole
        latest = self.last - 1 + min(chunk, length)
        return min(whole, -(-self.first // self.page) + -(-(latest - 1) // self.page) + 1)


class TensorPlacement(NamedTuple):
    """Where one tensor of an entry lies in a page, from which number on: so many heads, each with all its tokens."""

    group: int
    start: int
    heads: int
    width: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PageLayout:
    """How layers divide pages: tables of those that keep alike, and the places of each layer's tensors by name.

    All pages are as large as one of `page` tokens of the group that keeps most of a token; others put more tokens in.

    >>> import headwise as hw
    >>> near, far = (hw.design(model=8, heads=2, pattern=pattern) for pattern in ("window(5)", "causal"))
    >>> paging = PageLayout.for_specs([near, near, far], page=4)
    >>> paging.groups, paging.numbers  # 2 layers x 16 numbers x 4 tokens
    ((RetentionGroup(first=0, last=5, page=4), RetentionGroup(first=0, last=None, page=8)), 128)
    >>> paging.layers[1]["v"]
    TensorPlacement(group=0, start=96, heads=2, width=4, shape=(2, 4))
    """

    groups: tuple[RetentionGroup, ...]
    layers: tuple[Mapping[str, TensorPlacement], ...]
    numbers: int
    page: int

    @staticmethod
    def for_specs(specs: Sequence[AttentionSpec], page: int) -> PageLayout:
        """The pages of layers with these specs, in order."""
        check_page(page)
        memories = list(dict.fromkeys(spec.pattern.retention for spec in specs))
        totals = [sum(_width(spec) for spec in specs if spec.pattern.retention == memory) for memory in memories]
        numbers = page * max(totals, default=0)
        keeps = [
            RetentionGroup(*memory, numbers // (page * total) * page)
            for memory, total in zip(memories, totals, strict=True)
        ]
        starts = [0] * len(memories)
        layers: list[Mapping[str, TensorPlacement]] = []
        for spec in specs:
            group, places = memories.index(spec.pattern.retention), dict[str, TensorPlacement]()
            for name, shape in spec.kv_entry_shapes().items():
                heads = shape[0] if len(shape) > 1 else 1
                places[name] = TensorPlacement(group, starts[group], heads, prod(shape) // heads, shape)
                starts[group] += keeps[group].page * prod(shape)
            layers.append(places)
        return PageLayout(tuple(keeps), tuple(layers), numbers, page)

    @property
    def widest(self) -> int:
        """The numbers of one page that a single layer reads, at most."""
        each = (sum(self.groups[p.group].page * p.heads * p.width for p in places.values()) for places in self.layers)
        return max(each, default=0)


def check_page(page: object) -> None:
    """Refuse what is no size of a page."""
    if type(page) is not int or page < 1:
        raise SpecError(f"page={page!r} is no number of tokens; give 16, say")


def _width(spec: AttentionSpec) -> int:
    return sum(prod(shape) for shape in spec.kv_entry_shapes().values())


@dataclass(eq=False)
class PagedSequence:
    """One sequence: how many tokens of it are remembered, and its pages by their place in it, group by group.

    `need` is how many pages of each group it may come to hold, for whoever reserves; `root` sets apart sequences whose
    remembered tokens follow from more than their ids.
    """

    tables: tuple[dict[int, int], ...]
    reserved_tokens: tuple[int, ...] = ()
    namespace: bytes = b""
    length: int = 0
    block_hashes: list[bytes] = field(
        default_factory=list
    )  # hashes of all ids up to the end of each of the smallest pages
    num_published: int = 0


class PageChanges(NamedTuple):
    """What must happen to pages before tokens are written: some are emptied, some copied, as (from, to)."""

    emptied: list[int]
    copied: list[tuple[int, int]]


class BlockTables:
    """The pages of all rows: extended as tokens come, shared where beginnings are equal, given back when forgotten.

    >>> book = BlockTables(PageLayout((RetentionGroup(0, None, 4),), (), 0, page=4), count=9)
    >>> one = book.new_sequence()
    >>> _ = book.append_slots([one], [10])
    >>> one.length = 10
    >>> book.publish_prefix(one, range(10))
    >>> two = book.new_sequence()
    >>> book.reuse_prefix(two, book.find_prefix(two, [*range(9), 77]))  # two pages are full; the third is its own
    >>> two.length, book.pages.num_held
    (8, 3)
    """

    def __init__(self, paging: PageLayout, count: int) -> None:
        self.keeps, self.page, self.pages = paging.groups, paging.page, PageAllocator(count)
        self._unit = lcm(*(keep.page for keep in paging.groups))

    def new_sequence(self, need: tuple[int, ...] = (), root: bytes = b"") -> PagedSequence:
        """A row without tokens."""
        return PagedSequence(tuple({} for _ in self.keeps), need, root)

    def append_slots(self, rows: Sequence[PagedSequence], counts: Sequence[int]) -> PageChanges:
        """Let go of what no later query reads, and hold pages for so many tokens more; or refuse and take none."""
        for row in rows:
            self._release_unreadable(row)
        touched = [
            (row, group, number, row.length + count)
            for row, count in zip(rows, counts, strict=True)
            for group, keep in enumerate(self.keeps)
            for number in range(row.length // keep.page, -(-(row.length + count) // keep.page))
        ]
        fresh = [spot for spot in touched if spot[2] not in spot[0].tables[spot[1]]]
        shared = [(row, g, n) for row, g, n, _ in touched if n in row.tables[g] and self._shared(row.tables[g][n])]
        if (wanted := len(fresh) + len(shared)) > self.pages.num_free:
            raise CacheFull(
                f"{wanted:,} more pages are needed and {self.pages.num_free:,} of {self.pages.count:,} are free; "
                "wait until a row leaves, or make more"
            )
        changes = PageChanges([], [])
        for row, group, number, end in fresh:
            row.tables[group][number] = page = self.pages.allocate()
            if (number + 1) * self.keeps[group].page > end:
                changes.emptied.append(page)  # what a former row left there must not be read, not even times nothing
        for row, group, number in shared:
            if self._shared(old := row.tables[group][number]):  # until the last of them, which keeps it
                row.tables[group][number] = new = self.pages.allocate()
                self.pages.release(old)
                changes.copied.append((old, new))
        return changes

    def _shared(self, page: int) -> bool:
        return self.pages.holders(page) > 1

    def fork(self, row: PagedSequence) -> PagedSequence:
        """A second row that goes on from the same tokens; a page is copied when one of them writes to it."""
        for page in _all_pages(row):
            self.pages.add_reference(page)
        tables = tuple(dict(table) for table in row.tables)
        return PagedSequence(
            tables, row.reserved_tokens, row.namespace, row.length, list(row.block_hashes), row.num_published
        )

    def free_sequence(self, row: PagedSequence) -> None:
        """Give all its pages back; the last first, so that beginnings stay known longest."""
        for page in reversed(list(_all_pages(row))):
            self.pages.release(page)
        row.tables = tuple({} for _ in self.keeps)

    def find_prefix(self, row: PagedSequence, ids: Sequence[int], opening: int = 0) -> int:
        """How many of these ids are remembered already as the beginning of another row: whole pages, not all of them.

        Fewer than `opening` are none: those tokens must come together.
        """
        if not self.keeps:
            return 0
        self._hash(row, ids)
        most = (len(ids) - 1) // self._unit * self._unit
        for group, keep in enumerate(self.keeps):
            if keep.last is None:
                missing = (n for n in range(most // keep.page) if self._find(row, group, n) is None)
                most = next(missing, most // keep.page) * keep.page // self._unit * self._unit
        ends = range(most, max(opening, 1) - 1, -self._unit)
        return next((end for end in ends if all(p is not None for _, _, p in self._prefix_pages(row, end))), 0)

    def reuse_prefix(self, row: PagedSequence, length: int) -> None:
        """Begin a row with so many tokens that `common` has found."""
        for group, number, page in list(self._prefix_pages(row, length)):
            assert page is not None
            self.pages.add_reference(page)
            row.tables[group][number] = page
        row.length = row.num_published = length

    def next_hashes(self, row: PagedSequence, ids: Sequence[int], length: int) -> bytes | None:
        """What the next tokens behind so many will be known by, where they are enough to be shared."""
        end = length + self._unit
        if length % self._unit or end >= len(ids):
            return None
        self._hash(row, ids)
        return row.block_hashes[end // self.page - 1]

    def publish_prefix(self, row: PagedSequence, ids: Sequence[int]) -> None:
        """Let full pages be found by the ids up to their end."""
        self._hash(row, ids)
        for group, keep in enumerate(self.keeps):
            for number in range(row.num_published // keep.page, row.length // keep.page):
                if number in row.tables[group]:
                    self.pages.name(row.tables[group][number], (group, self._block_hash(row, group, number)))
        row.num_published = row.length

    def num_reserved_pages(self, rows: Iterable[PagedSequence]) -> int:
        """Pages that these rows hold or may come to hold, by their needs.

        What is never forgotten is held once however many share it. Where pages are forgotten, each row may come to hold
        all it needs alone; one that is shared now may outlast who shares it, and counts besides.
        """
        rows, total = list(rows), 0
        for group, keep in enumerate(self.keeps):
            held = Counter(page for row in rows for page in row.tables[group].values())
            total += sum(row.reserved_tokens[group] for row in rows)
            if keep.last is None:
                total += len(held) - held.total()
            else:
                total += sum(times > 1 for times in held.values())
        return total

    def _release_unreadable(self, row: PagedSequence) -> None:
        for keep, table in zip(self.keeps, row.tables, strict=True):
            if keep.last is not None:
                read = set(keep.visible_pages(row.length))
                for number in [number for number in table if number not in read]:
                    self.pages.release(table.pop(number))

    def _prefix_pages(self, row: PagedSequence, length: int) -> Iterator[tuple[int, int, int | None]]:
        """Group, place and page of all that queries behind so many tokens may read; no page where none is known."""
        for group, keep in enumerate(self.keeps):
            for number in keep.visible_pages(length):
                yield group, number, self._find(row, group, number)

    def _find(self, row: PagedSequence, group: int, number: int) -> int | None:
        return self.pages.find((group, self._block_hash(row, group, number)))

    def _block_hash(self, row: PagedSequence, group: int, number: int) -> bytes:
        return row.block_hashes[(number + 1) * self.keeps[group].page // self.page - 1]

    def _hash(self, row: PagedSequence, ids: Sequence[int]) -> None:
        for start in range(len(row.block_hashes) * self.page, len(ids) - self.page + 1, self.page):
            before = row.block_hashes[-1] if row.block_hashes else row.namespace
            row.block_hashes.append(
                hashlib.sha256(before + array("q", ids[start : start + self.page]).tobytes()).digest()
            )


def _all_pages(row: PagedSequence) -> Iterator[int]:
    return (page for table in row.tables for page in table.values())

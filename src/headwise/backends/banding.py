"""A call cut into pieces: blocks of queries that read as many keys in the same way, so that one fused call runs all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..boxes import bends, overlay
from ..pattern import Pattern
from .residues import Thin, rate, residues

# What a pair costs in blocks of so many queries, forward and backward, against one in blocks of 64. For 128 and 256 it
# was measured alone on the machine, for 32 beside other work, for 16 not at all.
HEIGHTS = {16: 2.0, 32: 1.35, 64: 1.0, 128: 0.93, 256: 0.93}
PROBE = range(2048, 2560), range(4096)  # the queries and keys over which heights are compared

Ranges = tuple[range, ...]


class Axis(NamedTuple):
    """Tokens at neighbouring places, as a pattern counts them, each `step` slots behind the one before."""

    places: range
    slot: int = 0
    step: int = 1

    def slots(self, some: range) -> range:
        """Where these places lie."""
        first = self.slot + (some.start - self.places.start) * self.step
        return range(first, first + len(some) * self.step, self.step)


class Piece(NamedTuple):
    """Blocks of as many queries, each with as many keys: their slots, and the places of those of the first block.

    `places` is None where every query of a block may read every key of it.
    """

    queries: Sequence[range]
    keys: Sequence[Ranges]
    places: tuple[range, Ranges] | None

    @property
    def pairs(self) -> int:
        """The scores that it forms for each head."""
        return len(self.queries) * len(self.queries[0]) * sum(map(len, self.keys[0]))


class Block(NamedTuple):
    """Neighbouring queries, the keys that some of them read (of each axis), and the rows between two bends.

    A stretch is its first row and the one behind its last, and what these two rows read of every axis.
    """

    queries: range
    keys: tuple[Ranges, ...]
    stretches: tuple[tuple[int, int, tuple[Ranges, ...], tuple[Ranges, ...]], ...]

    @property
    def full(self) -> bool:
        """Whether every query reads every key."""
        return all(first == last == self.keys for _, _, first, last in self.stretches)

    @property
    def likeness(self) -> object:
        """What is equal of two blocks that one fused call with one mask can run."""
        widths = tuple(len(some) for each in self.keys for some in each)
        if self.full:
            return len(self.queries), sum(widths), len(widths) == 1
        rows = tuple(
            (top - self.queries.start, stop - self.queries.start, self._within(first), self._within(last))
            for top, stop, first, last in self.stretches
        )
        return len(self.queries), widths, rows

    def _within(self, read: tuple[Ranges, ...]) -> tuple[tuple[int, int], ...]:
        """The columns of the block that a row reads."""
        found, before = [], 0
        for every, some in zip(self.keys, read, strict=True):
            for here in every:
                inside = [(before + s.start - here.start, len(s)) for s in some if here.start <= s.start < here.stop]
                found += inside
                before += len(here)
        return tuple(found)


def pieces(pattern: Pattern, asks: Axis, told: Sequence[Axis]) -> list[Piece]:
    """All that these queries read of these keys, each pair once; queries that read nothing are in no piece.

    >>> from headwise.pattern import Window
    >>> [(len(one.queries), one.pairs) for one in pieces(Window(256), Axis(range(1024)), [Axis(range(1024))])]
    [(1, 4096), (1, 8192), (1, 12288), (1, 16384), (11, 224576), (1, 20416)]
    """
    count, rows = rate(pattern), height(pattern)
    found: dict[object, tuple[list[range], list[Ranges], tuple[range, Ranges] | None]] = {}
    for rest in sorted({place % count for place in asks.places[:count]}):
        thin, queries = Thin(pattern, count, rest), _thinned(asks, count, rest)
        axes = [_thinned(axis, count, rest) for axis in told]
        for block in _blocks(thin, queries.places, [axis.places for axis in axes], rows):
            places = None if block.full else _places(thin, block)
            piece = found.setdefault(block.likeness, ([], [], places))
            piece[0].append(queries.slots(block.queries))
            some = zip(axes, block.keys, strict=True)
            piece[1].append(tuple(axis.slots(one) for axis, ranges in some for one in ranges))
    return [Piece(*piece) for piece in found.values()]


def formed(pattern: Pattern, queries: range, keys: range) -> int:
    """The pairs of all pieces, where tokens lie in order: as a series between two bends.

    >>> from headwise.pattern import Window
    >>> formed(Window(256), range(1024), range(1024))
    285952
    >>> 319 * 10**15 - formed(Window(256), range(10**15), range(10**15))  # each reads 319 but near the beginning
    40704
    """
    count, rows = rate(pattern), height(pattern)
    split = zip(residues(count, queries), residues(count, keys), strict=True)
    return sum(_summed(Thin(pattern, count, rest), *some, rows) for rest, some in enumerate(split) if all(some))


_HEIGHTS: dict[str, int] = {}


def height(pattern: Pattern) -> int:
    """How many queries a block has: the more, the better its products run, and more keys are read by few of them."""
    if (told := pattern.text) not in _HEIGHTS:
        thin = Thin(pattern, rate(pattern), 0)
        costs = {rows: each * _each(thin, *PROBE, rows) for rows, each in HEIGHTS.items()}
        _HEIGHTS[told] = min(costs, key=costs.__getitem__)
    return _HEIGHTS[told]


def _thinned(axis: Axis, count: int, rest: int) -> Axis:
    """Those tokens whose place leaves this rest, at places counted among themselves."""
    places = residues(count, axis.places)[rest] if count > 1 else axis.places
    return Axis(places, axis.slot + places.start * count + rest - axis.places.start, axis.step * count)


def _places(thin: Thin, block: Block) -> tuple[range, Ranges]:
    """Where the queries and keys of a block stand, as the whole pattern counts."""
    return thin.all(block.queries), tuple(thin.all(some) for each in block.keys for some in each)


def _cuts(queries: range, rows: int) -> Iterator[range]:
    """Blocks that end at multiples of `rows`, as the blocks of a pattern do."""
    inside = range(queries.start // rows * rows + rows, queries.stop, rows)
    yield from (range(start, stop) for start, stop in pairwise([queries.start, *inside, queries.stop]))


def _blocks(thin: Thin, queries: range, told: Sequence[range], rows: int) -> Iterator[Block]:
    """Blocks of queries with the keys that they read; those that read nothing are left out."""
    if not queries:
        return
    turns = sorted({*queries[:1], queries.stop}.union(*(bends(thin, queries, keys) for keys in told if keys)))
    for some in _cuts(queries, rows):
        inner = turns[bisect_right(turns, some.start) : bisect_left(turns, some.stop)]
        block = _block(thin, some, inner, told)
        if any(block.keys):
            yield block


def _block(thin: Thin, queries: range, turns: Sequence[int], told: Sequence[range]) -> Block:
    stretches, reached = [], [list[range]() for _ in told]
    pending = list(pairwise([queries.start, *turns, queries.stop]))[::-1]
    while pending:
        top, stop = pending.pop()
        first, last = (tuple(_read(thin, i, keys) for keys in told) for i in (top, stop - 1))
        if any(len(a) != len(b) for a, b in zip(first, last, strict=True)):
            # Ranges touch or fall apart in between: such rows are looked at one by one.
            pending += [(row, row + 1) for row in reversed(range(top, stop))]
            continue
        stretches.append((top, stop, first, last))
        for ranges, some, other in zip(reached, first, last, strict=True):
            ranges += [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in zip(some, other, strict=True)]
    return Block(queries, tuple(_joined(ranges) for ranges in reached), tuple(stretches))


def _read(thin: Thin, i: int, keys: range) -> Ranges:
    return _joined(thin.spans(i, keys)) if keys else ()


def _joined(ranges: Sequence[range]) -> Ranges:
    """The same keys as ranges of which no two touch."""
    found: list[range] = []
    for one in overlay(ranges, 1):
        if found and found[-1].stop == one.start:
            found[-1] = range(found[-1].start, one.stop)
        else:
            found.append(one)
    return tuple(found)


def _summed(thin: Thin, queries: range, keys: range, rows: int) -> int:
    turns, total, at = bends(thin, queries, keys), 0, queries.start
    for top, stop in pairwise(turns) if len(turns) < len(queries) // rows else ():
        first = -(-max(top, at) // rows) * rows
        count = (stop - first) // rows
        if count > 2:
            ends = [_each(thin, range(n, n + rows), keys, rows) for n in (first, first + (count - 1) * rows)]
            total += _each(thin, range(at, first), keys, rows) + sum(ends) * count // 2
            at = first + count * rows
    return total + _each(thin, range(at, queries.stop), keys, rows)


def _each(thin: Thin, queries: range, keys: range, rows: int) -> int:
    every = _blocks(thin, queries, (keys,), rows)
    return sum(len(block.queries) * sum(map(len, block.keys[0])) for block in every)

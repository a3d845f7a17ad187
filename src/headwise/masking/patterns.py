"""Patterns kept as tables: some tokens read all, blocks read drawn blocks, nodes read along edges."""

from __future__ import annotations

import argparse
import os
import random
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from ..errors import SpecError
from .key_intervals import (
    BoundaryLines,
    KeyBand,
    KeyRetention,
    any_true,
    block_grid_lines,
    intersect,
    smallest_retention,
)
from .pattern_base import (
    ASCII,
    And,
    BandedPattern,
    LineCountedPattern,
    Or,
    Pattern,
    check_whole_number,
    draw_pattern,
    parse_calls,
)

MAX_TABLE_CELLS = 2**22  # the longest table a pattern may keep


def lookup_clamped(table: tuple[int, ...], index: Any) -> Any:
    """table[index] for an int or a tensor of ints; beyond the end, its last entry.

    >>> lookup_clamped((5, 7, -1), 1), lookup_clamped((5, 7, -1), 40)
    (7, -1)
    """
    end = len(table) - 1
    inside = index - (index - end) * (index > end)  # min(index, end), as arithmetic
    return table[inside] if isinstance(inside, int) else inside.new_tensor(table)[inside]


def is_listed(table: tuple[int, ...], value: Any) -> Any:
    """Whether a value >= 0 stands in the sorted table, led by -1: a binary search that does not branch.

    >>> [value for value in range(9) if is_listed((-1, 1, 4, 5), value)]
    [1, 4, 5]
    """
    at = value - value
    for bit in reversed(range(len(table).bit_length())):
        at = at + (lookup_clamped(table, at + (1 << bit)) <= value) * (1 << bit)
    return lookup_clamped(table, at) == value


@dataclass(frozen=True, repr=False)
class Global(LineCountedPattern):
    """The tokens at `positions` read every key and are read by every query (2004.05150); sorted and unique.

    >>> Global((0, 3)).pairs(range(5), range(5))
    16
    """

    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        positions = {
            check_whole_number("each of positions", position, 0)
            for position in check_entries("positions", self.positions)
        }
        object.__setattr__(self, "positions", tuple(sorted(positions)))

    def allows(self, i: Any, j: Any) -> Any:
        table = (-1, *self.positions)
        return is_listed(table, i) | is_listed(table, j)

    @property
    def retention(self) -> KeyRetention:
        # What a global query reads from memory is no later than itself, hence no later than the last of them.
        return KeyRetention(max(self.positions, default=-1) + 1, 1)

    @property
    def tokens_before_decode(self) -> int | None:
        return None if self.positions else 0

    def spans(self, i: int, keys: range) -> list[range]:
        return [keys] if i in self.positions else [range(at, at + 1) for at in self.positions if at in keys]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        edges = frozenset(at + edge for at in self.positions for edge in (0, 1))
        return BoundaryLines(edges, edges)


@dataclass(frozen=True, repr=False)
class BigBird(LineCountedPattern):
    """Blocks of tokens read blocks (2007.14062): query block r reads key block c if one of these holds.

    |r - c| <= window // 2: the `window` neighbours, its own included. c < globals: all read the first blocks.
    r < globals: the first blocks read all. c was drawn for r: among the blocks that `length` tokens fill or
    begin, each row r >= globals draws `random` different ones that it does not read already, all if fewer are
    left. Beyond those blocks nothing is drawn, and the other three rules go on.

    The paper leaves open which blocks are global. Its code makes the first and the last so, which is BigBird with
    globals=1 | Global of the last block's tokens, and draws for each head apart, in texts of most lengths only among
    the first 2 random + 5 blocks. transformers draws in training alone: else the first block is read 1 + random times.

    >>> bird = BigBird(length=24, block=2, window=3, globals=1, random=2, seed=0)
    >>> [c for c in range(12) if bird.allows(2 * 5, 2 * c)]
    [0, 4, 5, 6, 7, 8]
    """

    length: int
    block: int = 64
    window: int = 3
    globals: int = 2
    random: int = 3
    seed: int = 0
    drawn: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, low in {"length": 1, "block": 1, "window": 1, "globals": 0, "random": 0, "seed": 0}.items():
            check_whole_number(name, getattr(self, name), low)
        if self.window % 2 == 0:
            fact = "window must be odd, for as many blocks before as after"
            raise SpecError(f"{fact}; got {self.window}; use {self.window - 1} or {self.window + 1}")
        if self._rows * self.random > MAX_TABLE_CELLS:
            fact = f"{self._rows} rows of {self.random} random blocks are more than {MAX_TABLE_CELLS}"
            raise SpecError(f"{fact}; got length={self.length}, block={self.block}; use a larger block")
        rows = list(self._draws())
        # One column for each draw, ended by -1, which is no block, for the rows beyond.
        object.__setattr__(self, "drawn", tuple((*column, -1) for column in zip(*rows, strict=True)))

    @property
    def _rows(self) -> int:
        return -(-self.length // self.block)

    def _draws(self) -> Iterator[list[int]]:
        # random() is the only method of Random whose numbers are promised to stay the same in every Python.
        draw = random.Random(self.seed).random
        for row in range(self._rows):
            left = range(self.globals, max(self.globals, row - self.window // 2))
            right = range(max(self.globals, row + self.window // 2 + 1), self._rows)
            free = len(left) + len(right) if row >= self.globals else 0
            ranks: set[int] = set()
            while len(ranks) < min(self.random, free):
                ranks.add(int(draw() * free))
            chosen = [left[rank] if rank < len(left) else right[rank - len(left)] for rank in sorted(ranks)]
            yield chosen + [-1] * (self.random - len(chosen))

    def allows(self, i: Any, j: Any) -> Any:
        r, c = i // self.block, j // self.block
        near = (c >= r - self.window // 2) & (c <= r + self.window // 2)
        drawn = [c == lookup_clamped(column, r) for column in self.drawn]
        return any_true(near, c < self.globals, r < self.globals, *drawn)

    @property
    def retention(self) -> KeyRetention:
        past = [c for column in self.drawn for r, c in enumerate(column) if c < r]
        first = max([self.globals - 1, *past]) + 1
        return KeyRetention(first * self.block, (self.window // 2 + 1) * self.block)

    @property
    def tokens_before_decode(self) -> int | None:
        return None

    def spans(self, i: int, keys: range) -> list[range]:
        r = i // self.block
        if r < self.globals:
            return [keys]
        near = range(r - self.window // 2, r + self.window // 2 + 1)
        read = {*range(self.globals), *near, *(lookup_clamped(column, r) for column in self.drawn)}
        return [intersect(keys, range(c * self.block, (c + 1) * self.block)) for c in sorted(read) if c >= 0]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return block_grid_lines(self.block, queries, keys)


@dataclass(frozen=True, repr=False)
class Edges(LineCountedPattern):
    """Query i reads key j if the edge (i, j) is listed: message passing on a graph; sorted and unique.

    >>> Edges(((0, 1), (2, 0))).allows(2, 0), Edges.complete(3).pairs(range(3), range(3))
    (True, 9)
    """

    edges: tuple[tuple[int, int], ...]
    width: int = field(init=False, repr=False, compare=False)
    codes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges = tuple(sorted({_edge(edge) for edge in check_entries("edges", self.edges)}))
        width = 1 + max((j for _, j in edges), default=0)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "codes", (-1, *(i * width + j for i, j in edges)))

    @classmethod
    def complete(cls, nodes: int) -> Edges:
        """Every edge between `nodes` nodes, and from each to itself: Full on those nodes."""
        return cls(tuple((i, j) for i in range(check_whole_number("nodes", nodes, 0)) for j in range(nodes)))

    def allows(self, i: Any, j: Any) -> Any:
        # A key beyond the listed ones would pass for a key of the next query.
        return (j < self.width) & is_listed(self.codes, i * self.width + j)

    @property
    def retention(self) -> KeyRetention:
        past = [(i, j) for i, j in self.edges if j <= i]
        first = 1 + max((j for _, j in past), default=-1)
        return smallest_retention(KeyRetention(0, 1 + max((i - j for i, j in past), default=0)), KeyRetention(first, 1))

    @property
    def tokens_before_decode(self) -> int | None:
        return None if any(j > i for i, j in self.edges) else 0

    def spans(self, i: int, keys: range) -> list[range]:
        start, stop = (bisect_left(self.edges, (query, 0)) for query in (i, i + 1))
        return [range(j, j + 1) for _, j in self.edges[start:stop] if j in keys]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return BoundaryLines(
            frozenset(i + edge for i, _ in self.edges for edge in (0, 1)),
            frozenset(j + edge for _, j in self.edges for edge in (0, 1)),
        )


def check_entries(name: str, value: object) -> Iterable[object]:
    """The entries of a tuple or list."""
    if not isinstance(value, tuple | list):
        raise SpecError(f"{name} must be a tuple; got {value!r}; write (0,) for a single entry")
    return cast("Iterable[object]", value)


def _edge(value: object) -> tuple[int, int]:
    ends = list(cast("Iterable[object]", value)) if isinstance(value, tuple | list) else []
    if len(ends) != 2:
        raise SpecError(f"an edge is a pair (query, key); got {value!r}; write edges like ((0, 1), (2, 0))")
    return check_whole_number("the query of an edge", ends[0], 0), check_whole_number("the key of an edge", ends[1], 0)


# --- Pattern -------------------------------------------------------------------------------------------

__all__ = ["PATTERNS_BY_NAME", "And", "BigBird", "Blocks", "Causal", "Dilated", "Edges", "First", "Full", "Global"]
__all__ += ["KeyRetention", "Or", "Pattern", "Prefix", "Window", "draw_pattern", "parse_pattern"]


@dataclass(frozen=True, repr=False)
class Full(BandedPattern):
    """Every query reads every key.

    >>> Full().pairs(range(3), range(5))
    15
    """

    @property
    def bands(self) -> tuple[KeyBand, ...]:
        return (KeyBand(),)


@dataclass(frozen=True, repr=False)
class Causal(BandedPattern):
    """A query reads its own key and those before it: j <= i.

    >>> Causal().pairs(range(4), range(4))
    10
    """

    @property
    def bands(self) -> tuple[KeyBand, ...]:
        return (KeyBand(ahead=0),)


@dataclass(frozen=True, repr=False)
class Window(BandedPattern):
    """A query reads `keys` neighbouring keys, its own INCLUDED: `after` follow it, keys-1-after precede.

    Kernels count otherwise: this is flash attention's window_size = (keys - 1 - after, after).

    >>> [j for j in range(12) if Window(keys=4).allows(8, j)]
    [5, 6, 7, 8]
    >>> [j for j in range(12) if Window(keys=5, after=2).allows(8, j)]
    [6, 7, 8, 9, 10]
    """

    keys: int
    after: int = 0

    def __post_init__(self) -> None:
        check_window(self.keys, self.after)

    @property
    def bands(self) -> tuple[KeyBand, ...]:
        return (KeyBand(back=self.keys - 1 - self.after, ahead=self.after),)


@dataclass(frozen=True, repr=False)
class First(BandedPattern):
    """A query reads the first `keys` keys, never ahead: j < keys and j <= i (attention sinks, 2309.17453).

    >>> [[j for j in range(9) if First(keys=2).allows(i, j)] for i in (0, 7)]
    [[0], [0, 1]]
    """

    keys: int

    def __post_init__(self) -> None:
        check_whole_number("keys", self.keys, 1)

    @property
    def bands(self) -> tuple[KeyBand, ...]:
        return (KeyBand(high=self.keys, ahead=0),)


@dataclass(frozen=True, repr=False)
class Prefix(BandedPattern):
    """A query reads the first `keys` keys and those before it: j < keys or j <= i (prefix language models).

    >>> [[j for j in range(9) if Prefix(keys=3).allows(i, j)] for i in (0, 4)]
    [[0, 1, 2], [0, 1, 2, 3, 4]]
    """

    keys: int

    def __post_init__(self) -> None:
        check_whole_number("keys", self.keys, 1)

    @property
    def bands(self) -> tuple[KeyBand, ...]:
        return (KeyBand(high=self.keys), KeyBand(ahead=0))


@dataclass(frozen=True, repr=False)
class Dilated(Pattern):
    """A window with gaps: `keys` keys, `rate` apart, the query's own included; `after` of them follow it.

    >>> [j for j in range(12) if Dilated(keys=4, rate=2, after=1).allows(8, j)]
    [4, 6, 8, 10]
    """

    keys: int
    rate: int
    after: int = 0

    def __post_init__(self) -> None:
        check_window(self.keys, self.after)
        check_whole_number("rate", self.rate, 1)

    @property
    def offsets(self) -> range:
        """Key minus query, for every key it reads."""
        return range(-(self.keys - 1 - self.after) * self.rate, self.after * self.rate + 1, self.rate)

    def allows(self, i: Any, j: Any) -> Any:
        near = (j >= i + self.offsets[0]) & (j <= i + self.offsets[-1])
        return near & (i % self.rate == j % self.rate)

    @property
    def retention(self) -> KeyRetention:
        return KeyRetention(0, 1 - self.offsets[0])

    @property
    def tokens_before_decode(self) -> int | None:
        return None if self.after else 0

    def spans(self, i: int, keys: range) -> list[range]:
        return [range(i + offset, i + offset + 1) for offset in self.offsets if i + offset in keys]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return BoundaryLines(diagonals=frozenset(offset + edge for offset in self.offsets for edge in (0, 1)))

    def _count(self, queries: range, keys: range) -> int:
        shifted = (range(keys.start - offset, keys.stop - offset) for offset in self.offsets)
        return sum(len(intersect(queries, diagonal)) for diagonal in shifted)


@dataclass(frozen=True, repr=False)
class Blocks(Pattern):
    """A query reads the keys of its own block of `size` tokens: i // size == j // size.

    >>> Blocks(3).pairs(range(8), range(8))
    22
    """

    size: int

    def __post_init__(self) -> None:
        check_whole_number("size", self.size, 1)

    def allows(self, i: Any, j: Any) -> Any:
        return i // self.size == j // self.size

    @property
    def retention(self) -> KeyRetention:
        return KeyRetention(0, self.size)

    @property
    def tokens_before_decode(self) -> int | None:
        return 0 if self.size == 1 else None

    def spans(self, i: int, keys: range) -> list[range]:
        start = i // self.size * self.size
        return [intersect(keys, range(start, start + self.size))]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return block_grid_lines(self.size, queries, keys)

    def _count(self, queries: range, keys: range) -> int:
        return sum(
            sign * self._corner(query, key)
            for query, key, sign in (
                (queries.stop, keys.stop, 1),
                (queries.start, keys.stop, -1),
                (queries.stop, keys.start, -1),
                (queries.start, keys.start, 1),
            )
        )

    def _corner(self, queries: int, keys: int) -> int:
        whole_blocks = min(queries, keys) // self.size
        rest = whole_blocks * self.size
        return rest * self.size + min(queries - rest, self.size) * min(keys - rest, self.size)


def check_window(keys: int, after: int) -> None:
    """Refuse a window without its query's own key."""
    check_whole_number("keys", keys, 1)
    check_whole_number("after", after, 0)
    if after >= keys:
        fact = f"{keys} keys, the query's own included, leave room for {keys - 1} after it"
        raise SpecError(f"{fact}; got after={after}; use after in 0..{keys - 1}, or more keys")


PATTERN_CLASSES: tuple[type[Pattern], ...] = (
    Full,
    Causal,
    Window,
    Dilated,
    First,
    Prefix,
    Global,
    Blocks,
    BigBird,
    Edges,
)
PATTERNS_BY_NAME: dict[str, type[Pattern]] = {kind.__name__.lower(): kind for kind in PATTERN_CLASSES}


def parse_pattern(text: str) -> Pattern:
    """The pattern that a text spells: calls, `&` (which binds tighter) and `|`; () may be left out.

    >>> parse_pattern("window(256) | first(4)")
    Window(keys=256) | First(keys=4)
    """
    return parse_calls(text, PATTERNS_BY_NAME)


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}\n")


def main(words: list[str] | None = None) -> int:
    """Draw the mask of a pattern given as text."""
    parser = _OneLineParser(prog="python -m headwise.masking.patterns", description=main.__doc__)
    parser.add_argument("pattern", help="such as 'window(4) | first(2)'; known: " + ", ".join(PATTERNS_BY_NAME))
    parser.add_argument("--tokens", type=int, default=12, help="queries (default 12)")
    parser.add_argument("--keys", type=int, default=None, help="keys (default: as many as queries)")
    given = parser.parse_args(words)
    try:
        keys = given.tokens if given.keys is None else given.keys
        drawing = draw_pattern(parse_pattern(given.pattern), given.tokens, keys)
    except SpecError as error:
        parser.error(str(error))
    try:
        print(drawing if _supported_patterns(drawing) else drawing.translate(ASCII), flush=True)
    except BrokenPipeError:  # the reader has gone, as after `| head`; Python would complain once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _supported_patterns(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())

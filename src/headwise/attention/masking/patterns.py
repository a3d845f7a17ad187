"""The attention patterns: causal, windows, sinks, blocks, BigBird and others; `parse_pattern` reads
them from text.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

from ...util.errors import SpecError
from ...util.size_limits import check_whole_number
from .key_intervals import (
    BoundaryLines,
    KeyBand,
    KeyRetention,
    any_true,
    block_grid_lines,
    intersect,
    one_key_edges,
    smallest_retention,
)
from .pattern_base import (
    And,
    Or,
    Pattern,
    PerHead,
    UnionPattern,
    count_pairs_by_head,
    draw_pattern,
    head_pattern,
    parse_calls,
    select_heads,
)

__all__ = [
    "PATTERNS_BY_NAME",
    "And",
    "BigBird",
    "Blocks",
    "Causal",
    "Dilated",
    "Edges",
    "First",
    "Full",
    "Global",
]
__all__ += [
    "KeyRetention",
    "Or",
    "Pattern",
    "PerHead",
    "Prefix",
    "Window",
    "count_pairs_by_head",
    "draw_pattern",
]
__all__ += ["head_pattern", "parse_pattern", "select_heads"]

MAX_TABLE_CELLS = 2**22  # limit on the size of a pattern's table


# --- Lookups that work on ints and tensors --------------------------------------------------------


def lookup_clamped(table: tuple[int, ...], index: Any) -> Any:
    """table[index] for an int or an integer tensor; indices beyond the end give the last entry.

    >>> lookup_clamped((5, 7, -1), 1), lookup_clamped((5, 7, -1), 40)
    (7, -1)
    """
    end = len(table) - 1
    inside = index - (index - end) * (index > end)  # min(index, end), as arithmetic
    return table[inside] if isinstance(inside, int) else inside.new_tensor(table)[inside]


def is_listed(table: tuple[int, ...], value: Any) -> Any:
    """True where a value >= 0 occurs in a sorted table that starts with -1, by a branch-free binary
    search.

    >>> [value for value in range(9) if is_listed((-1, 1, 4, 5), value)]
    [1, 4, 5]
    """
    index = value - value
    for bit in reversed(range(len(table).bit_length())):
        index = index + (lookup_clamped(table, index + (1 << bit)) <= value) * (1 << bit)
    return lookup_clamped(table, index) == value


# --- Patterns with tables -------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Global(Pattern):
    """The tokens at `positions` attend to every key, and every query attends to them (2004.05150).

    Positions are sorted and made unique.

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
        # A global query attends only to keys up to itself among past keys, hence up to the last
        # global position.
        return KeyRetention(max(self.positions, default=-1) + 1, 1)

    @property
    def tokens_before_decode(self) -> int | None:
        return None if self.positions else 0

    def spans(self, i: int, keys: range) -> list[range]:
        if i in self.positions:
            return [keys]
        return [range(at, at + 1) for at in self.positions if at in keys]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        edges = one_key_edges(self.positions)
        return BoundaryLines(edges, edges)


@dataclass(frozen=True, repr=False)
class BigBird(Pattern):
    """Block-sparse attention (2007.14062): query block r attends to key block c if one of these
    rules applies.

    |r - c| <= window // 2: the `window` neighbouring blocks, including its own. c < globals: all
    queries attend to the first blocks. r < globals: the first blocks attend to all keys. c was
    sampled for r: among the blocks of the first `length` tokens, each row r >= globals samples
    `random` distinct blocks that it does not attend to already (all of them, if there are fewer).
    Beyond `length` nothing is sampled, and the other rules still apply.

    The paper does not define which blocks are global. Its code uses the first and the last, which
    is BigBird with globals=1 | Global of the last block's tokens. It samples separately for each
    head, and for most text lengths only among the first 2 random + 5 blocks. transformers samples
    in training only; otherwise queries attend to the first block 1 + random times.

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
    sampled_blocks: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, low in {
            "length": 1,
            "block": 1,
            "window": 1,
            "globals": 0,
            "random": 0,
            "seed": 0,
        }.items():
            check_whole_number(name, getattr(self, name), low)
        if self.window % 2 == 0:
            problem = "window must be odd, with equally many blocks before and after"
            raise SpecError(
                f"{problem}; got {self.window}; use {self.window - 1} or {self.window + 1}"
            )
        if self._num_rows * self.random > MAX_TABLE_CELLS:
            problem = (
                f"{self._num_rows} rows of {self.random} random blocks are more than "
                f"{MAX_TABLE_CELLS}"
            )
            raise SpecError(
                f"{problem}; got length={self.length}, block={self.block}; use a larger block"
            )
        rows = list(self._sample_rows())
        # One column per sample; the final -1, which is not a block, is for all rows beyond
        # `length`.
        object.__setattr__(
            self, "sampled_blocks", tuple((*column, -1) for column in zip(*rows, strict=True))
        )

    @property
    def _num_rows(self) -> int:
        return -(-self.length // self.block)

    def _sample_rows(self) -> Iterator[list[int]]:
        # Python guarantees a stable sequence across versions only for Random.random().
        draw = random.Random(self.seed).random
        for row in range(self._num_rows):
            left = range(self.globals, max(self.globals, row - self.window // 2))
            right = range(max(self.globals, row + self.window // 2 + 1), self._num_rows)
            free = len(left) + len(right) if row >= self.globals else 0
            ranks: set[int] = set()
            while len(ranks) < min(self.random, free):
                ranks.add(int(draw() * free))
            chosen = [
                left[rank] if rank < len(left) else right[rank - len(left)]
                for rank in sorted(ranks)
            ]
            yield chosen + [-1] * (self.random - len(chosen))

    def allows(self, i: Any, j: Any) -> Any:
        r = i // self.block
        c = j // self.block
        in_window = (c >= r - self.window // 2) & (c <= r + self.window // 2)
        sampled = [c == lookup_clamped(column, r) for column in self.sampled_blocks]
        return any_true(in_window, c < self.globals, r < self.globals, *sampled)

    @property
    def retention(self) -> KeyRetention:
        first = self.globals
        for column in self.sampled_blocks:
            first = max([first, *(c + 1 for r, c in enumerate(column) if c < r)])
        return KeyRetention(first * self.block, (self.window // 2 + 1) * self.block)

    @property
    def tokens_before_decode(self) -> int | None:
        return None

    def spans(self, i: int, keys: range) -> list[range]:
        r = i // self.block
        if r < self.globals:
            return [keys]
        window = range(r - self.window // 2, r + self.window // 2 + 1)
        blocks = {
            *range(self.globals),
            *window,
            *(lookup_clamped(column, r) for column in self.sampled_blocks),
        }
        return [
            intersect(keys, range(c * self.block, (c + 1) * self.block))
            for c in sorted(blocks)
            if c >= 0
        ]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return block_grid_lines(self.block, queries, keys)


@dataclass(frozen=True, repr=False)
class Edges(Pattern):
    """Query i attends to key j if the edge (i, j) is listed, as in message passing on a graph.

    Edges are sorted and made unique.

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
        """All edges between `nodes` nodes, including each node with itself; equals Full on those
        nodes.
        """
        numbers = range(check_whole_number("nodes", nodes, 0))
        return cls(tuple(product(numbers, numbers)))

    def allows(self, i: Any, j: Any) -> Any:
        # Without the first condition, a key beyond `width` gets the code of another query's key.
        return (j < self.width) & is_listed(self.codes, i * self.width + j)

    @property
    def retention(self) -> KeyRetention:
        past = [(i, j) for i, j in self.edges if j <= i]
        first = 1 + max((j for _, j in past), default=-1)
        return smallest_retention(
            KeyRetention(0, 1 + max((i - j for i, j in past), default=0)), KeyRetention(first, 1)
        )

    @property
    def tokens_before_decode(self) -> int | None:
        return None if any(j > i for i, j in self.edges) else 0

    def spans(self, i: int, keys: range) -> list[range]:
        start, stop = (bisect_left(self.edges, (query, 0)) for query in (i, i + 1))
        return [range(j, j + 1) for _, j in self.edges[start:stop] if j in keys]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return BoundaryLines(
            one_key_edges(i for i, _ in self.edges), one_key_edges(j for _, j in self.edges)
        )


def check_entries(name: str, value: object) -> Iterable[object]:
    """`value` if it is a tuple or list; raises SpecError otherwise."""
    if not isinstance(value, tuple | list):
        raise SpecError(f"{name} must be a tuple; got {value!r}; write (0,) for a single entry")
    return cast("Iterable[object]", value)


def _edge(value: object) -> tuple[int, int]:
    ends = list(cast("Iterable[object]", value)) if isinstance(value, tuple | list) else []
    if len(ends) != 2:
        raise SpecError(
            f"an edge is a pair (query, key); got {value!r}; write edges like ((0, 1), (2, 0))"
        )
    return check_whole_number("the query of an edge", ends[0], 0), check_whole_number(
        "the key of an edge", ends[1], 0
    )


# --- Bands and blocks -----------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Full(UnionPattern):
    """Every query attends to every key.

    >>> Full().pairs(range(3), range(5))
    15
    """

    @property
    def members(self) -> tuple[KeyBand, ...]:
        return (KeyBand(),)


@dataclass(frozen=True, repr=False)
class Causal(UnionPattern):
    """A query attends to its own key and all keys before it: j <= i.

    >>> Causal().pairs(range(4), range(4))
    10
    """

    @property
    def members(self) -> tuple[KeyBand, ...]:
        return (KeyBand(ahead=0),)


@dataclass(frozen=True, repr=False)
class Window(UnionPattern):
    """A query attends to `keys` neighbouring keys, including its own: `after` after it, keys - 1 -
    after before it.

    Flash attention counts differently: its window_size is (keys - 1 - after, after).

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
    def members(self) -> tuple[KeyBand, ...]:
        return (KeyBand(back=self.keys - 1 - self.after, ahead=self.after),)


@dataclass(frozen=True, repr=False)
class First(UnionPattern):
    """A query attends to the first `keys` keys, up to its own: j < keys and j <= i (attention
    sinks, 2309.17453).

    >>> [[j for j in range(9) if First(keys=2).allows(i, j)] for i in (0, 7)]
    [[0], [0, 1]]
    """

    keys: int

    def __post_init__(self) -> None:
        check_whole_number("keys", self.keys, 1)

    @property
    def members(self) -> tuple[KeyBand, ...]:
        return (KeyBand(high=self.keys, ahead=0),)


@dataclass(frozen=True, repr=False)
class Prefix(UnionPattern):
    """A query attends to the first `keys` keys and all keys before it: j < keys or j <= i (prefix
    language models).

    >>> [[j for j in range(9) if Prefix(keys=3).allows(i, j)] for i in (0, 4)]
    [[0, 1, 2], [0, 1, 2, 3, 4]]
    """

    keys: int

    def __post_init__(self) -> None:
        check_whole_number("keys", self.keys, 1)

    @property
    def members(self) -> tuple[KeyBand, ...]:
        return (KeyBand(high=self.keys), KeyBand(ahead=0))


@dataclass(frozen=True, repr=False)
class Dilated(Pattern):
    """A dilated window: `keys` keys at a distance of `rate`, including the query's own; `after` of
    them follow it.

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
        """The positions of the allowed keys relative to the query."""
        return range(
            -(self.keys - 1 - self.after) * self.rate, self.after * self.rate + 1, self.rate
        )

    def allows(self, i: Any, j: Any) -> Any:
        in_window = (j >= i + self.offsets[0]) & (j <= i + self.offsets[-1])
        return in_window & (i % self.rate == j % self.rate)

    @property
    def retention(self) -> KeyRetention:
        return KeyRetention(0, 1 - self.offsets[0])

    @property
    def tokens_before_decode(self) -> int | None:
        return None if self.after else 0

    def spans(self, i: int, keys: range) -> list[range]:
        return [range(i + offset, i + offset + 1) for offset in self.offsets if i + offset in keys]

    def lines(self, queries: range, keys: range) -> BoundaryLines:
        return BoundaryLines(diagonals=one_key_edges(self.offsets))

    def _count(self, queries: range, keys: range) -> int:
        shifted = (range(keys.start - offset, keys.stop - offset) for offset in self.offsets)
        return sum(len(intersect(queries, diagonal)) for diagonal in shifted)


@dataclass(frozen=True, repr=False)
class Blocks(Pattern):
    """A query attends to the keys in its block of `size` tokens: i // size == j // size.

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
            sign * self._count_from_zero(query, key)
            for query, key, sign in (
                (queries.stop, keys.stop, 1),
                (queries.start, keys.stop, -1),
                (queries.stop, keys.start, -1),
                (queries.start, keys.start, 1),
            )
        )

    def _count_from_zero(self, queries: int, keys: int) -> int:
        """The allowed pairs of the first `queries` queries and the first `keys` keys."""
        whole_blocks = min(queries, keys) // self.size
        covered = whole_blocks * self.size
        return covered * self.size + min(queries - covered, self.size) * min(
            keys - covered, self.size
        )


def check_window(keys: int, after: int) -> None:
    """Raise SpecError unless the window contains the query's own key."""
    check_whole_number("keys", keys, 1)
    check_whole_number("after", after, 0)
    if after >= keys:
        problem = (
            f"a window of {keys} keys, including the query's own, has at most {keys - 1} after it"
        )
        raise SpecError(f"{problem}; got after={after}; use after in 0..{keys - 1}, or more keys")


# --- Patterns as text -----------------------------------------------------------------------------


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
    PerHead,
)
PATTERNS_BY_NAME: dict[str, type[Pattern]] = {
    kind.__name__.lower(): kind for kind in PATTERN_CLASSES
}


def parse_pattern(text: str) -> Pattern:
    """The pattern written as text: calls combined with `&` (which binds tighter) and `|`; () may be
    omitted.

    >>> parse_pattern("window(256) | first(4)")
    Window(keys=256) | First(keys=4)
    >>> parse_pattern("perhead((causal(), window(256) | first(4)), (0, 1, 1, 1))").pattern_of_head
    (0, 1, 1, 1)
    """
    return parse_calls(text, PATTERNS_BY_NAME)

"""Pattern: which keys a query may read, as one rule from which mask, pair count and cache length are derived.

>>> pattern = Window(keys=4) | First(keys=2)
>>> [j for j in range(12) if pattern.allows(9, j)], pattern.memory, pattern.pairs(range(10), range(10))
([0, 1, 6, 7, 8, 9], Memory(first=2, last=4), 45)
>>> print(draw_pattern(Window(keys=2) | First(keys=1), queries=4, keys=4))
window(2) | first(1)
     0
   0 █···
   1 ██··
   2 ███·
   3 █·██
rows ask, columns are read (█); 9 of 16 pairs (56.2%)
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from headwise.boxes import KeyBand, BoundaryLines, KeyRetention, block_grid_lines, intersect
from headwise.errors import SpecError
from headwise.pattern_base import And, BandedPattern, Or, Pattern, check_whole_number
from headwise.pattern_tables import BigBird, Edges, Global
from headwise.pattern_text import ASCII, draw_pattern, parse_calls

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
    parser = _OneLineParser(prog="python -m headwise.pattern", description=main.__doc__)
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

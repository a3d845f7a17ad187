"""How long requests are: listed, or drawn from a distribution by a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from ..errors import SpecError, suggest
from .calls import MAX_SIZE

MAX_REQUESTS = 100_000  # requests that are drawn one by one
LENGTH_DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "uniform": (("least", "most"), lambda dice, least, most: dice.randint(least, most)),
    "exponential": (("mean",), lambda dice, mean: dice.expovariate(1 / mean)),
}
LENGTHS_SYNTAX = "write 100,2000,30000 or uniform(100, 4000) or exponential(1000)"


def parse_lengths(text: str, count: int, seed: int = 0) -> list[int]:
    """Tokens of each request: those of a list, or so many drawn ones, each at least 1.

    >>> parse_lengths("100, 2000", count=1), parse_lengths("uniform(3, 5)", count=6, seed=1)
    ([100, 2000], [3, 5, 3, 4, 3, 4])
    """
    if found := re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text):
        return _sample_lengths(found[1], _parse_sizes(found[2], text), count, seed)
    return _parse_sizes(text, text)


def _sample_lengths(name: str, said: list[int], count: int, seed: int) -> list[int]:
    if name not in LENGTH_DISTRIBUTIONS:
        raise SpecError(f"lengths cannot be drawn from {name!r}; {suggest(name, LENGTH_DISTRIBUTIONS)}")
    words, draw = LENGTH_DISTRIBUTIONS[name]
    if len(said) != len(words) or said != sorted(said):
        raise SpecError(f"{name}{tuple(said)} says no lengths; write {name}({', '.join(words)})")
    if not 1 <= count <= MAX_REQUESTS:
        raise SpecError(f"{count:,} lengths are too many to be drawn one by one; draw from 1 to {MAX_REQUESTS:,}")
    dice = random.Random(seed)
    return [max(1, round(draw(dice, *said))) for _ in range(count)]


def _parse_sizes(text: str, whole: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,19}", word) and 1 <= int(word) <= MAX_SIZE for word in words):
        raise SpecError(f"{whole!r} says no lengths of at least 1 token; {LENGTHS_SYNTAX}")
    return [int(word) for word in words]

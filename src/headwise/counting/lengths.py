"""How long requests are: listed, or drawn from a distribution by a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from ..errors import SpecError, nearest
from .calls import LARGEST

MOST = 100_000  # requests that are drawn one by one
DRAWN: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "uniform": (("least", "most"), lambda dice, least, most: dice.randint(least, most)),
    "exponential": (("mean",), lambda dice, mean: dice.expovariate(1 / mean)),
}
WRITE = "write 100,2000,30000 or uniform(100, 4000) or exponential(1000)"


def lengths(text: str, count: int, seed: int = 0) -> list[int]:
    """Tokens of each request: those of a list, or so many drawn ones, each at least 1.

    >>> lengths("100, 2000", count=1), lengths("uniform(3, 5)", count=6, seed=1)
    ([100, 2000], [3, 5, 3, 4, 3, 4])
    """
    if found := re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text):
        return _drawn(found[1], _sizes(found[2], text), count, seed)
    return _sizes(text, text)


def _drawn(name: str, said: list[int], count: int, seed: int) -> list[int]:
    if name not in DRAWN:
        raise SpecError(f"lengths cannot be drawn from {name!r}; {nearest(name, DRAWN)}")
    words, draw = DRAWN[name]
    if len(said) != len(words) or said != sorted(said):
        raise SpecError(f"{name}{tuple(said)} says no lengths; write {name}({', '.join(words)})")
    if not 1 <= count <= MOST:
        raise SpecError(f"{count:,} lengths are too many to be drawn one by one; draw from 1 to {MOST:,}")
    dice = random.Random(seed)
    return [max(1, round(draw(dice, *said))) for _ in range(count)]


def _sizes(text: str, whole: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,19}", word) and 1 <= int(word) <= LARGEST for word in words):
        raise SpecError(f"{whole!r} says no lengths of at least 1 token; {WRITE}")
    return [int(word) for word in words]

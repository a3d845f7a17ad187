"""How many ranks divide what: one frozen description with a short text form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import SpecError, suggest
from ..interfaces.registry import CheckedDataclass

# From the outermost to the innermost: ranks that differ in the last one alone are neighbours and talk the most.
PARALLEL_DIMS = ("data", "context", "shards", "tensor")
AUTO = "auto"


@dataclass(frozen=True, repr=False)
class Parallelism(CheckedDataclass):
    """What ranks divide among themselves, each way by so many.

    "data": the rows of a batch, each rank with a copy of the model. "shards": the rows as well, and every tensor of
    the model, put together layer by layer where it is needed (FSDP2). "tensor": heads, and what feed-forwards hold
    inside. "context": the tokens of a row. Ways multiply: data=2,tensor=2 takes four ranks.

    >>> str(Parallelism(data=2, tensor=3)), Parallelism(data=2, tensor=3).size
    ('data=2,tensor=3', 6)
    """

    data: int = 1
    context: int = 1
    shards: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for way, count in zip(PARALLEL_DIMS, self.shape, strict=True):
            if count < 1:
                raise SpecError(f"Spread({way}={count}) cannot be meant; give 1 or more")

    @staticmethod
    def parse(text: str) -> Parallelism:
        """The spread of a text such as "data=2,tensor=2"; a word alone is no spread, its number must be said.

        >>> Parallelism.parse("data=2, shards=2") == Parallelism(data=2, shards=2)
        True
        >>> Parallelism.parse("date=2")
        Traceback (most recent call last):
        headwise.errors.SpecError: there is no way 'date' to spread; did you mean 'data'?
        """
        said: dict[str, int] = {}
        for word in text.split(","):
            way, _, count = (piece.strip() for piece in word.partition("="))
            if way not in PARALLEL_DIMS:
                raise SpecError(f"there is no way {way!r} to spread; {suggest(way, PARALLEL_DIMS)}")
            if way in said or not count.isascii() or not count.isdigit():
                raise SpecError(f"spread={text!r} says nothing; write each way once with its number, as in data=2")
            said[way] = int(count)
        return Parallelism(**said)

    @staticmethod
    def over(text: str, num_ranks: int) -> Parallelism:
        """The spread of this text over so many ranks; "auto" divides the data.

        >>> Parallelism.over("auto", 3)
        Parallelism(data=3)
        >>> Parallelism.over("data=2", 3)
        Traceback (most recent call last):
        headwise.errors.SpecError: a world of 3 cannot be data=2, which takes 2; start 2 processes, or give data=3
        """
        if text == AUTO:
            return Parallelism(data=num_ranks)
        spread = Parallelism.parse(text)
        if spread.size != num_ranks:
            fact = f"a world of {num_ranks} cannot be {spread}, which takes {spread.size}"
            raise SpecError(f"{fact}; start {spread.size} processes, or give data={num_ranks}")
        return spread

    @property
    def shape(self) -> tuple[int, ...]:
        """How many ranks each way has, in the order of WAYS."""
        return tuple(getattr(self, way) for way in PARALLEL_DIMS)

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return math.prod(self.shape)

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank stands, each way.

        >>> Parallelism(data=2, tensor=3).place(4)
        {'data': 1, 'context': 0, 'shards': 0, 'tensor': 1}
        """
        found: dict[str, int] = {}
        for way in reversed(PARALLEL_DIMS):
            rank, found[way] = divmod(rank, getattr(self, way))
        return {way: found[way] for way in PARALLEL_DIMS}

    def rank_groups(self, *ways: str) -> list[list[int]]:
        """All ranks, in circles of those that differ in nothing but these ways.

        >>> Parallelism(data=2, tensor=2).rank_groups("data")
        [[0, 2], [1, 3]]
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.place(rank)
            found.setdefault(tuple(place[way] for way in PARALLEL_DIMS if way not in ways), []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        said = [f"{way}={count}" for way, count in zip(PARALLEL_DIMS, self.shape, strict=True) if count > 1]
        return ",".join(said) or "data=1"

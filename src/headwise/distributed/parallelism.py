"""How ranks divide the work: the number of ranks in each parallel dimension, with a short text form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import SpecError, suggest
from ..interfaces.part import CheckedDataclass

# From the outermost to the innermost: ranks that differ in the last one only are neighbours and communicate the most.
PARALLEL_DIMS = ("data", "context", "shards", "tensor")
AUTO = "auto"


@dataclass(frozen=True, repr=False)
class Parallelism(CheckedDataclass):
    """Number of ranks in each parallel dimension; their product is the number of processes.

    - "data": ranks divide the rows of a batch; each rank has a copy of the model.
    - "shards": ranks divide the rows and every tensor of the model; FSDP2 gathers one layer at a time (2304.11277).
    - "tensor": ranks divide the heads and the hidden units of feed-forwards.
    - "context": ranks divide the tokens of each row.

    data=2,tensor=2 needs four ranks.

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
                raise SpecError(f"cannot use Parallelism({way}={count}); give 1 or more")

    @staticmethod
    def parse(text: str) -> Parallelism:
        """Parse a text such as "data=2,tensor=2"; every dimension needs its number.

        >>> Parallelism.parse("data=2, shards=2") == Parallelism(data=2, shards=2)
        True
        >>> Parallelism.parse("date=2")
        Traceback (most recent call last):
        headwise.errors.SpecError: unknown parallel dimension 'date'; did you mean 'data'?
        """
        sizes: dict[str, int] = {}
        for word in text.split(","):
            way, _, count = (piece.strip() for piece in word.partition("="))
            if way not in PARALLEL_DIMS:
                raise SpecError(f"unknown parallel dimension {way!r}; {suggest(way, PARALLEL_DIMS)}")
            if way in sizes or not count.isascii() or not count.isdigit():
                raise SpecError(
                    f"cannot parse spread={text!r}; write each dimension once with its number, as in data=2"
                )
            sizes[way] = int(count)
        return Parallelism(**sizes)

    @staticmethod
    def over(text: str, num_ranks: int) -> Parallelism:
        """Parse a text and check that it takes exactly `num_ranks` ranks; "auto" divides the data.

        >>> Parallelism.over("auto", 3)
        Parallelism(data=3)
        >>> Parallelism.over("data=2", 3)
        Traceback (most recent call last):
        headwise.errors.SpecError: data=2 needs 2 processes, not 3; start 2 processes, or give data=3
        """
        if text == AUTO:
            return Parallelism(data=num_ranks)
        spread = Parallelism.parse(text)
        if spread.size != num_ranks:
            problem = f"{spread} needs {spread.size} processes, not {num_ranks}"
            raise SpecError(f"{problem}; start {spread.size} processes, or give data={num_ranks}")
        return spread

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks in each dimension, in the order of PARALLEL_DIMS."""
        return tuple(getattr(self, way) for way in PARALLEL_DIMS)

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.shape)

    def place(self, rank: int) -> dict[str, int]:
        """Return the index of a rank in each dimension.

        >>> Parallelism(data=2, tensor=3).place(4)
        {'data': 1, 'context': 0, 'shards': 0, 'tensor': 1}
        """
        index: dict[str, int] = {}
        for way in reversed(PARALLEL_DIMS):
            rank, index[way] = divmod(rank, getattr(self, way))
        return {way: index[way] for way in PARALLEL_DIMS}

    def rank_groups(self, *ways: str) -> list[list[int]]:
        """Return all ranks, grouped so that the ranks of one group differ only in these dimensions.

        >>> Parallelism(data=2, tensor=2).rank_groups("data")
        [[0, 2], [1, 3]]
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.place(rank)
            groups.setdefault(tuple(place[way] for way in PARALLEL_DIMS if way not in ways), []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        sizes = [f"{way}={count}" for way, count in zip(PARALLEL_DIMS, self.shape, strict=True) if count > 1]
        return ",".join(sizes) or "data=1"

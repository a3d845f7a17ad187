"""The words that parts, readers and backends share: what is declared, asked and counted.

Letters everywhere: B batch, T queries, S keys, H score heads, G key or value heads, O output heads, K key
width, V value width, D model, E source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from .layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from .spec import AttentionSpec
    from .tokens import Tokens


Applied = Literal["query", "source", "recalled"]


class Phase(IntEnum):
    """When a modifier acts; modifiers are sorted by it, and keep the order written inside one phase."""

    TURN = 1
    SCORES = 2
    WEIGHTS = 3
    VALUES = 4
    OUTPUTS = 5
    GATES = 6


@dataclass(frozen=True)
class Core:
    """All that a backend and the counting may know of shapes.

    keys[h] is the key head that score head h reads; values[r] the value head that row r of the weights reads.
    `width` is how many channels the product of a score runs over: dim, unless a similarity lifts them.
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dim: int
    vdim: int
    scale: float
    width: int = -1

    def __post_init__(self) -> None:
        if self.width < 0:
            object.__setattr__(self, "width", self.dim)

    def flops(self, pairs: int) -> int:
        """Two matrix products over `pairs` (query, key) pairs: scores, then the reading of values."""
        return 2 * pairs * (len(self.keys) * self.width + len(self.values) * self.vdim)


@dataclass(frozen=True)
class Param:
    """A parameter: its axes, how it starts, and which tokens it is multiplied with.

    `applied` names the tokens that meet it in a matrix product: each "query", each "source" token when it is
    remembered, each "recalled" token whenever it is read; None for what only adds or scales. A constant
    (learned=False) is saved, cut and moved with the rest but never trained. `tied` names its owner.
    """

    layout: Layout
    init: Callable[[tuple[int, ...]], Tensor]
    applied: Applied | None = None
    learned: bool = True
    tied: str | None = None


@dataclass(frozen=True)
class Work:
    """One call: batch, queries asked, tokens newly remembered, keys to be read, pairs allowed (of one row)."""

    batch: int
    queries: int
    remembered: int
    keys: int
    pairs: int = -1

    def __post_init__(self) -> None:
        if self.pairs < 0:
            object.__setattr__(self, "pairs", self.queries * self.keys)

    def tokens(self, applied: str | None) -> int:
        """How many tokens of this call meet a parameter that is `applied` so."""
        each = {"query": self.queries, "source": self.remembered, "recalled": self.keys}
        return self.batch * each[applied] if applied else 0


@runtime_checkable
class Weighted(Protocol):
    """The parameters of one part: by name, by head, or shaped to broadcast over a score tensor."""

    training: bool
    sizes: Mapping[str, int]

    def __getitem__(self, name: str) -> Tensor: ...
    def __contains__(self, name: str) -> bool: ...
    def head(self, h: Any) -> Mapping[str, Tensor]: ...
    def spread(self) -> Mapping[str, Tensor]: ...
    def learned(self) -> list[Tensor]: ...


@runtime_checkable
class Turning(Protocol):
    """Applies every turn of the layer to one side, "q", "k" or "v", of x_BTHK."""

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor: ...


class Asked(NamedTuple):
    """What queries bring: their input, themselves turned, the scale of scores, and where they stand."""

    x_BTD: Tensor
    q_BTHK: Tensor
    scale: float
    at: Tokens


@runtime_checkable
class Cell(Protocol):
    """The (query, key) pairs in hand: their positions, and `take`, which reads per-query factors at an index."""

    @property
    def i(self) -> Any: ...
    @property
    def j(self) -> Any: ...
    def take(self, factors: Tensor, index: Any) -> Tensor: ...


class Freedom(NamedTuple):
    """Orthogonal maps of a head's channels: any rotation within a plane, any map at all within a room, no other.

    `a & b` are the maps of both:

    >>> Freedom(planes=((0, 2), (1, 3))) & Freedom(rooms=((0, 1, 2), (3,)))
    Freedom(planes=((0, 2),), rooms=())
    """

    planes: tuple[tuple[int, int], ...] = ()
    rooms: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def whole(width: int) -> Freedom:
        """Every orthogonal map of so many channels."""
        return Freedom(rooms=(tuple(range(width)),) if width else ())

    @staticmethod
    def alike(columns: Sequence[Sequence[float]]) -> Freedom:
        """The maps that commute with scaling channels so: any among channels with one column of factors.

        >>> Freedom.alike([(1.0, 2.0), (1.0, 3.0), (1.0, 2.0)])
        Freedom(planes=(), rooms=((0, 2), (1,)))
        """
        rooms: dict[tuple[float, ...], list[int]] = {}
        for channel, factors in enumerate(columns):
            rooms.setdefault(tuple(factors), []).append(channel)
        return Freedom(rooms=tuple(map(tuple, rooms.values())))

    def __and__(self, other: Freedom) -> Freedom:
        mine = [plane for plane in self.planes if other._holds(plane)]
        theirs = [plane for plane in other.planes if self._holds(plane) and set(plane) not in map(set, mine)]
        rooms = [tuple(sorted(set(a) & set(b))) for a in self.rooms for b in other.rooms]
        return Freedom((*mine, *theirs), tuple(room for room in rooms if room))

    def _holds(self, plane: tuple[int, int]) -> bool:
        return any(set(plane) == set(one) for one in self.planes) or any(set(plane) <= set(one) for one in self.rooms)


@runtime_checkable
class Base(Protocol):
    """Makes a small spec from the words of `design`; what is not said gets sizes that no two axes share."""

    def __call__(self, **said: Any) -> AttentionSpec: ...


@runtime_checkable
class Among(Protocol):
    """Ranks that a layer's heads, or the tokens of its rows, are spread over."""

    def whole(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor: ...
    def term(self, value: Tensor) -> Tensor: ...


@dataclass
class Ledger:
    """Training terms by (layer, term): set, never added to, so that recomputing a layer cannot double them.

    `among` is with whom the layer shares its heads or tokens: a part sums over all of these with `whole`.
    """

    terms: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], "Tensor"])
    layer: str = ""
    among: Among | None = None

    def set(self, term: str, value: Tensor) -> None:
        """Write one term of the layer in hand."""
        self.terms[self.layer, term] = value if self.among is None else self.among.term(value)

    def whole(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor:
        """A sum over all "heads" or "tokens" of a layer, from that over those in hand."""
        return x if self.among is None else self.among.whole(x, over)

    def total(self, term: str) -> Tensor | float:
        """The sum of one term over layers."""
        return sum((v for (_, name), v in self.terms.items() if name == term), 0.0)

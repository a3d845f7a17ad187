"""The words that parts, readers and backends share: what is declared, asked and counted.

Letters everywhere: B batch, T queries, S keys, H score heads, G key or value heads, O output heads, K key
width, V value width, D model, E source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from .axis_layout import AxisLayout

if TYPE_CHECKING:
    from torch import Tensor

    from ..masking.sequence_info import SequenceInfo
    from ..spec.attention_spec import AttentionSpec


AppliedTo = Literal["query", "source", "recalled"]


class Phase(IntEnum):
    """When a modifier acts; modifiers are sorted by it, and keep the order written inside one phase."""

    QK_TRANSFORM = 1
    SCORES = 2
    WEIGHTS = 3
    VALUES = 4
    OUTPUTS = 5
    GATES = 6


@dataclass(frozen=True)
class CoreShape:
    """All that a backend and the counting may know of shapes.

    keys[h] is the key head that score head h reads; values[r] the value head that row r of the weights reads.
    `width` is how many channels the product of a score runs over: dim, unless a similarity lifts them.
    """

    key_head_of_query: tuple[int, ...]
    value_head_of_row: tuple[int, ...]
    dim: int
    vdim: int
    scale: float
    score_dim: int = -1

    def __post_init__(self) -> None:
        if self.score_dim < 0:
            object.__setattr__(self, "score_dim", self.dim)

    def flops(self, pairs: int) -> int:
        """Two matrix products over `pairs` (query, key) pairs: scores, then the reading of values."""
        return 2 * pairs * (len(self.key_head_of_query) * self.score_dim + len(self.value_head_of_row) * self.vdim)


@dataclass(frozen=True)
class Param:
    """A parameter: its axes, how it starts, and which tokens it is multiplied with.

    `applied` names the tokens that meet it in a matrix product: each "query", each "source" token when it is
    remembered, each "recalled" token whenever it is read; None for what only adds or scales. A constant
    (learned=False) is saved, cut and moved with the rest but never trained. `tied` names its owner.
    """

    layout: AxisLayout
    init: Callable[[tuple[int, ...]], Tensor]
    applied: AppliedTo | None = None
    trainable: bool = True
    tied_to: str | None = None


@dataclass(frozen=True)
class CallSize:
    """One call: batch, queries asked, tokens newly remembered, keys to be read, pairs allowed (of one row)."""

    batch: int
    queries: int
    new_tokens: int
    keys: int
    pairs: int = -1

    def __post_init__(self) -> None:
        if self.pairs < 0:
            object.__setattr__(self, "pairs", self.queries * self.keys)

    def tokens(self, applied: str | None) -> int:
        """How many tokens of this call meet a parameter that is `applied` so."""
        each = {"query": self.queries, "source": self.new_tokens, "recalled": self.keys}
        return self.batch * each[applied] if applied else 0


@runtime_checkable
class PartParams(Protocol):
    """The parameters of one part: by name, by head, or shaped to broadcast over a score tensor."""

    training: bool
    sizes: Mapping[str, int]

    def __getitem__(self, name: str) -> Tensor: ...
    def __contains__(self, name: str) -> bool: ...
    def head(self, h: Any) -> Mapping[str, Tensor]: ...
    def broadcast_over_scores(self) -> Mapping[str, Tensor]: ...
    def trainable(self) -> list[Tensor]: ...


@runtime_checkable
class TransformsQK(Protocol):
    """Applies every turn of the layer to one side, "q", "k" or "v", of x_BTHK."""

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor: ...


class QueryContext(NamedTuple):
    """What queries bring: their input, themselves turned, the scale of scores, and where they stand."""

    x_BTD: Tensor
    q_BTHK: Tensor
    scale: float
    sequence: SequenceInfo


@runtime_checkable
class ScorePosition(Protocol):
    """The (query, key) pairs in hand: their positions, and `take`, which reads per-query factors at an index."""

    @property
    def i(self) -> Any: ...
    @property
    def j(self) -> Any: ...
    def take(self, factors: Tensor, index: Any) -> Tensor: ...


class SymmetryGroup(NamedTuple):
    """Orthogonal maps of a head's channels: any rotation within a plane, any map at all within a room, no other.

    `a & b` are the maps of both:

    >>> SymmetryGroup(planes=((0, 2), (1, 3))) & SymmetryGroup(blocks=((0, 1, 2), (3,)))
    SymmetryGroup(planes=((0, 2),), blocks=())
    """

    planes: tuple[tuple[int, int], ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def full(width: int) -> SymmetryGroup:
        """Every orthogonal map of so many channels."""
        return SymmetryGroup(blocks=(tuple(range(width)),) if width else ())

    @staticmethod
    def commuting_with_scales(columns: Sequence[Sequence[float]]) -> SymmetryGroup:
        """The maps that commute with scaling channels so: any among channels with one column of factors.

        >>> SymmetryGroup.commuting_with_scales([(1.0, 2.0), (1.0, 3.0), (1.0, 2.0)])
        SymmetryGroup(planes=(), blocks=((0, 2), (1,)))
        """
        rooms: dict[tuple[float, ...], list[int]] = {}
        for channel, factors in enumerate(columns):
            rooms.setdefault(tuple(factors), []).append(channel)
        return SymmetryGroup(blocks=tuple(map(tuple, rooms.values())))

    def __and__(self, other: SymmetryGroup) -> SymmetryGroup:
        mine = [plane for plane in self.planes if other._contains(plane)]
        theirs = [plane for plane in other.planes if self._contains(plane) and set(plane) not in map(set, mine)]
        rooms = [tuple(sorted(set(a) & set(b))) for a in self.blocks for b in other.blocks]
        return SymmetryGroup((*mine, *theirs), tuple(room for room in rooms if room))

    def _contains(self, plane: tuple[int, int]) -> bool:
        return any(set(plane) == set(one) for one in self.planes) or any(set(plane) <= set(one) for one in self.blocks)


@runtime_checkable
class SpecFactory(Protocol):
    """Makes a small spec from the words of `design`; what is not said gets sizes that no two axes share."""

    def __call__(self, **said: Any) -> AttentionSpec: ...


@runtime_checkable
class ReductionGroup(Protocol):
    """Ranks that a layer's heads, or the tokens of its rows, are spread over."""

    def sum_over(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor: ...
    def own_share(self, value: Tensor) -> Tensor: ...


@dataclass
class AuxLosses:
    """Training terms by (layer, term): set, never added to, so that recomputing a layer cannot double them.

    `among` is with whom the layer shares its heads or tokens: a part sums over all of these with `whole`.
    """

    terms: dict[tuple[str, str], Tensor] = field(default_factory=dict[tuple[str, str], "Tensor"])
    layer: str = ""
    group: ReductionGroup | None = None

    def set(self, term: str, value: Tensor) -> None:
        """Write one term of the layer in hand."""
        self.terms[self.layer, term] = value if self.group is None else self.group.own_share(value)

    def sum_over(self, x: Tensor, over: Literal["heads", "tokens"]) -> Tensor:
        """A sum over all "heads" or "tokens" of a layer, from that over those in hand."""
        return x if self.group is None else self.group.sum_over(x, over)

    def total(self, term: str) -> Tensor | float:
        """The sum of one term over layers."""
        return sum((v for (_, name), v in self.terms.items() if name == term), 0.0)

"""The seams: what a part of an attention layer may do, and the little that others may know of it.

A part is a frozen description with pure methods. Its parameters are declared by named axes and handed back
to it as `p`; so one declaration builds, counts, cuts, shares and saves it. Letters: B batch, T queries,
S keys, H score heads, G key or value heads, O output heads, K key width, V value width, D model, E source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from .heads import Heads
from .layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from .spec import AttentionSpec


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
    """

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dim: int
    vdim: int
    scale: float

    def flops(self, pairs: int) -> int:
        """Two matrix products over `pairs` (query, key) pairs: scores, then the reading of values."""
        return 2 * pairs * (len(self.keys) * self.dim + len(self.values) * self.vdim)


@dataclass(frozen=True)
class Param:
    """A parameter: its axes, how it starts, and which tokens it is multiplied with.

    `applied` names the tokens that meet it in a matrix product: each "query", each "source" token when it is
    remembered, each "recalled" token whenever it is read; None for what only adds or scales. A constant
    (learned=False) is saved, cut and moved with the rest but never trained. `tied` names its owner.
    """

    layout: Layout
    init: Callable[[tuple[int, ...]], Tensor]
    applied: Literal["query", "source", "recalled"] | None = None
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


class Weighted(Protocol):
    """The parameters of one part: by name, by head, or shaped to broadcast over a score tensor."""

    training: bool
    sizes: Mapping[str, int]

    def __getitem__(self, name: str) -> Tensor: ...
    def __contains__(self, name: str) -> bool: ...
    def head(self, h: int) -> Mapping[str, Tensor]: ...
    def spread(self) -> Mapping[str, Tensor]: ...


class Turning(Protocol):
    """Applies every turn of the layer to one side, "q", "k" or "v", of x_BTHK."""

    def __call__(self, x_BTHK: Tensor, side: str) -> Tensor: ...


class Asked(NamedTuple):
    """What a query token brings: its input, its turned queries, the scale of scores, and whether it is no padding."""

    x_BTD: Tensor
    q_BTHK: Tensor
    scale: float
    live_BT: Tensor


class Cell(Protocol):
    """The (query, key) pairs in hand: their positions, and `take`, which reads per-query factors at an index."""

    i: Any
    j: Any

    def take(self, factors: Tensor, index: Any) -> Tensor: ...


class Base(Protocol):
    """Makes a small spec from the words of `design`; what is not said gets sizes that no two axes share."""

    def __call__(self, **said: Any) -> AttentionSpec: ...


@dataclass(frozen=True)
class Part(ABC):
    """Anything an attention layer is made of. Every method has a meaning of its own and a neutral default."""

    paper: ClassVar[str] = ""

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        """Its parameters, by named axes."""
        return {}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        """The sizes of axes that only it has."""
        return {}

    def entry(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        """What it adds to a remembered token."""
        return {}

    def flops(self, spec: AttentionSpec, work: Work) -> int:
        """Matrix products beyond the declared parameters and the core."""
        return 0

    def clashes(self, spec: AttentionSpec) -> Iterable[str]:
        """Why it cannot stand in this spec; nothing when it can."""
        return ()

    def sources(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        """The score heads it needs so that these come out right."""
        return heads

    def settled(self, spec: AttentionSpec) -> Self:
        """Itself with every size written out that would otherwise follow from the number of heads."""
        return self

    def fitted(self, heads: Heads) -> Heads:
        """The heads it needs when a design names only the plain ones."""
        return heads

    def placed(self, layer: int, layers: int) -> Self:
        """Itself at one depth: schedules become numbers."""
        return self

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        """Small specs, together covering every field; the contract runs on each."""
        return iter(())


class Project(Part):
    """Where queries, keys and values come from, and what is remembered of a token."""

    @abstractmethod
    def core(self, spec: AttentionSpec) -> Core: ...
    @abstractmethod
    def ask(self, x_BTD: Tensor, turn: Turning, p: Weighted) -> Tensor: ...
    @abstractmethod
    def remember(self, z_BSE: Tensor, turn: Turning, p: Weighted) -> dict[str, Tensor]: ...
    @abstractmethod
    def recall(self, entry: Mapping[str, Tensor], turn: Turning, p: Weighted) -> tuple[Tensor, Tensor]: ...

    def deliver(self, o_BTHV: Tensor, p: Weighted) -> Tensor:
        """What was read, brought to value width."""
        return o_BTHV

    def turned(self, spec: AttentionSpec) -> int:
        """How many channels of a head the turns reach."""
        return spec.heads.dim

    def rewrites(self, spec: AttentionSpec) -> Mapping[str, Project]:
        """Algebraically equal forms over the same parameters; "step" is the one for a single query."""
        return {}


class Modifier(Part):
    """A part of the list: it acts in its phase."""

    @property
    @abstractmethod
    def phase(self) -> Phase: ...


class Turn(Modifier):
    """Changes queries, keys or values token by token, before they meet."""

    @property
    def phase(self) -> Phase:
        """Before the scores."""
        return Phase.TURN

    def reaches(self, spec: AttentionSpec) -> frozenset[str]:
        """The sides it changes."""
        return frozenset("qk")

    @abstractmethod
    def turn(self, x_BTHK: Tensor, side: str, position_BT: Tensor, p: Weighted) -> Tensor: ...


class Similarity(Part):
    """How alike a query and a key are."""

    @abstractmethod
    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: Weighted) -> Tensor: ...

    def factor(self, core: Core) -> float:
        """What scores are multiplied with."""
        return core.scale

    def state(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        """What it can remember of all past tokens at once; empty when each token must be kept."""
        return {}

    def fold(
        self, state: Mapping[str, Tensor], k_BHSK: Tensor, v_BHSV: Tensor, live_BS: Tensor, p: Weighted
    ) -> dict[str, Tensor]:
        """The state after these tokens; those not live leave no trace."""
        raise AssertionError("a similarity without a state was asked to fold tokens into one")

    def read(self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: Weighted) -> tuple[Tensor, Tensor]:
        """What a query reads from the state: the weighted values, and the total weight."""
        raise AssertionError("a similarity without a state was asked to read one")


class ScoreStep(Modifier):
    """Changes one score at a time; written once, for a number and for a tensor alike."""

    additive: ClassVar[bool] = False

    @property
    def phase(self) -> Phase:
        """On the scores."""
        return Phase.SCORES

    def ask(self, asked: Asked, p: Weighted) -> Tensor | None:
        """Factors [B, T, H, R] of each query, when the step needs them."""
        return None

    @abstractmethod
    def score(self, s: Tensor, cell: Cell, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor: ...


class Mix(Modifier):
    """Mixes heads at every (query, key) pair, on the scores or on the weights."""

    def ask(self, x_BTD: Tensor, p: Weighted) -> dict[str, Tensor]:
        """Factors of each query token."""
        return {}

    def remember(self, z_BSE: Tensor, p: Weighted) -> dict[str, Tensor]:
        """Factors of each key token, kept in its entry."""
        return {}

    @abstractmethod
    def pair(self, a_H: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: Weighted) -> Tensor: ...
    @abstractmethod
    def mix(self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: Weighted) -> Tensor: ...


class Normaliser(Part):
    """Scores to weights. A query with nothing to read gets no weight at all."""

    @abstractmethod
    def row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: Weighted) -> Tensor: ...


class WeightStep(Modifier):
    """Changes weights one at a time after normalising, in training only or always."""

    @property
    def phase(self) -> Phase:
        """On the weights."""
        return Phase.WEIGHTS

    @abstractmethod
    def weigh(self, w_BHTS: Tensor, p: Weighted) -> Tensor: ...


class ValueStep(Modifier):
    """Adds to the value that a query reads from a key, depending on where the two stand."""

    @property
    def phase(self) -> Phase:
        """On the values."""
        return Phase.VALUES

    @abstractmethod
    def value(self, i: int, j: int, p: Weighted) -> Tensor: ...
    @abstractmethod
    def read(self, w_BHTS: Tensor, i: Tensor, j: Tensor, p: Weighted) -> Tensor: ...


class OutputStep(Modifier):
    """Changes per-head outputs token by token; may join several rows into one output head."""

    @property
    def phase(self) -> Phase:
        """On the outputs."""
        return Phase.OUTPUTS

    def voices(self, speaks: tuple[int, ...]) -> tuple[int, ...]:
        """The rows it needs, in order, to give these output heads."""
        return speaks

    def speaks(self, rows: int) -> tuple[int, ...]:
        """The own row of each output head when nothing has been cut."""
        return tuple(range(rows))

    @abstractmethod
    def finish(self, o_BTHV: Tensor, x_BTD: Tensor, p: Weighted) -> Tensor: ...


class Gate(Modifier):
    """Scales output heads by something known before the core, so that a backend may skip what is zero."""

    @property
    def phase(self) -> Phase:
        """Last, before the merge."""
        return Phase.GATES

    @abstractmethod
    def gate(self, asked: Asked, p: Weighted, ledger: Ledger | None) -> Tensor: ...


class Merge(Part):
    """Per-head outputs to the model's width."""

    @abstractmethod
    def merge(self, o_BTOV: Tensor, p: Weighted) -> Tensor: ...


@dataclass
class Ledger:
    """Training terms by (layer, term): set, never added to, so that recomputing a layer cannot double them."""

    terms: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    layer: str = ""

    def set(self, term: str, value: Tensor) -> None:
        """Write one term of the layer in hand."""
        self.terms[self.layer, term] = value

    def total(self, term: str) -> Tensor | float:
        """The sum of one term over layers."""
        return sum((v for (_, name), v in self.terms.items() if name == term), 0.0)

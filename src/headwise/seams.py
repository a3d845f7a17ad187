"""The seams: what a part of an attention layer may do.

A part is a frozen description with pure methods. Its parameters are declared by named axes and handed back
to it as `p`; so one declaration builds, counts, cuts, shares and saves it. Letters: see `headwise.terms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .heads import Heads
from .layout import Layout
from .registry import Spoken
from .terms import Asked, Base, Cell, Core, Ledger, Param, Phase, Turning, Weighted, Work

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .spec import AttentionSpec


@dataclass(frozen=True, repr=False)
class Part(Spoken, ABC):
    """Anything an attention layer is made of. Every method has a meaning of its own and a neutral default."""

    paper: ClassVar[str] = ""
    disagreements: ClassVar[tuple[str, ...]] = ()  # where its sources disagree, and which of them it follows
    positional: ClassVar[bool] = False  # whether it asks where tokens stand

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

    def joins_keys(self) -> bool:
        """Whether it takes all key heads as one vector, so that how often each is there matters."""
        return False

    def settled(self, spec: AttentionSpec) -> Self:
        """Itself with every size written out that would otherwise follow from the number of heads."""
        return self

    def fitted(self, heads: Heads) -> Heads:
        """The heads it needs when a design names only the plain ones."""
        return self.widened(heads)

    def widened(self, heads: Heads) -> Heads:
        """These heads, as wide as its own numbers ask for: asked anew wherever it is placed."""
        return heads

    def longest(self, spec: AttentionSpec) -> int | None:
        """How many positions it knows, counted from 0; None when it can stand anywhere."""
        return None

    def placed(self, layer: int, layers: int) -> Self:
        """Itself at one depth: schedules become numbers."""
        return self

    @classmethod
    def examples(cls, base: Base) -> Iterator[AttentionSpec]:
        """Small specs, together covering every field; the contract runs on each."""
        return iter(())


class Project(Part):
    """Where queries, keys and values come from, and what is remembered of a token."""

    plain: ClassVar[bool] = False  # whether heads compare, read and are remembered dim and vdim wide, in every form

    @abstractmethod
    def core(self, spec: AttentionSpec) -> Core: ...
    @abstractmethod
    def ask(self, x_BTD: Tensor, turn: Turning, p: Weighted) -> Tensor: ...
    @abstractmethod
    def remember(self, z_BSE: Tensor, turn: Turning, p: Weighted) -> dict[str, Tensor]: ...
    @abstractmethod
    def recall(self, entry: Mapping[str, Tensor], turn: Turning, p: Weighted) -> tuple[Tensor, Tensor]: ...

    def deliver(self, o_BTHV: Tensor, voices: tuple[int, ...], p: Weighted) -> Tensor:
        """What these score heads' weights read, brought to value width."""
        return o_BTHV

    def turned(self, spec: AttentionSpec) -> int:
        """How many channels of a head the turns reach."""
        return spec.heads.dim

    def shifts(self, spec: AttentionSpec, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Biases that all keys ("k") or all values ("v") have alike: of values, what each voice reads of it."""
        return {}

    def without(self, biases: frozenset[str]) -> Self:
        """Itself without these biases."""
        return self

    def absorb(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        """The weights of a side, bias and all, behind which the matrix met every head; none when it cannot."""
        return {}

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

    def levels(self) -> bool:
        """Whether every head's vector leaves it with one length, whatever it came with."""
        return False

    def place(self, position_BT: Tensor, exact: torch.dtype, p: Weighted) -> Any:
        """What it needs of the positions, for both sides alike, in a precision that angles can stand."""
        return None

    @abstractmethod
    def turn(self, x_BTHK: Tensor, side: str, placed: Any, p: Weighted) -> Tensor: ...

    def matrix(self, side: str, p: Mapping[str, Tensor]) -> Tensor | None:
        """What it multiplies the channels of every head and token with, [out, in], when that is all it does."""
        return None

    def without(self, sides: frozenset[str]) -> Self | None:
        """Itself on its other sides alone; None when it has none."""
        return self


class Foldable(Part):
    """What can remember all past tokens as sums over them, so that no token has to be kept."""

    def state(self, spec: AttentionSpec) -> Mapping[str, Layout]:
        """The sums, by named axes; empty when each token must be kept."""
        return {}

    def features(self, core: Core) -> int:
        """How many numbers of a token its sums run over; none when all tokens have one share."""
        return 0

    def share(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: Weighted) -> Tensor:
        """What the weights of these pairs are in proportion to, [B, H, T, S]."""
        raise AssertionError("a part without a state was asked for shares")

    def fold(
        self, state: Mapping[str, Tensor], k_BHSK: Tensor, v_BHSV: Tensor, live_BS: Tensor, p: Weighted
    ) -> dict[str, Tensor]:
        """The state after these tokens; those not live leave no trace."""
        raise AssertionError("a part without a state was asked to fold tokens into one")

    def read(self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: Weighted) -> tuple[Tensor, Tensor]:
        """What a query reads from the state: the values by their shares, and the total of these."""
        raise AssertionError("a part without a state was asked to read one")


class Similarity(Foldable):
    """How alike a query and a key are: `signed` when that may be negative, `linear` when it is in the key.

    `headed` when it has parameters of its own per score head, so that heads which share a key are not alike to it.
    """

    signed: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    headed: ClassVar[bool] = False

    @abstractmethod
    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: Weighted) -> Tensor: ...

    def factor(self, core: Core) -> float:
        """What scores are multiplied with."""
        return core.scale

    def lift(self, x_BTHK: Tensor, p: Weighted) -> Tensor:
        """What of queries, or of keys, the vectorised forms compare: once for each token, before heads share keys."""
        return x_BTHK

    def compared(self, core: Core) -> int:
        """How many channels that has."""
        return core.dim


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
    """Mixes heads at every (query, key) pair, on the scores or on the weights; `even` when at all pairs alike."""

    even: ClassVar[bool] = False

    def gives(self, heads: int) -> int:
        """How many heads it makes of so many."""
        return heads

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


class Normaliser(Foldable):
    """Scores to weights. A query with nothing to read gets no weight at all.

    `proportional` when weights are the scores themselves over their sum, which is all that a similarity's state
    can give; one that does not look at scores may have a state of its own;
    `shift_free` when it does not see one number added to a whole row; `whole` when a row that reads anything
    has weights that sum to one.
    """

    proportional: ClassVar[bool] = False
    shift_free: ClassVar[bool] = False
    whole: ClassVar[bool] = False

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
    """Changes per-head outputs token by token; if it `joins`, several rows become one output head."""

    joins: ClassVar[bool] = False

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

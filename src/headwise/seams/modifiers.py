"""The list: what may change a layer at one phase of its computation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from ..terms import Asked, Cell, Freedom, Ledger, Phase, Weighted
from .base import Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..spec import AttentionSpec


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

    def freedom(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> Freedom:
        """Those that commute with it: none, where it reaches the side at all and says no more."""
        reached = self.reaches(spec) & frozenset({"k": "qk", "v": "v"}[side])
        return Freedom() if reached else super().freedom(spec, side, p)

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

    def joined(self, spec: AttentionSpec, heads: int, p: Mapping[str, Tensor]) -> Joined | None:
        """Itself where so many heads are one vector, for those of their channels that it turns; None when it cannot."""
        return None


class Joined(NamedTuple):
    """A turn of heads that are laid out as one: itself, the (head, channel) of each of its channels, its weights."""

    turn: Turn
    lay: tuple[tuple[int, int], ...]
    weights: Mapping[str, Tensor]


class ScoreStep(Modifier):
    """Changes one score at a time; written once, for a number and for a tensor alike."""

    additive: ClassVar[bool] = False
    headed: ClassVar[bool] = False  # whether its factors are of each score head
    free: ClassVar[str] = "v"

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

    free: ClassVar[str] = "k"

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
    free: ClassVar[str] = "k"

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

    free: ClassVar[str] = ""

    @property
    def phase(self) -> Phase:
        """Last, before the merge."""
        return Phase.GATES

    @abstractmethod
    def gate(self, asked: Asked, p: Weighted, ledger: Ledger | None) -> Tensor: ...

    def shares(self, spec: AttentionSpec) -> tuple[Fraction, ...] | None:
        """The share of tokens for which each output head speaks, if it shuts them for all others: exactly zero."""
        return None

    def seals(self) -> bool:
        """Whether no gradient passes where it is zero: what sets it learns nothing from heads that it shuts."""
        return False

    def chances(self, p: Weighted) -> Tensor | None:
        """How likely each output head is to speak, where that is learned whatever is read; None otherwise."""
        return None

"""The list: what may change a layer at one phase of its computation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from .core_types import AuxLosses, PartParams, Phase, QueryContext, ScorePosition, SymmetryGroup
from .part import Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..spec.attention_spec import AttentionSpec


class Modifier(Part):
    """A part of the list: it acts in its phase."""

    @property
    @abstractmethod
    def phase(self) -> Phase: ...


class QKTransform(Modifier):
    """Changes queries, keys or values token by token, before they meet."""

    @property
    def phase(self) -> Phase:
        """Before the scores."""
        return Phase.QK_TRANSFORM

    def transformed_sides(self, spec: AttentionSpec) -> frozenset[str]:
        """The sides it changes."""
        return frozenset("qk")

    def normalises_length(self) -> bool:
        """Whether every head's vector leaves it with one length, whatever it came with."""
        return False

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        """Those that commute with it: none, where it reaches the side at all and says no more."""
        reached = self.transformed_sides(spec) & frozenset({"k": "qk", "v": "v"}[side])
        return SymmetryGroup() if reached else super().symmetry(spec, side, p)

    def precompute(self, position_BT: Tensor, exact: torch.dtype, p: PartParams) -> Any:
        """What it needs of the positions, for both sides alike, in a precision that angles can stand."""
        return None

    @abstractmethod
    def transform(self, x_BTHK: Tensor, side: str, placed: Any, p: PartParams) -> Tensor: ...

    def as_matrix(self, side: str, p: Mapping[str, Tensor]) -> Tensor | None:
        """What it multiplies the channels of every head and token with, [out, in], when that is all it does."""
        return None

    def without_sides(self, sides: frozenset[str]) -> Self | None:
        """Itself on its other sides alone; None when it has none."""
        return self

    def as_single_vector(
        self, spec: AttentionSpec, heads: int, p: Mapping[str, Tensor]
    ) -> SingleVectorTransform | None:
        """Itself where so many heads are one vector, for those of their channels that it turns; None when it cannot."""
        return None


class SingleVectorTransform(NamedTuple):
    """A turn of heads that are laid out as one: itself, the (head, channel) of each of its channels, its weights."""

    transform: QKTransform
    channel_sources: tuple[tuple[int, int], ...]
    weights: Mapping[str, Tensor]


class ScoreStep(Modifier):
    """Changes one score at a time; written once, for a number and for a tensor alike."""

    additive: ClassVar[bool] = False
    per_head: ClassVar[bool] = False  # whether its factors are of each score head
    unrestricted_sides: ClassVar[str] = "v"

    @property
    def phase(self) -> Phase:
        """On the scores."""
        return Phase.SCORES

    def query_factors(self, asked: QueryContext, p: PartParams) -> Tensor | None:
        """Factors [B, T, H, R] of each query, when the step needs them."""
        return None

    @abstractmethod
    def score(self, s: Tensor, cell: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor: ...


class Mix(Modifier):
    """Mixes heads at every (query, key) pair, on the scores or on the weights; `even` when at all pairs alike."""

    position_independent: ClassVar[bool] = False

    def num_outputs(self, heads: int) -> int:
        """How many heads it makes of so many."""
        return heads

    def query_factors(self, x_BTD: Tensor, p: PartParams) -> dict[str, Tensor]:
        """Factors of each query token."""
        return {}

    def key_factors(self, z_BSE: Tensor, p: PartParams) -> dict[str, Tensor]:
        """Factors of each key token, kept in its entry."""
        return {}

    @abstractmethod
    def mix_pair(
        self, a_H: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams
    ) -> Tensor: ...
    @abstractmethod
    def mix(self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams) -> Tensor: ...

    def fused_mix(
        self, a_BHTS: Tensor, asked: Mapping[str, Tensor], kept: Mapping[str, Tensor], p: PartParams
    ) -> Tensor:
        """The same in one pass over all pairs, where there is a kernel for it."""
        return self.mix(a_BHTS, asked, kept, p)


class WeightStep(Modifier):
    """Changes weights one at a time after normalising, in training only or always."""

    @property
    def phase(self) -> Phase:
        """On the weights."""
        return Phase.WEIGHTS

    @abstractmethod
    def transform_weights(self, w_BHTS: Tensor, p: PartParams) -> Tensor: ...


class ValueStep(Modifier):
    """Adds to the value that a query reads from a key, depending on where the two stand."""

    unrestricted_sides: ClassVar[str] = "k"

    @property
    def phase(self) -> Phase:
        """On the values."""
        return Phase.VALUES

    @abstractmethod
    def pair_value(self, i: int, j: int, p: PartParams) -> Tensor: ...
    @abstractmethod
    def weighted_values(self, w_BHTS: Tensor, i: Tensor, j: Tensor, p: PartParams) -> Tensor: ...


class OutputStep(Modifier):
    """Changes per-head outputs token by token; if it `joins`, several rows become one output head."""

    combines_rows: ClassVar[bool] = False
    unrestricted_sides: ClassVar[str] = "k"

    @property
    def phase(self) -> Phase:
        """On the outputs."""
        return Phase.OUTPUTS

    def required_rows(self, speaks: tuple[int, ...]) -> tuple[int, ...]:
        """The rows it needs, in order, to give these output heads."""
        return speaks

    def own_row_of_output(self, rows: int) -> tuple[int, ...]:
        """The own row of each output head when nothing has been cut."""
        return tuple(range(rows))

    @abstractmethod
    def transform_outputs(self, o_BTHV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor: ...


class Gate(Modifier):
    """Scales output heads by something known before the core, so that a backend may skip what is zero."""

    unrestricted_sides: ClassVar[str] = ""

    @property
    def phase(self) -> Phase:
        """Last, before the merge."""
        return Phase.GATES

    @abstractmethod
    def gate(self, asked: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor: ...

    def open_fractions(self, spec: AttentionSpec) -> tuple[Fraction, ...] | None:
        """The share of tokens for which each output head speaks, if it shuts them for all others: exactly zero."""
        return None

    def blocks_gradient_when_closed(self) -> bool:
        """Whether no gradient passes where it is zero: what sets it learns nothing from heads that it shuts."""
        return False

    def open_probabilities(self, p: PartParams) -> Tensor | None:
        """How likely each output head is to speak, where that is learned whatever is read; None otherwise."""
        return None

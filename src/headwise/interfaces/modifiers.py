"""Base classes of modifiers: optional parts that each act in one phase of the computation."""

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
    """A part that changes the computation in one phase; a spec may have any number of them."""

    @property
    @abstractmethod
    def phase(self) -> Phase: ...


class QKTransform(Modifier):
    """Changes queries, keys or values token by token, before scores are computed (RoPE, QK-norm)."""

    @property
    def phase(self) -> Phase:
        """Before the scores."""
        return Phase.QK_TRANSFORM

    def transformed_sides(self, spec: AttentionSpec) -> frozenset[str]:
        """The sides that this transform changes, of "q", "k" and "v"."""
        return frozenset("qk")

    def normalises_length(self) -> bool:
        """Whether the transformed vectors of every head all have the same length."""
        return False

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        """The orthogonal maps that commute with this transform; by default none on the sides that it changes."""
        changed = self.transformed_sides(spec) & frozenset({"k": "qk", "v": "v"}[side])
        return SymmetryGroup() if changed else super().symmetry(spec, side, p)

    def precompute(self, position_BT: Tensor, exact: torch.dtype, p: PartParams) -> Any:
        """Values that depend on positions only, such as rotary angles; computed once and passed to `transform`.

        `exact` is a dtype with enough precision for angles.
        """
        return None

    @abstractmethod
    def transform(self, x_BTHK: Tensor, side: str, precomputed: Any, p: PartParams) -> Tensor: ...

    def as_matrix(self, side: str, p: Mapping[str, Tensor]) -> Tensor | None:
        """The matrix [out, in] that this transform multiplies every head's channels with; None if it is not linear."""
        return None

    def without_sides(self, sides: frozenset[str]) -> Self | None:
        """This transform on its other sides only; None if no side remains."""
        return self

    def as_single_vector(
        self, spec: AttentionSpec, heads: int, p: Mapping[str, Tensor]
    ) -> SingleVectorTransform | None:
        """This transform for `heads` key heads concatenated into one vector; None if there is no such form."""
        return None


class SingleVectorTransform(NamedTuple):
    """A transform of several heads concatenated into one vector.

    `channel_sources` lists the (head, channel) of each channel that `transform` changes; `weights` are its parameters.
    """

    transform: QKTransform
    channel_sources: tuple[tuple[int, int], ...]
    weights: Mapping[str, Tensor]


class ScoreStep(Modifier):
    """Changes each score on its own.

    `score` is written once and works on a single number (the reference), a score tensor (dense backends) or inside a
    FlexAttention kernel. `additive` steps only add a bias that does not depend on the score.
    """

    additive: ClassVar[bool] = False
    per_head: ClassVar[bool] = False  # whether the query factors differ between score heads
    unrestricted_sides: ClassVar[str] = "v"

    @property
    def phase(self) -> Phase:
        """On the scores."""
        return Phase.SCORES

    def query_factors(self, context: QueryContext, p: PartParams) -> Tensor | None:
        """Factors [B, T, H, R] of each query, passed on to `score`; None if the step needs none."""
        return None

    @abstractmethod
    def score(self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]) -> Tensor: ...


class Mix(Modifier):
    """Mixes heads at every (query, key) pair, on the scores or on the weights.

    `position_independent` mixes use the same mixing matrix at all pairs.
    """

    position_independent: ClassVar[bool] = False

    def num_outputs(self, heads: int) -> int:
        """The number of heads after mixing `heads` heads."""
        return heads

    def query_factors(self, x_BTD: Tensor, p: PartParams) -> dict[str, Tensor]:
        """Factors of each query token, by name."""
        return {}

    def key_factors(self, z_BSE: Tensor, p: PartParams) -> dict[str, Tensor]:
        """Factors of each key token, by name; they are cached with its keys and values."""
        return {}

    def pair_bias(self, p: PartParams) -> Tensor | None:
        """A number for each head after mixing that is added at every allowed pair, [heads]; None if there is none.

        `mix_pair` adds it; `mix` does not, because it sees no mask.
        """
        return None

    @abstractmethod
    def mix_pair(
        self, a_H: Tensor, from_query: Mapping[str, Tensor], from_key: Mapping[str, Tensor], p: PartParams
    ) -> Tensor: ...
    @abstractmethod
    def mix(
        self, a_BHTS: Tensor, from_query: Mapping[str, Tensor], from_key: Mapping[str, Tensor], p: PartParams
    ) -> Tensor: ...

    def fused_mix(
        self, a_BHTS: Tensor, from_query: Mapping[str, Tensor], from_key: Mapping[str, Tensor], p: PartParams
    ) -> Tensor:
        """Like `mix`, in one pass over all pairs where a fused kernel exists."""
        return self.mix(a_BHTS, from_query, from_key, p)


class WeightStep(Modifier):
    """Changes each attention weight on its own, after normalisation."""

    @property
    def phase(self) -> Phase:
        """On the weights."""
        return Phase.WEIGHTS

    @abstractmethod
    def transform_weights(self, w_BHTS: Tensor, p: PartParams) -> Tensor: ...


class ValueStep(Modifier):
    """Adds a vector to each value that depends on the positions of the query and the key."""

    unrestricted_sides: ClassVar[str] = "k"

    @property
    def phase(self) -> Phase:
        """On the values."""
        return Phase.VALUES

    @abstractmethod
    def pair_value(self, i: int, j: int, p: PartParams) -> Tensor: ...
    @abstractmethod
    def weighted_values(self, w_BRTS: Tensor, i: Tensor, j: Tensor, p: PartParams) -> Tensor: ...


class OutputStep(Modifier):
    """Changes per-head outputs token by token; with `combines_rows`, several rows become one output head.

    `transform_outputs` receives o_BTRV, one output for each row of weights (or for each output of the step before), and
    returns o_BTOV.
    """

    combines_rows: ClassVar[bool] = False
    unrestricted_sides: ClassVar[str] = "k"

    @property
    def phase(self) -> Phase:
        """On the outputs."""
        return Phase.OUTPUTS

    def required_rows(self, own_rows: tuple[int, ...]) -> tuple[int, ...]:
        """The input rows, in order, from which the output heads with these own rows are computed."""
        return own_rows

    def own_row_of_output(self, rows: int) -> tuple[int, ...]:
        """The row that identifies each output head, for `rows` input rows and no pruned heads."""
        return tuple(range(rows))

    @abstractmethod
    def transform_outputs(self, o_BTRV: Tensor, x_BTD: Tensor, p: PartParams) -> Tensor: ...


class Gate(Modifier):
    """Scales output heads by factors that are known before the attention core runs.

    A backend can therefore skip heads whose factor is zero.
    """

    unrestricted_sides: ClassVar[str] = ""

    @property
    def phase(self) -> Phase:
        """Last, before the merge."""
        return Phase.GATES

    @abstractmethod
    def gate(self, context: QueryContext, p: PartParams, aux_losses: AuxLosses | None) -> Tensor: ...

    def open_fractions(self, spec: AttentionSpec) -> tuple[Fraction, ...] | None:
        """The fraction of tokens for which each output head's gate is not exactly zero; None if gates never close."""
        return None

    def blocks_gradient_when_closed(self) -> bool:
        """Whether a gate of zero passes no gradient to the parameters that set it."""
        return False

    def open_probabilities(self, p: PartParams) -> Tensor | None:
        """The probability that each output head's gate is open, if it does not depend on the input; else None."""
        return None

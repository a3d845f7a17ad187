"""Base classes of all parts: the properties that a part declares to the layer, the cost model and surgery."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from .axis_layout import AxisLayout
from .core_types import CallSize, CoreShape, Param, PartParams, SpecFactory, SymmetryGroup
from .registry import CheckedDataclass

if TYPE_CHECKING:
    from torch import Tensor

    from ..spec.attention_spec import AttentionSpec
    from ..spec.heads import Heads


@dataclass(frozen=True, repr=False)
class Part(CheckedDataclass, ABC):
    """Base class of everything that an attention layer is made of.

    A part is a frozen dataclass; it holds options, not tensors. Every method has a neutral default, so a part overrides
    only the methods that concern it.
    """

    paper: ClassVar[str] = ""  # arXiv number, or another name of the source
    disagreements: ClassVar[tuple[str, ...]] = ()  # where paper and released code disagree, and which one this follows
    positional: ClassVar[bool] = False  # whether the result depends on token positions
    # The sides on which this part allows any orthogonal map of a head's channels: "k" (keys with their queries), "v".
    unrestricted_sides: ClassVar[str] = "kv"

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        """The parameters of this part, by name."""
        return {}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        """The sizes of the axes that only this part has."""
        return {}

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        """The tensors that this part caches for each token, by name."""
        return {}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """FLOPs of matrix products beyond those of the declared parameters and of the attention core."""
        return 0

    def constant_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """The FLOPs of `flops` that multiply with constants, which need one product in the backward pass, not two."""
        return 0

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        """Reasons why this part cannot be used in this spec; empty if it can."""
        return ()

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        """The score heads that must be computed to get the results of `heads`."""
        return heads

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        """The orthogonal maps of a head's channels under which this part is invariant or equivariant.

        On side "k" a map applies to a key head and to all queries that use it, on side "v" to a value head.
        """
        widths = {"k": spec.heads.dim, "v": spec.heads.vdim}
        return SymmetryGroup.full(widths[side]) if side in self.unrestricted_sides else SymmetryGroup()

    def concatenates_key_heads(self) -> bool:
        """Whether this part treats all key heads as one vector, so that repeating a key head changes the result."""
        return False

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        """A copy with every size given explicitly that would otherwise follow from the number of heads."""
        return self

    def fit_heads(self, heads: Heads) -> Heads:
        """The heads that this part needs, derived from the plain heads that `design` was given."""
        return self.widen_heads(heads)

    def widen_heads(self, heads: Heads) -> Heads:
        """`heads` with the widths that this part needs; applied again whenever `at_depth` changes the part."""
        return heads

    def max_positions(self, spec: AttentionSpec) -> int | None:
        """The number of positions that this part supports, counted from 0; None if there is no limit."""
        return None

    def at_depth(self, layer: int, layers: int) -> Self:
        """A copy for one layer of a stack of `layers`, with depth schedules replaced by their values."""
        return self

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        """Small specs that together cover every field; the contract tests run on each of them."""
        return iter(())


class RecurrentPart(Part):
    """A part that may be able to summarise all past tokens in a state of fixed size, as linear attention does."""

    def state_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        """The tensors of the state, by name; empty if there is no state and tokens must be cached."""
        return {}

    def num_state_features(self, core: CoreShape) -> int:
        """The number of key features that the state sums over; 0 if all tokens have equal weight."""
        return 0

    def unnormalised_weights(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        """Attention weights of these pairs before division by their sum, [B, H, T, S]."""
        raise AssertionError(f"{type(self).__name__} has no recurrent state, so it defines no unnormalised weights")

    def update_state(
        self, state: Mapping[str, Tensor], k_BHSK: Tensor, v_BHSV: Tensor, live_BS: Tensor, p: PartParams
    ) -> dict[str, Tensor]:
        """The state after adding these tokens; tokens that are not live (padding) are ignored."""
        raise AssertionError(f"{type(self).__name__} has no recurrent state to update")

    def read_state(self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: PartParams) -> tuple[Tensor, Tensor]:
        """The weighted sum of values for each query, and the sum of the weights to divide it by."""
        raise AssertionError(f"{type(self).__name__} has no recurrent state to read")

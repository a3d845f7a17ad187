"""What every part of a layer may say of itself."""

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
    """Anything an attention layer is made of. Every method has a meaning of its own and a neutral default."""

    paper: ClassVar[str] = ""
    disagreements: ClassVar[tuple[str, ...]] = ()  # where its sources disagree, and which of them it follows
    positional: ClassVar[bool] = False  # whether it asks where tokens stand
    unrestricted_sides: ClassVar[str] = (
        "kv"  # sides ("k" with its queries, "v") whose heads any orthogonal map may turn under it
    )

    def params(self, spec: AttentionSpec) -> Mapping[str, Param]:
        """Its parameters, by named axes."""
        return {}

    def sizes(self, spec: AttentionSpec) -> Mapping[str, int]:
        """The sizes of axes that only it has."""
        return {}

    def kv_entry_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        """What it adds to a remembered token."""
        return {}

    def flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """Matrix products beyond the declared parameters and the core."""
        return 0

    def constant_flops(self, spec: AttentionSpec, work: CallSize) -> int:
        """Those of them that are with constants, so that backwards only one product is left of each."""
        return 0

    def conflicts(self, spec: AttentionSpec) -> Iterable[str]:
        """Why it cannot stand in this spec; nothing when it can."""
        return ()

    def required_score_heads(self, spec: AttentionSpec, heads: frozenset[int]) -> frozenset[int]:
        """The score heads it needs so that these come out right."""
        return heads

    def symmetry(self, spec: AttentionSpec, side: str, p: Mapping[str, Tensor]) -> SymmetryGroup:
        """Which orthogonal maps of a head's channels it does not see, or hands on as they are.

        On side "k" a key head and all queries that read it are mapped alike, on side "v" a value head is.
        """
        widths = {"k": spec.heads.dim, "v": spec.heads.vdim}
        return SymmetryGroup.full(widths[side]) if side in self.unrestricted_sides else SymmetryGroup()

    def concatenates_key_heads(self) -> bool:
        """Whether it takes all key heads as one vector, so that how often each is there matters."""
        return False

    def with_fixed_sizes(self, spec: AttentionSpec) -> Self:
        """Itself with every size written out that would otherwise follow from the number of heads."""
        return self

    def fit_heads(self, heads: Heads) -> Heads:
        """The heads it needs when a design names only the plain ones."""
        return self.widen_heads(heads)

    def widen_heads(self, heads: Heads) -> Heads:
        """These heads, as wide as its own numbers ask for: asked anew wherever it is placed."""
        return heads

    def max_positions(self, spec: AttentionSpec) -> int | None:
        """How many positions it knows, counted from 0; None when it can stand anywhere."""
        return None

    def at_depth(self, layer: int, layers: int) -> Self:
        """Itself at one depth: schedules become numbers."""
        return self

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        """Small specs, together covering every field; the contract runs on each."""
        return iter(())


class RecurrentPart(Part):
    """What can remember all past tokens as sums over them, so that no token has to be kept."""

    def state_layouts(self, spec: AttentionSpec) -> Mapping[str, AxisLayout]:
        """The sums, by named axes; empty when each token must be kept."""
        return {}

    def num_state_features(self, core: CoreShape) -> int:
        """How many numbers of a token its sums run over; none when all tokens have one share."""
        return 0

    def unnormalised_weights(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor:
        """What the weights of these pairs are in proportion to, [B, H, T, S]."""
        raise AssertionError("a part without a state was asked for shares")

    def update_state(
        self, state: Mapping[str, Tensor], k_BHSK: Tensor, v_BHSV: Tensor, live_BS: Tensor, p: PartParams
    ) -> dict[str, Tensor]:
        """The state after these tokens; those not live leave no trace."""
        raise AssertionError("a part without a state was asked to fold tokens into one")

    def read_state(self, q_BHTK: Tensor, state: Mapping[str, Tensor], p: PartParams) -> tuple[Tensor, Tensor]:
        """What a query reads from the state: the values by their shares, and the total of these."""
        raise AssertionError("a part without a state was asked to read one")

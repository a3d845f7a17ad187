"""The choices of which a spec makes one each: where heads come from, how they compare, normalise and merge."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from .core_types import CoreShape, PartParams, TransformsQK
from .part import Part, RecurrentPart

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..spec.attention_spec import AttentionSpec


class Project(Part):
    """Where queries, keys and values come from, and what is remembered of a token."""

    uses_head_dims: ClassVar[bool] = (
        False  # whether heads compare, read and are remembered dim and vdim wide, in every form
    )
    supports_grouping: ClassVar[bool] = True  # whether score heads may share keys and values
    caches_keys_and_values: ClassVar[bool] = (
        False  # whether what is recalled are the entry's "k" and "v" just as they were remembered
    )

    @abstractmethod
    def core(self, spec: AttentionSpec) -> CoreShape: ...
    @abstractmethod
    def project_query(self, x_BTD: Tensor, turn: TransformsQK, p: PartParams) -> Tensor: ...
    @abstractmethod
    def project_kv(self, z_BSE: Tensor, turn: TransformsQK, p: PartParams) -> dict[str, Tensor]: ...
    @abstractmethod
    def expand_kv(self, entry: Mapping[str, Tensor], turn: TransformsQK, p: PartParams) -> tuple[Tensor, Tensor]: ...

    def project_qkv(self, x_BTD: Tensor, turn: TransformsQK, p: PartParams) -> tuple[Tensor, dict[str, Tensor]]:
        """Queries of these tokens and their kv entry, for self-attention; a project may compute them in one product."""
        entry = self.project_kv(x_BTD, turn, p)
        return self.project_query(x_BTD, turn, p), entry

    def project_heads(self, o_BTHV: Tensor, voices: tuple[int, ...], p: PartParams) -> Tensor:
        """What these score heads' weights read, brought to value width."""
        return o_BTHV

    def transformed_dims(self, spec: AttentionSpec) -> int:
        """How many channels of a head the turns reach."""
        return spec.heads.dim

    def constant_biases(self, spec: AttentionSpec, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Biases that all keys ("k") or all values ("v") have alike: of values, what each voice reads of it."""
        return {}

    def without_biases(self, biases: frozenset[str]) -> Self:
        """Itself without these biases."""
        return self

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        """The weights of a side, bias and all, behind which the matrix met every head; none when it cannot.

        `matrix` is one for all heads of the side, or one for each, [heads, out, in].
        """
        return {}

    def equivalent_forms(self, spec: AttentionSpec) -> Mapping[str, Project]:
        """Algebraically equal forms over the same parameters; "step" is the one for a single query."""
        return {}


class Similarity(RecurrentPart):
    """How alike a query and a key are: `signed` when that may be negative, `linear` when it is in the key.

    `headed` when it has parameters of its own per score head, so that heads which share a key are not alike to it.
    """

    signed: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    per_head: ClassVar[bool] = False
    unrestricted_sides: ClassVar[str] = "v"

    @abstractmethod
    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: PartParams) -> Tensor: ...

    def score_scale(self, core: CoreShape) -> float:
        """What scores are multiplied with."""
        return core.scale

    def can_be_all_zero(self) -> bool:
        """Whether all scores of a row may be 0 in spite of keys: weights in proportion to them then sum to 0."""
        return False

    def feature_map(self, x_BTHK: Tensor, side: str, p: PartParams) -> Tensor:
        """What of queries ("q"), or of keys, the vectorised forms compare: once a token, before heads share keys."""
        return x_BTHK

    def feature_dim(self, core: CoreShape) -> int:
        """How many channels that has."""
        return core.dim


class Normaliser(RecurrentPart):
    """Scores to weights. A query with nothing to read gets no weight at all.

    `proportional` when weights are the scores themselves over their sum, which is all that a similarity's state
    can give; one that does not look at scores may have a state of its own;
    `shift_free` when it does not see one number added to a whole row; `whole` when a row that reads anything
    has weights that sum to one.
    """

    proportional: ClassVar[bool] = False
    shift_invariant: ClassVar[bool] = False
    sums_to_one: ClassVar[bool] = False

    @abstractmethod
    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor: ...

    def fused_normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        """The same in one pass over each row, where there is a kernel for it."""
        return self.normalise(s_BHTS, allowed, p)

    def prefers_gather(self, device: str, dtype: torch.dtype) -> bool:
        """Whether `gather` is faster, of values in such numbers, than a product of all values with all weights."""
        return False

    def gather_values(
        self, s_BHTS: Tensor, allowed: Tensor, v_BSGV: Tensor, of: tuple[int, ...], p: PartParams
    ) -> Tensor:
        """What head h reads of the values of head of[h], o_BHTV; it touches the values of keys with weight alone."""
        return self.fused_normalise(s_BHTS, allowed, p).to(v_BSGV.dtype) @ v_BSGV[:, :, list(of)].transpose(1, 2)


class Merge(Part):
    """Per-head outputs to the model's width."""

    def absorb_matrix(self, spec: AttentionSpec, weights: Mapping[str, Tensor], matrix: Tensor) -> Mapping[str, Tensor]:
        """Its weights, before which each output head met a matrix of its own, [out, to, from]; none when it cannot."""
        return {}

    @abstractmethod
    def merge(self, o_BTOV: Tensor, p: PartParams) -> Tensor: ...

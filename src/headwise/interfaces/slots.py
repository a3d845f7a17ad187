"""Base classes of the slots that a spec fills once: project, similarity, normaliser and merge."""

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
    """Computes queries, keys and values from the input, and decides what is cached of a token.

    `project_kv` computes the entry that is cached for each token; `expand_kv` computes keys and values from entries.
    """

    # Whether queries and keys have heads.dim channels and values heads.vdim, in the cache too, in every form.
    uses_head_dims: ClassVar[bool] = False
    # Whether several score heads may share a key-value head.
    supports_grouping: ClassVar[bool] = True
    # Whether expand_kv returns the entry's "k" and "v" unchanged.
    caches_keys_and_values: ClassVar[bool] = False

    @abstractmethod
    def core(self, spec: AttentionSpec) -> CoreShape: ...
    @abstractmethod
    def project_query(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> Tensor: ...
    @abstractmethod
    def project_kv(self, z_BSE: Tensor, transform: TransformsQK, p: PartParams) -> dict[str, Tensor]: ...
    @abstractmethod
    def expand_kv(
        self, entry: Mapping[str, Tensor], transform: TransformsQK, p: PartParams
    ) -> tuple[Tensor, Tensor]: ...

    def project_qkv(self, x_BTD: Tensor, transform: TransformsQK, p: PartParams) -> tuple[Tensor, dict[str, Tensor]]:
        """Queries and cache entries of self-attention; a project may compute them in one matrix product."""
        entry = self.project_kv(x_BTD, transform, p)
        return self.project_query(x_BTD, transform, p), entry

    def project_heads(self, o_BTRV: Tensor, score_heads: tuple[int, ...], p: PartParams) -> Tensor:
        """The weighted sums of these score heads, projected to value width."""
        return o_BTRV

    def transformed_dims(self, spec: AttentionSpec) -> int:
        """The number of channels per query or key head that QK transforms (RoPE, QK-norm) receive."""
        return spec.heads.dim

    def constant_biases(self, spec: AttentionSpec, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Biases that are added to all keys ("k", per key head) or to all values ("v", per row of weights)."""
        return {}

    def without_biases(self, biases: frozenset[str]) -> Self:
        """A copy without these biases."""
        return self

    def absorb_matrix(
        self, spec: AttentionSpec, weights: Mapping[str, Tensor], side: str, matrix: Tensor
    ) -> Mapping[str, Tensor]:
        """The weights of one side (with bias) after folding in a matrix that multiplies the side's heads.

        `matrix` is [out, in] for all heads, or [heads, out, in]. Empty if the project cannot absorb it.
        """
        return {}

    def equivalent_forms(self, spec: AttentionSpec) -> Mapping[str, Project]:
        """Algebraically equivalent projects over the same parameters; "step" is the one for a single query."""
        return {}


class Similarity(RecurrentPart):
    """Computes the score of a query and a key.

    `signed`: scores may be negative. `linear`: scores are linear in the key. `per_head`: the similarity has parameters
    per score head, so that score heads which share a key head still differ.
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
        """The factor of the scores."""
        return core.scale

    def can_be_all_zero(self) -> bool:
        """Whether all scores of a row with allowed keys can be 0, so that proportional weights would sum to 0."""
        return False

    def has_arbitrary_scale(self) -> bool:
        """Whether scores are computed up to an unknown factor, so that only their ratios have a meaning."""
        return False

    def feature_map(self, x_BTHK: Tensor, side: str, p: PartParams) -> Tensor:
        """The features of queries (side "q") or keys (side "k") that `scores` takes.

        It is applied once per token, before keys are repeated for the score heads that share them.
        """
        return x_BTHK

    def feature_dim(self, core: CoreShape) -> int:
        """The number of channels of the feature map."""
        return core.dim


class Normaliser(RecurrentPart):
    """Turns scores into attention weights. All weights of a query without allowed keys are zero.

    `proportional`: weights are the scores divided by `divisor` of their sum. This is the only kind that a similarity
    with a recurrent state can use; a normaliser that ignores the scores may have a state of its own.
    `shift_invariant`: adding a constant to all scores of a row changes nothing.
    `sums_to_one`: the weights of every row with an allowed key sum to one.
    """

    proportional: ClassVar[bool] = False
    shift_invariant: ClassVar[bool] = False
    sums_to_one: ClassVar[bool] = False

    @abstractmethod
    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor: ...

    def divisor(self, total: Tensor) -> Tensor:
        """The divisor of proportional weights, given the sum of the scores of a row; never zero."""
        return total.masked_fill(total == 0, 1.0)

    def always_sums_to_one(self) -> bool:
        """Whether `sums_to_one` holds exactly with these options."""
        return self.sums_to_one

    def fused_normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        """Like `normalise`, in one pass over each row where a fused kernel exists."""
        return self.normalise(s_BHTS, allowed, p)

    def prefers_gather(self, device: str, dtype: torch.dtype) -> bool:
        """Whether `gather_values` is faster for values of this dtype than multiplying all values with all weights."""
        return False

    def gather_values(
        self, s_BHTS: Tensor, allowed: Tensor, v_BSGV: Tensor, value_heads: tuple[int, ...], p: PartParams
    ) -> Tensor:
        """Outputs o_BHTV, where row h uses value head ``value_heads[h]``; may skip the values of zero weights."""
        v_BHSV = v_BSGV[:, :, list(value_heads)].transpose(1, 2)
        return self.fused_normalise(s_BHTS, allowed, p).to(v_BSGV.dtype) @ v_BHSV


class Merge(Part):
    """Combines the outputs of all heads into a vector of the model's width."""

    def absorb_matrix(self, spec: AttentionSpec, weights: Mapping[str, Tensor], matrix: Tensor) -> Mapping[str, Tensor]:
        """The weights after folding in a matrix per output head, [heads, out, in], that multiplies the head's output.

        Empty if the merge cannot absorb it.
        """
        return {}

    @abstractmethod
    def merge(self, o_BTOV: Tensor, p: PartParams) -> Tensor: ...

"""The choices of which a spec makes one each: where heads come from, how they compare, normalise and merge."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from ..terms import Core, Turning, Weighted
from .base import Foldable, Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..spec import AttentionSpec


class Project(Part):
    """Where queries, keys and values come from, and what is remembered of a token."""

    plain: ClassVar[bool] = False  # whether heads compare, read and are remembered dim and vdim wide, in every form
    grouped: ClassVar[bool] = True  # whether score heads may share keys and values
    handed: ClassVar[bool] = False  # whether what is recalled are the entry's "k" and "v" just as they were remembered

    @abstractmethod
    def core(self, spec: AttentionSpec) -> Core: ...
    @abstractmethod
    def ask(self, x_BTD: Tensor, turn: Turning, p: Weighted) -> Tensor: ...
    @abstractmethod
    def remember(self, z_BSE: Tensor, turn: Turning, p: Weighted) -> dict[str, Tensor]: ...
    @abstractmethod
    def recall(self, entry: Mapping[str, Tensor], turn: Turning, p: Weighted) -> tuple[Tensor, Tensor]: ...

    def both(self, x_BTD: Tensor, turn: Turning, p: Weighted) -> tuple[Tensor, dict[str, Tensor]] | None:
        """What tokens ask that read themselves, and what is remembered of them; None where these are formed apart."""
        return None

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
        """The weights of a side, bias and all, behind which the matrix met every head; none when it cannot.

        `matrix` is one for all heads of the side, or one for each, [heads, out, in].
        """
        return {}

    def rewrites(self, spec: AttentionSpec) -> Mapping[str, Project]:
        """Algebraically equal forms over the same parameters; "step" is the one for a single query."""
        return {}


class Similarity(Foldable):
    """How alike a query and a key are: `signed` when that may be negative, `linear` when it is in the key.

    `headed` when it has parameters of its own per score head, so that heads which share a key are not alike to it.
    """

    signed: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    headed: ClassVar[bool] = False
    free: ClassVar[str] = "v"

    @abstractmethod
    def pair(self, q_K: Tensor, k_K: Tensor, scale: float, p_h: Mapping[str, Tensor]) -> Tensor: ...
    @abstractmethod
    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, scale: float, p: Weighted) -> Tensor: ...

    def factor(self, core: Core) -> float:
        """What scores are multiplied with."""
        return core.scale

    def vanishes(self) -> bool:
        """Whether all scores of a row may be 0 in spite of keys: weights in proportion to them then sum to 0."""
        return False

    def lift(self, x_BTHK: Tensor, side: str, p: Weighted) -> Tensor:
        """What of queries ("q"), or of keys, the vectorised forms compare: once a token, before heads share keys."""
        return x_BTHK

    def compared(self, core: Core) -> int:
        """How many channels that has."""
        return core.dim


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

    def fused(self, s_BHTS: Tensor, allowed: Tensor, p: Weighted) -> Tensor:
        """The same in one pass over each row, where there is a kernel for it."""
        return self.normalise(s_BHTS, allowed, p)

    def gathers(self, device: str, dtype: torch.dtype) -> bool:
        """Whether `gather` is faster, of values in such numbers, than a product of all values with all weights."""
        return False

    def gather(self, s_BHTS: Tensor, allowed: Tensor, v_BSGV: Tensor, of: tuple[int, ...], p: Weighted) -> Tensor:
        """What head h reads of the values of head of[h], o_BHTV; it touches the values of keys with weight alone."""
        return self.fused(s_BHTS, allowed, p).to(v_BSGV.dtype) @ v_BSGV[:, :, list(of)].transpose(1, 2)


class Merge(Part):
    """Per-head outputs to the model's width."""

    def absorb(self, spec: AttentionSpec, weights: Mapping[str, Tensor], matrix: Tensor) -> Mapping[str, Tensor]:
        """Its weights, before which each output head met a matrix of its own, [out, to, from]; none when it cannot."""
        return {}

    @abstractmethod
    def merge(self, o_BTOV: Tensor, p: Weighted) -> Tensor: ...

"""How heads of keys and values are shared, split or brought into another form: one attention at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from .. import axes
from ..errors import SpecError, suggest
from ..parts.collaborative import convert_to_collaborative
from ..parts.latent import convert_to_latent
from ..parts.routed import convert_to_mixture_of_heads
from ..spec import AttentionSpec
from .aligning import AlignmentResult, align_heads, find_symmetry
from .arranging import make_groups_contiguous
from .groups import HeadGroups, group_similar_heads, group_adjacent_heads
from .products import CrossProducts, compute_similarity

ALIGN_SIDES = {"none": "", "values": "v", "keys": "k", "both": "kv"}
KV_NAMES = {"k": "keys", "v": "values"}
GROUPINGS = ("even", "alike")
Weights = Mapping[str, Tensor]
KVStatistics = Mapping[str, CrossProducts] | None


class ConvertedLayer(NamedTuple):
    """A layer in its new form, the same function as before where there is one, and what must be said of it.

    `missed` is the share of what keys ("k") and values ("v") say that means of groups miss: as they were, and aligned.
    """

    spec: AttentionSpec
    weights: Weights
    equivalent_weights: Weights | None = None
    groups: HeadGroups = ()
    pooling_errors: Mapping[str, tuple[float, float]] = {}
    notes: tuple[str, ...] = ()


class AttentionConversion(ABC):
    """A way to change who reads whom. It is `exact` if the function stays, `gathers` if it looks at what heads say
    of texts first, and `weighs` if at what they are worth."""

    is_exact: ClassVar[bool] = False

    needs_importance: ClassVar[bool] = False

    @property
    def needs_statistics(self) -> bool:
        """Whether it asks what heads say."""
        return False

    @property
    @abstractmethod
    def summary(self) -> str:
        """What it does, in a few words."""

    @abstractmethod
    def convert_layer(self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]) -> ConvertedLayer:
        """A layer so changed; `worth` is that of its heads, where the way asks for it."""


@dataclass(frozen=True)
class Pool(AttentionConversion):
    """`kv` heads of keys and values, each the mean of equally many (2305.13245).

    grouping="even" takes neighbours, "alike" those whose values are nearest to each other; align="values", "keys" or
    "both" maps the heads of a group as near to each other as the function allows before their mean is taken
    (2412.20677).
    """

    kv: int
    align: str = "none"
    grouping: str = "even"
    score: str = "distance"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("align", ALIGN_SIDES), ("grouping", GROUPINGS), ("score", ("distance", "cosine"))):
            if (said := getattr(self, name)) not in known:
                raise SpecError(f"{name}={said!r} is unknown; {suggest(str(said), known)}")

    @property
    def needs_statistics(self) -> bool:
        """Whether it asks what heads say."""
        return self.align != "none" or self.grouping == "alike"

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        mapped = "" if self.align == "none" else f", after {self.align} were aligned" if self.align != "both" else (
            ", after keys and values were aligned"
        )  # fmt: skip
        if self.kv == 1:
            return f"every layer has one head of keys and values, the mean of all{mapped}"
        return f"every layer has {self.kv} heads of keys and values, means of {_describe_grouping(self.grouping)}{mapped}"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]) -> ConvertedLayer:
        groups = self._group_heads(spec, weights, statistics)
        found = AlignmentResult(dict(weights), {}, {})
        if sides := ALIGN_SIDES[self.align]:
            assert statistics is not None
            found = align_heads(spec, weights, groups, statistics, sides=sides)
            if found.skip_reasons.keys() == set(sides):
                raise SpecError(f"nothing can be aligned: {'; '.join(found.skip_reasons.values())}; leave align out")
        notes = tuple(f"{KV_NAMES[side]} stay as they are: {why}" for side, why in found.skip_reasons.items())
        missed = {side: lost for side, lost in found.pooling_errors.items() if side not in found.skip_reasons}
        shared, left = make_groups_contiguous(*axes.share_kv_heads(spec, found.weights, groups))
        return ConvertedLayer(shared, left, found.weights if sides else None, groups, missed, notes)

    def _group_heads(self, spec: AttentionSpec, weights: Weights, gathered: KVStatistics) -> HeadGroups:
        if self.grouping == "even":
            return group_adjacent_heads(spec.heads.kv, self.kv)
        assert gathered is not None
        group_adjacent_heads(spec.heads.kv, self.kv)  # which refuses what does not divide
        free, _ = find_symmetry(spec, weights, "v")
        return group_similar_heads(compute_similarity(gathered["v"], free, kind=self.score), self.kv, seed=self.seed)


@dataclass(frozen=True)
class Split(AttentionConversion):
    """Every query head has its own copy of what it reads: exactly the same, for work that wants heads apart."""

    is_exact: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return "every query head has keys and values of its own"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]) -> ConvertedLayer:
        made = axes.split_kv_heads(spec, weights)
        return ConvertedLayer(made[0], made[1])


@dataclass(frozen=True)
class Merged(AttentionConversion):
    """All heads of keys and values in one latent vector: exactly the same, as a start for a smaller one."""

    is_exact: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return "keys and values of all heads are one latent vector"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]) -> ConvertedLayer:
        made = convert_to_latent(spec, weights)
        return ConvertedLayer(made[0], made[1])


@dataclass(frozen=True)
class Collaborate(AttentionConversion):
    """Queries and keys of all heads in one shared space of this width (2006.16362)."""

    width: int

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return f"queries and keys of all heads share a space of {self.width} channels"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]) -> ConvertedLayer:
        made = convert_to_collaborative(spec, weights, self.width)
        return ConvertedLayer(made.spec, made.weights, notes=(f"scores are met to {made.relative_error:.2%} of their size",))


@dataclass(frozen=True)
class Route(AttentionConversion):
    """Of every layer so many heads always speak, those worth most, and `active` of the others, token by token."""

    needs_importance: ClassVar[bool] = True
    num_always_active: int
    num_active: int

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        return f"{self.num_always_active} heads of every layer always speak, and of the others the {self.num_active} that ask loudest"

    def convert_layer(self, spec: AttentionSpec, weights: Weights, statistics: KVStatistics, importance: Sequence[float]) -> ConvertedLayer:
        if not 0 <= self.num_always_active <= len(importance):
            raise SpecError(f"{self.num_always_active} of {len(importance)} heads cannot always speak; give at most {len(importance)}")
        first = sorted(range(len(importance)), key=lambda head: -importance[head])[: self.num_always_active]
        made = convert_to_mixture_of_heads(spec, weights, sorted(first), self.num_active)
        return ConvertedLayer(made[0], made[1])


def _describe_grouping(grouping: str) -> str:
    return "neighbours" if grouping == "even" else "those that are most alike"

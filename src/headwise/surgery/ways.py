"""How heads of keys and values are shared, split or brought into another form: one attention at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from .. import axes
from ..errors import SpecError, nearest
from ..parts.collaborative import collaborate
from ..parts.latent import as_latent
from ..parts.routed import as_routed
from ..spec import AttentionSpec
from .aligning import Aligned, aligned, freedom
from .arranging import neighbours
from .groups import Groups, alike, evenly
from .products import Products, likeness

SIDES = {"none": "", "values": "v", "keys": "k", "both": "kv"}
WORDS = {"k": "keys", "v": "values"}
GROUPINGS = ("even", "alike")
Weights = Mapping[str, Tensor]
Gathered = Mapping[str, Products] | None


class Made(NamedTuple):
    """A layer in its new form, the same function as before where there is one, and what must be said of it.

    `missed` is the share of what keys ("k") and values ("v") say that means of groups miss: as they were, and aligned.
    """

    spec: AttentionSpec
    weights: Weights
    same: Weights | None = None
    groups: Groups = ()
    missed: Mapping[str, tuple[float, float]] = {}
    notes: tuple[str, ...] = ()


class Way(ABC):
    """A way to change who reads whom. It is `exact` if the function stays, `gathers` if it looks at what heads say
    of texts first, and `weighs` if at what they are worth."""

    exact: ClassVar[bool] = False

    weighs: ClassVar[bool] = False

    @property
    def gathers(self) -> bool:
        """Whether it asks what heads say."""
        return False

    @property
    @abstractmethod
    def sentence(self) -> str:
        """What it does, in a few words."""

    @abstractmethod
    def make(self, spec: AttentionSpec, weights: Weights, gathered: Gathered, worth: Sequence[float]) -> Made:
        """A layer so changed; `worth` is that of its heads, where the way asks for it."""


@dataclass(frozen=True)
class Pool(Way):
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
        for name, known in (("align", SIDES), ("grouping", GROUPINGS), ("score", ("distance", "cosine"))):
            if (said := getattr(self, name)) not in known:
                raise SpecError(f"{name}={said!r} is unknown; {nearest(str(said), known)}")

    @property
    def gathers(self) -> bool:
        """Whether it asks what heads say."""
        return self.align != "none" or self.grouping == "alike"

    @property
    def sentence(self) -> str:
        """What it does, in a few words."""
        mapped = "" if self.align == "none" else f", after {self.align} were aligned" if self.align != "both" else (
            ", after keys and values were aligned"
        )  # fmt: skip
        if self.kv == 1:
            return f"every layer has one head of keys and values, the mean of all{mapped}"
        return f"every layer has {self.kv} heads of keys and values, means of {_those(self.grouping)}{mapped}"

    def make(self, spec: AttentionSpec, weights: Weights, gathered: Gathered, worth: Sequence[float]) -> Made:
        groups = self._groups(spec, weights, gathered)
        found = Aligned(dict(weights), {}, {})
        if sides := SIDES[self.align]:
            assert gathered is not None
            found = aligned(spec, weights, groups, gathered, sides=sides)
            if found.stayed.keys() == set(sides):
                raise SpecError(f"nothing can be aligned: {'; '.join(found.stayed.values())}; leave align out")
        notes = tuple(f"{WORDS[side]} stay as they are: {why}" for side, why in found.stayed.items())
        missed = {side: lost for side, lost in found.missed.items() if side not in found.stayed}
        shared, left = neighbours(*axes.share(spec, found.weights, groups))
        return Made(shared, left, found.weights if sides else None, groups, missed, notes)

    def _groups(self, spec: AttentionSpec, weights: Weights, gathered: Gathered) -> Groups:
        if self.grouping == "even":
            return evenly(spec.heads.kv, self.kv)
        assert gathered is not None
        evenly(spec.heads.kv, self.kv)  # which refuses what does not divide
        free, _ = freedom(spec, weights, "v")
        return alike(likeness(gathered["v"], free, kind=self.score), self.kv, seed=self.seed)


@dataclass(frozen=True)
class Split(Way):
    """Every query head has its own copy of what it reads: exactly the same, for work that wants heads apart."""

    exact: ClassVar[bool] = True

    @property
    def sentence(self) -> str:
        """What it does, in a few words."""
        return "every query head has keys and values of its own"

    def make(self, spec: AttentionSpec, weights: Weights, gathered: Gathered, worth: Sequence[float]) -> Made:
        made = axes.split(spec, weights)
        return Made(made[0], made[1])


@dataclass(frozen=True)
class Merged(Way):
    """All heads of keys and values in one latent vector: exactly the same, as a start for a smaller one."""

    exact: ClassVar[bool] = True

    @property
    def sentence(self) -> str:
        """What it does, in a few words."""
        return "keys and values of all heads are one latent vector"

    def make(self, spec: AttentionSpec, weights: Weights, gathered: Gathered, worth: Sequence[float]) -> Made:
        made = as_latent(spec, weights)
        return Made(made[0], made[1])


@dataclass(frozen=True)
class Collaborate(Way):
    """Queries and keys of all heads in one shared space of this width (2006.16362)."""

    width: int

    @property
    def sentence(self) -> str:
        """What it does, in a few words."""
        return f"queries and keys of all heads share a space of {self.width} channels"

    def make(self, spec: AttentionSpec, weights: Weights, gathered: Gathered, worth: Sequence[float]) -> Made:
        made = collaborate(spec, weights, self.width)
        return Made(made.spec, made.weights, notes=(f"scores are met to {made.error:.2%} of their size",))


@dataclass(frozen=True)
class Route(Way):
    """Of every layer so many heads always speak, those worth most, and `active` of the others, token by token."""

    weighs: ClassVar[bool] = True
    always: int
    active: int

    @property
    def sentence(self) -> str:
        """What it does, in a few words."""
        return f"{self.always} heads of every layer always speak, and of the others the {self.active} that ask loudest"

    def make(self, spec: AttentionSpec, weights: Weights, gathered: Gathered, worth: Sequence[float]) -> Made:
        if not 0 <= self.always <= len(worth):
            raise SpecError(f"{self.always} of {len(worth)} heads cannot always speak; give at most {len(worth)}")
        first = sorted(range(len(worth)), key=lambda head: -worth[head])[: self.always]
        made = as_routed(spec, weights, sorted(first), self.active)
        return Made(made[0], made[1])


def _those(grouping: str) -> str:
    return "neighbours" if grouping == "even" else "those that are most alike"

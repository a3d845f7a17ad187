"""Which heads go: a share of them by their worth, named ones, those of a class, or all but one of each cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, nearest
from ..heads.classes import classified
from ..heads.measuring import measure
from ..heads.redundancy import How, redundancy
from ..heads.scene import Scene
from ..heads.table import Table
from ..models import Transformer
from .plans import Head, Plan, Unit, counts, units
from .worths import USUAL, By, Worths, worths

Tell = Callable[[str], Any]
PER = ("layer", "stack", "model")


class Choice(ABC):
    """A way to choose what a model keeps."""

    @abstractmethod
    def plan(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> Plan:
        """What is kept of this model, judged by these texts; `tell` hears of progress."""

    def ready(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> tuple[Transformer, Plan]:
        """The model that is cut, where choosing changed it, and what is kept of it."""
        return net, self.plan(net, scenes, tell)


@dataclass(frozen=True)
class Keep(Choice):
    """Keep a share of the heads, those worth most: of every layer, of the layers of a stack alike, or of the model.

    `share` is more than 0 and less than 1, or a whole number of heads for each layer (of the model, per="model").
    `unit` is what goes together: "head", "group" (the heads that read one head of keys and values), or "auto", groups
    where there are several. per="stack" takes the same numbers from all layers of a stack, by their worth together;
    per="model" leaves `least` units in every layer, 0 lets an attention go altogether.
    """

    share: float | int
    by: By = USUAL
    per: str = "layer"
    unit: str = "auto"
    least: int = 1

    def __post_init__(self) -> None:
        if self.per not in PER:
            raise SpecError(f"per={self.per!r} is unknown; {nearest(self.per, PER)}")
        whole = type(self.share) is int and self.share >= 1
        if not whole and not (isinstance(self.share, float) and 0 < self.share < 1):
            raise SpecError(f"keep={self.share!r} is no share of heads; give 0.5, say, or a whole number of them")
        if type(self.least) is not int or self.least < 0:
            raise SpecError(f"least={self.least!r} is no number of heads; give 0 or more")

    def plan(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> Plan:
        tell("weighing heads")
        found, those = worths(net, scenes, self.by), units(net.described, self.unit)
        kept = {"layer": self._each, "stack": self._alike, "model": self._whole}[self.per](those, found)
        keep: dict[str, list[int]] = {site: [] for site in those}
        for unit in kept:
            keep[unit.site] += unit.heads
        where = {
            "layer": "of each layer",
            "stack": "of each layer, the same in all of a stack",
            "model": "of the model",
        }
        return Plan.of(net.described, keep, f"those worth most {where[self.per]} by {self.by.method}", found.notes)

    def _each(self, those: Mapping[str, tuple[Unit, ...]], found: Worths) -> Iterator[Unit]:
        for site, own in those.items():
            yield from _most(own, found.unit, self._of(site, own))

    def _alike(self, those: Mapping[str, tuple[Unit, ...]], found: Worths) -> Iterator[Unit]:
        stacks: dict[tuple[str, str], list[str]] = {}
        for site in those:
            stack, _, kind = site.split(".")
            stacks.setdefault((stack, kind), []).append(site)
        for (stack, kind), sites in stacks.items():
            rows = [those[site] for site in sites]
            if len({tuple(unit.heads for unit in row) for row in rows}) > 1:
                raise SpecError(f"layers of {stack} differ in their heads of {kind}; use per='layer' or 'model'")
            columns = sorted(zip(*rows, strict=True), key=lambda column: sum(map(found.unit, column)), reverse=True)
            for column in columns[: self._of(sites[0], rows[0])]:
                yield from column

    def _whole(self, those: Mapping[str, tuple[Unit, ...]], found: Worths) -> Iterator[Unit]:
        heads = sum(len(unit.heads) for own in those.values() for unit in own)
        wanted = self.share if isinstance(self.share, int) else round(self.share * heads)
        if wanted > heads:
            raise SpecError(f"keep={self.share} heads of a model with {heads}; give at most {heads - 1}")
        yield from worth_most(those, found, wanted, self.least)

    def _of(self, site: str, own: Sequence[Unit]) -> int:
        """How many units of a site stay."""
        if isinstance(self.share, float):
            return max(1, round(self.share * len(own) + 1e-9))
        size, heads = len(own[0].heads), sum(len(unit.heads) for unit in own)
        if self.share > heads:
            raise SpecError(f"keep={self.share} heads of {site}, which has {heads}; give at most {heads}")
        if self.share % size:
            raise SpecError(
                f"keep={self.share} heads of {site} are no whole groups of {size}; give a multiple, or unit='head'"
            )
        return self.share // size


@dataclass(frozen=True)
class Named(Choice):
    """Take these heads away, ("decoder.3.attention", 5) each."""

    heads: tuple[Head, ...]

    def plan(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> Plan:
        return Plan.without(net.described, self.heads, "without those that were named")


@dataclass(frozen=True)
class Classes(Choice):
    """Take the heads away that are of these classes and of no others, as `hw.classified` names them."""

    drop: tuple[str, ...]

    def plan(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> Plan:
        tell("naming heads")
        table = classified(measure(net, scenes))
        known = sorted({one.name for head in table.heads for one in head.classes})
        if wrong := [name for name in self.drop if name not in known]:
            raise SpecError(f"no head of the model is called {wrong[0]!r}; {nearest(wrong[0], known)}")
        return Plan.without(net.described, self._gone(table), f"without the {' and '.join(self.drop)}", table.notes)

    def _gone(self, table: Table) -> list[Head]:
        named = [(head, {one.name for one in head.classes}) for head in table.heads]
        return [(head.site, head.head) for head, names in named if names and names <= set(self.drop)]


@dataclass(frozen=True)
class Clusters(Choice):
    """Keep one of each cluster of heads that look alike, the one worth most, and all that are alone.

    `cut` is the Jensen-Shannon distance below which heads are one cluster; without it, as `hw.redundancy` has it.
    """

    by: By = USUAL
    cut: float | None = None

    def plan(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> Plan:
        tell("comparing heads")
        alike = redundancy(net, scenes, how=How(seed=self.by.seed, cut=self.cut, permutations=1, resamples=1))
        tell("weighing heads")
        found, keep = worths(net, scenes, self.by), dict[str, list[int]]()
        clusters = [[(who.site, who.head) for who in own] for one in alike.readers for own in one.members]
        for own in clusters:
            site, head = max(own, key=lambda one: found.of[one])
            keep.setdefault(site, []).append(head)
        seen = {site for own in clusters for site, _ in own}
        keep = {site: keep.get(site, []) for site in counts(net.described) if site in seen}
        notes = (*found.notes, *alike.notes)
        return Plan.of(net.described, keep, f"the one worth most of each of {len(clusters)} clusters", notes)


def worth_most(those: Mapping[str, tuple[Unit, ...]], found: Worths, wanted: int, least: int = 0) -> list[Unit]:
    """Units of all these sites together that are worth most, so many heads at most; `least` units of every site first.

    >>> those = {"a": (Unit("a", (0,)), Unit("a", (1,))), "b": (Unit("b", (0,)),)}
    >>> [unit.site for unit in worth_most(those, Worths({("a", 0): 3.0, ("a", 1): 2.0, ("b", 0): 1.0}), 2, least=1)]
    ['a', 'b']
    """
    kept = [unit for own in those.values() for unit in _most(own, found.unit, min(least, len(own)))]
    rest = [unit for own in those.values() for unit in own if unit not in kept]
    for unit in sorted(rest, key=found.unit, reverse=True):
        if sum(len(one.heads) for one in kept) + len(unit.heads) <= wanted:
            kept.append(unit)
    return kept


def _most(own: Sequence[Unit], worth: Callable[[Unit], float], count: int) -> list[Unit]:
    """So many, worth most; of equals the first."""
    return sorted(own, key=worth, reverse=True)[:count]

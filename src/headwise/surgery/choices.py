"""Which heads go: a share of them by their worth, named ones, those of a class, or all but one of each cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, suggest
from ..heads.classes import classify_heads
from ..heads.measuring import measure_heads
from ..heads.redundancy import RedundancyOptions, measure_redundancy
from ..heads.scene import Example
from ..heads.table import HeadTable
from ..models import Transformer
from .plans import HeadId, PruningPlan, HeadUnit, count_heads, list_units
from .worths import DEFAULT_RANKING, HeadRanking, HeadScores, score_heads

LogFunction = Callable[[str], Any]
KEEP_SCOPES = ("layer", "stack", "model")


class HeadSelection(ABC):
    """A way to choose what a model keeps."""

    @abstractmethod
    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        """What is kept of this model, judged by these texts; `tell` hears of progress."""

    def prepare(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> tuple[Transformer, PruningPlan]:
        """The model that is cut, where choosing changed it, and what is kept of it."""
        return net, self.plan(net, examples, log)


@dataclass(frozen=True)
class KeepTop(HeadSelection):
    """Keep a share of the heads, those worth most: of every layer, of the layers of a stack alike, or of the model.

    `share` is more than 0 and less than 1, or a whole number of heads for each layer (of the model, per="model").
    `unit` is what goes together: "head", "group" (the heads that read one head of keys and values), or "auto", groups
    where there are several. per="stack" takes the same numbers from all layers of a stack, by their worth together;
    per="model" leaves `least` units in every layer, 0 lets an attention go altogether.
    """

    amount: float | int
    ranking: HeadRanking = DEFAULT_RANKING
    scope: str = "layer"
    unit: str = "auto"
    min_units: int = 1

    def __post_init__(self) -> None:
        if self.scope not in KEEP_SCOPES:
            raise SpecError(f"per={self.scope!r} is unknown; {suggest(self.scope, KEEP_SCOPES)}")
        whole = type(self.amount) is int and self.amount >= 1
        if not whole and not (isinstance(self.amount, float) and 0 < self.amount < 1):
            raise SpecError(f"keep={self.amount!r} is no share of heads; give 0.5, say, or a whole number of them")
        if type(self.min_units) is not int or self.min_units < 0:
            raise SpecError(f"least={self.min_units!r} is no number of heads; give 0 or more")

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        log("weighing heads")
        found, those = score_heads(net, examples, self.ranking), list_units(net.described, self.unit)
        kept = {"layer": self._select_per_layer, "stack": self._select_per_stack, "model": self._select_per_model}[self.scope](those, found)
        keep: dict[str, list[int]] = {site: [] for site in those}
        for unit in kept:
            keep[unit.site] += unit.heads
        where = {
            "layer": "of each layer",
            "stack": "of each layer, the same in all of a stack",
            "model": "of the model",
        }
        return PruningPlan.of(net.described, keep, f"those worth most {where[self.scope]} by {self.ranking.method}", found.notes)

    def _select_per_layer(self, those: Mapping[str, tuple[HeadUnit, ...]], found: HeadScores) -> Iterator[HeadUnit]:
        for site, own in those.items():
            yield from _top_units(own, found.unit_score, self._num_units(site, own))

    def _select_per_stack(self, those: Mapping[str, tuple[HeadUnit, ...]], found: HeadScores) -> Iterator[HeadUnit]:
        stacks: dict[tuple[str, str], list[str]] = {}
        for site in those:
            stack, _, kind = site.split(".")
            stacks.setdefault((stack, kind), []).append(site)
        for (stack, kind), sites in stacks.items():
            rows = [those[site] for site in sites]
            if len({tuple(unit.heads for unit in row) for row in rows}) > 1:
                raise SpecError(f"layers of {stack} differ in their heads of {kind}; use per='layer' or 'model'")
            columns = sorted(zip(*rows, strict=True), key=lambda column: sum(map(found.unit_score, column)), reverse=True)
            for column in columns[: self._num_units(sites[0], rows[0])]:
                yield from column

    def _select_per_model(self, those: Mapping[str, tuple[HeadUnit, ...]], found: HeadScores) -> Iterator[HeadUnit]:
        heads = sum(len(unit.heads) for own in those.values() for unit in own)
        wanted = self.amount if isinstance(self.amount, int) else round(self.amount * heads)
        if wanted > heads:
            raise SpecError(f"keep={self.amount} heads of a model with {heads}; give at most {heads - 1}")
        yield from select_top_units(those, found, wanted, self.min_units)

    def _num_units(self, site: str, own: Sequence[HeadUnit]) -> int:
        """How many units of a site stay."""
        if isinstance(self.amount, float):
            return max(1, round(self.amount * len(own) + 1e-9))
        size, heads = len(own[0].heads), sum(len(unit.heads) for unit in own)
        if self.amount > heads:
            raise SpecError(f"keep={self.amount} heads of {site}, which has {heads}; give at most {heads}")
        if self.amount % size:
            raise SpecError(
                f"keep={self.amount} heads of {site} are no whole groups of {size}; give a multiple, or unit='head'"
            )
        return self.amount // size


@dataclass(frozen=True)
class DropHeads(HeadSelection):
    """Take these heads away, ("decoder.3.attention", 5) each."""

    heads: tuple[HeadId, ...]

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        return PruningPlan.without(net.described, self.heads, "without those that were named")


@dataclass(frozen=True)
class DropClasses(HeadSelection):
    """Take the heads away that are of these classes and of no others, as `hw.classified` names them."""

    classes: tuple[str, ...]

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        log("naming heads")
        table = classify_heads(measure_heads(net, examples))
        known = sorted({one.name for head in table.heads for one in head.classes})
        if wrong := [name for name in self.classes if name not in known]:
            raise SpecError(f"no head of the model is called {wrong[0]!r}; {suggest(wrong[0], known)}")
        return PruningPlan.without(net.described, self._heads_to_drop(table), f"without the {' and '.join(self.classes)}", table.notes)

    def _heads_to_drop(self, table: HeadTable) -> list[HeadId]:
        named = [(head, {one.name for one in head.classes}) for head in table.heads]
        return [(head.site, head.head) for head, names in named if names and names <= set(self.classes)]


@dataclass(frozen=True)
class KeepOnePerCluster(HeadSelection):
    """Keep one of each cluster of heads that look alike, the one worth most, and all that are alone.

    `cut` is the Jensen-Shannon distance below which heads are one cluster; without it, as `hw.redundancy` has it.
    """

    ranking: HeadRanking = DEFAULT_RANKING
    max_distance: float | None = None

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        log("comparing heads")
        alike = measure_redundancy(net, examples, options=RedundancyOptions(seed=self.ranking.seed, max_distance=self.max_distance, num_permutations=1, num_resamples=1))
        log("weighing heads")
        found, keep = score_heads(net, examples, self.ranking), dict[str, list[int]]()
        clusters = [[(who.site, who.head) for who in own] for one in alike.readers for own in one.cluster_members]
        for own in clusters:
            site, head = max(own, key=lambda one: found.scores[one])
            keep.setdefault(site, []).append(head)
        seen = {site for own in clusters for site, _ in own}
        keep = {site: keep.get(site, []) for site in count_heads(net.described) if site in seen}
        notes = (*found.notes, *alike.notes)
        return PruningPlan.of(net.described, keep, f"the one worth most of each of {len(clusters)} clusters", notes)


def select_top_units(units_by_site: Mapping[str, tuple[HeadUnit, ...]], scores: HeadScores, num_heads: int, min_units: int = 0) -> list[HeadUnit]:
    """Units of all these sites together that are worth most, so many heads at most; `least` units of every site first.

    >>> those = {"a": (HeadUnit("a", (0,)), HeadUnit("a", (1,))), "b": (HeadUnit("b", (0,)),)}
    >>> [unit.site for unit in select_top_units(those, HeadScores({("a", 0): 3.0, ("a", 1): 2.0, ("b", 0): 1.0}), 2, least=1)]
    ['a', 'b']
    """
    kept = [unit for own in units_by_site.values() for unit in _top_units(own, scores.unit_score, min(min_units, len(own)))]
    rest = [unit for own in units_by_site.values() for unit in own if unit not in kept]
    for unit in sorted(rest, key=scores.unit_score, reverse=True):
        if sum(len(one.heads) for one in kept) + len(unit.heads) <= num_heads:
            kept.append(unit)
    return kept


def _top_units(own: Sequence[HeadUnit], worth: Callable[[HeadUnit], float], count: int) -> list[HeadUnit]:
    """So many, worth most; of equals the first."""
    return sorted(own, key=worth, reverse=True)[:count]

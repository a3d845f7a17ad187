"""What every head is worth, by any of the names that importance goes by, or by chance."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from .. import costs
from ..errors import SpecError, suggest
from ..files import write_atomically
from ..head_analysis.annotated_examples import Example
from ..head_analysis.head_classes import classify_heads
from ..head_analysis.head_importance import IMPORTANCE_METHODS, estimate_importance
from ..head_analysis.head_measurement import measure_heads
from ..head_analysis.head_redundancy import RedundancyOptions, measure_redundancy
from ..head_analysis.head_table import HeadTable
from ..head_analysis.importance_methods import ImportanceOptions
from ..head_analysis.objectives import Objective, choose_objective
from ..model_spec import ModelSpec
from ..models import Transformer
from .attention_replacement import remove_heads
from .pruning_plan import HeadId, HeadUnit, PruningPlan, count_heads, fingerprint_model, list_units
from .verification.efficiency import TimingOptions, compare_speed
from .verification.quality_metrics import measure_quality

RANDOM, BEST = "random", "best"
RANKING_METHODS = (*IMPORTANCE_METHODS, RANDOM, BEST)


class HeadRanking(NamedTuple):
    """By what heads are ranked: a method of `hw.estimate_importance`, or "random"; of which objective, on how many
    texts.

    "best" is michel where the objective has a slope, and leave-one-out where it has none: of a trained translator the
    latter was no better than chance when many heads went at once (docs/findings/translator.md).
    """

    method: str = "best"
    objective: str | Objective | None = None
    num_examples: int | None = None
    max_seconds: float | None = None
    normalisation: str = ""
    seed: int = 0


DEFAULT_RANKING = HeadRanking()


class HeadScores(NamedTuple):
    """A number for every head, and what must be said of how it was found."""

    scores: Mapping[HeadId, float]
    notes: tuple[str, ...] = ()

    def unit_score(self, unit: HeadUnit) -> float:
        """What the heads of a unit are worth together; one of which nothing is known is not taken away."""
        told = [self.scores.get((unit.site, head), math.inf) for head in unit.heads]
        return math.inf if any(map(math.isnan, told)) else sum(told)


def score_heads(net: Transformer, examples: Sequence[Example], ranking: HeadRanking = DEFAULT_RANKING) -> HeadScores:
    """What each head of a model is worth on these texts.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 1}), seed=0
    ... )
    >>> sorted(score_heads(net, [], HeadRanking("random")).scores.values())
    [0.0, 1.0, 2.0, 3.0]
    """
    if ranking.method not in RANKING_METHODS:
        raise SpecError(f"heads are ranked by {ranking.method!r} nowhere; {suggest(ranking.method, RANKING_METHODS)}")
    if ranking.method == RANDOM:
        heads = [(site, head) for site, count in count_heads(net.spec).items() for head in range(count)]
        order = np.random.default_rng(ranking.seed).permutation(len(heads))
        return HeadScores({head: float(place) for head, place in zip(heads, order, strict=True)})
    if len(examples) < 2:
        raise SpecError(
            f"{len(examples)} texts say nothing of heads by {ranking.method}; give at least two, or by='random'"
        )
    if ranking.method == BEST:
        sloped = choose_objective(net, ranking.objective, examples[0])[0].has_gradient
        return score_heads(net, examples, ranking._replace(method="michel" if sloped else "leave-one-out"))
    how = replace(
        ImportanceOptions(),
        num_examples=ranking.num_examples,
        max_seconds=ranking.max_seconds,
        normalisation=ranking.normalisation,
        seed=ranking.seed,
        num_resamples=1,
    )
    found = estimate_importance(net, examples, method=ranking.method, objective=ranking.objective, options=how)
    notes = (f"ranked by {found.method} of {found.objective} over {found.texts} texts", *found.notes)
    return HeadScores({(one.site, one.head): one.value for one in found.heads}, notes)


# --- Which heads go ------------------------------------------------------------------------------------

LogFunction = Callable[[str], Any]
KEEP_SCOPES = ("layer", "stack", "model")


class HeadSelection(ABC):
    """A way to choose what a model keeps."""

    @abstractmethod
    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        """What is kept of this model, judged by these texts; `tell` hears of progress."""

    def prepare(
        self, net: Transformer, examples: Sequence[Example], log: LogFunction
    ) -> tuple[Transformer, PruningPlan]:
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
        found, those = score_heads(net, examples, self.ranking), list_units(net.spec, self.unit)
        kept = {"layer": self._select_per_layer, "stack": self._select_per_stack, "model": self._select_per_model}[
            self.scope
        ](those, found)
        keep: dict[str, list[int]] = {site: [] for site in those}
        for unit in kept:
            keep[unit.site] += unit.heads
        where = {
            "layer": "of each layer",
            "stack": "of each layer, the same in all of a stack",
            "model": "of the model",
        }
        return PruningPlan.of(
            net.spec, keep, f"those worth most {where[self.scope]} by {self.ranking.method}", found.notes
        )

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
            columns = sorted(
                zip(*rows, strict=True), key=lambda column: sum(map(found.unit_score, column)), reverse=True
            )
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
        return PruningPlan.without(net.spec, self.heads, "without those that were named")


@dataclass(frozen=True)
class DropClasses(HeadSelection):
    """Take the heads away that are of these classes and of no others, as `hw.classify_heads` names them."""

    classes: tuple[str, ...]

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        log("naming heads")
        table = classify_heads(measure_heads(net, examples))
        known = sorted({one.name for head in table.heads for one in head.classes})
        if wrong := [name for name in self.classes if name not in known]:
            raise SpecError(f"no head of the model is called {wrong[0]!r}; {suggest(wrong[0], known)}")
        return PruningPlan.without(
            net.spec, self._heads_to_drop(table), f"without the {' and '.join(self.classes)}", table.notes
        )

    def _heads_to_drop(self, table: HeadTable) -> list[HeadId]:
        named = [(head, {one.name for one in head.classes}) for head in table.heads]
        return [(head.site, head.head) for head, names in named if names and names <= set(self.classes)]


@dataclass(frozen=True)
class KeepOnePerCluster(HeadSelection):
    """Keep one of each cluster of heads that look alike, the one worth most, and all that are alone.

    `cut` is the Jensen-Shannon distance below which heads are one cluster; without it, as `hw.measure_redundancy` has
    it.
    """

    ranking: HeadRanking = DEFAULT_RANKING
    max_distance: float | None = None

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        log("comparing heads")
        alike = measure_redundancy(
            net,
            examples,
            options=RedundancyOptions(
                seed=self.ranking.seed, max_distance=self.max_distance, num_permutations=1, num_resamples=1
            ),
        )
        log("weighing heads")
        found, keep = score_heads(net, examples, self.ranking), dict[str, list[int]]()
        clusters = [[(who.site, who.head) for who in own] for one in alike.readers for own in one.cluster_members]
        for own in clusters:
            site, head = max(own, key=lambda one: found.scores[one])
            keep.setdefault(site, []).append(head)
        seen = {site for own in clusters for site, _ in own}
        keep = {site: keep.get(site, []) for site in count_heads(net.spec) if site in seen}
        notes = (*found.notes, *alike.notes)
        return PruningPlan.of(net.spec, keep, f"the one worth most of each of {len(clusters)} clusters", notes)


def select_top_units(
    units_by_site: Mapping[str, tuple[HeadUnit, ...]], scores: HeadScores, num_heads: int, min_units: int = 0
) -> list[HeadUnit]:
    """Units of all these sites together that are worth most, so many heads at most; `least` units of every site first.

    >>> those = {"a": (HeadUnit("a", (0,)), HeadUnit("a", (1,))), "b": (HeadUnit("b", (0,)),)}
    >>> [
    ...     unit.site
    ...     for unit in select_top_units(
    ...         those, HeadScores({("a", 0): 3.0, ("a", 1): 2.0, ("b", 0): 1.0}), 2, min_units=1
    ...     )
    ... ]
    ['a', 'b']
    """
    kept = [
        unit for own in units_by_site.values() for unit in _top_units(own, scores.unit_score, min(min_units, len(own)))
    ]
    rest = [unit for own in units_by_site.values() for unit in own if unit not in kept]
    for unit in sorted(rest, key=scores.unit_score, reverse=True):
        if sum(len(one.heads) for one in kept) + len(unit.heads) <= num_heads:
            kept.append(unit)
    return kept


def _top_units(own: Sequence[HeadUnit], worth: Callable[[HeadUnit], float], count: int) -> list[HeadUnit]:
    """So many, worth most; of equals the first."""
    return sorted(own, key=worth, reverse=True)[:count]


# --- Heads taken away one after the other, until a model is as small or as fast as asked for, or would ---

BUDGET_KINDS = ("parameters", "cache", "time", "loss")
DEFAULT_TIMING = TimingOptions(seconds=2.0)


class PruningBudget(NamedTuple):
    """What a model may have: numbers that it learns, bytes that it remembers of a token, seconds that its attentions
    take, each as a share of what it has now (below 1) or in full; or by how much its loss may grow.

    >>> PruningBudget("cache", 0.5).validate()
    PruningBudget(kind='cache', limit=0.5)
    """

    kind: str
    limit: float

    def validate(self) -> PruningBudget:
        """The same, if it can be kept to."""
        if self.kind not in BUDGET_KINDS:
            raise SpecError(f"there is no budget of {self.kind!r}; {suggest(self.kind, BUDGET_KINDS)}")
        if not self.limit > 0 and not (self.kind == "loss" and self.limit == 0):
            raise SpecError(f"a budget of {self.limit:g} {self.kind} leaves nothing; give a share such as 0.5")
        if self.kind == "time" and not self.limit < 1:
            raise SpecError(f"time={self.limit:g} is no share of what the model takes now; give 0.7, say")
        return self


@dataclass(frozen=True)
class PruneToBudget(HeadSelection):
    """Take away what is worth least, unit by unit, until a budget is met; with a budget of loss, as long as it is.

    Worths are found anew whenever `again` units have gone, or only once; `least` units stay in every layer. What has
    been done is kept in the file `state`, and taken up there.
    """

    budget: PruningBudget
    ranking: HeadRanking = DEFAULT_RANKING
    rescore_every: int | None = None
    unit: str = "auto"
    min_units: int = 0
    state_path: Path | None = None
    timing: TimingOptions = DEFAULT_TIMING

    def __post_init__(self) -> None:
        self.budget.validate()
        if self.rescore_every is not None and (type(self.rescore_every) is not int or self.rescore_every < 1):
            raise SpecError(f"again={self.rescore_every!r} is no number of units; give at least 1, or leave it out")

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        if self.budget.kind == "loss" and len(examples) < 2:
            raise SpecError(f"a budget of loss is measured on texts, and there are {len(examples)}; give at least two")
        on = _BudgetSearch(self, net, examples, log)
        if on.is_met:
            return self._build_plan(net, on)
        for _ in on.steps():
            if on.is_met:
                break
        else:
            if self.budget.kind != "loss":
                there = f"{on.current:g} with the {sum(map(len, on.keep.values()))} heads that have to stay"
                raise SpecError(f"{self.budget.kind}={self.budget.limit:g} cannot be met: it is {there}; give more")
        return self._build_plan(net, on)

    def _build_plan(self, net: Transformer, on: _BudgetSearch) -> PruningPlan:
        until = "would have gone beyond" if self.budget.kind == "loss" else "was down to"
        why = f"those worth least gone, until {self.budget.kind} {until} {self.budget.limit:g}"
        return PruningPlan.of(net.spec, on.keep, why, on.notes)


class _BudgetSearch:
    """A model on its way to a budget: what it keeps still, and what has gone in which order."""

    def __init__(self, asked: PruneToBudget, net: Transformer, scenes: Sequence[Example], tell: LogFunction) -> None:
        self.selection, self.net, self.scenes, self.tell = asked, net, scenes, tell
        self.units = [unit for own in list_units(net.spec, asked.unit).values() for unit in own]
        self.removed_units, self.notes = list[HeadUnit](), list[str]()
        self.current, self.is_met = self._measure(net), False
        self.initial = self.current
        self._worths, self._at = HeadScores({}), -1
        self._load_state()

    @property
    def keep(self) -> dict[str, tuple[int, ...]]:
        """The heads of every site that are there still."""
        return self._heads_without(self.removed_units)

    def _heads_without(self, units: Sequence[HeadUnit]) -> dict[str, tuple[int, ...]]:
        gone = {(unit.site, head) for unit in units for head in unit.heads}
        there = count_heads(self.net.spec)
        return {site: tuple(h for h in range(count) if (site, h) not in gone) for site, count in there.items()}

    def steps(self) -> Iterator[None]:
        """One unit less each time, as long as any may go."""
        while (unit := self._next_unit()) is not None:
            before = list(self.removed_units)
            self.removed_units.append(unit)
            now = self._measure(remove_heads(self.net, self.keep))
            if self.selection.budget.kind == "loss" and now - self.initial > self.selection.budget.limit:
                self.removed_units, self.is_met = before, True
                yield
                return
            self.current, self.is_met = now, self._is_within(now)
            self._save_state()
            self.tell(
                f"{len(self.removed_units)} of {len(self.units)} units gone, {self.selection.budget.kind} {now:.6g}"
            )
            yield

    def _is_within(self, now: float) -> bool:
        kind, limit = self.selection.budget
        return kind != "loss" and now <= (limit * self.initial if limit < 1 else limit)

    def _next_unit(self) -> HeadUnit | None:
        """The unit worth least of those that may go."""
        left = [unit for unit in self.units if unit not in self.removed_units]
        free = [unit for unit in left if sum(other.site == unit.site for other in left) > self.selection.min_units]
        if len(left) < 2 or not free:
            return None
        again = self.selection.rescore_every or len(self.units)
        if (at := len(self.removed_units) // again * again) != self._at:
            self._worths, self._at = self._score_without(at), at
        return min(free, key=self._worths.unit_score)

    def _score_without(self, count: int) -> HeadScores:
        """What heads are worth, by their first numbers, in the model without the first so many that went."""
        keep = self._heads_without(self.removed_units[:count])
        found = score_heads(remove_heads(self.net, keep) if count else self.net, self.scenes, self.selection.ranking)
        self.notes = self.notes or list(found.notes)
        return HeadScores({(site, keep[site][head]): worth for (site, head), worth in found.scores.items()})

    def _measure(self, net: Transformer) -> float:
        """What the budget is of."""
        kind = self.selection.budget.kind
        if kind == "parameters":
            return costs.count_parameters(net.spec)
        if kind == "cache":
            return count_cache_bytes(net.spec, next(net.parameters()).element_size())
        if kind == "time":
            return 1.0 if net is self.net else 1 / compare_speed(self.net, net, self.selection.timing).phases[0].faster
        return measure_quality(net, self.scenes, self.selection.ranking.objective, self.net).rows[0].after.value

    # --- what was done before ------------------------------------------------------------------------------

    def _load_state(self) -> None:
        path = self.selection.state_path
        if path is None or not path.is_file():
            return
        try:
            said = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
            mark, asked, gone = said["model"], said["asked"], [HeadUnit(s, tuple(h)) for s, h in said["gone"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(f"{path} does not say what was done: {error}; remove it to begin anew") from None
        if mark != fingerprint_model(self.net) or asked != self._selection_key or not set(gone) <= set(self.units):
            raise SpecError(f"{path} is of another model or another choice; remove it to begin anew")
        self.removed_units = gone
        self.current = self._measure(remove_heads(self.net, self.keep)) if gone else self.current
        self.is_met = self._is_within(self.current)

    def _save_state(self) -> None:
        if self.selection.state_path is not None:
            gone = [[unit.site, list(unit.heads)] for unit in self.removed_units]
            said = {"model": fingerprint_model(self.net), "asked": self._selection_key, "gone": gone}
            write_atomically(self.selection.state_path, json.dumps(said).encode())

    @property
    def _selection_key(self) -> str:
        return repr(replace(self.selection, state_path=None))


def count_cache_bytes(model_spec: ModelSpec, element_size: int) -> int:
    """Bytes that the last stack of a model remembers of a token that it reads.

    >>> import headwise as hw
    >>> llama = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> count_cache_bytes(
    ...     hw.families.read_model_spec(llama | {"num_hidden_layers": 3, "head_dim": 6}), 2
    ... )  # 3 layers, k and v, 2 heads
    144
    """
    layers = model_spec.stacks[-1].layers
    return element_size * sum(
        costs.cached_numbers_per_token(block.attention_specs["attention"])
        for block in layers
        if "attention" in block.attention_specs
    )

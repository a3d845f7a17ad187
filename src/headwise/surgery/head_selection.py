"""Importance scores of attention heads, and strategies that choose which heads a pruned model
keeps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import nn

from .. import costs
from ..models import Transformer
from ..models.model_spec import ModelSpec
from ..observe.head_analysis.annotated_examples import Example
from ..observe.head_analysis.head_importance import (
    IMPORTANCE_METHODS,
    ImportanceOptions,
    estimate_importance,
)
from ..observe.head_analysis.head_redundancy import RedundancyOptions, measure_redundancy
from ..observe.head_analysis.objectives import Objective, choose_objective
from ..report.progress import CountedMessage
from ..util.errors import SpecError, suggest
from .attention_replacement import remove_heads
from .pruning_plan import (
    HeadId,
    HeadUnit,
    PruningPlan,
    choose_sites,
    collect_heads,
    count_heads,
    describe_heads,
    list_rounded_shares,
    list_units,
)
from .verification.efficiency import TimingOptions, compare_speed
from .verification.model_comparison import parameter_dtype
from .verification.quality_metrics import measure_quality

RANDOM = "random"
BEST = "best"
RANKING_METHODS = (*IMPORTANCE_METHODS, RANDOM, BEST)


LogFunction = Callable[[str], Any]


class HeadRanking(NamedTuple):
    """How heads are ranked: a method of `hw.estimate_importance` or "random", the objective, and
    limits of the work.

    "best" is "michel" if the objective has a gradient and "leave-one-out" otherwise: on a trained
    translation model leave-one-out was no better than chance when many heads were removed at once
    (docs/findings/translator.md).
    """

    method: str = "best"
    objective: str | Objective | None = None
    num_examples: int | None = None
    max_seconds: float | None = None
    normalisation: str = ""
    seed: int = 0


DEFAULT_RANKING = HeadRanking()


class HeadScores(NamedTuple):
    """A score for every head, notes on how it was estimated, and the method. Higher is more
    important.
    """

    scores: Mapping[HeadId, float]
    notes: tuple[str, ...] = ()
    method: str = ""

    def unit_score(self, unit: HeadUnit) -> float:
        """Return the sum of the scores of a unit's heads; infinity, which keeps the unit, if one is
        unknown or NaN.
        """
        head_scores = [self.scores.get((unit.site, head), math.inf) for head in unit.heads]
        return math.inf if any(map(math.isnan, head_scores)) else sum(head_scores)


def score_heads(
    net: nn.Module,
    examples: Sequence[Example],
    ranking: HeadRanking = DEFAULT_RANKING,
    log: LogFunction = lambda _: None,
) -> HeadScores:
    """Score the heads of a model by their importance on example texts; `log` is called with the
    number of texts done.

    >>> import headwise as hw
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 4, "n_layer": 1}
    ...     ),
    ...     seed=0,
    ... )
    >>> sorted(score_heads(net, [], HeadRanking("random")).scores.values())
    [0.0, 1.0, 2.0, 3.0]
    """
    if ranking.method not in RANKING_METHODS:
        raise SpecError(
            f"unknown ranking method {ranking.method!r}; {suggest(ranking.method, RANKING_METHODS)}"
        )
    if ranking.method == RANDOM:
        heads: list[HeadId] = []
        for site, count in count_heads(describe_heads(net)).items():
            heads += [(site, head) for head in range(count)]
        ranks = np.random.default_rng(ranking.seed).permutation(len(heads))
        return HeadScores(
            {head: float(rank) for head, rank in zip(heads, ranks, strict=True)}, method=RANDOM
        )
    if len(examples) < 2:
        raise SpecError(
            f"cannot rank heads by {ranking.method}: {len(examples)} examples. Give at least 2, "
            "or use method='random'"
        )
    method = ranking.method
    if method == BEST:
        has_gradient = choose_objective(net, ranking.objective, examples[0])[0].has_gradient
        method = "michel" if has_gradient else "leave-one-out"
    options = replace(
        ImportanceOptions(),
        num_examples=ranking.num_examples,
        max_seconds=ranking.max_seconds,
        normalisation=ranking.normalisation,
        seed=ranking.seed,
    )
    total = min(len(examples), ranking.num_examples or len(examples))

    def progress(count: int) -> None:
        log(CountedMessage("ranking heads", count, total, "texts"))

    progress(0)
    importance = estimate_importance(
        net,
        examples,
        method=method,
        objective=ranking.objective,
        options=options,
        progress=progress,
        log=log,
    )
    notes = (
        f"ranked by {importance.method} of {importance.objective} over {importance.texts} texts",
        *importance.notes,
    )
    return HeadScores(
        {(score.site, score.head): score.value for score in importance.heads},
        notes,
        importance.method,
    )


# --- Selections of heads --------------------------------------------------------------------------

KEEP_SCOPES = ("layer", "stack", "model")


class HeadSelection(ABC):
    """Strategy that chooses the heads a model keeps.

    `takes_any_model`: it plans for models that headwise does not load as its own too.
    """

    takes_any_model: ClassVar[bool] = False

    @property
    def text_uses(self) -> tuple[str, ...]:
        """Uses of the texts, as notes of a verification report; empty if the choice does not depend
        on texts.
        """
        return ("heads were chosen",)

    @abstractmethod
    def plan(self, net: Any, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        """Choose the heads to keep, judged by `examples`; `log` is called with
        progress messages.
        """

    def prepare(
        self, net: Transformer, examples: Sequence[Example], log: LogFunction
    ) -> tuple[Transformer, PruningPlan]:
        """Return the model to prune and the plan for it; the model differs from `net` if choosing
        trained it.
        """
        return net, self.plan(net, examples, log)


@dataclass(frozen=True)
class KeepTop(HeadSelection):
    """Keep the most important heads of every layer, of every stack or of the whole model.

    `amount` is a fraction between 0 and 1, or an integer: heads per layer, or heads of the model
    with scope="model". `unit` is what is removed together: "head", "group" (the query heads of one
    key-value head), or "auto", which takes groups if a layer has several. scope="stack" removes the
    same head indices from all layers of a stack, ranked by the sum of their scores over the layers.
    With scope="model" at least `min_units` units stay in every layer; 0 lets whole attentions be
    removed. `sites` are names of attentions or prefixes such as "encoder", which `amount` is about;
    all others keep their heads.
    """

    takes_any_model: ClassVar[bool] = True
    amount: float | int
    ranking: HeadRanking = DEFAULT_RANKING
    scope: str = "layer"
    unit: str = "auto"
    min_units: int = 1
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scope not in KEEP_SCOPES:
            raise SpecError(f"unknown scope={self.scope!r}; {suggest(self.scope, KEEP_SCOPES)}")
        is_count = type(self.amount) is int and self.amount >= 1
        if not is_count and not (isinstance(self.amount, float) and 0 < self.amount < 1):
            raise SpecError(
                f"cannot keep {self.amount!r} of the heads. Give a fraction such as 0.5, or an "
                "int >= 1"
            )
        if type(self.min_units) is not int or self.min_units < 0:
            raise SpecError(f"min_units must be an int >= 0, got {self.min_units!r}")

    @property
    def text_uses(self) -> tuple[str, ...]:
        """Uses of the texts: the ranking of heads, unless it is random."""
        return () if self.ranking.method == RANDOM else super().text_uses

    def plan(self, net: Any, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        log("ranking heads")
        scores = score_heads(net, examples, self.ranking, log)
        all_units = list_units(describe_heads(net), self.unit)
        units_by_site = choose_sites(all_units, self.sites)
        if self.scope == "model":
            units = chain.from_iterable(units_by_site.values())
            num_heads = sum(len(unit.heads) for unit in units)
            self._check_amount("the model", num_heads)
            is_count = isinstance(self.amount, int)
            num_kept = self.amount if is_count else round(self.amount * num_heads)
            selected = select_top_units(units_by_site, scores, int(num_kept), self.min_units)
        else:
            selected = self._select_per_layer(units_by_site, scores)
        others = (units for site, units in all_units.items() if site not in units_by_site)
        keep = collect_heads(all_units, chain(selected, *others))
        scope = {
            "layer": "each layer",
            "stack": "each layer, the same heads in all layers of a stack",
            "model": "the model",
        }[self.scope]
        notes = (*list_rounded_shares(self.amount, self.scope, keep, units_by_site), *scores.notes)
        where = f" in {', '.join(self.sites)}" if self.sites else ""
        reason = f"the most important of {scope}{where} by {scores.method}"
        return PruningPlan.from_kept_heads(describe_heads(net), keep, reason, notes)

    def _select_per_layer(
        self, units_by_site: Mapping[str, tuple[HeadUnit, ...]], scores: HeadScores
    ) -> Iterator[HeadUnit]:
        """Yield the best units of each layer; with scope="stack", of all layers of a stack and kind
        together.
        """
        pools: dict[str, list[tuple[HeadUnit, ...]]] = {}
        for site, units in units_by_site.items():
            stack, _, kind = site.split(".")
            pool = site if self.scope == "layer" else f"{kind} of {stack}"
            pools.setdefault(pool, []).append(units)
        for pool, rows in pools.items():
            if len({tuple(unit.heads for unit in row) for row in rows}) > 1:
                raise SpecError(
                    f"cannot select per stack: layers have different heads in {pool}. Use "
                    "scope='layer' or 'model'"
                )
            site = rows[0][0].site
            size = len(rows[0][0].heads)
            num_heads = sum(len(unit.heads) for unit in rows[0])
            if isinstance(self.amount, float):
                num_units = max(1, round(self.amount * len(rows[0]) + 1e-9))
            else:
                self._check_amount(site, num_heads)
                num_units, rest = divmod(self.amount, size)
                if rest:
                    raise SpecError(
                        f"cannot keep {self.amount} heads of {site}: its heads come in groups of "
                        f"{size}. Give a multiple, or use unit='head'"
                    )
            columns = sorted(
                zip(*rows, strict=True),
                key=lambda column: sum(map(scores.unit_score, column)),
                reverse=True,
            )
            yield from chain.from_iterable(columns[:num_units])

    def _check_amount(self, where: str, num_heads: int) -> None:
        if self.amount > num_heads:
            raise SpecError(
                f"cannot keep {self.amount} heads of {where}: it has {num_heads}. Give "
                f"{num_heads} or less, or a fraction such as 0.5"
            )


@dataclass(frozen=True)
class DropHeads(HeadSelection):
    """Remove the given heads, each a pair of site and index such as ("decoder.3.attention", 5)."""

    takes_any_model: ClassVar[bool] = True
    heads: tuple[HeadId, ...]

    @property
    def text_uses(self) -> tuple[str, ...]:
        """Nothing: the heads are given."""
        return ()

    def plan(self, net: Any, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        return PruningPlan.without(describe_heads(net), self.heads, "all but the listed heads")


@dataclass(frozen=True)
class KeepOnePerCluster(HeadSelection):
    """Keep the most important head of each cluster of similar heads, and every head without a
    cluster.

    Heads closer than `max_distance`, a Jensen-Shannon distance, form one cluster; None uses the
    default of `hw.measure_redundancy`.
    """

    takes_any_model: ClassVar[bool] = True
    ranking: HeadRanking = DEFAULT_RANKING
    max_distance: float | None = None

    def plan(self, net: Any, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        log("comparing heads")
        options = RedundancyOptions(
            seed=self.ranking.seed, max_distance=self.max_distance, num_permutations=1
        )
        redundancy = measure_redundancy(net, examples, options=options)
        log("ranking heads")
        scores = score_heads(net, examples, self.ranking, log)
        keep = dict[str, list[int]]()
        num_clusters = 0
        for same_input in redundancy.readers:
            singles = [(head,) for head in same_input.without_rest]
            for members in (*same_input.cluster_members, *singles):
                heads = [(member.site, member.head) for member in members]
                best_site, best_head = max(heads, key=lambda head: scores.scores[head])
                for site, _ in heads:
                    keep.setdefault(site, [])
                keep[best_site].append(best_head)
                num_clusters += 1
        reason = f"the most important head of each of {num_clusters} clusters"
        notes = (*scores.notes, *redundancy.notes)
        return PruningPlan.from_kept_heads(describe_heads(net), keep, reason, notes)


def select_top_units(
    units_by_site: Mapping[str, tuple[HeadUnit, ...]],
    scores: HeadScores,
    num_heads: int,
    min_units: int = 0,
) -> list[HeadUnit]:
    """Return the units with the highest scores over all sites, at most `num_heads` heads.

    The best `min_units` units of every site are taken first.

    >>> units = {"a": (HeadUnit("a", (0,)), HeadUnit("a", (1,))), "b": (HeadUnit("b", (0,)),)}
    >>> [
    ...     unit.site
    ...     for unit in select_top_units(
    ...         units, HeadScores({("a", 0): 3.0, ("a", 1): 2.0, ("b", 0): 1.0}), 2, min_units=1
    ...     )
    ... ]
    ['a', 'b']
    """
    selected = list[HeadUnit]()
    others = list[HeadUnit]()
    for units in units_by_site.values():
        ranked = sorted(units, key=scores.unit_score, reverse=True)
        selected += ranked[:min_units]
        others += [unit for unit in units if unit not in ranked[:min_units]]
    count = sum(len(unit.heads) for unit in selected)
    for unit in sorted(others, key=scores.unit_score, reverse=True):
        if count + len(unit.heads) <= num_heads:
            selected.append(unit)
            count += len(unit.heads)
    return selected


# --- Pruning to a budget --------------------------------------------------------------------------

BUDGET_KINDS = ("parameters", "cache", "time", "loss")
DEFAULT_TIMING = TimingOptions(seconds=2.0)


@dataclass(frozen=True)
class PruningBudget:
    """Limit that a pruned model has to meet.

    `kind` is "parameters", "cache" (bytes of keys and values per token), "time" (of the attentions)
    or "loss". A limit below 1 is a fraction of the current value, a larger one an absolute value;
    for "loss" it is the largest increase.
    """

    kind: str
    limit: float

    def __post_init__(self) -> None:
        if self.kind not in BUDGET_KINDS:
            raise SpecError(f"unknown budget {self.kind!r}; {suggest(self.kind, BUDGET_KINDS)}")
        if not self.limit > 0 and not (self.kind == "loss" and self.limit == 0):
            raise SpecError(
                f"budget {self.kind} must be > 0, got {self.limit:g}; give a fraction such as 0.5"
            )
        if self.kind == "time" and not self.limit < 1:
            raise SpecError(
                f"budget time must be a fraction of the current time, got {self.limit:g}; give a "
                "value below 1 such as 0.7"
            )

    def is_met(self, value: float, initial: float) -> bool:
        """True if a value is within the limit."""
        if self.kind == "loss":
            return value - initial <= self.limit
        return value <= (self.limit * initial if self.limit < 1 else self.limit)


@dataclass(frozen=True)
class PruneToBudget(HeadSelection):
    """Remove the least important unit, one at a time, until the budget is met (for "loss": as long
    as it is met).

    Scores are estimated again after every `rescore_every` removed units, or only once if it is
    None. At least `min_units` units stay in every layer.
    """

    budget: PruningBudget
    ranking: HeadRanking = DEFAULT_RANKING
    rescore_every: int | None = None
    unit: str = "auto"
    min_units: int = 0
    timing: TimingOptions = DEFAULT_TIMING

    @property
    def text_uses(self) -> tuple[str, ...]:
        """Uses of the texts: the ranking of heads, unless it is random, and a budget of the
        loss.
        """
        is_unused = self.ranking.method == RANDOM and self.budget.kind != "loss"
        return () if is_unused else super().text_uses

    def __post_init__(self) -> None:
        every = self.rescore_every
        if every is not None and (type(every) is not int or every < 1):
            raise SpecError(f"rescore_every must be an int >= 1 or None, got {every!r}")

    def plan(self, net: Transformer, examples: Sequence[Example], log: LogFunction) -> PruningPlan:
        budget = self.budget
        is_loss = budget.kind == "loss"
        if is_loss and len(examples) < 2:
            raise SpecError(f"cannot measure the loss on {len(examples)} examples. Give at least 2")
        units = list(chain.from_iterable(list_units(net.spec, self.unit).values()))
        remaining = list(units)
        interval = self.rescore_every or len(units)
        notes: tuple[str, ...] = ()
        scores = HeadScores({})
        pruned = net
        value = initial = self._measure(net, net, examples)
        while is_loss or not budget.is_met(value, initial):
            counts = Counter(unit.site for unit in remaining)
            removable = [unit for unit in remaining if counts[unit.site] > self.min_units]
            if len(remaining) < 2 or not removable:
                if is_loss:
                    break
                raise SpecError(
                    f"cannot meet budget {budget.kind}={budget.limit:g}: it is {value:g} with the "
                    f"{sum(len(unit.heads) for unit in remaining)} heads that have to be kept. "
                    "Give a larger limit"
                )
            sites = count_heads(net.spec)
            if (len(units) - len(remaining)) % interval == 0:
                # heads keep their indices in the original model
                keep = collect_heads(sites, remaining)
                importance = score_heads(pruned, examples, self.ranking)
                notes = notes or importance.notes
                values = importance.scores.items()
                scores = HeadScores({(site, keep[site][head]): one for (site, head), one in values})
            unit = min(removable, key=scores.unit_score)
            left = [other for other in remaining if other is not unit]
            smaller = remove_heads(net, collect_heads(sites, left))
            value = self._measure(net, smaller, examples)
            if is_loss and not budget.is_met(value, initial):
                break
            remaining = left
            pruned = smaller
            done = f"{len(units) - len(remaining)} of {len(units)} units removed"
            log(f"{done}, {budget.kind} {value:.6g}")
        end = "would have grown by more than" if is_loss else "reached"
        reason = f"the least important removed until {budget.kind} {end} {budget.limit:g}"
        keep = collect_heads(count_heads(net.spec), remaining)
        return PruningPlan.from_kept_heads(net.spec, keep, reason, notes)

    def _measure(
        self, before: Transformer, after: Transformer, examples: Sequence[Example]
    ) -> float:
        """Return the value that the budget limits."""
        kind = self.budget.kind
        if kind == "parameters":
            return costs.count_parameters(after.spec)
        if kind == "cache":
            return count_cache_bytes(after.spec, parameter_dtype(after).itemsize)
        if kind == "time":
            if after is before:
                return 1.0
            return 1 / compare_speed(before, after, self.timing).phases[0].speedup
        report = measure_quality(after, examples, self.ranking.objective, before)
        return report.rows[0].after.value


def count_cache_bytes(model_spec: ModelSpec, element_size: int) -> int:
    """Return the bytes of keys and values that the last stack caches per token.

    >>> import headwise as hw
    >>> llama = {
    ...     "model_type": "llama",
    ...     "hidden_size": 8,
    ...     "num_attention_heads": 4,
    ...     "num_key_value_heads": 2,
    ... }
    >>> count_cache_bytes(
    ...     hw.families.read_model_spec(llama | {"num_hidden_layers": 3, "head_dim": 6}), 2
    ... )  # 3 layers, k and v, 2 heads
    144
    """
    layers = model_spec.stacks[-1].layers
    return element_size * sum(
        costs.cached_numbers_per_token(block.attention_specs["attention"])
        for block in layers
        if "attention" in block.attention_specs and not block.kv_layers_back
    )

"""Heads taken away one after the other, until a model is as small or as fast as asked for, or would lose too much."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from .. import counting
from ..blueprint import ModelSpec
from ..errors import SpecError, suggest
from ..files import write_atomically
from ..heads.scene import Example
from ..models import Transformer
from .choices import HeadSelection, LogFunction
from .marks import fingerprint_model
from .phases import TimingOptions
from .plans import PruningPlan, HeadUnit, count_heads, list_units
from .quality import measure_quality
from .removing import remove_heads
from .speeds import compare_speed
from .worths import DEFAULT_RANKING, HeadRanking, HeadScores, score_heads

BUDGET_KINDS = ("parameters", "cache", "time", "loss")
DEFAULT_TIMING = TimingOptions(seconds=2.0)


class PruningBudget(NamedTuple):
    """What a model may have: numbers that it learns, bytes that it remembers of a token, seconds that its attentions
    take, each as a share of what it has now (below 1) or in full; or by how much its loss may grow.

    >>> PruningBudget("cache", 0.5).checked()
    Budget(kind='cache', limit=0.5)
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
        return PruningPlan.of(net.described, on.keep, why, on.notes)


class _BudgetSearch:
    """A model on its way to a budget: what it keeps still, and what has gone in which order."""

    def __init__(self, asked: PruneToBudget, net: Transformer, scenes: Sequence[Example], tell: LogFunction) -> None:
        self.selection, self.net, self.scenes, self.tell = asked, net, scenes, tell
        self.units = [unit for own in list_units(net.described, asked.unit).values() for unit in own]
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
        there = count_heads(self.net.described)
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
            self.tell(f"{len(self.removed_units)} of {len(self.units)} units gone, {self.selection.budget.kind} {now:.6g}")
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
            return counting.count_parameters(net.described)
        if kind == "cache":
            return count_cache_bytes(net.described, next(net.parameters()).element_size())
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
    >>> count_cache_bytes(hw.families.read(llama | {"num_hidden_layers": 3, "head_dim": 6}), 2)  # 3 layers, k and v, 2 heads
    144
    """
    layers = model_spec.stacks[-1].layers
    return element_size * sum(
        counting.cached_numbers_per_token(block.attention_specs["attention"]) for block in layers if "attention" in block.attention_specs
    )

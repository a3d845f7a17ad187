"""Heads taken away one after the other, until a model is as small or as fast as asked for, or would lose too much."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from .. import counting
from ..blueprint import Model
from ..errors import SpecError, nearest
from ..files import write_atomically
from ..heads.scene import Scene
from ..models import Transformer
from .choices import Choice, Tell
from .marks import mark_of
from .phases import Pace
from .plans import Plan, Unit, counts, units
from .quality import quality
from .removing import removed
from .speeds import speeds
from .worths import USUAL, By, Worths, worths

KINDS = ("parameters", "cache", "time", "loss")
PACE = Pace(seconds=2.0)


class Budget(NamedTuple):
    """What a model may have: numbers that it learns, bytes that it remembers of a token, seconds that its attentions
    take, each as a share of what it has now (below 1) or in full; or by how much its loss may grow.

    >>> Budget("cache", 0.5).checked()
    Budget(kind='cache', limit=0.5)
    """

    kind: str
    limit: float

    def checked(self) -> Budget:
        """The same, if it can be kept to."""
        if self.kind not in KINDS:
            raise SpecError(f"there is no budget of {self.kind!r}; {nearest(self.kind, KINDS)}")
        if not self.limit > 0 and not (self.kind == "loss" and self.limit == 0):
            raise SpecError(f"a budget of {self.limit:g} {self.kind} leaves nothing; give a share such as 0.5")
        if self.kind == "time" and not self.limit < 1:
            raise SpecError(f"time={self.limit:g} is no share of what the model takes now; give 0.7, say")
        return self


@dataclass(frozen=True)
class Until(Choice):
    """Take away what is worth least, unit by unit, until a budget is met; with a budget of loss, as long as it is.

    Worths are found anew whenever `again` units have gone, or only once; `least` units stay in every layer. What has
    been done is kept in the file `state`, and taken up there.
    """

    budget: Budget
    by: By = USUAL
    again: int | None = None
    unit: str = "auto"
    least: int = 0
    state: Path | None = None
    pace: Pace = PACE

    def __post_init__(self) -> None:
        self.budget.checked()
        if self.again is not None and (type(self.again) is not int or self.again < 1):
            raise SpecError(f"again={self.again!r} is no number of units; give at least 1, or leave it out")

    def plan(self, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> Plan:
        if self.budget.kind == "loss" and len(scenes) < 2:
            raise SpecError(f"a budget of loss is measured on texts, and there are {len(scenes)}; give at least two")
        on = _On(self, net, scenes, tell)
        if on.met:
            return self._planned(net, on)
        for _ in on.steps():
            if on.met:
                break
        else:
            if self.budget.kind != "loss":
                there = f"{on.reached:g} with the {sum(map(len, on.keep.values()))} heads that have to stay"
                raise SpecError(f"{self.budget.kind}={self.budget.limit:g} cannot be met: it is {there}; give more")
        return self._planned(net, on)

    def _planned(self, net: Transformer, on: _On) -> Plan:
        until = "would have gone beyond" if self.budget.kind == "loss" else "was down to"
        why = f"those worth least gone, until {self.budget.kind} {until} {self.budget.limit:g}"
        return Plan.of(net.described, on.keep, why, on.notes)


class _On:
    """A model on its way to a budget: what it keeps still, and what has gone in which order."""

    def __init__(self, asked: Until, net: Transformer, scenes: Sequence[Scene], tell: Tell) -> None:
        self.asked, self.net, self.scenes, self.tell = asked, net, scenes, tell
        self.those = [unit for own in units(net.described, asked.unit).values() for unit in own]
        self.gone, self.notes = list[Unit](), list[str]()
        self.reached, self.met = self._measured(net), False
        self.whole = self.reached
        self._worths, self._at = Worths({}), -1
        self._take_up()

    @property
    def keep(self) -> dict[str, tuple[int, ...]]:
        """The heads of every site that are there still."""
        return self._without(self.gone)

    def _without(self, units: Sequence[Unit]) -> dict[str, tuple[int, ...]]:
        gone = {(unit.site, head) for unit in units for head in unit.heads}
        there = counts(self.net.described)
        return {site: tuple(h for h in range(count) if (site, h) not in gone) for site, count in there.items()}

    def steps(self) -> Iterator[None]:
        """One unit less each time, as long as any may go."""
        while (unit := self._next()) is not None:
            before = list(self.gone)
            self.gone.append(unit)
            now = self._measured(removed(self.net, self.keep))
            if self.asked.budget.kind == "loss" and now - self.whole > self.asked.budget.limit:
                self.gone, self.met = before, True
                yield
                return
            self.reached, self.met = now, self._within(now)
            self._save()
            self.tell(f"{len(self.gone)} of {len(self.those)} units gone, {self.asked.budget.kind} {now:.6g}")
            yield

    def _within(self, now: float) -> bool:
        kind, limit = self.asked.budget
        return kind != "loss" and now <= (limit * self.whole if limit < 1 else limit)

    def _next(self) -> Unit | None:
        """The unit worth least of those that may go."""
        left = [unit for unit in self.those if unit not in self.gone]
        free = [unit for unit in left if sum(other.site == unit.site for other in left) > self.asked.least]
        if len(left) < 2 or not free:
            return None
        again = self.asked.again or len(self.those)
        if (at := len(self.gone) // again * again) != self._at:
            self._worths, self._at = self._weighed(at), at
        return min(free, key=self._worths.unit)

    def _weighed(self, count: int) -> Worths:
        """What heads are worth, by their first numbers, in the model without the first so many that went."""
        keep = self._without(self.gone[:count])
        found = worths(removed(self.net, keep) if count else self.net, self.scenes, self.asked.by)
        self.notes = self.notes or list(found.notes)
        return Worths({(site, keep[site][head]): worth for (site, head), worth in found.of.items()})

    def _measured(self, net: Transformer) -> float:
        """What the budget is of."""
        kind = self.asked.budget.kind
        if kind == "parameters":
            return counting.params(net.described)
        if kind == "cache":
            return cache_bytes(net.described, next(net.parameters()).element_size())
        if kind == "time":
            return 1.0 if net is self.net else 1 / speeds(self.net, net, self.asked.pace).phases[0].faster
        return quality(net, self.scenes, self.asked.by.objective, self.net).rows[0].after.value

    # --- what was done before ------------------------------------------------------------------------------

    def _take_up(self) -> None:
        path = self.asked.state
        if path is None or not path.is_file():
            return
        try:
            said = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
            mark, asked, gone = said["model"], said["asked"], [Unit(s, tuple(h)) for s, h in said["gone"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(f"{path} does not say what was done: {error}; remove it to begin anew") from None
        if mark != mark_of(self.net) or asked != self._asked or not set(gone) <= set(self.those):
            raise SpecError(f"{path} is of another model or another choice; remove it to begin anew")
        self.gone = gone
        self.reached = self._measured(removed(self.net, self.keep)) if gone else self.reached
        self.met = self._within(self.reached)

    def _save(self) -> None:
        if self.asked.state is not None:
            gone = [[unit.site, list(unit.heads)] for unit in self.gone]
            said = {"model": mark_of(self.net), "asked": self._asked, "gone": gone}
            write_atomically(self.asked.state, json.dumps(said).encode())

    @property
    def _asked(self) -> str:
        return repr(replace(self.asked, state=None))


def cache_bytes(described: Model, each: int) -> int:
    """Bytes that the last stack of a model remembers of a token that it reads.

    >>> import headwise as hw
    >>> llama = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> cache_bytes(hw.families.read(llama | {"num_hidden_layers": 3, "head_dim": 6}), 2)  # 3 layers, k and v, 2 heads
    144
    """
    layers = described.stacks[-1].layers
    return each * sum(
        counting.cache_numbers(block.specs["attention"]) for block in layers if "attention" in block.specs
    )

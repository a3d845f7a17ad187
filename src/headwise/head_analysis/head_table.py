"""The heads of a model with what was measured of each: rows that print as a table, and plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Measure(NamedTuple):
    """A number, where it might have come out on other texts, and what chance would be."""

    value: float
    low: float
    high: float
    chance: float

    @property
    def is_above_chance(self) -> bool:
        """Whether even the low end is above chance."""
        return self.low > self.chance

    @property
    def data(self) -> dict[str, float | None]:
        """As plain values; what was never counted is None."""
        return {name: None if math.isnan(value) else value for name, value in self._asdict().items()}


class HeadClass(NamedTuple):
    """A class that a head belongs to, how surely, and the sentence that says why."""

    name: str
    score: float
    evidence: str


@dataclass(frozen=True)
class HeadMeasures:
    """One head: where it is, what it reads, what was measured of it, and what it is called."""

    stack: str
    kind: str
    layer: int
    head: int
    kv: int
    site: str
    measures: Mapping[str, Measure]
    classes: tuple[HeadClass, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "stack": self.stack,
            "kind": self.kind,
            "layer": self.layer,
            "head": self.head,
            "kv": self.kv,
            "measures": {name: one.data for name, one in self.measures.items()},
            "classes": [one._asdict() for one in self.classes],
        }


@dataclass(frozen=True)
class HeadTable:
    """All heads that were measured, on which data, and what was left out and why."""

    model: str
    texts: str
    heads: tuple[HeadMeasures, ...]
    notes: tuple[str, ...] = field(default=())

    def head(self, site: str, number: int) -> HeadMeasures:
        """One of them."""
        found = [one for one in self.heads if (one.site, one.head) == (site, number)]
        if not found:
            raise ValueError(f"the table has no head {number} of {site!r}; its sites are {', '.join(self.sites)}")
        return found[0]

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites, in order."""
        return tuple(dict.fromkeys(one.site for one in self.heads))

    def sorted_by(self, measure: str) -> tuple[HeadMeasures, ...]:
        """The heads with the largest of a measure first; those without it last."""
        known = self.heads[0].measures if self.heads else {}
        if measure not in known:
            raise ValueError(f"nothing called {measure!r} was measured; measured were {', '.join(known)}")
        return tuple(sorted(self.heads, key=lambda one: -_finite_or_last(one.measures[measure].value)))

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        heads = [one.data for one in self.heads]
        return {"model": self.model, "data": self.texts, "heads": heads, "notes": list(self.notes)}


def _finite_or_last(value: float) -> float:
    return -math.inf if math.isnan(value) else value

"""How much each head matters: a number for every head, where it might have come out, and how it was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import nearest
from ..hub.routes.base import Found
from .intervals import Array, interval, mean, means, resampled
from .significance import CORRECTIONS, corrected, p_values
from .table import Measure

NORMALISED = ("", "layer")
LEVEL = 0.05  # what is less likely by chance is told from it
TINY = 1e-20  # as the authors of 1905.10650 keep from dividing by nothing
Worths = Mapping[str, tuple[Array, Array]]  # of each site: sums [heads], and what they are a mean over [heads]


@dataclass(frozen=True)
class How:
    """What is asked of an estimate beside its method.

    `budget` seconds are spent at most, begun texts aside; `sample` texts are drawn, all are read where nothing is said.
    normalised="layer" divides by the root of the sum of squares over the heads of a site (1905.10650). `correction` is
    of p-values, over all heads: "holm", "bonferroni" or "none".

    >>> How(correction="hol")
    Traceback (most recent call last):
    ValueError: correction='hol' is unknown; did you mean 'holm'?
    """

    budget: float | None = None
    sample: int | None = None
    normalised: str = ""
    correction: str = "holm"
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("normalised", NORMALISED), ("correction", CORRECTIONS)):
            if (said := getattr(self, name)) not in known:
                raise ValueError(f"{name}={said!r} is unknown; {nearest(str(said), [one for one in known if one])}")
        if self.budget is not None and not self.budget > 0:
            raise ValueError(f"budget={self.budget!r} leaves no time; give seconds, or leave it out")
        for name, least in (("sample", 2), ("resamples", 1)):
            said = getattr(self, name)
            if said is not None and (type(said) is not int or said < least):
                raise ValueError(f"{name}={said!r} is too few; give a whole number of {least} or more")


@dataclass(frozen=True)
class Rated:
    """One head, what it is worth, between what that might have come out, and how likely chance would do as much.

    `p` is that of this head alone, `level` the same corrected for all heads; nan where nothing is tested.
    """

    site: str
    stack: str
    kind: str
    layer: int
    head: int
    kv: int
    value: float
    low: float
    high: float
    p: float = math.nan
    level: float = math.nan

    @property
    def measure(self) -> Measure:
        """The same as a table keeps it; chance is to matter not at all."""
        return Measure(self.value, self.low, self.high, 0.0)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values; what is not tested is None."""
        told = asdict(self)
        return {name: None if isinstance(one, float) and math.isnan(one) else one for name, one in told.items()}


@dataclass(frozen=True)
class Importance:
    """Every head of a model with its worth, of which objective, by which method, over how many texts."""

    model: str
    method: str
    objective: str
    texts: int
    heads: tuple[Rated, ...]
    notes: tuple[str, ...] = ()

    def head(self, site: str, number: int) -> Rated:
        """One of them."""
        found = [one for one in self.heads if (one.site, one.head) == (site, number)]
        if not found:
            sites = ", ".join(dict.fromkeys(one.site for one in self.heads))
            raise ValueError(f"no head {number} of {site!r} was rated; the sites are {sites}")
        return found[0]

    @property
    def ranked(self) -> tuple[Rated, ...]:
        """The heads that matter most first; those of which nothing is known last."""
        return tuple(sorted(self.heads, key=lambda one: math.inf if math.isnan(one.value) else -one.value))

    @property
    def significant(self) -> tuple[Rated, ...]:
        """Those that are told from chance, with all heads that were tested in mind."""
        return tuple(one for one in self.heads if one.level < LEVEL)

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "model": self.model, "method": self.method, "objective": self.objective, "texts": self.texts,
            "heads": [one.data for one in self.heads], "notes": list(self.notes),
        }  # fmt: skip


def rated(those: Sequence[Found], units: Sequence[Worths], how: How, tested: str) -> tuple[Rated, ...]:
    """The heads of these sites, of what was found in each unit, a text or a batch of them.

    tested="signs" tells what is likely chance; "none" does not.
    """
    draws = resampled(len(units), how.resamples, how.seed)
    sites = [one for one in those if all(one.site.name in unit for unit in units)]
    stacked = {
        one.site.name: (
            np.stack([unit[one.site.name][0] for unit in units]),
            np.stack([unit[one.site.name][1] for unit in units]),
        )
        for one in sites
    }
    p = np.full(sum(sums.shape[1] for sums, _ in stacked.values()), math.nan)
    if tested == "signs":
        p = p_values(np.concatenate([sums / numbers for sums, numbers in stacked.values()], 1), how.seed)
    tests, found = iter(zip(p, corrected(p, how.correction), strict=True)), list[Rated]()
    for one in sites:
        sums, numbers = stacked[one.site.name]
        value, others = (_normalised(told, how) for told in (mean(sums, numbers), means(sums, numbers, draws)))
        low, high = interval(others)
        found += [_rated(one, len(value), n, row) for n, row in enumerate(zip(value, low, high, tests, strict=False))]
    return tuple(found)


def _rated(one: Found, heads: int, number: int, row: tuple[Any, ...]) -> Rated:
    site, (value, low, high, (p, level)) = one.site, row
    kv = number // max(1, heads // max(1, site.kv))
    told = (float(value), float(low), float(high), float(p), float(level))
    return Rated(site.name, site.stack, site.kind, site.layer, number, kv, *told)


def _normalised(told: Array, how: How) -> Array:
    return told / (np.linalg.norm(told, axis=-1, keepdims=True) + TINY) if how.normalised == "layer" else told

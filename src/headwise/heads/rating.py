"""How much each head matters: a number for every head, where it might have come out, and how it was found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import suggest
from ..hub.routes.base import SiteModule
from .intervals import Array, confidence_interval, ratio_of_sums, resampled_ratios, draw_resamples
from .significance import CORRECTION_METHODS, correct_p_values, sign_flip_p_values
from .table import Measure

NORMALISATIONS = ("", "layer")
SIGNIFICANCE_LEVEL = 0.05  # what is less likely by chance is told from it
MIN_NORM = 1e-20  # as the authors of 1905.10650 keep from dividing by nothing
ImportanceSums = Mapping[str, tuple[Array, Array]]  # of each site: sums [heads], and what they are a mean over [heads]


@dataclass(frozen=True)
class ImportanceOptions:
    """What is asked of an estimate beside its method.

    `budget` seconds are spent at most, begun texts aside; `sample` texts are drawn, all are read where nothing is said.
    normalised="layer" divides by the root of the sum of squares over the heads of a site (1905.10650). `correction` is
    of p-values, over all heads: "holm", "bonferroni" or "none".

    >>> ImportanceOptions(correction="hol")
    Traceback (most recent call last):
    ValueError: correction='hol' is unknown; did you mean 'holm'?
    """

    max_seconds: float | None = None
    num_examples: int | None = None
    normalisation: str = ""
    correction: str = "holm"
    num_resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("normalisation", NORMALISATIONS), ("correction", CORRECTION_METHODS)):
            if (said := getattr(self, name)) not in known:
                raise ValueError(f"{name}={said!r} is unknown; {suggest(str(said), [one for one in known if one])}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"budget={self.max_seconds!r} leaves no time; give seconds, or leave it out")
        for name, least in (("num_examples", 2), ("num_resamples", 1)):
            said = getattr(self, name)
            if said is not None and (type(said) is not int or said < least):
                raise ValueError(f"{name}={said!r} is too few; give a whole number of {least} or more")


@dataclass(frozen=True)
class HeadImportance:
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
class ImportanceResult:
    """Every head of a model with its worth, of which objective, by which method, over how many texts."""

    model: str
    method: str
    objective: str
    texts: int
    heads: tuple[HeadImportance, ...]
    notes: tuple[str, ...] = ()

    def head(self, site: str, number: int) -> HeadImportance:
        """One of them."""
        found = [one for one in self.heads if (one.site, one.head) == (site, number)]
        if not found:
            sites = ", ".join(dict.fromkeys(one.site for one in self.heads))
            raise ValueError(f"no head {number} of {site!r} was rated; the sites are {sites}")
        return found[0]

    @property
    def by_importance(self) -> tuple[HeadImportance, ...]:
        """The heads that matter most first; those of which nothing is known last."""
        return tuple(sorted(self.heads, key=lambda one: math.inf if math.isnan(one.value) else -one.value))

    @property
    def significant_heads(self) -> tuple[HeadImportance, ...]:
        """Those that are told from chance, with all heads that were tested in mind."""
        return tuple(one for one in self.heads if one.level < SIGNIFICANCE_LEVEL)

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "model": self.model, "method": self.method, "objective": self.objective, "texts": self.texts,
            "heads": [one.data for one in self.heads], "notes": list(self.notes),
        }  # fmt: skip


def rate_heads(located_sites: Sequence[SiteModule], units: Sequence[ImportanceSums], options: ImportanceOptions, tested: str) -> tuple[HeadImportance, ...]:
    """The heads of these sites, of what was found in each unit, a text or a batch of them.

    tested="signs" tells what is likely chance; "none" does not.
    """
    draws = draw_resamples(len(units), options.num_resamples, options.seed)
    sites = [one for one in located_sites if all(one.site.name in unit for unit in units)]
    stacked = {
        one.site.name: (
            np.stack([unit[one.site.name][0] for unit in units]),
            np.stack([unit[one.site.name][1] for unit in units]),
        )
        for one in sites
    }
    p = np.is_full(sum(sums.shape[1] for sums, _ in stacked.values()), math.nan)
    if tested == "signs":
        p = sign_flip_p_values(np.concatenate([sums / numbers for sums, numbers in stacked.values()], 1), options.seed)
    tests, found = iter(zip(p, correct_p_values(p, options.correction), strict=True)), list[HeadImportance]()
    for one in sites:
        sums, numbers = stacked[one.site.name]
        value, others = (_normalise_scores(told, options) for told in (ratio_of_sums(sums, numbers), resampled_ratios(sums, numbers, draws)))
        low, high = confidence_interval(others)
        found += [_rate_head(one, len(value), n, row) for n, row in enumerate(zip(value, low, high, tests, strict=False))]
    return tuple(found)


def _rate_head(one: SiteModule, heads: int, number: int, row: tuple[Any, ...]) -> HeadImportance:
    site, (value, low, high, (p, level)) = one.site, row
    kv = number // max(1, heads // max(1, site.kv))
    told = (float(value), float(low), float(high), float(p), float(level))
    return HeadImportance(site.name, site.stack, site.kind, site.layer, number, kv, *told)


def _normalise_scores(told: Array, how: ImportanceOptions) -> Array:
    return told / (np.linalg.norm(told, axis=-1, keepdims=True) + MIN_NORM) if how.normalisation == "layer" else told

"""How unlike each other the heads of a layer are, held to layers dealt out anew, and which of them stand apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .folds import Folds, Told
from .intervals import Array
from .likeness import generalised
from .nulls import against, corrected
from .sampled import Rows, Who
from .table import Measure

DRAWS = 100_000


class Layer(NamedTuple):
    """One layer: how far its heads spread, from 0, where all read alike, to 1, where no two share a key.

    `spread` is H(mean of rows) - mean of H(row) over log of the number of heads (1909.00015); its chance is the same of
    as many heads drawn from all layers. `p` says how often so drawn heads are as far from that chance, corrected for
    the number of layers.
    """

    site: str
    heads: int
    spread: Measure
    p: float

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        p = None if math.isnan(self.p) else self.p
        return {"site": self.site, "heads": self.heads, "spread": self.spread.data, "p": p}


class Outlier(NamedTuple):
    """A head, how far it is from the others of its layer on average, and how surely that is too far to be one of them.

    `beyond` is that distance, as a logarithm, less the mean of the others' own, in their deviations.
    """

    head: Who
    far: float
    beyond: float
    p: float


class Spread:
    """Adds up, text by text, how far the heads of each layer spread, and those of layers dealt out anew."""

    def __init__(self, heads: Sequence[Who], permutations: int, seed: int) -> None:
        self.sites = tuple(dict.fromkeys(one.site for one in heads))
        self.sizes = [sum(one.site == site for one in heads) for site in self.sites]
        own = np.array([self.sites.index(one.site) for one in heads])
        draw, times = np.random.default_rng(seed), permutations if len(self.sites) > 1 else 0
        dealt = [own, *(draw.permutation(own) for _ in range(times))]
        self.sets = torch.cat([self._sets(torch.from_numpy(of)) for of in dealt])
        self.own, self.dealt = Folds(), np.zeros((times, len(self.sites)))

    def _sets(self, of: Tensor) -> Tensor:
        members = _members(of, len(self.sizes))
        return members / members.sum(1, keepdim=True)

    def add(self, number: int, rows: Rows) -> None:
        """Rows of text `number`."""
        sums = generalised(rows.weights, self.sets).cpu().numpy().reshape(-1, len(self.sites)) * rows.weight
        self.own.add(number, sums[0], rows.weights.shape[1] * rows.weight)
        self.dealt += sums[1:]

    def layers(self, resamples: int, seed: int) -> tuple[Layer, ...]:
        """What was found of each layer; a single head spreads over nothing, and a single layer has no other to be
        dealt to."""
        most = np.array([math.log(size) if size > 1 else math.nan for size in self.sizes])
        told = Told(*(each / most for each in self.own.told(resamples, seed)))
        dealt = self.dealt / self.own.count / most
        alike = [dealt[:, np.equal(self.sizes, size)].ravel() for size in self.sizes]  # each a set of so many heads
        held = [against(value, each) for value, each in zip(told.mean, alike, strict=True)]
        p = corrected([one.p for one in held])
        return tuple(
            Layer(site, size, told.at(n, held[n].chance), p[n])
            for n, (site, size) in enumerate(zip(self.sites, self.sizes, strict=True))
        )


def _members(of: Tensor, count: int) -> Tensor:
    """Which things [count, things] are of each class."""
    return (of == torch.arange(count)[:, None]).float()


def outliers(distances: Array, heads: Sequence[Who], *, seed: int = 0, draws: int = DRAWS) -> tuple[Outlier, ...]:
    """Every head that has two layer mates or more, those that stand apart most surely first.

    How far a head is from its layer mates on average, as a logarithm, is held to the same of these mates: the
    deviation is studentised without the head itself, as Grubbs (1950) does, and `p` is how often one of as many normal
    numbers lies as far out, corrected for the number of heads. So a layer with no odd head has none.
    """
    found: list[Outlier] = []
    for site in dict.fromkeys(one.site for one in heads):
        own = [n for n, one in enumerate(heads) if one.site == site]
        if len(own) < 3:
            continue
        near = distances[np.ix_(own, own)]
        far = near.sum(1) / (len(own) - 1)
        beyond = _studentised(np.log(np.maximum(far, 1e-12))[None])[0]
        normal = np.random.default_rng([seed, len(own)]).standard_normal((draws, len(own)))
        chance = _studentised(normal)[:, 0]
        found += [Outlier(heads[n], float(far[k]), float(beyond[k]), against(beyond[k], chance, "high").p)
                  for k, n in enumerate(own)]  # fmt: skip
    p = corrected([one.p for one in found])
    return tuple(sorted((one._replace(p=p[n]) for n, one in enumerate(found)), key=lambda one: (one.p, -one.beyond)))


def _studentised(values: Array) -> Array:
    """Each less the mean of the others in its row, over their deviation."""
    count, values = values.shape[1] - 1, values - values.mean(1, keepdims=True)
    total, squares = values.sum(1, keepdims=True), (values**2).sum(1, keepdims=True)
    mean = (total - values) / count
    variance = np.maximum((squares - values**2) / count - mean**2, 0)
    deviation = np.sqrt(variance * count / max(1, count - 1))
    gap = values - mean
    return np.divide(gap, deviation, out=np.where(gap == 0, 0.0, np.copysign(np.inf, gap)), where=deviation > 1e-12)

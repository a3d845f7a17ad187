"""How unlike each other the heads of a layer are, held to layers dealt out anew, and which of them stand apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .folds import FoldedSums, MeanIntervals
from .intervals import Array
from .likeness import generalised_jensen_shannon
from .nulls import compare_with_null, holm_correction
from .sampled import SampledRows, HeadLocation
from .table import Measure

NUM_NULL_DRAWS = 100_000


class LayerDiversity(NamedTuple):
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


class HeadOutlier(NamedTuple):
    """A head, how far it is from the others of its layer on average, and how surely that is too far to be one of them.

    `beyond` is that distance, as a logarithm, less the mean of the others' own, in their deviations.
    """

    head: HeadLocation
    far: float
    beyond: float
    p: float


class DiversitySums:
    """Adds up, text by text, how far the heads of each layer spread, and those of layers dealt out anew."""

    def __init__(self, heads: Sequence[HeadLocation], permutations: int, seed: int) -> None:
        self.sites = tuple(dict.fromkeys(one.site for one in heads))
        self.sizes = [sum(one.site == site for one in heads) for site in self.sites]
        own = np.array([self.sites.index(one.site) for one in heads])
        draw, times = np.random.default_rng(seed), permutations if len(self.sites) > 1 else 0
        dealt = [own, *(draw.permutation(own) for _ in range(times))]
        self.sets = torch.cat([self._layer_sets(torch.from_numpy(of)) for of in dealt])
        self.own, self.dealt = FoldedSums(), np.zeros((times, len(self.sites)))

    def _layer_sets(self, of: Tensor) -> Tensor:
        members = _membership(of, len(self.sizes))
        return members / members.sum(1, keepdim=True)

    def add(self, text_index: int, rows: SampledRows) -> None:
        """Rows of text `number`."""
        sums = generalised_jensen_shannon(rows.weights, self.sets).cpu().numpy().reshape(-1, len(self.sites)) * rows.row_weight
        self.own.add(text_index, sums[0], rows.weights.shape[1] * rows.row_weight)
        self.dealt += sums[1:]

    def layer_diversities(self, num_resamples: int, seed: int) -> tuple[LayerDiversity, ...]:
        """What was found of each layer; a single head spreads over nothing, and a single layer has no other to be
        dealt to."""
        most = np.array([math.log(size) if size > 1 else math.nan for size in self.sizes])
        told = MeanIntervals(*(each / most for each in self.own.mean_intervals(num_resamples, seed)))
        dealt = self.dealt / self.own.count / most
        alike = [dealt[:, np.equal(self.sizes, size)].ravel() for size in self.sizes]  # each a set of so many heads
        held = [compare_with_null(value, each) for value, each in zip(told.mean, alike, strict=True)]
        p = holm_correction([one.p for one in held])
        return tuple(
            LayerDiversity(site, size, told.measure_at(n, held[n].chance), p[n])
            for n, (site, size) in enumerate(zip(self.sites, self.sizes, strict=True))
        )


def _membership(of: Tensor, count: int) -> Tensor:
    """Which things [count, things] are of each class."""
    return (of == torch.arange(count)[:, None]).float()


def find_outliers(distances: Array, heads: Sequence[HeadLocation], *, seed: int = 0, num_draws: int = NUM_NULL_DRAWS) -> tuple[HeadOutlier, ...]:
    """Every head that has two layer mates or more, those that stand apart most surely first.

    How far a head is from its layer mates on average, as a logarithm, is held to the same of these mates: the
    deviation is studentised without the head itself, as Grubbs (1950) does, and `p` is how often one of as many normal
    numbers lies as far out, corrected for the number of heads. So a layer with no odd head has none.
    """
    found: list[HeadOutlier] = []
    for site in dict.fromkeys(one.site for one in heads):
        own = [n for n, one in enumerate(heads) if one.site == site]
        if len(own) < 3:
            continue
        near = distances[np.ix_(own, own)]
        far = near.sum(1) / (len(own) - 1)
        beyond = _studentise(np.log(np.maximum(far, 1e-12))[None])[0]
        normal = np.random.default_rng([seed, len(own)]).standard_normal((num_draws, len(own)))
        chance = _studentise(normal)[:, 0]
        found += [HeadOutlier(heads[n], float(far[k]), float(beyond[k]), compare_with_null(beyond[k], chance, "high").p)
                  for k, n in enumerate(own)]  # fmt: skip
    p = holm_correction([one.p for one in found])
    return tuple(sorted((one._replace(p=p[n]) for n, one in enumerate(found)), key=lambda one: (one.p, -one.beyond)))


def _studentise(values: Array) -> Array:
    """Each less the mean of the others in its row, over their deviation."""
    count, values = values.shape[1] - 1, values - values.mean(1, keepdims=True)
    total, squares = values.sum(1, keepdims=True), (values**2).sum(1, keepdims=True)
    mean = (total - values) / count
    variance = np.maximum((squares - values**2) / count - mean**2, 0)
    deviation = np.sqrt(variance * count / max(1, count - 1))
    gap = values - mean
    return np.divide(gap, deviation, out=np.where(gap == 0, 0.0, np.copysign(np.inf, gap)), where=deviation > 1e-12)

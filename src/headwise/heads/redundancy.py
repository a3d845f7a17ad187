"""Are the heads of a model redundant, and how do we know? Distances, likeness, clusters and a map, held to chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..hub.finding import able
from ..hub.readable import reads_two, streams_of
from .answering import CHANCE, answer, compared
from .diversity import Layer, Outlier, Spread, outliers
from .folds import Folds
from .intervals import Array
from .likeness import KINDS, SMOOTHINGS, cka, jensen_shannon, smoothed
from .mapping import Joined, Plane, clusters, linkage, plane
from .nulls import Against, at_least, mantel, nearer_within, surely_below
from .sampled import Choice, Reservoir, Rows, Streams, Who, rows_of, said_in
from .scene import Scene


class How(NamedTuple):
    """How heads are compared.

    `rows` are queries of a text, `tokens` those of all texts whose outputs are compared; `smoothing` is "none" or
    "clark", `outputs` "unbiased" or "linear". `cut` is the distance below which heads are one cluster; without it, the
    one below which 5 % of pairs fall by chance.
    """

    rows: int = 64
    tokens: int = 1024
    smoothing: str = "none"
    outputs: str = "unbiased"
    permutations: int = 199
    resamples: int = 1000
    seed: int = 0
    cut: float | None = None

    def checked(self) -> How:
        """The same, if it can be done."""
        for name, value, known in (("smoothing", self.smoothing, SMOOTHINGS), ("outputs", self.outputs, KINDS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; use {' or '.join(map(repr, known))}")
        for name, least in (("rows", 1), ("tokens", 4), ("permutations", 1), ("resamples", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too few; give at least {least}")
        return self


@dataclass(frozen=True, eq=False)
class Readers:
    """Heads that read the same tokens, and all that was found between them.

    `distances` are Jensen-Shannon divergences of their rows in nats, means over rows, between `low` and `high`;
    `chance` is the same with the weights of each of the other's rows dealt anew among the keys it may read: what is
    left where two heads are as sharp as these but look at nothing alike. `outputs` is CKA of what they say, or None
    where that could not be had. `by_chance` is how many clusters the distances of chance would make at the same cut.
    `alike` counts pairs that are surely near, beside how many would be where no head looks at what another does;
    `within` holds distances in layers to those between, `agreement` distances to what heads say.
    """

    streams: Streams
    heads: tuple[Who, ...]
    distances: Array
    low: Array
    high: Array
    chance: Array
    outputs: Array | None
    joined: tuple[Joined, ...]
    cut: float
    clusters: tuple[int, ...]
    by_chance: int
    plane: Plane
    layers: tuple[Layer, ...]
    outliers: tuple[Outlier, ...]
    alike: Against
    within: Against
    agreement: Against

    @property
    def pairs(self) -> int:
        """How many pairs of heads there are."""
        return len(self.heads) * (len(self.heads) - 1) // 2

    @property
    def near(self) -> tuple[tuple[Who, Who], ...]:
        """Pairs whose interval ends below the cut and below their own chance, the nearest first."""
        one, other = np.triu_indices(len(self.heads), 1)
        sure = (self.high < np.minimum(self.cut, self.chance))[one, other]
        order = np.argsort(self.distances[one, other], kind="stable")
        return tuple((self.heads[one[n]], self.heads[other[n]]) for n in order if sure[n])

    @property
    def members(self) -> tuple[tuple[Who, ...], ...]:
        """The clusters, the largest first."""
        every: dict[int, list[Who]] = {}
        for who, number in zip(self.heads, self.clusters, strict=True):
            every.setdefault(number, []).append(who)
        return tuple(sorted(map(tuple, every.values()), key=len, reverse=True))

    @property
    def sentence(self) -> str:
        """The answer, with the numbers that it rests on and what chance would have given."""
        return answer(self)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        grids = {name: _plain(getattr(self, name)) for name in ("distances", "low", "high", "chance")}
        return {
            "streams": list(self.streams), "heads": [who._asdict() for who in self.heads], **grids,
            "outputs": None if self.outputs is None else _plain(self.outputs), "cut": self.cut,
            "joined": [one._asdict() for one in self.joined], "clusters": list(self.clusters),
            "clusters_by_chance": self.by_chance, "map": _plain(self.plane.places), "stress": self.plane.stress,
            "layers": [one.data for one in self.layers], "alike": _tested(self.alike), "within": _tested(self.within),
            "outliers": [{**one.head._asdict(), "far": one.far, "p": one.p} for one in self.outliers],
            "agreement": _tested(self.agreement), "sentence": self.sentence,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Redundancy:
    """What was found of every set of heads that read the same tokens, on how many texts, and what was left out."""

    model: str
    texts: int
    readers: tuple[Readers, ...]
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The answer to "are heads redundant, how do we verify it?"."""
        return " ".join(f"{self.model}, {self.texts} texts: {one.sentence}" for one in self.readers)

    def beside(self, other: Redundancy) -> str:
        """The same of another model on the same texts, such as its `twin`, in a sentence for each set of readers."""
        pairs = [(one, two) for one in self.readers for two in other.readers if one.streams == two.streams]
        return " ".join(f"{other.model}, {other.texts} texts: {compared(one, two)}" for one, two in pairs)

    @property
    def data(self) -> dict[str, Any]:
        """As plain values."""
        readers = [one.data for one in self.readers]
        return {"model": self.model, "texts": self.texts, "readers": readers, "notes": list(self.notes)}


class _Adding:
    """Sums over texts of everything that one set of readers is asked for."""

    def __init__(self, rows: Rows, how: How) -> None:
        self.heads, self.how = rows.heads, how
        self.far, self.chance = Folds(), Folds()
        self.spread = Spread(rows.heads, how.permutations, how.seed)

    def add(self, number: int, rows: Rows) -> None:
        """Rows of text `number`."""
        weights, count = self._smoothed(rows.weights), rows.weights.shape[1] * rows.weight
        dealt = self._smoothed(rows.dealt((self.how.seed, number)))
        self.far.add(number, jensen_shannon(weights).cpu().numpy() * rows.weight, count)
        self.chance.add(number, jensen_shannon(weights, dealt).cpu().numpy() * rows.weight, count)
        self.spread.add(number, rows)

    def _smoothed(self, weights: torch.Tensor) -> torch.Tensor:
        """All keys but the learned sink are smoothed."""
        return torch.cat([smoothed(weights[..., :-1], self.how.smoothing), weights[..., -1:]], -1)


def redundancy(
    model: nn.Module, scenes: Iterable[Scene], *, how: How = How(), name: str = "",  # noqa: B008 - it is frozen
    tell: Callable[[int], object] = lambda _: None,
) -> Redundancy:  # fmt: skip
    """How alike all heads of a model are that read the same tokens, and whether that is more than chance.

    Every text is run by itself; of each, some rows of all heads are held, and of all texts, some tokens of what heads
    say, so that memory does not grow with the data. `tell` hears how many texts were read.
    """
    those, how = able(model, "see"), how.checked()
    streams = {one.site.name: streams_of(one.site, reads_two(model)) for one in those}
    heard = [one for one in those if one.site.silence.can]
    adding, said, notes, count = dict[Streams, _Adding](), dict[str, Reservoir](), dict[str, str](), 0
    for number, scene in enumerate(scenes):
        count = number + 1
        every, whys = rows_of(model, those, scene, streams, Choice(how.rows, how.seed), number)
        notes |= whys
        for rows in every:
            if rows.weights.shape[1]:
                own = adding.setdefault(rows.streams, _Adding(rows, how))
                _check_same(own.heads, rows.heads)
                own.add(number, rows)
        _hear(said, said_in(model, heard, scene), streams, number, how)
        tell(count)
    if count < 2:
        raise ValueError(f"{count} texts leave no interval; give at least two")
    readers = tuple(_readers(pair, own, said.get(pair[0])) for pair, own in adding.items() if len(own.heads) > 1)
    if not readers:
        raise ValueError("no two heads read the same tokens" + "".join(
            f"; {site}: {why}" for site, why in notes.items()))  # fmt: skip
    told = tuple(f"{site} is left out: {why}" for site, why in notes.items())
    return Redundancy(name or type(model).__name__, count, readers, told)


def _check_same(heads: Sequence[Who], now: Sequence[Who]) -> None:
    if tuple(heads) != tuple(now):
        raise ValueError("the model runs other attentions for one text than for another; give texts that run the same")


def _hear(
    said: dict[str, Reservoir], now: Mapping[str, torch.Tensor], streams: Mapping[str, Streams], number: int, how: How
) -> None:
    """Keep some tokens of what heads say, of all sites with the same queries alike."""
    for asks in dict.fromkeys(pair[0] for pair in streams.values()):
        own = {site: z for site, z in now.items() if streams[site][0] == asks}
        if own:
            said.setdefault(asks, Reservoir(how.tokens, how.seed)).add(number, own)


def _readers(pair: Streams, adding: _Adding, said: Reservoir | None) -> Readers:
    """What was added up, with what follows from it."""
    how, heads = adding.how, adding.heads
    far, low, high = adding.far.told(how.resamples, how.seed)
    dealt = adding.chance.told(how.resamples, how.seed)
    chance, pairs = dealt.mean, np.triu_indices(len(heads), 1)
    cut = _cut(chance) if how.cut is None else how.cut
    joined, own = linkage(far), [list(dict.fromkeys(who.site for who in heads)).index(who.site) for who in heads]
    outputs = _outputs(heads, said, how)
    near = int((high < np.minimum(cut, chance))[pairs].sum())
    alike = at_least(near, surely_below(*(grid[pairs] for grid in dealt), cut=cut))
    return Readers(
        pair, heads, far, low, high, chance, outputs, tuple(joined), cut, clusters(joined, cut),
        len(set(clusters(linkage(chance), cut))), plane(far, seed=how.seed),
        adding.spread.layers(how.resamples, how.seed), outliers(far, heads, seed=how.seed),
        alike, nearer_within(far, own, how.permutations, how.seed), _agreement(far, outputs, how),
    )  # fmt: skip


def _cut(chance: Array) -> float:
    return float(np.quantile(chance[np.triu_indices(len(chance), 1)], CHANCE))


def _outputs(heads: Sequence[Who], said: Reservoir | None, how: How) -> Array | None:
    """CKA of what these heads say; None where rows of weights and what is said are not one to one."""
    sites = list(dict.fromkeys(who.site for who in heads))
    if said is None or any(site not in said.kept for site in sites) or len(said.marks) < 4:
        return None
    features = said.features(sites)
    return cka(features, how.outputs).numpy() if len(features) == len(heads) else None


def _agreement(far: Array, outputs: Array | None, how: How) -> Against:
    """Whether heads that read alike say alike."""
    if outputs is None or np.isnan(outputs).any():
        return Against(math.nan, math.nan, math.nan)
    return mantel(far, 1 - outputs, how.permutations, how.seed)


def _plain(grid: Array) -> list[Any]:
    """Rows of numbers; what was never counted is None."""
    return [[None if math.isnan(value) else float(value) for value in row] for row in grid]


def _tested(one: Against) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in one._asdict().items()}

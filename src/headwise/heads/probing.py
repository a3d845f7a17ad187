"""How much of syntax all heads know together: governors of words guessed from weights of attention alone (1906.04341).

The word i that governs word j is guessed by p(i|j) ~ exp(sum over heads k of w_k a^k_ij + u_k a^k_ji), where a^k_ij is
how much word i reads word j in head k: one number for each head and direction is learned, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..hub.finding import found
from ..hub.readable import reads_two, streams_of
from ..hub.routes.base import Found
from .intervals import interval, mean, means, resampled
from .looking import look
from .scene import Scene
from .table import Measure
from .words import ByWord, whole

REACH = 8  # offsets that the baseline may choose from, each way
ROUNDS = 100


@dataclass(frozen=True)
class Probing:
    """How a probe is learned and asked: this share of texts is held out; `decay` times half the squares is added.

    >>> Probing(held_out=1.5)
    Traceback (most recent call last):
    ValueError: held_out=1.5 is no share of texts; give more than 0 and less than 1
    """

    held_out: float = 0.3
    decay: float = 1e-4
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out!r} is no share of texts; give more than 0 and less than 1")
        if not self.decay >= 0:
            raise ValueError(f"decay={self.decay!r} is negative; give 0 or more")


class Pull(NamedTuple):
    """What a probe learned of one head: `up`, how much it counts that a governor reads the word, and `down`, that the
    word reads its governor."""

    site: str
    head: int
    up: float
    down: float


@dataclass(frozen=True)
class Probed:
    """How often governors are guessed right in texts held out (UAS): by the model, its twin, and one fixed offset."""

    uas: Measure
    twin: Measure | None
    baseline: Measure
    offset: int
    pulls: tuple[Pull, ...]
    texts: tuple[int, int]
    arcs: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """All of it as plain values; texts and arcs are those learned from and those held out."""
        return {
            "uas": self.uas.data, "twin": None if self.twin is None else self.twin.data,
            "baseline": self.baseline.data, "offset": self.offset, "pulls": [one._asdict() for one in self.pulls],
            "texts": list(self.texts), "arcs": list(self.arcs), "notes": list(self.notes),
        }  # fmt: skip


class Sentence(NamedTuple):
    """The maps [heads, words, words] of a text, whose they are (site, head), and its arcs (dependent, governor)."""

    maps: Tensor
    heads: Sequence[tuple[str, int]]
    arcs: Sequence[tuple[int, int]]

    @property
    def cases(self) -> Tensor:
        """For each arc and each word that might govern, what heads say: [arcs, words, 2 heads]."""
        those = [dependent for dependent, _ in self.arcs]
        up, down = self.maps[:, :, those].permute(2, 1, 0), self.maps[:, those].permute(1, 2, 0)
        return torch.cat([up, down], -1)

    @property
    def open(self) -> Tensor:
        """Which words might govern, [arcs, words]: no word governs itself."""
        words = torch.arange(self.maps.shape[1])
        return words != torch.tensor([dependent for dependent, _ in self.arcs])[:, None]


def attention_probe(
    model: nn.Module,
    scenes: Iterable[Scene],
    *,
    twin: nn.Module | None = None,
    how: Probing = Probing(),
    tell: Callable[[int], object] = lambda _: None,
) -> Probed:
    """Clark's attention-only probe over the gold arcs of texts: learned on some, asked of those held out.

    `twin` is the same model before it learned anything; what it reaches is what words' places alone say. The other
    baseline is the one offset from a word to its governor that is most often right in the texts that are learned from.
    """
    models = [model] if twin is None else [model, twin]
    sites = [_selves(one) for one in models]
    seen: list[list[Sentence]] = [[] for _ in models]
    left_out = 0
    for scene in scenes:
        arcs = _arcs(scene)
        if not arcs:
            left_out += 1
            continue
        for one, those, kept in zip(models, sites, seen, strict=True):
            maps = word_maps(one, those, scene)
            names = [(site, head) for site, own in maps.items() for head in range(len(own))]
            kept.append(Sentence(torch.cat(list(maps.values())), names, arcs))
        tell(len(seen[0]))
    learned, held = _split(len(seen[0]), how)
    fits = [_fit([kept[n] for n in learned], how) for kept in seen]
    right = [[_right(kept[n], weight) for n in held] for kept, weight in zip(seen, fits, strict=True)]
    offset = _best_offset([seen[0][n] for n in learned])
    by_offset = [[float(governor == dependent + offset) for dependent, governor in seen[0][n].arcs] for n in held]
    chance = np.concatenate([np.full(len(seen[0][n].arcs), 1 / (seen[0][n].maps.shape[1] - 1)) for n in held]).mean()
    rates = [_measure(one, float(chance), how) for one in (*right, by_offset)]
    notes = (f"{left_out} texts without arcs were left out",) if left_out else ()
    counts = [sum(len(seen[0][n].arcs) for n in part) for part in (learned, held)]
    return Probed(
        rates[0], rates[1] if twin is not None else None, rates[-1], offset, _pulls(seen[0][0].heads, fits[0]),
        (len(learned), len(held)), (counts[0], counts[1]), notes,
    )  # fmt: skip


def word_maps(model: nn.Module, those: Sequence[Found], scene: Scene) -> dict[str, Tensor]:
    """How much each word reads each word in every head of these sites, [heads, words, words] of each."""
    tokens, bands = scene.streams["text"], dict[str, list[Tensor]]()
    words = ByWord(lambda site, block: bands.setdefault(site, []).append(block.w_HTS.float().cpu()))
    look(model, those, scene, {one.site.name: ("text", "text") for one in those}, words.see)
    kept = (words.whole(tokens).tokens.word >= 0).cpu()
    return {one.site.name: torch.cat(bands[one.site.name], 1)[:, kept][:, :, kept] for one in those}


def _selves(model: nn.Module) -> list[Found]:
    """The sites at which the text reads itself."""
    if model.training:
        raise ValueError("the model is in train mode, where dropout changes what is read; call model.eval() first")
    two = reads_two(model)
    those = [one for one in found(model) if one.site.see.can and streams_of(one.site, two) == ("text", "text")]
    if not those:
        raise ValueError(f"{type(model).__name__} has no attention of a text over itself that can be seen")
    return those


def _arcs(scene: Scene) -> list[tuple[int, int]]:
    """The arcs between two words, by the places of these in maps."""
    numbers = whole(scene.streams["text"]).word.tolist() if "text" in scene.streams else []
    at = {word: place for place, word in enumerate(number for number in numbers if number >= 0)}
    arcs = [(dependent, governor) for dependent, governor, _ in scene.arcs if dependent != governor and governor >= 0]
    if wrong := [arc for arc in arcs if not {*arc} <= at.keys()]:
        has = f"the words {min(at)}..{max(at)}" if at else "no words"
        raise ValueError(f"an arc joins words {wrong[0]}, and the tokens have {has}; give arcs of those")
    return [(at[dependent], at[governor]) for dependent, governor in arcs]


def _split(count: int, how: Probing) -> tuple[list[int], list[int]]:
    """Which texts are learned from, and which are held out."""
    held = round(how.held_out * count)
    if held < 2 or count - held < 2:
        raise ValueError(f"{count} texts with arcs leave {held} held out; give at least two to learn from and two more")
    order = np.random.default_rng(how.seed).permutation(count).tolist()
    return sorted(order[held:]), sorted(order[:held])


class Rows(NamedTuple):
    """Every word that might govern, of every arc: what heads say of it, which arc it is of, whether it governs."""

    told: Tensor
    arc: Tensor
    gold: Tensor
    arcs: int

    @staticmethod
    def of(sentences: Sequence[Sentence]) -> Rows:
        """Those of some texts, one behind the other."""
        counts = [len(one.arcs) for one in sentences]
        kept = torch.cat([one.open.flatten() for one in sentences])
        told = torch.cat([one.cases.flatten(0, 1) for one in sentences])[kept]
        gold = torch.cat([_gold(one).flatten() for one in sentences])[kept]
        words = torch.tensor([one.maps.shape[1] for one in sentences]).repeat_interleave(torch.tensor(counts))
        return Rows(told, torch.arange(sum(counts)).repeat_interleave(words)[kept], gold, sum(counts))

    def surprise(self, weight: Tensor) -> Tensor:
        """- log p of the gold governor, a mean over arcs."""
        scores, none = self.told @ weight, self.told.new_zeros(self.arcs)
        top = (none - torch.inf).scatter_reduce(0, self.arc, scores.detach(), "amax")
        total = none.index_add(0, self.arc, (scores - top[self.arc]).exp())
        return (total.log() + top - none.index_add(0, self.arc, scores * self.gold)).mean()


def _fit(sentences: Sequence[Sentence], how: Probing) -> Tensor:
    """[2 heads]: what makes gold governors likeliest, by L-BFGS from nothing."""
    rows = Rows.of(sentences)
    weight = torch.zeros(rows.told.shape[1], requires_grad=True)
    steps = torch.optim.LBFGS([weight], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        steps.zero_grad()
        told = rows.surprise(weight) + how.decay * weight.square().sum() / 2
        told.backward()
        return told

    with torch.enable_grad():
        steps.step(loss)  # pyright: ignore[reportArgumentType] - its stub wants a float, torch a tensor
    return weight.detach()


def _gold(one: Sentence) -> Tensor:
    governors = torch.tensor([governor for _, governor in one.arcs])
    return (torch.arange(one.maps.shape[1]) == governors[:, None]).float()


def _right(one: Sentence, weight: Tensor) -> list[float]:
    """For each arc, whether the likeliest word governs."""
    guessed = (one.cases @ weight).masked_fill(~one.open, -torch.inf).argmax(-1).tolist()
    return [float(guess == governor) for guess, (_, governor) in zip(guessed, one.arcs, strict=True)]


def _best_offset(sentences: Sequence[Sentence]) -> int:
    far = [governor - dependent for one in sentences for dependent, governor in one.arcs]
    known = [offset for offset in range(-REACH, REACH + 1) if offset]
    return max(known, key=lambda offset: (far.count(offset), -abs(offset), -offset))


def _measure(right: Sequence[Sequence[float]], chance: float, how: Probing) -> Measure:
    """The share that is right, resampled over texts."""
    sums, numbers = (np.array([[float(told(one))] for one in right]) for told in (sum, len))
    draws = resampled(len(right), how.resamples, how.seed)
    low, high = interval(means(sums, numbers, draws))
    return Measure(float(mean(sums, numbers)[0]), float(low[0]), float(high[0]), chance)


def _pulls(heads: Sequence[tuple[str, int]], weight: Tensor) -> tuple[Pull, ...]:
    up, down = weight.view(2, -1).tolist()
    return tuple(Pull(site, head, *told) for (site, head), *told in zip(heads, up, down, strict=True))

"""Dependency arcs of a text as pairs of words, by one convention or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .scene import TokenAnnotations
from .statistics import MAX_OFFSET
from .words import WordGrouping

DIRECTIONS = ("governor", "dependent")
ALL_RELATIONS = "all"  # relations together
POSSESSIVE_MARKS = ("'s", "s'")
RelationKey = tuple[str, str]  # a relation, and towards which end


@dataclass(frozen=True)
class ArcConvention:
    """How arcs are counted.

    `offsets` compete as baseline, and "alike" `weights` on all tokens, for words of many pieces get more of those.
    `back` is how a governor finds its dependents: by its "rows", what it reads most, or by "columns", where each
    dependent is given to the word that reads it most. `itself` says whether a word may read itself: "counts" or "left
    out". `edge` is where offsets lead beyond the last word: to "nothing", or to the "last". `counted` are arcs that may
    be "read", or "all". A dependent of a `possessive` relation before a mark of possession is asked for through the
    mark.
    """

    baseline_offsets: tuple[int, ...]
    dependents_from: str = "rows"
    self_reading: str = "counts"
    out_of_range: str = "nothing"
    counted_arcs: str = "read"
    possessive_relations: tuple[str, ...] = ()
    weight_baseline: str = "none"

    @property
    def num_baselines(self) -> int:
        """How many compete with a head."""
        return len(self.baseline_offsets) + (self.weight_baseline == "alike")


ARC_CONVENTIONS: Mapping[str, ArcConvention] = {
    "ours": ArcConvention(tuple(one for one in range(-MAX_OFFSET, MAX_OFFSET + 1) if one), weight_baseline="alike"),
    # 1906.04341, section 4.2, and its notebook
    "clark": ArcConvention(tuple(range(-3, 3)), "columns", "left out", "last", "all", ("poss", "nmod:poss")),
}


@dataclass(frozen=True, eq=False)
class DependencyPairs:
    """Pairs of words: who asks, who is wanted, and the number among `keys` of the relation with its direction, [3, N].

    Words go by their numbers among the `words` of the text, those that stand for no text included.
    """

    pairs: Tensor
    keys: tuple[RelationKey, ...]
    words: TokenAnnotations

    def select(self, directions: Sequence[str]) -> Tensor:
        """The pairs of these directions."""
        wanted = torch.tensor([key[1] in directions for key in self.keys], device=self.pairs.device)
        return self.pairs[:, wanted[self.pairs[2]]]


def make_dependency_pairs(dependencies: Sequence[tuple[int, int, str]], word_grouping: WordGrouping, convention: ArcConvention) -> DependencyPairs:
    """The arcs (dependent, governor, relation) of a text."""
    words = word_grouping.tokens
    at = {word: number for number, word in enumerate(words.word_index.tolist()) if word >= 0}
    rows: list[tuple[int, int, RelationKey]] = []
    for arc in dependencies:
        if arc[0] not in at or arc[1] not in at:
            has = f"the words {min(at)}..{max(at)}" if at else "no words"
            raise ValueError(f"arc {arc!r} names a word that is not there, the tokens have {has}; give arcs of those")
        dependent, governor, relation = at[arc[0]], at[arc[1]], arc[2]
        mark = at.get(arc[0] + 1) if relation in convention.possessive_relations else None
        asks = dependent if mark is None or words.words[mark].strip() not in POSSESSIVE_MARKS else mark
        back = (asks, governor) if convention.dependents_from == "columns" else (governor, dependent)
        for name in (relation, ALL_RELATIONS):
            rows += [(asks, governor, (name, DIRECTIONS[0])), (*back, (name, DIRECTIONS[1]))]
    keys = tuple(dict.fromkeys(key for *_, key in rows))
    number = {key: n for n, key in enumerate(keys)}
    table = [(asks, wanted, number[key]) for asks, wanted, key in rows]
    return DependencyPairs(torch.tensor(table, device=words.word_index.device).T, keys, words)

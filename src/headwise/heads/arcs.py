"""Dependency arcs of a text as pairs of words, by one convention or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .scene import Tokens
from .statistics import REACH
from .words import Whole

TOWARDS = ("governor", "dependent")
ALL = "all"  # relations together
MARKS = ("'s", "s'")
Key = tuple[str, str]  # a relation, and towards which end


@dataclass(frozen=True)
class Convention:
    """How arcs are counted.

    `offsets` compete as baseline, and "alike" `weights` on all tokens, for words of many pieces get more of those.
    `back` is how a governor finds its dependents: by its "rows", what it reads most, or by "columns", where each
    dependent is given to the word that reads it most. `itself` says whether a word may read itself: "counts" or "left
    out". `edge` is where offsets lead beyond the last word: to "nothing", or to the "last". `counted` are arcs that may
    be "read", or "all". A dependent of a `possessive` relation before a mark of possession is asked for through the
    mark.
    """

    offsets: tuple[int, ...]
    back: str = "rows"
    itself: str = "counts"
    edge: str = "nothing"
    counted: str = "read"
    possessive: tuple[str, ...] = ()
    weights: str = "none"

    @property
    def rivals(self) -> int:
        """How many compete with a head."""
        return len(self.offsets) + (self.weights == "alike")


CONVENTIONS: Mapping[str, Convention] = {
    "ours": Convention(tuple(one for one in range(-REACH, REACH + 1) if one), weights="alike"),
    # 1906.04341, section 4.2, and its notebook
    "clark": Convention(tuple(range(-3, 3)), "columns", "left out", "last", "all", ("poss", "nmod:poss")),
}


@dataclass(frozen=True, eq=False)
class Arcs:
    """Pairs of words: who asks, who is wanted, and the number among `keys` of the relation with its direction, [3, N].

    Words go by their numbers among the `words` of the text, those that stand for no text included.
    """

    pairs: Tensor
    keys: tuple[Key, ...]
    words: Tokens

    def of(self, towards: Sequence[str]) -> Tensor:
        """The pairs of these directions."""
        wanted = torch.tensor([key[1] in towards for key in self.keys], device=self.pairs.device)
        return self.pairs[:, wanted[self.pairs[2]]]


def pairs(arcs: Sequence[tuple[int, int, str]], whole: Whole, convention: Convention) -> Arcs:
    """The arcs (dependent, governor, relation) of a text."""
    words = whole.tokens
    at = {word: number for number, word in enumerate(words.word.tolist()) if word >= 0}
    rows: list[tuple[int, int, Key]] = []
    for arc in arcs:
        if arc[0] not in at or arc[1] not in at:
            has = f"the words {min(at)}..{max(at)}" if at else "no words"
            raise ValueError(f"arc {arc!r} names a word that is not there, the tokens have {has}; give arcs of those")
        dependent, governor, relation = at[arc[0]], at[arc[1]], arc[2]
        mark = at.get(arc[0] + 1) if relation in convention.possessive else None
        asks = dependent if mark is None or words.words[mark].strip() not in MARKS else mark
        back = (asks, governor) if convention.back == "columns" else (governor, dependent)
        for name in (relation, ALL):
            rows += [(asks, governor, (name, TOWARDS[0])), (*back, (name, TOWARDS[1]))]
    keys = tuple(dict.fromkeys(key for *_, key in rows))
    number = {key: n for n, key in enumerate(keys)}
    table = [(asks, wanted, number[key]) for asks, wanted, key in rows]
    return Arcs(torch.tensor(table, device=words.word.device).T, keys, words)

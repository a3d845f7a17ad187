"""Words of a source that heads of a cross-attention align with words of a text, against links that people drew.

Each word of the text is linked with the word of the source that is read most. Of such links A, sure ones S and possible
ones P, that hold S, the alignment error rate is 1 - (|A and S| + |A and P|) / (|A| + |S|) (Och and Ney 2003).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .block import Block
from .intervals import Array, interval, mean, means
from .looking import See
from .scene import Scene, Tokens
from .table import Measure
from .words import ByWord

# A row reads one token and says the next: the row of a word is that which read it, or that which said it.
ROWS = ("read", "said")
SIGN = "alignment"  # what the names of its measures begin with
NAMES = ("", " precision", " recall")


class Alignment:
    """Links that heads of cross-attentions draw, added up text by text: what `measure` takes as `more`.

    Texts without gold links are left out. `rows` says which row stands for a word: that which "read", or "said" it.
    """

    def __init__(self, *, rows: Sequence[str] = ROWS) -> None:
        if not rows or set(rows) - set(ROWS):
            raise ValueError(f"rows={tuple(rows)!r} are unknown; give some of {ROWS}")
        self.rows = tuple(rows)
        self.kept: list[dict[tuple[str, str], tuple[Array, Array]]] = []
        self._gold: tuple[Tensor, Tensor] | None = None  # sure and possible, [words of the text, words of the source]
        self._asks: dict[str, Tokens] = {}
        self._sums: dict[tuple[str, str], Array] = {}
        self._words = {row: ByWord(self._seer(row)) for row in self.rows}

    def open(self, scene: Scene) -> None:
        """A text comes."""
        self._gold = None
        if not scene.links:
            return
        if set(scene.streams) != {"source", "text"}:
            raise ValueError(f"links lead from a source to a text, and here is only {', '.join(scene.streams)}; leave "
                             "links out, or give a model that reads two")  # fmt: skip
        text, source = scene.streams["text"], scene.streams["source"]
        self._asks = {"read": text, "said": _said(text)}
        self._gold = _gold(scene.links, text, source)

    def see(self, site: str, block: Block) -> None:
        """Add a band of rows."""
        if self._gold is None or block.itself:
            return
        for row, words in self._words.items():
            words.see(site, replace(block, asks=self._asks[row]))

    def _seer(self, row: str) -> See:
        def see(site: str, block: Block) -> None:
            self._add((site, row), block)

        return see

    def _add(self, where: tuple[str, str], block: Block) -> None:
        """Add links of a band of words: of heads, of one that reads all alike, and along the diagonal."""
        assert self._gold is not None
        sure, possible = self._gold
        asks, words = block.asks.word[block.places], block.told.word
        readable = block.uniform.allowed & (words >= 0)
        counted = replace(block, w_HTS=block.w_HTS.masked_fill(~readable, -1), allowed=readable)
        rows = (asks >= 0) & readable.any(-1)
        diagonal = words == ((asks + 0.5) * sure.shape[1] / len(sure)).long()[:, None]
        links_HTS = torch.cat([_most(counted), _most(counted.uniform), diagonal[None].double()])
        links_HTS = links_HTS * rows[:, None] * (words >= 0)
        hits = [(links_HTS * gold[asks.clamp(min=0)][:, words.clamp(min=0)]).sum((1, 2)) for gold in (sure, possible)]
        whole = rows.sum().expand_as(hits[0])
        found = torch.stack([*hits, whole]).cpu().numpy().astype(np.float64)
        self._sums[where] = self._sums.get(where, 0) + found

    def close(self) -> None:
        """A text is over."""
        told = dict[tuple[str, str], tuple[Array, Array]]()
        for where, (right, likely, links) in self._sums.items():
            assert self._gold is not None
            gold = np.full_like(links, float(self._gold[0].sum()))
            told[where] = np.stack([right + likely, likely, right]), np.stack([links + gold, links, gold])
        self.kept.append(told)
        self._sums, self._gold = {}, None
        for words in self._words.values():
            words.close()

    def measures(self, draws: Array) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Of each head: 1 - AER, precision, recall; chance is to read all words alike, or the diagonal, if better."""
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for site, row in dict.fromkeys(where for told in self.kept for where in told):
            some = next(told[site, row] for told in self.kept if (site, row) in told)
            nothing = np.zeros_like(some[0]), np.zeros_like(some[1])
            both = [told.get((site, row), nothing) for told in self.kept]
            sums, numbers = (np.stack(one) for one in zip(*both, strict=True))
            value = mean(sums, numbers)
            low, high = interval(means(sums, numbers, draws))
            for n, name in enumerate(NAMES):
                chance = float(value[n, -2:].max())
                for head in range(value.shape[1] - 2):
                    found = Measure(float(value[n, head]), float(low[n, head]), float(high[n, head]), chance)
                    measures.setdefault((site, head), {})[f"{SIGN} {row}{name}"] = found
        return measures


def _most(block: Block) -> Tensor:
    """1 at the largest weight of each row, shared where several are as large."""
    best = (block.w_HTS == block.w_HTS.amax(-1, keepdim=True)).double()
    return best / best.sum(-1, keepdim=True)


def _said(text: Tokens) -> Tokens:
    """The same, each row with the word that it says: the next."""
    return replace(text, word=torch.cat([text.word[1:], text.word.new_full((1,), -1)]))


def _gold(links: Sequence[tuple[int, int, bool]], text: Tokens, source: Tokens) -> tuple[Tensor, Tensor]:
    """Sure and possible links, [words of the text, words of the source]; what is sure is possible."""
    counts = {"source": int(source.word.max()) + 1, "text": int(text.word.max()) + 1}
    sure = torch.zeros(counts["text"], counts["source"], device=text.word.device)
    possible = sure.clone()
    for link in links:
        for stream, word in zip(counts, link, strict=False):
            if not 0 <= word < counts[stream]:
                has = f"the {stream} has words 0..{counts[stream] - 1}" if counts[stream] else f"the {stream} has none"
                raise ValueError(f"link {link!r} names word {word} of the {stream}, and {has}; count words from 0")
        possible[link[1], link[0]] = 1
        sure[link[1], link[0]] = max(float(link[2]), float(sure[link[1], link[0]]))
    return sure, possible

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

from .annotated_examples import Example, TokenAnnotations
from .head_table import Measure
from .resampling import Array, confidence_interval, ratio_of_sums, resampled_ratios
from .weight_bands import BandCallback, WeightBand, WordBandMerger

# A row reads one token and says the next: the row of a word is that which read it, or that which said it.
ROW_CONVENTIONS = ("read", "said")
ALIGNMENT_PREFIX = "alignment"  # what the names of its measures begin with
MEASURE_SUFFIXES = ("", " precision", " recall")


class AlignmentScores:
    """Links that heads of cross-attentions draw, added up text by text: what `measure` takes as `more`.

    Texts without gold links are left out. `rows` says which row stands for a word: that which "read", or "said" it.
    """

    def __init__(self, *, row_conventions: Sequence[str] = ROW_CONVENTIONS) -> None:
        if not row_conventions or set(row_conventions) - set(ROW_CONVENTIONS):
            raise ValueError(f"rows={tuple(row_conventions)!r} are unknown; give some of {ROW_CONVENTIONS}")
        self.rows = tuple(row_conventions)
        self.kept: list[dict[tuple[str, str], tuple[Array, Array]]] = []
        self._gold: tuple[Tensor, Tensor] | None = None  # sure and possible, [words of the text, words of the source]
        self._asks: dict[str, TokenAnnotations] = {}
        self._sums: dict[tuple[str, str], Array] = {}
        self._words = {row: WordBandMerger(self._make_callback(row)) for row in self.rows}

    def start_example(self, example: Example) -> None:
        """A text comes."""
        self._gold = None
        if not example.alignment_links:
            return
        if set(example.streams) != {"source", "text"}:
            raise ValueError(
                f"links lead from a source to a text, and here is only {', '.join(example.streams)}; leave "
                "links out, or give a model that reads two"
            )
        text, source = example.streams["text"], example.streams["source"]
        self._asks = {"read": text, "said": _shift_to_next_token(text)}
        self._gold = _gold_links(example.alignment_links, text, source)

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows."""
        if self._gold is None or band.is_self_attention:
            return
        for row, words in self._words.items():
            words.add_band(site, replace(band, query_tokens=self._asks[row]))

    def _make_callback(self, row: str) -> BandCallback:
        def see(site: str, block: WeightBand) -> None:
            self._add_word_band((site, row), block)

        return see

    def _add_word_band(self, where: tuple[str, str], block: WeightBand) -> None:
        """Add links of a band of words: of heads, of one that reads all alike, and along the diagonal."""
        assert self._gold is not None
        sure, possible = self._gold
        asks, words = block.query_tokens.word_index[block.query_positions], block.key_tokens.word_index
        readable = block.uniform_baseline.allowed & (words >= 0)
        counted = replace(block, w_HTS=block.w_HTS.masked_fill(~readable, -1), allowed=readable)
        rows = (asks >= 0) & readable.any(-1)
        diagonal = words == ((asks + 0.5) * sure.shape[1] / len(sure)).long()[:, None]
        links_HTS = torch.cat([_is_max(counted), _is_max(counted.uniform_baseline), diagonal[None].double()])
        links_HTS = links_HTS * rows[:, None] * (words >= 0)
        hits = [(links_HTS * gold[asks.clamp(min=0)][:, words.clamp(min=0)]).sum((1, 2)) for gold in (sure, possible)]
        whole = rows.sum().expand_as(hits[0])
        found = torch.stack([*hits, whole]).cpu().numpy().astype(np.float64)
        self._sums[where] = self._sums.get(where, 0) + found

    def finish_example(self) -> None:
        """A text is over."""
        told = dict[tuple[str, str], tuple[Array, Array]]()
        for where, (right, likely, links) in self._sums.items():
            assert self._gold is not None
            gold = np.full_like(links, float(self._gold[0].sum()))
            told[where] = np.stack([right + likely, likely, right]), np.stack([links + gold, links, gold])
        self.kept.append(told)
        self._sums, self._gold = {}, None
        for words in self._words.values():
            words.finish_example()

    def measures(self, resamples: Array) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """Of each head: 1 - AER, precision, recall; chance is to read all words alike, or the diagonal, if better."""
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for site, row in dict.fromkeys(where for told in self.kept for where in told):
            some = next(told[site, row] for told in self.kept if (site, row) in told)
            nothing = np.zeros_like(some[0]), np.zeros_like(some[1])
            both = [told.get((site, row), nothing) for told in self.kept]
            sums, numbers = (np.stack(one) for one in zip(*both, strict=True))
            value = ratio_of_sums(sums, numbers)
            low, high = confidence_interval(resampled_ratios(sums, numbers, resamples))
            for n, name in enumerate(MEASURE_SUFFIXES):
                chance = float(value[n, -2:].max())
                for head in range(value.shape[1] - 2):
                    found = Measure(float(value[n, head]), float(low[n, head]), float(high[n, head]), chance)
                    measures.setdefault((site, head), {})[f"{ALIGNMENT_PREFIX} {row}{name}"] = found
        return measures


def _is_max(block: WeightBand) -> Tensor:
    """1 at the largest weight of each row, shared where several are as large."""
    best = (block.w_HTS == block.w_HTS.amax(-1, keepdim=True)).double()
    return best / best.sum(-1, keepdim=True)


def _shift_to_next_token(text: TokenAnnotations) -> TokenAnnotations:
    """The same, each row with the word that it says: the next."""
    return replace(text, word_index=torch.cat([text.word_index[1:], text.word_index.new_full((1,), -1)]))


def _gold_links(
    links: Sequence[tuple[int, int, bool]], text: TokenAnnotations, source: TokenAnnotations
) -> tuple[Tensor, Tensor]:
    """Sure and possible links, [words of the text, words of the source]; what is sure is possible."""
    counts = {"source": int(source.word_index.max()) + 1, "text": int(text.word_index.max()) + 1}
    sure = torch.zeros(counts["text"], counts["source"], device=text.word_index.device)
    possible = sure.clone()
    for link in links:
        for stream, word in zip(counts, link, strict=False):
            if not 0 <= word < counts[stream]:
                has = f"the {stream} has words 0..{counts[stream] - 1}" if counts[stream] else f"the {stream} has none"
                raise ValueError(f"link {link!r} names word {word} of the {stream}, and {has}; count words from 0")
        possible[link[1], link[0]] = 1
        sure[link[1], link[0]] = max(float(link[2]), float(sure[link[1], link[0]]))
    return sure, possible

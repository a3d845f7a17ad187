"""Word alignments of cross-attention heads, scored against human alignments.

Each target word is linked with the source word that the head attends to most. With these links A,
the sure gold links S and the possible ones P (which include S), the alignment error rate is 1 - (|A
and S| + |A and P|) / (|A| + |S|) (Och and Ney 2003).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .annotated_examples import Example, TokenAnnotations
from .head_table import Measure
from .resampling import Array, Jackknife, excess_p_values
from .weight_bands import BandCallback, WeightBand, WordBandMerger

# A decoder row has one token as input and predicts the next one. The row that stands for a word is
# the one with the word as input ("input") or the one that predicts it ("target").
ROW_CONVENTIONS = ("input", "target")
ALIGNMENT_PREFIX = "alignment"  # names of these measures start with it
MEASURE_SUFFIXES = ("", " precision", " recall")


class AlignmentScores:
    """Alignment scores of cross-attention heads: a collector for `measure_heads`.

    Examples without gold links are skipped. `row_conventions` choose which row stands for a target
    word: the one that has it as input ("input") or the one that predicts it ("target").
    """

    def __init__(self, *, row_conventions: Sequence[str] = ROW_CONVENTIONS) -> None:
        if not row_conventions or set(row_conventions) - set(ROW_CONVENTIONS):
            raise ValueError(
                f"unknown row_conventions={tuple(row_conventions)!r}; use any of {ROW_CONVENTIONS}"
            )
        self.rows = tuple(row_conventions)
        self.ratios_by_example: list[dict[tuple[str, str], tuple[Array, Array]]] = []
        self._gold: tuple[Tensor, Tensor] | None = (
            None  # sure and possible links, [target words, source words]
        )
        self._query_tokens: dict[str, TokenAnnotations] = {}
        self._sums: dict[tuple[str, str], Array] = {}
        self._words = {row: WordBandMerger(self._make_callback(row)) for row in self.rows}

    def start_example(self, example: Example) -> None:
        """Read the gold links of the example."""
        self._gold = None
        if not example.alignment_links:
            return
        if set(example.streams) != {"source", "text"}:
            streams = ", ".join(example.streams)
            fact = (
                "alignment links need a source and a target text (this example has only: "
                f"{streams})"
            )
            raise ValueError(
                f"{fact}; leave alignment_links empty, or use an encoder-decoder model"
            )
        text = example.streams["text"]
        source = example.streams["source"]
        self._query_tokens = {"input": text, "target": _shift_to_next_token(text)}
        self._gold = _gold_links(example.alignment_links, text, source)

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows; bands of self-attention are ignored."""
        if self._gold is None or band.is_self_attention:
            return
        for row, words in self._words.items():
            words.add_band(site, replace(band, query_tokens=self._query_tokens[row]))

    def _make_callback(self, row: str) -> BandCallback:
        def on_band(site: str, band: WeightBand) -> None:
            self._add_word_band((site, row), band)

        return on_band

    def _add_word_band(self, key: tuple[str, str], band: WeightBand) -> None:
        """Count the links of a band of words: those of the heads, of uniform attention and of the
        diagonal.
        """
        assert self._gold is not None
        sure, possible = self._gold
        target_words = band.query_tokens.word_index[band.query_positions]
        source_words = band.key_tokens.word_index
        readable = band.uniform_baseline.allowed & (source_words >= 0)
        counted = replace(band, w_HTS=band.w_HTS.masked_fill(~readable, -1), allowed=readable)
        rows = (target_words >= 0) & readable.any(-1)
        diagonal = (
            source_words == ((target_words + 0.5) * sure.shape[1] / len(sure)).long()[:, None]
        )
        links_HTS = torch.cat(
            [_is_max(counted), _is_max(counted.uniform_baseline), diagonal[None].double()]
        )
        links_HTS = links_HTS * rows[:, None] * (source_words >= 0)
        hits = [
            (links_HTS * gold[target_words.clamp(min=0)][:, source_words.clamp(min=0)]).sum((1, 2))
            for gold in (sure, possible)
        ]
        num_rows = rows.sum().expand_as(hits[0])
        totals = torch.stack([*hits, num_rows]).cpu().numpy().astype(np.float64)
        self._sums[key] = self._sums.get(key, 0) + totals

    def finish_example(self) -> None:
        """Store the counts of the example."""
        ratios = dict[tuple[str, str], tuple[Array, Array]]()
        for key, (sure_hits, possible_hits, links) in self._sums.items():
            assert self._gold is not None
            gold = np.full_like(links, float(self._gold[0].sum()))
            ratios[key] = (
                np.stack([sure_hits + possible_hits, possible_hits, sure_hits]),
                np.stack([links + gold, links, gold]),
            )
        self.ratios_by_example.append(ratios)
        self._sums = {}
        self._gold = None
        for words in self._words.values():
            words.finish_example()

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """1 - AER, precision and recall of each head.

        Chance is uniform attention or the diagonal, whichever scores better.
        """
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for site, row in dict.fromkeys(key for ratios in self.ratios_by_example for key in ratios):
            example = next(
                ratios[site, row] for ratios in self.ratios_by_example if (site, row) in ratios
            )
            missing = np.zeros_like(example[0]), np.zeros_like(example[1])
            by_text = [ratios.get((site, row), missing) for ratios in self.ratios_by_example]
            sums, counts = (np.stack(arrays) for arrays in zip(*by_text, strict=True))
            scores = Jackknife.of_ratio(sums, counts)
            value = scores.value
            (low, high) = scores.interval()
            for n, suffix in enumerate(MEASURE_SUFFIXES):
                best = (
                    value.shape[1] - 2 + int(value[n, -2:].argmax())
                )  # uniform attention or the diagonal
                chance = float(value[n, best])
                p = excess_p_values(
                    (sums[:, n, :-2], counts[:, n, :-2]),
                    (sums[:, n, best, None], counts[:, n, best, None]),
                )
                for head in range(value.shape[1] - 2):
                    mean, start, stop = (float(array[n, head]) for array in (value, low, high))
                    num_links = float(counts[:, n, head].sum())
                    measure = Measure(mean, start, stop, chance, num_links, float(p[head]))
                    measures.setdefault((site, head), {})[f"{ALIGNMENT_PREFIX} {row}{suffix}"] = (
                        measure
                    )
        return measures


def _is_max(band: WeightBand) -> Tensor:
    """1 at the largest weight of each row; keys that tie share it equally."""
    is_max = (band.w_HTS == band.w_HTS.amax(-1, keepdim=True)).double()
    return is_max / is_max.sum(-1, keepdim=True)


def _shift_to_next_token(text: TokenAnnotations) -> TokenAnnotations:
    """The annotations with the word of the next token at each row, which is the word that the row
    predicts.
    """
    return replace(
        text, word_index=torch.cat([text.word_index[1:], text.word_index.new_full((1,), -1)])
    )


def _gold_links(
    links: Sequence[tuple[int, int, bool]], text: TokenAnnotations, source: TokenAnnotations
) -> tuple[Tensor, Tensor]:
    """Sure and possible links, [target words, source words]; sure links are also possible."""
    counts = {"source": int(source.word_index.max()) + 1, "text": int(text.word_index.max()) + 1}
    sure = torch.zeros(counts["text"], counts["source"], device=text.word_index.device)
    possible = sure.clone()
    for link in links:
        for stream, word in zip(counts, link, strict=False):
            if not 0 <= word < counts[stream]:
                valid = f"has words 0..{counts[stream] - 1}" if counts[stream] else "has no words"
                fact = f"alignment link {link!r} names word {word} of the {stream}, which {valid}"
                raise ValueError(f"{fact}; count words from 0")
        possible[link[1], link[0]] = 1
        sure[link[1], link[0]] = max(float(link[2]), float(sure[link[1], link[0]]))
    return sure, possible

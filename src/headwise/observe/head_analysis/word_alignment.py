"""Word alignments of cross-attention heads, scored against human alignments.

Each target word is linked with the source word that the head attends to most. With these links A,
the sure gold links S and the possible ones P (which include S), the alignment error rate is 1 - (|A
and S| + |A and P|) / (|A| + |S|) (Och and Ney 2003).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .annotated_examples import Example, TokenAnnotations
from .head_measurement import MeasureCollector
from .head_table import Measure
from .resampling import Array, Jackknife, excess_p_values, stack_by_key
from .weight_bands import WeightBand, WordBandMerger

# A decoder row has one token as input and predicts the next one. The row that stands for a word is
# the one with the word as input ("input") or the one that predicts it ("target").
ROW_CONVENTIONS = ("input", "target")
ALIGNMENT_PREFIX = "alignment"  # names of these measures start with it
MEASURE_SUFFIXES = ("", " precision", " recall")


class AlignmentScores(MeasureCollector):
    """Alignment scores of cross-attention heads: a collector for `measure_heads`.

    Examples without gold links are skipped. Scores are given for both rows that can stand for a
    target word: the one that has it as input ("input") and the one that predicts it ("target").
    """

    def __init__(self) -> None:
        # hits of sure and of possible links, links, and gold links of each text, by site and row
        self.counts_by_example: list[dict[tuple[str, str], Array]] = []
        self._gold: tuple[Tensor, Tensor] | None = None  # sure and possible, [target, source words]
        self._query_tokens: dict[str, TokenAnnotations] = {}
        self._sums: dict[tuple[str, str], Array] = {}
        self._words = {
            row: WordBandMerger(partial(self._add_word_band, row)) for row in ROW_CONVENTIONS
        }

    def start_example(self, example: Example) -> None:
        """Read the gold links of the example."""
        self._gold = None
        if not example.alignment_links:
            return
        if set(example.streams) != {"source", "text"}:
            streams = ", ".join(example.streams)
            raise ValueError(
                "alignment links need a source and a target text (this example has only: "
                f"{streams}); leave alignment_links empty, or use an encoder-decoder model"
            )
        text = example.streams["text"]
        # A row predicts the word of the next token.
        words = text.word_index
        following = replace(text, word_index=torch.cat([words[1:], words.new_full((1,), -1)]))
        self._query_tokens = {"input": text, "target": following}
        counts = {one: int(example.streams[one].word_index.max()) + 1 for one in ("source", "text")}
        sure = torch.zeros(counts["text"], counts["source"], device=words.device)
        possible = sure.clone()  # sure links are also possible
        for link in example.alignment_links:
            for stream, word in zip(counts, link, strict=False):
                if not 0 <= word < counts[stream]:
                    valid = f"words 0..{counts[stream] - 1}" if counts[stream] else "no words"
                    fact = f"alignment link {link!r} names word {word} of the {stream}, which has"
                    raise ValueError(f"{fact} {valid}; count words from 0")
            possible[link[1], link[0]] = 1
            sure[link[1], link[0]] = max(float(link[2]), float(sure[link[1], link[0]]))
        self._gold = (sure, possible)

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows; bands of self-attention are ignored."""
        if self._gold is None or band.is_self_attention:
            return
        for row, words in self._words.items():
            words.add_band(site, replace(band, query_tokens=self._query_tokens[row]))

    def _add_word_band(self, row: str, site: str, band: WeightBand) -> None:
        """Count the links of a band of words: from heads, uniform attention and the diagonal."""
        assert self._gold is not None
        num_targets, num_sources = self._gold[0].shape
        targets = band.query_tokens.word_index[band.query_positions]
        sources = band.key_tokens.word_index
        readable = band.allowed.any(0) & (sources >= 0)
        counted = replace(band, w_HTS=band.w_HTS.masked_fill(~readable, -1), allowed=readable)
        rows = (targets >= 0) & readable.any(-1)
        diagonal = sources == ((targets + 0.5) * num_sources / num_targets).long()[:, None]
        links_HTS = torch.cat(
            [_is_max(counted), _is_max(counted.uniform_baseline), diagonal[None].double()]
        )
        links_HTS = links_HTS * rows[:, None] * (sources >= 0)
        counts: list[Tensor] = []
        for gold in self._gold:
            is_linked = gold[targets.clamp(min=0)][:, sources.clamp(min=0)]
            counts.append((links_HTS * is_linked).sum((1, 2)))
        counts.append(rows.sum().expand_as(counts[0]))
        counts.append(torch.zeros_like(counts[0]))
        totals = torch.stack(counts).cpu().numpy().astype(np.float64)
        self._sums[site, row] = self._sums.get((site, row), 0) + totals

    def finish_example(self) -> None:
        """Store the counts of the example."""
        for counts in self._sums.values():
            assert self._gold is not None
            counts[3] = float(self._gold[0].sum())
        self.counts_by_example.append(self._sums)
        self._sums = {}
        self._gold = None
        for words in self._words.values():
            words.finish_example()

    def merge(self, later: AlignmentScores) -> None:
        """Add the counts of later examples."""
        self.counts_by_example += later.counts_by_example

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, Measure]]:
        """1 - AER, precision and recall of each head.

        Chance is uniform attention or the diagonal, whichever scores better.
        """
        measures: dict[tuple[str, int], dict[str, Measure]] = {}
        for (site, row), counted in stack_by_key(self.counts_by_example).items():
            sure, possible, links, gold = counted.transpose(1, 0, 2)
            ratios = ((sure + possible, links + gold), (possible, links), (sure, gold))
            for suffix, (sums, counts) in zip(MEASURE_SUFFIXES, ratios, strict=True):
                scores = Jackknife.of_ratio(sums, counts)
                best = scores.value.shape[0] - 2 + int(scores.value[-2:].argmax())
                chance = float(scores.value[best])
                p = excess_p_values(
                    (sums[:, :-2], counts[:, :-2]), (sums[:, best, None], counts[:, best, None])
                )
                columns = (scores.value, *scores.interval(), counts.sum(0))
                for head, values in enumerate(np.stack(columns, 1)[:-2].tolist()):
                    value, low, high, num_links = values
                    measure = Measure(value, low, high, chance, num_links, float(p[head]))
                    by_name = measures.setdefault((site, head), {})
                    by_name[f"{ALIGNMENT_PREFIX} {row}{suffix}"] = measure
        return measures


def _is_max(band: WeightBand) -> Tensor:
    """1 at the largest weight of each row; keys that tie share it equally."""
    is_max = (band.w_HTS == band.w_HTS.amax(-1, keepdim=True)).double()
    return is_max / is_max.sum(-1, keepdim=True)

"""Test if the first token of a text is an attention sink of a model, measured before the heads are.

Special tokens such as [CLS] count as sinks. A first token that is an ordinary word counts only if a
head puts clearly more weight on it than chance (2309.17453, 2410.10781).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...util.errors import pluralise
from ..head_names import print_head
from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import map_tensors
from .annotated_examples import Example
from .head_metrics import first_token_choice_sums
from .resampling import Array, correct_p_values, excess_p_values, ratio_of_sums, stack_by_key
from .weight_bands import WeightBand, stream_weight_bands

MAX_SINK_TEXTS = 32  # texts on which the first token is measured, at most
MIN_SINK_SCORE = 0.3  # epsilon of 2410.10781, here on the scale from chance (0) to all weight (1)
SIGNIFICANCE = 0.05


class FirstTokenWeight(NamedTuple):
    """Mean weight that a head puts on the first token, its chance level, and the corrected p-value
    of the excess.
    """

    site: str
    head: int
    value: float
    chance: float
    p: float

    @property
    def score(self) -> float:
        """Scale the weight between chance (0) and 1."""
        return (self.value - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0


def measure_first_token(
    model: nn.Module,
    sites: Sequence[SiteModule],
    streams: Mapping[str, tuple[str, str]],
    examples: Sequence[Example],
) -> list[FirstTokenWeight]:
    """Measure how much weight every head puts on the first token of its key stream, over rows that
    may also read another token.
    """
    sums: dict[str, Array] = {}  # [2, heads, 2]

    def add_band(site: str, band: WeightBand) -> None:
        added = torch.stack(first_token_choice_sums(band)).cpu().numpy()
        sums[site] = sums.get(site, 0) + added

    sums_by_text: list[dict[str, Array]] = []
    for example in examples:
        sums.clear()
        stream_weight_bands(model, sites, [example], streams, add_band)
        sums_by_text.append(dict(sums))
    return rate_first_tokens(stack_by_key(sums_by_text))


def rate_first_tokens(sums_by_site: Mapping[str, Array]) -> list[FirstTokenWeight]:
    """Test every head's weight on the first token against chance, from the sums and counts of
    `first_token_choice_sums` by site, [texts, 2, heads, 2].

    P-values are corrected for the number of heads (Holm).
    """
    first_token_weights: list[FirstTokenWeight] = []
    for site, sums in sums_by_site.items():
        weight, uniform = (tuple(sums[..., n].swapaxes(0, 1)) for n in range(2))
        p = excess_p_values(weight, uniform)
        columns = (ratio_of_sums(*weight), ratio_of_sums(*uniform), p)
        for head, values in enumerate(np.stack(columns, 1).tolist()):
            if not math.isnan(values[0]):
                first_token_weights.append(FirstTokenWeight(site, head, *values))
    corrected = correct_p_values([one.p for one in first_token_weights]).tolist()
    return [one._replace(p=p) for one, p in zip(first_token_weights, corrected, strict=True)]


def streams_of_words(
    sample: Sequence[Example], streams: Mapping[str, tuple[str, str]]
) -> dict[str, str]:
    """Return the key stream of each site whose texts have words and do not all begin with a special
    token.
    """
    stream_of_site: dict[str, str] = {}
    for site, (_, stream) in streams.items():
        tokens = [text.streams[stream] for text in sample if stream in text.streams]
        if not all(bool(one.is_special[:1].all()) for one in tokens):
            stream_of_site[site] = stream
    return stream_of_site if len(sample) > 1 else {}


def find_sink_streams(
    stream_of_site: Mapping[str, str], weights: Sequence[FirstTokenWeight]
) -> tuple[set[str], tuple[str, ...]]:
    """Find the streams in which some head reads the first token: its weight is significantly above
    chance, corrected for the number of heads, and its score is at least `MIN_SINK_SCORE`. Return
    them with notes on what was measured.
    """
    notes: list[str] = []
    sink_streams: set[str] = set()
    for stream in dict.fromkeys(stream_of_site.values()):
        readers = [weight for weight in weights if stream_of_site[weight.site] == stream]
        sinks = [one for one in readers if one.score >= MIN_SINK_SCORE and one.p < SIGNIFICANCE]
        note = "is no sink: no head puts clearly more weight on it than chance"
        if sinks:
            sink_streams.add(stream)
            top = max(sinks, key=lambda weight: weight.score)
            fact = f"{len(sinks)} of {len(readers)} heads put clearly more weight on it than chance"
            name = print_head(top.site, top.head, list(stream_of_site))
            note = f"is a sink: {fact}, {name} {top.value:.2f} of its weight"
        notes.append(f"the first token of the {stream} {note}")
    return sink_streams, tuple(notes)


def mark_first_token_sinks(
    model: nn.Module,
    sites: Sequence[SiteModule],
    streams: Mapping[str, tuple[str, str]],
    examples: Iterable[Example],
) -> tuple[Iterator[Example], tuple[str, ...]]:
    """Measure on the first texts whether the first token of each key stream is a sink; return all
    examples, annotated, and notes on what was measured.

    Streams that begin with a special token are not measured.
    """
    texts = iter(examples)
    sample = list(islice(texts, MAX_SINK_TEXTS))
    stream_of_site = streams_of_words(sample, streams)
    if not stream_of_site:
        return chain(sample, texts), ()
    measured = [module for module in sites if module.site.name in stream_of_site]
    weights = measure_first_token(model, measured, streams, sample)
    sink_streams, notes = find_sink_streams(stream_of_site, weights)

    def mark(example: Example) -> Example:
        marked = dict(example.streams)
        for name in sink_streams & marked.keys():
            marked[name] = replace(marked[name], first_is_sink=True)
        return replace(example, streams=marked) if sink_streams else example

    return map(mark, chain(sample, texts)), notes


class DistinctExamples:
    """Iterate over examples with new inputs.

    After the iteration, distinct and repeated examples are counted.

    >>> examples = DistinctExamples([Example({"x": n % 2}, {}) for n in range(5)])
    >>> len(list(examples)), examples.notes
    (2, ('left out 3 texts that repeat an earlier one',))
    """

    def __init__(self, examples: Iterable[Example]) -> None:
        self.num_distinct = self.num_repeated = 0
        self._examples = examples

    def __iter__(self) -> Iterator[Example]:
        self.num_distinct = self.num_repeated = 0
        digests: set[bytes] = set()
        for example in self._examples:
            digest = digest_inputs(example)
            if digest in digests:
                self.num_repeated += 1
                continue
            digests.add(digest)
            self.num_distinct += 1
            yield example

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on the examples that were left out; none if there are none."""
        if not self.num_repeated:
            return ()
        verb = "repeats" if self.num_repeated == 1 else "repeat"
        return (f"left out {pluralise(self.num_repeated, 'text')} that {verb} an earlier one",)

    def check_min_count(self, minimum: int = 2) -> None:
        """Raise ValueError if there were fewer than `minimum` distinct examples."""
        if self.num_distinct < minimum:
            if self.num_repeated:
                num_texts = self.num_distinct + self.num_repeated
                raise ValueError(
                    "cannot compute confidence intervals from equal texts "
                    f"(different: {self.num_distinct} of {num_texts}); give different texts"
                )
            num_texts = pluralise(self.num_distinct, "text")
            raise ValueError(
                f"cannot compute confidence intervals from {num_texts}; give at least two"
            )


def digest_inputs(example: Example, salt: str = "") -> bytes:
    """Return a hash of the inputs of an example; another one for each `salt`."""
    text = salt + repr(map_tensors(_describe, example.inputs))
    return blake2b(text.encode(), digest_size=16).digest()


def _describe(tensor: Tensor) -> str:
    """Return a text that is equal for equal tensors only."""
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.detach().cpu().flatten().tolist()!r}"

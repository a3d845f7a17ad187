"""Whether the first token of a text is an attention sink of a model, measured before the heads are.

Special tokens such as [CLS] count as sinks. A first token that is an ordinary word counts only if a
head puts clearly more weight on it than chance (2309.17453, 2410.10781).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..inspect.hooks import SiteModule
from ..inspect.model_inputs import get_device
from .annotated_examples import Example
from .resampling import Array, correct_p_values, excess_p_values, ratio_of_sums
from .weight_bands import WeightBand, move_annotations, stream_weight_bands

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
        """How far the weight stands between chance (0) and 1."""
        return (self.value - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0


class MarkedExamples(NamedTuple):
    """Examples whose annotations state whether the first token is a sink, and a note on what was
    measured.
    """

    examples: Iterator[Example]
    notes: tuple[str, ...]


class FirstTokenSums:
    """Sums of the weight on the first token over rows that may also read another token, text by
    text.

    `observed[site]` and `uniform[site]` hold a pair of sums and counts [heads] of each text; the
    second is that of uniform attention.
    """

    def __init__(self) -> None:
        self.observed: dict[str, list[tuple[Array, Array]]] = {}
        self.uniform: dict[str, list[tuple[Array, Array]]] = {}
        self._open: dict[str, Array] = {}

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows of the current text."""
        added = _first_token_sums(band) if band.first_key == 0 else np.zeros((3, len(band.w_HTS)))
        self._open[site] = self._open[site] + added if site in self._open else added

    def finish_text(self) -> None:
        """Store the sums of the text that just ended."""
        for site, (weight, chance, count) in self._open.items():
            self.observed.setdefault(site, []).append((weight, count))
            self.uniform.setdefault(site, []).append((chance, count))
        self._open = {}

    def weights(self) -> list[FirstTokenWeight]:
        """The weight of every head that has rows, with p-values corrected for the number of heads
        (Holm).
        """
        weights: list[FirstTokenWeight] = []
        for site, by_text in self.observed.items():
            observed, uniform = (stack_texts(texts) for texts in (by_text, self.uniform[site]))
            value = ratio_of_sums(*observed)
            chance = ratio_of_sums(*uniform)
            p = excess_p_values(observed, uniform)
            weights += [
                FirstTokenWeight(
                    site, head, float(value[head]), float(chance[head]), float(p[head])
                )
                for head in range(len(value))
                if not math.isnan(value[head])
            ]
        corrected = correct_p_values([weight.p for weight in weights])
        return [weight._replace(p=float(p)) for weight, p in zip(weights, corrected, strict=True)]


def _first_token_sums(band: WeightBand) -> Array:
    """Weight on the first token, that of uniform attention, and the number of rows with a choice,
    [3, heads].
    """
    allowed = band.allowed if band.allowed.dim() == 3 else band.allowed[None]
    num_keys = allowed.sum(-1)
    has_choice = allowed[..., 0] & (num_keys > 1)
    weight = torch.where(has_choice, band.w_HTS[..., 0], 0)
    sums = (weight, has_choice / num_keys.clamp(min=1), has_choice)
    return (
        torch.stack([one.sum(-1, dtype=torch.float64).expand(len(weight)) for one in sums])
        .cpu()
        .numpy()
    )


def stack_texts(by_text: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The sums and the counts of all texts, each as one array."""
    return np.stack([sums for sums, _ in by_text]), np.stack([counts for _, counts in by_text])


def measure_first_token(
    model: nn.Module,
    sites: Sequence[SiteModule],
    streams: Mapping[str, tuple[str, str]],
    examples: Sequence[Example],
) -> list[FirstTokenWeight]:
    """Measure how much weight every head puts on the first token of its key stream."""
    sums = FirstTokenSums()
    for example in examples:
        moved = move_annotations(example, get_device(model))
        stream_weight_bands(model, sites, moved, streams, sums.add_band)
        sums.finish_text()
    return sums.weights()


def mark_first_token_sinks(
    model: nn.Module,
    sites: Sequence[SiteModule],
    streams: Mapping[str, tuple[str, str]],
    examples: Iterable[Example],
) -> MarkedExamples:
    """Measure on the first texts whether the first token of each key stream is a sink, and annotate
    all examples.

    The first token of a stream is a sink if some head reads it: its weight is significantly above
    chance, corrected for the number of heads, and its score is at least `MIN_SINK_SCORE`. Streams
    that begin with a special token are not measured.
    """
    texts = iter(examples)
    sample = list(islice(texts, MAX_SINK_TEXTS))
    ordinary = [
        module for module in sites if _begins_with_word(sample, streams[module.site.name][1])
    ]
    if len(sample) < 2 or not ordinary:
        return MarkedExamples(chain(sample, texts), ())
    weights = measure_first_token(model, ordinary, streams, sample)
    notes = list[str]()
    sink_streams = set[str]()
    for stream in dict.fromkeys(streams[module.site.name][1] for module in ordinary):
        readers = [weight for weight in weights if streams[weight.site][1] == stream]
        sinks = [one for one in readers if one.score >= MIN_SINK_SCORE and one.p < SIGNIFICANCE]
        if sinks:
            sink_streams.add(stream)
        notes.append(_first_token_note(stream, readers, sinks))
    marked = (_mark_example(example, sink_streams) for example in chain(sample, texts))
    return MarkedExamples(marked, tuple(notes))


def _begins_with_word(examples: Sequence[Example], stream: str) -> bool:
    return any(not bool(example.streams[stream].is_special[:1].all()) for example in examples)


def _mark_example(example: Example, sink_streams: set[str]) -> Example:
    streams = {
        name: replace(tokens, first_is_sink=True) if name in sink_streams else tokens
        for name, tokens in example.streams.items()
    }
    return replace(example, streams=streams) if sink_streams else example


def _first_token_note(
    stream: str, readers: Sequence[FirstTokenWeight], sinks: Sequence[FirstTokenWeight]
) -> str:
    if not sinks:
        return (
            f"the first token of the {stream} is no sink: no head puts clearly more weight on "
            "it than chance"
        )
    top = max(sinks, key=lambda weight: weight.score)
    fact = f"{len(sinks)} of {len(readers)} heads put clearly more weight on it than chance"
    return (
        f"the first token of the {stream} is a sink: {fact}, {top.site} {top.head} "
        f"{top.value:.2f} of its weight"
    )

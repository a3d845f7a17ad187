"""The task "markov": sequences of random Markov chains, whose transitions must be inferred in context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.pattern_base import check_whole_number
from ..model_spec import ModelSpec
from ..ops.counter_rng import Ints, RandomStreams
from .synthetic_task import (
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    check_sizes,
    find_correct,
    make_small_decoder,
    slice_by_power_of_two,
    sum_by_slice,
)
from .task import IGNORE_INDEX, Batch, MetricSums

NUM_BASELINE_EXAMPLES = 512  # validation examples that the baselines are measured on


@dataclass(frozen=True, repr=False)
class MarkovChains(SyntheticTask):
    """Predict the next symbol of a Markov chain with a transition matrix of its own (2402.11004).

    Each row of the matrix is drawn from Dirichlet(1, ..., 1). The Bayes-optimal prediction is the smoothed bigram: b
    follows a with probability (n(a, b) + 1) / (n(a) + symbols), where n counts the sequence so far. The metric `excess`
    is the KL divergence of the model's prediction from it, in nats. Every sequence of `length` symbols begins with a
    start token, the last id: without it and without absolute positions, attention cannot distinguish a from a a.

    >>> predict_by_bigrams(np.array([[0, 1, 0, 1, 0]]), 2)[0].round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5], [0.333, 0.667], [0.667, 0.333], [0.25, 0.75]]
    """

    name: ClassVar[str] = "markov"
    symbols: int = 4
    length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("length", self.length, 2)
        check_whole_number("symbols", self.symbols, 2)
        if self.symbols > 64:
            raise SpecError(f"symbols={self.symbols} is too many to count pairs of them in context; use at most 64")
        check_sizes(self, tokens=self.length)
        check_num_examples(self, float(self.symbols) ** min(self.length, 64), "use a larger length=")

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of the uniform distribution over symbols."""
        return {"accuracy": 1 / self.symbols, "nats": log(self.symbols), "excess": self.lines["uniform"]}

    @property
    def lines(self) -> Mapping[str, float]:
        """Excess of the baselines "uniform", "unigram" and "bigram" on the first 512 validation examples.

        >>> {name: round(excess, 2) for name, excess in MarkovChains().lines.items()}
        {'uniform': 0.22, 'unigram': 0.16, 'bigram': 0.0}
        """
        x = self._examples_of_split(np.arange(NUM_BASELINE_EXAMPLES), "valid")["x"][:, :-1]
        optimal = predict_by_bigrams(x, self.symbols)
        predictions = {
            "uniform": np.full_like(optimal, 1 / self.symbols),
            "unigram": predict_by_unigrams(x, self.symbols),
            "bigram": optimal,
        }
        return {
            name: float((optimal * np.log(optimal / prediction)).sum(-1).mean())
            for name, prediction in predictions.items()
        }

    def model(self) -> ModelSpec:
        """A decoder of two layers: the first can attend to the previous token, the second can count pairs."""
        return make_small_decoder(self.name, self.symbols + 1, ModelShape(width=64, heads=4, layers=2, feed=128))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        # The gaps between 0, sorted uniform numbers and 1 are distributed as Dirichlet(1, ..., 1).
        edges = np.sort(random.uniform(self.symbols * (self.symbols - 1)).reshape(len(random), self.symbols, -1), -1)
        unit, rows = random.uniform(self.length), np.arange(len(random))
        x = np.empty((len(random), self.length + 1), np.int64)
        x[:, 0] = random.integers(self.symbols, 1)[:, 0]
        for t in range(self.length):
            x[:, t + 1] = (edges[rows, x[:, t]] < unit[:, t, None]).sum(-1)
        return {"content": x[:, :-1], "x": x}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        """The batch of these examples; `gold` holds the bigram prediction after each symbol, [length, symbols]."""
        optimal = torch.from_numpy(predict_by_bigrams(examples["x"][:, :-1], self.symbols))
        x, labels = examples["x"].copy(), examples["x"].copy()
        x[:, 1:], x[:, 0], labels[:, 0] = x[:, :-1].copy(), self.symbols, IGNORE_INDEX
        return Batch(torch.from_numpy(x), torch.from_numpy(labels), gold=list(optimal.unbind()))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy, nats per symbol, and excess over the bigram, the latter also by position."""
        correct, has_label = find_correct(logits, batch.labels)
        log_probs = logits.double().log_softmax(-1)
        label_log_probs = log_probs.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
        optimal = torch.stack(list(batch.gold)).to(log_probs.device)
        excess = torch.zeros_like(label_log_probs)
        excess[:, 1:] = (optimal * (optimal.log() - log_probs[:, 1:, : self.symbols])).sum(-1)
        position = torch.arange(has_label.shape[1], device=has_label.device).expand(has_label.shape)
        accuracy = dict(sum_by_slice("accuracy", correct, has_label, {}))
        nats = dict(sum_by_slice("nats", -label_log_probs, has_label, {}))
        return accuracy | nats | dict(sum_by_slice("excess", excess, has_label, slice_by_power_of_two("t", position)))

    def text(self, ids: list[int]) -> str:
        """Symbols as numbers, the start token as "|"."""
        return " ".join("|" if token_id == self.symbols else str(token_id) for token_id in ids)


def predict_by_bigrams(x: Ints, symbols: int) -> np.ndarray:
    """Bayes-optimal distribution of the next symbol after each position of `x` [rows, length]: the smoothed bigram."""
    rows = np.arange(len(x))
    counts = np.ones((len(x), symbols, symbols))
    out = np.empty((*x.shape, symbols))
    for t in range(x.shape[1]):
        if t:
            counts[rows, x[:, t - 1], x[:, t]] += 1
        out[:, t] = counts[rows, x[:, t]]
    return out / out.sum(-1, keepdims=True)


def predict_by_unigrams(x: Ints, symbols: int) -> np.ndarray:
    """Distribution of the next symbol by smoothed counts of single symbols, for each position of `x` [rows, length].

    >>> predict_by_unigrams(np.array([[0, 1]]), 2)[0].round(3).tolist()
    [[0.667, 0.333], [0.5, 0.5]]
    """
    counts = 1.0 + (x[..., None] == np.arange(symbols)).cumsum(1)
    return counts / counts.sum(-1, keepdims=True)

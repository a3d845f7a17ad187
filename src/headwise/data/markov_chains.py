"""markov: texts of random Markov chains, whose next symbol must be guessed from what the text itself has shown."""

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

NUM_BASELINE_EXAMPLES = 512  # examples over which the lines of simple guessers are drawn


@dataclass(frozen=True, repr=False)
class MarkovChains(SyntheticTask):
    """A text of `length` symbols by a chain of its own, each row of whose table is Dirichlet(1, ..., 1) (2402.11004).

    Whoever knows how it was made can do no better than the bigram: after symbol a comes b with probability
    (n(a, b) + 1) / (n(a) + symbols), where n counts the text so far. `excess` is how many nats a model is worse: the
    divergence of its guess from that one, which is exact at every place. A token of its own, the last id, begins every
    text: without it, and without absolute positions, attention cannot tell one symbol from the same one twice.

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
            raise SpecError(f"symbols={self.symbols} leave nothing to count in a text; use at most 64")
        check_sizes(self, tokens=self.length)
        check_num_examples(self, float(self.symbols) ** min(self.length, 64), "use a longer text")

    @property
    def chance(self) -> Mapping[str, float]:
        """All symbols alike likely."""
        return {"accuracy": 1 / self.symbols, "nats": log(self.symbols), "excess": self.lines["uniform"]}

    @property
    def lines(self) -> Mapping[str, float]:
        """The excess of simple guessers on the first 512 examples of validation: "uniform", "unigram" and "bigram".

        >>> {name: round(excess, 2) for name, excess in MarkovChains().lines.items()}
        {'uniform': 0.22, 'unigram': 0.16, 'bigram': 0.0}
        """
        x = self._examples_of_split(np.arange(NUM_BASELINE_EXAMPLES), "valid")["x"][:, :-1]
        best = predict_by_bigrams(x, self.symbols)
        told = {
            "uniform": np.full_like(best, 1 / self.symbols),
            "unigram": predict_by_unigrams(x, self.symbols),
            "bigram": best,
        }
        return {name: float((best * np.log(best / guess)).sum(-1).mean()) for name, guess in told.items()}

    def model(self) -> ModelSpec:
        """Two layers: one that tells every token what stood before it, one that counts."""
        return make_small_decoder(self.name, self.symbols + 1, ModelShape(width=64, heads=4, layers=2, feed=128))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        # Between 0, sorted uniform numbers and 1 lie the probabilities of Dirichlet(1, ..., 1).
        edges = np.sort(random.uniform(self.symbols * (self.symbols - 1)).reshape(len(random), self.symbols, -1), -1)
        unit, rows = random.uniform(self.length), np.arange(len(random))
        x = np.empty((len(random), self.length + 1), np.int64)
        x[:, 0] = random.integers(self.symbols, 1)[:, 0]
        for t in range(self.length):
            x[:, t + 1] = (edges[rows, x[:, t]] < unit[:, t, None]).sum(-1)
        return {"content": x[:, :-1], "x": x}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        """`gold` holds the bigram's guess behind each symbol, [length, symbols]."""
        best = torch.from_numpy(predict_by_bigrams(examples["x"][:, :-1], self.symbols))
        x, labels = examples["x"].copy(), examples["x"].copy()
        x[:, 1:], x[:, 0], labels[:, 0] = x[:, :-1].copy(), self.symbols, IGNORE_INDEX
        return Batch(torch.from_numpy(x), torch.from_numpy(labels), gold=list(best.unbind()))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy, nats, and nats in excess of the bigram, these also by how much has been read."""
        right, asked = find_correct(logits, batch.labels)
        guess = logits.double().log_softmax(-1)
        said = guess.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
        best = torch.stack(list(batch.gold)).to(guess.device)
        excess = torch.zeros_like(said)
        excess[:, 1:] = (best * (best.log() - guess[:, 1:, : self.symbols])).sum(-1)
        read = torch.arange(asked.shape[1], device=asked.device).expand(asked.shape)
        told = dict(sum_by_slice("accuracy", right, asked, {})) | dict(sum_by_slice("nats", -said, asked, {}))
        return told | dict(sum_by_slice("excess", excess, asked, slice_by_power_of_two("t", read)))

    def text(self, ids: list[int]) -> str:
        """Symbols by number, what begins a text as |."""
        return " ".join("|" if one == self.symbols else str(one) for one in ids)


def predict_by_bigrams(x: Ints, symbols: int) -> np.ndarray:
    """What comes after each place of x [rows, length], as whoever knows how it was made must guess: Bayes' rule."""
    rows = np.arange(len(x))
    counts = np.ones((len(x), symbols, symbols))
    out = np.empty((*x.shape, symbols))
    for t in range(x.shape[1]):
        if t:
            counts[rows, x[:, t - 1], x[:, t]] += 1
        out[:, t] = counts[rows, x[:, t]]
    return out / out.sum(-1, keepdims=True)


def predict_by_unigrams(x: Ints, symbols: int) -> np.ndarray:
    """The same of whoever counts symbols alone.

    >>> predict_by_unigrams(np.array([[0, 1]]), 2)[0].round(3).tolist()
    [[0.667, 0.333], [0.5, 0.5]]
    """
    counts = 1.0 + (x[..., None] == np.arange(symbols)).cumsum(1)
    return counts / counts.sum(-1, keepdims=True)

"""The task "recall": multi-query associative recall (MQAR)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.pattern_base import check_whole_number
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec
from ..ops.counter_rng import RandomStreams
from .synthetic_task import (
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    check_sizes,
    find_correct,
    make_small_decoder,
    parse_sizes,
    slice_by_value,
    sum_by_slice,
)
from .task import IGNORE_INDEX, Batch, MetricSums

FILLERS = ("random", "zero")


class RecallAnnotation(NamedTuple):
    """Annotation of an example: number of pairs, length, and links (index of the value, index of the query)."""

    pairs: int
    length: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class AssociativeRecall(SyntheticTask):
    """Key-value pairs, then each key again as a query; the label of a query is its value (MQAR, 2312.04927).

    A row begins with D distinct keys from 1 .. V/2 - 1 and D distinct values from V/2 .. V - 1 as k v k v ...,
    repeated `passes` times. The rest of the row is divided into slots of two tokens; D of them are sampled without
    replacement with p(i) ~ i^(power - 1), i = 1, 2, ..., and each begins with one of the keys. All other tokens are
    random (filler="random") or 0 (filler="zero"). V is `vocabulary` and D is `pairs`. `length` and `pairs` may be
    tuples; each example then draws one setting (length[n], pairs[n]).

    >>> batch = AssociativeRecall(vocabulary=16, length=16, pairs=3, filler="zero").batch(0, 1)
    >>> batch.x[0].tolist()
    [5, 15, 3, 12, 7, 10, 5, 0, 0, 0, 3, 0, 0, 0, 7, 0]
    >>> batch.gold[0].links
    ((1, 6), (3, 10), (5, 14))
    """

    name: ClassVar[str] = "recall"
    vocabulary: int = 1024
    length: int | tuple[int, ...] = 64
    pairs: int | tuple[int, ...] = (4, 8, 16)
    passes: int = 1
    power: float = 0.01
    filler: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("passes", self.passes, 1)
        check_whole_number("vocabulary", self.vocabulary, 4)
        if not self.power > 0:
            raise SpecError(f"power={self.power!r} must be above 0; use for example power=0.01")
        if self.filler not in FILLERS:
            raise SpecError(f"filler={self.filler!r} is unknown; {suggest(self.filler, FILLERS)}")
        for length, pairs in self.settings:
            self._check_setting(length, pairs)
        check_sizes(self, tokens=max(length for length, _ in self.settings), symbols=self.vocabulary)
        num_keys, num_values = self.vocabulary // 2 - 1, self.vocabulary - self.vocabulary // 2
        min_pairs = min(pairs for _, pairs in self.settings)
        num_examples = np.prod([(num_keys - n) * (num_values - n) for n in range(min_pairs)], dtype=float)
        check_num_examples(self, float(num_examples), "use more pairs")

    def _check_setting(self, length: int, pairs: int) -> None:
        if length % 2:
            raise SpecError(f"length={length} must be even, for key-value pairs; use length={length + 1}")
        if (required := 2 * pairs * (self.passes + 1)) > length:
            max_pairs = length // (2 * (self.passes + 1))
            fact = f"pairs={pairs} with passes={self.passes} need {required} tokens, but length={length}"
            raise SpecError(f"{fact}; use pairs={max_pairs} or less, or length={required}")
        if pairs > (num_keys := self.vocabulary // 2 - 1):
            raise SpecError(
                f"vocabulary={self.vocabulary} has {num_keys} keys, too few for pairs={pairs}; "
                f"use vocabulary={2 * pairs + 2} or more"
            )

    @property
    def settings(self) -> tuple[tuple[int, int], ...]:
        """Each combination (length, pairs) that occurs."""
        lengths, pairs = parse_sizes("length", self.length, 4), parse_sizes("pairs", self.pairs, 1)
        count = max(len(lengths), len(pairs))
        if len(lengths) not in (1, count) or len(pairs) not in (1, count):
            raise SpecError(
                f"length= has {len(lengths)} values, pairs= has {len(pairs)}; give equally many, or a single one"
            )
        return tuple((lengths[n % len(lengths)], pairs[n % len(pairs)]) for n in range(count))

    @property
    def chance(self) -> Mapping[str, float]:
        """Accuracy of guessing any value."""
        return {"accuracy": 1 / (self.vocabulary - self.vocabulary // 2)}

    def model(self) -> ModelSpec:
        """Two attention layers without feed-forwards: one joins keys with their values, one looks them up."""
        return make_small_decoder(self.name, self.vocabulary, ModelShape(width=64, heads=4, layers=2))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        length, pairs = np.asarray(self.settings)[random.integers(len(self.settings), 1)[:, 0]].T
        max_pairs = max(pairs for _, pairs in self.settings)
        max_length = max(length for length, _ in self.settings)
        half, rows = self.vocabulary // 2, np.arange(len(random))
        has_pair = np.arange(max_pairs) < pairs[:, None]
        keys = random.distinct(half - 1, max_pairs) + 1
        values = random.distinct(self.vocabulary - half, max_pairs) + half
        slot = self._draw_slots(random, length, pairs, max_pairs)
        queries = 2 * self.passes * pairs[:, None] + 2 * slot
        if self.filler == "random":
            x = random.integers(self.vocabulary, max_length)
        else:
            x = np.zeros((len(random), max_length), np.int64)
        row, pair = np.nonzero(has_pair)
        for n in range(self.passes):
            at = 2 * (n * pairs[row] + pair)
            x[row, at], x[row, at + 1] = keys[row, pair], values[row, pair]
        x[row, queries[row, pair]] = keys[row, pair]
        x[np.arange(max_length) >= length[rows, None]] = -1
        labels = np.full_like(x, IGNORE_INDEX)
        labels[row, queries[row, pair]] = values[row, pair]
        return {"content": x, "x": x, "labels": labels, "queries": queries, "pairs": pairs, "length": length}

    def _draw_slots(self, random: RandomStreams, length: np.ndarray, pairs: np.ndarray, max_pairs: int) -> np.ndarray:
        """Sample slots without replacement: draw exponential arrival times of rate p(i) and take the earliest."""
        num_slots = length // 2 - self.passes * pairs
        slot = np.arange(1, max(length // 2 - self.passes * pairs for length, pairs in self.settings) + 1)
        arrival = -np.log(random.uniform(len(slot))) / slot ** (self.power - 1)
        arrival[slot > num_slots[:, None]] = np.inf
        return arrival.argsort(1, kind="stable")[:, :max_pairs]

    def to_batch(self, examples: ExampleArrays) -> Batch:
        length = examples["length"]
        x, labels = (
            torch.from_numpy(examples["x"][:, : length.max()]),
            torch.from_numpy(examples["labels"][:, : length.max()]),
        )
        tokens = None if (length == length[0]).all() else SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        gold = [
            RecallAnnotation(count, end, tuple((2 * n + 1, query) for n, query in enumerate(queries[:count])))
            for count, end, queries in zip(
                examples["pairs"].tolist(), length.tolist(), examples["queries"].tolist(), strict=True
            )
        ]
        return Batch(x.clamp(min=0), labels, tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy overall, for each number of pairs D, and for each length s."""
        correct, has_label = find_correct(logits, batch.labels)
        by_pairs = slice_by_value("D", [example.pairs for example in batch.gold], has_label)
        by_length = slice_by_value("s", [example.length for example in batch.gold], has_label)
        return sum_by_slice("accuracy", correct, has_label, by_pairs | by_length)

"""recall: which value went with this key? Multi-query associative recall."""

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
    """What is known of an example: how many pairs, how long, and links (where the value stands, where it is asked)."""

    pairs: int
    length: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class AssociativeRecall(SyntheticTask):
    """Keys with their values, then some of the keys again: at each, its value is wanted (MQAR, 2312.04927).

    D different keys of 1 .. V/2 - 1 and D different values of V/2 .. V - 1 stand as k v k v ..., `passes` times over.
    Of the slots of two behind them, D are drawn without replacement by p(i) ~ i^(power - 1), i = 1, 2, ...; each key
    begins one of them. What is left is any token at all (filler="random") or 0. `length` and `pairs` may be tuples:
    an example takes one of the settings, read side by side.

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
            raise SpecError(f"power={self.power!r} is no exponent of a power law; use more than 0, such as 0.01")
        if self.filler not in FILLERS:
            raise SpecError(f"filler={self.filler!r} is unknown; {suggest(self.filler, FILLERS)}")
        for length, pairs in self.settings:
            self._check_setting(length, pairs)
        check_sizes(self, tokens=max(length for length, _ in self.settings), symbols=self.vocabulary)
        low, high = self.vocabulary // 2 - 1, self.vocabulary - self.vocabulary // 2
        fewest = min(pairs for _, pairs in self.settings)
        check_num_examples(
            self, float(np.prod([(low - n) * (high - n) for n in range(fewest)], dtype=float)), "use more pairs"
        )

    def _check_setting(self, length: int, pairs: int) -> None:
        if length % 2:
            raise SpecError(f"length={length} is odd, and keys and values come in twos; use {length + 1}")
        if (needed := 2 * pairs * (self.passes + 1)) > length:
            most = length // (2 * (self.passes + 1))
            fact = f"{pairs} pairs, said {self.passes} times and asked, need {needed} places, but length={length}"
            raise SpecError(f"{fact}; use pairs of at most {most} or length={needed}")
        if pairs > (known := self.vocabulary // 2 - 1):
            raise SpecError(
                f"{pairs} different keys cannot be drawn from {known}; use vocabulary={2 * pairs + 2} or more"
            )

    @property
    def settings(self) -> tuple[tuple[int, int], ...]:
        """Each (length, pairs) that occurs."""
        lengths, pairs = parse_sizes("length", self.length, 4), parse_sizes("pairs", self.pairs, 1)
        count = max(len(lengths), len(pairs))
        if len(lengths) not in (1, count) or len(pairs) not in (1, count):
            raise SpecError(
                f"{len(lengths)} lengths and {len(pairs)} numbers of pairs do not go together; give as many"
            )
        return tuple((lengths[n % len(lengths)], pairs[n % len(pairs)]) for n in range(count))

    @property
    def chance(self) -> Mapping[str, float]:
        """Any value, whatever was asked."""
        return {"accuracy": 1 / (self.vocabulary - self.vocabulary // 2)}

    def model(self) -> ModelSpec:
        """Two layers of attention alone: one to put keys beside their values, one to look them up."""
        return make_small_decoder(self.name, self.vocabulary, ModelShape(width=64, heads=4, layers=2))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        length, pairs = np.asarray(self.settings)[random.integers(len(self.settings), 1)[:, 0]].T
        most, half, rows = max(pairs for _, pairs in self.settings), self.vocabulary // 2, np.arange(len(random))
        known = np.arange(most) < pairs[:, None]
        keys = random.distinct(half - 1, most) + 1
        values = random.distinct(self.vocabulary - half, most) + half
        slot = self._draw_slots(random, length, pairs, most)
        asked = 2 * self.passes * pairs[:, None] + 2 * slot
        end = max(length for length, _ in self.settings)
        x = random.integers(self.vocabulary, end) if self.filler == "random" else np.zeros((len(random), end), np.int64)
        row, pair = np.nonzero(known)
        for turn in range(self.passes):
            at = 2 * (turn * pairs[row] + pair)
            x[row, at], x[row, at + 1] = keys[row, pair], values[row, pair]
        x[row, asked[row, pair]] = keys[row, pair]
        x[np.arange(end) >= length[rows, None]] = -1
        labels = np.full_like(x, IGNORE_INDEX)
        labels[row, asked[row, pair]] = values[row, pair]
        return {"content": x, "x": x, "labels": labels, "asked": asked, "pairs": pairs, "length": length}

    def _draw_slots(self, draws: RandomStreams, length: np.ndarray, pairs: np.ndarray, most: int) -> np.ndarray:
        """Slots in the order in which weighted drawing without replacement takes them, as a race of exponentials."""
        space = length // 2 - self.passes * pairs
        place = np.arange(1, max(length // 2 - self.passes * pairs for length, pairs in self.settings) + 1)
        arrival = -np.log(draws.uniform(len(place))) / place ** (self.power - 1)
        arrival[place > space[:, None]] = np.inf
        return arrival.argsort(1, kind="stable")[:, :most]

    def to_batch(self, examples: ExampleArrays) -> Batch:
        length = examples["length"]
        x, labels = (
            torch.from_numpy(examples["x"][:, : length.max()]),
            torch.from_numpy(examples["labels"][:, : length.max()]),
        )
        tokens = None if (length == length[0]).all() else SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        gold = [
            RecallAnnotation(count, end, tuple((2 * n + 1, place) for n, place in enumerate(places[:count])))
            for count, end, places in zip(
                examples["pairs"].tolist(), length.tolist(), examples["asked"].tolist(), strict=True
            )
        ]
        return Batch(x.clamp(min=0), labels, tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy, and that of each number of pairs D and length s."""
        right, asked = find_correct(logits, batch.labels)
        by_pairs = slice_by_value("D", [one.pairs for one in batch.gold], asked)
        by_length = slice_by_value("s", [one.length for one in batch.gold], asked)
        return sum_by_slice("accuracy", right, asked, by_pairs | by_length)

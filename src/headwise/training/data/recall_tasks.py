"""Synthetic tasks with answers in the context: "recall" (multi-query associative recall),
"lookup2" (two keys, in one or two hops) and "markov" (the next symbol of a chain, from the
transitions seen so far).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.counter_rng import Ints, RandomStreams
from ...kernels.devices import to_float64
from ...models.batch import IGNORE_INDEX, Batch
from ...util.errors import SpecError
from .synthetic_task import (
    MAX_SIZE,
    ExampleArrays,
    ModelShape,
    Ranges,
    SyntheticTask,
    parse_sizes,
    slice_by_position,
    slice_by_value,
    sum_by_slice,
)
from .task import MetricSums

# --- Associative recall ---------------------------------------------------------------------------

SLOT_POWER = 0.01  # of the distances between pairs and queries, as in Zoology
Links = tuple[tuple[int, int], ...]


class RecallAnnotation(NamedTuple):
    """Number of pairs and length of an example, and links (index of the value, of the query)."""

    pairs: int
    length: int
    links: Links


@dataclass(frozen=True, repr=False)
class AssociativeRecall(SyntheticTask):
    """Key-value pairs, then each key again as a query; the label of a query is its value (MQAR,
    2312.04927).

    A row begins with D distinct keys from 1 .. V/2 - 1 and D distinct values from V/2 .. V - 1 as k
    v k v .... The rest of the row is divided into slots of two tokens; D of them are sampled
    without replacement with p(i) ~ i^(0.01 - 1), i = 1, 2, ..., and each begins with one of the
    keys. All other tokens are random. V is `vocabulary` and D is `pairs`. `length` and `pairs` may
    be tuples; each example then draws one setting (length[n], pairs[n]).

    >>> batch = AssociativeRecall(vocabulary=16, length=16, pairs=3).batch(0, 1)
    >>> batch.x[0].tolist()[:7]
    [5, 15, 3, 12, 7, 10, 5]
    >>> batch.gold[0].links
    ((1, 6), (3, 10), (5, 14))
    """

    name: ClassVar[str] = "recall"
    shape = ModelShape(width=64, heads=4, layers=2)
    ranges: ClassVar[Ranges] = {"vocabulary": (4, MAX_SIZE)}
    vocabulary: int = 1024
    length: int | tuple[int, ...] = 64
    pairs: int | tuple[int, ...] = (4, 8, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        for length, pairs in self.settings:
            if length % 2:
                raise SpecError(
                    f"length={length} must be even, for key-value pairs; use length={length + 1}"
                )
            if 4 * pairs > length:
                raise SpecError(
                    f"pairs={pairs} need {4 * pairs} tokens, but length={length}; use "
                    f"pairs={length // 4} or less, or length={4 * pairs}"
                )
            if pairs > self._num_keys:
                raise SpecError(
                    f"vocabulary={self.vocabulary} has {self._num_keys} keys, too few for "
                    f"pairs={pairs}; use vocabulary={2 * pairs + 2} or more"
                )
        min_pairs = np.arange(min(pairs for _, pairs in self.settings), dtype=float)
        count = np.prod((self._num_keys - min_pairs) * (self.num_answers - min_pairs))
        self.check_extent(self._max_length, float(count), "use more pairs")

    @property
    def settings(self) -> tuple[tuple[int, int], ...]:
        """Each combination (length, pairs) that occurs."""
        lengths = parse_sizes("length", self.length, 4)
        pairs = parse_sizes("pairs", self.pairs, 1)
        count = max(len(lengths), len(pairs))
        if len(lengths) not in (1, count) or len(pairs) not in (1, count):
            raise SpecError(
                f"length= has {len(lengths)} values, pairs= has {len(pairs)}; give equally many, "
                "or a single one"
            )
        return tuple((lengths[n % len(lengths)], pairs[n % len(pairs)]) for n in range(count))

    @property
    def _num_keys(self) -> int:
        return self.vocabulary // 2 - 1

    @property
    def num_answers(self) -> int:
        return self.vocabulary - self.vocabulary // 2

    @property
    def num_ids(self) -> int:
        return self.vocabulary

    @property
    def _max_length(self) -> int:
        return max(length for length, _ in self.settings)

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        settings = np.asarray(self.settings)
        length, pairs = settings[random.integers(len(settings), 1)[:, 0]].T
        max_pairs = int(settings[:, 1].max())
        keys = random.distinct(self._num_keys, max_pairs) + 1
        values = random.distinct(self.num_answers, max_pairs) + self.vocabulary // 2
        # Slots without replacement: sorted by exponential arrival times of rate p(i).
        most = max(length // 2 - pairs for length, pairs in self.settings)
        slot = np.arange(1, most + 1)
        arrival = -np.log(random.uniform(most)) / slot ** (SLOT_POWER - 1)
        arrival[slot > (length // 2 - pairs)[:, None]] = np.inf
        slot = arrival.argsort(1, kind="stable")[:, :max_pairs]
        queries = 2 * pairs[:, None] + 2 * slot
        x = random.integers(self.vocabulary, self._max_length)
        row, pair = np.nonzero(np.arange(max_pairs) < pairs[:, None])
        x[row, 2 * pair] = keys[row, pair]
        x[row, 2 * pair + 1] = values[row, pair]
        x[row, queries[row, pair]] = keys[row, pair]
        x[np.arange(self._max_length) >= length[:, None]] = -1
        labels = np.full_like(x, IGNORE_INDEX)
        labels[row, queries[row, pair]] = values[row, pair]
        arrays = {"content": x, "x": x, "labels": labels, "queries": queries}
        return arrays | {"pairs": pairs, "length": length}

    def annotate(self, example: Mapping[str, np.ndarray]) -> RecallAnnotation:
        pairs = int(example["pairs"])
        queries = enumerate(example["queries"][:pairs].tolist())
        links = tuple((2 * n + 1, query) for n, query in queries)
        return RecallAnnotation(pairs, int(example["length"]), links)

    def slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Rows by number of pairs D, and by length s."""
        by_pairs = slice_by_value("D", [example.pairs for example in batch.gold])
        return by_pairs | slice_by_value("s", [example.length for example in batch.gold])


# --- Lookup by two keys ---------------------------------------------------------------------------

QUESTION_ID = 0
SAME_ID = 1  # tokens of direct and of composed questions
FIRST_ENTITY_ID = 2


class LookupAnnotation(NamedTuple):
    """Links (index of the value, index of its label) for each kind of question of an example.

    `hops` are the first hops of composed questions: (index of the attribute in the other question,
    index of the label).
    """

    direct: Links
    composed: Links
    hops: Links


@dataclass(frozen=True, repr=False)
class TwoKeyLookup(SyntheticTask):
    """Facts `entity attribute value` for every entity and attribute, in random order, then
    questions about them.

    The answer to a direct question `? entity attribute` is the value of that fact; it follows the
    question. A composed question `= A B` asks for the attribute of A that a direct question asked
    about B. Direct questions are about different entities, so a composed question has a single
    answer.

    >>> task = TwoKeyLookup(entities=3, attributes=2, values=9, direct=1, composed=1)
    >>> print(task.text(task.batch(0, 1).x[0].tolist()))
    E1 a1 3 E1 a0 1 E0 a1 7 E2 a1 1 E0 a0 1 E2 a0 5 ? E1 a1 3 = E2 E1 1
    """

    name: ClassVar[str] = "lookup2"
    shape = ModelShape(width=64, heads=4, layers=3, feed=128)
    ranges: ClassVar[Ranges] = {
        "entities": (2, MAX_SIZE),
        "attributes": (1, MAX_SIZE),
        "values": (2, MAX_SIZE),
        "direct": (1, MAX_SIZE),
        "composed": (0, MAX_SIZE),
    }
    entities: int = 6
    attributes: int = 4
    values: int = 16
    direct: int = 3
    composed: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.direct > self.entities:
            raise SpecError(
                f"direct={self.direct} is above entities={self.entities}, but each is asked once; "
                f"use direct={self.entities}"
            )
        length = 3 * self._num_facts + 4 * (self.direct + self.composed)
        count = float(self.values) ** min(self._num_facts, 64)
        self.check_extent(length, count, "use more entities, attributes or values")

    @property
    def _num_facts(self) -> int:
        return self.entities * self.attributes

    @property
    def _first_attribute(self) -> int:
        return FIRST_ENTITY_ID + self.entities

    @property
    def _first_value(self) -> int:
        return self._first_attribute + self.attributes

    @property
    def num_ids(self) -> int:
        return self._first_value + self.values

    @property
    def num_answers(self) -> int:
        return self.values

    @property
    def words(self) -> Sequence[str]:
        """Entities are E0, E1, ..., attributes a0, a1, ..., and values numbers."""
        entities = [f"E{n}" for n in range(self.entities)]
        attributes = [f"a{n}" for n in range(self.attributes)]
        return ["?", "=", *entities, *attributes, *map(str, range(self.values))]

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        order = random.distinct(self._num_facts, self._num_facts)
        value = random.integers(self.values, self._num_facts)
        asked_entity = random.distinct(self.entities, self.direct)
        asked_attribute = random.integers(self.attributes, self.direct)
        other = random.integers(self.direct, self.composed)  # the question a composed one refers to
        other_entity = np.take_along_axis(asked_entity, other, 1)
        composed_entity = random.integers(self.entities - 1, self.composed)
        composed_entity += composed_entity >= other_entity  # any entity but the other one
        other_attribute = np.take_along_axis(asked_attribute, other, 1)
        direct_fact = asked_entity * self.attributes + asked_attribute
        composed_fact = composed_entity * self.attributes + other_attribute

        def make_rows(entity: Ints, second: Ints, fact: Ints, question: int | None = None) -> Ints:
            """Ids of facts, or of questions with their answers; `fact` chooses the values."""
            columns = [
                entity + FIRST_ENTITY_ID,
                second + (FIRST_ENTITY_ID if question == SAME_ID else self._first_attribute),
                np.take_along_axis(value, fact, 1) + self._first_value,
            ]
            if question is not None:
                columns = [np.full_like(entity, question), *columns]
            return np.stack(columns, -1).reshape(len(entity), -1)

        facts = make_rows(*np.divmod(order, self.attributes), order)
        direct = make_rows(asked_entity, asked_attribute, direct_fact, QUESTION_ID)
        composed = make_rows(composed_entity, other_entity, composed_fact, SAME_ID)
        x = np.concatenate([facts, direct, composed], 1)
        value_index = 3 * order.argsort(1) + 2  # index of the value of each fact
        labels = np.full_like(x, IGNORE_INDEX)
        labels[:, self._answers_at] = x[:, self._answers_at + 1]
        return {
            "content": x,
            "x": x,
            "labels": labels,
            "direct": np.take_along_axis(value_index, direct_fact, 1),
            "composed": np.take_along_axis(value_index, composed_fact, 1),
            "hops": 3 * self._num_facts + 4 * other + 2,
        }

    @property
    def _answers_at(self) -> Ints:
        """Indices of the labels, direct questions first."""
        return 3 * self._num_facts + 4 * np.arange(self.direct + self.composed) + 2

    def annotate(self, example: Mapping[str, np.ndarray]) -> LookupAnnotation:
        direct, composed = np.split(self._answers_at, [self.direct])
        targets = {"direct": direct, "composed": composed, "hops": composed}
        links: dict[str, Links] = {}
        for kind, target in targets.items():
            links[kind] = tuple(zip(example[kind].tolist(), target.tolist(), strict=True))
        return LookupAnnotation(**links)

    def slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Direct and composed questions."""
        positions = torch.arange(batch.labels.shape[1])[None]
        is_direct = positions <= int(self._answers_at[self.direct - 1])
        return {"query=direct": is_direct, "query=composed": ~is_direct}


# --- Markov chains --------------------------------------------------------------------------------

NUM_BASELINE_EXAMPLES = 512  # validation examples that the chance level is measured on


@dataclass(frozen=True, repr=False)
class MarkovChains(SyntheticTask):
    """Predict the next symbol of a Markov chain; each has its own transition matrix (2402.11004).

    Each row of the matrix is drawn from Dirichlet(1, ..., 1). The Bayes-optimal prediction is the
    smoothed bigram: b follows a with probability (n(a, b) + 1) / (n(a) + symbols), where n counts
    the sequence so far. The metric `excess` is the KL divergence of the model's prediction from it,
    in nats. Every sequence of `length` symbols begins with a start token, the last id: without it
    and without absolute positions, attention cannot distinguish a from a a.

    >>> predict_by_bigrams(np.array([[0, 1, 0, 1, 0]]), 2)[0].round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5], [0.333, 0.667], [0.667, 0.333], [0.25, 0.75]]
    """

    name: ClassVar[str] = "markov"
    ranges: ClassVar[Ranges] = {"length": (2, MAX_SIZE), "symbols": (2, 64)}
    symbols: int = 4
    length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        count = float(self.symbols) ** min(self.length, 64)
        self.check_extent(self.length, count, "use a larger length=")

    @property
    def num_ids(self) -> int:
        return self.symbols + 1

    @property
    def words(self) -> Sequence[str]:
        """Symbols are numbers, the start token is "|"."""
        return [*map(str, range(self.symbols)), "|"]

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of the uniform distribution over symbols; the excess is that on the first 512
        validation examples.
        """
        examples = self._examples_of_split(np.arange(NUM_BASELINE_EXAMPLES), "valid")
        optimal = predict_by_bigrams(examples["content"], self.symbols)
        excess = (optimal * np.log(optimal / (1 / self.symbols))).sum(-1).mean()
        return {
            "accuracy": 1 / self.symbols,
            "nats": log(self.symbols),
            "excess": float(excess),
        }

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        # The gaps between 0, sorted uniform numbers and 1 are distributed as Dirichlet(1, ..., 1).
        uniform = random.uniform(self.symbols * (self.symbols - 1))
        edges = np.sort(uniform.reshape(len(random), self.symbols, -1), -1)
        unit = random.uniform(self.length)
        rows = np.arange(len(random))
        x = np.empty((len(random), self.length + 1), np.int64)
        x[:, 0] = random.integers(self.symbols, 1)[:, 0]
        for t in range(self.length):
            x[:, t + 1] = (edges[rows, x[:, t]] < unit[:, t, None]).sum(-1)
        labels = x.copy()
        labels[:, 0] = IGNORE_INDEX
        start = np.full((len(x), 1), self.symbols)
        content = x[:, :-1]
        return {"content": content, "x": np.concatenate([start, content], 1), "labels": labels}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        """Return the batch of these examples; `gold` holds the bigram prediction after each symbol,
        [length, symbols].
        """
        optimal = torch.from_numpy(predict_by_bigrams(examples["content"], self.symbols))
        return replace(super().to_batch(examples), gold=list(optimal.unbind()))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy, nats per symbol, and excess over the bigram, the latter also by position."""
        has_label = batch.labels != IGNORE_INDEX
        log_probs = to_float64(logits).log_softmax(-1)
        label_log_probs = log_probs.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
        optimal = torch.stack(list(batch.gold)).to(log_probs.device)
        excess = torch.zeros_like(label_log_probs)
        excess[:, 1:] = (optimal * (optimal.log() - log_probs[:, 1:, : self.symbols])).sum(-1)
        by_position = slice_by_position(has_label.shape[1])
        return (
            dict(super().measure(logits, batch))
            | sum_by_slice("nats", -label_log_probs, has_label)
            | sum_by_slice("excess", excess, has_label, by_position)
        )


def predict_by_bigrams(x: Ints, symbols: int) -> np.ndarray:
    """Bayes-optimal distribution of the next symbol after each position of `x` [rows, length]: the
    smoothed bigram.
    """
    rows = np.arange(len(x))
    counts = np.ones((len(x), symbols, symbols))
    out = np.empty((*x.shape, symbols))
    for t in range(x.shape[1]):
        if t:
            counts[rows, x[:, t - 1], x[:, t]] += 1
        out[:, t] = counts[rows, x[:, t]]
    return out / out.sum(-1, keepdims=True)

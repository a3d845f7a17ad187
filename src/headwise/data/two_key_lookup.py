"""The task "lookup2": look up values by two keys, an entity and an attribute, directly or in two hops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
    sum_by_slice,
)
from .task import IGNORE_INDEX, Batch, MetricSums

QUESTION_ID, SAME_ID, FIRST_ENTITY_ID = 0, 1, 2  # tokens of direct and composed questions; id of the first entity


class LookupAnnotation(NamedTuple):
    """Annotation of an example: links (index of the value, index of its label) for each kind of question.

    `hops` are the first hops of composed questions: (index of the attribute in the other question, index of the label).
    """

    direct: tuple[tuple[int, int], ...]
    composed: tuple[tuple[int, int], ...]
    hops: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class TwoKeyLookup(SyntheticTask):
    """Facts `entity attribute value` for every entity and attribute, in random order, then questions about them.

    The answer to a direct question `? entity attribute` is the value of that fact; it follows the question. A composed
    question `= A B` asks for the attribute of A that a direct question asked about B. Direct questions are about
    different entities, so a composed question has a single answer.

    >>> task = TwoKeyLookup(entities=3, attributes=2, values=9, direct=1, composed=1)
    >>> print(task.text(task.batch(0, 1).x[0].tolist()))
    E1 a1 3 E1 a0 1 E0 a1 7 E2 a1 1 E0 a0 1 E2 a0 5 ? E1 a1 3 = E2 E1 1
    """

    name: ClassVar[str] = "lookup2"
    entities: int = 6
    attributes: int = 4
    values: int = 16
    direct: int = 3
    composed: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, minimum in {"entities": 2, "attributes": 1, "values": 2, "direct": 1, "composed": 0}.items():
            check_whole_number(option, getattr(self, option), minimum)
        if self.direct > self.entities:
            fact = f"direct={self.direct} questions need as many different entities, but entities={self.entities}"
            raise SpecError(f"{fact}; use direct={self.entities}")
        check_sizes(self, tokens=self._length, symbols=self.vocabulary)
        check_num_examples(
            self, float(self.values) ** min(self._num_facts, 64), "use more entities, attributes or values"
        )

    @property
    def _num_facts(self) -> int:
        return self.entities * self.attributes

    @property
    def _length(self) -> int:
        return 3 * self._num_facts + 4 * (self.direct + self.composed)

    @property
    def vocabulary(self) -> int:
        """Number of ids: question tokens, entities, attributes and values, in this order."""
        return FIRST_ENTITY_ID + self.entities + self.attributes + self.values

    @property
    def chance(self) -> Mapping[str, float]:
        """Accuracy of guessing any value."""
        return {"accuracy": 1 / self.values}

    def model(self) -> ModelSpec:
        """A decoder of three layers: a composed question needs the result of another look-up first."""
        return make_small_decoder(self.name, self.vocabulary, ModelShape(width=64, heads=4, layers=3, feed=128))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        order = random.distinct(self._num_facts, self._num_facts)
        value = random.integers(self.values, self._num_facts)
        asked_entity = random.distinct(self.entities, self.direct)
        asked_attribute = random.integers(self.attributes, self.direct)
        other = random.integers(self.direct, self.composed)  # the direct question that a composed one refers to
        other_entity = np.take_along_axis(asked_entity, other, 1)
        composed_entity = random.integers(self.entities - 1, self.composed)
        composed_entity += composed_entity >= other_entity  # any entity but the other one
        entity, attribute = np.divmod(order, self.attributes)
        facts = self._make_rows(entity, attribute, np.take_along_axis(value, order, 1))
        value_index = 3 * order.argsort(1) + 2  # index of the value of each fact
        direct_fact = asked_entity * self.attributes + asked_attribute
        direct = self._make_rows(asked_entity, asked_attribute, np.take_along_axis(value, direct_fact, 1), QUESTION_ID)
        composed_fact = composed_entity * self.attributes + np.take_along_axis(asked_attribute, other, 1)
        composed = self._make_rows(composed_entity, other_entity, np.take_along_axis(value, composed_fact, 1), SAME_ID)
        x = np.concatenate([facts, direct, composed], 1)
        return {
            "content": x,
            "x": x,
            "direct": np.take_along_axis(value_index, direct_fact, 1),
            "composed": np.take_along_axis(value_index, composed_fact, 1),
            "hops": 3 * self._num_facts + 4 * other + 2,
        }

    def _make_rows(self, entity: Ints, second: Ints, value: Ints, question_id: int | None = None) -> Ints:
        """Ids [examples, tokens] of facts, or of questions with their answers."""
        first_attribute_id = FIRST_ENTITY_ID + self.entities
        columns = [
            entity + FIRST_ENTITY_ID,
            second + (FIRST_ENTITY_ID if question_id == SAME_ID else first_attribute_id),
            value + first_attribute_id + self.attributes,
        ]
        columns = columns if question_id is None else [np.full_like(entity, question_id), *columns]
        return np.stack(columns, -1).reshape(len(entity), -1)

    def to_batch(self, examples: ExampleArrays) -> Batch:
        x = examples["x"]
        positions = self._answer_positions()
        labels = np.full_like(x, IGNORE_INDEX)
        labels[:, positions] = x[:, positions + 1]
        direct, composed = positions[: self.direct].tolist(), positions[self.direct :].tolist()
        sources = [examples[name].tolist() for name in ("direct", "composed", "hops")]
        gold = []
        for row in zip(*sources, strict=True):
            links = [
                tuple(zip(source, target, strict=True))
                for source, target in zip(row, (direct, composed, composed), strict=True)
            ]
            gold.append(LookupAnnotation(*links))
        return Batch(torch.from_numpy(x), torch.from_numpy(labels), gold=gold)

    def _answer_positions(self) -> Ints:
        """Indices of the labels, direct questions first."""
        return 3 * self._num_facts + 4 * np.arange(self.direct + self.composed) + 2

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy overall, and of direct and composed questions."""
        correct, has_label = find_correct(logits, batch.labels)
        last_direct = int(self._answer_positions()[self.direct - 1])
        is_direct = torch.arange(has_label.shape[1], device=has_label.device) <= last_direct
        return sum_by_slice("accuracy", correct, has_label, {"query=direct": is_direct, "query=composed": ~is_direct})

    def text(self, ids: list[int]) -> str:
        """Ids as words: entities E0, E1, ..., attributes a0, a1, ..., and values as numbers."""
        return " ".join(map(self._word, ids))

    def _word(self, token_id: int) -> str:
        if token_id < FIRST_ENTITY_ID:
            return "?" if token_id == QUESTION_ID else "="
        first_attribute_id = FIRST_ENTITY_ID + self.entities
        first_value_id = first_attribute_id + self.attributes
        if token_id < first_attribute_id:
            return f"E{token_id - FIRST_ENTITY_ID}"
        if token_id < first_value_id:
            return f"a{token_id - first_attribute_id}"
        return str(token_id - first_value_id)

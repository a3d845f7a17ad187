"""lookup2: a value found by two things at once, an entity and an attribute; and by an attribute that must be found."""

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

QUESTION_ID, SAME_ID, FIRST_ENTITY_ID = 0, 1, 2  # the marks of the two questions, and the id of the first entity


class LookupAnnotation(NamedTuple):
    """What is known of an example: links (where the value stands, where it is asked) of each kind of question.

    `hops` are the links that a composed question must follow first: (where the attribute stands, where it is asked).
    """

    direct: tuple[tuple[int, int], ...]
    composed: tuple[tuple[int, int], ...]
    hops: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class TwoKeyLookup(SyntheticTask):
    """Facts `entity attribute value` of every entity and attribute, in random order, then questions.

    `? entity attribute` wants the fact's value, which follows. `= entity other` wants the entity's value of the
    attribute that was asked of the other one: "the same of A as of B". Direct questions are about different entities,
    so that a composed one has a single answer.

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
        for knob, least in {"entities": 2, "attributes": 1, "values": 2, "direct": 1, "composed": 0}.items():
            check_whole_number(knob, getattr(self, knob), least)
        if self.direct > self.entities:
            fact = f"{self.direct} direct questions about different ones of {self.entities} entities cannot be asked"
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
        """Marks, entities, attributes, values, in this order."""
        return FIRST_ENTITY_ID + self.entities + self.attributes + self.values

    @property
    def chance(self) -> Mapping[str, float]:
        """Any value."""
        return {"accuracy": 1 / self.values}

    def model(self) -> ModelSpec:
        """Three layers: a composed question needs the answer of another look-up first."""
        return make_small_decoder(self.name, self.vocabulary, ModelShape(width=64, heads=4, layers=3, feed=128))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        order = random.distinct(self._num_facts, self._num_facts)
        value = random.integers(self.values, self._num_facts)
        asked = random.distinct(self.entities, self.direct)
        wanted = random.integers(self.attributes, self.direct)
        other = random.integers(self.direct, self.composed)
        one = random.integers(self.entities - 1, self.composed)
        one += one >= np.take_along_axis(asked, other, 1)  # any entity but the other
        entity, attribute = np.divmod(order, self.attributes)
        facts = self._make_rows(entity, attribute, np.take_along_axis(value, order, 1))
        stands = 3 * order.argsort(1) + 2  # where the value of each fact stands
        fact = asked * self.attributes + wanted
        direct = self._make_rows(asked, wanted, np.take_along_axis(value, fact, 1), QUESTION_ID)
        hopped = one * self.attributes + np.take_along_axis(wanted, other, 1)
        composed = self._make_rows(
            one, np.take_along_axis(asked, other, 1), np.take_along_axis(value, hopped, 1), SAME_ID
        )
        return {
            "content": (x := np.concatenate([facts, direct, composed], 1)),
            "x": x,
            "direct": np.take_along_axis(stands, fact, 1),
            "composed": np.take_along_axis(stands, hopped, 1),
            "hops": 3 * self._num_facts + 4 * other + 2,
        }

    def _make_rows(self, entity: Ints, second: Ints, value: Ints, mark: int | None = None) -> Ints:
        """Facts, or questions with their answers, side by side as ids [examples, tokens]."""
        attributes = FIRST_ENTITY_ID + self.entities
        said = [
            entity + FIRST_ENTITY_ID,
            second + (FIRST_ENTITY_ID if mark == SAME_ID else attributes),
            value + attributes + self.attributes,
        ]
        said = said if mark is None else [np.full_like(entity, mark), *said]
        return np.stack(said, -1).reshape(len(entity), -1)

    def to_batch(self, examples: ExampleArrays) -> Batch:
        x = examples["x"]
        places = self._answer_positions()
        labels = np.full_like(x, IGNORE_INDEX)
        labels[:, places] = x[:, places + 1]
        known = [examples[name].tolist() for name in ("direct", "composed", "hops")]
        direct, composed = places[: self.direct].tolist(), places[self.direct :].tolist()
        gold = [
            LookupAnnotation(
                *(
                    tuple(zip(at, wants, strict=True))
                    for at, wants in zip(row, (direct, composed, composed), strict=True)
                )
            )
            for row in zip(*known, strict=True)
        ]
        return Batch(torch.from_numpy(x), torch.from_numpy(labels), gold=gold)

    def _answer_positions(self) -> Ints:
        """Where answers are wanted, direct questions first."""
        return 3 * self._num_facts + 4 * np.arange(self.direct + self.composed) + 2

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy, of direct and of composed questions too."""
        right, asked = find_correct(logits, batch.labels)
        first = int(self._answer_positions()[self.direct - 1])
        before = torch.arange(asked.shape[1], device=asked.device) <= first
        return sum_by_slice("accuracy", right, asked, {"query=direct": before, "query=composed": ~before})

    def text(self, ids: list[int]) -> str:
        """E0 for an entity, a0 for an attribute, values as numbers."""
        attributes, values = FIRST_ENTITY_ID + self.entities, FIRST_ENTITY_ID + self.entities + self.attributes
        marks = {QUESTION_ID: "?", SAME_ID: "="}
        return " ".join(
            marks.get(one)
            or (
                f"E{one - FIRST_ENTITY_ID}"
                if one < attributes
                else f"a{one - attributes}"
                if one < values
                else str(one - values)
            )
            for one in ids
        )

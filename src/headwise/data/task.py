"""What a task is: batches that follow from a seed and an index, a measure, and what guessing would score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, ProcessorSpec

IGNORE_INDEX = -100  # the label of a place where nothing is asked
SPLITS = ("train", "valid", "test")

# A sum and how many things were summed, by the name of what was measured: "accuracy": (310.0, 320).
MetricSums = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples side by side.

    `x` is what the model reads: ids [B, T], pixels [B, C, H, W] or frames [B, T, F]. `labels` are the ids wanted at
    each place, [B, T], or one for each example, [B]; IGNORED where nothing is asked. `source` is what an encoder
    reads before it. `gold` holds one entry for each example: whatever the task knows of its structure, such as links
    between source and target tokens.
    """

    x: Tensor
    labels: Tensor
    tokens: SequenceInfo | None = None
    source: Tensor | None = None
    source_tokens: SequenceInfo | None = None
    gold: Sequence[Any] = ()

    def to(self, device: torch.device | str) -> Self:
        """The same batch over there."""
        moved = {name: _to_device(value, device) for name, value in vars(self).items()}
        return type(self)(**moved)

    def rows(self, rows: slice) -> Self:
        """Some of its examples.

        >>> ids = torch.arange(6).view(3, 2)
        >>> Batch(ids, ids, SequenceInfo.from_batch(ids, lengths=[2, 1, 2]), gold="abc").rows(slice(1, 2)).gold
        'b'
        """
        return type(self)(**{name: _select_rows(value, rows) for name, value in vars(self).items()})


def _select_rows(value: Any, own: slice) -> Any:
    if isinstance(value, SequenceInfo):
        if value.segment.shape[0] == 1:  # all rows are alike
            return value
        return value.rows(own)
    return None if value is None else value[own]


def _to_device(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, (Tensor, SequenceInfo)) else value


@dataclass(frozen=True)
class Task(ABC):
    """Examples without end, or as many as a data set has.

    Fields of a task are its difficulty, so that two tasks that print alike are alike. `batch` is a pure function of
    its arguments and the fields: no state is kept between calls, so that training resumes by counting. The splits
    never share an example.
    """

    name: ClassVar[str]
    seed: int = field(default=0, kw_only=True)

    @abstractmethod
    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        """Batch `index` of this many examples; counts past the end of finite data begin again, in another order."""

    @abstractmethod
    def model(self) -> ModelSpec:
        """A model of a size that suits this task, its tables as large as the task needs."""

    @property
    @abstractmethod
    def chance(self) -> Mapping[str, float]:
        """What each measure reads when nothing was learnt, by the name that `measure` or `score` gives it."""

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """What is right where labels are given: [B, T, vocabulary] or [B, classes] against `batch.labels`."""
        return measure_accuracy(logits, batch)

    @property
    def answers(self) -> int:
        """How many tokens to generate before answers are scored; 0 when nothing is generated."""
        return 0

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """What generation starts from: ids [B, P], padded on the left where rows differ, and where they stand."""
        raise NotImplementedError(f"{self.name} generates nothing")

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """What is right in free answers, one row of new ids for each example, cut at the end token."""
        raise NotImplementedError(f"{self.name} generates nothing")

    @property
    def end(self) -> int | None:
        """The id that ends an answer."""
        return None

    @property
    def examples(self) -> int | None:
        """How many examples the train split has; None when there is no end of them."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out of the data, and why, a sentence each."""
        return ()

    def batches(self, size: int, split: str = "train") -> int | None:
        """How many batches of this size show a split once; None when there is no end of it."""
        return None

    @property
    def tokenizer(self) -> str | None:
        """The document of a `tokenizers.Tokenizer` that gives this task's ids; None where there is no text."""
        return None

    @property
    def usage(self) -> ProcessorSpec:
        """How a model that has learnt this is spoken to and understood."""
        return ProcessorSpec(end=() if self.end is None else (self.end,), tokenizer=self.tokenizer)

    def text(self, ids: Sequence[int]) -> str:
        """Ids as a person reads them."""
        return " ".join(map(str, ids))


def measure_accuracy(logits: Tensor, batch: Batch) -> MetricSums:
    """How many labels are the likeliest, of those that are given."""
    asked = batch.labels != IGNORE_INDEX
    right = (logits.argmax(-1) == batch.labels) & asked
    return {"accuracy": (float(right.sum()), int(asked.sum()))}


def check_split(split: str) -> None:
    """Refuse a split that does not exist."""
    if split not in SPLITS:
        raise SpecError(f"split={split!r} is unknown; {suggest(split, SPLITS)}")

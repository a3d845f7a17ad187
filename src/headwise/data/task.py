"""The interface `Task`: batches computed from a seed and an index, metrics, and the score of random guessing."""

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

IGNORE_INDEX = -100  # the label of a position without a target
SPLITS = ("train", "valid", "test")

# For each metric the sum and the number of terms: {"accuracy": (310.0, 320)}.
MetricSums = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of examples.

    `x` is the input of the model: token ids [B, T], pixels [B, C, H, W] or frames [B, T, F]. `labels` are the target
    ids of every position, [B, T], or one class per example, [B]; positions without a target hold IGNORE_INDEX.
    `source` is the input of the encoder, if the model has one. `tokens` and `source_tokens` hold the positions and
    segment ids of `x` and `source`; None means that row t of the input is at position t and nothing is padding.
    `gold` has one entry per example with what the task knows about its structure, such as the links between source
    and target tokens.
    """

    x: Tensor
    labels: Tensor
    tokens: SequenceInfo | None = None
    source: Tensor | None = None
    source_tokens: SequenceInfo | None = None
    gold: Sequence[Any] = ()

    def to(self, device: torch.device | str) -> Self:
        """Copy of the batch on `device`; `gold` is not moved."""
        moved = {name: _to_device(value, device) for name, value in vars(self).items()}
        return type(self)(**moved)

    def rows(self, rows: slice) -> Self:
        """The batch of the examples that a slice selects.

        >>> ids = torch.arange(6).view(3, 2)
        >>> Batch(ids, ids, SequenceInfo.from_batch(ids, lengths=[2, 1, 2]), gold="abc").rows(slice(1, 2)).gold
        'b'
        """
        return type(self)(**{name: _select_rows(value, rows) for name, value in vars(self).items()})


def _select_rows(value: Any, rows: slice) -> Any:
    if isinstance(value, SequenceInfo):
        if value.segment.shape[0] == 1:  # one row that is shared by all examples
            return value
        return value.rows(rows)
    return None if value is None else value[rows]


def _to_device(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, (Tensor, SequenceInfo)) else value


@dataclass(frozen=True)
class Task(ABC):
    """Base class of all tasks: an endless stream of generated examples, or a finite dataset.

    The fields of a task are its options, so two tasks with the same `repr` are equal. `batch` is a pure function of
    its arguments and the fields. No state is kept between calls, so training can resume at any batch index. No example
    is in two splits.
    """

    name: ClassVar[str]
    seed: int = field(default=0, kw_only=True)

    @abstractmethod
    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        """Batch number `index` of `size` examples; finite data starts a new epoch, in another order, after its end."""

    @abstractmethod
    def model(self) -> ModelSpec:
        """Spec of a default model for this task, with embedding and output sizes that fit it."""

    @property
    @abstractmethod
    def chance(self) -> Mapping[str, float]:
        """Value of each metric for random guessing, with the metric names of `measure` and `score`."""

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Metrics of `logits`, [B, T, vocabulary] or [B, classes], where `batch.labels` has a target."""
        return measure_accuracy(logits, batch)

    @property
    def answers(self) -> int:
        """Maximum number of tokens to generate for `score`; 0 if the task does not use generation."""
        return 0

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """Prompts for generation: ids [B, P], left-padded if lengths differ, and their positions and segments."""
        raise NotImplementedError(f"the task {self.name!r} does not use generation")

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """Metrics of generated answers: one list of new ids per example, cut at the end token."""
        raise NotImplementedError(f"the task {self.name!r} does not use generation")

    @property
    def end(self) -> int | None:
        """Token id that ends an answer; None if there is none."""
        return None

    @property
    def examples(self) -> int | None:
        """Number of examples in the train split; None if examples are generated without end."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was left out of the data, and why."""
        return ()

    def batches(self, size: int, split: str = "train") -> int | None:
        """Number of batches of this size in one pass over a split; None if examples are generated without end."""
        return None

    @property
    def tokenizer(self) -> str | None:
        """JSON of the `tokenizers.Tokenizer` that produces this task's ids; None if the task has no text."""
        return None

    @property
    def usage(self) -> ProcessorSpec:
        """How to turn raw input into ids, and ids into output, for a model that was trained on this task."""
        return ProcessorSpec(end=() if self.end is None else (self.end,), tokenizer=self.tokenizer)

    def text(self, ids: Sequence[int]) -> str:
        """Human-readable form of a sequence of ids."""
        return " ".join(map(str, ids))


def measure_accuracy(logits: Tensor, batch: Batch) -> MetricSums:
    """Number of positions whose argmax is the label, and number of labels, ignored positions left out."""
    has_label = batch.labels != IGNORE_INDEX
    correct = (logits.argmax(-1) == batch.labels) & has_label
    return {"accuracy": (float(correct.sum()), int(has_label.sum()))}


def check_split(split: str) -> None:
    """Raise SpecError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise SpecError(f"split={split!r} is unknown; {suggest(split, SPLITS)}")

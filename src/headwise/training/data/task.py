"""The interface `Task`: batches from a seed and an index, metrics, chance; packed batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...attention.masking.sequence_info import SequenceInfo
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import ModelSpec, ProcessorSpec
from ...util.errors import SpecError, suggest

SPLITS = ("train", "valid", "test")
IndexArray = NDArray[np.int64]

# For each metric the sum and the number of terms: {"accuracy": (310.0, 320)}.
MetricSums = Mapping[str, tuple[float, int]]


@dataclass(frozen=True)
class Task(ABC):
    """Base class of all tasks: an endless stream of generated examples, or a finite dataset.

    The fields of a task are its options, so two tasks with the same `repr` are equal. `batch` is a
    pure function of its arguments and the fields. No state is kept between calls, so training can
    resume at any batch index. No example is in two splits.
    """

    name: ClassVar[str]
    seed: int = field(default=0, kw_only=True)

    @abstractmethod
    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        """Batch number `index` of `size` examples; finite data starts a new epoch, in another
        order, after its end.
        """

    @abstractmethod
    def model(self) -> ModelSpec:
        """Spec of a default model for this task, with embedding and output sizes that fit it."""

    @property
    @abstractmethod
    def chance(self) -> Mapping[str, float]:
        """Value of each metric for random guessing, with the metric names of
        `measure` and `score`.
        """

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Metrics of `logits`, [B, T, vocabulary] or [B, classes], where `batch.labels` has a
        target.
        """
        has_label = batch.labels != IGNORE_INDEX
        correct = (logits.argmax(-1) == batch.labels) & has_label
        return {"accuracy": (float(correct.sum()), int(has_label.sum()))}

    @property
    def answers(self) -> int:
        """Maximum number of tokens to generate for `score`; 0 if the task does
        not use generation.
        """
        return 0

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """Prompts for generation: ids [B, P], left-padded if lengths differ, and their positions
        and segments.
        """
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
        """Count batches of this size in one pass over a split; None if examples are generated
        without end.
        """
        return None

    @property
    def tokenizer(self) -> str | None:
        """JSON of the `tokenizers.Tokenizer` that produces this task's ids; None if the task has no
        text.
        """
        return None

    @property
    def usage(self) -> ProcessorSpec:
        """How to turn raw input into ids, and ids into output, for a model that was trained on this
        task.
        """
        return ProcessorSpec(eos=() if self.end is None else (self.end,), tokenizer=self.tokenizer)

    def text(self, ids: Sequence[int]) -> str:
        """Human-readable form of a sequence of ids."""
        return " ".join(map(str, ids))


def check_split(split: str) -> None:
    """Raise SpecError unless `split` is one of SPLITS."""
    if split not in SPLITS:
        raise SpecError(f"split={split!r} is unknown; {suggest(split, SPLITS)}")


# --- Packing a batch into one row -----------------------------------------------------------------


class UnpackableBatch(ValueError):
    """Raised by `pack_batch` for a batch that cannot be packed, with the reason."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A batch with all texts in one row of N tokens; `places` are their indices in the flattened
    [B, T] = `shape`.
    """

    batch: Batch
    places: Tensor
    shape: tuple[int, int]

    def unpack(self, outputs: Tensor) -> Tensor:
        """Outputs per packed token [1, N, ...] moved back to [B, T, ...], with zeros at padding."""
        rows = outputs.new_zeros(self.shape[0] * self.shape[1], *outputs.shape[2:])
        rows.index_copy_(0, self.places.to(outputs.device), outputs[0])
        return rows.unflatten(0, self.shape)


def pack_batch(batch: Batch) -> PackedBatch:
    """Pack all texts of a batch of ids into one row, in their order; text k of the source belongs
    to text k of `x`.

    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> labels = torch.tensor([[6, 5, IGNORE_INDEX], [8, 9, 7]])
    >>> packed = pack_batch(Batch(ids, labels, SequenceInfo.from_batch(ids, lengths=[2, 3])))
    >>> packed.batch.x.tolist(), packed.batch.tokens.lengths
    ([[5, 6, 7, 8, 9]], ((2, 3),))
    >>> packed.unpack(packed.batch.x).tolist()
    [[5, 6, 0], [7, 8, 9]]
    """
    if batch.labels.shape != batch.x.shape:
        raise UnpackableBatch("the labels are per example, not per token")
    sides = [_PackedSide.from_ids(batch.x, batch.tokens)]
    if batch.source is not None:
        sides.append(_PackedSide.from_ids(batch.source, batch.source_tokens))
    texts = np.unique(np.concatenate([side.texts for side in sides]), axis=0)
    places = torch.from_numpy(sides[0].places)
    labels = batch.labels.flatten()[places]
    if int((labels != IGNORE_INDEX).sum()) != int((batch.labels != IGNORE_INDEX).sum()):
        raise UnpackableBatch("there are labels at padding positions")
    x, tokens = sides[0].flatten(texts)
    row = replace(batch, x=x, labels=labels[None], tokens=tokens)
    if len(sides) > 1:
        source, source_tokens = sides[1].flatten(texts)
        row = replace(row, source=source, source_tokens=source_tokens)
    return PackedBatch(row, places, (batch.x.shape[0], batch.x.shape[1]))


def iter_texts(row: Batch) -> Iterator[Batch]:
    """Each non-empty text of a packed row as a batch of one row, with positions from 0."""
    inputs = _split_texts(row.x, row.tokens)
    labels = _split_texts(row.labels, row.tokens)
    sources: Sequence[Tensor | None] = [None] * len(inputs)
    if row.source is not None:
        sources = _split_texts(row.source, row.source_tokens)
    for x, text_labels, source in zip(inputs, labels, sources, strict=True):
        if x.shape[1]:
            yield Batch(x, text_labels, source=source)


def _split_texts(row: Tensor, tokens: SequenceInfo | None) -> Sequence[Tensor]:
    assert tokens is not None
    assert tokens.lengths is not None
    return row.split(tokens.lengths[0], 1)


class _PackedSide(NamedTuple):
    """The texts of `x` or `source`: its ids, flat indices of their tokens, and the (row, segment)
    and length of each text.
    """

    ids: Tensor
    places: IndexArray
    texts: IndexArray
    lengths: IndexArray

    @staticmethod
    def from_ids(ids: Tensor, tokens: SequenceInfo | None) -> _PackedSide:
        """Find the texts of one side of a batch."""
        if ids.dim() != 2 or ids.is_floating_point():
            raise UnpackableBatch("the input is not a batch of token ids")
        width = ids.shape[1]
        tokens = SequenceInfo.contiguous(0, width, "cpu") if tokens is None else tokens
        position = tokens.position.expand(ids.shape).cpu().numpy().ravel()
        segment = tokens.segment.expand(ids.shape).cpu().numpy().ravel()
        places = np.flatnonzero(segment >= 0)
        text_of_token = np.stack([places // max(1, width), segment[places]], 1)
        groups = np.unique(text_of_token, axis=0, return_index=True, return_counts=True)
        texts, starts, lengths = groups
        offsets = np.arange(len(places)) - np.repeat(starts, lengths)
        is_consecutive = np.array_equal(np.repeat(texts, lengths, 0), text_of_token)
        if not is_consecutive or not np.array_equal(offsets, position[places]):
            raise UnpackableBatch(
                "the texts of a row are not consecutive, each with positions from 0"
            )
        return _PackedSide(ids, places, texts, lengths)

    def flatten(self, texts: IndexArray) -> tuple[Tensor, SequenceInfo]:
        """Ids of these texts in one row, and their positions and segments; texts that the side
        lacks have length 0.
        """
        own_texts = map(tuple, self.texts.tolist())
        length_of_text = dict(zip(own_texts, self.lengths.tolist(), strict=True))
        lengths = [length_of_text.get(tuple(text), 0) for text in texts.tolist()]
        row = self.ids.flatten()[torch.from_numpy(self.places)][None]
        return row, SequenceInfo.packed([lengths])

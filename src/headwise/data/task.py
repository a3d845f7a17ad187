"""The interface `Task`: batches from a seed and an index, metrics, the score of random guessing;
packed batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, ProcessorSpec
from .example_order import IndexArray

IGNORE_INDEX = -100  # the label of a position without a target
SPLITS = ("train", "valid", "test")

# For each metric the sum and the number of terms: {"accuracy": (310.0, 320)}.
MetricSums = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of examples.

    `x` is the input of the model: token ids [B, T], pixels [B, C, H, W] or frames [B, T, F].
    `labels` are the target ids of every position, [B, T], or one class per example, [B]; positions
    without a target hold IGNORE_INDEX. `source` is the input of the encoder, if the model has one.
    `tokens` and `source_tokens` hold the positions and segment ids of `x` and `source`; None means
    that row t of the input is at position t and nothing is padding. `gold` has one entry per
    example with what the task knows about its structure, such as the links between source and
    target tokens.
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
        >>> Batch(ids, ids, SequenceInfo.from_batch(ids, lengths=[2, 1, 2]), gold="abc").rows(
        ...     slice(1, 2)
        ... ).gold
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
        return measure_accuracy(logits, batch)

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
        """Number of batches of this size in one pass over a split; None if examples are generated
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
        return ProcessorSpec(end=() if self.end is None else (self.end,), tokenizer=self.tokenizer)

    def text(self, ids: Sequence[int]) -> str:
        """Human-readable form of a sequence of ids."""
        return " ".join(map(str, ids))


def measure_accuracy(logits: Tensor, batch: Batch) -> MetricSums:
    """Number of positions whose argmax is the label, and number of labels, ignored positions left
    out.
    """
    has_label = batch.labels != IGNORE_INDEX
    correct = (logits.argmax(-1) == batch.labels) & has_label
    return {"accuracy": (float(correct.sum()), int(has_label.sum()))}


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
        return rows.index_copy_(0, self.places.to(outputs.device), outputs[0]).unflatten(
            0, self.shape
        )


def pack_batch(batch: Batch) -> PackedBatch:
    """Pack all texts of a batch of ids into one row, in their order; text k of the source belongs
    to text k of `x`.

    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> packed = pack_batch(
    ...     Batch(
    ...         ids,
    ...         torch.tensor([[6, 5, IGNORE_INDEX], [8, 9, 7]]),
    ...         SequenceInfo.from_batch(ids, lengths=[2, 3]),
    ...     )
    ... )
    >>> packed.batch.x.tolist(), packed.batch.tokens.lengths
    ([[5, 6, 7, 8, 9]], ((2, 3),))
    >>> packed.unpack(packed.batch.x).tolist()
    [[5, 6, 0], [7, 8, 9]]
    """
    if batch.labels.shape != batch.x.shape:
        raise UnpackableBatch("the labels are per example, not per token")
    inputs = [(batch.x, batch.tokens)] + (
        [] if batch.source is None else [(batch.source, batch.source_tokens)]
    )
    sides = [_find_texts(ids, tokens) for ids, tokens in inputs]
    texts = np.unique(np.concatenate([side.texts for side in sides]), axis=0)
    rows = [_flatten_side(ids, side, texts) for (ids, _), side in zip(inputs, sides, strict=True)]
    target, places = sides[0], torch.from_numpy(sides[0].places)
    labels = batch.labels.flatten()[places]
    if int((labels != IGNORE_INDEX).sum()) != int((batch.labels != IGNORE_INDEX).sum()):
        raise UnpackableBatch("there are labels at padding positions")
    (x, tokens), (source, source_tokens) = rows[0], rows[1] if len(rows) > 1 else (None, None)
    row = replace(
        batch, x=x, labels=labels[None], tokens=tokens, source=source, source_tokens=source_tokens
    )
    return PackedBatch(row, places, target.shape)


def real_token_share(batch: Batch) -> float:
    """Share of the positions of `x` and `source` that are not padding.

    >>> real_token_share(
    ...     Batch(torch.zeros(2, 4), torch.zeros(2, 4), SequenceInfo.packed([[4], [1, 1]]))
    ... )
    0.75
    """
    inputs = [(batch.x, batch.tokens), (batch.source, batch.source_tokens)]
    sizes = [(x.shape[0] * x.shape[1], tokens) for x, tokens in inputs if x is not None]
    num_real = [
        size if tokens is None else float(tokens.is_real.float().mean()) * size
        for size, tokens in sizes
    ]
    return sum(num_real) / max(1, sum(size for size, _ in sizes))


def iter_texts(row: Batch) -> Iterator[Batch]:
    """Each non-empty text of a packed row as a batch of one row, with positions from 0."""
    tokens, source_tokens = row.tokens, row.source_tokens
    assert tokens is not None
    assert tokens.lengths is not None
    source_lengths = None if source_tokens is None else source_tokens.lengths
    inputs = row.x.split(tokens.lengths[0], 1)
    labels = row.labels.split(tokens.lengths[0], 1)
    sources: Sequence[Tensor | None] = [None] * len(inputs)
    if source_lengths is not None and row.source is not None:
        sources = row.source.split(source_lengths[0], 1)
    for x, text_labels, source in zip(inputs, labels, sources, strict=True):
        if x.shape[1]:
            yield Batch(x, text_labels, source=source)


class _PackedSide(NamedTuple):
    """The texts of `x` or `source`: flat indices of their tokens, (row, segment) and length of each
    text.
    """

    places: IndexArray
    texts: IndexArray
    lengths: IndexArray
    shape: tuple[int, int]


def _find_texts(ids: Tensor, tokens: SequenceInfo | None) -> _PackedSide:
    if ids.dim() != 2 or ids.is_floating_point():
        raise UnpackableBatch("the input is not a batch of token ids")
    shape = (ids.shape[0], ids.shape[1])
    tokens = SequenceInfo.contiguous(0, shape[1], "cpu") if tokens is None else tokens
    position, segment = (
        t.expand(shape).cpu().numpy().ravel() for t in (tokens.position, tokens.segment)
    )
    places = np.flatnonzero(segment >= 0)
    text_of_token = np.stack([places // max(1, shape[1]), segment[places]], 1)
    texts, starts, lengths = np.unique(text_of_token, axis=0, return_index=True, return_counts=True)
    offsets = np.arange(len(places)) - np.repeat(starts, lengths)
    if not (
        np.array_equal(np.repeat(texts, lengths, 0), text_of_token)
        and np.array_equal(offsets, position[places])
    ):
        raise UnpackableBatch("the texts of a row are not consecutive, each with positions from 0")
    return _PackedSide(places, texts, lengths, shape)


def _flatten_side(ids: Tensor, side: _PackedSide, texts: IndexArray) -> tuple[Tensor, SequenceInfo]:
    """Ids of all texts in one row, and their positions and segments; texts that the side lacks have
    length 0.
    """
    length_of_text = dict(zip(map(tuple, side.texts.tolist()), side.lengths.tolist(), strict=True))
    lengths: Sequence[int] = [length_of_text.get(text, 0) for text in map(tuple, texts.tolist())]
    return ids.flatten()[torch.from_numpy(side.places)][None], SequenceInfo.packed([lengths])

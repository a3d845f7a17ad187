"""Tasks over files: `FileTask` holds the options, `Dataset` the data; and
classification data sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SpecError
from ..interfaces.part import CheckedDataclass
from ..masking.sequence_info import SequenceInfo
from ..model_spec import (
    EmbeddingSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    PatchSpec,
    ProcessorSpec,
    StackSpec,
)
from .example_order import EpochOrder, IndexArray, strided_batch_indices
from .synthetic_task import ModelShape
from .task import IGNORE_INDEX, SPLITS, Batch, MetricSums, Task, check_split, measure_accuracy
from .vocabulary import Vocabulary


class Dataset(ABC):
    """Base class of loaded data: `sizes` is the number of examples per split, `notes` states what
    was left out.
    """

    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None
    answers: int = 0
    end: int | None = None

    @abstractmethod
    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        """Batch number `index` of a split, which must not be empty."""

    @abstractmethod
    def batches(self, size: int, split: str) -> int:
        """Number of batches in one pass over a split."""

    @abstractmethod
    def model(self) -> ModelSpec:
        """Spec of a default model for the data."""

    @property
    @abstractmethod
    def chance(self) -> Mapping[str, float]:
        """Value of each metric for random guessing."""

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Metrics of `logits` against `batch.labels`."""
        return measure_accuracy(logits, batch)

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        """Prompts for generation."""
        raise NotImplementedError("this data does not use generation")

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        """Metrics of generated answers."""
        raise NotImplementedError("this data does not use generation")

    @property
    def usage(self) -> ProcessorSpec:
        """How to turn raw input into ids, and ids into output, for a model that was trained on this
        data.
        """
        return ProcessorSpec(tokenizer=self.vocabulary.document if self.vocabulary else None)


# Datasets by task fields and file stamps, so that equal tasks read their files once; kept while a
# task uses them.
_LOADED_DATASETS: WeakValueDictionary[Any, Dataset] = WeakValueDictionary()


@dataclass(frozen=True, repr=False)
class FileTask(CheckedDataclass, Task):
    """Base class of tasks whose examples are read from files; tasks with equal fields share the
    data they read.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise SpecError(f"seed={self.seed} is below 0; use 0 or more")
        self.check()
        stamps = tuple(
            (str(path), (at := path.stat()).st_mtime_ns, at.st_size) for path in self.files()
        )
        key = (
            type(self),
            tuple(value for name, value in self._field_values().items() if name != "seed"),
            stamps,
        )
        data = _LOADED_DATASETS.get(key)
        if data is None:
            data = _LOADED_DATASETS[key] = self.read()
        object.__setattr__(self, "_data", data)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._field_values()), ()

    def _field_values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self) -> None:
        """Raise SpecError for invalid options, before any file is opened."""

    @abstractmethod
    def files(self) -> Sequence[Path]:
        """Paths of all files that are read."""

    @abstractmethod
    def read(self) -> Dataset:
        """Read the files."""

    @property
    def data(self) -> Dataset:
        """The data that was read."""
        return vars(self)["_data"]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was left out of the data, and why."""
        return self.data.notes

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        self._check_batch_arguments(size, split)
        if index < 0:
            raise ValueError(f"index={index} is below 0; batches are counted from 0")
        if not self.data.sizes.get(split):
            available = " and ".join(name for name in SPLITS if self.data.sizes.get(name))
            raise SpecError(
                f"{self!r} has no {split} split, only {available}; use one of these, or hold out "
                f"data: {split}=0.05"
            )
        return self.data.batch(index, size, split, self.seed)

    def batches(self, size: int, split: str = "train") -> int | None:
        self._check_batch_arguments(size, split)
        return self.data.batches(size, split) if self.data.sizes.get(split) else 0

    def _check_batch_arguments(self, size: int, split: str) -> None:
        check_split(split)
        if size < 1:
            raise ValueError(f"a batch of {size} examples is empty; use 1 or more")

    def model(self) -> ModelSpec:
        return self.data.model()

    @property
    def chance(self) -> Mapping[str, float]:
        return self.data.chance

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        return self.data.measure(logits, batch)

    @property
    def answers(self) -> int:
        return self.data.answers

    def prompt(self, batch: Batch) -> tuple[Tensor, SequenceInfo | None]:
        return self.data.prompt(batch)

    def score(self, generated: Sequence[Sequence[int]], batch: Batch) -> MetricSums:
        return self.data.score(generated, batch)

    @property
    def end(self) -> int | None:
        return self.data.end

    @property
    def examples(self) -> int | None:
        return self.data.sizes["train"]

    @property
    def tokenizer(self) -> str | None:
        return self.data.usage.tokenizer

    @property
    def usage(self) -> ProcessorSpec:
        return self.data.usage

    def text(self, ids: Sequence[int]) -> str:
        return self.data.vocabulary.decode(ids) if self.data.vocabulary else super().text(ids)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, such as a prompt."""
        if self.data.vocabulary is None:
            raise ValueError(f"{self!r} has no tokenizer; pass ids instead of text")
        return self.data.vocabulary.encode([text])[0].tolist()


# --- Default models -------------------------------------------------------------------------------

DEFAULT_SHAPE = ModelShape(width=128, heads=4, layers=4, feed=512)
TARGET_NUM_PATCHES = 64  # approximate number of patches per image


def make_language_model(vocab_size: int) -> ModelSpec:
    """A causal decoder of four layers with 128 channels, embedding and output weights tied.

    >>> from headwise import costs
    >>> costs.count_parameters(
    ...     make_language_model(65)
    ... )  # 65 d + 4 (12 d^2 + 9 d) + 2 d, for d = 128
    799616
    """
    blocks, embedding = DEFAULT_SHAPE.blocks("causal()"), EmbeddingSpec(vocab_size)
    stack = StackSpec.from_blocks(
        "decoder", DEFAULT_SHAPE.width, blocks, embedding=embedding, norm=NormSpec()
    )
    return ModelSpec(
        "text", "decoder", (stack,), (OutputHeadSpec("tokens", vocab_size, table="decoder"),)
    )


def make_translator(vocab_sizes: tuple[int, int], width: int, layers: int, table: str) -> ModelSpec:
    """Encoder and decoder of `layers` layers each, with 32 channels per head.

    table="one" ties the embeddings of source and target and the output weights; table="two" ties
    only the target embedding and the output weights. `vocab_sizes` are those of source and target.

    >>> make_translator((11, 11), 64, 2, "one").tied_weights()
    {'decoder.embedding.tokens': 'encoder.embedding.tokens', 'head.tokens.weight': 'encoder.embedding.tokens'}
    """
    shape = ModelShape(width, width // 32, layers, 4 * width)
    shared_table = "encoder" if table == "one" else ""
    source, target = (
        EmbeddingSpec(vocab_sizes[0]),
        EmbeddingSpec(vocab_sizes[1], table=shared_table),
    )
    stacks = (
        StackSpec.from_blocks(
            "encoder", width, shape.blocks("full()"), embedding=source, norm=NormSpec()
        ),
        StackSpec.from_blocks(
            "decoder", width, shape.blocks("causal()", "full()"), embedding=target, norm=NormSpec()
        ),
    )
    head = OutputHeadSpec("tokens", vocab_sizes[1], table=shared_table or "decoder")
    return ModelSpec("translator", "encoder-decoder", stacks, (head,))


def make_classifier(
    name: str, embedding: EmbeddingSpec, classes: int, pooling: str, kind: str = "encoder"
) -> ModelSpec:
    """An encoder of four layers with 128 channels; pooling="mean" gives one class per example,
    "each" one per token.
    """
    stack = StackSpec.from_blocks(
        "encoder",
        DEFAULT_SHAPE.width,
        DEFAULT_SHAPE.blocks("full()"),
        embedding=embedding,
        norm=NormSpec(),
    )
    return ModelSpec(
        name, kind, (stack,), (OutputHeadSpec("classes", classes, pooling, bias="learned"),)
    )


def make_patches(high: int, wide: int, channels: int) -> PatchSpec:
    """Square patches for images of this size, about 64 of them; a size that divides the image
    evenly is preferred.

    >>> make_patches(28, 28, 1)
    PatchSpec(rows=7, columns=7, high=4, wide=4, channels=1)
    """
    target_size = max(1, round((high * wide / TARGET_NUM_PATCHES) ** 0.5))
    divisors = [
        size
        for size in range(target_size, 2 * target_size + 1)
        if high % size == 0 and wide % size == 0
    ]
    size = min([*divisors, target_size][0], high, wide)
    return PatchSpec(high // size, wide // size, size, size, channels)


# --- Classification -------------------------------------------------------------------------------


class ClassifierInputs(ABC):
    """Base class of the inputs of a classifier: images, frames or texts."""

    vocabulary: Vocabulary | None = None

    @property
    @abstractmethod
    def usage(self) -> ProcessorSpec:
        """How raw inputs are prepared for the model."""

    @abstractmethod
    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        """Input batch of these examples, and their positions and segments if
        they differ in length.
        """

    @abstractmethod
    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """Spec of a classifier; pooling="each" classifies every token, "mean"
        the average of them.
        """


class LabelledDataset(Dataset):
    """Inputs with labels, each label a class number or an array with one class number per token.

    `class_names` holds the names of the classes, in the order of their numbers.
    """

    def __init__(
        self,
        inputs: ClassifierInputs,
        labels: Any,
        class_names: Sequence[str],
        splits: Mapping[str, IndexArray],
    ) -> None:
        self.inputs, self.labels, self.names, self.splits = (
            inputs,
            labels,
            tuple(class_names),
            splits,
        )
        self.vocabulary = inputs.vocabulary
        self.sizes = {split: len(indices) for split, indices in splits.items()}
        for split in ("train", "valid"):
            if not self.sizes[split]:
                raise SpecError(
                    f"the split {split!r} has no examples; add examples to the data, or change "
                    "valid="
                )
        self._order = EpochOrder(self.sizes["train"])
        self._has_token_labels = np.ndim(labels[0]) > 0

    def batches(self, size: int, split: str) -> int:
        return -(-self.sizes[split] // size)

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        if split == "train":
            positions = self._order.take(index, size, seed)
        else:
            positions = np.array(strided_batch_indices(self.sizes[split], index, size))
        indices = self.splits[split][positions]
        x, tokens = self.inputs.take(indices)
        return Batch(x, self._label_tensor([self.labels[n] for n in indices]), tokens)

    def _label_tensor(self, labels: list[Any]) -> Tensor:
        if not self._has_token_labels:
            return torch.tensor([int(label) for label in labels])
        padded = np.full((len(labels), max(map(len, labels))), IGNORE_INDEX, np.int64)
        for row, label in zip(padded, labels, strict=True):
            row[: len(label)] = label
        return torch.from_numpy(padded)

    @property
    def chance(self) -> Mapping[str, float]:
        """Accuracy of always predicting the most frequent class of the train split."""
        train_labels = [np.atleast_1d(self.labels[n]) for n in self.splits["train"]]
        counts = np.bincount(np.concatenate(train_labels), minlength=len(self.names))
        return {"accuracy": float(counts.max() / counts.sum())}

    @property
    def usage(self) -> ProcessorSpec:
        return replace(self.inputs.usage, labels=self.names)

    def model(self) -> ModelSpec:
        return self.inputs.model(len(self.names), "each" if self._has_token_labels else "mean")


def number_labels(labels: Sequence[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Class number of each label, and the class names in sorted order.

    >>> number_labels(["dog", "cat", "dog"])
    (array([1, 0, 1]), ['cat', 'dog'])
    """
    names, numbers = np.unique(np.asarray(labels), return_inverse=True)
    if len(names) < 2:
        raise SpecError(
            f"all {len(labels)} labels are {str(names[0])!r}; give examples of at least two classes"
        )
    return numbers.astype(np.int64), [str(name) for name in names]

"""Tasks over files: `FileTask` reads and caches the data; `ClassificationTask` has a label for each
example.
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

from ...attention.interfaces.part import CheckedDataclass
from ...attention.masking.sequence_info import SequenceInfo
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import EmbeddingSpec, ModelSpec, OutputHeadSpec, ProcessorSpec
from ...models.vocabulary import Vocabulary
from ...util.errors import SpecError
from .example_order import EpochOrder, IndexArray, strided_batch_indices
from .synthetic_task import ModelShape
from .task import SPLITS, Task, check_split

DEFAULT_SHAPE = ModelShape(width=128, heads=4, layers=4, feed=512)


class Dataset:
    """Data that was read: the number of examples per split, notes about what was left out, and the
    vocabulary of its texts.
    """

    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None


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
        stamps: list[tuple[str, int, int]] = []
        for path in self.files():
            stat = path.stat()
            stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
        options = {name: value for name, value in self._field_values().items() if name != "seed"}
        key = (type(self), tuple(options.values()), tuple(stamps))
        data = _LOADED_DATASETS.get(key)
        if data is None:
            data = self.read()
            _LOADED_DATASETS[key] = data
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

    @abstractmethod
    def read_batch(self, index: int, size: int, split: str) -> Batch:
        """Batch number `index` of a split that is not empty."""

    def count_batches(self, size: int, split: str) -> int:
        """Number of batches in one pass over a split that is not empty."""
        return -(-self.data.sizes[split] // size)

    @property
    def data(self) -> Any:
        """The data that was read."""
        return vars(self)["_data"]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what was left out of the data, and why."""
        return self.data.notes

    @property
    def examples(self) -> int | None:
        return self.data.sizes["train"]

    def batch(self, index: int, size: int, split: str = "train") -> Batch:
        if self.batches(size, split) == 0:
            available = " and ".join(name for name in SPLITS if self.data.sizes.get(name))
            raise SpecError(
                f"{self!r} has no {split} split, only {available}; use one of these, or hold out "
                f"data: {split}=0.05"
            )
        if index < 0:
            raise ValueError(f"index={index} is below 0; batches are counted from 0")
        return self.read_batch(index, size, split)

    def batches(self, size: int, split: str = "train") -> int | None:
        check_split(split)
        if size < 1:
            raise ValueError(f"a batch of {size} examples is empty; use 1 or more")
        return self.count_batches(size, split) if self.data.sizes.get(split) else 0

    @property
    def tokenizer(self) -> str | None:
        return None if self.data.vocabulary is None else self.data.vocabulary.document

    def text(self, ids: Sequence[int]) -> str:
        vocabulary = self.data.vocabulary
        return super().text(ids) if vocabulary is None else vocabulary.decode(ids)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, such as a prompt."""
        if self.data.vocabulary is None:
            raise ValueError(f"{self!r} has no tokenizer; pass ids instead of text")
        return self.data.vocabulary.encode([text])[0].tolist()


# --- Classification -------------------------------------------------------------------------------


class ClassifierInputs(ABC):
    """Base class of the inputs of a classifier: images or frames."""

    usage: ProcessorSpec  # how raw inputs are prepared for the model

    @abstractmethod
    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        """Input batch of these examples, and their positions and segments if they differ in
        length.
        """

    @abstractmethod
    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """Spec of a classifier; pooling="each" classifies every token, "mean" their average."""


class LabelledDataset(Dataset):
    """Inputs with labels, each label a class number or an array with one class number per token.

    `names` holds the names of the classes, in the order of their numbers.
    """

    def __init__(
        self,
        inputs: ClassifierInputs,
        labels: Any,
        names: Sequence[str],
        splits: Mapping[str, IndexArray],
    ) -> None:
        self.inputs = inputs
        self.labels = labels
        self.names = tuple(names)
        self.splits = splits
        self.sizes = {split: len(indices) for split, indices in splits.items()}
        for split in ("train", "valid"):
            if not self.sizes[split]:
                raise SpecError(
                    f"the split {split!r} has no examples; add examples to the data, or change "
                    "valid="
                )
        self.order = EpochOrder(self.sizes["train"])


@dataclass(frozen=True, repr=False)
class ClassificationTask(FileTask):
    """Base class of tasks with one class per example, or one per token."""

    def read_batch(self, index: int, size: int, split: str) -> Batch:
        data: LabelledDataset = self.data
        if split == "train":
            positions = data.order.take(index, size, self.seed)
        else:
            positions = np.array(strided_batch_indices(data.sizes[split], index, size))
        indices = data.splits[split][positions]
        x, tokens = data.inputs.take(indices)
        labels = [torch.as_tensor(data.labels[n]) for n in indices]
        if self._has_token_labels:
            padded = torch.nn.utils.rnn.pad_sequence(labels, True, IGNORE_INDEX)
            return Batch(x, padded, tokens)
        return Batch(x, torch.stack(labels), tokens)

    @property
    def _has_token_labels(self) -> bool:
        return np.ndim(self.data.labels[0]) > 0

    @property
    def chance(self) -> Mapping[str, float]:
        """Accuracy of always predicting the most frequent class of the train split."""
        data: LabelledDataset = self.data
        labels = [np.atleast_1d(data.labels[n]) for n in data.splits["train"]]
        counts = np.bincount(np.concatenate(labels), minlength=len(data.names))
        return {"accuracy": float(counts.max() / counts.sum())}

    @property
    def usage(self) -> ProcessorSpec:
        return replace(self.data.inputs.usage, labels=self.data.names)

    def model(self) -> ModelSpec:
        pooling = "each" if self._has_token_labels else "mean"
        return self.data.inputs.model(len(self.data.names), pooling)


def make_classifier(
    name: str, embedding: EmbeddingSpec, classes: int, pooling: str, kind: str = "encoder"
) -> ModelSpec:
    """An encoder of four layers with 128 channels; pooling="mean" gives one class per example,
    "each" one per token.
    """
    stack = DEFAULT_SHAPE.stack("encoder", embedding, "full()")
    head = OutputHeadSpec("classes", classes, pooling, bias="learned")
    return ModelSpec(name, kind, (stack,), (head,))


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


class ChannelStatistics:
    """Mean and standard deviation of each channel, from sums over parts of the data; the deviation
    of a constant channel is 1.
    """

    def __init__(self, channels: int) -> None:
        self._sums = np.zeros((2, channels))
        self._count = 0

    def add(self, values: NDArray[Any]) -> None:
        """Add values, whose last axis are the channels."""
        values = values.astype(np.float64)
        axes = tuple(range(values.ndim - 1))
        self._sums += np.stack([values.sum(axes), (values**2).sum(axes)])
        self._count += values.size // values.shape[-1]

    @property
    def mean(self) -> NDArray[np.float64]:
        """Mean of each channel."""
        return self._sums[0] / self._count

    @property
    def deviation(self) -> NDArray[np.float64]:
        """Standard deviation of each channel."""
        deviation = np.sqrt(np.maximum(self._sums[1] / self._count - self.mean**2, 0))
        return np.where(deviation > 1e-6, deviation, 1.0)

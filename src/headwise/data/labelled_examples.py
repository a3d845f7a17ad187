"""Classification datasets: one class per example, or one class per token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SpecError
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, ProcessorSpec
from .example_order import EpochOrder, IndexArray, strided_batch_indices
from .file_task import Dataset
from .task import IGNORE_INDEX, Batch
from .vocabulary import Vocabulary


class ClassifierInputs(ABC):
    """Base class of the inputs of a classifier: images, frames or texts."""

    vocabulary: Vocabulary | None = None

    @property
    @abstractmethod
    def usage(self) -> ProcessorSpec:
        """How raw inputs are prepared for the model."""

    @abstractmethod
    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        """Input batch of these examples, and their positions and segments if they differ in length."""

    @abstractmethod
    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """Spec of a classifier; pooling="each" classifies every token, "mean" the average of them."""


class LabelledDataset(Dataset):
    """Inputs with labels, each label a class number or an array with one class number per token.

    `class_names` holds the names of the classes, in the order of their numbers.
    """

    def __init__(
        self, inputs: ClassifierInputs, labels: Any, class_names: Sequence[str], splits: Mapping[str, IndexArray]
    ) -> None:
        self.inputs, self.labels, self.names, self.splits = inputs, labels, tuple(class_names), splits
        self.vocabulary = inputs.vocabulary
        self.sizes = {split: len(indices) for split, indices in splits.items()}
        for split in ("train", "valid"):
            if not self.sizes[split]:
                raise SpecError(f"the split {split!r} has no examples; add examples to the data, or change valid=")
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
        raise SpecError(f"all {len(labels)} labels are {str(names[0])!r}; give examples of at least two classes")
    return numbers.astype(np.int64), [str(name) for name in names]

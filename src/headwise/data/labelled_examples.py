"""Examples with a class each, or a class for each of their tokens: images, frames, texts."""

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
    """What is to be classified, wherever it lies."""

    vocabulary: Vocabulary | None = None

    @property
    @abstractmethod
    def usage(self) -> ProcessorSpec:
        """How such an input is brought to what a model reads."""

    @abstractmethod
    def take(self, indices: IndexArray) -> tuple[Tensor, SequenceInfo | None]:
        """These examples side by side, and where their tokens stand if they are of several lengths."""

    @abstractmethod
    def model(self, num_classes: int, pooling: str) -> ModelSpec:
        """A model that tells so many classes apart, `at` each token or the mean of them."""


class LabelledDataset(Dataset):
    """Examples and their `labels`: one number for each, or as many as an example has tokens.

    `names` are what the labels stand for, in their order.
    """

    def __init__(
        self, inputs: ClassifierInputs, labels: Any, class_names: Sequence[str], splits: Mapping[str, IndexArray]
    ) -> None:
        self.inputs, self.labels, self.names, self.splits = inputs, labels, tuple(class_names), splits
        self.vocabulary = inputs.vocabulary
        self.sizes = {split: len(own) for split, own in splits.items()}
        for split in ("train", "valid"):
            if not self.sizes[split]:
                raise SpecError(f"no example is left for {split}; bring more, or give another share for valid=")
        self._order = EpochOrder(self.sizes["train"])
        self._has_token_labels = np.ndim(labels[0]) > 0

    def batches(self, size: int, split: str) -> int:
        return -(-self.sizes[split] // size)

    def batch(self, index: int, size: int, split: str, seed: int) -> Batch:
        if split == "train":
            places = self._order.take(index, size, seed)
        else:
            places = np.array(strided_batch_indices(self.sizes[split], index, size))
        chosen = self.splits[split][places]
        x, tokens = self.inputs.take(chosen)
        return Batch(x, self._label_tensor([self.labels[n] for n in chosen]), tokens)

    def _label_tensor(self, labels: list[Any]) -> Tensor:
        if not self._has_token_labels:
            return torch.tensor([int(label) for label in labels])
        asked = np.full((len(labels), max(map(len, labels))), IGNORE_INDEX, np.int64)
        for row, label in zip(asked, labels, strict=True):
            row[: len(label)] = label
        return torch.from_numpy(asked)

    @property
    def chance(self) -> Mapping[str, float]:
        """What the most frequent class of the train split would score."""
        own = [np.atleast_1d(self.labels[n]) for n in self.splits["train"]]
        counts = np.bincount(np.concatenate(own), minlength=len(self.names))
        return {"accuracy": float(counts.max() / counts.sum())}

    @property
    def usage(self) -> ProcessorSpec:
        return replace(self.inputs.usage, labels=self.names)

    def model(self) -> ModelSpec:
        return self.inputs.model(len(self.names), "each" if self._has_token_labels else "mean")


def number_labels(labels: Sequence[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Labels as numbers from 0, and what each stands for: numbers in their order, words in that of the alphabet.

    >>> number_labels(["dog", "cat", "dog"])
    (array([1, 0, 1]), ['cat', 'dog'])
    """
    names, found = np.unique(np.asarray(labels), return_inverse=True)
    if len(names) < 2:
        raise SpecError(f"all {len(labels)} labels are {str(names[0])!r}; give examples of two classes at least")
    return found.astype(np.int64), [str(name) for name in names]

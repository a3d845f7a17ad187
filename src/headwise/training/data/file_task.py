"""Tasks over files: `FileTask` reads and caches the data; `ClassificationTask` has a label for each
example. Order of examples, batches of similar lengths and splits follow from seeds and contents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar
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
from .synthetic_task import ModelShape
from .task import SPLITS, IndexArray, Task, check_split

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
    """Base class of tasks that read examples from files; tasks with equal fields share the data."""

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
        """Count batches in one pass over a split that is not empty."""
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
    """Make an encoder of four layers with 128 channels; pooling="mean" gives one class per example,
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
        """Add values with channels on the last axis."""
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


DEFAULT_HELD_OUT = 0.05  # share of the examples for validation, and again for test
SPLIT_NAMES = ("train", "valid", "test")

Order = TypeVar("Order")


def make_rng(*key: int) -> np.random.Generator:
    """Random generator that is determined by a few integers, such as a seed and a batch index.

    >>> int(make_rng(3, 1).integers(100)) == int(make_rng(3, 1).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class EpochCache(Generic[Order]):
    """The orders of the last two epochs, so that they are not drawn again for each batch."""

    def __init__(self, draw: Callable[[np.random.Generator], Order]) -> None:
        self._draw = draw
        self._orders: dict[tuple[int, int], Order] = {}

    def get(self, seed: int, epoch: int) -> Order:
        """Return the order of an epoch."""
        key = (seed, epoch)
        if key not in self._orders:
            last = dict(list(self._orders.items())[-1:])
            self._orders = last | {key: self._draw(make_rng(seed, epoch))}
        return self._orders[key]


class EpochOrder:
    """An order of examples that is shuffled again in every epoch.

    >>> order = EpochOrder(5)
    >>> sorted(order.take(0, 5, seed=1).tolist()), len(order.take(2, 3, seed=1))
    ([0, 1, 2, 3, 4], 3)
    """

    def __init__(self, num_examples: int) -> None:
        self.count = num_examples
        self._cache = EpochCache(lambda rng: rng.permutation(num_examples))

    def take(self, index: int, size: int, seed: int) -> IndexArray:
        """Indices of the examples in batch `index`, which may span the end of one epoch and the
        start of the next.
        """
        epochs, positions = np.divmod(np.arange(index * size, (index + 1) * size), self.count)
        parts = [
            self._cache.get(seed, int(epoch))[positions[epochs == epoch]]
            for epoch in np.unique(epochs)
        ]
        return np.concatenate(parts)


class BatchPlan:
    """Batches of at most `size` examples of similar lengths; every epoch has the same number of
    them.

    `lengths` holds the length of each example. In each epoch, examples of equal length swap places
    and the batches are shuffled. The lengths in each batch do not change, so the epoch follows from
    the batch index.

    >>> sorted(BatchPlan(np.array([5, 1, 1, 5, 5]), 3).take(1, seed=0).tolist())
    [3, 4]
    """

    def __init__(self, lengths: IndexArray, size: int) -> None:
        self.lengths = lengths
        self.batches = -(-len(lengths) // size)
        self._cache = EpochCache(self._draw_order)

    def take(self, index: int, seed: int | None) -> IndexArray:
        """Return example indices of batch `index`; without a seed, in the order for evaluation.

        Evaluation batches are shuffled, so that the first few contain all lengths.
        """
        epoch, batch = divmod(index, self.batches)
        if seed is None:
            examples = np.argsort(self.lengths, kind="stable")
            batches = make_rng(0).permutation(self.batches)
        else:
            examples, batches = self._cache.get(seed, epoch)
        return np.array_split(examples, self.batches)[batches[batch]]

    def _draw_order(self, rng: np.random.Generator) -> tuple[IndexArray, IndexArray]:
        """Return the examples by length, equal lengths shuffled, and an order of the batches."""
        examples = np.lexsort((rng.random(len(self.lengths)), self.lengths))
        return examples, rng.permutation(self.batches)


def strided_batch_indices(count: int, index: int, size: int) -> range:
    """Example indices of batch `index` in a pass over `count` examples, at most `size` of them.

    Each batch takes examples from the whole range, at equal distances. After the last batch the
    first one follows.

    >>> [strided_batch_indices(5, index, 3) for index in range(3)]
    [range(0, 5, 2), range(1, 5, 2), range(0, 5, 2)]
    """
    batches = -(-count // size)
    return range(index % batches, count, batches)


def check_split_shares(valid: float, test: float) -> None:
    """Raise SpecError if the shares leave nothing for training or for validation; the test share
    may be 0.
    """
    if not 0 < valid < 1 or not 0 <= test < 1 or valid + test >= 1:
        raise SpecError(
            f"valid={valid:g} must be > 0, test={test:g} >= 0, and their sum < 1; use for example "
            "valid=0.1 and test=0"
        )


def split_by_key(keys: Sequence[str], valid: float, test: float) -> dict[str, IndexArray]:
    """Indices of the examples in each split; examples with equal keys are in the same split,
    whatever the seed.

    Keys are ordered by their hash, and the first ones are held out.

    >>> splits = split_by_key(["a", "b", "a", "c"], 0.3, 0)
    >>> {split: indices.tolist() for split, indices in splits.items()}
    {'train': [0, 1, 2], 'valid': [3], 'test': []}
    """
    check_split_shares(valid, test)
    distinct = sorted(set(keys), key=lambda key: blake2b(key.encode(), digest_size=8).digest())
    count = len(distinct)
    num_held_out = 1 + (test > 0)
    if count <= num_held_out:
        raise SpecError(
            f"{count} different examples are too few for {num_held_out + 1} splits; add "
            "examples to the data"
        )
    num_test = min(max(1, round(test * count)), count - 2) if test else 0
    num_valid = min(max(1, round(valid * count)), count - 1 - num_test)
    split_of_key = dict.fromkeys(distinct, "train")
    split_of_key |= dict.fromkeys(distinct[:num_valid], "valid")
    split_of_key |= dict.fromkeys(distinct[num_valid : num_valid + num_test], "test")
    splits = np.array([split_of_key[key] for key in keys])
    return {name: np.flatnonzero(splits == name) for name in SPLIT_NAMES}


def split_examples(
    counts: Mapping[str, int], keys: Sequence[str], valid: float, test: float
) -> dict[str, IndexArray]:
    """Indices of the examples in each split, if the data has `counts` examples per split, stored
    one after the other.

    Without a validation split, shares of the train split are held out by `split_by_key`; `keys` has
    one key per example.

    >>> splits = split_examples({"train": 2, "test": 1}, ["a", "b", "a"], 0.5, 0)
    >>> {split: indices.tolist() for split, indices in splits.items()}
    {'train': [1], 'valid': [0], 'test': [2]}
    """
    splits = {"test": np.arange(0)}
    first = 0
    for split, count in counts.items():
        splits[split] = np.arange(first, first + count)
        first += count
    if "valid" not in counts:
        train = splits["train"]
        train_keys = [keys[n] for n in train.tolist()]
        parts = split_by_key(train_keys, valid, 0.0 if "test" in counts else test)
        for split, part in parts.items():
            if split == "train" or split not in counts:
                splits[split] = train[part]
    return {split: splits[split] for split in SPLIT_NAMES}

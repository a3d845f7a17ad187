"""Order of examples, batches of similar lengths and splits, all reproducible from seeds and
contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...util.errors import SpecError

IndexArray = NDArray[np.int64]
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
        """The order of an epoch."""
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

    def of(self, seed: int, epoch: int) -> IndexArray:
        """Permutation of all examples in this epoch."""
        return self._cache.get(seed, epoch)

    def take(self, index: int, size: int, seed: int) -> IndexArray:
        """Indices of the examples in batch `index`, which may span the end of one epoch and the
        start of the next.
        """
        epochs, positions = np.divmod(np.arange(index * size, (index + 1) * size), self.count)
        parts = [
            self.of(seed, int(epoch))[positions[epochs == epoch]] for epoch in np.unique(epochs)
        ]
        return np.concatenate(parts)


class BatchPlan:
    """Batches of at most `size` examples of similar lengths; every epoch has the same number of them.

    `lengths` holds the length of each example. In each epoch, examples of equal length swap places
    and the batches are shuffled. The lengths in each batch stay the same, so the epoch follows from
    the batch index.

    >>> sorted(BatchPlan(np.array([5, 1, 1, 5, 5]), 3).take(1, seed=0).tolist())
    [3, 4]
    """

    def __init__(self, lengths: IndexArray, size: int) -> None:
        self.lengths = lengths
        self.batches = -(-len(lengths) // size)
        self._cache = EpochCache(self._draw_order)

    def take(self, index: int, seed: int | None) -> IndexArray:
        """Example indices of batch `index`; without a seed, those of evaluation, in one order.

        The batches of evaluation are shuffled, so that the first few contain all lengths.
        """
        epoch, batch = divmod(index, self.batches)
        if seed is None:
            examples = np.argsort(self.lengths, kind="stable")
            batches = make_rng(0).permutation(self.batches)
        else:
            examples, batches = self._cache.get(seed, epoch)
        return np.array_split(examples, self.batches)[batches[batch]]

    def _draw_order(self, rng: np.random.Generator) -> tuple[IndexArray, IndexArray]:
        """The examples by length, equal lengths shuffled, and an order of the batches."""
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

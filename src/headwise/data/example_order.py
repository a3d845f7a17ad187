"""Order of examples, batches of similar lengths and splits, all reproducible from seeds and
contents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ..errors import SpecError

IndexArray = NDArray[np.int64]
DEFAULT_HELD_OUT = 0.05  # share of the examples for validation, and again for test

ExampleRows = list[list[int]]  # the examples of each row of a batch


def make_rng(*key: int) -> np.random.Generator:
    """Random generator that is determined by a few integers, such as a seed and a batch index.

    >>> int(make_rng(3, 1).integers(100)) == int(make_rng(3, 1).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class EpochOrder:
    """An order of examples that is shuffled again in every epoch.

    >>> order = EpochOrder(5)
    >>> sorted(order.take(0, 5, seed=1).tolist()), len(order.take(2, 3, seed=1))
    ([0, 1, 2, 3, 4], 3)
    """

    def __init__(self, num_examples: int) -> None:
        self.count = num_examples
        # The last two permutations, so that an epoch is not drawn again for each of its batches.
        self._permutations: dict[tuple[int, int], IndexArray] = {}

    def of(self, seed: int, epoch: int) -> IndexArray:
        """Permutation of all examples in this epoch."""
        key = seed, epoch
        permutation = self._permutations.get(key)
        if permutation is None:
            permutation = make_rng(seed, epoch).permutation(self.count)
            self._permutations = dict([*list(self._permutations.items())[-1:], (key, permutation)])
        return permutation

    def take(self, index: int, size: int, seed: int) -> IndexArray:
        """Indices of the examples in batch `index`, which may span the end of one epoch and the
        start of the next.
        """
        epochs, positions = np.divmod(np.arange(index * size, (index + 1) * size), self.count)
        return np.concatenate(
            [self.of(seed, int(epoch))[positions[epochs == epoch]] for epoch in np.unique(epochs)]
        )


class BatchPlan:
    """Assignment of examples to batches by length; every epoch has the same number of batches.

    `lengths` holds the length of each example, or a number that is equal for examples of equal
    lengths. `units` are lists of rows; a row lists ranks of examples sorted by length. A batch
    consists of `units_per_batch` units. In each epoch, examples of equal length swap places and the
    units are shuffled. The lengths in each unit stay the same, so the number of batches is constant
    and the epoch follows from the batch index.
    """

    def __init__(
        self, lengths: IndexArray, units: Sequence[ExampleRows], units_per_batch: int = 1
    ) -> None:
        self.lengths, self.units, self.units_per_batch = lengths, units, units_per_batch
        self._epoch_orders: dict[tuple[int, int], tuple[IndexArray, IndexArray]] = {}

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.units) // self.units_per_batch)

    def take(self, index: int, seed: int) -> ExampleRows:
        """Example indices of each row of training batch `index`."""
        epoch, batch = divmod(index, self.batches)
        key = seed, epoch
        orders = self._epoch_orders.get(key)
        if orders is None:
            rng = make_rng(seed, epoch)
            orders = (
                np.lexsort((rng.random(len(self.lengths)), self.lengths)),
                rng.permutation(len(self.units)),
            )
            self._epoch_orders = dict([*list(self._epoch_orders.items())[-1:], (key, orders)])
        return self._rows(
            orders[0], orders[1][batch * self.units_per_batch : (batch + 1) * self.units_per_batch]
        )

    def evaluation_rows(self, index: int) -> ExampleRows:
        """Example indices of each row of evaluation batch `index`, independent of any seed.

        The units are shuffled, so that the first few batches contain all lengths.
        """
        batch = index % self.batches
        units = make_rng(0).permutation(len(self.units))[
            batch * self.units_per_batch : (batch + 1) * self.units_per_batch
        ]
        return self._rows(np.argsort(self.lengths, kind="stable"), units)

    def _rows(self, order: IndexArray, units: IndexArray) -> ExampleRows:
        return [[int(order[rank]) for rank in row] for unit in units for row in self.units[unit]]


def plan_by_length(example_lengths: IndexArray, size: int) -> BatchPlan:
    """Batches of at most `size` examples of similar lengths.

    >>> sorted(plan_by_length(np.array([5, 1, 1, 5, 5]), 3).take(1, seed=0))
    [[3], [4]]
    """
    count = len(example_lengths)
    parts = np.array_split(np.arange(count), -(-count // size))
    return BatchPlan(example_lengths, [[[int(rank)] for rank in part] for part in parts])


def plan_by_token_budget(example_lengths: IndexArray, size: int) -> BatchPlan:
    """Batches of at most `size` tokens, padding included: number of examples times the longest
    length in the batch.
    """
    if (longest := int(example_lengths.max())) > size:
        raise SpecError(
            f"a batch of {size} tokens is too small for an example of {longest} tokens; use "
            f"batch={longest} or more"
        )
    units: list[ExampleRows] = [[]]
    for rank, length in enumerate(np.sort(example_lengths)):
        if (len(units[-1]) + 1) * int(length) > size:
            units.append([])
        units[-1].append([rank])
    return BatchPlan(example_lengths, units)


MAX_OPEN_ROWS = (
    256  # rows that are filled at the same time: more rows waste less space, but take longer
)


def plan_packed_rows(sides: Sequence[IndexArray], length: int, size: int) -> BatchPlan:
    """Batches of `size` rows, each packed with examples up to `length` tokens on every side.

    `sides` holds the lengths of all examples for each side, such as source and target. The longest
    examples are placed first, each in the first open row that has room for it.
    """
    needs = np.stack(sides, 1)
    levels = needs @ (length + 1) ** np.arange(
        needs.shape[1]
    )  # equal for examples with equal lengths on every side
    order = np.argsort(levels, kind="stable")
    rows: ExampleRows = [[] for _ in range(MAX_OPEN_ROWS)]
    room = np.full((MAX_OPEN_ROWS, needs.shape[1]), length)
    open_rows = list(range(MAX_OPEN_ROWS))  # indices into `rows`
    for rank in range(len(levels))[::-1]:
        need = needs[order[rank]]
        fits = np.all(room >= need, axis=1)
        slot = int(fits.argmax())
        if not fits[slot]:
            slot = int(room.min(1).argmin())  # close the fullest row and open a new one
            open_rows[slot], room[slot] = len(rows), length
            rows.append([])
        room[slot] -= need
        rows[open_rows[slot]].append(rank)
    return BatchPlan(levels, [[row] for row in rows if row], units_per_batch=size)


def strided_batch_indices(count: int, index: int, size: int) -> range:
    """Example indices of batch `index` in a pass over `count` examples, at most `size` of them.

    Each batch takes examples from the whole range, at equal distances. After the last batch the
    first one follows.

    >>> (
    ...     strided_batch_indices(5, 0, 3),
    ...     strided_batch_indices(5, 1, 3),
    ...     strided_batch_indices(5, 2, 3),
    ... )
    (range(0, 5, 2), range(1, 5, 2), range(0, 5, 2))
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

    >>> {
    ...     split: indices.tolist()
    ...     for split, indices in split_by_key(["a", "b", "a", "c"], 0.3, 0).items()
    ... }
    {'train': [0, 1, 2], 'valid': [3], 'test': []}
    """
    check_split_shares(valid, test)
    distinct = sorted(set(keys), key=lambda key: blake2b(key.encode(), digest_size=8).digest())
    num_held_out = 1 + (test > 0)
    if len(distinct) <= num_held_out:
        raise SpecError(
            f"{len(distinct)} different examples are too few for {num_held_out + 1} splits; add "
            "examples to the data"
        )
    num_test = min(max(1, round(test * len(distinct))), len(distinct) - 2) if test else 0
    num_valid = min(max(1, round(valid * len(distinct))), len(distinct) - 1 - num_test)
    split_of_key = dict.fromkeys(distinct, "train")
    split_of_key |= dict.fromkeys(distinct[:num_valid], "valid")
    split_of_key |= dict.fromkeys(distinct[num_valid : num_valid + num_test], "test")
    splits = np.array([split_of_key[key] for key in keys])
    return {name: np.flatnonzero(splits == name) for name in ("train", "valid", "test")}


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
    ends = np.cumsum(list(counts.values())).tolist()
    ranges = [np.arange(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    splits = {"test": np.arange(0)} | dict(zip(counts, ranges, strict=True))
    if "valid" not in counts:
        train = splits["train"]
        parts = split_by_key(
            [keys[n] for n in train.tolist()], valid, 0.0 if "test" in counts else test
        )
        splits |= {
            split: train[part]
            for split, part in parts.items()
            if split == "train" or split not in counts
        }
    return {split: splits[split] for split in ("train", "valid", "test")}

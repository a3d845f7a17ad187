"""In which order examples come, and which split they are in, as functions of numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ..errors import SpecError

IndexArray = NDArray[np.int64]
DEFAULT_HELD_OUT = 0.05  # of examples, to validate on, and as many to test on

ExampleRows = list[list[int]]  # the examples of each row of a batch


def make_rng(*key: int) -> np.random.Generator:
    """Random numbers that follow from a few whole ones, such as a seed and the index of a batch.

    >>> int(make_rng(3, 1).integers(100)) == int(make_rng(3, 1).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class EpochOrder:
    """So many examples, one after the other, in another order every epoch.

    >>> order = EpochOrder(5)
    >>> sorted(order.take(0, 5, seed=1).tolist()), len(order.take(2, 3, seed=1))
    ([0, 1, 2, 3, 4], 3)
    """

    def __init__(self, num_examples: int) -> None:
        self.count = num_examples
        self._permutations: dict[
            tuple[int, int], IndexArray
        ] = {}  # spares drawing an epoch again for each of its batches

    def of(self, seed: int, epoch: int) -> IndexArray:
        """All of them, as this epoch orders them."""
        key = seed, epoch
        found = self._permutations.get(key)
        if found is None:
            found = make_rng(seed, epoch).permutation(self.count)
            self._permutations = dict([*list(self._permutations.items())[-1:], (key, found)])
        return found

    def take(self, index: int, size: int, seed: int) -> IndexArray:
        """Batch `index` of this size; it may end one epoch and begin the next."""
        epoch, place = np.divmod(np.arange(index * size, (index + 1) * size), self.count)
        return np.concatenate([self.of(seed, int(one))[place[epoch == one]] for one in np.unique(epoch)])


class BatchPlan:
    """Rows of examples in batches, whose make-up by length is the same in every epoch.

    `levels` is how long each example is. Examples of one level change places from epoch to epoch, and so do `units`,
    lists of rows of places in the order of levels; `each` of them are a batch. So how many batches an epoch has never
    changes, and the epoch of a batch follows from its index.
    """

    def __init__(self, lengths: IndexArray, units: Sequence[ExampleRows], units_per_batch: int = 1) -> None:
        self.lengths, self.units, self.each = lengths, units, units_per_batch
        self._epoch_orders: dict[tuple[int, int], tuple[IndexArray, IndexArray]] = {}

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        return -(-len(self.units) // self.each)

    def take(self, index: int, seed: int) -> ExampleRows:
        """The examples of each row of a batch of training."""
        epoch, at = divmod(index, self.batches)
        key = seed, epoch
        found = self._epoch_orders.get(key)
        if found is None:
            draw = make_rng(seed, epoch)
            found = np.lexsort((draw.random(len(self.lengths)), self.lengths)), draw.permutation(len(self.units))
            self._epoch_orders = dict([*list(self._epoch_orders.items())[-1:], (key, found)])
        return self._rows(found[0], found[1][at * self.each : (at + 1) * self.each])

    def evaluation_rows(self, index: int) -> ExampleRows:
        """The same for judging: batches that no seed changes, so mixed that a few of them have every length."""
        at = index % self.batches
        chosen = make_rng(0).permutation(len(self.units))[at * self.each : (at + 1) * self.each]
        return self._rows(np.argsort(self.lengths, kind="stable"), chosen)

    def _rows(self, order: IndexArray, chosen: IndexArray) -> ExampleRows:
        return [[int(order[place]) for place in row] for unit in chosen for row in self.units[unit]]


def plan_by_length(example_lengths: IndexArray, size: int) -> BatchPlan:
    """Batches of at most so many examples of about one length.

    >>> sorted(plan_by_length(np.array([5, 1, 1, 5, 5]), 3).take(1, seed=0))
    [[3], [4]]
    """
    count = len(example_lengths)
    cuts = np.array_split(np.arange(count), -(-count // size))
    return BatchPlan(example_lengths, [[[int(place)] for place in cut] for cut in cuts])


def plan_by_token_budget(example_lengths: IndexArray, size: int) -> BatchPlan:
    """Batches of as many examples as so many tokens hold, all counted as long as the longest beside them."""
    if (most := int(example_lengths.max())) > size:
        raise SpecError(f"a batch of {size} tokens holds no example of {most}; give batches of {most} or more")
    units: list[ExampleRows] = [[]]
    for place, level in enumerate(np.sort(example_lengths)):
        if (len(units[-1]) + 1) * int(level) > size:
            units.append([])
        units[-1].append([place])
    return BatchPlan(example_lengths, units)


MAX_OPEN_ROWS = 256  # rows that are filled side by side: more find a fit more often, and take longer


def plan_packed_rows(sides: Sequence[IndexArray], length: int, size: int) -> BatchPlan:
    """Batches of so many rows, each filled with examples until one side, as source and target, is `length` long."""
    needs = np.stack(sides, 1)
    levels = needs @ (length + 1) ** np.arange(needs.shape[1])  # examples of one level are as long on every side
    order = np.argsort(levels, kind="stable")
    rows: ExampleRows = [[] for _ in range(MAX_OPEN_ROWS)]
    room = np.full((MAX_OPEN_ROWS, needs.shape[1]), length)
    beside = list(range(MAX_OPEN_ROWS))  # the rows that are open
    for place in range(len(levels))[::-1]:
        need = needs[order[place]]
        fits = np.all(room >= need, axis=1)
        at = int(fits.argmax())
        if not fits[at]:
            at = int(room.min(1).argmin())  # the fullest one is closed
            beside[at], room[at] = len(rows), length
            rows.append([])
        room[at] -= need
        rows[beside[at]].append(place)
    return BatchPlan(levels, [[row] for row in rows if row], units_per_batch=size)


def strided_batch_indices(count: int, index: int, size: int) -> range:
    """Batch `index` of at most so many examples, each batch from all over; after the last one the first again.

    >>> strided_batch_indices(5, 0, 3), strided_batch_indices(5, 1, 3), strided_batch_indices(5, 2, 3)
    (range(0, 5, 2), range(1, 5, 2), range(0, 5, 2))
    """
    batches = -(-count // size)
    return range(index % batches, count, batches)


def check_split_shares(valid: float, test: float) -> None:
    """Refuse shares for validation and test that leave nothing to train on, or nothing to judge by."""
    if not 0 < valid < 1 or not 0 <= test < 1 or valid + test >= 1:
        raise SpecError(f"valid={valid:g} and test={test:g} are no shares of a whole; give valid=0.1 and test=0, say")


def split_by_key(keys: Sequence[str], valid: float, test: float) -> dict[str, IndexArray]:
    """Which examples each split has: those of one key stay together, and no seed moves them.

    >>> {split: own.tolist() for split, own in split_by_key(["a", "b", "a", "c"], 0.3, 0).items()}
    {'train': [0, 1, 2], 'valid': [3], 'test': []}
    """
    check_split_shares(valid, test)
    known = sorted(set(keys), key=lambda key: blake2b(key.encode(), digest_size=8).digest())
    least = 1 + (test > 0)
    if len(known) <= least:
        raise SpecError(f"{len(known)} different examples cannot be divided among {least + 1} splits; bring more")
    tested = min(max(1, round(test * len(known))), len(known) - 2) if test else 0
    held = min(max(1, round(valid * len(known))), len(known) - 1 - tested)
    split = dict.fromkeys(known, "train")
    split |= dict.fromkeys(known[:held], "valid") | dict.fromkeys(known[held : held + tested], "test")
    own = np.array([split[key] for key in keys])
    return {name: np.flatnonzero(own == name) for name in ("train", "valid", "test")}


def split_examples(counts: Mapping[str, int], keys: Sequence[str], valid: float, test: float) -> dict[str, IndexArray]:
    """Which examples each split has, where those of `counts` stand one after the other, with a key each.

    Where there are none for validation they are drawn from those to train on, as `members` draws them.

    >>> {split: own.tolist() for split, own in split_examples({"train": 2, "test": 1}, ["a", "b", "a"], 0.5, 0).items()}
    {'train': [1], 'valid': [0], 'test': [2]}
    """
    ends = np.cumsum(list(counts.values())).tolist()
    ranges = [np.arange(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    splits = {"test": np.arange(0)} | dict(zip(counts, ranges, strict=True))
    if "valid" not in counts:
        own = splits["train"]
        held = split_by_key([keys[n] for n in own.tolist()], valid, 0.0 if "test" in counts else test)
        splits |= {split: own[chosen] for split, chosen in held.items() if split == "train" or split not in counts}
    return {split: splits[split] for split in ("train", "valid", "test")}

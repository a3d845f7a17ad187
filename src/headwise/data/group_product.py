"""group: the running product of elements of a group. Parity, clocks, permutations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.pattern_base import check_whole_number
from ..model_spec import ModelSpec
from ..ops.counter_rng import RandomStreams
from .synthetic_task import (
    MIN_DISTINCT_EXAMPLES,
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    check_sizes,
    find_correct,
    find_correct_rows,
    make_small_decoder,
    slice_by_power_of_two,
    sum_by_slice,
)
from .task import IGNORE_INDEX, Batch, MetricSums

GROUP_PATTERN = re.compile(r"([ZSA])([1-9]\d{0,3})")
MAX_GROUP_SIZE = {"Z": 1000, "S": 5, "A": 6}


@dataclass(frozen=True, repr=False)
class GroupProduct(SyntheticTask):
    """Elements g1, g2, ...; at each place the product g1 g2 ... gt is wanted (2404.08819).

    group="parity" is Z2; "Z5" adds modulo 5; "S3" are all permutations of three things, "A5" the even ones of five.
    A product applies its left factor first. Elements of S and A are numbered in alphabetical order, which starts with
    the one that moves nothing. A token of its own, the last id, begins every row: without it, and without absolute
    positions, attention cannot tell one element from the same one twice.

    >>> batch = GroupProduct(group="Z5", length=8).batch(0, 1)
    >>> batch.x.tolist(), batch.labels.tolist()
    ([[5, 1, 4, 3, 3, 4, 1, 3, 0]], [[-100, 1, 0, 3, 1, 0, 1, 4, 4]])
    """

    name: ClassVar[str] = "group"
    group: str = "parity"
    length: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        order, length = len(self.table), check_whole_number("length", self.length, 1)
        if order < 2:
            raise SpecError(f"group={self.group!r} has one element, so nothing is asked; use 'parity', 'Z5' or 'S3'")
        enough = next(n for n in range(1, 20) if order**n >= MIN_DISTINCT_EXAMPLES)
        check_sizes(self, tokens=length)
        check_num_examples(self, float(order) ** min(length, 64), f"use length={enough} or more")

    @property
    def table(self) -> np.ndarray:
        """The product of every two elements: table[g, h] is g h."""
        return make_multiplication_table(self.group)

    @property
    def chance(self) -> Mapping[str, float]:
        """Any element: products of random elements are all alike likely."""
        one = 1 / len(self.table)
        return {"accuracy": one, "exact_match": one**self.length}

    def model(self) -> ModelSpec:
        """Four layers; how many a group needs for a length is what the task is about."""
        return make_small_decoder(self.name, len(self.table) + 1, ModelShape(width=64, heads=4, layers=4, feed=128))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        table = self.table
        x = random.integers(len(table), self.length)
        products = x.copy()
        for t in range(1, self.length):
            products[:, t] = table[products[:, t - 1], x[:, t]]
        return {"content": x, "x": x, "labels": products}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        first = np.ones((len(examples["x"]), 1), np.int64)
        x = np.concatenate([len(self.table) * first, examples["x"]], 1)
        labels = np.concatenate([IGNORE_INDEX * first, examples["labels"]], 1)
        return Batch(torch.from_numpy(x), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy by how many elements were multiplied, and how often all of a row is right."""
        right, asked = find_correct(logits, batch.labels)
        count = torch.arange(asked.shape[1], device=asked.device).expand(asked.shape)
        rows = find_correct_rows(right, asked)
        told = dict(sum_by_slice("accuracy", right, asked, slice_by_power_of_two("t", count)))
        return told | dict(sum_by_slice("exact_match", rows, torch.ones_like(rows), {}))

    def text(self, ids: list[int]) -> str:
        """Elements by number, what begins a row as |."""
        return " ".join("|" if one == len(self.table) else str(one) for one in ids)


def make_multiplication_table(name: str) -> np.ndarray:
    """The products of a group by its name.

    >>> make_multiplication_table("Z3").tolist(), make_multiplication_table("S3")[1].tolist()
    ([[0, 1, 2], [1, 2, 0], [2, 0, 1]], [1, 0, 3, 2, 5, 4])
    """
    told = GROUP_PATTERN.fullmatch("Z2" if name == "parity" else name)
    if not told:
        raise SpecError(f"group={name!r} is unknown; use 'parity', or a letter and a size: 'Z5', 'S3', 'A5'")
    kind, size = told[1], int(told[2])
    if size > MAX_GROUP_SIZE[kind]:
        raise SpecError(
            f"group={name!r} is larger than any model here learns; use at most {kind}{MAX_GROUP_SIZE[kind]}"
        )
    if kind == "Z":
        return np.add.outer(np.arange(size), np.arange(size)) % size
    moves = np.array(list(_permutations(kind, size)))
    weights = size ** np.arange(size)[::-1]
    products = moves[np.arange(len(moves))[None, :, None], moves[:, None]]  # [g, h, thing]: where h takes what g moved
    return np.searchsorted(moves @ weights, products @ weights)


def _permutations(kind: str, size: int) -> Iterator[tuple[int, ...]]:
    """Permutations as where each thing goes, in order; of A, those with an even number of inversions."""
    for move in permutations(range(size)):
        inversions = sum(a > b for n, a in enumerate(move) for b in move[n + 1 :])
        if kind == "S" or inversions % 2 == 0:
            yield move

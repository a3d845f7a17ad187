"""The task "group": running products in a finite group, such as parity, addition modulo n, or permutations."""

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
    """Predict at each position t the product g1 g2 ... gt of the group elements so far (2404.08819).

    group="parity" is Z2; "Z5" is addition modulo 5; "S3" are all permutations of three objects, "A5" the even
    permutations of five. A product applies its left factor first. Elements of S and A are numbered in lexicographic
    order, so 0 is the identity. Every row begins with a start token, the last id: without it and without absolute
    positions, attention cannot distinguish g from g g.

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
            raise SpecError(f"group={self.group!r} has only one element; use for example 'parity', 'Z5' or 'S3'")
        min_length = next(n for n in range(1, 20) if order**n >= MIN_DISTINCT_EXAMPLES)
        check_sizes(self, tokens=length)
        check_num_examples(self, float(order) ** min(length, 64), f"use length={min_length} or more")

    @property
    def table(self) -> np.ndarray:
        """Multiplication table: table[g, h] is the product g h."""
        return make_multiplication_table(self.group)

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of guessing any element; products of random elements are uniformly distributed."""
        accuracy = 1 / len(self.table)
        return {"accuracy": accuracy, "exact_match": accuracy**self.length}

    def model(self) -> ModelSpec:
        """A decoder of four layers; the depth that a group needs at a given length is what the task measures."""
        return make_small_decoder(self.name, len(self.table) + 1, ModelShape(width=64, heads=4, layers=4, feed=128))

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        table = self.table
        x = random.integers(len(table), self.length)
        products = x.copy()
        for t in range(1, self.length):
            products[:, t] = table[products[:, t - 1], x[:, t]]
        return {"content": x, "x": x, "labels": products}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        ones = np.ones((len(examples["x"]), 1), np.int64)
        x = np.concatenate([len(self.table) * ones, examples["x"]], 1)
        labels = np.concatenate([IGNORE_INDEX * ones, examples["labels"]], 1)
        return Batch(torch.from_numpy(x), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy per position, by the number of factors; exact match of whole rows."""
        correct, has_label = find_correct(logits, batch.labels)
        num_factors = torch.arange(has_label.shape[1], device=has_label.device).expand(has_label.shape)
        correct_rows = find_correct_rows(correct, has_label)
        accuracy = dict(sum_by_slice("accuracy", correct, has_label, slice_by_power_of_two("t", num_factors)))
        return accuracy | dict(sum_by_slice("exact_match", correct_rows, torch.ones_like(correct_rows), {}))

    def text(self, ids: list[int]) -> str:
        """Elements as numbers, the start token as "|"."""
        return " ".join("|" if token_id == len(self.table) else str(token_id) for token_id in ids)


def make_multiplication_table(name: str) -> np.ndarray:
    """Multiplication table of a group, [order, order], by its name.

    >>> make_multiplication_table("Z3").tolist(), make_multiplication_table("S3")[1].tolist()
    ([[0, 1, 2], [1, 2, 0], [2, 0, 1]], [1, 0, 3, 2, 5, 4])
    """
    match = GROUP_PATTERN.fullmatch("Z2" if name == "parity" else name)
    if not match:
        raise SpecError(f"group={name!r} is unknown; use 'parity', or a letter and a size: 'Z5', 'S3', 'A5'")
    family, size = match[1], int(match[2])
    if size > MAX_GROUP_SIZE[family]:
        raise SpecError(f"group={name!r} is too large; use at most {family}{MAX_GROUP_SIZE[family]}")
    if family == "Z":
        return np.add.outer(np.arange(size), np.arange(size)) % size
    elements = np.array(list(_permutations(family, size)))
    weights = size ** np.arange(size)[::-1]
    # products[g, h, i] = h(g(i)); reading permutations as numbers in base `size` keeps their order.
    products = elements[np.arange(len(elements))[None, :, None], elements[:, None]]
    return np.searchsorted(elements @ weights, products @ weights)


def _permutations(family: str, size: int) -> Iterator[tuple[int, ...]]:
    """Permutations in lexicographic order, as the images of 0 .. size - 1; for "A" only the even ones."""
    for images in permutations(range(size)):
        inversions = sum(a > b for n, a in enumerate(images) for b in images[n + 1 :])
        if family == "S" or inversions % 2 == 0:
            yield images

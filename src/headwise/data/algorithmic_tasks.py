"""Algorithmic tasks: "copy", "group" (running products in a finite group) and "graph" (shortest
distances).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from math import comb
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, suggest
from ..masking.pattern_base import check_whole_number
from ..masking.patterns import Edges
from ..masking.sequence_info import SequenceInfo
from ..model_spec import ModelSpec, OutputHeadSpec
from ..ops.counter_rng import Ints, RandomStreams
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
    make_small_encoder,
    make_small_translator,
    parse_sizes,
    slice_by_power_of_two,
    slice_by_value,
    sum_by_slice,
)
from .task import IGNORE_INDEX, Batch, MetricSums

# --- Copying --------------------------------------------------------------------------------------


NOISE_ID, REPEAT_ID, START_ID = 0, 1, 2  # symbols have the ids after these
COPY_KINDS = ("induction", "selective", "source")


class CopyAnnotation(NamedTuple):
    """Annotation of an example: lengths of block and gap, and links (index of a symbol, index of
    its label).

    In kind="source" the symbols are those of the source.
    """

    block: int
    gap: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class CopyTask(SyntheticTask):
    """A random block of symbols, a gap of noise, a separator, and the block again, which must be
    predicted.

    kind="selective" scatters the noise among the symbols instead (MAD, 2403.17844). kind="source"
    gives the block alone to an encoder, and the decoder repeats it. `block` and `gap` are the
    numbers of symbols and of noise tokens; from a tuple each example draws one. Ids: 0 is noise, 1
    the separator, 2 begins every row, symbols follow.

    >>> task = CopyTask(symbols=9, block=4, gap=2)
    >>> print(task.text(task.batch(0, 1).x[0].tolist()))
    > 0 2 1 2 . . | 0 2 1
    """

    name: ClassVar[str] = "copy"
    kind: str = "induction"
    symbols: int = 32
    block: int | tuple[int, ...] = (8, 12, 16, 20, 24)
    gap: int | tuple[int, ...] = (0, 8, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in COPY_KINDS:
            raise SpecError(f"kind={self.kind!r} is unknown; {suggest(self.kind, COPY_KINDS)}")
        check_whole_number("symbols", self.symbols, 2)
        blocks, gaps = parse_sizes("block", self.block, 1), parse_sizes("gap", self.gap, 0)
        if self.kind == "source" and gaps != (0,):
            raise SpecError(
                f"gap={self.gap} is not possible with kind='source', which has no noise; use gap=0"
            )
        check_sizes(self, tokens=1 + 2 * max(blocks) + max(gaps), symbols=self.symbols)
        check_num_examples(
            self, float(self.symbols) ** min(*blocks, 64), "use a longer block or more symbols"
        )

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of guessing any symbol."""
        blocks = parse_sizes("block", self.block, 1)
        accuracy = 1 / self.symbols
        return {
            "accuracy": accuracy,
            "exact_match": sum(accuracy**block for block in blocks) / len(blocks),
        }

    def model(self) -> ModelSpec:
        """A decoder of two layers, the least for induction heads: the first attends to the previous
        token.

        kind="source" has an encoder and a decoder of two layers each.
        """
        make = make_small_translator if self.kind == "source" else make_small_decoder
        return make(
            self.name,
            self.symbols + START_ID + 1,
            ModelShape(width=64, heads=4, layers=2, feed=128),
        )

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        blocks, gaps = parse_sizes("block", self.block, 1), parse_sizes("gap", self.gap, 0)
        block, gap = random.choice(blocks), random.choice(gaps)
        max_block, max_prefix = max(blocks), max(blocks) + max(gaps)
        symbols = random.integers(self.symbols, max_block) + START_ID + 1
        separator = 1 + (block + gap)[:, None]  # its index in each row
        sources = 1 + np.tile(np.arange(max_block), (len(random), 1))  # indices of the symbols
        if self.kind == "selective":
            sources = (
                1
                + _scatter_positions(random.uniform(max_prefix), block, separator - 1)[
                    :, :max_block
                ]
            )
        targets = separator + np.arange(max_block)  # indices of their labels
        x = np.full((len(random), 1 + max_prefix + max_block), NOISE_ID)
        x[:, 0] = START_ID
        labels = np.full_like(x, IGNORE_INDEX)
        row, n = np.nonzero(np.arange(max_block) < block[:, None])
        x[row, sources[row, n]] = labels[row, targets[row, n]] = symbols[row, n]
        x[np.arange(len(random)), separator[:, 0]] = REPEAT_ID
        row, n = np.nonzero(np.arange(max_block) < block[:, None] - 1)
        x[row, targets[row, n] + 1] = symbols[row, n]
        x[np.arange(x.shape[1]) >= separator + block[:, None]] = -1
        return {
            "content": x,
            "x": x,
            "labels": labels,
            "sources": sources,
            "block": block,
            "gap": gap,
        }

    def to_batch(self, examples: ExampleArrays) -> Batch:
        if self.kind == "source":
            return _make_source_batch(examples["x"], examples["block"])
        block, gap = examples["block"], examples["gap"]
        length = 1 + 2 * block + gap
        x, labels = (
            torch.from_numpy(examples["x"][:, : length.max()]),
            torch.from_numpy(examples["labels"][:, : length.max()]),
        )
        tokens = (
            None
            if (length == length[0]).all()
            else SequenceInfo.from_batch(x, lengths=torch.from_numpy(length))
        )
        gold = [
            CopyAnnotation(
                size,
                noise,
                tuple((at, 1 + size + noise + n) for n, at in enumerate(sources[:size])),
            )
            for size, noise, sources in zip(
                block.tolist(), gap.tolist(), examples["sources"].tolist(), strict=True
            )
        ]
        return Batch(x.clamp(min=0), labels, tokens=tokens, gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy per symbol, by distance to its source (in kind="source", by block length); exact
        match of whole blocks, by block length.
        """
        correct, has_label = find_correct(logits, batch.labels)
        correct_rows, blocks = (
            find_correct_rows(correct, has_label),
            [example.block for example in batch.gold],
        )
        by_block = slice_by_value("block", blocks, correct_rows)
        if self.kind == "source":
            slices = slice_by_value("block", blocks, correct)
        else:
            distance = torch.zeros(has_label.shape, dtype=torch.long)
            for row, example in enumerate(batch.gold):
                sources, targets = torch.tensor(example.links).T
                distance[row, targets] = targets - sources
            slices = slice_by_power_of_two("distance", distance.to(has_label.device))
        accuracy = dict(sum_by_slice("accuracy", correct, has_label, slices))
        return accuracy | dict(
            sum_by_slice("exact_match", correct_rows, torch.ones_like(correct_rows), by_block)
        )

    def text(self, ids: list[int]) -> str:
        """Symbols as numbers, noise as ".", the separator as "|", the start of a row as ">"."""
        names = {NOISE_ID: ".", REPEAT_ID: "|", START_ID: ">"}
        return " ".join(names.get(token_id, str(token_id - START_ID - 1)) for token_id in ids)


def _make_source_batch(rows: Ints, block: Ints) -> Batch:
    """Batch of an encoder that reads the block of each row of a copy task, and a decoder that
    repeats it.
    """
    longest = int(block.max())
    source = torch.from_numpy(rows[:, 1 : 1 + longest])
    in_block = torch.arange(longest) < torch.from_numpy(block)[:, None]
    begin = torch.full_like(source[:, :1], START_ID)
    source = source.where(in_block, NOISE_ID)
    tokens = (
        None if in_block.all() else SequenceInfo.from_batch(source, lengths=torch.from_numpy(block))
    )
    gold = [CopyAnnotation(size, 0, tuple((n, n) for n in range(size))) for size in block.tolist()]
    x, labels = torch.cat([begin, source[:, :-1]], 1), source.where(in_block, IGNORE_INDEX)
    return Batch(x.where(in_block, NOISE_ID), labels, tokens, source, tokens, gold)


def _scatter_positions(random: np.ndarray, block: np.ndarray, end: np.ndarray) -> np.ndarray:
    """In each row `block` distinct indices below `end`, sorted, followed by the remaining indices.

    `random` are uniform numbers [rows, n]; the indices of the smallest ones are chosen.
    """
    random = np.where(np.arange(random.shape[1]) < end, random, 2.0)
    rank = random.argsort(1, kind="stable").argsort(1, kind="stable")
    return (rank >= block[:, None]).argsort(1, kind="stable")


# --- Products in a finite group -------------------------------------------------------------------

GROUP_PATTERN = re.compile(r"([ZSA])([1-9]\d{0,3})")
MAX_GROUP_SIZE = {"Z": 1000, "S": 5, "A": 6}


@dataclass(frozen=True, repr=False)
class GroupProduct(SyntheticTask):
    """Predict at each position t the product g1 g2 ... gt of the group elements so far
    (2404.08819).

    group="parity" is Z2; "Z5" is addition modulo 5; "S3" are all permutations of three objects,
    "A5" the even permutations of five. A product applies its left factor first. Elements of S and A
    are numbered in lexicographic order, so 0 is the identity. Every row begins with a start token,
    the last id: without it and without absolute positions, attention cannot distinguish g from g g.

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
            raise SpecError(
                f"group={self.group!r} has only one element; use for example 'parity', 'Z5' or 'S3'"
            )
        min_length = next(n for n in range(1, 20) if order**n >= MIN_DISTINCT_EXAMPLES)
        check_sizes(self, tokens=length)
        check_num_examples(
            self, float(order) ** min(length, 64), f"use length={min_length} or more"
        )

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
        """A decoder of four layers; the depth that a group needs at a given length is what the task
        measures.
        """
        return make_small_decoder(
            self.name, len(self.table) + 1, ModelShape(width=64, heads=4, layers=4, feed=128)
        )

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
        num_factors = torch.arange(has_label.shape[1], device=has_label.device).expand(
            has_label.shape
        )
        correct_rows = find_correct_rows(correct, has_label)
        accuracy = dict(
            sum_by_slice("accuracy", correct, has_label, slice_by_power_of_two("t", num_factors))
        )
        return accuracy | dict(
            sum_by_slice("exact_match", correct_rows, torch.ones_like(correct_rows), {})
        )

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
        raise SpecError(
            f"group={name!r} is unknown; use 'parity', or a letter and a size: 'Z5', 'S3', 'A5'"
        )
    family, size = match[1], int(match[2])
    if size > MAX_GROUP_SIZE[family]:
        raise SpecError(
            f"group={name!r} is too large; use at most {family}{MAX_GROUP_SIZE[family]}"
        )
    if family == "Z":
        return np.add.outer(np.arange(size), np.arange(size)) % size
    elements = np.array(list(_permutations(family, size)))
    weights = size ** np.arange(size)[::-1]
    # products[g, h, i] = h(g(i)); reading permutations as numbers in base `size` keeps their order.
    products = elements[np.arange(len(elements))[None, :, None], elements[:, None]]
    return np.searchsorted(elements @ weights, products @ weights)


def _permutations(family: str, size: int) -> Iterator[tuple[int, ...]]:
    """Permutations in lexicographic order, as the images of 0 .. size - 1; for "A" only the even
    ones.
    """
    for images in permutations(range(size)):
        inversions = sum(a > b for n, a in enumerate(images) for b in images[n + 1 :])
        if family == "S" or inversions % 2 == 0:
            yield images


# --- Distances in a graph -------------------------------------------------------------------------

GRAPH_STREAM = 3  # random stream of the graph; 0, 1 and 2 are the streams of the splits


@dataclass(frozen=True, repr=False)
class GraphDistance(SyntheticTask):
    """Predict for each node of a graph its distance to the nearest of `sources` marked nodes.

    The graph is a ring of `nodes` with `chords` additional random edges; it is determined by the
    seed and equal for all examples, which differ in their sources. Labels are the distances 0 ..
    `reach`, and `reach` + 1 for larger ones. The attention pattern lets a node attend to itself and
    its neighbours, so t layers propagate information t steps. Tokens (1 for a source, 0 otherwise)
    have no positions, so nodes differ only by the information that reaches them.

    >>> task = GraphDistance(nodes=14, chords=2, sources=4)
    >>> batch = task.batch(0, 1)
    >>> batch.x[0].tolist(), batch.labels[0].tolist()
    ([0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0], [4, 3, 2, 1, 0, 1, 2, 1, 0, 0, 0, 1, 2, 3])
    """

    name: ClassVar[str] = "graph"
    nodes: int = 32
    chords: int = 8
    sources: int = 3
    reach: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, minimum in {"nodes": 3, "chords": 0, "sources": 1, "reach": 1}.items():
            check_whole_number(option, getattr(self, option), minimum)
        if self.nodes > 512:
            raise SpecError(
                f"nodes={self.nodes} is too many for a pattern of edges; use at most 512"
            )
        if self.chords > (max_chords := comb(self.nodes, 2) - self.nodes):
            raise SpecError(
                f"chords={self.chords} is too many for a ring of {self.nodes} nodes; use at most "
                f"{max_chords}"
            )
        if self.sources >= self.nodes:
            raise SpecError(
                f"sources={self.sources} must be fewer than nodes={self.nodes}; use at most "
                f"{self.nodes - 1}"
            )
        check_num_examples(self, comb(self.nodes, self.sources), "use more nodes or sources")

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Edges of the graph as pairs of nodes, the smaller one first: the
        ring, then the chords.
        """
        ring = [(n, n + 1) for n in range(self.nodes - 1)] + [(0, self.nodes - 1)]
        candidates = [
            (a, b)
            for a in range(self.nodes)
            for b in range(a + 2, self.nodes)
            if (a, b) != (0, self.nodes - 1)
        ]
        zero = np.zeros(1, np.int64)
        chords = RandomStreams(self.seed, GRAPH_STREAM, zero, zero).distinct(
            len(candidates), self.chords
        )[0]
        return (*ring, *(candidates[n] for n in chords.tolist()))

    @property
    def pattern(self) -> Edges:
        """Attention pattern: each node attends to itself and to its neighbours."""
        loops = tuple((n, n) for n in range(self.nodes))
        return Edges((*loops, *self.edges, *((b, a) for a, b in self.edges)))

    @property
    def distances(self) -> Ints:
        """Number of edges on the shortest path between every two nodes, [nodes, nodes]."""
        adjacency = np.zeros((self.nodes, self.nodes), bool)
        adjacency[tuple(np.array(self.edges).T)] = True
        adjacency |= adjacency.T
        distances = np.full(adjacency.shape, -1)
        reached, distance = np.eye(self.nodes, dtype=bool), 0
        while (distances < 0).any():
            distances[reached & (distances < 0)] = distance
            reached, distance = reached | (reached.astype(np.int64) @ adjacency > 0), distance + 1
        return distances

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of guessing any distance."""
        accuracy = 1 / (self.reach + 2)
        return {"accuracy": accuracy, "exact_match": accuracy**self.nodes}

    def model(self) -> ModelSpec:
        """An encoder of `reach` layers, the least that carry information `reach` steps."""
        shape = ModelShape(width=64, heads=4, layers=self.reach, feed=128, positions="none")
        return make_small_encoder(
            self.name, 2, shape, OutputHeadSpec("distance", self.reach + 2), self.pattern
        )

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        sources = np.sort(random.distinct(self.nodes, self.sources), 1)
        x = np.zeros((len(random), self.nodes), np.int64)
        np.put_along_axis(x, sources, 1, 1)
        return {"content": sources, "x": x, "sources": sources}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        """The batch of these examples; `gold` holds the sources of each."""
        labels = self.distances[examples["sources"]].min(1).clip(max=self.reach + 1)
        gold = [tuple(row) for row in examples["sources"].tolist()]
        return Batch(torch.from_numpy(examples["x"]), torch.from_numpy(labels), gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy per node, overall and by distance; exact match of whole graphs."""
        correct, has_label = find_correct(logits, batch.labels)
        by_distance = {f"distance={d}": batch.labels == d for d in range(self.reach + 1)}
        by_distance[f"distance>{self.reach}"] = batch.labels > self.reach
        correct_rows = find_correct_rows(correct, has_label)
        accuracy = dict(sum_by_slice("accuracy", correct, has_label, by_distance))
        return accuracy | dict(
            sum_by_slice("exact_match", correct_rows, torch.ones_like(correct_rows), {})
        )

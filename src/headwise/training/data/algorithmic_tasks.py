"""Algorithmic tasks: "copy", "group" (running products in a finite group) and "graph" (shortest
distances).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import comb
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...attention.masking.pattern_base import check_whole_number
from ...attention.masking.patterns import Edges
from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.counter_rng import Ints, RandomStreams
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import ModelSpec, OutputHeadSpec
from ...util.errors import SpecError, suggest
from .synthetic_task import (
    MIN_DISTINCT_EXAMPLES,
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    check_sizes,
    make_small_decoder,
    make_small_encoder,
    make_small_translator,
    measure_tokens_and_rows,
    number_positions,
    pad_to_longest,
    parse_sizes,
    slice_by_power_of_two,
    slice_by_value,
)
from .task import MetricSums

# --- Copying --------------------------------------------------------------------------------------

NOISE_ID = 0
REPEAT_ID = 1
START_ID = 2  # symbols have the ids after these
COPY_KINDS = ("induction", "selective", "source")


class CopyAnnotation(NamedTuple):
    """Lengths of block and gap of an example, and links (index of a symbol, index of its label).

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
        if self.kind == "source" and self._gaps != (0,):
            raise SpecError(
                f"gap={self.gap} is not possible with kind='source', which has no noise; use gap=0"
            )
        tokens = 1 + 2 * max(self._blocks) + max(self._gaps)
        check_sizes(self, tokens=tokens, symbols=self.symbols)
        count = float(self.symbols) ** min(*self._blocks, 64)
        check_num_examples(self, count, "use a longer block or more symbols")

    @property
    def _blocks(self) -> tuple[int, ...]:
        return parse_sizes("block", self.block, 1)

    @property
    def _gaps(self) -> tuple[int, ...]:
        return parse_sizes("gap", self.gap, 0)

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of guessing any symbol."""
        accuracy = 1 / self.symbols
        exact_match = sum(accuracy**block for block in self._blocks) / len(self._blocks)
        return {"accuracy": accuracy, "exact_match": exact_match}

    def model(self) -> ModelSpec:
        """A decoder of two layers, the least for induction heads: the first attends to the previous
        token.

        kind="source" has an encoder and a decoder of two layers each.
        """
        make = make_small_translator if self.kind == "source" else make_small_decoder
        shape = ModelShape(width=64, heads=4, layers=2, feed=128)
        return make(self.name, self.symbols + START_ID + 1, shape)

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        block = random.choice(self._blocks)
        gap = random.choice(self._gaps)
        longest = max(self._blocks)
        prefix = longest + max(self._gaps)
        rows = np.arange(len(random))
        symbols = random.integers(self.symbols, longest) + START_ID + 1
        separator = 1 + (block + gap)[:, None]  # its index in each row
        sources = 1 + np.tile(np.arange(longest), (len(random), 1))  # indices of the symbols
        if self.kind == "selective":
            positions = _scatter_positions(random.uniform(prefix), block, separator - 1)
            sources = 1 + positions[:, :longest]
        targets = separator + np.arange(longest)  # indices of their labels
        x = np.full((len(random), 1 + prefix + longest), NOISE_ID)
        x[:, 0] = START_ID
        x[rows, separator[:, 0]] = REPEAT_ID
        labels = np.full_like(x, IGNORE_INDEX)
        row, n = np.nonzero(np.arange(longest) < block[:, None])
        x[row, sources[row, n]] = symbols[row, n]
        labels[row, targets[row, n]] = symbols[row, n]
        row, n = np.nonzero(np.arange(longest) < block[:, None] - 1)
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
        gold: list[CopyAnnotation] = []
        for row, size in enumerate(examples["block"].tolist()):
            gap = int(examples["gap"][row])
            sources = examples["sources"][row, :size].tolist()
            gold.append(CopyAnnotation(size, gap, _pair_up(sources, 1 + size + gap)))
        length = 1 + 2 * examples["block"] + examples["gap"]
        return replace(pad_to_longest(examples, length), gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy per symbol, by distance to its source (in kind="source", by block length); exact
        match of whole blocks, by block length.
        """
        blocks = [example.block for example in batch.gold]
        by_block = slice_by_value("block", blocks, logits.device)
        if self.kind == "source":
            slices = {name: mask[:, None] for name, mask in by_block.items()}
        else:
            distance = torch.zeros(batch.labels.shape, dtype=torch.long)
            for row, example in enumerate(batch.gold):
                sources, targets = torch.tensor(example.links).T
                distance[row, targets] = targets - sources
            slices = slice_by_power_of_two("distance", distance.to(logits.device))
        return measure_tokens_and_rows(logits, batch.labels, slices, by_block)

    def text(self, ids: list[int]) -> str:
        """Symbols as numbers, noise as ".", the separator as "|", the start of a row as ">"."""
        names = {NOISE_ID: ".", REPEAT_ID: "|", START_ID: ">"}
        return " ".join(names.get(token_id, str(token_id - START_ID - 1)) for token_id in ids)


def _make_source_batch(rows: Ints, block: Ints) -> Batch:
    """Batch of an encoder that reads the block of each row, and a decoder that repeats it."""
    longest = int(block.max())
    source = torch.from_numpy(rows[:, 1 : 1 + longest])
    in_block = torch.arange(longest) < torch.from_numpy(block)[:, None]
    begin = torch.full_like(source[:, :1], START_ID)
    source = source.where(in_block, NOISE_ID)
    tokens = None
    if not in_block.all():
        tokens = SequenceInfo.from_batch(source, lengths=torch.from_numpy(block))
    gold = [CopyAnnotation(size, 0, _pair_up(range(size), 0)) for size in block.tolist()]
    x = torch.cat([begin, source[:, :-1]], 1).where(in_block, NOISE_ID)
    return Batch(x, source.where(in_block, IGNORE_INDEX), tokens, source, tokens, gold)


def _pair_up(sources: Sequence[int], first: int) -> tuple[tuple[int, int], ...]:
    """Each source with its label, the labels from index `first` on."""
    return tuple((source, first + n) for n, source in enumerate(sources))


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
        order = len(self.table)
        check_whole_number("length", self.length, 1)
        if order < 2:
            raise SpecError(
                f"group={self.group!r} has only one element; use for example 'parity', 'Z5' or 'S3'"
            )
        check_sizes(self, tokens=self.length)
        enough = next(n for n in range(1, 20) if order**n >= MIN_DISTINCT_EXAMPLES)
        count = float(order) ** min(self.length, 64)
        check_num_examples(self, count, f"use length={enough} or more")

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
        shape = ModelShape(width=64, heads=4, layers=4, feed=128)
        return make_small_decoder(self.name, len(self.table) + 1, shape)

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        table = self.table
        x = random.integers(len(table), self.length)
        products = x.copy()
        for t in range(1, self.length):
            products[:, t] = table[products[:, t - 1], x[:, t]]
        return {"content": x, "x": x, "labels": products}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        start = ((0, 0), (1, 0))  # one more column, before the first
        x = np.pad(examples["x"], start, constant_values=len(self.table))
        labels = np.pad(examples["labels"], start, constant_values=IGNORE_INDEX)
        return Batch(torch.from_numpy(x), torch.from_numpy(labels))

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy per position, by the number of factors; exact match of whole rows."""
        by_factors = slice_by_power_of_two("t", number_positions(batch.labels))
        return measure_tokens_and_rows(logits, batch.labels, by_factors)

    def text(self, ids: list[int]) -> str:
        """Elements as numbers, the start token as "|"."""
        start = len(self.table)
        return " ".join("|" if token_id == start else str(token_id) for token_id in ids)


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
    family = match[1]
    size = int(match[2])
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
        inversions = np.triu(np.subtract.outer(images, images) > 0).sum()
        if family == "S" or inversions % 2 == 0:
            yield images


# --- Distances in a graph -------------------------------------------------------------------------

GRAPH_STREAM = 3  # random stream of the graph; 0, 1 and 2 are the streams of the splits
MAX_NODES = 512


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
        limits = {
            "nodes": MAX_NODES,
            "chords": comb(self.nodes, 2) - self.nodes,
            "sources": self.nodes - 1,
        }
        for option, limit in limits.items():
            if getattr(self, option) > limit:
                raise SpecError(
                    f"{option}={getattr(self, option)} is too many for a ring of nodes="
                    f"{self.nodes}; use at most {limit}"
                )
        check_num_examples(self, comb(self.nodes, self.sources), "use more nodes or sources")

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Edges of the graph as pairs of nodes, the smaller one first: the ring, then the chords."""
        last = self.nodes - 1
        ring = [(n, n + 1) for n in range(last)] + [(0, last)]
        is_chord = np.triu(np.ones((self.nodes, self.nodes), bool), 2)
        is_chord[0, last] = False
        candidates = np.argwhere(is_chord)
        zero = np.zeros(1, np.int64)
        random = RandomStreams(self.seed, GRAPH_STREAM, zero, zero)
        chords = candidates[random.distinct(len(candidates), self.chords)[0]]
        return (*ring, *map(tuple, chords.tolist()))

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
        reached = np.eye(self.nodes, dtype=bool)
        distance = 0
        while (distances < 0).any():
            distances[reached & (distances < 0)] = distance
            reached |= reached.astype(np.int64) @ adjacency > 0
            distance += 1
        return distances

    @property
    def chance(self) -> Mapping[str, float]:
        """Scores of guessing any distance."""
        accuracy = 1 / (self.reach + 2)
        return {"accuracy": accuracy, "exact_match": accuracy**self.nodes}

    def model(self) -> ModelSpec:
        """An encoder of `reach` layers, the least that carry information `reach` steps."""
        shape = ModelShape(width=64, heads=4, layers=self.reach, feed=128, positions="none")
        head = OutputHeadSpec("distance", self.reach + 2)
        return make_small_encoder(self.name, 2, shape, head, self.pattern)

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
        by_distance = {f"distance={d}": batch.labels == d for d in range(self.reach + 1)}
        by_distance[f"distance>{self.reach}"] = batch.labels > self.reach
        return measure_tokens_and_rows(logits, batch.labels, by_distance)

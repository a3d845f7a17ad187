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
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from ...attention.masking.patterns import Edges
from ...attention.masking.sequence_info import SequenceInfo
from ...kernels.counter_rng import Ints, RandomStreams
from ...models.batch import IGNORE_INDEX, Batch
from ...models.model_spec import ModelSpec, OutputHeadSpec
from ...util.errors import SpecError
from .synthetic_task import (
    MAX_LAYERS,
    MAX_SIZE,
    MIN_DISTINCT_EXAMPLES,
    Choices,
    ExampleArrays,
    ModelShape,
    Ranges,
    SyntheticTask,
    make_small_decoder,
    make_small_encoder,
    make_small_translator,
    parse_sizes,
    slice_by_position,
    slice_by_power_of_two,
    slice_by_value,
)

# --- Copying --------------------------------------------------------------------------------------

NOISE_ID = 0
REPEAT_ID = 1
START_ID = 2  # symbols have the ids after these
COPY_KINDS = ("induction", "source")


class CopyAnnotation(NamedTuple):
    """Lengths of block and gap of an example, and links (index of a symbol, index of its label).

    With kind="source" the symbols are in the source.
    """

    block: int
    gap: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class CopyTask(SyntheticTask):
    """A random block of symbols, a gap of noise, a separator, and the block again, which must be
    predicted.

    kind="source" gives the block alone to an encoder, and the decoder repeats it. `block` and `gap`
    are the numbers of symbols and of noise tokens; from a tuple each example draws one. Ids: 0 is
    noise, 1 the separator, 2 begins every row, symbols follow.

    >>> task = CopyTask(symbols=9, block=4, gap=2)
    >>> print(task.text(task.batch(0, 1).x[0].tolist()))
    > 0 2 1 2 . . | 0 2 1
    """

    name: ClassVar[str] = "copy"
    ranges: ClassVar[Ranges] = {"symbols": (2, MAX_SIZE)}
    choices: ClassVar[Choices] = {"kind": COPY_KINDS}
    kind: str = "induction"
    symbols: int = 32
    block: int | tuple[int, ...] = (8, 12, 16, 20, 24)
    gap: int | tuple[int, ...] = (0, 8, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "source" and self._gaps != (0,):
            raise SpecError(
                f"gap={self.gap} is not possible with kind='source', which has no noise; use gap=0"
            )
        count = float(self.symbols) ** min(*self.row_lengths, 64)
        tokens = 1 + 2 * max(self.row_lengths) + max(self._gaps)
        self.check_extent(tokens, count, "use a longer block or more symbols")

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return parse_sizes("block", self.block, 1)

    @property
    def _gaps(self) -> tuple[int, ...]:
        return parse_sizes("gap", self.gap, 0)

    @property
    def num_ids(self) -> int:
        return self.symbols + START_ID + 1

    @property
    def num_answers(self) -> int:
        return self.symbols

    @property
    def words(self) -> Sequence[str]:
        """Noise is ".", the separator "|", the start of a row ">", and symbols are numbers."""
        return [".", "|", ">", *map(str, range(self.symbols))]

    def model(self) -> ModelSpec:
        """Return a decoder of two layers, the least for induction heads: the first attends to the
        previous token. kind="source" has an encoder and a decoder of two layers each.
        """
        make = make_small_translator if self.kind == "source" else make_small_decoder
        return make(self.name, self.num_ids, self.shape)

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        block = random.choice(self.row_lengths)
        gap = random.choice(self._gaps)
        longest = max(self.row_lengths)
        prefix = longest + max(self._gaps)
        rows = np.arange(len(random))
        symbols = random.integers(self.symbols, longest) + START_ID + 1
        separator = 1 + (block + gap)[:, None]  # its index in each row
        sources = 1 + np.tile(np.arange(longest), (len(random), 1))  # indices of the symbols
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
        arrays = {"content": x, "x": x, "labels": labels, "sources": sources}
        return arrays | {"block": block, "gap": gap, "length": 1 + 2 * block + gap}

    def annotate(self, example: Mapping[str, np.ndarray]) -> CopyAnnotation:
        size = int(example["block"])
        gap = int(example["gap"])
        if self.kind == "source":
            return CopyAnnotation(size, gap, tuple((n, n) for n in range(size)))
        sources = enumerate(example["sources"][:size].tolist(), 1 + size + gap)
        return CopyAnnotation(size, gap, tuple((source, target) for target, source in sources))

    def to_batch(self, examples: ExampleArrays) -> Batch:
        """With kind="source", an encoder reads the block of each row, and a decoder repeats it."""
        batch = super().to_batch(examples)
        if self.kind != "source":
            return batch
        block = torch.from_numpy(examples["block"])
        source = torch.from_numpy(examples["x"])[:, 1 : 1 + int(block.max())]
        in_block = torch.arange(source.shape[1]) < block[:, None]
        begin = torch.full_like(source[:, :1], START_ID)
        source = source.where(in_block, NOISE_ID)
        tokens = None
        if not in_block.all():
            tokens = SequenceInfo.from_batch(source, lengths=block)
        x = torch.cat([begin, source[:, :-1]], 1).where(in_block, NOISE_ID)
        labels = source.where(in_block, IGNORE_INDEX)
        return Batch(x, labels, tokens, source, tokens, batch.gold)

    def slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Labels by distance to their source; with kind="source" rows by block length."""
        if self.kind == "source":
            return self.row_slices(batch)
        distance = torch.zeros(batch.labels.shape, dtype=torch.long)
        for row, example in enumerate(batch.gold):
            sources, targets = torch.tensor(example.links).T
            distance[row, targets] = targets - sources
        return slice_by_power_of_two("distance", distance)

    def row_slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Rows by block length."""
        return slice_by_value("block", [example.block for example in batch.gold])


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
    shape = ModelShape(width=64, heads=4, layers=4, feed=128)
    ranges: ClassVar[Ranges] = {"length": (1, MAX_SIZE)}
    group: str = "parity"
    length: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        order = self.num_answers
        if order < 2:
            raise SpecError(
                f"group={self.group!r} has only one element; use for example 'parity', 'Z5' or 'S3'"
            )
        enough = next(n for n in range(1, 20) if order**n >= MIN_DISTINCT_EXAMPLES)
        count = float(order) ** min(self.length, 64)
        self.check_extent(self.length, count, f"use length={enough} or more")

    @property
    def table(self) -> np.ndarray:
        """Multiplication table: table[g, h] is the product g h."""
        return make_multiplication_table(self.group)

    @property
    def num_ids(self) -> int:
        return len(self.table) + 1

    @property
    def num_answers(self) -> int:
        return len(self.table)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def words(self) -> Sequence[str]:
        """Elements are numbers, the start token is "|"."""
        return [*map(str, range(len(self.table))), "|"]

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        table = self.table
        content = random.integers(len(table), self.length)
        products = content.copy()
        for t in range(1, self.length):
            products[:, t] = table[products[:, t - 1], content[:, t]]
        start = ((0, 0), (1, 0))  # one more column, before the first
        x = np.pad(content, start, constant_values=len(table))
        labels = np.pad(products, start, constant_values=IGNORE_INDEX)
        return {"content": content, "x": x, "labels": labels}

    def slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Positions by their number of factors."""
        return slice_by_position(batch.labels.shape[1])


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
    ranges: ClassVar[Ranges] = {
        "nodes": (3, MAX_NODES),
        "sources": (1, MAX_NODES),
        "reach": (1, MAX_LAYERS),
    }
    nodes: int = 32
    chords: int = 8
    sources: int = 3
    reach: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {"chords": comb(self.nodes, 2) - self.nodes, "sources": self.nodes - 1}
        self.check_fields({name: (0, limit) for name, limit in limits.items()}, {})
        count = comb(self.nodes, self.sources)
        self.check_extent(self.nodes, count, "use more nodes or sources")

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Edges of the graph as pairs of nodes, the smaller one first: the ring, then the
        chords.
        """
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
        first, second = np.array(self.edges).T
        graph = csr_array((np.ones(len(first)), (first, second)), (self.nodes, self.nodes))
        return shortest_path(graph, directed=False, unweighted=True).astype(np.int64)

    @property
    def num_ids(self) -> int:
        return 2

    @property
    def words(self) -> Sequence[str]:
        """Text of every id and of every label, which is a distance."""
        return list(map(str, range(self.reach + 2)))

    @property
    def num_answers(self) -> int:
        return self.reach + 2

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return (self.nodes,)

    def model(self) -> ModelSpec:
        """Return an encoder of `reach` layers, the least that carry information `reach` steps."""
        shape = replace(self.shape, layers=self.reach, positions="none")
        head = OutputHeadSpec("distance", self.num_answers)
        return make_small_encoder(self.name, self.num_ids, shape, head, self.pattern)

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        sources = np.sort(random.distinct(self.nodes, self.sources), 1)
        x = np.zeros((len(random), self.nodes), np.int64)
        np.put_along_axis(x, sources, 1, 1)
        return {"content": sources, "x": x}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        labels = self.distances[examples["content"]].min(1).clip(max=self.reach + 1)
        return super().to_batch(examples | {"labels": labels})

    def annotate(self, example: Mapping[str, np.ndarray]) -> tuple[int, ...]:
        return tuple(example["content"].tolist())

    def slices(self, batch: Batch) -> Mapping[str, Tensor]:
        """Nodes by distance."""
        by_distance = {f"distance={d}": batch.labels == d for d in range(self.reach + 1)}
        return by_distance | {f"distance>{self.reach}": batch.labels > self.reach}

"""The task "graph": distance of each node to the nearest source, by message passing along the edges of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError
from ..masking.pattern_base import check_whole_number
from ..masking.patterns import Edges
from ..model_spec import ModelSpec, OutputHeadSpec
from ..ops.counter_rng import Ints, RandomStreams
from .synthetic_task import (
    ExampleArrays,
    ModelShape,
    SyntheticTask,
    check_num_examples,
    find_correct,
    find_correct_rows,
    make_small_encoder,
    sum_by_slice,
)
from .task import Batch, MetricSums

GRAPH_STREAM = 3  # random stream of the graph; 0, 1 and 2 are the streams of the splits


@dataclass(frozen=True, repr=False)
class GraphDistance(SyntheticTask):
    """Predict for each node of a graph its distance to the nearest of `sources` marked nodes.

    The graph is a ring of `nodes` with `chords` additional random edges; it is determined by the seed and equal for all
    examples, which differ in their sources. Labels are the distances 0 .. `reach`, and `reach` + 1 for larger ones.
    The attention pattern lets a node attend to itself and its neighbours, so t layers propagate information t steps.
    Tokens (1 for a source, 0 otherwise) have no positions, so nodes differ only by the information that reaches them.

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
            raise SpecError(f"nodes={self.nodes} is too many for a pattern of edges; use at most 512")
        if self.chords > (max_chords := comb(self.nodes, 2) - self.nodes):
            raise SpecError(
                f"chords={self.chords} is too many for a ring of {self.nodes} nodes; use at most {max_chords}"
            )
        if self.sources >= self.nodes:
            raise SpecError(
                f"sources={self.sources} must be fewer than nodes={self.nodes}; use at most {self.nodes - 1}"
            )
        check_num_examples(self, comb(self.nodes, self.sources), "use more nodes or sources")

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Edges of the graph as pairs of nodes, the smaller one first: the ring, then the chords."""
        ring = [(n, n + 1) for n in range(self.nodes - 1)] + [(0, self.nodes - 1)]
        candidates = [
            (a, b) for a in range(self.nodes) for b in range(a + 2, self.nodes) if (a, b) != (0, self.nodes - 1)
        ]
        zero = np.zeros(1, np.int64)
        chords = RandomStreams(self.seed, GRAPH_STREAM, zero, zero).distinct(len(candidates), self.chords)[0]
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
        return make_small_encoder(self.name, 2, shape, OutputHeadSpec("distance", self.reach + 2), self.pattern)

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
        return accuracy | dict(sum_by_slice("exact_match", correct_rows, torch.ones_like(correct_rows), {}))

"""graph: how far is each node from the nearest source? Message passing along the edges of one graph."""

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

GRAPH_STREAM = 3  # the stream from which the graph is drawn; 0, 1 and 2 are the splits


@dataclass(frozen=True, repr=False)
class GraphDistance(SyntheticTask):
    """A graph drawn once from the seed; each example marks `sources` of its nodes, and asks all how far they are.

    Every node is joined with the next, and `chords` more pairs of nodes are. Labels are distances 0 .. reach, and
    reach + 1 for farther. `pattern` lets a node read itself and its neighbours, so that t layers carry a message t
    steps far; tokens (1 a source, 0 none) have no position, so a node is known by what reaches it.

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
        for knob, least in {"nodes": 3, "chords": 0, "sources": 1, "reach": 1}.items():
            check_whole_number(knob, getattr(self, knob), least)
        if self.nodes > 512:
            raise SpecError(f"nodes={self.nodes} make a pattern of too many edges; use at most 512")
        if self.chords > (most := comb(self.nodes, 2) - self.nodes):
            raise SpecError(f"a ring of {self.nodes} nodes has room for {most} chords, not {self.chords}; use fewer")
        if self.sources >= self.nodes:
            fact = f"sources={self.sources} of {self.nodes} nodes leave none to ask about"
            raise SpecError(f"{fact}; use at most {self.nodes - 1}")
        check_num_examples(self, comb(self.nodes, self.sources), "use more nodes or sources")

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The joined pairs of nodes, smaller one first: the ring, then the chords."""
        ring = [(n, n + 1) for n in range(self.nodes - 1)] + [(0, self.nodes - 1)]
        free = [(a, b) for a in range(self.nodes) for b in range(a + 2, self.nodes) if (a, b) != (0, self.nodes - 1)]
        none = np.zeros(1, np.int64)
        drawn = RandomStreams(self.seed, GRAPH_STREAM, none, none).distinct(len(free), self.chords)[0]
        return (*ring, *(free[n] for n in drawn.tolist()))

    @property
    def pattern(self) -> Edges:
        """Who reads whom: neighbours both ways, and each itself."""
        own = tuple((n, n) for n in range(self.nodes))
        return Edges((*own, *self.edges, *((b, a) for a, b in self.edges)))

    @property
    def distances(self) -> Ints:
        """Steps between every two nodes, [nodes, nodes]."""
        near = np.zeros((self.nodes, self.nodes), bool)
        near[tuple(np.array(self.edges).T)] = True
        near |= near.T
        steps = np.full(near.shape, -1)
        reached, begun = np.eye(self.nodes, dtype=bool), 0
        while (steps < 0).any():
            steps[reached & (steps < 0)] = begun
            reached, begun = reached | (reached.astype(np.int64) @ near > 0), begun + 1
        return steps

    @property
    def chance(self) -> Mapping[str, float]:
        """Any distance."""
        one = 1 / (self.reach + 2)
        return {"accuracy": one, "exact_match": one**self.nodes}

    def model(self) -> ModelSpec:
        """As many layers as a message needs steps."""
        shape = ModelShape(width=64, heads=4, layers=self.reach, feed=128, positions="none")
        return make_small_encoder(self.name, 2, shape, OutputHeadSpec("distance", self.reach + 2), self.pattern)

    def draw_examples(self, random: RandomStreams) -> ExampleArrays:
        chosen = np.sort(random.distinct(self.nodes, self.sources), 1)
        x = np.zeros((len(random), self.nodes), np.int64)
        np.put_along_axis(x, chosen, 1, 1)
        return {"content": chosen, "x": x, "sources": chosen}

    def to_batch(self, examples: ExampleArrays) -> Batch:
        """`gold` holds the sources of each example."""
        labels = self.distances[examples["sources"]].min(1).clip(max=self.reach + 1)
        gold = [tuple(row) for row in examples["sources"].tolist()]
        return Batch(torch.from_numpy(examples["x"]), torch.from_numpy(labels), gold=gold)

    def measure(self, logits: Tensor, batch: Batch) -> MetricSums:
        """Accuracy by distance, and how often all nodes are right."""
        right, asked = find_correct(logits, batch.labels)
        far = {f"distance={d}": batch.labels == d for d in range(self.reach + 1)}
        rows = find_correct_rows(right, asked)
        told = dict(sum_by_slice("accuracy", right, asked, far | {f"distance>{self.reach}": batch.labels > self.reach}))
        return told | dict(sum_by_slice("exact_match", rows, torch.ones_like(rows), {}))

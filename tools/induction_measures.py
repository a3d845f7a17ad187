"""Measurements of one model for `induction_study.py`: heads, losses by token, and composition, for
each text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

import headwise as hw
from headwise.data.language_modelling import TextTask
from headwise.head_analysis.annotated_examples import (
    Example,
    ExampleReader,
    TokenAnnotations,
    examples_from_task,
)
from headwise.head_analysis.head_circuits import LowRankMap
from headwise.head_analysis.head_classes import classify_heads
from headwise.head_analysis.head_measurement import (
    OBSERVED,
    MeasureOptions,
    MetricSums,
    measure_heads,
)
from headwise.head_analysis.head_table import HeadTable
from headwise.head_analysis.literature_metrics import get_metric
from headwise.head_analysis.weight_bands import WeightBand
from headwise.model_spec import (
    BlockSpec as Layer,
    EmbeddingSpec,
    ModelSpec,
    NormSpec,
    OutputHeadSpec,
    StackSpec,
)
from headwise.models import Transformer
from headwise.presets import design

Array = NDArray[np.float64]
Place = tuple[str, int]  # a site, and a head of it
ROWS = 50  # that are run at once
EVERY = 10**9  # more rows than there are
SOURCE = (
    "sink",
    "separator",
    "previous",
    "self",
    "next",
    "offset",
    "peak",
    "duplicate",
    "induction",
    "punctuation",
    "rare",
    "breadth",
)
REPEATED = (
    "sink",
    "previous",
    "duplicate",
    "induction",
)  # all that random tokens can be measured for
TESTED = ("induction", "previous")


@dataclass(frozen=True)
class Setting:
    """What is trained and looked at: weights at the `kept` steps, heads on so many `texts` of each
    kind, losses on so many held-out `rows`.
    """

    path: str = "stdlib"
    vocab: int = 1024
    length: int = 128
    width: int = 128
    heads: int = 8
    layers: int = 2
    base: float = 30.0
    recipe: hw.Recipe = field(
        default=hw.Recipe(
            steps=900,
            batch=32,
            lr=0.003,
            schedule="constant",
            warmup=120 / 900,
            init="gpt2",
            evaluate_every=100,
            checkpoint_every=25,
            keep=1000,
            precision="fp32",
            compile="off",
            attention="plain",
            device="cpu",
        )
    )
    kept: tuple[int, ...] = (0, 25, 50, 100, 150, 200, 300, 400, 500, 600, 700, 900)
    texts: int = 40
    rows: int = 400
    seeds: tuple[int, ...] = (0, 1)

    def task(self, seed: int) -> TextTask:
        """The text, in an order of its own for each seed; what is held out is the same."""
        return TextTask(self.path, tokens="bpe", vocab=self.vocab, length=self.length, seed=seed)

    def model(self, task: TextTask) -> ModelSpec:
        """What is trained: attention alone, whose positions turn fast enough to tell neighbours
        apart.
        """
        turns = hw.Rotary(base=self.base)
        spec = design(
            model=self.width, heads=self.heads, pattern="causal()", modifiers=(turns,), bias="qkvo"
        )
        embedding, head = (
            EmbeddingSpec(task.data.vocabulary.size),
            OutputHeadSpec("tokens", task.data.vocabulary.size),
        )
        stack = StackSpec.from_blocks(
            "decoder", self.width, [Layer(spec)] * self.layers, embedding=embedding, norm=NormSpec()
        )
        return ModelSpec("stdlib", "decoder", (stack,), (head,))


def source_scenes(net: Transformer, task: TextTask, count: int) -> list[Example]:
    """So many held-out texts, evenly spread over all there are: neighbours would be of one file."""
    scenes = examples_from_task(net, task, EVERY, "valid").examples
    counted = ExampleReader(
        net, [scenes[at] for at in evenly(len(scenes), count)]
    ).examples_with_frequencies()
    return [replace(one, inputs={"x": one.inputs["x"]}) for one in counted]


def evenly(count: int, number: int) -> list[int]:
    """So many numbers from 0 to count - 1, from end to end.

    >>> evenly(9, 3)
    [0, 4, 8]
    """
    return np.linspace(0, count - 1, min(count, number)).round().astype(int).tolist()


def held_out(task: TextTask, count: int) -> Tensor:
    """So many held-out rows in the same way, [rows, tokens]."""
    every = task.batch(0, task.data.sizes["valid"], "valid").x
    return every[evenly(len(every), count)]


def repeated_scenes(vocab: int, length: int, count: int, seed: int) -> list[Example]:
    """Random tokens, none twice, and the same once more: all that can be known of the second half
    is in the first.

    >>> repeated_scenes(9, 8, 2, 0)[1].inputs["x"].tolist()
    [[2, 8, 3, 6, 2, 8, 3, 6]]
    """
    draw, none = np.random.default_rng(seed), torch.zeros(length, dtype=torch.bool)
    scenes: list[Example] = []
    for _ in range(count):
        ids = torch.from_numpy(np.tile(draw.permutation(vocab)[: length // 2], 2))
        words = tuple(map(str, ids.tolist()))
        annotations = TokenAnnotations(
            ids, words, none, none, none, torch.arange(length), torch.zeros_like(ids)
        )
        scenes.append(Example({"x": ids[None]}, {"text": annotations}))
    return scenes


class ByText:
    """Statistics of every head text by text: what is tested is what differs between texts."""

    def __init__(self, statistics: Sequence[str]) -> None:
        self.names, self.adding = statistics, MetricSums([get_metric(one) for one in statistics])

    def start_example(self, example: Example) -> None:
        """Nothing is to be known of a text beforehand."""

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows."""
        self.adding.add_band(site, band)

    def finish_example(self) -> None:
        """A text is over."""
        self.adding.finish_example()

    def measures(self) -> Mapping[tuple[str, int], Mapping[str, object]]:
        """None: `values` has what was added up."""
        return {}

    def values(self, name: str, whose: str = OBSERVED) -> Array:
        """The mean of each text, [texts, heads], sites one after the other; nan where no row of a
        text counts.
        """
        sites = dict.fromkeys(site for site, _, _ in self.adding.sums_by_example)
        means = [
            np.stack([_mean(*sums) for sums in self.adding.sums_by_example[site, name, whose]])
            for site in sites
        ]
        return np.concatenate(means, -1)


def _mean(sums: Array, numbers: Array) -> Array:
    return np.divide(sums, numbers, out=np.full(sums.shape, np.nan), where=numbers > 0)


class Data(NamedTuple):
    """What every kept model is held to: the same held-out source, and the same repeated random
    tokens.

    `rows` are more of the first, for losses; `choosing` are other random tokens, on which heads are
    chosen that are then followed.
    """

    rows: Tensor
    source: list[Example]
    repeated: list[Example]
    choosing: list[Example]

    @property
    def kinds(self) -> Mapping[str, list[Example]]:
        """What is measured, by name."""
        return {"source": self.source, "repeated": self.repeated}


class Seen(NamedTuple):
    """One model on all of it: tables of heads with classes, scores and losses text by text, and
    composition.

    `scores` are [texts, heads] by data and statistic; `losses` [texts, tokens] by data.
    """

    tables: Mapping[str, HeadTable]
    scores: Mapping[tuple[str, str], Array]
    losses: Mapping[str, Array]
    composition: Array

    @property
    def called(self) -> Mapping[tuple[str, str], int]:
        """How many heads are called what, by data and class."""
        return {
            (data, kind): sum(kind in [one.name for one in head.classes] for head in table.heads)
            for data, table in self.tables.items()
            for kind in TESTED
        }


def seen(net: Transformer, data: Data) -> Seen:
    """All that is measured of one model."""
    tables: dict[str, HeadTable] = {}
    scores: dict[tuple[str, str], Array] = {}
    for name, scenes in data.kinds.items():
        by_text = ByText(TESTED)
        chosen = MeasureOptions(SOURCE if name == "source" else REPEATED)
        tables[name] = classify_heads(
            measure_heads(net, scenes, options=chosen, collectors=[by_text])
        )
        scores |= {(name, one): by_text.values(one) for one in TESTED}
    return Seen(tables, scores, losses_of(net, data), composition(net))


def losses_of(net: Transformer, data: Data) -> Mapping[str, Array]:
    """What is lost token by token on both."""
    return {"source": losses(net, data.rows), "repeated": losses(net, ids_of(data.repeated))}


def ids_of(scenes: Sequence[Example]) -> Tensor:
    """The ids of texts of one length, [texts, tokens]."""
    return torch.cat([one.inputs["x"] for one in scenes])


def losses(net: Transformer, ids: Tensor) -> Array:
    """- log p of each token behind the first, [texts, tokens - 1]."""
    per_text: list[Tensor] = []
    with torch.inference_mode():
        for some in ids.split(ROWS):
            logits = net(some)[:, :-1].float()
            per_text.append(F.cross_entropy(logits.transpose(1, 2), some[:, 1:], reduction="none"))
    return torch.cat(per_text).double().numpy()


def composition(net: Transformer) -> Array:
    """How much of what a head writes enters the keys of a head of a later layer, [heads, heads];
    nan of all others.

    |W_QK W_OV^T| / |W_QK| |W_OV|, Frobenius norms (K-composition of Elhage et al. 2021); norms of layers and what turns
    keys stand outside of it.
    """
    every = [
        (depth, own, head)
        for depth, own in enumerate(hw.get_circuits(net).values())
        for head in range(own.spec.heads.q)
    ]
    carried = [own.ov_circuit(head) for _, own, head in every]
    compared = [own.qk_circuit(head) for _, own, head in every]
    scores = np.full((len(every), len(every)), np.nan)
    for (one, (early, *_)), (two, (late, *_)) in product(enumerate(every), repeat=2):
        if early < late:
            scores[one, two] = _through(compared[two], carried[one])
    return scores


def _through(qk: LowRankMap, ov: LowRankMap) -> float:
    joined = LowRankMap(qk.left, qk.right @ ov.right.T @ ov.left.T)
    return float(_size(joined) / (_size(qk) * _size(ov)))


def _size(one: LowRankMap) -> Tensor:
    return one.inner_product(one).sqrt()


def strongest(net: Transformer, scenes: Sequence[Example]) -> Mapping[str, int]:
    """The number of the head that does most of each that is tested, counted through all layers."""
    by_text = ByText(TESTED)
    measure_heads(net, scenes, options=MeasureOptions(TESTED), collectors=[by_text])
    return {name: int(by_text.values(name).mean(0).argmax()) for name in TESTED}


class Story(NamedTuple):
    """One seed: what was seen at every kept step; which heads were strongest at the last, on other
    random tokens.

    `silenced` are the heads called induction there, and as many others of the same layers, of least
    induction, where there are so many; `quiet` are losses by data without the first and without the
    second.
    """

    seed: int
    steps: tuple[Seen, ...]
    heads: Mapping[str, int]
    silenced: tuple[tuple[Place, ...], tuple[Place, ...]]
    quiet: tuple[Mapping[str, Array], Mapping[str, Array]]


class Found(NamedTuple):
    """All that was found: a story for each seed, and what was seen of a twin."""

    setting: Setting
    task: TextTask
    parameters: int
    stories: tuple[Story, ...]
    twin: Seen

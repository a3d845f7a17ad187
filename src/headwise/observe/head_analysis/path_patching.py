"""Path patching: the effect of one head on another, on an MLP or on the logits, along direct paths
alone (Wang et al. 2022, 2211.00593).

The outputs of the senders are those of the corrupt text, and all other heads are frozen at their
outputs for the clean text. What the receivers read in this run replaces their inputs in a last run
of the clean text, in which everything else is computed as usual.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...report.data import Column, Estimate, Item, Table
from ...report.notebook import NotebookResult
from ...report.render import to_plain, to_text
from ...report.text import choose_format, format_p
from ...util.errors import pluralise
from ..inspect.ablation import check_seed
from ..inspect.trace_capture import get_model_name
from .circuit_graph import (
    EMBEDDING,
    HEAD,
    LOGITS,
    CircuitModel,
    MetricPair,
    Node,
    NodeRun,
    check_mlps,
    prepare_pair,
)
from .circuit_metrics import TokenMetric, parse_metric
from .head_table import INTERVAL_NOTE
from .resampling import Array, Jackknife
from .text_analysis import text_reader

NUM_RANDOM = 8  # random sets of senders whose mean effect is the chance level
Names = str | Iterable[str]


def read_pairs(model: nn.Module, pairs: Iterable[Any], metric: Any) -> list[MetricPair]:
    """Return pairs (clean, corrupt) or (clean, corrupt, metric of this pair) as inputs.

    A metric is a text as in `parse_metric`, a `TokenMetric`, or a function of the logits [1, T, V].
    """
    read: list[MetricPair] = []
    for pair in pairs:
        if isinstance(pair, str) or not 2 <= len(pair) <= 3:
            raise ValueError(
                f"{pair!r} is no pair of texts; give a list of pairs, such as [(clean, corrupt)]"
            )
        clean, corrupt, *metrics = pair
        (own,) = metrics or (metric,)
        own = parse_metric(own) if isinstance(own, str) else own
        own = own.resolve(model) if isinstance(own, TokenMetric) else own
        read.append(prepare_pair(model, clean, corrupt, own))
    if not read:
        raise ValueError("there is no pair of texts; give at least one")
    return read


def estimate_effect(
    effects: Array, chance: Array | None = None, weights: Array | None = None
) -> Estimate:
    """Return the mean of effects [pairs] with its interval, the mean of the chance level [pairs],
    and the p-value that they are equal, by the differences within pairs; pairs may have weights.
    """
    counts = np.ones(len(effects)) if weights is None else weights
    mean = Jackknife.of_ratio((effects * counts)[:, None], counts[:, None])
    (low, high) = mean.interval()
    level = np.full(len(effects), np.nan) if chance is None else chance
    p = Jackknife.of_ratio(((effects - level) * counts)[:, None], counts[:, None]).p_values()[0]
    ends = (float(low[0]), float(high[0]))
    average = float(np.average(level, weights=counts))
    return Estimate(float(mean.value[0]), *ends, average, len(effects), float(p))


# --- Results --------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class CircuitResult(NotebookResult):
    """Base class of effects on a metric, over pairs of texts.

    `clean` is the mean metric of the clean texts, `total` the mean difference of the corrupt ones.
    """

    model: str
    metric: str
    pairs: int
    clean: float
    total: float
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The metric of both texts."""
        return (
            f"{self.model}, {self.metric}, {pluralise(self.pairs, 'pair')}: "
            f"clean {self.clean:.4g}, corrupt {self.clean + self.total:.4g}"
        )

    def table_title(self, *details: str) -> str:
        """The title with details, and what low and high are if there are several pairs."""
        interval = [INTERVAL_NOTE] if self.pairs > 1 else []
        return "; ".join([self.title, *details, *interval])

    def __str__(self) -> str:
        return "\n\n".join(map(to_text, self.report_items))

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON."""
        return to_plain(self)


ResultFields = tuple[str, str, int, float, float, tuple[str, ...]]  # of a `CircuitResult`


def describe_pairs(
    model: nn.Module, metric: Any, values: Sequence[tuple[float, float]]
) -> ResultFields:
    """Return the fields of a `CircuitResult`, from the metric of both texts of each pair."""
    if isinstance(metric, TokenMetric):
        metric = metric.name
    elif not isinstance(metric, str):
        metric = getattr(metric, "__name__", "metric")
    (clean, corrupt) = np.array(values).mean(0)
    # weights of a model of transformers that come from no checkpoint
    config = getattr(model, "config", None)
    is_new = config is not None and getattr(config, "_name_or_path", None) == ""
    notes = ["the weights come from no checkpoint, so they may be untrained"] if is_new else []
    if clean == corrupt:
        notes.append("the metric is the same for clean and corrupt texts: there is no difference")
    numbers = (len(values), float(clean), float(corrupt - clean))
    return (get_model_name(model), metric, *numbers, tuple(notes))


def join_nodes(names: Sequence[str]) -> str:
    """Return the names of nodes in one text, the heads of a layer together.

    >>> join_nodes(["L17H3.k", "L17H4.k", "L18H6.k", "M2"])
    'L17:3,4.k+L18H6.k+M2'
    """
    heads_of: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = re.fullmatch(r"(L\d+)H(\d+)(\.[qkv])?", name)
        place = (match[1], match[3] or "") if match else (name, "")
        heads_of.setdefault(place, []).extend([match[2]] if match else [])
    parts: list[str] = []
    for (layer, part), heads in heads_of.items():
        mark = {0: "", 1: "H"}.get(len(heads), ":")
        parts.append(f"{layer}{mark}{','.join(heads)}{part}")
    return "+".join(parts)


@dataclass(frozen=True)
class PathEffect:
    """Change of the metric by one path, over pairs of texts; chance is that of random senders."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    effect: Estimate

    @property
    def name(self) -> str:
        """The path as it is written on the command line."""
        return f"{join_nodes(self.senders)} -> {join_nodes(self.receivers)}"


@dataclass(frozen=True, repr=False)
class PathEffects(CircuitResult):
    """Effects of paths on a metric, with free or frozen MLPs."""

    mlps: str
    paths: tuple[PathEffect, ...]

    @property
    def table(self) -> Table:
        """A row for each path."""
        rows: list[tuple[Any, ...]] = []
        for path in self.paths:
            effect = path.effect
            share = effect.value / self.total if self.total else math.nan
            rows.append((path.name, *effect[:4], share, effect.p))
        numbers = [value for row in rows for value in row[1:5]]
        alike = [
            Column(name, choose_format(numbers)) for name in ("effect", "low", "high", "chance")
        ]
        columns = ("path", *alike, "of total", Column("p", format_p))
        title = self.table_title()
        return Table(title, columns, rows, self.notes).without_empty_columns()

    @property
    def report_items(self) -> Sequence[Item]:
        """The table."""
        return [self.table]


# --- Runs -----------------------------------------------------------------------------------------


class PairRuns:
    """The runs of a clean and a corrupt text, and patched runs between them."""

    def __init__(
        self, nodes: CircuitModel, pair: MetricPair, vector_sites: Collection[str] = ()
    ) -> None:
        self.nodes = nodes
        self.pair = pair
        with torch.no_grad():
            self.clean = NodeRun(vector_sites=vector_sites)
            self.clean_value = float(pair.measure(nodes.run(pair.clean, self.clean)))
            self.corrupt = NodeRun(vector_sites=vector_sites)
            self.corrupt_value = float(pair.measure(nodes.run(pair.corrupt, self.corrupt)))

    @property
    def total(self) -> float:
        """The difference of the metric, corrupt minus clean."""
        return self.corrupt_value - self.clean_value

    def with_senders(self, senders: Sequence[Node]) -> dict[str, Tensor]:
        """Return the outputs of the clean text by place, with senders as in the corrupt text."""
        outputs = dict(self.clean.recorded)
        for node in senders:
            corrupt = self.corrupt.recorded[node.place]
            if node.kind == HEAD:
                outputs[node.place] = outputs[node.place].clone()
                outputs[node.place][..., node.head, :] = corrupt[..., node.head, :]
            else:
                outputs[node.place] = corrupt
        return outputs

    @torch.no_grad()
    def patch_output(self, sender: Node) -> float:
        """Return the metric while the output of one node is that of the corrupt text."""
        patched = NodeRun({sender.place: self.with_senders([sender])[sender.place]})
        return float(self.pair.measure(self.nodes.run(self.pair.clean, patched)))

    @torch.no_grad()
    def patch_path(self, senders: Sequence[Node], receivers: Sequence[Node], mlps: str) -> float:
        """Return the metric while the receivers read what direct paths from the senders change."""
        sites = {node.place for node in receivers if node.kind == HEAD}
        outputs = self.with_senders(senders)
        sent = {node.place for node in senders}
        if mlps == "free":
            outputs = {
                place: output
                for place, output in outputs.items()
                if place not in self.nodes.mlps or place in sent
            }
        frozen = NodeRun(outputs, vector_sites=sites)
        logits = self.nodes.run(self.pair.clean, frozen)
        if receivers[0].kind == LOGITS:
            return float(self.pair.measure(logits))
        inputs = {node: frozen.read(node) for node in receivers}
        patched = NodeRun(inputs=inputs, vector_sites=sites)
        return float(self.pair.measure(self.nodes.run(self.pair.clean, patched)))


def patch_paths(
    model: Any,
    pairs: Iterable[Any],
    metric: Any,
    paths: Iterable[tuple[Names, Names]],
    *,
    mlps: str = "free",
    seed: int = 0,
    tokenizer: object = None,
) -> PathEffects:
    """Measure the effect of senders on a metric along direct paths to receivers, by path patching.

    `pairs` are (clean, corrupt), or (clean, corrupt, metric of this pair): texts or other inputs
    with equally many tokens. `metric` is "logit_difference:A,B" or "log_probability:A" at the last
    position, or a function of the logits [1, T, V]. Each path is (senders, receivers): senders are
    heads ("L0H3"), MLPs ("M0") or "embedding", receivers inputs of heads ("L1H2.q", ".k" or ".v"),
    MLPs, or "logits" alone. With `mlps` "free", MLPs are computed again while heads are frozen, as
    in the paper; "frozen" freezes them too. Keys and values are those of one query head, also where
    several heads share them. The chance level is the mean effect of random heads of the senders'
    layers.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> pairs = [(torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5, 9]]))]
    >>> metric = hw.head_analysis.TokenMetric("logit_difference", (2, 7))
    >>> patch_paths(net, pairs, metric, [("L0H1", "L1H0.k")]).paths[0].name
    'L0H1 -> L1H0.k'
    """
    check_mlps(mlps)
    check_seed(seed)
    with text_reader(model, tokenizer) as reader, torch.no_grad():
        nodes = CircuitModel(reader)
        listed = [
            (nodes.find_all(senders), nodes.find_all(receivers)) for senders, receivers in paths
        ]
        for senders, receivers in listed:
            check_path(nodes, senders, receivers, mlps)
        sets = [random_sets(nodes, senders, seed) for senders, _ in listed]
        values: list[tuple[float, float]] = []  # of the clean and the corrupt text of each pair
        changes: list[list[list[float]]] = [[] for _ in listed]  # by path, pair and set of senders
        for pair in read_pairs(reader, pairs, metric):
            runs = PairRuns(nodes, pair)
            values.append((runs.clean_value, runs.corrupt_value))
            for number, (senders, receivers) in enumerate(listed):
                patched = [
                    runs.patch_path(one, receivers, mlps) for one in (senders, *sets[number])
                ]
                changes[number].append([value - runs.clean_value for value in patched])
    effects: list[PathEffect] = []
    for (senders, receivers), of_path in zip(listed, changes, strict=True):
        array = np.array(of_path)
        chance = array[:, 1:].mean(1) if array.shape[1] > 1 else None
        effect = estimate_effect(array[:, 0], chance)
        effects.append(PathEffect(nodes.names(senders), nodes.names(receivers), effect))
    return PathEffects(*describe_pairs(reader, metric, values), mlps, tuple(effects))


def check_path(
    nodes: CircuitModel, senders: Sequence[Node], receivers: Sequence[Node], mlps: str
) -> None:
    """Raise unless these nodes can send and receive."""
    for node in senders:
        if node.part or node.kind == LOGITS:
            raise ValueError(
                f"{nodes.name(node)} is no sender; give heads such as L0H3, MLPs or {EMBEDDING}"
            )
        if node.kind == EMBEDDING:
            _ = nodes.first_block
    kinds = {node.kind for node in receivers}
    for node in receivers:
        if node.kind == EMBEDDING or (node.kind == HEAD and not node.part):
            raise ValueError(
                f"{nodes.name(node)} is no receiver; give inputs of heads such as L1H2.q, L1H2.k "
                f"or L1H2.v, MLPs such as M1, or {LOGITS}"
            )
    if LOGITS in kinds and len(receivers) > 1:
        raise ValueError(f"{LOGITS} cannot be one of several receivers; give a path of its own")
    nodes.check_receivers(receivers)
    order = {node.place: number for number, node in enumerate(nodes.senders)}
    first = min(order.get(node.place, -1) for node in senders)
    last = max(order.get(node.place, len(order)) for node in receivers)
    # other stacks than one row of blocks have no such order
    if LOGITS not in kinds and len(nodes.parents) == 1 and first >= last:
        raise ValueError(
            f"there is no path from {'+'.join(nodes.names(senders))} to "
            f"{'+'.join(nodes.names(receivers))}, which come first or stand beside; give senders "
            "of earlier layers"
        )
    if mlps == "frozen":
        nodes.check_all_mlps()


def random_sets(
    nodes: CircuitModel, senders: Sequence[Node], seed: int, count: int = NUM_RANDOM
) -> list[list[Node]]:
    """Return sets of other heads, as many in each layer as the senders; none if there are too few.

    A layer's other heads, in random order, take turns.
    """
    generator = np.random.default_rng(seed)
    others: dict[str, list[Node]] = {}  # by site, in random order
    for node in senders:
        if node.kind != HEAD:
            return []
        of_site = [one for one in nodes.heads if one.place == node.place and one not in senders]
        if node.place not in others:
            others[node.place] = [of_site[n] for n in generator.permutation(len(of_site))]
    needed = Counter(node.place for node in senders)
    if any(len(others[place]) < number for place, number in needed.items()):
        return []
    sets: list[list[Node]] = []
    for draw in range(min(count, *map(len, others.values()))):
        chosen: list[Node] = []
        for place, number in needed.items():
            turns = range(draw * number, (draw + 1) * number)
            chosen += [others[place][turn % len(others[place])] for turn in turns]
        sets.append(chosen)
    return sets

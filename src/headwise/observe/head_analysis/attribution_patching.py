"""Attribution patching: the effect of every head on a metric, estimated from gradients (Nanda,
2023).

The estimate for a head is (corrupt - clean) times the gradient of the metric in the run of the
clean text, summed over tokens and channels, of its output, queries, keys or values. It needs three
forward passes and one backward pass for all heads. The integrated form averages gradients over runs
whose embeddings lie between those of the two texts (EAP-IG, Hanna et al. 2024, 2403.17806).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...report.data import Column, Estimate, Figure, HeatMap, Item, Table
from ...report.render import to_text
from ...report.text import choose_format, format_p
from ..inspect.site import OUTPUT, VECTOR_FIELDS
from .circuit_graph import EMBEDDING, CircuitModel, NodeRun
from .path_patching import (
    CircuitResult,
    PairRuns,
    describe_pairs,
    estimate_effect,
    read_pairs,
)
from .resampling import Array, correct_p_values
from .text_analysis import text_reader

PARTS = (OUTPUT, *VECTOR_FIELDS)
NUM_SHOWN = 30  # heads, or edges, of a printed table
LOW_AGREEMENT = 0.7  # of estimates with exact effects, by Pearson's correlation
MAX_EXACT = 20  # heads that are also patched one by one, by default


@dataclass(frozen=True)
class HeadAttribution:
    """Effects of one head on a metric: estimated for its output, q, k and v, and of its output by
    exact patching (None: not measured).

    The chance level is the mean of the other heads of its layer; `level` is the p-value of the
    difference for the output, corrected for all heads. `tokens` has the estimates at each token of
    the first pair, by part.
    """

    name: str
    site: str
    head: int
    effects: Mapping[str, Estimate]
    exact: Estimate | None
    level: float
    tokens: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Agreement:
    """How well estimates agree with exact effects of the same nodes or edges: Pearson's and
    Spearman's correlations, and the share of the largest `top` that both have in common.
    """

    count: int
    pearson: float
    spearman: float
    top: int
    shared: float

    @staticmethod
    def of(estimated: Array, exact: Array) -> Agreement:
        """Compare two arrays [count].

        >>> round(Agreement.of(np.array([1.0, 2, 9]), np.array([1.0, 2, 3])).spearman, 6)
        1.0
        """
        from scipy import stats

        ranks = [stats.rankdata(one) for one in (estimated, exact)]
        top = min(10, -(-len(exact) // 4))
        largest = [set(np.abs(one).argsort()[-top:].tolist()) for one in (estimated, exact)]
        shared = len(largest[0] & largest[1]) / top
        return Agreement(len(exact), _correlate(estimated, exact), _correlate(*ranks), top, shared)

    @property
    def sentence(self) -> str:
        """The agreement as a note."""
        if math.isnan(self.pearson):
            return f"exact patching of {self.count} has no agreement: all effects are equal"
        doubt = "; estimates are unreliable here: read those that are patched, or raise steps"
        return (
            f"agreement with exact patching of {self.count}: Pearson {self.pearson:.2f}, Spearman "
            f"{self.spearman:.2f}; {round(self.shared * self.top)} of the {self.top} "
            f"largest among these {self.count} are in both"
            f"{doubt if self.pearson < LOW_AGREEMENT else ''}"
        )


def _correlate(first: Array, second: Array) -> float:
    """Return Pearson's correlation; NaN if one side is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


@dataclass(frozen=True, repr=False)
class AttributionResult(CircuitResult):
    """Effects of all heads of a model on a metric, from gradients of so many `steps`.

    `words` are the tokens of the first clean text.
    """

    steps: int
    words: tuple[str, ...]
    heads: tuple[HeadAttribution, ...]
    agreement: Agreement | None

    @property
    def by_size(self) -> list[HeadAttribution]:
        """The heads, the largest absolute effect first: exact where it was measured."""
        return sorted(self.heads, key=lambda one: -abs(_best(one)))

    @property
    def table(self) -> Table:
        """A row for each head, the largest effect first."""
        rows: list[tuple[Any, ...]] = []
        for one in self.by_size:
            effects = [one.effects[part].value for part in PARTS]
            chance = one.effects[OUTPUT].chance
            exact = (None,) * 3 if one.exact is None else one.exact[:3]
            rows.append((one.name, *exact, effects[0], chance, *effects[1:], one.level))
        numbers = [value for row in rows for value in row[1:-1] if value is not None]
        least = max(map(abs, numbers), default=0.0) / 100  # smaller ones choose no decimals
        numbers = [value for value in numbers if abs(value) >= least]
        names = ("patched", "low", "high", "estimate", "chance", "by q", "by k", "by v")
        alike = [Column(name, choose_format(numbers)) for name in names]
        columns = ("head", *alike, Column("p", format_p))
        title = self.table_title("change by each head", "p: of the estimate, corrected")
        sentence = [] if self.agreement is None else [self.agreement.sentence]
        return Table(title, columns, rows, (*sentence, *self.notes)).without_empty_columns()

    @property
    def figure(self) -> Figure:
        """The effect of every head on the metric: a row for each layer, a column for each head."""
        sites = list(dict.fromkeys(one.site for one in self.heads))
        num_heads = 1 + max(one.head for one in self.heads)
        largest = max(abs(_best(one)) for one in self.heads) or 1.0
        strengths = [[0.0] * num_heads for _ in sites]
        texts = [[" "] * num_heads for _ in sites]
        for one in self.heads:
            row = sites.index(one.site)
            strengths[row][one.head] = abs(_best(one)) / largest
            texts[row][one.head] = f"{_best(one) / largest:+.2f}"
        columns = [f"{head:>5}" for head in range(num_heads)]
        grid = HeatMap(strengths, sites, columns, x_label="head", texts=texts)
        return Figure(f"{self.title}; effect of each head in units of {largest:.3g}", [grid])

    @property
    def report_items(self) -> Sequence[Item]:
        """The grid and the table."""
        return [self.figure, self.table]

    def __str__(self) -> str:
        table = self.table
        if len(table.rows) > NUM_SHOWN:
            more = f"and {len(table.rows) - NUM_SHOWN} more heads, in .data and --json"
            table = replace(table, rows=table.rows[:NUM_SHOWN], notes=(more, *table.notes))
        is_small = len(self.heads) <= NUM_SHOWN
        return "\n\n".join(map(to_text, (self.figure, table) if is_small else (table,)))


def _best(head: HeadAttribution) -> float:
    return (head.exact or head.effects[OUTPUT]).value


# --- Gradients ------------------------------------------------------------------------------------


def mix_shares(steps: int) -> list[float]:
    """Return the shares of the corrupt embeddings: none for one step, else the middles of equal
    parts, which integrate with an error of the second order.

    >>> mix_shares(1), mix_shares(2)
    ([0.0], [0.25, 0.75])
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    return [0.0] if steps == 1 else [(step + 0.5) / steps for step in range(steps)]


def run_with_gradients(runs: PairRuns, share: float) -> tuple[NodeRun, Tensor]:
    """Return a run whose records are part of the graph of the metric, and the metric."""
    nodes = runs.nodes
    outputs: dict[str, Tensor] = {}
    if share:
        _ = nodes.first_block  # raises if there are no embeddings to mix
        outputs[""] = torch.lerp(runs.clean.recorded[""], runs.corrupt.recorded[""], share)
    node_run = NodeRun(outputs, vector_sites=nodes.vector_sites, tracks_gradients=True)
    with torch.enable_grad():
        return node_run, runs.pair.measure(nodes.run(runs.pair.clean, node_run))


def attribute_pair(runs: PairRuns, steps: int) -> dict[str, dict[str, Array]]:
    """Return the estimated effects at each token by part and site, [tokens, heads], and those of
    the embeddings, [tokens].
    """
    effects: dict[str, dict[str, Array]] = {part: {} for part in (*PARTS, EMBEDDING)}
    shares = mix_shares(steps)
    for share in shares:
        node_run, value = run_with_gradients(runs, share)
        tensors: list[tuple[str, str, Tensor, Tensor]] = []  # part, site, recorded, difference
        for place, output in node_run.recorded.items():
            difference = runs.corrupt.recorded[place] - runs.clean.recorded[place]
            part = OUTPUT if place in runs.nodes.site_names else EMBEDDING
            if part == OUTPUT or not place:
                tensors.append((part, place, output, difference))
        for site, vectors in node_run.vectors.items():
            for part, name in VECTOR_FIELDS.items():
                pair = [
                    getattr(one.vectors[site].inputs, name) for one in (runs.corrupt, runs.clean)
                ]
                tensors.append((part, site, getattr(vectors.inputs, name), pair[0] - pair[1]))
        recorded = [one[2] for one in tensors]
        grads = torch.autograd.grad(value, recorded, materialize_grads=True)
        for (part, site, _, difference), grad in zip(tensors, grads, strict=True):
            # one text may be several windows of tokens
            product = (difference * grad).sum(-1).flatten(0, 1).detach().cpu().double().numpy()
            effects[part][site] = effects[part].get(site, 0.0) + product / len(shares)
    return effects


def attribute_heads(
    model: Any,
    pairs: Iterable[Any],
    metric: Any,
    *,
    steps: int = 1,
    exact: int = MAX_EXACT,
    tokenizer: object = None,
) -> AttributionResult:
    """Estimate the effect of every head on a metric by attribution patching, and measure those with
    the largest estimates exactly.

    The effect is the change of the metric when the head's output, or what it alone reads as
    queries, keys or values, becomes that of the corrupt text. `pairs` and `metric` as in
    `patch_paths`. With `steps` above 1, gradients are averaged over mixed embeddings. `exact` is
    the number of heads that are also patched one by one: those with the largest estimates, and as
    many others; 0 measures none.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> pairs = [(torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5, 9]]))]
    >>> metric = hw.head_analysis.TokenMetric("logit_difference", (2, 7))
    >>> result = attribute_heads(net, pairs, metric)
    >>> result.agreement.count, result.by_size[0].name in ("L0H0", "L0H1", "L1H0", "L1H1")
    (4, True)
    """
    mix_shares(steps)
    with text_reader(model, tokenizer) as reader, torch.no_grad():
        nodes = CircuitModel(reader)
        by_pair: list[dict[str, dict[str, Array]]] = []
        values: list[tuple[float, float]] = []  # of the clean and the corrupt text of each pair
        listed = read_pairs(reader, pairs, metric)
        for pair in listed:
            runs = PairRuns(nodes, pair, nodes.vector_sites)
            values.append((runs.clean_value, runs.corrupt_value))
            by_pair.append(attribute_pair(runs, steps))
        estimates = {
            part: np.array([_sum_tokens(nodes, one[part], part) for one in by_pair])
            for part in PARTS
        }
        order = np.abs(estimates[OUTPUT].mean(0)).argsort()[::-1]
        chosen = choose_to_check(order, exact)
        patched = np.array([_patch_heads(PairRuns(nodes, pair), chosen) for pair in listed])
    agreement = None
    if chosen:
        agreement = Agreement.of(estimates[OUTPUT].mean(0)[chosen], patched.mean(0))
    rows = listed[0].clean.token_rows.get("text", ())
    exact_effects = {head: estimate_effect(patched[:, n]) for n, head in enumerate(chosen)}
    return AttributionResult(
        *describe_pairs(reader, metric, values),
        steps,
        tuple(rows[0].words) if rows else (),
        _describe_heads(nodes, estimates, exact_effects, by_pair[0]),
        agreement,
    )


def choose_to_check(order: Array, count: int) -> list[int]:
    """Return members of a ranking: the first half of `count`, and as many evenly spaced others.

    >>> choose_to_check(np.arange(10), 4)
    [0, 1, 2, 9]
    """
    first = order[: (count + 1) // 2]
    others = order[len(first) :]
    number = min(count // 2, len(others))
    places = np.linspace(0, len(others) - 1, number).astype(int)
    return [int(one) for one in (*first, *others[places])]


def _sum_tokens(nodes: CircuitModel, by_site: Mapping[str, Array], part: str) -> Array:
    """Return effects summed over tokens, [heads].

    A site that a text does not reach has no effect; queries, keys and values that cannot be
    replaced have an unknown one.
    """
    missing = 0.0 if part == OUTPUT else math.nan
    values: list[float] = []
    for node in nodes.heads:
        is_known = node.place in by_site
        values.append(float(by_site[node.place][:, node.head].sum()) if is_known else missing)
    return np.array(values)


def _patch_heads(runs: PairRuns, numbers: Sequence[int]) -> list[float]:
    """Return the exact change of the metric by the output of each of these heads."""
    heads = runs.nodes.heads
    return [runs.patch_output(heads[number]) - runs.clean_value for number in numbers]


def _describe_heads(
    nodes: CircuitModel,
    estimates: Mapping[str, Array],
    exact: Mapping[int, Estimate],
    first: Mapping[str, Mapping[str, Array]],
) -> tuple[HeadAttribution, ...]:
    """Return all heads with their effects, from estimates [pairs, heads] by part."""
    effects: list[dict[str, Estimate]] = []
    for number, node in enumerate(nodes.heads):
        others = [n for n, one in enumerate(nodes.heads) if one.place == node.place and n != number]
        of_head: dict[str, Estimate] = {}
        for part, values in estimates.items():
            chance = values[:, others].mean(1) if others else None
            of_head[part] = estimate_effect(values[:, number], chance)
        effects.append(of_head)
    levels = correct_p_values([one[OUTPUT].p for one in effects])
    heads: list[HeadAttribution] = []
    for number, node in enumerate(nodes.heads):
        tokens = {
            part: tuple(by_site[node.place][:, node.head].tolist())
            for part, by_site in first.items()
            if node.place in by_site
        }
        place = (nodes.name(node), node.place, node.head)
        level = float(levels[number])
        heads.append(HeadAttribution(*place, effects[number], exact.get(number), level, tokens))
    return tuple(heads)

"""The graph of a model's edges: how much each node matters to each other one along a direct path.

The score of an edge is (corrupt - clean) of the sender's output times the gradient of the metric
with respect to the receiver's input, along the direct path between them (EAP, Syed et al. 2023,
2310.10348). It is the first-order estimate of path patching with frozen MLPs. A *circuit* is a set
of edges: along all others, nodes read what the corrupt text sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...report.data import Axis, Column, Estimate, Figure, Item, Plot, Series, Table
from ...report.progress import count_items
from ...report.render import to_plain
from ...report.text import choose_format, format_bytes, format_share
from ...util.errors import pluralise
from ..inspect.ablation import check_seed
from ..inspect.hooks import ForwardOverride, override_forwards
from ..inspect.site import VECTOR_FIELDS, HeadVectors
from .attribution_patching import (
    MAX_EXACT,
    NUM_SHOWN,
    Agreement,
    choose_to_check,
    mix_shares,
    run_with_gradients,
)
from .circuit_graph import (
    EMBEDDING,
    HEAD,
    LOGITS,
    MLP,
    CircuitModel,
    MetricPair,
    Node,
    NodeRun,
    RunHandler,
    change_output,
)
from .path_patching import (
    CircuitResult,
    PairRuns,
    describe_pairs,
    estimate_effect,
    read_pairs,
)
from .resampling import Array
from .text_analysis import text_reader

EdgeMask = NDArray[np.bool_]  # [senders, receivers]


# --- Options and results --------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeOptions:
    """Options of `attribute_edges`.

    - `steps`: runs between the texts whose gradients are averaged; 1 takes those of the clean text.
    - `exact`: edges that are also patched one by one.
    - `points`: sizes of circuits on the curves, up to all edges; 0 for no curves.
    - `draws`: random sets of edges of each size; `seed` of them.
    - `budget`: largest memory in bytes for the scores and for one run of a circuit.
    """

    steps: int = 1
    exact: int = MAX_EXACT
    points: int = 8
    draws: int = 3
    seed: int = 0
    budget: int = 4 * 2**30


@dataclass(frozen=True)
class Edge:
    """One edge: its score over pairs of texts, and its effect by path patching if measured."""

    sender: str
    receiver: str
    score: Estimate
    exact: float | None = None


@dataclass(frozen=True)
class CircuitSize:
    """The share of the metric that the `edges` best edges keep, and that all others keep without
    them; chance is that of random edges of equal number.

    A share is 1 for the metric of the clean text, 0 for that of the corrupt one. Pairs of texts
    count by the size of their difference.
    """

    edges: int
    faithfulness: Estimate
    completeness: Estimate


@dataclass(frozen=True, repr=False)
class EdgeGraph(CircuitResult):
    """Scores of all edges of a model for a metric, and the share that circuits of edges keep.

    `edges` are the largest ones, `scores` all of them [senders, receivers].
    """

    num_edges: int
    edges: tuple[Edge, ...]
    sizes: tuple[CircuitSize, ...]
    agreement: Agreement | None
    scores: Array

    @property
    def table(self) -> Table:
        """The largest edges."""
        rows = [
            (f"{one.sender} -> {one.receiver}", *one.score[:3], one.exact) for one in self.edges
        ]
        numbers = [value for row in rows for value in row[1:] if value is not None]
        alike = [
            Column(name, choose_format(numbers)) for name in ("score", "low", "high", "patched")
        ]
        title = self.table_title(f"the {len(rows)} largest of {self.num_edges:,} edges")
        sentence = [] if self.agreement is None else [self.agreement.sentence]
        notes = (*sentence, *self.notes)
        return Table(title, ("edge", *alike), rows, notes).without_empty_columns()

    @property
    def size_table(self) -> Table:
        """A row for each size of circuits."""
        rows = [(one.edges, *one.faithfulness[:4], *one.completeness[:4]) for one in self.sizes]
        names = ("low", "high", "random")
        shares = [Column(name, format_share) for name in ("kept", *names, "without", *names)]
        columns = ["edges", *shares]
        title = "share of the metric that the best edges keep, and that all other edges keep"
        return Table(title, columns, rows).without_empty_columns()

    @property
    def figure(self) -> Figure:
        """The curves of faithfulness and completeness, with random edges of equal number."""
        panels: list[Plot] = []
        for name in ("faithfulness", "completeness"):
            points = [getattr(one, name) for one in self.sizes]
            xs = [one.edges for one in self.sizes]
            values, lows, highs, chance = ([one[n] for one in points] for n in range(4))
            series = [
                Series("best edges", xs, values, lows, highs, marker="."),
                Series("random edges", xs, chance, line="--", colour="muted"),
            ]
            panels.append(Plot(series, Axis("edges", log=True), Axis(name), title=name))
        return Figure(f"{self.model}: circuits of the best edges for {self.metric}", panels)

    @property
    def report_items(self) -> Sequence[Item]:
        """The largest edges, and the sizes of circuits."""
        return [self.table, *([self.size_table] if self.sizes else [])]

    @property
    def data(self) -> dict[str, Any]:
        """Dictionary of plain values, ready for JSON; without the scores of small edges."""
        return to_plain(replace(self, scores=np.empty(0)))


# --- Scores ---------------------------------------------------------------------------------------


def score_edges(
    runs: PairRuns, steps: int, progress: Callable[[str], object] = lambda _: None
) -> Array:
    """Return the score of every edge [senders, receivers] for one pair; NaN if there is no edge."""
    nodes = runs.nodes
    differences = {
        place: runs.corrupt.recorded[place] - clean for place, clean in runs.clean.recorded.items()
    }
    shares = mix_shares(steps)
    total = np.zeros((len(nodes.senders), len(nodes.receivers)))
    for share in shares:
        node_run, value = run_with_gradients(runs, share)
        read = _input_tensors(node_run)
        grads = torch.autograd.grad(value, list(read.values()), materialize_grads=True)
        gradients = dict(zip(read, grads, strict=True))
        outputs: dict[str, Any] = {
            place: output.detach().requires_grad_() for place, output in node_run.recorded.items()
        }
        frozen = NodeRun(outputs, vector_sites=nodes.vector_sites, tracks_gradients=True)
        with torch.enable_grad():
            direct = runs.pair.measure(nodes.run(runs.pair.clean, frozen))
        inputs = _input_tensors(frozen)
        listed = count_items(nodes.receivers, progress, "scoring edges", "receivers")
        for column, node in enumerate(listed):
            key = (node.place, node.part)
            tensor = direct if node.kind == LOGITS else inputs[key]
            gradient = None if node.kind == LOGITS else gradients[key]
            if gradient is not None and node.kind == HEAD:
                of_head = torch.zeros_like(gradient)
                of_head[:, :, node.head] = gradient[:, :, node.head]
                gradient = of_head
            total[:, column] += _direct_effects(nodes, tensor, gradient, outputs, differences)
    return total / len(shares)


def _input_tensors(node_run: NodeRun) -> dict[tuple[str, str], Tensor]:
    """Return what nodes read, by (site, part) for all heads of a site or (block, "")."""
    tensors = {(place, ""): tensor for place, tensor in node_run.mlp_inputs.items()}
    for site, vectors in node_run.vectors.items():
        for part, name in VECTOR_FIELDS.items():
            tensors[site, part] = getattr(vectors.inputs, name)
    return tensors


def _direct_effects(
    nodes: CircuitModel,
    tensor: Tensor,
    gradient: Tensor | None,
    outputs: Mapping[str, Tensor],
    differences: Mapping[str, Tensor],
) -> Array:
    """Return difference times gradient of every sender [senders], back from one input tensor."""
    grads = torch.autograd.grad(
        tensor, list(outputs.values()), gradient, retain_graph=True, allow_unused=True
    )
    of_place = dict(zip(outputs, grads, strict=True))
    products: dict[str, Array] = {}
    for place, grad in of_place.items():
        if grad is not None:
            product = (differences[place] * grad).sum(-1)
            # heads have an axis of their own
            summed = product.flatten(0, -2).sum(0) if place in nodes.site_names else product.sum()
            products[place] = summed.detach().cpu().double().numpy()
    effects = np.full(len(nodes.senders), math.nan)
    for number, node in enumerate(nodes.senders):
        if node.place in products:
            product = products[node.place]
            effects[number] = product[node.head] if node.kind == HEAD else product
    return effects


# --- Circuits -------------------------------------------------------------------------------------


class _CircuitRun(RunHandler):
    """A run of the clean text in which every receiver has a row of the batch with a residual stream
    of its own: along its kept edges it gets what nodes compute now, along others the corrupt
    outputs.
    """

    def __init__(self, runs: PairRuns, edges: EdgeMask) -> None:
        self.vector_sites = runs.nodes.site_names
        self.corrupt = runs.corrupt.recorded
        self.rows = {node: row for row, node in enumerate(runs.nodes.receivers)}
        masks = map(torch.from_numpy, edges)
        self.masks = dict(zip(runs.nodes.senders, masks, strict=True))
        self.outputs: dict[str, Tensor] = {}  # of heads by site, [1, T, H, V]

    def write(self, place: str, output: Tensor) -> Tensor:
        corrupt = self.corrupt[place]
        if place not in self.outputs:
            node = Node(MLP, place) if place else Node(EMBEDDING)
            is_flat = output.dim() == 2
            chosen = self._choose(node, output if is_flat else output[:1], corrupt)
            return chosen.flatten(0, 1) if is_flat else chosen
        current = self.outputs[place]
        heads = [
            self._choose(Node(HEAD, place, head), current[:, :, head], corrupt[:, :, head])
            for head in range(current.shape[2])
        ]
        return torch.stack(heads, 2)

    def _choose(self, node: Node, current: Tensor, corrupt: Tensor) -> Tensor:
        """Return the output of a node in every row, [rows, T, width]."""
        is_kept = self.masks[node].to(current.device)[:, None, None]
        return torch.where(is_kept, current, corrupt)

    def read_mlp(self, place: str, value: Tensor) -> Tensor:
        return self.read_row(Node(MLP, place), value)

    def read_row(self, node: Node, value: Tensor) -> Tensor:
        """Return what one receiver reads, [1, T, width]; [T, width] of rows and tokens in one
        axis, as MLPs of OPT read them.
        """
        row = self.rows[node]
        if value.dim() == 2:
            return value.unflatten(0, (len(self.rows), -1))[row]
        return value[row : row + 1]

    def change_vectors(self, site: str, vectors: HeadVectors) -> None:
        inputs = vectors.inputs
        heads = range(vectors.num_heads)
        chosen: dict[str, Tensor] = {}
        for part, name in VECTOR_FIELDS.items():
            rows = [self.rows[Node(HEAD, site, head, part)] for head in heads]
            chosen[name] = getattr(inputs, name)[rows, :, list(heads)].transpose(0, 1)[None]
        for name in ("mask", "bias"):
            mask = getattr(inputs, name)
            if mask is not None and mask.dim() == 4:
                chosen[name] = mask[:1]
        of_rows = HeadVectors(replace(inputs, **chosen))
        of_rows.changed_heads.update(heads)
        self.outputs[site] = of_rows.edit_outputs(torch.empty_like(chosen["v_BSGV"]))


@torch.no_grad()
def run_circuit(runs: PairRuns, edges: EdgeMask) -> float:
    """Return the metric of the clean text if nodes read the corrupt outputs along all edges but
    these.
    """
    nodes = runs.nodes
    circuit = _CircuitRun(runs, edges)
    keep_logits = partial(circuit.read_row, Node(LOGITS))
    last = ForwardOverride(nodes.last_block, partial(change_output, keep_logits))
    with override_forwards([last]):
        inputs = runs.pair.clean.repeat(len(nodes.receivers))
        return float(runs.pair.measure(nodes.run(inputs, circuit)))


def _measure_sizes(
    all_runs: Sequence[PairRuns], scores: Array, options: EdgeOptions
) -> tuple[CircuitSize, ...]:
    """Return what circuits of the best and of random edges keep, for growing numbers of edges.

    Pairs count by the size of their difference, so those without one do not count.
    """
    all_runs = [runs for runs in all_runs if runs.total]
    if not all_runs or not options.points:
        return ()
    differences = np.abs([runs.total for runs in all_runs])
    is_edge = ~np.isnan(scores)
    places = np.argwhere(is_edge)
    order = np.abs(scores[is_edge]).argsort(kind="stable")[::-1]
    generator = np.random.default_rng(options.seed)
    counts = np.unique(np.geomspace(1, len(order), max(2, options.points)).round().astype(int))
    sizes: list[CircuitSize] = []
    for count in counts.tolist():
        orders = [order, *(generator.permutation(order) for _ in range(options.draws))]
        sets = [places[one[:count]] for one in orders]
        shares = np.array([_kept_shares(runs, sets, is_edge) for runs in all_runs])  # [pairs, n, 2]
        chance = shares[:, 1:].mean(1) if options.draws else np.full_like(shares[:, 0], math.nan)
        faithfulness, completeness = (
            estimate_effect(shares[:, 0, n], chance[:, n], differences) for n in range(2)
        )
        sizes.append(CircuitSize(count, faithfulness, completeness))
    return tuple(sizes)


def _kept_shares(
    runs: PairRuns, sets: Sequence[NDArray[np.intp]], is_edge: EdgeMask
) -> list[list[float]]:
    """Return the share of the metric with only a set of edges, and without it, for each set."""
    shares: list[list[float]] = []
    for chosen in sets:
        edges = np.zeros_like(is_edge)
        edges[chosen[:, 0], chosen[:, 1]] = True
        values = [run_circuit(runs, one) for one in (edges, is_edge & ~edges)]
        # smaller shares are rounding of float32
        shares.append([round((runs.corrupt_value - value) / runs.total, 5) for value in values])
    return shares


def attribute_edges(
    model: Any,
    pairs: Iterable[Any],
    metric: Any,
    *,
    options: EdgeOptions = EdgeOptions(),
    tokenizer: object = None,
    progress: Callable[[str], object] = lambda _: None,
) -> EdgeGraph:
    """Score all edges between heads, MLPs, embeddings and logits for a metric, and measure which
    share of it circuits of the best edges keep.

    `pairs` and `metric` as in `patch_paths`. The curves have, for each number of edges, the share
    of the difference between both texts that remains if all other edges carry the corrupt text
    (faithfulness), and if these edges do (completeness), beside random edges of equal number.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config), seed=0).eval()
    >>> pairs = [(torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5, 9]]))]
    >>> metric = hw.head_analysis.TokenMetric("logit_difference", (2, 7))
    >>> graph = attribute_edges(net, pairs, metric)
    >>> graph.num_edges, round(graph.sizes[-1].faithfulness.value, 3)
    (13, 1.0)
    """
    mix_shares(options.steps)
    check_seed(options.seed)
    with text_reader(model, tokenizer) as reader, torch.no_grad():
        nodes = CircuitModel(reader)
        _ = nodes.first_block
        nodes.check_receivers(nodes.receivers)
        nodes.check_all_mlps()
        listed = read_pairs(reader, pairs, metric)
        check_budget(nodes, listed, options)
        all_runs = [PairRuns(nodes, pair) for pair in listed]
        scores = np.array([score_edges(runs, options.steps, progress) for runs in all_runs])
        mean = scores.mean(0)
        places = np.argwhere(~np.isnan(mean))
        order = np.abs(mean[tuple(places.T)]).argsort(kind="stable")[::-1]
        exact: dict[int, float] = {}
        chosen = choose_to_check(order, options.exact)
        for n in count_items(chosen, progress, "patching", "edges"):
            ends = (nodes.senders[places[n, 0]], nodes.receivers[places[n, 1]])
            changes = [
                runs.patch_path([ends[0]], [ends[1]], "frozen") - runs.clean_value
                for runs in all_runs
            ]
            exact[n] = float(np.mean(changes))
        if options.points:
            progress("measuring circuits")
        sizes = _measure_sizes(all_runs, mean, options)
    agreement = None
    if exact:
        estimated = mean[tuple(places[list(exact)].T)]
        agreement = Agreement.of(estimated, np.array(list(exact.values())))
    edges: list[Edge] = []
    for n in order[:NUM_SHOWN].tolist():
        sender, receiver = places[n]
        names = (nodes.name(nodes.senders[sender]), nodes.name(nodes.receivers[receiver]))
        edges.append(Edge(*names, estimate_effect(scores[:, sender, receiver]), exact.get(n)))
    values = [(runs.clean_value, runs.corrupt_value) for runs in all_runs]
    described = describe_pairs(reader, metric, values)
    graph = EdgeGraph(*described, len(places), tuple(edges), sizes, agreement, mean)
    num_flat = sum(runs.total == 0 for runs in all_runs)
    if sizes and num_flat:
        note = f"circuits leave out {pluralise(num_flat, 'pair')} without a difference"
        graph = replace(graph, notes=(*graph.notes, note))
    return graph


def check_budget(nodes: CircuitModel, pairs: Sequence[MetricPair], options: EdgeOptions) -> None:
    """Raise if the scores, and one run of a circuit if there are curves, need more memory than the
    budget.
    """
    num_edges = len(nodes.senders) * len(nodes.receivers)
    parameter = next(nodes.model.parameters())
    width = max(one.shape[-1] for one in nodes.model.parameters() if one.dim() > 1)
    tokens = max(_count_tokens(pair) for pair in pairs)
    # a run holds several tensors as wide as the widest matrix, with a row for every receiver
    bytes_per_run = 4 * len(nodes.receivers) * tokens * width * parameter.element_size()
    needed = 8 * num_edges * (len(pairs) + 1) + (bytes_per_run if options.points else 0)
    if needed > options.budget:
        raise ValueError(
            f"the graph has {len(nodes.senders):,} senders and {len(nodes.receivers):,} receivers "
            f"and needs about {format_bytes(needed)} for texts of {tokens} tokens, more than the "
            f"budget of {format_bytes(options.budget)}; give shorter texts, or a larger budget"
        )


def _count_tokens(pair: MetricPair) -> int:
    rows = pair.clean.token_rows.get("text", ())
    return len(rows[0].ids) if rows else 1

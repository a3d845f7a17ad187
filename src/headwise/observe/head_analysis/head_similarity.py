"""Similarity of heads: distances between attention rows, CKA of outputs, sampling of both,
clustering and a map.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...kernels.devices import exact_device, to_float64
from ..inspect.hooks import AttentionHook, SiteModule, run_observed
from ..inspect.model_inputs import get_device
from ..inspect.site import ObservedCall
from .annotated_examples import Example
from .weight_bands import MIN_NON_SINK_WEIGHT

# --- Distances of attention rows and similarity of outputs ----------------------------------------

MAX_CELLS = 2**21  # numbers compared at once, so that they stay in the CPU cache


def entropy(weights: Tensor) -> Tensor:
    """Entropy -sum p log p over the last axis in nats, as float64.

    Summing the log in the dtype of the weights is three times as fast as torch.special.xlogy.

    >>> round(entropy(torch.tensor([0.5, 0.5, 0.0])).item(), 6)  # log 2
    0.693147
    """
    return -weights.clamp(min=torch.finfo(weights.dtype).tiny).log_().mul_(weights).sum(-1).double()


def jensen_shannon_divergence(
    weights: Tensor, others: Tensor | None = None, counted: Tensor | None = None
) -> Tensor:
    """Jensen-Shannon divergence H((p + q) / 2) - (H(p) + H(q)) / 2 of every pair of heads, summed
    over rows: [heads, heads].

    `weights` are [heads, rows, keys]. If `others` of the same shape is given, p comes from
    `weights` and q from `others`; the diagonal stays zero. `counted` [heads, rows] marks the rows
    of each head that count; a pair sums over the rows of both.

    >>> rows = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    >>> (jensen_shannon_divergence(rows) / math.log(2)).round(decimals=6).tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    second = weights if others is None else others
    heads, rows, keys = weights.shape
    flags = torch.ones(heads, rows, device=weights.device) if counted is None else counted
    divergence = torch.zeros(heads, heads, dtype=torch.float64, device=weights.device)
    step = max(1, MAX_CELLS // max(1, heads * keys))
    for start in range(0, rows, step):
        p, q = (x[:, start : start + step] for x in (weights, second))
        counts = flags[:, start : start + step].double()
        first_entropy = entropy(p)
        second_entropy = entropy(q)
        for head in range(heads - 1):
            rest = slice(head + 1, None)
            by_row = entropy((p[head] + q[rest]) / 2)
            by_row = (by_row - (first_entropy[head] + second_entropy[rest]) / 2).clamp(min=0)
            divergence[head, rest] += (by_row * counts[rest]) @ counts[head]
    return divergence + divergence.T


def spread_of_sets(weights: Tensor, sets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Spread of each set of heads: (H(mean p) - mean H(p)) / log n over its n heads (generalised
    Jensen-Shannon divergence, 1909.00015), summed over rows, and the number of these rows: [sets]
    each.

    `weights` are [heads, rows, keys]; `sets` [sets, heads] marks the members of each set; `counted`
    [heads, rows] the rows of each head that count. A row counts for a set in which at least two
    heads count it, and n is their number.

    >>> rows = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> sums, counts = spread_of_sets(
    ...     rows, torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.ones(2, 1)
    ... )
    >>> sums.round(decimals=6).tolist(), counts.tolist()
    ([1.0, 0.0], [1.0, 0.0])
    """
    _, rows, keys = weights.shape
    sets = sets.to(weights)
    flags_RH = counted.T.to(weights)
    sums = torch.zeros(len(sets), dtype=torch.float64, device=weights.device)
    counts = sums.clone()
    step = max(1, 2 * MAX_CELLS // max(1, len(sets) * keys))
    for start in range(0, rows, step):
        chunk = weights[:, start : start + step].transpose(0, 1)
        members = sets * flags_RH[start : start + step, None]  # [rows, sets, heads]
        size = members.sum(-1)
        members = members / size.clamp(min=1)[..., None]
        mean_of_heads = (members.double() @ entropy(chunk)[..., None])[..., 0]
        divergence = (entropy(members @ chunk) - mean_of_heads).clamp(min=0)
        sums += torch.where(size > 1, divergence / size.clamp(min=2).double().log(), 0).sum(0)
        counts += (size > 1).sum(0)
    return sums, counts


def centred_kernel_alignment(features: Tensor) -> Tensor:
    """Centred kernel alignment (CKA, 1905.00414) of head outputs over the same tokens: [heads,
    heads].

    CKA measures similarity up to rotation and scale. `features` are [heads, tokens, width]. It uses
    the unbiased estimator of HSIC (Song et al. 2012): its mean is zero for unrelated features, so
    it can be negative. A head with constant output has NaN.

    >>> x = torch.arange(15.0).view(1, 5, 3) ** 2
    >>> centred_kernel_alignment(torch.cat([x, 3 * x]))[0, 1].round(decimals=6).item()
    1.0
    """
    heads, tokens, width = features.shape
    if tokens < 4:
        raise ValueError(f"cannot compare head outputs over {tokens} tokens; give at least 4")
    x = to_float64(features)
    x = x - x.mean(1, keepdim=True)
    columns = x.transpose(0, 1).flatten(1)
    blocks: list[Tensor] = []
    for some in columns.split(width * max(1, MAX_CELLS // max(1, heads * width**2)), -1):
        products = (some.T @ columns).square()
        blocks.append(products.view(-1, width, heads, width).sum((1, 3)))
    hsic = torch.cat(blocks)
    # The diagonals of the kernels are removed.
    diagonal = x.square().sum(-1)
    row_sums = (x * x.sum(1, keepdim=True)).sum(-1) - diagonal
    total = row_sums.sum(-1)
    hsic = hsic - diagonal @ diagonal.T
    hsic = hsic + total[:, None] * total / ((tokens - 1) * (tokens - 2))
    hsic = hsic - 2 / (tokens - 2) * row_sums @ row_sums.T
    hsic = hsic / (tokens * (tokens - 3))
    self_hsic = hsic.diagonal().clamp(min=0)
    scale = (self_hsic[:, None] * self_hsic).sqrt()
    return torch.where(scale > 1e-12 * scale.max().clamp(min=1e-300), hsic / scale, math.nan)


# --- Sampled rows and outputs of a text -----------------------------------------------------------

MAX_SAMPLED_CELLS = 2**25  # largest number of sampled weights of a text, over all heads: 128 MB
MIN_ROWS = 8  # rows sampled from a text however long it is
StreamPair = tuple[str, str]


class HeadLocation(NamedTuple):
    """A head: the name of its site, its layer, and its index in the layer."""

    site: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.site} head {self.head}"


class NonSinkRows(NamedTuple):
    """Attention rows without sinks, rescaled to sum to 1, [heads, rows, other keys].

    `counted` [heads, rows] marks the rows in which sinks leave at least `MIN_NON_SINK_WEIGHT`; the
    others are zero.
    """

    weights: Tensor
    counted: Tensor


class SampledRows(NamedTuple):
    """Sampled attention rows of all heads over the same tokens.

    - `streams`: names of the query stream and of the key stream.
    - `weights`: [heads, rows, keys + 1]; the last column is the weight of a learned sink.
    - `allowed`: keys that each row may read, [heads, rows, keys].
    - `is_sink`: which keys are sinks, [keys]; the learned sink always is one.
    - `row_weight`: number of rows of the text that each sampled row stands for.
    """

    streams: StreamPair
    heads: tuple[HeadLocation, ...]
    weights: Tensor
    allowed: Tensor
    is_sink: Tensor
    row_weight: float = 1.0

    def permute_weights(self, seed: Sequence[int]) -> Tensor:
        """Permute the weights of each row among the keys that it may read, except for sinks.

        The rows stay as sharp, with as much on sinks, but unrelated to the text.
        """
        generator = np.random.default_rng(seed)
        permuted = self.weights.clone()
        for head, allowed in enumerate(self.allowed & ~self.is_sink):
            keys = torch.from_numpy(generator.random(allowed.shape, dtype=np.float32))
            keys = keys.to(allowed.device)
            # Allowed keys come first, in order and in random order; the others follow in order in
            # both and stay.
            targets = (~allowed).int().argsort(dim=-1, stable=True)
            sources = torch.where(allowed, keys, 2).argsort(dim=-1, stable=True)
            weights = permuted[head, :, :-1]
            weights.scatter_(-1, targets, self.weights[head, :, :-1].gather(-1, sources))
        return permuted

    def without_sinks(self, weights: Tensor) -> NonSinkRows:
        """Leave out the sinks of `weights`, for these rows or permuted ones."""
        rest = weights[..., :-1][..., ~self.is_sink]
        mass = rest.sum(-1)
        counted = mass >= MIN_NON_SINK_WEIGHT
        scale = torch.where(counted, 1 / mass.clamp(min=MIN_NON_SINK_WEIGHT), 0)
        return NonSinkRows(rest * scale[..., None], counted)

    @property
    def sink_weight(self) -> float:
        """Weight on sinks, summed over heads and rows."""
        return float((1 - self.weights[..., :-1][..., ~self.is_sink].sum(-1)).sum())


def choose_queries(
    num_rows: int, seed: Sequence[int], num_queries: int, cells_per_query: int
) -> Tensor:
    """Sampled query positions of a text: evenly spaced from a random start, fewer if each has very
    many cells.

    >>> choose_queries(3, (0, 0), 9, 1).diff().tolist()
    [3, 3]
    """
    most = max(MIN_ROWS, MAX_SAMPLED_CELLS // max(1, cells_per_query))
    num_rows = max(1, min(num_queries, num_rows, most))
    positions = (
        (np.random.default_rng(seed).random() + np.arange(num_rows)) * num_queries / num_rows
    )
    return torch.from_numpy(positions.astype(np.int64))


class RowSamplingHook(AttentionHook):
    """Hook that keeps the sampled rows of one site; `unsupported_reason` is set if its rows are not
    distributions.
    """

    def __init__(self, queries: Tensor) -> None:
        gaps = (queries.diff() != 1).nonzero()[:, 0] + 1
        runs = queries.tensor_split(gaps)
        self.query_runs = [slice(int(run[0]), int(run[-1]) + 1) for run in runs]
        self.rows: tuple[Tensor, Tensor] | None = None  # weights and allowed pairs
        self.unsupported_reason = ""

    def on_call(self, call: ObservedCall) -> None:
        """Compute and keep the sampled rows only."""
        weights = torch.cat([call.all_weights(run)[0] for run in self.query_runs], 1)
        allowed = torch.cat([call.allowed_pairs(run)[0] for run in self.query_runs], 1)
        self.rows = (weights, allowed.expand(weights.shape))
        if bool((weights < 0).any()) or bool((weights.sum(-1) > 1 + 1e-3).any()):
            self.unsupported_reason = "its weights are negative or sum to more than one"


def sample_rows(
    model: nn.Module,
    sites: Sequence[SiteModule],
    example: Example,
    streams: Mapping[str, StreamPair],
    num_rows: int,
    seed: int,
    text_index: int = 0,
) -> tuple[list[SampledRows], dict[str, str]]:
    """Sample rows of one text, grouped by heads over the same tokens; also return why sites are
    left out.

    Rows in which some head may not read any key are left out.
    """
    hooks: dict[str, RowSamplingHook] = {}
    num_sampled: dict[StreamPair, int] = {}
    for module in sites:
        pair = streams[module.site.name]
        missing = [stream for stream in pair if stream not in example.streams]
        if missing:
            raise ValueError(
                f"example {text_index} has no annotations of the tokens of {missing[0]!r}; give "
                "the text or its ids instead, which hw.ExampleReader annotates"
            )
        query_tokens, key_tokens = (example.streams[stream] for stream in pair)
        num_heads = sum(one.site.q for one in sites if streams[one.site.name] == pair)
        cells = num_heads * key_tokens.count
        queries = choose_queries(num_rows, (seed, text_index), query_tokens.count, cells)
        num_sampled[pair] = len(queries)
        hooks[module.site.name] = RowSamplingHook(queries)
    run_observed(model, example.model_inputs, sites, hooks)
    # The layers of a model may be on several devices; rows are compared in float64.
    device = exact_device(get_device(model))
    groups: list[SampledRows] = []
    for pair, count in num_sampled.items():
        heads: list[HeadLocation] = []
        weights: list[Tensor] = []
        allowed: list[Tensor] = []
        for module in sites:
            hook = hooks[module.site.name]
            if streams[module.site.name] != pair or hook.rows is None or hook.unsupported_reason:
                continue
            place = (module.site.name, module.site.layer)
            heads += [HeadLocation(*place, head) for head in range(len(hook.rows[0]))]
            weights.append(hook.rows[0].to(device))
            allowed.append(hook.rows[1].to(device))
        if heads:
            all_allowed = torch.cat(allowed)
            has_keys = all_allowed.any(-1).all(0)
            rows = torch.cat(weights)[:, has_keys].float()
            # one more key holds the weight of a learned sink, so that every row sums to one
            learned_sink = (1 - rows.sum(-1, keepdim=True)).clamp(min=0)
            rows = torch.cat([rows, learned_sink], -1)
            is_sink = example.streams[pair[1]].is_sink.to(device)
            row_weight = example.streams[pair[0]].count / count
            allowed_rows = all_allowed[:, has_keys]
            groups.append(SampledRows(pair, tuple(heads), rows, allowed_rows, is_sink, row_weight))
    reasons = {name: hook.unsupported_reason for name, hook in hooks.items()}
    return groups, {name: reason for name, reason in reasons.items() if reason}


class OutputReservoir:
    """Uniform sample of head outputs over all tokens of a data set.

    Every token gets a random priority, and the `max_tokens` smallest ones are kept. Dropping the
    others after each text keeps the same tokens as dropping them once at the end.
    """

    def __init__(self, max_tokens: int, seed: int = 0) -> None:
        self.max_tokens = max_tokens
        self.seed = seed
        self.threshold = 1.0
        self.priorities: NDArray[np.float64] = np.empty(0)
        self.outputs: dict[str, Tensor] = {}

    def add(self, text_index: int, head_outputs: Mapping[str, Tensor]) -> None:
        """Add head outputs [tokens, heads, width] of a text by site; all sites must have the same
        tokens.
        """
        count = len(next(iter(head_outputs.values())))
        priorities = np.random.default_rng([self.seed, text_index]).random(count)
        selected = np.flatnonzero(priorities < self.threshold)
        self.priorities = np.concatenate([self.priorities, priorities[selected]])
        for name, z in head_outputs.items():
            new = z[torch.from_numpy(selected).to(z.device)].float().cpu()
            self.outputs[name] = torch.cat([self.outputs.get(name, new[:0]), new])
        if len(self.priorities) > self.max_tokens:
            best = np.argsort(self.priorities)[: self.max_tokens]
            self.priorities = self.priorities[best]
            self.threshold = float(self.priorities[-1])
            self.outputs = {name: z[torch.from_numpy(best)] for name, z in self.outputs.items()}

    def features(self, sites: Sequence[str]) -> Tensor:
        """Outputs of all heads of these sites, [heads, tokens, width]; narrower heads are padded
        with zeros.
        """
        width = max(self.outputs[name].shape[-1] for name in sites)
        outputs = [self.outputs[name] for name in sites]
        padded = [nn.functional.pad(z, (0, width - z.shape[-1])) for z in outputs]
        return torch.cat(padded, 1).transpose(0, 1)


# --- Clusters and a map of distances --------------------------------------------------------------

DistanceArray = NDArray[np.float64]


class ClusterMerge(NamedTuple):
    """A merge of two clusters: the first member of each, and the distance between the clusters."""

    one: int
    other: int
    height: float


def average_linkage(distances: DistanceArray) -> list[ClusterMerge]:
    """Hierarchical clustering with average linkage; returns the merges, the closest first.

    >>> apart = np.abs(np.subtract.outer([0.0, 1.0, 5.0], [0.0, 1.0, 5.0]))
    >>> [tuple(merge) for merge in average_linkage(apart)]
    [(0, 1, 1.0), (0, 2, 4.5)]
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    first_members = list(range(len(distances)))
    merges: list[ClusterMerge] = []
    for one, other, height, _ in linkage(squareform(distances, checks=False), "average").tolist():
        members = sorted((first_members[int(one)], first_members[int(other)]))
        merges.append(ClusterMerge(members[0], members[1], height))
        first_members.append(members[0])
    return merges


def cut_clusters(merges: list[ClusterMerge], max_distance: float) -> tuple[int, ...]:
    """Cluster of each item after all merges closer than `max_distance`, numbered from 0 in order of
    the items.

    >>> cut_clusters([ClusterMerge(0, 1, 1.0), ClusterMerge(0, 2, 4.5)], 2.0)
    (0, 0, 1)
    """
    cluster_of = list(range(len(merges) + 1))
    for one, other, height in merges:
        if height < max_distance:
            merged = cluster_of[other]
            target = cluster_of[one]
            cluster_of = [target if cluster == merged else cluster for cluster in cluster_of]
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(cluster_of))}
    return tuple(numbers[cluster] for cluster in cluster_of)


class PlaneEmbedding(NamedTuple):
    """Points [n, 2], and the stress sqrt(sum (d - D)^2 / sum D^2) of their distances d against the
    true ones D.
    """

    points: DistanceArray
    stress: float


NUM_STARTS = 5
MAX_STEPS = 1000


def embed_in_plane(distances: DistanceArray, seed: int = 0) -> PlaneEmbedding:
    """Embed items in the plane to match distances: multidimensional scaling by SMACOF.

    SMACOF runs from several starts. The first start is the classical solution, the others are
    random. The best result is rotated so that it is widest along the first axis. The result is
    deterministic.

    >>> corners = np.array([[0.0, 0], [3, 0], [3, 4]])
    >>> found = embed_in_plane(np.linalg.norm(corners[:, None] - corners, axis=-1))
    >>> found.stress < 1e-6
    True
    """
    generator = np.random.default_rng(seed)
    scale = float(distances.max()) or 1.0
    # Classical scaling: the two largest eigenvalues of the doubly centred squared distances
    centring = np.eye(len(distances)) - 1 / len(distances)
    values, vectors = np.linalg.eigh(-0.5 * centring @ (distances**2) @ centring)
    classical = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    others = scale * generator.standard_normal((NUM_STARTS - 1, len(distances), 2))
    embeddings = [_minimise_stress(distances, points) for points in (classical, *others)]
    points, stress = min(embeddings, key=lambda embedding: embedding.stress)
    points = points - points.mean(0)
    _, _, axes = np.linalg.svd(points, full_matrices=False)
    rotated = points @ axes.T
    extreme = rotated[np.abs(rotated).argmax(0), [0, 1]]  # the farthest point of each axis
    return PlaneEmbedding(rotated * np.where(extreme < 0, -1, 1), stress)


def _minimise_stress(distances: DistanceArray, points: DistanceArray) -> PlaneEmbedding:
    """Iterate the Guttman transform; every step lowers the stress."""
    total = float((distances**2).sum()) or 1.0
    previous = math.inf
    for step in range(MAX_STEPS + 1):
        apart = np.linalg.norm(points[:, None] - points, axis=-1)
        stress = float(np.sqrt(((apart - distances) ** 2).sum() / total))
        if previous - stress < 1e-10 or step == MAX_STEPS:
            break
        previous = stress
        ratio = -np.divide(distances, apart, out=np.zeros_like(distances), where=apart > 0)
        np.fill_diagonal(ratio, 0)
        np.fill_diagonal(ratio, -ratio.sum(1))
        points = ratio @ points / len(distances)
    return PlaneEmbedding(points, stress)

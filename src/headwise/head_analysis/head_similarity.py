"""How alike heads are: by the weights of their rows, and by what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import suggest
from ..inspect.hooks import AttentionCall, SiteModule
from ..inspect.model_inputs import prepare_inputs
from ..inspect.site_hooks import ModelRun
from .annotated_examples import Example

MAX_CELLS = 2**21  # numbers that are compared at once, so that they stay in cache
SMOOTHING_METHODS = ("none", "clark")
CKA_ESTIMATORS = ("unbiased", "linear")


def entropy(weights: Tensor) -> Tensor:
    """- sum p log p over the last axis, in nats: summed as it comes, three times as fast as xlogy, told in float64.

    >>> round(entropy(torch.tensor([0.5, 0.5, 0.0])).item(), 6)  # log 2
    0.693147
    """
    return -weights.clamp(min=torch.finfo(weights.dtype).tiny).log_().mul_(weights).sum(-1).double()


def smooth_weights(weights: Tensor, method: str) -> Tensor:
    """Weights [heads, rows, keys] as they are, or 0.999 a + 0.001 / n over n keys as "clark" does (1906.04341)."""
    if method not in SMOOTHING_METHODS:
        raise ValueError(f"smoothing={method!r} is unknown; {suggest(method, SMOOTHING_METHODS)}")
    return weights if method == "none" else 0.999 * weights + 1e-3 / weights.shape[-1]


def append_sink_column(weights: Tensor) -> Tensor:
    """The same with one key more that takes what a learned sink took, so that every row sums to one."""
    return torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp(min=0)], -1)


def jensen_shannon_divergence(weights: Tensor, others: Tensor | None = None) -> Tensor:
    """H((p + q) / 2) - (H(p) + H(q)) / 2 of every pair of heads, summed over rows: [heads, heads].

    Weights are [heads, rows, keys]. With `others`, of the same shape, p is a head's and q another head's of these, so
    that nobody is held to itself and the diagonal stays zero.

    >>> rows = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
    >>> (jensen_shannon_divergence(rows) / math.log(2)).round(decimals=6).tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    told = weights if others is None else others
    heads, rows, keys = weights.shape
    found = torch.zeros(heads, heads, dtype=torch.float64, device=weights.device)
    step = max(1, MAX_CELLS // max(1, heads * keys))
    for start in range(0, rows, step):
        p, q = (each[:, start : start + step] for each in (weights, told))
        own, own_told = entropy(p), entropy(q)
        for head in range(heads - 1):
            both = entropy((p[head] + q[head + 1 :]) / 2)
            found[head, head + 1 :] += (both - (own[head] + own_told[head + 1 :]) / 2).clamp(min=0).sum(-1)
    return found + found.T


def generalised_jensen_shannon(weights: Tensor, sets: Tensor) -> Tensor:
    """H(mean p) - mean H(p) over each set of heads, summed over rows (1909.00015): [sets].

    Weights are [heads, rows, keys]; `sets` [sets, heads] holds 1 / n at each of its n heads and 0 elsewhere.

    >>> rows = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> (generalised_jensen_shannon(rows, torch.tensor([[0.5, 0.5], [1.0, 0.0]])) / math.log(2)).round(
    ...     decimals=6
    ... ).tolist()
    [1.0, 0.0]
    """
    heads, rows, keys = weights.shape
    found = torch.zeros(len(sets), dtype=torch.float64, device=weights.device)
    sets = sets.to(weights)
    step = max(1, 2 * MAX_CELLS // max(1, len(sets) * keys))
    for start in range(0, rows, step):
        some = weights[:, start : start + step]
        mean = (sets @ some.reshape(heads, -1)).reshape(len(sets), -1, keys)
        found += (entropy(mean) - sets.double() @ entropy(some)).clamp(min=0).sum(-1)
    return found


def centred_kernel_alignment(features: Tensor, estimator: str = "unbiased") -> Tensor:
    """How alike what heads say is over the same tokens, up to rotation and scale (1905.00414): [heads, heads].

    Features are [heads, tokens, width]. "linear" is ||X^T Y||^2 / (||X^T X|| ||Y^T Y||) of centred ones, which fewer
    tokens than channels push up; "unbiased" has the estimator of HSIC whose mean is zero where nothing is shared
    (Song et al. 2012), and so may come out below zero. A head that always says the same has none.

    >>> x = torch.eye(5)[None]
    >>> centred_kernel_alignment(torch.cat([x, 3 * x.flip(-1)]), "linear").round(decimals=6)[0, 1].item()
    1.0
    """
    if estimator not in CKA_ESTIMATORS:
        raise ValueError(f"kind={estimator!r} is unknown; {suggest(estimator, CKA_ESTIMATORS)}")
    heads, tokens, _ = features.shape
    if tokens < 4:
        raise ValueError(f"{tokens} tokens are too few to compare what heads say; give at least 4")
    x = features.double()
    x = x - x.mean(1, keepdim=True)
    shared = torch.stack([(x[head].T @ x).square().sum((1, 2)) for head in range(heads)])
    if estimator == "unbiased":
        shared = _unbiased_hsic(x, shared)
    own = shared.diagonal().clamp(min=0)
    scale = (own[:, None] * own).sqrt()
    return torch.where(scale > 1e-12 * scale.max().clamp(min=1e-300), shared / scale, math.nan)


def _unbiased_hsic(x: Tensor, shared: Tensor) -> Tensor:
    """HSIC without bias out of ||X^T Y||^2: what the diagonals of the kernels add is taken out."""
    tokens = x.shape[1]
    diagonal = x.square().sum(-1)
    rows = (x * x.sum(1, keepdim=True)).sum(-1) - diagonal  # of each kernel, its diagonal left out
    total = rows.sum(-1)
    found = shared - diagonal @ diagonal.T
    found = found + total[:, None] * total / ((tokens - 1) * (tokens - 2)) - 2 / (tokens - 2) * rows @ rows.T
    return found / (tokens * (tokens - 3))


# --- Rows of all heads at once, and what they say, of one text -----------------------------------------

MAX_SAMPLED_CELLS = 2**25  # weights of all heads of a text, at most: 128 MB
MIN_ROWS = 8  # rows of a text, however long it is
StreamPair = tuple[str, str]


class HeadLocation(NamedTuple):
    """A head by its site, its layer, and its number there."""

    site: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.site} head {self.head}"


class SampledRows(NamedTuple):
    """Some rows of every head that reads the same tokens, [heads, rows, keys and one for a learned sink], which of
    these keys each may read, and how many rows of the text each stands for."""

    streams: StreamPair
    heads: tuple[HeadLocation, ...]
    weights: Tensor
    allowed: Tensor
    row_weight: float = 1.0

    def permute_weights(self, seed: Sequence[int]) -> Tensor:
        """The same weights, those of each row dealt anew among the keys that it may read: as sharp, and looking at
        nothing."""
        draw, found = np.random.default_rng(seed), self.weights.clone()
        for head, may in enumerate(self.allowed):
            marks = torch.from_numpy(draw.random(may.shape, dtype=np.float32)).to(may.device)
            places, keys = ((~may).int().argsort(dim=-1, stable=True), torch.where(may, marks, 2).argsort(-1))
            own = found[head, :, :-1]
            own.scatter_(-1, places, self.weights[head, :, :-1].gather(-1, keys))
        return found


class RowSampling(NamedTuple):
    """How many queries of a text are looked at, and the seed they are drawn with."""

    num_rows: int = 64
    seed: int = 0

    def choose_queries(self, text_index: int, num_queries: int, cells_per_query: int) -> Tensor:
        """Which queries of text `number`, of so many, when each holds so many cells: evenly spaced from a drawn start.

        >>> RowSampling(3).choose_queries(0, 9, 1).diff().tolist()
        [3, 3]
        """
        most = max(1, min(num_queries, self.num_rows, max(MIN_ROWS, MAX_SAMPLED_CELLS // max(1, cells_per_query))))
        start = np.random.default_rng([self.seed, text_index]).random()
        return torch.from_numpy(((start + np.arange(most)) * num_queries / most).astype(np.int64))


class RowSamplingHook:
    """A watcher that keeps the drawn rows of one site; `why` says why its rows are no shares of what is read."""

    needs_call = True

    def __init__(self, picks: Tensor) -> None:
        gaps = (picks.diff() != 1).nonzero()[:, 0] + 1
        self.query_runs = [slice(int(run[0]), int(run[-1]) + 1) for run in picks.tensor_split(gaps)]
        self.weights: Tensor | None = None
        self.allowed: Tensor | None = None
        self.unsupported_reason = ""

    def on_call(self, call: AttentionCall) -> None:
        """Keep what was drawn, and compute no other row."""
        weights = torch.cat([call.all_weights(run)[0] for run in self.query_runs], 1)
        allowed = torch.cat([call.allowed_pairs(run)[0] for run in self.query_runs], 1)
        self.weights, self.allowed = weights, allowed.expand(weights.shape)
        if bool((weights < 0).any()) or bool((weights.sum(-1) > 1 + 1e-3).any()):
            self.unsupported_reason = "its weights are below zero or sum to more than one, and so are no shares"

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Leave it."""


def sample_rows(
    model: nn.Module,
    sites: Sequence[SiteModule],
    example: Example,
    streams: Mapping[str, StreamPair],
    sampling: RowSampling,
    text_index: int = 0,
) -> tuple[list[SampledRows], dict[str, str]]:
    """Drawn rows of one text, of all heads that read the same tokens together; and which sites have none, and why.

    Rows in which some head may read nothing are left out.
    """
    cells = {
        one.site.name: _num_comparable_heads(sites, streams, one) * example.streams[streams[one.site.name][1]].count
        for one in sites
    }
    picks = {
        name: sampling.choose_queries(text_index, example.streams[streams[name][0]].count, held)
        for name, held in cells.items()
    }
    samplers = {name: RowSamplingHook(own) for name, own in picks.items()}
    ModelRun(model, prepare_inputs(model, example.model_inputs, 0)).run_with_hooks(sites, samplers)
    found: list[SampledRows] = []
    for pair in dict.fromkeys(streams[one.site.name] for one in sites):
        own = [one for one in sites if streams[one.site.name] == pair]
        kept = {
            one: held
            for one in own
            if (held := samplers[one.site.name]).weights is not None and not held.unsupported_reason
        }
        if kept:
            asked = example.streams[pair[0]].count
            found.append(_merge_sites(pair, kept)._replace(row_weight=asked / len(picks[own[0].site.name])))
    return found, {name: held.unsupported_reason for name, held in samplers.items() if held.unsupported_reason}


def _num_comparable_heads(those: Sequence[SiteModule], streams: Mapping[str, StreamPair], one: SiteModule) -> int:
    return sum(other.site.q for other in those if streams[other.site.name] == streams[one.site.name])


def _merge_sites(pair: StreamPair, kept: Mapping[SiteModule, RowSamplingHook]) -> SampledRows:
    weights = [held.weights for held in kept.values() if held.weights is not None]
    may = torch.cat([held.allowed for held in kept.values() if held.allowed is not None])
    alive = may.any(-1).all(0)
    heads = [
        HeadLocation(one.site.name, one.site.layer, head)
        for one, own in zip(kept, weights, strict=True)
        for head in range(len(own))
    ]
    return SampledRows(pair, tuple(heads), append_sink_column(torch.cat(weights)[:, alive].float()), may[:, alive])


class HeadOutputsHook:
    """A watcher that keeps what each head says of a text, [tokens, heads, width]."""

    needs_call = False

    def __init__(self) -> None:
        self.outputs: Tensor | None = None

    def on_call(self, call: AttentionCall) -> None:
        """Leave it."""

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Keep it."""
        self.outputs = outputs[0].detach()


def collect_head_outputs(model: nn.Module, sites: Sequence[SiteModule], example: Example) -> dict[str, Tensor]:
    """What every head of these sites says while a model reads a text, [tokens, heads, width] by site."""
    listeners = {one.site.name: HeadOutputsHook() for one in sites}
    ModelRun(model, prepare_inputs(model, example.model_inputs, 0)).run_with_hooks(sites, listeners)
    return {name: one.outputs for name, one in listeners.items() if one.outputs is not None}


class OutputReservoir:
    """A sample of what heads say, drawn evenly from all tokens of a data set, however they come in texts.

    Every token has a number drawn for it, and those with the least are kept: so all at once and text by text keep the
    same.
    """

    def __init__(self, max_tokens: int, seed: int = 0) -> None:
        self.max_tokens, self.seed, self.threshold = max_tokens, seed, 1.0
        self.priorities: NDArray[np.float64] = np.empty(0)
        self.outputs: dict[str, Tensor] = {}

    def add(self, text_index: int, head_outputs: Mapping[str, Tensor]) -> None:
        """What heads say [tokens, heads, width] of text `number`, by site, of the same tokens each."""
        count = len(next(iter(head_outputs.values())))
        marks = np.random.default_rng([self.seed, text_index]).random(count)
        own = np.flatnonzero(marks < self.threshold)
        self.priorities = np.concatenate([self.priorities, marks[own]])
        for name, z in head_outputs.items():
            new = z[torch.from_numpy(own).to(z.device)].float().cpu()
            self.outputs[name] = torch.cat([self.outputs[name], new]) if name in self.outputs else new
        if len(self.priorities) > self.max_tokens:
            best = np.argsort(self.priorities)[: self.max_tokens]
            self.priorities, self.threshold = self.priorities[best], float(self.priorities[best[-1]])
            self.outputs = {name: z[torch.from_numpy(best)] for name, z in self.outputs.items()}

    def features(self, sites: Sequence[str]) -> Tensor:
        """Of all heads of these sites, [heads, tokens, width]; narrower ones are filled up with zeros."""
        wide = max(self.outputs[name].shape[-1] for name in sites)
        each = [nn.functional.pad(self.outputs[name], (0, wide - self.outputs[name].shape[-1])) for name in sites]
        return torch.cat(each, 1).transpose(0, 1)


# --- Heads by the distances between them ---------------------------------------------------------------

DistanceArray = NDArray[np.float64]


class ClusterMerge(NamedTuple):
    """Two clusters that become one: the first of each's members, and how far apart they are."""

    one: int
    other: int
    height: float


def average_linkage(distances: DistanceArray) -> list[ClusterMerge]:
    """Which clusters join, the nearest first; how far two are apart is the mean over all pairs between them.

    >>> apart = np.abs(np.subtract.outer([0.0, 1.0, 5.0], [0.0, 1.0, 5.0]))
    >>> [tuple(joined) for joined in average_linkage(apart)]
    [(0, 1, 1.0), (0, 2, 4.5)]
    """
    far = _check_distances(distances).copy()
    np.fill_diagonal(far, np.inf)
    size, joined = np.ones(len(far)), list[ClusterMerge]()
    for _ in range(len(far) - 1):
        one, other = divmod(int(far.argmin()), len(far))
        joined.append(ClusterMerge(one, other, float(far[one, other])))
        mean = (size[one] * far[one] + size[other] * far[other]) / (size[one] + size[other])
        far[one], far[:, one] = mean, mean
        far[one, one], far[other], far[:, other] = np.inf, np.inf, np.inf
        size[one] += size[other]
    return joined


def cut_clusters(merges: list[ClusterMerge], max_distance: float) -> tuple[int, ...]:
    """The number of each one's cluster when all that stand nearer than `cut` have joined, the first cluster 0.

    >>> cut_clusters([ClusterMerge(0, 1, 1.0), ClusterMerge(0, 2, 4.5)], 2.0)
    (0, 0, 1)
    """
    of = list(range(len(merges) + 1))
    for one, other, height in merges:
        if height < max_distance:
            of = [of[one] if mine == of[other] else mine for mine in of]
    names = {first: number for number, first in enumerate(dict.fromkeys(of))}
    return tuple(names[mine] for mine in of)


class PlaneEmbedding(NamedTuple):
    """Places [n, 2], and how badly their distances say the true ones: sqrt(sum (d - D)^2 / sum D^2)."""

    places: DistanceArray
    stress: float


def embed_in_plane(
    distances: DistanceArray, *, num_starts: int = 5, max_steps: int = 1000, seed: int = 0
) -> PlaneEmbedding:
    """Places on a plane whose distances say the true ones best: stress majorised (SMACOF) from several starts.

    The first start is the classical solution, the others are drawn; the best end is turned so that it is widest along
    the first axis. The same distances always have the same plane.

    >>> corners = np.array([[0.0, 0], [3, 0], [3, 4]])
    >>> found = embed_in_plane(np.linalg.norm(corners[:, None] - corners, axis=-1))
    >>> found.stress < 1e-6
    True
    """
    far = _check_distances(distances)
    draw, spread = np.random.default_rng(seed), float(far.max(initial=0.0)) or 1.0
    begin = [_classical_scaling(far), *(spread * draw.standard_normal((len(far), 2)) for _ in range(num_starts - 1))]
    best = min((_minimise_stress(far, places, max_steps) for places in begin), key=lambda found: found.stress)
    return best._replace(places=_canonical_orientation(best.places))


def _check_distances(distances: DistanceArray) -> DistanceArray:
    if distances.ndim != 2 or len(distances) != distances.shape[1] or not len(distances):
        raise ValueError(f"distances are {list(distances.shape)}; give one for every pair, [n, n]")
    if not np.isfinite(distances).all() or (distances < 0).any() or not np.allclose(distances, distances.T):
        raise ValueError("distances must be finite, not negative and the same both ways; leave out what has none")
    return distances.astype(np.float64)


def _classical_scaling(far: DistanceArray) -> DistanceArray:
    """The plane of the two largest eigenvalues of the centred squares."""
    middle = np.eye(len(far)) - 1 / len(far)
    values, vectors = np.linalg.eigh(-0.5 * middle @ (far**2) @ middle)
    found = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0))
    return np.pad(found, ((0, 0), (0, 2 - found.shape[1])))


def _minimise_stress(far: DistanceArray, places: DistanceArray, steps: int) -> PlaneEmbedding:
    """Where Guttman's transform leads: each step lowers the stress."""
    stress = _stress(far, places)
    for _ in range(steps):
        apart = np.linalg.norm(places[:, None] - places, axis=-1)
        ratio = -np.divide(far, apart, out=np.zeros_like(far), where=apart > 0)
        np.fill_diagonal(ratio, 0)
        np.fill_diagonal(ratio, -ratio.sum(1))
        places = ratio @ places / len(far)
        before, stress = stress, _stress(far, places)
        if before - stress < 1e-10:
            break
    return PlaneEmbedding(places, stress)


def _stress(far: DistanceArray, places: DistanceArray) -> float:
    apart = np.linalg.norm(places[:, None] - places, axis=-1)
    total = float((far**2).sum())
    return float(np.sqrt(((apart - far) ** 2).sum() / total)) if total else 0.0


def _canonical_orientation(places: DistanceArray) -> DistanceArray:
    """Centred, widest along the first axis, and the farthest out on the positive side of both."""
    places = places - places.mean(0)
    _, _, axes = np.linalg.svd(places, full_matrices=False)
    axes = np.concatenate([axes, np.eye(2)])[:2] if len(axes) < 2 else axes
    turned = places @ axes.T
    far = turned[np.abs(turned).argmax(0), [0, 1]]
    return turned * np.where(far < 0, -1, 1)

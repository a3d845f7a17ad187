"""How alike heads are: by the weights of their rows, and by what they say."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import suggest

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
    >>> (generalised_jensen_shannon(rows, torch.tensor([[0.5, 0.5], [1.0, 0.0]])) / math.log(2)).round(decimals=6).tolist()
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

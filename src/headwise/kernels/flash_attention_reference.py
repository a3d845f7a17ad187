"""The PyTorch functions that the kernels of `flash_attention` equal, in chunks of queries so that memory stays small.

They run in place of the kernels while these are being compiled, and are what the tests compare the kernels with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

QUERIES_PER_CHUNK = 128


def attend_key_ranges_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, vdim] and the log-sum-exp [B, T, H]; the arguments are those of `attend_key_ranges`.

    >>> q, k = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    >>> attend_key_ranges_reference(q, k, torch.arange(3.0).view(1, 3, 1, 1), None, 0, 1.0)[0].flatten().tolist()
    [0.0, 0.5, 1.0]
    """
    outputs, log_sums = [], []
    for rows, allowed in _query_chunks(q, k, ends, ahead):
        scores = _masked_scores(q[:, rows], k, allowed, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - _finite(lse)[..., None]).exp()
        outputs.append(torch.einsum("bgrts,bsgv->btgrv", weights, v).flatten(2, 3))
        log_sums.append(lse.permute(0, 3, 1, 2).flatten(2))
    return torch.cat(outputs, 1), torch.cat(log_sums, 1)


def attend_key_ranges_backward_reference(
    grad: Tensor, given: list[Tensor], ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `given` holds q, k, v, the output and the log-sum-exp.

    With P = exp(S - lse) and D = rowsum(output * grad): dV = P^T grad, dS = P * (grad V^T - D), dQ = dS K * scale and
    dK = dS^T Q * scale.
    """
    q, k, v, o, lse = given
    groups = k.shape[2]
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, allowed in _query_chunks(q, k, ends, ahead):
        queries, grads = (t[:, rows].unflatten(2, (groups, -1)) for t in (q, grad))
        row_lse = lse[:, rows].unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        row_dots = (o * grad)[:, rows].sum(-1).unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        weights = (_masked_scores(q[:, rows], k, allowed, scale) - _finite(row_lse)[..., None]).exp()
        d_v += torch.einsum("bgrts,btgrv->bsgv", weights, grads)
        d_scores = weights * (torch.einsum("btgrv,bsgv->bgrts", grads, v) - row_dots[..., None]) * scale
        d_q[:, rows] = torch.einsum("bgrts,bsgk->btgrk", d_scores, k).flatten(2, 3)
        d_k += torch.einsum("bgrts,btgrk->bsgk", d_scores, queries)
    return d_q, d_k, d_v


def _query_chunks(
    q: Tensor, k: Tensor, ends: Tensor | None, ahead: int | None
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield slices of the queries, and which keys [1 or B, 1, 1, t, S] they may read (None: all)."""
    keys = torch.arange(k.shape[1], device=q.device)
    for start in range(0, q.shape[1], QUERIES_PER_CHUNK):
        rows = slice(start, min(start + QUERIES_PER_CHUNK, q.shape[1]))
        if ends is not None:
            first, end = ends[:, rows, 0, None], ends[:, rows, 1, None]
            yield rows, ((first <= keys) & (keys < end))[:, None, None]
        elif ahead is not None:
            yield rows, (keys <= torch.arange(rows.start, rows.stop)[:, None] + ahead)[None, None, None]
        else:
            yield rows, None


def _masked_scores(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Return the scores [B, G, heads per key head, t, S], -inf where a key is not allowed."""
    scores = torch.einsum("btgrk,bsgk->bgrts", q.unflatten(2, (k.shape[2], -1)), k) * scale
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """Replace the -inf of rows without keys, whose weights exp(-inf - lse) are then zero."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)

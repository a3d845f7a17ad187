"""The torch operations that `flash_attention` runs while its kernels are being compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

QUERIES_PER_CHUNK = 128


def attend_key_ranges_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, vdim] and the log-sum-exp [B, T, H].

    Takes the same arguments as `attend_key_ranges`.

    >>> q, k = torch.zeros(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)
    >>> attend_key_ranges_reference(q, k, torch.arange(3.0).view(1, 3, 1, 1), None, 0, 1.0)[
    ...     0
    ... ].flatten()
    tensor([0.0000, 0.5000, 1.0000])
    """
    output_chunks = []
    lse_chunks = []
    for rows, allowed in _query_chunks(q, k, ends, ahead):
        scores = _masked_scores(q[:, rows], k, allowed, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - _finite(lse)[..., None]).exp()
        output_chunks.append(torch.einsum("bgrts,bsgv->btgrv", weights, v).flatten(2, 3))
        lse_chunks.append(lse.permute(0, 3, 1, 2).flatten(2))
    return torch.cat(output_chunks, 1), torch.cat(lse_chunks, 1)


def attend_key_ranges_backward_reference(
    grad: Tensor, tensors: list[Tensor], ends: Tensor | None, ahead: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `tensors` holds q, k, v, the output and the log-sum-exp.

    With P = exp(S - lse) and D = rowsum(output * grad): dV = P^T grad, dS = P * (grad V^T - D), dQ
    = dS K * scale and dK = dS^T Q * scale.
    """
    q, k, v, o, lse = tensors
    groups = k.shape[2]
    d_q = torch.empty_like(q)
    d_k = torch.zeros_like(k)
    d_v = torch.zeros_like(v)
    for rows, allowed in _query_chunks(q, k, ends, ahead):
        queries, grads = (t[:, rows].unflatten(2, (groups, -1)) for t in (q, grad))
        row_lse = lse[:, rows].unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        row_dots = (o * grad)[:, rows].sum(-1).unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
        weights = (
            _masked_scores(q[:, rows], k, allowed, scale) - _finite(row_lse)[..., None]
        ).exp()
        d_v += torch.einsum("bgrts,btgrv->bsgv", weights, grads)
        d_scores = (
            weights * (torch.einsum("btgrv,bsgv->bgrts", grads, v) - row_dots[..., None]) * scale
        )
        d_q[:, rows] = torch.einsum("bgrts,bsgk->btgrk", d_scores, k).flatten(2, 3)
        d_k += torch.einsum("bgrts,btgrk->bsgk", d_scores, queries)
    return d_q, d_k, d_v


def _query_chunks(
    q: Tensor, k: Tensor, ends: Tensor | None, ahead: int | None
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield slices of the queries, and the mask [1 or B, 1, 1, t, S] of their allowed keys; None
    allows all.
    """
    keys = torch.arange(k.shape[1], device=q.device)
    for start in range(0, q.shape[1], QUERIES_PER_CHUNK):
        rows = slice(start, min(start + QUERIES_PER_CHUNK, q.shape[1]))
        if ends is not None:
            first = ends[:, rows, 0, None]
            end = ends[:, rows, 1, None]
            yield rows, ((first <= keys) & (keys < end))[:, None, None]
        elif ahead is not None:
            yield (
                rows,
                (keys <= torch.arange(rows.start, rows.stop)[:, None] + ahead)[None, None, None],
            )
        else:
            yield rows, None


def _masked_scores(q: Tensor, k: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Return the scores [B, G, heads per key head, t, S], -inf where a key is not allowed."""
    scores = torch.einsum("btgrk,bsgk->bgrts", q.unflatten(2, (k.shape[2], -1)), k) * scale
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """Replace the -inf of rows without keys, so that their weights exp(-inf - lse) are zero."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)

"""Bilinear forms that share their vectors: a tensor of one form a head as a sum of few products of three vectors.

The form of head i is T_i = q_i^T k_i, with q_i [dim, model] and k_i [dim, source] as trained. It is never written
out for all heads: what least squares need of it are products of its factors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class BilinearForm(NamedTuple):
    """q [heads, dim, model] and k [heads, dim, source]: T_i = q_i^T k_i."""

    q: Tensor
    k: Tensor


class TrilinearFactors(NamedTuple):
    """q [rank, model], mixing [heads, rank] and k [rank, source]: T_i = q^T diag(mixing_i) k."""

    q: Tensor
    mixing: Tensor
    k: Tensor


def init_head_blocks(shape: tuple[int, ...]) -> Tensor:
    """Ones where a head's own block of channels is, each as wide as if all were equal, the last what is left.

    >>> init_head_blocks((2, 3)).tolist()
    [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    heads, width = shape
    owner = torch.arange(width) // math.ceil(width / heads)
    return (owner == torch.arange(heads)[:, None]).to(torch.get_default_dtype())


def normalise_form_scale(form: BilinearForm) -> tuple[BilinearForm, int]:
    """The form over 2^size, each head's two halves alike in size: its squares then neither overflow nor vanish."""
    halves = [half.abs().amax((1, 2)) for half in form]
    live = (halves[0] > 0) & (halves[1] > 0)
    q, k = (torch.frexp(half).exponent for half in halves)
    size = int((q + k)[live].amax()) if live.any() else 0
    return BilinearForm(_multiply_power_of_two(form.q, torch.where(live, k - size, -q)), _multiply_power_of_two(form.k, -k)), size


def scale_factors(factors: TrilinearFactors, size: int) -> TrilinearFactors:
    """The factors of a form 2^size as large."""
    half = size // 2
    q, k = (_multiply_power_of_two(x, torch.tensor(power)) for x, power in ((factors.q, size - half), (factors.k, half)))
    return factors._replace(q=q, k=k)


def _multiply_power_of_two(x: Tensor, power: Tensor) -> Tensor:
    """x 2^power, in two steps, for 2^power alone may be no number: one power for all, or one a head."""
    power = power.to(x.dtype)[..., None, None]
    first = torch.div(power, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(x, first), power - first)


def factorise_least_squares(form: BilinearForm, rank: int, max_sweeps: int, tolerance: float) -> tuple[int, TrilinearFactors]:
    """Factors of this rank after so many sweeps of alternating least squares; fewer when one gains too little."""
    factors = factorise_truncated_svd(form, rank)
    error = _relative_error_of_products(form, factors)
    if not error:  # as it is of no form at all, of which sweeps could make anything
        return 0, factors
    for took in range(max_sweeps):
        swept = _als_sweep(form, factors)
        least = _relative_error_of_products(form, swept)
        # Progress is slow along valleys: a longer step is kept where it helps, so errors still never grow.
        further = _extrapolate_step(factors, swept, math.sqrt(took + 1))
        if (found := _relative_error_of_products(form, further)) < least:
            swept, least = further, found
        gain, error, factors = error - least, least, _balance_norms(swept)
        if gain <= tolerance * (error + gain) or error < 1e-8:  # below that, _missed is rounding
            return took + 1, factors
    return max_sweeps, factors


def factorise_exact(form: BilinearForm) -> TrilinearFactors:
    """Every head's own vectors, of rank heads * dim: exact."""
    rank = form.q.shape[0] * form.q.shape[1]
    return TrilinearFactors(form.q.flatten(0, 1), init_head_blocks((len(form.q), rank)).to(form.q), form.k.flatten(0, 1))


def factorise_truncated_svd(form: BilinearForm, rank: int) -> TrilinearFactors:
    """The largest singular triples of all heads together, each still one head's own: the best without sharing."""
    (uq, rq), (uk, rk) = torch.linalg.qr(form.q.mT), torch.linalg.qr(form.k.mT)
    x, sizes, y = torch.linalg.svd(rq @ rk.mT, full_matrices=False)
    root = sizes.sqrt()[..., None]
    q, k = ((uq @ x).mT * root).flatten(0, 1), ((uk @ y.mT).mT * root).flatten(0, 1)
    largest = sizes.flatten().sort(descending=True, stable=True).indices[:rank]
    mixing = F.one_hot(largest // sizes.shape[1], len(form.q)).T.to(q)
    short = rank - len(largest)  # heads wider than what they compare are exact before the rank is spent
    return TrilinearFactors(F.pad(q[largest], (0, 0, 0, short)), F.pad(mixing, (0, short)), F.pad(k[largest], (0, 0, 0, short)))


def relative_error(form: BilinearForm, factors: TrilinearFactors) -> float:
    """||T - T'|| / ||T||, from what is left of one head's form after the other: no large numbers cancel."""
    missed, whole = 0.0, 0.0
    for q, k, mixing in zip(form.q, form.k, factors.mixing, strict=True):
        told = q.T @ k
        missed += (told - factors.q.T @ (mixing[:, None] * factors.k)).square().sum().item()
        whole += told.square().sum().item()
    return math.sqrt(missed / whole) if whole else math.sqrt(missed)


def _relative_error_of_products(form: BilinearForm, factors: TrilinearFactors) -> float:
    """The same from products of factors alone: cheap, and blind below the root of rounding."""
    whole = ((form.q @ form.q.mT) * (form.k @ form.k.mT)).sum()
    met = (factors.mixing.T * (_project_vectors(factors.q, form.q) * _project_vectors(factors.k, form.k)).sum(-1)).sum()
    own = ((factors.mixing.T @ factors.mixing) * (factors.q @ factors.q.T) * (factors.k @ factors.k.T)).sum()
    return math.sqrt(max((whole - 2 * met + own).item(), 0.0) / max(whole.item(), torch.finfo(whole.dtype).tiny))


def _project_vectors(vectors: Tensor, weights: Tensor) -> Tensor:
    """[rank, heads, dim]: each vector in the channels of each head."""
    return (vectors @ weights.flatten(0, 1).T).unflatten(1, weights.shape[:2])


def _als_sweep(form: BilinearForm, factors: TrilinearFactors) -> TrilinearFactors:
    """Each factor in turn the best for the other two."""
    q, mixing, k = factors
    by_q, by_k = _project_vectors(q, form.q), _project_vectors(k, form.k)
    mixing = _solve_regularised((q @ q.T) * (k @ k.T), (by_q * by_k).sum(-1), mixing.T).T
    met = (mixing.T[..., None] * by_k).flatten(1) @ form.q.flatten(0, 1)
    q = _solve_regularised((mixing.T @ mixing) * (k @ k.T), met, q)
    met = (mixing.T[..., None] * _project_vectors(q, form.q)).flatten(1) @ form.k.flatten(0, 1)
    return TrilinearFactors(q, mixing, _solve_regularised((mixing.T @ mixing) * (q @ q.T), met, k))


def _solve_regularised(gram: Tensor, met: Tensor, old: Tensor) -> Tensor:
    """The solution of gram x = met, held to the old one where the gram says nothing: errors can only fall."""
    hold = 1e-10 * gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(gram + hold * torch.eye(len(gram)).to(gram), met + hold * old)


def _extrapolate_step(old: TrilinearFactors, new: TrilinearFactors, times: float) -> TrilinearFactors:
    """The step from old to new, so many times as long."""
    return TrilinearFactors(*(one + times * (other - one) for one, other in zip(old, new, strict=True)))


def _balance_norms(factors: TrilinearFactors) -> TrilinearFactors:
    """The same products with their size shared out evenly among the three."""
    sizes = torch.stack([factors.q.norm(dim=1), factors.mixing.norm(dim=0), factors.k.norm(dim=1)])
    scale = torch.where(sizes.prod(0) > 0, sizes.prod(0).pow(1 / 3) / sizes.clamp(min=torch.finfo(sizes.dtype).tiny), 1)
    return TrilinearFactors(factors.q * scale[0, :, None], factors.mixing * scale[1], factors.k * scale[2, :, None])

"""Triton kernels of `headwise::masked_entmax`, the operation of `row_normalisers`, for GPUs.

A program owns one row of scores. It reads the row once for each step that solves for tau, mostly
from its cache, and writes the weights once. The steps are those of `parts.entmax`: Newton's method
for alpha up to 2, bisection above. The backward kernel recomputes the weights from the row's
maximum and tau.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .triton_support import can_run_triton, constant, jit, tl

MAX_BLOCK = 1024  # scores of a row that a program has in registers; more of them spill
BISECTIONS = constant(40)


class Rows(NamedTuple):
    """Scores [B, H, T, S], which keys are allowed, by its strides, and the alpha of each head."""

    scores: Any
    allowed: Any
    allowed_by_batch: Any
    allowed_by_query: Any
    alpha: Any
    heads: Any
    queries: Any
    keys: Any
    block: Any


class Row(NamedTuple):
    """A row: its number, where its mask begins, its alpha, and its largest score."""

    number: Any
    mask: Any
    alpha: Any
    top: Any


@jit
def find_row(rows):
    """The row of this program, before its largest score is known."""
    number = tl.program_id(0).to(tl.int64)
    query = number % rows.queries
    head = number // rows.queries % rows.heads
    batch = number // rows.queries // rows.heads
    mask = batch * rows.allowed_by_batch + query * rows.allowed_by_query
    return Row(number, mask, tl.load(rows.alpha + head), 0.0)


@jit
def load_scores(rows, row, start):
    """The next scores of a row, -inf where no key is allowed, and where they are."""
    columns = start + tl.arange(0, rows.block)
    inside = columns < rows.keys
    allowed = tl.load(rows.allowed + row.mask + columns, mask=inside, other=0) != 0
    places = row.number * rows.keys + columns
    scores = tl.load(rows.scores + places, mask=allowed & inside, other=-float("inf"))
    return scores, places, inside


@jit
def raise_power(x, power):
    """x ** power where x > 0, and 0 elsewhere."""
    safe = tl.where(x > 0, x, 1.0)
    return tl.where(x > 0, tl.exp2(power * tl.log2(safe)), 0.0)


@jit
def load_bases(rows, row, tau, start):
    """[(alpha - 1) (s - top) - tau]+ of the next scores: weights are powers of them."""
    scores, places, inside = load_scores(rows, row, start)
    return tl.maximum((scores - row.top) * (row.alpha - 1) - tau, 0.0), places, inside


@jit
def find_top(rows, row):
    """The row with its largest allowed score, or a finite number if none is allowed."""
    best = tl.full([rows.block], -float("inf"), tl.float32)
    for start in range(0, rows.keys, rows.block):
        scores, _, _ = load_scores(rows, row, start)
        best = tl.maximum(best, scores)
    top = tl.max(best, 0)
    return Row(row.number, row.mask, row.alpha, tl.where(top == -float("inf"), 0.0, top))


@jit
def sum_powers(rows, row, tau):
    """Sums over the row of bases to the powers of weights and of slopes."""
    power = 1 / (row.alpha - 1)
    total = tl.zeros([rows.block], tl.float32)
    slope = tl.zeros([rows.block], tl.float32)
    for start in range(0, rows.keys, rows.block):
        bases, _, _ = load_bases(rows, row, tau, start)
        slopes = raise_power(bases, power - 1)
        slope += slopes
        total += slopes * bases
    return tl.sum(total, 0), tl.sum(slope, 0)


@jit
def solve_tau(rows, row):
    """The tau with which the weights of the row sum to one."""
    tau = -1.0
    if row.alpha > 2:
        width = 1.0
        for _ in range(BISECTIONS):
            width = width / 2
            total, _ = sum_powers(rows, row, tau + width)
            tau = tl.where(total >= 1, tau + width, tau)
    else:
        for _ in range(3 + tl.ceil(8 * (row.alpha - 1)).to(tl.int32)):
            total, slope = sum_powers(rows, row, tau)
            total = tl.maximum(total, 1.0)
            rest = tl.exp2((2 - row.alpha) * tl.log2(total))
            tau = tau + (total - rest) / tl.maximum(slope, 1.0)
    return tau


@jit
def entmax_kernel(rows, weights, row_state):
    """Write the weights of a row, its maximum and its tau."""
    row = find_top(rows, find_row(rows))
    tau = solve_tau(rows, row)
    total, _ = sum_powers(rows, row, tau)
    for start in range(0, rows.keys, rows.block):
        bases, places, inside = load_bases(rows, row, tau, start)
        powers = raise_power(bases, 1 / (row.alpha - 1)) / tl.maximum(total, 0.5)
        tl.store(weights + places, powers, mask=inside)
    tl.store(row_state + row.number * 2, row.top)
    tl.store(row_state + row.number * 2 + 1, tau)


@jit
def entmax_backward_kernel(rows, grad, row_state, d_scores, d_alpha):
    """Write the gradients of a row of scores, and of alpha by this row (1909.00015)."""
    row = find_row(rows)
    top = tl.load(row_state + row.number * 2)
    tau = tl.load(row_state + row.number * 2 + 1)
    row = Row(row.number, row.mask, row.alpha, top)
    power = 1 / (row.alpha - 1)
    total, _ = sum_powers(rows, row, tau)
    total = tl.maximum(total, 0.5)
    slope = tl.zeros([rows.block], tl.float32)
    by_slope = tl.zeros([rows.block], tl.float32)
    by_weight = tl.zeros([rows.block], tl.float32)
    entropy = tl.zeros([rows.block], tl.float32)
    by_entropy = tl.zeros([rows.block], tl.float32)
    for start in range(0, rows.keys, rows.block):
        bases, places, inside = load_bases(rows, row, tau, start)
        own = tl.load(grad + places, mask=inside, other=0.0)
        weights = raise_power(bases, power) / total
        slopes = raise_power(weights, 2 - row.alpha)
        surprise = -weights * tl.log(tl.where(weights > 0, weights, 1.0))
        slope += slopes
        by_slope += slopes * own
        by_weight += weights * own
        entropy += surprise
        by_entropy += surprise * own
    mean = tl.sum(by_slope, 0) / tl.maximum(tl.sum(slope, 0), 0.5)
    for start in range(0, rows.keys, rows.block):
        bases, places, inside = load_bases(rows, row, tau, start)
        own = tl.load(grad + places, mask=inside, other=0.0)
        slopes = raise_power(raise_power(bases, power) / total, 2 - row.alpha)
        tl.store(d_scores + places, slopes * (own - mean), mask=inside)
    direction = (tl.sum(by_weight, 0) - mean) * power
    direction += tl.sum(by_entropy, 0) - mean * tl.sum(entropy, 0)
    tl.store(d_alpha + row.number, direction * power)


def _make_rows(s: Tensor, allowed: Tensor, alpha: Tensor) -> Rows:
    _, heads, queries, keys = s.shape
    mask = allowed.expand(*allowed.shape[:3], keys).contiguous().view(torch.uint8)
    block = max(16, min(MAX_BLOCK, 1 << (keys - 1).bit_length()))
    return Rows(
        s.contiguous(),
        mask,
        keys * mask.shape[2] * (len(mask) > 1),
        keys * (mask.shape[2] > 1),
        alpha.contiguous(),
        heads,
        queries,
        keys,
        tl.constexpr(block),
    )


def can_normalise(s: Tensor) -> bool:
    """Return True if the kernels run on the device and dtype of these scores."""
    return can_run_triton(s.device) and s.dtype == torch.float32


def entmax(s: Tensor, allowed: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the row states of `headwise::masked_entmax` without values."""
    weights = s.new_empty(s.shape)
    row_state = s.new_empty(*s.shape[:3], 2)  # maximum and tau
    if weights.numel():
        with torch.cuda.device_of(s):
            grid = (row_state[..., 0].numel(),)
            entmax_kernel[grid](_make_rows(s, allowed, alpha), weights, row_state)
    return weights, row_state


def entmax_backward(
    grad: Tensor, s: Tensor, allowed: Tensor, alpha: Tensor, row_state: Tensor
) -> list[Tensor]:
    """Return the gradients of the scores and of alpha."""
    d_scores = s.new_empty(s.shape)
    d_alpha = s.new_zeros(s.shape[:3])
    if d_scores.numel():
        with torch.cuda.device_of(s):
            grid = (d_alpha.numel(),)
            entmax_backward_kernel[grid](
                _make_rows(s, allowed, alpha),
                grad.contiguous(),
                row_state.contiguous(),
                d_scores,
                d_alpha,
            )
    return [d_scores, d_alpha.sum((0, 2))]

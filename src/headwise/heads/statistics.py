"""What is measured of a head's weights: each a sum over rows, and the number of rows it is a mean of.

A row is what one query reads. A statistic is given a band of rows of every head and adds up; the mean over a data set
is the sum of its sums over the sum of their numbers. The same of a head that reads all it may alike is its chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .block import Block

Sums = tuple[Tensor, Tensor]  # of each head: [H] or [H, N], and the number of rows
Fold = Callable[[Tensor], Tensor]
REACH = 8  # offsets that are looked at, each way
FAR = 16  # offsets whose mean weight is kept, each way; farther pairs are one group
ROWS = 64  # of a text are sorted, at most
SHARES = (0.5, 0.9, 0.95)
HAIR = 1e-6  # by which a sum of float32 may miss a share


@dataclass(frozen=True)
class Statistic:
    """A name, what it says in a sentence, and how it is summed; `of` "rest" is of what sinks leave.

    `fold` makes one number of a mean of several.
    """

    name: str
    says: str
    sums: Callable[[Block], Sums]
    of: str = "all"
    fold: Fold | None = None
    itself: bool = False  # only where a text reads itself


def mean_of(rows_HT: Tensor, counted: Tensor) -> Sums:
    """The sum over the rows that count, and how many these are."""
    counted = counted.expand_as(rows_HT)
    return torch.where(counted, rows_HT, 0).sum(-1, dtype=torch.float64), counted.sum(-1, dtype=torch.float64)


def _on(block: Block, keys: Tensor) -> Sums:
    """The weight on some tokens, of rows that may read one of them."""
    return mean_of(block.on(keys), block.may(keys))


def _at(block: Block, t: Tensor, s: Tensor) -> Sums:
    """The weight of each row on the keys it is paired with, which are few and picked one by one."""
    t, s = t - block.start, s - block.first
    here = (s >= 0) & (s < block.w_HTS.shape[2])
    t, s = t[here], s[here]
    flags = (block.allowed if block.allowed.dim() == 3 else block.allowed[None])[:, t, s].float()
    rows = block.w_HTS.new_zeros(block.w_HTS.shape[:2]).index_add_(1, t, block.w_HTS[:, t, s])
    may = flags.new_zeros(len(flags), rows.shape[1]).index_add_(1, t, flags) > 0
    return mean_of(rows, block.counting(may))


def entropies(block: Block) -> Sums:
    """- sum p log p of each row in nats, and exp of it over the number of keys that may be read, [H, 2]."""
    rows = nats(block.w_HTS)
    shares = rows.exp() / block.visible.clamp(min=1)
    told = [mean_of(one, block.alive) for one in (rows, shares)]
    return torch.stack([sums for sums, _ in told], -1), torch.stack([numbers for _, numbers in told], -1)


def nats(w_HTS: Tensor) -> Tensor:
    """- sum p log p of each row, [H, T]; of weights below zero there is none.

    >>> nats(torch.tensor([[[0.5, 0.5, 0.0]]]))
    tensor([[0.6931]])
    """
    least = torch.finfo(w_HTS.dtype).tiny  # changes no weight but 0, and nothing times its logarithm is nothing
    return -(w_HTS + least).log_().mul_(w_HTS).sum(-1)


def confidence(block: Block) -> Sums:
    """The largest weight of each row (1905.09418)."""
    return mean_of(block.top, block.alive)


def distance(block: Block) -> Sums:
    """How far away keys are, in tokens."""
    far = (block.keys - block.places[:, None]).abs().to(block.w_HTS.dtype)
    return mean_of((block.w_HTS * far).sum(-1), block.alive)


def sink(block: Block) -> Sums:
    """The weight on the first token and on those that stand for no text, and what a learned sink takes."""
    return mean_of(1 - block.rest, block.alive)


def separator(block: Block) -> Sums:
    """The weight on separators."""
    return _on(block, block.told.separator)


def first(block: Block) -> Sums:
    """The weight on the first token."""
    keys = torch.zeros_like(block.told.special)
    keys[:1] = True
    return _on(block, keys)


def punctuation(block: Block) -> Sums:
    """The weight on punctuation."""
    return _on(block, block.told.punctuation)


def at_offset(offset: int) -> Callable[[Block], Sums]:
    """The weight on the key so many tokens later, of rows that may read it."""

    def sums(block: Block) -> Sums:
        those, may = block.beside((offset,))
        return mean_of(those[..., 0], block.counting(may[..., 0]))

    return sums


def offsets(block: Block) -> Sums:
    """How often the largest weight stands at each offset of -8..8, [H, 17] (1905.09418)."""
    those, _ = block.beside(range(-REACH, REACH + 1))
    hits = (those == block.top[..., None]) / block.ties[..., None]
    counted = block.alive.expand(hits.shape[:2])
    found = torch.where(counted[..., None], hits, 0).sum(1, dtype=torch.float64)
    return found, counted.sum(-1, dtype=torch.float64)[:, None].expand_as(found)


def duplicate(block: Block) -> Sums:
    """The weight on other tokens of the same id."""
    t, s = block.alike
    return _at(block, t[s != t], s[s != t])


def induction(block: Block) -> Sums:
    """The weight on tokens behind earlier ones of the same id (Olsson et al. 2022)."""
    t, s = block.alike
    earlier = s + 1 < t
    return _at(block, t[earlier], s[earlier] + 1)


def rare(block: Block) -> Sums:
    """How often the largest weight stands on the rarest token of the text (1905.09418)."""
    told = block.told
    readable = (told.common > 0) & ~told.special
    if not bool(readable.any()):
        zero = block.w_HTS.new_zeros(block.w_HTS.shape[0], dtype=torch.float64)
        return zero, zero
    least = torch.where(readable, told.common, told.common.max() + 1).min()
    rarest = readable & (told.common == least)
    hits = block.most @ block.here(rarest).to(block.most.dtype) / block.ties
    return mean_of(hits, block.may(rarest))


def support(block: Block) -> Sums:
    """How many keys hold 50, 90 and 95 % of a row, over those that may be read, [H, 3]; of rows evenly spread."""
    count = block.asks.count
    spread = torch.linspace(0, count - 1, min(count, ROWS), device=block.w_HTS.device).round().long() - block.start
    rows = spread[(spread >= 0) & (spread < block.w_HTS.shape[1])]
    held = block.w_HTS[:, rows].sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    goals = held[..., -1:] * (1 - HAIR) * torch.tensor(SHARES, dtype=torch.float64, device=held.device)
    keys = torch.searchsorted(held, goals) + 1
    visible = block.visible[..., rows].expand(keys.shape[:2])
    counted = (visible > 0)[..., None]
    found = torch.where(counted, keys.double() / visible.clamp(min=1)[..., None], 0).sum(1, dtype=torch.float64)
    return found, counted.expand_as(keys).sum(1, dtype=torch.float64)


def by_offset(block: Block) -> Sums:
    """Weights of each offset of -16..16 and of all others, how many pairs these are of all, and squares: [H, 69].

    All that the share of their variance that offsets explain is made of, see `explained`.
    """
    those, may = block.beside(range(-FAR, FAR + 1))
    left = block.counting(torch.ones_like(block.visible, dtype=torch.bool))
    those, pairs = those.sum(1, dtype=torch.float64), (may & left[..., None]).sum(1, dtype=torch.float64)
    whole = block.w_HTS.sum(-1).sum(-1, dtype=torch.float64)
    every = (block.visible * left).sum(-1, dtype=torch.float64)
    squares = torch.linalg.vector_norm(block.w_HTS, dim=-1).double().square().sum(-1)
    sums = torch.cat([those, (whole - those.sum(-1))[:, None]], -1)
    numbers = torch.cat([pairs, (every - pairs.sum(-1))[:, None]], -1).expand_as(sums)
    total = every.expand(len(sums))[:, None]
    return torch.cat([sums, numbers, squares[:, None]], -1), torch.cat([numbers, total.expand(-1, 2 * FAR + 3)], -1)


def explained(mean: Tensor) -> Tensor:
    """The share of the variance of weights that offsets alone explain, of `by_offset`; 0 where nothing varies."""
    groups = 2 * FAR + 2
    of_group, share, square = mean[..., :groups], mean[..., groups:-1], mean[..., -1]
    of_group = torch.where(share > 0, of_group, 0)  # nobody is at an offset that no text is long enough for
    centre = (share * of_group).sum(-1)
    within, total = (share * of_group.square()).sum(-1) - centre.square(), square - centre.square()
    return torch.where(total > HAIR * square, within / total, torch.where(total.isnan(), total, 0))


def largest(mean: Tensor) -> Tensor:
    """The largest of several means."""
    return mean.amax(-1)


def peak(mean: Tensor) -> Tensor:
    """The offset of the largest of the means of `offsets`.

    >>> peak(torch.tensor([0.0] * 6 + [0.9] + [0.0] * 10))
    tensor(-2., dtype=torch.float64)
    """
    return torch.where(mean.isnan().any(-1), torch.nan, (mean.argmax(-1) - REACH).double())


def entry(number: int) -> Fold:
    """One of several means.

    >>> entry(1)(torch.tensor([0.2, 0.7]))
    tensor(0.7000)
    """
    return lambda mean: mean[..., number]


STATISTICS: Mapping[str, Statistic] = {
    one.name: one
    for one in (
        Statistic("entropy", "nats of a row", entropies, fold=entry(0)),
        Statistic("breadth", "share of what may be read that is read", entropies, fold=entry(1)),
        Statistic("confidence", "largest weight of a row", confidence),
        Statistic("distance", "tokens between query and key", distance, itself=True),
        Statistic("sink", "weight on sinks", sink),
        Statistic("first", "weight on the first token", first),
        Statistic("separator", "weight on separators", separator),
        Statistic("punctuation", "weight on punctuation", punctuation, "rest"),
        Statistic("previous", "weight on the token before", at_offset(-1), "rest", itself=True),
        Statistic("self", "weight on the token itself", at_offset(0), "rest", itself=True),
        Statistic("next", "weight on the token behind", at_offset(1), "rest", itself=True),
        Statistic("offset", "rows whose largest weight is at one distance", offsets, "rest", largest, itself=True),
        Statistic("peak", "the distance that most largest weights are at", offsets, "rest", peak, itself=True),
        Statistic(
            "positional_share", "variance of weights that distance explains", by_offset, "rest", explained, itself=True
        ),
        Statistic("support50", "share of keys that hold half of a row", support, fold=entry(0)),
        Statistic("support90", "share of keys that hold 90 % of a row", support, fold=entry(1)),
        Statistic("support95", "share of keys that hold 95 % of a row", support, fold=entry(2)),
        Statistic("duplicate", "weight on the same token elsewhere", duplicate, "rest", itself=True),
        Statistic("induction", "weight behind an earlier same token", induction, "rest", itself=True),
        Statistic("rare", "rows whose largest weight is on the rarest token", rare, "rest"),
    )
}

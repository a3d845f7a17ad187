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


@dataclass(frozen=True)
class Statistic:
    """A name, what it says in a sentence, and how it is summed; `of` "rest" is of what sinks leave.

    `fold` makes one number of a mean of several. `high` is what makes it much, for whoever draws it.
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


def _alive(block: Block) -> Tensor:
    """Rows that have something to read, [H or 1, T]."""
    return block.allowed.any(-1)[None] if block.allowed.dim() == 2 else block.allowed.any(-1)


def _on(block: Block, keys: Tensor) -> Sums:
    """The weight on some keys [S] or [T, S], of rows that may read one of them."""
    rows = (block.w_HTS * keys).sum(-1)
    may = (block.allowed & keys).any(-1)
    return mean_of(rows, may[None] if may.dim() == 1 else may)


def entropy(block: Block) -> Sums:
    """- sum p log p of each row, in nats."""
    return mean_of(-torch.special.xlogy(block.w_HTS, block.w_HTS).sum(-1), _alive(block))


def breadth(block: Block) -> Sums:
    """exp(entropy) over the number of keys that may be read: 1 where all are read alike."""
    rows = torch.special.xlogy(block.w_HTS, block.w_HTS).sum(-1).neg().exp()
    visible = block.allowed.sum(-1)
    return mean_of(rows / visible.clamp(min=1), _alive(block))


def confidence(block: Block) -> Sums:
    """The largest weight of each row (1905.09418)."""
    return mean_of(block.w_HTS.amax(-1), _alive(block))


def distance(block: Block) -> Sums:
    """How far away keys are, in tokens."""
    far = (torch.arange(block.told.count, device=block.w_HTS.device) - block.places[:, None]).abs()
    return mean_of((block.w_HTS * far).sum(-1), _alive(block))


def sink(block: Block) -> Sums:
    """The weight on the first token and on those that stand for no text, and what a learned sink takes."""
    from .scene import sinks

    rows = 1 - (block.w_HTS * ~sinks(block.told)).sum(-1)
    return mean_of(rows, _alive(block))


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
        return _on(block, _offset(block, offset))

    return sums


def _offset(block: Block, offset: int) -> Tensor:
    return torch.arange(block.told.count, device=block.w_HTS.device) == block.places[:, None] + offset


def offsets(block: Block) -> Sums:
    """How often the largest weight stands at each offset of -8..8, [H, 17] (1905.09418)."""
    far = block.w_HTS.argmax(-1) - block.places
    at = torch.arange(-REACH, REACH + 1, device=far.device)
    counted = _alive(block).expand_as(far)
    hits = ((far[..., None] == at) & counted[..., None]).sum(1, dtype=torch.float64)
    return hits, counted.sum(-1, dtype=torch.float64)[:, None].expand_as(hits)


def duplicate(block: Block) -> Sums:
    """The weight on other tokens of the same id."""
    same = block.asks.ids[block.places][:, None] == block.told.ids
    return _on(block, same & ~_offset(block, 0))


def induction(block: Block) -> Sums:
    """The weight on tokens behind earlier ones of the same id (Olsson et al. 2022)."""
    ids = block.told.ids
    before = torch.cat([ids.new_full((1,), -1), ids[:-1]])
    earlier = torch.arange(len(ids), device=ids.device) <= block.places[:, None]
    keys = (block.asks.ids[block.places][:, None] == before) & earlier
    return _on(block, keys & ~_offset(block, 0))


def rare(block: Block) -> Sums:
    """How often the largest weight stands on the rarest token of the text (1905.09418)."""
    told = block.told
    readable = (told.common > 0) & ~told.special
    if not bool(readable.any()):
        zero = block.w_HTS.new_zeros(block.w_HTS.shape[0], dtype=torch.float64)
        return zero, zero
    least = torch.where(readable, told.common, told.common.max() + 1).min()
    rarest = readable & (told.common == least)
    hits = rarest[block.w_HTS.argmax(-1)].double()
    may = (block.allowed & rarest).any(-1)
    return mean_of(hits, may[None] if may.dim() == 1 else may)


def largest(mean: Tensor) -> Tensor:
    """The largest of several means."""
    return mean.amax(-1)


STATISTICS: Mapping[str, Statistic] = {
    one.name: one
    for one in (
        Statistic("entropy", "nats of a row", entropy),
        Statistic("breadth", "share of what may be read that is read", breadth),
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
        Statistic("duplicate", "weight on the same token elsewhere", duplicate, "rest", itself=True),
        Statistic("induction", "weight behind an earlier same token", induction, "rest", itself=True),
        Statistic("rare", "rows whose largest weight is on the rarest token", rare, "rest"),
    )
}

"""The texts of a batch in one row, so that none is filled up, and what is said of them put back where they stood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..tokens import SequenceInfo
from .base import IGNORED, Batch
from .order import Numbers


class Unpackable(ValueError):
    """A batch whose texts cannot lie in one row, and why."""


@dataclass(frozen=True, eq=False)
class Packed:
    """The same texts in one row: the `batch`, and which place each token had among the rows of a `shape` [B, T]."""

    batch: Batch
    places: Tensor
    shape: tuple[int, int]

    def unpacked(self, said: Tensor) -> Tensor:
        """What is said of every token [1, N, ...] where it stood, [B, T, ...]; zeros where rows were filled up."""
        rows = said.new_zeros(self.shape[0] * self.shape[1], *said.shape[2:])
        return rows.index_copy_(0, self.places.to(said.device), said[0]).unflatten(0, self.shape)


def pack_batch(batch: Batch) -> Packed:
    """The texts of a batch of ids, in the order in which they stand; text k of a source goes with text k of x.

    >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    >>> told = pack_batch(Batch(ids, torch.tensor([[6, 5, IGNORED], [8, 9, 7]]), SequenceInfo.of(ids, lengths=[2, 3])))
    >>> told.batch.x.tolist(), told.batch.tokens.lengths
    ([[5, 6, 7, 8, 9]], ((2, 3),))
    >>> told.unpacked(told.batch.x).tolist()
    [[5, 6, 0], [7, 8, 9]]
    """
    if batch.labels.shape != batch.x.shape:
        raise Unpackable("its labels are of whole rows, which are told apart by nothing else")
    sides = [(batch.x, batch.tokens)] + ([] if batch.source is None else [(batch.source, batch.source_tokens)])
    found = [_side(ids, tokens) for ids, tokens in sides]
    texts = np.unique(np.concatenate([side.texts for side in found]), axis=0)
    rows = [_laid(ids, side, texts) for (ids, _), side in zip(sides, found, strict=True)]
    own, places = found[0], torch.from_numpy(found[0].places)
    labels = batch.labels.flatten()[places]
    if int((labels != IGNORED).sum()) != int((batch.labels != IGNORED).sum()):
        raise Unpackable("something is asked where rows are filled up")
    (x, tokens), (source, source_tokens) = rows[0], rows[1] if len(rows) > 1 else (None, None)
    row = replace(batch, x=x, labels=labels[None], tokens=tokens, source=source, source_tokens=source_tokens)
    return Packed(row, places, own.shape)


def filled(batch: Batch) -> float:
    """How much of the rows of a batch is no padding, of x and of its source.

    >>> filled(Batch(torch.zeros(2, 4), torch.zeros(2, 4), SequenceInfo.packed([[4], [1, 1]])))
    0.75
    """
    told = [(batch.x, batch.tokens), (batch.source, batch.source_tokens)]
    sizes = [(x.shape[0] * x.shape[1], tokens) for x, tokens in told if x is not None]
    live = [size if tokens is None else float(tokens.live.float().mean()) * size for size, tokens in sizes]
    return sum(live) / max(1, sum(size for size, _ in sizes))


def texts_of(row: Batch) -> Iterator[Batch]:
    """Every text of a packed row as a batch of its own, without its tokens: each stands from 0 on."""
    own, other = row.tokens, row.source_tokens
    assert own is not None
    assert own.lengths is not None
    sources = None if other is None else other.lengths
    asks = row.x.split(own.lengths[0], 1)
    labels = row.labels.split(own.lengths[0], 1)
    told = [None] * len(asks) if sources is None or row.source is None else row.source.split(sources[0], 1)
    for x, wanted, source in zip(asks, labels, told, strict=True):
        if x.shape[1]:
            yield Batch(x, wanted, source=source)


class _Side(NamedTuple):
    """Where the tokens of a side stand among its rows, and its texts as (row, segment), with their lengths."""

    places: Numbers
    texts: Numbers
    lengths: Numbers
    shape: tuple[int, int]


def _side(ids: Tensor, tokens: SequenceInfo | None) -> _Side:
    if ids.dim() != 2 or ids.is_floating_point():
        raise Unpackable("what it reads are no ids of tokens")
    shape = (ids.shape[0], ids.shape[1])
    told = SequenceInfo.contiguous(0, shape[1], "cpu") if tokens is None else tokens
    position, segment = (t.expand(shape).cpu().numpy().ravel() for t in (told.position, told.segment))
    places = np.flatnonzero(segment >= 0)
    which = np.stack([places // max(1, shape[1]), segment[places]], 1)
    texts, begins, lengths = np.unique(which, axis=0, return_index=True, return_counts=True)
    inside = np.arange(len(places)) - np.repeat(begins, lengths)
    if not (np.array_equal(np.repeat(texts, lengths, 0), which) and np.array_equal(inside, position[places])):
        raise Unpackable("its texts do not stand one behind the other, each from position 0 on")
    return _Side(places, texts, lengths, shape)


def _laid(ids: Tensor, side: _Side, texts: Numbers) -> tuple[Tensor, SequenceInfo]:
    """The ids of a side in one row, and its tokens, of these texts; one that it does not have is empty."""
    lengths = dict(zip(map(tuple, side.texts.tolist()), side.lengths.tolist(), strict=True))
    each: Sequence[int] = [lengths.get(text, 0) for text in map(tuple, texts.tolist())]
    return ids.flatten()[torch.from_numpy(side.places)][None], SequenceInfo.packed([each])

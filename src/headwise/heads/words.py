"""Bands of words out of bands of the pieces that a tokenizer makes of them (1906.04341).

What is read of a word is read of any of its pieces, so weights on them are summed; what a word reads is what its pieces
read on average. Tokens that are no piece of a word stand for themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .block import Block
from .looking import See
from .scene import Tokens


def units(tokens: Tokens) -> Tensor:
    """The number of the word, or of the token that is no piece of one, that each token belongs to, counted from 0."""
    word = tokens.word
    if not len(word):
        return word
    alone = (word[1:] < 0) | (word[1:] != word[:-1])
    found = torch.cat([word.new_zeros(1), alone.long().cumsum(0)])
    firsts = word[torch.cat([alone.new_ones(1), alone])]
    pieces = firsts[firsts >= 0]
    if len(pieces) != len(pieces.unique()):
        split = next(int(one) for one in pieces.unique() if int((pieces == one).sum()) > 1)
        raise ValueError(f"pieces of word {split} do not stand in a row; number words as the tokenizer cut them")
    return found


def whole(tokens: Tokens) -> Tokens:
    """What is known of words, of what is known of their pieces.

    Two words are the same where their pieces are; a word is as common as its rarest piece.
    """
    of = units(tokens)
    count = int(of[-1]) + 1 if len(of) else 0
    pieces: list[tuple[int, ...]] = [()] * count
    words = [""] * count
    for one, piece, word in zip(of.tolist(), tokens.ids.tolist(), tokens.words, strict=True):
        pieces[one] += (piece,)
        words[one] += word
    known: dict[tuple[int, ...], int] = {}
    ids = [known.setdefault(one, len(known)) for one in pieces]
    common = tokens.common.new_zeros(count).scatter_reduce_(0, of, tokens.common, "amin", include_self=False)
    return Tokens(
        torch.tensor(ids, device=of.device), tuple(words), _any(tokens.special, of, count),
        _any(tokens.separator, of, count), _any(tokens.punctuation, of, count),
        tokens.word.new_zeros(count).scatter_(0, of, tokens.word), common,
    )  # fmt: skip


def _any(flags: Tensor, of: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long, device=of.device).index_add_(0, of, flags.long()) > 0


class Whole(NamedTuple):
    """Words, and which of them each token belongs to."""

    tokens: Tokens
    of: Tensor


class _Open(NamedTuple):
    """What the pieces of a word that is not over have read so far: weights [H, U], counts [H or 1, U], how many."""

    w_HS: Tensor
    readable: Tensor
    pieces: int


class ByWord:
    """Hands bands on as bands of words; a word that ends in a later band waits for it."""

    def __init__(self, see: See) -> None:
        self._see = see
        self._whole: dict[Tokens, Whole] = {}
        self._open: dict[str, _Open] = {}

    def see(self, site: str, block: Block) -> None:
        """Take a band of pieces, and hand on the words that are over."""
        asks, told = self.whole(block.asks), self.whole(block.told)
        of = asks.of[block.start : block.start + block.w_HTS.shape[1]]
        own, start, last = block.here(told.of), int(of[0]), int(of[-1])
        rows, pieces = of - start, torch.bincount(of - start)
        w_HTS = _summed(_summed(block.w_HTS, own, -1, told.tokens.count), rows, 1, last - start + 1)
        allowed = block.allowed if block.allowed.dim() == 3 else block.allowed[None]
        readable = _summed(_summed(allowed.float(), own, -1, told.tokens.count), rows, 1, last - start + 1)
        before = self._open.pop(site, None)
        if before is not None:
            w_HTS[:, 0] += before.w_HS
            readable[:, 0] += before.readable
            pieces[0] += before.pieces
        end = block.start + len(of)
        if end < block.asks.count and int(asks.of[end]) == last:
            self._open[site] = _Open(w_HTS[:, -1], readable[:, -1], int(pieces[-1]))
            w_HTS, readable, pieces = w_HTS[:, :-1], readable[:, :-1], pieces[:-1]
        if len(pieces):
            may = readable > 0
            w_HTS = w_HTS / pieces[:, None]
            self._see(site, Block(w_HTS, may[0] if len(may) == 1 else may, start, asks.tokens, told.tokens))

    def whole(self, tokens: Tokens) -> Whole:
        """The words of these tokens."""
        if tokens not in self._whole:
            self._whole[tokens] = Whole(whole(tokens), units(tokens))
        return self._whole[tokens]

    def close(self) -> None:
        """A text is over."""
        self._whole, self._open = {}, {}


def _summed(grid: Tensor, of: Tensor, axis: int, count: int) -> Tensor:
    shape = list(grid.shape)
    shape[axis] = count
    return grid.new_zeros(shape).index_add_(axis, of, grid)

"""Bands of words out of bands of the pieces that a tokenizer makes of them (1906.04341).

What is read of a word is read of any of its pieces, so weights on them are summed; what a word reads is what its pieces
read on average. Tokens that are no piece of a word stand for themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .block import WeightBand
from .looking import BandCallback
from .scene import TokenAnnotations


def number_words(annotations: TokenAnnotations) -> Tensor:
    """The number of the word, or of the token that is no piece of one, that each token belongs to, counted from 0."""
    word = annotations.word_index
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


def merge_annotations(annotations: TokenAnnotations) -> TokenAnnotations:
    """What is known of words, of what is known of their pieces.

    Two words are the same where their pieces are; a word is as common as its rarest piece.
    """
    of = number_words(annotations)
    count = int(of[-1]) + 1 if len(of) else 0
    pieces: list[tuple[int, ...]] = [()] * count
    words = [""] * count
    for one, piece, word in zip(of.tolist(), annotations.ids.tolist(), annotations.words, strict=True):
        pieces[one] += (piece,)
        words[one] += word
    known: dict[tuple[int, ...], int] = {}
    ids = [known.setdefault(one, len(known)) for one in pieces]
    common = annotations.frequency.new_zeros(count).scatter_reduce_(0, of, annotations.frequency, "amin", include_self=False)
    return TokenAnnotations(
        torch.tensor(ids, device=of.device), tuple(words), _any_by_word(annotations.is_special, of, count),
        _any_by_word(annotations.is_separator, of, count), _any_by_word(annotations.is_punctuation, of, count),
        annotations.word_index.new_zeros(count).scatter_(0, of, annotations.word_index), common,
    )  # fmt: skip


def _any_by_word(flags: Tensor, of: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long, device=of.device).index_add_(0, of, flags.long()) > 0


class WordGrouping(NamedTuple):
    """Words, and which of them each token belongs to."""

    tokens: TokenAnnotations
    word_of_token: Tensor


class _UnfinishedWord(NamedTuple):
    """What the pieces of a word that is not over have read so far: weights [H, U], counts [H or 1, U], how many."""

    summed_weights: Tensor
    num_readable: Tensor
    num_pieces: int


class WordBandMerger:
    """Hands bands on as bands of words; a word that ends in a later band waits for it."""

    def __init__(self, add_word_band: BandCallback) -> None:
        self._see = add_word_band
        self._whole: dict[TokenAnnotations, WordGrouping] = {}
        self._open: dict[str, _UnfinishedWord] = {}

    def add_band(self, site: str, band: WeightBand) -> None:
        """Take a band of pieces, and hand on the words that are over."""
        asks, told = self.group_words(band.query_tokens), self.group_words(band.key_tokens)
        of = asks.word_of_token[band.start : band.start + band.w_HTS.shape[1]]
        own, start, last = band.slice_keys(told.word_of_token), int(of[0]), int(of[-1])
        rows, pieces = of - start, torch.bincount(of - start)
        w_HTS = _sum_by_word(_sum_by_word(band.w_HTS, own, -1, told.tokens.count), rows, 1, last - start + 1)
        allowed = band.allowed if band.allowed.dim() == 3 else band.allowed[None]
        readable = _sum_by_word(_sum_by_word(allowed.float(), own, -1, told.tokens.count), rows, 1, last - start + 1)
        before = self._open.pop(site, None)
        if before is not None:
            w_HTS[:, 0] += before.summed_weights
            readable[:, 0] += before.num_readable
            pieces[0] += before.num_pieces
        end = band.start + len(of)
        if end < band.query_tokens.count and int(asks.word_of_token[end]) == last:
            self._open[site] = _UnfinishedWord(w_HTS[:, -1], readable[:, -1], int(pieces[-1]))
            w_HTS, readable, pieces = w_HTS[:, :-1], readable[:, :-1], pieces[:-1]
        if len(pieces):
            may = readable > 0
            w_HTS = w_HTS / pieces[:, None]
            self._see(site, WeightBand(w_HTS, may[0] if len(may) == 1 else may, start, asks.tokens, told.tokens))

    def group_words(self, annotations: TokenAnnotations) -> WordGrouping:
        """The words of these tokens."""
        if annotations not in self._whole:
            self._whole[annotations] = WordGrouping(merge_annotations(annotations), number_words(annotations))
        return self._whole[annotations]

    def finish_example(self) -> None:
        """A text is over."""
        self._whole, self._open = {}, {}


def _sum_by_word(grid: Tensor, of: Tensor, axis: int, count: int) -> Tensor:
    shape = list(grid.shape)
    shape[axis] = count
    return grid.new_zeros(shape).index_add_(axis, of, grid)

"""A band of weights, as statistics see it; what several of them ask for is found once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..inspect.hooks import AttentionCall, SiteModule
from ..inspect.model_inputs import prepare_inputs
from ..inspect.site_hooks import ModelRun
from .annotated_examples import Example, TokenAnnotations, find_sink_tokens

GATHER_RATIO = 32  # of so many keys one is picked, and more are gone through with all others
MIN_NON_SINK_WEIGHT = 0.01  # of a row's weight must be left beside sinks for the rest to be looked at


@dataclass(frozen=True, eq=False)
class WeightBand:
    """Some queries of one attention over one text: weights [H, T, S], and which pairs may be [T, S] or [H, T, S].

    `start` is the number of the first query, and `first` of the first key: none of these queries may read a key that
    is not here. `asks` and `told` are the tokens that ask and are read, the same object where a text reads itself. Of
    rows only those in `left` [H, T] count, all where nothing is said.
    """

    w_HTS: Tensor
    allowed: Tensor
    first_query: int
    query_tokens: TokenAnnotations
    key_tokens: TokenAnnotations
    counted_rows: Tensor | None = None
    first_key: int = 0
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def _cached(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made under this name, made now if nobody asked before."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def is_self_attention(self) -> bool:
        """Whether a text reads itself."""
        return self.query_tokens is self.key_tokens

    @property
    def query_positions(self) -> Tensor:
        """The numbers of the queries, [T]."""
        return torch.arange(self.first_query, self.first_query + self.w_HTS.shape[1], device=self.w_HTS.device)

    @property
    def key_positions(self) -> Tensor:
        """The numbers of the keys, [S]."""
        return torch.arange(self.first_key, self.first_key + self.w_HTS.shape[2], device=self.w_HTS.device)

    def slice_keys(self, values: Tensor) -> Tensor:
        """Of what is known of all tokens that are read, that of the keys, [S]."""
        return values[self.first_key : self.first_key + self.w_HTS.shape[2]]

    def weight_on(self, keys: Tensor) -> Tensor:
        """The weight of each row on some of all tokens, [H, T]."""
        those = self.slice_keys(keys).nonzero()[:, 0]
        if len(those) * GATHER_RATIO < self.w_HTS.shape[2]:
            return self.w_HTS[..., those].sum(-1)
        return self.w_HTS @ self.slice_keys(keys).to(self.w_HTS.dtype)

    def may_read(self, keys: Tensor) -> Tensor:
        """Which rows count, and may read one of some tokens, [H or 1, T]."""
        return self.select_counted(self._allowed_as_float @ self.slice_keys(keys).to(self._allowed_as_float.dtype) > 0)

    def select_counted(self, rows: Tensor) -> Tensor:
        """Of these rows [T] or [H, T] those that count, [H or 1, T]."""
        rows = rows[None] if rows.dim() == 1 else rows
        return rows if self.counted_rows is None else rows & self.counted_rows

    @property
    def _allowed_as_float(self) -> Tensor:
        """`allowed` as numbers, which products add up faster."""
        return self._cached("flags", lambda: self.allowed.to(self.w_HTS.dtype))

    @property
    def num_allowed_keys(self) -> Tensor:
        """How many keys each row may read, [T] or [H, T]."""
        return self._cached("visible", lambda: self.allowed.sum(-1))

    @property
    def has_keys(self) -> Tensor:
        """Which rows count and have something to read, [H or 1, T]."""
        return self._cached("alive", lambda: self.select_counted(self.num_allowed_keys > 0))

    @property
    def non_sink_weight(self) -> Tensor:
        """The weight that sinks leave of each row, [H, T]."""
        return self._cached("rest", lambda: self.weight_on(~find_sink_tokens(self.key_tokens)))

    @property
    def max_weight(self) -> Tensor:
        """The largest weight of each row, [H, T]."""
        return self._cached("top", lambda: self.w_HTS.amax(-1))

    @property
    def is_max(self) -> Tensor:
        """1 at the largest weight of each row, and at every other as large, [H, T, S]; numbers add up faster."""
        return self._cached(
            "most", lambda: torch.eq(self.w_HTS, self.max_weight[..., None], out=torch.empty_like(self.w_HTS))
        )

    @property
    def num_max_keys(self) -> Tensor:
        """How many keys have the largest weight of each row, [H, T]: a hit on one of them is a part of a hit.

        Where a row reads nothing, none of them is one.
        """
        return self._cached("ties", lambda: torch.where(self.max_weight == 0, torch.inf, self.is_max.sum(-1)))

    @property
    def same_id_pairs(self) -> tuple[Tensor, Tensor]:
        """Of each pair of a query and a token of the same id, a key or the one before all keys, the two numbers."""
        return self._cached("alike", self._find_same_id_pairs)

    def _find_same_id_pairs(self) -> tuple[Tensor, Tensor]:
        before = max(0, self.first_key - 1)
        ids = self.key_tokens.ids[before : self.first_key + self.w_HTS.shape[2]]
        t, s = (self.query_tokens.ids[self.query_positions][:, None] == ids).nonzero(as_tuple=True)
        return t + self.first_query, s + before

    def weights_at_offsets(self, offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The weights of each row on what stands so many tokens behind it, [H, T, N], and if it may, [H or 1, T, N]."""
        at = self.query_positions[:, None] + torch.tensor(offsets, device=self.w_HTS.device) - self.first_key
        there = (at >= 0) & (at < self.w_HTS.shape[2])
        at = torch.where(there, at, 0)
        allowed = self.allowed if self.allowed.dim() == 3 else self.allowed[None]
        those, may = (grid.gather(-1, at.expand(len(grid), -1, -1)) for grid in (self.w_HTS, allowed))
        return torch.where(there, those, 0), there & may

    @property
    def uniform_baseline(self) -> WeightBand:
        """The same of one head that reads every key it may alike: what chance is."""
        allowed = self.allowed if self.allowed.dim() == 2 else self.allowed.any(0)
        count = allowed.sum(-1, keepdim=True)
        alike = allowed.to(self.w_HTS.dtype) / count.clamp(min=1)
        return replace(self, w_HTS=alike[None], allowed=allowed, counted_rows=None)

    def append_uniform_baseline(self) -> WeightBand:
        """The same with one more head, the uniform one."""
        chance = self.uniform_baseline
        allowed = self.allowed if self.allowed.dim() == 2 else torch.cat([self.allowed, chance.allowed[None]])
        return replace(self, w_HTS=torch.cat([self.w_HTS, chance.w_HTS]), allowed=allowed)

    def without_sinks(self) -> WeightBand:
        """What sinks leave of each row, made whole again; rows of which they leave nothing do not count."""
        there, out = self.non_sink_weight >= MIN_NON_SINK_WEIGHT, self.slice_keys(find_sink_tokens(self.key_tokens))
        whole = self.w_HTS * torch.where(there, 1 / self.non_sink_weight.clamp(min=MIN_NON_SINK_WEIGHT), 0)[..., None]
        whole.index_fill_(-1, out.nonzero()[:, 0], 0)
        return replace(self, w_HTS=whole, allowed=self.allowed & ~out, counted_rows=self.select_counted(there))


# --- Weights of every attention while a model runs, a band of rows at a time, handed to whoever adds ---

MAX_CELLS = 2**22  # weights of a band, at most: 16 MB
MAX_HEIGHT_RATIO = 4  # times as high as one of all keys is a band of few keys, at most
BandCallback = Callable[[str, WeightBand], None]


class WeightBandHook:
    """A watcher that hands the weights of one site on, band by band; `see` is told the name of the site."""

    needs_call = True

    def __init__(self, name: str, example: Example, streams: tuple[str, str], add_band: BandCallback) -> None:
        self.name, self.example, self.streams, self.add_band = name, example, streams, add_band

    def on_call(self, call: AttentionCall) -> None:
        """Hand all rows on, each band with the keys that it may read."""
        asks, told = (self.example.streams[stream] for stream in self.streams)
        last = max(0, asks.count - 1)
        _, heads, queries, keys = call.all_weights(slice(last, None)).shape
        if (last + queries, keys) != (asks.count, told.count):
            fact = f"the model reads {keys} tokens and asks for {last + queries}, where {told.count} and {asks.count}"
            raise ValueError(f"{fact} are known; tell of all tokens as the model's tokenizer makes them")
        start, least = 0, max(1, MAX_CELLS // max(1, heads * keys))
        step = least
        while start < asks.count:
            some = slice(start, min(asks.count, start + step))
            allowed = call.allowed_pairs(some)[0]
            read = allowed.flatten(0, -2).any(0).nonzero()
            those = slice(int(read[0]), int(read[-1]) + 1) if len(read) else slice(0, 1)
            w_HTS = call.all_weights(some, those)[0]
            allowed = allowed[..., those].expand(-1, w_HTS.shape[1], -1)
            allowed = allowed[0] if len(allowed) == 1 else allowed
            self.add_band(self.name, WeightBand(w_HTS, allowed, start, asks, told, first_key=those.start))
            # the next reads about as many keys; it may read all
            start, step = some.stop, max(least, min(MAX_HEIGHT_RATIO * least, MAX_CELLS // (heads * w_HTS.shape[-1])))

    def on_head_outputs(self, outputs: Tensor) -> None:
        """Leave it."""


def stream_weight_bands(
    model: nn.Module,
    sites: Sequence[SiteModule],
    example: Example,
    streams: Mapping[str, tuple[str, str]],
    add_band: BandCallback,
) -> None:
    """Run a model over one text, and hand the weights of these sites on as they come."""
    lookers = {one.site.name: WeightBandHook(one.site.name, example, streams[one.site.name], add_band) for one in sites}
    with torch.inference_mode():
        ModelRun(model, prepare_inputs(model, example.model_inputs, 0)).run_with_hooks(sites, lookers)


# --- How much each token of a text is read by every head -----------------------------------------------


class AttentionReceived:
    """Sums of the weights on each token of one text, by site [heads, tokens]; `see` is handed to `look`.

    Divided by the number of queries it is the share of all reading that goes to a token.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of rows."""
        heads = len(band.w_HTS)
        if site not in self.sums:
            self.sums[site] = torch.zeros(heads, band.key_tokens.count, dtype=torch.float64, device=band.w_HTS.device)
        keys = slice(band.first_key, band.first_key + band.w_HTS.shape[2])
        self.sums[site][:, keys] += band.w_HTS.sum(1)


# --- Bands of words out of bands of the pieces that a tokenizer makes of them (1906.04341) -------------


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
    common = annotations.frequency.new_zeros(count).scatter_reduce_(
        0, of, annotations.frequency, "amin", include_self=False
    )
    return TokenAnnotations(
        torch.tensor(ids, device=of.device),
        tuple(words),
        _any_by_word(annotations.is_special, of, count),
        _any_by_word(annotations.is_separator, of, count),
        _any_by_word(annotations.is_punctuation, of, count),
        annotations.word_index.new_zeros(count).scatter_(0, of, annotations.word_index),
        common,
    )


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
        of = asks.word_of_token[band.first_query : band.first_query + band.w_HTS.shape[1]]
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
        end = band.first_query + len(of)
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

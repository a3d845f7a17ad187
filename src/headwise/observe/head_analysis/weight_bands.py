"""Attention weights of a running model, streamed in bands of rows so that memory stays bounded.

`WeightBand` is what metrics receive; it caches the quantities that several metrics share.
`stream_weight_bands` runs a model over one example and passes the bands on, and `WordBandMerger`
turns bands of tokens into bands of words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.devices import exact_device
from ..inspect.hooks import AttentionHook, SiteModule, run_observed
from ..inspect.model_tokenizer import PAD_ID
from ..inspect.site import AttentionInputs, ObservedCall, WeightsOnlyCall
from ..traces import TokenRow, Trace
from .annotated_examples import (
    Example,
    TokenAnnotations,
    annotate_row,
    count_tokens,
    join_inputs,
)

# columns are gathered if fewer than one key in 32 is selected; else a product over all keys is
# faster
GATHER_RATIO = 32
MAX_OFFSET = 8  # largest offset considered, in both directions
MIN_NON_SINK_WEIGHT = 0.01  # rows with less weight than this outside sinks do not count


def row_entropy(w_HTS: Tensor) -> Tensor:
    """Entropy -sum p log p of each row, [H, T]; NaN for rows with negative weights.

    >>> row_entropy(torch.tensor([[[0.5, 0.5, 0.0]]]))
    tensor([[0.6931]])
    """
    tiny = torch.finfo(w_HTS.dtype).tiny  # changes only weights of 0, for which 0 * log(tiny) is 0
    return -(w_HTS + tiny).log_().mul_(w_HTS).sum(-1)


@dataclass(frozen=True, eq=False)
class WeightBand:
    """Attention weights of some consecutive queries over one text, for every head of a layer.

    - `w_HTS`: weights [heads, queries, keys].
    - `allowed`: which pairs the mask allows, [1 or H, T, S]; it may be given as [T, S].
    - `first_query`, `first_key`: positions of the first query and of the first key. None of these
      queries may read a
      key outside the band.
    - `query_tokens`, `key_tokens`: annotations of all tokens of the query stream and of the key
      stream; the same object
      in self-attention.
    - `counted_rows`: rows that metrics count, [H, T]; None counts all.
    - `row_scale`: factor of the weights of each row, [H, T]; 1 if None. `w_HTS` lacks it, but the
      results of the methods have it.
    - `text`: index of the text in its batch.

    Annotations are on the CPU, so that tokens can be selected without waiting for the device.
    """

    w_HTS: Tensor
    allowed: Tensor
    first_query: int
    query_tokens: TokenAnnotations
    key_tokens: TokenAnnotations
    counted_rows: Tensor | None = None
    first_key: int = 0
    row_scale: Tensor | None = None
    text: int = 0

    def __post_init__(self) -> None:
        if self.allowed.dim() == 2:
            object.__setattr__(self, "allowed", self.allowed[None])

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys come from the same text."""
        return self.query_tokens is self.key_tokens

    @property
    def query_positions(self) -> Tensor:
        """Positions of the queries, [T]."""
        return self.first_query + torch.arange(self.w_HTS.shape[1], device=self.w_HTS.device)

    @property
    def key_positions(self) -> Tensor:
        """Positions of the keys, [S]."""
        return self.first_key + torch.arange(self.w_HTS.shape[2], device=self.w_HTS.device)

    def slice_keys(self, values: Tensor) -> Tensor:
        """Restrict a tensor over all tokens of the key stream to the keys of the band, [S]."""
        return values[self.first_key : self.first_key + self.w_HTS.shape[2]]

    def weight_on(self, keys: Tensor) -> Tensor:
        """Weight of each row on the selected keys, [H, T]; `keys` is a boolean mask over all tokens
        of the stream.
        """
        keys = self.slice_keys(keys)
        selected = keys.nonzero()[:, 0]
        if len(selected) * GATHER_RATIO < self.w_HTS.shape[2]:
            return self.scale_rows(self.w_HTS[..., selected].sum(-1))
        return self.scale_rows(self.w_HTS @ keys.to(self.w_HTS))

    def scale_rows(self, values: Tensor) -> Tensor:
        """Multiply values of each row, [H, T] or [H, T, N], by the factor of the row."""
        if self.row_scale is None:
            return values
        return values * (self.row_scale if values.dim() == 2 else self.row_scale[..., None])

    def may_read(self, keys: Tensor) -> Tensor:
        """Rows that count and may read at least one of the selected keys, [H or 1, T]."""
        return self.select_counted(
            self._allowed_as_float @ self.slice_keys(keys).to(self._allowed_as_float) > 0
        )

    def select_counted(self, rows: Tensor) -> Tensor:
        """Restrict the boolean `rows`, [H or 1, T], to rows that count."""
        return rows if self.counted_rows is None else rows & self.counted_rows

    @cached_property
    def _allowed_as_float(self) -> Tensor:
        """`allowed` as floats, for which matrix products are faster."""
        return self.allowed.to(self.w_HTS.dtype)

    @cached_property
    def num_allowed_keys(self) -> Tensor:
        """Number of keys that each row may read, [H or 1, T]."""
        return self.allowed.sum(-1)

    @cached_property
    def has_keys(self) -> Tensor:
        """Rows that count and may read at least one key, [H or 1, T]."""
        return self.select_counted(self.num_allowed_keys > 0)

    @cached_property
    def non_sink_weight(self) -> Tensor:
        """Weight of each row that is not on sink tokens, [H, T]."""
        return self.weight_on(~self.key_tokens.is_sink)

    @cached_property
    def row_entropies(self) -> Tensor:
        """Entropy of each row in nats, [H, T]."""
        return row_entropy(self.w_HTS)

    @cached_property
    def max_weight(self) -> Tensor:
        """Largest weight of each row, [H, T]."""
        return self.w_HTS.amax(-1)

    @cached_property
    def is_max(self) -> Tensor:
        """1.0 at the largest weight of each row and at its ties, [H, T, S]; floats sum faster than
        booleans.
        """
        return torch.eq(self.w_HTS, self.max_weight[..., None], out=torch.empty_like(self.w_HTS))

    @cached_property
    def num_max_keys(self) -> Tensor:
        """Number of keys that share the largest weight of each row, [H, T], by which a hit on one
        of them is divided.

        It is infinite for rows without any weight, so that they have no hit.
        """
        return torch.where(self.max_weight == 0, torch.inf, self.is_max.sum(-1))

    @cached_property
    def same_id_pairs(self) -> tuple[Tensor, Tensor]:
        """Positions (queries, keys) of all pairs with the same token id. Keys start one before the
        band, which induction needs.
        """
        before = max(0, self.first_key - 1)
        ids = self.key_tokens.ids[before : self.first_key + self.w_HTS.shape[2]]
        rows = slice(self.first_query, self.first_query + self.w_HTS.shape[1])
        t, s = (self.query_tokens.ids[rows, None] == ids).nonzero(as_tuple=True)
        return t + self.first_query, s + before

    def weights_at_offsets(self, offsets: range) -> tuple[Tensor, Tensor]:
        """Weights of each row at keys `offset` positions after the query, [H, T, N], without the
        factors of rows, and whether they are allowed, [H or 1, T, N].
        """
        # In rows padded by zeros, the keys of the next row start one key later.
        rows, keys = self.w_HTS.shape[1:]
        first = self.first_query - self.first_key + offsets.start
        before = max(0, -first)
        after = max(0, first + rows + len(offsets) - 1 - keys)
        grids: list[Tensor] = []
        for grid in (self.w_HTS, self.allowed):
            padded = F.pad(grid, (before, after))
            width = padded.shape[2]
            shape = (len(grid), rows, len(offsets))
            stride = (rows * width, width + 1, 1)
            grids.append(padded.as_strided(shape, stride, first + before))
        return grids[0], grids[1]

    @cached_property
    def nearest(self) -> tuple[Tensor, Tensor]:
        """`weights_at_offsets` of -8..8."""
        return self.weights_at_offsets(range(-MAX_OFFSET, MAX_OFFSET + 1))

    @cached_property
    def neighbour_sums(self) -> tuple[Tensor, Tensor]:
        """Sums of the weights at offsets -1, 0 and 1 over rows that count and may read them, and
        the numbers of these rows, [H, 3].
        """
        weights, allowed = (grid[..., MAX_OFFSET - 1 : MAX_OFFSET + 2] for grid in self.nearest)
        counted = allowed if self.counted_rows is None else allowed & self.counted_rows[..., None]
        sums = torch.where(counted, self.scale_rows(weights), 0).sum(1, dtype=torch.float64)
        return sums, counted.sum(1, dtype=torch.float64).expand_as(sums)

    @property
    def uniform_baseline(self) -> WeightBand:
        """The band of one head that reads every allowed key equally: the chance level."""
        allowed = self.allowed.any(0, keepdim=True)
        count = allowed.sum(-1, keepdim=True)
        uniform = allowed.to(self.w_HTS.dtype) / count.clamp(min=1)
        return replace(self, w_HTS=uniform, allowed=allowed, counted_rows=None, row_scale=None)

    def has_same_mask(self, other: WeightBand) -> bool:
        """True if the bands have the same tokens, rows, keys and mask; masks on a device, for which
        a comparison would wait, count as different.
        """
        own, others = (
            (band.first_query, band.first_key, band.allowed.shape) for band in (self, other)
        )
        tokens = self.query_tokens is other.query_tokens and self.key_tokens is other.key_tokens
        if not tokens or own != others or self.allowed.device.type != "cpu":
            return False
        return self.allowed.is_set_to(other.allowed) or torch.equal(self.allowed, other.allowed)

    def without_sinks(self, scratch: Tensor | None = None) -> WeightBand:
        """The band without sink tokens, each row rescaled to sum to 1.

        Rows with less than `MIN_NON_SINK_WEIGHT` on other tokens do not count. `scratch` holds
        these weights, perhaps already without some sinks, and is overwritten.
        """
        is_sink = self.slice_keys(self.key_tokens.is_sink)
        counted = self.non_sink_weight >= MIN_NON_SINK_WEIGHT
        scale = torch.where(counted, 1 / self.non_sink_weight.clamp(min=MIN_NON_SINK_WEIGHT), 0)
        w_HTS = self.w_HTS.clone() if scratch is None else scratch
        device = w_HTS.device
        return replace(
            self,
            w_HTS=w_HTS.index_fill_(-1, is_sink.nonzero()[:, 0].to(device), 0),
            allowed=self.allowed & ~is_sink.to(device),
            counted_rows=self.select_counted(counted),
            row_scale=scale,
        )


def join_heads(bands: Sequence[WeightBand]) -> WeightBand:
    """Join the heads of bands with the same tokens, rows, keys and mask."""
    if len(bands) == 1:
        return bands[0]
    masks = [band.allowed for band in bands]
    allowed = masks[0] if len(masks[0]) == 1 else torch.cat(masks)
    return replace(bands[0], w_HTS=torch.cat([band.w_HTS for band in bands]), allowed=allowed)


# --- Streaming the weights of a running model -----------------------------------------------------

# Largest number of weights in a band, over all texts of a batch: 2 MB, near the size of a core's
# cache, and 16 MB on a device.
MAX_CELLS = 2**19
MAX_DEVICE_CELLS = 2**22
MIN_ROWS = 32  # of a band on the CPU, however many keys there are
BandCallback = Callable[[str, WeightBand], None]
CallCallback = Callable[[str, AttentionInputs, TokenAnnotations, TokenAnnotations], bool]


class BatchMismatch(ValueError):
    """The rows of an attention call are not the texts of its batch."""


def stream_trace(trace: Trace, row: int, example: Example, add_band: BandCallback) -> None:
    """Pass the recorded weights of one text of a trace to `add_band`, band by band."""
    for layer in trace.layers:
        streams = (layer.query_stream, layer.key_stream)
        places = [_list_tokens(trace, stream, row) for stream in streams]
        masks = np.stack([trace.head_mask(layer.name, n, row=row) for n in range(layer.heads)])
        grids = [
            torch.from_numpy(grid[:, places[0]][..., places[1]])[None]
            for grid in (trace.weights(layer.name, row=row), masks)
        ]
        call = WeightsOnlyCall(grids[0], grids[1])
        WeightBandHook(layer.name, layer.heads, [example], streams, add_band).on_call(call)


def annotate_trace(trace: Trace, row: int) -> Example:
    """Return the tokens of one text of a trace as an example, without padding."""
    streams: dict[str, TokenAnnotations] = {}
    for stream in {
        name: None for one in trace.layers for name in (one.query_stream, one.key_stream)
    }:
        places = _list_tokens(trace, stream, row)
        rows = trace.streams.get(stream, ())
        tokens = rows[row] if rows else TokenRow.from_words(("",) * len(places))
        offsets = tuple(tokens.offsets[n] for n in places) if tokens.offsets else ()
        pairs = [(tokens.ids[n], tokens.words[n]) for n in places]
        ids, words = zip(*pairs, strict=True)
        streams[stream] = annotate_row(TokenRow(ids, words, offsets, tokens.text))
    return Example([tokens.ids for tokens in streams.values()], streams)


def _list_tokens(trace: Trace, stream: str, row: int) -> list[int]:
    """Return the positions of a text that every layer attends over; the last generated token is
    never a query, and padding is left out.
    """
    counts = [one.num_queries for one in trace.layers if one.query_stream == stream]
    counts += [one.num_keys for one in trace.layers if one.key_stream == stream]
    rows = trace.streams.get(stream, ())
    ids = rows[row].ids if rows else range(min(counts))
    return [n for n in range(min(counts)) if ids[n] != PAD_ID]


class WeightBandHook(AttentionHook):
    """Hook that passes the attention weights of one site to `add_band(name, band)`, band by band
    and text by text.

    A call goes to `add_call(name, inputs, query_tokens, key_tokens)` instead if that returns True.
    Models with windows may pad texts to a multiple of `multiple` tokens, of which the padding is
    left out.
    """

    def __init__(
        self,
        site: str,
        num_heads: int,
        examples: Sequence[Example],
        streams: tuple[str, str],
        add_band: BandCallback,
        add_call: CallCallback | None = None,
        multiple: int = 1,
    ) -> None:
        self.site = site
        self.num_heads = num_heads
        self.examples = examples
        self.streams = streams
        self.multiple = multiple
        self.tokens: list[tuple[TokenAnnotations, TokenAnnotations]] = []
        self.add_band = add_band
        self.add_call = add_call

    def on_call(self, call: ObservedCall) -> None:
        """Split the rows of an attention call into bands, each with the range of keys that its
        queries may read.
        """
        self.tokens = [self._find_tokens(example, call) for example in self.examples]
        query_tokens, key_tokens = self.tokens[0]
        inputs = None if self.add_call is None else call.streamable_inputs
        if self.add_call is not None and inputs is not None:
            self._check_counts(inputs.q_BTHK.shape[1], inputs.k_BSGK.shape[1])
            if self.add_call(self.site, inputs, query_tokens, key_tokens):
                return
        is_on_cpu = call.queries is None or call.queries.device.type == "cpu"
        num_pairs = MAX_CELLS if is_on_cpu else MAX_DEVICE_CELLS
        num_pairs //= max(1, self.num_heads) * len(self.tokens)
        start = num_keys = 0
        while start < query_tokens.count:
            if is_on_cpu:  # as many rows as fit if each adds one key, as in a causal mask
                num_rows = (math.isqrt(num_keys**2 + 4 * num_pairs) - num_keys) // 2
                num_rows = max(MIN_ROWS, num_rows)
            else:
                num_rows = max(1, num_pairs // max(1, key_tokens.count))
            allowed = call.allowed_pairs(self._rows(start, num_rows))
            columns = _allowed_range(allowed)
            num_keys = columns.stop - columns.start
            if is_on_cpu and num_rows * num_keys > 2 * num_pairs:
                num_rows = max(MIN_ROWS, num_pairs // num_keys)
                allowed = allowed[:, :, :num_rows]
            is_last = start + num_rows >= query_tokens.count
            rows = (
                slice(start, None)
                if is_last and self.multiple == 1
                else self._rows(start, num_rows)
            )
            w_BHTS = call.all_weights(rows, columns)
            end = start + w_BHTS.shape[2]
            if is_last or w_BHTS.shape[2] < num_rows:
                self._check_counts(end, allowed.shape[-1])
            if len(w_BHTS) != len(self.tokens) > 1:
                raise BatchMismatch
            self._add_texts(w_BHTS, allowed[..., columns], start, columns.start)
            start = end

    def _rows(self, start: int, count: int) -> slice:
        """A range of queries without padding."""
        end = start + count
        return slice(start, end if self.multiple == 1 else min(end, self.tokens[0][0].count))

    def _find_tokens(
        self, example: Example, call: ObservedCall
    ) -> tuple[TokenAnnotations, TokenAnnotations]:
        """Return the tokens of queries and keys. Those that an example does not annotate are only
        counted, and so are tokens that a model pools to fewer ones.
        """
        query, key = (example.streams.get(stream) for stream in self.streams)
        if query is None or key is None or isinstance(call, WeightsOnlyCall):
            queries, keys = call.counts
            if query is None or queries < query.count:
                query = count_tokens(self.streams[0], queries)
            if key is None or keys < key.count:
                key = count_tokens(self.streams[1], keys)
        return query, key

    def _add_texts(self, w_BHTS: Tensor, allowed: Tensor, start: int, first_key: int) -> None:
        """Pass on the bands of all texts, on the CPU if their device has no float64."""
        device = exact_device(w_BHTS.device)
        w_BHTS = w_BHTS.to(device)
        allowed = allowed.to(device).expand(-1, -1, w_BHTS.shape[2], -1)
        for text, tokens in enumerate(self.tokens):
            mask = allowed[text if len(allowed) > 1 else 0]
            band = WeightBand(w_BHTS[text], mask, start, *tokens, first_key=first_key, text=text)
            self.add_band(self.site, band)

    def _check_counts(self, queries: int, keys: int) -> None:
        """Raise ValueError if the example annotates other numbers of tokens."""
        query_tokens, key_tokens = self.tokens[0]
        padded_keys = -(-key_tokens.count // self.multiple) * self.multiple
        if queries != query_tokens.count or keys not in (key_tokens.count, padded_keys):
            fact = f"{self.site} has {queries} queries and {keys} keys"
            expected = f"the example annotates {query_tokens.count} and {key_tokens.count} tokens"
            raise ValueError(
                f"{fact}, but {expected}; annotate every token as the model's tokenizer makes them"
            )


def _allowed_range(allowed: Tensor) -> slice:
    """Return the keys from the first to the last allowed one; all keys on a device, which would
    have to be waited for.
    """
    if allowed.device.type != "cpu":
        return slice(0, allowed.shape[-1])
    keys = allowed.flatten(0, -2).any(0).nonzero()[:, 0].tolist() or [0]
    return slice(keys[0], keys[-1] + 1)


def stream_weight_bands(
    model: nn.Module,
    sites: Sequence[SiteModule],
    examples: Sequence[Example],
    streams: Mapping[str, tuple[str, str]],
    add_band: BandCallback,
    add_call: CallCallback | None = None,
) -> None:
    """Run a model over a batch of examples with equal `batch_key` and pass the attention weights of
    `sites` to `add_band(site_name, band)`, except of calls that `add_call` takes.

    `streams` maps a site name to the names of its query stream and its key stream. Bands are on the
    device of the weights.
    """
    windows = getattr(getattr(model, "config", None), "attention_window", 1)
    multiple = max(windows) if isinstance(windows, list) else windows or 1
    hooks: dict[str, AttentionHook] = {}
    for module in sites:
        site = module.site
        hooks[site.name] = WeightBandHook(
            site.name, site.q, examples, streams[site.name], add_band, add_call, multiple
        )
    run_observed(model, join_inputs(examples), sites, hooks)


# --- Bands of words from bands of tokens (1906.04341) ---------------------------------------------


def number_words(annotations: TokenAnnotations) -> Tensor:
    """Return the word index of each token from 0; a token without a word is its own word."""
    word = annotations.word_index
    if not len(word):
        return word
    starts_word = (word[1:] < 0) | (word[1:] != word[:-1])
    numbers = torch.cat([word.new_zeros(1), starts_word.long().cumsum(0)])
    first_tokens = word[torch.cat([starts_word.new_ones(1), starts_word])]
    words = first_tokens[first_tokens >= 0]
    if len(words) != len(words.unique()):
        split = next(int(index) for index in words.unique() if int((words == index).sum()) > 1)
        raise ValueError(
            f"the tokens of word {split} are not adjacent; give every word one run of tokens"
        )
    return numbers


def merge_annotations(annotations: TokenAnnotations) -> TokenAnnotations:
    """Merge token annotations into annotations of words.

    Two words have the same id if their tokens have; a word is as frequent as its rarest token.
    """
    word_of_token = number_words(annotations)
    count = int(word_of_token[-1]) + 1 if len(word_of_token) else 0
    token_ids: list[tuple[int, ...]] = [()] * count
    words = [""] * count
    numbers = word_of_token.tolist()
    for n, (token_id, text) in enumerate(
        zip(annotations.ids.tolist(), annotations.words, strict=True)
    ):
        token_ids[numbers[n]] += (token_id,)
        words[numbers[n]] += text
    id_of: dict[tuple[int, ...], int] = {}
    ids = [id_of.setdefault(key, len(id_of)) for key in token_ids]

    def merge(values: Tensor, how: str) -> Tensor:
        zeros = values.new_zeros(count)
        return zeros.scatter_reduce_(0, word_of_token, values, how, include_self=False)

    flags = (annotations.is_special, annotations.is_separator, annotations.is_punctuation)
    special, separator, punctuation = (merge(flag.long(), "amax") > 0 for flag in flags)
    return TokenAnnotations(
        torch.tensor(ids, device=word_of_token.device),
        tuple(words),
        special,
        separator,
        punctuation,
        merge(annotations.word_index, "amax"),
        merge(annotations.frequency, "amin"),
        annotations.first_is_sink,
    )


class WordGrouping(NamedTuple):
    """Annotations of the words of a text, and the word of each token."""

    tokens: TokenAnnotations
    word_of_token: Tensor


class WordBandMerger:
    """Merges bands of tokens into bands of words and passes them to `add_word_band(site, band)`.

    The weight on a word is the sum over its tokens; the row of a word is the mean over its tokens.
    A word that ends in a later band is held back until then.
    """

    def __init__(self, add_word_band: BandCallback) -> None:
        self._add_word_band = add_word_band
        self._groupings: dict[TokenAnnotations, WordGrouping] = {}
        # Sums of a word that continues in the next band: weights [H, S], allowed pairs [H or 1, S],
        # number of tokens.
        self._unfinished: dict[str, tuple[Tensor, Tensor, int]] = {}

    def add_band(self, site: str, band: WeightBand) -> None:
        """Add a band of tokens and pass on the words that are complete, on the CPU."""
        band = replace(band, w_HTS=band.w_HTS.cpu(), allowed=band.allowed.cpu())
        queries = self.group_words(band.query_tokens)
        keys = self.group_words(band.key_tokens)
        num_rows = band.w_HTS.shape[1]
        query_words = queries.word_of_token[band.first_query : band.first_query + num_rows]
        key_words = band.slice_keys(keys.word_of_token)
        first_word = int(query_words[0])
        last_word = int(query_words[-1])
        rows = query_words - first_word
        num_tokens = torch.bincount(rows)

        def sum_words(grid: Tensor) -> Tensor:
            by_key = grid.new_zeros(*grid.shape[:2], keys.tokens.count)
            by_key.index_add_(2, key_words, grid)
            by_word = grid.new_zeros(len(grid), last_word - first_word + 1, keys.tokens.count)
            return by_word.index_add_(1, rows, by_key)

        w_HTS = sum_words(band.w_HTS)
        readable = sum_words(band.allowed.float())
        before = self._unfinished.pop(site, None)
        if before is not None:
            w_HTS[:, 0] += before[0]
            readable[:, 0] += before[1]
            num_tokens[0] += before[2]
        end = band.first_query + num_rows
        if end < band.query_tokens.count and int(queries.word_of_token[end]) == last_word:
            self._unfinished[site] = (w_HTS[:, -1], readable[:, -1], int(num_tokens[-1]))
            w_HTS = w_HTS[:, :-1]
            readable = readable[:, :-1]
            num_tokens = num_tokens[:-1]
        if len(num_tokens):
            w_HTS = w_HTS / num_tokens[:, None]
            tokens = (queries.tokens, keys.tokens)
            self._add_word_band(site, WeightBand(w_HTS, readable > 0, first_word, *tokens))

    def group_words(self, annotations: TokenAnnotations) -> WordGrouping:
        """Words of these tokens, cached until the example ends."""
        if annotations not in self._groupings:
            grouping = WordGrouping(merge_annotations(annotations), number_words(annotations))
            self._groupings[annotations] = grouping
        return self._groupings[annotations]

    def finish_example(self) -> None:
        """Drop the state of the example that just ended."""
        self._groupings = {}
        self._unfinished = {}

"""Attention weights of a running model, streamed in bands of rows so that memory stays bounded.

`WeightBand` is what metrics receive; it caches the quantities that several metrics share.
`stream_weight_bands` runs a model over one example and passes the bands on, and `WordBandMerger`
turns bands of tokens into bands of words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.devices import exact_device
from ..inspect.hooks import AttentionHook, SiteModule, run_observed
from ..inspect.model_inputs import PAD_ID
from ..inspect.site import ALL, AttentionInputs, ObservedCall
from ..traces import TokenRow, Trace
from .annotated_examples import Example, TokenAnnotations, annotate_row, find_sink_tokens

# columns are gathered if fewer than one key in 32 is selected; else a product over all keys is
# faster
GATHER_RATIO = 32
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
    """

    w_HTS: Tensor
    allowed: Tensor
    first_query: int
    query_tokens: TokenAnnotations
    key_tokens: TokenAnnotations
    counted_rows: Tensor | None = None
    first_key: int = 0

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
        return torch.arange(
            self.first_query, self.first_query + self.w_HTS.shape[1], device=self.w_HTS.device
        )

    @property
    def key_positions(self) -> Tensor:
        """Positions of the keys, [S]."""
        return torch.arange(
            self.first_key, self.first_key + self.w_HTS.shape[2], device=self.w_HTS.device
        )

    def slice_keys(self, values: Tensor) -> Tensor:
        """Restrict a tensor over all tokens of the key stream to the keys of the band, [S]."""
        return values[self.first_key : self.first_key + self.w_HTS.shape[2]]

    def weight_on(self, keys: Tensor) -> Tensor:
        """Weight of each row on the selected keys, [H, T]; `keys` is a boolean mask over all tokens
        of the stream.
        """
        selected = self.slice_keys(keys).nonzero()[:, 0]
        if len(selected) * GATHER_RATIO < self.w_HTS.shape[2]:
            return self.w_HTS[..., selected].sum(-1)
        return self.w_HTS @ self.slice_keys(keys).to(self.w_HTS.dtype)

    def may_read(self, keys: Tensor) -> Tensor:
        """Rows that count and may read at least one of the selected keys, [H or 1, T]."""
        return self.select_counted(
            self._allowed_as_float @ self.slice_keys(keys).to(self._allowed_as_float.dtype) > 0
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
        return self.weight_on(~find_sink_tokens(self.key_tokens))

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
        t, s = (self.query_tokens.ids[self.query_positions][:, None] == ids).nonzero(as_tuple=True)
        return t + self.first_query, s + before

    def weights_at_offsets(self, offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Weights of each row at keys `offset` positions after the query, [H, T, N], and whether
        they are allowed, [H or 1, T, N].
        """
        index = (
            self.query_positions[:, None]
            + torch.tensor(offsets, device=self.w_HTS.device)
            - self.first_key
        )
        in_band = (index >= 0) & (index < self.w_HTS.shape[2])
        index = torch.where(in_band, index, 0)
        weights, allowed_pairs = (
            tensor.gather(-1, index.expand(len(tensor), -1, -1))
            for tensor in (self.w_HTS, self.allowed)
        )
        return torch.where(in_band, weights, 0), in_band & allowed_pairs

    @property
    def uniform_baseline(self) -> WeightBand:
        """The band of one head that reads every allowed key equally: the chance level."""
        allowed = self.allowed.any(0, keepdim=True)
        count = allowed.sum(-1, keepdim=True)
        uniform = allowed.to(self.w_HTS.dtype) / count.clamp(min=1)
        return replace(self, w_HTS=uniform, allowed=allowed, counted_rows=None)

    def has_same_mask(self, other: WeightBand) -> bool:
        """True if the bands have the same tokens, rows, keys and mask."""
        own, others = (
            (band.first_query, band.first_key, band.allowed.shape, band.allowed.device)
            for band in (self, other)
        )
        tokens = self.query_tokens is other.query_tokens and self.key_tokens is other.key_tokens
        return tokens and own == others and torch.equal(self.allowed, other.allowed)

    def without_sinks(self) -> WeightBand:
        """The band without sink tokens, each row rescaled to sum to 1.

        Rows with less than `MIN_NON_SINK_WEIGHT` on other tokens do not count.
        """
        is_sink = self.slice_keys(find_sink_tokens(self.key_tokens))
        counted = self.non_sink_weight >= MIN_NON_SINK_WEIGHT
        scale = torch.where(counted, 1 / self.non_sink_weight.clamp(min=MIN_NON_SINK_WEIGHT), 0)
        w_HTS = self.w_HTS * scale[..., None]
        w_HTS.index_fill_(-1, is_sink.nonzero()[:, 0], 0)
        return replace(
            self,
            w_HTS=w_HTS,
            allowed=self.allowed & ~is_sink,
            counted_rows=self.select_counted(counted),
        )


def join_heads(bands: Sequence[WeightBand]) -> WeightBand:
    """Join the heads of bands with the same tokens, rows, keys and mask."""
    if len(bands) == 1:
        return bands[0]
    masks = [band.allowed for band in bands]
    allowed = masks[0] if len(masks[0]) == 1 else torch.cat(masks)
    return replace(bands[0], w_HTS=torch.cat([band.w_HTS for band in bands]), allowed=allowed)


# --- Streaming the weights of a running model -----------------------------------------------------

MAX_CELLS = 2**22  # largest number of weights in a band: 16 MB
MAX_HEIGHT_RATIO = 4  # a band with few keys has at most 4 times the rows of one with all keys
BandCallback = Callable[[str, WeightBand], None]
CallCallback = Callable[[str, AttentionInputs, TokenAnnotations, TokenAnnotations], bool]


def move_annotations(example: Example, device: torch.device) -> Example:
    """Return the example with its annotations where its attention weights are measured: on the
    device of the weights, or on the CPU if that device has no float64, in which they are summed.
    """
    device = exact_device(device)
    streams = dict(example.streams)
    for name, tokens in example.streams.items():
        tensors = {key: one for key, one in vars(tokens).items() if isinstance(one, Tensor)}
        if tokens.ids.device != device:
            moved: dict[str, Any] = {key: one.to(device) for key, one in tensors.items()}
            streams[name] = replace(tokens, **moved)
    return replace(example, streams=streams)


class RecordedCall(ObservedCall):
    """The weights of one layer of a trace over some queries and keys of one text."""

    def __init__(
        self, trace: Trace, name: str, row: int, places: tuple[list[int], list[int]]
    ) -> None:
        heads = range(trace.get_layer(name).heads)
        masks = np.stack([trace.head_mask(name, head, row=row) for head in heads])
        self.weights = trace.weights(name, row=row)[:, places[0]][..., places[1]]
        self.allowed = masks[:, places[0]][..., places[1]]

    def all_weights(self, queries: slice = ALL, keys: slice = ALL) -> Tensor:
        return torch.from_numpy(self.weights[None, :, queries, keys])

    def allowed_pairs(self, queries: slice = ALL) -> Tensor:
        return torch.from_numpy(self.allowed[None, :, queries])

    def head_values(self, head: int) -> Any:
        raise ValueError("measures read no values of a trace; give the model")


def stream_trace(trace: Trace, row: int, example: Example, add_band: BandCallback) -> None:
    """Pass the recorded weights of one text of a trace to `add_band`, band by band."""
    for layer in trace.layers:
        streams = (layer.query_stream, layer.key_stream)
        places = [_list_tokens(trace, stream, row) for stream in streams]
        call = RecordedCall(trace, layer.name, row, (places[0], places[1]))
        WeightBandHook(layer.name, example, streams, add_band).on_call(call)


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
    """Hook that passes the attention weights of one site to `add_band(name,
    band)`, band by band.

    A call goes to `add_call(name, inputs, query_tokens, key_tokens)` instead if that returns True.
    """

    def __init__(
        self,
        name: str,
        example: Example,
        streams: tuple[str, str],
        add_band: BandCallback,
        add_call: CallCallback | None = None,
    ) -> None:
        self.name = name
        self.example = example
        self.streams = streams
        self.add_band = add_band
        self.add_call = add_call

    def on_call(self, call: ObservedCall) -> None:
        """Split the rows of an attention call into bands, each with the range of keys that its
        queries may read.
        """
        query_tokens, key_tokens = (self.example.streams[stream] for stream in self.streams)
        inputs = None if self.add_call is None else call.streamable_inputs
        if self.add_call is not None and inputs is not None:
            self._check_counts(inputs.q_BTHK.shape[1], inputs.k_BSGK.shape[1])
            if self.add_call(self.name, inputs, query_tokens, key_tokens):
                return
        device = key_tokens.ids.device
        last = max(0, query_tokens.count - 1)
        _, heads, queries, keys = call.all_weights(slice(last, None)).shape
        self._check_counts(last + queries, keys)
        start = 0
        min_rows = max(1, MAX_CELLS // max(1, heads * keys))
        num_rows = min_rows
        while start < query_tokens.count:
            rows = slice(start, min(query_tokens.count, start + num_rows))
            allowed = call.allowed_pairs(rows)[0].to(device)
            allowed_keys = allowed.flatten(0, -2).any(0).nonzero()[:, 0].tolist() or [0]
            columns = slice(allowed_keys[0], allowed_keys[-1] + 1)
            w_HTS = call.all_weights(rows, columns)[0].to(device)
            allowed = allowed[..., columns].expand(-1, w_HTS.shape[1], -1)
            tokens = (query_tokens, key_tokens)
            band = WeightBand(w_HTS, allowed, start, *tokens, first_key=columns.start)
            self.add_band(self.name, band)
            # The next band is sized for as many keys as this one; it may turn out to read all of
            # them.
            start = rows.stop
            fitting = MAX_CELLS // (heads * w_HTS.shape[-1])
            num_rows = max(min_rows, min(MAX_HEIGHT_RATIO * min_rows, fitting))

    def _check_counts(self, queries: int, keys: int) -> None:
        """Raise ValueError if the example annotates other numbers of tokens."""
        query_tokens, key_tokens = (self.example.streams[stream] for stream in self.streams)
        if (queries, keys) != (query_tokens.count, key_tokens.count):
            fact = f"{self.name} has {queries} queries and {keys} keys"
            expected = f"the example annotates {query_tokens.count} and {key_tokens.count} tokens"
            raise ValueError(
                f"{fact}, but {expected}; annotate every token as the model's tokenizer makes them"
            )


def stream_weight_bands(
    model: nn.Module,
    sites: Sequence[SiteModule],
    example: Example,
    streams: Mapping[str, tuple[str, str]],
    add_band: BandCallback,
    add_call: CallCallback | None = None,
) -> None:
    """Run a model over one example and pass the attention weights of `sites` to
    `add_band(site_name, band)`, except of calls that `add_call` takes.

    `streams` maps a site name to the names of its query stream and its key stream. Bands are on the
    device of the annotations; `move_annotations` moves these to the device of the model.
    """
    names = [module.site.name for module in sites]
    hooks = {
        name: WeightBandHook(name, example, streams[name], add_band, add_call) for name in names
    }
    run_observed(model, example.model_inputs, sites, hooks)


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
        """Add a band of tokens and pass on the words that are complete."""
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

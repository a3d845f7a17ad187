"""A trace: one run of a model, from which attention weights, head outputs and pictures of them are
recomputed; and its view with other tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from ...report.data import Figure, HeatMap, Item
from ...report.notebook import NotebookResult, ShownFigure, ShownTable
from ...report.render import to_text
from ...report.text import format_bytes
from ...util.errors import pluralise
from ...util.escaping import make_visible
from ..head_names import find_layer, locate_head, print_head
from .attention_record import Array, AttentionCallRecord, AttentionRecord, PackedMask, TokenRow

# --- Pictures of weights: a cell shows the largest weight in it, because a mean would lose thin lin

QUERY_BLOCK = 512  # queries computed at a time


def query_blocks(num_queries: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of up to `QUERY_BLOCK` neighbouring queries.

    >>> list(query_blocks(600))
    [(0, 512), (512, 600)]
    """
    for start in range(0, num_queries, QUERY_BLOCK):
        yield start, min(num_queries, start + QUERY_BLOCK)


def max_pool_weights(
    bands: Iterable[tuple[int, int, Array]], shape: tuple[int, int], size: tuple[int, int]
) -> Array:
    """Draw weights as a picture, 0..255; each cell is its largest weight.

    The weights arrive in bands of rows.

    >>> max_pool_weights([(0, 2, np.eye(4)[:2]), (2, 4, np.eye(4)[2:])], (4, 4), (2, 2))
    array([[255,   0],
           [  0, 255]], dtype=uint8)
    """
    if min(size) < 1:
        raise ValueError(f"a picture of {size[0]} x {size[1]} has no cells; give at least 1 x 1")
    height = min(size[0], shape[0])
    width = min(size[1], shape[1])
    picture = np.zeros((height, width), np.float32)
    first_rows = np.arange(height) * shape[0] // height
    first_columns = np.arange(width) * shape[1] // width
    for start, stop, band in bands:
        column_maxima = np.maximum.reduceat(band, first_columns, axis=1)
        cell_rows = np.searchsorted(first_rows, np.arange(start, stop), side="right") - 1
        np.maximum.at(picture, cell_rows, column_maxima)
    return np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8)


# --- A trace --------------------------------------------------------------------------------------

ALL_POSITIONS = slice(None)
THUMBNAIL_SIZE = 64


@dataclass(frozen=True, repr=False)
class Trace(NotebookResult):
    """One run of a model: its tokens by stream, its attention layers, and the masks that layers
    share (`grids`).

    `model` describes the model. `skipped` maps sites that were not recorded to the reason.
    `thumbnails` maps layers to small 8-bit pictures of their weights, [B, heads, height, width], if
    they were made. `images` are the images that a vision model read, [B, height, width, channels],
    0..255, by stream. `classes` maps (site, head) to the class that a person gave the head.
    """

    model: Mapping[str, Any]
    streams: Mapping[str, tuple[TokenRow, ...]]
    layers: tuple[AttentionRecord, ...]
    grids: tuple[PackedMask, ...] = field(repr=False, default=())
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    thumbnails: Mapping[str, Array] = field(repr=False, default_factory=dict[str, Array])
    images: Mapping[str, Array] = field(repr=False, default_factory=dict[str, Array])
    classes: Mapping[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])

    def get_layer(self, which: str | int) -> AttentionRecord:
        """Return the layer of this name or number (-1 is the last), as in `observe.head_names`."""
        return find_layer(which, self.layers, "the trace")

    def __getitem__(self, name: str) -> Array:
        """Return the weights of the head with this name on the first text, [queries, keys].

        >>> from headwise.observe.traces import trace_from_weights
        >>> trace_from_weights([np.eye(2)[None, None]], ["a", "b"])["L0H0"].shape
        (2, 2)
        """
        return self.head_weights(*locate_head(name, self.layers, "the trace"))

    def head_weights(
        self, site: str | int, head: int, queries: slice = ALL_POSITIONS, *, row: int = 0
    ) -> Array:
        """Recompute weights of one head for a range of queries of one text, [queries, keys].

        The result is float32.
        """
        layer = self.get_layer(site)
        layer.check(head=head, row=row)
        start, stop, step = queries.indices(layer.num_queries)
        if step != 1:
            raise ValueError(
                f"cannot take queries {queries}: the step must be 1; give neighbours, and index "
                "the rows of the result"
            )
        return layer.weights(head, row, (start, max(start, stop)), self.grids)

    def weights(self, site: str | int, *, row: int = 0) -> Array:
        """Recompute the weights of all heads of a layer for one text, [heads, queries, keys]."""
        heads = range(self.get_layer(site).heads)
        return np.stack([self.head_weights(site, head, row=row) for head in heads])

    def draw(self, name: str, *, row: int = 0) -> ShownFigure:
        """Return a picture of the head with this name on one text, which a notebook shows.

        >>> from headwise.observe.traces import trace_from_weights
        >>> trace_from_weights([np.eye(2)[None, None]], ["a", "b"]).draw("L0H0")
        <Figure: weights: L0H0>
        """
        site, head = locate_head(name, self.layers, "the trace")
        layer = self.get_layer(site)
        weights = self.head_weights(site, head, row=row)
        queries, keys = (
            self.streams[stream][row].words[:count]
            if self.streams.get(stream)
            else tuple(map(str, range(count)))
            for stream, count in zip(
                (layer.query_stream, layer.key_stream), weights.shape, strict=True
            )
        )
        model = str(self.model.get("name") or self.model.get("class") or "a model")
        title = f"{model}: {print_head(layer.name, head, [one.name for one in self.layers])}"
        text = f"text {row + 1} of {layer.batch_size}" if layer.batch_size > 1 else ""
        cells = HeatMap(weights[: len(queries), : len(keys)], queries, keys, text, "key", "query")
        return ShownFigure(title, [cells], scale_label=SCALE_LABEL)

    def head_mask(
        self, site: str | int, head: int, queries: slice = ALL_POSITIONS, *, row: int = 0
    ) -> Array:
        """Return a mask that is True where a query may attend to a key, [queries, keys].

        See `AttentionRecord.allowed`.
        """
        layer = self.get_layer(site)
        start, stop, _ = queries.indices(layer.num_queries)
        return layer.allowed(head, row, (start, max(start, stop)), self.grids)

    def weight_tile(
        self,
        site: str | int,
        head: int,
        queries: slice = ALL_POSITIONS,
        keys: slice = ALL_POSITIONS,
        *,
        size: tuple[int, int] = (THUMBNAIL_SIZE, THUMBNAIL_SIZE),
        row: int = 0,
    ) -> Array:
        """Draw a range of weights as an 8-bit picture of at most `size` cells.

        Each cell is its largest weight.
        """
        layer = self.get_layer(site)
        start, stop, _ = queries.indices(layer.num_queries)
        left, right, _ = keys.indices(layer.num_keys)
        if stop <= start or right <= left:
            raise ValueError(
                f"a tile of queries {queries} and keys {keys} is empty; give at least one query "
                "and one key"
            )

        def read_bands() -> Iterator[tuple[int, int, Array]]:
            for first, last in query_blocks(stop - start):
                block = slice(start + first, start + last)
                yield first, last, self.head_weights(site, head, block, row=row)[:, left:right]

        return max_pool_weights(read_bands(), (stop - start, right - left), size)

    def thumbnail(self, site: str | int, head: int, *, row: int = 0) -> Array:
        """Draw all weights of one head as a picture of at most 64 x 64 cells."""
        layer = self.get_layer(site)
        if layer.name in self.thumbnails:
            return self.thumbnails[layer.name][row, head]
        return self.weight_tile(site, head, row=row)

    def select_row(self, row: int) -> Trace:
        """Return one text of a batch as a trace of its own."""
        self.layers[0].check(row=row)
        if not row and all(layer.batch_size == 1 for layer in self.layers):
            return self
        part = slice(row, row + 1)
        return replace(
            self,
            streams={name: rows[part] for name, rows in self.streams.items()},
            layers=tuple(layer.select_row(row) for layer in self.layers),
            grids=tuple(grid.select_row(row) for grid in self.grids),
            thumbnails={name: pictures[part] for name, pictures in self.thumbnails.items()},
            images={name: images[part] for name, images in self.images.items()},
        )

    def with_thumbnails(self, size: int = THUMBNAIL_SIZE) -> Trace:
        """Return a copy with a thumbnail of every head.

        A viewer can then show all heads without computing weights.
        """
        pictures: dict[str, Array] = {}
        for layer in self.layers:
            tiles = [
                self.weight_tile(layer.name, head, size=(size, size), row=row)
                for row, head in np.ndindex(layer.batch_size, layer.heads)
            ]
            shape = (layer.batch_size, layer.heads, *tiles[0].shape)
            pictures[layer.name] = np.stack(tiles).reshape(shape)
        return replace(self, thumbnails=pictures)

    @property
    def nbytes(self) -> int:
        """Return the size of all recorded tensors and masks, in bytes."""
        arrays = [grid.values for grid in self.grids]
        for layer in self.layers:
            arrays += layer.arrays.values()
        return sum(array.nbytes for array in arrays)

    @property
    def data(self) -> dict[str, Any]:
        """Summarize the trace as plain values, without the tensors."""
        streams: dict[str, list[int]] = {}
        for name, rows in self.streams.items():
            streams[name] = [len(row.ids) for row in rows]
        sites = [
            {
                "name": layer.name,
                "heads": layer.heads,
                "queries": layer.num_queries,
                "keys": layer.num_keys,
                "calls": len(layer.calls),
                "kept": layer.recorded,
            }
            for layer in self.layers
        ]
        return {
            "model": dict(self.model),
            "streams": streams,
            "bytes": self.nbytes,
            "sites": sites,
            "skipped": dict(self.skipped),
        }

    def __str__(self) -> str:
        lines: list[str] = []
        for name, rows in self.streams.items():
            for row in rows[:3]:
                words = " ".join(word.replace(" ", "·") for word in row.words[:MAX_SHOWN])
                more = len(row.words) - MAX_SHOWN
                lines.append(f"{name}: {words}" + (f" and {more} more" if more > 0 else ""))
            if len(rows) > 3:
                lines.append(f"{name}: {len(rows) - 3} more rows")
        head = "\n".join(map(make_visible, [self._title, *lines]))
        return f"{head}\n\n{to_text(self.site_table)}"

    @property
    def _title(self) -> str:
        count = pluralise(len(self.layers), "site")
        return f"{self.model.get('name', 'a model')}: {format_bytes(self.nbytes)} of {count}"

    @property
    def site_table(self) -> ShownTable:
        """A row for each recorded site."""
        columns = itemgetter(*SITE_COLUMNS[:-1])
        sites = [(*columns(site), " ".join(site["kept"])) for site in self.data["sites"]]
        notes = [f"{name} is not recorded: {reason}" for name, reason in self.skipped.items()]
        return ShownTable("", SITE_COLUMNS, sites, notes)

    @property
    def report_items(self) -> Sequence[Item]:
        """Pictures of some layers, each the mean of its heads on the first text, and the table of
        sites.
        """
        step = -(-len(self.layers) // MAX_PICTURES)
        panels: list[HeatMap] = []
        for layer in self.layers[::step]:
            picture = np.mean([self.thumbnail(layer.name, n) for n in range(layer.heads)], 0) / 255
            labels: list[list[str]] = [
                _sample_words(self.streams.get(stream, ()), count, size)
                for stream, count, size in (
                    (layer.query_stream, layer.num_queries, picture.shape[0]),
                    (layer.key_stream, layer.num_keys, picture.shape[1]),
                )
            ]
            texts = (f"{layer.name}, mean", "key", "query")
            panels.append(HeatMap(picture, labels[0], labels[1], *texts, size=(3.1, 3.2)))
        return [Figure(self._title, panels, num_columns=MAX_PICTURES), self.site_table]


SCALE_LABEL = "attention weight (strength of colour: its square root)"
MAX_SHOWN = 12  # tokens per row
MAX_PICTURES = 3  # layers that a notebook draws
SITE_COLUMNS = ("name", "heads", "queries", "keys", "calls", "kept")


def _sample_words(rows: Sequence[TokenRow], count: int, size: int) -> list[str]:
    """Return the token of each of `size` cells of a picture of `count` tokens, or its position."""
    words = rows[0].words if rows else ()
    positions = [n * count // size for n in range(size)]
    return [words[n] if n < len(words) else str(n) for n in positions]


def make_token_rows(words: Sequence[Sequence[str]]) -> tuple[TokenRow, ...]:
    """Make rows of token strings without known ids."""
    return tuple(TokenRow.from_words(tuple(map(str, row))) for row in words)


# --- Many heads as one matrix ---------------------------------------------------------------------

AGGREGATES = ("mean", "max", "rollout")


def aggregate_heads(trace: Trace, sites: Sequence[str], how: str, *, row: int = 0) -> Array:
    """Take the mean or maximum over all heads of some sites, [queries, keys], in float32.

    The sites must attend over the same tokens.

    >>> from headwise.observe.traces import trace_from_weights
    >>> weights = np.stack([np.eye(2), np.full((2, 2), 0.5)])[None]
    >>> trace = trace_from_weights([weights], ["a", "b"])
    >>> aggregate_heads(trace, [trace.layers[0].name], "max").tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    if how not in AGGREGATES[:2]:
        raise ValueError(f"unknown how={how!r}; use 'mean' or 'max'")
    layers = [trace.get_layer(site) for site in sites]
    shape = _common_shape(layers)
    total = np.zeros(shape, np.float64 if how == "mean" else np.float32)
    combine = np.add if how == "mean" else np.maximum
    for layer in layers:
        for head in range(layer.heads):
            for start, stop in query_blocks(shape[0]):
                weights = trace.head_weights(layer.name, head, slice(start, stop), row=row)
                combine(total[start:stop], weights, out=total[start:stop])
    count = sum(layer.heads for layer in layers) if how == "mean" else 1
    return (total / count).astype(np.float32)


def roll_out_attention(trace: Trace, site: str, *, row: int = 0) -> Array:
    """Attention rollout (2005.00928) up to a self-attention site: [queries, tokens of the input],
    in float32.

    Each layer of the stack is half the mean of its heads and half the token itself, for the
    residual connection; the rollout is the product of these matrices from the first layer to the
    site. Rows of means are rescaled to sum to one where a sink takes a part.
    `compute_attention_maps(model, inputs).rollout()` gives the same from a model; this needs no
    torch.
    """
    last = trace.get_layer(site)
    if last.query_stream != last.key_stream:
        raise ValueError(
            f"{site} is cross-attention, and a rollout follows one stack of tokens; choose "
            "self-attention"
        )
    layers = [
        layer
        for layer in trace.layers
        if layer.stack == last.stack and layer.kind == last.kind and layer.layer <= last.layer
    ]
    _common_shape(layers)
    in_order = sorted(layers, key=lambda one: one.layer)
    means = (aggregate_heads(trace, [layer.name], "mean", row=row) for layer in in_order)
    return multiply_rollout(means).astype(np.float32)


def multiply_rollout(means: Iterable[Array]) -> Array:
    """Multiply I / 2 + A / 2 over layers in float64; A is the mean over the heads of a layer.

    >>> multiply_rollout([np.array([[1.0, 0.0], [1.0, 0.0]])] * 2).tolist()
    [[1.0, 0.0], [0.75, 0.25]]
    """
    rollout: Array | None = None
    for mean in means:
        rescaled = _rescale_rows(mean.astype(np.float64))
        step = _rescale_rows(0.5 * rescaled + 0.5 * np.eye(len(mean)))
        rollout = step if rollout is None else step @ rollout
    if rollout is None:
        raise ValueError("a rollout needs at least one layer")
    return rollout


def _rescale_rows(weights: Array) -> Array:
    """Rescale rows to sum to one.

    A row without weight stays zero; with the residual share added, it is the token itself.
    """
    total = weights.sum(1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _common_shape(layers: Sequence[AttentionRecord]) -> tuple[int, int]:
    """Return the numbers of queries and keys of some layers; raise if they attend over different
    tokens.
    """
    shapes = {(layer.num_queries, layer.num_keys) for layer in layers}
    streams = {(layer.query_stream, layer.key_stream) for layer in layers}
    if len(shapes) != 1 or len(streams) != 1:
        names = ", ".join(layer.name for layer in layers)
        raise ValueError(
            f"{names or 'no sites'} attend over different tokens; give sites over the same ones"
        )
    return shapes.pop()


# --- Subwords merged into words, special tokens or the first token left out -----------------------

SPECIAL_TOKEN = re.compile(r"(\[[A-Z]+\]|<[^<>\s]{1,24}>|<\|.*\|>)")
WORD_STARTS = ("Ġ", "▁", " ")  # how byte-level BPE and SentencePiece mark the first token of a word
CONTINUATION = "##"  # how WordPiece marks the other tokens
MAX_WEIGHT_BYTES = 10**9  # of the weights of all heads, which a grouped trace stores


@dataclass(frozen=True)
class TokenGrouping:
    """Choose which tokens to merge and which to leave out.

    `words` merges the subwords of a word: weights to a word are added, and weights from it are
    averaged. `special` leaves out tokens without text, such as [CLS]. `first` leaves out the first
    token of each text, where many heads put most of their weight. The remaining weights of a query
    are divided by their sum.
    """

    words: bool = False
    special: bool = False
    first: bool = False

    @property
    def changes_anything(self) -> bool:
        """True if any of the three is asked for."""
        return self.words or self.special or self.first


def group_tokens(trace: Trace, grouping: TokenGrouping, *, row: int = 0) -> Trace:
    """Return one text of `trace` with tokens merged or left out.

    The new trace stores weights, without queries and keys.

    >>> from headwise.observe.traces import trace_from_weights
    >>> weights = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.4, 0.4]])
    >>> trace = trace_from_weights([weights[None, None]], ["[CLS]", "play", "##ing"])
    >>> group_tokens(trace, TokenGrouping(words=True)).head_weights(0, 0).round(3)
    array([[1.  , 0.  ],
           [0.35, 0.65]], dtype=float32)
    """
    groups = {name: find_groups(rows[row], grouping) for name, rows in trace.streams.items()}
    empty = [name for name, places in groups.items() if not places]
    if empty:
        raise ValueError(
            f"no token of the {empty[0]} would be left; show special tokens or the first token"
        )
    stored = sum(
        4 * layer.heads * len(groups[layer.query_stream]) * len(groups[layer.key_stream])
        for layer in trace.layers
    )
    if stored > MAX_WEIGHT_BYTES:
        raise ValueError(
            f"the weights of all heads take {stored / 1e9:.1f} GB, more than "
            f"{MAX_WEIGHT_BYTES / 1e9:g} GB; use a "
            "shorter text"
        )
    return Trace(
        trace.model,
        {name: (_merge_tokens(rows[row], groups[name]),) for name, rows in trace.streams.items()},
        tuple(_group_layer(trace, layer, groups, grouping, row) for layer in trace.layers),
        skipped=trace.skipped,
        classes=trace.classes,
    )


def find_groups(tokens: TokenRow, grouping: TokenGrouping) -> list[list[int]]:
    """Return the original positions of each token in the view; left-out tokens have no group.

    >>> words = TokenRow.from_words(("[CLS]", "un", "##happy", "cats"))
    >>> find_groups(words, TokenGrouping(words=True, special=True))
    [[1, 2], [3]]
    """
    groups: list[list[int]] = []
    has_marks = any(word.startswith(WORD_STARTS) for word in tokens.words)
    for place, word in enumerate(tokens.words):
        is_special = SPECIAL_TOKEN.fullmatch(word) is not None
        if (grouping.special and is_special) or (grouping.first and place == 0):
            continue
        follows = groups and groups[-1][-1] == place - 1
        may_continue = grouping.words and follows and not is_special
        if may_continue and _continues_word(tokens, place, has_marks):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _continues_word(tokens: TokenRow, place: int, has_marks: bool) -> bool:
    """Return True if a token continues the word of the previous token."""
    before = tokens.words[place - 1]
    word = tokens.words[place]
    if SPECIAL_TOKEN.fullmatch(before):
        return False
    if word.startswith(CONTINUATION) and len(word) > len(CONTINUATION):
        return True
    if tokens.offsets and tokens.text:
        (_, end) = tokens.offsets[place - 1]
        (start, stop) = tokens.offsets[place]
        is_next = start == end and 0 < start < stop
        return is_next and _is_inside_word(tokens.text[start - 1], tokens.text[start])
    return has_marks and not word.startswith(WORD_STARTS) and _is_inside_word(before[-1:], word[:1])


def _is_inside_word(before: str, after: str) -> bool:
    """Return True if two neighbouring characters belong to one word.

    A word is letters and digits, but not ideographs.
    """
    return all(
        sign.isalnum()
        and not unicodedata.name(sign, "").startswith(("CJK", "HIRAGANA", "KATAKANA", "HANGUL"))
        for sign in (before, after)
    )


def _merge_tokens(tokens: TokenRow, groups: list[list[int]]) -> TokenRow:
    """Return the tokens of the view; a merged token keeps the id of its first token."""
    words: list[str] = []
    for places in groups:
        first, *rest = (tokens.words[place] for place in places)
        words.append(first + "".join(word.removeprefix(CONTINUATION) for word in rest))
    offsets = tuple(
        (tokens.offsets[places[0]][0], tokens.offsets[places[-1]][1])
        for places in groups
        if tokens.offsets
    )
    return TokenRow(
        tuple(tokens.ids[places[0]] for places in groups), tuple(words), offsets, tokens.text
    )


def _group_layer(
    trace: Trace,
    layer: AttentionRecord,
    groups: dict[str, list[list[int]]],
    grouping: TokenGrouping,
    row: int,
) -> AttentionRecord:
    queries = groups[layer.query_stream]
    keys = groups[layer.key_stream]
    starts = np.array([places[0] for places in keys])
    key_indices = np.array([place for place in chain.from_iterable(keys) if place < layer.num_keys])
    edges = np.searchsorted(key_indices, starts)
    weights = np.zeros((1, layer.heads, len(queries), len(keys)), np.float32)
    for head in range(layer.heads):
        blocks: list[Array] = []
        for block in query_blocks(layer.num_queries):
            read = trace.head_weights(layer.name, head, slice(*block), row=row)
            blocks.append(_keep_keys(read, key_indices, grouping))
        summed = np.add.reduceat(np.concatenate(blocks), edges, axis=1)
        weights[0, head] = [summed[places].mean(0) for places in queries]
    call = AttentionCallRecord((0, len(queries)), (0, len(keys)), weights=0)
    return replace(layer, calls=(call,), arrays={"weights.0": weights})


def _keep_keys(weights: Array, key_indices: Array, grouping: TokenGrouping) -> Array:
    """Select the weights on kept keys; divide by their sum if keys were left out."""
    chosen = weights[:, key_indices]
    if not (grouping.special or grouping.first):
        return chosen
    total = chosen.sum(1, keepdims=True, dtype=np.float64)
    return np.divide(chosen, total, out=np.zeros_like(chosen), where=total > 0)

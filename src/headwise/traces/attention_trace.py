"""Pictures of weights: each cell the largest weight in it, so that a thin line stays where a mean would lose it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import suggest
from .attention_record import AttentionRecord, TokenRow
from .packed_masks import Array, PackedMask

QUERY_BLOCK = 512  # queries at a time


def query_blocks(num_queries: int) -> Iterator[tuple[int, int]]:
    """Where neighbouring queries are taken together.

    >>> list(query_blocks(600))
    [(0, 512), (512, 600)]
    """
    return ((start, min(num_queries, start + QUERY_BLOCK)) for start in range(0, num_queries, QUERY_BLOCK))


def max_pool_weights(
    bands: Iterable[tuple[tuple[int, int], Array]], shape: tuple[int, int], size: tuple[int, int]
) -> Array:
    """The largest weight of each cell, 0..255, of weights that come in bands of rows.

    >>> max_pool_weights([((0, 2), np.eye(4)[:2]), ((2, 4), np.eye(4)[2:])], (4, 4), (2, 2))
    array([[255,   0],
           [  0, 255]], dtype=uint8)
    """
    if min(size) < 1:
        raise ValueError(f"a picture of {size[0]} x {size[1]} has no cell; give at least 1 x 1")
    high, wide = (min(asked, count) for asked, count in zip(size, shape, strict=True))
    found = np.zeros((high, wide), np.float32)
    lines, columns = (np.arange(cells) * count // cells for cells, count in zip((high, wide), shape, strict=True))
    for (start, stop), band in bands:
        across = np.maximum.reduceat(band, columns, axis=1)
        cells = np.searchsorted(lines, np.arange(start, stop), side="right") - 1
        np.maximum.at(found, cells, across)
    return np.round(np.clip(found, 0, 1) * 255).astype(np.uint8)


# --- A trace -------------------------------------------------------------------------------------------

ALL_POSITIONS = slice(None)
THUMBNAIL_SIZE = 64


@dataclass(frozen=True)
class Trace:
    """One run of a model: its tokens by stream, its layers, and the grids that these share.

    `model` says which it was. `skipped` names sites that were not kept, with the reason. `thumbnails` are small
    pictures [B, heads, high, wide] of the weights of each layer, 8 bit, where they were made.
    """

    model: Mapping[str, Any]
    streams: Mapping[str, tuple[TokenRow, ...]]
    layers: tuple[AttentionRecord, ...]
    grids: tuple[PackedMask, ...] = field(repr=False, default=())
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    thumbnails: Mapping[str, Array] = field(repr=False, default_factory=dict[str, Array])

    def get_layer(self, which: str | int) -> AttentionRecord:
        """The layer of this name, or of this number where there is no other."""
        found = [one for one in self.layers if which in (one.name, one.layer)]
        if not found:
            names = [one.name for one in self.layers]
            raise ValueError(f"the trace has no site {which!r}; {suggest(str(which), names)}")
        if len(found) > 1:
            names = ", ".join(one.name for one in found)
            raise ValueError(f"the trace has several sites at layer {which}: {names}; say which by its name")
        return found[0]

    def head_weights(self, site: str | int, head: int, queries: slice = ALL_POSITIONS, *, row: int = 0) -> Array:
        """The weights of one head for some queries of one text, [queries, keys], computed again in float32."""
        one = self.get_layer(site)
        _check_in_range("head", head, one.heads, one.name)
        _check_in_range("row", row, one.batch_size, one.name)
        start, stop, step = queries.indices(one.num_queries)
        if step != 1:
            raise ValueError(f"queries {queries} leave some out; give neighbours, and pick among the rows")
        return one.weights(head, row, (start, max(start, stop)), self.grids)

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
        """A picture of some weights, 8 bit and at most `size` high and wide: each cell the largest weight in it."""
        one = self.get_layer(site)
        start, stop, _ = queries.indices(one.num_queries)
        left, right, _ = keys.indices(one.num_keys)
        if stop <= start or right <= left:
            raise ValueError(f"a tile of queries {queries} and keys {keys} is empty; give at least one of each")
        bands = (
            (at, self.head_weights(site, head, slice(start + at[0], start + at[1]), row=row)[:, left:right])
            for at in query_blocks(stop - start)
        )
        return max_pool_weights(bands, (stop - start, right - left), size)

    def head_output(self, site: str | int, head: int, queries: slice = ALL_POSITIONS, *, row: int = 0) -> Array:
        """What one head said before the merge, [queries, width]: as it was kept, or read from kept values again."""
        one = self.get_layer(site)
        if "z" in one.arrays:
            _check_in_range("head", head, one.arrays["z"].shape[2], one.name)
            return one.arrays["z"][row, queries, head].astype(np.float32)
        if "v" not in one.arrays or any(call.first != call.keys[0] for call in one.calls):
            raise ValueError(f"neither z nor v of {one.name} was kept; trace with keep=('q', 'k', 'v')")
        weights = self.head_weights(site, head, queries, row=row)
        return weights @ one.arrays["v"][row, : weights.shape[1], one.reads[head]].astype(np.float32)

    def thumbnail(self, site: str | int, head: int, *, row: int = 0) -> Array:
        """All weights of one head as a picture of 64 x 64 at most."""
        one = self.get_layer(site)
        if one.name in self.thumbnails:
            return self.thumbnails[one.name][row, head]
        return self.weight_tile(site, head, row=row)

    def with_thumbnails(self, size: int = THUMBNAIL_SIZE) -> Trace:
        """The same with a thumbnail of every head, so that whoever opens it has something to show at once."""
        pictures = {
            one.name: np.stack(
                [
                    np.stack(
                        [self.weight_tile(one.name, head, size=(size, size), row=row) for head in range(one.heads)]
                    )
                    for row in range(one.batch_size)
                ]
            )
            for one in self.layers
        }
        return replace(self, thumbnails=pictures)

    @property
    def nbytes(self) -> int:
        """The bytes of all that is kept."""
        arrays = [array for one in self.layers for array in one.arrays.values()]
        return sum(array.nbytes for array in [*arrays, *(grid.values for grid in self.grids)])

    @property
    def data(self) -> dict[str, Any]:
        """What is in it, as plain values, without the numbers."""
        return {
            "model": dict(self.model),
            "streams": {name: [len(row.ids) for row in rows] for name, rows in self.streams.items()},
            "bytes": self.nbytes,
            "sites": [
                {
                    "name": one.name,
                    "heads": one.heads,
                    "queries": one.num_queries,
                    "keys": one.num_keys,
                    "calls": len(one.calls),
                    "kept": sorted({name.partition(".")[0] for name in one.arrays}),
                }
                for one in self.layers
            ],
            "skipped": dict(self.skipped),
        }

    def save(self, path: Path | str) -> None:
        """Write one file that opens without the model and without torch."""
        from .trace_file import save_trace

        save_trace(self, path)

    def export_weights(self, path: Path | str, *, sites: Iterable[str | int] = (), min_weight: float = 0.0) -> None:
        """Write the weights of these sites, or of all, as the ending says: .csv or .json by pairs, .npz as arrays.

        Pairs whose weight is below `least` are left out of .csv and .json.
        """
        from .import_export import export_weights

        export_weights(self, path, [self.get_layer(site) for site in sites] or self.layers, min_weight)

    def __str__(self) -> str:

        return format_trace(self)


def _check_in_range(what: str, number: int, count: int, name: str) -> None:
    if not 0 <= number < count:
        raise ValueError(f"{name} has no {what} {number}; give one in 0..{count - 1}")


def make_token_rows(words: Sequence[Sequence[str]]) -> tuple[TokenRow, ...]:
    """Rows of tokens of which only the writing is known."""
    return tuple(TokenRow.from_words(tuple(map(str, row))) for row in words)


# --- A trace as a table in a terminal ------------------------------------------------------------------

MAX_SHOWN = 12  # tokens of a row


def format_trace(trace: Trace) -> str:
    """What a trace holds."""
    lines = [f"{trace.model.get('name', 'a model')}: {format_bytes(trace.nbytes)} of {len(trace.layers)} sites"]
    for name, rows in trace.streams.items():
        for row in rows[:3]:
            words = " ".join(escape_token(word) for word in row.words[:MAX_SHOWN])
            more = f" and {len(row.words) - MAX_SHOWN} more" if len(row.words) > MAX_SHOWN else ""
            lines.append(f"{name}: {words}{more}")
        if len(rows) > 3:
            lines.append(f"{name}: {len(rows) - 3} rows more")
    wide = max((len(one.name) for one in trace.layers), default=0)
    for one in trace.layers:
        kept = " ".join(sorted({name.partition(".")[0] for name in one.arrays}))
        steps = f", {len(one.calls)} calls" if len(one.calls) > 1 else ""
        lines.append(f"{one.name.ljust(wide)}  {one.heads} heads, {one.num_queries} x {one.num_keys}{steps}  {kept}")
    return "\n".join([*lines, *(f"{name}: not kept, {why}" for name, why in trace.skipped.items())])


def escape_token(token: str) -> str:
    """A string on one line, whatever it holds.

    >>> escape_token("a\\x1b[2J b")
    'a\\\\x1b[2J·b'
    """
    shown = token.replace(" ", "·")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def format_bytes(num_bytes: float) -> str:
    """A number of bytes in a unit that can be read.

    >>> format_bytes(302_000_000)
    '302.0 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"

"""A trace: what every attention of a model worked with in one run, without the model and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import suggest
from .grid import Array, PackedMask
from .record import AttentionRecord, TokenRow
from .views import query_blocks, max_pool_weights

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
        self, site: str | int, head: int, queries: slice = ALL_POSITIONS, keys: slice = ALL_POSITIONS, *,
        size: tuple[int, int] = (THUMBNAIL_SIZE, THUMBNAIL_SIZE), row: int = 0,
    ) -> Array:  # fmt: skip
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
            one.name: np.stack([
                np.stack([self.weight_tile(one.name, head, size=(size, size), row=row) for head in range(one.heads)])
                for row in range(one.batch_size)
            ])
            for one in self.layers
        }  # fmt: skip
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
                {"name": one.name, "heads": one.heads, "queries": one.num_queries, "keys": one.num_keys,
                 "calls": len(one.calls), "kept": sorted({name.partition(".")[0] for name in one.arrays})}
                for one in self.layers
            ],
            "skipped": dict(self.skipped),
        }  # fmt: skip

    def save(self, path: Path | str) -> None:
        """Write one file that opens without the model and without torch."""
        from .file import save_trace

        save_trace(self, path)

    def export_weights(self, path: Path | str, *, sites: Iterable[str | int] = (), min_weight: float = 0.0) -> None:
        """Write the weights of these sites, or of all, as the ending says: .csv or .json by pairs, .npz as arrays.

        Pairs whose weight is below `least` are left out of .csv and .json.
        """
        from .exchange import export_weights

        export_weights(self, path, [self.get_layer(site) for site in sites] or self.layers, min_weight)

    def __str__(self) -> str:
        from .telling import format_trace

        return format_trace(self)


def _check_in_range(what: str, number: int, count: int, name: str) -> None:
    if not 0 <= number < count:
        raise ValueError(f"{name} has no {what} {number}; give one in 0..{count - 1}")


def make_token_rows(words: Sequence[Sequence[str]]) -> tuple[TokenRow, ...]:
    """Rows of tokens of which only the writing is known."""
    return tuple(TokenRow.from_words(tuple(map(str, row))) for row in words)

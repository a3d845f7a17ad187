"""Queries that speak, packed for each key head in the order of tokens, and the rectangles in which they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..pattern import Causal
from ..tokens import AttentionMask

QUERIES_PER_CHUNK = 64  # about so many queries of a key head read at once what only some of them may
UNMASKED_CHUNKS_PER_CALL = 4  # and so many times as many what all of them may
BACKWARD_KEYS_PER_CALL = 256  # keys whose gradients are formed at once
MIN_FILL_RATIO = 0.8  # heads packed together are filled up to the longest: each has at least this share of it


class PackedQueries(NamedTuple):
    """The queries of some key heads that speak, [B, heads, rows], in chunks of equal length.

    All heads have as many chunks, each an equal share of its queries, so that chunks of one number are about the same
    tokens. `line` is where each row stands among all (b, t, h) in one line, `place` its t. What fills up is not `live`:
    it stands behind the line, and reads as the row before it does. `spans` is the first and last t of every chunk.
    `whole` says that the rows are all tokens, as they come.
    """

    heads: tuple[int, ...]
    flat_index: Tensor
    position_BGR: Tensor
    is_valid_BGR: Tensor
    chunk_spans: tuple[tuple[int, int], ...]
    is_complete: bool

    @property
    def num_rows(self) -> int:
        """The rows of each head."""
        return self.position_BGR.shape[2]


def pack_open_queries(open_BTH: Tensor, num_kv_heads: int, is_plain_mask: bool) -> list[PackedQueries]:
    """What speaks, packed for so many key heads; heads that have about as many rows stand together.

    In a `plain` call tokens read all keys, or of as many keys those that are not later: what is whole is one chunk.
    """
    batch, queries, heads = open_BTH.shape
    each = heads // num_kv_heads
    open_BGX = open_BTH.view(batch, queries, num_kv_heads, each).transpose(1, 2).flatten(2)
    loads: list[int] = open_BGX.sum(-1).amax(0).tolist()
    return [_pack_group(open_BGX[:, list(group)], group, (heads, each), is_plain_mask) for group in group_heads_by_load(loads)]


def group_heads_by_load(loads: Sequence[int]) -> list[tuple[int, ...]]:
    """Heads with about equal numbers of rows, without those that have none.

    >>> group_heads_by_load([1024, 300, 0, 990, 310])
    [(0, 3), (1, 4)]
    """
    groups: list[list[int]] = []
    for head in sorted(range(len(loads)), key=lambda head: -loads[head]):
        if groups and loads[head] >= MIN_FILL_RATIO * loads[groups[-1][0]]:
            groups[-1].append(head)
        elif loads[head]:
            groups.append([head])
    return [tuple(sorted(group)) for group in groups if loads[group[0]]]


def _pack_group(open_BGX: Tensor, group: tuple[int, ...], sizes: tuple[int, int], plain: bool) -> PackedQueries:
    heads, each = sizes
    batch, kept, queries = open_BGX.shape[0], len(group), open_BGX.shape[2] // each
    rank_BGX = open_BGX.cumsum(-1)
    counts_BG = rank_BGX[..., -1]
    most = int(counts_BG.max())
    b, g, x = open_BGX.nonzero(as_tuple=True)
    whole = plain and each == 1 and len(x) == open_BGX.numel()
    count = 1 if whole else num_chunks(most)
    rows = -(-most // count)
    rank, own = rank_BGX[b, g, x], counts_BG[b, g]
    chunk = (rank * count - 1) // own  # rank is counted from 1
    slot = ((b * kept + g) * count + chunk) * rows + rank - 1 - chunk * own // count
    head = torch.tensor(group, device=x.device)[g] * each + x % each
    line = torch.is_full((batch * kept * count * rows,), batch * queries * heads, device=x.device)
    line[slot] = (b * queries + x // each) * heads + head
    place = torch.full_like(line, -1)
    place[slot] = x // each
    place_BGCR = place.view(batch, kept, count, rows)
    firsts = place_BGCR.masked_fill(place_BGCR < 0, queries).amin((0, 1, 3))
    spans = tuple(zip(firsts.tolist(), place_BGCR.amax((0, 1, 3)).tolist(), strict=True))
    place_BGR = place_BGCR.flatten(2)
    return PackedQueries(group, line, place_BGR.cummax(-1).values.clamp_(min=0), place_BGR >= 0, spans, whole)


def num_chunks(rows: int) -> int:
    """How many chunks so many rows make."""
    return max(1, round(rows / QUERIES_PER_CHUNK))


class MaskedRectangle(NamedTuple):
    """Rows and keys that meet in one call, whether some of these pairs are barred, and whether it is the `first` of its
    rows; a `triangle` bars keys that are later than a row, without a table."""

    rows: slice
    keys: slice
    is_masked: bool
    is_first_of_rows: bool = False
    is_causal_square: bool = False


class KeyVisibility:
    """Who reads whom in a call, in places among its queries and places among its keys: all keys, those that are not
    later, or whom the tokens let."""

    def __init__(self, sight: AttentionMask, dtype: torch.dtype) -> None:
        asks, told = sight.queries.start, sight.keys.start
        self.sight, self.dtype, self.keys = sight, dtype, sight.keys.count
        self.query_offset = -1 if asks is None or told is None else asks - told  # how many keys the first query has before it
        self.is_full = sight.shape == "full"
        self.is_full_or_causal = self.is_full or sight.shape == "triangle"
        self.is_causal = not self.is_full and self.query_offset >= 0 and sight.pattern == Causal()
        self._extents: tuple[Tensor, Tensor] | None = None

    def forward_rectangles(self, pack: PackedQueries) -> Iterator[MaskedRectangle]:
        """The pieces that give what rows read; of several for some rows, the first bars none of these from all keys."""
        if self._once(pack):
            yield MaskedRectangle(slice(0, pack.num_rows), slice(0, self.keys), False, True, not self.is_full)
            return
        each, before = pack.num_rows // len(pack.chunk_spans), 0
        for n, (first, last) in enumerate(pack.chunk_spans):
            rows = slice(n * each, (n + 1) * each)
            if not self.is_causal:
                yield MaskedRectangle(rows, self.key_slice(first, last), True, True)
                continue
            own = min(first + self.query_offset, self.keys - 1)  # every row may read what is before; its own key is behind
            before = before if n % UNMASKED_CHUNKS_PER_CALL else own
            yield MaskedRectangle(rows, slice(own, min(last + self.query_offset + 1, self.keys)), True, True)
            yield MaskedRectangle(rows, slice(before, own), False)
            if n % UNMASKED_CHUNKS_PER_CALL == UNMASKED_CHUNKS_PER_CALL - 1 or n == len(pack.chunk_spans) - 1:
                yield MaskedRectangle(slice(n // UNMASKED_CHUNKS_PER_CALL * UNMASKED_CHUNKS_PER_CALL * each, rows.stop), slice(0, before), False)

    def _once(self, pack: PackedQueries) -> bool:
        """Whether one call does for all rows."""
        return self.is_full or pack.is_complete

    def backward_rectangles(self, pack: PackedQueries) -> Iterator[MaskedRectangle]:
        """The pieces that give gradients: few keys with many rows, so that little has to be added up for keys."""
        if self._once(pack) or not self.is_causal:
            yield from self.forward_rectangles(pack)
            return
        ends = [*range(0, self.keys, BACKWARD_KEYS_PER_CALL), self.keys]
        asked = torch.tensor([end - self.query_offset for end in ends], device=pack.position_BGR.device)
        asked = asked.expand(*pack.position_BGR.shape[:2], -1).contiguous()
        least: list[int] = torch.searchsorted(pack.position_BGR, asked).amin((0, 1)).tolist()
        most: list[int] = torch.searchsorted(pack.position_BGR, asked - 1).amax((0, 1)).tolist()
        for (start, stop), some, every in zip(pairwise(ends), least, most[1:], strict=False):
            yield MaskedRectangle(slice(some, every), slice(start, stop), True)
            yield MaskedRectangle(slice(every, pack.num_rows), slice(start, stop), False)

    def key_ranges(self, queries: int) -> Tensor | None:
        """The first key that each token reads and the one behind its last, [1 or B, T, 2]; None where some in between
        are not for it."""
        device = self.sight.keys.position.device
        if self.is_full or self.is_causal:
            last = torch.is_full((queries,), self.keys, device=device)
            if not self.is_full:
                last = (torch.arange(queries, device=device) + self.query_offset + 1).clamp_(max=self.keys)
            return torch.stack([torch.zeros_like(last), last], -1)[None]
        allowed_BTS = self.sight.allowed[:, 0]
        count, first = allowed_BTS.sum(-1), allowed_BTS.to(torch.uint8).argmax(-1)
        last = self.keys - allowed_BTS.flip(-1).to(torch.uint8).argmax(-1)
        last = torch.where(count > 0, last, first)
        return torch.stack([first, last], -1) if bool((last - first == count).all()) else None

    def key_slice(self, first: int, last: int) -> slice:
        """Keys outside of which no query from the first to the last place reads."""
        if self._extents is None:
            some_TS = self.sight.allowed[:, 0].any(0)
            place = torch.arange(self.keys, device=some_TS.device)
            low, high = torch.where(some_TS, place, self.keys).amin(-1), torch.where(some_TS, place + 1, 0).amax(-1)
            self._extents = low, high
        low, high = (extent[first : last + 1] for extent in self._extents)
        start, stop = int(low.min()), int(high.max())
        return slice(start, max(start, stop))

    def mask_bias(self, place_BGR: Tensor, keys: slice) -> Tensor:
        """0 where a query at this place may read a key and -inf elsewhere, [B, G, R, S]."""
        if self.is_causal:
            return self._triangle(place_BGR + self.query_offset + 1 - keys.start, keys.stop - keys.start)
        allowed = self._rows(place_BGR)[..., keys]
        return torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)

    def _triangle(self, count_BGR: Tensor, wide: int) -> Tensor:
        """Rows whose first so many keys may be read: windows into a line of zeros followed by -inf."""
        line = torch.zeros(2 * wide, dtype=self.dtype, device=count_BGR.device)
        line[wide:] = -torch.inf
        starts = wide - count_BGR.clamp(0, wide)
        rows = line.as_strided((wide + 1, wide), (1, 1)).contiguous().index_select(0, starts.flatten())
        return rows.view(*count_BGR.shape, wide)

    def _rows(self, place_BGR: Tensor) -> Tensor:
        """Which keys each may read, from all pairs."""
        allowed_BTS = self.sight.allowed[:, 0]
        row = torch.arange(place_BGR.shape[0], device=place_BGR.device) % allowed_BTS.shape[0]
        flat = (row[:, None, None] * allowed_BTS.shape[1] + place_BGR).flatten()
        return allowed_BTS.flatten(0, 1).index_select(0, flat).view(*place_BGR.shape, self.keys)

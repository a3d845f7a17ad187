"""One query of each of eight rows, whose keys lie in pages: lengths of 500 to 8,000, and a beginning that all share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cache import Pool, Row
from ...kernels import decode
from ...presets import design
from ..case import LIMIT, Aim, Case, Need, Run

TITLE = "One query per row over pages, 32 heads on 8 key heads of 128"
TRIED = (
    "As for caches without pages, whose kernel it is: products and memory add up and do not overlap. See "
    "log/2026-11-22-fast-decode.md."
)
HEADS, KV, DIM = 32, 8, 128
LENGTHS = (500, 1_571, 2_643, 3_714, 4_786, 5_857, 6_929, 8_000)
SHARED, OWN = 4_096, 256  # tokens that all of eight rows begin with, and those behind them that are each row's own
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REACHES = {"fp32": 0.8, "bf16": 0.7}  # of what the machine can read
GATHERED, PADDED, ALONE = "gathered, then SDPA enable_gqa", "padded rows, SDPA enable_gqa", "the same, nothing shared"


def cases(quick: bool) -> Iterator[Case]:
    """Rows of many lengths in pages of 16 and 64 tokens, and rows that begin alike."""
    for page in (16,) if quick else (16, 64):
        for name in DTYPES:
            yield _ragged(page, name)
    for name in DTYPES:
        yield _shared(name)


def _ragged(page: int, name: str) -> Case:
    rows = _Rows(LENGTHS, page, DTYPES[name])
    return Case(
        f"8 rows of 500 to 8,000 tokens in pages of {page}, {name}", rows.ours,
        {GATHERED: rows.gathered(), PADDED: rows.padded()},
        (Aim(LIMIT, REACHES[name]), Aim(GATHERED, 3.0)), Need(reads=rows.reads),
        tolerance=1e-3 if name == "fp32" else 2e-2, tried=TRIED,
    )  # fmt: skip


def _shared(name: str) -> Case:
    lengths = (SHARED + OWN,) * len(LENGTHS)
    rows = _Rows(lengths, 16, DTYPES[name], shared=SHARED)
    apart = _Rows(lengths, 16, DTYPES[name])
    apart.fill(rows)
    return Case(
        f"8 rows that share {SHARED:,} of {SHARED + OWN:,} tokens in pages of 16, {name}", rows.ours,
        {ALONE: apart.ours, GATHERED: rows.gathered()}, need=Need(rows.reads, rows.flops, DTYPES[name]),
        tolerance=1e-3 if name == "fp32" else 2e-2,
        notes={"bytes": f"{rows.reads:,}, shared pages being read once; {apart.reads:,} if each row had its own"},
    )  # fmt: skip


class _Rows:
    """Rows in pages that were handed out in turns, as to rows that grow together; one query of each."""

    def __init__(self, lengths: Sequence[int], page: int, dtype: torch.dtype, shared: int = 0) -> None:
        torch.manual_seed(0)
        spec = design(model=HEADS * DIM, heads=HEADS, kv=KV, pattern="causal()")
        count = sum(-(-length // page) for length in lengths) - (len(lengths) - 1) * (shared // page)
        self.pool, self.lengths = Pool([spec], pages=count, page=page, dtype=dtype), lengths
        self.pool.numbers.copy_(torch.randn(1, self.pool.numbers.shape[1]).expand_as(self.pool.numbers))
        self.pool.numbers.mul_(torch.rand(len(self.pool.numbers), 1))
        self.rows = self._begun(shared)
        while any(row.length < end - 1 for row, end in zip(self.rows, lengths, strict=True)):
            self._grow([min(page, end - 1 - row.length) for row, end in zip(self.rows, lengths, strict=True)])
        seats = self.pool.seat(self.rows)
        seats.next([1] * len(lengths))
        held = seats.accesses[0].held
        assert held is not None
        self.held, self.told = held, held.placed(True)
        self.q = torch.randn(len(lengths), HEADS, DIM).to(dtype)

    def _begun(self, shared: int) -> list[Row]:
        book = self.pool.book
        first = book.fresh()
        if shared:
            book.extend([first], [shared])
            first.length = shared
        return [first, *(book.fork(first) for _ in self.lengths[1:])]

    def _grow(self, counts: list[int]) -> None:
        self.pool.book.extend(self.rows, counts)
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count

    @property
    def reads(self) -> int:
        """Bytes of keys and values that are read, each page once."""
        spans = {tuple(span) for span in self._table.flatten(0, 1).tolist()}
        return sum(end - begin for _, begin, end in spans) * 2 * KV * DIM * self.q.itemsize

    @property
    def flops(self) -> int:
        """Of both products of every row."""
        return 4 * HEADS * DIM * sum(self.lengths)

    @property
    def _table(self) -> Tensor:
        assert self.told.spans is not None
        return self.told.spans.table

    def fill(self, other: _Rows) -> None:
        """The same numbers as another's rows have."""
        for mine, theirs in zip(self.rows, other.rows, strict=True):
            to, of = ([*row.tables[0].values()] for row in (mine, theirs))
            self.pool.numbers[to] = other.pool.numbers[of]
        self.q = other.q

    def ours(self) -> Tensor:
        """Read where they lie."""
        views = self.pool.views[0]
        with torch.no_grad():
            return decode(self.q, views["k"], views["v"], self._table, scale=DIM**-0.5)[0]

    def gathered(self) -> Run:
        """Copied side by side at every step."""
        live = self.held.gathered.told.live[:, None, None]
        mask = None if live.all() else live

        def run() -> Tensor:
            with torch.no_grad():
                entry = self.pool.gather(0, self.held)
                k, v = (entry[side].transpose(1, 2) for side in "kv")
                return _sdpa(self.q, k, v, mask)

        return run

    def padded(self) -> Run:
        """Side by side from the beginning, each row as long as the longest."""
        live = self.held.gathered.told.live[:, None, None]
        entry: Any = {name: held.clone() for name, held in self.pool.gather(0, self.held).items()}
        k, v = (entry[side].transpose(1, 2).contiguous() for side in "kv")

        def run() -> Tensor:
            with torch.no_grad():
                return _sdpa(self.q, k, v, live)

        return run


def _sdpa(q_BHK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, live: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q_BHK[:, :, None], k_BGSK, v_BGSV, live, enable_gqa=True)[:, :, 0]

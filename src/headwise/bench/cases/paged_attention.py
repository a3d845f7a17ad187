"""One query of each of eight rows, whose keys lie in pages: lengths of 500 to 8,000, and a beginning that all share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cache import PagedSequence, PagePool
from ...kernels import attend_paged
from ...presets import design
from ..benchmark_case import LIMIT, BenchmarkCase, RequiredWork, SpeedTarget, TimedCall

TITLE = "One query per row over pages, 32 heads on 8 key heads of 128"
HISTORY = (
    "As for caches without pages, whose kernel it is: products and memory add up and do not overlap. See "
    "log/2026-11-22-fast-decode.md."
)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
ROW_LENGTHS = (500, 1_571, 2_643, 3_714, 4_786, 5_857, 6_929, 8_000)
SHARED_PREFIX, OWN_TOKENS = (
    4_096,
    256,
)  # tokens that all of eight rows begin with, and those behind them that are each row's own
BENCHMARK_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
READ_LIMIT_TARGETS = {"fp32": 0.8, "bf16": 0.7}  # of what the machine can read
GATHERED_SDPA, PADDED_SDPA, UNSHARED = (
    "gathered, then SDPA enable_gqa",
    "padded rows, SDPA enable_gqa",
    "the same, nothing shared",
)


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Rows of many lengths in pages of 16 and 64 tokens, and rows that begin alike."""
    for page in (16,) if quick else (16, 64):
        for name in BENCHMARK_DTYPES:
            yield _ragged_pages_case(page, name)
    for name in BENCHMARK_DTYPES:
        yield _shared_prefix_case(name)


def _ragged_pages_case(page: int, name: str) -> BenchmarkCase:
    rows = _PagedRows(ROW_LENGTHS, page, BENCHMARK_DTYPES[name])
    return BenchmarkCase(
        f"8 rows of 500 to 8,000 tokens in pages of {page}, {name}",
        rows.headwise_kernel,
        {GATHERED_SDPA: rows.gathered_sdpa(), PADDED_SDPA: rows.padded_sdpa()},
        (SpeedTarget(LIMIT, READ_LIMIT_TARGETS[name]), SpeedTarget(GATHERED_SDPA, 3.0)),
        RequiredWork(bytes_read=rows.bytes_read),
        tolerance=1e-3 if name == "fp32" else 2e-2,
        history=HISTORY,
    )


def _shared_prefix_case(name: str) -> BenchmarkCase:
    lengths = (SHARED_PREFIX + OWN_TOKENS,) * len(ROW_LENGTHS)
    rows = _PagedRows(lengths, 16, BENCHMARK_DTYPES[name], shared=SHARED_PREFIX)
    apart = _PagedRows(lengths, 16, BENCHMARK_DTYPES[name])
    apart.copy_from(rows)
    return BenchmarkCase(
        f"8 rows that share {SHARED_PREFIX:,} of {SHARED_PREFIX + OWN_TOKENS:,} tokens in pages of 16, {name}",
        rows.headwise_kernel,
        {UNSHARED: apart.headwise_kernel, GATHERED_SDPA: rows.gathered_sdpa()},
        required_work=RequiredWork(rows.bytes_read, rows.flops, BENCHMARK_DTYPES[name]),
        tolerance=1e-3 if name == "fp32" else 2e-2,
        notes={
            "bytes": f"{rows.bytes_read:,}, shared pages being read once; {apart.bytes_read:,} if each row had its own"
        },
    )


class _PagedRows:
    """Rows in pages that were handed out in turns, as to rows that grow together; one query of each."""

    def __init__(self, lengths: Sequence[int], page: int, dtype: torch.dtype, shared: int = 0) -> None:
        torch.manual_seed(0)
        spec = design(model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS, kv=NUM_KV_HEADS, pattern="causal()")
        count = sum(-(-length // page) for length in lengths) - (len(lengths) - 1) * (shared // page)
        self.pool, self.lengths = PagePool([spec], pages=count, page=page, dtype=dtype), lengths
        self.pool.numbers.copy_(torch.randn(1, self.pool.numbers.shape[1]).expand_as(self.pool.numbers))
        self.pool.numbers.mul_(torch.rand(len(self.pool.numbers), 1))
        self.rows = self._start_shared(shared)
        while any(row.length < end - 1 for row, end in zip(self.rows, lengths, strict=True)):
            self._grow([min(page, end - 1 - row.length) for row, end in zip(self.rows, lengths, strict=True)])
        seats = self.pool.batch_of(self.rows)
        seats.next_positions([1] * len(lengths))
        held = seats.accesses[0].held_pages
        assert held is not None
        self.held, self.told = held, held.spans(True)
        self.q = torch.randn(len(lengths), NUM_HEADS, HEAD_DIM).to(dtype)

    def _start_shared(self, shared: int) -> list[PagedSequence]:
        book = self.pool.book
        first = book.new_sequence()
        if shared:
            book.append_slots([first], [shared])
            first.length = shared
        return [first, *(book.fork(first) for _ in self.lengths[1:])]

    def _grow(self, counts: list[int]) -> None:
        self.pool.book.append_slots(self.rows, counts)
        for row, count in zip(self.rows, counts, strict=True):
            row.length += count

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that are read, each page once."""
        spans = {tuple(span) for span in self._table.flatten(0, 1).tolist()}
        return sum(end - begin for _, begin, end in spans) * 2 * NUM_KV_HEADS * HEAD_DIM * self.q.itemsize

    @property
    def flops(self) -> int:
        """Of both products of every row."""
        return 4 * NUM_HEADS * HEAD_DIM * sum(self.lengths)

    @property
    def _table(self) -> Tensor:
        assert self.told.block_table is not None
        return self.told.block_table.table

    def copy_from(self, other: _PagedRows) -> None:
        """The same numbers as another's rows have."""
        for mine, theirs in zip(self.rows, other.rows, strict=True):
            to, of = ([*row.tables[0].values()] for row in (mine, theirs))
            self.pool.numbers[to] = other.pool.numbers[of]
        self.q = other.q

    def headwise_kernel(self) -> Tensor:
        """Read where they lie."""
        views = self.pool.views[0]
        with torch.no_grad():
            return attend_paged(self.q, views["k"], views["v"], self._table, scale=HEAD_DIM**-0.5)[0]

    def gathered_sdpa(self) -> TimedCall:
        """Copied side by side at every step."""
        live = self.held.gathered.sequence.is_real[:, None, None]
        mask = None if live.all() else live

        def run() -> Tensor:
            with torch.no_grad():
                entry = self.pool.gather(0, self.held)
                k, v = (entry[side].transpose(1, 2) for side in "kv")
                return _grouped_sdpa(self.q, k, v, mask)

        return run

    def padded_sdpa(self) -> TimedCall:
        """Side by side from the beginning, each row as long as the longest."""
        live = self.held.gathered.sequence.is_real[:, None, None]
        entry: Any = {name: held.clone() for name, held in self.pool.gather(0, self.held).items()}
        k, v = (entry[side].transpose(1, 2).contiguous() for side in "kv")

        def run() -> Tensor:
            with torch.no_grad():
                return _grouped_sdpa(self.q, k, v, live)

        return run


def _grouped_sdpa(q_BHK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, live: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q_BHK[:, :, None], k_BGSK, v_BGSV, live, enable_gqa=True)[:, :, 0]

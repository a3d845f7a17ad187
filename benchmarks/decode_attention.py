"""Attention of one decode step: one query per row over KV caches of all kinds, contiguous and
paged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.cache import PagedSequence, PagePool
from headwise.attention.presets import design
from headwise.kernels import PagedDecodeOptions, attend_paged

from .harness import (
    LIMIT,
    BenchmarkCase,
    CaseKind,
    RequiredWork,
    SpeedTarget,
    TimedCall,
)

NUM_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
NUM_TOKENS = 8192
MIN_TOTAL_CACHE_BYTES = (
    128 * 2**20
)  # of all KV caches that a case cycles through: 4 times a last-level cache of 32 MB
CacheRead = Callable[..., Tensor]  # attention over the tensors of one cache
RAGGED_LENGTHS = (500, 1000, 1500, 2500, 4000, 5000, 6500, 8000)
PAGE_SIZE = 16
RING_SIZE = 1024


@dataclass(frozen=True)
class _DecodeCaches:
    """KV caches of one shape, read in turn so that none stays in the processor's cache; and one
    query per row.
    """

    q_BHK: Tensor
    kv_pairs: tuple[tuple[Tensor, Tensor], ...]  # k, v [B, S, G, K]
    table: Tensor

    @staticmethod
    def with_lengths(lengths: tuple[int, ...], dtype: torch.dtype) -> _DecodeCaches:
        """Return caches with rows of these lengths, padded to the longest."""
        torch.manual_seed(0)
        shape = (len(lengths), max(lengths), NUM_KV_HEADS, HEAD_DIM)
        copies = -(
            -MIN_TOTAL_CACHE_BYTES
            // (2 * len(lengths) * max(lengths) * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize)
        )
        pairs = [
            (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
            for _ in range(max(copies, 2))
        ]
        table = torch.tensor([[[row, 0, length]] for row, length in enumerate(lengths)])
        return _DecodeCaches(
            torch.randn(len(lengths), NUM_HEADS, HEAD_DIM).to(dtype), tuple(pairs), table
        )

    def required_work(self) -> RequiredWork:
        """Return the bytes of all keys and values of one cache."""
        k, v = self.kv_pairs[0]
        bytes_per_token = (k[0, 0].numel() + v[0, 0].numel()) * k.itemsize
        return RequiredWork(
            bytes_read=int((self.table[..., 2] - self.table[..., 1]).sum()) * bytes_per_token,
            dtype=k.dtype,
        )

    def cycle_caches(self, read: CacheRead) -> TimedCall:
        """Return a call that reads the next cache each time."""
        order = count()
        return lambda: read(*self.kv_pairs[next(order) % len(self.kv_pairs)])

    def headwise_kernel(self, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the kernel of headwise."""
        return attend_paged(
            self.q_BHK, k.transpose(1, 2), v.transpose(1, 2), self.table, scale=HEAD_DIM**-0.5
        )[0]

    def sdpa_gqa(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend with SDPA and enable_gqa."""
        q = self.q_BHK[:, :, None]
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[:, :, 0]

    def sdpa_repeated(self, k: Tensor, v: Tensor) -> Tensor:
        """Attend with SDPA over keys and values that are repeated for every query head."""
        k, v = (t.transpose(1, 2).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for t in (k, v))
        return F.scaled_dot_product_attention(self.q_BHK[:, :, None], k, v)[:, :, 0]

    def sdpa_grouped_rows(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend with SDPA; the query heads of a group are the queries of one key-value head."""
        q = self.q_BHK.unflatten(1, (NUM_KV_HEADS, -1))
        return F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), mask
        ).flatten(1, 2)


def attention_decode_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield 8k tokens in three precisions, rows of different lengths, pages, a ring buffer and a
    latent cache.
    """
    with torch.no_grad():
        yield _full_cache_case(
            "fp32",
            torch.float32,
            (
                SpeedTarget("SDPA, enable_gqa", 3),
                SpeedTarget("repeat-kv + SDPA", 15),
                SpeedTarget(LIMIT, 0.8),
            ),
        )
        yield _full_cache_case(
            "bf16", torch.bfloat16, (SpeedTarget("SDPA, enable_gqa", 10), SpeedTarget(LIMIT, 0.7))
        )
        yield _int8_case()
        yield _ragged_case()
        yield _paged_case()
        yield _ring_case()
        yield _latent_case()


def _without_grad(runs: Mapping[str, TimedCall]) -> dict[str, TimedCall]:
    """Return the runs without gradients."""
    return {name: torch.no_grad()(run) for name, run in runs.items()}


def _decode_case(
    name: str,
    caches: _DecodeCaches,
    peers: Mapping[str, CacheRead],
    targets: tuple[SpeedTarget, ...] = (),
    low_precision: bool = False,
) -> BenchmarkCase:
    runs = _without_grad(
        {"ours": caches.cycle_caches(caches.headwise_kernel)}
        | {peer: caches.cycle_caches(run) for peer, run in peers.items()}
    )
    return BenchmarkCase(
        name,
        runs.pop("ours"),
        runs,
        targets,
        caches.required_work(),
        3e-2 if low_precision else 1e-3,
    )


def _full_cache_case(
    name: str, dtype: torch.dtype, targets: tuple[SpeedTarget, ...]
) -> BenchmarkCase:
    caches = _DecodeCaches.with_lengths((NUM_TOKENS,), dtype)
    peers = {
        "SDPA, enable_gqa": caches.sdpa_gqa,
        "repeat-kv + SDPA": caches.sdpa_repeated,
        "SDPA, heads as rows": caches.sdpa_grouped_rows,
    }
    return _decode_case(
        f"decode 8k, {name}", caches, peers, targets, low_precision=dtype == torch.bfloat16
    )


def _int8_case() -> BenchmarkCase:
    """Return the case of an int8 cache; the peer reads bf16, so that results differ by the
    quantisation error.
    """
    caches = _DecodeCaches.with_lengths((NUM_TOKENS,), torch.bfloat16)
    quantized = []
    for pair in caches.kv_pairs * 2:
        scales = [t.float().abs().amax(-1) / 127 for t in pair]
        integers = [
            (t / s[..., None]).round().to(torch.int8) for t, s in zip(pair, scales, strict=True)
        ]
        quantized.append((*integers, *scales))
    order = count()

    def ours() -> Tensor:
        k, v, *scales = (t.transpose(1, 2) for t in quantized[next(order) % len(quantized)])
        return attend_paged(
            caches.q_BHK,
            k,
            v,
            caches.table,
            scale=HEAD_DIM**-0.5,
            options=PagedDecodeOptions(None, None, *scales),
        )[0]

    runs = _without_grad(
        {"ours": ours, "SDPA, enable_gqa (bf16)": caches.cycle_caches(caches.sdpa_gqa)}
    )
    reads = sum(t.nbytes for t in quantized[0])
    return BenchmarkCase(
        "decode 8k, int8",
        runs.pop("ours"),
        runs,
        (),
        RequiredWork(bytes_read=reads, dtype=torch.bfloat16),
        tolerance=0.1,
    )


def _ragged_case() -> BenchmarkCase:
    caches = _DecodeCaches.with_lengths(RAGGED_LENGTHS, torch.float32)
    is_real = torch.arange(max(RAGGED_LENGTHS)) < torch.tensor(RAGGED_LENGTHS)[:, None]
    mask = is_real[:, None, None]
    return _decode_case(
        "decode, 8 rows of 500 to 8,000",
        caches,
        {
            "padded SDPA, enable_gqa": lambda k, v: caches.sdpa_gqa(k, v, mask),
            "padded SDPA, heads as rows": lambda k, v: caches.sdpa_grouped_rows(k, v, mask),
        },
    )


def _paged_case() -> BenchmarkCase:
    """Return the case of a cache in shuffled pages; the peer copies them into one tensor first."""
    caches = _DecodeCaches.with_lengths((NUM_TOKENS,), torch.float32)
    order = torch.randperm(NUM_TOKENS // PAGE_SIZE)
    pools = []
    for pair in caches.kv_pairs:
        pages = [
            t[0].unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).contiguous() for t in pair
        ]  # [P, G, page, K]
        pools.append(tuple(torch.empty_like(t).index_copy_(0, order, t) for t in pages))
    spans = torch.stack([order, torch.zeros_like(order), torch.full_like(order, PAGE_SIZE)], -1)[
        None
    ]
    caches = _DecodeCaches(caches.q_BHK, tuple(pools), caches.table)

    def gather_and_attend(k: Tensor, v: Tensor) -> Tensor:
        k, v = (t[order].transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
        return F.scaled_dot_product_attention(caches.q_BHK[:, :, None], k, v, enable_gqa=True)[
            :, :, 0
        ]

    runs = {
        "ours": lambda k, v: attend_paged(caches.q_BHK, k, v, spans, scale=HEAD_DIM**-0.5)[0],
        "gather + SDPA": gather_and_attend,
    }
    runs = _without_grad({name: caches.cycle_caches(run) for name, run in runs.items()})
    reads = 2 * NUM_TOKENS * NUM_KV_HEADS * HEAD_DIM * 4
    return BenchmarkCase(
        "decode 8k, pages of 16", runs.pop("ours"), runs, (), RequiredWork(bytes_read=reads)
    )


def _ring_case() -> BenchmarkCase:
    caches = _DecodeCaches.with_lengths((RING_SIZE,) * 8, torch.float32)
    peers = {"SDPA, enable_gqa": caches.sdpa_gqa, "SDPA, heads as rows": caches.sdpa_grouped_rows}
    return _decode_case(f"decode, 8 rows in ring buffers of {RING_SIZE:,}", caches, peers)


def _latent_case() -> BenchmarkCase:
    """Return the case of MLA: 16 heads over a latent of 512 + 64 numbers; the first 512 are the
    value (2405.04434).
    """
    torch.manual_seed(0)
    rank = 512
    rope = 64
    heads = 16
    pairs = tuple(
        (k := torch.randn(1, NUM_TOKENS, 1, rank + rope), k[..., :rank]) for _ in range(8)
    )
    caches = _DecodeCaches(
        torch.randn(1, heads, rank + rope), pairs, torch.tensor([[[0, 0, NUM_TOKENS]]])
    )

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return attend_paged(
            caches.q_BHK, k.transpose(1, 2), v.transpose(1, 2), caches.table, scale=192**-0.5
        )[0]

    def sdpa(k: Tensor, v: Tensor) -> Tensor:
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return F.scaled_dot_product_attention(caches.q_BHK[:, None], k, v, scale=192**-0.5)[:, 0]

    runs = _without_grad(
        {
            name: caches.cycle_caches(run)
            for name, run in {"ours": ours, "SDPA, heads as rows": sdpa}.items()
        }
    )
    required = RequiredWork(
        bytes_read=NUM_TOKENS * (rank + rope) * 4, flops=2 * heads * NUM_TOKENS * (2 * rank + rope)
    )
    return BenchmarkCase("decode 8k, latent of 512 + 64", runs.pop("ours"), runs, (), required)


NUM_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
ROW_LENGTHS = (500, 1_571, 2_643, 3_714, 4_786, 5_857, 6_929, 8_000)
SHARED_PREFIX, OWN_TOKENS = (
    4_096,
    256,
)  # tokens of the prefix that all eight rows share, and of each row after it
BENCHMARK_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
READ_LIMIT_TARGETS = {"fp32": 0.8, "bf16": 0.7}  # shares of the memory bandwidth
GATHERED_SDPA = "gathered, then SDPA enable_gqa"
PADDED_SDPA = "padded rows, SDPA enable_gqa"
UNSHARED = "headwise, prefix not shared"


def paged_attention_cases(quick: bool) -> Iterator[BenchmarkCase]:
    """Yield rows of different lengths in pages of 16 and 64 tokens, and rows
    with a shared prefix.
    """
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
    )


def _shared_prefix_case(name: str) -> BenchmarkCase:
    lengths = (SHARED_PREFIX + OWN_TOKENS,) * len(ROW_LENGTHS)
    rows = _PagedRows(lengths, 16, BENCHMARK_DTYPES[name], shared=SHARED_PREFIX)
    unshared = _PagedRows(lengths, 16, BENCHMARK_DTYPES[name])
    unshared.copy_from(rows)
    return BenchmarkCase(
        f"8 rows that share {SHARED_PREFIX:,} of {SHARED_PREFIX + OWN_TOKENS:,} tokens in pages "
        f"of 16, {name}",
        rows.headwise_kernel,
        {UNSHARED: unshared.headwise_kernel, GATHERED_SDPA: rows.gathered_sdpa()},
        required_work=RequiredWork(rows.bytes_read, rows.flops, BENCHMARK_DTYPES[name]),
        tolerance=1e-3 if name == "fp32" else 2e-2,
        notes={
            "bytes": (
                f"{rows.bytes_read:,} with shared pages read once; {unshared.bytes_read:,} "
                "without sharing"
            )
        },
    )


class _PagedRows:
    """Rows of a paged cache whose pages alternate, as if all rows had grown together; and one query
    per row.
    """

    def __init__(
        self, lengths: Sequence[int], page: int, dtype: torch.dtype, shared: int = 0
    ) -> None:
        torch.manual_seed(0)
        spec = design(
            model=NUM_HEADS * HEAD_DIM, heads=NUM_HEADS, kv=NUM_KV_HEADS, pattern="causal()"
        )
        count = sum(-(-length // page) for length in lengths) - (len(lengths) - 1) * (
            shared // page
        )
        self.pool = PagePool([spec], pages=count, page=page, dtype=dtype)
        self.lengths = lengths
        self.pool.storage.copy_(
            torch.randn(1, self.pool.storage.shape[1]).expand_as(self.pool.storage)
        )
        self.pool.storage.mul_(torch.rand(len(self.pool.storage), 1))
        self.rows = self._start_shared(shared)
        while any(row.length < end - 1 for row, end in zip(self.rows, lengths, strict=True)):
            self._grow(
                [
                    min(page, end - 1 - row.length)
                    for row, end in zip(self.rows, lengths, strict=True)
                ]
            )
        batch = self.pool.batch_of(self.rows)
        batch.next_positions([1] * len(lengths))
        self.pages = batch.accesses[0]
        self.spans = self.pages.spans(True)
        self.q = torch.randn(len(lengths), NUM_HEADS, HEAD_DIM).to(dtype)

    def _start_shared(self, shared: int) -> list[PagedSequence]:
        block_tables = self.pool.block_tables
        first = block_tables.new_sequence()
        if shared:
            block_tables.append_slots([first], [shared])
            first.length = shared
        return [first, *(block_tables.fork(first) for _ in self.lengths[1:])]

    def _grow(self, counts: list[int]) -> None:
        self.pool.block_tables.append_slots(self.rows, counts)
        for row, added in zip(self.rows, counts, strict=True):
            row.length += added

    @property
    def bytes_read(self) -> int:
        """Bytes of all keys and values, with each page counted once."""
        spans = {tuple(span) for span in self._table.flatten(0, 1).tolist()}
        return (
            sum(end - begin for _, begin, end in spans)
            * 2
            * NUM_KV_HEADS
            * HEAD_DIM
            * self.q.itemsize
        )

    @property
    def flops(self) -> int:
        """FLOPs of both matrix products of all rows."""
        return 4 * NUM_HEADS * HEAD_DIM * sum(self.lengths)

    @property
    def _table(self) -> Tensor:
        assert self.spans.block_table is not None
        return self.spans.block_table.table

    def copy_from(self, other: _PagedRows) -> None:
        """Copy queries, keys and values from `other`."""
        for mine, theirs in zip(self.rows, other.rows, strict=True):
            to, of = ([*row.tables[0].values()] for row in (mine, theirs))
            self.pool.storage[to] = other.pool.storage[of]
        self.q = other.q

    def headwise_kernel(self) -> Tensor:
        """Attend over the pages in place."""
        views = self.pool.views[0]
        with torch.no_grad():
            return attend_paged(self.q, views["k"], views["v"], self._table, scale=HEAD_DIM**-0.5)[
                0
            ]

    def gathered_sdpa(self) -> TimedCall:
        """Return a call that copies the pages of each row into one tensor, then attends."""
        is_real = self.pages.gathered[2].is_real[:, None, None]
        mask = None if is_real.all() else is_real

        def run() -> Tensor:
            with torch.no_grad():
                entry = self.pool.gather(0, self.pages)
                k, v = (entry[side].transpose(1, 2) for side in "kv")
                return _grouped_sdpa(self.q, k, v, mask)

        return run

    def padded_sdpa(self) -> TimedCall:
        """Return a call that attends over rows padded to the longest, copied beforehand."""
        is_real = self.pages.gathered[2].is_real[:, None, None]
        entry: Any = {
            name: tensor.clone() for name, tensor in self.pool.gather(0, self.pages).items()
        }
        k, v = (entry[side].transpose(1, 2).contiguous() for side in "kv")

        def run() -> Tensor:
            with torch.no_grad():
                return _grouped_sdpa(self.q, k, v, is_real)

        return run


def _grouped_sdpa(q_BHK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, is_real: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q_BHK[:, :, None], k_BGSK, v_BGSV, is_real, enable_gqa=True
    )[:, :, 0]


KINDS = {
    "attention_decode": CaseKind("Decoding: one query per row", attention_decode_cases),
    "paged_attention": CaseKind(
        "One query per row over pages, 32 heads on 8 key heads of 128", paged_attention_cases
    ),
}

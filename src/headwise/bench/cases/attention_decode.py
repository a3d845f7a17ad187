"""One token more: a query of every head over what is remembered, in the forms in which that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import PagedDecodeOptions, attend_paged
from ..benchmark_case import LIMIT, BenchmarkCase, RequiredWork, SpeedTarget, TimedCall

TITLE = "Decoding: one query per row"
HISTORY = (
    "Keys and values four at a time in the order of memory, asked for 12 KB ahead into the first cache: 59 to 68 % of "
    "the read limit in fp32 and 62 to 64 % in bf16 on two threads where `sum` reads 40 GB/s (before: 63 and 59); every "
    "other distance, cache, order and assignment to threads reads the same or less. Processors drop part of what is "
    "asked for beside products. See log/2026-11-22-fast-decode.md."
)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_TOKENS = 32, 8, 128, 8192
MIN_TOTAL_CACHE_BYTES = (
    128 * 2**20
)  # a case turns over caches that are at least so large together: 4 times a last-level cache of 32 MB
CacheRead = Callable[..., Tensor]  # what it is told of a cache
RAGGED_LENGTHS = (500, 1000, 1500, 2500, 4000, 5000, 6500, 8000)
PAGE_SIZE, RING_SIZE = 16, 1024


@dataclass(frozen=True)
class _DecodeCaches:
    """Caches of one shape, read in turn, so that none is still in the processor's own memory; and one query."""

    q_BHK: Tensor
    caches: tuple[tuple[Tensor, Tensor], ...]  # k, v [B, S, G, K]
    table: Tensor

    @staticmethod
    def with_lengths(lengths: tuple[int, ...], dtype: torch.dtype) -> _DecodeCaches:
        """Rows that hold so many tokens, in slots for the longest."""
        torch.manual_seed(0)
        shape = (len(lengths), max(lengths), NUM_KV_HEADS, HEAD_DIM)
        copies = -(
            -MIN_TOTAL_CACHE_BYTES // (2 * len(lengths) * max(lengths) * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize)
        )
        caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(max(copies, 2))]
        table = torch.tensor([[[row, 0, length]] for row, length in enumerate(lengths)])
        return _DecodeCaches(torch.randn(len(lengths), NUM_HEADS, HEAD_DIM).to(dtype), tuple(caches), table)

    def required_work(self) -> RequiredWork:
        """What is held of every row, read once."""
        k, v = self.caches[0]
        each = (k[0, 0].numel() + v[0, 0].numel()) * k.itemsize
        return RequiredWork(bytes_read=int((self.table[..., 2] - self.table[..., 1]).sum()) * each, dtype=k.dtype)

    def cycle_caches(self, read: CacheRead) -> TimedCall:
        """The same work over one cache after the other."""
        turn = count()
        return lambda: read(*self.caches[next(turn) % len(self.caches)])

    def headwise_kernel(self, k: Tensor, v: Tensor) -> Tensor:
        """The kernel."""
        return attend_paged(self.q_BHK, k.transpose(1, 2), v.transpose(1, 2), self.table, scale=HEAD_DIM**-0.5)[0]

    def sdpa_gqa(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """SDPA told that heads share keys."""
        told = self.q_BHK[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(*told, mask, enable_gqa=True)[:, :, 0]

    def sdpa_repeated(self, k: Tensor, v: Tensor) -> Tensor:
        """SDPA over keys repeated for every head."""
        k, v = (t.transpose(1, 2).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for t in (k, v))
        return F.scaled_dot_product_attention(self.q_BHK[:, :, None], k, v)[:, :, 0]

    def sdpa_grouped_rows(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """SDPA with the heads that share a key as rows of one product."""
        q = self.q_BHK.unflatten(1, (NUM_KV_HEADS, -1))
        return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask).flatten(1, 2)


def cases(quick: bool) -> Iterator[BenchmarkCase]:
    """8k tokens in three precisions; rows of different lengths; pages; a ring; a latent."""
    with torch.no_grad():
        yield _full_cache_case(
            "fp32",
            torch.float32,
            (SpeedTarget("SDPA, enable_gqa", 3), SpeedTarget("repeat-kv + SDPA", 15), SpeedTarget(LIMIT, 0.8)),
        )
        yield _full_cache_case("bf16", torch.bfloat16, (SpeedTarget("SDPA, enable_gqa", 10), SpeedTarget(LIMIT, 0.7)))
        yield _int8_case()
        yield _ragged_case()
        yield _paged_case()
        yield _ring_case()
        yield _latent_case()


def _without_grad(runs: Mapping[str, TimedCall]) -> dict[str, TimedCall]:
    """Without gradients, whatever the caller does."""
    quietly = torch.no_grad()
    return {name: quietly(run) for name, run in runs.items()}


def _decode_case(
    name: str,
    past: _DecodeCaches,
    peers: Mapping[str, CacheRead],
    aims: tuple[SpeedTarget, ...] = (),
    loose: bool = False,
) -> BenchmarkCase:
    runs = _without_grad(
        {"ours": past.cycle_caches(past.headwise_kernel)}
        | {peer: past.cycle_caches(run) for peer, run in peers.items()}
    )
    return BenchmarkCase(
        name, runs.pop("ours"), runs, aims, past.required_work(), 3e-2 if loose else 1e-3, history=HISTORY
    )


def _full_cache_case(name: str, dtype: torch.dtype, aims: tuple[SpeedTarget, ...]) -> BenchmarkCase:
    past = _DecodeCaches.with_lengths((NUM_TOKENS,), dtype)
    peers = {
        "SDPA, enable_gqa": past.sdpa_gqa,
        "repeat-kv + SDPA": past.sdpa_repeated,
        "SDPA, heads as rows": past.sdpa_grouped_rows,
    }
    return _decode_case(f"decode 8k, {name}", past, peers, aims, loose=dtype == torch.bfloat16)


def _int8_case() -> BenchmarkCase:
    """A cache of 8 bits, beside bf16 as torch reads it; what they give differs by the rounding."""
    past = _DecodeCaches.with_lengths((NUM_TOKENS,), torch.bfloat16)
    kept = []
    for pair in past.caches * 2:
        scales = [t.float().abs().amax(-1) / 127 for t in pair]
        small = [(t / s[..., None]).round().to(torch.int8) for t, s in zip(pair, scales, strict=True)]
        kept.append((*small, *scales))
    turn = count()

    def ours() -> Tensor:
        k, v, *scales = (t.transpose(1, 2) for t in kept[next(turn) % len(kept)])
        return attend_paged(
            past.q_BHK, k, v, past.table, scale=HEAD_DIM**-0.5, options=PagedDecodeOptions(None, None, *scales)
        )[0]

    runs = _without_grad({"ours": ours, "SDPA, enable_gqa (bf16)": past.cycle_caches(past.sdpa_gqa)})
    reads = sum(t.nbytes for t in kept[0])
    return BenchmarkCase(
        "decode 8k, int8",
        runs.pop("ours"),
        runs,
        (),
        RequiredWork(bytes_read=reads, dtype=torch.bfloat16),
        tolerance=0.1,
    )


def _ragged_case() -> BenchmarkCase:
    past = _DecodeCaches.with_lengths(RAGGED_LENGTHS, torch.float32)
    live = torch.arange(max(RAGGED_LENGTHS)) < torch.tensor(RAGGED_LENGTHS)[:, None]
    mask = live[:, None, None]
    return _decode_case(
        "decode, 8 rows of 500 to 8,000",
        past,
        {
            "padded SDPA, enable_gqa": lambda k, v: past.sdpa_gqa(k, v, mask),
            "padded SDPA, heads as rows": lambda k, v: past.sdpa_grouped_rows(k, v, mask),
        },
    )


def _paged_case() -> BenchmarkCase:
    """The same rows in shuffled pages; peers gather them first."""
    past = _DecodeCaches.with_lengths((NUM_TOKENS,), torch.float32)
    order = torch.randperm(NUM_TOKENS // PAGE_SIZE)
    pools = []
    for pair in past.caches:
        laid = [t[0].unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).contiguous() for t in pair]  # [P, G, page, K]
        pools.append(tuple(torch.empty_like(t).index_copy_(0, order, t) for t in laid))
    spans = torch.stack([order, torch.zeros_like(order), torch.full_like(order, PAGE_SIZE)], -1)[None]
    past = _DecodeCaches(past.q_BHK, tuple(pools), past.table)

    def gathered(k: Tensor, v: Tensor) -> Tensor:
        k, v = (t[order].transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
        return F.scaled_dot_product_attention(past.q_BHK[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    runs = {
        "ours": lambda k, v: attend_paged(past.q_BHK, k, v, spans, scale=HEAD_DIM**-0.5)[0],
        "gather + SDPA": gathered,
    }
    runs = _without_grad({name: past.cycle_caches(run) for name, run in runs.items()})
    reads = 2 * NUM_TOKENS * NUM_KV_HEADS * HEAD_DIM * 4
    return BenchmarkCase("decode 8k, pages of 16", runs.pop("ours"), runs, (), RequiredWork(bytes_read=reads))


def _ring_case() -> BenchmarkCase:
    past = _DecodeCaches.with_lengths((RING_SIZE,) * 8, torch.float32)
    peers = {"SDPA, enable_gqa": past.sdpa_gqa, "SDPA, heads as rows": past.sdpa_grouped_rows}
    return _decode_case(f"decode, 8 rows in rings of {RING_SIZE:,}", past, peers)


def _latent_case() -> BenchmarkCase:
    """16 heads over one latent of 512 + 64 numbers, whose first 512 are the value as well (2405.04434)."""
    torch.manual_seed(0)
    rank, rope, heads = 512, 64, 16
    caches = tuple((k := torch.randn(1, NUM_TOKENS, 1, rank + rope), k[..., :rank]) for _ in range(8))
    past = _DecodeCaches(torch.randn(1, heads, rank + rope), caches, torch.tensor([[[0, 0, NUM_TOKENS]]]))

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return attend_paged(past.q_BHK, k.transpose(1, 2), v.transpose(1, 2), past.table, scale=192**-0.5)[0]

    def rows(k: Tensor, v: Tensor) -> Tensor:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(past.q_BHK[:, None], k, v, scale=192**-0.5)[:, 0]

    runs = _without_grad(
        {name: past.cycle_caches(run) for name, run in {"ours": ours, "SDPA, heads as rows": rows}.items()}
    )
    need = RequiredWork(bytes_read=NUM_TOKENS * (rank + rope) * 4, flops=2 * heads * NUM_TOKENS * (2 * rank + rope))
    return BenchmarkCase("decode 8k, latent of 512 + 64", runs.pop("ours"), runs, (), need)

"""One token more: a query of every head over what is remembered, in the forms in which that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import Beside, decode
from ..case import LIMIT, Aim, Case, Need, Run

TITLE = "Decoding: one query per row"
TRIED = (
    "Keys and values four at a time in the order of memory, asked for 12 KB ahead into the first cache: 59 to 68 % of "
    "the read limit in fp32 and 62 to 64 % in bf16 on two threads where `sum` reads 40 GB/s (before: 63 and 59); every "
    "other distance, cache, order and assignment to threads reads the same or less. Processors drop part of what is "
    "asked for beside products. See log/2026-11-22-fast-decode.md."
)
HEADS, GROUPS, DIM, TOKENS = 32, 8, 128, 8192
BYTES = 128 * 2**20  # a case turns over caches that are at least so large together: 4 times a last-level cache of 32 MB
Read = Callable[..., Tensor]  # what it is told of a cache
RAGGED = (500, 1000, 1500, 2500, 4000, 5000, 6500, 8000)
PAGE, RING = 16, 1024


@dataclass(frozen=True)
class _Past:
    """Caches of one shape, read in turn, so that none is still in the processor's own memory; and one query."""

    q_BHK: Tensor
    caches: tuple[tuple[Tensor, Tensor], ...]  # k, v [B, S, G, K]
    table: Tensor

    @staticmethod
    def of(lengths: tuple[int, ...], dtype: torch.dtype) -> _Past:
        """Rows that hold so many tokens, in slots for the longest."""
        torch.manual_seed(0)
        shape = (len(lengths), max(lengths), GROUPS, DIM)
        copies = -(-BYTES // (2 * len(lengths) * max(lengths) * GROUPS * DIM * dtype.itemsize))
        caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(max(copies, 2))]
        table = torch.tensor([[[row, 0, length]] for row, length in enumerate(lengths)])
        return _Past(torch.randn(len(lengths), HEADS, DIM).to(dtype), tuple(caches), table)

    def need(self) -> Need:
        """What is held of every row, read once."""
        k, v = self.caches[0]
        each = (k[0, 0].numel() + v[0, 0].numel()) * k.itemsize
        return Need(reads=int((self.table[..., 2] - self.table[..., 1]).sum()) * each, dtype=k.dtype)

    def turning(self, read: Read) -> Run:
        """The same work over one cache after the other."""
        turn = count()
        return lambda: read(*self.caches[next(turn) % len(self.caches)])

    def ours(self, k: Tensor, v: Tensor) -> Tensor:
        """The kernel."""
        return decode(self.q_BHK, k.transpose(1, 2), v.transpose(1, 2), self.table, scale=DIM**-0.5)[0]

    def shared(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """SDPA told that heads share keys."""
        told = self.q_BHK[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(*told, mask, enable_gqa=True)[:, :, 0]

    def repeated(self, k: Tensor, v: Tensor) -> Tensor:
        """SDPA over keys repeated for every head."""
        k, v = (t.transpose(1, 2).repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        return F.scaled_dot_product_attention(self.q_BHK[:, :, None], k, v)[:, :, 0]

    def rows(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """SDPA with the heads that share a key as rows of one product."""
        q = self.q_BHK.unflatten(1, (GROUPS, -1))
        return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask).flatten(1, 2)


def cases(quick: bool) -> Iterator[Case]:
    """8k tokens in three precisions; rows of different lengths; pages; a ring; a latent."""
    with torch.no_grad():
        yield _whole("fp32", torch.float32, (Aim("SDPA, enable_gqa", 3), Aim("repeat-kv + SDPA", 15), Aim(LIMIT, 0.8)))
        yield _whole("bf16", torch.bfloat16, (Aim("SDPA, enable_gqa", 10), Aim(LIMIT, 0.7)))
        yield _eight()
        yield _ragged()
        yield _paged()
        yield _ring()
        yield _latent()


def _quiet(runs: Mapping[str, Run]) -> dict[str, Run]:
    """Without gradients, whatever the caller does."""
    quietly = torch.no_grad()
    return {name: quietly(run) for name, run in runs.items()}


def _case(name: str, past: _Past, peers: Mapping[str, Read], aims: tuple[Aim, ...] = (), loose: bool = False) -> Case:
    runs = _quiet({"ours": past.turning(past.ours)} | {peer: past.turning(run) for peer, run in peers.items()})
    return Case(name, runs.pop("ours"), runs, aims, past.need(), 3e-2 if loose else 1e-3, tried=TRIED)


def _whole(name: str, dtype: torch.dtype, aims: tuple[Aim, ...]) -> Case:
    past = _Past.of((TOKENS,), dtype)
    peers = {"SDPA, enable_gqa": past.shared, "repeat-kv + SDPA": past.repeated, "SDPA, heads as rows": past.rows}
    return _case(f"decode 8k, {name}", past, peers, aims, loose=dtype == torch.bfloat16)


def _eight() -> Case:
    """A cache of 8 bits, beside bf16 as torch reads it; what they give differs by the rounding."""
    past = _Past.of((TOKENS,), torch.bfloat16)
    kept = []
    for pair in past.caches * 2:
        scales = [t.float().abs().amax(-1) / 127 for t in pair]
        small = [(t / s[..., None]).round().to(torch.int8) for t, s in zip(pair, scales, strict=True)]
        kept.append((*small, *scales))
    turn = count()

    def ours() -> Tensor:
        k, v, *scales = (t.transpose(1, 2) for t in kept[next(turn) % len(kept)])
        return decode(past.q_BHK, k, v, past.table, scale=DIM**-0.5, beside=Beside(None, None, *scales))[0]

    runs = _quiet({"ours": ours, "SDPA, enable_gqa (bf16)": past.turning(past.shared)})
    reads = sum(t.nbytes for t in kept[0])
    return Case("decode 8k, int8", runs.pop("ours"), runs, (), Need(reads=reads, dtype=torch.bfloat16), tolerance=0.1)


def _ragged() -> Case:
    past = _Past.of(RAGGED, torch.float32)
    live = torch.arange(max(RAGGED)) < torch.tensor(RAGGED)[:, None]
    mask = live[:, None, None]
    return _case("decode, 8 rows of 500 to 8,000", past, {
        "padded SDPA, enable_gqa": lambda k, v: past.shared(k, v, mask),
        "padded SDPA, heads as rows": lambda k, v: past.rows(k, v, mask),
    })  # fmt: skip


def _paged() -> Case:
    """The same rows in shuffled pages; peers gather them first."""
    past = _Past.of((TOKENS,), torch.float32)
    order = torch.randperm(TOKENS // PAGE)
    pools = []
    for pair in past.caches:
        laid = [t[0].unflatten(0, (-1, PAGE)).transpose(1, 2).contiguous() for t in pair]  # [P, G, page, K]
        pools.append(tuple(torch.empty_like(t).index_copy_(0, order, t) for t in laid))
    spans = torch.stack([order, torch.zeros_like(order), torch.full_like(order, PAGE)], -1)[None]
    past = _Past(past.q_BHK, tuple(pools), past.table)

    def gathered(k: Tensor, v: Tensor) -> Tensor:
        k, v = (t[order].transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
        return F.scaled_dot_product_attention(past.q_BHK[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    runs = {"ours": lambda k, v: decode(past.q_BHK, k, v, spans, scale=DIM**-0.5)[0], "gather + SDPA": gathered}
    runs = _quiet({name: past.turning(run) for name, run in runs.items()})
    reads = 2 * TOKENS * GROUPS * DIM * 4
    return Case("decode 8k, pages of 16", runs.pop("ours"), runs, (), Need(reads=reads))


def _ring() -> Case:
    past = _Past.of((RING,) * 8, torch.float32)
    peers = {"SDPA, enable_gqa": past.shared, "SDPA, heads as rows": past.rows}
    return _case(f"decode, 8 rows in rings of {RING:,}", past, peers)


def _latent() -> Case:
    """16 heads over one latent of 512 + 64 numbers, whose first 512 are the value as well (2405.04434)."""
    torch.manual_seed(0)
    rank, rope, heads = 512, 64, 16
    caches = tuple((k := torch.randn(1, TOKENS, 1, rank + rope), k[..., :rank]) for _ in range(8))
    past = _Past(torch.randn(1, heads, rank + rope), caches, torch.tensor([[[0, 0, TOKENS]]]))

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return decode(past.q_BHK, k.transpose(1, 2), v.transpose(1, 2), past.table, scale=192**-0.5)[0]

    def rows(k: Tensor, v: Tensor) -> Tensor:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(past.q_BHK[:, None], k, v, scale=192**-0.5)[:, 0]

    runs = _quiet({name: past.turning(run) for name, run in {"ours": ours, "SDPA, heads as rows": rows}.items()})
    need = Need(reads=TOKENS * (rank + rope) * 4, flops=2 * heads * TOKENS * (2 * rank + rope))
    return Case("decode 8k, latent of 512 + 64", runs.pop("ours"), runs, (), need)

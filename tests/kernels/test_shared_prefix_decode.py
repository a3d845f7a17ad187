"""Decode over shared prefixes: each row has the bits it has alone, and each key is read once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.attention.cache import PagePool
from headwise.kernels import PagedDecodeOptions, attend_paged, attend_paged_reference
from headwise.kernels.paged_decode import (
    KV_BLOCK_SIZE,
    KV_SPLIT_SIZE,
    MAX_ROWS_TOGETHER,
    SCHEDULE_KERNELS,
    PagedDecodeArgs,
    num_kv_splits,
    plan_size,
)
from headwise.kernels.split_kv_schedule import PLAN_ENTRY_FIELDS
from support.layer_cases import check_close
from support.paged_layers import (
    MODEL,
    SPECS,
    build_layer,
    decode_step,
    last_output_in_one_pass,
    make_pool,
    prefilled_cache,
    reference_decode,
)

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int8]
FEW = settings(max_examples=max(1, settings().max_examples // 4), deadline=None)


@st.composite
def trees(draw):
    """Spans of rows in pages of some size: each goes on from the beginning of one before it, or of
    none.
    """
    page = draw(st.sampled_from([1, 3, 7, 16, 19, 64]))
    pool = iter(
        torch.randperm(
            4000, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
        ).tolist()
    )
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from([[], *rows]))
        keep = parent[: draw(st.integers(0, len(parent)))]
        begin = draw(st.integers(0, page - 1)) if not keep else 0
        end = begin + draw(st.one_of(st.integers(0, 9), st.integers(0, 300)))
        own = [
            (next(pool), begin if n == 0 else 0, min(page, end - n)) for n in range(0, end, page)
        ]
        rows.append([*keep, *own])
    rows = draw(st.permutations(rows))
    most = max(map(len, rows))
    padded = [[*row, *[(next(pool), 0, 0)] * (most - len(row))] for row in rows]
    table = torch.tensor(padded, dtype=torch.int64).view(len(rows), most, 3)
    # no more pages than there are, as shuffled as before
    table[..., 0] = table[..., 0].unique(return_inverse=True)[1]
    return page, table


def keys_of_row(table: torch.Tensor, row: int) -> list[tuple[int, int, int]]:
    """The keys of one row: page, slot and column."""
    each = enumerate(table[row].tolist())
    return [(page, slot, n) for n, (page, begin, end) in each for slot in range(begin, end)]


def planned(table: torch.Tensor, page: int, threads: int = 1) -> list[tuple[tuple[int, ...], int]]:
    """The jobs that a table makes: which rows read how many keys."""
    batch, count, _ = table.shape
    most = batch * num_kv_splits(count * page)
    notes = torch.full((plan_size(batch, most),), -(10**6))
    args = PagedDecodeArgs.make(
        num_items=threads,
        max_splits=most,
        spans=table,
        plan=notes,
        batch=batch,
        num_spans=count,
        num_pages=2**40,
        page_size=page,
    )
    SCHEDULE_KERNELS.run_kernel("plan", None, args)
    listed = notes.tolist()
    order = (args.row_order - args.plan) // 8
    row = listed[order : order + 3 * batch : 3]
    starts = range(0, args.num_items * PLAN_ENTRY_FIELDS, PLAN_ENTRY_FIELDS)
    return [(tuple(row[listed[n] : listed[n] + listed[n + 1]]), listed[n + 4]) for n in starts]


def numbers(
    table: torch.Tensor,
    page: int,
    kind: torch.dtype,
    heads: int,
    groups: int,
    widths: tuple[int, int],
):
    """Queries, pages of keys and of values with scales, if any, and what is added."""
    count = int(table[..., 0].max()) + 1 if table.numel() else 1
    k, v = (torch.randn(count, groups, page, width) for width in widths)
    scales = (None, None)
    if kind == torch.int8:
        scales = torch.rand(count, groups, page) / 100, torch.rand(count, groups, page) / 100
        k, v = ((t * 40).round().clamp(-127, 127) for t in (k, v))
    q = torch.randn(len(table), heads, widths[0]).to(torch.float32 if kind == torch.int8 else kind)
    return q, k.to(kind), v.to(kind), scales


def of_row(beside: PagedDecodeOptions, row: int) -> PagedDecodeOptions:
    return beside if beside.bias is None else beside._replace(bias=beside.bias[row : row + 1])


# --- what is read ---------------------------------------------------------------------------------


@given(
    page_table=trees(),
    seed=st.integers(0, 99),
    kind=st.sampled_from(KINDS),
    beside=st.booleans(),
    heads=st.sampled_from([(6, 2), (8, 2), (5, 1), (3, 3), (10, 2)]),
    widths=st.sampled_from([(16, 21), (37, 32)]),
)
@settings(max_examples=25, deadline=None)
def test_each_row_reads_as_it_does_alone(page_table, seed, kind, beside, heads, widths):
    """Bit for bit; and it is what the definition reads of its list of keys."""
    page, table = page_table
    torch.manual_seed(seed)
    q, k, v, scales = numbers(table, page, kind, heads[0], heads[1], widths)
    more = PagedDecodeOptions(None, None, *scales)
    if beside:
        bias = torch.randn(len(table), heads[0], table.shape[1] * page)
        bias.view(-1)[:: 5 + seed] = -torch.inf
        more = PagedDecodeOptions(bias, torch.randn(heads[0]), *scales, softcap=3.0)
    o, lse = attend_paged(q, k, v, table, scale=0.25, options=more)
    full = [
        t.double() if s is None else t.double() * s[..., None]
        for t, s in zip((k, v), scales, strict=True)
    ]
    close = {"rtol": 1e-2, "atol": 1e-2} if kind == torch.bfloat16 else {"atol": 3e-5, "rtol": 1e-4}
    for row in range(len(table)):
        alone = attend_paged(
            q[row : row + 1], k, v, table[row : row + 1], scale=0.25, options=of_row(more, row)
        )
        assert torch.equal(o[row], alone[0][0])
        assert torch.equal(lse[row], alone[1][0])
        keys = keys_of_row(table, row)
        at = [torch.tensor([key[n] for key in keys], dtype=torch.int64) for n in range(3)]
        own = of_row(more, row)
        if own.bias is not None:
            own = own._replace(
                bias=own.bias[:, :, at[2].new_tensor([n * page + s for _, s, n in keys])]
            )
        expected = reference_decode(
            q[row], full[0][at[0], :, at[1]], full[1][at[0], :, at[1]], 0.25, own
        )
        check_close(o[row], expected[0], **close)


@given(page_table=trees())
@settings(max_examples=25, deadline=None)
def test_no_split_is_read_twice(page_table):
    """A split of keys with all before it is one and the same for every row that has it, and read
    once.
    """
    page, table = page_table
    splits = set()
    for row in range(len(table)):
        keys = keys_of_row(table, row)
        splits |= {
            tuple(keys[: begin + KV_SPLIT_SIZE]) for begin in range(0, len(keys), KV_SPLIT_SIZE)
        }
    jobs = planned(table, page)
    assert sum(count for _, count in jobs) == sum(
        (len(split) - 1) % KV_SPLIT_SIZE + 1 for split in splits
    )
    each = [sum(count for rows, count in jobs if row in rows) for row in range(len(table))]
    assert each == [len(keys_of_row(table, row)) for row in range(len(table))]


def tailed(rows: int, shared: int, own: int, page: int = 16) -> torch.Tensor:
    """A table of rows that begin with the same pages; then each has its own."""
    first = [(n, 0, page) for n in range(shared // page)]
    count = -(-own // page)
    tails = [
        [(len(first) + row * count + n, 0, min(page, own - n * page)) for n in range(count)]
        for row in range(rows)
    ]
    return torch.tensor([[*first, *tail] for tail in tails])


def test_a_plan_reads_whole_pieces_together_and_then_each_row_by_itself():
    jobs = planned(tailed(3, 2 * KV_SPLIT_SIZE, 40), 16)
    assert jobs == [
        ((0, 1, 2), KV_SPLIT_SIZE),
        ((0, 1, 2), KV_SPLIT_SIZE),
        ((0,), 40),
        ((1,), 40),
        ((2,), 40),
    ]


def test_rows_with_longer_shared_prefixes_are_adjacent():
    """Rows of two groups, one of which parts again, in turns."""
    a, b, c, d = (list(range(n, n + 16)) for n in (0, 100, 200, 300))
    rows = [[*a, *b, 400], [*d, 401], [*a, *c, 402], [*a, *b, 403], [*d, 404], [*a, *c, 405]]
    most = max(map(len, rows))
    table = torch.tensor(
        [[(n, 0, 16) for n in row] + [(0, 0, 0)] * (most - len(row)) for row in rows]
    )
    assert [job for job in planned(table, 16) if len(job[0]) > 1] == [
        ((0, 3, 2, 5), 256),
        ((0, 3), 256),
        ((2, 5), 256),
        ((1, 4), 256),
    ]


def test_many_rows_read_in_teams():
    count = 2 * MAX_ROWS_TOGETHER + 3
    table = tailed(count, KV_SPLIT_SIZE, 5)
    shared = [rows for rows, count in planned(table, 16) if count == KV_SPLIT_SIZE]
    assert [len(rows) for rows in shared] == [MAX_ROWS_TOGETHER, 6, 5]
    q, k, v, _ = numbers(table, 16, torch.float32, 6, 2, (16, 16))
    o, _ = attend_paged(q, k, v, table, scale=0.25)
    for row in range(count):
        assert torch.equal(
            o[row], attend_paged(q[row : row + 1], k, v, table[row : row + 1], scale=0.25)[0][0]
        )


def test_teams_are_smaller_where_threads_would_wait():
    """Eight rows of two pieces; and of many, enough for all threads as they are."""
    sizes = {
        threads: {len(rows) for rows, _ in planned(tailed(8, KV_SPLIT_SIZE, 9), 16, threads)}
        for threads in (1, 2, 3, 8)
    }
    assert {threads: max(value) for threads, value in sizes.items()} == {1: 8, 2: 4, 3: 2, 8: 1}
    assert (
        max(len(rows) for rows, _ in planned(tailed(8, 8 * KV_SPLIT_SIZE, 9), 16, 2))
        == MAX_ROWS_TOGETHER
    )


def test_rows_that_diverge_twice_read_their_own_keys():
    """All four read a split together, then two and two, then each its own."""
    spans = [[0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6]]
    table = torch.tensor([[(page, 0, 256) for page in row] for row in spans])
    together = [job for job in planned(table, 256) if len(job[0]) > 1]
    assert together == [((0, 1, 2, 3), 256), ((0, 1), 256), ((2, 3), 256)]
    q, k, v, _ = numbers(table, 256, torch.float64, 4, 2, (16, 16))
    o, _ = attend_paged(q, k, v, table, scale=0.25)
    check_close(o, attend_paged_reference(q, k, v, table, scale=0.25)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_options_belong_to_each_row(kind):
    """Biases, a ceiling, sinks and scales of rows that part within a piece, and
    of several pieces.
    """
    table = torch.cat(
        [
            tailed(3, KV_SPLIT_SIZE + KV_BLOCK_SIZE, 50),
            tailed(1, 2 * KV_BLOCK_SIZE, KV_SPLIT_SIZE + KV_BLOCK_SIZE + 50 - 2 * KV_BLOCK_SIZE),
        ]
    )
    q, k, v, scales = numbers(table, 16, kind, 8, 2, (16, 21))
    bias = torch.randn(4, 8, table.shape[1] * 16)
    beside = PagedDecodeOptions(bias, torch.randn(8), *scales, softcap=2.0)
    o, lse = attend_paged(q, k, v, table, scale=0.3, options=beside)
    expected = attend_paged_reference(q, k, v, table, scale=0.3, options=beside)
    close = {"rtol": 2e-2, "atol": 2e-2} if kind == torch.bfloat16 else {"rtol": 1e-4, "atol": 3e-5}
    check_close(o, expected[0], **close)
    check_close(lse, expected[1], **close)
    for row in range(4):
        assert torch.equal(
            o[row],
            attend_paged(q[[row]], k, v, table[[row]], scale=0.3, options=of_row(beside, row))[0][
                0
            ],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_threads_change_no_bit(dtype):
    table = torch.cat(
        [
            tailed(5, 2 * KV_SPLIT_SIZE + KV_BLOCK_SIZE, 70),
            tailed(5, 2 * KV_SPLIT_SIZE + KV_BLOCK_SIZE, 70),
        ]
    )
    q, k, v, _ = numbers(table, 16, dtype, 6, 2, (32, 32))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(attend_paged(q, k, v, table, scale=0.3)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_scores_and_nan_stay_with_whom_they_belong_to(dtype):
    table = tailed(3, KV_SPLIT_SIZE, 20)
    q, k, v, _ = numbers(table, 16, dtype, 6, 2, (16, 16))
    k[: KV_SPLIT_SIZE // 16] *= 1e4
    q[1] = torch.nan
    v[int(table[2, -1, 0]), 0] = torch.nan
    o, lse = attend_paged(q, k, v, table, scale=1.0)
    assert o[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert o[1].isnan().all()
    assert o[2, :3].isnan().all()
    assert o[2, 3:].isfinite().all()


def test_products_are_counted_for_every_row():
    table = tailed(3, KV_SPLIT_SIZE, 16)
    q, k, v, _ = numbers(table, 16, torch.float32, 6, 2, (16, 24))
    with FlopCounterMode(display=False) as counter:
        attend_paged(q, k, v, table, scale=1.0)
    assert counter.get_total_flops() == 2 * 3 * 6 * (KV_SPLIT_SIZE + 16) * (16 + 24)


# --- caches ---------------------------------------------------------------------------------------


def together(pool: PagePool, cache: hw.KVCache) -> int:
    """How many rows read something together, in the last step of a cache."""
    table = cache._paged_batch.accesses[0]._placed[0]
    jobs = planned(table.contiguous(), pool.paging.groups[0].page)
    return max(len(rows) for rows, _ in jobs)


@pytest.mark.parametrize("name", SPECS)
@FEW
@given(
    first=st.integers(3, 320),
    more=st.lists(st.integers(1, 90), min_size=2, max_size=2),
    page=st.sampled_from([1, 4, 7, 16]),
    order=st.integers(0, 9),
)
def test_rows_that_fork_read_as_one_pass_reads(name, first, more, page, order):
    """One text; three go on from it, the first two of these again as two each, and all write behind
    what they share.
    """
    layer = build_layer(name)
    pool = make_pool(layer.spec, torch.float64, page, 5 * (-(-510 // page) + 2), order)
    texts = [torch.randn(first, MODEL, dtype=torch.float64)]
    cache = prefilled_cache(layer, pool, texts[0][None], [first])
    for parents, count in zip(([0, 0, 0], [0, 0, 2, 1, 1]), more, strict=True):
        cache.select_rows(torch.tensor(parents))
        new = torch.randn(len(parents), count, MODEL, dtype=torch.float64)
        with torch.no_grad():
            layer(new, cache=cache)
        texts = [torch.cat([texts[n], own]) for n, own in zip(parents, new, strict=True)]
        for _ in range(2):
            new = torch.randn(len(parents), 1, MODEL, dtype=torch.float64)
            texts = [torch.cat(value) for value in zip(texts, new, strict=True)]
            ours = decode_step(layer, cache, new, "paged")
            for row, text in zip(ours, texts, strict=True):
                check_close(row, last_output_in_one_pass(layer, text))
    if layer.spec.pattern.retention == (0, None) and first // page * page >= KV_SPLIT_SIZE:
        assert together(pool, cache) == 5


@pytest.mark.parametrize("name", ["grouped", "alibi", "window"])
def test_rows_that_adopt_a_beginning_read_it_together(name):
    """Texts that are known to begin alike, of different lengths behind it."""
    layer = build_layer(name)
    pool = make_pool(layer.spec, torch.float64, 4, 400, 1)
    ids = [n % 11 for n in range(310)]
    x = torch.randn(4, 340, MODEL, dtype=torch.float64)
    x[:, :280] = x[:1, :280]
    rows = [pool.block_tables.new_sequence()]
    cache = pool.caches(pool.batch_of(rows))[0]
    with torch.no_grad():
        layer(x[:1, :280], cache=cache)
    pool.block_tables.publish_prefix(rows[0], ids[:280])
    for own in range(3):
        rows.append(pool.block_tables.new_sequence())
        pool.block_tables.reuse_prefix(
            rows[-1], pool.block_tables.find_prefix(rows[-1], [*ids[:280], 90 + own])
        )
    cache = pool.caches(pool.batch_of(rows))[0]
    lengths = [21, 1, 14, 30]
    at = hw.SequenceInfo.from_batch(x[:, 280:310], lengths=lengths)
    at = hw.SequenceInfo(at.position + 280, at.segment)
    with torch.no_grad():
        layer(x[:, 280:310], cache=cache, sequence=at)
    new = torch.randn(4, 1, MODEL, dtype=torch.float64)
    ours = decode_step(layer, cache, new, "paged")
    for row, length in enumerate(lengths):
        check_close(
            ours[row], last_output_in_one_pass(layer, torch.cat([x[row, : 280 + length], new[row]]))
        )
    assert together(pool, cache) == (4 if name != "window" else 1)

"""The paged cache: no page is leaked or freed twice, and results equal those of any other cache."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import headwise as hw
from attention.cache import cache_streams as streams
from headwise.attention.cache import BlockTables, PageAllocator, PagePool
from headwise.attention.cache.block_table import PageLayout, RetentionGroup
from support import layer_cases as cases

# --- whose page it is -----------------------------------------------------------------------------


def test_a_page_is_given_back_once():
    pages = PageAllocator(2)
    page = pages.allocate()
    pages.release(page)
    with pytest.raises(ValueError, match="given back twice"):
        pages.release(page)


def test_a_page_that_was_found_again_is_not_handed_out():
    pages = PageAllocator(3)
    page = pages.allocate()
    pages.name(page, "one")
    pages.release(page)
    pages.add_reference(page)
    assert (pages.num_allocated, pages.num_free) == (1, 2)
    assert page not in (pages.allocate(), pages.allocate())
    with pytest.raises(hw.CacheFull):  # no page is left that was never used
        pages.allocate()


def test_pages_without_a_name_are_handed_out_first_then_the_longest_free():
    pages = PageAllocator(4)
    one, two, three = (pages.allocate() for _ in range(3))
    pages.name(one, "one")
    pages.name(two, "two")
    for page in (two, three, one):
        pages.release(page)
    assert [pages.allocate() for _ in range(4)] == [three, 3, two, one]
    with pytest.raises(hw.CacheFull, match="all 4 pages are in use"):
        pages.allocate()
    assert pages.find("one") is pages.find("two") is None


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize("retention", [(0, 1), (0, 5), (2, 5), (7, 1), (1, 12), (0, None)])
def test_pages_read_are_those_of_tokens_read(retention: tuple[int, int | None], page: int):
    """Token by token: j is read behind n tokens if j is one of the first, or n - j < last."""
    group = RetentionGroup(*retention, page)
    for n in range(40):
        last = n + 1 if group.last is None else group.last
        read = {j // page for j in range(n) if j < group.first or n - j < last}
        # the next token goes on in a page that is not full
        assert read <= set(group.visible_pages(n)) <= read | {n // page}, n
        for chunk in (1, 3, 8):
            most = max(
                len(
                    set(group.visible_pages(start))
                    | set(range(start // page, -(-min(start + chunk, n) // page)))
                )
                for start in range(n + 1)
            )
            assert most <= group.max_pages(n, chunk) <= -(-n // page) or n == 0


class Books(RuleBasedStateMachine):
    """Rows that come, grow, fork, share and leave, against a count of all their pages."""

    COUNT, PAGE = 23, 2
    PAGING = PageLayout((RetentionGroup(0, None, 2), RetentionGroup(1, 5, 4)), (), 0, PAGE)

    def __init__(self) -> None:
        super().__init__()
        self.block_tables = BlockTables(self.PAGING, self.COUNT)
        self.rows: list[tuple[object, list[int]]] = []
        self.gone: list[list[int]] = []

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def join(self, ids: list[int]) -> None:
        row = self.block_tables.new_sequence()
        length = self.block_tables.find_prefix(row, ids)
        assert 0 <= length < len(ids)
        all_rows = [other for _, other in self.rows] + self.gone
        assert not length or any(other[:length] == ids[:length] for other in all_rows)
        self.block_tables.reuse_prefix(row, length)
        self.rows.append((row, ids))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 9), more=st.lists(st.integers(0, 1), max_size=5))
    def grow(self, data: st.DataObject, count: int, more: list[int]) -> None:
        row, ids = data.draw(st.sampled_from(self.rows))
        ids += more
        count = min(count, len(ids) - row.length)
        if count == 0:
            return
        before = [dict(table) for table in row.tables]
        try:
            emptied, copied = self.block_tables.append_slots([row], [count])
        except hw.CacheFull:
            assert all(
                table.items() <= old.items() for table, old in zip(row.tables, before, strict=True)
            )
            return
        row.length += count
        for table in row.tables:
            for number in table.values():
                assert self.block_tables.pages.holders(number) >= 1
        assert set(emptied).isdisjoint(new for _, new in copied)
        self.block_tables.publish_prefix(row, ids)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row, ids = data.draw(st.sampled_from(self.rows))
        self.rows.append((self.block_tables.fork(row), list(ids)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row, ids = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.block_tables.free_sequence(row)
        self.gone.append(ids)

    @invariant()
    def every_page_has_the_holders_that_hold_it(self) -> None:
        pages = self.block_tables.pages
        counter = Counter(
            page for row, _ in self.rows for table in row.tables for page in table.values()
        )
        assert [pages.holders(page) for page in range(self.COUNT)] == [
            counter[page] for page in range(self.COUNT)
        ]
        assert pages.num_allocated == len(counter)
        assert pages.num_free + pages.num_allocated == self.COUNT

    @invariant()
    def nobody_writes_where_another_reads(self) -> None:
        for row, _ in self.rows:
            for group, table in zip(self.PAGING.groups, row.tables, strict=True):
                assert set(group.visible_pages(row.length)) <= set(table), (
                    "a page that is still read was given back"
                )

    def teardown(self) -> None:
        for row, _ in self.rows:
            self.block_tables.free_sequence(row)
        assert self.block_tables.pages.num_allocated == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True
)


def test_reserved_pages_are_never_exceeded():
    """Whatever rows are let in by what is pledged, each comes to its end; and many that begin alike
    fit at once.
    """
    paging = PageLayout((RetentionGroup(0, None, 2), RetentionGroup(1, 5, 4)), (), 0, 2)
    block_tables, length, ids = BlockTables(paging, 23), 14, [1, 0, 1, 1] * 4
    need = tuple(group.max_pages(length, 3) for group in paging.groups)
    rows = []
    for _ in range(9):
        row = block_tables.new_sequence(need)
        if block_tables.num_reserved_pages([*rows, row]) > block_tables.pages.count:
            break
        rows.append(row)
        block_tables.reuse_prefix(row, block_tables.find_prefix(row, ids))
        while row.length < 9:
            block_tables.append_slots([row], [min(3, 9 - row.length)])
            row.length += min(3, 9 - row.length)
            block_tables.publish_prefix(row, ids)
    assert 2 <= len(rows) < 9
    pledged = block_tables.num_reserved_pages(rows)
    while any(row.length < length for row in rows):
        for row in (row for row in rows if row.length < length):
            block_tables.append_slots([row], [1])
            row.length += 1
            assert (
                block_tables.pages.num_allocated <= block_tables.num_reserved_pages(rows) <= pledged
            )
    for row in rows:
        block_tables.free_sequence(row)


def test_an_opening_is_shared_as_a_whole():
    """Tokens that must come together are all remembered or none of them."""
    block_tables, ids = (
        BlockTables(PageLayout((RetentionGroup(0, None, 2),), (), 0, 2), 23),
        [1, 2, 3, 4, 5, 6, 7],
    )
    row = block_tables.new_sequence()
    block_tables.append_slots([row], [7])
    row.length = 7
    block_tables.publish_prefix(row, ids)
    other = [1, 2, 3, 4, 9, 9, 9]
    assert [
        block_tables.find_prefix(block_tables.new_sequence(), other, opening)
        for opening in (0, 4, 5)
    ] == [4, 4, 0]
    assert block_tables.find_prefix(block_tables.new_sequence(), ids) == 6
    # one token at least is read, to know what comes next
    assert block_tables.find_prefix(block_tables.new_sequence(), ids[:6]) == 4


def test_a_shared_page_depends_on_all_earlier_ids():
    """Of a window only the last pages are needed, but what lies in them is not a matter of their
    own ids alone.
    """
    block_tables, ids = (
        BlockTables(PageLayout((RetentionGroup(0, 3, 2),), (), 0, 2), 23),
        [1, 2, 3, 4, 5, 6, 7],
    )
    row = block_tables.new_sequence()
    block_tables.append_slots([row], [7])
    row.length = 7
    block_tables.publish_prefix(row, ids)
    assert block_tables.find_prefix(block_tables.new_sequence(), [*ids[:6], 8]) == 6
    assert block_tables.find_prefix(block_tables.new_sequence(), [9, 9, *ids[2:]]) == 0


# --- the contract of a cache ----------------------------------------------------------------------

PAGED = [kind for kind in streams.KINDS if kind != "state"]


def pooled(layer: hw.Attention, batch: int, *, pages: int = 40, page: int = 3) -> hw.KVCache:
    pool = PagePool([layer.spec], pages=pages, page=page, dtype=torch.float64)
    return pool.caches(pool.batch_of([pool.block_tables.new_sequence() for _ in range(batch)]))[0]


@pytest.mark.parametrize("stream", streams.ONE_DOCUMENT)
@pytest.mark.parametrize("kind", PAGED)
def test_chunks_with_padding(kind: str, stream: str):
    layer, rows = streams.build_layer(kind), streams.ONE_DOCUMENT[stream]
    streams.check_stream(layer, rows, pooled(layer, len(rows[0])))


@pytest.mark.parametrize("kind", PAGED)
def test_the_cache_reports_positions(kind: str):
    layer = streams.build_layer(kind)
    for stream in streams.EVEN:
        rows = streams.ONE_DOCUMENT[stream]
        streams.check_stream(layer, rows, pooled(layer, len(rows[0])), infer_positions=True)


@pytest.mark.parametrize("name", cases.EXAMPLES)
def test_any_part_reads_pages_as_it_reads_one_pass(name: str):
    spec = cases.as_causal(cases.EXAMPLES[name])
    if spec.is_recurrent:
        with pytest.raises(hw.SpecError, match="one recurrent state"):
            PagePool([spec], pages=3)
        return
    layer = cases.layer(spec)
    x, _ = cases.tensors(spec)
    cache, parts = pooled(layer, cases.BATCH, page=2), []
    with torch.no_grad():
        for start, count in ((0, 3), (3, 1), (4, 2), (6, 1)):
            parts.append(layer(x[:, start : start + count], cache=cache))
        cases.check_close(torch.cat(parts, 1), layer(x))


@pytest.mark.parametrize("kind", PAGED)
def test_diverging_rows_copy_the_pages_they_write(kind: str):
    layer = streams.build_layer(kind)
    x = streams.random_tensor(4, 9, streams.MODEL)
    x[2, :4] = x[0, :4]
    pool = PagePool([layer.spec], pages=12, page=3, dtype=torch.float64)
    cache = pool.caches(
        pool.batch_of([pool.block_tables.new_sequence(), pool.block_tables.new_sequence()])
    )[0]
    with torch.no_grad():
        layer(x[:2, :4], cache=cache)
        num_allocated = pool.block_tables.pages.num_allocated
        cache.select_rows(torch.tensor([0, 0]))
        assert pool.block_tables.pages.num_allocated == num_allocated // 2
        first = layer(torch.stack([x[0, 4:6], x[2, 4:6]]), cache=cache)
        cache.select_rows(torch.tensor([1, 0]))
        last = layer(torch.stack([x[2, 6:], x[0, 6:]]), cache=cache)
        alone = layer(x)
    cases.check_close(torch.cat([first[0], last[1]]), alone[0, 4:])
    cases.check_close(torch.cat([first[1], last[0]]), alone[2, 4:])
    cache.select_rows(torch.tensor([], dtype=torch.int64))
    assert pool.block_tables.pages.num_allocated == 0


def test_a_row_sees_nothing_of_the_previous_owner_of_its_pages():
    """Of rows of several lengths the short ones are read with slots that they have not filled."""
    layer = streams.build_layer("plain")
    pool = PagePool([layer.spec], pages=4, page=4, dtype=torch.float64)
    with torch.no_grad():
        cache = pool.caches(
            pool.batch_of([pool.block_tables.new_sequence(), pool.block_tables.new_sequence()])
        )[0]
        layer(torch.full((2, 8, streams.MODEL), torch.nan, dtype=torch.float64), cache=cache)
        cache.select_rows(torch.tensor([], dtype=torch.int64))
        x = streams.random_tensor(2, 5, streams.MODEL)
        cache = pool.caches(
            pool.batch_of([pool.block_tables.new_sequence(), pool.block_tables.new_sequence()])
        )[0]
        layer(x[:, :4], cache=cache, sequence=hw.SequenceInfo.from_batch(x[:, :4], lengths=[4, 1]))
        # gathers pages; whoever reads them where they lie leaves out what is not there
        layer.backend_name = "dense"
        last = layer(torch.stack([x[0, 4:], x[1, 1:2]]), cache=cache)
        layer.backend_name = None
        cases.check_close(last[:, 0], torch.stack([layer(x[:1])[0, 4], layer(x[1:, :2])[0, 1]]))


def test_rows_of_one_length_may_keep_different_pages():
    """Both rows end at 10 tokens, but one of them goes on from an earlier token and still reads an
    earlier page.
    """
    spec = hw.design(model=streams.MODEL, heads=2, pattern="window(3)")
    layer = cases.layer(spec)
    cache, x = pooled(layer, 2, page=2), streams.random_tensor(2, 10, streams.MODEL)
    with torch.no_grad():
        layer(x[:, :9], cache=cache, sequence=hw.SequenceInfo.from_batch(x[:, :9], lengths=[6, 9]))
        # four tokens; one and padding
        new = torch.stack([x[0, 6:], torch.cat([x[1, 9:], x[1, :3]])])
        position = torch.tensor([[6, 7, 8, 9], [9, 10, 11, 12]])
        segment = torch.tensor([[0, 0, 0, 0], [0, -1, -1, -1]])
        layer.backend_name = "dense"  # gathers pages into one buffer
        last = layer(new, cache=cache, sequence=hw.SequenceInfo(position, segment))
        layer.backend_name = None
        whole = layer(x)
    cases.check_close(last[0], whole[0, 6:])
    cases.check_close(last[1, :1], whole[1, 9:])


def test_pages_out_of_reach_are_freed():
    layer = streams.build_layer("sinks")  # the first 2, the latest 3
    pool = PagePool([layer.spec], pages=6, page=2, dtype=torch.float64)
    cache = pool.caches(pool.batch_of([pool.block_tables.new_sequence()]))[0]
    with torch.no_grad():
        layer(streams.random_tensor(1, 6, streams.MODEL), cache=cache)
        for _ in range(50):
            layer(streams.random_tensor(1, 1, streams.MODEL), cache=cache)
            assert pool.block_tables.pages.num_allocated <= 3
    assert cache.used == 56


def test_specs_that_cannot_be_paged_are_refused():
    layer = streams.build_layer("plain")
    cache = pooled(layer, 2, pages=3)
    x = streams.random_tensor(2, 4, streams.MODEL)
    with pytest.raises(ValueError, match=r"does not record gradients; decode under torch\.no_grad"):
        layer(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match="one text per row"):
            layer(
                x,
                cache=cache,
                sequence=hw.SequenceInfo.from_batch(
                    x, segments=torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
                ),
            )
        with pytest.raises(ValueError, match="goes on at position 0, one by one"):
            layer(x, cache=cache, sequence=hw.SequenceInfo.contiguous(1, 4, "cpu"))
        with pytest.raises(hw.CacheFull, match="4 more pages are needed and 3 of 3 are free"):
            layer(x, cache=cache)
        assert layer(x[:, :3], cache=cache).shape == (2, 3, streams.MODEL)  # nothing was taken
    with pytest.raises(hw.SpecError, match="attends to future tokens"):
        PagePool([hw.design(model=8, heads=2, pattern="full()")], pages=3)


def test_layers_that_keep_alike_share_a_table_and_all_share_the_pages():
    near, far = (
        hw.design(model=10, heads=2, pattern=pattern) for pattern in ("window(3)", "causal")
    )
    pool = PagePool([near, far, near], pages=20, page=2)
    row = pool.block_tables.new_sequence()
    pool.block_tables.append_slots([row], [9])
    # 9 tokens by 2 of two layers, and by 4 of one
    assert [len(table) for table in row.tables] == [5, 3]
    assert not set(row.tables[0].values()) & set(row.tables[1].values())
    assert pool.storage[0].numel() == 2 * 2 * 20


# --- groups of heads ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[38, 1, 1], [7, *[1] * 33], [1, 12, 3, *[1] * 24]])
@torch.no_grad()
def test_heads_with_other_patterns_lie_in_pages_of_their_own(chunks: list[int]):
    """Two layers of 3 key-value heads; two of them keep the first 3 and the
    latest 5 tokens of 40.
    """
    options = {"model": 24, "heads": 6, "kv": 3, "dim": 4, "modifiers": (hw.parts.Rotary(),)}
    spec = hw.design(
        **options, pattern="perhead((causal(), window(5) | first(3)), (0, 0, 1, 1, 1, 1))"
    )
    x, allocated_bytes = torch.randn(2, 40, 24, dtype=torch.float64), dict[str, int]()
    for name, one in (("groups", spec), ("all tokens", hw.design(**options, pattern="causal()"))):
        layers = [hw.Attention(one).double().eval() for _ in range(2)]
        pool = PagePool([one, one], pages=60, page=4, dtype=torch.float64)
        caches = pool.caches(pool.batch_of([pool.block_tables.new_sequence() for _ in range(2)]))
        calls = [
            [layer(part, cache=cache) for layer, cache in zip(layers, caches, strict=True)]
            for part in x.split(chunks, 1)
        ]
        for layer, outputs in zip(layers, zip(*calls, strict=True), strict=True):
            cases.check_close(torch.cat(outputs, 1), layer(x))
        allocated_bytes[name] = pool.block_tables.pages.num_allocated * pool.paging.numel * 8
    # For each of two rows, 10 pages of 4 tokens with 2 x 24 numbers; or 5 pages of 8 tokens with 2
    # x 8 numbers, and 3 pages of 4 tokens with 2 x 16: the first, and two with the latest tokens.
    assert allocated_bytes == {
        "groups": 2 * (5 * 8 * 16 + 3 * 4 * 32) * 8,
        "all tokens": 2 * 10 * 4 * 48 * 8,
    }

"""Attention patterns against a brute-force oracle that asks for every pair."""

import itertools
import time

import pytest
import torch
from hypothesis import given, settings, strategies as st

from headwise.attention.masking import pattern_base, patterns as hp
from headwise.attention.masking.patterns import (
    PATTERNS_BY_NAME,
    And,
    BigBird,
    Blocks,
    Causal,
    Dilated,
    Edges,
    First,
    Full,
    Global,
    KeyRetention,
    Or,
    PerHead,
    Prefix,
    Window,
    draw_pattern,
    parse_pattern,
)
from headwise.util.errors import SpecError

EACH = [
    Full(),
    Causal(),
    Window(1),
    Window(4),
    Window(5, after=2),
    Window(3, after=2),
    Dilated(4, 3),
    Dilated(5, 2, after=2),
    Dilated(3, 1, after=1),
    First(3),
    Prefix(5),
    Global((0, 7)),
    Global(()),
    Blocks(1),
    Blocks(5),
    BigBird(29, block=3, window=3, globals=1, random=2, seed=5),
    BigBird(13, block=2, window=1, globals=0, random=9),
    BigBird(7, block=2, window=3, globals=2, random=0),
    Edges(((0, 1), (3, 2), (7, 7), (7, 0), (2, 11))),
    Edges(((5, 1), (9, 3))),
    Edges(()),
]
JOINED = [
    Window(4) | First(2),
    Window(7, after=3) & Causal(),
    Dilated(4, 3) | Global((2, 11)),
    (Blocks(5) | First(2)) & Causal(),
    Blocks(5) & Window(4) | Edges(((0, 12),)),
    And(Prefix(6), Window(9, after=4)),
    BigBird(29, block=3, globals=1) & Causal() | Dilated(2, 13, after=1),
    Global((1, 6)) & Blocks(4),
]
RANGES = [
    (range(17), range(17)),
    (range(3, 11), range(17)),
    (range(17), range(6, 13)),
    (range(9, 41), range(2, 7)),
    (range(2, 5), range(8, 30)),
    (range(30, 37), range(37)),
    (range(7, 8), range(7, 8)),
    (range(0), range(9)),
    (range(9), range(4, 4)),
    (range(8, 3), range(9)),
]
NAMES = {
    name: getattr(hp, name)
    for name in [*(kind.__name__ for kind in PATTERNS_BY_NAME.values()), "And", "Or"]
}


def brute(pattern, queries, keys):
    return sum(bool(pattern.allows(i, j)) for i in queries for j in keys)


small = st.integers(1, 9)


def windows(kind, *more):
    return st.tuples(small, small).map(lambda two: kind(max(two), *more, after=min(two) - 1))


leaves = st.one_of(
    st.sampled_from([Full(), Causal()]),
    windows(Window),
    small.flatmap(lambda rate: windows(Dilated, rate)),
    st.builds(First, small),
    st.builds(Prefix, small),
    st.builds(Blocks, small),
    st.lists(st.integers(0, 20), max_size=3).map(lambda at: Global(tuple(at))),
    st.lists(st.tuples(small, small), max_size=6).map(lambda pairs: Edges(tuple(pairs))),
    st.builds(
        BigBird,
        st.integers(1, 30),
        block=small,
        window=st.sampled_from([1, 3]),
        globals=st.integers(0, 2),
        random=st.integers(0, 3),
        seed=small,
    ),
)
trees = st.recursive(
    leaves, lambda inner: st.builds(And, inner, inner) | st.builds(Or, inner, inner), max_leaves=5
)
trees |= st.tuples(
    st.lists(trees, min_size=3, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=5)
).map(lambda two: PerHead(*map(tuple, two)))
spans = st.tuples(st.integers(0, 30), st.integers(0, 25)).map(
    lambda two: range(two[0], two[0] + two[1])
)
steady = settings(derandomize=True, max_examples=25, deadline=None)


def assert_retention_holds(pattern, size=37):
    first, last = pattern.retention
    assert first >= 0
    assert last is None or last >= 1
    for i in range(size):
        for j in range(i + 1):
            if pattern.allows(i, j):
                assert j < first or last is None or i - j < last, (pattern, i, j)


def assert_prefix_holds(pattern, size=37):
    if pattern.tokens_before_decode is not None:
        ahead = [(i, j) for i in range(size) for j in range(i + 1, size) if pattern.allows(i, j)]
        assert all(j < pattern.tokens_before_decode for _, j in ahead), (pattern, ahead)


# --- one rule: ints, tensors, counts, retention, prefix -------------------------------------------


@pytest.mark.parametrize("pattern", EACH + JOINED, ids=str)
def test_pairs_equal_brute_force(pattern):
    for queries, keys in RANGES:
        assert pattern.pairs(queries, keys) == brute(pattern, queries, keys), (queries, keys)


@steady
@given(trees, spans, spans)
def test_pairs_equal_brute_force_on_any_tree(pattern, queries, keys):
    assert pattern.pairs(queries, keys) == brute(pattern, queries, keys)


@steady
@given(trees, spans, spans)
def test_pairs_counted_with_tensors_equal_brute_force(pattern, queries, keys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pattern_base, "COUNTED_ROWS", 3)
        assert pattern_base.count_pairs_by_head(pattern, queries, keys)[0] == brute(
            pattern, queries, keys
        )


def test_a_dilated_window_is_counted_in_seconds_or_refused():
    pattern = Dilated(513, 2, after=256) | Global((0,))
    started = time.process_time()
    pattern_base.count_pairs_by_head(pattern, range(1 << 15), range(1 << 15))
    assert time.process_time() - started < 5  # half a second; the rest is for a busy machine
    wide = Dilated(1 << 19, 2) | Global((0,))
    with pytest.raises(SpecError, match=r"cannot count 1,048,576 tokens .* give at most [\d,]+$"):
        pattern_base.count_pairs_by_head(wide, range(1 << 20), range(1 << 20))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(trees, spans, spans)
def test_reach_covers_exactly_the_keys_that_are_read(pattern, queries, keys):
    reach = pattern.visible_keys(queries, keys)
    assert [j for span in reach for j in span] == [
        j for j in keys if any(pattern.allows(i, j) for i in queries)
    ]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(trees, spans, spans)
def test_shared_keys_are_read_by_all_queries(pattern, queries, keys):
    """Some may be missing, where keys lie in different spans of two queries."""
    shared = [j for span in pattern.shared_keys(queries, keys) for j in span]
    every = {j for j in keys if all(pattern.allows(i, j) for i in queries)}
    assert shared == sorted(set(shared))
    assert set(shared) <= every
    if len(queries) == 1 or isinstance(pattern, (Causal, Full, Window)):
        assert set(shared) == (every if queries else set())


@pytest.mark.parametrize("pattern", EACH + JOINED, ids=str)
def test_spans_are_the_allowed_keys_in_order(pattern):
    for i, keys in itertools.product(range(31), [range(33), range(4, 9)]):
        read = [j for span in pattern.spans(i, keys) for j in span]
        assert read == [j for j in keys if pattern.allows(i, j)], i


@pytest.mark.parametrize("pattern", EACH + JOINED, ids=str)
def test_allows_is_the_same_on_ints_and_tensors(pattern):
    i, j = torch.arange(41)[:, None], torch.arange(37)[None, :]
    mask = pattern.allows(i, j)
    assert mask.dtype == torch.bool
    assert mask.shape == (41, 37)
    assert mask.tolist() == [[pattern.allows(a, b) for b in range(37)] for a in range(41)]
    assert all(type(pattern.allows(a, 3)) is bool for a in range(5))


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "pattern", [EACH[4], EACH[7], EACH[11], EACH[15], EACH[18], *JOINED[:1]], ids=str
)
def test_allows_traces_as_one_graph(pattern):
    i, j = torch.arange(23)[:, None], torch.arange(19)[None, :]
    traced = torch.compile(pattern.allows, backend="eager", fullgraph=True)
    assert torch.equal(traced(i, j), pattern.allows(i, j))


@pytest.mark.parametrize("pattern", EACH + JOINED, ids=str)
def test_retention_and_prefix_hold(pattern):
    assert_retention_holds(pattern)
    assert_prefix_holds(pattern)


@steady
@given(trees)
def test_retention_and_prefix_hold_on_any_tree(pattern):
    assert_retention_holds(pattern, 31)
    assert_prefix_holds(pattern, 31)


@pytest.mark.parametrize(
    ("pattern", "retention"),
    [
        (Full(), KeyRetention(0, None)),
        (Causal(), KeyRetention(0, None)),
        (Window(4), KeyRetention(0, 4)),
        (Window(5, after=2), KeyRetention(0, 3)),
        (Dilated(4, 3), KeyRetention(0, 10)),
        (First(4), KeyRetention(4, 1)),
        (Prefix(4), KeyRetention(0, None)),
        (Global((2, 5)), KeyRetention(6, 1)),
        (Blocks(5), KeyRetention(0, 5)),
        (Edges.complete(4), KeyRetention(0, 4)),
        (Edges(((9, 1),)), KeyRetention(2, 1)),
        (Window(4) | First(2), KeyRetention(2, 4)),
        (Window(4) | Causal(), KeyRetention(0, None)),
        ((Window(4) | First(2)) & Causal(), KeyRetention(2, 4)),
        (Window(4) & First(2), KeyRetention(2, 1)),
        (BigBird(640, block=8, globals=2, random=0), KeyRetention(16, 16)),
    ],
    ids=str,
)
def test_retention_is_tight(pattern, retention):
    assert pattern.retention == retention


@pytest.mark.parametrize(
    ("pattern", "opening"),
    [
        (Full(), None),
        (Causal(), 0),
        (Window(4), 0),
        (Window(4, after=1), None),
        (Dilated(4, 3), 0),
        (Dilated(4, 3, after=1), None),
        (First(4), 0),
        (Prefix(4), 4),
        (Global((2,)), None),
        (Global(()), 0),
        (Blocks(5), None),
        (Blocks(1), 0),
        (BigBird(9), None),
        (Edges(((3, 1), (2, 2))), 0),
        (Edges(((1, 3),)), None),
        (Prefix(4) | Window(3), 4),
        (Prefix(4) | Prefix(9), 9),
        (Prefix(4) & Prefix(9), 4),
        (Full() & Prefix(9), 9),
        (BigBird(9) & Causal(), 0),
        (Causal() | Full(), None),
    ],
    ids=str,
)
def test_the_opening_has_the_given_length(pattern, opening):
    assert pattern.tokens_before_decode == opening


# --- what each pattern means ----------------------------------------------------------------------


def read(pattern, i, size=60):
    return [j for j in range(size) if pattern.allows(i, j)]


def test_a_window_reads_exactly_its_keys_the_own_included():
    assert read(Window(4), 9) == [6, 7, 8, 9]
    assert read(Window(4), 1) == [0, 1]
    assert read(Window(5, after=2), 9) == [7, 8, 9, 10, 11]
    assert read(Window(4, after=3), 9) == [9, 10, 11, 12]
    assert read(Dilated(4, 3), 9) == [0, 3, 6, 9]
    assert read(Dilated(4, 3, after=2), 9) == [6, 9, 12, 15]


def test_first_never_reads_ahead_and_prefix_does():
    assert [read(First(3), i) for i in (0, 1, 8)] == [[0], [0, 1], [0, 1, 2]]
    assert [read(Prefix(3), i) for i in (0, 4)] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_tables_are_sorted_and_unique():
    assert Global((7, 0, 7)) == Global((0, 7))
    assert Edges(((3, 1), (0, 2), (3, 1))) == Edges(((0, 2), (3, 1)))
    assert hash(Global((7, 0, 7))) == hash(Global((0, 7)))


def test_bigbird_samples_by_its_definition():
    bird = BigBird(64, block=4, window=3, globals=2, random=3, seed=1)
    for r in range(20):
        blocks = {j // 4 for j in read(bird, 4 * r + 1, 100)}
        near = {c for c in range(25) if abs(c - r) <= 1} | {0, 1}
        if r < 2:
            assert blocks == set(range(25))
        elif r < 16:
            assert blocks >= near
            assert len(blocks - near) == 3
            assert max(blocks - near) < 16
        else:
            assert blocks == near
    assert (
        BigBird(64, block=4, seed=2).sampled_blocks != BigBird(64, block=4, seed=3).sampled_blocks
    )


GOLDEN_DRAWS = [
    (-1, -1),
    (-1, -1),
    (4, 5),
    (5, 8),
    (6, 7),
    (2, 7),
    (2, 4),
    (2, 4),
    (2, 6),
    (3, 5),
    (-1, -1),
]


def test_bigbird_draws_the_same_on_every_python():
    assert (
        list(zip(*BigBird(10, block=1, random=2, seed=7).sampled_blocks, strict=True))
        == GOLDEN_DRAWS
    )


def test_bigbird_takes_all_blocks_when_few_are_left():
    assert read(BigBird(14, block=2, window=3, globals=1, random=50), 6, 14) == list(range(14))


# --- counting without the square ------------------------------------------------------------------


def timed(pattern, size):
    start = time.perf_counter()
    pairs = pattern.pairs(range(size), range(size))
    return pairs, time.perf_counter() - start


MILLION = 1_000_000


@pytest.mark.parametrize(
    ("pattern", "pairs"),
    [
        (Full(), MILLION**2),
        (Causal(), MILLION * (MILLION + 1) // 2),
        (Window(4096), 4096 * MILLION - 4096 * 4095 // 2),
        # beyond the window, four sinks each: rows 4099.. have all four outside, rows 4096..4098
        # have 1, 2, 3
        (Window(4096) | First(4), 4096 * MILLION - 4096 * 4095 // 2 + 4 * (MILLION - 4099) + 6),
        (Blocks(1), MILLION),
        (Blocks(64), 64 * MILLION),
        (Dilated(64, 7), sum(MILLION - 7 * k for k in range(64))),
        (Global((3, 5)), 4 * MILLION - 4),
        (Blocks(1 << 16) & Causal(), 15 * (65536 * 65537 // 2) + 16960 * 16961 // 2),
    ],
    ids=str,
)
def test_a_million_tokens_are_counted_at_once(pattern, pairs):
    counted, seconds = timed(pattern, MILLION)
    assert counted == pairs
    assert seconds < 0.2  # a few milliseconds; the rest is for a busy machine


def test_a_mixture_of_tables_is_still_counted_quickly():
    size = 1 << 14
    pattern = BigBird(size) & Causal() | Dilated(8, 512) | Global((9, 99))
    pairs, seconds = timed(pattern, size)
    assert seconds < 1
    assert pairs == sum(len(span) for i in range(size) for span in pattern.spans(i, range(size)))


def test_ranges_are_checked():
    for axis in (range(0, 9, 2), range(-3, 4), range(9, 0, -1)):
        with pytest.raises(
            SpecError, match=r"ranges of step 1 from 0 up, got range\(.*; use range\(start, stop\)"
        ):
            Causal().pairs(axis, range(9))


# --- text and code --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text", "code"),
    [
        (Window(256) | First(4), "window(256) | first(4)", "Window(keys=256) | First(keys=4)"),
        (Window(5, after=2), "window(5, after=2)", "Window(keys=5, after=2)"),
        (Dilated(5, 2), "dilated(5, 2)", "Dilated(keys=5, rate=2)"),
        (Global((0,)), "global((0,))", "Global(positions=(0,))"),
        (
            BigBird(99, globals=1, seed=3),
            "bigbird(99, globals=1, seed=3)",
            "BigBird(length=99, globals=1, seed=3)",
        ),
        (Edges(((0, 1),)), "edges(((0, 1),))", "Edges(edges=((0, 1),))"),
        (
            PerHead((Causal(), Window(4) | First(2), Causal()), (2, 1, 0)),
            "perhead((causal(), window(4) | first(2)), (0, 1, 0))",
            "PerHead(patterns=(Causal(), Window(keys=4) | First(keys=2)), pattern_of_head=(0, 1, "
            "0))",
        ),
        (
            PerHead((Full(),), (0, 0)),
            "perhead((full(),), (0, 0))",
            "PerHead(patterns=(Full(),), pattern_of_head=(0, 0))",
        ),
        (
            (Full() | Causal()) & Prefix(2) | Blocks(3),
            "(full() | causal()) & prefix(2) | blocks(3)",
            "(Full() | Causal()) & Prefix(keys=2) | Blocks(size=3)",
        ),
    ],
)
def test_text_and_code(pattern, text, code):
    assert pattern.text == str(pattern) == text
    assert repr(pattern) == code
    assert parse_pattern(text) == pattern


@steady
@given(trees)
def test_text_and_code_round_trip(pattern):
    again = parse_pattern(pattern.text)
    assert again == pattern
    assert hash(again) == hash(pattern)
    assert again.text == pattern.text
    assert eval(repr(pattern), NAMES) == pattern
    assert parse_pattern(repr(pattern)) == pattern


def test_brackets_do_not_matter_and_order_does():
    a, b, c = Window(2), First(3), Blocks(4)
    assert (a | b) | c == a | (b | c) == Or(a, Or(b, c))
    assert (a & b) & c == a & (b & c)
    assert (a | b) & c != a | (b & c)
    assert a | b != b | a


def test_text_is_forgiving():
    assert parse_pattern(" Window( 4 )\n  | causal & FULL ") == Window(4) | Causal() & Full()
    assert parse_pattern("global(positions=[3, 1])") == Global((1, 3))


def test_patterns_per_head_join_head_by_head():
    mixed = PerHead((Causal(), Window(3, after=1)), (0, 1, 1))
    assert mixed & Causal() == PerHead(
        (Causal() & Causal(), Window(3, after=1) & Causal()), (0, 1, 1)
    )
    assert First(2) | mixed == PerHead(
        (First(2) | Causal(), First(2) | Window(3, after=1)), (0, 1, 1)
    )
    assert (mixed | mixed).pattern_of_head == (0, 1, 1)
    with pytest.raises(SpecError, match="combine them with the operators & and"):
        And(mixed, Causal())


def test_only_patterns_join():
    with pytest.raises(SpecError, match=r"& and \| need patterns, got 3"):
        Window(4) | 3


# --- drawing --------------------------------------------------------------------------------------

GOLDEN = """\
window(4) | first(2)
     0
   0 █·····
   1 ██····
   2 ███···
   3 ████··
   4 █████·
   5 ██████
rows are queries, columns are keys (█ allowed); 21 of 36 pairs (58.3%)"""


def test_drawing():
    assert draw_pattern(Window(4) | First(2), 6, 6) == GOLDEN
    lines = draw_pattern(Window(2), 3, 17).splitlines()
    assert lines[1] == "     0       8       16"
    assert lines[4] == "   2 ·██··············"


def test_a_wide_drawing_shrinks_with_a_note():
    lines = draw_pattern(Window(300) | Global(tuple(range(30))), 1000, 5000).splitlines()
    assert max(map(len, lines)) <= 80
    assert "each character is 79 x 79 pairs: █ all, ▒ some, · none allowed" in lines
    assert len(lines) == 2 + 13 + 2
    assert lines[2][5:] == "▒" * 64  # 30 of its 79 rows read all
    assert lines[14][5:] == "▒·······▒███▒" + "·" * 51  # rows 948..999 read 649..999


def test_an_empty_pattern_has_no_drawing():
    with pytest.raises(SpecError, match="cannot draw 0 queries and 4 keys; use at least 1"):
        draw_pattern(Full(), 0, 4)

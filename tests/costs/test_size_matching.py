"""Layers of matched size: by hand, by exhaustive search, and impossible matches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import headwise as hw
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.size_matching import MATCH_QUANTITIES, SizeSearch, list_sizes, with_size
from support import layer_cases as cases

MHA = hw.design(model=512, heads=8, pattern="causal")
GQA = hw.design(model=512, heads=8, kv=2, pattern="causal")
LOAD = hw.Workload(batch=3, context=700)
PRESETS = {
    name: hw.design(preset=name, model=96, heads=6)
    for name in hw.PRESETS
    if name not in ("mla", "bigbird")
}
SPECS = list({**PRESETS, **cases.EXAMPLES}.values())

# What each number is, read off the whole price.
PRICED = {
    "params": lambda value: value.parameters.total,
    "flops": lambda value: value.prefill_flops.total,
    "kv": lambda value: value.cache_bytes,
}


def counted(spec, by: str, load: hw.Workload = LOAD) -> int:
    return PRICED[by](estimate_cost(spec, load))


@pytest.mark.parametrize(
    ("free", "size", "reached"),
    [
        ("dim", 102, 512 * 102 * (2 * 8 + 2 * 2)),  # 4 d^2 = d k (2 q + 2 kv) at k = 102.4
        (
            "model",
            648,
            648 * 81 * (2 * 8 + 2 * 2),
        ),  # k = d / q: 4 512^2 = 2.5 d^2 at 647.6, a multiple of 8
        ("kv", 8, 4 * 512**2),
        ("vdim", 141, 512 * (64 * (8 + 2) + 141 * (8 + 2))),  # 2048 = 64 * 10 + v * 10 at 140.8
        ("q", 14, 512 * 64 * (2 * 14 + 2 * 2)),  # a multiple of kv
    ],
)
def test_grouped_heads_as_large_as_full_ones_by_hand(free, size, reached):
    found = hw.match_size(GQA, like=MHA, free=free)
    assert (found.chosen, found.reached, found.target) == (size, reached, 4 * 512**2)
    assert found.spec == with_size(GQA, free, size)
    assert hw.costs.count_parameters(found.spec) == reached
    assert found.difference == (reached - 4 * 512**2) / (4 * 512**2)


def test_products_are_matched_to_the_nearest_of_all_widths():
    """b (2 s d k (2 q + 2 kv) + 4 pairs q k), which nobody else computes here."""
    b, s, d, q, kv = LOAD.batch, LOAD.context, 512, 8, 2
    expected = b * (8 * s * d * d + 4 * s * (s + 1) // 2 * d)
    each = {
        k: b * (4 * s * d * k * (q + kv) + 4 * s * (s + 1) // 2 * q * k) for k in range(1, 4000)
    }
    nearest = min(each, key=lambda k: abs(each[k] - expected))
    found = hw.match_size(GQA, like=MHA, by="flops", free="dim", workload=LOAD)
    assert (found.target, found.chosen, found.reached) == (expected, nearest, each[nearest])


@given(
    spec=st.sampled_from(SPECS),
    like=st.sampled_from(SPECS),
    by=st.sampled_from(("params", "kv")),
    data=st.data(),
)
def test_no_size_is_nearer(spec, like, by, data):
    load = hw.Workload(batch=2, context=13)
    free = data.draw(st.sampled_from(sorted(list_sizes(spec))))
    if by == "kv" and any(one.pattern.tokens_before_decode != 0 for one in (spec, like)):
        return
    spec, like = (replace(one, source=None) for one in (spec, like))
    count = MATCH_QUANTITIES[by][0]
    expected = count(like, load)
    off = min((abs(one - expected), one) for one in every(spec, free, by, load, 150))
    try:
        found = hw.match_size(spec, like=like, by=by, free=free, workload=load)
    except hw.SpecError:
        around = list(every(spec, free, by, load, 120))
        assert expected < min(around) or expected > max(around)
        return
    assert count(found.spec, load) == found.reached
    assert list_sizes(found.spec)[free] == found.chosen
    assert abs(found.reached - expected) <= off[0]


def every(spec, free: str, by: str, load: hw.Workload, most: int):
    """The count of every size that there can be."""
    for size in range(1, most):
        try:
            yield MATCH_QUANTITIES[by][0](with_size(spec, free, size), load)
        except hw.SpecError:
            continue


@pytest.mark.parametrize("name", ["gqa", "linear", "average", "diff", "moh"])
def test_matched_quantities_are_those_of_the_cost_report(name):
    like, spec = hw.design(preset="mqa", model=96, heads=6), PRESETS[name]
    for by in MATCH_QUANTITIES:
        found = hw.match_size(spec, like=like, by=by, workload=LOAD)
        assert (counted(like, by), counted(found.spec, by)) == (found.target, found.reached)


def test_dependent_sizes_follow():
    assert with_size(MHA, "q", 5).heads == hw.Heads.grouped(q=5, dim=64)
    assert with_size(GQA, "q", 6).heads == hw.Heads.grouped(q=6, kv=2, dim=64)
    assert with_size(GQA, "model", 1024).heads == hw.Heads.grouped(q=8, kv=2, dim=128)
    assert with_size(PRESETS["diff"], "dim", 10).heads.vdim == 20
    assert with_size(PRESETS["mohsa"], "dim", 10).heads.vdim == 12
    assert with_size(PRESETS["mohsa"], "project.overlap", 3).heads.vdim == 16 + 6
    assert with_size(hw.design(model=96, heads=6, vdim=5), "dim", 10).heads.vdim == 5
    assert with_size(PRESETS["dcmha"], "dynamic_composition_2.rank", 5).modifiers[-1].rank == 5
    assert with_size(GQA, "kv", 2) is GQA


def test_the_first_size_that_reaches_is_free_unless_one_is_named():
    assert hw.match_size(GQA, like=MHA).free == "dim"
    assert hw.match_size(hw.design(preset="mla"), like=MHA, by="kv").free == "project.rank"
    same = hw.match_size(MHA, like=MHA)
    assert (same.chosen, same.was, same.difference) == (64, 64, 0.0)


def test_a_match_reports_the_chosen_size():
    found = hw.match_size(GQA, like=MHA)
    assert str(found) == "dim 102, was 64: 1,044,480 parameters, 0.39% fewer than 1,048,576"
    assert str(hw.match_size(MHA, like=MHA)) == "dim stays 64: 1,048,576 parameters, equal"
    assert found.data == {
        "by": "params",
        "free": "dim",
        "was": 64,
        "chosen": 102,
        "target": 1_048_576,
        "reached": 1_044_480,
        "difference": -0.00390625,
    }


# --- the search -----------------------------------------------------------------------------------


@given(
    shape=st.sampled_from(
        (lambda n: 7 * n + 3, lambda n: n * n, lambda n: 10**5 - 31 * n, lambda n: n // 3)
    ),
    stride=st.integers(1, 12),
    bound=st.sampled_from((None, 100, 1000)),
    expected=st.integers(0, 5000),
    times=st.integers(1, 8),
)
def test_a_search_equals_exhaustive_search(shape, stride, bound, expected, times):
    def count(size: int) -> int | None:
        if size > 0 and size % stride == 0 and (bound is None or size <= bound):
            return shape(size)
        return None

    search = SizeSearch(count, start=stride * times)
    size, found = search.nearest(expected)
    everything = {n: result for n in range(1, 16_000) if (result := count(n)) is not None}
    assert everything[size] == found
    if search.is_bracketed(expected):
        assert abs(found - expected) == min(abs(value - expected) for value in everything.values())
    else:
        assert expected < min(everything.values()) or expected > max(everything.values())


@pytest.mark.parametrize("largest", [700, 1000, 1023, 2**30 + 5])
def test_the_largest_valid_size_is_found_with_few_counts(largest):
    search = SizeSearch(
        lambda size: 7 * size if 0 < size <= largest and size % 4 == 0 else None, start=8
    )
    assert search.nearest(10**12) == (largest // 4 * 4, largest // 4 * 28)
    assert len(search.counts) < 5000


def test_a_count_that_the_last_doubling_reaches_is_found():
    """Sizes 1024, 2048 and 4096 are tried, and the last has the count itself."""
    search = SizeSearch(lambda size: 3 * size if size else None, start=1024)
    assert search.nearest(3 * 4096) == (4096, 3 * 4096)


def test_non_monotonic_sizes_are_tried_one_by_one():
    def zigzag(size: int) -> int | None:
        return size * 10 + (size * 7) % 31 * 9 if size else None

    for expected in range(500, 9000, 371):
        found = SizeSearch(zigzag, start=40).nearest(expected)[1]
        assert abs(found - expected) == min(
            abs((zigzag(n) or 0) - expected) for n in range(1, 3000)
        )


def test_numbers_at_the_ceilings():
    found = hw.match_size(GQA, like=hw.design(model=2**13, heads=1), free="dim")
    assert abs(found.reached - 4 * 2**26) <= 512 * 20 // 2

"""Attention of gathered queries, against the definition in float64, at any size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from headwise.kernels import flash_attention
from headwise.kernels.flash_attention import FLASH_FORWARD_OP, WorkItems, gathered_attention
from support.layer_cases import check_close

SCALE = 0.4


class Some:
    """Numbers of one call: who asks, and from which key to which each token reads."""

    def __init__(
        self, sizes, widths, seed: int = 0, dtype: torch.dtype = torch.float64, rate: float = 0.4
    ) -> None:
        (batch, queries, keys), (heads, values, dim, vdim) = sizes, widths
        make = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return (
                torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
            )

        self.q, self.k, self.v = (
            numbers(batch, queries, heads, dim),
            numbers(batch, keys, values, dim),
            numbers(batch, keys, values, vdim),
        )
        self.way = torch.randn(batch, queries, heads, vdim, generator=make, dtype=torch.float64).to(
            dtype
        )
        self.unmerged_shape = torch.rand(batch, queries, heads, generator=make) < rate
        ends = torch.randint(0, keys + 1, (batch, queries, 2), generator=make).sort(-1).values
        self.ends = ends[:1] if seed % 2 else ends

    def read(self) -> torch.Tensor:
        work_items = WorkItems.from_open_heads(
            self.unmerged_shape, self.k.shape[2], self.ends, self.k.shape[1]
        )
        return gathered_attention(self.q, self.k, self.v, work_items, SCALE)

    def expected(self) -> torch.Tensor:
        each, key = self.q.shape[2] // self.k.shape[2], torch.arange(self.k.shape[1])
        q, k, v = (
            t.double()
            for t in (self.q, self.k.repeat_interleave(each, 2), self.v.repeat_interleave(each, 2))
        )
        allowed = ((key >= self.ends[..., :1]) & (key < self.ends[..., 1:]))[:, None]
        s = torch.einsum("bthk,bshk->bhts", q, k) * SCALE
        w = (
            s.masked_fill(~allowed, -torch.inf)
            .softmax(-1)
            .masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        )
        return torch.einsum("bhts,bshv->bthv", w, v) * self.unmerged_shape[..., None]

    def both(self, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (o, *torch.autograd.grad((o * self.way.to(o.dtype)).sum(), (self.q, self.k, self.v)))

    def check_reading(self, **tolerance: float) -> None:
        for ours, theirs in zip(self.both(self.read()), self.both(self.expected()), strict=True):
            check_close(ours, theirs.to(ours.dtype), **tolerance)


@pytest.fixture
def parts(monkeypatch):
    """Keys in parts of their own, be there few or many."""
    monkeypatch.setattr(flash_attention, "MIN_KEYS_PER_PART", 16)


@pytest.mark.parametrize("dim", [1, 15, 16, 17, 64, 67])
@pytest.mark.parametrize("vdim", [3, 16, 65])
def test_any_width(dim, vdim, parts):
    Some((2, 70, 75), (4, 2, dim, vdim)).check_reading()


@pytest.mark.parametrize("queries", [1, 63, 64, 65, 128, 131])
@pytest.mark.parametrize("keys", [1, 3, 63, 64, 65, 131])
def test_units_and_blocks_of_keys_end_where_they_should(queries, keys, parts):
    Some((1, queries, keys), (2, 2, 5, 7), rate=1.0).check_reading()


@pytest.mark.parametrize("keep", [1, 2, 7, 14])
def test_parts_of_keys_are_added_up(keep, parts):
    some = Some((1, 80, 201), (14, keep, 5, 3))
    items = WorkItems.from_open_heads(some.unmerged_shape, keep, some.ends, 201)
    assert len(items.backward) == keep * {1: 4, 2: 4, 7: 2, 14: 1}[keep]
    some.check_reading()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(1, 200)),
    groups=st.sampled_from([(1, 1), (6, 1), (6, 2), (6, 6)]),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    rate=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_call(sizes, groups, widths, rate, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "MIN_KEYS_PER_PART", 48)
        Some(sizes, (*groups, *widths), seed, rate=rate).check_reading()


def test_results_are_independent_of_threads(parts):
    some, found = Some((1, 300, 300), (6, 3, 20, 20), dtype=torch.float32), []
    before = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(some.both(some.read()))
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_scores_of_any_size_in_single_precision(size):
    some = Some((1, 150, 150), (2, 2, 16, 16), dtype=torch.float32)
    with torch.no_grad():
        some.q.mul_(size)
    found = some.both(some.read())
    assert all(t.isfinite().all() for t in found)
    check_close(found[0], some.expected().float(), rtol=1e-5, atol=1e-5 if size == 1.0 else 1e-3)


def test_memory_that_lies_otherwise_is_read_where_it_is():
    some = Some((2, 70, 80), (4, 2, 6, 6))
    expected = some.both(some.expected())
    for name in "qkv":
        setattr(
            some,
            name,
            getattr(some, name)
            .detach()
            .transpose(1, 2)
            .contiguous()
            .transpose(1, 2)
            .requires_grad_(),
        )
    some.k = some.k.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    for ours, theirs in zip(some.both(some.read()), expected, strict=True):
        check_close(ours, theirs)


def test_those_with_most_keys_begin():
    opened = torch.rand(1, 500, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    ends = torch.stack([torch.zeros(500, dtype=torch.int64), torch.arange(1, 501)], -1)[None]
    lined = WorkItems.from_open_heads(opened, 3, ends, 500)
    places, _, forth, back, _ = lined
    last = places[forth[:, 1] + forth[:, 2] - 1] // 3 % 500
    assert (last.diff() <= 0).all()
    assert forth[:, 2].sum() == opened.sum() == len(places)
    assert (back[:, 2].diff() <= 0).all()
    assert lined.num_pairs == 64 * int((last + 1).sum())


def test_the_operation_passes_opcheck():
    some = Some((1, 20, 20), (2, 2, 4, 4))
    items = WorkItems.from_open_heads(some.unmerged_shape, 2, some.ends, 20)
    tables = [items.query_rows, items.forward, items.backward]
    qkv = [t.detach() for t in (some.q, some.k, some.v)]
    arguments = (*qkv, items.key_ranges, None, tables, SCALE, items.num_pairs)
    looks = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(FLASH_FORWARD_OP, arguments, test_utils=looks).values()) == {
        "SUCCESS"
    }

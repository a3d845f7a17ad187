"""The varlen attention kernel, against plain operations on each text alone."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.backends import varlen
from headwise.kernels.varlen_attention import attend_varlen
from headwise.masking.sequence_info import SequenceInfo
from support import takeover
from support.layer_cases import check_close

SIZES = [
    (4, 4, 32, 32),
    (6, 2, 5, 7),
    (3, 1, 16, 48),
    (2, 2, 31, 17),
]  # heads, key heads, dim, vdim
LENGTHS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=6)
EDGES = [(1, 1), (3, 15), (4, 16), (5, 17), (16, 4), (17, 33), (63, 64), (0, 3), (2, 0)]


def plain(q, k, v, where, causal: bool, scale: float):
    """Each text by itself, in tensor operations."""
    o, each = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype), q.shape[1] // k.shape[1]
    for first, value, begin, keys in where.tolist():
        own, read = slice(first, first + value), slice(begin, begin + keys)
        s = torch.einsum("thk,shk->hts", q[own], k[read].repeat_interleave(each, 1)) * scale
        if causal:
            s = s.masked_fill(torch.arange(keys) > torch.arange(value)[:, None], -torch.inf)
        w = s.softmax(-1) if keys else s
        o = o.index_copy(
            0,
            torch.arange(first, first + value),
            torch.einsum("hts,shv->thv", w, v[read].repeat_interleave(each, 1)),
        )
    return o


def given_of(lengths, sizes, dtype=torch.float64, spare: int = 0):
    """q, k, v and where texts of these lengths lie in them, `spare` tokens behind the last."""
    heads, groups, dim, vdim = sizes
    values, keys = zip(*lengths, strict=True)
    first, begin = ([0, *accumulate(each)] for each in (values, keys))
    where = torch.tensor([*zip(first, values, begin, keys, strict=False)])
    shapes = (
        (first[-1] + spare, heads, dim),
        (begin[-1] + spare, groups, dim),
        (begin[-1] + spare, groups, vdim),
    )
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes], where


def check_texts(lengths, sizes, causal: bool, spare: int = 0) -> None:
    qkv, where = given_of(lengths, sizes, spare=spare)
    o = attend_varlen(qkv, where, max(map(max, lengths)), causal, 0.3)
    expected = plain(*qkv, where, causal, 0.3)
    check_close(o, expected)
    back = torch.randn_like(o)
    if o.numel():
        for ours, theirs in zip(
            torch.autograd.grad(o, qkv, back), torch.autograd.grad(expected, qkv, back), strict=True
        ):
            check_close(ours, theirs)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_texts_read_themselves_and_their_sources(sizes, causal):
    check_texts(EDGES, sizes, causal)
    check_texts([(n, n) for n, _ in EDGES], sizes, causal, spare=3)


@settings(deadline=None, max_examples=25)
@given(lengths=LENGTHS, sizes=st.sampled_from(SIZES), causal=st.booleans())
def test_any_lengths(lengths, sizes, causal):
    check_texts(lengths, sizes, causal)


def test_rows_need_not_lie_whole():
    (q, k, v), where = given_of([(5, 5), (20, 20)], (2, 2, 16, 16))
    one = torch.stack([q, k, v], 1).detach().requires_grad_()
    parts = one.unbind(1)
    o, expected = attend_varlen(list(parts), where, 20, True, 0.2), plain(*parts, where, True, 0.2)
    check_close(o, expected)
    back = torch.randn_like(o).transpose(0, 2).contiguous().transpose(0, 2)
    check_close(torch.autograd.grad(o, one, back)[0], torch.autograd.grad(expected, one, back)[0])
    across = q.detach().transpose(0, 2).contiguous().transpose(0, 2)
    check_close(
        attend_varlen([across, k, v], where, 20, True, 0.2),
        attend_varlen([q, k, v], where, 20, True, 0.2),
    )


def test_keys_outside_the_mask_do_not_matter():
    (q, k, v), where = given_of([(3, 3), (6, 6)], (2, 1, 16, 16), spare=2)
    with torch.no_grad():
        for t in (q, k, v):
            t[-2:] = torch.nan
    o = attend_varlen([q, k, v], where, 6, False, 1.0)
    assert not o[-2:].any()
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(grad.isfinite().all() and not grad[-2:].any() for grad in grads)


def test_numbers_that_are_none_stay_none():
    (q, k, v), where = given_of([(3, 3), (20, 20)], (1, 1, 16, 16), torch.float32)
    with torch.no_grad():
        q[4, 0, 0] = torch.nan
    o = attend_varlen([q, k, v], where, 20, True, 1.0)
    assert o[4].isnan().all()
    assert o[[*range(4), *range(5, 23)]].isfinite().all()


def test_threads_do_not_matter():
    (q, k, v), where = given_of([(40, 40), (7, 7), (33, 33)], (4, 2, 32, 32), torch.float32)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            o = attend_varlen([q, k, v], where, 40, True, 0.2)
            found.append([o, *torch.autograd.grad(o.sum(), (q, k, v))])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_products_are_counted():
    (q, k, v), where = given_of([(3, 5), (2, 7)], (4, 2, 16, 32))
    with FlopCounterMode(display=False) as counter:
        o = attend_varlen([q, k, v], where, 7, False, 1.0)
        assert counter.get_total_flops() == 2 * 4 * (3 * 5 + 2 * 7) * (16 + 32)
        o.sum().backward()
    assert counter.get_total_flops() == 2 * 4 * (3 * 5 + 2 * 7) * (4 * 16 + 3 * 32)


def test_shapes_are_known_without_numbers():
    (q, k, v), where = given_of([(3, 5), (2, 7)], (4, 2, 16, 32))
    arguments = ([q, k, v], where, 7, False, 1.0)
    found = torch.library.opcheck(
        torch.ops.headwise.varlen_attention, arguments, test_utils="test_faketensor"
    )
    assert found == {"test_faketensor": "SUCCESS"}


def called(layer, x, tokens, monkeypatch) -> bool:
    """Whether a call runs the kernel."""
    before, recorded = varlen.attend_varlen, []

    def record_call(*args):
        recorded.append(args)
        return before(*args)

    monkeypatch.setattr(varlen, "attend_varlen", record_call)
    layer(x, sequence=tokens)
    return bool(recorded)


def test_plain_and_short_texts_are_supported(monkeypatch):
    sequence, x = SequenceInfo.packed([[3, 4]]), torch.randn(1, 7, 8)

    def of(**options):
        return hw.Attention(hw.design(model=8, heads=2, **options))

    assert called(of(pattern="causal"), x, sequence, monkeypatch)
    assert called(of(kv=1, modifiers=(hw.Rotary(),)), x, sequence, monkeypatch)
    for other in (
        of(pattern="window(3)"),
        of(modifiers=(hw.Alibi(),)),
        of(normaliser=hw.SinkSoftmax()),
        of(modifiers=(hw.TalkingHeads(),)),
    ):
        assert not called(other, x, sequence, monkeypatch)
    layer = of()
    layer.backend_name = "sdpa"
    assert not called(layer, x, sequence, monkeypatch)
    most = takeover.least("varlen")
    for longest, whole in ((most, True), (most + 1, False)):
        row = SequenceInfo.packed([[longest, 2]])
        assert called(of(), torch.randn(1, row.count, 8), row, monkeypatch) == whole


def test_no_attention_weights_are_saved():
    def saved_bytes(length: int) -> int:
        layer, stored = hw.Attention(hw.design(model=16, heads=2)), dict[int, int]()
        sequence = SequenceInfo.packed([[length] * (256 // length)])

        def keep(tensor):
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = layer(torch.randn(1, 256, 16, requires_grad=True), sequence=sequence)
        assert y.requires_grad
        return sum(stored.values())

    assert saved_bytes(128) <= saved_bytes(4)  # where texts lie takes some bytes too

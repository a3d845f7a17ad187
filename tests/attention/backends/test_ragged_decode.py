"""Ragged decode: the kernel, its backend, and int8 caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise import costs
from headwise.attention.backends import BACKENDS, CallSignature, core_interface, ragged_decode
from headwise.attention.cache.cache_selection import HeadGroupCache
from headwise.kernels import PagedDecodeOptions, attend_paged, attend_paged_reference
from headwise.kernels.paged_decode import KV_BLOCK_SIZE, KV_SPLIT_SIZE
from support import crossover, layer_cases as cases
from support.layer_cases import EXAMPLES, check_close
from support.layer_checks import decode_in_chunks
from support.paged_layers import reference_decode

ENDS = [
    KV_BLOCK_SIZE - 1,
    KV_BLOCK_SIZE,
    KV_BLOCK_SIZE + 1,
    KV_SPLIT_SIZE - 1,
    KV_SPLIT_SIZE,
    KV_SPLIT_SIZE + 1,
    2 * KV_SPLIT_SIZE + 3,
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def everything_is_large():
    """Little work goes to torch's own call: here all of it goes to the kernel."""
    with crossover.sizes(ragged_float32=0, ragged_bfloat16=0):
        yield


def dense(lengths, dim, vdim, heads=6, groups=2, dtype=torch.float64):
    """Queries, keys and values [B, S, G, K] of a dense cache whose rows hold so many tokens, and
    their table.
    """
    batch, slots = len(lengths), max(lengths) + 2
    k, v = (torch.randn(batch, slots, groups, width).to(dtype) for width in (dim, vdim))
    table = torch.tensor([[[row, 0, length]] for row, length in enumerate(lengths)])
    return torch.randn(batch, heads, dim).to(dtype), k, v, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("dim", "vdim", "heads", "groups"),
    [(64, 64, 6, 2), (16, 80, 5, 1), (5, 3, 3, 3), (130, 67, 8, 2)],
)
def test_the_kernel_equals_the_definition(dim, vdim, heads, groups, dtype):
    lengths = [0, 1, KV_BLOCK_SIZE + 1, KV_SPLIT_SIZE + 3]
    q, k, v, table = dense(lengths, dim, vdim, heads, groups, dtype)
    o, lse = attend_paged(q, k.transpose(1, 2), v.transpose(1, 2), table, scale=0.3)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    for row, length in enumerate(lengths):
        expected = reference_decode(q[row], k[row, :length], v[row, :length], 0.3)
        check_close(o[row], expected[0], **close)
        check_close(lse[row], expected[1], **close)


@pytest.mark.parametrize("length", ENDS)
def test_blocks_and_pieces_end_where_they_should(length):
    q, k, v, table = dense([length, 2], 16, 16)
    # the last key has the largest score, so that what was read before it shrinks
    k[0, length - 1] = 2 * q[0, ::3]
    o, _ = attend_paged(q, k.transpose(1, 2), v.transpose(1, 2), table, scale=0.5)
    check_close(o[0], reference_decode(q[0], k[0, :length], v[0, :length], 0.5)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decode_options_count(dtype):
    length = KV_SPLIT_SIZE + 5
    q, k, v, table = dense([length], 16, 16, dtype=dtype)
    bias = torch.randn(1, 6, k.shape[1], dtype=torch.float64)
    bias[:, :, 7] = -torch.inf
    beside = PagedDecodeOptions(bias, torch.randn(6), softcap=1.5)
    o, lse = attend_paged(q, k.transpose(1, 2), v.transpose(1, 2), table, scale=0.5, options=beside)
    result = replace_bias(beside, length)
    expected = reference_decode(q[0], k[0, :length], v[0, :length], 0.5, result)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    check_close(o[0], expected[0], **close)
    check_close(lse[0], expected[1], **close)
    plain = attend_paged_reference(
        q, k.transpose(1, 2), v.transpose(1, 2), table, scale=0.5, options=beside
    )
    check_close(o, plain[0], **close)


def replace_bias(beside, length):
    return beside._replace(bias=beside.bias[:, :, :length])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [None, 1e4, -1e4])
def test_large_scores_make_no_nan(dtype, sink):
    q, k, v, table = dense([KV_SPLIT_SIZE + 9, 40], 16, 16, dtype=dtype)
    k[0, ::2], k[1, :, :] = 1e4, -1e4
    beside = PagedDecodeOptions(sink=None if sink is None else torch.full((6,), sink))
    o, lse = attend_paged(
        q.abs(), k.transpose(1, 2), v.transpose(1, 2), table, scale=1.0, options=beside
    )
    assert o.isfinite().all()
    assert lse.isfinite().all()
    expected = attend_paged_reference(
        q.abs(), k.transpose(1, 2), v.transpose(1, 2), table, scale=1.0, options=beside
    )
    check_close(o, expected[0], rtol=2e-2, atol=2e-2)


def test_rows_without_allowed_keys_are_zero_and_nan_stays_nan():
    q, k, v, _ = dense([5, 5, 5], 16, 16)
    table = torch.tensor([[[0, 3, 3]], [[1, 4, 2]], [[2, 0, 5]]])
    k[2, 1, 0] = torch.nan
    o, lse = attend_paged(q, k.transpose(1, 2), v.transpose(1, 2), table, scale=1.0)
    assert (o[:2] == 0).all()
    assert (lse[:2] == -torch.inf).all()
    assert o[2, :3].isnan().all()
    assert o[2, 3:].isfinite().all()
    hidden = PagedDecodeOptions(bias=torch.full((1, 1, k.shape[1]), -torch.inf))
    table = torch.tensor([[[0, 0, 5]], [[1, 2, 4]]])
    o, lse = attend_paged(
        q[:2], k.transpose(1, 2), v.transpose(1, 2), table, scale=1.0, options=hidden
    )
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rounding_is_no_worse_than_torchs(kind):
    q, k, v, table = dense([900], 64, 64, 8, 2, torch.float32)
    q, k, v = (t.to(kind) for t in (q, k, v))
    exact = reference_decode(q[0], k[0, :900], v[0, :900], 0.125)[0]
    rows = q.view(1, 2, 4, 64), k[:, :900].transpose(1, 2), v[:, :900].transpose(1, 2)
    theirs = torch.nn.functional.scaled_dot_product_attention(*rows, scale=0.125).reshape(8, 64)
    ours, _ = attend_paged(q, k.transpose(1, 2), v.transpose(1, 2), table, scale=0.125)
    assert (ours[0] - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_gradients_are_those_of_the_definition():
    q, k, v, table = dense([4, 2], 5, 3)
    bias, sink = (
        torch.randn(1, 6, k.shape[1], dtype=torch.float64),
        torch.randn(6, dtype=torch.float64),
    )
    result = tuple(t.requires_grad_() for t in (q, k, v, bias, sink))

    def core(q, k, v, bias, sink):
        pages = k.transpose(1, 2), v.transpose(1, 2)
        return attend_paged(
            q, *pages, table, scale=0.5, options=PagedDecodeOptions(bias, sink, softcap=2.0)
        )

    assert torch.autograd.gradcheck(core, result)


def test_the_operation_passes_opcheck():
    q, k, v, table = dense([4, 2], 5, 3)
    nothing = [torch.empty(0)] * 4
    checks = torch.library.opcheck(
        torch.ops.headwise.paged_decode.default,
        (q, k.transpose(1, 2), v.transpose(1, 2), table, nothing, 1.0, 0.0),
    )
    assert set(checks.values()) == {"SUCCESS"}


def test_its_products_are_counted():
    q, k, v, table = dense([40, 30], 16, 24)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        attend_paged(q, k.transpose(1, 2), v.transpose(1, 2), table, scale=1.0)
    assert counter.get_total_flops() == 2 * 2 * 6 * k.shape[1] * (16 + 24)


# --- the backend ----------------------------------------------------------------------------------


RAGGED = [
    name
    for name, spec in EXAMPLES.items()
    if "ragged" in cases.supporting_backends(cases.as_causal(spec), single_query=True)
]


@pytest.mark.parametrize("name", RAGGED)
def test_rows_of_any_length_equal_dense(name):
    spec = cases.as_causal(EXAMPLES[name])
    layer = cases.layer(spec)
    x = torch.randn(3, 2, spec.model, dtype=torch.float64)
    for lengths in ([5, 3, 4], [4, 1, 0]):
        found = {}
        for only in ("dense", "ragged"):
            cache = layer.cache(batch=3, capacity=9)
            layer.backend_name = None
            first = torch.ones(3, 5, spec.model, dtype=torch.float64).cumsum(1)
            layer(first, cache=cache, sequence=hw.SequenceInfo.from_batch(first, lengths=lengths))
            layer.backend_name = only
            found[only] = decode_in_chunks(layer, x, (1, 1), cache)
        check_close(found["ragged"], found["dense"])


def test_a_cache_reports_the_length_of_each_row():
    layer = cases.layer(cases.base(pattern="causal"))
    x = torch.randn(3, 4, 10, dtype=torch.float64)
    cache, recorded = layer.cache(batch=3, capacity=9), []
    layer(x, cache=cache, sequence=hw.SequenceInfo.from_batch(x, lengths=[4, 1, 2]))
    append = cache.append
    cache.append = lambda entry, at: recorded.append(append(entry, at)) or recorded[-1]
    layer(x[:, :1], cache=cache)
    assert recorded[-1][1].visible_per_row.tolist() == [5, 2, 3]
    at = hw.SequenceInfo(torch.tensor([[5], [0], [3]]), torch.tensor([[0], [-1], [0]]))
    layer(x[:, :1], cache=cache, sequence=at)
    assert recorded[-1][1].visible_per_row.tolist() == [6, 0, 4]


def test_packed_documents_do_not_meet_in_a_cache():
    layer = cases.layer(cases.base(pattern="causal"))
    x = torch.randn(2, 4, 10, dtype=torch.float64)
    found = {}
    for only in ("dense", "ragged"):
        cache = layer.cache(batch=2, capacity=9)
        layer.backend_name = None
        layer(
            x[:, :3],
            cache=cache,
            sequence=hw.SequenceInfo.from_batch(
                x[:, :3], segments=torch.tensor([[0, 0, 1], [0, 0, 0]])
            ),
        )
        layer.backend_name = only
        at = hw.SequenceInfo(torch.tensor([[1], [3]]), torch.tensor([[1], [0]]))
        found[only] = layer(x[:, 3:], cache=cache, sequence=at)
    check_close(found["ragged"], found["dense"])


def test_the_faster_backend_runs_a_decode_step():
    spec = cases.base(kv=2, pattern="causal")
    job = CallSignature(spec, spec.core, single_query=True)
    with crossover.sizes(ragged_float32=2 * 2 * 4 * 8 * 5):
        assert ragged_decode.slower_reasons(job, hw.costs.CallSize(1, 1, 1, 4 // 2), "any")
        assert not ragged_decode.slower_reasons(job, hw.costs.CallSize(5, 1, 1, 4), "any")
        assert hw.backends.choose_backend(job, hw.costs.CallSize(1, 1, 1, 2)) is BACKENDS["sdpa"]
        assert hw.backends.choose_backend(job, hw.costs.CallSize(5, 1, 1, 4)) is ragged_decode


def test_unsupported_calls_have_reasons(monkeypatch):
    spec = cases.base(kv=2, pattern="causal")
    job = CallSignature(spec, spec.core, single_query=True)
    assert BACKENDS["ragged"].unsupported_reasons(job) == []
    assert BACKENDS["ragged"].unsupported_reasons(replace(job, device="cuda")) == [
        "has a kernel for the CPU only, not cuda"
    ]
    assert BACKENDS["ragged"].unsupported_reasons(replace(job, dtype=torch.float16)) == [
        "does not support torch.float16"
    ]
    assert BACKENDS["ragged"].unsupported_reasons(replace(job, single_query=False)) == [
        "supports one query per row only"
    ]
    monkeypatch.setattr(
        core_interface, "kernel_problem", lambda: "needs Numba, which is not installed"
    )
    assert BACKENDS["ragged"].unsupported_reasons(job) == ["needs Numba, which is not installed"]
    assert hw.backends.choose_backend(job) is BACKENDS["sdpa"]


# --- caches of 8 bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_cache_of_8_bits_is_near_and_as_large_as_counted(name):
    spec = cases.as_causal(EXAMPLES[name])
    layer = cases.layer(spec)
    if spec.is_recurrent:
        with pytest.raises(hw.SpecError, match="does not support a recurrent state"):
            layer.cache(batch=2, capacity=20, storage_format="int8")
        return
    x = torch.randn(2, 9, spec.model, dtype=torch.float64)
    full, small = (
        layer.cache(batch=2, capacity=20, storage_format=store) for store in (None, "int8")
    )
    expected, y = (decode_in_chunks(layer, x, (5, 1, 2, 1), cache) for cache in (full, small))
    assert (y - expected).abs().max() <= 0.1 * expected.abs().max().clamp(min=1)
    counted = costs.cache_bytes(spec, batch=2, capacity=20, bytes_per_number=8, storage="int8")
    stores = small.caches if isinstance(small, HeadGroupCache) else [small]
    assert (
        small.nbytes
        == counted
        == sum(tensor.nbytes for store in stores for tensor in store.entry.values())
    )


def test_8_bits_are_off_by_half_a_step():
    layer = cases.layer(cases.base(kv=2, vdim=5, pattern="causal"), torch.float32)
    full, small = (
        layer.cache(batch=2, capacity=9, storage_format=store) for store in (None, "int8")
    )
    x = torch.randn(2, 7, 10)
    x[0, 3] = 0.0
    for cache in (full, small):
        layer(x, cache=cache)
    found = small.dequantize(small.entry)
    for name, tensor in full.entry.items():
        step = tensor.abs().amax(-1, keepdim=True) / 127
        assert ((found[name] - tensor).abs() <= 0.5001 * step).all()
    assert small.nbytes < full.nbytes / 2
    with pytest.raises(hw.SpecError, match="int4"):
        layer.cache(batch=2, capacity=9, storage_format="int4")


@pytest.mark.parametrize("pattern", ["causal", "window(5) | first(2)"])
def test_the_kernel_reads_8_bits_as_they_lie(pattern):
    layer = cases.layer(cases.base(kv=2, vdim=5, pattern=pattern), torch.float32)
    x = torch.randn(2, 12, 10)
    found = {}
    with torch.no_grad():
        for only in ("dense", None):
            cache = layer.cache(batch=2, capacity=20, storage_format="int8")
            layer.backend_name = None
            layer(x[:, :9], cache=cache)
            layer.backend_name = only
            found[only] = decode_in_chunks(layer, x[:, 9:], (1, 1, 1), cache)
    check_close(found[None], found["dense"], rtol=1e-4, atol=1e-5)


@pytest.mark.compile
def test_a_step_is_one_graph():
    layer = cases.layer(cases.base(kv=2, pattern="causal"), torch.float32)
    x = torch.randn(2, 1, 10)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    check_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)

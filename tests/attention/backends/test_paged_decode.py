"""Paged decode: equal to one pass for any order of pages and with shared pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.attention import backends
from headwise.attention.backends import CallSignature, CoreInputs
from headwise.attention.backends.backend_report import why
from headwise.attention.cache import PagePool
from headwise.attention.cache.kv_cache import FullVisibility, retained_tokens
from headwise.attention.masking.patterns import Causal
from headwise.models import model_spec as bp
from headwise.models.generation import engine as engine_module
from support import layer_cases as cases
from support.paged_layers import (
    LONGEST,
    MODEL,
    SPECS,
    build_layer,
    decode_step,
    last_output_in_one_pass,
    make_pool,
    prefilled_cache,
)

FEW = settings(max_examples=max(1, settings().max_examples // 4), deadline=None)


# --- as one pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@FEW
@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 12), st.integers(0, LONGEST)), min_size=1, max_size=4
    ),
    page=st.sampled_from([1, 2, 3, 5, 7, 13, 16, 31]),
    row_order=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    order=st.integers(0, 9),
)
def test_rows_read_their_pages_as_one_pass_reads(
    name: str, lengths, page: int, row_order, order: int
):
    """Of any lengths; then some rows leave, some are taken twice and share what they have until
    they part.
    """
    layer = build_layer(name)
    if name == "prefix":
        lengths = [max(3, length) for length in lengths]
    row_order = [n % len(lengths) for n in row_order]
    each = -(-(max(lengths) + 4) // page) + 2
    pool = make_pool(layer.spec, torch.float64, page, each * (len(lengths) + len(row_order)), order)
    x = torch.randn(len(lengths), max(lengths) + 1, MODEL, dtype=torch.float64)
    cache = prefilled_cache(layer, pool, x, lengths)
    texts, nbytes = [row[:length] for row, length in zip(x, lengths, strict=True)], pool.nbytes
    for turn in range(3):
        new = torch.randn(len(texts), 1, MODEL, dtype=torch.float64)
        texts = [torch.cat(value) for value in zip(texts, new, strict=True)]
        ours = decode_step(layer, cache, new, "paged")
        for row, text in zip(ours, texts, strict=True):
            cases.check_close(row, last_output_in_one_pass(layer, text))
        if turn == 0:
            cache.select_rows(torch.tensor(row_order))
            texts = [texts[n] for n in row_order]
    assert pool.nbytes == nbytes  # no step has gathered a page


@pytest.mark.parametrize("name", SPECS)
def test_an_ended_row_attends_to_nothing(name: str):
    layer = build_layer(name)
    pool = make_pool(layer.spec, torch.float64, 3, 60, 1)
    x = torch.randn(3, 21, MODEL, dtype=torch.float64)
    cache = prefilled_cache(layer, pool, x, [20, 7, 10])
    position = torch.tensor([[20], [0], [10]])
    at = hw.SequenceInfo(position, torch.tensor([[0], [-1], [0]]))
    ours = decode_step(layer, cache, x[:, 20:], "paged", sequence=at)
    assert not ours[1].any()
    cases.check_close(ours[0], last_output_in_one_pass(layer, x[0]))
    cases.check_close(ours[2], last_output_in_one_pass(layer, torch.cat([x[2, :10], x[2, 20:]])))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("grouped", torch.float32),
        ("cap", torch.bfloat16),
        ("sink", torch.float32),
        ("gaps", torch.bfloat16),
    ],
)
def test_errors_equal_those_of_gathered_keys(name: str, dtype: torch.dtype):
    layer, exact = build_layer(name, dtype), build_layer(name)
    lengths = [287, 16, 130]
    x = torch.randn(3, 288, MODEL).to(dtype)
    new = x[:, 287:]
    far = {}
    for only in ("paged", "dense"):
        cache = prefilled_cache(layer, make_pool(layer.spec, dtype, 16, 60, 2), x, lengths)
        far[only] = decode_step(layer, cache, new, only).double()
    exact.load_state_dict({name: tensor.double() for name, tensor in layer.state_dict().items()})
    truth = torch.stack(
        [
            last_output_in_one_pass(exact, torch.cat([x[b, :n], new[b]]).double())
            for b, n in enumerate(lengths)
        ]
    )
    error = {only: (y - truth).abs().max().item() for only, y in far.items()}
    assert error["paged"] <= 2 * error["dense"] + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(dtype: torch.dtype):
    layer = build_layer("sinks", dtype)
    other = build_layer("grouped", dtype)
    x, threads, recorded = torch.randn(4, 900, MODEL).to(dtype), torch.get_num_threads(), []
    lengths = [899, 3, 411, 0]
    try:
        for count in (1, 2):
            torch.set_num_threads(1)
            caches = [
                prefilled_cache(each, make_pool(each.spec, dtype, 16, 300, 4), x, lengths)
                for each in (layer, other)
            ]
            torch.set_num_threads(count)
            each = zip((layer, other), caches, strict=True)
            recorded.append([decode_step(one, cache, x[:, 899:], "paged") for one, cache in each])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*recorded, strict=True))


def test_scores_that_are_huge_stay_numbers():
    layer = build_layer("grouped")
    x = torch.randn(2, 40, MODEL, dtype=torch.float64) * 3e3
    cache = prefilled_cache(layer, make_pool(layer.spec, torch.float64, 3, 60, 5), x, [39, 5])
    assert decode_step(layer, cache, x[:, 39:], "paged").isfinite().all()


def test_layers_with_one_cache_layout_apply_their_own_patterns():
    """One table for both, all of which only one of them reads."""
    specs = [
        hw.design(model=MODEL, heads=2, dim=3, pattern=text)
        for text in ("causal()", "causal() & dilated(40, 3)")
    ]
    assert [
        FullVisibility(spec.pattern, retained_tokens(spec.pattern)).sees_all(30) for spec in specs
    ] == [True, False]
    layers = [hw.Attention(spec).double() for spec in specs]
    pool = PagePool(specs, pages=20, page=4, dtype=torch.float64)
    caches = pool.caches(
        pool.batch_of([pool.block_tables.new_sequence(), pool.block_tables.new_sequence()])
    )
    x = torch.randn(2, 14, MODEL, dtype=torch.float64)
    for layer, cache in zip(layers, caches, strict=True):
        decode_step(layer, cache, x[:, :9], None)
    for t in range(9, 14):
        for layer, cache in zip(layers, caches, strict=True):
            ours = decode_step(layer, cache, x[:, t : t + 1], "paged")
            cases.check_close(
                ours, torch.stack([last_output_in_one_pass(layer, row[: t + 1]) for row in x])
            )


# --- what is read where it lies, and what is gathered ---------------------------------------------


def test_projections_that_pass_cached_tensors_on_do_so():
    for name, spec in cases.EXAMPLES.items():
        form = spec.projection_form(one=True)
        if form.caches_keys_and_values:
            entry = {
                key: torch.randn(2, 3, *shape) for key, shape in spec.kv_entry_shapes().items()
            }
            p = hw.Attention(spec).weights["project"]
            k, v = form.expand_kv(entry, lambda x, side: x + 1, p)
            assert k is entry["k"], name
            assert v is entry["v"], name


def test_why_reports_the_paged_backend():
    spec = hw.design(model=12, heads=4, kv=2, pattern="causal()")
    assert why(spec, tokens="one", when="paged").backend == "paged"
    assert why(spec, tokens="one").backend != "paged"
    assert why(spec, tokens="one", when="paged").data["paged"]


def test_several_tokens_of_a_row_are_gathered():
    layer = build_layer("grouped")
    pool = make_pool(layer.spec, torch.float64, 4, 20, 0)
    x = torch.randn(2, 9, MODEL, dtype=torch.float64)
    cache = prefilled_cache(layer, pool, x, [5, 5])
    with pytest.raises(ValueError, match="in place for 2 tokens per row"):
        cache.extend_in_place({}, hw.SequenceInfo.contiguous(5, 2, "cpu"))
    cases.check_close(
        decode_step(layer, cache, x[:, 5:8])[:, -1:],
        torch.stack([last_output_in_one_pass(layer, row[:8]) for row in x]),
    )
    assert pool.nbytes > pool.storage.nbytes


def test_probed_layers_gather_their_keys():
    """Whoever looks at keys of a call has those of each row side by side, zero where a row has
    none.
    """
    layer, recorded = build_layer("sinks"), []
    pool = make_pool(layer.spec, torch.float64, 4, 20, 0)
    pool.storage.fill_(torch.nan)  # the page that stands for none, too
    x = torch.randn(2, 31, MODEL, dtype=torch.float64)
    cache = prefilled_cache(layer, pool, x, [30, 8])
    attend = backends.paged_decode.attend

    def watched(job: CallSignature, inputs: CoreInputs) -> torch.Tensor:
        recorded.append(inputs)
        return attend(job, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends.paged_decode, "attend", watched)
        ours = decode_step(layer, cache, x[:, 30:], "paged")
    inputs = backends.gather_pages(recorded[0])
    unheld = ~inputs.mask.keys.is_real
    assert unheld.any()
    for tensor in (inputs.k, inputs.v):
        assert tensor.isfinite().all()
        assert (tensor[unheld] == 0).all()
    job = CallSignature(layer.spec, layer.spec.core, dtype=torch.float64, single_query=True)
    o = backends.BACKENDS["dense"].attend(job, inputs)
    cases.check_close(layer.merge_heads(o), ours)


def test_products_are_counted():
    layer = build_layer("grouped")
    pool = make_pool(layer.spec, torch.float64, 4, 20, 0)
    x = torch.randn(2, 9, MODEL, dtype=torch.float64)
    cache = prefilled_cache(layer, pool, x, [7, 7])
    with FlopCounterMode(display=False) as counter:
        decode_step(layer, cache, x[:, 7:8], "paged")
    job = CallSignature(layer.spec, layer.spec.core, single_query=True, has_paged_cache=True)
    core = backends.paged_decode.executed_flops(job, hw.costs.CallSize(2, 1, 1, 8))
    assert (
        counter.get_flop_counts()["Global"][torch.ops.headwise.paged_decode]
        == core
        == 2 * 2 * 6 * 8 * 10
    )


# --- the engine -----------------------------------------------------------------------------------


def language(*specs: hw.AttentionSpec) -> hw.Transformer:
    blocks = [
        bp.BlockSpec(spec, feed=bp.FeedForwardSpec(18), norm=bp.NormSpec("rms")) for spec in specs
    ]
    stack = bp.StackSpec.from_blocks(
        "decoder", 16, blocks, embedding=bp.EmbeddingSpec(13), norm=bp.NormSpec("rms")
    )
    return hw.build(
        bp.ModelSpec("tiny", "decoder", (stack,), heads=(bp.OutputHeadSpec("tokens", 13),)), seed=1
    ).eval()


def answered(
    net: hw.Transformer, patch: pytest.MonkeyPatch, sizes: list[int]
) -> tuple[hw.Engine, list[int], int]:
    """An engine that has answered such prompts; rows of each call of one token, and how often pages
    were gathered.
    """
    engine = hw.Engine(
        net, budget=4_000_000, batching=hw.generation.BatchingConfig(page=4, chunk=512)
    )
    rows, gathered, hidden, gather = [], [], net.hidden, PagePool.gather

    def called(x: Any, **how):
        ids = getattr(x, "ids", x)
        rows.extend([len(ids)] if ids.shape[1] == 1 else [])
        return hidden(x, **how)

    patch.setattr(net, "hidden", called)
    patch.setattr(PagePool, "gather", lambda *args: gathered.append(args) or gather(*args))
    streams = [
        engine.submit([n * size % 13 for n in range(size)], max_new_tokens=4) for size in sizes
    ]
    engine.step()
    before, rows[:] = len(gathered), []
    engine.finish_requests()
    arguments = rows[:], len(gathered) - before
    for stream, size in zip(streams, sizes, strict=True):
        assert (
            stream.ids
            == hw.generation.greedy_decode(
                net, torch.tensor([[n * size % 13 for n in range(size)]]), max_new_tokens=4
            )[0]
        )
    return engine, *arguments


def test_an_engine_with_paged_layers_gathers_no_keys(monkeypatch: pytest.MonkeyPatch):
    near, far = (
        hw.design(model=16, heads=4, kv=2, pattern=text)
        for text in ("window(9) | first(2)", "causal()")
    )
    net = language(near, far)
    # a call of its own would cost nothing
    monkeypatch.setattr(engine_module, "CALL_OVERHEAD_BYTES", -(10**9))
    engine, rows, gathered = answered(net, monkeypatch, [50, 3, 7])
    assert not engine.memory.gathers
    assert rows == [3] * 2
    assert gathered == 0


def test_an_engine_gathers_the_pages_of_some_layers(monkeypatch: pytest.MonkeyPatch):
    far = hw.design(model=16, heads=4, kv=2, pattern="causal()")
    net = language(
        far, hw.design(model=16, heads=4, pattern="causal()", normaliser=hw.parts.Entmax()), far
    )
    net.stacks["decoder"].blocks[2].attentions["attention"].backend_name = "dense"
    monkeypatch.setattr(engine_module, "CALL_OVERHEAD_BYTES", -(10**9))
    engine, rows, gathered = answered(net, monkeypatch, [50, 3, 7])
    assert engine.memory.gathers
    assert set(rows) == {1}  # each row in a call of its own, as that costs nothing here
    assert gathered == 2 * 3 * 2  # layers, rows, steps


def test_reach_is_computed_again_for_longer_rows():
    """A pattern that reads all of a short text may leave keys out of a long one."""
    reach = FullVisibility(hw.patterns.Window(500), Causal())
    assert [reach.sees_all(used) for used in (2, 7, 8)] == [True, True, True]
    assert reach.num_counted == 128  # ahead of need, and not at every step
    assert [reach.sees_all(used) for used in (2000, 1, 10**6)] == [False, False, False]

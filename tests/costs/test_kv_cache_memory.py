"""KV cache memory: our own caches, paged allocators, and published numbers of serving engines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import headwise as hw
from headwise.cache.slot_caches import split_by_retention
from headwise.costs.kv_cache_memory import (
    CacheAllocator,
    RequestBatch,
    group_attentions,
    kv_cache_bytes,
    list_cache_terms,
)
from headwise.costs.roofline import NumberFormats
from headwise.costs.serving_capacity import last_where
from headwise.families import read_model_spec
from support import layer_cases as cases
from support.model_configs import LLAMA3, gemma_3_1b

CACHED_SPECS = {
    name: spec
    for name, spec in (
        cases.EXAMPLES | {name: hw.design(preset=name) for name in hw.PRESETS}
    ).items()
    if spec.pattern.tokens_before_decode is not None and spec.source is None
}
CACHED_SPECS["sinks"] = cases.base(kv=2, pattern="window(5) | first(3)")
V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
}
V3 |= {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
}


@pytest.mark.parametrize("allocator", ["ideal", "ring"])
@pytest.mark.parametrize("name", CACHED_SPECS)
def test_our_own_caches_hold_as_many_bytes(name: str, allocator: str):
    spec = CACHED_SPECS[name]
    for length in (1, 4, 41, 600):
        cache = hw.KVCache.for_spec(spec, batch=3, capacity=length)
        assert (
            kv_cache_bytes(spec, RequestBatch.uniform(3, length), allocator, "fp32") == cache.nbytes
        )
    half = hw.KVCache.for_spec(spec, batch=1, capacity=9, dtype=torch.bfloat16)
    assert kv_cache_bytes(spec, RequestBatch.uniform(1, 9), allocator, "bf16") == half.nbytes


def test_a_model_caches_the_bytes_of_its_layers():
    model = read_model_spec(
        LLAMA3 | {"num_hidden_layers": 3, "model_type": "mistral", "sliding_window": 11}
    )
    stored = sum(
        hw.KVCache.for_spec(spec, batch=2, capacity=17).nbytes
        for _, spec in model.attention_specs()
    )
    assert (
        kv_cache_bytes(model, RequestBatch.uniform(2, 17), "ring", "fp32")
        == stored
        == 3 * 2 * 11 * 8 * 2 * 128 * 4
    )


# --- published ------------------------------------------------------------------------------------


def test_bytes_of_a_token():
    for config, each in ((LLAMA3, 131_072), (V3, 70_272), ({"model_type": "gpt_oss"}, 73_728)):
        assert (
            kv_cache_bytes(read_model_spec(config), RequestBatch.uniform(1, 1), "unified") == each
        )


def test_gemma_3_1b_at_32768():
    """139.0 MiB as rings, 832 MiB where every layer keeps every token (mlxcel 172)."""
    model, rows = gemma_3_1b(), RequestBatch.uniform(1, 32768)
    assert kv_cache_bytes(model, rows, "ring") == 1024 * (22 * 512 + 4 * 32768) == 139 * 2**20
    assert kv_cache_bytes(model, rows, "unified") == 1024 * 26 * 32768 == 832 * 2**20


@pytest.mark.parametrize(("allocator", "less"), [("unified", 78_383), ("unified(16)", 78_368)])
def test_gpt_oss_120b_in_vllm(allocator: str, less: int):
    """A log of vLLM says 5.38 GiB for a cache, and 78,384 tokens in it (hf-mem 60)."""
    model, memory = read_model_spec({"model_type": "gpt_oss"}), 78_384 * 73_728

    def most(memory: int) -> int:
        return last_where(
            lambda tokens: (
                kv_cache_bytes(model, RequestBatch.uniform(1, tokens), allocator) <= memory
            )
        )

    assert f"{memory / 2**30:.2f}" == "5.38"
    assert (most(memory), most(memory - 1)) == (78_384, less)


def test_int8_has_a_scale_for_each_head():
    assert kv_cache_bytes(
        read_model_spec(LLAMA3), RequestBatch.uniform(2, 100), dtype="int8"
    ) == 2 * 100 * 32 * (2 * 8 * 128 + 2 * 8 * 4)
    assert kv_cache_bytes(read_model_spec(V3), RequestBatch.uniform(1, 1), dtype="int8") == 61 * (
        512 + 4 + 64 + 4
    )


def test_a_state_keeps_float32_whatever_the_cache():
    spec = hw.design(preset="linear")
    assert kv_cache_bytes(spec, RequestBatch.uniform(1, 5), dtype="int8") == kv_cache_bytes(
        spec, RequestBatch.uniform(1, 50_000), dtype="fp32"
    )


def test_cross_attention_caches_its_source_once():
    model = read_model_spec(
        {"model_type": "bart", "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2}
    )
    assert (
        kv_cache_bytes(model, RequestBatch.uniform(3, 5, source=7)) == 2 * 3 * (5 + 7) * 2 * 16 * 2
    )
    with pytest.raises(hw.SpecError, match="give source"):
        kv_cache_bytes(model, RequestBatch.uniform(3, 5))


# --- pages, one by one ----------------------------------------------------------------------------


def live(memory: tuple[int, int | None], length: int) -> set[int]:
    """Tokens that a query after so many may still read, its own slot being one of the window's."""
    first, values = memory
    return {j for j in range(length) if values is None or j < first or j >= length - values}


FORGETS = st.tuples(st.integers(0, 9), st.integers(1, 12))  # a token reads itself
MEMORIES = st.one_of(st.just((0, None)), FORGETS)


@given(MEMORIES, st.integers(1, 6), st.integers(1, 40))
def test_pages_are_those_that_hold_something(memory, page, length):
    most = max(len({j // page for j in live(memory, end)}) for end in range(1, length + 1))
    assert CacheAllocator("paged", page).num_slots(memory, length) == most * page
    assert CacheAllocator("unified", page).num_slots(memory, length) == -(-length // page) * page


@given(MEMORIES, st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 30))
def test_a_shared_prefix_is_stored_once(memory, lengths, shared):
    shared = min(shared, *lengths)
    tensors = {
        (j,) if j < shared else (row, j)
        for row, length in enumerate(lengths)
        for j in live(memory, length)
    }
    spec = cases.base(pattern=_pattern(memory))
    (term,) = list_cache_terms(
        group_attentions(spec),
        RequestBatch.from_lengths(lengths, shared),
        CacheAllocator(),
        NumberFormats(),
    )
    assert term.value == len(tensors) * 2 * 6 * 4 * 2


def _pattern(memory: tuple[int, int | None]) -> hw.Pattern:
    """A pattern that remembers just this."""
    first, values = memory
    if values is None:
        return hw.Causal()
    return hw.Window(values) | hw.First(first) if first else hw.Window(values)


def test_only_whole_pages_of_a_beginning_are_shared():
    spec = hw.design(model=8, heads=1, pattern="causal")  # 32 bytes of a token
    assert kv_cache_bytes(spec, RequestBatch.uniform(3, 10, shared=7), "paged(4)") == 32 * (
        4 + 3 * 8
    )
    assert kv_cache_bytes(spec, RequestBatch.uniform(3, 10, shared=7), "unified(4)") == 32 * (
        4 + 3 * 8
    )
    assert kv_cache_bytes(spec, RequestBatch.uniform(3, 10, shared=7), "ideal") == 32 * (7 + 3 * 3)
    with pytest.raises(hw.SpecError, match="cannot share 7 tokens"):
        kv_cache_bytes(spec, RequestBatch.uniform(3, 10, shared=7), "ring")


@given(st.sampled_from(sorted(CACHED_SPECS)), st.integers(1, 300), st.integers(1, 5))
def test_pages_of_one_token_waste_nothing(name, length, batch):
    spec = CACHED_SPECS[name]
    for allocator in ("ideal", "ring", "paged(7)", "unified", "unified(7)"):
        exact, longer, more = (
            kv_cache_bytes(spec, rows, allocator)
            for rows in (
                RequestBatch.uniform(batch, length),
                RequestBatch.uniform(batch, length + 1),
                RequestBatch.uniform(batch + 1, length),
            )
        )
        assert exact <= longer
        assert exact < more
    ideal, pages, larger_pages = (
        kv_cache_bytes(spec, RequestBatch.uniform(batch, length), allocator)
        for allocator in ("ideal", "paged(1)", "paged(7)")
    )
    assert ideal <= pages <= larger_pages
    if not split_by_retention(spec):  # pages hold the tokens that any head needs
        assert ideal == pages


@pytest.mark.parametrize(
    "text", ["ideal", "ring", "paged(1)", "paged(16)", "unified", "unified(16)"]
)
def test_an_allocator_is_written_as_it_is_read(text: str):
    assert str(CacheAllocator.from_text(text)) == text


def test_invalid_allocators_are_refused():
    for text, message in {
        "page": "did you mean 'paged'",
        "paged": "needs a page size in tokens",
        "paged(-1)": "must be at least 1, got paged(-1)",
        "ring(3)": "ring has no pages",
        "paged(x)": "write ideal, ring, paged(16) or unified",
        "": "write ideal",
    }.items():
        with pytest.raises(hw.SpecError) as excinfo:
            CacheAllocator.from_text(text)
        assert message in str(excinfo.value)


def test_models_without_decoding_are_refused():
    with pytest.raises(hw.SpecError, match="give a decoder"):
        kv_cache_bytes(read_model_spec({"model_type": "bert"}), RequestBatch())
    with pytest.raises(hw.SpecError, match="reads future tokens"):
        kv_cache_bytes(hw.design(preset="mha"), RequestBatch())

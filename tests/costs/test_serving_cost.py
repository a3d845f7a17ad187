"""Serving cost: steps, prompts and capacity by hand for Llama-3-8B, by exhaustive search, and by
re-estimation.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import headwise as hw
from headwise import cli
from headwise.costs.cost_report import estimate_cost
from headwise.costs.decode_intensity import DecodeLayer
from headwise.costs.kv_cache_memory import (
    AttentionGroup,
    CacheAllocator,
    RequestBatch,
    WeightMatrixGroup,
    group_matrices,
    kv_cache_bytes,
    parse_lengths,
)
from headwise.costs.roofline import Device, NumberFormats
from headwise.costs.serving_capacity import (
    MemoryDemand,
    check_memory_fit,
    max_context,
    max_requests,
    parse_bytes,
)
from headwise.costs.serving_cost import RequestChunk, ServingCost, chunk_cost, flops_by_part
from headwise.costs.throughput_report import ThroughputReport
from headwise.costs.weight_storage import WeightStorage
from headwise.families import read_model_spec
from headwise.model_spec import ExpertsSpec, FeedForwardSpec
from headwise.model_spec.components import make_weight
from support.model_configs import LLAMA3, gemma_3_1b

H200 = Device.from_name("h200")
LLAMA = read_model_spec(LLAMA3)
WEIGHTS = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)  # matrices of layers
HEAD = 4096 * 128256
GQA = hw.design(preset="gqa", model=64, heads=4)
V3 = hw.design(
    model=7168,
    heads=128,
    dim=128,
    pattern="causal",
    project=hw.Latent(rank=512, rope=64, query_rank=1536),
    modifiers=(hw.Rotary(pairs="interleaved"),),
)
# A device on which small layers have corners at small numbers.
SMALL = Device("small", "a small one", {"bf16": 12.0, "fp16": 12.0, "fp32": 6.0}, 1.0, 2.0**20)


# --- one step -------------------------------------------------------------------------------------


def test_a_step_of_llama_3_8b_by_hand():
    """Every matrix meets every token; 4 x 32 x 128 products for each key, 4,096 bytes of each token
    and layer.
    """
    batch, context = 16, 8192
    step = ServingCost(LLAMA, H200).decode_step(RequestBatch.uniform(batch, context))
    matrices, cores = step.weight_operations, step.core_operations
    assert sum(one.flops for one in matrices) == 2 * batch * (WEIGHTS + HEAD)
    flowing = (
        32 * (2 * 4096 + 3 * (4096 + 14336)) + 4096 + 128256
    )  # in and out of attentions, maps, and the head
    assert sum(one.moved for one in matrices) == 2 * (WEIGHTS + HEAD) + 2 * batch * flowing
    assert [one.flops for one in cores] == [32 * batch * context * 4 * 32 * 128]
    assert [one.moved for one in cores] == [32 * batch * (context * 4096 + 2 * 2 * 4096)]
    assert step.seconds == pytest.approx(
        sum(max(o.flops / 989e12, o.moved / 4.8e12) for o in step.operations)
    )


def test_a_beginning_that_rows_share_is_read_once():
    """By whole pages of 16; each row reads what is its own, and all products are made for each."""
    rows = RequestBatch(((8000, 3), (5000, 1)), shared_prefix=1000)
    each, brought = 4096, 2 * 2 * 4096
    for allocator, once in (
        (CacheAllocator(), 1000),
        (CacheAllocator("paged", 16), 992),
        (CacheAllocator("ring"), 0),
    ):
        together = ServingCost(LLAMA, H200, allocator=allocator).decode_step(rows)
        separate = ServingCost(LLAMA, H200, allocator=allocator).decode_step(
            replace(rows, shared_prefix=0)
        )
        assert [one.flops for one in together.core_operations] == [
            one.flops for one in separate.core_operations
        ]
        assert [one.moved for one in separate.core_operations] == [
            32 * (29000 * each + 4 * brought)
        ]
        assert [one.moved for one in together.core_operations] == [
            32 * ((29000 - 3 * once) * each + 4 * brought)
        ]
    assert (
        ServingCost(LLAMA, H200).mixed_step(rows, 4, past=9).core_operations[0]
        == ServingCost(LLAMA, H200).decode_step(rows).core_operations[0]
    )


def test_windows_read_only_their_reach_of_a_shared_prefix():
    spec = hw.design(model=64, heads=1, pattern="window(20) | first(3)")
    rows = RequestBatch(((25, 2), (40, 1)), shared_prefix=10)
    (core,) = ServingCost(spec, H200).decode_step(rows).core_operations
    stored = 256  # bytes of a token: two of 64 numbers
    # Rows of 25 reach tokens 0 to 2 and 5 to 24, of which 8 are shared; the one of 40 reaches 0 to
    # 2 of these.
    assert core.moved == stored * (2 * 23 + 23 - (2 * 8 + 3) + 8) + 3 * 2 * 2 * 64
    (state,) = (
        ServingCost(hw.design(preset="linear", model=64, heads=1), H200)
        .decode_step(rows)
        .core_operations
    )
    assert (
        state
        == ServingCost(hw.design(preset="linear", model=64, heads=1), H200)
        .decode_step(replace(rows, shared_prefix=0))
        .core_operations[0]
    )


def test_a_mixed_step_by_hand():
    """Three rows of 5 tokens get one more, while tokens 7 to 9 of a prompt are taken."""
    step = ServingCost(GQA, H200).mixed_step(RequestBatch.uniform(3, 5), tokens=3, past=7)
    decoding, prompt = step.core_operations
    assert decoding.flops == 3 * 5 * 4 * 64
    assert prompt.flops == (8 + 9 + 10) * 4 * 64
    assert prompt.moved == 10 * 2 * 16 * 2 + 2 * 3 * 2 * 64
    (projections,) = step.weight_operations
    assert projections.flops == 2 * (3 + 3) * hw.costs.count_parameters(GQA)


def test_a_prompt_is_answered_once():
    """Logits of its last token alone, and none of the others'."""
    step = ServingCost(LLAMA, H200).mixed_step(RequestBatch.uniform(3, 5), tokens=100)
    (head,) = [one for one in step.weight_operations if one.name == "head"]
    assert head.flops == 2 * (3 + 1) * HEAD


def test_a_prompt_that_ends_in_one_token_joins_the_decoding():
    """A call of the same kind as a row's is one more of them, and not in its place."""
    serving = ServingCost(GQA, H200)
    assert serving.mixed_step(RequestBatch.uniform(3, 8), tokens=1, past=7) == serving.decode_step(
        RequestBatch.uniform(4, 8)
    )


PRICED = {
    name: hw.design(preset=name, model=256, heads=8)
    for name in ("gqa", "mla", "moh", "dcmha", "diff", "linear")
}
PRICED |= {
    "llama": LLAMA,
    "gpt-oss": read_model_spec({"model_type": "gpt_oss"}),
    "deepseek": read_model_spec({"model_type": "deepseek_v3"}),
}
PRICED |= {
    "bart": read_model_spec({"model_type": "bart"}),
    "gpt2": read_model_spec({"model_type": "gpt2"}),
}


@pytest.mark.parametrize("name", PRICED)
def test_a_step_has_the_estimated_cost(name: str):
    """Counted by other code, from other declarations: products by bills, and bytes by roles of
    weights.
    """
    described = PRICED[name]
    cost = estimate_cost(described, hw.Workload(batch=3, context=500, source=70))
    step = ServingCost(described, H200, source_tokens=70).decode_step(RequestBatch.uniform(3, 500))
    assert cost.decode_flops is not None
    assert sum(one.flops for one in step.operations) == cost.decode_flops.total
    weights = [
        one
        for one in cost.operations["decode"]
        if one.name.split()[-1] not in ("core", "embedding")
    ]
    assert sum(one.moved for one in step.weight_operations) == sum(one.moved for one in weights)
    assert sum(one.seconds for one in step.weight_operations) == pytest.approx(
        sum(one.seconds for one in weights)
    )
    demand = MemoryDemand(
        ServingCost(described, H200, source_tokens=70), RequestBatch.uniform(3, 500, source=70)
    )
    assert sum(term.value for term in demand.cache_terms) == cost.cache_bytes
    assert demand.serving.weights.bytes == cost.weights_bytes


@pytest.mark.parametrize("name", hw.PRESETS)
def test_parts_are_the_whole(name: str):
    spec = hw.design(preset=name)
    for call in (RequestChunk(1, 30), RequestChunk(5, 30), RequestChunk(5)):
        cost = chunk_cost(AttentionGroup("attention", spec), call, NumberFormats())
        assert sum(flops_by_part(spec, call).values()) == cost.weight_flops
        assert cost.core_flops > 0
        assert cost.bytes_moved > 0


def test_experts_are_read_once_and_computed_for_every_token():
    """The expected number of different experts is 4 (1 - 2^-n), if each token chooses 2 of 4."""
    router = make_weight("decoder.0.feed.router", "expert model", expert=4, model=10)
    up = make_weight(
        "decoder.0.feed.each.up", "expert hidden model", expert=4, hidden=10, model=100
    )
    down = make_weight(
        "decoder.0.feed.each.down", "expert model hidden", expert=4, hidden=10, model=100
    )
    feed = WeightMatrixGroup(
        "experts", 1, (router,), (up, down), num_experts=4, num_active_experts=2
    )
    moved = [feed.bytes_moved(tokens, WeightStorage("fp32")) for tokens in (1, 2, 3)]
    assert moved == [4 * (40 + n * 2000) for n in (2, 3, 3.5)]
    assert feed.flops(3) == 2 * 3 * (40 + 2 * 2000)
    assert feed.numbers_per_token == 14 + 2 * 220


@pytest.mark.parametrize(
    ("count", "active", "tokens"), [(4, 1, 3), (4, 2, 3), (5, 3, 2), (3, 3, 2), (6, 2, 1)]
)
def test_tokens_share_experts_as_often_as_all_their_choices_do(
    count: int, active: int, tokens: int
):
    """The mean over every possible choice of every token."""
    choices = list(itertools.combinations(range(count), active))
    numbers = [len(set().union(*chosen)) for chosen in itertools.product(choices, repeat=tokens)]
    experts = ExpertsSpec(FeedForwardSpec(3), count, active)
    assert experts.expected_experts(tokens) == pytest.approx(sum(numbers) / len(numbers), rel=1e-12)


def test_32_rows_of_gpt_oss_read_82_of_128_experts():
    """By 1 - (31/32)^32 of them in gpt-oss-120b, and nearly all 32 in gpt-oss-20b; both reports
    read the same.
    """
    expert = 3 * 2880**2 * 17 // 32 + 2 * 3 * 2880
    for name, layers, count, read in (
        ("gpt-oss-120b", 36, 128, 81.65),
        ("gpt-oss-20b", 24, 32, 31.55),
    ):
        model = read_model_spec(name)
        share = 1 - (1 - 4 / count) ** 32
        assert count * share == pytest.approx(read, abs=0.01)
        others = 2 * 2880 * count + 2 * count + 2 * 32 * (2880 + count + 4 * 3 * 2 * 2880)
        expected = layers * (count * share * expert + others)
        served = (
            ServingCost(model, H200).decode_step(RequestBatch.uniform(32, 100)).weight_operations
        )
        (feed,) = [one for one in served if one.name.endswith("experts")]
        assert feed.moved == pytest.approx(expected, rel=1e-9)
        (feed,) = [
            one
            for one in estimate_cost(model, hw.Workload(batch=32, context=100)).operations["decode"]
            if one.name == "feed-forward"
        ]
        assert feed.moved == pytest.approx(expected, rel=1e-9)


def test_a_window_and_a_state_stop_growing():
    for spec in (replace(GQA, pattern=hw.Window(9)), hw.design(preset="linear", model=64, heads=4)):
        steps = [ServingCost(spec, H200).decode_step(RequestBatch.uniform(2, n)) for n in (9, 900)]
        assert steps[0] == steps[1]


def test_layers_and_rows_of_many_lengths_add_up():
    one, three = (
        ServingCost(GQA, H200, num_layers=n).decode_step(RequestBatch.from_lengths([5, 9, 5]))
        for n in (1, 3)
    )
    assert three.seconds == pytest.approx(3 * one.seconds)
    assert one.core_operations[0].flops == (5 + 9 + 5) * 4 * 64


def test_int8_weights_and_cache_are_read_as_bytes():
    narrow = ServingCost(GQA, H200, NumberFormats(weights="int8", cache="int8")).decode_step(
        RequestBatch.uniform(1, 100)
    )
    shapes = [(64, 64), (16, 64), (16, 64), (64, 64)]
    assert narrow.weight_operations[0].moved == sum(a * b + 4 * a for a, b in shapes) + 2 * 2 * 64
    assert narrow.core_operations[0].moved == 100 * 2 * (16 + 4) + 2 * 2 * 64


# --- where something turns ------------------------------------------------------------------------


def test_weights_alone_wait_for_compute_from():
    """peak x bytes / (2 x bandwidth): A100 312e12 / 2.039e12, H100 989e12 / 3.35e12, H200 989e12 /
    4.8e12.
    """
    assert [
        round(Device.from_name(n).compute_bound_tokens("bf16")) for n in ("a100", "h100", "h200")
    ] == [
        153,
        295,
        206,
    ]
    assert (
        Device.from_name("h100").compute_bound_tokens("bf16", "int8")
        == Device.from_name("h100").compute_bound_tokens("bf16") / 2
    )


def turns(serving: ServingCost, tokens: int) -> bool:
    weights = serving.decode_step(RequestBatch.uniform(tokens, 1)).weight_operations
    device = serving.device
    return (
        sum(one.flops for one in weights) / device.flops["bf16"]
        >= sum(o.moved for o in weights) / device.bandwidth
    )


def test_products_turn_and_cores_overtake_at_the_first_such_number():
    serving = ServingCost(GQA, SMALL, num_layers=2)
    tokens = serving.compute_bound_tokens()
    assert tokens == next(n for n in range(1, 1000) if turns(serving, n))
    context = serving.core_dominates_from(3)
    steps = (serving.decode_step(RequestBatch.uniform(3, n)) for n in range(1, 1000))
    longer = (
        sum(o.seconds for o in step.core_operations)
        >= sum(o.seconds for o in step.weight_operations)
        for step in steps
    )
    assert context == next(n for n, holds in enumerate(longer, 1) if holds)
    assert ServingCost(GQA, replace(SMALL, bandwidth=1e-3)).compute_bound_tokens() is None
    assert (
        ServingCost(replace(GQA, pattern=hw.Window(2)), SMALL, num_layers=2).core_dominates_from(1)
        is None
    )


def test_llama_turns_a_little_above_the_weights_alone():
    """2 T W / peak = (2 W + 2 T flowing) / bandwidth."""
    ridge, flowing = 989e12 / 4.8e12, 32 * (2 * 4096 + 3 * (4096 + 14336)) + 4096 + 128256
    exact = (WEIGHTS + HEAD) * ridge / (WEIGHTS + HEAD - ridge * flowing)
    assert ServingCost(LLAMA, H200).compute_bound_tokens() == -(-exact // 1) == 220


def test_the_first_token_waits_for_every_chunk():
    serving, beside = ServingCost(GQA, H200), RequestBatch.uniform(2, 30)
    chunks = [(4, 0), (4, 4), (2, 8)]
    waited = sum(serving.mixed_step(beside, tokens, past).seconds for tokens, past in chunks)
    assert serving.first_token_seconds(10, 4, beside) == pytest.approx(waited)
    with pytest.raises(hw.SpecError, match="give a chunk of 245 or more"):
        serving.first_token_seconds(10**6, 1)


def test_shares_of_a_machine():
    half = ServingCost(GQA, H200.with_efficiency(0.5, 0.5)).decode_step(RequestBatch.uniform(2, 30))
    assert half.seconds == pytest.approx(
        2 * ServingCost(GQA, H200).decode_step(RequestBatch.uniform(2, 30)).seconds
    )


# --- intensity ------------------------------------------------------------------------------------


def test_the_core_has_two_flops_for_each_head_that_shares_a_byte():
    for kv, expected in ((32, 1), (4, 8), (1, 32)):
        spec = hw.design(preset="gqa", model=4096, heads=32, kv=kv)
        core = DecodeLayer(spec, H200, 10**7).components(1)[1]
        assert core.intensity == pytest.approx(expected, rel=1e-4)
    latent = DecodeLayer(V3, Device.from_name("a100"), 10**7)
    assert latent.components(1)[1].intensity == pytest.approx(
        241.8, abs=0.05
    )  # 2 x 128 x 1,088 / (576 x 2)
    assert (
        latent.compute_bound_rows("core"),
        replace(latent, device=Device.from_name("h100")).compute_bound_rows("core"),
    ) == (1, None)


@pytest.mark.parametrize(
    ("dtype", "weights", "each"), [("fp32", "", 0.50), ("bf16", "", 0.9995), ("bf16", "int8", 2.0)]
)
def test_one_vector_and_a_matrix_of_4096(dtype: str, weights: str, each: float):
    spec = hw.design(model=4096, heads=32, pattern="causal")
    output = DecodeLayer(spec, H200, 9, NumberFormats(dtype, weights)).components(1)[2]
    assert output.intensity == pytest.approx(each, rel=3e-3)
    assert output.flops == 2 * 4096**2


def test_a_box_turns_at_the_first_such_number_of_rows():
    boxed = DecodeLayer(GQA, SMALL, 20)
    for n, name in enumerate(("projections", "core", "output")):
        visible = [boxed.components(rows)[n].bound == "compute" for rows in range(1, 200)]
        assert boxed.compute_bound_rows(name) == (
            visible.index(True) + 1 if True in visible else None
        )
    assert boxed.compute_bound_rows("core") is None


# --- memory ---------------------------------------------------------------------------------------


def test_llama_3_8b_on_24_gb_by_hand():
    """16,060,522,496 bytes of weights; 2,048 tokens between layers and inside a feed-forward."""
    working = 2048 * (4096 + 4096 + 2 * 14336) * 2
    demand = MemoryDemand(ServingCost(LLAMA, Device.from_name("rtx4090")))
    most = max_context(demand)
    assert most == (24 * 10**9 - 16_060_522_496 - working) // 131_072 == 59_421
    assert {term.name: term.value for term in demand.terms} == {
        "weights": 16_060_522_496,
        "cache": 2048 * 131_072,
        "hidden states between layers": 2048 * 4096 * 2,
        "inside feed-forward": 2048 * (4096 + 2 * 14336) * 2,
    }
    row, one = (
        2048 * 131_072,
        2 * (2 * 4096 + 2 * 14336),
    )  # each row more is kept, and has one token in a step
    assert (
        max_requests(demand)
        == 1 + (24 * 10**9 - 16_060_522_496 - working - row) // (row + one)
        == 29
    )


@given(
    st.sampled_from(["ideal", "ring", "paged(3)", "paged(16)", "unified(5)"]),
    st.integers(1, 4),
    st.integers(2**15, 2**20),
    st.booleans(),
)
def test_the_longest_context_fits_and_one_token_more_does_not(allocator, batch, memory, mixed):
    spec = replace(GQA, pattern=hw.Window(40) | hw.First(3)) if mixed else GQA
    serving = ServingCost(
        spec, replace(SMALL, memory=memory), allocator=CacheAllocator.from_text(allocator)
    )
    demand = MemoryDemand(serving, RequestBatch.uniform(batch, 50), chunk=8)
    if not demand.with_uniform_requests(batch, 1).fits:
        with pytest.raises(hw.SpecError, match=r"and memory is .* give .* or more"):
            max_context(demand)
        return
    longest, most = (
        max_context(demand),
        max_requests(demand) if demand.with_uniform_requests(1, 50).fits else 0,
    )
    assert longest is None or (
        demand.with_uniform_requests(batch, longest).fits,
        demand.with_uniform_requests(batch, longest + 1).fits,
    ) == (
        True,
        False,
    )
    assert longest is not None or (mixed and demand.with_uniform_requests(batch, 10**9).fits)
    assert (
        most == 0 or demand.with_uniform_requests(most, 50).fits,
        demand.with_uniform_requests(most + 1, 50).fits,
    ) == (True, False)


def test_training_by_hand():
    demand = MemoryDemand(
        ServingCost(LLAMA, H200), RequestBatch.uniform(2, 100), training_bytes_per_parameter=18
    )
    values = {term.name: term.value for term in demand.terms}
    assert values["weights, gradients, optimiser"] == 18 * 8_030_261_248
    assert values["saved inputs of layers"] == 32 * 200 * 4096 * 2
    assert values["inside head"] == 200 * (4096 + 128256) * 2
    assert "cache" not in values
    assert (
        replace(demand, num_devices=2).bytes_per_device
        == 9 * 8_030_261_248 + sum([*values.values()][1:]) // 2
    )


# --- the verdict ----------------------------------------------------------------------------------

DEMANDS = {
    "llama": MemoryDemand(
        ServingCost(LLAMA, Device.from_name("rtx4090")), RequestBatch.uniform(4, 32768)
    ),
    "unified": MemoryDemand(
        ServingCost(
            gemma_3_1b(), replace(H200, memory=2.4e9), allocator=CacheAllocator("unified", 16)
        ),
        RequestBatch.uniform(1, 32768),
    ),
    "lengths": MemoryDemand(
        ServingCost(GQA, replace(SMALL, memory=2**18), num_layers=4),
        RequestBatch.from_lengths([700, 300, 40], shared=30),
        chunk=8,
    ),
    "training": MemoryDemand(
        ServingCost(LLAMA, H200), RequestBatch.uniform(8, 8192), training_bytes_per_parameter=16
    ),
    "latent": MemoryDemand(
        ServingCost(read_model_spec({"model_type": "deepseek_v3"}), H200),
        RequestBatch.uniform(8, 4096),
    ),
}


@pytest.mark.parametrize("name", DEMANDS)
def test_every_remedy_is_enough_and_the_least(name: str):
    demand = DEMANDS[name]
    memory_fit = check_memory_fit(demand)
    assert not memory_fit.fits
    assert memory_fit.remedies
    memory = demand.serving.device.memory
    for remedy in memory_fit.remedies:
        again = replace(remedy.demand, serving=replace(remedy.demand.serving))
        assert again.bytes_per_device <= memory < demand.bytes_per_device, remedy.name
    by_name = {remedy.name: remedy.demand for remedy in memory_fit.remedies}
    assert [str(remedy.name) in str(memory_fit) for remedy in memory_fit.remedies] == [True] * len(
        memory_fit.remedies
    )
    for words, other in by_name.items():
        if words.endswith("weights and cache") and other.num_devices > 1:
            assert not replace(other, num_devices=other.num_devices - 1).fits


def test_the_remedies_of_llama_by_hand():
    """Of 24 GB weights and a step leave 7,788,261,376 bytes; four rows share them."""
    left = 24 * 10**9 - 16_060_522_496 - 2051 * (2 * 4096 + 2 * 14336) * 2
    values = {remedy.name for remedy in check_memory_fit(DEMANDS["llama"]).remedies}
    tokens = left // (4 * 131_072)
    assert f"a context of {tokens:,} tokens" in values
    assert f"window({tokens}) in layers with full attention" in values
    assert "1 row" in values
    fewer = kv_cache_bytes(
        read_model_spec(LLAMA3 | {"num_key_value_heads": 2}), RequestBatch.uniform(4, 32768)
    )
    saved = 2 * 32 * 2 * 4096 * (8 - 2) * 128
    assert ("kv=2 in every layer" in values) == (fewer <= left + saved)
    assert "kv=4 in every layer" not in values
    assert not any(name.startswith("int8 cache") for name in values)


def test_the_first_requests_of_several_lengths_are_kept():
    """59,419 tokens of llama's cache are left: two requests of 20,000 and one of 10,000 fit, a
    second one does not.
    """
    lengths = (20_000, 20_000, 10_000, 10_000, 10_000, 30_000)
    demand = replace(DEMANDS["llama"], requests=RequestBatch.from_lengths(lengths))
    values = {remedy.name: remedy.demand for remedy in check_memory_fit(demand).remedies}
    assert values["3 rows"].requests.counts_by_length == ((20_000, 2), (10_000, 1))


def test_one_key_value_head_is_a_remedy_for_two():
    """Two key-value heads of llama leave 8.2 GB, 249,968 tokens; one leaves
    room for twice as many.
    """
    serving = ServingCost(
        read_model_spec(LLAMA3 | {"num_key_value_heads": 2}), DEMANDS["llama"].serving.device
    )
    demand = replace(DEMANDS["llama"], serving=serving, requests=RequestBatch.uniform(4, 65_000))
    assert "kv=1 in every layer" in {remedy.name for remedy in check_memory_fit(demand).remedies}


def test_remedies_cost_what_their_configs_cost():
    """Fewer key-value heads and a window, priced once more as models of their own."""
    demand = replace(DEMANDS["llama"], requests=RequestBatch.uniform(4, 16384))
    values = {remedy.name: remedy.demand for remedy in check_memory_fit(demand).remedies}
    fewer, keys = read_model_spec(LLAMA3 | {"num_key_value_heads": 4}), 14854
    assert (
        values["kv=4 in every layer"].bytes_per_device
        == replace(demand, serving=replace(demand.serving, spec_or_model=fewer)).bytes_per_device
    )
    local = read_model_spec(LLAMA3 | {"model_type": "mistral", "sliding_window": keys})
    narrow = values[f"window({keys}) in layers with full attention"]
    assert (
        narrow.bytes_per_device
        == replace(demand, serving=replace(demand.serving, spec_or_model=local)).bytes_per_device
    )
    wider = read_model_spec(LLAMA3 | {"model_type": "mistral", "sliding_window": keys + 1})
    assert not replace(demand, serving=replace(demand.serving, spec_or_model=wider)).fits
    assert (
        values["2 devices that divide weights and cache"].bytes_per_device
        < 24 * 10**9
        < demand.bytes_per_device
    )


def test_a_window_remedy_leaves_narrower_windows():
    serving = ServingCost(gemma_3_1b(), replace(H200, memory=2.2e9))
    (found,) = [
        remedy
        for remedy in check_memory_fit(
            MemoryDemand(serving, RequestBatch.uniform(1, 32768))
        ).remedies
        if "window" in remedy.name
    ]
    keep = [each.spec.pattern.retention.last for each in found.demand.serving.attentions]
    assert len(keep) == 2
    assert keep[0] == 512 < keep[1] < 32768


def test_insufficient_remedies_are_not_listed():
    """On 9 GB not even the weights fit: no length, window or number of rows is enough."""
    small = replace(DEMANDS["llama"].serving, device=replace(H200, memory=9e9))
    memory_fit = check_memory_fit(replace(DEMANDS["llama"], serving=small))
    assert [remedy.name for remedy in memory_fit.remedies] == [
        "4 devices that divide weights and cache"
    ]
    nothing = check_memory_fit(MemoryDemand(ServingCost(GQA, replace(SMALL, memory=10.0))))
    assert (nothing.fits, nothing.remedies) == (False, ())
    assert "no single change is enough" in str(nothing)


# --- lengths, memory in words ---------------------------------------------------------------------


def test_lengths_are_given_or_sampled_by_seed():
    assert parse_lengths("100,2000", 1) == [100, 2000]
    lengths = parse_lengths("uniform(10, 20)", 1000, seed=3)
    assert (
        lengths
        == parse_lengths("uniform(10, 20)", 1000, seed=3)
        != parse_lengths("uniform(10, 20)", 1000, seed=4)
    )
    assert (min(lengths), max(lengths), len(lengths)) == (10, 20, 1000)
    mean = sum(parse_lengths("exponential(500)", 5000, seed=1)) / 5000
    assert mean == pytest.approx(500, rel=0.05)


def test_memory_in_words():
    assert [parse_bytes(text) for text in ("80 GB", "5.38GiB", "1024", "0.5 kb")] == [
        8 * 10**10,
        5776731013,
        1024,
        500,
    ]


# --- the command line -----------------------------------------------------------------------------


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["cost", *argv])
    out, err = capsys.readouterr()
    return code, out, err


SIZES = (
    "--model",
    "4096",
    "--heads",
    "32",
    "--layers",
    "32",
    "--batch",
    "16",
    "--context",
    "32768",
)


def test_the_page_of_serving(capsys):
    code, out, err = run(
        capsys, "gqa", *SIZES, "--serve", "--allocator", "paged(16)", "--cache", "int8"
    )
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "int8 cache (paged(16))" in out
    code, out, _ = run(
        capsys, "gqa", *SIZES, "--serve", "--json", "--lengths", "300,4000", "--prompt", "70"
    )
    (result,) = json.loads(out)["serving"]
    assert result["rows"] == [[300, 1], [4000, 1]]
    assert result["cache_bytes"] == 4300 * 131_072
    assert result["tokens_per_second"] == pytest.approx(2 / result["token_seconds"])
    assert [rate["rows"] for rate in result["curve"][:3]] == [1, 2, 4]
    assert result["curve"][-1]["rows"] == result["most_rows"]
    (core,) = [one for one in result["steps"]["mixed"] if one["name"] == "core, prefill"]
    assert core["flops"] == 32 * 4 * 4096 * 70 * 71 // 2


def test_the_page_of_a_model_fits_a_terminal():
    throughput_report = ThroughputReport(
        "gemma",
        MemoryDemand(ServingCost(gemma_3_1b(), H200), RequestBatch.uniform(64, 8192)),
        prompt=5000,
    )
    assert max(map(len, str(throughput_report).splitlines())) <= 80
    assert "22 x core, window(512), decode" in str(throughput_report).replace("\n", " ").replace(
        "  ", " "
    )
    assert [each.name for each in group_matrices(gemma_3_1b())] == ["feed-forward", "head"]


def test_the_verdict_on_the_page(capsys):
    argv = ("gqa", *SIZES, "--memory-fit", "--device", "rtx4090")
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "gqa: does not fit on NVIDIA GeForce RTX 4090" in out
    gqa = json.loads(run(capsys, *argv, "--json")[1])["memory_fit"]["gqa"]
    assert (gqa["fits"], gqa["memory"]) == (False, 24 * 10**9)
    assert all(remedy["needed"] <= gqa["memory"] for remedy in gqa["remedies"])
    assert json.loads(run(capsys, "gqa", "--memory-fit", "--json")[1])["memory_fit"]["gqa"]["fits"]


def test_the_page_of_boxes(capsys):
    code, out, err = run(
        capsys, "mha", "gqa", "mla", "--model", "4096", "--heads", "32", "--intensity"
    )
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "projections 221, core never, output 230" in out
    intensity = json.loads(run(capsys, "mha", "--intensity", "--batch", "5", "--json")[1])[
        "intensity"
    ]
    assert [box["rows"] for box in intensity[0]["boxes"][:6]] == [1, 1, 1, 5, 5, 5]
    assert {box["measured"] for box in intensity[0]["boxes"]} == {None}


BAD = {
    "device": (("--serve", "--device", "h20"), "did you mean 'h200'"),
    "allocator": (("--serve", "--allocator", "pages"), "did you mean 'paged'"),
    "page": (("--serve", "--allocator", "paged(0)"), "must be at least 1, got paged(0)"),
    "cache": (("--serve", "--cache", "int9"), "did you mean 'int8'"),
    "weights": (("--memory-fit", "--weights", "int3"), "weights='int3' is unknown"),
    "no layers": (("--serve", "--layers", "-3"), "give 1 to 10000"),
    "too many layers": (("--serve", "--layers", "9" * 30), "give 1 to 10000"),
    "chunk": (("--serve", "--chunk", "0"), "chunk must be a whole number of at least 1"),
    "chunks": (("--serve", "--chunk", "1", "--context", "999999"), "give a chunk of 245 or more"),
    "prompt": (("--serve", "--prompt", "-4"), "--prompt must be at least 1 token, got -4"),
    "one share": (("--serve", "--efficiency", "0.7"), "write compute,bandwidth"),
    "share": (("--serve", "--efficiency", "0.7,2"), "at most 1"),
    "nan": (("--serve", "--efficiency", "nan,1"), "at most 1"),
    "budget": (("--memory-fit", "--budget", "much"), "write it as in '80 GB'"),
    "unit": (("--memory-fit", "--budget", "5 XiB"), "has the unknown unit 'XiB'"),
    "huge": (("--memory-fit", "--budget", "9" * 25 + " TB"), "memory must be from 1 to"),
    "below the weights": (
        ("--memory-fit", "--budget", "1 MB"),
        "--budget 1 MB is less than the weights, 1.31 MB",
    ),
    "shared": (("--serve", "--shared", "2049"), "share at most 2,048"),
    "negative": (("--serve", "--shared", "-1"), "shared must be a whole number from 0"),
    "ring": (("--serve", "--shared", "9", "--allocator", "ring"), "use paged(16)"),
    "lengths": (("--serve", "--lengths", "0,5"), "write 100,2000"),
    "drawn": (("--serve", "--lengths", "uniform(9,3)"), "write uniform(least, most)"),
    "distribution": (("--serve", "--lengths", "normal(9)"), "did you mean 'uniform'"),
    "many": (
        ("--serve", "--lengths", "exponential(9)", "--batch", "9999999"),
        "sample from 1 to 100,000",
    ),
    "optimiser": (("--memory-fit", "--optimiser", "zerro"), "did you mean 'zero'"),
    "alone": (("--layers", "3"), "--layers has an effect only with --serve or --memory-fit"),
    "alone too": (("--prompt", "16"), "--prompt has an effect only with --serve"),
    "seed": (("--serve", "--seed", "3"), "add --lengths"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_arguments_give_one_line(capsys, name: str):
    argv, remedy = BAD[name]
    code, out, err = run(capsys, "gqa", *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert remedy in err


def test_configs_are_served_and_judged(capsys, tmp_path):
    for name, options in {
        "llama": LLAMA3,
        "bart": {"model_type": "bart"},
        "gpt2": {"model_type": "gpt2"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(options))
        argv = (
            str(tmp_path / f"{name}.json"),
            "--context",
            "300",
            "--serve",
            "--memory-fit",
            "--optimiser",
            "zero",
        )
        code, out, err = run(capsys, *argv, "--json")
        assert (code, err) == (0, "")
        data = json.loads(out)
        assert data["memory_fit"][name]["terms"][0]["value"] == 16 * data["rows"][0]["params"]
        assert data["serving"][0]["cache_bytes"] == data["rows"][0]["kv_bytes"]
    assert data["serving"][0]["longest_context"] == 1024  # positions of GPT-2
    assert max(map(len, run(capsys, *argv)[1].splitlines())) <= 80
    (tmp_path / "bert.json").write_text('{"model_type": "bert"}')
    code, out, err = run(capsys, str(tmp_path / "bert.json"), "--serve")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "give a decoder" in err
    code, out, err = run(capsys, str(tmp_path / "llama.json"), "--serve", "--layers", "2")
    assert (code, out) == (2, "")
    assert "is a model with layers" in err


def test_boxes_of_a_model_are_those_of_its_attention(capsys, tmp_path):
    (tmp_path / "oss.json").write_text('{"model_type": "gpt_oss"}')
    code, out, err = run(capsys, str(tmp_path / "oss.json"), "--intensity")
    assert (code, out) == (2, "")
    assert "2 kinds of attention; name a layer" in err
    code, out, _ = run(capsys, str(tmp_path / "oss.json"), "--intensity", "--layer", "0.attention")
    assert code == 0
    assert "core never" in out


def test_models_without_decoding_are_not_served(capsys):
    for preset in ("mha", "longformer"):
        code, out, err = run(capsys, preset, "--serve")
        assert (code, out) == (2, "")
        assert "reads future tokens" in err

"""Models on several devices: by hand, against one device, and against simulated exchanges."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

import headwise as hw
from headwise import cli
from headwise.costs.cost_report import estimate_cost
from headwise.costs.kv_cache_memory import RequestBatch
from headwise.costs.parallelism import (
    ParallelCost,
    ParallelPlan,
    divide_attention,
    remote_devices,
    stage_shares,
)
from headwise.costs.roofline import Device
from headwise.costs.serving_cost import ServingCost
from headwise.families import read_model_spec
from headwise.model_spec import ExpertsSpec, FeedForwardSpec

H200 = Device.from_name("h200")
SINGLE_MODELS = ("llama-3-8b", "gpt-oss-20b", "deepseek-v3", "gpt2")


def make_cost(name: str, plan: ParallelPlan, rows: int = 64, length: int = 1000) -> ParallelCost:
    return ParallelCost(read_model_spec(name), plan, H200, RequestBatch.uniform(rows, length))


# --- one device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE_MODELS)
def test_one_device_is_the_cost_of_the_whole_model(name: str):
    model, requests = read_model_spec(name), RequestBatch.uniform(64, 1000)
    alone, cost = ServingCost(model, H200), make_cost(name, ParallelPlan(1))
    step, expected = cost.decode_step, alone.decode_step(requests)
    assert cost.weight_bytes_per_device == alone.weights.bytes
    assert cost.cache_bytes_per_device == estimate_cost(model, hw.Workload(64, 1000)).cache_bytes
    (operations,) = step.operations
    for quantity in ("flops", "moved", "seconds"):
        total = sum(getattr(one, quantity) for one in expected.operations)
        assert sum(getattr(one, quantity) for one in operations) == pytest.approx(total, rel=1e-3)
    assert step.communication == ((),)
    assert cost.tokens_per_second == pytest.approx(64 / step.seconds)


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 4), (4, 1), (8, 2), (16, 1), (2, 3)])
def test_llama_3_8b_by_hand(tensor: int, pipeline: int):
    """8 key-value heads: 16 devices hold each of them twice. 32 layers in 3 stages are 11, 11 and
    10.
    """
    cost = make_cost("llama-3-8b", ParallelPlan(tensor * pipeline, tensor, pipeline), rows=24)
    kv = max(1, 8 // tensor)
    layer = 2 * 4096 * 4096 // tensor + 2 * 4096 * kv * 128 + 3 * 4096 * 14336 // tensor + 2 * 4096
    table = 4096 * 128_256 // tensor
    layers = [32 // pipeline + (stage < 32 % pipeline) for stage in range(pipeline)]
    weights = [2 * (count * layer) for count in layers]
    weights[0] += 2 * table
    weights[-1] += 2 * (table + 4096)
    assert [term.value for term in cost.weight_terms] == weights
    caches = [24 * 1000 * count * 2 * 2 * kv * 128 for count in layers]
    assert cost.cache_bytes_per_device == max(caches)
    assert cost.memory_per_device == max(a + b for a, b in zip(weights, caches, strict=True))
    rows = 24 // pipeline
    step = cost.decode_step
    flops = [2 * rows * count * (layer - 2 * 4096) for count in layers]
    flops[-1] += 2 * rows * table
    cores = [rows * count * 1000 * 4 * (32 // tensor) * 128 for count in layers]
    assert [sum(one.flops for one in stage) for stage in step.operations] == [
        a + b for a, b in zip(flops, cores, strict=True)
    ]
    assert cost.tokens_per_second == pytest.approx(rows / max(step.stage_seconds))
    assert step.seconds == pytest.approx(
        sum(step.compute_seconds) + sum(step.communication_seconds)
    )


def _sent_in_ring(tensor: int, size: int) -> int:
    """Bytes that one of `tensor` devices sends in a simulated ring all-reduce of `size` bytes, one
    per number.
    """
    chunk = size // tensor
    data = [[[float(device + 1)] * chunk for _ in range(tensor)] for device in range(tensor)]
    sent = 0
    for phase, step in itertools.product(range(2), range(tensor - 1)):
        moving = [(device, (device - step + phase) % tensor) for device in range(tensor)]
        values = [list(data[device][part]) for device, part in moving]
        sent += len(values[0])
        for (device, part), value in zip(moving, values, strict=True):
            other = data[(device + 1) % tensor][part]
            data[(device + 1) % tensor][part] = (
                value if phase else [a + b for a, b in zip(other, value, strict=True)]
            )
    total = float(sum(range(1, tensor + 1)))
    assert all(number == total for device in data for part in device for number in part)
    return sent


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_all_reduces_send_what_a_ring_sends(tensor: int):
    """Two per layer, and one of the embedding; every one of 12 rows has 4096 numbers of 2 bytes."""
    (stage,) = make_cost(
        "llama-3-8b", ParallelPlan(tensor, tensor), rows=12
    ).decode_step.communication
    sent = {exchange.name: exchange.sent for exchange in stage}
    assert sent["all-reduce"] == (2 * 32 + 1) * _sent_in_ring(tensor, 12 * 4096 * 2)
    assert sent["all-gather of logits"] == (tensor - 1) * 12 * (128_256 // tensor) * 2
    step = make_cost("llama-3-8b", ParallelPlan(tensor, tensor), rows=12).decode_step
    assert step.communication_seconds == (pytest.approx(sum(sent.values()) / 450e9),)


def test_stages_pass_hidden_states_on():
    step = make_cost("gpt2", ParallelPlan(3, 1, 3), rows=9).decode_step
    assert [[one.sent for one in stage] for stage in step.communication] == [
        [3 * 768 * 2],
        [3 * 768 * 2],
        [],
    ]
    table = 2 * 50_257 * 768
    stages = [term.value for term in make_cost("gpt2", ParallelPlan(3, 1, 3)).weight_terms]
    layer = 2 * (12 * 768**2 + 13 * 768)
    assert stages == [
        4 * layer + table + 2 * 1024 * 768,
        4 * layer,
        4 * layer + table + 2 * 2 * 768,
    ]


def test_experts_of_deepseek_v3_by_hand():
    """8 x 4 = 32 devices: 2 stages with 4 replicas of 4; 16 devices, all of a stage, divide 256
    experts.
    """
    cost = make_cost("deepseek-v3", ParallelPlan(32, 4, 2, 16), rows=64, length=4096)
    assert cost.plan.replicas == 4
    assert (cost.rows_per_replica, cost.rows_per_micro_batch) == (16, 8)

    def fp8(rows: int, columns: int) -> int:
        return rows * columns + 4 * math.ceil(rows / 128) * math.ceil(columns / 128)

    attention = fp8(1536, 7168) + fp8(24576 // 4, 1536) + fp8(576, 7168) + 2 * fp8(16384 // 4, 512)
    attention += fp8(7168, 16384 // 4) + 2 * (1536 + 512 + 2 * 7168)
    expert, shared = 2 * fp8(2048, 7168) + fp8(7168, 2048), 2 * fp8(512, 7168) + fp8(7168, 512)
    router = 2 * 256 * 7168
    dense = 2 * fp8(18432 // 4, 7168) + fp8(7168, 18432 // 4)
    table = 2 * 129_280 // 4 * 7168
    first = 31 * attention + 3 * dense + 28 * (router + shared + 16 * expert) + table
    last = 30 * (attention + router + shared + 16 * expert) + table + 2 * 7168
    assert [term.value for term in cost.weight_terms] == [first, last]
    assert (
        cost.cache_bytes_per_device == 16 * 4096 * 31 * 2 * 576
    )  # every device of a tensor group has all latents

    step = cost.decode_step
    experts = next(one for one in step.operations[1] if one.name == "30 x experts")
    met = 8 * 4  # tokens of the micro-batches of four replicas
    products = 2 * (8 * 256 * 7168 + met * 8 * 3 * 2048 * 7168 // 16)
    values = 8 * (7168 + 256) + met * 8 * 3 * (2048 + 7168) // 16
    read = router + 16 * expert * (1 - (1 - 8 / 256) ** met)
    assert experts.flops == 30 * products
    assert experts.moved == pytest.approx(30 * (read + 2 * values), rel=1e-9)
    sent = {exchange.name: exchange.sent for exchange in step.communication[1]}
    hidden = 8 * 7168 * 2
    remote = 15 * (1 - math.prod((240 - n) / (256 - n) for n in range(8)))
    assert sent["dispatch and combine of experts"] == pytest.approx(
        30 * 2 * hidden / 4 * remote, abs=1
    )
    assert sent["all-reduce"] == 30 * 2 * 3 * hidden // 4
    assert sent["reduction and all-gather of expert outputs"] == 60 * 3 * hidden // 4


def test_fewer_expert_devices_than_tensor_devices_divide_each_expert_too():
    """8 devices in 4 groups of experts: each holds 8 of 32 experts of gpt-oss-20b, and half of
    each.
    """
    whole, divided = (
        make_cost("gpt-oss-20b", ParallelPlan(8, 8, 1, experts)) for experts in (8, 4)
    )
    half = (
        2 * (2 * (1440 * 2880 * 17 // 32) + 2 * 2 * 1440) // 2 + 2880 * 1440 * 17 // 32 + 2 * 2880
    )
    full = 3 * (2880**2 * 17 // 32) + 2 * 3 * 2880
    difference = divided.weight_bytes_per_device - whole.weight_bytes_per_device
    assert difference == 24 * (8 * half - 4 * full)
    names = {exchange.name for exchange in divided.decode_step.communication[0]}
    assert names == {"all-reduce", "all-gather of logits"}


@pytest.mark.parametrize(
    ("count", "active", "devices"), [(4, 1, 4), (6, 2, 3), (8, 3, 2), (8, 3, 8)]
)
def test_a_token_is_sent_to_the_devices_of_its_experts(count: int, active: int, devices: int):
    """The mean over all choices: the device of the token is the first."""
    experts_per_device = count // devices
    choices = list(itertools.combinations(range(count), active))
    others = [len({expert // experts_per_device for expert in choice} - {0}) for choice in choices]
    experts = ExpertsSpec(FeedForwardSpec(3), count, active)
    assert remote_devices(experts, devices) == pytest.approx(sum(others) / len(others))


def test_layers_stored_differently_stay_so_in_their_stage():
    config = {
        **hw.families.PUBLISHED_MODELS["llama-3-8b"].config,
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "modules_to_not_convert": ["layers.17"],
        },
    }
    model = read_model_spec(config)
    cost = ParallelCost(model, ParallelPlan(4, 1, 4), H200, RequestBatch.uniform(1, 10))
    total = estimate_cost(model, hw.Workload(context=10)).weights_bytes
    assert sum(term.value for term in cost.weight_terms) == total
    excluded = [
        share.model.quantization and share.model.quantization.excluded for share in cost.shares
    ]
    assert [bool(names) for names in excluded] == [False, False, True, False]
    assert "decoder.1.feed.up" in (excluded[2] or ())


# --- impossible divisions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("gpt2", {"devices": 8, "tensor": 3}, "use tensor=1, 2, 4 or 8 with this pipeline"),
        ("gpt2", {"devices": 2, "pipeline": 3}, "use pipeline=1 or 2"),
        ("gpt2", {"devices": 5, "tensor": 5}, "heads .12. .* use tensor=1, 2, 3, 4, 6 or 12"),
        (
            "gpt2",
            {"devices": 16, "pipeline": 16},
            "more than the 12 layers of gpt2; use at most 12",
        ),
        ("gpt2", {"devices": 2, "experts": 2}, "gpt2 has none; use experts=1"),
        ("gpt2", {"devices": 0}, "devices must be a whole number"),
        ("gpt-oss-20b", {"devices": 8, "experts": 3}, "use experts=1, 2, 4 or 8"),
        (
            "gpt-oss-20b",
            {"devices": 64, "experts": 64},
            "the 32 experts of gpt_oss; use experts=1, 2, 4, 8, 16 or 32",
        ),
        ("bert-base", {"devices": 2}, "only decoders can be divided"),
    ],
)
def test_impossible_divisions_are_refused_with_the_possible_values(
    name: str, plan: dict[str, Any], message: str
):
    with pytest.raises(hw.SpecError, match=message):
        stage_shares(read_model_spec(name), ParallelPlan(**plan))


def test_heads_that_are_mixed_stay_together():
    with pytest.raises(hw.SpecError, match="heads that are mixed"):
        divide_attention(hw.design(preset="talking", model=64, heads=4), 2)
    with pytest.raises(hw.SpecError, match="requests of several lengths"):
        ParallelCost(
            read_model_spec("gpt2"), ParallelPlan(1), H200, RequestBatch.from_lengths([3, 4])
        )


# --- the command ----------------------------------------------------------------------------------


def test_the_command_divides_models(capsys: pytest.CaptureFixture[str]):
    argv = [
        "cost",
        "gpt3",
        "--context",
        "1024",
        "--batch",
        "8",
        "--devices",
        "8",
        "--tensor",
        "4",
        "--pipeline",
        "2",
    ]
    assert cli.main([*argv, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["parallel"]
    cost = make_cost("gpt3", ParallelPlan(8, 4, 2), 8, 1024)
    assert report["memory_per_device"] == cost.memory_per_device
    assert report["steps"]["decode"]["seconds"] == cost.decode_step.seconds
    assert report["steps"]["prefill"]["seconds"] == cost.prefill_step(1024).seconds
    assert cli.main(argv) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "gpt3 on 8 x NVIDIA H200 SXM: tensor 4, pipeline 2, experts 1, replicas 1" in page
    assert f"tokens per second, all devices {cost.tokens_per_second:,.0f}" in page
    assert cli.main([*argv[:6], "--devices", "2", "--tensor", "2"]) == 0
    assert "so no time of a step is estimated" in " ".join(capsys.readouterr().out.split())
    for wrong, message in (
        (["cost", "gpt2", "--tensor", "4"], "--tensor 4 divides several devices; add --devices 4"),
        (["cost", "gqa", "--devices", "4"], "gqa is one layer; name a model"),
    ):
        assert cli.main(wrong) == 2
        assert message in capsys.readouterr().err

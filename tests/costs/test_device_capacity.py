"""A device that cannot hold a model gives no time; how much is missing, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import headwise as hw
from headwise import cli
from headwise.costs.cost_estimate import estimate_cost
from headwise.costs.cost_report import cost
from headwise.costs.roofline import Device
from headwise.models.families import read_model_spec

GPT3 = read_model_spec("gpt3")
PARAMETERS = 96 * (12 * 12_288**2 + 13 * 12_288) + (50_257 + 2048) * 12_288 + 2 * 12_288
WEIGHTS, TOKEN = 2 * PARAMETERS, 2 * 96 * 2 * 12_288


def test_a_model_that_does_not_fit_has_no_time():
    """GPT-3 has 349 GB of weights and 4.7 MB of cache per token; an H200 has 141 GB."""
    estimate = estimate_cost(GPT3, hw.Workload(batch=4, context=2048))
    assert (estimate.weights_bytes, estimate.cache_bytes) == (WEIGHTS, 4 * 2048 * TOKEN)
    assert estimate.seconds("prefill") is None
    assert estimate.seconds("decode") is None
    prefill, decode = estimate.shortfall("prefill"), estimate.shortfall("decode")
    assert prefill is not None
    assert decode is not None
    assert prefill.missing_bytes == WEIGHTS - 141 * 10**9
    assert decode.missing_bytes == WEIGHTS + 4 * 2048 * TOKEN - 141 * 10**9
    assert (prefill.min_devices, decode.min_devices) == (
        math.ceil(WEIGHTS / 141e9),
        math.ceil((WEIGHTS + 4 * 2048 * TOKEN) / 141e9),
    )


def test_a_cache_that_does_not_fit_leaves_the_time_of_prefill():
    llama = read_model_spec("llama-3-8b")
    estimate = estimate_cost(llama, hw.Workload(batch=128, context=8192, device="h100"))
    assert estimate.cache_bytes == 128 * 8192 * 131_072 > 80e9 > estimate.weights_bytes
    assert estimate.seconds("prefill") == pytest.approx(estimate.total_operation("prefill").seconds)
    assert estimate.seconds("decode") is None
    fits = estimate_cost(llama, hw.Workload(batch=32, context=8192, device="h100"))
    assert fits.shortfall("decode") is None
    assert fits.seconds("decode") == pytest.approx(
        sum(one.seconds for one in fits.operations["decode"])
    )


def test_the_boundary_is_exact(monkeypatch: pytest.MonkeyPatch):
    spec, workload = hw.design(model=64, heads=2, pattern="causal"), hw.Workload(context=7)
    needed = estimate_cost(spec, workload).weights_bytes + 7 * 2 * 2 * 64
    device = Device.from_name("h200")
    for memory, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(
            Device,
            "from_name",
            staticmethod(lambda _, memory=memory: replace(device, memory=memory)),
        )
        assert (estimate_cost(spec, workload).seconds("decode") is not None) == fits


def test_the_table_and_the_document_say_what_is_missing(capsys: pytest.CaptureFixture[str]):
    table = " ".join(
        str(
            cost({"gpt3": GPT3, "gpt2": read_model_spec("gpt2")}, hw.Workload(context=1024))
        ).split()
    )
    assert "decode, lower bound too large" in table
    needed = WEIGHTS + 1024 * TOKEN
    missing = (
        f"weights and cache need {needed / 1e9:,.2f} GB, {(needed - 141e9) / 1e9:,.2f} GB "
        "more than its 141.00 GB"
    )
    end = "so no time is estimated (decode step); at least 3 such devices are needed"
    assert f"gpt3: NVIDIA H200 SXM is too small: {missing}, {end}" in table
    assert "gpt2: NVIDIA" not in table
    assert cli.main(["cost", "gpt3", "gpt2", "--context", "1024", "--json"]) == 0
    large, small = json.loads(capsys.readouterr().out)["rows"]
    assert large["seconds"] == {"prefill": None, "decode": None}
    assert large["missing_bytes"]["decode"] == needed - 141 * 10**9
    assert (large["devices"], small["devices"]) == (3, 1)
    assert small["seconds"]["decode"] > 0
    assert small["missing_bytes"] == {"prefill": 0, "decode": 0}

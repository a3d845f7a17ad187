"""The Cost screen: its numbers are those of `hw.cost`."""

from __future__ import annotations

from typing import Any

import pytest

import headwise as hw
from headwise.viewer import bundled_sample
from headwise.viewer.model_actions import compute_cost
from headwise.viewer.model_worker import Job, JobProgress
from headwise.viewer.open_model import OpenModel


@pytest.fixture(scope="module")
def model() -> OpenModel:
    opened = OpenModel(bundled_sample.load_sample_trace(), load_model=bundled_sample.load_sample_model)
    opened.get_model()
    return opened


def progress() -> JobProgress:
    return JobProgress(Job("test", {}))


def test_rows_are_those_of_the_library(model: OpenModel):
    found = compute_cost(model, {"context": 100, "batch": 3}, progress())
    net: Any = model.get_model()
    whole = hw.cost(net.spec, hw.Workload(context=100, batch=3)).data["rows"][0]
    assert found["rows"][0]["params"] == whole["params"] == sum(p.numel() for p in net.parameters())
    assert found["rows"][0]["prefill"] == whole["flops"]["prefill"]
    assert found["rows"][0]["kv_bytes"] == whole["kv_bytes"]
    layers = {row["name"]: row for row in found["rows"][1:]}
    assert set(layers) | {note.partition(":")[0] for note in found["notes"]} >= set(model.sites)
    name = "decoder.0.attention"
    spec = model.sites[name].spec
    assert spec is not None
    assert layers[name]["decode"] == hw.cost(spec, hw.Workload(context=100, batch=3)).data["rows"][0]["flops"]["decode"]


@pytest.mark.parametrize("arguments", [{"context": 0}, {"context": 2**21}, {"batch": True}, {"context": "9"}])
def test_sizes_out_of_range_are_refused(model: OpenModel, arguments: dict[str, Any]):
    with pytest.raises(ValueError, match="is out of range"):
        compute_cost(model, arguments, progress())

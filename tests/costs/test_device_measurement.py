"""The measurement of this machine, made once."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator

import pytest
import torch

from headwise import cli
from headwise.costs import roofline
from headwise.costs.roofline import Device


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known, and measurements take no time."""
    monkeypatch.setattr(roofline, "MEASURE_SECONDS", 0.002)
    monkeypatch.setattr(roofline, "MATRIX_SIZES", (16, 64))
    monkeypatch.setattr(roofline, "COPY_BYTES", 2**20)
    roofline._measure_machine.cache_clear()
    yield
    roofline._measure_machine.cache_clear()


def test_the_device_is_measured_once(capsys):
    first = Device.from_name("here")
    assert first.name == "here"
    assert first.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    assert first.description.startswith("this machine (")
    assert set(first.flops) == {"fp32", "bf16", "fp16"}
    assert min(*first.flops.values(), first.bandwidth) > 1e6
    assert 2**28 < first.memory < 2**50
    assert Device.from_name("here") is first
    assert cli.main(["cost", "gqa", "--device", "here"]) == 0
    assert "this machine (" in capsys.readouterr().out


def test_measurements_are_times(monkeypatch: pytest.MonkeyPatch):
    """A product that takes a hundredth of a second or more: at most that many FLOPs a hundred times
    a second.
    """
    monkeypatch.setattr(roofline, "multiply_matrices", lambda a, b: time.sleep(0.01))
    rate = roofline._measure_matmul_flops(torch.float32)
    assert 0 < rate <= 2 * 64**3 * 100
    assert roofline.time_run(lambda: time.sleep(0.01), 0.0) >= 0.01


def test_importing_does_not_measure():
    again = importlib.util.module_from_spec(roofline.__spec__)
    roofline.__spec__.loader.exec_module(again)
    assert again._measure_machine.cache_info().currsize == 0

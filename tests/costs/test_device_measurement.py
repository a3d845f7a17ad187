"""The measurement of this machine: made once, stored atomically, shown with its age, and without a
home folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from headwise import cli
from headwise.costs import roofline
from headwise.costs.roofline import Device


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, nothing known, and measurements that take no time."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(roofline, "_MEASURED_DEVICES", {})
    monkeypatch.setattr(roofline, "MEASURE_SECONDS", 0.002)
    monkeypatch.setattr(roofline, "MATRIX_SIZES", (16, 64))
    monkeypatch.setattr(roofline, "COPY_BYTES", 2**20)
    return tmp_path


def list_files(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file())


def test_the_device_is_measured_once_and_stored(home: Path, monkeypatch: pytest.MonkeyPatch):
    first = Device.from_name("here")
    assert first.name == "here"
    assert first.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    assert "measured just now" in first.description
    assert set(first.flops) == {"fp32", "bf16", "fp16"}
    assert min(*first.flops.values(), first.bandwidth) > 1e6
    assert 2**28 < first.memory < 2**50
    (file,) = list_files(home)
    assert file.parent == home / ".cache" / "headwise"
    monkeypatch.setattr(roofline, "measure_machine", lambda machine: pytest.fail("measured again"))
    assert Device.from_name("here") is first
    roofline._MEASURED_DEVICES.clear()  # as another process begins
    assert Device.from_name("here") == first
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"when": time.time() - 3 * 86400}))
    roofline._MEASURED_DEVICES.clear()
    assert "measured 3 days ago" in Device.from_name("here").description


def test_measurements_are_times(monkeypatch: pytest.MonkeyPatch):
    """A product that takes a hundredth of a second or more: at most that many FLOPs a hundred times
    a second.
    """
    monkeypatch.setattr(roofline, "multiply_matrices", lambda a, b: time.sleep(0.01))
    rate = roofline._measure_matmul_flops(torch.float32)
    assert 0 < rate <= 2 * 64**3 * 100
    assert roofline.time_run(lambda: time.sleep(0.01), 0.0) >= 0.01


@pytest.mark.parametrize(
    "words",
    ["", "{", "[]", "{}", "null", "bandwidth", "nan", "machine", "dtype"],
)
def test_damaged_and_foreign_measurements_are_repeated(home: Path, words: str):
    Device.from_name("here")
    (file,) = list_files(home)
    sound = json.loads(file.read_text())
    harm = {
        "bandwidth": {"bandwidth": 0.0},
        "nan": {"memory": float("nan")},
        "machine": {"machine": "another"},
    }
    harm |= {"dtype": {"flops": {"fp32": 1.0}}}
    file.write_text(json.dumps(sound | harm[words]) if words in harm else words)
    roofline._MEASURED_DEVICES.clear()
    assert "just now" in Device.from_name("here").description
    assert json.loads(file.read_text())["machine"] == sound["machine"]


def test_measure_repeats_the_measurement(home: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    Device.from_name("here")
    (file,) = list_files(home)
    old = json.loads(file.read_text())
    assert cli.main(["cost", "gqa", "--device", "here", "--measure"]) == 0
    assert "this machine (" in capsys.readouterr().out
    assert json.loads(file.read_text())["when"] > old["when"]
    assert cli.main(["cost", "gqa", "--measure"]) == 2
    assert capsys.readouterr().err.endswith("add --device here\n")


@pytest.mark.parametrize("why", ["file", "absent"])
def test_without_a_home_folder_the_device_is_measured_and_reported(
    home: Path, monkeypatch: pytest.MonkeyPatch, why: str
):
    if why == "file":  # whoever is root may write to every folder, but not below a file
        (home / ".cache").write_text("")
    else:
        monkeypatch.setattr(
            Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("there is no home"))
        )
    device = Device.from_name("here")
    assert "not stored for next time" in device.description
    assert "\n" not in device.description
    monkeypatch.setattr(roofline, "measure_machine", lambda machine: pytest.fail("measured again"))
    assert Device.from_name("here") is device


def test_importing_does_not_measure(home: Path):
    code = "import headwise.costs.roofline as roofline; print(bool(roofline._MEASURED_DEVICES))"
    completed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert completed.stdout.strip() == "False"
    assert list_files(home) == []

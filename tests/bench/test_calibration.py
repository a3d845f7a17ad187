"""Calibration with a simulated clock, and on this machine with the shortest samples."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.bench import calibration
from headwise.bench.calibration import (
    PointMeasurement,
    SizeTiming,
    calibrate,
    find_takeover,
    measurements,
    time_paths,
)
from headwise.machine import takeover_points
from headwise.machine.capabilities import this_machine
from headwise.machine.takeover_points import (
    NEVER,
    POINT_NAMES,
    UP_TO_POINTS,
    calibration_path,
    points_of_class,
    read_calibration,
    takeover_size,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, and points that are read from it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HEADWISE_MACHINE_CLASS")
    monkeypatch.setattr(takeover_points, "_CURRENT", takeover_points._CurrentPoints())
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    return tmp_path


class Clock:
    """Time that passes only in simulated calls."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[str]()

    def __call__(self) -> float:
        return self.now

    def run(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def go() -> None:
            self.calls.append(name)
            self.now += seconds()

        return go


def timings(**speedups: float) -> dict[int, SizeTiming]:
    """Timings at sizes that are written as names, such as n64=2.0."""
    return {int(name[1:]): SizeTiming(1.0, speedup) for name, speedup in speedups.items()}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (timings(n16=1.2, n64=2.0), 0.0),  # faster at every size
        (timings(n16=0.5, n64=0.9), NEVER),
        (timings(n16=0.5, n64=2.0), 32.0),  # half way between, by logarithms
        (timings(n16=2.0, n64=0.5), NEVER),  # what is slower at the largest size never takes over
        (timings(n16=2.0, n64=0.5, n256=2.0), 128.0),
        (timings(n16=0.5, n64=2.0, n256=0.97), 32.0),  # a loss within the noise ends nothing
        (timings(n16=0.5, n64=2.0, n256=0.9), NEVER),
        (timings(n16=0.5, n64=0.99, n256=0.98), NEVER),  # never faster, only never much slower
    ],
)
def test_points_from_which_the_own_path_is_faster(measured: dict[int, SizeTiming], expected: float):
    assert find_takeover(measured, is_up_to=False) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (timings(n1=1.2, n4=2.0), 4.0),  # not beyond what was measured
        (timings(n1=0.5, n4=2.0), 0.0),
        (timings(n1=2.0, n4=0.5), 2.0),
        (
            timings(n1=2.0, n4=1.5, n16=0.5, n64=3.0),
            4 * 4 ** (math.log(1.5) / math.log(3)),
        ),  # by logarithms
    ],
)
def test_points_up_to_which_the_own_path_is_faster(
    measured: dict[int, SizeTiming], expected: float
):
    assert find_takeover(measured, is_up_to=True) == pytest.approx(expected, rel=1e-3)


def test_the_fastest_samples_of_rounds_are_compared():
    clock = Clock()
    own = iter([0.5, 0.5] + [0.25, 0.125, 0.5] * 99)
    pair = clock.run("own", lambda: next(own)), clock.run("torch", lambda: 0.375)
    assert time_paths(pair, 4.0, clock) == SizeTiming(0.125, 0.375)
    assert clock.now < 4.0 + 2 * 0.875  # stops after the round in which the time is used up
    assert abs(clock.calls.count("own") - clock.calls.count("torch")) <= 1


def test_a_short_time_still_compares_twice():
    clock = Clock()
    time_paths((clock.run("own", lambda: 9.0), clock.run("torch", lambda: 9.0)), 1.0, clock)
    assert (
        clock.calls.count("own") == clock.calls.count("torch") == 4
    )  # to compile, for an estimate, and twice


def simulated(clock: Clock, threshold: int, name: str) -> PointMeasurement:
    """A path that takes over at a size, run by the points as headwise runs its own."""

    def make_call(size: int) -> Callable[[], Any]:
        def seconds() -> float:
            limit = takeover_size(name)
            is_own = size <= limit if name in UP_TO_POINTS else size >= limit
            return (
                (1.0 if (size >= threshold) == (name not in UP_TO_POINTS) else 4.0)
                if is_own
                else 2.0
            )

        return clock.run(f"{name} {size}", seconds)

    return PointMeasurement((16, 64, 256), make_call)


def test_what_is_measured_is_kept_and_used(home: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    fakes = {
        "flash_cpu": simulated(clock, 64, "flash_cpu"),
        "varlen": simulated(clock, 65, "varlen"),
        "routed": simulated(clock, 999, "routed"),
    }
    monkeypatch.setattr(calibration, "measurements", lambda: fakes)
    report = calibrate(1, clock=clock, total_seconds=1e6)
    assert report.calibration.points == {"flash_cpu": 32.0, "varlen": 128.0, "routed": NEVER}
    assert report.stored_in == str(calibration_path(1))
    stored, problem = read_calibration(this_machine(), 1)
    assert problem == ""
    assert stored == report.calibration
    assert takeover_size("flash_cpu") == 32  # at the next call, without a new process
    spec = hw.design(model=64, heads=4, pattern="causal")
    assert (hw.why(spec, tokens=32).backend, hw.why(spec, tokens=31).backend) == (
        "flash_cpu",
        "sdpa",
    )
    text = str(report)
    assert "from 32" in text
    assert "up to 128" in text
    assert "16: 0.50, 64: 2.00, 256: 2.00" in text
    assert text.endswith(f"kept in {calibration_path(1)}")
    assert json.loads(json.dumps(report.data))["points"] == {
        "flash_cpu": 32.0,
        "varlen": 128.0,
        "routed": None,
    }


def test_points_beyond_the_time_keep_the_size_of_the_table(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    fakes = {name: simulated(clock, 64, name) for name in ("flash_cpu", "routed", "linear")}
    monkeypatch.setattr(calibration, "measurements", lambda: fakes)
    report = calibrate(1, clock=clock, total_seconds=10.0)
    assert list(report.calibration.points) == ["flash_cpu"]
    assert "! not measured, so the table holds: routed, linear" in " ".join(str(report).split())
    table = points_of_class(this_machine().machine_class).points
    assert takeover_size("linear") == table["linear"].size


def test_a_calibration_that_cannot_be_kept_is_printed_and_fails(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = Clock()
    monkeypatch.setattr(
        calibration, "measurements", lambda: {"flash_cpu": simulated(clock, 64, "flash_cpu")}
    )
    monkeypatch.setattr(
        calibration, "calibrate", lambda *args, **options: calibrate(*args, **options, clock=clock)
    )
    (home / ".cache").write_text("a file in place of the folder")
    assert cli.main(["bench", "--calibrate", "--threads", "1"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "from 32" in out
    assert "not kept: " in out
    (home / ".cache").unlink()
    assert cli.main(["bench", "--calibrate", "--threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored_in"] == str(calibration_path(1))


def test_what_a_busy_machine_measures_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(
        calibration, "measurements", lambda: {"flash_cpu": simulated(clock, 64, "flash_cpu")}
    )
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    report = calibrate(1, clock=clock, total_seconds=1e6)
    assert report.calibration.points == {"flash_cpu": 32.0}
    assert not calibration_path(1).exists()
    assert "not kept: other processes kept all processors busy (load average 999.0)" in str(report)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_is_said(home: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(
        calibration, "measurements", lambda: {"flash_cpu": simulated(clock, 64, "flash_cpu")}
    )
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "Permission denied" in calibrate(1, clock=clock).problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "--quick"], "--calibrate takes no --quick"),
        (["--calibrate", "flash"], "there is no take-over point 'flash'"),
        (["--calibrate", "--threads", "0"], "threads=0 is not between 1"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.lengthy
@pytest.mark.parametrize("name", POINT_NAMES)
def test_both_paths_of_every_point_compute_the_same(name: str):
    """Each point switches a path of headwise: the results agree, and another path runs."""
    one = measurements()[name]
    pairs = [
        calibration._paths(name, one.make_call(one.sizes[0]), points_of_class("other"))
        for _ in range(2)
    ]
    own, plain = pairs[0][0](), pairs[1][1]()  # of two equal calls, because a cache grows with each
    own, plain = ([own], [plain]) if isinstance(own, torch.Tensor) else (own, plain)
    for a, b in zip(own, plain, strict=True):
        if a is not None:
            torch.testing.assert_close(
                a.float(), b.float(), rtol=3e-2, atol=3e-2 * float(b.abs().max())
            )
    assert name in ("block_sparse", "linear") or any(
        not torch.equal(a, b) for a, b in zip(own, plain, strict=True) if a is not None
    )

"""Scaling reports: power laws with intervals, crossings, and the page; nothing is timed here."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise import backends, cli
from headwise.bench import runner, session
from headwise.bench.benchmark_case import BenchmarkCase, TimingPace
from headwise.bench.runner import (
    ScalingReport,
    SpeedCrossover,
    fastest_by_size,
    find_crossings,
    fit_power_law,
)
from headwise.bench.session import CaseTimer, LastLevelCache, MachineLimits
from support import takeover

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SIZES = (64, 128, 256, 512, 1024, 2048)
MACHINE = {
    "processor": "some processor",
    "threads": 2,
    "processors": 2,
    "last_level_cache_bytes": 2**25,
    "buffer_bytes": 2**28,
    "versions": {"torch": "2.13.0"},
    "read_bytes_per_second": 3.2e10,
    "copy_bytes_per_second": 3e10,
    "fp32_flops_per_second": 1.5e11,
    "bf16_flops_per_second": 7.5e11,
    "labels": [],
    "quick": False,
    "interrupted": False,
}


def test_a_power_is_found_and_its_interval_holds_it():
    fit = fit_power_law({size: 3e-9 * size**1.5 for size in SIZES})
    assert fit is not None
    assert (fit.power, fit.start, fit.points) == (pytest.approx(1.5), 512, 3)
    assert fit.low == pytest.approx(fit.high, abs=1e-9)
    inside = 0
    for seed in range(200):
        draw = random.Random(seed)
        noisy = fit_power_law(
            {size: size**2 * math.exp(draw.gauss(0, 0.1)) for size in (*SIZES, 4096, 8192)}
        )
        assert noisy is not None
        assert noisy.points == 4
        inside += noisy.low <= 2 <= noisy.high
    assert 180 <= inside <= 199  # 95 of 100, give or take


def test_two_points_are_no_fit():
    assert fit_power_law({64: 1.0, 128: 2.0}) is None
    assert fit_power_law({}) is None


def test_crossings_are_between_the_points_where_the_fastest_changes():
    # a is 1e-3 whatever the size, b grows with its square: they meet where 1e-9 n^2 = 1e-3
    points = {size: {"a": 1e-3, "b": 1e-9 * size**2} for size in (*SIZES, 4096)}
    assert fastest_by_size(points)[512] == "b"
    assert fastest_by_size(points)[1024] == "a"
    assert find_crossings(points) == [SpeedCrossover("b", "a", pytest.approx(1000.0))]
    assert find_crossings({size: {"a": 1.0, "b": 2.0} for size in SIZES}) == []
    options = {
        64: {"a": 2.0, "b": 1.0},
        128: {"a": 2.0},
    }  # b was not asked for more: nobody overtook it
    assert find_crossings(options) == []


class Clock:
    """Time that passes only while a fake run runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, seconds: float) -> Any:
        def go() -> torch.Tensor:
            self.now += seconds
            return torch.ones(3)

        return go


def faked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> CaseTimer:
    """A machine on which everybody takes 0.1 microseconds for each pair of tokens, composed ten
    times as long.
    """

    def make_case(
        kind: str, spec: hw.AttentionSpec, size: runner.CallSize, names: list[str]
    ) -> BenchmarkCase:
        each = 1e-7 * size.tokens**2 * size.heads * size.rows * size.layers / 8
        runs = {name: clock.run(each * (10 if name == "chunked" else 1)) for name in names}
        first, *rest = names
        return BenchmarkCase(kind, runs[first], {name: runs[name] for name in rest})

    monkeypatch.setattr(runner, "_scaling_case", make_case)
    return CaseTimer(
        TimingPace(min_sample_seconds=0.0, min_samples=3, max_samples=3),
        MachineLimits(LastLevelCache(2**10, True)),
        clock,
    )


def test_every_axis_grows_and_slow_backends_are_dropped(monkeypatch: pytest.MonkeyPatch):
    kind = "plain heads, causal"
    points = list(runner.measure_scaling(faked(Clock(), monkeypatch), kind))
    at = {(point["axis"], point["at"]): point["seconds"] for point in points}
    assert {axis for axis, _ in at} == set(runner.SCALING_AXES)
    assert set(at["tokens", 64]) == {"flash_cpu", "sdpa", "chunked", "dense", "bf16_matmul"}
    assert "chunked" not in at["tokens", 1024]  # at 512 it took 0.26 seconds
    assert "flex" in at["tokens", 512]  # it compiles, and has three shapes
    assert "flex" not in at["tokens", 256]
    assert "sdpa" in at["tokens", 1024]
    assert ("tokens", 2048) not in at
    assert all(point["runs"] == "flash_cpu" for point in points)
    found = ScalingReport(MACHINE, points)
    powers = {(one["axis"], one["backend"]): one["power"] for one in found.power_laws}
    assert powers["tokens", "sdpa"] == pytest.approx(2.0)
    (order,) = found.speed_order
    assert order["fastest"]["64"] == "flash_cpu"


def test_a_failing_backend_is_named_and_dropped(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    bench, _scaling_case = faked(clock, monkeypatch), runner._scaling_case

    def broken() -> Any:
        raise ValueError("too many values")

    def worse(
        kind: str, spec: hw.AttentionSpec, size: runner.CallSize, names: list[str]
    ) -> BenchmarkCase:
        case = _scaling_case(kind, spec, size, names)
        return replace(case, ours=broken) if names[0] == "flash_cpu" else case

    monkeypatch.setattr(runner, "_scaling_case", worse)
    points = list(runner.measure_scaling(bench, "plain heads, causal"))
    assert points[0]["absent"] == {"flash_cpu": "ValueError: too many values"}
    assert points[0]["seconds"] == {}
    assert set(points[1]["seconds"]) == {"sdpa", "chunked", "dense", "bf16_matmul"}
    found = ScalingReport(MACHINE, points)
    assert not found.is_valid
    assert "! plain heads, causal, flash_cpu: ValueError: too many values" in str(found)


def test_gradients_are_measured_along_tokens_alone(monkeypatch: pytest.MonkeyPatch):
    points = list(
        runner.measure_scaling(faked(Clock(), monkeypatch), "plain heads, causal, with gradients")
    )
    assert {point["axis"] for point in points} == {"tokens"}


@pytest.mark.parametrize("kind", runner.SCALING_LAYERS)
def test_backends_run_the_same_layer(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Every backend that takes a kind of layer gives the same, gradients too; and again, when a
    cache begins anew.
    """
    size = runner.CallSize(tokens=37, heads=4, rows=2, layers=2)
    spec = runner.design_layer(kind, size)
    names = [
        name
        for name, reasons in runner.unsupported_reasons(kind, spec).items()
        if not reasons and name != runner.COMPILED_BACKEND
    ]
    assert len(names) >= 2
    case = runner._scaling_case(kind, spec, size, names)
    for _ in range(2 if not runner.SCALING_LAYERS[kind].single_query else 19):
        ours = case.ours()
        for name, peer in case.peers.items():
            theirs = peer()
            torch.testing.assert_close(
                theirs, ours, atol=1e-4, rtol=1e-3, msg=lambda value, name=name: f"{name}: {value}"
            )


def test_each_measurement_starts_with_a_new_cache(monkeypatch: pytest.MonkeyPatch):
    kind, size = "one query, heads in fours", runner.CallSize(tokens=32, heads=4)
    run = runner._layer_run(
        runner.SCALING_LAYERS[kind], runner.design_layer(kind, size), size, "dense"
    )
    values = [run() for _ in range(33)]
    assert torch.equal(values[0], values[16])
    assert torch.equal(values[0], values[32])
    assert not torch.equal(values[0], values[1])


def test_every_backend_is_measured_by_some_kind():
    measured = {
        name
        for kind in runner.SCALING_LAYERS
        for name, reasons in runner.unsupported_reasons(
            kind, runner.design_layer(kind, runner.CallSize())
        ).items()
        if not reasons
    }
    assert measured == set(backends.BACKENDS) - {
        "paged"
    }  # it is for pages, which the bench has rows of


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds and few sizes, on a machine that nobody measures."""

    def measured(bench: CaseTimer, kind: str) -> Iterator[dict[str, Any]]:
        for at in SIZES:
            yield {
                "kind": kind,
                "axis": "tokens",
                "at": at,
                "seconds": {"sdpa": at / 1e6, "dense": at**2 / 1e9},
                "spread": {},
                "runs": "sdpa",
                "absent": {},
                "differs": {},
            }

    monkeypatch.setattr(runner, "measure_scaling", measured)
    monkeypatch.setattr(session, "describe_machine", lambda limits, threads: MACHINE)


def test_the_command_prints_a_table_and_json(capsys, quick, tmp_path: Path):
    assert cli.main(["bench", "--scaling", "window", "--out", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "sdpa overtakes dense at 1,000 tokens" in text
    assert "not the fastest at 64, 128, 256, 512 tokens" in text
    assert "dense scales with: tokens 2.00 ± 0.00" in out
    assert (
        cli.main(
            [
                "bench",
                "--scaling",
                "window",
                "--json",
                "--out",
                str(tmp_path / "new"),
                "--overwrite",
            ]
        )
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["machine", "points", "powers", "order"]
    assert {one["kind"] for one in data["order"]} == {
        "a window of 128",
        "a window of 128, with gradients",
    }
    assert ScalingReport.read(tmp_path / "new" / "scaling.json").data == data


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("nothing",), "there is no kind of layer 'nothing'"),
        (("--quick",), "leave out --quick"),
        (("--threads", "0"), "threads=0 is not between 1 and"),
    ],
)
def test_bad_input_is_one_line(capsys, quick, argv: tuple[str, ...], message: str):
    assert cli.main(["bench", "--scaling", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


def test_kinds_of_layers_are_listed(capsys):
    assert cli.main(["bench", "--scaling", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [
        kind
        for line, kind in zip(lines, runner.SCALING_LAYERS, strict=True)
        if line.startswith(f"{kind}  ")
    ] == [*runner.SCALING_LAYERS]
    assert max(map(len, lines)) <= 80


def test_the_pages_show_the_measurements(monkeypatch: pytest.MonkeyPatch, quick, tmp_path: Path):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, "benchmark_pages", raising=False)
    import benchmark_pages

    runner.run_scaling("plain", output_folder=tmp_path)
    monkeypatch.setattr(benchmark_pages, "SCALED", tmp_path / "scaling.json")
    result = benchmark_pages.backends_page()
    assert (
        f"Chosen: `sdpa`, `flash_cpu` from {takeover.least('flash_cpu')} tokens on. Measured: "
        "`sdpa` overtakes `dense`"
    ) in result
    assert "overtakes `dense` at 1,000 tokens." in result
    assert "| 64 | 64.0 us | **4.1 us** |" in result
    for name in backends.BACKENDS:
        assert f"| `{name}` |" in result


def test_the_page_of_rows_has_a_table_for_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, "benchmark_pages", raising=False)
    import benchmark_pages

    row = {
        "name": "a case",
        "kind": "fake",
        "title": "Fake work",
        "ours_s": 0.5,
        "peers": {"one": 1.0},
        "ratio": {"one": 2.0},
        "limit": None,
        "met": False,
        "spread": {"ours": 0.01, "one": 0.02},
        "aim": [{"against": "one", "times": 3.0, "reached": 2.0, "met": False, "why": ""}],
        "absent": {"two": "two is not installed"},
        "differs": {},
        "failed": "",
        "notes": {"memory": "7 MB"},
        "tried": "all of it.",
    }
    (tmp_path / "bench.json").write_text(json.dumps({"machine": MACHINE, "rows": [row]}))
    monkeypatch.setattr(benchmark_pages, "MEASURED", tmp_path / "bench.json")
    result = benchmark_pages.benchmarks_page()
    for line in (
        "- some processor, 2 threads",
        "## Fake work",
        "| one | 1.00 s | 2.00 x | 2 % | **3.00 x: missed** |",
        "- two: two is not installed",
        "What was tried: all of it.",
        "0 of 1 targets are met.",
        "| a case | one | 3.00 x | 2.00 x | missed |",
    ):
        assert line in result.splitlines() or line in result
    assert result.index("## Targets") < result.index("](bench.svg)") < result.index("## Fake work")
    met = {
        **row,
        "name": "another",
        "aim": [{**row["aim"][0], "times": 2.0, "met": True}],
        "met": True,
    }
    (tmp_path / "bench.json").write_text(json.dumps({"machine": MACHINE, "rows": [met]}))
    result = benchmark_pages.benchmarks_page()
    assert "1 of 1 targets are met." in result
    assert "| one | 1.00 s | 2.00 x | 2 % | 2.00 x: met |" in result
    assert "What was tried" not in result
    assert "by machine" not in result
    other = {**MACHINE, "processor": "another", "date": "2026-11-26"}
    (tmp_path / "bench-x86-amx.json").write_text(json.dumps({"machine": other, "rows": [row]}))
    result = benchmark_pages.benchmarks_page()
    assert "| row | against | target | some processor | another, 2026-11-26 |" in result
    assert "| a case | one | 3.00 x | - | **2.00 x** |" in result
    assert "| another | one | 2.00 x | 2.00 x | - |" in result
    assert "1 met on some processor; 0 met on another, 2026-11-26." in result
    assert "- another, 2 threads, 2026-11-26" in result

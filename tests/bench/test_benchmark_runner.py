"""The benchmark runner and its report with a simulated clock; nothing is timed here."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import headwise as hw
from headwise import cli
from headwise.bench import benchmark_case, benchmark_report, runner, session
from headwise.bench.benchmark_case import (
    LIMIT,
    BenchmarkCase,
    CaseCount,
    CaseKind,
    MissingPeer,
    RequiredWork,
    SpeedRatio,
    SpeedTarget,
    TimingPace,
    TimingSamples,
    compare_pairs,
    count_outside,
    interleaved_order,
    time_interleaved,
    time_warm_call,
)
from headwise.bench.benchmark_report import BenchmarkReport, format_duration, format_seconds
from headwise.bench.session import MATMUL_RUN, READ_RUN, LastLevelCache, MachineLimits
from headwise.errors import SpecError
from headwise.head_analysis import head_figures
from headwise.machine.capabilities import MachineCapabilities

DOCS = Path(__file__).resolve().parents[2] / "docs"
SAME = torch.arange(7.0)
LAST = LastLevelCache(2**10, True)


class Clock:
    """Time that passes only while a fake run runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def run(self, name: str, *seconds: float, gives: Any = SAME) -> Callable[[], Any]:
        """A run that takes these seconds, one after the other, and the last of
        them from then on.
        """
        left = list(seconds)

        def go() -> Any:
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return gives

        return go


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Fixed(MachineLimits):
    """A machine that reads and multiplies by the fake clock."""

    def limit_runs(self, need: RequiredWork | None) -> dict[str, Any]:
        built = super().limit_runs(need)
        return {
            name: CLOCKS[-1].run(name, {READ_RUN: 0.125, MATMUL_RUN: 0.5}[name]) for name in built
        }


CLOCKS: list[Clock] = []


@pytest.fixture
def bench(clock: Clock) -> session.CaseTimer:
    CLOCKS.append(clock)
    return session.CaseTimer(
        TimingPace(min_sample_seconds=0.02, min_samples=3, max_samples=5, max_seconds=100.0),
        Fixed(LAST),
        clock,
    )


def row(bench: session.CaseTimer, case: BenchmarkCase) -> dict[str, Any]:
    return bench.time_case(case, "fake") | {"title": "Fake work"}


# --- turns ----------------------------------------------------------------------------------------


def test_a_sample_lasts_long_enough_and_gives_seconds_per_call(clock: Clock):
    samples = time_interleaved(
        {"a": clock.run("a", 0.25), "b": clock.run("b", 0.0078125)},
        TimingPace(max_samples=4),
        clock,
    )
    assert samples["a"] == TimingSamples((0.25,) * 4, 1)
    assert samples["b"].calls_per_sample == 3  # 0.02 seconds and no less
    assert samples["b"].seconds == pytest.approx((0.0078125,) * 4, rel=1e-12)


def test_slow_cases_are_sampled_less_often_but_often_enough(clock: Clock):
    pace = TimingPace(min_samples=3, max_samples=15, max_seconds=30.0)
    samples = time_interleaved({"slow": clock.run("slow", 60.0), "some": clock.run("some", 2.5), "fast": clock.run("fast", 0.1)},
                     pace, clock)  # fmt: skip
    assert [len(samples[name].seconds) for name in ("slow", "some", "fast")] == [3, 4, 15]


def test_a_call_as_long_as_a_sample_is_one_from_the_first_round_on(clock: Clock):
    runs = {"long": clock.run("long", 0.75, 0.5), "short": clock.run("short", 0.015625)}
    samples = time_interleaved(
        runs, TimingPace(min_sample_seconds=0.02, min_samples=3, max_samples=3), clock
    )
    assert samples["long"].seconds == (0.75, 0.5, 0.5)
    assert clock.order.count("long") == 3
    assert len(samples["short"].seconds) == 3
    assert clock.order.count("short") == 2 + 3 * 2  # two calls say that two are a sample


def test_a_wide_spread_of_one_run_doubles_the_samples_of_all(clock: Clock):
    runs = {"even": clock.run("even", 1.0), "odd": clock.run("odd", 1.0, 1.0, 2.0, 3.0, 1.0)}
    times = time_interleaved(
        runs, TimingPace(min_samples=3, max_samples=15, max_seconds=1.0), clock
    )
    assert {name: len(samples.seconds) for name, samples in times.items()} == {"even": 6, "odd": 6}
    again = time_interleaved(
        {"odd": clock.run("odd", 1.0, 1.0, 2.0, 3.0)},
        TimingPace(min_samples=3, max_samples=3, max_seconds=1.0),
        clock,
    )
    assert len(again["odd"].seconds) == 3  # no more than are taken at most


def test_the_order_of_turns_is_shuffled_by_a_fixed_seed():
    result = list(interleaved_order({"a": 40, "b": 40, "c": 20}, seed=0))
    assert result == list(interleaved_order({"a": 40, "b": 40, "c": 20}, seed=0))
    assert result != list(interleaved_order({"a": 40, "b": 40, "c": 20}, seed=1))
    assert {name: result.count(name) for name in "abc"} == {"a": 40, "b": 40, "c": 20}
    halves = result[: len(result) // 2]
    assert halves.count("c") == 10  # spread over the rounds, not at one end
    firsts = [result.index("a", 2 * n) < result.index("b", 2 * n) for n in range(20)]
    assert True in firsts
    assert False in firsts


def test_the_warm_estimate_is_the_shortest_of_some(clock: Clock):
    assert (
        time_warm_call(clock.run("a", 0.015625, 0.00390625, 0.0078125), clock, 0.02) == 0.00390625
    )
    assert len(clock.order) == 3  # as many as take 0.02 seconds together


def test_the_collector_rests_while_runs_are_timed(clock: Clock):
    import gc

    recorded = []
    time_interleaved(
        {"a": lambda: (recorded.append(gc.isenabled()), clock.run("a", 1.0)())},
        TimingPace(max_samples=3),
        clock,
    )
    assert set(recorded) == {False}
    assert gc.isenabled()


def test_median_and_spread_are_of_the_middle():
    samples = TimingSamples((1.0, 100.0, 2.0, 3.0, 4.0))
    assert samples.median == 3.0
    assert samples.spread == pytest.approx((4.0 - 2.0) / 3.0)


# --- agreement ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (torch.tensor([0.0, 1000.0]), torch.tensor([0.9, 1000.0]), True),
        (torch.tensor([0.0, 1000.0]), torch.tensor([1.1, 1000.0]), False),
        ((SAME, SAME[:3]), (SAME, SAME[:3]), True),
        ((SAME, SAME[:3]), (SAME, SAME[:3] + 1), False),
        ((SAME, SAME), SAME, False),
        (SAME, SAME[:6], False),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan]), False),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), False),
        ((SAME, SAME), (SAME, SAME * torch.nan), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), True),
        (torch.zeros(3), torch.full((3,), 0.01), False),
        (torch.empty(0, 3), torch.empty(0, 3), True),
        (3.5, 3.5, True),
    ],
)
def test_tolerance_scales_with_the_largest_number(ours: Any, theirs: Any, same: bool):
    assert (benchmark_case.describe_difference(ours, theirs, 1e-3) == "") is same


# --- verdicts -------------------------------------------------------------------------------------


def test_a_row_has_medians_ratios_the_limit_and_verdicts(bench: session.CaseTimer, clock: Clock):
    case = BenchmarkCase(
        "a case", clock.run("ours", 0.5), {"one": clock.run("one", 1.5), "two": clock.run("two", 0.25)},
        targets=(SpeedTarget("one", 3.0), SpeedTarget("two", 1.0), SpeedTarget(LIMIT, 0.5)), required_work=RequiredWork(bytes_read=2**15), notes={"memory": "7 MB"},
        history="everything.",
    )  # fmt: skip
    got = row(bench, case)
    assert got["ours_s"] == 0.5
    assert got["peers"] == {"one": 1.5, "two": 0.25}
    assert got["ratio"] == {"one": 3.0, "two": 0.5}
    # 2^15 bytes where 2^13 (8 times the cache) take an eighth of a second: half a second
    assert (got["limit"]["seconds"], got["limit"]["share"]) == (0.5, 1.0)
    assert [(one["against"], one["reached"], one["met"]) for one in got["aim"]] == [
        ("one", 3.0, True), ("two", 0.5, False), (LIMIT, 1.0, True)
    ]  # fmt: skip
    assert got["met"] is False
    assert (got["notes"], got["tried"], got["kind"]) == ({"memory": "7 MB"}, "everything.", "fake")
    json.dumps(got, allow_nan=False)


def test_a_limit_is_the_longer_of_reading_and_products(bench: session.CaseTimer, clock: Clock):
    need = RequiredWork(bytes_read=2**14, flops=2 * 2048**3 * 3, dtype=torch.float64)
    samples = {READ_RUN: TimingSamples((0.125,) * 3), MATMUL_RUN: TimingSamples((0.5,) * 3)}
    got = MachineLimits(LAST).bound(need, samples)
    assert (got["seconds"], got["bottleneck"]) == (1.5, "compute")
    assert got["bytes_per_second"] == 2**13 / 0.125
    assert got["flops_per_second"] == 2 * 2048**3 / 0.5
    assert (
        MachineLimits(LAST).bound(RequiredWork(bytes_read=2**17), samples)["bottleneck"] == "memory"
    )


def test_the_machine_reads_more_than_its_cache_holds_and_multiplies_in_the_dtype(clock: Clock):
    runs = MachineLimits(LastLevelCache(2**12, True)).limit_runs(
        RequiredWork(bytes_read=1, flops=1, dtype=torch.bfloat16)
    )
    assert set(runs) == {READ_RUN, MATMUL_RUN}
    assert runs[READ_RUN]().item() == 8 * 2**12 / 4  # ones, four bytes each
    assert runs[MATMUL_RUN]().dtype == torch.bfloat16
    assert MachineLimits(LAST).limit_runs(None) == {}


def test_absent_peers_are_named(bench: session.CaseTimer, clock: Clock):
    def broken() -> Any:
        raise RuntimeError("no\ncompiler")

    peers = {
        "gone": MissingPeer("gone is not installed"),
        "broken": broken,
        "there": clock.run("there", 1.0),
    }
    got = row(
        bench,
        BenchmarkCase(
            "a case",
            clock.run("ours", 0.5),
            peers,
            targets=(SpeedTarget("gone", 2.0), SpeedTarget("there", 2.0)),
        ),
    )
    assert got["absent"] == {
        "gone": "gone is not installed",
        "broken": "failed: RuntimeError: no compiler",
    }
    assert list(got["peers"]) == ["there"]
    assert [one["met"] for one in got["aim"]] == [None, True]
    assert got["met"] is None
    result = str(BenchmarkReport(MACHINE, [got]))
    assert "gone: gone is not installed" in result
    assert "broken: failed: RuntimeError: no compiler" in result


def test_other_results_give_no_verdict(bench: session.CaseTimer, clock: Clock):
    peers = {"liar": clock.run("liar", 9.0, gives=SAME + 1), "one": clock.run("one", 9.0)}
    got = row(
        bench,
        BenchmarkCase("a case", clock.run("ours", 0.5), peers, targets=(SpeedTarget("one", 2.0),)),
    )
    assert list(got["differs"]) == ["liar"]
    assert (got["met"], got["aim"][0]["why"]) == (None, "different results")
    report = BenchmarkReport(MACHINE, [got])
    assert not report.is_valid
    assert "liar gives a different result" in str(report)
    lenient = BenchmarkCase(
        "a case", clock.run("ours", 0.5), peers, targets=(SpeedTarget("one", 2.0),), tolerance=None
    )
    assert row(bench, lenient)["met"] is True


def test_a_loose_spread_makes_a_verdict_uncertain(bench: session.CaseTimer, clock: Clock):
    shaky = clock.run("shaky", 1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0)
    targets = (
        SpeedTarget("shaky", 0.1),
        SpeedTarget("shaky", 2.5),
        SpeedTarget("shaky", 9.0),
        SpeedTarget("calm", 2.0),
    )
    peers = {"shaky": shaky, "calm": clock.run("calm", 1.0)}
    got = row(bench, BenchmarkCase("a case", clock.run("ours", 0.5), peers, targets=targets))
    assert got["spread"]["shaky"] > 0.2
    low, high = got["interval"]["shaky"]
    assert 2.0 <= low < 2.5 < high <= 6.0  # one to three seconds over half a second
    assert got["interval"]["calm"] == [2.0, 2.0]
    assert [(one["met"], one["certain"]) for one in got["aim"]] == [
        (True, True), (True, False), (False, True), (True, True)
    ]  # fmt: skip
    text = str(BenchmarkReport(MACHINE, [got]))
    assert "2.50 x: met ?" in text
    assert "9.00 x: missed\n" in text


def test_pairs_see_the_same_machine():
    """Other work slows both runs of a pair, so their ratio is known where their
    spreads are wide.
    """
    load = (1.0, 4.0, 1.0, 9.0, 2.0, 16.0, 1.0, 3.0)
    starts = tuple(range(len(load)))
    ours = TimingSamples(load, 1, tuple(2.0 * n for n in starts))
    theirs = TimingSamples(
        tuple(1.5 * slow for slow in load), 1, tuple(2.0 * n + 1 for n in starts)
    )
    assert ours.spread > 1
    assert compare_pairs(ours, theirs) == SpeedRatio(1.5, 1.5, 1.5, 8)
    few = TimingSamples(
        (6.0, 1.5), 1, (3.0, 13.0)
    )  # beside the second sample of ours, and the seventh
    assert compare_pairs(ours, few) == SpeedRatio(1.5, 1.5, 1.5, 2)
    assert compare_pairs(few, ours) == SpeedRatio(
        pytest.approx(1 / 1.5), pytest.approx(1 / 1.5), pytest.approx(1 / 1.5), 2
    )


@pytest.mark.parametrize("pairs", [6, 9, 15, 40])
def test_the_interval_holds_the_median_in_95_of_100_runs(pairs: int):
    """Coverage by the binomial distribution: the median lies outside if too few ratios are on one
    side of it.
    """
    outside = count_outside(pairs)
    tail = sum(math.comb(pairs, count) for count in range(outside + 1)) / 2**pairs
    assert 2 * tail <= 0.05
    assert (
        2 * (tail + math.comb(pairs, outside + 1) / 2**pairs) > 0.05
    )  # the narrowest such interval


def test_a_failure_of_headwise_is_reported_and_fails_the_run(bench: session.CaseTimer):
    def ours() -> Any:
        raise ValueError("this is new")

    got = row(
        bench,
        BenchmarkCase(
            "a case",
            ours,
            {},
            targets=(SpeedTarget(LIMIT, 0.5),),
            required_work=RequiredWork(bytes_read=1),
        ),
    )
    assert (got["ours_s"], got["failed"], got["met"]) == (None, "ValueError: this is new", None)
    report = BenchmarkReport(MACHINE, [got])
    assert not report.is_valid
    assert "ours failed: ValueError: this is new" in str(report)
    assert benchmark_report.row_bars(got) == []


def test_a_row_reports_where_its_time_went(capsys, fakes, clock: Clock):
    def slow(quick: bool) -> Iterator[BenchmarkCase]:
        clock.now += 4.0
        yield BenchmarkCase("first", clock.run("ours", 0.5), {"one": clock.run("one", 1.0)})
        clock.now += 60.0
        yield BenchmarkCase("second", clock.run("ours", 0.5), {})

    fakes["slow"] = CaseKind("Slow work", slow, CaseCount(2, 2))
    _, out, _ = run(capsys, "slow", "--json")
    data = json.loads(out)
    pace = runner.TIMING_PACES[False]
    seconds = 0.5 * pace.num_samples(0.5, 2) + 1.0 * pace.num_samples(1.0, 2)
    assert data["rows"][0]["took"] == pytest.approx(
        {"making": 4.0, "first calls": 1.5, "samples": seconds}
    )
    assert data["rows"][1]["took"]["making"] == 60.0
    whole = sum(sum(row["took"].values()) for row in data["rows"])
    assert data["machine"]["took"] == pytest.approx(whole)
    text = " ".join(run(capsys, "slow")[1].split())
    assert f"total time {format_duration(whole)}" in text
    assert f"Time by kind: slow {format_duration(whole)}." in text


def test_an_aim_without_a_peer_is_an_error(bench: session.CaseTimer, clock: Clock):
    with pytest.raises(
        ValueError, match="has a target against 'nobody', which is not one of its peers"
    ):
        bench.time_case(
            BenchmarkCase(
                "a case", clock.run("ours", 1.0), {}, targets=(SpeedTarget("nobody", 1.0),)
            ),
            "fake",
        )
    with pytest.raises(ValueError, match="has a target against the limit, but no required_work"):
        bench.time_case(
            BenchmarkCase("a case", clock.run("ours", 1.0), {}, targets=(SpeedTarget(LIMIT, 1.0),)),
            "fake",
        )


def test_no_aims_no_verdict_and_all_met_is_met(bench: session.CaseTimer, clock: Clock):
    assert (
        row(bench, BenchmarkCase("a", clock.run("ours", 0.5), {"one": clock.run("one", 1.0)}))[
            "met"
        ]
        is None
    )
    assert row(
        bench,
        BenchmarkCase(
            "a", clock.run("ours", 0.5), {"one": clock.run("one", 1.0)}, (SpeedTarget("one", 2.0),)
        ),
    )["met"]


# --- the machine ----------------------------------------------------------------------------------

MACHINE = {
    "processor": "some processor", "threads": 2, "processors": 2, "last_level_cache_bytes": 2**25,
    "buffer_bytes": 2**28, "versions": {"torch": "2.13.0", "x-transformers": "2.31.10"},
    "read_bytes_per_second": 3.2e10, "copy_bytes_per_second": 3e10, "fp32_flops_per_second": 1.5e11,
    "bf16_flops_per_second": 7.5e11, "labels": [], "quick": False, "interrupted": False,
}  # fmt: skip


def caches(folder: Path, *args: tuple[int, str, str, str]) -> Path:
    for n, (cpu, level, size, shared) in enumerate(args):
        index = folder / f"cpu{cpu}" / "cache" / f"index{n}"
        index.mkdir(parents=True)
        for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (index / name).write_text(value + "\n")
    return folder


def test_the_last_level_is_that_of_all_processors_once(tmp_path: Path):
    result = [
        (0, "1", "48K", "0"),
        (0, "3", "32768K", "0-1"),
        (1, "3", "32768K", "0-1"),
        (2, "3", "16M", "2-3"),
    ]
    assert session.find_last_level_cache(caches(tmp_path / "a", *result)) == (48 * 2**20, True)
    assert session.find_last_level_cache(tmp_path / "nothing") == (2**25, False)
    damaged = caches(tmp_path / "b", (0, "3", "unknown", "0-1"), (1, "2", "2M", "1"))
    assert session.find_last_level_cache(damaged) == (2 * 2**20, True)


def test_a_container_uses_the_processors_that_it_is_allowed(monkeypatch: pytest.MonkeyPatch):
    machine = MachineCapabilities("Some processor", "x86_64", ("AVX2",), 64, 2, quota=2.0)
    monkeypatch.setattr(session, "this_machine", lambda: machine)
    assert session.num_processors() == session.check_threads(None) == 2
    with pytest.raises(SpecError, match="threads=64 is not between 1 and 2"):
        session.check_threads(64)
    monkeypatch.setattr(MachineLimits, "measure_rates", lambda self: {})
    labels = session.describe_machine(MachineLimits(LAST), 64)["labels"]
    assert any("2 of 64 visible processors may be used" in label for label in labels)


def test_odd_machines_are_labelled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MachineLimits, "measure_rates", lambda self: {})
    monkeypatch.setattr(session.os, "getloadavg", lambda: (0.5, 9.0, 9.0))
    assert session.describe_machine(MachineLimits(LAST), 2)["labels"] == []
    monkeypatch.setattr(
        session, "version", lambda name: {"torch": "2.13.0", "entmax": None}.get(name, "1")
    )
    monkeypatch.setattr(session.os, "getloadavg", lambda: (3.25, 0.0, 0.0))
    labels = session.describe_machine(MachineLimits(LastLevelCache(2**25, False)), 1)["labels"]
    assert labels == [
        "1 thread only",
        "entmax: unknown version",
        "other processes were running: load average 3.2 before the run",
        "the size of the last-level cache is assumed",
    ]


def test_packages_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise session.PackageNotFoundError(name)

    monkeypatch.setattr(session, "version", missing)
    assert session.package_versions() == {}


def test_threads_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    with session.use_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> dict[str, Any]:
    """Two kinds of work that take no time, on a machine that nobody measures."""

    def slow(quick: bool) -> Iterator[BenchmarkCase]:
        yield BenchmarkCase(
            "slow, forward",
            clock.run("ours", 0.5),
            {"one": clock.run("one", 1.0)},
            (SpeedTarget("one", 3.0), SpeedTarget("one", 2.0)),
        )
        yield BenchmarkCase(
            "slow, backward", clock.run("ours", 0.5), {"gone": MissingPeer("gone is not installed")}
        )

    def other(quick: bool) -> Iterator[BenchmarkCase]:
        yield BenchmarkCase(
            "other", clock.run("ours", 0.5), {"liar": clock.run("liar", 1.0, gives=SAME + 1)}
        )

    fields = {"slow": CaseKind("Slow work", slow, CaseCount(2, 2)),
            "other": CaseKind("Other work", other, CaseCount(2, 2))}  # fmt: skip
    monkeypatch.setattr(runner, "case_kinds", lambda: fields)
    monkeypatch.setattr(
        session, "describe_machine", lambda limits, threads: MACHINE | {"threads": threads}
    )
    bench = session.CaseTimer
    monkeypatch.setattr(session, "CaseTimer", lambda pace, limits: bench(pace, limits, clock))
    return fields


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_the_machine_and_the_rows(capsys, fakes):
    code, out, err = run(capsys, "slow", "--json")
    data = json.loads(out)
    assert (code, list(data)) == (0, ["machine", "rows"])  # an aim that is missed is no failure
    assert err.splitlines() == [
        "slow: slow, forward (1 / 2, about 19 s left)",
        "slow: slow, backward (2 / 2, about 0 s left)",
    ]
    expected = {"name", "ours_s", "peers", "ratio", "limit", "aim", "met"}
    assert all(expected <= set(row) for row in data["rows"])
    assert [(row["name"], row["met"]) for row in data["rows"]] == [
        ("slow, forward", False),
        ("slow, backward", None),
    ]


def test_the_table_fits_a_terminal(capsys, fakes):
    code, out, _ = run(capsys)
    assert code == 1  # somebody gives a different result
    assert max(map(len, out.splitlines())) <= 80
    for word in (
        "Slow work",
        "slow, forward",
        "3.00 x: missed",
        "2.00 x: met",
        "gone is not installed",
        "different result",
        "2.00 x",
    ):
        assert word in out
    assert "1 met, 1 missed" in " ".join(out.split())


def test_the_widest_line_fits_too(bench: session.CaseTimer, clock: Clock):
    name = "somebody whose name is long, as published (plain PyTorch, compiled)"
    shaky = clock.run(name, 1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0)
    aims = (SpeedTarget(name, 20.0), SpeedTarget(LIMIT, 0.8), SpeedTarget(name, 200.0))
    got = row(
        bench,
        BenchmarkCase(
            3 * name,
            clock.run("ours", 0.5),
            {name: shaky},
            aims,
            required_work=RequiredWork(bytes_read=2**14),
            history=9 * name,
        ),
    )
    lines = str(
        BenchmarkReport(MACHINE | {"labels": [2 * name], "quick": True}, [got])
    ).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[-3:] for line in lines if "20.0 x:" in line] == [["20.0", "x:", "missed"]]


def test_rows_are_chosen_by_a_piece_of_a_name(capsys, fakes):
    def names(*argv: str) -> list[str]:
        return [row["name"] for row in json.loads(run(capsys, *argv, "--json")[1])["rows"]]

    assert names("slow:Backward") == ["slow, backward"]
    assert names("slow:for", "other") == ["slow, forward", "other"]
    assert names("slow:backward", "slow") == ["slow, forward", "slow, backward"]
    assert names("slow:for", "slow:backward") == ["slow, forward", "slow, backward"]


def test_the_list_of_kinds_fits_80_columns(capsys: pytest.CaptureFixture[str]):
    assert max(map(len, run(capsys, "--list")[1].splitlines())) <= 80


def test_kinds_are_listed(capsys, fakes):
    assert [line.split()[0] for line in run(capsys, "--list")[1].splitlines()] == ["slow", "other"]
    assert json.loads(run(capsys, "--list", "--json")[1])["other"] == fakes["other"].title


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("slow",), None),
        (("decade",), "there is no kind of work 'decade'; use one of"),
        (
            ("slow:sideways",),
            "no row of slow has 'sideways' in its name; its rows are: slow, forward; slow, "
            "backward",
        ),
        (("oter",), "did you mean 'other'?"),
        (("--threads", "0"), "threads=0 is not between 1 and"),
        (("--threads", "1000"), "threads=1000 is not between 1 and"),
        (("--threads", "two"), "--threads needs a whole number, got 'two'"),
        (("--out", "FILE"), "it is a file; give the path of a new folder"),
        (("--fast",), "there is no option --fast"),
        (("--list", "slow"), "--list takes no names; leave out 'slow'"),
    ],
)
def test_bad_input_is_one_line(
    capsys, fakes, tmp_path: Path, argv: tuple[str, ...], message: str | None
):
    (tmp_path / "file").write_text("mine")
    code, out, err = run(
        capsys, *(str(tmp_path / "file") if word == "FILE" else word for word in argv)
    )
    assert (code == 0) if message is None else (code, out) == (2, "")
    assert message is None or (message in err and len(err.splitlines()) == 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_wrong_piece_of_a_name_costs_no_rows_that_were_measured(capsys, fakes):
    code, out, _ = run(capsys, "slow", "other:sideways", "--json")
    rows = json.loads(out)["rows"]
    assert (code, [row["name"] for row in rows]) == (
        1,
        ["slow, forward", "slow, backward", "other"],
    )
    assert "no row of other has 'sideways' in its name; its rows are: other" in rows[-1]["failed"]


def test_an_interrupt_prints_the_finished_rows(
    capsys, fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def stopped(quick: bool) -> Iterator[BenchmarkCase]:
        raise KeyboardInterrupt
        yield

    fakes["other"] = CaseKind("Other work", stopped, CaseCount(2, 2))
    code, out, _ = run(capsys, "--out", str(tmp_path / "new"))
    assert code == 130
    assert "slow, forward" in out
    assert "interrupted: some rows are missing" in out
    assert BenchmarkReport.read(tmp_path / "new" / "bench.json").machine["interrupted"]


INTERRUPTED_RUN = """
import math, signal, sys, time
from headwise import cli
from headwise.bench import runner, session
from headwise.bench.benchmark_case import BenchmarkCase, CaseCount, CaseKind, TimingPace

session.HEADER_SECONDS, session.MATRIX_SIZES["cpu"], session.MachineLimits.buffer_bytes = 0.01, 64, 2**20
runner.TIMING_PACES[False] = TimingPace(max_seconds=0.05, max_spread=math.inf)

def quick(_):
    for number in range(2):
        yield BenchmarkCase(f"case {number}", lambda: 1.0, {"peer": lambda: 1.0})

def slow(_):
    yield BenchmarkCase("never", lambda: time.sleep(600), {})

kinds = {"first": CaseKind("First", quick, CaseCount(2, 2)), "second": CaseKind("Second", slow, CaseCount(3, 3))}
runner.case_kinds = lambda: kinds
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background of a shell
sys.exit(cli.main(["bench", "--threads", "1", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_process_reports_the_finished_rows(tmp_path: Path, number: signal.Signals):
    command = [sys.executable, "-c", INTERRUPTED_RUN, str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        progress = [process.stderr.readline() for _ in range(2)]
        process.send_signal(number)
        try:
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert [line.partition(",")[0] for line in progress] == [
        "first: case 0 (1 / 5",
        "first: case 1 (2 / 5",
    ]
    assert err == "headwise: interrupted; cases that are missing, by kind: second (3)\n"
    report = BenchmarkReport.read(tmp_path / "out" / "bench.json")
    assert [row["name"] for row in report.rows] == ["case 0", "case 1"]
    assert report.machine["missing"] == {"second": 3}
    assert out.rstrip("\n") == str(report)


def test_a_kind_that_cannot_be_made_is_a_row(capsys, fakes):
    def broken(quick: bool) -> Iterator[BenchmarkCase]:
        yield from fakes["slow"].make_cases(quick)
        raise RuntimeError("not here")

    fakes["other"] = CaseKind("Other work", broken, CaseCount(2, 2))
    code, out, _ = run(capsys, "other", "--json")
    rows = json.loads(out)["rows"]
    assert (code, [row["name"] for row in rows]) == (
        1,
        ["slow, forward", "slow, backward", "other"],
    )
    assert rows[-1]["failed"] == "RuntimeError: not here"


def test_the_folder_holds_numbers_and_a_drawing(fakes, tmp_path: Path):
    report = hw.run_benchmarks("slow", output_folder=tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} >= {"bench.json", "bench.svg"}
    assert BenchmarkReport.read(tmp_path / "new" / "bench.json") == report
    drawing = (tmp_path / "new" / "bench.svg").read_bytes()
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert drawing == benchmark_report.render_chart(report.rows)  # the same rows are the same file


AIMED = (SpeedTarget("one", 3.0), SpeedTarget("one", 4.0), SpeedTarget(LIMIT, 0.8))


def render_row(
    bench: session.CaseTimer, clock: Clock, *aims: SpeedTarget
) -> tuple[list[benchmark_report.RatioBar], ElementTree.Element]:
    """The bars of a row in which one takes 3 times our seconds, and the drawing of it."""
    case = BenchmarkCase(
        "a case",
        clock.run("ours", 0.5),
        {"one": clock.run("one", 1.5)},
        aims,
        required_work=RequiredWork(bytes_read=2**14),
    )
    got = row(bench, case)
    return benchmark_report.row_bars(got), ElementTree.fromstring(
        benchmark_report.render_chart([got])
    )


def of_class(drawing: ElementTree.Element, *names: str) -> list[dict[str, str]]:
    return [
        found.attrib for found in drawing.iter() if {*names} <= set(found.get("class", "").split())
    ]


def test_a_drawing_shows_every_peer_and_the_limit(bench: session.CaseTimer, clock: Clock):
    lines, drawing = render_row(bench, clock)
    assert lines == [
        ("a case", None, "ours 500 ms", (), False),
        ("one", 3.0, "3.00 x", (), False),
        ("limit: memory", 0.5, "50 %", (), True),
    ]
    (slower,), (limit,) = of_class(drawing, "slower"), of_class(drawing, "limit")
    one = float(slower["x"])  # where bars begin
    assert float(limit["x"]) + float(limit["width"]) == pytest.approx(one, abs=0.1)
    scale = benchmark_report.LogScale.from_bars(lines)
    assert float(slower["width"]) == pytest.approx(scale.position(3.0) - one, abs=0.1)
    assert float(limit["x"]) == scale.position(0.5)
    assert of_class(drawing, "mark") == []
    assert "Nothing to draw" in "".join(
        ElementTree.fromstring(benchmark_report.render_chart([])).itertext()
    )


def test_aims_are_drawn_and_those_missed_are_seen(bench: session.CaseTimer, clock: Clock):
    lines, drawing = render_row(bench, clock, *AIMED)
    assert [[goal.is_met for goal in line.targets] for line in lines] == [
        [],
        [True, False],
        [False],
    ]
    scale = benchmark_report.LogScale.from_bars(lines)
    marks = {
        kind: [mark["d"] for mark in of_class(drawing, "mark", kind)]
        for kind in ("met", "missed", "open")
    }
    places = {kind: [float(d[1:].split()[0]) for d in found] for kind, found in marks.items()}
    assert places == {
        "met": [scale.position(3.0)],
        "missed": [scale.position(4.0), scale.position(0.8)],
        "open": [],
    }
    gaps = [(gap["d"].split()[0], gap["d"].split("H")[1]) for gap in of_class(drawing, "gap")]
    assert gaps == [
        (f"M{scale.position(3.0):g}", f"{scale.position(4.0):g}"),
        (f"M{scale.position(0.5):g}", f"{scale.position(0.8):g}"),
    ]
    values = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"3.00 x: met", "4.00 x: missed", "80 %: missed"} <= set(values)


def test_a_drawing_is_small_and_its_words_stay_in_their_columns():
    """The one on the page; letters of the widest font are 0.61 of its size wide on average, in bold
    0.7.
    """
    rows = BenchmarkReport.read(DOCS / "bench.json").rows
    chart = benchmark_report.render_chart(rows)
    assert chart == (DOCS / "bench.svg").read_bytes()
    assert len(chart) < 150_000
    drawing = ElementTree.fromstring(chart)
    texts = {
        kind: [*drawing.iterfind(f".//{{*}}text[@class='{kind}']")]
        for kind in ("end", "row", "missed", "open")
    }
    names = [text for text in texts["end"] if float(text.attrib["x"]) == benchmark_report.NAME_X]
    assert max(len(text.text or "") for text in names) * 0.61 * 11.5 < benchmark_report.NAME_X
    assert (
        max(len(text.text or "") for text in texts["row"]) * 0.7 * 11.5 < benchmark_report.TARGET_X
    )
    for kind, wide in (("missed", 0.7), ("open", 0.61)):
        assert (
            max((len(text.text or "") for text in texts[kind]), default=0) * wide * 11.5
            < benchmark_report.CHART_WIDTH - benchmark_report.TARGET_X
        )
    places = [
        (text.get("x"), text.get("y")) for text in drawing.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert len(places) == len(set(places))
    assert max(float(y or 0) for _, y in places) < float(drawing.attrib["height"])


def test_a_drawing_is_for_light_and_for_dark_paper():
    style = (
        ElementTree.fromstring(benchmark_report.render_chart([])).findtext(
            "{http://www.w3.org/2000/svg}style"
        )
        or ""
    )
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    for name, value in (("light", light), ("dark", dark)):
        paper = head_figures.FIGURE_THEMES[name]
        for colour in (paper.background, paper.foreground, paper.muted, *paper.pair_colours):
            assert colour in value


def test_drawing_of_random_states_and_seeds_leaves_none_behind(fakes):
    before = torch.random.get_rng_state()
    hw.run_benchmarks("slow")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("seconds", "value"),
    [(1e-6, "1.0 us"), (0.00099, "990 us"), (0.1234, "123 ms"), (75, "75.0 s")],
)
def test_seconds_have_three_significant_figures(seconds: float, value: str):
    assert format_seconds(seconds) == value

"""One row: a case that was timed, as plain values, with a verdict on every aim."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..counting.here import synchronize_device
from .agreeing import describe_difference
from .case import LIMIT, MissingPeer, SpeedTarget, BenchmarkCase, TimedCall
from .limits import MachineLimits
from .turns import Clock, TimingPace, TimingSamples, time_interleaved

HEADWISE = "ours"
MAX_SPREAD = 0.2  # a spread beyond which there is no verdict
BenchmarkRow = dict[str, Any]  # what JSON can say, the same when it is read back


@dataclass(frozen=True)
class CaseTimer:
    """How cases are timed: the pace, what the machine allows, and the clock."""

    pace: TimingPace
    limits: MachineLimits
    clock: Clock = time.perf_counter

    def time_case(self, case: BenchmarkCase, kind: str) -> BenchmarkRow:
        """Everybody who can run it, warm and agreeing, timed in turns."""
        _check_targets(case)
        found, begun = _CaseResult(case), self.clock()
        runs = found.warm_up({name: _synchronized(run) for name, run in _available_runs(case).items()})
        warm = self.clock()
        found.phase_seconds = {"first calls": warm - begun}
        if HEADWISE not in runs:
            return found.row(kind)
        found.samples = time_interleaved(runs | self.limits.limit_runs(case.required_work), self.pace, self.clock)
        found.phase_seconds["samples"] = self.clock() - warm
        if case.required_work is not None:
            limit = self.limits.bound(case.required_work, found.samples)
            found.limit = limit | {"share": limit["seconds"] / found.samples[HEADWISE].median}
        return found.row(kind)


def _check_targets(case: BenchmarkCase) -> None:
    """Every aim is at somebody."""
    for aim in case.targets:
        if aim.baseline == LIMIT and case.required_work is None:
            raise ValueError(f"{case.name!r} aims at a limit, and says no need")
        if aim.baseline not in (LIMIT, *case.peers):
            raise ValueError(f"{case.name!r} aims at {aim.baseline!r}, and has no such peer")


def failed_row(kind: str, name: str, error: Exception) -> BenchmarkRow:
    """The row of what could not even be made."""
    return _CaseResult(BenchmarkCase(name, lambda: None, {}), failed=_format_error(error)).row(kind)


def _available_runs(case: BenchmarkCase) -> dict[str, TimedCall]:
    peers = {name: run for name, run in case.peers.items() if not isinstance(run, MissingPeer)}
    return {HEADWISE: case.ours, **peers}


def _synchronized(run: TimedCall) -> TimedCall:
    """The same, done when it returns."""

    def whole() -> Any:
        given = run()
        synchronize_device()
        return given

    return whole


def _format_error(error: Exception) -> str:
    """An error in one line that is not too long."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) < 200 else f"{words[:197]}..."


@dataclass
class _CaseResult:
    """What is known of a case so far."""

    case: BenchmarkCase
    samples: dict[str, TimingSamples] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    limit: dict[str, Any] | None = None
    failed: str = ""
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def warm_up(self, runs: Mapping[str, TimedCall]) -> dict[str, TimedCall]:
        """Those that have run once, and what they gave compared with ours; whoever fails is named with the reason."""
        self.missing = {name: run.reason for name, run in self.case.peers.items() if isinstance(run, MissingPeer)}
        try:
            ours = runs[HEADWISE]()
        except Exception as error:
            self.failed = _format_error(error)
            return {}
        going = {HEADWISE: runs[HEADWISE]}
        for name, run in runs.items():
            if name == HEADWISE:
                continue
            try:
                theirs = run()
            except Exception as error:
                self.missing[name] = f"failed: {_format_error(error)}"
                continue
            going[name] = run
            tolerance = None if name in self.case.reported_peers else self.case.tolerance
            if tolerance is not None and (said := describe_difference(ours, theirs, tolerance)):
                self.differences[name] = said
        return going

    def row(self, kind: str) -> BenchmarkRow:
        """As plain values."""
        case, taken = self.case, self.samples
        peers = {name: taken[name].median for name in case.peers if name in taken}
        ours = taken[HEADWISE].median if HEADWISE in taken else None
        verdicts = [self._target_verdict(aim, ours, peers) for aim in case.targets]
        return {
            "name": case.name, "kind": kind, "ours_s": ours, "peers": peers,
            "ratio": {name: seconds / ours for name, seconds in peers.items() if ours},
            "limit": self.limit, "aim": verdicts, "met": _overall_verdict([one["met"] for one in verdicts]),
            "spread": {name: taken[name].spread for name in (HEADWISE, *peers) if name in taken},
            "samples": {name: len(taken[name].seconds) for name in (HEADWISE, *peers) if name in taken},
            "calls": {name: taken[name].calls_per_sample for name in (HEADWISE, *peers) if name in taken},
            "absent": self.missing, "differs": self.differences, "failed": self.failed,
            "notes": dict(case.notes), "tried": case.history, "took": self.phase_seconds,
        }  # fmt: skip

    def _target_verdict(self, aim: SpeedTarget, ours: float | None, peers: Mapping[str, float]) -> dict[str, Any]:
        """What was reached of an aim, and whether it is met; where nothing can be said, why."""
        reached, why = None, ""
        spreads = {HEADWISE: self.samples[HEADWISE].spread} if HEADWISE in self.samples else {}
        if ours is None:
            why = "ours failed"
        elif aim.baseline == LIMIT and self.limit is not None:
            reached, spreads = self.limit["share"], spreads | {LIMIT: self.limit["spread"]}
        elif aim.baseline in peers:
            reached, spreads = peers[aim.baseline] / ours, spreads | {aim.baseline: self.samples[aim.baseline].spread}
        else:
            why = "absent"
        if reached is not None and self.differences:
            why = "not the same results"
        elif reached is not None and (loose := [name for name, spread in spreads.items() if spread > MAX_SPREAD]):
            why = f"spread of {', '.join(loose)} above {MAX_SPREAD:.0%}"
        met = None if why or reached is None else reached >= aim.ratio
        return {"against": aim.baseline, "times": aim.ratio, "reached": reached, "met": met, "why": why}


def _overall_verdict(verdicts: list[bool | None]) -> bool | None:
    """Missed if one is, met if all are; None where nothing is aimed at, or something cannot be said."""
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True

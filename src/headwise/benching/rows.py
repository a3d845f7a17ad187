"""One row: a case that was timed, as plain values, with a verdict on every aim."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..counting.here import wait
from .agreeing import difference
from .case import LIMIT, Absent, Aim, Case, Run
from .limits import Limits
from .turns import Clock, Pace, Samples, in_turns

OURS = "ours"
LOOSE = 0.2  # a spread beyond which there is no verdict
Row = dict[str, Any]  # what JSON can say, the same when it is read back


@dataclass(frozen=True)
class Bench:
    """How cases are timed: the pace, what the machine allows, and the clock."""

    pace: Pace
    limits: Limits
    clock: Clock = time.perf_counter

    def row(self, case: Case, kind: str) -> Row:
        """Everybody who can run it, warm and agreeing, timed in turns."""
        _check(case)
        found, begun = _Found(case), self.clock()
        runs = found.warmed({name: _waited(run) for name, run in _runs(case).items()})
        warm = self.clock()
        found.took = {"first calls": warm - begun}
        if OURS not in runs:
            return found.row(kind)
        found.taken = in_turns(runs | self.limits.runs(case.need), self.pace, self.clock)
        found.took["samples"] = self.clock() - warm
        if case.need is not None:
            limit = self.limits.of(case.need, found.taken)
            found.limit = limit | {"share": limit["seconds"] / found.taken[OURS].median}
        return found.row(kind)


def _check(case: Case) -> None:
    """Every aim is at somebody."""
    for aim in case.aims:
        if aim.against == LIMIT and case.need is None:
            raise ValueError(f"{case.name!r} aims at a limit, and says no need")
        if aim.against not in (LIMIT, *case.peers):
            raise ValueError(f"{case.name!r} aims at {aim.against!r}, and has no such peer")


def failed(kind: str, name: str, error: Exception) -> Row:
    """The row of what could not even be made."""
    return _Found(Case(name, lambda: None, {}), failed=_said(error)).row(kind)


def _runs(case: Case) -> dict[str, Run]:
    peers = {name: run for name, run in case.peers.items() if not isinstance(run, Absent)}
    return {OURS: case.ours, **peers}


def _waited(run: Run) -> Run:
    """The same, done when it returns."""

    def whole() -> Any:
        given = run()
        wait()
        return given

    return whole


def _said(error: Exception) -> str:
    """An error in one line that is not too long."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) < 200 else f"{words[:197]}..."


@dataclass
class _Found:
    """What is known of a case so far."""

    case: Case
    taken: dict[str, Samples] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    limit: dict[str, Any] | None = None
    failed: str = ""
    took: dict[str, float] = field(default_factory=dict)

    def warmed(self, runs: Mapping[str, Run]) -> dict[str, Run]:
        """Those that have run once, and what they gave compared with ours; whoever fails is named with the reason."""
        self.absent = {name: run.why for name, run in self.case.peers.items() if isinstance(run, Absent)}
        try:
            ours = runs[OURS]()
        except Exception as error:
            self.failed = _said(error)
            return {}
        going = {OURS: runs[OURS]}
        for name, run in runs.items():
            if name == OURS:
                continue
            try:
                theirs = run()
            except Exception as error:
                self.absent[name] = f"failed: {_said(error)}"
                continue
            going[name] = run
            tolerance = None if name in self.case.beside else self.case.tolerance
            if tolerance is not None and (said := difference(ours, theirs, tolerance)):
                self.differs[name] = said
        return going

    def row(self, kind: str) -> Row:
        """As plain values."""
        case, taken = self.case, self.taken
        peers = {name: taken[name].median for name in case.peers if name in taken}
        ours = taken[OURS].median if OURS in taken else None
        verdicts = [self._verdict(aim, ours, peers) for aim in case.aims]
        return {
            "name": case.name, "kind": kind, "ours_s": ours, "peers": peers,
            "ratio": {name: seconds / ours for name, seconds in peers.items() if ours},
            "limit": self.limit, "aim": verdicts, "met": _together([one["met"] for one in verdicts]),
            "spread": {name: taken[name].spread for name in (OURS, *peers) if name in taken},
            "samples": {name: len(taken[name].seconds) for name in (OURS, *peers) if name in taken},
            "calls": {name: taken[name].calls for name in (OURS, *peers) if name in taken},
            "absent": self.absent, "differs": self.differs, "failed": self.failed,
            "notes": dict(case.notes), "tried": case.tried, "took": self.took,
        }  # fmt: skip

    def _verdict(self, aim: Aim, ours: float | None, peers: Mapping[str, float]) -> dict[str, Any]:
        """What was reached of an aim, and whether it is met; where nothing can be said, why."""
        reached, why = None, ""
        spreads = {OURS: self.taken[OURS].spread} if OURS in self.taken else {}
        if ours is None:
            why = "ours failed"
        elif aim.against == LIMIT and self.limit is not None:
            reached, spreads = self.limit["share"], spreads | {LIMIT: self.limit["spread"]}
        elif aim.against in peers:
            reached, spreads = peers[aim.against] / ours, spreads | {aim.against: self.taken[aim.against].spread}
        else:
            why = "absent"
        if reached is not None and self.differs:
            why = "not the same results"
        elif reached is not None and (loose := [name for name, spread in spreads.items() if spread > LOOSE]):
            why = f"spread of {', '.join(loose)} above {LOOSE:.0%}"
        met = None if why or reached is None else reached >= aim.times
        return {"against": aim.against, "times": aim.times, "reached": reached, "met": met, "why": why}


def _together(verdicts: list[bool | None]) -> bool | None:
    """Missed if one is, met if all are; None where nothing is aimed at, or something cannot be said."""
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True

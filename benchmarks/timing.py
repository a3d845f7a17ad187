"""Time ours and theirs in turns within one process, so that both meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One piece of work, done by us and by others."""

    name: str
    ours: Callable[[], None]
    peers: dict[str, Callable[[], None]]


def interleaved(case: Case, *, repeats: int, calls: int) -> dict[str, object]:
    """Medians of seconds a call, the spread over repeats, and our ratio to each peer (below 1 is faster)."""
    runs = {"ours": case.ours, **case.peers}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        _timed(run, calls)
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(_timed(run, calls))
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    spread = {name: (max(taken) - min(taken)) / median[name] for name, taken in seconds.items()}
    peers = {name: taken for name, taken in median.items() if name != "ours"}
    ratio = {name: median["ours"] / taken for name, taken in peers.items()}
    return {"name": case.name, "ours_s": median["ours"], "peers": peers, "ratio": ratio, "spread": spread}


def _timed(run: Callable[[], None], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begun) / calls

"""The clock of the system jumps while models train, generate and answer a page: no duration is
measured by it.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import pytest

import headwise as hw
from hostile import hostile_requests

SOURCES = Path(hw.__file__).parent
HOURS = 6 * 3600.0
# The date of a measurement or an answer, or the age of a file: never the difference of two readings
# in one process.
DATES = {"kernels/jit.py": 1}


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the system jump forth and back at every reading, by six hours more each
    time.
    """
    real, jumps = time.time, ((-1) ** n * n * HOURS for n in itertools.count(1))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (real() + next(jumps))))


def test_jobs_of_the_page_reach_their_end(jumping_clock: None):
    view = hostile_requests.open_page()
    client = hostile_requests.page_client(view)
    body = {"kind": "generate", "text": "abc", "max_new_tokens": 4, "temperature": 0.5, "seed": 1}
    assert [
        hostile_requests.check_job(view, client, json.dumps(body).encode()) for _ in range(3)
    ] == ["done"] * 3
    view.worker.close()


def test_the_clock_of_the_system_gives_dates_only():
    reading = re.compile(
        r"\btime\.time(_ns)?\(\)|\bfrom time import .*\btime\b|\bdatetime\.(now|utcnow|today)\("
    )
    sources = {
        path.relative_to(SOURCES).as_posix(): path.read_text() for path in SOURCES.rglob("*.py")
    }
    counts = {name: len(reading.findall(text)) for name, text in sources.items()}
    assert {name: count for name, count in counts.items() if count} == DATES

"""The clock of the system jumps while models train, generate and answer a page: no duration is
measured by it.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.training.data import make_task
from support import hostile_requests

SOURCES = Path(hw.__file__).parent
HOURS = 6 * 3600.0
# The date of a measurement or an answer, or the age of a file: never the difference of two readings
# in one process.
DATES = {"costs/roofline.py": 2, "kernels/jit.py": 1}
OPTIONS: dict[str, Any] = {
    "steps": 6,
    "batch": 4,
    "lr": 1e-3,
    "evaluate_every": 3,
    "evaluate_batches": 1,
    "checkpoint_every": 2,
}
CHOICES: dict[str, Any] = {
    "precision": "fp32",
    "attention": "plain",
    "rows": "padded",
    "compile": "off",
}
LIMIT = 120.0  # seconds of a real clock, which no test comes near


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the system jump forth and back at every reading, by six hours more each
    time.
    """
    real, jumps = time.time, ((-1) ** n * n * HOURS for n in itertools.count(1))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (real() + next(jumps))))


def train_copy(folder: Path) -> Path:
    """Train a small model on a task made in code."""
    hw.train(
        make_task("copy", symbols=5, block=4, gap=2),
        recipe=hw.Recipe(**OPTIONS, **CHOICES),
        out=folder,
    )
    return folder


def test_training_takes_the_same_steps(tmp_path: Path, request: pytest.FixtureRequest):
    expected = train_copy(tmp_path / "steady")
    request.getfixturevalue("jumping_clock")
    begin = time.monotonic()
    found = train_copy(tmp_path / "jumping")
    assert (found / "model.safetensors").read_bytes() == (
        expected / "model.safetensors"
    ).read_bytes()
    values = re.findall(
        r'"\w*seconds\w*": (-?[\d.e+-]+)', "".join(p.read_text() for p in found.glob("*.json*"))
    )
    assert values
    assert all(0 <= float(value) <= time.monotonic() - begin for value in values)


def test_the_engine_measures_with_a_clock_that_does_not_jump(jumping_clock: None):
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
    }
    net = hw.build(
        hw.families.read_model_spec(config | {"num_hidden_layers": 2, "vocab_size": 11}), seed=0
    )
    engine = hw.Engine(net, budget=400_000)
    streams = [engine.submit([n, 1, 4], max_new_tokens=5) for n in range(4)]
    assert all(len(stream.result()) == 5 for stream in streams)
    report = engine.report()
    durations = [report.seconds, *(step.seconds for step in report.steps)]
    assert all(0 <= duration < LIMIT for duration in durations)


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

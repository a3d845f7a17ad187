"""Every parser reads a hostile document, or refuses it in one line and in time; nothing else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import soak
from hostile.hostile_documents import PARSERS
from hostile.hostile_runs import FEW, MANY, count_inputs, try_input


@pytest.mark.lengthy
@pytest.mark.parametrize("name", PARSERS)
def test_hostile_documents_are_read_or_refused(name: str):
    parser = PARSERS[name]
    assert count_inputs(parser.inputs, lambda value: try_input(parser, value), FEW, seed=0) >= FEW


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_many_hostile_documents_are_read_or_refused(name: str):
    parser = PARSERS[name]
    assert count_inputs(parser.inputs, lambda value: try_input(parser, value), MANY, seed=1) >= MANY


@pytest.mark.parametrize(
    "error", [KeyError("a"), TypeError("a"), RecursionError(), ZeroDivisionError(), MemoryError()]
)
def test_another_exception_is_a_failure(error: Exception):
    def read(value: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        try_input(PARSERS["pattern"]._replace(read=read), "a")


def test_an_input_that_takes_too_long_is_a_failure():
    def read(value: Any) -> None:
        while True:
            pass

    with pytest.raises(BaseException, match=r"not read within 0\.1 s"):
        try_input(PARSERS["pattern"]._replace(read=read, seconds=0.1), "a")


def test_no_round_begins_after_the_time_limit(monkeypatch, capsys):
    now = [0.0]

    def run(count: int, seed: int) -> Counter[str]:
        now[0] += 10
        return Counter(read=count)

    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(soak, "list_rounds", lambda: dict.fromkeys("abc", run))
    monkeypatch.setattr(soak, "FAULTS", {})
    for seconds, expected in (
        (15.0, {"a": 5, "b": 5}),
        (0.0, {}),
        (35.0, {"a": 10, "b": 5, "c": 5}),
    ):
        now[0] = 0.0
        *_, counts = soak.run_rounds(seconds, 5, [])
        assert {name: one["inputs"] for name, one in counts.inputs.items()} == expected
        missing = "".join(
            f"{name}: not tried, because the time was over\n"
            for name in "abc"
            if name not in expected
        )
        assert (
            "".join(
                line for line in capsys.readouterr().err.splitlines(True) if "not tried" in line
            )
            == missing
        )

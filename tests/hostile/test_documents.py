"""Every parser reads a hostile document, or refuses it in one line and in time; nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from support.hostile_documents import PARSERS
from support.hostile_runs import FEW, MANY, count_inputs, try_input


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


@pytest.mark.parametrize("error", [KeyError("a"), TypeError("a"), RecursionError(), ZeroDivisionError(), MemoryError()])
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

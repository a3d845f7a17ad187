"""Runs of hostile inputs: a number of them from a seed, with a verdict on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed as seeded, settings, strategies as st

from hostile.hostile_documents import Parser
from hostile.hostile_values import REFUSALS, check_refusal, time_limit

FEW, MANY = 50, 1000  # inputs of each parser in `make test` and in `make slow`


def count_inputs(
    inputs: st.SearchStrategy[Any], check: Callable[[Any], object], count: int, seed: int
) -> int:
    """Check `count` inputs from a seed, and return how many were tried; the smallest that fails is
    reported.
    """
    tried = [0]

    @seeded(seed)
    @settings(
        max_examples=count,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def run(value: Any) -> None:
        tried[0] += 1
        check(value)

    run()
    return tried[0]


def try_input(parser: Parser, value: Any) -> str:
    """Return "read" or "refused"; raises for anything else that a parser does with an input."""
    try:
        with time_limit(parser.seconds):
            parser.read(value)
    except REFUSALS as error:
        check_refusal(error)
        return "refused"
    return "read"

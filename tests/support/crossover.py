"""Crossovers in tests: the sizes of the class that tests go by, and other sizes for the
length of a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwise.kernels.capabilities import assume_points, current_points


def least(name: str) -> int:
    """The size of a crossover."""
    return int(current_points().sizes[name])


@contextmanager
def sizes(**changed: float) -> Iterator[None]:
    """Let the named points have these sizes."""
    with assume_points(current_points().with_sizes(**changed)):
        yield

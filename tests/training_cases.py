"""Training by heads and by tokens: what ranks do, as one alone does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.spread import joined
from many import STEPPED, steps_of

WAYS = ("tensor=2", "context=2")
PAIRS = ("data=2,tensor=2", "data=2,context=2", "context=2,tensor=2", "shards=2,tensor=2", "context=2,shards=2")


def steps(folder: Path) -> dict[str, Any]:
    """Every case, divided every way that this world can be."""
    with joined() as launch:
        ways = WAYS if launch.size == 2 else PAIRS
        return {way: {case: steps_of(case, launch, way) for case in STEPPED} for way in ways}

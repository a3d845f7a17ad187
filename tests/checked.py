"""Many checks in one world of a few ranks: what every rank found of each."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.spread import joined
from worlds import world


def found_by(ranks: int, function: str, folder: Path) -> dict[str, list[Any]]:
    """What each rank found of every check that "module.function" runs, by name; None where nothing was amiss."""
    every = world(ranks, function, folder)
    names = dict.fromkeys(name for found in every for name in found)
    failed = next((f"{name} failed" for found in every for name, said in found.items() if said is not None), "")
    return {name: [found.get(name, f"not reached, for {failed}") for found in every] for name in names}


def run(check: Callable[[str], None], names: Iterable[str]) -> dict[str, str | None]:
    """What this rank finds. It stops at the first failure, for what comes after would not meet; others learn of it."""
    names, found = list(names), dict[str, str | None]()
    with joined():
        for name in names:
            torch.manual_seed(0)
            try:
                check(name)
                found[name] = None
            except Exception:
                failed = {name: traceback.format_exc()}
                return dict.fromkeys(names, f"not reached, for {name} failed") | found | failed
    return found


def check_found(found: Sequence[str | None]) -> None:
    """Every rank found nothing amiss."""
    for rank, said in enumerate(found):
        assert said is None, f"rank {rank}: {said}"

"""Many checks in one world of a few ranks: what every rank found of each."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.distributed import join_process_group
from support.rank_processes import run_ranks


def requested_checks(request: pytest.FixtureRequest) -> list[str]:
    """The checks that the tests of a module which are to run ask for, by name: "mha decoder", "terms"."""
    items = [item for item in request.session.items if item.path == request.path]
    return [
        " ".join(item.callspec.params[key] for key in ("preset", "kind", "name") if key in item.callspec.params)
        for item in items
    ]


def run_checks_on_ranks(ranks: int, module: str, names: Sequence[str], folder: Path) -> dict[str, list[Any]]:
    """What each rank found of every check, by name; None where nothing was amiss."""
    folder.joinpath("names").write_text("\n".join(names))
    results = run_ranks(ranks, f"{module}.run_requested", folder)
    return {name: [found[name] for found in results] for name in names}


def run_checks(check: Callable[[str], None], folder: Path) -> dict[str, str | None]:
    """What this rank finds. It stops at the first failure, for what comes after would not meet; others learn of it."""
    failures: dict[str, str | None] = {}
    names = folder.joinpath("names").read_text().splitlines()
    with join_process_group():
        for name in names:
            torch.manual_seed(0)
            try:
                check(name)
                failures[name] = None
            except Exception:
                this_failure = {name: traceback.format_exc()}
                return dict.fromkeys(names, f"not reached, for {name} failed") | failures | this_failure
    return failures


def check_no_failure(failures: Sequence[str | None]) -> None:
    """Every rank found nothing amiss."""
    for rank, failure in enumerate(failures):
        assert failure is None, f"rank {rank}: {failure}"

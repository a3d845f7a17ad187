"""Several checks in one group of ranks, with the result of every rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.models.distributed import join_process_group
from models.distributed.rank_processes import run_ranks


def requested_checks(request: pytest.FixtureRequest) -> list[str]:
    """Names of the checks that the selected tests of a module need: "mha decoder", "terms"."""
    items = [item for item in request.session.items if item.path == request.path]
    return [
        " ".join(
            item.callspec.params[key]
            for key in ("preset", "kind", "name")
            if key in item.callspec.params
        )
        for item in items
    ]


def run_checks_on_ranks(
    ranks: int, module: str, names: Sequence[str], folder: Path
) -> dict[str, list[Any]]:
    """Result of every check on each rank by name: None, or a traceback."""
    folder.joinpath("names").write_text("\n".join(names))
    results = run_ranks(ranks, f"{module}.run_requested", folder)
    return {name: [found[name] for found in results] for name in names}


def run_checks(check: Callable[[str], None], folder: Path) -> dict[str, str | None]:
    """Run the checks on this rank up to the first failure, since collectives would not match after
    it.
    """
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
                return (
                    dict.fromkeys(names, f"not reached, for {name} failed")
                    | failures
                    | this_failure
                )
    return failures


def check_no_failure(failures: Sequence[str | None]) -> None:
    """Assert that no rank failed."""
    for rank, failure in enumerate(failures):
        assert failure is None, f"rank {rank}: {failure}"

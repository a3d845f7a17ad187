"""Context parallelism: every preset has the outputs, gradients and updates of undivided rows."""

from __future__ import annotations

import pytest

from models.distributed import context_parallel_checks as context_cases
from models.distributed.parallel_models import PRESET_KINDS
from models.distributed.rank_checks import check_no_failure, requested_checks, run_checks_on_ranks


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """What both ranks found, by name."""
    return run_checks_on_ranks(
        2,
        "models.distributed.context_parallel_checks",
        requested_checks(request),
        tmp_path_factory.mktemp("context"),
    )


@pytest.mark.parametrize(("preset", "kind"), PRESET_KINDS)
def test_rows_that_are_divided_are_rows(found, preset, kind):
    check_no_failure(found[f"{preset} {kind}"])


@pytest.mark.parametrize("name", context_cases.CASES)
def test_tokens_that_are_divided(found, name):
    check_no_failure(found[name])

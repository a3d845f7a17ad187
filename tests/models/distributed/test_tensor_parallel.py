"""Tensor parallelism: every preset has the outputs, gradients and updates of one rank, or is
refused.
"""

from __future__ import annotations

import pytest

import headwise as hw
from headwise.models.distributed.head_partition import partition_model
from models.distributed import tensor_parallel_checks as tensor_cases
from models.distributed.parallel_models import PRESET_KINDS, make_model_spec
from models.distributed.rank_checks import check_no_failure, requested_checks, run_checks_on_ranks


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """What both ranks found, by name."""
    names = [
        name for name in requested_checks(request) if name.split()[0] not in tensor_cases.MIXED
    ]
    return run_checks_on_ranks(
        2, "models.distributed.tensor_parallel_checks", names, tmp_path_factory.mktemp("tensor")
    )


@pytest.mark.parametrize(("preset", "kind"), PRESET_KINDS)
def test_a_divided_model_is_the_model(found, preset, kind):
    if preset in tensor_cases.MIXED:
        with pytest.raises(
            hw.SpecError, match=r"joins? the scores of 4 heads, so that none .* use data= or "
        ):
            partition_model(make_model_spec(preset, kind), 2)
    else:
        check_no_failure(found[f"{preset} {kind}"])


@pytest.mark.parametrize("name", tensor_cases.CASES)
def test_heads_that_are_divided(found, name):
    check_no_failure(found[name])

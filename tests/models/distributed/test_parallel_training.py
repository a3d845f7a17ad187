"""Training with tensor and context parallelism: steps, runs and checkpoints of several ranks
against one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwise.models.distributed import Parallelism, ProcessInfo
from headwise.training import train
from headwise.util.files import read_lines
from models.distributed.data_parallel_checks import run_until
from models.distributed.parallel_training_checks import (
    BALANCED,
    CASES,
    FOUR_RANKS,
    TWO_RANKS,
    Balanced,
    steps_of_any_case,
)
from models.distributed.rank_checks import check_no_failure, run_checks_on_ranks
from models.distributed.rank_processes import run_ranks
from models.distributed.training_comparison import (
    check_equal_steps,
    check_similar_runs,
    logged_results,
)
from support.small_training import short_recipe


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks left behind, and what each of them found."""
    folder = tmp_path_factory.mktemp("worlds") / "two"
    return folder, run_ranks(
        2, "models.distributed.parallel_training_checks.run_everything", folder
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four found."""
    return run_ranks(
        4,
        "models.distributed.parallel_training_checks.run_everything",
        tmp_path_factory.mktemp("worlds") / "four",
    )


def alone(case: str, way: str) -> dict[str, Any]:
    """The steps of one rank; of terms, in as many parts as ranks take rows of their own."""
    parallelism = Parallelism.parse(way)
    parts = {"accumulate": parallelism.data * parallelism.shards} if case == "terms" else {}
    return steps_of_any_case(case, ProcessInfo(), "data=1", **parts)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", TWO_RANKS)
def test_two_ranks_take_the_steps_of_one(
    two: tuple[Path, list[dict[str, Any]]], way: str, case: str
):
    expected = alone(case, way)
    for rank in two[1]:
        check_equal_steps(rank["steps"][way][case], expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", FOUR_RANKS)
def test_kinds_of_parallelism_multiply(four: list[dict[str, Any]], way: str, case: str):
    expected = alone(case, way)
    for rank in four:
        check_equal_steps(rank["steps"][way][case], expected)


@pytest.mark.slow
def test_four_ranks_divide_heads_of_fewer_keys(tmp_path: Path):
    """A head for each rank, most of which share a key and a value with others;
    five heads of three.
    """
    names = [
        "gqa decoder",
        "mqa encoder",
        "moh decoder",
        "diff encoder-decoder",
        "uneven_heads",
        "experts",
        "terms",
    ]
    for found in run_checks_on_ranks(
        4,
        "models.distributed.tensor_parallel_checks",
        [*names, "single_precision", "one_file_whatever_the_split"],
        tmp_path,
    ).values():
        check_no_failure(found)


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_resumes_under_another_parallelism(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path
):
    """By heads, then by tokens, then by heads, against one rank that is never interrupted."""
    recipe = short_recipe(batch=6, steps=6, evaluate_every=3, lr=0.01)
    assert run_until(-1, recipe, tmp_path / "one") == ""
    check_similar_runs(two[0] / "ways", tmp_path / "one")
    layouts = [
        record["parallelism"]
        for record in read_lines(two[0] / "ways" / "metrics.jsonl")
        if record["event"] == "run"
    ]
    assert layouts == ["tensor=2", "context=2", "tensor=2"]


@pytest.mark.parametrize("way", TWO_RANKS)
def test_terms_are_those_of_one_rank(
    two: tuple[Path, list[dict[str, Any]]], tmp_path: Path, way: str
):
    """Tokens that choose their heads, and are to choose them evenly over the rows of all ranks."""
    train(Balanced(), recipe=short_recipe(**BALANCED), out=tmp_path / "one")
    check_similar_runs(two[0] / f"balanced {way}", tmp_path / "one")


@pytest.mark.parametrize("way", TWO_RANKS)
def test_dropout_trains_under_parallelism(two: tuple[Path, list[dict[str, Any]]], way: str):
    result = logged_results(two[0] / f"dropped {way}")
    assert len(result) == 6 + 3


def test_ranks_of_one_worker_go_on_in_one_stream(two: tuple[Path, list[dict[str, Any]]]):
    """From rows, each rank drawing for itself, to heads, whose ranks must drop alike what is added
    to the stream.
    """
    first, second = (rank["runs"]["drawn"] for rank in two[1])
    separate = [one != other for one, other in zip(first, second, strict=True)]
    assert separate.index(True) < len(separate) - 5
    assert not any(separate[-4:])
    assert len(set(first[-4:])) > 1


REFUSED = {
    "mixed": "SpecError: decoder.0.attention: talking_heads joins the scores of 4 heads, so that "
    "none can be computed "
    "without the others; use data= or context= instead of tensor=",
    "one head": (
        "SpecError: decoder.0.attention: cannot divide 1 head among 2 ranks; use tensor=1 or less"
    ),
    "pixels": "SpecError: encoder embeds pixels or frames, so its rows cannot be divided into "
    "tokens beforehand; "
    "use data= or tensor= instead of context=",
    "compiled": (
        "SpecError: compile='on' does not support collectives inside layers (tensor=2); "
        "use compile='off'"
    ),
    "compiled rows": (
        "SpecError: compile='on' does not support collectives inside layers "
        "(context=2); use compile="
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_refuse_an_impossible_split_before_writing(
    two: tuple[Path, list[dict[str, Any]]], case: str
):
    for rank in two[1]:
        assert rank["refusals"][case].startswith(REFUSED[case])
        assert "\n" not in rank["refusals"][case]
    assert not (two[0] / "never").exists()

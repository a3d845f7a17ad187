"""Data-parallel and sharded training: steps, runs and checkpoints against one rank, and refusals by
all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.models.distributed import Parallelism, ProcessInfo
from headwise.models.distributed.sharded_model import LINEAR_MAP
from headwise.training import train
from headwise.training.data import IGNORE_INDEX
from headwise.util.errors import SpecError
from headwise.util.files import read_lines
from models.distributed.data_parallel_checks import PLAIN, STEPPED, run_until, steps_of_case
from models.distributed.rank_processes import run_ranks
from models.distributed.training_comparison import (
    check_equal_steps,
    check_similar_runs,
    logged_results,
    newest_checkpoint,
)
from support.small_training import Echo, short_recipe

ALONE = ProcessInfo()

# --- parallelism ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parallelism",
    [Parallelism(), Parallelism(data=3), Parallelism(data=2, tensor=5), Parallelism(2, 3, 5, 7)],
)
def test_a_parallelism_survives_its_text(parallelism: Parallelism):
    assert Parallelism.parse(str(parallelism)) == parallelism
    assert Parallelism.over(str(parallelism), parallelism.size) == parallelism


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("data=2", 3, "data=2 needs 2 processes, not 3; start 2 processes, or give data=3"),
        ("data=2,tensor=2", 1, "data=2,tensor=2 needs 4 processes, not 1; start 4 processes"),
        ("date=2", 2, "unknown parallel dimension 'date'; did you mean 'data'"),
        ("data", 2, "write each dimension once with its number, as in data=2"),
        ("data=2,data=2", 4, "write each dimension once"),
        ("data=-2", 2, "write each dimension once"),
        ("data=0", 2, r"cannot use Parallelism\(data=0\); give 1 or more"),
        ("", 2, "unknown parallel dimension ''"),
    ],
)
def test_an_impossible_parallelism_is_refused_in_one_line(text: str, ranks: int, message: str):
    with pytest.raises(SpecError, match=message) as refused:
        Parallelism.over(text, ranks)
    assert "\n" not in str(refused.value)


def test_every_rank_stands_somewhere_else_and_neighbours_differ_in_the_last_way():
    """Against the places of an array of that shape."""
    parallelism = Parallelism(data=2, context=3, shards=5, tensor=7)
    ranks = torch.arange(parallelism.size).view(parallelism.shape)
    for rank in range(parallelism.size):
        assert ranks[tuple(parallelism.place(rank).values())] == rank
    assert sorted(parallelism.rank_groups("context", "tensor")) == sorted(
        ranks.permute(0, 2, 1, 3).reshape(10, 21).tolist()
    )


def test_a_parallelism_without_ranks_is_refused_before_writing(tmp_path: Path):
    with pytest.raises(SpecError, match="data=2 needs 2 processes, not 1; start 2 processes"):
        train(Echo(), recipe=short_recipe(parallelism="data=2"), out=tmp_path / "never")
    assert not (tmp_path / "never").exists()
    with pytest.raises(SpecError, match="unknown parallel dimension 'rows'"):
        short_recipe(parallelism="rows=2")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks left behind, and what each of them found and was told."""
    folder = tmp_path_factory.mktemp("worlds") / "two"
    folder.mkdir()
    run_until(3, short_recipe(**PLAIN), folder / "one, two, one")
    return folder, run_ranks(2, "models.distributed.data_parallel_checks.run_two_ranks", folder)


# --- steps ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stepped(two: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each of two ranks found in every case, divided either way."""
    return [rank["steps"] for rank in two[1]]


def alone(case: str, ranks: int) -> dict[str, Any]:
    """The steps of one rank; terms are taken over the rows of each rank, so over as many parts of a
    batch.
    """
    return steps_of_case(
        case, ALONE, "data=1", **({"accumulate": ranks} if case == "terms" else {})
    )


@pytest.mark.parametrize("case", STEPPED)
@pytest.mark.parametrize("way", ["data=2", "shards=2"])
def test_two_ranks_take_the_steps_of_one(stepped: list[dict[str, Any]], way: str, case: str):
    expected = alone(case, 2)
    for rank in stepped:
        check_equal_steps(rank[way][case], expected)


def test_matrices_are_gathered_in_the_dtype_of_autocast(stepped: list[dict[str, Any]]):
    """The first step is that of whole weights under autocast, up to the order of sums."""
    narrow, whole = (stepped[0][way]["bf16"] for way in ("shards=2", "data=2"))
    assert narrow["dtypes"] == {(True, torch.bfloat16), (False, torch.float32)}
    assert whole["dtypes"] == {(True, torch.float32), (False, torch.float32)}
    assert narrow["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-6)
    for name, gradient in narrow["gradients"][0].items():
        assert gradient.dtype == torch.float32
        wanted = whole["gradients"][0][name]
        assert (gradient - wanted).abs().max() <= 1e-2 * wanted.abs().max()
    assert narrow["losses"] == pytest.approx(whole["losses"], rel=1e-2)
    assert all(one.dtype == torch.float32 for one in narrow["weights"].values())


def test_routers_and_shared_tables_are_not_rounded(stepped: list[dict[str, Any]]):
    """Autocast does not round them either."""
    odd, whole = (stepped[0][way]["bf16 odd"] for way in ("shards=2", "data=2"))
    assert odd["dtypes"] == {
        (True, torch.bfloat16),
        (True, torch.float32),
        (False, torch.float32),
    }
    assert odd["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-6)


@pytest.mark.parametrize(
    ("preset", "is_narrow"), [("gqa", True), ("mla", True), ("dcmha", False), ("kha", False)]
)
def test_layers_with_other_weights_than_those_of_linear_maps(preset: str, is_narrow: bool):
    """Their layers are gathered as they are stored; vectors do not count."""
    layer = hw.Attention(hw.design(preset=preset, model=32, heads=4, pattern="causal"))
    names = [f"attention.{name}" for name, p in layer.named_parameters() if p.dim() > 1]
    assert all(map(LINEAR_MAP.search, names)) == is_narrow


@pytest.mark.parametrize("case", ["echo", "odd"])
def test_the_first_gradient_is_that_of_the_mean_over_all_labels(
    stepped: list[dict[str, Any]], case: str
):
    """Against torch's own cross entropy of the whole batch: ranks are asked unlike much, none
    counts more.
    """
    task, result = STEPPED[case]
    net, batch = hw.build(task.model(), seed=3).double(), task.batch(0, result["batch"])
    logits = net(
        batch.x, sequence=batch.tokens, source=batch.source, source_sequence=batch.source_tokens
    )
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), result.get("clip", 1.0))
    for way in ("data=2", "shards=2"):
        found = stepped[0][way][case]
        assert found["losses"][0] == pytest.approx(loss.item(), rel=1e-12)
        assert found["norms"][0] == pytest.approx(norm.item(), rel=1e-10)
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(
                    found["gradients"][0][name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name
                )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data=4", "shards=4", "data=2,shards=2"])
def test_four_ranks_take_the_steps_of_one(tmp_path_factory: pytest.TempPathFactory, way: str):
    folder = tmp_path_factory.getbasetemp() / "four"
    if not folder.exists():
        run_ranks(4, "models.distributed.data_parallel_checks.steps", folder)
    for case in STEPPED:
        expected = alone(case, 4)
        for rank in range(4):
            check_equal_steps(
                torch.load(folder / f"{rank}.pt", weights_only=False)[way][case], expected
            )


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(two: tuple[Path, list[dict[str, Any]]]) -> tuple[Path, list[dict[str, Any]]]:
    """Where runs of two ranks left things, and what each rank was told."""
    return two[0], [rank["runs"] for rank in two[1]]


def test_a_run_of_two_that_is_interrupted_goes_on_to_the_same_bits(
    ran: tuple[Path, list[dict[str, Any]]],
):
    """Ctrl-C reaches one rank; both end behind the same step, and what each drops goes on where it
    stood.
    """
    folder, ranks = ran
    for options in ranks:
        assert (
            options["stopped"]
            == f"interrupted at step 4; the checkpoint is in {folder / 'stopped'}"
        )
        assert options["whole"] == options["resumed"] == ""
    check_same(folder / "stopped", folder / "whole")


def check_same(first: Path, second: Path) -> None:
    """Bit by bit."""
    one, other = newest_checkpoint(first), newest_checkpoint(second)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert logged_results(first) == logged_results(second)


def test_slices_go_on_where_they_stood(ran: tuple[Path, list[dict[str, Any]]]):
    check_same(ran[0] / "slices stopped", ran[0] / "slices")


def test_ranks_drop_other_numbers(ran: tuple[Path, list[dict[str, Any]]]):
    """Each as many: their shares are of one size."""
    stored = newest_checkpoint(ran[0] / "whole")
    assert not torch.equal(stored["random cpu"], stored["random cpu 1"])


def test_one_rank_writes_a_run_down_once(ran: tuple[Path, list[dict[str, Any]]]):
    events = [record["event"] for record in read_lines(ran[0] / "whole" / "metrics.jsonl")]
    assert [events.count(name) for name in ("run", "step", "evaluation", "end")] == [1, 6, 2, 1]
    assert read_lines(ran[0] / "whole" / "metrics.jsonl")[0]["ranks"] == 2


def test_unequal_shares_are_reported(ran: tuple[Path, list[dict[str, Any]]]):
    def notes(run: str) -> list[str]:
        return [
            r["says"] for r in read_lines(ran[0] / run / "metrics.jsonl") if r["event"] == "note"
        ]

    assert notes("whole")[0] == "2 ranks, data=2"
    assert "2 ranks, data=2; 7 rows are divided into 2 unequal shares" in notes("one, two, one")


def test_a_run_goes_on_in_a_world_of_another_size(
    ran: tuple[Path, list[dict[str, Any]]], tmp_path: Path
):
    """One rank, then two, then one, against one that is never interrupted."""
    folder = ran[0]
    assert [
        r["ranks"]
        for r in read_lines(folder / "one, two, one" / "metrics.jsonl")
        if r["event"] == "run"
    ] == [1, 2]
    assert run_until(-1, short_recipe(**PLAIN), folder / "one, two, one") == ""
    assert run_until(-1, short_recipe(**PLAIN), tmp_path / "one") == ""
    check_similar_runs(folder / "one, two, one", tmp_path / "one")
    check_similar_runs(folder / "other ways", tmp_path / "one")


# --- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "code": "SpecError: source is '",
    "recipe": (
        "SpecError: recipe.lr is 0.001 on rank 0, 0.002 on rank 1; start all ranks with the "
        "same configuration"
    ),
    "task": "SpecError: task.noise is 0.0 on rank 0, 0.5 on rank 1;",
    "data": "SpecError: first batch is '",
    "model": "SpecError: model.stack",
    "weights": "SpecError: weights is '",
    "parallelism": "SpecError: parallelism is 'data=2' on rank 0, 'shards=2' on rank 1;",
    "rows": (
        "SpecError: batch=1 has fewer rows than the 2 data shards; use batch=2 or more, or "
        "fewer ranks"
    ),
    "parts": (
        "SpecError: batch=4 with accumulate=4 has fewer rows than the 2 data shards; use "
        "batch=8 or more"
    ),
    "size": "SpecError: data=3 needs 3 processes, not 2; start 3 processes, or give data=2",
    "compile": (
        "SpecError: compile='on' does not support collectives inside layers (shards=2); "
        "use compile='off'"
    ),
    "one rank": "SpecError: rank 1 of 2: the data is not here; copy it to this machine",
    "diverged": "TrainingDiverged: step 1: the loss is nan; the output of decoder.0.feed (feed, "
    "decayed) is the first with "
    "NaN or inf on rank 1; the checkpoint of step 0 is in ",
    "diverged slices": (
        "TrainingDiverged: step 1: the loss is nan; the output of decoder.0.feed "
        "(feed, decayed) is the first "
    ),
    "bad weight": "TrainingDiverged: step 1: the loss is nan; the weight decoder.0.feed.up (feed, "
    "decayed) is the first with NaN or inf on "
    "rank 1; the checkpoint of step 0",
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_ranks_print_one_refusal(ran: tuple[Path, list[dict[str, Any]]], case: str):
    first, second = (rank[case] for rank in ran[1])
    assert first.startswith(REFUSED[case])
    assert first == second
    assert "\n" not in first

"""Start and end of process groups: output of ranks, a killed rank, ranks that do not connect."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from headwise.models.distributed import join_process_group, parallelism
from headwise.training import CheckpointFolder
from headwise.util.files import read_lines
from models.distributed.rank_processes import (
    free_port,
    rank_environment,
    run_ranks,
    start_ranks,
    wait_for_ranks,
)

QUICK = ["--batch", "4", "--precision", "fp32", "--compile", "off", "--device", "cpu"]
QUICK += [
    "--set",
    "recipe.attention=fused",
    "--set",
    "recipe.evaluate_batches=1",
    "--set",
    "recipe.evaluate_every=20",
]
HEADWISE = ["-m", "headwise", "train", "recall"]


def command(folder: Path, *more: str) -> list[str]:
    return [*HEADWISE, "--out", str(folder), *QUICK, *more]


@pytest.mark.lengthy
def test_one_rank_prints_and_writes(tmp_path: Path):
    result = wait_for_ranks(
        start_ranks(2, *command(tmp_path, "--steps", "2", "--parallelism", "shards=2", "--json"))
    )
    assert [code for code, _, _ in result] == [0, 0]
    (_, out, err), (_, silent, quiet) = result
    assert json.loads(out)["steps"] == 2
    assert "2 ranks, shards=2" in err.splitlines()
    assert (silent, quiet) == ("", "")
    assert [r["event"] for r in read_lines(tmp_path / "metrics.jsonl")].count("step") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            ["--parallelism", "data=3"],
            "headwise: data=3 needs 3 processes, not 2; start 3 processes",
        ),
        (
            ["--parallelism", "date=2"],
            "headwise: unknown parallel dimension 'date'; did you mean 'data'?",
        ),
        (
            ["--model", "mqaa"],
            "headwise: there is no preset, file or folder 'mqaa'; did you mean 'mqa'?",
        ),
        (
            ["--parallelism", "tensor=2", "--batch", "0"],
            "headwise: --batch 0 is out of range; give 1 or more",
        ),
    ],
)
def test_refusals_are_printed_once(tmp_path: Path, more: list[str], expected: str):
    result = wait_for_ranks(start_ranks(2, *command(tmp_path / "never", "--steps", "2", *more)))
    assert [code for code, _, _ in result] == [2, 2]
    lines = "".join(err for _, _, err in result).splitlines()
    assert len(lines) == 1
    assert re.match(expected, lines[0])
    assert not (tmp_path / "never" / "checkpoint").exists()


def wait_for_step(folder: Path, step: int) -> None:
    """Until a run has kept that step."""
    for _ in range(600):
        paths = CheckpointFolder(folder / "checkpoint").paths
        if paths and int(paths[0].stem) >= step:
            return
        time.sleep(0.1)
    raise AssertionError("the run does not come on")


def check_same(first: Path, second: Path) -> None:
    """Bit by bit, what two runs ended with."""
    one, other = (
        CheckpointFolder(folder / "checkpoint").load_newest()[0] for folder in (first, second)
    )
    assert one is not None
    assert other is not None
    assert one.step == other.step
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


STEPS = ["--steps", "60", "--set", "recipe.checkpoint_every=1", "--set", "recipe.dropout=0.1"]
LOST = (
    "waited for another rank, which ended; saved checkpoints are intact, continue with the "
    "same command and --resume"
)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "parallelism"), [(0, "data=2"), (1, "data=2"), (1, "shards=2")])
def test_a_killed_rank_ends_the_job_with_one_line_and_the_run_goes_on(
    tmp_path: Path, victim: int, parallelism: str
):
    """To the same bits as a run that nobody killed."""
    more = [*STEPS, "--parallelism", parallelism]
    processes = start_ranks(2, *command(tmp_path / "killed", *more))
    wait_for_step(tmp_path / "killed", 5)
    processes[victim].send_signal(signal.SIGKILL)
    result = wait_for_ranks(processes, timeout=60)
    assert [code for code, _, _ in result] == [
        -signal.SIGKILL if rank == victim else 2 for rank in range(2)
    ]
    assert result[1 - victim][2].splitlines()[-1] == f"headwise: rank {1 - victim} {LOST}"
    assert CheckpointFolder(tmp_path / "killed" / "checkpoint").load_newest()[1] == []
    assert [
        c
        for c, _, _ in wait_for_ranks(
            start_ranks(2, *command(tmp_path / "killed", *more, "--resume"))
        )
    ] == [0, 0]
    assert [
        c for c, _, _ in wait_for_ranks(start_ranks(2, *command(tmp_path / "whole", *more)))
    ] == [0, 0]
    check_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def launched(ranks: int, arguments: list[str], *options: str) -> subprocess.Popen[str]:
    """What torchrun starts."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    inherited = {
        name: value
        for name, value in rank_environment(0, 1, 0).items()
        if name not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.Popen(
        [*torchrun, *options, *arguments], env=inherited, stderr=subprocess.PIPE, text=True
    )


def kill(process: subprocess.Popen[str], rank: int) -> None:
    """Kill this rank of what torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    values = {pid: (Path("/proc") / pid / "environ").read_bytes().split(b"\0") for pid in children}
    os.kill(
        next(int(pid) for pid, words in values.items() if f"RANK={rank}".encode() in words),
        signal.SIGKILL,
    )


@pytest.mark.slow
def test_torchrun_starts_ranks_and_prints_once_why_they_ended(tmp_path: Path):
    """Of three ranks the one in the middle is killed: of the two that are left one speaks."""
    process = launched(3, command(tmp_path, *STEPS, "--steps", "2000"))
    wait_for_step(tmp_path, 3)
    kill(process, 1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    values = [line for line in err.splitlines() if line.startswith("headwise: ")]
    assert len(values) == 1
    assert values[0].endswith(LOST)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_group_and_training_resumes(tmp_path: Path):
    process = launched(2, command(tmp_path, *STEPS, "--resume"), "--max-restarts", "1")
    wait_for_step(tmp_path, 3)
    kill(process, 0)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert CheckpointFolder(tmp_path / "checkpoint").paths[0].stem == f"{60:010}"
    assert [record["event"] for record in read_lines(tmp_path / "metrics.jsonl")].count("run") == 2


@pytest.mark.slow
def test_a_silent_rank_times_out(tmp_path: Path):
    entry = run_ranks(
        2, "models.distributed.data_parallel_checks.wait_for_silent_rank", tmp_path / "stuck"
    )[0]
    assert entry.startswith(
        "rank 0 waited for another rank, which did not answer for 0:00:02; saved checkpoints are "
        "intact"
    )


# --- ranks that do not meet -----------------------------------------------------------------------


def test_a_port_in_use_is_reported(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as other_server:
        other_server.bind(("localhost", 0))
        other_server.listen()
        port = other_server.getsockname()[1]
        for name, value in rank_environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        message = (
            f"the port of localhost:{port} is in use; give torchrun another --master-port, "
            "or --standalone"
        )
        with pytest.raises(ConnectionError, match=message), join_process_group():
            pass


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, rank: int
):
    monkeypatch.setattr(parallelism, "JOIN_TIMEOUT", timedelta(seconds=1))
    for name, value in rank_environment(rank, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    waited = time.monotonic()
    with (
        pytest.raises(
            ConnectionError, match=f"rank {rank} of 2 could not join the others at localhost:"
        ),
        join_process_group(),
    ):
        pass
    assert time.monotonic() - waited < 20


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("one", "2"), ("-1", "2")])
def test_an_incomplete_environment_is_refused(rank: str, size: str):
    with pytest.raises(
        ValueError,
        match=f"RANK={rank} WORLD_SIZE={size} .* is not a valid rank; start with torchrun",
    ):
        parallelism.read_torchrun_environment({"RANK": rank, "WORLD_SIZE": size})

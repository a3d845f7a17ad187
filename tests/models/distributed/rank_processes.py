"""Processes of several ranks with the environment of torchrun: commands, and forks of one that has
imported torch.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise
from headwise.training import loop
from support.small_training import save_small_curves

TESTS, SOURCE = Path(__file__).parents[2], Path(headwise.__file__).parents[1]
MAX_SECONDS = 300  # of one function on all ranks


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment variables that torchrun sets for one rank."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in variables.items()}


def child_environment() -> dict[str, str]:
    """The environment of this process, in which headwise and the modules of tests are found."""
    path = os.pathsep.join([str(SOURCE), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank that is a process of its own."""
    return {**child_environment(), **torchrun_variables(rank, ranks, port)}


def start_ranks(ranks: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start one process for each rank, each `python` with these arguments."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=rank_environment(rank, ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def wait_for_ranks(
    processes: list[subprocess.Popen[str]], timeout: float = MAX_SECONDS
) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each process."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *value) for process, value in zip(processes, outputs, strict=True)]


# --- forked ranks ---------------------------------------------------------------------------------


def run_ranks(ranks: int, function: str, folder: Path) -> list[Any]:
    """Results of "module.function" on each of `ranks` ranks, called with the folder.

    The ranks are forks of one new process: torch is imported once, and no thread of this process is
    missing in them.
    """
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "models.distributed.rank_processes",
        str(ranks),
        function,
        str(folder),
    ]
    ended = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def fork_ranks(ranks: int, function: str, folder: Path) -> bool:
    """Run a function on forks of this process; False if one fails or is not done in time."""
    module, _, name = function.rpartition(".")
    call = getattr(importlib.import_module(module), name)
    # on each rank if not here
    for imported_later in ("torch._dynamo", "torch.distributed.fsdp", "numba"):
        importlib.import_module(imported_later)
    port, fork = free_port(), multiprocessing.get_context("fork")
    processes = [
        fork.Process(
            target=run_rank, args=(call, folder, torchrun_variables(rank, ranks, port)), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + MAX_SECONDS
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    for rank, process in enumerate(processes):
        if process.exitcode is None:
            print(f"rank {rank} is not done after {MAX_SECONDS} s", file=sys.stderr)
            process.kill()
    return all(process.exitcode == 0 for process in processes)


def run_rank(call: Callable[[Path], Any], folder: Path, variables: dict[str, str]) -> None:
    """Write what the function returns to the file of this rank."""
    os.environ.update(variables)
    torch.save(call(folder), folder / f"{variables['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop.save_curves = save_small_curves
    sys.exit(not fork_ranks(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))

"""Processes of several ranks with the environment of torchrun, each of which runs one function."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import headwise

TESTS, SOURCE = Path(__file__).parents[1], Path(headwise.__file__).parents[1]


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment variables that torchrun sets for one rank."""
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    path = os.pathsep.join([str(SOURCE), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    strings = {name: str(value) for name, value in variables.items()}
    return {**os.environ, **strings, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start_ranks(ranks: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start one process for each rank, each `python` with these arguments."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=rank_environment(rank, ranks, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def wait_for_ranks(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each process."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *value) for process, value in zip(processes, outputs, strict=True)]


def run_ranks(ranks: int, function: str, folder: Path) -> list[Any]:
    """Results of "module.function" on each of `ranks` ranks, called with the folder."""
    folder.mkdir(exist_ok=True)
    ended = wait_for_ranks(start_ranks(ranks, "-m", "support.rank_processes", function, str(folder)))
    assert not any(code for code, _, _ in ended), "\n".join(
        f"rank {rank}:\n{err}" for rank, (_, _, err) in enumerate(ended)
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    module, _, name = sys.argv[1].rpartition(".")
    found = getattr(importlib.import_module(module), name)(Path(sys.argv[2]))
    torch.save(found, Path(sys.argv[2]) / f"{os.environ['RANK']}.pt")

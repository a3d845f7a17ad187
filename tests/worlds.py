"""Worlds of a few ranks in processes of their own, each running many checks; what every rank found of each."""

from __future__ import annotations

import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WAIT = timedelta(seconds=30)  # a rank that says nothing for so long has been left behind


def found_by(size: int, module: str, names: Sequence[str]) -> dict[str, list[Any]]:
    """What `check(name)` of a module gives on each of `size` ranks, by name; of one that failed, its traceback.

    Ranks stop at the first failure, for what comes after would not meet.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (size, folder, module, list(names)), nprocs=size, start_method="spawn")
        every = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
    failed = next((f"{name} failed" for found in every for name, said in found.items() if said is not None), "")
    return {name: [found.get(name, f"not reached, for {failed}") for found in every] for name in names}


def _rank(rank: int, size: int, folder: str, module: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=WAIT)
    found: dict[str, Any] = {}
    check = importlib.import_module(module).check
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = check(name)
        except Exception:
            found[name] = traceback.format_exc()
            break
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    if len(found) < len(names):
        os._exit(0)  # those who still wait for this rank learn that it is gone
    dist.destroy_process_group()


def check_found(found: Sequence[Any]) -> None:
    """Every rank found nothing amiss."""
    for rank, said in enumerate(found):
        assert said is None, f"rank {rank}: {said}"

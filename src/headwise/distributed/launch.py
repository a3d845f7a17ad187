"""How processes that torchrun started find each other, and how they end."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ..errors import SpecError

JOIN_TIMEOUT = timedelta(minutes=5)  # until every rank must have come
COLLECTIVE_TIMEOUT = timedelta(
    minutes=10
)  # until a rank that says nothing is given up; the longest work of one rank alone
MAX_REASON_LENGTH = 200  # of what torch says of ranks that did not meet, for it goes on for long
FAILURE_KEY = "said"  # what the first rank to speak of an end writes into the store

_join_counter = itertools.count()  # ranks join together, so that the n-th time of one is the n-th of all


@dataclass(frozen=True)
class ProcessInfo:
    """Which rank this process is, of how many, which of those on its own machine, and how often torchrun has begun
    them all anew."""

    rank: int = 0
    size: int = 1
    local: int = 0
    attempt: int = 0
    store: Any = field(default=None, repr=False, compare=False)

    @property
    def is_leader(self) -> bool:
        """Whether it is the one that writes and prints."""
        return self.rank == 0

    def speaks(self) -> bool:
        """Whether no rank has spoken of the end before this one: of many that fail, one says why."""
        if self.store is None:
            return True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all that are left, and one must speak
        try:
            return self.store.add(FAILURE_KEY, 1) == 1
        except RuntimeError:  # the store went with its rank, which was killed before it could speak
            return True


def read_torchrun_environment(environment: Mapping[str, str] | None = None) -> ProcessInfo:
    """What torchrun says of this process; without it, that it is alone.

    >>> read_torchrun_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    ProcessInfo(rank=3, size=4, local=1, attempt=0)
    >>> read_torchrun_environment({}).size
    1
    """
    said = os.environ if environment is None else environment
    if "RANK" not in said or "WORLD_SIZE" not in said:
        return ProcessInfo()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    usual = {"LOCAL_RANK": said["RANK"], "TORCHELASTIC_RESTART_COUNT": "0"}
    words = [said.get(name, usual.get(name, "")) for name in names]
    if not all(word.isascii() and word.isdigit() for word in words) or int(words[0]) >= int(words[1]):
        told = " ".join(f"{name}={word}" for name, word in zip(names, words, strict=True))
        raise SpecError(f"the environment says {told}, which is no rank of a world; start with torchrun")
    return ProcessInfo(*map(int, words))


@contextmanager
def join_process_group() -> Iterator[ProcessInfo]:
    """Inside, every rank can be talked to; whoever joined first leaves last. Alone, nothing happens.

    What a lost rank breaks is said in one line, whatever was being waited for.
    """
    launch = read_torchrun_environment()
    if launch.size == 1:
        yield launch
        return
    import torch.distributed as dist

    if dist.is_initialized():
        yield launch
        return
    try:
        yield replace(launch, store=_init_process_group(launch))
    except RuntimeError as error:
        if not _is_communication_error(error):
            raise
        how = f"said nothing for {COLLECTIVE_TIMEOUT}" if "timed out" in str(error).lower() else "ended"
        lost = f"rank {launch.rank} waited for another rank, which {how}"
        raise ConnectionError(f"{lost}; what was kept is whole, the same command with --resume goes on") from error
    dist.destroy_process_group()


def _init_process_group(launch: ProcessInfo) -> Any:
    """Begin the process group; the store through which its ranks found each other."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local % torch.cuda.device_count())
    try:
        store, *_ = next(rendezvous("env://", launch.rank, launch.size, timeout=JOIN_TIMEOUT))
        store = PrefixStore(f"headwise {launch.attempt} {next(_join_counter)}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(
            _join_failure_message(launch, " ".join(str(error).split())[:MAX_REASON_LENGTH])
        ) from error
    return store


def _join_failure_message(launch: ProcessInfo, reason: str) -> str:
    """Why ranks could not meet, and what to do."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in reason:
        return f"the port of {where} is in use; give torchrun another --master-port, or --standalone"
    return (
        f"rank {launch.rank} of {launch.size} did not meet the others at {where} ({reason}); "
        "see that every machine runs the same torchrun and reaches that address"
    )


def _is_communication_error(error: RuntimeError) -> bool:
    """Whether what failed was talk between ranks."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()

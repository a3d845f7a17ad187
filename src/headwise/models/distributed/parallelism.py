"""How the processes of a run divide the work, and how they join; importable without torch, for
quick help texts.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from ...attention.interfaces.part import CheckedDataclass
from ...util.errors import SpecError, suggest

# --- Parallel dimensions --------------------------------------------------------------------------

# From the outermost to the innermost: ranks that differ in the last one only are neighbours and
# communicate the most.
PARALLEL_DIMS = ("data", "context", "shards", "tensor")
AUTO = "auto"


@dataclass(frozen=True, repr=False)
class Parallelism(CheckedDataclass):
    """Number of ranks in each parallel dimension; their product is the number of processes.

    - "data": ranks divide the rows of a batch; each rank has a copy of the model.
    - "shards": ranks divide the rows and every tensor of the model; FSDP2 gathers one layer at a
      time (2304.11277).
    - "tensor": ranks divide the heads and the hidden units of feed-forwards.
    - "context": ranks divide the tokens of each row.

    data=2,tensor=2 needs four ranks.

    >>> str(Parallelism(data=2, tensor=3)), Parallelism(data=2, tensor=3).size
    ('data=2,tensor=3', 6)
    """

    data: int = 1
    context: int = 1
    shards: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for dim, count in zip(PARALLEL_DIMS, self.shape, strict=True):
            if count < 1:
                raise SpecError(f"cannot use Parallelism({dim}={count}); give 1 or more")

    @staticmethod
    def parse(text: str) -> Parallelism:
        """Parse a text such as "data=2,tensor=2"; every dimension needs its number.

        >>> Parallelism.parse("data=2, shards=2") == Parallelism(data=2, shards=2)
        True
        >>> Parallelism.parse("date=2")
        Traceback (most recent call last):
        headwise.util.errors.SpecError: unknown parallel dimension 'date'; did you mean 'data'?
        """
        sizes: dict[str, int] = {}
        for word in text.split(","):
            dim, _, count = (piece.strip() for piece in word.partition("="))
            if dim not in PARALLEL_DIMS:
                raise SpecError(
                    f"unknown parallel dimension {dim!r}; {suggest(dim, PARALLEL_DIMS)}"
                )
            if dim in sizes or not count.isascii() or not count.isdigit():
                raise SpecError(
                    f"cannot parse parallelism={text!r}; write each dimension once with its "
                    "number, as in data=2"
                )
            sizes[dim] = int(count)
        return Parallelism(**sizes)

    @staticmethod
    def over(text: str, num_ranks: int) -> Parallelism:
        """Parse a text and check that it takes exactly `num_ranks` ranks; "auto" divides the data.

        >>> Parallelism.over("auto", 3)
        Parallelism(data=3)
        >>> Parallelism.over("data=2", 3)
        Traceback (most recent call last):
        headwise.util.errors.SpecError: data=2 needs 2 processes, not 3; start 2 processes, or give
        data=3
        """
        if text == AUTO:
            return Parallelism(data=num_ranks)
        parallelism = Parallelism.parse(text)
        if parallelism.size != num_ranks:
            problem = f"{parallelism} needs {parallelism.size} processes, not {num_ranks}"
            raise SpecError(
                f"{problem}; start {parallelism.size} processes, or give data={num_ranks}"
            )
        return parallelism

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks in each dimension, in the order of PARALLEL_DIMS."""
        return tuple(getattr(self, dim) for dim in PARALLEL_DIMS)

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.shape)

    def place(self, rank: int) -> dict[str, int]:
        """Return the index of a rank in each dimension.

        >>> Parallelism(data=2, tensor=3).place(4)
        {'data': 1, 'context': 0, 'shards': 0, 'tensor': 1}
        """
        index: dict[str, int] = {}
        for dim in reversed(PARALLEL_DIMS):
            rank, index[dim] = divmod(rank, getattr(self, dim))
        return {dim: index[dim] for dim in PARALLEL_DIMS}

    def rank_groups(self, *dims: str) -> list[list[int]]:
        """Return all ranks, grouped so that the ranks of one group differ only in these dimensions.

        >>> Parallelism(data=2, tensor=2).rank_groups("data")
        [[0, 2], [1, 3]]
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.place(rank)
            groups.setdefault(
                tuple(place[dim] for dim in PARALLEL_DIMS if dim not in dims), []
            ).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        sizes = [
            f"{dim}={count}"
            for dim, count in zip(PARALLEL_DIMS, self.shape, strict=True)
            if count > 1
        ]
        return ",".join(sizes) or "data=1"


# --- Process group --------------------------------------------------------------------------------


JOIN_TIMEOUT = timedelta(minutes=5)  # for all ranks to join
# For a rank to answer a collective; the longest work that one rank may do alone.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# characters quoted of torch's error when ranks cannot join; the original is very long
MAX_REASON_LENGTH = 200
FAILURE_KEY = "failed"  # counter in the store: the first rank to increment it reports the failure

# ranks join together, so the n-th join of one rank is the n-th join of all
_join_counter = itertools.count()


@dataclass(frozen=True)
class ProcessInfo:
    """Rank of this process, number of processes, rank on its own machine, and number of restarts by
    torchrun.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    attempt: int = 0
    store: Any = field(default=None, repr=False, compare=False)

    @property
    def is_leader(self) -> bool:
        """True if this process writes files and prints."""
        return self.rank == 0

    def claim_failure_report(self) -> bool:
        """Claim the right to report a failure; True for the first rank that calls this, so only one
        prints it.
        """
        if self.store is None:
            return True
        # torchrun sends it to the other ranks; one must still report
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            return self.store.add(FAILURE_KEY, 1) == 1
        except RuntimeError:  # the rank that served the store was killed before it could report
            return True


def read_torchrun_environment(environment: Mapping[str, str] | None = None) -> ProcessInfo:
    """Read the rank and size that torchrun sets in the environment; without torchrun, a single
    process.

    >>> read_torchrun_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    ProcessInfo(rank=3, size=4, local=1, attempt=0)
    >>> read_torchrun_environment({}).size
    1
    """
    variables = os.environ if environment is None else environment
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return ProcessInfo()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    defaults = {"LOCAL_RANK": variables["RANK"], "TORCHELASTIC_RESTART_COUNT": "0"}
    values = [variables.get(name, defaults.get(name, "")) for name in names]
    if not all(value.isascii() and value.isdigit() for value in values) or int(values[0]) >= int(
        values[1]
    ):
        shown = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise SpecError(
            f"the environment has {shown}, which is not a valid rank; start with torchrun"
        )
    return ProcessInfo(*map(int, values))


@contextmanager
def join_process_group() -> Iterator[ProcessInfo]:
    """Join torchrun's process group for the duration of the block; a nested call reuses the group.

    Does nothing in a single process. If a rank is lost, the waiting ranks raise a ConnectionError
    of one line, whatever collective they were waiting in.
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
        reason = "ended"
        if "timed out" in str(error).lower():
            reason = f"did not answer for {COLLECTIVE_TIMEOUT}"
        problem = f"rank {launch.rank} waited for another rank, which {reason}"
        raise ConnectionError(
            f"{problem}; saved checkpoints are intact, continue with the same command and --resume"
        ) from error
    dist.destroy_process_group()


def _init_process_group(launch: ProcessInfo) -> Any:
    """Initialise the process group and return the store of its rendezvous."""
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
    """Return the reason why ranks could not join, and what to do."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in reason:
        return (
            f"the port of {address} is in use; give torchrun another --master-port, or --standalone"
        )
    return (
        f"rank {launch.rank} of {launch.size} could not join the others at {address} ({reason}); "
        "check that every machine runs the same torchrun command and can reach that address"
    )


def _is_communication_error(error: RuntimeError) -> bool:
    """Return whether communication between ranks failed."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()

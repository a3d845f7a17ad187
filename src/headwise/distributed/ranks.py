"""A world: the ranks of one training, what they divide, and what they tell each other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..data import IGNORE_INDEX, Batch
from ..errors import SpecError
from .launch import ProcessInfo
from .parallelism import PARALLEL_DIMS, Parallelism

T = TypeVar("T")
SHARED_FAILURES = (ValueError, OSError, RuntimeError)  # what is said to the others; anything else ends the process

# Ranks of these ways work on something else each; those of "tensor" work on the same rows and tokens.
GRADIENT_DIMS = ("data", "context", "shards")


class ProcessMesh:
    """Which rank this is, of a spread over so many, on which device. Of one rank, all that follows is a formality.

    What is said here every rank must say, in the same order.

    >>> world = ProcessMesh(ProcessInfo(), Parallelism())
    >>> world.is_leader, world.every("here"), world.any(True), world.sum(torch.ones(2)).tolist()
    (True, ['here'], True, [1.0, 1.0])
    """

    def __init__(self, process: ProcessInfo, parallelism: Parallelism, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.spread, self.device = process.rank, process.size, parallelism, torch.device(device)
        self.place = parallelism.place(process.rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._device_mesh: DeviceMesh | None = None
        self._check_device(process)

    def _check_device(self, launch: ProcessInfo) -> None:
        if self.size == 1 or self.device.type != "cuda":
            return
        cards = torch.cuda.device_count()
        if self.device.index is not None or launch.local >= cards:
            said = f"device={str(self.device)!r} for every rank" if self.device.index is not None else f"{cards} cards"
            raise SpecError(f"{said} cannot serve {self.size} ranks; give device='cuda' and a card to each, or 'cpu'")

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    @property
    def worker_index(self) -> int:
        """Which of those that work on something else each: its number among them, the same for ranks of one head."""
        return self._index_along(GRADIENT_DIMS)[0]

    @property
    def num_workers(self) -> int:
        """How many work on something else each."""
        return self.size // self.spread.tensor

    @property
    def num_data_shards(self) -> int:
        """How many learn from rows of their own: those of one context learn from the same."""
        return self.num_workers // self.spread.context

    def _index_along(self, ways: Sequence[str]) -> tuple[int, int]:
        """Its number among ranks that differ in these ways, and how many they are."""
        found, count = 0, 1
        for way in ways:
            found, count = found * getattr(self.spread, way) + self.place[way], count * getattr(self.spread, way)
        return found, count

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks as torch's mesh, its dimensions named as WAYS are."""
        if self._device_mesh is None:
            self._device_mesh = init_device_mesh(self.device.type, self.spread.shape, mesh_dim_names=PARALLEL_DIMS)
        return self._device_mesh

    def group(self, *ways: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in nothing but these ways."""
        if ways not in self._groups:
            circles = self.spread.rank_groups(*ways)
            self._groups[ways] = cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(circles)[0])
        return self._groups[ways]

    def every(self, value: T) -> list[T]:
        """What each rank says, in their order."""
        if self.size == 1:
            return [value]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value)
        return said

    def told(self, function: Callable[[], T]) -> T:
        """What the leader's work gives, told to all; if it fails, they all fail."""
        if self.size == 1:
            return function()
        said: list[Any] = [_run_safely(function) if self.is_leader else None]
        dist.broadcast_object_list(said)
        value, failure = said[0]
        if failure is not None:
            raise failure
        return value

    def run_on_all(self, function: Callable[[], T]) -> T:
        """What its own work gives each rank; if that of one fails, they all fail, and for its reason."""
        if self.size == 1:
            return function()
        value, failure = _run_safely(function)
        failures = self.every(failure)
        if failure is not None and all(str(other) == str(failure) for other in failures):
            raise failure
        for rank, other in enumerate(failures):
            if other is not None:
                raise SpecError(f"rank {rank} of {self.size}: {other}")
        return value  # pyright: ignore[reportReturnType] - no failure, so there is one

    def first(self, value: T | None) -> tuple[T, str] | None:
        """What the first rank has that has anything, and where that is; None if none has."""
        for rank, said in enumerate(self.every(value)):
            if said is not None:
                return said, f" on rank {rank}" if self.size > 1 else ""
        return None

    def any(self, value: bool) -> bool:
        """Whether any rank says so."""
        if self.size == 1:
            return value
        flag = torch.tensor(float(value), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all that work on something else, in place of what is given."""
        if self.num_workers > 1:
            dist.all_reduce(own, group=self.group(*GRADIENT_DIMS))
        return own

    def share(self, batch: Batch, *ways: str) -> BatchShard:
        """What this rank takes of a batch that all of them have, where ranks of these ways take rows of their own."""
        index, count = self._index_along(ways or GRADIENT_DIMS)
        return shard_batch(batch, index, count)

    @contextmanager
    def leader_context(self, manager: AbstractContextManager[Any]) -> Iterator[None]:
        """The leader inside this, and the others with it."""
        with ExitStack() as stack:
            self.told(lambda: stack.enter_context(manager) and None)
            yield


def _run_safely(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a work gives, or how it fails; nothing else may end it, for others are waiting."""
    try:
        return function(), None
    except SHARED_FAILURES as error:
        return None, _picklable_error(error)


def _picklable_error(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever it cannot be sent for
        return RuntimeError(str(error))
    return error


# --- Which examples of a batch are a rank's ------------------------------------------------------------


class BatchShard(NamedTuple):
    """What a rank takes of a batch, and how many of its rows count.

    Who gets no row takes one that asks nothing: it has nothing to learn, but others wait for it in every layer.
    """

    batch: Batch
    rows: int


def shard_batch(batch: Batch, index: int, num_shards: int) -> BatchShard:
    """Part `index` of `count`, all as large as the others or one row smaller, in order.

    >>> ids = torch.arange(3)[:, None]
    >>> [(part.batch.x.tolist(), part.rows) for part in (shard_batch(Batch(ids, ids), index, 2) for index in range(2))]
    [([[0], [1]], 2), ([[2]], 1)]
    >>> shard_batch(Batch(ids, ids), 3, 4).batch.labels.tolist()
    [[-100]]
    """
    if num_shards == 1:
        return BatchShard(batch, len(batch.labels))
    each, over = divmod(len(batch.labels), num_shards)
    first = index * each + min(index, over)
    rows = each + (index < over)
    if rows:
        return BatchShard(batch.rows(slice(first, first + rows)), rows)
    idle = batch.rows(slice(0, 1))
    return BatchShard(replace(idle, labels=torch.full_like(idle.labels, IGNORE_INDEX)), 0)

"""The ranks of one training run: shared values and errors, rows of a batch, equal code and
configuration.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import __version__
from ...util.errors import SpecError
from ..batch import IGNORE_INDEX, Batch
from ..model_spec.serialization import Difference, compare_trees
from .parallelism import PARALLEL_DIMS, Parallelism, ProcessInfo

# --- Ranks ----------------------------------------------------------------------------------------

T = TypeVar("T")
# sent to the other ranks; any other exception ends the process
SHARED_FAILURES = (ValueError, OSError, RuntimeError)

# Ranks that differ in these dimensions work on different data. "tensor" ranks work on the same
# rows and tokens.
GRADIENT_DIMS = ("data", "context", "shards")


class ProcessMesh:
    """This process among the ranks of one training run, with its device.

    Every method that communicates is a collective: all ranks must call it, in the same order. With
    one rank nothing is sent.

    >>> world = ProcessMesh(ProcessInfo(), Parallelism())
    >>> (
    ...     world.is_leader,
    ...     world.all_gather_objects("here"),
    ...     world.any(True),
    ...     world.sum(torch.ones(2)).tolist(),
    ... )
    (True, ['here'], True, [1.0, 1.0])
    """

    def __init__(
        self, process: ProcessInfo, parallelism: Parallelism, device: torch.device | str = "cpu"
    ) -> None:
        self.rank = process.rank
        self.size = process.size
        self.parallelism = parallelism
        self.device = torch.device(device)
        self.place = parallelism.place(process.rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._device_mesh: DeviceMesh | None = None
        self._check_device(process)

    def _check_device(self, launch: ProcessInfo) -> None:
        if self.size == 1 or self.device.type != "cuda":
            return
        num_devices = torch.cuda.device_count()
        if self.device.index is not None or launch.local >= num_devices:
            if self.device.index is not None:
                problem = f"device={str(self.device)!r} for every rank"
            else:
                problem = f"{num_devices} GPUs"
            raise SpecError(
                f"{problem} cannot serve {self.size} ranks; give device='cuda' and one GPU per "
                "rank, or 'cpu'"
            )

    @property
    def is_leader(self) -> bool:
        """True if this rank writes files and prints."""
        return self.rank == 0

    @property
    def worker_index(self) -> int:
        """Index of this rank among the workers; ranks of one tensor-parallel group have the same
        index.
        """
        return self._index_along(GRADIENT_DIMS)[0]

    @property
    def num_workers(self) -> int:
        """Number of workers, that is of tensor-parallel groups, which work on different data."""
        return self.size // self.parallelism.tensor

    @property
    def num_data_shards(self) -> int:
        """Number of parts into which the rows are divided; ranks of one context group have the same
        rows.
        """
        return self.num_workers // self.parallelism.context

    def _index_along(self, dims: Sequence[str]) -> tuple[int, int]:
        """Return the index of this rank in these dimensions, and the number of ranks in them."""
        index = 0
        count = 1
        for dim in dims:
            index = index * getattr(self.parallelism, dim) + self.place[dim]
            count = count * getattr(self.parallelism, dim)
        return index, count

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks as a torch DeviceMesh with the dimension names of PARALLEL_DIMS."""
        if self._device_mesh is None:
            self._device_mesh = init_device_mesh(
                self.device.type, self.parallelism.shape, mesh_dim_names=PARALLEL_DIMS
            )
        return self._device_mesh

    def group(self, *dims: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one only
        in these dimensions.
        """
        if dims not in self._groups:
            rank_groups = self.parallelism.rank_groups(*dims)
            self._groups[dims] = cast(
                dist.ProcessGroup, dist.new_subgroups_by_enumeration(rank_groups)[0]
            )
        return self._groups[dims]

    def all_gather_objects(self, value: T) -> list[T]:
        """Return the value of each rank, in rank order; values must be picklable."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def run_on_leader(self, function: Callable[[], T]) -> T:
        """Call `function` on the leader and return its result on all ranks; if it raises, every
        rank raises.
        """
        if self.size == 1:
            return function()
        outcome: list[Any] = [_run_safely(function) if self.is_leader else None]
        dist.broadcast_object_list(outcome)
        value, failure = outcome[0]
        if failure is not None:
            raise failure
        return value

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank and return its own result; if it raises on one rank, every
        rank raises that.
        """
        if self.size == 1:
            return function()
        value, failure = _run_safely(function)
        failures = self.all_gather_objects(failure)
        if failure is not None and all(str(other) == str(failure) for other in failures):
            raise failure
        for rank, other in enumerate(failures):
            if other is not None:
                raise SpecError(f"rank {rank} of {self.size}: {other}")
        return value  # pyright: ignore[reportReturnType] - no failure, so there is one

    def first(self, value: T | None) -> tuple[T, str] | None:
        """Return the value of the first rank that has one, and " on rank N"; None if all values are
        None.
        """
        for rank, other in enumerate(self.all_gather_objects(value)):
            if other is not None:
                return other, f" on rank {rank}" if self.size > 1 else ""
        return None

    def any(self, value: bool) -> bool:
        """Return whether the value is true on any rank."""
        if self.size == 1:
            return value
        flag = torch.tensor(float(value), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def sum(self, own: Tensor) -> Tensor:
        """Sum a tensor over the workers, in place."""
        if self.num_workers > 1:
            dist.all_reduce(own, group=self.group(*GRADIENT_DIMS))
        return own

    def shard(self, batch: Batch, *dims: str) -> BatchShard:
        """Return this rank's rows of a batch that all ranks have; ranks of these dimensions get
        different rows.
        """
        index, count = self._index_along(dims or GRADIENT_DIMS)
        return shard_batch(batch, index, count)

    @contextmanager
    def leader_context(self, manager: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter `manager` on the leader only; if that raises, every rank raises."""
        with ExitStack() as stack:
            self.run_on_leader(lambda: stack.enter_context(manager) and None)
            yield


def _run_safely(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of a function, or its exception: the other ranks are waiting for either."""
    try:
        return function(), None
    except SHARED_FAILURES as error:
        return None, _picklable_error(error)


def _picklable_error(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling may raise anything
        return RuntimeError(str(error))
    return error


# --- Rows of a batch ------------------------------------------------------------------------------


class BatchShard(NamedTuple):
    """The rows of a batch that one rank gets, and how many of them count.

    A rank without a row gets one with all labels ignored, because the other ranks wait for it in
    every layer.
    """

    batch: Batch
    rows: int


def shard_batch(batch: Batch, index: int, num_shards: int) -> BatchShard:
    """Return part `index` of `num_shards` of the rows, in order; sizes differ by at most one row.

    >>> ids = torch.arange(3)[:, None]
    >>> [
    ...     (part.batch.x.tolist(), part.rows)
    ...     for part in (shard_batch(Batch(ids, ids), index, 2) for index in range(2))
    ... ]
    [([[0], [1]], 2), ([[2]], 1)]
    >>> shard_batch(Batch(ids, ids), 3, 4).batch.labels.tolist()
    [[-100]]
    """
    if num_shards == 1:
        return BatchShard(batch, len(batch.labels))
    rows_per_shard, num_larger = divmod(len(batch.labels), num_shards)
    first = index * rows_per_shard + min(index, num_larger)
    rows = rows_per_shard + (index < num_larger)
    if rows:
        return BatchShard(batch.rows(slice(first, first + rows)), rows)
    idle = batch.rows(slice(0, 1))
    return BatchShard(replace(idle, labels=torch.full_like(idle.labels, IGNORE_INDEX)), 0)


# --- Equal code and configuration on all ranks ----------------------------------------------------


def fingerprint_code() -> dict[str, str]:
    """Return the versions of headwise and torch, and a checksum of the source of this package."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    if root not in _checksums:
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()} ".encode())
            digest.update(path.read_bytes())
        _checksums[root] = digest.hexdigest()[:12]
    return {"headwise": __version__, "source": _checksums[root], "torch": torch.__version__}


# of this package: a process runs the code that it has imported, whatever comes later
_checksums: dict[Path, str] = {}


def check_same_config(mesh: ProcessMesh, config: Mapping[str, Any]) -> None:
    """Raise SpecError at the first value that differs between the leader and another rank."""
    first, *others = mesh.all_gather_objects(config)
    for rank, other in enumerate(others, 1):
        difference = find_difference(first, other)
        if difference:
            name, expected, actual = difference
            raise SpecError(
                f"{name} is {expected} on rank 0, {actual} on rank {rank}; start all ranks with "
                "the same configuration"
            )


def find_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference | None:
    """Return the name and both values of the first difference of two configurations; None if they
    are equal.
    """
    return next(compare_trees("", one, other, "not set"), None)

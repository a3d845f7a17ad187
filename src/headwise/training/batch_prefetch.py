"""Batches that a thread prepares while the step before them runs."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from ..data import Batch, Task


class BatchPrefetcher:
    """The training batches of a task in order, prepared by one thread up to `ahead` batches before they are needed.

    A batch depends only on its number, so preparing it early changes nothing about it. An error in a batch is raised
    by the step that needs it. Batches from number `stop` on are not prepared.

    >>> from headwise.data import make_task
    >>> task = make_task("copy")
    >>> with BatchPrefetcher(task, 4, ahead=2, stop=3) as batches:
    ...     bool((batches.get(1).x == task.batch(1, 4).x).all())
    True
    """

    def __init__(self, task: Task, size: int, *, ahead: int, stop: int) -> None:
        self._task, self._size, self._ahead, self._stop = task, size, ahead, stop
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="headwise-batches") if ahead else None
        self._pending: deque[tuple[int, Future[Batch]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop the batches that are not needed; waits for the one that is being prepared."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def get(self, index: int) -> Batch:
        """Return the batch of this number, and have the next ones prepared."""
        if self._threads is None:
            return self._task.batch(index, self._size, "train")
        while self._pending and self._pending[0][0] != index:
            self._pending.popleft()[1].cancel()
        first = self._pending[-1][0] + 1 if self._pending else index
        for number in range(first, max(index + 1, min(index + 1 + self._ahead, self._stop))):
            self._pending.append((number, self._threads.submit(self._task.batch, number, self._size, "train")))
        return self._pending.popleft()[1].result()

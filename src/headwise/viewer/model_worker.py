"""One thread that runs jobs on the model, one after the other, with progress, cancellation and a time limit."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .open_model import OpenModel

MAX_QUEUED_JOBS = 8
MAX_KEPT_RESULTS = 32  # the results of older jobs are dropped
MAX_JOB_SECONDS = 600.0
JobFunction = Callable[[OpenModel, Mapping[str, Any], "JobProgress"], Any]


class QueueFull(Exception):
    """Too many jobs are waiting."""


class JobCancelled(Exception):
    """The job was cancelled, or took longer than its time limit."""


class JobProgress:
    """Reports the progress of one job, and stops it if it was cancelled or takes too long."""

    def __init__(self, job: Job, max_seconds: float = MAX_JOB_SECONDS) -> None:
        self.job, self.deadline = job, time.monotonic() + max_seconds

    def __call__(self, done: int, total: int = 0, note: str = "") -> None:
        """Publish that `done` of `total` steps are done (total 0: unknown); raises JobCancelled."""
        self.check()
        self.job.publish({"state": "running", "done": done, "total": total, "note": note})

    def check(self) -> None:
        """Raise JobCancelled if the job is to stop."""
        if self.job.is_cancelled:
            raise JobCancelled("cancelled")
        if time.monotonic() > self.deadline:
            raise JobCancelled("the time limit has passed; use a shorter text or fewer heads")


@dataclass
class Job:
    """One request to the worker: its kind and arguments, its events so far, and its result."""

    kind: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    events: list[dict[str, Any]] = field(default_factory=lambda: [{"state": "queued"}])
    result: Any = None
    is_cancelled: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    @property
    def state(self) -> str:
        """queued, running, done, failed or cancelled."""
        return self.events[-1]["state"]

    @property
    def has_ended(self) -> bool:
        """Whether no further event follows."""
        return self.state in ("done", "failed", "cancelled")

    def publish(self, event: dict[str, Any]) -> None:
        """Add an event and wake all that wait for it."""
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def wait_for_event(self, number: int, timeout: float) -> list[dict[str, Any]]:
        """Return the events from `number` on; waits for one if there is none yet."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) > number, timeout)
            return self.events[number:]

    def cancel(self) -> None:
        """Stop the job at its next progress report."""
        self.is_cancelled = True


class ModelWorker:
    """Runs jobs in one thread, in order; at most `MAX_QUEUED_JOBS` wait.

    The model is only used while `lock` is held, so that quick requests may use it between two jobs.
    """

    def __init__(self, model: OpenModel, job_kinds: Mapping[str, JobFunction]) -> None:
        self.model, self.job_kinds, self.lock = model, job_kinds, threading.Lock()
        self.jobs: dict[str, Job] = {}
        self._queue: queue.Queue[Job | None] = queue.Queue(MAX_QUEUED_JOBS)
        self._thread = threading.Thread(target=self._run, name="headwise-view", daemon=True)
        self._thread.start()

    def submit(self, kind: str, arguments: Mapping[str, Any]) -> Job:
        """Queue a job; raises ValueError for an unknown kind, QueueFull if too many wait."""
        if kind not in self.job_kinds:
            raise ValueError(f"there is no job {kind!r}; use one of {', '.join(self.job_kinds)}")
        job = Job(kind, arguments)
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise QueueFull(f"{MAX_QUEUED_JOBS} jobs are waiting; wait for one to end, or cancel one") from None
        ended = [name for name, other in self.jobs.items() if other.has_ended]
        for name in ended[: max(0, len(ended) - MAX_KEPT_RESULTS)]:
            del self.jobs[name]
        self.jobs[job.id] = job
        return job

    def close(self) -> None:
        """Cancel all jobs and end the thread."""
        for job in list(self.jobs.values()):
            job.cancel()
        self._queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            progress = JobProgress(job)
            try:
                progress(0)
                with self.lock:
                    job.result = self.job_kinds[job.kind](self.model, job.arguments, progress)
                job.publish({"state": "done"})
            except JobCancelled as stop:
                job.publish({"state": "cancelled", "note": str(stop)})
            except Exception as error:  # a job may run any model: its failure must not end the worker
                job.publish({"state": "failed", "error": describe_error(error)})


def describe_error(error: BaseException) -> dict[str, str]:
    """Split a message of the library into its fact and its remedy; other errors are named by their type."""
    text = " ".join(str(error).split())[:400]
    if isinstance(error, (ValueError, MemoryError)) and text:
        fact, _, remedy = text.partition("; ")
        return {"fact": fact, "remedy": remedy}
    return {"fact": f"{type(error).__name__}: {text}" if text else type(error).__name__, "remedy": ""}

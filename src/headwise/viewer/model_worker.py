"""One thread that runs jobs on the model, one after the other, with progress, cancellation and a
time limit.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..util.escaping import shorten_message
from .open_model import OpenModel, import_libraries

MAX_QUEUED_JOBS = 8
MAX_KEPT_RESULTS = 32  # the results of older jobs are dropped
MAX_JOB_SECONDS = 600.0
END_STATES = ("done", "failed", "cancelled")
MIN_EVENT_SECONDS = 0.05  # a progress event that comes sooner replaces the last one
# A path: from a root to the last separator, in quotes or up to a space.
PATH = re.compile(
    r"""(?P<quote>['"])(?:[A-Za-z]:[\\/]|~?/)[^'"]*[\\/](?P<quoted>[^'"\\/]*)(?P=quote)"""
    r"""|(?<![\w/.])(?:[A-Za-z]:[\\/]|~?/(?!/))(?:[^\s'"\\/]+[\\/])+(?P<bare>[^\s'"\\/]*)"""
)
JobFunction = Callable[[OpenModel, Mapping[str, Any], "JobProgress"], Any]


class QueueFull(Exception):
    """Too many jobs are waiting."""


class JobCancelled(Exception):
    """The job was cancelled, or took longer than its time limit."""


class JobProgress:
    """Reports the progress of one job, and stops it if it was cancelled or takes too long."""

    def __init__(self, job: Job, max_seconds: float = MAX_JOB_SECONDS) -> None:
        self.job = job
        self.deadline = time.monotonic() + max_seconds

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


@dataclass(eq=False)
class Job:
    """One request to the worker: its kind and arguments, its events so far, and its result."""

    kind: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    events: list[dict[str, Any]] = field(default_factory=lambda: [{"state": "queued"}])
    result: Any = None
    is_cancelled: bool = False
    _changing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _published: float = -1.0  # time of the last event

    @property
    def state(self) -> str:
        """queued, running, done, failed or cancelled."""
        return self.events[-1]["state"]

    @property
    def has_ended(self) -> bool:
        """Whether no further event follows."""
        return self.state in END_STATES

    def publish(self, event: dict[str, Any]) -> None:
        """Add an event; one that reports progress replaces another that came just before."""
        with self._changing:
            now = time.monotonic()
            is_progress = event["state"] == self.state == "running"
            if is_progress and now - self._published < MIN_EVENT_SECONDS:
                self.events[-1] = event
            else:
                self.events.append(event)
                self._published = now

    def read_events(self, last: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the events after `last`; all of them if it is None, the last one if it was
        replaced.
        """
        with self._changing:
            places = [number for number, event in enumerate(self.events) if event is last]
            return (
                self.events[places[0] + 1 :]
                if places
                else self.events[-1:]
                if last
                else list(self.events)
            )

    def cancel(self) -> None:
        """Stop the job at its next progress report."""
        self.is_cancelled = True


class ModelWorker:
    """Runs jobs in one thread, in order; at most `MAX_QUEUED_JOBS` wait.

    The model is only used while `lock` is held, so that quick requests may use it between two jobs.
    """

    def __init__(self, model: OpenModel, job_kinds: Mapping[str, JobFunction]) -> None:
        self.model = model
        self.job_kinds = job_kinds
        self.lock = threading.Lock()
        self.jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="headwise-view", daemon=True)
        self._thread.start()

    def submit(self, kind: str, arguments: Mapping[str, Any]) -> Job:
        """Queue a job; raises ValueError for an unknown kind, QueueFull if too many wait."""
        if kind not in self.job_kinds:
            raise ValueError(f"there is no job {kind!r}; use one of {', '.join(self.job_kinds)}")
        job = Job(kind, arguments)
        with self._changed:
            if len(self._waiting) >= MAX_QUEUED_JOBS:
                raise QueueFull(
                    f"{MAX_QUEUED_JOBS} jobs are waiting; wait for one to end, or cancel one"
                )
            ended = [name for name, other in self.jobs.items() if other.has_ended]
            for name in ended[: max(0, len(ended) - MAX_KEPT_RESULTS)]:
                del self.jobs[name]
            self.jobs[job.id] = job
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Stop a job: at once if it waits, at its next progress report if it runs."""
        job.cancel()
        with self._changed:
            is_waiting = job in self._waiting
            if is_waiting:
                self._waiting.remove(job)
        if is_waiting:
            job.publish({"state": "cancelled", "note": "cancelled"})

    def close(self, timeout: float = 10.0) -> None:
        """Cancel all jobs and end the thread; waits at most `timeout` seconds
        for the running job.
        """
        with self._changed:
            self._is_closing = True
            jobs = list(self.jobs.values())
            self._changed.notify_all()
        for job in jobs:
            self.cancel(job)
        self._thread.join(timeout)

    def _next_job(self) -> Job | None:
        """The job that waits longest; None when the worker is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return None if self._is_closing else self._waiting.popleft()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            progress = JobProgress(job)
            try:
                progress(0)
                if self.model.has_model:
                    import_libraries()
                with self.lock:
                    job.result = self.job_kinds[job.kind](self.model, job.arguments, progress)
                job.publish({"state": "done"})
            except JobCancelled as stop:
                job.publish({"state": "cancelled", "note": str(stop)})
            except (
                Exception,
                SystemExit,
            ) as error:  # a job may run any model: its failure must not end the worker
                job.publish({"state": "failed", "error": describe_error(error)})


def describe_error(error: BaseException) -> dict[str, str]:
    """Split a message of the library into its fact and its remedy; other errors are named by their
    type.

    >>> describe_error(ValueError("there is no file /srv/name/model.json; give a folder"))
    {'fact': 'there is no file model.json', 'remedy': 'give a folder'}
    >>> describe_error(ValueError("cannot keep 9 of the heads. Give a fraction such as 0.5"))
    {'fact': 'cannot keep 9 of the heads', 'remedy': 'Give a fraction such as 0.5'}
    >>> describe_error(MemoryError())
    {'fact': 'the memory of this machine does not suffice', 'remedy': 'use a shorter text or a smaller model'}
    """
    text = shorten_message(hide_folders(" ".join(str(error).split())))
    if is_out_of_memory(error) and not (isinstance(error, MemoryError) and text):
        return {
            "fact": "the memory of this machine does not suffice",
            "remedy": "use a shorter text or a smaller model",
        }
    if isinstance(error, (ValueError, MemoryError)) and text:
        fact, separator, remedy = text.partition("; ")
        if not separator:  # "fact. Remedy"
            fact, _, remedy = text.rpartition(". ")
        return {"fact": fact or text, "remedy": remedy if fact else ""}
    return {
        "fact": f"{type(error).__name__}: {text}" if text else type(error).__name__,
        "remedy": "",
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory does not suffice; torch reports that by the words of a
    RuntimeError.

    >>> (
    ...     is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ...     is_out_of_memory(ValueError("a")),
    ... )
    (True, False)
    """
    is_torch = isinstance(error, RuntimeError) and (
        "allocate memory" in str(error) or "out of memory" in str(error)
    )
    return is_torch or isinstance(error, MemoryError)


def hide_folders(text: str) -> str:
    """The text with only the last part of every absolute path, because a page may be shown to
    others.

    >>> hide_folders("cannot read '/srv/a name/x.json' (2/3 done)")
    "cannot read 'x.json' (2/3 done)"
    """

    def keep_name(match: re.Match[str]) -> str:
        quote = match["quote"] or ""
        return f"{quote}{match['quoted'] or match['bare'] or '...'}{quote}"

    return PATH.sub(keep_name, text)

"""A worker thread that runs jobs on the model in order, with progress, cancellation and a time
limit.
"""

from __future__ import annotations

import math
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

from ..util.escaping import shorten_message
from .open_model import ABLATION_MODES, AblatedHead, OpenModel, import_libraries

MAX_QUEUED_JOBS = 8
MAX_KEPT_RESULTS = 32  # the results of older jobs are dropped
MAX_JOB_SECONDS = 600.0
END_STATES = ("done", "failed", "cancelled")
OTHER_WINDOW = ValueError("error.otherWindow")  # a sentence of the page
MIN_EVENT_SECONDS = 0.05  # a progress event that comes sooner replaces the last one
# A path: from a root to the last separator, in quotes or up to a space.
PATH = re.compile(
    r"""(?P<quote>['"])(?:[A-Za-z]:[\\/]|~?/)[^'"]*[\\/](?P<quoted>[^'"\\/]*)(?P=quote)"""
    r"""|(?<![\w/.])(?:[A-Za-z]:[\\/]|~?/(?!/))(?:[^\s'"\\/]+[\\/])+(?P<bare>[^\s'"\\/]*)"""
)
JobFunction = Callable[[OpenModel, Mapping[str, Any], "JobProgress"], Any]


class QueueFull(Exception):
    """Raised if too many jobs are waiting."""


class JobCancelled(Exception):
    """Raised if a job was cancelled or exceeded its time limit."""


class JobProgress:
    """Reports the progress of one job, and stops it on cancellation or timeout."""

    def __init__(self, job: Job, max_seconds: float = MAX_JOB_SECONDS) -> None:
        self.job = job
        self.deadline = time.monotonic() + max_seconds

    def __call__(self, done: int, total: int = 0, note: str = "") -> None:
        """Report that `done` of `total` steps are done (total 0: unknown). Raises JobCancelled."""
        self.check()
        self.job.publish({"state": "running", "done": done, "total": total, "note": note})

    def check(self) -> None:
        """Raise JobCancelled if the job should stop."""
        if self.job.is_cancelled:
            raise JobCancelled("cancelled")
        if time.monotonic() > self.deadline:
            raise JobCancelled("the time limit has passed; use a shorter text or fewer heads")


@dataclass(eq=False)
class Job:
    """One request to the worker: its kind and arguments, its events so far, and its result.

    `window` asks for it, and shows `revision`; None if it asks about whatever is open.
    """

    kind: str
    arguments: Mapping[str, Any]
    window: str = ""
    revision: int | None = None
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
        """True if no more events follow."""
        return self.state in END_STATES

    def publish(self, event: dict[str, Any]) -> None:
        """Add an event. A progress event replaces the one just before it."""
        with self._changing:
            now = time.monotonic()
            is_progress = event["state"] == self.state == "running"
            if is_progress and now - self._published < MIN_EVENT_SECONDS:
                self.events[-1] = event
            else:
                self.events.append(event)
                self._published = now

    def read_events(self, last: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the events after `last`: all if `last` is None, the last one if `last` was
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

    Jobs hold `lock` while they use the model, so quick requests can use it between two jobs.
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

    def submit(
        self,
        kind: str,
        arguments: Mapping[str, Any],
        window: str = "",
        revision: int | None = None,
    ) -> Job:
        """Queue a job; raises ValueError for an unknown kind, QueueFull if too many wait."""
        if kind not in self.job_kinds:
            raise ValueError(f"there is no job {kind!r}; use one of {', '.join(self.job_kinds)}")
        job = Job(kind, arguments, window, revision)
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
        """Stop a job: immediately if it is queued, at its next progress report if it runs."""
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
        """Return the oldest queued job; None when the worker is closed."""
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
                    if self.model.is_other_window(job.window, job.revision):
                        raise OTHER_WINDOW  # a job before this one opened another text
                    self.model.window = job.window
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
    """Split a library message into fact and remedy; other errors are named by type.

    >>> describe_error(ValueError("there is no file /srv/name/model.json; give a folder"))
    {'fact': 'there is no file model.json', 'remedy': 'give a folder'}
    >>> describe_error(ValueError("cannot keep 9 of the heads. Give a fraction such as 0.5"))
    {'fact': 'cannot keep 9 of the heads', 'remedy': 'Give a fraction such as 0.5'}
    >>> describe_error(MemoryError())
    {'fact': 'the memory of this machine does not suffice', 'remedy': 'use a shorter text or a
    smaller model'}
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
    """True if an error means out of memory. torch may raise a plain RuntimeError, so the message is
    checked too.

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
    """Replace every absolute path by its last part, because a page may be shown to others.

    >>> hide_folders("cannot read '/srv/a name/x.json' (2/3 done)")
    "cannot read 'x.json' (2/3 done)"
    """

    def keep_name(match: re.Match[str]) -> str:
        quote = match["quote"] or ""
        return f"{quote}{match['quoted'] or match['bare'] or '...'}{quote}"

    return PATH.sub(keep_name, text)


ALL_JOBS: dict[str, JobFunction] = {}  # every job of the page by its kind
REQUIRED: Any = object()
Pair = tuple[str, int]  # the name of a site, and the number of a head


class Field(NamedTuple):
    """A field of a job: how to check its value, its default, and its JSON name if it differs from
    the argument name. "*" means all arguments.
    """

    read: Callable[[OpenModel, str, Any], Any]
    default: Any = REQUIRED
    key: str = ""

    def get(self, model: OpenModel, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the value from the job's arguments, or the default."""
        name = self.key or name
        value = arguments if name == "*" else arguments.get(name)
        if value is None and self.default is not REQUIRED:
            return self.default
        return self.read(model, name, value)


def action(kind: str, /, **fields: Field) -> Callable[[Callable[..., Any]], JobFunction]:
    """Register a function as a job; it takes the model, its progress and these fields."""

    def register(function: Callable[..., Any]) -> JobFunction:
        @wraps(function)
        def run(model: OpenModel, arguments: Mapping[str, Any], progress: JobProgress) -> Any:
            values = {name: field.get(model, name, arguments) for name, field in fields.items()}
            return function(model, progress, **values)

        ALL_JOBS[kind] = run
        return run

    return register


# --- Kinds of values ------------------------------------------------------------------------------


def integer(low: int, high: int, default: Any = REQUIRED) -> Field:
    """Make a field for an integer from `low` to `high`."""

    def read(model: OpenModel, name: str, value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"{name}={value!r} is not an integer; give {low} to {high}")
        if not low <= value <= high:
            raise ValueError(f"{name}={value} is out of range; give {low} to {high}")
        return value

    return Field(read, default)


def _checked(
    accepts: Callable[[Any], bool], fault: str, default: Any = REQUIRED, key: str = ""
) -> Field:
    """Make a field for a value that passes a test; `fault` is the message for others."""

    def read(model: OpenModel, name: str, value: Any) -> Any:
        if not accepts(value):
            raise ValueError(fault.format(name=name, value=value, kind=type(value).__name__))
        return value

    return Field(read, default, key)


def number(default: Any = REQUIRED, low: float = -math.inf, high: float = math.inf) -> Field:
    """Make a field for a finite number."""
    scope = f" from {low:g} to {high:g}" if math.isfinite(high) else ""
    return _checked(
        lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high,
        f"{{name}}={{value!r}} is not a number{scope}; give for example 0.5",
        default,
    )


def flag() -> Field:
    """Make a field for a boolean, false by default."""
    fault = "{name}={value!r} is neither true nor false; give one of them"
    return _checked(lambda value: isinstance(value, bool), fault, False)


def text(default: Any = "", key: str = "") -> Field:
    """A text."""
    fault = "{name} is of type {kind}; give a text"
    return _checked(lambda value: isinstance(value, str), fault, default, key)


def choice(names: Sequence[str], default: Any = REQUIRED, key: str = "") -> Field:
    """Make a field for one of several words."""
    fault = f"{{name}}={{value!r}} is unknown; use one of {', '.join(names)}"
    return _checked(lambda value: value in names, fault, default, key)


def _read_lines(model: OpenModel, name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or any(not isinstance(line, str) for line in value):
        raise ValueError(f"{name} must be a list of texts; give one text a line")
    lines: list[str] = []
    for part in value:
        lines += [line for line in part.splitlines() if line.strip()]
    return lines


def _read_heads(model: OpenModel, name: str, value: Any) -> list[AblatedHead]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list; give [site, head, mode, scale] for each head")
    heads: list[AblatedHead] = []
    for entry in value:
        if not isinstance(entry, list) or [type(part) for part in entry[:2]] != [int, int]:
            raise ValueError(f"{entry!r} is not an ablated head; give [site, head, mode, scale]")
        head = AblatedHead(model.site_name(entry[0]), *entry[1:4])
        if type(head.scale) not in (int, float) or not math.isfinite(head.scale):
            raise ValueError(f"the scale {head.scale!r} is not a number; give for example 0.5")
        if head.mode not in ABLATION_MODES:
            modes = ", ".join(ABLATION_MODES)
            raise ValueError(f"unknown ablation {head.mode!r}; use one of {modes}")
        heads.append(head._replace(scale=float(head.scale)))
    return heads


def _read_tokens(model: OpenModel, name: str, value: Any) -> dict[str, tuple[int, ...]]:
    streams = model.get_recorded().streams
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must map a stream to positions; give {{'text': [0, 1]}}")
    tokens: dict[str, tuple[int, ...]] = {}
    for stream, positions in value.items():
        if stream not in streams or not isinstance(positions, list):
            raise ValueError(
                f"tokens of {stream!r} cannot be chosen; the streams are {', '.join(streams)}"
            )
        count = len(streams[stream][0].ids)
        wrong = [place for place in positions if type(place) is not int or not 0 <= place < count]
        if wrong:
            raise ValueError(
                f"the {stream} has {count} tokens, none at {wrong[0]!r}; give 0 to {count - 1}"
            )
        if positions:
            tokens[stream] = tuple(sorted(set(positions)))
    return tokens


def _read_classes(model: OpenModel, name: str, value: Any) -> dict[Pair, str]:
    shape = [int, int, str]
    entries = value if isinstance(value, list) else [value]
    if any(not isinstance(entry, list) or list(map(type, entry)) != shape for entry in entries):
        raise ValueError(f"{name} must be a list of [site, head, name]; give one for each head")
    too_long = [entry[2] for entry in value if not 0 < len(entry[2]) <= MAX_CLASS_CHARACTERS]
    if too_long:
        raise ValueError(
            f"{too_long[0][:20]!r} is not a name of a class; give 1 to {MAX_CLASS_CHARACTERS} "
            "characters"
        )
    return {(model.site_name(site), head): label for site, head, label in value}


MAX_CLASS_CHARACTERS = 60  # of the name of a class
MAX_SEED = 2**31 - 1
MOST = 10**6  # default limit of numbers
LINES = Field(_read_lines, ())  # lines of text, without empty ones
HEADS = Field(_read_heads, ())  # ablated heads: [site number, head, mode, scale], the last two free
TOKENS = Field(_read_tokens, {})  # {stream: [positions]} where heads are ablated; none: everywhere
CLASSES = Field(_read_classes, {})  # [site number, head, name] for each head with a class
SEED = integer(0, MAX_SEED, 0)

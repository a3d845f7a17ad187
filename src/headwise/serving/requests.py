"""A request: what is asked, what was answered so far, and the stream that its client reads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from time import perf_counter
from typing import NamedTuple

from ..cache import PagedSequence
from ..generation.decoding_config import DecodingConfig
from ..generation.text_output import Completion
from ..ops.counter_rng import RandomStream as Numbers
from .kv_memory import CacheSlot


class RequestTiming(NamedTuple):
    """When a request was handed in, and when its first and its last token came; 0 where none did."""

    submitted_at: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @property
    def wait(self) -> float:
        """Seconds until the first token."""
        return self.first - self.submitted_at

    @property
    def each(self) -> float:
        """Seconds from token to token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def after(self, now: float) -> RequestTiming:
        """The same with one token more."""
        return RequestTiming(self.submitted_at, self.first or now, now, self.tokens + 1)


@dataclass(eq=False)
class ServingRequest:
    """One that is answered, or waits to be.

    `ids` are what the model reads: the prompt and all that was said. `ended` is how it came to its end: "length",
    "stop", "cancelled" or "failed"; until then it is empty.
    """

    ids: list[int]
    source: list[int]
    count: int
    temperature: float
    how: DecodingConfig
    numbers: Numbers
    answer: Completion
    kind: str  # of the prompt: "text" or "ids"
    number: int = 0
    base: int = 0  # how many of the ids the model does not look back at any more
    said: int = 0
    told: list[int] = field(default_factory=list)
    ended: str = ""
    error: Exception | None = None
    cancelled: bool = False
    times_overtaken: int = 0
    place: CacheSlot | None = None
    timing: RequestTiming = field(default_factory=lambda: RequestTiming(perf_counter()))

    @property
    def tokens(self) -> int:
        """How many tokens are remembered of it at most: the last that it says is not read."""
        return len(self.ids) + self.count - self.said - 1

    @property
    def root(self) -> bytes:
        """What sets apart whose remembered tokens follow from more than their ids: another source."""
        return sha256(array("q", self.source).tobytes()).digest() if self.source else b""

    @property
    def placed(self) -> CacheSlot:
        """Where it is remembered."""
        assert self.place is not None, "it waits"
        return self.place

    @property
    def row(self) -> PagedSequence:
        """Its pages."""
        return self.placed.row

    @property
    def context(self) -> list[int]:
        """The ids that the model looks at."""
        return self.ids[self.base :] if self.base else self.ids

    @property
    def num_pending(self) -> int:
        """How many of its ids the model has not read."""
        return len(self.ids) - self.base - self.row.length

    @property
    def reads(self) -> bool:
        """Whether it is reading its prompt, and not only the token that it said last."""
        return not self.row.length or self.num_pending > 1

    def fail(self, error: Exception) -> None:
        """Let it end with this error."""
        self.ended, self.error = "failed", error
        self.answer.close()

    def take(self, token_id: int) -> None:
        """One token more."""
        self.ids.append(token_id)
        self.said += 1
        self.answer.take(token_id)
        self.timing = self.timing.after(perf_counter())
        if not self.answer.over and self.said == self.count:
            self.answer.close()
            self.ended = "length"
        if self.answer.over:
            self.ended = self.ended or "stop"
        self.told += self.answer.take_new_ids()


StepUntil = Callable[[Callable[[], bool]], None]


class RequestStream:
    """The tokens of one request as they come: an iterator of ids.

    Nobody waits for who reads it: what has come is kept until it is read, at most `max_new_tokens` ids. While nobody
    else drives the engine, reading does.
    """

    def __init__(
        self, request: ServingRequest, step_until: StepUntil, cancel: Callable[[ServingRequest], None]
    ) -> None:
        self._request, self._step_until, self._cancel, self._num_read = request, step_until, cancel, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._step_until(lambda: len(self._request.told) > self._num_read or bool(self._request.ended))
        if len(self._request.told) > self._num_read:
            self._num_read += 1
            return self._request.told[self._num_read - 1]
        if self._request.error is not None:
            raise self._request.error
        raise StopIteration

    @property
    def number(self) -> int:
        """Which request of its engine it is, counted from 0."""
        return self._request.number

    @property
    def ended(self) -> str:
        """How it ended: "length", "stop", "cancelled" or "failed"; empty while it goes on."""
        return self._request.ended

    @property
    def ids(self) -> list[int]:
        """All ids so far."""
        return list(self._request.told)

    @property
    def text(self) -> str:
        """The text so far, of a prompt that was text."""
        return self._request.answer.text

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        return self._request.error

    @property
    def timing(self) -> RequestTiming:
        """When it was handed in and when its tokens came."""
        return self._request.timing

    def result(self) -> list[int] | str:
        """All that is said, once it has ended: text for text, else ids; of a cancelled one what came before."""
        self._step_until(lambda: bool(self._request.ended))
        if self._request.error is not None:
            raise self._request.error
        return self.text if self._request.kind == "text" else self.ids

    def cancel(self) -> None:
        """Let it end now; what it holds is free at once, or when the step that runs is over."""
        self._cancel(self._request)

"""Requests with their prompts, options and outputs, and the order in which they are admitted and
grouped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from time import perf_counter
from typing import NamedTuple

from ..cache import PagedSequence
from ..generation.decoding_config import DecodingConfig
from ..generation.text_output import Completion
from ..ops.counter_rng import RandomStream as Numbers
from .kv_memory import BatchingConfig, CacheSlot

# --- Requests -------------------------------------------------------------------------------------


class RequestTiming(NamedTuple):
    """When a request was submitted, and when its first and last token arrived
    (0 if there is none).
    """

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
        """Return the timing after one more token, which arrived at `now`."""
        return RequestTiming(self.submitted_at, self.first or now, now, self.tokens + 1)


@dataclass(eq=False)
class ServingRequest:
    """A request that is waiting or running.

    `ids` are the prompt and the output so far; `num_output_ids` counts the output ids,
    `emitted_ids` are those that no stop text can take back. `ended` is "length", "stop",
    "cancelled" or "failed", and empty until then.
    """

    ids: list[int]
    source: list[int]
    count: int
    temperature: float
    config: DecodingConfig
    numbers: Numbers
    completion: Completion
    kind: str  # of the prompt: "text" or "ids"
    end_ids: frozenset[int] = frozenset()
    number: int = 0
    base: int = 0  # ids before this index have left the window
    num_output_ids: int = 0
    emitted_ids: list[int] = field(default_factory=list)
    ended: str = ""
    error: Exception | None = None
    cancelled: bool = False
    times_overtaken: int = 0
    place: CacheSlot | None = None
    timing: RequestTiming = field(default_factory=lambda: RequestTiming(perf_counter()))

    @property
    def tokens(self) -> int:
        """Maximum number of cached tokens; the last output token is never fed back."""
        return len(self.ids) + self.count - self.num_output_ids - 1

    @property
    def namespace(self) -> bytes:
        """Prefix namespace: rows with different sources share no prefix, because their caches
        differ for equal ids.
        """
        return sha256(array("q", self.source).tobytes()).digest() if self.source else b""

    @property
    def placed(self) -> CacheSlot:
        """Its cache slot; the request must be running."""
        assert self.place is not None, "it waits"
        return self.place

    @property
    def row(self) -> PagedSequence:
        """Its page table."""
        return self.placed.row

    @property
    def context(self) -> list[int]:
        """The ids that the model attends to."""
        return self.ids[self.base :] if self.base else self.ids

    @property
    def num_pending(self) -> int:
        """Number of ids that are not in the cache yet."""
        return len(self.ids) - self.base - self.row.length

    @property
    def is_prefilling(self) -> bool:
        """Whether it is still in prefill, with more than the last output token to read."""
        return not self.row.length or self.num_pending > 1

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.ended, self.error = "failed", error
        self.completion.close()

    def take(self, token_id: int) -> None:
        """Append an output token and update the end state."""
        self.ids.append(token_id)
        self.num_output_ids += 1
        self.completion.take(token_id)
        self.timing = self.timing.after(perf_counter())
        if not self.completion.over and self.num_output_ids == self.count:
            self.completion.close()
            self.ended = "length"
        if self.completion.over:
            self.ended = self.ended or "stop"
        self.emitted_ids += self.completion.take_new_ids()


StepUntil = Callable[[Callable[[], bool]], None]


class RequestStream:
    """Iterator over the ids of one request as they arrive.

    The engine never waits for the reader: ids are kept until they are read, at most
    `max_new_tokens`. Reading runs engine steps unless another thread does.
    """

    def __init__(
        self,
        request: ServingRequest,
        step_until: StepUntil,
        cancel: Callable[[ServingRequest], None],
    ) -> None:
        self._request, self._step_until, self._cancel, self._num_read = (
            request,
            step_until,
            cancel,
            0,
        )

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._step_until(
            lambda: len(self._request.emitted_ids) > self._num_read or bool(self._request.ended)
        )
        if len(self._request.emitted_ids) > self._num_read:
            self._num_read += 1
            return self._request.emitted_ids[self._num_read - 1]
        if self._request.error is not None:
            raise self._request.error
        raise StopIteration

    @property
    def number(self) -> int:
        """Index of the request in its engine, from 0."""
        return self._request.number

    @property
    def ended(self) -> str:
        """How it ended: "length", "stop", "cancelled" or "failed"; empty while it runs."""
        return self._request.ended

    @property
    def ids(self) -> list[int]:
        """All ids so far."""
        return list(self._request.emitted_ids)

    @property
    def text(self) -> str:
        """The text so far, if the prompt was text."""
        return self._request.completion.text

    @property
    def error(self) -> Exception | None:
        """Why it failed, if it did."""
        return self._request.error

    @property
    def timing(self) -> RequestTiming:
        """When it was submitted and when its tokens arrived."""
        return self._request.timing

    def result(self) -> list[int] | str:
        """Wait for the end and return the output: text for text, else ids. A cancelled request
        returns what it has.
        """
        self._step_until(lambda: bool(self._request.ended))
        if self._request.error is not None:
            raise self._request.error
        return self.text if self._request.kind == "text" else self.ids

    def cancel(self) -> None:
        """End the request; its memory is freed at once, or after the running step."""
        self._cancel(self._request)


# --- Scheduling -----------------------------------------------------------------------------------


def select_next_request(
    waiting: Sequence[ServingRequest], batching: BatchingConfig
) -> ServingRequest:
    """Return the request to admit next; the oldest goes first once it was overtaken `patience`
    times.
    """
    oldest = waiting[0]
    if batching.order == "arrival" or oldest.times_overtaken >= batching.patience:
        return oldest
    return min(waiting, key=lambda request: request.tokens)


def record_overtaking(waiting: Sequence[ServingRequest], chosen: ServingRequest) -> None:
    """Increment `times_overtaken` of each request that is older than the chosen one."""
    for request in waiting:
        if request.number < chosen.number:
            request.times_overtaken += 1


def split_prefill(
    pending: Iterable[int], chunk_size: int, min_first_chunk: int = 0
) -> Iterator[int]:
    """Yield how many tokens of each prompt a step prefills, in order, up to `chunk_size` in total.

    The first `min_first_chunk` tokens of a prompt must be in one step; they wait for a step with
    room, or go first in one even if they exceed it.

    >>> (
    ...     list(split_prefill([100, 3, 5], 64)),
    ...     list(split_prefill([5, 3, 70], 64)),
    ...     list(split_prefill([5, 3, 70], 64, min_first_chunk=60)),
    ... )
    ([64], [5, 3, 56], [5, 3])
    """
    remaining = chunk_size
    for number, count in enumerate(pending):
        least = min(count, min_first_chunk)
        num_tokens = max(min(count, remaining), 0 if number else least)
        if num_tokens < max(least, 1):
            return
        remaining -= num_tokens
        yield num_tokens


def split_by_size(sizes: Sequence[int], call_cost: float) -> list[int]:
    """Return the number of rows in each call, for rows sorted by decreasing size.

    A call costs as much as if all its rows had the size of the first. A call is split if that saves
    more than `call_cost`.

    >>> (
    ...     split_by_size([40, 39, 2, 2, 2, 1], call_cost=100),
    ...     split_by_size([40, 39, 2], call_cost=100),
    ... )
    ([2, 4], [3])
    """
    count = len(sizes)
    if count < 2:
        return [count] * count
    saved, at = max(((sizes[0] - sizes[n]) * (count - n), n) for n in range(1, count))
    return (
        [count]
        if saved <= call_cost
        else split_by_size(sizes[:at], call_cost) + split_by_size(sizes[at:], call_cost)
    )

"""Requests of an engine with their prompts, options and outputs, and how they are grouped in
calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from ...attention.cache import PagedSequence
from ...kernels.counter_rng import RandomStream as Numbers
from .decoding_config import DecodingConfig
from .kv_memory import CacheSlot
from .text_output import Completion

# --- Requests -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
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
    place: CacheSlot | None = None

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
        self.ended = "failed"
        self.error = error
        self.completion.close()

    def take(self, token_id: int) -> None:
        """Append an output token and update the end state."""
        self.ids.append(token_id)
        self.num_output_ids += 1
        self.completion.take(token_id)
        if not self.completion.over and self.num_output_ids == self.count:
            self.completion.close()
            self.ended = "length"
        if self.completion.over:
            self.ended = self.ended or "stop"
        self.emitted_ids += self.completion.take_new_ids()


class RequestStream:
    """Iterator over the ids of one request as they arrive; reading runs steps of the engine.

    Ids are kept until they are read, at most `max_new_tokens`.
    """

    def __init__(self, request: Request, step: Callable[[], object]) -> None:
        self._request = request
        self._step = step
        self._num_read = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while len(self._request.emitted_ids) == self._num_read and not self._request.ended:
            self._step()
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

    def result(self) -> list[int] | str:
        """Run the engine until the end and return the output: text for text, else ids. A cancelled
        request returns what it has.
        """
        while not self._request.ended:
            self._step()
        if self._request.error is not None:
            raise self._request.error
        return self.text if self._request.kind == "text" else self.ids

    def cancel(self) -> None:
        """End the request; the next step of the engine frees its memory."""
        self._request.ended = self._request.ended or "cancelled"


# --- Groups of requests ---------------------------------------------------------------------------


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

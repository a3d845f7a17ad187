"""Who is next: of those that wait, of prompts that are read, and of rows that are answered in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .kv_memory import BatchingConfig
from .requests import ServingRequest


def select_next_request(waiting: Sequence[ServingRequest], batching: BatchingConfig) -> ServingRequest:
    """Who is let in next; whoever came first and was overtaken often enough comes before all."""
    oldest = waiting[0]
    if batching.order == "arrival" or oldest.times_overtaken >= batching.patience:
        return oldest
    return min(waiting, key=lambda request: request.tokens)


def record_overtaking(waiting: Sequence[ServingRequest], chosen: ServingRequest) -> None:
    """Count those that came before who is let in."""
    for request in waiting:
        if request.number < chosen.number:
            request.times_overtaken += 1


def split_prefill(pending: Iterable[int], chunk_size: int, min_first_chunk: int = 0) -> Iterator[int]:
    """How many tokens of each prompt a step takes, in order, until they are `chunk`.

    The first `opening` tokens of a prompt must come together, and wait for a step that has room for them, or is theirs.

    >>> (
    ...     list(split_prefill([100, 3, 5], 64)),
    ...     list(split_prefill([5, 3, 70], 64)),
    ...     list(split_prefill([5, 3, 70], 64, min_first_chunk=60)),
    ... )
    ([64], [5, 3, 56], [5, 3])
    """
    left = chunk_size
    for number, count in enumerate(pending):
        least = min(count, min_first_chunk)
        taken = max(min(count, left), 0 if number else least)
        if taken < max(least, 1):
            return
        left -= taken
        yield taken


def split_by_size(sizes: Sequence[int], call_cost: float) -> list[int]:
    """How many rows share each call, of rows by their sizes, the largest first.

    Those of one call take as long as if all were as large as the first of them. They are divided where that saves more
    than a call is `worth`.

    >>> split_by_size([40, 39, 2, 2, 2, 1], call_cost=100), split_by_size([40, 39, 2], call_cost=100)
    ([2, 4], [3])
    """
    count = len(sizes)
    if count < 2:
        return [count] * count
    saved, at = max(((sizes[0] - sizes[n]) * (count - n), n) for n in range(1, count))
    return (
        [count] if saved <= call_cost else split_by_size(sizes[:at], call_cost) + split_by_size(sizes[at:], call_cost)
    )

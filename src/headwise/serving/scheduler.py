"""Scheduling policy: admission order, prefill chunks, and grouping of rows into model calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .kv_memory import BatchingConfig
from .requests import ServingRequest


def select_next_request(waiting: Sequence[ServingRequest], batching: BatchingConfig) -> ServingRequest:
    """Return the request to admit next; the oldest goes first once it was overtaken `patience` times."""
    oldest = waiting[0]
    if batching.order == "arrival" or oldest.times_overtaken >= batching.patience:
        return oldest
    return min(waiting, key=lambda request: request.tokens)


def record_overtaking(waiting: Sequence[ServingRequest], chosen: ServingRequest) -> None:
    """Increment `times_overtaken` of each request that is older than the chosen one."""
    for request in waiting:
        if request.number < chosen.number:
            request.times_overtaken += 1


def split_prefill(pending: Iterable[int], chunk_size: int, min_first_chunk: int = 0) -> Iterator[int]:
    """Yield how many tokens of each prompt a step prefills, in order, up to `chunk_size` in total.

    The first `min_first_chunk` tokens of a prompt must be in one step; they wait for a step with room, or go first in
    one even if they exceed it.

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
        taken = max(min(count, remaining), 0 if number else least)
        if taken < max(least, 1):
            return
        remaining -= taken
        yield taken


def split_by_size(sizes: Sequence[int], call_cost: float) -> list[int]:
    """Return the number of rows in each call, for rows sorted by decreasing size.

    A call costs as much as if all its rows had the size of the first. A call is split if that saves more than
    `call_cost`.

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

"""One piece of work done by us and by others: what is timed, what it is held to, and what the machine allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

LIMIT = "limit"  # the machine's own, where an aim names no peer

TimedCall = Callable[[], Any]  # does the work once; what it gives is compared with what ours gives


class MissingPeer(NamedTuple):
    """A peer that cannot run here, and why."""

    reason: str


class SpeedTarget(NamedTuple):
    """To be at least so many times as fast as a peer; of the machine's limit, to reach at least this share."""

    baseline: str
    ratio: float


class RequiredWork(NamedTuple):
    """What the work cannot do without: bytes read from memory, and FLOPs of products in one dtype."""

    bytes_read: int = 0
    flops: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class BenchmarkCase:
    """One row of the table.

    `tolerance` is how far what a peer gives may be from what ours gives, as a share of its largest number; None where
    they give nothing that can be compared, as a step of training. `tried` says, where an aim is known to be missed,
    what was tried and how far it got. `beside` names peers that do other work and stand for scale.
    """

    name: str
    ours: TimedCall
    peers: Mapping[str, TimedCall | MissingPeer]
    targets: tuple[SpeedTarget, ...] = ()
    required_work: RequiredWork | None = None
    tolerance: float | None = 1e-3
    history: str = ""
    reported_peers: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # more that is worth a line: memory, say

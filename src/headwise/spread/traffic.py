"""What ranks send each other in a step: counted from the description, and seen as collectives are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..blueprint import Model, Weight
from ..errors import SpecError
from .buckets import BYTES
from .mesh import Spread

FLOAT = 4  # bytes of a gradient, a weight, a loss


class Message(NamedTuple):
    """One collective among so many ranks; `held` are the bytes that each of them holds of it when it is whole."""

    kind: str
    held: int
    ranks: int

    @property
    def moved(self) -> float:
        """Bytes that a rank sends, in a ring: each of the n pieces goes to n - 1 others, in a sum there and back.

        >>> Message("gather", 12, 3).moved, Message("sum", 12, 3).moved
        (8.0, 16.0)
        """
        return (2 if self.kind == "sum" else 1) * self.held * (self.ranks - 1) / self.ranks


def traffic(described: Model, spread: Spread, parts: int = 1) -> list[Message]:
    """The messages of one step, a batch of it taken in so many parts, each tensor in single precision.

    >>> from headwise.blueprint import Block, Dense, Embedding, Head, Stack
    >>> stack = Stack.of("encoder", 3, [Block(feed=Dense(7))], embedding=Embedding(tokens=11))
    >>> net = Model("one", "encoder", (stack,), (Head("tokens", 11),))
    >>> numbers, tensors = 2 * 3 + 2 * 3 * 7 + 3 * 11 + 3 * 11, 6
    >>> traffic(net, Spread(data=2)) == [Message("sum", 4 * (numbers + tensors), 2), Message("sum", 4, 2)]
    True
    """
    for way in (way for way in vars(spread) if way not in ("data", "shards")):
        if getattr(spread, way) > 1:
            raise SpecError(f"what ranks send is not counted for {way}; measure it with a Meter")
    weights = {name: w for name, w in described.params().items() if w.learned}
    found = list(_sliced(described, weights, spread, parts)) if spread.shards > 1 else []
    kept = [w for w in weights.values() if spread.shards == 1 or _whole(w)]
    found += [Message("sum", FLOAT * numel, spread.size) for numel in _bucketed(kept)]
    return [*found, Message("sum", FLOAT, spread.size)] if spread.size > 1 else []


def _whole(weight: Weight) -> bool:
    return bool(weight.shared) or not weight.shape


def _bucketed(weights: Iterable[Weight]) -> Iterator[int]:
    """Numbers of each message of gradients: they are packed as they come, the last first."""
    held, count = 0, 0
    for weight in reversed(list(weights)):
        if count and (held + weight.numel) * FLOAT > BYTES:
            yield held + count
            held, count = 0, 0
        held, count = held + weight.numel, count + 1
    if count:
        yield held + count


def _sliced(described: Model, weights: Mapping[str, Weight], spread: Spread, parts: int) -> Iterator[Message]:
    """Layers are put together on the way there and on the way back, what stands around them once."""
    unread = tuple(f"head.{head.name}." for head in described.heads[1:])
    around: list[tuple[str, Weight]] = []
    layers: dict[str, list[tuple[str, Weight]]] = {}
    for name, weight in weights.items():
        where = ".".join(name.split(".")[:2])
        inside = where.partition(".")[2].isdigit()
        (layers.setdefault(where, []) if inside else around).append((name, weight))
    for group, times in [(around, 1), *((layer, 2) for layer in layers.values())]:
        sliced = [(name, weight) for name, weight in group if not _whole(weight)]
        learned = [weight for name, weight in sliced if not name.startswith(unread)]
        gathered = Message("gather", FLOAT * _padded([w for _, w in sliced], spread.shards), spread.shards)
        scattered = Message("scatter", FLOAT * _padded(learned, spread.shards), spread.shards)
        if not sliced:
            continue
        each = [*[gathered] * times, scattered]
        if spread.data > 1:
            each.append(Message("sum", scattered.held // spread.shards, spread.data))
        yield from each * parts


def _padded(weights: Iterable[Weight], ranks: int) -> int:
    """Numbers of these, each filled up to slices of the same size."""
    return sum(-(-w.shape[0] // ranks) * ranks * math.prod(w.shape[1:]) for w in weights)


# Which of its arguments a collective of c10d holds whole, by what it does.
CALLED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "allreduce_": ("sum", lambda args: args[0]),
    "_allgather_base_": ("gather", lambda args: args[0]),
    "allgather_": ("gather", lambda args: args[0]),
    "_reduce_scatter_base_": ("scatter", lambda args: args[1]),
}


class Meter(TorchDispatchMode):
    """Inside, every collective that this thread calls is written down as a message."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name not in CALLED:
                raise SpecError(f"a meter knows no collective {name!r}; it knows {', '.join(CALLED)}")
            kind, held = CALLED[name]
            ranks = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject))).size()
            self.messages.append(Message(kind, _bytes(held(args)), ranks))
        return func(*args, **(kwargs or {}))


def _bytes(held: Any) -> int:
    return held.nbytes if isinstance(held, Tensor) else sum(_bytes(one) for one in held)

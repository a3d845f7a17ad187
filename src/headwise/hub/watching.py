"""Standing by while attentions run, in this context alone and with nothing left on a model.

What a class does is replaced while anybody watches, and put back when nobody does; who watches which module is known to
the watcher's own context and to no other. So nothing is hung onto a model: a copy made meanwhile is clean, another
thread runs as if nobody watched, and an exception leaves nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Reading(NamedTuple):
    """How a head that speaks reads: its row of weights, and the values that these multiply."""

    row: int
    v_BSV: Tensor


@dataclass(frozen=True)
class Seen:
    """What an attention worked with: queries, keys and values by head, where they stood, and how they were compared.

    Scores are q k^T times `scale`, capped softly at `cap`, plus `bias`; a pair counts where `mask` is true, or where
    its number of `mask` is not minus infinity's stand-in, and if `causal` where the key is not ahead. `sinks` are
    scores of a key that no head can read, one for each head. `odd` says what else the layer was told, which this does
    not know of; then its weights cannot be computed again. `reads[h]` is the head of keys that head h reads, its
    neighbours' too where nothing is said. `stands` are the numbers of the keys among all tokens, -1 for
    a place without one, where those are known.
    """

    q_BTHK: Tensor
    k_BSGK: Tensor
    v_BSGV: Tensor
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    bias: Tensor | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    odd: str = ""
    reads: tuple[int, ...] | None = None
    stands: Tensor | None = None

    @property
    def told(self) -> Seen | None:
        """Itself, if that is all."""
        return None if self.odd else self

    def reader(self, head: int) -> int:
        """The head of keys that a head reads."""
        heads, groups = self.q_BTHK.shape[2], self.k_BSGK.shape[2]
        return head * groups // heads if self.reads is None else self.reads[head]

    def rows(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S], computed again in float32 or finer.

        >>> q = torch.zeros(1, 2, 1, 3)
        >>> Seen(q, q, q, 1.0, causal=True).rows(0)
        tensor([[[1.0000, 0.0000],
                 [0.5000, 0.5000]]])
        """
        if self.odd:
            raise ValueError(f"weights cannot be computed again: {self.odd}; read them from the model's own")
        heads = self.q_BTHK.shape[2]
        if not 0 <= head < heads:
            raise ValueError(f"there is no head {head} of {heads}; give one in 0..{heads - 1}")
        return self._of((head,)).every(queries)[:, 0]

    def _of(self, heads: tuple[int, ...]) -> Seen:
        """The same of some heads."""
        those = list(heads)
        grids = {
            name: grid[..., those, :, :] if grid is not None and grid.dim() > 2 and grid.shape[-3] > 1 else grid
            for name, grid in (("mask", self.mask), ("bias", self.bias))
        }
        sinks = None if self.sinks is None else self.sinks.flatten()[those]
        reads = tuple(self.reader(head) for head in heads)
        return replace(self, q_BTHK=self.q_BTHK[:, :, those], sinks=sinks, reads=reads, **grids)

    def every(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]; of `keys` that are all they may read, if not all."""
        if self.odd:
            raise ValueError(f"weights cannot be computed again: {self.odd}; read them from the model's own")
        s_BHTS = self._compared(queries, keys)
        if self.cap is not None:
            s_BHTS = self.cap * torch.tanh(s_BHTS / self.cap)
        for grid in self._added(queries, keys):
            s_BHTS = s_BHTS + grid
        for grid in self._barred(queries, keys):
            some = grid.flatten(0, -2).any(0).nonzero()  # others are not gone through
            columns = slice(int(some[0]), int(some[-1]) + 1) if len(some) else slice(0)
            s_BHTS[..., columns].masked_fill_(grid[..., columns], -torch.inf)
        if self.sinks is None:
            none = s_BHTS.amax(-1, keepdim=True) == -torch.inf  # a query that may read nothing reads nothing
            w_BHTS = s_BHTS.softmax(-1)
            return w_BHTS.masked_fill(none, 0) if bool(none.any()) else w_BHTS
        sink = self.sinks.flatten().to(s_BHTS.dtype)[:, None, None].expand(*s_BHTS.shape[:3], 1)
        return torch.cat([s_BHTS, sink], -1).softmax(-1)[..., :-1]

    def allowed(self, queries: slice = slice(None)) -> Tensor:
        """Which keys some queries may read, [B, H or 1, T, S]."""
        q_BTHK, k_BSGK = self.q_BTHK, self.k_BSGK
        count = len(range(q_BTHK.shape[1])[queries])
        allowed = torch.ones(q_BTHK.shape[0], 1, count, k_BSGK.shape[1], dtype=torch.bool, device=q_BTHK.device)
        if added := self._added(queries, slice(None)):
            allowed = allowed & (sum(added[1:], added[0]) > MUTE)
        for grid in self._barred(queries, slice(None)):
            allowed = allowed & ~grid
        return allowed

    def _compared(self, queries: slice, keys: slice) -> Tensor:
        """Scaled products; heads that share keys with their neighbours are rows of one product."""
        q_BHTK = _exact(self.q_BTHK[:, queries].transpose(1, 2)) * self.scale
        k_BGSK, heads = _exact(self.k_BSGK[:, keys].transpose(1, 2)), q_BHTK.shape[1]
        if self.reads is not None or heads % k_BGSK.shape[1]:
            k_BGSK = k_BGSK[:, [self.reader(head) for head in range(heads)]]
        rows = q_BHTK.unflatten(1, (k_BGSK.shape[1], -1)).flatten(2, 3)
        return (rows @ k_BGSK.transpose(2, 3)).unflatten(2, (-1, q_BHTK.shape[2])).flatten(1, 2)

    def _added(self, queries: slice, keys: slice) -> list[Tensor]:
        """What is added to scores."""
        grids = [self.bias, None if self.mask is None or self.mask.dtype == torch.bool else self.mask]
        return [_exact(self._some(grid, queries, keys)) for grid in grids if grid is not None]

    def _barred(self, queries: slice, keys: slice) -> list[Tensor]:
        """Pairs that do not count."""
        grids = []
        if self.causal:
            place, key = (torch.arange(of.shape[1], device=of.device) for of in (self.q_BTHK, self.k_BSGK))
            grids.append(key[keys] > place[queries, None])
        if self.mask is not None and self.mask.dtype == torch.bool:
            grids.append(~self._some(self.mask, queries, keys))
        return grids

    def _some(self, grid: Tensor, queries: slice, keys: slice) -> Tensor:
        """[B or 1, heads or 1, T or 1, S or 1] of a tensor of as many axes or fewer, which may know of more keys."""
        grid = grid[(None,) * (4 - grid.dim())]
        grid = grid[:, :, queries] if grid.shape[2] > 1 else grid
        return grid[..., : self.k_BSGK.shape[1]][..., keys] if grid.shape[3] > 1 else grid

    def reading(self, head: int) -> Reading:
        """What a head reads, whatever it compares."""
        if self.odd:
            raise ValueError(f"what is read is not known: {self.odd}; nothing can stand for it")
        return Reading(head, self.v_BSGV[:, :, self.reader(head)])


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Core(Protocol):
    """What an attention worked with, as far as it can be told; good while the call lasts, for caches write over it."""

    def every(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]; of `keys` that are all they may read, if not all."""
        ...

    def allowed(self, queries: slice = slice(None)) -> Tensor:
        """Which keys some queries may read, [B, H or 1, T, S]."""
        ...

    def reading(self, head: int) -> Reading:
        """What a head that speaks reads, whatever it compares; refused where that is not seen."""
        ...

    @property
    def told(self) -> Seen | None:
        """All of it as tensors, if tensors can say it."""
        ...

    @property
    def stands(self) -> Tensor | None:
        """The numbers of its keys among all tokens, -1 for a place without one, where those are known."""
        ...

    def rows(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        ...


class Watcher(Protocol):
    """Who watches one attention.

    `wants_core` says whether it wants to see what the attention works with; `heads` is given what each head read,
    [B, T, heads, width], before the merge, and what it returns takes its place.
    """

    wants_core: bool

    def core(self, seen: Core) -> None:
        """Look at what the attention works with."""
        ...

    def heads(self, z: Tensor) -> Tensor | None:
        """Look at what heads say, or change it."""
        ...


MUTE = -1e4  # what adds this or less to a score is meant as a mask

Watching = Mapping[nn.Module, tuple[Watcher, ...]]
NOBODY: Watching = MappingProxyType({})
_WATCHED: ContextVar[Watching] = ContextVar("watched", default=NOBODY)


def watchers(module: nn.Module) -> tuple[Watcher, ...]:
    """Who watches this module here and now."""
    return _WATCHED.get().get(module, ())


def anybody() -> bool:
    """Whether anybody watches anything in this context."""
    return bool(_WATCHED.get())


def changed(those: Sequence[Watcher], z: Tensor) -> Tensor:
    """What heads say after everybody has had a look; the last to have come looks last."""
    for watcher in those:
        other = watcher.heads(z)
        z = z if other is None else other
    return z


class Holding(ABC):
    """Something that is otherwise while anybody watches, however many they are."""

    def __init__(self) -> None:
        self._holders, self._lock = 0, Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While this lasts it is otherwise; the first to come changes it, the last to go puts it back."""
        with self._lock:
            if not self._holders:
                self.change()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self.restore()

    @abstractmethod
    def change(self) -> None:
        """Make it otherwise."""

    @abstractmethod
    def restore(self) -> None:
        """Put it back."""


class Stand(Holding):
    """A method of a class that watching replaces: `around(original)` stands there while anybody watches."""

    def __init__(self, owner: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__()
        self.owner, self.name, self.around = owner, name, around
        self._inherits = name not in vars(owner)
        self._original: Callable[..., Any] = getattr(owner, name)

    def change(self) -> None:
        self._original = getattr(self.owner, self.name)
        setattr(self.owner, self.name, wraps(self._original)(self.around(self._original)))

    def restore(self) -> None:
        if self._inherits:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._original)


@contextmanager
def watching(who: Watching, stands: Sequence[Holding]) -> Iterator[None]:
    """Let these watch these modules, in this context; whoever watches already goes on."""
    now = dict(_WATCHED.get())
    for module, those in who.items():
        now[module] = (*now.get(module, ()), *those)
    with ExitStack() as stack:
        for stand in stands:
            stack.enter_context(stand.taken())
        token = _WATCHED.set(now)
        try:
            yield
        finally:
            _WATCHED.reset(token)

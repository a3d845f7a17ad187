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
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Reading(NamedTuple):
    """How a head that speaks reads: its row of weights, the values these multiply, and which keys a query may read."""

    row: int
    v_BSV: Tensor
    readable_BTS: Tensor


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
        """The weights of one head for some queries, [B, T, S], computed again in float32.

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
        q_BTK = self.q_BTHK[:, queries, head].float()
        k_BSK = self.k_BSGK[:, :, self.reader(head)].float()
        s_BTS = q_BTK @ k_BSK.transpose(1, 2) * self.scale
        if self.cap is not None:
            s_BTS = self.cap * torch.tanh(s_BTS / self.cap)
        if self.bias is not None:
            s_BTS = s_BTS + _of(self.bias, head, queries).float()
        s_BTS = self._masked(s_BTS, head, queries)
        if self.sinks is None:
            return s_BTS.softmax(-1)
        sink = self.sinks.flatten()[head].float().expand(*s_BTS.shape[:2], 1)
        return torch.cat([s_BTS, sink], -1).softmax(-1)[..., :-1]

    def reading(self, head: int) -> Reading:
        """What a head reads, whatever it compares.

        >>> q = torch.zeros(1, 2, 1, 3)
        >>> Seen(q, q, q, 1.0, causal=True).reading(0).readable_BTS
        tensor([[[ True, False],
                 [ True,  True]]])
        """
        if self.odd:
            raise ValueError(f"what may be read is not known: {self.odd}; nothing can stand for it")
        level_BTS = torch.zeros(*self.q_BTHK.shape[:2], self.k_BSGK.shape[1], device=self.q_BTHK.device)
        least = self.mask.dtype if self.mask is not None and self.mask.is_floating_point() else level_BTS.dtype
        readable_BTS = self._masked(level_BTS, head, slice(None)) > torch.finfo(least).min / 2
        return Reading(head, self.v_BSGV[:, :, self.reader(head)], readable_BTS)

    def _masked(self, s_BTS: Tensor, head: int, queries: slice) -> Tensor:
        if self.causal:
            place = torch.arange(self.q_BTHK.shape[1], device=s_BTS.device)[queries]
            ahead = torch.arange(s_BTS.shape[-1], device=s_BTS.device) > place[:, None]
            s_BTS = s_BTS.masked_fill(ahead, -torch.inf)
        if self.mask is None:
            return s_BTS
        mask = _of(self.mask, head, queries)
        mask = mask[..., : s_BTS.shape[-1]]
        return s_BTS.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s_BTS + mask.float()


def _of(grid: Tensor, head: int, queries: slice) -> Tensor:
    """[B or 1, T, S] of a tensor [B or 1, heads or 1, T or 1, S] for one head."""
    one = grid[:, head if grid.shape[1] > 1 else 0]
    return one[:, queries] if one.shape[1] > 1 else one


class Core(Protocol):
    """What an attention worked with, as far as it can be told; good while the call lasts, for caches write over it."""

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

    def reading(self, head: int) -> Reading:
        """What one head reads, whatever it compares; refused where that is not seen."""
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

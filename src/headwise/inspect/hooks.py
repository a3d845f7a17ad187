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

from .site import Site


class HeadValues(NamedTuple):
    """How a head that speaks reads: its row of weights, and the values that these multiply."""

    score_head: int
    v_BSV: Tensor


@dataclass(frozen=True)
class AttentionInputs:
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
    softcap: float | None = None
    sinks: Tensor | None = None
    unsupported: str = ""
    kv_head_of_query: tuple[int, ...] | None = None
    key_positions: Tensor | None = None

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """Itself, if that is all."""
        return None if self.unsupported else self

    def kv_head_of(self, head: int) -> int:
        """The head of keys that a head reads."""
        heads, groups = self.q_BTHK.shape[2], self.k_BSGK.shape[2]
        return head * groups // heads if self.kv_head_of_query is None else self.kv_head_of_query[head]

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S], computed again in float32 or finer.

        >>> q = torch.zeros(1, 2, 1, 3)
        >>> AttentionInputs(q, q, q, 1.0, causal=True).head_weights(0)
        tensor([[[1.0000, 0.0000],
                 [0.5000, 0.5000]]])
        """
        if self.unsupported:
            raise ValueError(f"weights cannot be computed again: {self.unsupported}; read them from the model's own")
        heads = self.q_BTHK.shape[2]
        if not 0 <= head < heads:
            raise ValueError(f"there is no head {head} of {heads}; give one in 0..{heads - 1}")
        return self._select_heads((head,)).all_weights(queries)[:, 0]

    def _select_heads(self, heads: tuple[int, ...]) -> AttentionInputs:
        """The same of some heads."""
        those = list(heads)
        grids = {
            name: grid[..., those, :, :] if grid is not None and grid.dim() > 2 and grid.shape[-3] > 1 else grid
            for name, grid in (("mask", self.mask), ("bias", self.bias))
        }
        sinks = None if self.sinks is None else self.sinks.flatten()[those]
        reads = tuple(self.kv_head_of(head) for head in heads)
        return replace(self, q_BTHK=self.q_BTHK[:, :, those], sinks=sinks, kv_head_of_query=reads, **grids)

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]; of `keys` that are all they may read, if not all."""
        if self.unsupported:
            raise ValueError(f"weights cannot be computed again: {self.unsupported}; read them from the model's own")
        s_BHTS = self._scaled_products(queries, keys)
        if self.softcap is not None:
            s_BHTS = self.softcap * torch.tanh(s_BHTS / self.softcap)
        for grid in self._score_biases(queries, keys):
            s_BHTS = s_BHTS + grid
        for grid in self._masked_pairs(queries, keys):
            some = grid.flatten(0, -2).any(0).nonzero()  # others are not gone through
            columns = slice(int(some[0]), int(some[-1]) + 1) if len(some) else slice(0)
            s_BHTS[..., columns].masked_fill_(grid[..., columns], -torch.inf)
        if self.sinks is None:
            none = s_BHTS.amax(-1, keepdim=True) == -torch.inf  # a query that may read nothing reads nothing
            w_BHTS = s_BHTS.softmax(-1)
            return w_BHTS.masked_fill(none, 0) if bool(none.any()) else w_BHTS
        sink = self.sinks.flatten().to(s_BHTS.dtype)[:, None, None].expand(*s_BHTS.shape[:3], 1)
        return torch.cat([s_BHTS, sink], -1).softmax(-1)[..., :-1]

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Which keys some queries may read, [B, H or 1, T, S]."""
        q_BTHK, k_BSGK = self.q_BTHK, self.k_BSGK
        count = len(range(q_BTHK.shape[1])[queries])
        allowed = torch.ones(q_BTHK.shape[0], 1, count, k_BSGK.shape[1], dtype=torch.bool, device=q_BTHK.device)
        if added := self._score_biases(queries, slice(None)):
            allowed = allowed & (sum(added[1:], added[0]) > MASK_THRESHOLD)
        for grid in self._masked_pairs(queries, slice(None)):
            allowed = allowed & ~grid
        return allowed

    def _scaled_products(self, queries: slice, keys: slice) -> Tensor:
        """Scaled products; heads that share keys with their neighbours are rows of one product."""
        q_BHTK = _to_float32(self.q_BTHK[:, queries].transpose(1, 2)) * self.scale
        k_BGSK, heads = _to_float32(self.k_BSGK[:, keys].transpose(1, 2)), q_BHTK.shape[1]
        if self.kv_head_of_query is not None or heads % k_BGSK.shape[1]:
            k_BGSK = k_BGSK[:, [self.kv_head_of(head) for head in range(heads)]]
        rows = q_BHTK.unflatten(1, (k_BGSK.shape[1], -1)).flatten(2, 3)
        return (rows @ k_BGSK.transpose(2, 3)).unflatten(2, (-1, q_BHTK.shape[2])).flatten(1, 2)

    def _score_biases(self, queries: slice, keys: slice) -> list[Tensor]:
        """What is added to scores."""
        grids = [self.bias, None if self.mask is None or self.mask.dtype == torch.bool else self.mask]
        return [_to_float32(self._slice_grid(grid, queries, keys)) for grid in grids if grid is not None]

    def _masked_pairs(self, queries: slice, keys: slice) -> list[Tensor]:
        """Pairs that do not count."""
        grids = []
        if self.causal:
            place, key = (torch.arange(of.shape[1], device=of.device) for of in (self.q_BTHK, self.k_BSGK))
            grids.append(key[keys] > place[queries, None])
        if self.mask is not None and self.mask.dtype == torch.bool:
            grids.append(~self._slice_grid(self.mask, queries, keys))
        return grids

    def _slice_grid(self, grid: Tensor, queries: slice, keys: slice) -> Tensor:
        """[B or 1, heads or 1, T or 1, S or 1] of a tensor of as many axes or fewer, which may know of more keys."""
        grid = grid[(None,) * (4 - grid.dim())]
        grid = grid[:, :, queries] if grid.shape[2] > 1 else grid
        return grid[..., : self.k_BSGK.shape[1]][..., keys] if grid.shape[3] > 1 else grid

    def head_values(self, head: int) -> HeadValues:
        """What a head reads, whatever it compares."""
        if self.unsupported:
            raise ValueError(f"what is read is not known: {self.unsupported}; nothing can stand for it")
        return HeadValues(head, self.v_BSGV[:, :, self.kv_head_of(head)])


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class AttentionCall(Protocol):
    """What an attention worked with, as far as it can be told; good while the call lasts, for caches write over it."""

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]; of `keys` that are all they may read, if not all."""
        ...

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Which keys some queries may read, [B, H or 1, T, S]."""
        ...

    def head_values(self, head: int) -> HeadValues:
        """What a head that speaks reads, whatever it compares; refused where that is not seen."""
        ...

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """All of it as tensors, if tensors can say it."""
        ...

    @property
    def key_positions(self) -> Tensor | None:
        """The numbers of its keys among all tokens, -1 for a place without one, where those are known."""
        ...

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        ...


class AttentionHook(Protocol):
    """Who watches one attention.

    `wants_core` says whether it wants to see what the attention works with; `heads` is given what each head read,
    [B, T, heads, width], before the merge, and what it returns takes its place.
    """

    needs_call: bool

    def on_call(self, call: AttentionCall, /) -> None:
        """Look at what the attention works with."""
        ...

    def on_head_outputs(self, outputs: Tensor, /) -> Tensor | None:
        """Look at what heads say, or change it."""
        ...


MASK_THRESHOLD = -1e4  # what adds this or less to a score is meant as a mask

HooksByModule = Mapping[nn.Module, tuple[AttentionHook, ...]]
NO_HOOKS: HooksByModule = MappingProxyType({})
_ACTIVE_HOOKS: ContextVar[HooksByModule] = ContextVar("watched", default=NO_HOOKS)


def get_hooks(module: nn.Module) -> tuple[AttentionHook, ...]:
    """Who watches this module here and now."""
    return _ACTIVE_HOOKS.get().get(module, ())


def has_hooks() -> bool:
    """Whether anybody watches anything in this context."""
    return bool(_ACTIVE_HOOKS.get())


def run_output_hooks(hooks: Sequence[AttentionHook], outputs: Tensor) -> Tensor:
    """What heads say after everybody has had a look; the last to have come looks last."""
    for watcher in hooks:
        other = watcher.on_head_outputs(outputs)
        outputs = outputs if other is None else other
    return outputs


class SharedPatch(ABC):
    """Something that is otherwise while anybody watches, however many they are."""

    def __init__(self) -> None:
        self._holders, self._lock = 0, Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this lasts it is otherwise; the first to come changes it, the last to go puts it back."""
        with self._lock:
            if not self._holders:
                self.apply()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self.revert()

    @abstractmethod
    def apply(self) -> None:
        """Make it otherwise."""

    @abstractmethod
    def revert(self) -> None:
        """Put it back."""


class MethodPatch(SharedPatch):
    """A method of a class that watching replaces: `around(original)` stands there while anybody watches."""

    def __init__(self, owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__()
        self.owner, self.name, self.wrapper = owner, name, wrapper
        self._inherits = name not in vars(owner)
        self._original: Callable[..., Any] = getattr(owner, name)

    def apply(self) -> None:
        self._original = getattr(self.owner, self.name)
        setattr(self.owner, self.name, wraps(self._original)(self.wrapper(self._original)))

    def revert(self) -> None:
        if self._inherits:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._original)


@contextmanager
def install_hooks(hooks: HooksByModule, patches: Sequence[SharedPatch]) -> Iterator[None]:
    """Let these watch these modules, in this context; whoever watches already goes on."""
    now = dict(_ACTIVE_HOOKS.get())
    for module, those in hooks.items():
        now[module] = (*now.get(module, ()), *those)
    with ExitStack() as stack:
        for stand in patches:
            stack.enter_context(stand.active())
        token = _ACTIVE_HOOKS.set(now)
        try:
            yield
        finally:
            _ACTIVE_HOOKS.reset(token)


# --- What a way into attentions is ---------------------------------------------------------------------


class SiteModule(NamedTuple):
    """A site, the module that one watches there, and the way that leads to it.

    A module may serve several sites: this one is its call number `call` of the `calls` in a forward.
    """

    site: Site
    module: nn.Module
    adapter: SiteAdapter
    call_index: int = 0
    calls_per_forward: int = 1


class SiteAdapter(ABC):
    """One way into attentions."""

    @abstractmethod
    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        """The sites of a model that this way leads to."""

    @abstractmethod
    def patches(self) -> Sequence[SharedPatch]:
        """What is replaced while somebody watches."""

    def visible_tensors(self, module: nn.Module) -> str:
        """What one sees there: "scores", what they are computed of, or the "weights" alone."""
        return "weights"


class WeightsOnlyCall:
    """What an attention worked with, where its weights [B, H, T, S] are at hand."""

    attention_inputs = key_positions = None

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """The weights of one head for some queries, [B, T, S]."""
        return self.weights[:, head, queries]

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The weights of all heads for some queries, [B, H, T, S]."""
        return self.weights[:, :, queries, keys]

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Where any head has a weight: who may read whom was not told."""
        return (self.weights[:, :, queries] != 0).any(1, keepdim=True)

    def head_values(self, head: int) -> HeadValues:
        """Refused."""
        raise ValueError("only weights are seen here, not the values that they multiply; give this head a mean instead")

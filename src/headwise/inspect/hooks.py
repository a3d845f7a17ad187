"""Hooks on attention layers that are local to the current context and leave nothing on the model.

While at least one hook is active, methods of classes are patched; afterwards they are restored. Which module has which
hooks is stored in a context variable, not on the model. So a copy of the model made meanwhile has no hooks, other
threads run without them, and an exception leaves nothing behind.
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
    """What an output head reads: the score head whose weights it uses, and its values."""

    score_head: int
    v_BSV: Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one attention call: queries, keys and values by head, mask, and how scores are computed.

    Scores are q k^T times `scale`, soft-capped at `softcap`, plus `bias`. `mask` is boolean (true: attend) or added to
    scores; with `causal`, keys after the query are masked. `sinks` are additional scores without a value, one per
    head. `unsupported` names arguments of the layer that this class cannot represent; the weights cannot be recomputed
    then. `kv_head_of_query[h]` is the KV head of head h (None: equal groups of neighbouring heads). `key_positions`
    are the positions of the keys in the text, -1 for an empty slot, or None if they are unknown.
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
        """These inputs if the weights can be recomputed from them, else None."""
        return None if self.unsupported else self

    def kv_head_of(self, head: int) -> int:
        """KV head of a query head."""
        heads, groups = self.q_BTHK.shape[2], self.k_BSGK.shape[2]
        return head * groups // heads if self.kv_head_of_query is None else self.kv_head_of_query[head]

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Attention weights of one head for a range of queries, [B, T, S], recomputed in float32 or float64.

        >>> q = torch.zeros(1, 2, 1, 3)
        >>> AttentionInputs(q, q, q, 1.0, causal=True).head_weights(0)
        tensor([[[1.0000, 0.0000],
                 [0.5000, 0.5000]]])
        """
        if self.unsupported:
            raise ValueError(
                f"cannot recompute weights: {self.unsupported}; read the weights that the model itself returns"
            )
        heads = self.q_BTHK.shape[2]
        if not 0 <= head < heads:
            raise ValueError(f"there is no head {head}; give one in 0..{heads - 1}")
        return self._select_heads((head,)).all_weights(queries)[:, 0]

    def _select_heads(self, heads: tuple[int, ...]) -> AttentionInputs:
        """Inputs restricted to some heads."""
        indices = list(heads)
        masks = {
            name: grid[..., indices, :, :] if grid is not None and grid.dim() > 2 and grid.shape[-3] > 1 else grid
            for name, grid in (("mask", self.mask), ("bias", self.bias))
        }
        sinks = None if self.sinks is None else self.sinks.flatten()[indices]
        kv_heads = tuple(self.kv_head_of(head) for head in heads)
        return replace(self, q_BTHK=self.q_BTHK[:, :, indices], sinks=sinks, kv_head_of_query=kv_heads, **masks)

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Attention weights of all heads for a range of queries, [B, H, T, S]. `keys` must include all allowed keys."""
        if self.unsupported:
            raise ValueError(
                f"cannot recompute weights: {self.unsupported}; read the weights that the model itself returns"
            )
        s_BHTS = self._scaled_products(queries, keys)
        if self.softcap is not None:
            s_BHTS = self.softcap * torch.tanh(s_BHTS / self.softcap)
        for mask in self._score_biases(queries, keys):
            s_BHTS = s_BHTS + mask
        for mask in self._masked_pairs(queries, keys):
            masked_columns = mask.flatten(0, -2).any(0).nonzero()  # skip columns that are masked for no query
            columns = slice(int(masked_columns[0]), int(masked_columns[-1]) + 1) if len(masked_columns) else slice(0)
            s_BHTS[..., columns].masked_fill_(mask[..., columns], -torch.inf)
        if self.sinks is None:
            fully_masked = (
                s_BHTS.amax(-1, keepdim=True) == -torch.inf
            )  # a query without any allowed key has weights of zero
            w_BHTS = s_BHTS.softmax(-1)
            return w_BHTS.masked_fill(fully_masked, 0) if bool(fully_masked.any()) else w_BHTS
        sink = self.sinks.flatten().to(s_BHTS.dtype)[:, None, None].expand(*s_BHTS.shape[:3], 1)
        return torch.cat([s_BHTS, sink], -1).softmax(-1)[..., :-1]

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Boolean mask of the keys that a range of queries may attend to, [B, H or 1, T, S]."""
        q_BTHK, k_BSGK = self.q_BTHK, self.k_BSGK
        count = len(range(q_BTHK.shape[1])[queries])
        allowed = torch.ones(q_BTHK.shape[0], 1, count, k_BSGK.shape[1], dtype=torch.bool, device=q_BTHK.device)
        if biases := self._score_biases(queries, slice(None)):
            allowed = allowed & (sum(biases[1:], biases[0]) > MASK_THRESHOLD)
        for excluded in self._masked_pairs(queries, slice(None)):
            allowed = allowed & ~excluded
        return allowed

    def _scaled_products(self, queries: slice, keys: slice) -> Tensor:
        """Scaled products q k^T; the heads of a KV group are computed in one matrix product."""
        q_BHTK = _to_float32(self.q_BTHK[:, queries].transpose(1, 2)) * self.scale
        k_BGSK, heads = _to_float32(self.k_BSGK[:, keys].transpose(1, 2)), q_BHTK.shape[1]
        if self.kv_head_of_query is not None or heads % k_BGSK.shape[1]:
            k_BGSK = k_BGSK[:, [self.kv_head_of(head) for head in range(heads)]]
        rows = q_BHTK.unflatten(1, (k_BGSK.shape[1], -1)).flatten(2, 3)
        return (rows @ k_BGSK.transpose(2, 3)).unflatten(2, (-1, q_BHTK.shape[2])).flatten(1, 2)

    def _score_biases(self, queries: slice, keys: slice) -> list[Tensor]:
        """Biases and additive masks, which are added to scores."""
        biases = [self.bias, None if self.mask is None or self.mask.dtype == torch.bool else self.mask]
        return [_to_float32(self._slice_mask(bias, queries, keys)) for bias in biases if bias is not None]

    def _masked_pairs(self, queries: slice, keys: slice) -> list[Tensor]:
        """Boolean masks of the pairs to exclude."""
        masks = []
        if self.causal:
            query_positions, key_positions = (
                torch.arange(tensor.shape[1], device=tensor.device) for tensor in (self.q_BTHK, self.k_BSGK)
            )
            masks.append(key_positions[keys] > query_positions[queries, None])
        if self.mask is not None and self.mask.dtype == torch.bool:
            masks.append(~self._slice_mask(self.mask, queries, keys))
        return masks

    def _slice_mask(self, mask: Tensor, queries: slice, keys: slice) -> Tensor:
        """Slice a mask as [B or 1, heads or 1, T or 1, S or 1]; adds missing axes and drops columns beyond the keys."""
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[:, :, queries] if mask.shape[2] > 1 else mask
        return mask[..., : self.k_BSGK.shape[1]][..., keys] if mask.shape[3] > 1 else mask

    def head_values(self, head: int) -> HeadValues:
        """Score head and values of an output head."""
        if self.unsupported:
            raise ValueError(f"values of this layer are unknown: {self.unsupported}; give this head a mean instead")
        return HeadValues(head, self.v_BSGV[:, :, self.kv_head_of(head)])


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class AttentionCall(Protocol):
    """Interface to the inputs of one attention call. Valid only during the call, because caches overwrite tensors."""

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Attention weights of all heads for a range of queries, [B, H, T, S]. `keys` must include all allowed keys."""
        ...

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Boolean mask of the keys that a range of queries may attend to, [B, H or 1, T, S]."""
        ...

    def head_values(self, head: int) -> HeadValues:
        """Score head and values of an output head; raises if the values cannot be observed."""
        ...

    @property
    def attention_inputs(self) -> AttentionInputs | None:
        """The inputs as tensors, if the weights can be recomputed from them, else None."""
        ...

    @property
    def key_positions(self) -> Tensor | None:
        """Positions of the keys in the text, -1 for an empty slot; None if they are unknown."""
        ...

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Attention weights of one head for a range of queries, [B, T, S]."""
        ...


class AttentionHook(Protocol):
    """Interface of an observer of one attention layer.

    With `needs_call`, `on_call` gets the inputs of the attention. `on_head_outputs` gets the head outputs
    [B, T, heads, head_dim] before the output projection; a tensor that it returns replaces them.
    """

    needs_call: bool

    def on_call(self, call: AttentionCall, /) -> None:
        """Observe the inputs of the attention."""
        ...

    def on_head_outputs(self, outputs: Tensor, /) -> Tensor | None:
        """Observe the head outputs; return a tensor to replace them, or None."""
        ...


MASK_THRESHOLD = -1e4  # a bias of this or less is treated as a mask

HooksByModule = Mapping[nn.Module, tuple[AttentionHook, ...]]
NO_HOOKS: HooksByModule = MappingProxyType({})
_ACTIVE_HOOKS: ContextVar[HooksByModule] = ContextVar("watched", default=NO_HOOKS)


def get_hooks(module: nn.Module) -> tuple[AttentionHook, ...]:
    """Hooks on this module in the current context."""
    return _ACTIVE_HOOKS.get().get(module, ())


def has_hooks() -> bool:
    """Whether any module has hooks in the current context."""
    return bool(_ACTIVE_HOOKS.get())


def run_output_hooks(hooks: Sequence[AttentionHook], outputs: Tensor) -> Tensor:
    """Run the hooks in the order of installation; each gets the outputs that the one before it returned."""
    for hook in hooks:
        replacement = hook.on_head_outputs(outputs)
        outputs = outputs if replacement is None else replacement
    return outputs


class SharedPatch(ABC):
    """Patch with a reference count: applied while at least one context uses it."""

    def __init__(self) -> None:
        self._holders, self._lock = 0, Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the patch is applied; the first to enter applies it, the last to leave reverts it."""
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
        """Apply the patch."""

    @abstractmethod
    def revert(self) -> None:
        """Restore the original state."""


class MethodPatch(SharedPatch):
    """Replaces a method of a class by `wrapper(original)` while applied."""

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
    """Context in which these modules have these hooks, in addition to those already installed."""
    active = dict(_ACTIVE_HOOKS.get())
    for module, module_hooks in hooks.items():
        active[module] = (*active.get(module, ()), *module_hooks)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch.active())
        token = _ACTIVE_HOOKS.set(active)
        try:
            yield
        finally:
            _ACTIVE_HOOKS.reset(token)


# --- Interface of adapters --------------------------------------------------------------------------------


class SiteModule(NamedTuple):
    """A site, the module that is hooked there, and its adapter.

    A module may serve several sites: this site is call number `call_index` of its `calls_per_forward` calls.
    """

    site: Site
    module: nn.Module
    adapter: SiteAdapter
    call_index: int = 0
    calls_per_forward: int = 1


class SiteAdapter(ABC):
    """Base class of adapters: finds one kind of attention module and makes it observable."""

    @abstractmethod
    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        """Yield the sites of a model that this adapter supports."""

    @abstractmethod
    def patches(self) -> Sequence[SharedPatch]:
        """Patches that must be active for hooks on these modules to run."""

    def visible_tensors(self, module: nn.Module) -> str:
        """What hooks can observe at a module: "scores" (their inputs: queries, keys, masks), or only the "weights"."""
        return "weights"


class WeightsOnlyCall:
    """An attention call whose inputs are unknown, except for its weights [B, H, T, S]."""

    attention_inputs = key_positions = None

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Attention weights of one head for a range of queries, [B, T, S]."""
        return self.weights[:, head, queries]

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Attention weights of all heads for a range of queries, [B, H, T, S]."""
        return self.weights[:, :, queries, keys]

    def allowed_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Pairs where any head has a nonzero weight, because the mask is unknown."""
        return (self.weights[:, :, queries] != 0).any(1, keepdim=True)

    def head_values(self, head: int) -> HeadValues:
        """Raises, because values are unknown."""
        raise ValueError(
            "only the weights of this layer can be observed, not its values; give this head a mean instead"
        )

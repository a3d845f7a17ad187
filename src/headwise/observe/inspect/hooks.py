"""Hooks on attention layers that are local to the current context and leave nothing on the model.

While at least one hook is active, methods of classes are patched; afterwards they are restored.
Which module has which hooks is stored in a context variable, not on the model. So a copy of the
model made meanwhile has no hooks, other threads run without them, and an exception leaves nothing
behind.

A forward call here is a call of the model, or of a part of it, that is not inside another such
call. It is an error if a hooked module was replaced meanwhile, if it runs more often per forward
call than it has sites, or if it never ran although the model did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...attention.parts.feature_map import to_at_least_float32
from ...models import Transformer
from ...models.generation.decoding_config import DecodingConfig
from ...models.generation.generate import generate
from .method_patches import (
    EAGER_STANCE,
    ForwardOverride,
    MethodPatch,
    SharedPatch,
    forward_patches,
    override_forwards,
)
from .model_inputs import ModelInputs
from .site import Site


class HeadValues(NamedTuple):
    """Inputs of an output head: the row of weights that it uses, and its values."""

    row: int
    v_BSV: Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of one attention call: queries, keys and values by head, mask, and how scores are
    computed.

    Scores are q k^T times `scale`, soft-capped at `softcap`, plus `bias`. `mask` is boolean (true:
    attend) or added to scores; with `causal`, keys after the query are masked. `sinks` are
    additional scores without a value, one per head. `unsupported` names arguments of the layer that
    this class cannot represent; the weights cannot be recomputed then. `kv_head_of_query[h]` is the
    KV head of head h (None: equal groups of neighbouring heads). `key_positions` are the positions
    of the keys in the text, -1 for an empty slot, or None if they are unknown.
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
        heads = self.q_BTHK.shape[2]
        groups = self.k_BSGK.shape[2]
        return (
            head * groups // heads if self.kv_head_of_query is None else self.kv_head_of_query[head]
        )

    def head_weights(self, head: int, queries: slice = slice(None)) -> Tensor:
        """Attention weights of one head for a range of queries, [B, T, S], recomputed in float32 or
        float64.

        >>> q = torch.zeros(1, 2, 1, 3)
        >>> AttentionInputs(q, q, q, 1.0, causal=True).head_weights(0)
        tensor([[[1.0000, 0.0000],
                 [0.5000, 0.5000]]])
        """
        if self.unsupported:
            raise ValueError(
                f"cannot recompute weights: {self.unsupported}; read the weights that the model "
                "itself returns"
            )
        heads = self.q_BTHK.shape[2]
        if not 0 <= head < heads:
            raise ValueError(f"there is no head {head}; give one in 0..{heads - 1}")
        return self._select_heads((head,)).all_weights(queries)[:, 0]

    def _select_heads(self, heads: tuple[int, ...]) -> AttentionInputs:
        """Inputs restricted to some heads."""
        indices = list(heads)
        masks = {
            name: grid[..., indices, :, :]
            if grid is not None and grid.dim() > 2 and grid.shape[-3] > 1
            else grid
            for name, grid in (("mask", self.mask), ("bias", self.bias))
        }
        sinks = None if self.sinks is None else self.sinks.flatten()[indices]
        kv_heads = tuple(self.kv_head_of(head) for head in heads)
        return replace(
            self, q_BTHK=self.q_BTHK[:, :, indices], sinks=sinks, kv_head_of_query=kv_heads, **masks
        )

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Attention weights of all heads for a range of queries, [B, H, T, S]. `keys` must include
        all allowed keys.
        """
        if self.unsupported:
            raise ValueError(
                f"cannot recompute weights: {self.unsupported}; read the weights that the model "
                "itself returns"
            )
        s_BHTS = self._scaled_products(queries, keys)
        if self.softcap is not None:
            s_BHTS = self.softcap * torch.tanh(s_BHTS / self.softcap)
        for mask in self._score_biases(queries, keys):
            s_BHTS = s_BHTS + mask
        for mask in self._masked_pairs(queries, keys):
            masked_columns = (
                mask.flatten(0, -2).any(0).nonzero()
            )  # skip columns that are masked for no query
            columns = (
                slice(int(masked_columns[0]), int(masked_columns[-1]) + 1)
                if len(masked_columns)
                else slice(0)
            )
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
        q_BTHK = self.q_BTHK
        k_BSGK = self.k_BSGK
        count = len(range(q_BTHK.shape[1])[queries])
        allowed = torch.ones(
            q_BTHK.shape[0], 1, count, k_BSGK.shape[1], dtype=torch.bool, device=q_BTHK.device
        )
        biases = self._score_biases(queries, slice(None))
        if biases:
            allowed = allowed & (sum(biases[1:], biases[0]) > MASK_THRESHOLD)
        for excluded in self._masked_pairs(queries, slice(None)):
            allowed = allowed & ~excluded
        return allowed

    def _scaled_products(self, queries: slice, keys: slice) -> Tensor:
        """Scaled products q k^T; the heads of a KV group are computed in one matrix product."""
        q_BHTK = to_at_least_float32(self.q_BTHK[:, queries].transpose(1, 2)) * self.scale
        k_BGSK = to_at_least_float32(self.k_BSGK[:, keys].transpose(1, 2))
        heads = q_BHTK.shape[1]
        if self.kv_head_of_query is not None or heads % k_BGSK.shape[1]:
            k_BGSK = k_BGSK[:, [self.kv_head_of(head) for head in range(heads)]]
        rows = q_BHTK.unflatten(1, (k_BGSK.shape[1], -1)).flatten(2, 3)
        return (rows @ k_BGSK.transpose(2, 3)).unflatten(2, (-1, q_BHTK.shape[2])).flatten(1, 2)

    def _score_biases(self, queries: slice, keys: slice) -> list[Tensor]:
        """Biases and additive masks, which are added to scores."""
        biases = [
            self.bias,
            None if self.mask is None or self.mask.dtype == torch.bool else self.mask,
        ]
        return [
            to_at_least_float32(self._slice_mask(bias, queries, keys))
            for bias in biases
            if bias is not None
        ]

    def _masked_pairs(self, queries: slice, keys: slice) -> list[Tensor]:
        """Boolean masks of the pairs to exclude."""
        masks = []
        if self.causal:
            query_positions, key_positions = (
                torch.arange(tensor.shape[1], device=tensor.device)
                for tensor in (self.q_BTHK, self.k_BSGK)
            )
            masks.append(key_positions[keys] > query_positions[queries, None])
        if self.mask is not None and self.mask.dtype == torch.bool:
            masks.append(~self._slice_mask(self.mask, queries, keys))
        return masks

    def _slice_mask(self, mask: Tensor, queries: slice, keys: slice) -> Tensor:
        """Slice a mask as [B or 1, heads or 1, T or 1, S or 1]; adds missing axes and drops columns
        beyond the keys.
        """
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask[:, :, queries] if mask.shape[2] > 1 else mask
        return mask[..., : self.k_BSGK.shape[1]][..., keys] if mask.shape[3] > 1 else mask

    def head_values(self, head: int) -> HeadValues:
        """Score head and values of an output head."""
        if self.unsupported:
            raise ValueError(
                f"values of this layer are unknown: {self.unsupported}; give this head a mean "
                "instead"
            )
        return HeadValues(head, self.v_BSGV[:, :, self.kv_head_of(head)])


class ObservedCall(Protocol):
    """Interface to the inputs and weights of one attention call of any model, which
    `AttentionHook.on_call` receives.

    It is valid only during the call, because caches overwrite tensors.
    """

    def all_weights(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Attention weights of all heads for a range of queries, [B, H, T, S]. `keys` must include
        all allowed keys.
        """
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

    With `needs_call`, `on_call` gets the inputs of the attention. `on_head_outputs` gets the head
    outputs [B, T, heads, head_dim] before the output projection; a tensor that it returns replaces
    them.
    """

    needs_call: bool

    def on_call(self, call: ObservedCall, /) -> None:
        """Observe the inputs of the attention."""
        ...

    def on_head_outputs(self, outputs: Tensor, /) -> Tensor | None:
        """Observe the head outputs; return a tensor to replace them, or None."""
        ...


class OutputHook:
    """Base class of observers of head outputs alone."""

    needs_call = False

    def on_call(self, call: ObservedCall) -> None:
        """Ignore the inputs of the attention."""


MASK_THRESHOLD = -1e4  # a bias of this or less is treated as a mask

HooksByModule = Mapping[nn.Module, tuple[AttentionHook, ...]]
NO_HOOKS: HooksByModule = MappingProxyType({})
_ACTIVE_HOOKS: ContextVar[HooksByModule] = ContextVar("active_hooks", default=NO_HOOKS)


def get_hooks(module: nn.Module) -> tuple[AttentionHook, ...]:
    """Hooks on this module in the current context."""
    return _ACTIVE_HOOKS.get().get(module, ())


def has_hooks() -> bool:
    """Whether any module has hooks in the current context."""
    return bool(_ACTIVE_HOOKS.get())


def run_output_hooks(hooks: Sequence[AttentionHook], outputs: Tensor) -> Tensor:
    """Run the hooks in the order of installation; each gets the outputs that the one before it
    returned.
    """
    for hook in hooks:
        replacement = hook.on_head_outputs(outputs)
        outputs = outputs if replacement is None else replacement
    return outputs


@contextmanager
def install_hooks(
    hooks: HooksByModule, patches: Sequence[SharedPatch], overrides: Sequence[ForwardOverride] = ()
) -> Iterator[None]:
    """Context in which these modules have these hooks and overrides, in addition to those already
    installed.
    """
    active = dict(_ACTIVE_HOOKS.get())
    for module, module_hooks in hooks.items():
        active[module] = (*active.get(module, ()), *module_hooks)
    with ExitStack() as stack:
        for patch in (EAGER_STANCE, *patches, *forward_patches(overrides)):
            stack.enter_context(patch.active())
        stack.enter_context(override_forwards(overrides))
        token = _ACTIVE_HOOKS.set(active)
        try:
            yield
        finally:
            _ACTIVE_HOOKS.reset(token)


# --- Interface of adapters ------------------------------------------------------------------------


class SiteModule(NamedTuple):
    """A site, the module that is hooked there, and its adapter.

    A module may serve several sites: this site is call number `call_index` of its
    `calls_per_forward` calls. `overrides` replace the forward of modules while the site has hooks.
    """

    site: Site
    module: nn.Module
    adapter: SiteAdapter
    call_index: int = 0
    calls_per_forward: int = 1
    overrides: tuple[ForwardOverride, ...] = ()


class SiteAdapter(ABC):
    """Base class of adapters: finds one kind of attention module and makes it observable.

    Finding changes nothing, because another adapter may be preferred for the same module.
    """

    @abstractmethod
    def find_sites(self, model: nn.Module) -> Iterator[SiteModule]:
        """Yield the sites of a model that this adapter supports."""

    def patches(self) -> Sequence[SharedPatch]:
        """Patches that must be active for hooks on these modules to run."""
        return ()

    def visible_tensors(self, module: nn.Module) -> str:
        """The tensors that hooks can observe at a module: "scores" (and queries, keys, masks), or
        only "weights".
        """
        return "weights"


class WeightsOnlyCall:
    """`ObservedCall` of which only the attention weights [B, H, T, S] are known, not queries, keys
    and values.
    """

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
            "only the weights of this layer can be observed, not its values; give this head a "
            "mean instead"
        )


# --- Hooks at the sites of a model ----------------------------------------------------------------


class SiteHooks:
    """The hooks at the sites of a model, and counts of the calls there."""

    def __init__(
        self,
        model: nn.Module,
        site_modules: Sequence[SiteModule],
        observers: Mapping[str, AttentionHook],
    ) -> None:
        self.model = model
        self.adapters = list(dict.fromkeys(site_module.adapter for site_module in site_modules))
        self.hook_of_module = {
            site_module.module: SiteHook(self, site_module, site_modules, observers)
            for site_module in reversed(site_modules)
        }
        paths = model.named_modules(remove_duplicate=False)
        self.module_of_path = {
            path: module for path, module in paths if module in self.hook_of_module
        }
        self.modules_below: dict[
            nn.Module, set[nn.Module]
        ] = {}  # module -> hooked modules inside it
        for path, module in self.module_of_path.items():
            for ancestor in _ancestors(model, path):
                self.modules_below.setdefault(ancestor, set()).add(module)
        for hook in self.hook_of_module.values():
            self.modules_below.setdefault(hook.site, set())
        self.num_forwards = Counter[nn.Module]()
        self.num_calls = Counter[nn.Module]()
        self.num_site_calls = Counter[
            nn.Module
        ]()  # calls of the modules whose projections are hooked
        self.last_queries: ModuleQueries | None = None

    def begin_forward(self) -> Counter[nn.Module]:
        """Start a forward call: returns an empty counter of module calls; raises if a hooked module
        was replaced.
        """
        replaced = [
            path
            for path, module in self.module_of_path.items()
            if _get_module(self.model, path) is not module
        ]
        if replaced:
            raise ValueError(
                f"{replaced[0] or 'the model'} was replaced while it had hooks; replace modules "
                "before or after the "
                "context"
            )
        if torch.is_grad_enabled() and any(map(_recomputes, self.model.modules())):
            raise ValueError(
                "hooks do not support activation checkpointing: the backward pass runs layers "
                "again, perhaps without "
                "hooks; switch checkpointing off"
            )
        return Counter()

    def end_forward(self, root: nn.Module, calls: Counter[nn.Module]) -> None:
        """End a forward call: a module with several sites must have run once for each, or never."""
        self.last_queries = None
        for module in self.modules_below[root]:
            self.num_forwards[module] += 1
            hook = self.hook_of_module[module]
            count = calls[self.hook_of_module[module].site]
            self.num_site_calls[module] += count
            if hook.calls_per_forward > 1 and count not in (0, hook.calls_per_forward):
                raise ValueError(
                    f"{hook.name} is a module of {hook.calls_per_forward} depths, but ran {count} "
                    "times in one "
                    "forward call; run the whole model"
                )

    def check_all_ran(self) -> None:
        """Raise if a hooked module never ran although a forward call that contains it did."""
        for module, hook in self.hook_of_module.items():
            if not self.num_forwards[module] or self.num_calls[module]:
                continue
            if self.num_site_calls[module] and hook.site is not module:
                raise ValueError(
                    f"{hook.name} ran, but its output projection never ran as a module, so its "
                    "hook did nothing; call "
                    "hw.sites(model, example), which finds attention without its projection"
                )
            raise ValueError(
                f"{hook.name} never ran, though its model did (forwards: "
                f"{self.num_forwards[module]}), so its "
                "hook did nothing; name sites that this input reaches"
            )


class ModuleQueries(NamedTuple):
    """The queries of an attention, and the call of its module: number
    `num_call` of a forward call.
    """

    site: nn.Module
    forward: Counter[nn.Module]
    num_call: int
    q_BTHK: Tensor

    def has_same_tokens(self, other: ModuleQueries) -> bool:
        """True if the same queries are used again in the same call of the module."""
        is_same_call = (
            self.forward is other.forward
            and self.num_call == other.num_call
            and self.site is other.site
        )
        return is_same_call and self.q_BTHK.is_set_to(other.q_BTHK)


class SiteHook:
    """Hook on one module that passes each call to the observer of the depth that it belongs to."""

    def __init__(
        self,
        site_hooks: SiteHooks,
        site_module: SiteModule,
        site_modules: Sequence[SiteModule],
        observers: Mapping[str, AttentionHook],
    ) -> None:
        self.site_hooks = site_hooks
        self.module = site_module.module
        self.site = site_hooks.model.get_submodule(site_module.site.path)
        self.calls_per_forward = site_module.calls_per_forward
        self.name = site_module.site.name
        self.hook_of_call = {
            other.call_index: observers[other.site.name]
            for other in site_modules
            if other.module is site_module.module
        }
        self.needs_call = any(observer.needs_call for observer in self.hook_of_call.values())

    def on_call(self, call: ObservedCall) -> None:
        """Pass the inputs to the observer of the current depth."""
        observer = self.hook_of_call.get(self._call_index())
        if observer is not None and observer.needs_call:
            self._check_queries(call)
            observer.on_call(call)

    def _check_queries(self, call: ObservedCall) -> None:
        """Raise if the module has computed attention for these queries in the same call of its
        forward.
        """
        forward = _RUNNING_FORWARDS.get().get(self.site_hooks)
        inputs = call.attention_inputs
        if forward is None or inputs is None:
            return
        queries = ModuleQueries(self.site, forward, forward[self.site], inputs.q_BTHK)
        last = self.site_hooks.last_queries
        self.site_hooks.last_queries = queries
        if last is not None and queries.has_same_tokens(last):
            raise ValueError(
                f"{self.name} computes attention several times for the same queries in one "
                "forward call, so its heads "
                "cannot be told apart; declare the heads of its output projection with hw.declare"
            )

    def on_head_outputs(self, z: Tensor) -> Tensor | None:
        """Pass the outputs to the observer of the current depth."""
        observer = self.hook_of_call.get(self._call_index())
        self.site_hooks.num_calls[self.module] += 1
        return None if observer is None else observer.on_head_outputs(z)

    def _call_index(self) -> int:
        """Number of this call among the calls of the module in the running forward call."""
        forward = _RUNNING_FORWARDS.get().get(self.site_hooks)
        index = 0 if forward is None else forward[self.site] - 1
        if self.calls_per_forward > 1 and (forward is None or index < 0):
            raise ValueError(
                f"{self.name} was called outside a forward call of its model; call the model itself"
            )
        if index >= self.calls_per_forward:
            raise ValueError(
                f"{self.name} runs more than {self.calls_per_forward} times in one forward call, "
                "so its depth is "
                "unknown; give the part of the model that runs it once"
            )
        return max(index, 0)


RunningForwards = Mapping[SiteHooks, Counter[nn.Module] | None]
_RUNNING_FORWARDS: ContextVar[RunningForwards] = ContextVar(
    "running_forwards", default=MappingProxyType({})
)
_FORWARD_PATCHES: dict[type, MethodPatch] = {}


@contextmanager
def hook_sites(
    model: nn.Module, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]
) -> Iterator[SiteHooks]:
    """Context in which observers are installed at sites by name; call `check_all_ran` on the result
    afterwards.
    """
    site_hooks = SiteHooks(
        model, [site_module for site_module in sites if site_module.site.name in hooks], hooks
    )
    patches: list[SharedPatch] = [
        _forward_patch(module_type)
        for module_type in dict.fromkeys(map(type, site_hooks.modules_below))
    ]
    for adapter in site_hooks.adapters:
        patches += adapter.patches()
    overrides = [
        override
        for site_module in sites
        if site_module.site.name in hooks
        for override in site_module.overrides
    ]
    hooks_by_module = {module: (hook,) for module, hook in site_hooks.hook_of_module.items()}
    with install_hooks(hooks_by_module, patches, overrides):
        token = _RUNNING_FORWARDS.set({**_RUNNING_FORWARDS.get(), site_hooks: None})
        try:
            yield site_hooks
        finally:
            _RUNNING_FORWARDS.reset(token)


def _forward_patch(kind: type) -> MethodPatch:
    return _FORWARD_PATCHES.setdefault(
        kind, MethodPatch(kind, "__call__", partial(_wrap_forward, kind))
    )


def _ancestors(model: nn.Module, path: str) -> list[nn.Module]:
    """Modules along a path, from the model to the end of the path."""
    parts = path.split(".") if path else []
    return [model.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]


def _get_module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _wrap_forward(kind: type, original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not kind:  # a subclass, which has a patch of its own
            return original(self, *args, **kwargs)
        running = _RUNNING_FORWARDS.get()
        started = {
            site_hooks: site_hooks.begin_forward()
            for site_hooks, forward in running.items()
            if forward is None and self in site_hooks.modules_below
        }
        running = {**running, **started}
        for forward in running.values():
            if forward is not None:
                forward[self] += 1
        if not started:
            return original(self, *args, **kwargs)
        token = _RUNNING_FORWARDS.set(running)
        try:
            output = original(self, *args, **kwargs)
        finally:
            _RUNNING_FORWARDS.reset(token)
        for site_hooks, calls in started.items():
            site_hooks.end_forward(self, calls)
        return output

    return __call__


def _recomputes(module: nn.Module) -> bool:
    """Whether a module uses activation checkpointing, of headwise or of transformers."""
    transformers_checkpointing = module.training and bool(
        getattr(module, "gradient_checkpointing", False)
    )
    return transformers_checkpointing or getattr(module, "checkpointing", "none") == "block"


# --- Run a model with hooks -----------------------------------------------------------------------


class ModelRun(NamedTuple):
    """A model, its inputs, and the number of tokens to generate."""

    model: nn.Module
    inputs: ModelInputs
    max_new_tokens: int = 0

    def run_with_hooks(
        self, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]
    ) -> Any:
        """Run the model with these hooks, and return its output."""
        with hook_sites(self.model, sites, hooks), torch.inference_mode():
            return self.run()

    def run(self) -> Any:
        """Run the model, and return its output, or the generated tokens if
        `max_new_tokens` is set.
        """
        model = self.model
        inputs = self.inputs
        try:
            if not self.max_new_tokens:
                return model(*inputs.args, **inputs.kwargs)
            if isinstance(model, Transformer):
                # with several rows no end token, because finished rows would leave the batch
                config = DecodingConfig(end=() if inputs.batch_size > 1 else None)
                return generate(
                    model, inputs.prompt_ids, max_new_tokens=self.max_new_tokens, config=config
                )
            generate_method: Any = getattr(model, "generate", None)
            if generate_method is None:
                raise ValueError(
                    f"{type(model).__name__} cannot generate tokens; leave max_new_tokens out"
                )
            return generate_method(
                **inputs.kwargs, max_new_tokens=self.max_new_tokens, do_sample=False
            )
        except IndexError as error:
            raise ValueError(
                f"{type(model).__name__} cannot run these inputs: {error}; check for ids beyond "
                "its vocabulary "
                "and for more tokens than it has positions"
            ) from None

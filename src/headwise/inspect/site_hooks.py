"""Install hooks at the sites of a model, route each call to the hook of its depth, and detect hooks that never ran.

A forward call here is a call of the model, or of a part of it, that is not inside another such call. It is an error if
a hooked module was replaced meanwhile, if it runs more often per forward call than it has sites, or if it never ran
although the model did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..generation.decoding_config import DecodingConfig
from ..generation.generate import generate
from ..models import Transformer
from .hooks import AttentionCall, AttentionHook, MethodPatch, SharedPatch, SiteModule, install_hooks
from .model_inputs import ModelInputs


class SiteHooks:
    """The hooks at the sites of a model, and counts of the calls there."""

    def __init__(
        self, model: nn.Module, site_modules: Sequence[SiteModule], observers: Mapping[str, AttentionHook]
    ) -> None:
        self.model, self.adapters = model, list(dict.fromkeys(site_module.adapter for site_module in site_modules))
        self.hook_of_module = {
            site_module.module: SiteHook(self, site_module, site_modules, observers)
            for site_module in reversed(site_modules)
        }
        paths = model.named_modules(remove_duplicate=False)
        self.module_of_path = {path: module for path, module in paths if module in self.hook_of_module}
        self.modules_below: dict[nn.Module, set[nn.Module]] = {}  # module -> hooked modules inside it
        for path, module in self.module_of_path.items():
            for ancestor in _ancestors(model, path):
                self.modules_below.setdefault(ancestor, set()).add(module)
        for hook in self.hook_of_module.values():
            self.modules_below.setdefault(hook.site, set())
        self.num_forwards, self.num_calls = Counter[nn.Module](), Counter[nn.Module]()

    def begin_forward(self) -> Counter[nn.Module]:
        """Start a forward call: returns an empty counter of module calls; raises if a hooked module was replaced."""
        if replaced := [
            path for path, module in self.module_of_path.items() if _get_module(self.model, path) is not module
        ]:
            raise ValueError(
                f"{replaced[0] or 'the model'} was replaced while it had hooks; replace modules before or after the "
                "context"
            )
        if torch.is_grad_enabled() and any(map(_recomputes, self.model.modules())):
            raise ValueError(
                "hooks do not support activation checkpointing: the backward pass runs layers again, perhaps without "
                "hooks; switch checkpointing off"
            )
        return Counter()

    def end_forward(self, root: nn.Module, calls: Counter[nn.Module]) -> None:
        """End a forward call: a module with several sites must have run once for each, or never."""
        for module in self.modules_below[root]:
            self.num_forwards[module] += 1
            hook, count = self.hook_of_module[module], calls[self.hook_of_module[module].site]
            if hook.calls_per_forward > 1 and count not in (0, hook.calls_per_forward):
                raise ValueError(
                    f"{hook.name} is a module of {hook.calls_per_forward} depths, but ran {count} times in one "
                    "forward call; run the whole model"
                )

    def check_all_ran(self) -> None:
        """Raise if a hooked module never ran although a forward call that contains it did."""
        for module, hook in self.hook_of_module.items():
            if self.num_forwards[module] and not self.num_calls[module]:
                raise ValueError(
                    f"{hook.name} never ran, though its model did (forwards: {self.num_forwards[module]}), so its "
                    "hook did nothing; name sites that this input reaches"
                )


class SiteHook:
    """Hook on one module that passes each call to the observer of the depth that it belongs to."""

    def __init__(
        self,
        site_hooks: SiteHooks,
        site_module: SiteModule,
        site_modules: Sequence[SiteModule],
        observers: Mapping[str, AttentionHook],
    ) -> None:
        self.site_hooks, self.module = site_hooks, site_module.module
        self.site = site_hooks.model.get_submodule(site_module.site.path)
        self.calls_per_forward, self.name = site_module.calls_per_forward, site_module.site.name
        self.hook_of_call = {
            other.call_index: observers[other.site.name] for other in site_modules if other.module is site_module.module
        }
        self.needs_call = any(observer.needs_call for observer in self.hook_of_call.values())

    def on_call(self, call: AttentionCall) -> None:
        """Pass the inputs to the observer of the current depth."""
        observer = self.hook_of_call.get(self._call_index())
        if observer is not None and observer.needs_call:
            observer.on_call(call)

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
            raise ValueError(f"{self.name} was called outside a forward call of its model; call the model itself")
        if index >= self.calls_per_forward:
            raise ValueError(
                f"{self.name} runs more than {self.calls_per_forward} times in one forward call, so its depth is "
                "unknown; give the part of the model that runs it once"
            )
        return max(index, 0)


RunningForwards = Mapping[SiteHooks, Counter[nn.Module] | None]
_RUNNING_FORWARDS: ContextVar[RunningForwards] = ContextVar("forwards", default=MappingProxyType({}))
_FORWARD_PATCHES: dict[type, MethodPatch] = {}


@contextmanager
def hook_sites(
    model: nn.Module, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]
) -> Iterator[SiteHooks]:
    """Context in which observers are installed at sites by name; call `check_all_ran` on the result afterwards."""
    site_hooks = SiteHooks(model, [site_module for site_module in sites if site_module.site.name in hooks], hooks)
    patches: list[SharedPatch] = [
        _forward_patch(module_type) for module_type in dict.fromkeys(map(type, site_hooks.modules_below))
    ]
    for adapter in site_hooks.adapters:
        patches += adapter.patches()
    with install_hooks({module: (hook,) for module, hook in site_hooks.hook_of_module.items()}, patches):
        token = _RUNNING_FORWARDS.set({**_RUNNING_FORWARDS.get(), site_hooks: None})
        try:
            yield site_hooks
        finally:
            _RUNNING_FORWARDS.reset(token)


def _forward_patch(kind: type) -> MethodPatch:
    return _FORWARD_PATCHES.setdefault(kind, MethodPatch(kind, "__call__", partial(_wrap_forward, kind)))


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
    transformers_checkpointing = module.training and bool(getattr(module, "gradient_checkpointing", False))
    return transformers_checkpointing or getattr(module, "checkpointing", "none") == "block"


# --- Run a model with hooks --------------------------------------------------------------------------------


class ModelRun(NamedTuple):
    """A model, its inputs, and the number of tokens to generate."""

    model: nn.Module
    inputs: ModelInputs
    max_new_tokens: int = 0

    def run_with_hooks(self, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]) -> Any:
        """Run the model with these hooks, and return its output."""
        with hook_sites(self.model, sites, hooks), torch.inference_mode():
            return self.run()

    def run(self) -> Any:
        """Run the model, and return its output, or the generated tokens if `max_new_tokens` is set."""
        model, inputs = self.model, self.inputs
        try:
            if not self.max_new_tokens:
                return model(*inputs.args, **inputs.kwargs)
            if isinstance(model, Transformer):
                # with several rows no end token, because finished rows would leave the batch
                config = DecodingConfig(end=() if inputs.batch_size > 1 else None)
                return generate(model, inputs.prompt_ids, max_new_tokens=self.max_new_tokens, config=config)
            generate_method: Any = getattr(model, "generate", None)
            if generate_method is None:
                raise ValueError(f"{type(model).__name__} cannot generate tokens; leave max_new_tokens out")
            return generate_method(**inputs.kwargs, max_new_tokens=self.max_new_tokens, do_sample=False)
        except IndexError as error:
            raise ValueError(
                f"{type(model).__name__} cannot run these inputs: {error}; check for ids beyond its vocabulary "
                "and for more tokens than it has positions"
            ) from None

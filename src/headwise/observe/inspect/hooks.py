"""Record runs: hook attention layers, and record the calls of any module.

While at least one hook is active, methods of classes are patched; afterwards they are restored.
Which module has which hooks, or an override of its forward, is stored in a context variable, not on
the model. So a copy of the model made meanwhile has no hooks, other threads run without them, and
an exception leaves nothing behind.

A forward call here is a call of the model, or of a part of it, that is not inside another such
call. It is an error if a hooked module was replaced meanwhile, if it runs more often per forward
call than it has sites, or if it never ran although the model did.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .model_inputs import ModelInputs, prepare_inputs, run_prepared
from .site import HeadVectors, ObservedCall, Site

# --- Patches of methods that several users share --------------------------------------------------

Function = Callable[..., Any]


class SharedPatch:
    """Share a context between users: the first one enters it, and the last one leaves it."""

    def __init__(self, make_context: Callable[[], AbstractContextManager[None]]) -> None:
        self.make_context = make_context
        self._users = 0
        self._lock = Lock()
        self._stack = ExitStack()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Apply the patch while the context is open."""
        with self._lock:
            if not self._users:
                self._stack.enter_context(self.make_context())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._stack.close()


def patch_method(owner: type, name: str, wrapper: Callable[[Function], Function]) -> SharedPatch:
    """Make the patch that replaces a method of a class by `wrapper(original)`."""
    return SharedPatch(partial(_replaced_method, owner, name, wrapper))


@contextmanager
def _replaced_method(
    owner: type, name: str, wrapper: Callable[[Function], Function]
) -> Iterator[None]:
    is_inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(wrapper(original)))
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


COMPILING_MODULES = ("torch._dynamo", "torch.nn.attention.flex_attention")


@contextmanager
def _eager_stance() -> Iterator[None]:
    """Make torch run compiled functions and modules eagerly: a compiled graph would skip hooks.

    It does nothing in a process that has imported neither torch's compiler nor flex_attention,
    which compiles itself: importing the compiler takes seconds.
    """
    if any(name in sys.modules for name in COMPILING_MODULES):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


EAGER_STANCE = SharedPatch(_eager_stance)

# --- Overrides of the forward of single modules ---------------------------------------------------


class ForwardOverride(NamedTuple):
    """Run `function(module, run, args, kwargs, *options)` instead of a module's forward, `run`.

    Equal overrides of nested contexts run once.
    """

    module: nn.Module
    function: Function
    options: tuple[Any, ...] = ()


OverridesByModule = Mapping[nn.Module, tuple[ForwardOverride, ...]]
_ACTIVE_OVERRIDES: ContextVar[OverridesByModule] = ContextVar(
    "active_overrides", default=MappingProxyType({})
)
_RUNNING_MODULES: ContextVar[tuple[nn.Module, ...]] = ContextVar("running_modules", default=())


@contextmanager
def override_forwards(overrides: Sequence[ForwardOverride]) -> Iterator[None]:
    """Activate these overrides, in addition to those already active."""
    active = dict(_ACTIVE_OVERRIDES.get())
    with ExitStack() as stack:
        for override in overrides:
            module_overrides = active.get(override.module, ())
            if override not in module_overrides:
                active[override.module] = (*module_overrides, override)
            # patching a subclass too would run the override twice
            mro = type(override.module).__mro__
            owner = next(cls for cls in mro if "forward" in vars(cls))
            stack.enter_context(_forward_patch(owner).active())
        token = _ACTIVE_OVERRIDES.set(active)
        try:
            yield
        finally:
            _ACTIVE_OVERRIDES.reset(token)


@cache
def _forward_patch(owner: type) -> SharedPatch:
    return patch_method(owner, "forward", _wrap_forward)


def _wrap_forward(original: Function) -> Function:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        overrides = _ACTIVE_OVERRIDES.get().get(self, ())
        running = _RUNNING_MODULES.get()
        if not overrides or self in running:  # a super().forward() call inside an override
            return original(self, *args, **kwargs)
        run: Function = partial(original, self)
        for override in overrides:
            run = partial(_run_override, override, run)
        token = _RUNNING_MODULES.set((*running, self))
        try:
            return run(*args, **kwargs)
        finally:
            _RUNNING_MODULES.reset(token)

    return forward


def _run_override(override: ForwardOverride, run: Function, *args: Any, **kwargs: Any) -> Any:
    return override.function(override.module, run, args, kwargs, *override.options)


# --- Hooks of modules -----------------------------------------------------------------------------


class AttentionHook:
    """Base class of observers of one attention layer; a subclass overrides one method or more."""

    @property
    def needs_call(self) -> bool:
        """Return True if `on_call` must be called."""
        return type(self).on_call is not AttentionHook.on_call

    @property
    def needs_vectors(self) -> bool:
        """Return True if `on_vectors` must be called."""
        return type(self).on_vectors is not AttentionHook.on_vectors

    def on_call(self, call: ObservedCall, /) -> None:
        """Observe the inputs of the attention."""

    def on_vectors(self, vectors: HeadVectors, /) -> None:
        """Read or replace queries, keys, values and weights of heads (`check_head_part`)."""

    def on_head_outputs(self, outputs: Tensor, /) -> Tensor | None:
        """Observe the head outputs [B, T, heads, head_dim] before the output projection; return a
        tensor to replace them, or None.
        """


class CallHook(AttentionHook):
    """Keep what a function returns for the last call of a layer."""

    def __init__(self, function: Callable[[ObservedCall], Any]) -> None:
        self.function = function
        self.result: Any = None

    def on_call(self, call: ObservedCall, /) -> None:
        self.result = self.function(call)


@dataclass(frozen=True, eq=False)
class OutputHook(AttentionHook):
    """Pass the head outputs to a function; what it returns replaces them, unless it is None."""

    function: Callable[[Tensor], Tensor | None]

    def on_head_outputs(self, outputs: Tensor, /) -> Tensor | None:
        return self.function(outputs)


HooksByModule = Mapping[nn.Module, tuple[AttentionHook, ...]]
_ACTIVE_HOOKS: ContextVar[HooksByModule] = ContextVar("active_hooks", default=MappingProxyType({}))


def get_hooks(module: nn.Module) -> tuple[AttentionHook, ...]:
    """Return the hooks on this module in the current context."""
    return _ACTIVE_HOOKS.get().get(module, ())


def run_call_hooks(hooks: Sequence[AttentionHook], make_call: Callable[[], ObservedCall]) -> None:
    """Run the hooks that observe calls; the call is only made if there are any."""
    observers = [hook for hook in hooks if hook.needs_call]
    if observers:
        call = make_call()
        for hook in observers:
            hook.on_call(call)


def run_vector_hooks(
    hooks: Sequence[AttentionHook], make_call: Callable[[], ObservedCall], outputs: Tensor
) -> Tensor:
    """Run the hooks that replace vectors of heads; return the outputs [B, T, H, V] after them."""
    editors = [hook for hook in hooks if hook.needs_vectors]
    if not editors:
        return outputs
    vectors = HeadVectors(make_call())
    for hook in editors:
        hook.on_vectors(vectors)
    return vectors.edit_outputs(outputs)


def run_output_hooks(hooks: Sequence[AttentionHook], outputs: Tensor) -> Tensor:
    """Run the hooks in the order of installation; each gets the previous one's outputs."""
    for hook in hooks:
        replacement = hook.on_head_outputs(outputs)
        outputs = outputs if replacement is None else replacement
    return outputs


class SiteModule(NamedTuple):
    """Link a site to its hooked module and to the name of the adapter that found it.

    A module may serve several sites: this site is call number `call_index` of its
    `calls_per_forward` calls. While the site has hooks, `patches` are active and `overrides`
    replace the forward of modules.
    """

    site: Site
    module: nn.Module
    adapter: str
    call_index: int = 0
    calls_per_forward: int = 1
    patches: tuple[SharedPatch, ...] = ()
    overrides: tuple[ForwardOverride, ...] = ()


@contextmanager
def install_hooks(
    hooks: HooksByModule,
    site_modules: Sequence[SiteModule] = (),
    *,
    patches: Iterable[SharedPatch] = (),
    overrides: Sequence[ForwardOverride] = (),
) -> Iterator[None]:
    """Install hooks and overrides on these modules, in addition to those already installed.

    Also activates the patches and overrides of their sites.
    """
    active = dict(_ACTIVE_HOOKS.get())
    for module, module_hooks in hooks.items():
        active[module] = (*active.get(module, ()), *module_hooks)
    all_patches = dict.fromkeys([EAGER_STANCE, *patches])
    all_overrides = list(overrides)
    for site_module in site_modules:
        all_patches |= dict.fromkeys(site_module.patches)
        all_overrides += site_module.overrides
    with ExitStack() as stack:
        for patch in all_patches:
            stack.enter_context(patch.active())
        stack.enter_context(override_forwards(all_overrides))
        token = _ACTIVE_HOOKS.set(active)
        try:
            yield
        finally:
            _ACTIVE_HOOKS.reset(token)


class ModuleCall(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def record_modules(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[ModuleCall]]]:
    """Record the calls of modules in this thread: {module: its calls in order}.

    >>> layer = nn.Linear(2, 3)
    >>> with record_modules([layer]) as calls:
    ...     _ = layer(torch.zeros(4, 2))
    >>> [call.output.shape for call in calls[layer]]
    [torch.Size([4, 3])]
    """
    calls: dict[nn.Module, list[ModuleCall]] = {module: [] for module in modules}

    def record(module: nn.Module, run: Function, args: Any, kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        calls[module].append(ModuleCall(args, kwargs, output))
        return output

    with install_hooks({}, overrides=[ForwardOverride(module, record) for module in calls]):
        yield calls


# --- Hooks at the sites of a model ----------------------------------------------------------------


class SiteHooks:
    """Hold the hooks at the sites of a model, and count the calls there."""

    def __init__(
        self,
        model: nn.Module,
        site_modules: Sequence[SiteModule],
        hooks: Mapping[str, AttentionHook],
    ) -> None:
        self.model = model
        self.last_queries: tuple[Counter[nn.Module], int, nn.Module, Tensor] | None = None
        self.hook_of_module: dict[nn.Module, SiteHook] = {}
        for site_module in site_modules:
            hook = self.hook_of_module.setdefault(site_module.module, SiteHook(self, site_module))
            hook.hook_of_call[site_module.call_index] = hooks[site_module.site.name]
        paths = model.named_modules(remove_duplicate=False)
        self.module_of_path = {
            path: module for path, module in paths if module in self.hook_of_module
        }
        # module -> hooked modules inside it
        self.modules_below: dict[nn.Module, set[nn.Module]] = {
            module: set() for module in self.hook_of_module
        }
        for path, module in self.module_of_path.items():
            parts = path.split(".") if path else []
            for end in range(len(parts) + 1):
                ancestor = model.get_submodule(".".join(parts[:end]))
                self.modules_below.setdefault(ancestor, set()).add(module)

    def begin_forward(self) -> Counter[nn.Module]:
        """Start a forward call and return an empty counter of module calls.

        Raises if a hooked module was replaced.
        """
        for path, module in self.module_of_path.items():
            try:
                is_same = self.model.get_submodule(path) is module
            except AttributeError:
                is_same = False
            if not is_same:
                raise ValueError(
                    f"{path or 'the model'} was replaced while it had hooks; replace modules "
                    "before or after the context"
                )
        if torch.is_grad_enabled() and any(map(_recomputes, self.model.modules())):
            raise ValueError(
                "hooks do not support activation checkpointing: the backward pass runs layers "
                "again, perhaps without hooks; switch checkpointing off"
            )
        return Counter()

    def end_forward(self, root: nn.Module, calls: Counter[nn.Module]) -> None:
        """End a forward call: a module with several sites must have run once for each, or never."""
        self.last_queries = None
        for module in self.modules_below[root]:
            hook = self.hook_of_module[module]
            count = calls[module]
            hook.num_forwards += 1
            hook.num_site_calls += count
            if hook.calls_per_forward > 1 and count not in (0, hook.calls_per_forward):
                raise ValueError(
                    f"{hook.name} is a module of {hook.calls_per_forward} depths, but ran {count} "
                    "times in one forward call; run the whole model"
                )

    def check_all_ran(self) -> None:
        """Raise if a hooked module never ran although a forward call that contains it did."""
        for hook in self.hook_of_module.values():
            if not hook.num_forwards or hook.num_calls:
                continue
            if hook.num_site_calls:
                raise ValueError(
                    f"{hook.name} ran, but its output projection never ran as a module, so its "
                    "hook did nothing; call hw.sites(model, example), which finds attention "
                    "without its projection"
                )
            raise ValueError(
                f"{hook.name} never ran, though its model did (forwards: {hook.num_forwards}), "
                "so its hook did nothing; name sites that this input reaches"
            )


class SiteHook(AttentionHook):
    """Pass each call of one module to the hook of its depth.

    Counts calls with head outputs, calls of the module, and forward calls.
    """

    num_calls = 0
    num_site_calls = 0
    num_forwards = 0

    def __init__(self, site_hooks: SiteHooks, site_module: SiteModule) -> None:
        self.site_hooks = site_hooks
        self.module = site_module.module
        self.calls_per_forward = site_module.calls_per_forward
        self.name = site_module.site.name
        self.hook_of_call: dict[int, AttentionHook] = {}

    @property
    def needs_call(self) -> bool:
        return any(hook.needs_call for hook in self.hook_of_call.values())

    def on_call(self, call: ObservedCall) -> None:
        """Pass the inputs to the hook of the current depth; raise if the module has computed
        attention for the same queries in the same call of its forward.
        """
        hook = self.hook_of_call.get(self._call_index())
        if hook is None or not hook.needs_call:
            return
        forward = _RUNNING_FORWARDS.get().get(self.site_hooks)
        q_BTHK = call.queries
        if forward is not None and q_BTHK is not None:
            last = self.site_hooks.last_queries
            queries = (forward, forward[self.module], self.module, q_BTHK)
            self.site_hooks.last_queries = queries
            is_same_call = last is not None and last[0] is forward and last[1:3] == queries[1:3]
            if last is not None and is_same_call and queries[3].is_set_to(last[3]):
                raise ValueError(
                    f"{self.name} computes attention several times for the same queries in one "
                    "forward call, so its heads cannot be told apart; declare the heads of its "
                    "output projection with hw.declare"
                )
        hook.on_call(call)

    @property
    def needs_vectors(self) -> bool:
        return any(hook.needs_vectors for hook in self.hook_of_call.values())

    def on_vectors(self, vectors: HeadVectors) -> None:
        """Pass the vectors of heads to the hook of the current depth."""
        hook = self.hook_of_call.get(self._call_index())
        if hook is not None and hook.needs_vectors:
            hook.on_vectors(vectors)

    def on_head_outputs(self, outputs: Tensor) -> Tensor | None:
        """Pass the outputs to the hook of the current depth."""
        hook = self.hook_of_call.get(self._call_index())
        self.num_calls += 1
        return None if hook is None else hook.on_head_outputs(outputs)

    def _call_index(self) -> int:
        """Number of this call among the calls of the module in the running forward call."""
        forward = _RUNNING_FORWARDS.get().get(self.site_hooks)
        index = 0 if forward is None else forward[self.module] - 1
        if self.calls_per_forward > 1 and (forward is None or index < 0):
            raise ValueError(
                f"{self.name} was called outside a forward call of its model; call the model itself"
            )
        if index >= self.calls_per_forward:
            raise ValueError(
                f"{self.name} runs more than {self.calls_per_forward} times in one forward call, "
                "so its depth is unknown; give the part of the model that runs it once"
            )
        return max(index, 0)


RunningForwards = Mapping[SiteHooks, Counter[nn.Module] | None]
_RUNNING_FORWARDS: ContextVar[RunningForwards] = ContextVar(
    "running_forwards", default=MappingProxyType({})
)


@contextmanager
def hook_sites(
    model: nn.Module, sites: Sequence[SiteModule], hooks: Mapping[str, AttentionHook]
) -> Iterator[SiteHooks]:
    """Install hooks at sites by name; call `check_all_ran` on the result afterwards."""
    hooked = [site_module for site_module in sites if site_module.site.name in hooks]
    site_hooks = SiteHooks(model, hooked, hooks)
    hooks_by_module = {module: (hook,) for module, hook in site_hooks.hook_of_module.items()}
    patches = map(_call_patch, dict.fromkeys(map(type, site_hooks.modules_below)))
    with install_hooks(hooks_by_module, hooked, patches=patches):
        token = _RUNNING_FORWARDS.set({**_RUNNING_FORWARDS.get(), site_hooks: None})
        try:
            yield site_hooks
        finally:
            _RUNNING_FORWARDS.reset(token)


@cache
def _call_patch(kind: type) -> SharedPatch:
    return patch_method(kind, "__call__", partial(_wrap_call, kind))


def _wrap_call(kind: type, original: Function) -> Function:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not kind:  # a subclass has its own patch
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
    """Return True if a module uses activation checkpointing, of headwise or of transformers."""
    is_checkpointing = module.training and getattr(module, "gradient_checkpointing", False)
    return bool(is_checkpointing) or getattr(module, "checkpointing", "none") == "block"


# --- Run a model with hooks -----------------------------------------------------------------------


def run_observed(
    model: nn.Module,
    inputs: Any,
    sites: Sequence[SiteModule],
    hooks: Mapping[str, AttentionHook],
    max_new_tokens: int = 0,
) -> Any:
    """Run a model with these hooks at its sites and return its output; `inputs` of any form."""
    if not isinstance(inputs, ModelInputs):
        inputs = prepare_inputs(model, inputs, max_new_tokens)
    with hook_sites(model, sites, hooks), torch.inference_mode():
        return run_prepared(model, inputs, max_new_tokens)


def record_head_outputs(
    model: nn.Module, inputs: Any, sites: Sequence[SiteModule]
) -> tuple[Any, dict[str, Tensor]]:
    """Run a model on a text; return its output and head outputs by site name.

    Head outputs are [tokens, heads, width].
    """
    recorded: dict[str, Tensor] = {}

    def record(name: str, outputs: Tensor) -> None:
        recorded[name] = outputs[0].detach()

    hooks = {one.site.name: OutputHook(partial(record, one.site.name)) for one in sites}
    return run_observed(model, inputs, sites, hooks), recorded

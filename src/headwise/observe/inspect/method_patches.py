"""Patches of methods that several users share, and overrides of the forward of single modules.

A patch replaces a method of a class while at least one context uses it. An override belongs to one
module object and is stored in a context variable; the patched forward of its class looks it up
there. So nothing is ever set on a module, and other threads run the original forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

Function = Callable[..., Any]


class SharedPatch:
    """A context that several users share: the first one enters it, and the last one leaves it."""

    def __init__(self, make_context: Callable[[], AbstractContextManager[None]]) -> None:
        self.make_context = make_context
        self._users = 0
        self._lock = Lock()
        self._stack = ExitStack()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the patch is applied."""
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
    """Context in which torch runs compiled functions and modules eagerly, because a compiled graph
    would skip hooks.

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
    """`function(module, run, args, kwargs, *options)` runs in place of the forward of a module,
    which is `run`. Equal overrides of nested contexts run once.
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
    """Context in which these overrides are active, in addition to those that are active already."""
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

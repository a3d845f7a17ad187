"""Patches of methods with a reference count, and overrides of the forward of single modules.

A patch replaces a method of a class while at least one context uses it. An override belongs to one
module object and is stored in a context variable; the patched forward of its class looks it up
there. So nothing is ever set on a module, and other threads run the original forward.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn


class SharedPatch(ABC):
    """Patch with a reference count: applied while at least one context uses it."""

    def __init__(self) -> None:
        self._holders = 0
        self._lock = Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the patch is applied; the first to enter applies it, the last to leave
        reverts it.
        """
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

    def __init__(
        self, owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.owner = owner
        self.name = name
        self.wrapper = wrapper
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


COMPILING_MODULES = ("torch._dynamo", "torch.nn.attention.flex_attention")


class EagerStance(SharedPatch):
    """Makes torch run compiled functions and modules eagerly while hooks are active, which a
    compiled graph would skip.

    It does nothing in a process that has imported neither torch's compiler nor flex_attention,
    which compiles itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.contexts = ExitStack()

    def apply(self) -> None:
        if any(
            name in sys.modules for name in COMPILING_MODULES
        ):  # importing the compiler takes seconds
            self.contexts.enter_context(torch.compiler.set_stance("force_eager"))

    def revert(self) -> None:
        self.contexts.close()


EAGER_STANCE = EagerStance()

# --- Overrides of the forward of single modules ---------------------------------------------------

ForwardFunction = Callable[..., Any]


class ForwardOverride(Protocol):
    """Interface of a replacement for the forward of one module. Equal overrides of nested contexts
    run once.
    """

    @property
    def module(self) -> nn.Module:
        """The module whose forward is replaced."""
        ...

    def run_forward(
        self, run: ForwardFunction, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any:
        """The output of the module; `run` is its own forward."""
        ...


OverridesByModule = Mapping[nn.Module, tuple[ForwardOverride, ...]]
_NO_OVERRIDES: OverridesByModule = MappingProxyType({})
_ACTIVE_OVERRIDES: ContextVar[OverridesByModule] = ContextVar(
    "active_overrides", default=_NO_OVERRIDES
)
_RUNNING_MODULES: ContextVar[tuple[nn.Module, ...]] = ContextVar("running_modules", default=())
_FORWARD_PATCHES: dict[type, MethodPatch] = {}


@contextmanager
def override_forwards(overrides: Sequence[ForwardOverride]) -> Iterator[None]:
    """Context in which these overrides are active, in addition to those that are active already."""
    active = dict(_ACTIVE_OVERRIDES.get())
    for override in overrides:
        if override not in active.get(override.module, ()):
            active[override.module] = (*active.get(override.module, ()), override)
    token = _ACTIVE_OVERRIDES.set(active)
    try:
        yield
    finally:
        _ACTIVE_OVERRIDES.reset(token)


def forward_patches(overrides: Sequence[ForwardOverride]) -> list[SharedPatch]:
    """The patches of classes that these overrides need."""
    owners = dict.fromkeys(_forward_owner(type(override.module)) for override in overrides)
    return [
        _FORWARD_PATCHES.setdefault(owner, MethodPatch(owner, "forward", _wrap_forward))
        for owner in owners
    ]


def _forward_owner(module_type: type) -> type:
    """The class that defines the forward; patching a subclass too would run the override twice."""
    return next(cls for cls in module_type.__mro__ if "forward" in vars(cls))


def _wrap_forward(original: ForwardFunction) -> ForwardFunction:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        overrides = _ACTIVE_OVERRIDES.get().get(self, ())
        running = _RUNNING_MODULES.get()
        if not overrides or self in running:  # a super().forward() call inside an override
            return original(self, *args, **kwargs)
        run: ForwardFunction = partial(original, self)
        for override in overrides:
            run = partial(_run_override, override, run)
        token = _RUNNING_MODULES.set((*running, self))
        try:
            return run(*args, **kwargs)
        finally:
            _RUNNING_MODULES.reset(token)

    return forward


def _run_override(
    override: ForwardOverride, run: ForwardFunction, *args: Any, **kwargs: Any
) -> Any:
    return override.run_forward(run, args, kwargs)

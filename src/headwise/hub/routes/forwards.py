"""Standing at the forward of modules of anybody's: one replacement for each class, whatever is done there."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...site import POSSIBLE, Ability
from ..watching import MethodPatch, has_hooks

ForwardFunction = Callable[..., Any]
ForwardOverride = Callable[[nn.Module, ForwardFunction, tuple[Any, ...], dict[str, Any]], Any]

_OVERRIDES: WeakKeyDictionary[nn.Module, ForwardOverride] = WeakKeyDictionary()
_FORWARD_PATCHES: dict[type, MethodPatch] = {}
_RUNNING: ContextVar[tuple[nn.Module, ...]] = ContextVar("within", default=())

INSTANCE_FORWARD = Ability(False, "its forward was replaced on the module itself, which hides its class's; undo that")


def override_forward(module: nn.Module, override: ForwardOverride) -> None:
    """Let `role(module, run, args, kwargs)` stand for the forward of a module while somebody watches."""
    _OVERRIDES[module] = override


def hook_ability(module: nn.Module) -> Ability:
    """Whether the forward of its class is what runs when a module is called."""
    return INSTANCE_FORWARD if "forward" in vars(module) else POSSIBLE


def make_patches(override: ForwardOverride) -> list[MethodPatch]:
    """What is replaced for all modules that have this role."""
    owners = {_forward_owner(type(module)) for module, own in _OVERRIDES.items() if own is override}
    return [_FORWARD_PATCHES.setdefault(owner, MethodPatch(owner, "forward", _wrap_forward)) for owner in owners]


def _forward_owner(kind: type) -> type:
    """The class whose forward it is: a class and its heir may not both be replaced for one function."""
    return next(one for one in kind.__mro__ if "forward" in vars(one))


def _wrap_forward(original: ForwardFunction) -> ForwardFunction:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        role, within = (_OVERRIDES.get(self), _RUNNING.get()) if has_hooks() else (None, ())
        if role is None or self in within:  # within it is the forward of a class that this one's goes on to
            return original(self, *args, **kwargs)
        token = _RUNNING.set((*within, self))
        try:
            return role(self, lambda *said, **more: original(self, *said, **more), args, kwargs)
        finally:
            _RUNNING.reset(token)

    return forward

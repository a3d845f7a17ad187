"""Standing at the forward of modules of anybody's: one replacement for each class, whatever is done there."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...site import YES, Ability
from ..watching import Stand, anybody

Run = Callable[..., Any]
Role = Callable[[nn.Module, Run, tuple[Any, ...], dict[str, Any]], Any]

_ROLES: WeakKeyDictionary[nn.Module, Role] = WeakKeyDictionary()
_STANDS: dict[type, Stand] = {}
_WITHIN: ContextVar[tuple[nn.Module, ...]] = ContextVar("within", default=())

REPLACED = Ability(False, "its forward was replaced on the module itself, which hides its class's; undo that")


def give(module: nn.Module, role: Role) -> None:
    """Let `role(module, run, args, kwargs)` stand for the forward of a module while somebody watches."""
    _ROLES[module] = role


def reached(module: nn.Module) -> Ability:
    """Whether the forward of its class is what runs when a module is called."""
    return REPLACED if "forward" in vars(module) else YES


def stands(role: Role) -> list[Stand]:
    """What is replaced for all modules that have this role."""
    owners = {_owner(type(module)) for module, own in _ROLES.items() if own is role}
    return [_STANDS.setdefault(owner, Stand(owner, "forward", _around)) for owner in owners]


def _owner(kind: type) -> type:
    """The class whose forward it is: a class and its heir may not both be replaced for one function."""
    return next(one for one in kind.__mro__ if "forward" in vars(one))


def _around(original: Run) -> Run:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        role, within = (_ROLES.get(self), _WITHIN.get()) if anybody() else (None, ())
        if role is None or self in within:  # within it is the forward of a class that this one's goes on to
            return original(self, *args, **kwargs)
        token = _WITHIN.set((*within, self))
        try:
            return role(self, lambda *said, **more: original(self, *said, **more), args, kwargs)
        finally:
            _WITHIN.reset(token)

    return forward

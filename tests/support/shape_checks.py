"""A name carries its shape, and in tests the shape is held to it.

`q_BTHK` is a tensor of four dimensions; every argument of one call that carries a T has the same T. The
letters stand in the source once, as names; here they become checks on every call of every function.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch

_LETTERS = re.compile(r".*_([A-Z]+|[A-Z]*1[A-Z]*)$")
_ALONE = {"B"}  # what is alike in every row is kept once


class ShapeError(AssertionError):
    """A tensor is not what its name says."""


def letters(name: str) -> str:
    """The axes that a name carries: "BTHK" of ``q_BTHK``, nothing of ``rows``."""
    found = _LETTERS.match(name)
    return found[1] if found else ""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, holding its tensor arguments to their names; itself when no name carries letters."""
    names = list(inspect.signature(function).parameters)
    said = {n: (name, letters(name)) for n, name in enumerate(names) if letters(name)}
    if not said:
        return function
    by_name = dict(said.values())

    @wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        told = [(*said[n], value) for n, value in enumerate(args) if n in said]
        told += [(name, by_name[name], value) for name, value in kwargs.items() if name in by_name]
        _hold(function.__qualname__, [row for row in told if isinstance(row[2], torch.Tensor)])
        return function(*args, **kwargs)

    return held


def _hold(where: str, told: list[tuple[str, str, torch.Tensor]]) -> None:
    sizes: dict[str, int] = {}
    for name, axes, tensor in told:
        if tensor.dim() != len(axes):
            raise ShapeError(f"{where}: {name} has shape {tuple(tensor.shape)}, not one axis for each of {axes}")
        for axis, size in zip(axes, tensor.shape, strict=True):
            alone = axis in _ALONE and 1 in (size, sizes.get(axis, size))
            if (not alone and sizes.setdefault(axis, size) != size) or (axis == "1" and size != 1):
                raise ShapeError(f"{where}: {name} has {axis}={size}, but {axis} is {sizes.get(axis, 1)} in this call")


def hold_all(package: str = "headwise") -> int:
    """Check every function and method of the package from now on; how many carry letters."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == package]
    swapped: dict[Any, Any] = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__.split(".")[0] == package:
                _hold_class(value, swapped)
            elif isinstance(value, FunctionType) and value.__module__.split(".")[0] == package:
                swapped.setdefault(value, checked(value))
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and swapped.get(value, value) is not value:
                setattr(module, name, swapped[value])
    return sum(old is not new for old, new in swapped.items())


def _hold_class(cls: type, swapped: dict[Any, Any]) -> None:
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and value not in swapped and value not in swapped.values():
            swapped[value] = checked(value)
            if swapped[value] is not value:
                setattr(cls, name, swapped[value])

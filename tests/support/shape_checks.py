"""Checks that tensors have the shapes in their names.

`q_BTHK` is a tensor of four dimensions, and every argument of one call with a T has one size of T.
The letters are written once in the source, as names; here they become checks on every call of every
function.
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
_BROADCAST = {"B"}  # what is alike in every row is kept once


class ShapeError(AssertionError):
    """A tensor whose shape contradicts its name."""


def letters(name: str) -> str:
    """The axes in a name: "BTHK" for ``q_BTHK``, "" for ``rows``."""
    match = _LETTERS.match(name)
    return match[1] if match else ""


def with_shape_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with checks of its tensor arguments, or itself if no
    argument name has letters.
    """
    names = list(inspect.signature(function).parameters)
    axes_by_index = {n: (name, letters(name)) for n, name in enumerate(names) if letters(name)}
    if not axes_by_index:
        return function
    by_name = dict(axes_by_index.values())

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = [(*axes_by_index[n], value) for n, value in enumerate(args) if n in axes_by_index]
        tensors += [
            (name, by_name[name], value) for name, value in kwargs.items() if name in by_name
        ]
        _check_shapes(
            function.__qualname__, [row for row in tensors if isinstance(row[2], torch.Tensor)]
        )
        return function(*args, **kwargs)

    return wrapper


def _check_shapes(function_name: str, tensors: list[tuple[str, str, torch.Tensor]]) -> None:
    sizes: dict[str, int] = {}
    for name, axes, tensor in tensors:
        if tensor.dim() != len(axes):
            raise ShapeError(
                f"{function_name}: {name} has shape {tuple(tensor.shape)}, not one axis for each "
                f"of {axes}"
            )
        for axis, size in zip(axes, tensor.shape, strict=True):
            broadcasts = axis in _BROADCAST and 1 in (size, sizes.get(axis, size))
            if (not broadcasts and sizes.setdefault(axis, size) != size) or (
                axis == "1" and size != 1
            ):
                raise ShapeError(
                    f"{function_name}: {name} has {axis}={size}, but {axis} is "
                    f"{sizes.get(axis, 1)} in this call"
                )


def install_shape_checks(package: str = "headwise") -> int:
    """Check every function and method of the package from now on. Returns how many have letters."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == package]
    wrapped: dict[
        Any, Any
    ] = {}  # by the original function; a function without letters stands for itself
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__.split(".")[0] == package:
                _wrap_methods(value, wrapped)
            elif isinstance(value, FunctionType) and str(value.__module__).split(".")[0] == package:
                wrapped.setdefault(value, with_shape_checks(value))
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and wrapped.get(value, value) is not value:
                setattr(module, name, wrapped[value])
    return sum(old is not new for old, new in wrapped.items())


def _wrap_methods(cls: type, wrapped: dict[Any, Any]) -> None:
    for name, value in list(vars(cls).items()):
        if isinstance(value, FunctionType) and value not in wrapped:
            wrapped[value] = checked = with_shape_checks(value)
            wrapped[checked] = checked
            if checked is not value:
                setattr(cls, name, checked)

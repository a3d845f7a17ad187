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
    axes_by_name = {name: letters(name) for name in inspect.signature(function).parameters}
    rows = [(n, name, axes) for n, (name, axes) in enumerate(axes_by_name.items()) if axes]
    if not rows:
        return function
    first = rows[0][0]
    seen = set[tuple[object, ...]]()  # most calls have shapes that an earlier call had

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) > first:
            shapes: list[object] = []
            for n, name, _ in rows:
                value = args[n] if n < len(args) else kwargs.get(name)
                shapes.append(value.shape if isinstance(value, torch.Tensor) else None)
            key = tuple(shapes)
            try:
                is_new = key not in seen
            except TypeError:  # symbolic sizes have no hash
                check_shapes(function.__qualname__, rows, key)
                is_new = False
            if is_new:
                check_shapes(function.__qualname__, rows, key)
                seen.add(key)
        return function(*args, **kwargs)

    return wrapper


def check_shapes(
    function_name: str, rows: list[tuple[int, str, str]], shapes: tuple[Any, ...]
) -> None:
    """Compare the shapes of the tensors of one call with the letters in their names."""
    sizes: dict[str, int] = {}
    for (_, name, axes), shape in zip(rows, shapes, strict=True):
        if shape is None:
            continue
        if len(shape) != len(axes):
            raise ShapeError(
                f"{function_name}: {name} has shape {tuple(shape)}, not one axis for each of {axes}"
            )
        for axis, size in zip(axes, shape, strict=True):
            known = sizes.setdefault(axis, 1 if axis == "1" else size)
            if known != size and not (axis in _BROADCAST and 1 in (size, known)):
                raise ShapeError(
                    f"{function_name}: {name} has {axis}={size}, but {axis} is {known} in this call"
                )
            if known == 1 and axis != "1":
                sizes[axis] = size


def install_shape_checks(package: str = "headwise") -> int:
    """Check every function and method of the package from now on. Returns how many have letters."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == package]
    # by the original function; a function without letters stands for itself
    wrapped: dict[Any, Any] = {}
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

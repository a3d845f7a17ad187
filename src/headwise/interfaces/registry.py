"""The registry of parts: finds a class by its name, so that specs can be written as text."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from ..errors import SpecError, suggest

C = TypeVar("C")
REGISTRY: dict[str, type] = {}


@dataclass_transform(frozen_default=True)
def part(cls: type[C]) -> type[C]:
    """Class decorator that makes a frozen dataclass and registers it under its name.

    It is for parts, and for the small values that parts have as fields.
    """
    frozen = dataclass(frozen=True, repr=False)(cls)
    known = REGISTRY.get(cls.__name__)
    if known is not None and known.__module__ != cls.__module__:
        raise SpecError(
            f"cannot register {cls.__name__} of {cls.__module__}: {known.__module__} has that name too; rename one"
        )
    REGISTRY[cls.__name__] = frozen
    return frozen


def find_class(name: str) -> type:
    """The registered class with this name.

    >>> find_class("Softmaxx")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no part 'Softmaxx'; ...
    """
    if name not in REGISTRY:
        raise SpecError(f"there is no part {name!r}; {suggest(name, REGISTRY)}")
    return REGISTRY[name]


def field_defaults(cls: type) -> dict[str, Any]:
    """The default values of the fields of a registered class that have one."""
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}


@dataclass(frozen=True, repr=False)
class CheckedDataclass:
    """Base class of dataclasses that check the types of their fields.

    The repr is the constructor call, without arguments that equal their defaults.
    """

    def __post_init__(self) -> None:
        known = _field_types(type(self))
        for field in fields(self):
            value, kinds = getattr(self, field.name), known[field.name]
            if isinstance(value, float) and not math.isfinite(value):
                raise SpecError(f"{type(self).__name__}({field.name}={value!r}) is not finite; give a finite number")
            wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
            if wrong:
                wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                wanted += _suggested_classes(kinds)
                raise SpecError(
                    f"{type(self).__name__}({field.name}={value!r}) is of type {type(value).__name__}; give {wanted}"
                )

    def check_fields(self, ranges: Mapping[str, tuple[float, float]], choices: Mapping[str, Collection[str]]) -> None:
        """Raise SpecError for numbers out of range and for strings that are not among the choices."""
        class_name = type(self).__name__
        for name, (low, high) in ranges.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise SpecError(f"{class_name}({name}={value!r}) is out of range; give {low:g} to {high:g}")
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise SpecError(f"{class_name}({name}={value!r}) is unknown; {suggest(value, known)}")

    def __repr__(self) -> str:
        defaults = field_defaults(type(self))
        values = [(f.name, getattr(self, f.name)) for f in fields(self)]
        args = [f"{name}={value!r}" for name, value in values if name not in defaults or value != defaults[name]]
        return f"{type(self).__name__}({', '.join(args)})"


_FIELD_TYPES: dict[type, dict[str, tuple[type, ...]]] = {}  # cached: resolving hints dominates the cost of a part


def _field_types(cls: type) -> dict[str, tuple[type, ...]]:
    """The classes that each field accepts; float fields accept int too."""
    if cls not in _FIELD_TYPES:
        hints = get_type_hints(cls)
        _FIELD_TYPES[cls] = {field.name: _classes(hints[field.name]) for field in fields(cls)}
    return _FIELD_TYPES[cls]


def _classes(hint: Any) -> tuple[type, ...]:
    options: tuple[Any, ...] = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = tuple(get_origin(option) or option for option in options)
    return (*kinds, int) if float in kinds else kinds


def _suggested_classes(kinds: tuple[type, ...]) -> str:
    """The registered classes that a field accepts, as the end of a message: ", such as PI(), YaRN()"."""
    names = [name for name, cls in REGISTRY.items() if CheckedDataclass in cls.__mro__ and issubclass(cls, kinds)]
    return f", such as {', '.join(f'{name}()' for name in sorted(names))}" if names else ""

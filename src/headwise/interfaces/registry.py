"""Every part and pattern by its name: what text may speak of."""

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
    """Freeze a class and let text name it: parts, and the small values parts are made of."""
    frozen = dataclass(frozen=True, repr=False)(cls)
    known = REGISTRY.get(cls.__name__)
    if known is not None and known.__module__ != cls.__module__:
        raise SpecError(f"two parts are named {cls.__name__}: {known.__module__} and {cls.__module__}; rename one")
    REGISTRY[cls.__name__] = frozen
    return frozen


def find_class(name: str) -> type:
    """The registered class of this name.

    >>> find_class("Softmaxx")
    Traceback (most recent call last):
    headwise.errors.SpecError: there is no part 'Softmaxx'; ...
    """
    if name not in REGISTRY:
        raise SpecError(f"there is no part {name!r}; {suggest(name, REGISTRY)}")
    return REGISTRY[name]


def field_defaults(cls: type) -> dict[str, Any]:
    """The fields of a registered class that need not be said, with their values."""
    return {f.name: f.default for f in fields(cls) if f.default is not MISSING}


@dataclass(frozen=True, repr=False)
class CheckedDataclass:
    """Something whose repr is the code that makes it, with what equals its default left out."""

    def __post_init__(self) -> None:
        known = _field_types(type(self))
        for field in fields(self):
            value, kinds = getattr(self, field.name), known[field.name]
            if isinstance(value, float) and not math.isfinite(value):
                raise SpecError(f"{type(self).__name__}({field.name}={value!r}) is no finite number; give one")
            wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
            if wrong:
                wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                wanted += _suggested_classes(kinds)
                raise SpecError(
                    f"{type(self).__name__}({field.name}={value!r}) is of type {type(value).__name__}; give {wanted}"
                )

    def check_fields(self, ranges: Mapping[str, tuple[float, float]], choices: Mapping[str, Collection[str]]) -> None:
        """Refuse numbers out of their range, and words that are none of those known."""
        own = type(self).__name__
        for name, (low, high) in ranges.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise SpecError(f"{own}({name}={value!r}) cannot be meant; give {low:g} to {high:g}")
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise SpecError(f"{own}({name}={value!r}) is unknown; {suggest(value, known)}")

    def __repr__(self) -> str:
        usual = field_defaults(type(self))
        values = [(f.name, getattr(self, f.name)) for f in fields(self)]
        said = [f"{name}={value!r}" for name, value in values if name not in usual or value != usual[name]]
        return f"{type(self).__name__}({', '.join(said)})"


_FIELD_TYPES: dict[type, dict[str, tuple[type, ...]]] = {}  # reading hints takes longer than all else about a part


def _field_types(cls: type) -> dict[str, tuple[type, ...]]:
    """The classes that each field may be of; a whole number will do for a float."""
    if cls not in _FIELD_TYPES:
        hints = get_type_hints(cls)
        _FIELD_TYPES[cls] = {field.name: _classes(hints[field.name]) for field in fields(cls)}
    return _FIELD_TYPES[cls]


def _classes(hint: Any) -> tuple[type, ...]:
    told: tuple[Any, ...] = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = tuple(get_origin(kind) or kind for kind in told)
    return (*kinds, int) if float in kinds else kinds


def _suggested_classes(kinds: tuple[type, ...]) -> str:
    """Which registered classes a value may be of, where a field wants one: ", such as PI(), YaRN()"."""
    made = [name for name, cls in REGISTRY.items() if CheckedDataclass in cls.__mro__ and issubclass(cls, kinds)]
    return f", such as {', '.join(f'{name}()' for name in sorted(made))}" if made else ""

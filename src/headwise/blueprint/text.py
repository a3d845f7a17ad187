"""Models as text: one dictionary form, written as TOML or JSON, read back as the same model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from .. import text
from ..errors import SpecError, suggest
from ..spec import AttentionSpec
from .model import ModelSpec
from .pieces import SpecNode

SpecDefaults = Mapping[str, Any] | None


def to_dict(model: ModelSpec) -> dict[str, Any]:
    """A model as plain values; what equals its default is left out."""
    return _to_plain(model)


def from_dict(values: Mapping[str, Any], defaults: SpecDefaults = None) -> ModelSpec:
    """The model that a dictionary describes; `usual` fills the choices that its specs do not make."""
    return _read_node("model", text.check_table("model", values), [ModelSpec], defaults)


def to_json(model: ModelSpec) -> str:
    """One JSON document."""
    return json.dumps(to_dict(model), indent=2)


def from_json(text: str, defaults: SpecDefaults = None) -> ModelSpec:
    """The model that a JSON document describes."""
    return from_dict(_parse("JSON", json.loads, text), defaults)


def to_toml(model: ModelSpec) -> str:
    """One TOML document."""
    return dump_toml(to_dict(model))


def dump_toml(values: dict[str, Any]) -> str:
    """Plain values as TOML: what holds tables under a heading, the rest in one line.

    >>> print(dump_toml({"format": 1, "model": {"name": "small", "stacks": [{"model": 8}]}}), end="")
    format = 1
    <BLANKLINE>
    [model]
    name = "small"
    <BLANKLINE>
    [[model.stacks]]
    model = 8
    """
    return "\n".join(_toml_lines("", values)).strip() + "\n"


def from_toml(text: str, defaults: SpecDefaults = None) -> ModelSpec:
    """The model that a TOML document describes."""
    return from_dict(_parse("TOML", tomllib.loads, text), defaults)


def _parse(name: str, loads: Callable[[str], Any], said: str) -> Any:
    try:
        return loads(said)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise SpecError(f"this is not {name}: {error}; write what to_{name.lower()} gives") from None


def _to_plain(value: Any) -> Any:
    if isinstance(value, AttentionSpec):
        return text.to_dict(value)
    if isinstance(value, SpecNode):
        own = [(f.name, getattr(value, f.name), f.default) for f in fields(value)]
        return {name: _to_plain(said) for name, said, usual in own if usual is MISSING or said != usual}
    return [_to_plain(item) for item in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value


def _read_value(where: str, said: Any, kind: Any, usual: SpecDefaults) -> Any:
    """The value that plain ones stand for, where the type of its field is known."""
    kinds: tuple[Any, ...] = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if isinstance(said, Mapping):
        table = dict(cast("Mapping[str, Any]", said))
        made = [k for k in kinds if isinstance(k, type) and issubclass(k, (SpecNode, AttentionSpec))]
        return _read_node(where, table, made, usual)
    if isinstance(said, (list, tuple)):
        items = [get_args(k)[0] for k in kinds if get_origin(k) is tuple]
        item = items[0] if items else object
        return tuple(_read_value(f"{where}[{n}]", one, item, usual) for n, one in enumerate(cast("list[Any]", said)))
    return said


def _read_node(where: str, table: dict[str, Any], kinds: list[type], usual: SpecDefaults) -> Any:
    """An object of the first of these kinds that has all these names."""
    if not kinds:
        raise SpecError(f"{where} = {table!r} is a table; give a plain value")
    fit = [kind for kind in kinds if set(table) <= {f.name for f in fields(kind)}]
    if not fit:
        known = {f.name for kind in kinds for f in fields(kind)}
        wrong = next((name for name in table if name not in known), next(iter(table)))
        raise SpecError(f"{where} has no {wrong!r}; {suggest(wrong, known)}")
    if fit[0] is AttentionSpec:
        return text.from_dict(table, usual)
    hints = get_type_hints(fit[0])
    if missing := [f.name for f in fields(fit[0]) if f.default is MISSING and f.name not in table]:
        raise SpecError(f"{where} says nothing of {missing[0]}; add {missing[0]} = ...")
    return fit[0](**{name: _read_value(f"{where}.{name}", value, hints[name], usual) for name, value in table.items()})


def _toml_lines(path: str, table: dict[str, Any]) -> list[str]:
    plain = {name: value for name, value in table.items() if not _needs_heading(value)}
    lines = [f"{name} = {text.format_toml(value)}" for name, value in plain.items()]
    for name, value in table.items():
        inner = f"{path}.{name}" if path else name
        head = f"[[{inner}]]" if isinstance(value, list) else f"[{inner}]"
        for row in _as_list(value) if name not in plain else ():
            lines += ["", head, *_toml_lines(inner, row)]
    return lines


def _needs_heading(value: Any) -> bool:
    """Whether it needs a heading of its own: a table with tables in it, or a list of tables."""
    if isinstance(value, dict):
        return any(isinstance(item, (dict, list)) for item in cast("dict[str, Any]", value).values())
    return bool(value) and all(isinstance(item, dict) for item in _as_list(value))


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]

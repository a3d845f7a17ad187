"""Reads specs from plain dictionaries, TOML and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...util.errors import SpecError, suggest
from ...util.size_limits import parse_json, parse_toml
from ..interfaces.part import find_class
from ..masking import patterns
from .attention_spec import SLOTS, AttentionSpec
from .heads import HEAD_MAPS, Heads
from .serialization import check_list, check_table, refuse_type


def from_dict(data: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a dictionary; `defaults` supplies fields that it lacks."""
    field_names = [f.name for f in fields(AttentionSpec)]
    _check_keys("a spec", data, field_names)
    values = dict(defaults or {}) | {name: _slot_value(name, value) for name, value in data.items()}
    missing = [name for name in ("model", "heads", *SLOTS) if name not in values]
    if missing:
        raise SpecError(f"the spec lacks {', '.join(missing)}; add {missing[0]} = ...")
    return AttentionSpec(**values)


def from_json(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a JSON document."""
    data = parse_json("the text", text, "write the spec as headwise.to_json does")
    return from_dict(check_table("a spec", data), defaults)


def from_toml(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a TOML document."""
    return from_dict(parse_toml("the text", text, "write the spec as print(spec) does"), defaults)


def _slot_value(name: str, value: Any) -> Any:
    if name == "pattern":
        if isinstance(value, str):
            return patterns.parse_pattern(value)
        refuse_type(name, value, "text such as 'causal()'")
    if name == "heads":
        return _heads(check_table(name, value))
    if name in SLOTS:
        return _registered_object(name, value)
    if name == "modifiers":
        return tuple(
            _registered_object(f"modifiers[{n}]", item)
            for n, item in enumerate(check_list(name, value))
        )
    return value


def _registered_object(where: str, value: Any) -> Any:
    table = check_table(where, {"part": value} if isinstance(value, str) else value)
    name = table.pop("part", None)
    if not isinstance(name, str):
        refuse_type(f"{where}.part", name, "the name of a part")
    cls = find_class(name)
    _check_keys(name, table, [f.name for f in fields(cls)])
    options = {key: _field_value(f"{where}.{key}", option) for key, option in table.items()}
    try:
        return cls(**options)
    except TypeError as error:
        raise SpecError(
            f"{where}: cannot build {name} from {options}: {error}; see its docstring"
        ) from None


def _field_value(where: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _registered_object(where, value)
    if isinstance(value, (list, tuple)):
        return tuple(_field_value(where, item) for item in check_list(where, value))
    return value


def _heads(table: dict[str, Any]) -> Heads:
    _check_keys("heads", table, [f.name for f in fields(Heads)])
    missing = [name for name in ("q", "dim") if name not in table]
    if missing:
        raise SpecError(f"heads lack {missing[0]}; add {missing[0]} = ...")
    head_maps: dict[str, Any] = {
        name: tuple(check_list(f"heads.{name}", table[name])) for name in HEAD_MAPS if name in table
    }
    values: dict[str, Any] = {"kv": table["q"]} | table | head_maps
    return Heads(**values)


def _check_keys(where: str, table: Mapping[str, Any], names: list[str]) -> None:
    for name in table:
        if name not in names:
            raise SpecError(f"{where} has no {name!r}; {suggest(name, names)}")

"""Converts specs to plain dictionaries, TOML and JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, cast

from ...util.errors import SpecError, suggest
from ...util.size_limits import parse_json, parse_toml
from ..interfaces.part import field_defaults, find_class
from ..masking import patterns
from .attention_spec import SLOTS, AttentionSpec
from .heads import HEAD_MAPS, Heads

# Names that head maps had in the first files.


def to_dict(spec: AttentionSpec) -> dict[str, Any]:
    """The spec as a dictionary of plain values, without fields that equal their defaults."""
    heads = {f.name: getattr(spec.heads, f.name) for f in fields(Heads)}
    if spec.heads.is_evenly_grouped:
        del heads["kv_head_of_query"]
    if heads["vdim"] == heads["dim"]:
        del heads["vdim"]
    data: dict[str, Any] = {"model": spec.model}
    if spec.source is not None:
        data["source"] = spec.source
    data["pattern"] = spec.pattern.text
    data["heads"] = {name: _plain(value) for name, value in heads.items() if value != ()}
    data |= {slot: _plain(getattr(spec, slot)) for slot in SLOTS if slot != "pattern"}
    if spec.modifiers:
        data["modifiers"] = [_plain(modifier) for modifier in spec.modifiers]
    return data


def from_dict(data: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a dictionary; `defaults` supplies fields that it lacks."""
    field_names = [f.name for f in fields(AttentionSpec)]
    _check_keys("a spec", data, field_names)
    values = dict(defaults or {}) | {name: _slot_value(name, value) for name, value in data.items()}
    missing = [name for name in ("model", "heads", *SLOTS) if name not in values]
    if missing:
        raise SpecError(f"the spec lacks {', '.join(missing)}; add {missing[0]} = ...")
    return AttentionSpec(**values)


def to_json(spec: AttentionSpec) -> str:
    """The spec as a JSON document."""
    return json.dumps(to_dict(spec), indent=2)


def from_json(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a JSON document."""
    data = parse_json("the text", text, "write the spec as headwise.to_json does")
    return from_dict(check_table("a spec", data), defaults)


def to_toml(spec: AttentionSpec) -> str:
    """The spec as a TOML document; nested parts are inline tables."""
    return dump_toml(to_dict(spec), depth=1).rstrip("\n")


def from_toml(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec described by a TOML document."""
    return from_dict(parse_toml("the text", text, "write the spec as print(spec) does"), defaults)


def _slot_value(name: str, value: Any) -> Any:
    if name == "pattern":
        if isinstance(value, str):
            return patterns.parse_pattern(value)
        _raise_type_error(name, value, "text such as 'causal()'")
    if name == "heads":
        return _heads(check_table(name, value))
    if name in SLOTS:
        return _registered_object(name, value)
    if name == "modifiers":
        return tuple(
            _registered_object(f"modifiers[{n}]", item) for n, item in enumerate(_list(name, value))
        )
    return value


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        defaults = field_defaults(type(value))
        values = {f.name: getattr(value, f.name) for f in fields(value)}
        options = {
            name: _plain(v)
            for name, v in values.items()
            if name not in defaults or defaults[name] != v
        }
        return {"part": type(value).__name__} | options
    return (
        [_plain(item) for item in _list("", value)] if isinstance(value, (tuple, list)) else value
    )


def _registered_object(where: str, value: Any) -> Any:
    table = check_table(where, {"part": value} if isinstance(value, str) else value)
    name = table.pop("part", None)
    if not isinstance(name, str):
        _raise_type_error(f"{where}.part", name, "the name of a part")
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
        return tuple(_field_value(where, item) for item in _list(where, value))
    return value


def _heads(table: dict[str, Any]) -> Heads:
    _check_keys("heads", table, [f.name for f in fields(Heads)])
    missing = [name for name in ("q", "dim") if name not in table]
    if missing:
        raise SpecError(f"heads lack {missing[0]}; add {missing[0]} = ...")
    head_maps: dict[str, Any] = {
        name: tuple(_list(f"heads.{name}", table[name])) for name in HEAD_MAPS if name in table
    }
    values: dict[str, Any] = {"kv": table["q"]} | table | head_maps
    return Heads(**values)


def _check_keys(where: str, table: Mapping[str, Any], names: list[str]) -> None:
    for name in table:
        if name not in names:
            raise SpecError(f"{where} has no {name!r}; {suggest(name, names)}")


def check_table(where: str, value: Any) -> dict[str, Any]:
    """A copy of `value` if it is a mapping; raises SpecError otherwise."""
    if not isinstance(value, Mapping):
        _raise_type_error(where, value, "a table")
    return dict(cast("Mapping[str, Any]", value))


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        _raise_type_error(where, value, "a list")
    return list(cast("list[Any]", value))


def _raise_type_error(where: str, value: object, expected: str) -> NoReturn:
    raise SpecError(f"{where} = {value!r} is of type {type(value).__name__}; give {expected}")


def format_toml(value: Any) -> str:
    """A value in TOML syntax; tables are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(format_toml(item) for item in _list("", value)) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{name} = {format_toml(item)}" for name, item in check_table("", value).items()
            )
            + "}"
        )
    return repr(value)


def dump_toml(values: Mapping[str, Any], *, depth: int | None = None) -> str:
    """Plain values as TOML: tables that contain tables or lists get a [heading], all others one
    line. With `depth`, all tables down to this depth get one, and none below.

    >>> values = {"format": 1, "model": {"name": "small", "stacks": [{"model": 8}]}}
    >>> print(dump_toml(values), end="")
    format = 1
    <BLANKLINE>
    [model]
    name = "small"
    <BLANKLINE>
    [[model.stacks]]
    model = 8
    """
    return "\n".join(_toml_lines("", values, depth)).strip() + "\n"


def _toml_lines(path: str, table: Mapping[str, Any], depth: int | None) -> list[str]:
    with_heading = {name for name, value in table.items() if _needs_heading(value, depth)}
    lines = [
        f"{name} = {format_toml(value)}"
        for name, value in table.items()
        if name not in with_heading
    ]
    inner_depth = None if depth is None else depth - 1
    for name, value in table.items():
        if name in with_heading:
            inner = f"{path}.{name}" if path else name
            is_list = isinstance(value, list)
            head = f"[[{inner}]]" if is_list else f"[{inner}]"
            for row in _list("", value) if is_list else [value]:
                lines += ["", head, *_toml_lines(inner, row, inner_depth)]
    return lines


def _needs_heading(value: Any, depth: int | None) -> bool:
    if isinstance(value, list):
        rows = _list("", value)
        return bool(rows) and all(isinstance(row, dict) for row in rows) and depth != 0
    if not isinstance(value, dict) or depth is not None:
        return isinstance(value, dict) and depth != 0
    return any(isinstance(item, (dict, list)) for item in check_table("", value).values())

"""Specs as plain dictionaries, TOML and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, cast

from ...util.errors import SpecError
from ..interfaces.part import field_defaults


def to_dict(spec: Any) -> dict[str, Any]:
    """An `AttentionSpec` as plain values, without fields that equal their defaults."""
    heads = {f.name: getattr(spec.heads, f.name) for f in fields(spec.heads)}
    if spec.heads.is_evenly_grouped:
        del heads["kv_head_of_query"]
    if heads["vdim"] == heads["dim"]:
        del heads["vdim"]
    data: dict[str, Any] = {"model": spec.model}
    if spec.source is not None:
        data["source"] = spec.source
    data["pattern"] = spec.pattern.text
    data["heads"] = {name: _plain(value) for name, value in heads.items() if value != ()}
    slots = ("project", "similarity", "normaliser", "merge")
    data |= {slot: _plain(getattr(spec, slot)) for slot in slots}
    if spec.modifiers:
        data["modifiers"] = [_plain(modifier) for modifier in spec.modifiers]
    return data


def to_json(spec: Any) -> str:
    """The spec as a JSON document."""
    return json.dumps(to_dict(spec), indent=2)


def to_toml(spec: Any) -> str:
    """The spec as a TOML document; nested parts are inline tables."""
    return dump_toml(to_dict(spec), depth=1).rstrip("\n")


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
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in check_list("", value)]
    return value


def check_table(where: str, value: Any) -> dict[str, Any]:
    """A copy of `value` if it is a mapping; raises SpecError otherwise."""
    if not isinstance(value, Mapping):
        refuse_type(where, value, "a table")
    return dict(cast("Mapping[str, Any]", value))


def check_list(where: str, value: Any) -> list[Any]:
    """A copy of `value` if it is a list or tuple; raises SpecError otherwise."""
    if not isinstance(value, (list, tuple)):
        refuse_type(where, value, "a list")
    return list(cast("list[Any]", value))


def refuse_type(where: str, value: object, expected: str) -> NoReturn:
    """Raise SpecError for a value of another type than expected."""
    raise SpecError(f"{where} = {value!r} is of type {type(value).__name__}; give {expected}")


def format_toml(value: Any) -> str:
    """A value in TOML syntax; tables are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(format_toml(item) for item in check_list("", value)) + "]"
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
            for row in check_list("", value) if is_list else [value]:
                lines += ["", head, *_toml_lines(inner, row, inner_depth)]
    return lines


def _needs_heading(value: Any, depth: int | None) -> bool:
    if isinstance(value, list):
        rows = check_list("", value)
        return bool(rows) and all(isinstance(row, dict) for row in rows) and depth != 0
    if not isinstance(value, dict) or depth is not None:
        return isinstance(value, dict) and depth != 0
    return any(isinstance(item, (dict, list)) for item in check_table("", value).values())

"""Specs as text: one dictionary form, written as TOML or JSON, read back as the same spec."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, cast

from ..errors import SpecError, suggest
from ..interfaces.registry import field_defaults, find_class
from ..masking import patterns
from .attention_spec import SLOTS, AttentionSpec
from .heads import Heads


def to_dict(spec: AttentionSpec) -> dict[str, Any]:
    """A spec as plain values; what equals its default is left out."""
    heads = {f.name: getattr(spec.heads, f.name) for f in fields(Heads)}
    if spec.heads.is_evenly_grouped:
        del heads["reads"]
    if heads["vdim"] == heads["dim"]:
        del heads["vdim"]
    said: dict[str, Any] = {"model": spec.model}
    if spec.source is not None:
        said["source"] = spec.source
    said["pattern"] = spec.pattern.text
    said["heads"] = {name: _plain(value) for name, value in heads.items() if value != ()}
    said |= {slot: _plain(getattr(spec, slot)) for slot in SLOTS if slot != "pattern"}
    if spec.modifiers:
        said["modifiers"] = [_plain(modifier) for modifier in spec.modifiers]
    return said


def from_dict(said: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec that a dictionary describes; `usual` fills the choices that it does not make."""
    known = [f.name for f in fields(AttentionSpec)]
    _known_keys("a spec", said, known)
    chosen = dict(defaults or {}) | {name: _slot_value(name, value) for name, value in said.items()}
    if missing := [name for name in ("model", "heads", *SLOTS) if name not in chosen]:
        raise SpecError(f"the spec says nothing of {', '.join(missing)}; add {missing[0]} = ...")
    return AttentionSpec(**chosen)


def to_json(spec: AttentionSpec) -> str:
    """One JSON document."""
    return json.dumps(to_dict(spec), indent=2)


def from_json(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec that a JSON document describes."""
    try:
        said = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"this is not JSON: {error}; write what spec.to_json gives") from None
    return from_dict(check_table("a spec", said), defaults)


def to_toml(spec: AttentionSpec) -> str:
    """One TOML document; nested parts are inline tables."""
    said = to_dict(spec)
    modifiers: list[dict[str, Any]] = said.pop("modifiers", [])
    tables: dict[str, dict[str, Any]] = {name: value for name, value in said.items() if isinstance(value, dict)}
    lines = [f"{name} = {format_toml(value)}" for name, value in said.items() if name not in tables]
    headed = [(f"[{name}]", table) for name, table in tables.items()]
    headed += [("[[modifiers]]", table) for table in modifiers]
    for head, table in headed:
        lines += ["", head, *(f"{key} = {format_toml(value)}" for key, value in table.items())]
    return "\n".join(lines)


def from_toml(text: str, defaults: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec that a TOML document describes."""
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"this is not TOML: {error}; write what print(spec) shows") from None
    return from_dict(said, defaults)


def _slot_value(name: str, said: Any) -> Any:
    if name == "pattern":
        return (
            patterns.parse_pattern(said) if isinstance(said, str) else _mistyped(name, said, "text such as 'causal()'")
        )
    if name == "heads":
        return _heads(check_table(name, said))
    if name in SLOTS:
        return _registered_object(name, said)
    if name == "modifiers":
        return tuple(_registered_object(f"modifiers[{n}]", row) for n, row in enumerate(_list(name, said)))
    return said


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        usual = field_defaults(type(value))
        own = {f.name: getattr(value, f.name) for f in fields(value)}
        said = {name: _plain(v) for name, v in own.items() if name not in usual or usual[name] != v}
        return {"part": type(value).__name__} | said
    return [_plain(item) for item in _list("", value)] if isinstance(value, (tuple, list)) else value


def _registered_object(where: str, said: Any) -> Any:
    table = check_table(where, {"part": said} if isinstance(said, str) else said)
    name = table.pop("part", None)
    if not isinstance(name, str):
        _mistyped(f"{where}.part", name, "the name of a part")
    cls = find_class(name)
    _known_keys(name, table, [f.name for f in fields(cls)])
    values = {key: _value(f"{where}.{key}", value) for key, value in table.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise SpecError(f"{where}: {name} cannot be made of {values}: {error}; see its docstring") from None


def _value(where: str, said: Any) -> Any:
    if isinstance(said, Mapping):
        return _registered_object(where, said)
    return tuple(_value(where, item) for item in _list(where, said)) if isinstance(said, (list, tuple)) else said


def _heads(said: dict[str, Any]) -> Heads:
    _known_keys("heads", said, [f.name for f in fields(Heads)])
    if missing := [name for name in ("q", "dim") if name not in said]:
        raise SpecError(f"heads say nothing of {missing[0]}; add {missing[0]} = ...")
    rows: dict[str, Any] = {
        name: tuple(_list(f"heads.{name}", said[name])) for name in ("reads", "values", "speaks") if name in said
    }
    chosen: dict[str, Any] = {"kv": said["q"]} | said | rows
    return Heads(**chosen)


def _known_keys(what: str, said: Mapping[str, Any], known: list[str]) -> None:
    for name in said:
        if name not in known:
            raise SpecError(f"{what} has no {name!r}; {suggest(name, known)}")


def check_table(where: str, said: Any) -> dict[str, Any]:
    """A table of its own to take apart, if it is one."""
    return dict(cast("Mapping[str, Any]", said)) if isinstance(said, Mapping) else _mistyped(where, said, "a table")


def _list(where: str, said: Any) -> list[Any]:
    return list(cast("list[Any]", said)) if isinstance(said, (list, tuple)) else _mistyped(where, said, "a list")


def _mistyped(where: str, value: object, wanted: str) -> NoReturn:
    raise SpecError(f"{where} = {value!r} is of type {type(value).__name__}; give {wanted}")


def format_toml(value: Any) -> str:
    """One value as TOML writes it; a table stands on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(format_toml(item) for item in _list("", value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {format_toml(item)}" for name, item in check_table("", value).items()) + "}"
    return repr(value)

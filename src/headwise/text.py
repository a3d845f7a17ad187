"""Specs as text: one dictionary form, written as TOML or JSON, read back as the same spec."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from . import pattern
from .errors import SpecError, nearest
from .heads import Heads
from .registry import REGISTRY, defaults, find
from .spec import SLOTS, AttentionSpec


def to_dict(spec: AttentionSpec) -> dict[str, Any]:
    """A spec as plain values; what equals its default is left out."""
    heads = {f.name: getattr(spec.heads, f.name) for f in fields(Heads)}
    if spec.heads.even:
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


def from_dict(said: Mapping[str, Any], usual: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec that a dictionary describes; `usual` fills the choices that it does not make."""
    known = [f.name for f in fields(AttentionSpec)]
    _known_keys("a spec", said, known)
    chosen: dict[str, Any] = dict(usual or {})
    for name, value in said.items():
        if name == "pattern":
            chosen[name] = pattern.parse(value) if isinstance(value, str) else _mistyped("pattern", value, "text")
        elif name == "heads":
            chosen[name] = _heads(value)
        elif name in SLOTS:
            chosen[name] = _object(name, value)
        elif name == "modifiers":
            rows = value if isinstance(value, (list, tuple)) else _mistyped(name, value, "a list of parts")
            chosen[name] = tuple(_object(f"modifiers[{n}]", row) for n, row in enumerate(rows))
        else:
            chosen[name] = value
    if missing := [name for name in ("model", "heads", *SLOTS) if name not in chosen]:
        raise SpecError(f"the spec says nothing of {', '.join(missing)}; add {missing[0]} = ...")
    return AttentionSpec(**chosen)


def to_json(spec: AttentionSpec) -> str:
    """One JSON document."""
    return json.dumps(to_dict(spec), indent=2)


def from_json(text: str, usual: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec that a JSON document describes."""
    try:
        said = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"this is not JSON: {error}; write what spec.to_json gives") from None
    return from_dict(said if isinstance(said, dict) else _mistyped("a spec", said, "an object"), usual)


def to_toml(spec: AttentionSpec) -> str:
    """One TOML document; nested parts are inline tables."""
    said = to_dict(spec)
    tables = {name: value for name, value in said.items() if isinstance(value, dict)}
    lines = [f"{n} = {_toml(v)}" for n, v in said.items() if n not in tables and n != "modifiers"]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    for table in said.get("modifiers", []):
        lines += ["", "[[modifiers]]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines)


def from_toml(text: str, usual: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec that a TOML document describes."""
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"this is not TOML: {error}; write what print(spec) shows") from None
    return from_dict(said, usual)


def _plain(value: object) -> Any:
    if is_dataclass(value):
        name = type(value).__name__
        usual = defaults(type(value))
        own = {f.name: getattr(value, f.name) for f in fields(value)}
        return {"part": name} | {n: _plain(v) for n, v in own.items() if n not in usual or usual[n] != v}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _object(where: str, said: Any) -> Any:
    if isinstance(said, str):
        said = {"part": said}
    if not isinstance(said, Mapping) or not isinstance(said.get("part"), str):
        _mistyped(where, said, 'a table with part = "..."')
    cls = find(said["part"])
    own = {f.name: f for f in fields(cls)}
    given = {name: value for name, value in said.items() if name != "part"}
    _known_keys(said["part"], given, own)
    values = {name: _value(f"{where}.{name}", value) for name, value in given.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise SpecError(f"{where}: {cls.__name__} cannot be made of {given}: {error}") from None


def _value(where: str, said: Any) -> Any:
    if isinstance(said, Mapping):
        return _object(where, said)
    if isinstance(said, (list, tuple)):
        return tuple(_value(where, item) for item in said)
    return said


def _heads(said: Any) -> Heads:
    if not isinstance(said, Mapping):
        _mistyped("heads", said, "a table with q, kv and dim")
    _known_keys("heads", said, [f.name for f in fields(Heads)])
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    values.setdefault("kv", values.get("q"))
    if missing := [name for name in ("q", "dim") if name not in values]:
        raise SpecError(f"heads say nothing of {missing[0]}; add {missing[0]} = ...")
    return Heads(**values)


def _known_keys(what: str, said: Mapping[str, Any], known: Any) -> None:
    for name in said:
        if name not in known:
            raise SpecError(f"{what} has no {name!r}; {nearest(name, known)}")


def _mistyped(where: str, value: object, wanted: str) -> Any:
    raise SpecError(f"{where} = {value!r} is a {type(value).__name__}; give {wanted}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return repr(value)


__all__ = ["REGISTRY", "from_dict", "from_json", "from_toml", "to_dict", "to_json", "to_toml"]

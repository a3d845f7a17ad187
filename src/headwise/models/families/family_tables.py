"""The tables of families.toml: what `Decoder`, `Encoder` and `BartFamily` hold for each model_type."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from ..model_spec import ModelSpec
from .config_reader import TransformersConfig, register_family

TABLES: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("families.toml").read_text(encoding="utf-8")
)
BASES = TABLES["bases"]
MERGED_FIELDS = ("keys", "refused")
FUNCTION_FIELDS = ("kv", "ropes", "layers_of", "feeds_of", "extras")

Function = TypeVar("Function", bound=Callable[..., Any])
Family = TypeVar("Family")
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Switch(NamedTuple):
    """A choice by a key that is true or false."""

    key: str
    default: bool
    on: str
    off: str = ""


def read_switch(config: TransformersConfig, choice: str | Switch) -> str:
    """Return a fixed choice, or that of a switch."""
    if isinstance(choice, str):
        return choice
    return choice.on if config.read_bool(choice.key, choice.default) else choice.off


def family_function(function: Function) -> Function:
    """Make a function available to families.toml by its name."""
    _FUNCTIONS[function.__name__] = function
    return function


def read_base(name: str, family_class: type[Family]) -> Family:
    """Return a table of the section "bases"."""
    return family_class(**{field: _resolve(field, value) for field, value in BASES[name].items()})


def _resolve(field: str, value: Any) -> Any:
    if value == "none":
        return None
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if "hook" in fields:
            arguments = {name: item for name, item in fields.items() if name != "hook"}
            return _FUNCTIONS[fields["hook"]](**arguments)
        return Switch(**fields) if "key" in fields else fields
    return _FUNCTIONS[value] if field in FUNCTION_FIELDS and isinstance(value, str) else value


def refuse_keys(config: TransformersConfig, refused: dict[str, list[Any]]) -> None:
    """Refuse keys that have another value than their default."""
    for name, (*default, reason) in refused.items():
        config.require_default(name, default[0] if default else None, reason)


def register_families(
    section: str,
    family_class: type[Family],
    build: Callable[[TransformersConfig, str, Family], ModelSpec],
) -> None:
    """Register the families of a section, whose models `build` makes."""
    tables = dict(BASES)
    for name, own in TABLES[section].items():
        base = tables.get(own.pop("like", ""), {})
        merged = {
            field: base.get(field, {}) | own.get(field, {})
            for field in MERGED_FIELDS
            if field in own
        }
        tables[name] = base | own | merged
        fields = {field: _resolve(field, value) for field, value in tables[name].items()}
        reader = partial(_read, build=build, family=family_class(**fields))
        task = fields.get("default_task", getattr(family_class, "default_task", ""))
        register_family(name, fields["prefix"], task)(reader)


def _read(
    config: TransformersConfig, task: str, build: Callable[..., ModelSpec], family: object
) -> ModelSpec:
    return build(config, task, family)

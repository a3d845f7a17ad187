"""Overrides of a study file, such as recipe.steps = 100: how they change its tables, and which are
refused because they would have no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

from ..util.errors import SpecError, suggest

KeyPath = tuple[str, ...]


def override_tables(
    table: Mapping[str, Any], overrides: Mapping[str, Any], names: Mapping[str, Collection[str]]
) -> dict[str, Any]:
    """Set dotted keys in the tables of a study.

    `names` holds the names of "variants", "tasks" and "edits" at the scale that is run. Raises
    SpecError for an override of another name, and for one without effect.

    >>> override_tables({"seeds": [1]}, {"recipe.steps": 3}, {"variants": [], "tasks": []})
    {'seeds': [1], 'recipe': {'steps': 3}}
    """
    values = dict(_list_values(overrides))
    for path in values:
        _check_path(path, names)
    merged = dict(table)
    for key, value in overrides.items():
        merged = merge_tables(merged, _nest(key, value))
    for path, value in values.items():
        present = _look_up(merged, path)
        if value == {} and present:
            key = ".".join(path)
            raise SpecError(
                f"{key} = {{}} has no effect, because tables are merged; set one of its keys, such "
                f"as {key}.{next(iter(present))}"
            )
        for variant, task in product(names["variants"], names["tasks"]):
            levels: list[KeyPath] = [("variants", variant), ("tasks", task), ()]
            _check_precedence(path, levels, merged, values)
    return merged


def merge_tables(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a table key by key; replace everything that is not a table."""
    merged = dict(table)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge_tables(old, value)
        merged[key] = value
    return merged


def _check_path(path: KeyPath, names: Mapping[str, Collection[str]]) -> None:
    """Raise SpecError for an override of a scale, or of a name that the study does not have."""
    key = ".".join(path)
    if path[0] == "scales":
        inner = ".".join(path[2:]) or "recipe.steps"
        raise SpecError(
            f"{key} cannot be set, because the scale is applied before; set {inner}, which changes "
            "the scale that is run"
        )
    if path[0] in names and len(path) > 1 and path[1] not in names[path[0]]:
        kind, name = path[:2]
        of_kind = names[kind]
        remedy = suggest(name, of_kind) if of_kind else f"add [{kind}.{name}] to the file"
        raise SpecError(
            f"{key} cannot be set, because {kind} has no {name!r} at this scale; {remedy}"
        )


def _check_precedence(
    path: KeyPath, levels: list[KeyPath], merged: Mapping[str, Any], values: Mapping[KeyPath, Any]
) -> None:
    """Raise SpecError if an override of the recipe or the model has no effect on a variant and a
    task.

    A field of the recipe or the model is the one of the first of `levels` that sets it: of the
    variant, the task, and the whole study.
    """
    own = next(level for level in levels if path[: len(level)] == level)
    inner = path[len(own) :]
    if len(inner) < 2 or inner[0] not in ("recipe", "model"):
        return
    field = inner[:2]
    first = next((level for level in levels if _look_up(merged, level + field) is not None), own)
    has_effect = _look_up(merged, first + inner) == values[path]
    if not has_effect and first + inner not in values:
        raise SpecError(
            f"{'.'.join(path)} has no effect on {first[1]!r}, because {'.'.join(first + field)} = "
            f"{_look_up(merged, first + field)!r} takes precedence; set "
            f"{'.'.join(first + inner)} too"
        )


def _list_values(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and the value of everything in nested tables that is not a table itself.

    >>> list(_list_values({"recipe": {"steps": 3}, "model.width": 32}))
    [(('recipe', 'steps'), 3), (('model', 'width'), 32)]
    """
    for key, value in table.items():
        inner = (*path, *key.split("."))
        if isinstance(value, Mapping) and value:
            yield from _list_values(value, inner)
        else:
            yield inner, value


def _look_up(table: Any, path: KeyPath) -> Any:
    """Return the value at a path in nested tables; None if there is none."""
    for key in path:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table


def _nest(path: str, value: Any) -> dict[str, Any]:
    """Make the table that sets one dotted key.

    >>> _nest("recipe.steps", 3)
    {'recipe': {'steps': 3}}
    """
    first, _, rest = path.partition(".")
    return {first: _nest(rest, value) if rest else value}

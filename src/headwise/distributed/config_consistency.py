"""Whether ranks run the same code, on the same data, for the same end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import SpecError
from .ranks import ProcessMesh


def fingerprint_code() -> dict[str, str]:
    """What runs here: versions, and a checksum of every module of this package."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()} ".encode())
        found.update(path.read_bytes())
    return {"headwise": __version__, "source": found.hexdigest()[:12], "torch": torch.__version__}


def check_same_config(mesh: ProcessMesh, config: Mapping[str, Any]) -> None:
    """Refuse ranks of which one says something else than the leader, by the first difference."""
    first, *others = mesh.every(config)
    for rank, other in enumerate(others, 1):
        if found := find_difference(first, other):
            name, led, own = found
            raise SpecError(f"{name} is {led} on rank 0, {own} on rank {rank}; start all ranks with the same of each")


def find_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Where two configurations first differ: the name, and what each says; None where they do not.

    >>> find_difference({"recipe": {"lr": 0.1, "seed": 3}}, {"recipe": {"lr": 0.2, "seed": 3}})
    ('recipe.lr', '0.1', '0.2')
    """
    first, second = _flatten_config("", one), _flatten_config("", other)
    for name in [*first, *(name for name in second if name not in first)]:
        if first.get(name) != second.get(name):
            return name, _format_value(first, name), _format_value(second, name)
    return None


def _flatten_config(where: str, value: Any) -> dict[str, Any]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {where: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found |= _flatten_config(f"{where}.{key}" if where else str(key), inner)
    return found


def _format_value(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not said"

"""Check that all ranks run the same code with the same configuration and data."""

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
    """Return the versions of headwise and torch, and a checksum of the source of this package."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()} ".encode())
        digest.update(path.read_bytes())
    return {"headwise": __version__, "source": digest.hexdigest()[:12], "torch": torch.__version__}


def check_same_config(mesh: ProcessMesh, config: Mapping[str, Any]) -> None:
    """Raise SpecError at the first value that differs between the leader and another rank."""
    first, *others = mesh.every(config)
    for rank, other in enumerate(others, 1):
        if difference := find_difference(first, other):
            name, expected, actual = difference
            raise SpecError(
                f"{name} is {expected} on rank 0, {actual} on rank {rank}; start all ranks with the same configuration"
            )


def find_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the name and both values of the first difference of two configurations; None if they are equal.

    >>> find_difference({"recipe": {"lr": 0.1, "seed": 3}}, {"recipe": {"lr": 0.2, "seed": 3}})
    ('recipe.lr', '0.1', '0.2')
    """
    first, second = _flatten_config("", one), _flatten_config("", other)
    for name in [*first, *(name for name in second if name not in first)]:
        if first.get(name) != second.get(name):
            return name, _format_value(first, name), _format_value(second, name)
    return None


def _flatten_config(prefix: str, value: Any) -> dict[str, Any]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in items:
        flat |= _flatten_config(f"{prefix}.{key}" if prefix else str(key), inner)
    return flat


def _format_value(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not set"

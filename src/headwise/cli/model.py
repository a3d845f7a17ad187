"""A whole model on the command line: which arguments name one, and the page about it."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .screen import LARGEST, Wrong, document

if TYPE_CHECKING:
    from ..blueprint import Model

MARKS = {".json": ("model_type", "architectures"), ".toml": ("stacks", "format")}  # keys that no spec has


def named_model(name: str | None) -> Model | None:
    """The model that this folder, config.json or TOML file describes; None of anything else."""
    path = Path(name or "-")
    if not path.is_dir() and not set(_keys(path)) & set(MARKS.get(path.suffix, ())):
        return None
    from ..families import read

    return read(path)


def _keys(path: Path) -> dict[str, Any]:
    """The keys of a file, none of one that is something else: who reads specs will say what is wrong with it."""
    if path.suffix not in MARKS or not path.is_file() or path.stat().st_size > LARGEST:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        said = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def page(model: Model, given: argparse.Namespace) -> str:
    """What was asked of a model: its text, its table as a document, or its table."""
    from ..blueprint import Table, to_dict, to_toml

    for option, value in (("--set", given.changes), ("--model", given.model), ("--heads", given.heads)):
        if value:
            raise Wrong(f"{option} is for one spec, and {given.spec} describes a whole model; change the file")
    if given.toml:
        return to_toml(model).rstrip()
    return document({"model": to_dict(model), "table": Table(model).data}) if given.json else str(Table(model))

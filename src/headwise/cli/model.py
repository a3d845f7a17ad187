"""A whole model on the command line: which arguments name one, and the page about it."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .screen import MAX_FILE_BYTES, UsageError, to_json

if TYPE_CHECKING:
    from ..blueprint import ModelSpec

MODEL_KEYS = {".json": ("model_type", "architectures"), ".toml": ("stacks", "format")}  # keys that no spec has


def load_model_description(name: str | None) -> ModelSpec | None:
    """The model that this folder, config.json or TOML file describes; None of anything else."""
    path = Path(name or "-")
    if not path.is_dir() and not set(_read_keys(path)) & set(MODEL_KEYS.get(path.suffix, ())):
        return None
    from ..families import read_model_spec

    return read_model_spec(path)


def _read_keys(path: Path) -> dict[str, Any]:
    """The keys of a file, none of one that is something else: who reads specs will say what is wrong with it."""
    if path.suffix not in MODEL_KEYS or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        said = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def print_model_page(model: ModelSpec, given: argparse.Namespace) -> str:
    """What was asked of a model: its text, its table as a document, or its table."""
    from ..blueprint import ModelTable, to_dict, to_toml

    for option, value in (("--set", given.changed_sites), ("--model", given.model), ("--heads", given.heads)):
        if value:
            raise UsageError(f"{option} is for one spec, and {given.spec} describes a whole model; change the file")
    if given.toml:
        return to_toml(model).rstrip()
    return to_json({"model": to_dict(model), "table": ModelTable(model).to_dict}) if given.json else str(ModelTable(model))

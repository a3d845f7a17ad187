"""What a name on the command line stands for: a preset, a spec, a model, or a part of one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .screen import PRESETS, UsageError, apply_changes_to_dict, apply_changes, load_named_spec, parse_spec_text, read_text

if TYPE_CHECKING:
    from ..blueprint import ModelSpec
    from ..spec import AttentionSpec

MAX_CONFIG_BYTES = 2**24  # bytes of a config.json: some name the 21,000 classes of a classifier, twice


def resolve_target(name: str, sizes: Mapping[str, int], changes: Sequence[str]) -> AttentionSpec | ModelSpec:
    """The preset of this name, or what a file or a model's folder describes, after every change.

    `sizes` are for presets. Of a model it is the description that is changed, as `headwise.blueprint` writes it.
    """
    from ..spec import AttentionSpec

    found = _load_target(name, sizes)
    if isinstance(found, AttentionSpec):
        return apply_changes(found, changes)
    if not changes:
        return found
    from .. import blueprint

    return blueprint.from_dict(apply_changes_to_dict(blueprint.to_dict(found), changes))


def short_name(name: str) -> str:
    """A short name for what stands there: a config.json is known by its folder."""
    path = Path(name)
    if name in PRESETS or name == "-":
        return name
    return (path.resolve().parent.name if path.name == "config.json" else path.resolve().stem) or name


def list_spec_keys(found: AttentionSpec | ModelSpec) -> Iterator[str]:
    """Every key of a spec that can be set, "project.overlap"."""
    from ..spec import SLOTS, AttentionSpec

    if isinstance(found, AttentionSpec):
        holders = {"heads": found.heads} | {slot: getattr(found, slot) for slot in SLOTS if slot != "pattern"}
        holders |= {f"modifiers.{n}": modifier for n, modifier in enumerate(found.modifiers)}
        yield from (f"{name}.{field.name}" for name, holder in holders.items() for field in fields(holder))


def _load_target(name: str, sizes: Mapping[str, int]) -> AttentionSpec | ModelSpec:
    if name in PRESETS or (name != "-" and not Path(name).exists()):
        return load_named_spec(name, sizes)
    words = "" if Path(name).is_dir() else read_text(name) if name == "-" else _read_file_start(Path(name))
    model = _load_model(name, words)
    if model is None:
        return parse_spec_text(name, words) if name == "-" and not sizes else load_named_spec(name, sizes)
    if sizes:
        raise UsageError(f"--{next(iter(sizes))} is for presets, and {name} is a model with its own sizes; leave it out")
    return model


def _load_model(name: str, words: str) -> ModelSpec | None:
    """The model that a folder or a text describes; None where it speaks of one layer."""
    from .. import blueprint, families
    from ..presets import DEFAULT_CHOICES

    table = _parse_table(words)
    if "stacks" in table:
        return blueprint.from_dict(table, DEFAULT_CHOICES)
    config = words.lstrip().startswith("{") and not _has_spec_keys(table)
    if config or Path(name).is_dir() or Path(name).name == "config.json":
        return families.read_model_spec(table if name == "-" else name)
    return None


def _read_file_start(path: Path) -> str:
    """The start of a file, as far as it is text: what is wrong with the rest its reader will say."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}; give a .toml or .json file") from None


def _parse_table(words: str) -> Mapping[str, Any]:
    """What a text says by keys; nothing where it is no such text."""
    try:
        said = (json.loads if words.lstrip().startswith("{") else tomllib.loads)(words)
    except (ValueError, RecursionError):  # its reader will say so
        return {}
    return said if isinstance(said, dict) else {}


def _has_spec_keys(table: Mapping[str, Any]) -> bool:
    """Whether these are keys of a spec and not of a config; a text without any may be either, but for a model's."""
    return not table or "heads" in table or ("model" in table and "model_type" not in table)

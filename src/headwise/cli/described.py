"""What a name on the command line stands for: a preset, a spec, a model, or a part of one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .screen import PRESETS, Wrong, after, changed, named_spec, spec_of_words, words_of

if TYPE_CHECKING:
    from ..blueprint import Model
    from ..spec import AttentionSpec

LARGEST = 2**24  # bytes of a config.json: some name the 21,000 classes of a classifier, twice


def described(name: str, sizes: Mapping[str, int], changes: Sequence[str]) -> AttentionSpec | Model:
    """The preset of this name, or what a file or a model's folder describes, after every change.

    `sizes` are for presets. Of a model it is the description that is changed, as `headwise.blueprint` writes it.
    """
    from ..spec import AttentionSpec

    found = _found(name, sizes)
    if isinstance(found, AttentionSpec):
        return changed(found, changes)
    if not changes:
        return found
    from .. import blueprint

    return blueprint.from_dict(after(blueprint.to_dict(found), changes))


def label(name: str) -> str:
    """A short name for what stands there: a config.json is known by its folder."""
    path = Path(name)
    if name in PRESETS or name == "-":
        return name
    return (path.resolve().parent.name if path.name == "config.json" else path.resolve().stem) or name


def keys_of(found: AttentionSpec | Model) -> Iterator[str]:
    """Every key of a spec that can be set, "project.overlap"."""
    from ..spec import SLOTS, AttentionSpec

    if isinstance(found, AttentionSpec):
        holders = {"heads": found.heads} | {slot: getattr(found, slot) for slot in SLOTS if slot != "pattern"}
        holders |= {f"modifiers.{n}": modifier for n, modifier in enumerate(found.modifiers)}
        yield from (f"{name}.{field.name}" for name, holder in holders.items() for field in fields(holder))


def _found(name: str, sizes: Mapping[str, int]) -> AttentionSpec | Model:
    if name in PRESETS or (name != "-" and not Path(name).exists()):
        return named_spec(name, sizes)
    words = "" if Path(name).is_dir() else words_of(name) if name == "-" else _words(Path(name))
    model = _model(name, words)
    if model is None:
        return spec_of_words(name, words) if name == "-" and not sizes else named_spec(name, sizes)
    if sizes:
        raise Wrong(f"--{next(iter(sizes))} is for presets, and {name} is a model with its own sizes; leave it out")
    return model


def _model(name: str, words: str) -> Model | None:
    """The model that a folder or a text describes; None where it speaks of one layer."""
    from .. import blueprint, families
    from ..presets import USUAL

    table = _table(words)
    if "stacks" in table:
        return blueprint.from_dict(table, USUAL)
    config = words.lstrip().startswith("{") and not _speaks_of_heads(table)
    if config or Path(name).is_dir() or Path(name).name == "config.json":
        return families.read(table if name == "-" else name)
    return None


def _words(path: Path) -> str:
    """The start of a file, as far as it is text: what is wrong with the rest its reader will say."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST).decode(errors="replace")
    except OSError as error:
        raise Wrong(f"{str(path)!r} cannot be read: {error.strerror}; give a .toml or .json file") from None


def _table(words: str) -> Mapping[str, Any]:
    """What a text says by keys; nothing where it is no such text."""
    try:
        said = (json.loads if words.lstrip().startswith("{") else tomllib.loads)(words)
    except (ValueError, RecursionError):  # its reader will say so
        return {}
    return said if isinstance(said, dict) else {}


def _speaks_of_heads(table: Mapping[str, Any]) -> bool:
    """Whether these are keys of a spec and not of a config; a text without any may be either, but for a model's."""
    return not table or "heads" in table or ("model" in table and "model_type" not in table)

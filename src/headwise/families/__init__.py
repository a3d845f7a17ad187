"""Architectures of transformers: config.json to a model description and back, and tensor names in checkpoints.

One file per architecture family; `config_reader`, `config_writer`, `attention_config`, `model_builders` and
`weight_names` are what they share. Nothing is loaded here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast

from ..errors import SpecError
from ..model_spec import ModelSpec
from ..model_spec.serialization import MANIFEST_FILE, find_record, read_model_toml
from ..presets import DEFAULT_CHOICES
from .config_reader import FAMILIES, WRITERS, TransformersConfig, read_config
from .config_writer import write_config
from .weight_names import WeightNames

WEIGHT_NAMES: dict[str, WeightNames] = {}
for _module in iter_modules(__path__):
    for _table in vars(import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_table, WeightNames):
            WEIGHT_NAMES.update(dict.fromkeys(_table.families, _table))

__all__ = ["FAMILIES", "WRITERS", "read_model_spec", "write_config"]


def read_model_spec(source: str | Path | Mapping[str, Any]) -> ModelSpec:
    """The model that is described: by a config.json, its keys, a folder as hw.save or transformers write it, or TOML.

    Where heads were cut so that config.json cannot say it, the heads.json beside it does.

    >>> read_model_spec({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}).stacks[0].runs[0].times
    12
    """
    if isinstance(source, Mapping):
        return read_config(TransformersConfig(source, "config"))
    path = Path(source)
    if path.is_dir():
        record = find_record(path)
        if record and record.model:
            return record.model
        found = [path / name for name in (MANIFEST_FILE, "config.json") if (path / name).is_file()]
        if not found:
            raise SpecError(f"{path} holds neither {MANIFEST_FILE} nor config.json; name a model's folder, or a file")
        path = found[0]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}; name a config.json, or a folder that holds one") from None
    if path.suffix == ".toml":
        return read_model_toml(text, str(path), DEFAULT_CHOICES)
    return read_config(TransformersConfig(_read_json(path, text), str(path)))


def _read_json(path: Path, text: str) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise SpecError(f"{path} is not JSON: {error}; give a config.json as transformers writes it") from None
    if not isinstance(said, dict):
        raise SpecError(f"{path} holds a {type(said).__name__}, not keys; give a config.json as transformers writes it")
    return cast("dict[str, Any]", said)


def get_weight_names(family: str) -> WeightNames:
    """The names in files of a family.

    >>> get_weight_names("qwen3") is get_weight_names("llama")
    True
    """
    if family not in WEIGHT_NAMES:
        raise SpecError(f"weights of {family!r} are not read yet; those of {', '.join(sorted(WEIGHT_NAMES))} are")
    return WEIGHT_NAMES[family]

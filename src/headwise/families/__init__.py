"""config.json to a whole model, described: one file per architecture, nothing loaded, no weights touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast

from ..blueprint import ModelSpec
from ..blueprint.manifest import MANIFEST_FILE, read_model_toml
from ..blueprint.records import find_record
from ..errors import SpecError
from ..presets import DEFAULT_CHOICES
from .config import TransformersConfig
from .registry import FAMILIES, WRITERS, read_config
from .writing import write_config

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FAMILIES", "WRITERS", "write_config", "read_model_spec"]


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

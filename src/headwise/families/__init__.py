"""config.json to a whole model, described: one file per architecture, nothing loaded, no weights touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, cast

from .. import blueprint
from ..blueprint import Model
from ..errors import SpecError
from ..presets import USUAL
from .config import Config
from .registry import FAMILIES, model

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FAMILIES", "read"]


def read(what: str | Path | Mapping[str, Any]) -> Model:
    """The model that a config describes: a config.json, a folder that holds one, its keys, or a blueprint as TOML.

    >>> read({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}).stacks[0].runs[0].times
    12
    """
    if isinstance(what, Mapping):
        return model(Config(what, "config"))
    path = Path(what)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise SpecError(f"{path.parent} holds no config.json; name a model's folder, or a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}; name a config.json, or a folder that holds one") from None
    if path.suffix == ".toml":
        return blueprint.from_toml(text, USUAL)
    return model(Config(_keys(path, text), str(path)))


def _keys(path: Path, text: str) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise SpecError(f"{path} is not JSON: {error}; give a config.json as transformers writes it") from None
    if not isinstance(said, dict):
        raise SpecError(f"{path} holds a {type(said).__name__}, not keys; give a config.json as transformers writes it")
    return cast("dict[str, Any]", said)

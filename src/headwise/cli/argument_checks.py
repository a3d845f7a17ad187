"""Checks of arguments that need no model and do not import torch, so that a mistake is reported at once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import suggest
from .arguments import DESCRIPTION_SUFFIXES, PRESETS, is_manifest_or_config, read_description_keys
from .command_parser import UsageError

CONFIG_FILE = "config.json"


def check_model_path(name: str) -> None:
    """Raise unless `name` is a folder with a model, or a file that may hold one; specs and presets have no weights."""
    from ..model_spec.serialization import MANIFEST_FILE

    path = Path(name)
    if path.is_dir():
        if not (path / MANIFEST_FILE).is_file() and not (path / CONFIG_FILE).is_file():
            raise UsageError(f"{name} contains neither {MANIFEST_FILE} nor {CONFIG_FILE}; give a folder with a model")
        return
    remedy = f"train a model with it: headwise train TASK --model {name} --out DIR"
    if not path.exists():
        if name in PRESETS:
            raise UsageError(f"{name} is a preset, without weights; {remedy}")
        raise UsageError(f"there is no folder or file {name!r}; give a folder with a model")
    if path.suffix in DESCRIPTION_SUFFIXES:
        keys = read_description_keys(path)
        if "heads" in keys or "stacks" in keys:
            what = "a model" if "stacks" in keys else "one attention layer"
            raise UsageError(f"{name} describes {what}, without weights; {remedy}")
        where = f", {path.parent}" if is_manifest_or_config(path) else ""
        raise UsageError(f"{name} is no model; give the folder of one{where}")


def check_input_file(option: str, name: str | None) -> None:
    """Raise unless a file of texts or settings exists and can be read; None is no file."""
    if name is None:
        return
    path = Path(name)
    where = f" for {option}" if option.startswith("-") else ""  # else a positional argument
    if path.is_dir():
        raise UsageError(f"{option} {name} is a folder; give a file")
    if not path.exists():
        raise UsageError(f"there is no file {name!r}{where}; give one that exists")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{option} {name} cannot be read; give a file that you may read")
    if path.is_file() and not path.stat().st_size:
        raise UsageError(f"{option} {name} is empty; give a file with text")


def check_tokenizer(name: str | None) -> None:
    """Raise unless --tokenizer is a file, or "bytes"."""
    if name != "bytes" and name is not None and not Path(name).is_file():
        raise UsageError(f"there is no file {name!r} for --tokenizer; give a tokenizer.json, or bytes")


def check_suffix(option: str, name: str | None, suffixes: Sequence[str]) -> None:
    """Raise unless a file to write has one of these suffixes."""
    if name is not None and Path(name).suffix.lower() not in suffixes:
        raise UsageError(f"{option} {name} has none of the suffixes {', '.join(suffixes)}; give one of these")


def check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    """Raise for an unknown name, with the most similar one; None is no choice."""
    if value is not None and value not in (names := list(choices)):
        raise UsageError(f"{option} {value!r} is unknown; {suggest(value, names)}")


def check_minimum(option: str, value: float | None, minimum: float) -> None:
    """Raise for a number below `minimum`, or one that is not finite; None is no number."""
    if value is not None and not (minimum <= value < math.inf):
        raise UsageError(f"{option} {value:g} is too small; give {minimum:g} or more")


def check_positive(option: str, value: float | None) -> None:
    """Raise for a number that is not above 0; None is no number."""
    if value is not None and not (0 < value < math.inf):
        raise UsageError(f"{option} {value:g} is out of range; give a number above 0")


def check_share(option: str, value: float | None) -> None:
    """Raise unless a number is above 0 and at most 1; None is no number."""
    if value is not None and not 0 < value <= 1:
        raise UsageError(f"{option} {value:g} is no share; give a number above 0, and at most 1")

"""Checks of arguments that need no model and do not import torch, so that a mistake is reported at
once.
"""

from __future__ import annotations

import os
from pathlib import Path

from .arguments import DESCRIPTION_SUFFIXES, PRESETS, read_description
from .options import UsageError

CONFIG_FILE = "config.json"
MANIFEST_FILE = "headwise.toml"  # that of headwise.models.model_spec, which imports torch


def check_model_path(_: str, name: str) -> None:
    """Raise unless `name` is a folder with a model, or a file that may hold one; specs and presets
    have no weights.
    """
    path = Path(name)
    if path.is_dir():
        if not any((path / file).is_file() for file in (MANIFEST_FILE, CONFIG_FILE)):
            fact = f"{name} contains neither {MANIFEST_FILE} nor {CONFIG_FILE}"
            raise UsageError(f"{fact}; give a folder with a model")
        return
    remedy = f"train a model with it: headwise train TASK --model {name} --out DIR"
    if not path.exists():
        if name in PRESETS:
            raise UsageError(f"{name} is a preset, without weights; {remedy}")
        raise UsageError(f"there is no folder or file {name!r}; give a folder with a model")
    if path.suffix == ".py":
        raise UsageError(
            f"{name} is Python code, not a model; give a folder with a model, and parts by "
            f"--import {name}"
        )
    if path.suffix in DESCRIPTION_SUFFIXES:
        keys = read_description(path)
        if "heads" in keys or "stacks" in keys:
            what = "a model" if "stacks" in keys else "one attention layer"
            raise UsageError(f"{name} describes {what}, without weights; {remedy}")
        raise UsageError(f"{name} is no model; give the folder of one")


def check_input_file(option: str, name: str) -> None:
    """Raise unless a file of texts or settings exists and can be read."""
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


def check_tokenizer(option: str, name: str) -> None:
    """Raise unless --tokenizer is a file, or "bytes"."""
    if name != "bytes" and not Path(name).is_file():
        raise UsageError(f"there is no file {name!r} for {option}; give a tokenizer.json, or bytes")


def check_text_model(model: str, option: str, remedy: str) -> None:
    """Raise if a config.json shows that a model reads images, and `option` gives it text."""
    config = read_description(Path(model) / CONFIG_FILE)
    if "patch_size" in config and not {"vocab_size", "text_config"} & set(config):
        raise UsageError(f"{model} reads images, and {option} gives text; {remedy}")

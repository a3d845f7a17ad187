"""Checks of arguments that need no model and do not import torch, so that a mistake is reported at
once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .arguments import DESCRIPTION_SUFFIXES, PRESETS, is_manifest_or_config, read_description_keys
from .options import UsageError

CONFIG_FILE = "config.json"


def check_model_path(_: str, name: str) -> None:
    """Raise unless `name` is a folder with a model, or a file that may hold one; specs and presets
    have no weights.
    """
    from ..models.model_spec.serialization import MANIFEST_FILE

    path = Path(name)
    if path.is_dir():
        if not (path / MANIFEST_FILE).is_file() and not (path / CONFIG_FILE).is_file():
            raise UsageError(
                f"{name} contains neither {MANIFEST_FILE} nor {CONFIG_FILE}; give a folder with a "
                "model"
            )
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
        keys = read_description_keys(path)
        if "heads" in keys or "stacks" in keys:
            what = "a model" if "stacks" in keys else "one attention layer"
            raise UsageError(f"{name} describes {what}, without weights; {remedy}")
        where = f", {path.parent}" if is_manifest_or_config(path) else ""
        raise UsageError(f"{name} is no model; give the folder of one{where}")


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


# --- Heads that the config.json of a model has ----------------------------------------------------

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_KEYS = ("num_key_value_heads", "num_kv_heads")
OTHER_KV_KEYS = ("multi_query", "new_decoder_architecture", "kv_lora_rank", "head_dim_per_layer")


class HeadCounts(NamedTuple):
    """The number of layers of a model, and of heads and key-value heads in each
    (None if unknown).
    """

    layers: int
    heads: int
    kv: int | None


def read_head_counts(model: str) -> HeadCounts | None:
    """Read the head counts of a model with one stack of equal layers from its config.json; None if
    it has another form.

    The counts of a pruned model and of an encoder-decoder are unknown before it is loaded.
    """
    config = None if (Path(model) / "heads.json").exists() else _read_config(model)
    if config is None or config.get("is_encoder_decoder"):
        return None
    layers = _find_count(config, LAYER_KEYS)
    heads = _find_count(config, HEAD_KEYS)
    if layers is None or heads is None:
        return None
    kv = (
        None
        if any(key in config for key in OTHER_KV_KEYS)
        else _find_count(config, KV_KEYS) or heads
    )
    return HeadCounts(layers, heads, kv)


def _read_config(model: str) -> Mapping[str, Any] | None:
    """The config.json of a folder; None if there is none, or it cannot be read, which loading the
    model reports.
    """
    try:
        config = json.loads((Path(model) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, Mapping) else None


def _find_count(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def check_heads_of_config(model: str, name: str, layer: int | None, heads: Sequence[int]) -> None:
    """Raise if a config.json shows that a model lacks the layer or the heads that an argument
    names.
    """
    counts = read_head_counts(model)
    if counts is None:
        return
    if layer is not None and layer >= counts.layers:
        raise UsageError(
            f"{name}: {model} has no layer {layer}; its layers are 0..{counts.layers - 1}"
        )
    wrong = [head for head in heads if head >= counts.heads]
    if wrong:
        raise UsageError(
            f"{name}: {model} has no head {wrong[0]}; the heads of a layer are "
            f"0..{counts.heads - 1}"
        )


def check_routing_of_config(model: str, always: int, active: int) -> None:
    """Raise if a config.json shows that a model has fewer heads than are always active and active
    by choice.
    """
    counts = read_head_counts(model)
    if counts is not None and always + active > counts.heads:
        raise UsageError(
            f"--to routed={always},{active} needs {always + active} heads, and a layer of {model} "
            f"has {counts.heads}; "
            f"give two numbers with a sum of at most {counts.heads}"
        )


def check_text_model(model: str, option: str, remedy: str) -> None:
    """Raise if a config.json shows that a model reads images, and `option` gives it text."""
    config = _read_config(model)
    if (
        config is not None
        and "patch_size" in config
        and "vocab_size" not in config
        and "text_config" not in config
    ):
        raise UsageError(f"{model} reads images, and {option} gives text; {remedy}")


def check_groups_of_config(model: str, kv: int) -> None:
    """Raise if a config.json shows that the key-value heads of a model cannot be pooled to `kv`
    equal groups.
    """
    counts = read_head_counts(model)
    if counts is None or counts.kv is None or counts.kv % kv == 0:
        return
    divisors = [count for count in range(1, counts.kv + 1) if counts.kv % count == 0]
    raise UsageError(
        f"--kv {kv} does not divide the {counts.kv} key-value heads of {model}; use one of "
        f"{divisors}"
    )

"""Model architectures of the transformers library: read and write config.json, and name tensors in
checkpoints.

In reading order:

- `config_reader` reads config.json key by key, and has the registry `FAMILIES`; `config_writer`
  writes one.
- `attention_config` reads RoPE settings, score scales and the layers with a sliding window.
- `decoders` reads families of decoders from their tables in families.toml;
  `decoder_families` has functions for what the tables cannot express.
- `encoders` does so for encoders, also of images, and encoder-decoders.
- published_models.toml names a few models of the literature, with the keys of their config.json.
- `quantization_config` reads the number format of quantised weights, and which weights have it.
- `weight_names` maps our tensors to names, shapes and slices in checkpoint files, by the tables of
  weight_names.toml.

This package reads no weights; `headwise.hub` does that.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ...attention.spec_builder import DEFAULT_CHOICES
from ...util.errors import SpecError
from ...util.files import read_text_file
from ...util.model_names import parse_hub_id
from ...util.size_limits import parse_json
from ..hub_files import fetch_model
from ..model_spec import ModelSpec
from ..model_spec.serialization import MANIFEST_FILE, find_record, read_model_toml
from . import decoder_families, encoders
from .config_reader import FAMILIES, TransformersConfig, read_config
from .config_writer import WRITERS, write_config
from .quantization_config import with_quantization
from .weight_names import WeightNames, read_weight_names

# Importing these modules registers their families.
READERS = (decoder_families, encoders)
WEIGHT_NAMES = read_weight_names()
CONFIG_REMEDY = "give a config.json written by transformers"
_PUBLISHED = (Path(__file__).parent / "published_models.toml").read_text(encoding="utf-8")
# The keys of config.json, by name. A name can be given where a model folder is expected, as in
# ``headwise cost gpt3``; weights are not part of it.
PUBLISHED_MODELS: dict[str, Mapping[str, Any]] = {
    name: table["config"] for name, table in tomllib.loads(_PUBLISHED).items()
}

__all__ = ["FAMILIES", "PUBLISHED_MODELS", "WRITERS", "read_model_spec", "write_config"]


def read_model_spec(source: str | Path | Mapping[str, Any]) -> ModelSpec:
    """Return the model described by `source`: a config.json, its keys as a mapping, a TOML file, or
    a model folder; a name of `PUBLISHED_MODELS`, or a Hub id, whose settings are downloaded, unless
    a file or folder has the same name.

    A folder is one written by hw.save or by transformers. If it has a heads.json with a model
    description, that description is used, because config.json cannot express models with pruned
    heads.

    >>> read_model_spec({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}).stacks[
    ...     0
    ... ].runs[0].times
    12
    >>> read_model_spec("gpt3").stacks[0].runs[0].times
    96
    """
    if isinstance(source, Mapping):
        return _read_with_quantization(TransformersConfig(source, "config"))
    path = Path(source)
    if str(source) in PUBLISHED_MODELS and not path.exists():
        return _read_with_quantization(
            TransformersConfig(PUBLISHED_MODELS[str(source)], str(source))
        )
    hub_id = parse_hub_id(path)
    if hub_id is not None:
        path = fetch_model(hub_id, weights=False)
    if path.is_dir():
        record = find_record(path)
        if record and record.model:
            return record.model
        candidates = [
            path / name for name in (MANIFEST_FILE, "config.json") if (path / name).is_file()
        ]
        if not candidates:
            raise SpecError(
                f"{path} holds neither {MANIFEST_FILE} nor config.json; name a model folder or a "
                "file"
            )
        path = candidates[0]
    text = read_text_file(path)
    if path.suffix == ".toml":
        return read_model_toml(text, str(path), DEFAULT_CHOICES)
    settings = parse_json(str(path), text, CONFIG_REMEDY)
    if not isinstance(settings, dict):
        raise SpecError(
            f"{path} holds a {type(settings).__name__}, not a JSON object; {CONFIG_REMEDY}"
        )
    config = TransformersConfig(cast("dict[str, Any]", settings), str(path))
    return _read_with_quantization(config)


def _read_with_quantization(config: TransformersConfig) -> ModelSpec:
    model = read_config(config)
    return with_quantization(config, model, WEIGHT_NAMES.get(model.name))


def get_weight_names(family: str) -> WeightNames:
    """Return the tensor names that checkpoints of this family use.

    >>> get_weight_names("qwen3") is get_weight_names("llama")
    True
    """
    if family not in WEIGHT_NAMES:
        raise SpecError(
            f"cannot load weights of {family!r}; use one of {', '.join(sorted(WEIGHT_NAMES))}"
        )
    return WEIGHT_NAMES[family]

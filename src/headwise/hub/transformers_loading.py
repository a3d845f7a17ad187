"""Load folders with transformers without running code that their settings name, and without reading
pickles.

Every call of a loader of transformers in headwise is in this module, so that the protection has one
place. The scripts in `surgery.hf_export`, which run without headwise, repeat its arguments.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..util.errors import SpecError
from .checkpoint_weights import note_zero_weights
from .tokenizer_files import CONFIG_FILE, read_json

# Settings whose values may name code of the Hub, which transformers would download and run
# (CVE-2026-4372).
IMPLEMENTATION_KEY = re.compile(r"_?(attn|experts)_implementation(_internal)?")
IMPLEMENTATIONS = {
    None,
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
}
IMPLEMENTATIONS |= {"grouped_mm", "batched_mm"}
KERNEL_KEYS = {"kernels", "use_kernels", "kernel_config"}
# Methods of quantisation for which transformers fetches kernels when the model runs.
HUB_QUANTIZATIONS = {"fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "nvfp4", "eetq", "metal"}
# Settings that name code or other files of the folder, and that the classes of transformers do not
# need.
IGNORED_KEYS = {"auto_map", "custom_pipelines", "trust_remote_code", "configuration_files"}
ADAPTER_FILE = "adapter_config.json"  # it may name another model, which transformers would load too
WEIGHT_GLOBS = ("*.safetensors", "*.safetensors.index.json")
# None lets transformers choose between its own sdpa and eager; it replaces whatever config.json
# asks for.
SAFE_ARGUMENTS: Mapping[str, Any] = {"trust_remote_code": False, "attn_implementation": None}


def remove_code_settings(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a config.json without settings that name code, at any depth; `source` is its name in
    messages.

    Raises SpecError for a setting that asks for code of the Hub. Code shipped with a model is left
    out, because transformers has the classes of known models itself.

    >>> remove_code_settings({"model_type": "gpt2", "_attn_implementation": "sdpa"}, "config.json")
    {'model_type': 'gpt2'}
    >>> remove_code_settings(
    ...     {"text_config": {"attn_implementation": "owner/kernel"}}, "config.json"
    ... )
    Traceback (most recent call last):
    headwise.util.errors.SpecError: config.json sets attn_implementation to 'owner/kernel', which may run code of ...
    """
    for key, value in _iter_settings(config):
        values = (
            list(value.values())
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else [value]
        )
        is_foreign = any(
            isinstance(one, (dict, list)) or one not in IMPLEMENTATIONS for one in values
        )
        if (IMPLEMENTATION_KEY.fullmatch(key) and is_foreign) or (key in KERNEL_KEYS and value):
            raise SpecError(
                f"{source} sets {key} to {str(value)[:60]!r}, which may run code of the Hub; "
                "remove that line"
            )
    return _without_code_settings(config)


def _iter_settings(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of a JSON document with its value, at any depth."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield from part.items()
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)


def _without_code_settings(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_code_settings(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _without_code_settings(one)
        for key, one in value.items()
        if not IMPLEMENTATION_KEY.fullmatch(key) and key not in KERNEL_KEYS | IGNORED_KEYS
    }


def check_folder(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder without those that name code; a notice lists those that are
    ignored.

    Raises SpecError if they ask for code of the Hub, or if the folder is an adapter of another
    model. Settings that cannot be read give {}; the loader says what is wrong with them.
    """
    if (folder / ADAPTER_FILE).exists():
        raise SpecError(
            f"{folder} has {ADAPTER_FILE}, which names another model; give a folder with merged "
            "weights"
        )
    try:
        settings = read_json(folder / CONFIG_FILE)
    except SpecError:
        return {}
    clean = remove_code_settings(settings, f"{CONFIG_FILE} of {folder}")
    ignored = {key for key, value in _iter_settings(settings) if key in IGNORED_KEYS and value}
    for key in sorted(ignored):
        logging.getLogger("headwise").warning(
            "headwise: %s of %s: %s is ignored, no code is run", CONFIG_FILE, folder, key
        )
    return clean


def load_config(folder: Path) -> Any:
    """The config of transformers for a folder, from its settings without those that name code."""
    import transformers

    settings = remove_code_settings(read_json(folder / CONFIG_FILE), f"{CONFIG_FILE} of {folder}")
    with tempfile.TemporaryDirectory() as clean:
        Path(clean, CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")
        return transformers.AutoConfig.from_pretrained(clean, trust_remote_code=False)


def load_model(folder: Path) -> nn.Module:
    """Load a folder with transformers, in eval mode; without weights, build the model on the meta
    device.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = load_config(folder)
    _refuse_hub_quantization(config, folder)
    model_class = find_model_class(config)
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_GLOBS):
        return build_without_weights(model_class, config)
    options = {"use_safetensors": True, "local_files_only": True, **SAFE_ARGUMENTS}
    with without_hub_kernels():
        model = model_class.from_pretrained(folder, config=config, **options).eval()
    for _ in note_zero_weights(folder, model.named_parameters()):
        pass
    return model


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Context in which transformers does not find the package `kernels`, through which models fetch
    code of the Hub.
    """
    from transformers.integrations import hub_kernels

    module: Any = hub_kernels
    before = module.is_kernels_available
    module.is_kernels_available = lambda *_, **__: False
    try:
        yield
    finally:
        module.is_kernels_available = before


def _refuse_hub_quantization(config: Any, folder: Path) -> None:
    """Raise SpecError for a method of quantisation that would fetch kernels with the package
    `kernels`.
    """
    method = next(
        (value for key, value in _iter_settings(config.to_dict()) if key == "quant_method"), None
    )
    if (
        str(getattr(method, "value", method)) in HUB_QUANTIZATIONS
        and find_spec("kernels") is not None
    ):
        fact = (
            f"{CONFIG_FILE} of {folder} has the quantisation {method}, which runs code of the Hub"
        )
        raise SpecError(
            f"{fact}; remove the package kernels, or give a folder with weights that are not "
            "quantised"
        )


def build_without_weights(model_class: Any, config: Any) -> nn.Module:
    """Build a model of transformers on the meta device, in eval mode."""
    with torch.device("meta"), without_hub_kernels():
        from_config = getattr(model_class, "from_config", None) or model_class._from_config
        return from_config(config, attn_implementation=None).eval()


def find_model_class(config: Any) -> Any:
    """The model class that a config names, else AutoModel."""
    import transformers

    model_class = getattr(transformers, str((config.architectures or [""])[0]), None)
    is_model = isinstance(model_class, type) and issubclass(
        model_class, transformers.PreTrainedModel
    )
    return model_class if is_model else transformers.AutoModel


def check_config_values(keys: Mapping[str, Any]) -> None:
    """Make the config of transformers for these keys, which raises what its own checks raise."""
    import transformers

    options = {
        name: value for name, value in _without_code_settings(keys).items() if name != "model_type"
    }
    transformers.AutoConfig.for_model(keys["model_type"], **options)

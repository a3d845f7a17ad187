"""Load folders with transformers without running code that their settings name, and without reading
pickles.

All calls of transformers loaders are in this module, so that the protection is in one place. The
script `load_model.txt`, which runs without headwise, repeats its arguments. Also reads
tokenizers, special ids and class names of a folder.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models import Transformer
from ..models.hub_files import ADAPTER_FILE, CONFIG_FILE
from ..models.model_spec import ModelSpec, ProcessorSpec
from ..models.model_spec.serialization import RECORD_FILE, TOKENIZER_FILE
from ..models.save_load import check_processor
from ..models.vocabulary import read_tokenizer_file
from ..observe.inspect.model_tokenizer import (
    TOKENIZER_REMEDY,
    find_tokenizer,
    get_surrounding_ids,
    read_tokenizer,
    replace_tokenizer,
    with_tokenizer,
)
from ..util.errors import SpecError
from ..util.files import read_text_file
from ..util.size_limits import parse_json
from .checkpoint_weights import note_zero_weights

# Settings that may name code of the Hub, which transformers would download and run
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
WEIGHT_GLOBS = ("*.safetensors", "*.safetensors.index.json")
# None lets transformers choose between its own sdpa and eager; it replaces whatever config.json
# asks for.
SAFE_ARGUMENTS: Mapping[str, Any] = {"trust_remote_code": False, "attn_implementation": None}


def remove_code_settings(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a config.json without settings that name code, at any depth; `source` is its name in
    messages.

    Raises SpecError for a setting that asks for code of the Hub. Code shipped with a model is
    dropped, because transformers has classes for known models.

    >>> remove_code_settings({"model_type": "gpt2", "_attn_implementation": "sdpa"}, "config.json")
    {'model_type': 'gpt2'}
    >>> remove_code_settings(
    ...     {"text_config": {"attn_implementation": "owner/kernel"}}, "config.json"
    ... )
    Traceback (most recent call last):
    headwise.util.errors.SpecError: config.json sets attn_implementation to 'owner/kernel', which
    may run code of ...
    """
    for key, value in _iter_settings(config):
        values = value if isinstance(value, list) else [value]
        values = list(value.values()) if isinstance(value, dict) else values
        is_foreign = any(
            isinstance(one, (dict, list)) or one not in IMPLEMENTATIONS for one in values
        )
        if (IMPLEMENTATION_KEY.fullmatch(str(key)) and is_foreign) or (
            key in KERNEL_KEYS and value
        ):
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
        if not IMPLEMENTATION_KEY.fullmatch(str(key)) and key not in KERNEL_KEYS | IGNORED_KEYS
    }


def is_known_to_transformers(model_type: object) -> bool:
    """Return True if transformers has this model_type."""
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def check_folder(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder without those that name code; a notice lists those that are
    ignored.

    Raises SpecError if they ask for code of the Hub, or if the folder is an adapter of another
    model. Unreadable settings give {}; the loader reports the error.
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
    """Load the transformers config of a folder, without settings that name code."""
    settings = remove_code_settings(read_json(folder / CONFIG_FILE), f"{CONFIG_FILE} of {folder}")
    return _config_of(settings)


def config_of_settings(settings: Mapping[str, Any], name: str) -> Any:
    """Return the transformers config of these settings, which name no code; an error of theirs
    becomes one line that begins with `name`.
    """
    try:
        return _config_of(settings)
    except Exception as error:  # settings may have any values
        message = " ".join(str(error).split())[:160] or type(error).__name__
        raise SpecError(
            f"{name}: transformers refuses it: {message}; correct config.json"
        ) from None


def _config_of(settings: Mapping[str, Any]) -> Any:
    import transformers

    with tempfile.TemporaryDirectory() as clean:
        Path(clean, CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")
        return transformers.AutoConfig.from_pretrained(clean, trust_remote_code=False)


def load_model(folder: Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a folder with transformers, in eval mode; without weights, build the model on the meta
    device.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = load_config(folder)
    # methods of quantisation that would fetch kernels with the package `kernels`
    settings = _iter_settings(config.to_dict())
    method = next((value for key, value in settings if key == "quant_method"), None)
    is_of_hub = str(getattr(method, "value", method)) in HUB_QUANTIZATIONS
    if is_of_hub and find_spec("kernels") is not None:
        raise SpecError(
            f"{CONFIG_FILE} of {folder} has the quantisation {method}, which runs code of the Hub; "
            "remove the package kernels, or give a folder with weights that are not quantised"
        )
    model_class = find_model_class(config)
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_GLOBS):
        return build_without_weights(model_class, config)
    options = {"use_safetensors": True, "local_files_only": True, **SAFE_ARGUMENTS}
    if dtype is not None:
        options["dtype"] = dtype
    changes = read_json(folder / RECORD_FILE).get("modules")
    with without_hub_kernels():
        if isinstance(changes, dict):  # heads of its layers that config.json cannot describe
            model = load_resized(folder, changes, **options)
        else:
            model = model_class.from_pretrained(folder, config=config, **options).eval()
    for _ in note_zero_weights(folder, model.named_parameters()):
        pass
    return model


LOADER_SOURCE = Path(__file__).with_name("load_model.txt")  # for folders, without headwise


def load_resized(folder: Path, changes: Mapping[str, Any], **options: Any) -> nn.Module:
    """Load a folder whose modules differ from its config.json, by our copy of its loader script."""
    script = types.ModuleType("load_model")
    script.__file__ = str(LOADER_SOURCE)
    exec(compile(LOADER_SOURCE.read_text(encoding="utf-8"), script.__file__, "exec"), vars(script))
    return script.load(folder, modules=changes, **options)


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Hide the package `kernels` from transformers; models use it to fetch code of the Hub."""
    from transformers.integrations import hub_kernels

    module: Any = hub_kernels
    before = module.is_kernels_available
    module.is_kernels_available = lambda *_, **__: False
    try:
        yield
    finally:
        module.is_kernels_available = before


def load_from_gguf(auto_class: Any, path: Path) -> Any:
    """Load the config or the tokenizer that the header of a GGUF file describes."""
    options = {"gguf_file": path.name, "trust_remote_code": False, "local_files_only": True}
    return auto_class.from_pretrained(path.absolute().parent, **options)


def build_without_weights(model_class: Any, config: Any, attention: str | None = None) -> nn.Module:
    """Build a model of transformers on the meta device, in eval mode, with this implementation of
    attention, or the one that transformers chooses.
    """
    with torch.device("meta"), without_hub_kernels():
        from_config = getattr(model_class, "from_config", None) or model_class._from_config
        return from_config(config, attn_implementation=attention).eval()


def find_model_class(config: Any) -> Any:
    """Return the model class named by a config, else AutoModel."""
    import transformers

    model_class = getattr(transformers, str((config.architectures or [""])[0]), None)
    is_model = isinstance(model_class, type) and issubclass(
        model_class, transformers.PreTrainedModel
    )
    return model_class if is_model else transformers.AutoModel


TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
)


def find_class_of_task(config: Any) -> Any:
    """Return the model class named by a config, else that of a language model, else the bare model;
    for a part of another model, the first class of its module that takes this config.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    model_class = find_model_class(config)
    if model_class is not transformers.AutoModel:
        return model_class
    is_decoder = bool(getattr(config, "is_encoder_decoder", False))
    tasks = [f"MODEL_FOR_{task}_MAPPING" for task in TASKS[0 if is_decoder else 1 :]]
    for name in (*tasks, "MODEL_MAPPING"):
        names = getattr(modeling_auto, f"{name}_NAMES", {})
        if config.model_type in names:
            classes = names[config.model_type]
            return getattr(transformers, classes if isinstance(classes, str) else classes[0])
    module = importlib.import_module(
        type(config).__module__.replace(".configuration_", ".modeling_")
    )
    for one in vars(module).values():
        is_model = isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)
        if is_model and one.config_class is type(config) and one.forward is not nn.Module.forward:
            return one
    raise SpecError(f"transformers has no model for the model_type {config.model_type!r}")


def check_config_values(keys: Mapping[str, Any]) -> None:
    """Build the transformers config for these keys, to run its checks."""
    import transformers

    options = {
        name: value for name, value in _without_code_settings(keys).items() if name != "model_type"
    }
    transformers.AutoConfig.for_model(keys["model_type"], **options)


GENERATION_FILE = "generation_config.json"
PROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_CONFIG_FILES = (
    "special_tokens_map.json",
    "tokenizer_config.json",
)  # either may contain the mask token


def read_processor(folder: Path, model_spec: ModelSpec) -> ProcessorSpec:
    """Return the processor spec of a folder. Special tokens in texts are parsed, as in
    transformers.
    """
    config = read_json(folder / CONFIG_FILE) | read_json(folder / GENERATION_FILE)
    fields = _read_config_fields(folder, config, model_spec)
    path = folder / TOKENIZER_FILE
    if path.is_file():
        tokenizer = read_tokenizer_file(path)
        before, behind = get_surrounding_ids(tokenizer)
        fields |= {"tokenizer": read_text_file(path), "prefix_ids": before, "suffix_ids": behind}
        for name in TOKENIZER_CONFIG_FILES:
            entry = read_json(folder / name).get("mask_token")
            word = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(word, str):
                fields["mask"] = tokenizer.token_to_id(word)
                break
    fields |= _read_image_processor(folder, model_spec)
    usage = ProcessorSpec(**fields)
    check_processor(model_spec, usage, f"{folder}/")
    return usage


def _read_config_fields(
    where: Path, config: Mapping[str, Any], model_spec: ModelSpec
) -> dict[str, Any]:
    """Read special ids and class names from a config."""
    vocab_size = _vocab_size(model_spec)
    fields: dict[str, Any] = {
        "parse_special": True,
        "eos": _read_ids(where, config, "eos_token_id", vocab_size),
    }
    if len(model_spec.stacks) > 1:
        fields["bos"] = _read_ids(where, config, "decoder_start_token_id", vocab_size)
    if model_spec.heads and model_spec.heads[0].name == "classes":
        # transformers writes no names for two classes, its default, and then calls them LABEL_0 and
        # LABEL_1.
        count = model_spec.heads[0].outputs
        labels = config.get("id2label")
        labels = labels if isinstance(labels, dict) else {}
        labels = {str(number): str(label) for number, label in labels.items()}
        ordered = [labels[str(n)] for n in range(len(labels)) if str(n) in labels]
        fields["labels"] = tuple(ordered or [f"LABEL_{number}" for number in range(count)])
    return fields


def read_live_processor(
    model: nn.Module, model_spec: ModelSpec, tokenizer: object = None, needed: str = "if it fits"
) -> ProcessorSpec:
    """Return the processor spec of a transformers model in memory, with the given tokenizer or the
    one next to its weights.

    `needed` is "required", which raises without a matching tokenizer, or "if it fits".
    """
    name = Path(type(model).__name__)
    config = dict[str, Any]()
    for source in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        as_dict = getattr(source, "to_dict", None)
        config |= (
            {}
            if as_dict is None
            else {key: value for key, value in as_dict().items() if value is not None}
        )
    usage = ProcessorSpec(**_read_config_fields(name, config, model_spec))
    check_processor(model_spec, usage)
    fast = find_tokenizer(model) if tokenizer is None else read_tokenizer(tokenizer)
    if fast is None and needed == "required":
        raise SpecError(f"{name} comes with no tokenizer; {TOKENIZER_REMEDY}")
    if fast is None:
        return usage
    try:
        return replace_tokenizer(model_spec, usage, fast)
    except SpecError:
        if needed == "required":
            raise
        return usage


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    fields = parse_json(str(path), read_text_file(path), "copy the file again")
    if not isinstance(fields, dict):
        raise SpecError(
            f"{path} contains a {type(fields).__name__}, not an object; copy the file again"
        )
    return fields


def _read_ids(
    folder: Path, config: Mapping[str, Any], name: str, vocab_size: int
) -> tuple[int, ...]:
    """Read one or several ids from a config. Ids outside the vocabulary are dropped: no model
    output has them.
    """
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise SpecError(
            f"{folder}: {name} = {value!r} is neither an id nor a list of ids; correct it, or "
            "remove it"
        )
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)


def _vocab_size(model_spec: ModelSpec) -> int:
    return max(
        (stack.embedding.tokens for stack in model_spec.stacks if stack.embedding), default=0
    )


def _read_image_processor(folder: Path, model_spec: ModelSpec) -> dict[str, Any]:
    """Read pixel size, mean and deviation of a vision model; {} for other models, or if not
    recorded.

    Images are resized to the size of the model; cropping is left out.
    """
    embedding = model_spec.stacks[0].embedding if model_spec.stacks else None
    patches = None if embedding is None else embedding.patches
    config = read_json(folder / PROCESSOR_FILE)
    factor = config.get("rescale_factor", 1 / 255)
    # pixels 0..255 are scaled to 0..1 before they are normalised
    is_scaled = isinstance(factor, float) and math.isclose(factor, 1 / 255)
    if patches is None or not is_scaled or not config.get("do_rescale", True):
        return {}
    statistics = read_pixel_statistics(folder, patches.channels)
    size = (patches.rows * patches.patch_height, patches.columns * patches.patch_width)
    return {"size": size, **statistics} if statistics else {}


def read_pixel_statistics(folder: Path, channels: int) -> dict[str, tuple[float, ...]]:
    """Read the channel means and deviations for normalising pixels in 0..1; {} if they are not
    recorded.
    """
    path = folder / PROCESSOR_FILE
    config = read_json(path)
    if not config:
        return {}
    if not config.get("do_normalize", True):
        return {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    channels_by_name = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    if None in channels_by_name.values():
        return {}
    statistics = dict[str, tuple[float, ...]]()
    for name, value in channels_by_name.items():
        values: list[Any] = value if isinstance(value, list) else [value] * channels
        if len(values) != channels or not all(type(number) in (int, float) for number in values):
            raise SpecError(
                f"{path}: {value!r} is not one number for each of {channels} channels; correct it"
            )
        statistics[name] = tuple(float(number) for number in values)
    return statistics


# --- Attach a tokenizer to a model without one ----------------------------------------------------


def takes_tokens(model: nn.Module) -> bool:
    """Return False for a model of images or sounds."""
    if isinstance(model, Transformer):
        return bool(_vocab_size(model.spec))
    return getattr(model, "main_input_name", "input_ids") == "input_ids"


def has_tokenizer(model: nn.Module) -> bool:
    """Return True if texts can be encoded for a model."""
    if isinstance(model, Transformer):
        return model.usage.tokenizer is not None
    return find_tokenizer(model) is not None


def attach_tokenizer(model: nn.Module, tokenizer: object) -> None:
    """Attach a tokenizer to a model that has none: anything that `read_tokenizer` reads.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> attach_tokenizer(net, "bytes")
    >>> from headwise.models.generation import encode_text
    >>> encode_text(net, "né")
    [110, 195, 169]
    """
    if has_tokenizer(model):
        name = model.spec.name if isinstance(model, Transformer) else type(model).__name__
        raise SpecError(f"{name} has a tokenizer of its own; leave {tokenizer!r} out")
    if not isinstance(model, Transformer):
        with_tokenizer(model, tokenizer)
        return
    spec = model.spec
    if not _vocab_size(spec):
        raise SpecError(f"{spec.name} takes no token ids, so no text; leave {tokenizer!r} out")
    model.usage = replace_tokenizer(spec, model.usage, read_tokenizer(tokenizer))

"""Read the tokenizer, special ids and class names of a transformers folder; attach a tokenizer to a
model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..models import Transformer
from ..models.model_spec import ModelSpec, ProcessorSpec
from ..models.model_spec.serialization import TOKENIZER_FILE
from ..models.save_load import check_processor
from ..models.vocabulary import read_tokenizer_file
from ..observe.inspect.model_tokenizer import (
    TOKENIZER_REMEDY,
    find_tokenizer,
    get_surrounding_ids,
    read_tokenizer,
    replace_tokenizer,
)
from ..util.errors import SpecError
from ..util.files import read_text_file
from ..util.size_limits import parse_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
PROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_CONFIG_FILES = (
    "special_tokens_map.json",
    "tokenizer_config.json",
)  # either may contain the mask token


def read_processor(folder: Path, model_spec: ModelSpec) -> ProcessorSpec:
    """Processor spec of a folder. Special tokens in texts are parsed as such,
    as in transformers.
    """
    config = read_json(folder / CONFIG_FILE) | read_json(folder / GENERATION_FILE)
    fields = _read_config_fields(folder, config, model_spec)
    if (folder / TOKENIZER_FILE).is_file():
        fields |= _read_tokenizer(folder)
    fields |= _read_image_processor(folder, model_spec)
    usage = ProcessorSpec(**fields)
    check_processor(model_spec, usage, f"{folder}/")
    return usage


def _read_config_fields(
    where: Path, config: Mapping[str, Any], model_spec: ModelSpec
) -> dict[str, Any]:
    """Special ids and class names in a config."""
    vocab_size = _vocab_size(model_spec)
    fields: dict[str, Any] = {
        "specials": "read",
        "end": _read_ids(where, config, "eos_token_id", vocab_size),
    }
    if len(model_spec.stacks) > 1:
        fields["begin"] = _read_ids(where, config, "decoder_start_token_id", vocab_size)
    if model_spec.heads and model_spec.heads[0].name == "classes":
        # transformers writes no names for two classes, its default, and then calls them LABEL_0 and
        # LABEL_1.
        names = tuple(f"LABEL_{number}" for number in range(model_spec.heads[0].outputs))
        fields["labels"] = _read_labels(config) or names
    return fields


def read_live_processor(
    model: nn.Module, model_spec: ModelSpec, tokenizer: object = None, needed: str = "if it fits"
) -> ProcessorSpec:
    """Processor spec of a transformers model in memory, with the given tokenizer or the one beside
    its weights.

    `needed` is "required", which raises if there is no tokenizer that fits the model, or "if it
    fits".
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
    """One id or several from a config; ids outside the vocabulary are dropped: no model output has
    them.
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


def _read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names in the order of their ids; () if the config has none."""
    id_to_label = config.get("id2label")
    labels = (
        {str(number): str(label) for number, label in id_to_label.items()}
        if isinstance(id_to_label, dict)
        else {}
    )
    return tuple(labels[str(number)] for number in range(len(labels)) if str(number) in labels)


def _read_tokenizer(folder: Path) -> dict[str, Any]:
    """The tokenizer document, the ids that it adds before and behind every
    text, and its mask id.
    """
    path = folder / TOKENIZER_FILE
    document = read_text_file(path)
    tokenizer = read_tokenizer_file(path)
    before, behind = get_surrounding_ids(tokenizer)
    mask = _read_mask_token(folder)
    fields = {"tokenizer": document, "before": before, "behind": behind}
    return fields | ({} if mask is None else {"mask": tokenizer.token_to_id(mask)})


def _read_image_processor(folder: Path, model_spec: ModelSpec) -> dict[str, Any]:
    """Size, mean and deviation of the pixels of a vision model; {} for other models, or if they are
    not recorded.

    Images are resized to the size of the model; cropping is left out.
    """
    embedding = model_spec.stacks[0].embedding if model_spec.stacks else None
    patches = None if embedding is None else embedding.patches
    if patches is None or not _is_scaled_to_one(read_json(folder / PROCESSOR_FILE)):
        return {}
    statistics = read_pixel_statistics(folder, patches.channels)
    size = (patches.rows * patches.high, patches.columns * patches.wide)
    return {"size": size, **statistics} if statistics else {}


def read_pixel_statistics(folder: Path, channels: int) -> dict[str, tuple[float, ...]]:
    """Mean and deviation by which a folder's processor normalises the channels of pixels in 0..1;
    {} if it does not say.
    """
    path = folder / PROCESSOR_FILE
    config = read_json(path)
    if not config:
        return {}
    if not config.get("do_normalize", True):
        return {"mean": (0.0,) * channels, "deviation": (1.0,) * channels}
    channels_by_name = {"mean": config.get("image_mean"), "deviation": config.get("image_std")}
    if None in channels_by_name.values():
        return {}
    return {name: _read_channels(path, value, channels) for name, value in channels_by_name.items()}


def _read_channels(path: Path, value: Any, channels: int) -> tuple[float, ...]:
    """A number for each channel, from a list or from one number for all."""
    values: list[Any] = value if isinstance(value, list) else [value] * channels
    if len(values) != channels or not all(type(number) in (int, float) for number in values):
        raise SpecError(
            f"{path}: {value!r} is not one number for each of {channels} channels; correct it"
        )
    return tuple(float(number) for number in values)


def _is_scaled_to_one(config: Mapping[str, Any]) -> bool:
    """True if pixels 0..255 are scaled to 0..1 before they are normalised."""
    factor = config.get("rescale_factor", 1 / 255)
    return (
        bool(config.get("do_rescale", True))
        and isinstance(factor, float)
        and math.isclose(factor, 1 / 255)
    )


def _read_mask_token(folder: Path) -> str | None:
    for name in TOKENIZER_CONFIG_FILES:
        entry = read_json(folder / name).get("mask_token")
        word = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(word, str):
            return word
    return None


# --- Attach a tokenizer to a model without one ----------------------------------------------------


def attach_tokenizer(model: nn.Module, tokenizer: str) -> None:
    """Attach a tokenizer to a headwise model that has none: "bytes", or the path of a tokenizer
    file.

    >>> import headwise as hw
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 256}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> attach_tokenizer(net, "bytes")
    >>> from headwise.models.generation import encode_text
    >>> encode_text(net, "né")
    [110, 195, 169]
    """
    if not isinstance(model, Transformer):
        fact = f"{type(model).__name__} is not a headwise model"
        raise SpecError(
            f"{fact}, and uses the tokenizer next to its weights; put a tokenizer.json there"
        )
    spec = model.spec
    if model.usage.tokenizer is not None:
        raise SpecError(f"{spec.name} has a tokenizer of its own; leave {tokenizer!r} out")
    if not _vocab_size(spec):
        raise SpecError(f"{spec.name} takes no token ids, so no text; leave {tokenizer!r} out")
    model.usage = replace_tokenizer(spec, model.usage, read_tokenizer(tokenizer))

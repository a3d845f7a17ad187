"""Load models from folders or live transformers models, and export them for transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save as tensor_bytes
from tokenizers import processors
from torch import nn

from .. import models
from ..kernels.devices import AS_SAVED, ModuleT, Placement
from ..models import Transformer
from ..models.families import (
    get_weight_names,
    read_model_spec as described_by,
    write_config,
)
from ..models.families.config_reader import UndescribedSetting
from ..models.families.encoders import with_collaborative_heads
from ..models.families.weight_names import CheckpointPlan
from ..models.hub_files import INDEX_FILE, PICKLE_SUFFIXES
from ..models.model_spec import ModelSpec, ProcessorSpec
from ..models.model_spec.serialization import (
    MANIFEST_FILE,
    RECORD_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    find_record,
)
from ..models.save_load import is_refusing_config
from ..models.vocabulary import parse_tokenizer
from ..observe.inspect.abilities import (
    compiled_part_reason,
    unhookable_reason,
    unprunable_reason,
)
from ..observe.inspect.model_inputs import check_is_module, get_device
from ..observe.inspect.model_tokenizer import get_surrounding_ids
from ..util.errors import SpecError
from ..util.files import sha256, write_atomically
from ..util.output_paths import FolderKind, stage_folder
from .checkpoint_weights import (
    build_from_weights,
    build_tensor,
    check_memory,
    open_folder,
    wrap_tensors,
)
from .model_names import find_model
from .transformers_loading import (
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILES,
    check_folder,
    is_known_to_transformers,
    load_model,
    read_processor,
)

# --- Import ---------------------------------------------------------------------------------------


def load_transformers_folder(
    folder: Path, dropout: float = 0.0, placement: Placement = AS_SAVED
) -> Transformer:
    """Load a transformers folder as a headwise model. Runs no code from the folder, and opens no
    pickle.
    """
    settings = check_folder(folder)
    if not (folder / WEIGHTS_FILE).is_file() and not (folder / INDEX_FILE).is_file():
        pickle = find_pickle(folder)
        if pickle:
            raise SpecError(
                f"{folder} has its weights in {pickle}, a pickle, which can run code when it is "
                f"loaded; give a folder with {WEIGHTS_FILE}, as save_pretrained writes it"
            )
        raise SpecError(
            f"{folder} holds a {CONFIG_FILE} but neither {WEIGHTS_FILE} nor {INDEX_FILE}; give a "
            f"folder with weights; {folder / CONFIG_FILE} alone describes a model with initial "
            "weights"
        )
    record = find_record(folder)
    resized = record if record and record.model else None
    model_spec = resized.model if resized and resized.model else _read_spec(folder, settings)
    quantized = [note for note in model_spec.notes if note.startswith("quantization_config")]
    if quantized:
        raise SpecError(f"{folder}: {quantized[0]}; give a folder with weights in 16 or 32 bits")
    names = get_weight_names(model_spec.name)
    constants = {}
    source = open_folder(folder)
    if resized is None and model_spec.name == "bert":
        # Only the shapes of the tensors tell whether heads are collaborative.
        shapes = {name: info.shape for name, info in source.infos.items()}
        model_spec = with_collaborative_heads(model_spec, shapes)
    if resized is not None:
        # files with code are hashed, never run
        for name, checksum in resized.files.items():
            path = folder / name
            if not path.is_file():
                raise SpecError(
                    f"{path} is missing, but {RECORD_FILE} lists it; copy the folder again"
                )
            if sha256(path) != checksum:
                raise SpecError(
                    f"{path} does not match its checksum in {RECORD_FILE}; copy the folder again"
                )
        names = names.with_ignored(resized.unused_tensors)
        constants = resized.constants
    net = build_from_weights(model_spec, names, source, dropout, constants, placement)
    net.usage = read_processor(folder, model_spec)
    return net


def _read_spec(folder: Path, settings: Mapping[str, Any]) -> ModelSpec:
    try:
        return described_by(folder / CONFIG_FILE)
    except UndescribedSetting as error:
        if not is_known_to_transformers(settings.get("model_type")):
            raise
        raise SpecError(
            f"{error.source}: {error.fact}; hw.load builds headwise's own layers only: pass "
            f"{str(folder)!r} to hw.heads, hw.prune and the others, which run it with transformers"
        ) from None


def find_pickle(folder: Path) -> str:
    """Return the name of the first pickle in a folder; "" if there is none."""
    return next(
        (path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLE_SUFFIXES), ""
    )


# --- Load any folder ------------------------------------------------------------------------------


def load(
    what: Path | str | nn.Module,
    *,
    dropout: float = 0.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
) -> Transformer:
    """Load a model as a headwise model, in eval mode.

    Its weights are on `device` ("auto" is the accelerator, or the CPU without one) and in `dtype`,
    such as "bf16"; None is the dtype that they were saved in.

    `what` is a folder written by `hw.save`; a transformers folder: config.json with
    model.safetensors, or with shards and their index; the id of a transformers model of the Hub,
    as in "org/name" or "org/name@revision", which is downloaded; or FILE.py:FACTORY, whose
    transformers model is copied. `net.usage.tokenizer` is the document of its tokenizer. No
    downloaded code is run: pickles are refused, and code that config.json refers to is ignored.

    >>> import headwise as hw, tempfile
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hw.save(net, f"{folder}/ours")
    ...     hw.export(net, f"{folder}/theirs")
    ...     [load(f"{folder}/{name}").spec.name for name in ("ours", "theirs")]
    ['gpt2', 'gpt2']
    """
    placement = Placement.resolve(device, dtype)
    path = find_model(what)
    if isinstance(path, nn.Module):
        model = path if isinstance(path, Transformer) else copy_live_model(path)
        return _move(model, device, placement)
    if path.is_file():
        raise SpecError(f"{path} is a file, not a model folder; give the folder of the model")
    check_memory(path, placement)
    if (path / MANIFEST_FILE).is_file():
        return placement.move(models.load(path, dropout=dropout))
    if is_refusing_config(path / CONFIG_FILE):
        raise SpecError(
            f"{path} is a headwise folder without {MANIFEST_FILE}; copy the folder again"
        )
    if (path / CONFIG_FILE).is_file():
        return load_transformers_folder(path, dropout, placement)
    kinds = "a folder that hw.save or transformers wrote"
    pickle = find_pickle(path)
    if pickle:
        raise SpecError(
            f"{path} contains {pickle}, a pickle, which can run code when it is loaded; give "
            f"{kinds}"
        )
    raise SpecError(f"{path} holds neither {MANIFEST_FILE} nor {CONFIG_FILE}; give {kinds}")


# --- Load a folder with the library that wrote it -------------------------------------------------


def load_original(
    what: Path | str | nn.Module,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
) -> nn.Module:
    """Load a model by its name, with the library that wrote it; a folder without weights is built
    on the meta device. Names are those of `load`; a module is moved, and returned.
    """
    placement = Placement.resolve(device, dtype)
    folder = find_model(what)
    if isinstance(folder, nn.Module):
        return _move(folder, device, placement)
    if (folder / MANIFEST_FILE).is_file() or folder.is_file():
        return load(folder, device=device, dtype=dtype)
    if not (folder / CONFIG_FILE).is_file():
        raise SpecError(
            f"{str(folder)!r} is not a model folder; give one with {MANIFEST_FILE} or {CONFIG_FILE}"
        )
    check_folder(folder)
    check_memory(folder, placement)
    try:
        model = load_model(folder, placement.dtype)
    except Exception as error:  # transformers may raise anything
        raise SpecError(
            f"{folder} cannot be loaded by transformers: {' '.join(str(error).split())[:300]}"
        ) from None
    # Quantised models refuse to be moved, even to where they are; a model without weights has
    # nothing to move.
    has_weights = not any(tensor.is_meta for tensor in model.parameters())
    if not has_weights or placement.device.type == "cpu":
        return model
    placement.check(model)
    return model.to(placement.device)


def open_model(model: Any) -> nn.Module:
    """Return a model: the given module, or the one of this name, in eval mode."""
    if not isinstance(model, (str, Path)):
        return check_is_module(model)
    return load_original(model).eval()


def _move(model: ModuleT, device: torch.device | str, placement: Placement) -> ModuleT:
    """Move a model that was built in memory; "auto" moves only models on the CPU."""
    is_placed = any(tensor.device.type != "cpu" for tensor in model.parameters())
    return model if device == "auto" and is_placed else placement.move(model)


# --- Copy a live transformers model into a headwise model -----------------------------------------


def copy_live_model(model: nn.Module) -> Transformer:
    """Copy a live transformers model into an equivalent headwise model on its device, with its own
    tensors.

    Raises with the reason if headwise has no weight map for its architecture, or if its weights are
    not plain tensors.

    >>> copy_live_model(nn.Linear(2, 2))
    Traceback (most recent call last):
    headwise.util.errors.SpecError: Linear has no config with a model_type; give a transformers
    model, or its folder
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or getattr(config, "model_type", None) is None:
        raise SpecError(
            f"{name} has no config with a model_type; give a transformers model, or its folder"
        )
    compiled_part = compiled_part_reason(dict(model.named_modules()), "")
    reason = unhookable_reason(model, [model]) or compiled_part or unprunable_reason([model])
    if reason:
        raise SpecError(f"{name} cannot be copied: {reason}")
    config_fields: dict[str, Any] = config.to_dict() | {"architectures": [name]}
    model_spec = described_by(config_fields)
    names = get_weight_names(model_spec.name)
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        # Names of checkpoints, which for some models differ from those in memory.
        tensors = revert_weight_conversion(cast(Any, model), model.state_dict())
        source = wrap_tensors(name, tensors)
        placement = Placement(get_device(model))
        return build_from_weights(model_spec, names, source, 0.0, placement=placement)


# --- Export ---------------------------------------------------------------------------------------

EXPORTED_MODEL = FolderKind("model of transformers", (CONFIG_FILE,))


def export(
    model: Transformer,
    folder: Path | str,
    *,
    form: str = "auto",
    max_length: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model to a new folder in the format of transformers: config.json, model.safetensors,
    and the tokenizer.

    `form` is "llama", "mistral", "qwen2", "qwen3" or "gpt2"; "auto" takes the first that can
    express the model. Raises with the first difference if the written config would not describe the
    same model. `max_length` is written as max_position_embeddings of a model with rotary positions,
    which have no built-in limit.

    >>> import headwise as hw, os, tempfile
    >>> net = hw.build(
    ...     hw.families.read_model_spec(
    ...         {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5}
    ...     )
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(net, f"{folder}/small")
    ...     print(*sorted(os.listdir(f"{folder}/small")))
    config.json model.safetensors
    """
    if not isinstance(model, Transformer):
        raise ValueError(
            f"net is of type {type(model).__name__}; give what hw.build made, not a wrapper "
            "around it"
        )
    config = write_config(model.spec, form) | _token_ids(model.usage)
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) > 1:
        raise SpecError(
            f"parameters have the dtypes {' and '.join(sorted(map(str, dtypes)))}; convert them "
            "to one, as in net.float()"
        )
    config["dtype"] = str(*dtypes).removeprefix("torch.")
    if max_length is not None:
        if "n_positions" in config:
            raise SpecError(
                f"cannot set max_length={max_length}: the model has {config['n_positions']} "
                "learned positions; leave max_length out"
            )
        if type(max_length) is not int or max_length < 1:
            raise SpecError(
                f"max_length={max_length!r} is not a number of positions; give an integer >= 1"
            )
        config["max_position_embeddings"] = max_length
    names = get_weight_names(config["model_type"])
    plan = CheckpointPlan.from_spec(model.spec, names, names.prefixes[0])
    state = model.state_dict()
    tensors = {
        path: build_tensor(pieces, state, state[pieces[0].name].dtype)
        for path, pieces in plan.pieces.items()
    }
    files = {WEIGHTS_FILE: tensor_bytes(tensors, {"format": "pt"})}
    if model.usage.tokenizer is not None:
        files |= {
            TOKENIZER_FILE: _tokenizer_json(model.usage).encode(),
            TOKENIZER_CONFIG_FILES[1]: _to_json(_tokenizer_config(model.usage)),
        }
    with stage_folder(folder, EXPORTED_MODEL, "overwrite" if overwrite else "refuse") as staged:
        for name, data in {**files, CONFIG_FILE: _to_json(config)}.items():
            write_atomically(staged / name, data)


def _token_ids(usage: ProcessorSpec) -> dict[str, Any]:
    """Return the begin and end ids of a text. Missing ids are null, because transformers' defaults
    are for other tokenizers.
    """
    begin = usage.prefix_ids[:1]
    end = usage.eos
    return {
        "bos_token_id": begin[0] if begin else None,
        "eos_token_id": list(end) if len(end) > 1 else (*end, None)[0],
    }


def _tokenizer_json(usage: ProcessorSpec) -> str:
    """Return the tokenizer document, changed if needed to add the prefix and suffix ids."""
    document = usage.tokenizer or ""
    tokenizer = parse_tokenizer(document)
    if get_surrounding_ids(tokenizer) == (usage.prefix_ids, usage.suffix_ids):
        return document
    token_names = {
        token_id: tokenizer.id_to_token(token_id)
        for token_id in (*usage.prefix_ids, *usage.suffix_ids)
    }
    unknown = [token_id for token_id, name in token_names.items() if name is None]
    if unknown:
        raise SpecError(
            f"the tokenizer has no token {unknown[0]}, which net.usage puts around every text; "
            "correct net.usage"
        )
    template = [
        *(token_names[token_id] for token_id in usage.prefix_ids),
        "$A",
        *(token_names[token_id] for token_id in usage.suffix_ids),
    ]
    special = [(name, token_id) for token_id, name in token_names.items()]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    return tokenizer.to_str()


def _tokenizer_config(usage: ProcessorSpec) -> dict[str, Any]:
    """Return a config that makes transformers read tokenizer.json unchanged, not the family's
    default tokenizer.
    """
    tokenizer = parse_tokenizer(usage.tokenizer or "")
    ids = _token_ids(usage)
    end_ids = ids["eos_token_id"]
    special_ids = {
        "bos_token": ids["bos_token_id"],
        "eos_token": end_ids[0] if isinstance(end_ids, list) else end_ids,
    }
    special_tokens = {
        name: tokenizer.id_to_token(token_id)
        for name, token_id in special_ids.items()
        if token_id is not None
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }


def _to_json(keys: dict[str, Any]) -> bytes:
    return json.dumps(keys, indent=2).encode() + b"\n"

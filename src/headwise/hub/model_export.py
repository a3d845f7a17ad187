"""Export a headwise model as a folder that transformers loads without headwise installed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as tensor_bytes
from tokenizers import Tokenizer, processors
from torch import Tensor

from ..errors import SpecError
from ..families import get_weight_names, write_config
from ..families.weight_names import CheckpointPlan
from ..files import TEMPORARY, write_atomically
from ..model_spec import ProcessorSpec
from ..model_spec.serialization import TOKENIZER_FILE
from ..models import Transformer
from .checkpoint_weights import WEIGHTS_FILE
from .tokenizer_files import CONFIG_FILE, TOKENIZER_CONFIG_FILES, get_surrounding_ids


def export(model: Transformer, folder: Path | str, *, form: str = "auto", max_length: int | None = None) -> None:
    """Write a model to a new folder in the format of transformers: config.json, model.safetensors, and the tokenizer.

    `form` is "llama", "mistral", "qwen2", "qwen3" or "gpt2"; "auto" takes the first that can express the model. Raises
    with the first difference if the written config would not describe the same model. `max_length` is written as
    max_position_embeddings of a model with rotary positions, which has no limit of its own.

    >>> import headwise as hw, tempfile
    >>> net = hw.build(
    ...     hw.families.read_model_spec({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5})
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(net, f"{folder}/small")
    ...     print(*sorted(os.listdir(f"{folder}/small")))
    config.json model.safetensors
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"net is of type {type(model).__name__}; give what hw.build made, not a wrapper around it")
    config = (
        write_config(model.spec, form) | _token_ids(model.usage) | {"dtype": str(_dtype(model)).removeprefix("torch.")}
    )
    if max_length is not None:
        config |= _set_max_length(config, max_length)
    files = {WEIGHTS_FILE: tensor_bytes(collect_tensors(model, config["model_type"]), {"format": "pt"})}
    if model.usage.tokenizer is not None:
        files |= {
            TOKENIZER_FILE: _tokenizer_json(model.usage).encode(),
            TOKENIZER_CONFIG_FILES[1]: _to_json(_tokenizer_config(model.usage)),
        }
    _write_files(Path(folder).resolve(), files | {CONFIG_FILE: _to_json(config)})


def collect_tensors(model: Transformer, family: str) -> dict[str, Tensor]:
    """All tensors of a model with the names and layouts of a family's checkpoints."""
    names = get_weight_names(family)
    state, tensors = model.state_dict(), dict[str, Tensor]()
    for path, pieces in CheckpointPlan.from_spec(model.spec, names, names.prefixes[0]).pieces.items():
        tensors[path] = torch.empty(pieces[0].shape, dtype=state[pieces[0].name].dtype)
        for piece in pieces:
            piece.file_view.view(tensors[path]).copy_(
                piece.own_view.view(state[piece.name].detach().cpu().contiguous())
            )
    return tensors


def _dtype(net: Transformer) -> torch.dtype:
    dtypes = {p.dtype for p in net.parameters()}
    if len(dtypes) > 1:
        raise SpecError(
            f"parameters have the dtypes {' and '.join(sorted(map(str, dtypes)))}; convert them to one, as in "
            "net.float()"
        )
    return next(iter(dtypes))


def _token_ids(usage: ProcessorSpec) -> dict[str, Any]:
    """Begin and end ids of a text. Null if there is none, because transformers' defaults are for other tokenizers."""
    begin, end = usage.before[:1], usage.end
    return {"bos_token_id": begin[0] if begin else None, "eos_token_id": list(end) if len(end) > 1 else (*end, None)[0]}


def _set_max_length(config: dict[str, Any], length: int) -> dict[str, Any]:
    if "n_positions" in config:
        raise SpecError(
            f"cannot set max_length={length}: the model has {config['n_positions']} learned positions; "
            "leave max_length out"
        )
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise SpecError(f"max_length={length!r} is not a number of positions; give an integer >= 1")
    return {"max_position_embeddings": length}


def _tokenizer_json(usage: ProcessorSpec) -> str:
    """The tokenizer document, changed if needed to add the ids before and behind a text."""
    document = usage.tokenizer or ""
    tokenizer = Tokenizer.from_str(document)
    if get_surrounding_ids(tokenizer) == (usage.before, usage.behind):
        return document
    token_names = {token_id: tokenizer.id_to_token(token_id) for token_id in (*usage.before, *usage.behind)}
    if unknown := [token_id for token_id, name in token_names.items() if name is None]:
        raise SpecError(
            f"the tokenizer has no token {unknown[0]}, which net.usage puts around every text; correct net.usage"
        )
    template = [
        *(token_names[token_id] for token_id in usage.before),
        "$A",
        *(token_names[token_id] for token_id in usage.behind),
    ]
    special = [(name, token_id) for token_id, name in token_names.items()]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer.to_str()


def _tokenizer_config(usage: ProcessorSpec) -> dict[str, Any]:
    """Config that makes transformers read tokenizer.json as it is, instead of the default tokenizer of the family."""
    tokenizer = Tokenizer.from_str(usage.tokenizer or "")
    ids = _token_ids(usage)
    end_ids = ids["eos_token_id"]
    special_ids = {"bos_token": ids["bos_token_id"], "eos_token": end_ids[0] if isinstance(end_ids, list) else end_ids}
    special_tokens = {
        name: tokenizer.id_to_token(token_id) for name, token_id in special_ids.items() if token_id is not None
    }
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special_tokens}


def _to_json(keys: dict[str, Any]) -> bytes:
    return json.dumps(keys, indent=2).encode() + b"\n"


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files or none: to a temporary folder beside the target, which is then renamed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        obstacle = f"holds {sorted(os.listdir(folder))[0]}" if folder.is_dir() else "is a file"
        raise SpecError(f"{folder} {obstacle}; give a new folder, or an empty one")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        temporary.mkdir(parents=True)
        for name, data in files.items():
            write_atomically(temporary / name, data)
        os.rename(temporary, folder)  # fails if another process has created the folder meanwhile
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error.strerror or error}; give another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

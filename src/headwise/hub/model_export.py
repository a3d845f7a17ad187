"""A model of ours as a folder that transformers reads, with nothing of headwise installed."""

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
    """Write a model into a new folder as transformers would: config.json, model.safetensors, and its tokenizer.

    `form` is "llama", "mistral", "qwen2", "qwen3" or "gpt2"; with "auto" the first that says the model. A model that is
    not read back as the same one is refused, with the first difference. `length` is written as the most positions of a
    model with rotary ones, which knows no end itself; transformers asks for it now and then.

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
    """Every tensor of a model under the names, and in the layouts, of a family's files."""
    names = get_weight_names(family)
    held, made = model.state_dict(), dict[str, Tensor]()
    for path, own in CheckpointPlan.from_spec(model.spec, names, names.prefixes[0]).pieces.items():
        made[path] = torch.empty(own[0].shape, dtype=held[own[0].name].dtype)
        for piece in own:
            piece.file_view.view(made[path]).copy_(piece.own_view.view(held[piece.name].detach().cpu().contiguous()))
    return made


def _dtype(net: Transformer) -> torch.dtype:
    dtypes = {p.dtype for p in net.parameters()}
    if len(dtypes) > 1:
        raise SpecError(
            f"parameters are of {' and '.join(sorted(map(str, dtypes)))}; bring them to one, net.float() say"
        )
    return next(iter(dtypes))


def _token_ids(usage: ProcessorSpec) -> dict[str, Any]:
    """What begins and what ends a text; null where nothing does, for transformers' own ids are of other tokenizers."""
    begin, end = usage.before[:1], usage.end
    return {"bos_token_id": begin[0] if begin else None, "eos_token_id": list(end) if len(end) > 1 else (*end, None)[0]}


def _set_max_length(config: dict[str, Any], length: int) -> dict[str, Any]:
    if "n_positions" in config:
        raise SpecError(f"length={length} for a model with {config['n_positions']} learned positions; leave length out")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise SpecError(f"length={length!r} is no number of positions; give a whole number of at least 1")
    return {"max_position_embeddings": length}


def _tokenizer_json(usage: ProcessorSpec) -> str:
    """The document of the tokenizer, made to put around a text what stands around it."""
    document = usage.tokenizer or ""
    tokenizer = Tokenizer.from_str(document)
    if get_surrounding_ids(tokenizer) == (usage.before, usage.behind):
        return document
    named = {one: tokenizer.id_to_token(one) for one in (*usage.before, *usage.behind)}
    if unknown := [one for one, name in named.items() if name is None]:
        raise SpecError(f"the tokenizer has no token {unknown[0]}, which stands around every text; correct net.usage")
    template = [*(named[one] for one in usage.before), "$A", *(named[one] for one in usage.behind)]
    special = [(name, one) for one, name in named.items()]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer.to_str()


def _tokenizer_config(usage: ProcessorSpec) -> dict[str, Any]:
    """What makes transformers read the document as it is, instead of making its own after the name of the family."""
    tokenizer = Tokenizer.from_str(usage.tokenizer or "")
    ids = _token_ids(usage)
    ends = ids["eos_token_id"]
    told = {"bos_token": ids["bos_token_id"], "eos_token": ends[0] if isinstance(ends, list) else ends}
    words = {name: tokenizer.id_to_token(one) for name, one in told.items() if one is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **words}


def _to_json(keys: dict[str, Any]) -> bytes:
    return json.dumps(keys, indent=2).encode() + b"\n"


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    """All of them or none: they are written beside the folder, which is then put in its place."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        holds = f"holds {sorted(os.listdir(folder))[0]}" if folder.is_dir() else "is a file"
        raise SpecError(f"{folder} {holds}; give a new folder, or an empty one")
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        fresh.mkdir(parents=True)
        for name, data in files.items():
            write_atomically(fresh / name, data)
        os.rename(fresh, folder)  # refused by the system where something has come in between
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error.strerror or error}; give another place") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)

"""Open GGUF files. The weights of a file are dequantised once, into a transformers folder in the
user's cache, so that everything that opens a folder opens a GGUF file too.

The packages `gguf` and transformers read the file: transformers knows how llama.cpp names tensors
and reorders the rows of queries and keys.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..kernels.capabilities import available_memory, user_cache_folder
from ..models.hub_files import CONFIG_FILE, WEIGHTS_FILE
from ..report.text import format_bytes
from ..util.errors import SpecError
from ..util.output_paths import FolderKind, stage_folder
from .transformers_loading import build_without_weights, load_from_gguf

MAGIC = b"GGUF"
PART_OF_SEVERAL = re.compile(r".*-\d{5}-of-\d{5}", re.IGNORECASE)
BYTES_PER_WEIGHT = 4  # float32 holds every dequantised number exactly
UNPACKED_MODEL = FolderKind("unpacked GGUF file", (CONFIG_FILE,))
logger = logging.getLogger("headwise")


def unpack_gguf(path: Path) -> Path:
    """Return the transformers folder of a GGUF file, with float32 weights and the tokenizer; it is
    made in the user's cache when the file is first opened, or has changed.
    """
    folder = _cached_folder(path)
    if (folder / CONFIG_FILE).is_file():
        return folder
    with _explained_errors(path):
        count = count_weights(path)
        needed = BYTES_PER_WEIGHT * count
        if needed > available_memory():
            raise SpecError(
                f"cannot unpack {path}: its {count:,} weights need {format_bytes(needed)} of "
                f"memory, and this machine has {format_bytes(available_memory())}; "
                "choose a smaller model"
            )
        size = format_bytes(needed)
        logger.warning("headwise: unpacking %s to %s (float32, %s)", path.name, folder, size)
        with stage_folder(folder, UNPACKED_MODEL, "overwrite") as staged:
            _write_folder(path, staged)
    return folder


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Return the settings of a GGUF file in the words of transformers, without reading weights."""
    with _explained_errors(path):
        return json.loads(_load_config(path).to_json_string(use_diff=False))


def count_weights(path: Path) -> int:
    """Count the weights of a GGUF file; raise ValueError if the file ends before its last tensor.

    The header is read; the weights are not.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    size = path.stat().st_size
    for tensor in reader.tensors:
        if int(tensor.data_offset) + int(tensor.n_bytes) > size:
            raise ValueError(f"the file ends within {tensor.name}")
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _load_config(path: Path) -> Any:
    """Return the transformers config that the header of a file describes."""
    import transformers
    from gguf import GGUFReader

    config = load_from_gguf(transformers.AutoConfig, path)
    fields = GGUFReader(path).fields
    width = fields.get(f"{fields['general.architecture'].contents()}.attention.key_length")
    settings = config.to_dict()
    if width is not None and "head_dim" in settings and "global_head_dim" not in settings:
        config.head_dim = int(width.contents())  # transformers leaves it out for some models
    return config


def _cached_folder(path: Path) -> Path:
    """Return the folder for this version of a file, by its path, size and time of change."""
    state = path.stat()
    key = f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    try:
        return user_cache_folder() / "gguf" / digest / path.stem
    except RuntimeError:
        raise SpecError(
            f"cannot unpack {path}: there is no home folder; set XDG_CACHE_HOME"
        ) from None


def _write_folder(path: Path, folder: Path) -> None:
    """Write the settings, the weights and, if transformers can convert it, the tokenizer."""
    import transformers

    gguf_reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    gguf_reader.tqdm = lambda tensors, **_: tensors  # no second progress bar
    config = _load_config(path)
    model_class: Any = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = transformers.AutoModelForSeq2SeqLM
    model = build_without_weights(model_class, config)
    contents = gguf_reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    tensors = {name: tensor.contiguous() for name, tensor in contents["tensors"].items()}
    _check_names(tensors, model)
    try:
        save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {folder / WEIGHTS_FILE}: {error}") from None
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    try:
        load_from_gguf(transformers.AutoTokenizer, path).save_pretrained(folder)
    except Exception as error:  # transformers converts the tokenizers of some architectures only
        reason = " ".join(str(error).split())[:200]
        logger.warning("headwise: the tokenizer of %s was not read: %s", path.name, reason)


def _check_names(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise ValueError if the file lacks weights of the model, or has another shape for one."""
    names_by_tensor: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_tensor.setdefault(parameter, []).append(name)
    for parameter, names in names_by_tensor.items():  # tied weights are stored under one name
        stored = next((tensors[name] for name in names if name in tensors), None)
        if stored is None:
            raise ValueError(f"it has no weights for {names[0]}")
        if stored.shape != parameter.shape:
            raise ValueError(
                f"{names[0]} has shape {list(stored.shape)}, and the settings of the file ask for "
                f"{list(parameter.shape)}"
            )


@contextmanager
def _explained_errors(path: Path) -> Iterator[None]:
    """Check a GGUF file and what reads it; raise SpecError with a remedy for what fails inside."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise SpecError(f"{path} does not start with {MAGIC.decode()}; copy the file again")
    if PART_OF_SEVERAL.fullmatch(path.stem):
        raise SpecError(
            f"{path} is one file of several; merge them with llama-gguf-split --merge, and give "
            "the merged file"
        )
    if find_spec("gguf") is None:
        raise SpecError(f"cannot read {path} without gguf; pip install 'headwise[gguf]'")
    try:
        yield
    except (SpecError, OSError, KeyboardInterrupt):
        raise
    except Exception as error:  # both packages may raise anything for a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SpecError(
            f"{path} cannot be read as GGUF: {reason}; copy the file again, or give a folder with "
            "safetensors"
        ) from None

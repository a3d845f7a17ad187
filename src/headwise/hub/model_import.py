"""A folder as transformers writes it: config.json, weights in safetensors, and perhaps a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import models
from ..errors import SpecError
from ..families import get_weight_names, read_model_spec as described_by
from ..files import sha256
from ..inspect.attention_sites import unhookable_reason, unprunable_reason
from ..model_spec.serialization import MANIFEST_FILE, RECORD_FILE, SurgeryRecord, find_record
from ..models import Transformer
from . import llama2c
from .checkpoint_weights import DTYPES, INDEX_FILE, WEIGHTS_FILE, SafetensorsFolder, TensorInfo, build_from_weights
from .tokenizer_files import CONFIG_FILE, read_processor

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_transformers_folder(folder: Path, dropout: float = 0.0) -> Transformer:
    """The model in such a folder. No code that lies there is run, and no pickle is opened."""
    if not (folder / WEIGHTS_FILE).is_file() and not (folder / INDEX_FILE).is_file():
        raise SpecError(_no_weights_message(folder))
    record = find_record(folder)
    resized = record if record and record.model else None
    described = resized.model if resized and resized.model else described_by(folder / CONFIG_FILE)
    if stored := [note for note in described.notes if note.startswith("quantization_config")]:
        raise SpecError(f"{folder}: {stored[0]}; give a folder with weights in 16 or 32 bits")
    names, constants = get_weight_names(described.name), {}
    if resized:
        _check_files(folder, resized)
        names, constants = names.with_ignored(resized.besides), resized.constants
    net = build_from_weights(described, names, SafetensorsFolder(folder), dropout, constants)
    net.usage = read_processor(folder, described)
    return net


def _check_files(folder: Path, record: SurgeryRecord) -> None:
    """Refuse files that are not those heads.json speaks of; one that is code is read as data, and never run."""
    for name, checksum in record.files.items():
        path = folder / name
        if not path.is_file():
            raise SpecError(f"{path} is missing, of which {RECORD_FILE} speaks; copy the folder again")
        if sha256(path) != checksum:
            raise SpecError(f"{path} is not what {RECORD_FILE} says was written; copy the folder again")


def find_pickle(folder: Path) -> str:
    """The name of a pickle in a folder, if there is one."""
    return next((path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLE_SUFFIXES), "")


def _no_weights_message(folder: Path) -> str:
    if pickle := find_pickle(folder):
        told = f"{folder} has its weights in {pickle}, a pickle, which runs code when it is read"
        return f"{told}; give a folder with {WEIGHTS_FILE}, as save_pretrained writes it"
    fresh = f"give one with its weights; {folder / CONFIG_FILE} alone describes a model with fresh ones"
    return f"{folder} holds a {CONFIG_FILE} but neither {WEIGHTS_FILE} nor {INDEX_FILE}; {fresh}"


# --- Whatever a folder or a file holds, as a model that runs -------------------------------------------

MODEL_FILE_SUFFIXES = (".safetensors", ".json", ".toml")  # of a folder


def load(what: Path | str, *, dropout: float = 0.0, tokenizer: Path | str | None = None) -> Transformer:
    """The model that a folder or a file holds, in the dtype it was saved in, set to answer and not to train.

    A folder as `hw.save` writes it, one as transformers does (config.json beside model.safetensors, or beside shards
    with their index), or a file of llama2.c, such as stories260K.bin. `net.tokenizer` is the document of the tokenizer
    that lies beside it; `tokenizer` names that of a llama2.c file where it lies elsewhere. Nothing that is read is run:
    pickles are refused, and code that a config.json names is left alone.

    >>> import headwise as hw, tempfile
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11}
    >>> net = hw.build(hw.families.read_model_spec(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hw.save(net, f"{folder}/ours")
    ...     hw.export(net, f"{folder}/theirs")
    ...     [load(f"{folder}/{name}").spec.name for name in ("ours", "theirs")]
    ['gpt2', 'gpt2']
    """
    path = Path(what)
    if path.is_file() and path.suffix in MODEL_FILE_SUFFIXES:
        raise SpecError(f"{path} is one of the files of a model; give the folder that it lies in")
    if path.is_file():
        return llama2c.load_llama2c(path, dropout, None if tokenizer is None else Path(tokenizer))
    if tokenizer is not None:
        raise SpecError(f"{path} is a folder, whose tokenizer lies in it; leave tokenizer out, or name a llama2.c file")
    if (path / MANIFEST_FILE).is_file():
        return models.load(path, dropout=dropout)
    if (path / CONFIG_FILE).is_file():
        return load_transformers_folder(path, dropout)
    raise SpecError(_not_loadable_message(path))


def _not_loadable_message(path: Path) -> str:
    """Why there is nothing to load."""
    kinds = "a folder that hw.save or transformers wrote, or a file of llama2.c"
    if not path.is_dir():
        return f"there is no folder or file {str(path)!r}; give {kinds}"
    if pickle := find_pickle(path):
        return f"{path} holds {pickle}, a pickle, which runs code when it is read; give {kinds}"
    return f"{path} holds neither {MANIFEST_FILE} nor {CONFIG_FILE}; give {kinds}"


# --- A model in a folder as whoever wrote it runs it ---------------------------------------------------

WEIGHT_GLOBS = ("*.safetensors", "*.safetensors.index.json")


def load_original(path: Path | str) -> nn.Module:
    """The model in a folder; of one with a config.json and no weights, its layers on the meta device."""
    folder = Path(path)
    if (folder / MANIFEST_FILE).is_file() or folder.is_file():
        return load(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise SpecError(f"{str(path)!r} is no folder of a model; give one with {MANIFEST_FILE} or {CONFIG_FILE}")
    if find_spec("transformers") is None:
        return load(folder)
    return _load_with_transformers(folder)


def _load_with_transformers(folder: Path) -> nn.Module:
    """What transformers makes of a folder; code that lies in it is never run, pickles are never read."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = _find_class(transformers, json.loads((folder / CONFIG_FILE).read_text()))
        if any(next(folder.glob(pattern), None) for pattern in WEIGHT_GLOBS):
            return kind.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()
        with torch.device("meta"):
            make = getattr(kind, "from_config", None) or kind._from_config
            return make(config).eval()
    except Exception as error:  # whatever a folder makes transformers raise
        raise SpecError(f"{folder} cannot be read by transformers: {' '.join(str(error).split())[:300]}") from None


def _find_class(transformers: Any, said: dict[str, Any]) -> Any:
    """The class that a config names, or the bare model."""
    named = (said.get("architectures") or [""])[0]
    return getattr(transformers, named, None) or transformers.AutoModel


# --- A model of transformers that is already in memory, copied into one of ours ------------------------


class LiveTensors:
    """The tensors of a live module, under the names that its files would have."""

    def __init__(self, where: str, held: Mapping[str, Tensor]) -> None:
        self.path, self._held = Path(where), held
        words = {dtype: word for word, dtype in DTYPES.items()}
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(tensor.shape), words.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")))
            for name, tensor in held.items()
        }

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        for name, tensor in self._held.items():
            yield name, tensor.detach().cpu().contiguous()


def copy_live_model(model: nn.Module) -> Transformer:
    """A model of ours that says what a live one of transformers says, with tensors of its own, on the CPU.

    One whose files no map reads, or whose weights are not plain numbers, is refused with the reason.

    >>> copy_live_model(nn.Linear(2, 2))
    Traceback (most recent call last):
    headwise.errors.SpecError: Linear has no config that says what it is; give a model of transformers, or its folder
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or getattr(config, "model_type", None) is None:
        raise SpecError(f"{name} has no config that says what it is; give a model of transformers, or its folder")
    if why := unhookable_reason(model, [model]) or unprunable_reason([model]):
        raise SpecError(f"{name} cannot be copied: {why}")
    keys: dict[str, Any] = config.to_dict() | {"architectures": [name]}
    described = described_by(keys)
    names = get_weight_names(described.name)
    with torch.no_grad():
        return build_from_weights(described, names, LiveTensors(name, _named_as_in_files(model)), 0.0)


def _named_as_in_files(model: Any) -> Mapping[str, Tensor]:
    """Its tensors by the names of its files, which are others than in memory for some."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before its fifth version, files and memory used the same names
        return model.state_dict()
    return revert_weight_conversion(model, model.state_dict())

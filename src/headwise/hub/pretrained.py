"""A folder as transformers writes it: config.json, weights in safetensors, and perhaps a tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from ..blueprint.records import RECORD_FILE, SurgeryRecord, find_record
from ..errors import SpecError
from ..families import read_model_spec as described_by
from ..files import sha256
from ..models import Transformer
from .maps import get_weight_names
from .reading import build_from_weights
from .tensors import INDEX_FILE, WEIGHTS_FILE, SafetensorsFolder
from .usage import CONFIG_FILE, read_processor

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

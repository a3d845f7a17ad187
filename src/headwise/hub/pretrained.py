"""A folder as transformers writes it: config.json, weights in safetensors, and perhaps a tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from ..blueprint.records import HEADS, Record, record_in
from ..errors import SpecError
from ..families import read as described_by
from ..files import sha256
from ..models import Transformer
from .maps import map_of
from .reading import built
from .tensors import INDEX, ONE, Safetensors
from .usage import CONFIG, usage_in

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read(folder: Path, dropout: float = 0.0) -> Transformer:
    """The model in such a folder. No code that lies there is run, and no pickle is opened."""
    if not (folder / ONE).is_file() and not (folder / INDEX).is_file():
        raise SpecError(_without_weights(folder))
    record = record_in(folder)
    resized = record if record and record.model else None
    described = resized.model if resized and resized.model else described_by(folder / CONFIG)
    if stored := [note for note in described.notes if note.startswith("quantization_config")]:
        raise SpecError(f"{folder}: {stored[0]}; give a folder with weights in 16 or 32 bits")
    names, constants = map_of(described.name), {}
    if resized:
        _check_files(folder, resized)
        names, constants = names.ignoring(resized.besides), resized.constants
    net = built(described, names, Safetensors(folder), dropout, constants)
    net.usage = usage_in(folder, described)
    return net


def _check_files(folder: Path, record: Record) -> None:
    """Refuse files that are not those heads.json speaks of; one that is code is read as data, and never run."""
    for name, checksum in record.files.items():
        path = folder / name
        if not path.is_file():
            raise SpecError(f"{path} is missing, of which {HEADS} speaks; copy the folder again")
        if sha256(path) != checksum:
            raise SpecError(f"{path} is not what {HEADS} says was written; copy the folder again")


def pickle_in(folder: Path) -> str:
    """The name of a pickle in a folder, if there is one."""
    return next((path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES), "")


def _without_weights(folder: Path) -> str:
    if pickle := pickle_in(folder):
        told = f"{folder} has its weights in {pickle}, a pickle, which runs code when it is read"
        return f"{told}; give a folder with {ONE}, as save_pretrained writes it"
    fresh = f"give one with its weights; {folder / CONFIG} alone describes a model with fresh ones"
    return f"{folder} holds a {CONFIG} but neither {ONE} nor {INDEX}; {fresh}"

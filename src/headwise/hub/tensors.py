"""Tensors in safetensors files, one or many with an index: what they are, and each of them once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import SpecError

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


class TensorInfo(NamedTuple):
    """What a file says of a tensor before it is read: its shape, and the kind of its numbers, "F32" say."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """Tensors in a file: what they are, by name, and each of them once; `where` names the file to whoever errs."""

    path: Path
    infos: Mapping[str, TensorInfo]

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        ...


class SafetensorsFolder:
    """The tensors of model.safetensors, or of the shards that an index beside them names."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX_FILE
        self.path = index if index.is_file() else folder / WEIGHTS_FILE
        self.files: list[Path] = [folder / name for name in _list_shards(index)] if index.is_file() else [self.path]
        self.infos: Mapping[str, TensorInfo] = {name: kind for path in self.files for name, kind in _read_infos(path).items()}

    def iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, shard by shard."""
        for path in self.files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    yield name, file.get_tensor(name)


def _read_infos(path: Path) -> dict[str, TensorInfo]:
    if not path.is_file():
        raise SpecError(f"{path} is missing; copy the folder again")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {name: TensorInfo(tuple(held.get_shape()), held.get_dtype()) for name, held in slices.items()}
    except (SafetensorError, OSError) as error:
        raise SpecError(f"{path} is cut short or no safetensors: {error}; copy the file again") from None


def _list_shards(index: Path) -> list[str]:
    """The files that an index names, if each holds just what the index says of it."""
    said = _read_weight_map(index)
    files = sorted(set(said.values()))
    if odd := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
        raise SpecError(f"{index} names {odd[0]!r}; shards are .safetensors files that lie beside it")
    for file in files:
        held = _read_infos(index.parent / file)
        named = {name for name, where in said.items() if where == file}
        for name in sorted(named ^ set(held)):
            fact = f"{name} is not in {file}" if name in named else f"{file} holds {name}, which it puts elsewhere"
            raise SpecError(f"{index}: {fact}; copy the folder again, the index belongs to other shards")
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{index} cannot be read: {error}; copy the file again") from None
    told = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(told, dict) or not told or not all(isinstance(file, str) for file in told.values()):
        raise SpecError(f"{index} is no index of shards; it must say weight_map = {{tensor: file}}")
    return told

"""Files of transformers written again with other attentions in them, shard by shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..blueprint import Model
from ..hub.maps import map_of
from ..hub.plan import Map, Plan
from ..hub.slots import Piece
from ..hub.tensors import INDEX, Safetensors
from .folders_form import Form

HEADED = ("q", "kv", "v", "out", "voice")  # axes that are empty where no head is left


class Rewriting(NamedTuple):
    """What lies where in the files of a model, before its heads were cut and after."""

    stored: Safetensors
    names: Map
    trunk: str
    old: Plan
    new: Plan
    form: Form

    @staticmethod
    def of(source: Path, described: Model, form: Form) -> Rewriting:
        """The plans of a folder that holds the first description, and is to say the form."""
        stored, names = Safetensors(source), map_of(described.name)
        trunk = names.trunk(names.usual(name) for name in stored.kinds)
        old, new = (Plan.of(model, names, trunk) for model in (described, form.described))
        return Rewriting(stored, names, trunk, old, new, form)

    def first(self, name: str) -> str:
        """The name that the plans have for a tensor."""
        usual = self.names.usual(name)
        return self.old.twins.get(usual, usual)

    @property
    def besides(self) -> list[str]:
        """Tensors that the new description has no use for, and that files of this kind do not have else."""
        usual = [self.names.usual(name) for name in self.stored.kinds if self.first(name) not in self.new.pieces]
        return [name for name in usual if not self.names.ignores(name)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that is written, by its name in the files."""
        return {name: self._shape(name) for name in (*self.stored.kinds, *self.added)}

    @property
    def added(self) -> dict[str, str]:
        """Tensors that no file held, each with the one beside which it is written."""
        held = {self.first(name): name for name in self.stored.kinds}
        last = list(self.stored.kinds)[-1]
        fresh = [path for path in self.new.pieces if path not in held]
        return {path: next((n for n in held.values() if n.startswith(_module(path))), last) for path in fresh}

    def _shape(self, name: str) -> tuple[int, ...]:
        path = self.first(name)
        if path in self.new.pieces:
            return self.new.pieces[path][0].shape
        if path in self.old.pieces:
            return _emptied(self.old.pieces[path])
        return self.stored.kinds[name].shape

    def tensor(self, name: str, stored: Tensor) -> Tensor:
        """What is written under a name: what stood there, unless the model has another."""
        path = self.first(name)
        if path in self.new.pieces:
            return self.made(path, stored.dtype)
        if path not in self.old.pieces:
            return stored
        shape = _emptied(self.old.pieces[path])
        return stored if shape == tuple(stored.shape) else stored.new_empty(shape)

    def made(self, path: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the model in the layout of the files, with their kind of numbers."""
        own = self.new.pieces[path]
        fresh = torch.empty(own[0].shape, dtype=dtype)
        for piece in own:
            piece.there.of(fresh).copy_(piece.here.of(self.form.tensors[piece.name].cpu().contiguous()))
        return fresh


def _module(path: str) -> str:
    return f"{path.rpartition('.')[0]}."


def _emptied(own: list[Piece]) -> tuple[int, ...]:
    """The shape without any head; what has no axis of heads stays."""
    there = own[0].there
    return there.layout.shape({**there.sizes, **{axis: 0 for axis in HEADED if axis in there.sizes}})


def rewrite(way: Rewriting, folder: Path) -> list[Path]:
    """Write the shards into a folder, one after the other, and their index where there was one."""
    beside, where = dict[str, list[str]](), dict[str, str]()
    for path, neighbour in way.added.items():
        beside.setdefault(neighbour, []).append(path)
    written, size = list[Path](), 0
    for file in way.stored.files:
        held, told = dict[str, Tensor](), dict[str, str]()
        for name, tensor in _each(file, told):
            held[name] = way.tensor(name, tensor).contiguous()
            held |= {path: way.made(path, held[name].dtype) for path in beside.get(name, ())}
        _save(held, folder / file.name, told)
        written.append(folder / file.name)
        where |= dict.fromkeys(held, file.name)
        size += sum(tensor.nbytes for tensor in held.values())
    if way.stored.where.name == INDEX:
        _index(way.stored.where, folder / INDEX, where, size)
        written.append(folder / INDEX)
    return written


def _each(file: Path, told: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        told |= opened.metadata() or {"format": "pt"}
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            yield name, opened.get_tensor(name)


def _save(held: Mapping[str, Tensor], path: Path, told: dict[str, str]) -> None:
    try:
        save_file(dict(held), path, told)
        synced(path)
    except Exception as error:  # safetensors has a name of its own for a full disk
        raise OSError(f"{path.name} cannot be written: {error}; make room, or give another place") from error


def _index(old: Path, path: Path, where: Mapping[str, str], size: int) -> None:
    said: dict[str, Any] = json.loads(old.read_text(encoding="utf-8"))
    said["weight_map"] = dict(where)
    said["metadata"] = (said.get("metadata") or {}) | {"total_size": size}
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    synced(path)


def synced(path: Path) -> None:
    """Wait until a file has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

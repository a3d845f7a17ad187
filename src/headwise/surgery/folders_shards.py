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

from ..blueprint import ModelSpec
from ..hub.maps import get_weight_names
from ..hub.plan import WeightNames, CheckpointPlan
from ..hub.slots import TensorPiece
from ..hub.tensors import INDEX_FILE, SafetensorsFolder
from .folders_form import CanonicalForm

HEAD_AXES = ("q", "kv", "v", "out", "voice")  # axes that are empty where no head is left


class ShardRewrite(NamedTuple):
    """What lies where in the files of a model, before its heads were cut and after."""

    source_tensors: SafetensorsFolder
    weight_names: WeightNames
    prefix: str
    old_plan: CheckpointPlan
    new_plan: CheckpointPlan
    form: CanonicalForm

    @staticmethod
    def of(source: Path, described: ModelSpec, form: CanonicalForm) -> ShardRewrite:
        """The plans of a folder that holds the first description, and is to say the form."""
        stored, names = SafetensorsFolder(source), get_weight_names(described.name)
        trunk = names.find_prefix(names.canonical_name(name) for name in stored.infos)
        old, new = (CheckpointPlan.from_spec(model, names, trunk) for model in (described, form.model_spec))
        return ShardRewrite(stored, names, trunk, old, new, form)

    def plan_name(self, name: str) -> str:
        """The name that the plans have for a tensor."""
        usual = self.weight_names.canonical_name(name)
        return self.old_plan.tied_names.get(usual, usual)

    @property
    def unused_tensors(self) -> list[str]:
        """Tensors that the new description has no use for, and that files of this kind do not have else."""
        usual = [self.weight_names.canonical_name(name) for name in self.source_tensors.infos if self.plan_name(name) not in self.new_plan.pieces]
        return [name for name in usual if not self.weight_names.is_ignored(name)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that is written, by its name in the files."""
        return {name: self._shape(name) for name in (*self.source_tensors.infos, *self.new_tensors)}

    @property
    def new_tensors(self) -> dict[str, str]:
        """Tensors that no file held, each with the one beside which it is written."""
        held = {self.plan_name(name): name for name in self.source_tensors.infos}
        last = list(self.source_tensors.infos)[-1]
        fresh = [path for path in self.new_plan.pieces if path not in held]
        return {path: next((n for n in held.values() if n.startswith(_module_prefix(path))), last) for path in fresh}

    def _shape(self, name: str) -> tuple[int, ...]:
        path = self.plan_name(name)
        if path in self.new_plan.pieces:
            return self.new_plan.pieces[path][0].shape
        if path in self.old_plan.pieces:
            return _shape_without_heads(self.old_plan.pieces[path])
        return self.source_tensors.infos[name].shape

    def rewrite_tensor(self, name: str, source: Tensor) -> Tensor:
        """What is written under a name: what stood there, unless the model has another."""
        path = self.plan_name(name)
        if path in self.new_plan.pieces:
            return self.build_tensor(path, source.dtype)
        if path not in self.old_plan.pieces:
            return source
        shape = _shape_without_heads(self.old_plan.pieces[path])
        return source if shape == tuple(source.shape) else source.new_empty(shape)

    def build_tensor(self, path: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the model in the layout of the files, with their kind of numbers."""
        own = self.new_plan.pieces[path]
        fresh = torch.empty(own[0].shape, dtype=dtype)
        for piece in own:
            piece.file_view.view(fresh).copy_(piece.own_view.view(self.form.tensors[piece.name].cpu().contiguous()))
        return fresh


def _module_prefix(path: str) -> str:
    return f"{path.rpartition('.')[0]}."


def _shape_without_heads(own: list[TensorPiece]) -> tuple[int, ...]:
    """The shape without any head; what has no axis of heads stays."""
    there = own[0].file_view
    return there.layout.shape({**there.axis_sizes, **{axis: 0 for axis in HEAD_AXES if axis in there.axis_sizes}})


def write_shards(rewrite: ShardRewrite, folder: Path) -> list[Path]:
    """Write the shards into a folder, one after the other, and their index where there was one."""
    beside, where = dict[str, list[str]](), dict[str, str]()
    for path, neighbour in rewrite.new_tensors.items():
        beside.setdefault(neighbour, []).append(path)
    written, size = list[Path](), 0
    for file in rewrite.source_tensors.files:
        held, told = dict[str, Tensor](), dict[str, str]()
        for name, tensor in _iter_tensors(file, told):
            held[name] = rewrite.rewrite_tensor(name, tensor).contiguous()
            held |= {path: rewrite.build_tensor(path, held[name].dtype) for path in beside.get(name, ())}
        _save_shard(held, folder / file.name, told)
        written.append(folder / file.name)
        where |= dict.fromkeys(held, file.name)
        size += sum(tensor.nbytes for tensor in held.values())
    if rewrite.source_tensors.path.name == INDEX_FILE:
        _write_index(rewrite.source_tensors.path, folder / INDEX_FILE, where, size)
        written.append(folder / INDEX_FILE)
    return written


def _iter_tensors(file: Path, told: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        told |= opened.metadata() or {"format": "pt"}
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            yield name, opened.get_tensor(name)


def _save_shard(held: Mapping[str, Tensor], path: Path, told: dict[str, str]) -> None:
    try:
        save_file(dict(held), path, told)
        fsync_file(path)
    except Exception as error:  # safetensors has a name of its own for a full disk
        raise OSError(f"{path.name} cannot be written: {error}; make room, or give another place") from error


def _write_index(old: Path, path: Path, where: Mapping[str, str], size: int) -> None:
    said: dict[str, Any] = json.loads(old.read_text(encoding="utf-8"))
    said["weight_map"] = dict(where)
    said["metadata"] = (said.get("metadata") or {}) | {"total_size": size}
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    fsync_file(path)


def fsync_file(path: Path) -> None:
    """Wait until a file has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

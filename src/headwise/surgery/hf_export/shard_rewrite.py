"""A model in the plainest words that say it: heads in the order of what they read, and nothing said that follows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...families import get_weight_names
from ...families.weight_names import CheckpointPlan, TensorPiece, WeightNames
from ...hub.checkpoint_weights import INDEX_FILE, SafetensorsFolder
from ...interfaces import Part
from ...interfaces.registry import field_defaults
from ...model_spec import ModelSpec
from ...model_spec.model import group_blocks
from ...models import Transformer
from ...nn.head_axis_ops import select_heads, transform_axes
from ...spec.attention_spec import SLOTS, AttentionSpec

SpecByName = Mapping[str, AttentionSpec]


@dataclass(frozen=True)
class CanonicalForm:
    """A description, and every tensor of it by name."""

    model_spec: ModelSpec
    tensors: Mapping[str, Tensor]

    def find_extra_constants(self, names: WeightNames) -> dict[str, Tensor]:
        """Numbers that files of this kind do not hold, and that do not follow from the description either."""
        return {
            f"{site}.{key}": held
            for site, spec in self.model_spec.attention_specs()
            for key, param in spec.params().items()
            if not param.trainable and names.find_location(f"{site}.{key}") is None
            if not torch.equal(
                held := self.tensors[f"{site}.{key}"].cpu(), param.init(spec.shapes()[key]).to(held.dtype)
            )
        }


def to_canonical_form(net: Transformer) -> CanonicalForm:
    """The same function: heads of a layer stand in order, a shared table holds what is read of it, parts say no more
    than they must.

    >>> import headwise as hw
    >>> from headwise.model_spec import BlockSpec, EmbeddingSpec, StackSpec
    >>> spec = hw.design(model=8, heads=4, kv=2, dim=3).with_heads(reads=(0, 1, 0, 1))
    >>> stack = StackSpec.from_blocks("decoder", 8, [BlockSpec(spec)], embedding=EmbeddingSpec(5))
    >>> [(_, sorted_spec)] = to_canonical_form(
    ...     hw.build(ModelSpec("x", "decoder", (stack,)))
    ... ).model_spec.attention_specs()
    >>> sorted_spec.heads
    Heads.grouped(q=4, kv=2, dim=3)
    """
    form = CanonicalForm(net.spec, {name: tensor.detach() for name, tensor in net.state_dict().items()})
    for step in (_sort_heads, _narrow_tables, _drop_defaults):
        form = step(form)
    return form


def replace_specs(model_spec: ModelSpec, specs: SpecByName) -> ModelSpec:
    """The model with these attentions, by name, in the place of its own."""
    stacks = []
    for stack in model_spec.stacks:
        blocks = [
            replace(block, **{role: specs[f"{stack.name}.{depth}.{role}"] for role in block.attention_specs})
            for depth, block in enumerate(stack.layers)
        ]
        stacks.append(replace(stack, runs=group_blocks(blocks)))
    return replace(model_spec, stacks=tuple(stacks))


def _site_tensors(form: CanonicalForm, site: str, spec: AttentionSpec) -> dict[str, Tensor]:
    """Every tensor that an attention reads; one that layers share is found where it first stands."""
    stack = site.split(".")[0]
    found = dict[str, Tensor]()
    for key in spec.params():
        shared = (name for name in form.tensors if name.startswith(f"{stack}.") and name.endswith(f".{key}"))
        found[key] = form.tensors[name if (name := f"{site}.{key}") in form.tensors else next(shared)]
    return found


# --- heads in order ------------------------------------------------------------------------------------


def _sort_heads(form: CanonicalForm) -> CanonicalForm:
    """Query heads sorted by what they read, and key-value heads by who reads them first."""
    specs, tensors = dict(form.model_spec.attention_specs()), dict(form.tensors)
    if form.model_spec.approximation_reasons():
        return form
    for site, spec in specs.items():
        heads, weights = spec.heads, _site_tensors(form, site, spec)
        if heads.values or spec.score_head_of_output != tuple(range(heads.q)):
            continue
        columns = next((weights[key].tolist() for key, _, _ in list_index_constants(spec)), list(heads.reads))
        by_column = heads.kv == heads.q
        order = sorted(range(heads.q), key=lambda h: columns[h] if by_column else heads.reads[h])
        groups = list(dict.fromkeys(heads.reads[h] for h in order))
        if order == sorted(order) and groups == sorted(groups):
            continue
        reads = tuple(groups.index(heads.reads[h]) for h in order)
        moved = transform_axes(
            spec, weights, {"q": select_heads(order), "out": select_heads(order), "kv": select_heads(groups)}
        )
        specs[site] = replace(spec, heads=replace(heads, reads=reads))
        tensors |= {name: moved[key] for key in moved if (name := f"{site}.{key}") in tensors}
    return CanonicalForm(replace_specs(form.model_spec, specs), tensors)


# --- tables that layers share --------------------------------------------------------------------------


def list_index_constants(spec: AttentionSpec) -> Iterator[tuple[str, str, str]]:
    """Constants that say for each head which index of a shared table it reads: constant, table, and the axis of it."""
    for name, part in spec.parts():
        params = part.params(spec)
        own = {key for key, param in params.items() if param.layout.axes == ("q",) and not param.trainable}
        tables = {key: param.layout.axes for key, param in params.items() if param.tied_to}
        for table, axes in tables.items():
            yield from ((f"{name}.{axis}", f"{name}.{table}", axis) for axis in axes if axis in own)


def _narrow_tables(form: CanonicalForm) -> CanonicalForm:
    """A table of which all layers of a stack read the same indices holds these alone."""
    specs, tensors = dict(form.model_spec.attention_specs()), dict(form.tensors)
    for stack in form.model_spec.stacks:
        own = {site: spec for site, spec in specs.items() if site.startswith(f"{stack.name}.")}
        for constant, table, axis in {row for spec in own.values() for row in list_index_constants(spec)}:
            sites = [site for site, spec in own.items() if constant in spec.params()]
            read = {tuple(tensors[f"{site}.{constant}"].tolist()) for site in sites}
            owner = next(f"{site}.{table}" for site in sites if f"{site}.{table}" in tensors)
            layout = own[sites[0]].params()[table].layout
            size = tensors[owner].shape[layout.axes.index(axis)]
            if len(read) > 1 or (kept := sorted(next(iter(read)))) != sorted(set(kept)) or len(kept) == size:
                continue
            fitted = {site: _fit_axis(own[site], constant.split(".")[0], axis, len(kept)) for site in sites}
            if not all(fitted.values()):
                continue
            specs |= {site: spec for site, spec in fitted.items() if spec}
            tensors[owner] = select_heads(kept)(tensors[owner], layout.axes.index(axis)).clone()
            for site in sites:
                held = tensors[f"{site}.{constant}"]
                tensors[f"{site}.{constant}"] = torch.tensor([kept.index(one) for one in held.tolist()]).to(held)
    return CanonicalForm(replace_specs(form.model_spec, specs), tensors)


def _fit_axis(spec: AttentionSpec, name: str, axis: str, size: int) -> AttentionSpec | None:
    """The spec whose part of this name gives an axis this size without being told, if it can."""
    part = dict(spec.parts())[name]
    for field, usual in _default_fields(part).items():
        fresh = replace(part, **{field: usual})
        if getattr(part, field) != usual and spec.sizes_of(fresh)[axis] == size:
            return _replace_part(spec, name, fresh)
    return None


# --- what follows by itself ----------------------------------------------------------------------------


def _drop_defaults(form: CanonicalForm) -> CanonicalForm:
    """Parts without what they would settle on by themselves."""
    specs = dict(form.model_spec.attention_specs())
    return replace(
        form, model_spec=replace_specs(form.model_spec, {site: _simplify_spec(spec) for site, spec in specs.items()})
    )


def _simplify_spec(spec: AttentionSpec) -> AttentionSpec:
    for name, part in list(spec.parts()):
        for field, usual in _default_fields(part).items():
            fresh = replace(part, **{field: usual})
            if (
                getattr(part, field) != usual
                and fresh.with_fixed_sizes(spec) == part.with_fixed_sizes(spec)
                and fresh != part
            ):
                spec, part = _replace_part(spec, name, fresh), fresh
    return spec


def _default_fields(part: Part) -> dict[str, Any]:
    return field_defaults(type(part))


def _replace_part(spec: AttentionSpec, name: str, fresh: Any) -> AttentionSpec:
    slots: dict[str, Callable[[], AttentionSpec]] = {
        ("output" if slot == "merge" else slot): (lambda slot=slot: replace(spec, **{slot: fresh})) for slot in SLOTS
    }
    if name in slots:
        return slots[name]()
    named = [found for found, _ in spec.parts()][4:]
    modifiers = tuple(fresh if found == name else held for found, held in zip(named, spec.modifiers, strict=True))
    return replace(spec, modifiers=modifiers)


# --- Files of transformers written again with other attentions in them, shard by shard -----------------

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
        usual = [
            self.weight_names.canonical_name(name)
            for name in self.source_tensors.infos
            if self.plan_name(name) not in self.new_plan.pieces
        ]
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

"""Weights of a changed model in the layout of its original files: a canonical form, rewritten shard
by shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...attention.head_axis_ops import select_heads
from ...attention.interfaces.part import field_defaults
from ...attention.spec.attention_spec import SLOTS, AttentionSpec
from ...hub.checkpoint_weights import TensorSource, build_tensor, open_folder
from ...models import Transformer
from ...models.families import get_weight_names
from ...models.families.weight_names import CheckpointPlan, WeightNames
from ...models.hub_files import INDEX_FILE
from ...models.model_spec import ModelSpec
from ...util.files import sync_folder
from ..attention_replacement import replace_specs
from ..head_grouping import permute_heads


@dataclass(frozen=True)
class CanonicalForm:
    """A model spec and all its tensors by name."""

    model_spec: ModelSpec
    tensors: Mapping[str, Tensor]

    def find_extra_constants(self, names: WeightNames) -> dict[str, Tensor]:
        """Return constants that these files do not store and that differ from what the spec
        implies.
        """
        constants: dict[str, Tensor] = {}
        for site, spec in self.model_spec.attention_specs():
            for key, param in spec.params().items():
                name = f"{site}.{key}"
                if param.trainable or names.find_location(name) is not None:
                    continue
                tensor = self.tensors[name].cpu()
                if not torch.equal(tensor, param.init(spec.shapes()[key]).to(tensor.dtype)):
                    constants[name] = tensor
        return constants


def to_canonical_form(net: Transformer) -> CanonicalForm:
    """Return an equivalent model in canonical form, which a config is most likely to describe.

    Heads are sorted by key-value head, shared tables contain only the columns in use, and options
    with default values are dropped.

    >>> import headwise as hw
    >>> from headwise.models.model_spec import BlockSpec, EmbeddingSpec, StackSpec
    >>> spec = hw.design(model=8, heads=4, kv=2, dim=3).with_heads(kv_head_of_query=(0, 1, 0, 1))
    >>> stack = StackSpec.from_blocks("decoder", 8, [BlockSpec(spec)], embedding=EmbeddingSpec(5))
    >>> [(_, sorted_spec)] = to_canonical_form(
    ...     hw.build(ModelSpec("x", "decoder", (stack,)))
    ... ).model_spec.attention_specs()
    >>> sorted_spec.heads
    Heads.grouped(q=4, kv=2, dim=3)
    """
    form = CanonicalForm(
        net.spec, {name: tensor.detach() for name, tensor in net.state_dict().items()}
    )
    for step in (_sort_heads, _narrow_tables, _drop_defaults):
        form = step(form)
    return form


def _site_tensors(form: CanonicalForm, site: str, spec: AttentionSpec) -> dict[str, Tensor]:
    """Return every tensor of an attention; a shared one is found under the name
    of its first use.
    """
    stack = site.split(".")[0]
    tensors = dict[str, Tensor]()
    for key in spec.params():
        own = f"{site}.{key}"
        if own not in form.tensors:
            own = next(
                name
                for name in form.tensors
                if name.startswith(f"{stack}.") and name.endswith(f".{key}")
            )
        tensors[key] = form.tensors[own]
    return tensors


# --- order of heads -------------------------------------------------------------------------------


def _sort_heads(form: CanonicalForm) -> CanonicalForm:
    """Sort query heads by their key-value head, and key-value heads by their first query head."""
    specs = dict(form.model_spec.attention_specs())
    tensors = dict(form.tensors)
    for site, spec in specs.items():
        heads = spec.heads
        weights = _site_tensors(form, site, spec)
        if heads.value_heads or spec.score_head_of_output != tuple(range(heads.q)):
            continue
        columns = next(
            (weights[key].tolist() for key, _, _ in list_index_constants(spec)),
            heads.kv_head_of_query,
        )
        keys = columns if heads.kv == heads.q else heads.kv_head_of_query
        order = sorted(range(heads.q), key=keys.__getitem__)
        groups = list(dict.fromkeys(heads.kv_head_of_query[h] for h in order))
        if order == sorted(order) and groups == sorted(groups):
            continue
        specs[site], moved = permute_heads(spec, weights, order)
        for key, tensor in moved.items():
            if f"{site}.{key}" in tensors:
                tensors[f"{site}.{key}"] = tensor
    return CanonicalForm(replace_specs(form.model_spec, specs), tensors)


# --- tables that layers share ---------------------------------------------------------------------


def list_index_constants(spec: AttentionSpec) -> Iterator[tuple[str, str, str]]:
    """Yield constants that hold each head's index into a shared table, as (constant, table, axis of
    the table).
    """
    for name, part in spec.parts():
        params = part.params(spec)
        for table, param in params.items():
            for axis in param.layout.axes if param.tied_to else ():
                index = params.get(axis)
                if index and index.layout.axes == ("q",) and not index.trainable:
                    yield f"{name}.{axis}", f"{name}.{table}", axis


def _narrow_tables(form: CanonicalForm) -> CanonicalForm:
    """Drop the unused columns of a table if all layers of a stack use the same ones."""
    specs = dict(form.model_spec.attention_specs())
    tensors = dict(form.tensors)
    for stack in form.model_spec.stacks:
        own = {site: spec for site, spec in specs.items() if site.startswith(f"{stack.name}.")}
        rows = set(chain.from_iterable(map(list_index_constants, own.values())))
        for constant, table, axis in rows:
            sites = [site for site, spec in own.items() if constant in spec.params()]
            index_lists = {tuple(tensors[f"{site}.{constant}"].tolist()) for site in sites}
            owner = next(f"{site}.{table}" for site in sites if f"{site}.{table}" in tensors)
            number = own[sites[0]].params()[table].layout.axes.index(axis)
            used = sorted(next(iter(index_lists)))
            is_shared = len(index_lists) == 1 and len(set(used)) == len(used)
            if not is_shared or len(used) == tensors[owner].shape[number]:
                continue
            part = constant.split(".")[0]
            narrowed = {site: _fit_axis(own[site], part, axis, len(used)) for site in sites}
            if not all(narrowed.values()):
                continue
            specs |= {site: spec for site, spec in narrowed.items() if spec}
            tensors[owner] = select_heads(used)(tensors[owner], number).clone()
            for site in sites:
                old = tensors[f"{site}.{constant}"]
                new = [used.index(index) for index in old.tolist()]
                tensors[f"{site}.{constant}"] = torch.tensor(new).to(old)
    return CanonicalForm(replace_specs(form.model_spec, specs), tensors)


def _fit_axis(spec: AttentionSpec, name: str, axis: str, size: int) -> AttentionSpec | None:
    """Reset one field of a part to its default so that the axis gets this size; None if no field
    does.
    """
    part = dict(spec.parts())[name]
    for field, default in field_defaults(type(part)).items():
        new_part = replace(part, **{field: default})
        if getattr(part, field) != default and spec.sizes_of(new_part)[axis] == size:
            return _replace_part(spec, name, new_part)
    return None


# --- options with default values ------------------------------------------------------------------


def _drop_defaults(form: CanonicalForm) -> CanonicalForm:
    """Reset fields of parts to their defaults where that changes nothing."""
    specs = dict(form.model_spec.attention_specs())
    for site, spec in specs.items():
        for name, part in list(spec.parts()):
            for field, default in field_defaults(type(part)).items():
                new_part = replace(part, **{field: default})
                is_same = new_part.with_fixed_sizes(spec) == part.with_fixed_sizes(spec)
                if getattr(part, field) != default and is_same and new_part != part:
                    spec = _replace_part(spec, name, new_part)
                    part = new_part
        specs[site] = spec
    return replace(form, model_spec=replace_specs(form.model_spec, specs))


def _replace_part(spec: AttentionSpec, name: str, part: Any) -> AttentionSpec:
    slot = "merge" if name == "output" else name
    if slot in SLOTS:
        return replace(spec, **{slot: part})
    names = [part_name for part_name, _ in spec.parts()][4:]
    modifiers = tuple(
        part if part_name == name else modifier
        for part_name, modifier in zip(names, spec.modifiers, strict=True)
    )
    return replace(spec, modifiers=modifiers)


# --- Rewriting of shards --------------------------------------------------------------------------

HEAD_AXES = ("q", "kv", "v", "out", "row")  # axes of size 0 when no head is left


class ShardRewrite(NamedTuple):
    """Layout of a model's tensors in its files, before and after the change."""

    source_tensors: TensorSource
    weight_names: WeightNames
    prefix: str
    old_plan: CheckpointPlan
    new_plan: CheckpointPlan
    form: CanonicalForm

    @staticmethod
    def plan_rewrite(source: Path, described: ModelSpec, form: CanonicalForm) -> ShardRewrite:
        """Return the rewrite of a folder with model spec `described` into `form`."""
        stored = open_folder(source)
        names = get_weight_names(described.name)
        trunk = names.find_prefix(names.canonical_name(name) for name in stored.infos)
        old, new = (
            CheckpointPlan.from_spec(model, names, trunk) for model in (described, form.model_spec)
        )
        return ShardRewrite(stored, names, trunk, old, new, form)

    def plan_name(self, name: str) -> str:
        """Return the name of a file tensor in the plans."""
        usual = self.weight_names.canonical_name(name)
        return self.old_plan.tied_names.get(usual, usual)

    @property
    def unused_tensors(self) -> list[str]:
        """Tensors that the new model does not use and that files of this kind do not normally
        contain.
        """
        usual = [
            self.weight_names.canonical_name(name)
            for name in self.source_tensors.infos
            if self.plan_name(name) not in self.new_plan.pieces
        ]
        return [name for name in usual if not self.weight_names.is_ignored(name)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor to write, by its name in the files."""
        return {name: self._shape(name) for name in (*self.source_tensors.infos, *self.new_tensors)}

    @property
    def new_tensors(self) -> dict[str, str]:
        """Return tensors missing in the source, each with a tensor in its target shard."""
        source_names = {self.plan_name(name): name for name in self.source_tensors.infos}
        last = list(self.source_tensors.infos)[-1]
        neighbours = dict[str, str]()
        for path in self.new_plan.pieces:
            if path not in source_names:
                prefix = f"{path.rpartition('.')[0]}."
                beside = (name for name in source_names.values() if name.startswith(prefix))
                neighbours[path] = next(beside, last)
        return neighbours

    def _shape(self, name: str) -> tuple[int, ...]:
        path = self.plan_name(name)
        if path in self.new_plan.pieces:
            return self.new_plan.pieces[path][0].shape
        if path not in self.old_plan.pieces:
            return self.source_tensors.infos[name].shape
        # without heads, all head axes have size 0
        view = self.old_plan.pieces[path][0].file_view
        sizes = {axis: 0 if axis in HEAD_AXES else size for axis, size in view.axis_sizes.items()}
        return view.layout.shape(sizes)

    def find_unstorable_tensor(self) -> str:
        """Why a tensor of the files cannot hold its parts of the model; "" if all can.

        A tensor with queries, keys and values side by side has room for equally many heads of each.
        """
        for path, pieces in self.new_plan.pieces.items():
            num_stored = 0
            fits = True
            for piece in pieces:
                size = self.form.tensors[piece.name].numel()
                own = piece.own_view
                fits &= prod(own.layout.unmerged_shape(own.axis_sizes)) == size
                fits &= piece.shape == pieces[0].shape
                num_stored += size
            is_joint = len({piece.name for piece in pieces}) > 1
            if not fits or (is_joint and num_stored > prod(pieces[0].shape)):
                sizes = ", ".join(
                    f"{piece.name} {list(self.form.tensors[piece.name].shape)}" for piece in pieces
                )
                return f"{path} of the source has no room for {sizes}"
        return ""

    def rewrite_tensor(self, name: str, source: Tensor) -> Tensor:
        """Return the tensor to write under a name: the source's, unless the model has a new one."""
        path = self.plan_name(name)
        if path in self.new_plan.pieces:
            return self.build_tensor(path, source.dtype)
        shape = self._shape(name)
        return source if shape == tuple(source.shape) else source.new_empty(shape)

    def build_tensor(self, path: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the model in the layout and dtype of the files."""
        return build_tensor(self.new_plan.pieces[path], self.form.tensors, dtype)


def write_shards(rewrite: ShardRewrite, folder: Path) -> None:
    """Write the shards into a folder one at a time, and their index if the source has one."""
    new_by_neighbour = dict[str, list[str]]()
    file_of_tensor = dict[str, str]()
    for path, neighbour in rewrite.new_tensors.items():
        new_by_neighbour.setdefault(neighbour, []).append(path)
    size = 0
    for file in rewrite.source_tensors.files:
        tensors = dict[str, Tensor]()
        with safe_open(file, framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = rewrite.rewrite_tensor(name, opened.get_tensor(name)).contiguous()
                for path in new_by_neighbour.get(name, ()):
                    tensors[path] = rewrite.build_tensor(path, tensors[name].dtype)
        path = folder / file.name
        try:
            save_file(tensors, path, metadata)
            sync_folder(path)
        except Exception as error:  # safetensors raises its own type when the disk is full
            raise OSError(
                f"{path} cannot be written: {error}; make room, or give another folder"
            ) from error
        file_of_tensor |= dict.fromkeys(tensors, file.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if rewrite.source_tensors.path.name == INDEX_FILE:
        index: dict[str, Any] = json.loads(rewrite.source_tensors.path.read_text(encoding="utf-8"))
        index["weight_map"] = file_of_tensor
        index["metadata"] = (index.get("metadata") or {}) | {"total_size": size}
        path = folder / INDEX_FILE
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync_folder(path)

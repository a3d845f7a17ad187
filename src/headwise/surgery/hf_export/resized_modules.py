"""Changes to transformers modules that let them hold attentions of other sizes, found by inspecting
the modules.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from os.path import commonpath
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ...attention.spec.attention_spec import AttentionSpec
from ...hub.pretrained_models import CONFIG_FILE
from ...hub.transformers_loading import build_without_weights, find_model_class, load_config
from ...models.families import read_model_spec
from ...models.families.config_reader import HEAD_COUNT_KEYS, KV_COUNT_KEYS
from ...models.families.weight_names import CheckpointPlan
from ...models.model_spec import ModelSpec
from ...util.errors import SpecError
from ..resized_attention import READINGS, HeadCounts, read_new_numbers
from .shard_rewrite import HEAD_AXES, CanonicalForm, ShardRewrite, list_index_constants

RETURN_COUNTS = (2, 3, 0)  # length of the tuple an attention module returns; 0: a bare tensor

ModuleChanges = dict[str, dict[str, Any]]


class AttentionLocation(NamedTuple):
    """Location of an attention in a transformers model: its module, and its output matrix relative
    to that module.
    """

    site: str
    module_path: str
    output_weight: str | None
    tensor_paths: tuple[str, ...]
    before: AttentionSpec
    after: AttentionSpec | None
    kv_paths: tuple[str, ...] = ()


def list_module_changes(folder: Path, rewrite: ShardRewrite) -> list[ModuleChanges]:
    """Return candidate changes by module, likely ones first: one for each interpretation of the
    integer attributes.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    try:
        hf_config = load_config(folder)
        model = build_without_weights(find_model_class(hf_config), hf_config)
    except Exception as error:  # transformers raises many types for a bad config
        raise SpecError(
            "transformers cannot build a model from its config.json: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None
    names, converted = _map_tensor_names(model, rewrite)
    locations = list(_locate_attentions(rewrite, names, read_model_spec(config)))
    changes = ModuleChanges({location.module_path: {} for location in locations})
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in rewrite.shapes.items():
        is_read = names[name] in shapes or rewrite.plan_name(name) in rewrite.new_plan.pieces
        # a converted one is without heads, else _map_tensor_names raises
        if is_read and shapes.get(names[name]) != shape and name not in converted:
            module_path, _, leaf = names[name].rpartition(".")
            changes.setdefault(module_path, {}).setdefault("shapes", {})[leaf] = list(shape)
    for host, columns in _table_columns(rewrite, names, locations):
        changes[host]["columns"] = columns
    modules = dict(model.named_modules())
    repeats = dict[str, dict[str, int]]()
    for location in locations:
        own = changes[location.module_path]
        own |= _forward_changes(
            modules[location.module_path], location, rewrite, has_columns="columns" in own
        )
        heads = None if location.after is None else location.after.heads
        # how often keys and values are repeated if each query head needs its own
        if heads and heads.kv != heads.q and heads.is_evenly_grouped and heads.dim == heads.vdim:
            repeat = {"count": heads.q // heads.kv, "width": heads.dim}
            repeats |= dict.fromkeys(location.kv_paths, repeat)
    has_constant = any("constant" in change for change in changes.values())
    return_counts = RETURN_COUNTS if has_constant else RETURN_COUNTS[:1]
    new_numbers = list(_list_new_numbers(modules, locations))
    candidates = list[ModuleChanges]()
    for repeated in ({}, repeats) if repeats else ({},):
        for return_count, numbers in product(return_counts, new_numbers):
            merged = {path: dict(change) for path, change in changes.items()}
            for path, values in numbers.items():
                if values:
                    merged.setdefault(path, {})["set"] = dict(values)
            for path, repeat in repeated.items():
                merged.setdefault(path, {})["repeat"] = dict(repeat)
            for change in merged.values():
                if "constant" in change:
                    change["constant"] = change["constant"] | {"num_outputs": return_count}
            candidates.append(merged)
    return candidates


# --- tensor names ---------------------------------------------------------------------------------


def _map_tensor_names(model: Any, rewrite: ShardRewrite) -> tuple[dict[str, str], set[str]]:
    """Return the transformers name of every tensor in the files, and the tensors that transformers
    converts.

    Raises SpecError if it would convert a tensor with heads. Experts are stacked, for example.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:
        raise SpecError(
            "cannot read the tensor names of this version of transformers. Install transformers "
            "5.0 or later"
        ) from None

    model_tensors = model.state_dict()
    names = dict[str, str]()
    converted_names = set[str]()
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    modules = dict[str, str]()
    for name in (*rewrite.source_tensors.infos, *rewrite.new_tensors):
        names[name], converted = rename_source_key(
            name, renamings, converters, model.base_model_prefix, model_tensors
        )
        if converted is not None:
            converted_names.add(name)
            pieces = rewrite.old_plan.pieces.get(rewrite.plan_name(name), ())
            if any(set(HEAD_AXES) & set(piece.file_view.axis_sizes) for piece in pieces):
                raise SpecError(f"transformers converts {name} to another layout when loading")
        if names[name] in model_tensors:
            modules[_parent_path(name)] = _parent_path(names[name])
    # A tensor missing in the model gets the path of its module's other tensors, which includes the
    # trunk's name.
    for name, new in names.items():
        if new not in model_tensors and _parent_path(name) in modules:
            names[name] = f"{modules[_parent_path(name)]}.{name.rpartition('.')[2]}"
    return names, converted_names


def _parent_path(name: str) -> str:
    return name.rpartition(".")[0]


def _locate_attentions(
    rewrite: ShardRewrite, names: Mapping[str, str], before: ModelSpec
) -> Iterator[AttentionLocation]:
    """Yield the location of every attention of the original config, from the
    paths of its tensors.
    """
    files_by_path = {rewrite.plan_name(name): name for name in rewrite.source_tensors.infos}
    plan = CheckpointPlan.from_spec(before, rewrite.weight_names, rewrite.prefix)
    module_of_tensor = dict[str, str]()
    for path, pieces in plan.pieces.items():
        if path in files_by_path:
            module_path = _parent_path(names[files_by_path[path]])
            module_of_tensor |= dict.fromkeys((piece.name for piece in pieces), module_path)
    new_specs = dict(rewrite.form.model_spec.attention_specs())
    for site, spec in before.attention_specs():
        paths = {
            key: module_of_tensor[f"{site}.{key}"]
            for key in spec.params()
            if f"{site}.{key}" in module_of_tensor
        }
        projections = [
            _parent_path(path) for key, path in paths.items() if key.startswith("project.")
        ]
        output_path = paths.get("output.o")
        if not projections or output_path is None:
            raise SpecError(f"{site} has no separate weight matrices in these files")
        folders = [path.replace(".", "/") for path in projections]
        module_path = commonpath(folders).replace("/", ".")
        # the innermost element of a list, such as "layers.3"
        around = (module_path, *_parent_paths(module_path))
        layer_path = next((path for path in around if path.rpartition(".")[2].isdigit()), "")
        tensor_paths = {*paths.values()}
        inner_paths = {module_path}
        for path in tensor_paths:
            inner_paths |= {one for one in _parent_paths(path) if len(one) > len(layer_path)}
        prefix = f"{module_path}."
        # keys and values, if each has a separate projection module
        kv_paths = tuple(paths[key] for key in ("project.k", "project.v") if key in paths)
        yield AttentionLocation(
            site,
            module_path,
            output_path.removeprefix(prefix) if output_path.startswith(prefix) else None,
            tuple(sorted((inner_paths - tensor_paths) | {module_path})),
            spec,
            new_specs.get(site),
            kv_paths if len({*kv_paths, paths.get("project.q")} - {None}) == 3 else (),
        )


def _parent_paths(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


# --- integer attributes of modules ----------------------------------------------------------------


def _list_new_numbers(
    modules: Mapping[str, nn.Module], locations: Sequence[AttentionLocation]
) -> Iterator[dict[str, dict[str, int]]]:
    """Yield new attribute values by module path, one dictionary per reading of the integers."""
    for reading in READINGS:
        new_values = dict[str, dict[str, int]]()
        for location in locations:
            if location.after is None:
                continue
            if not location.after.heads.is_evenly_grouped:
                raise SpecError(
                    "transformers does not support key-value groups of unequal size "
                    f"({location.site})"
                )
            old = _measure_widths(location.before)
            new = _measure_widths(location.after)
            lengths = {width: new[side] for side, width in old.items() if width != new[side]}
            counts = [
                HeadCounts(spec.heads.q, spec.heads.kv)
                for spec in (location.before, location.after)
            ]
            for path in location.tensor_paths:
                module = modules[path]
                if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                    continue  # their shapes are listed
                values = read_new_numbers(module, counts[0], counts[1], lengths, reading)
                new_values[path] = {
                    name: value for name, value in values.items() if value != vars(module)[name]
                }
        yield new_values


def _measure_widths(spec: AttentionSpec) -> dict[str, int]:
    """Return the channels of all heads of each side."""
    heads = spec.heads
    widths = {"keys": heads.kv * heads.dim, "queries": heads.q * heads.dim}
    return widths | {"outputs": len(spec.score_head_of_output) * heads.vdim}


def _forward_changes(
    module: nn.Module, location: AttentionLocation, rewrite: ShardRewrite, *, has_columns: bool
) -> dict[str, Any]:
    """Changes to what the forward method of an attention computes or reads."""
    before = location.before
    after = location.after
    if after is None:
        has_cache = (
            location.site.endswith(".attention") and type(vars(module).get("layer_idx")) is int
        )
        return {"constant": {"output_weight": location.output_weight, "has_cache": has_cache}}
    changes = dict[str, Any]()
    # numbers of heads that it reads from the config of the model
    methods = [one for one in vars(type(module)).values() if inspect.isfunction(one)]
    read = set[str]()
    for method in methods:
        if method.__name__ != "__init__":
            read |= {*re.findall(r"\.config\.(\w+)", inspect.getsource(method))}
    counts = dict.fromkeys(HEAD_COUNT_KEYS, (before.heads.q, after.heads.q))
    counts |= dict.fromkeys(KV_COUNT_KEYS, (before.heads.kv, after.heads.kv))
    config = getattr(module, "config", None)
    values = {
        name: new
        for name, (old, new) in counts.items()
        if name in read and old != new and getattr(config, name, None) == old
    }
    if values:
        changes["config"] = values
    # the query heads that the output matrix reads, if a norm over all heads needs others too
    keep = list(after.score_head_of_output)
    if location.output_weight is not None and keep != list(range(after.heads.q)):
        outputs = {"weight": location.output_weight, "keep": keep, "dim": after.heads.vdim}
        changes["outputs"] = outputs
    arguments = inspect.signature(type(module).forward).parameters
    if "position_bias" in arguments and (has_columns or location.site.endswith(".cross")):
        changes["own_position_bias"] = True
    # the rows of the model's position biases that it reads, if they are not all, in order
    for key, param in before.params().items() if "alibi" in arguments else ():
        if param.layout.axes == ("q",) and not param.trainable:
            usual = param.init(before.shapes()[key]).tolist()
            slopes = rewrite.form.tensors[f"{location.site}.{key}"].tolist()
            keep = [usual.index(slope) for slope in slopes]
            if keep != list(range(len(usual))):
                changes["slopes"] = {"heads": len(usual), "keep": keep}
    return changes


# --- tables shared by layers ----------------------------------------------------------------------


def _table_columns(
    rewrite: ShardRewrite, names: Mapping[str, str], locations: Sequence[AttentionLocation]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the table columns each attention uses, for stacks in which any layer does not use all
    of them in order.
    """
    form: CanonicalForm = rewrite.form
    by_stack = dict[str, list[tuple[AttentionLocation, str, list[int]]]]()
    for location in locations:
        for constant, table, _ in list_index_constants(location.after) if location.after else ():
            keep = form.tensors[f"{location.site}.{constant}"].tolist()
            by_stack.setdefault(location.site.split(".")[0], []).append((location, table, keep))
    for stack, rows in by_stack.items():
        table = rows[0][1]
        owner = next(
            name
            for name in form.tensors
            if name.startswith(f"{stack}.") and name.endswith(f".{table}")
        )
        in_order = list(range(form.tensors[owner].shape[-1]))
        pieces_by_path = rewrite.new_plan.pieces.items()
        paths = [path for path, pieces in pieces_by_path if owner in {one.name for one in pieces}]
        host = next(_parent_path(names[path]) for path in paths if path in names)
        is_moved = any(path in rewrite.new_tensors for path in paths)
        if is_moved or any(keep != in_order for _, _, keep in rows):
            for location, _, keep in rows:
                yield location.module_path, {"table": host, "keep": keep}

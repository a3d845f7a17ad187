"""Changes to transformers modules that let them hold attentions of other sizes, found by inspecting
the modules.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ...attention.spec.attention_spec import AttentionSpec
from ...hub.pretrained_models import CONFIG_FILE
from ...hub.transformers_loading import build_without_weights, find_model_class, load_config
from ...models import Transformer
from ...models.families import read_model_spec
from ...models.families.config_reader import HEAD_COUNT_KEYS, KV_COUNT_KEYS
from ...models.families.weight_names import CheckpointPlan
from ...models.model_spec import ModelSpec, to_dict
from ...models.model_spec.serialization import RECORD_FILE, RECORD_FORMAT
from ...util.errors import SpecError
from ...util.files import sha256, sync_folder
from .load_check import check_load
from .shard_rewrite import HEAD_AXES, CanonicalForm, ShardRewrite, list_index_constants

MAX_CANDIDATES = 24  # combinations of module attributes to try
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

    @property
    def repeats(self) -> dict[str, int]:
        """How often keys and values are repeated if each query head needs its own; {} if they are
        not grouped.
        """
        heads = None if self.after is None else self.after.heads
        if (
            heads is None
            or heads.kv == heads.q
            or not heads.is_evenly_grouped
            or heads.dim != heads.vdim
        ):
            return {}
        return {"count": heads.q // heads.kv, "width": heads.dim}


def list_module_changes(folder: Path, rewrite: ShardRewrite) -> list[ModuleChanges]:
    """Return candidate changes by module, likely ones first: one for each interpretation of the
    integer attributes.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    model = _build_hf_model(folder)
    names, converted = _map_tensor_names(model, rewrite)
    locations = list(_locate_attentions(rewrite, names, read_model_spec(config)))
    changes = ModuleChanges({location.module_path: {} for location in locations})
    for name, shape in _shapes(model, names, rewrite).items():
        if name in converted:  # without heads, else _map_tensor_names raises
            continue
        module, _, leaf = names[name].rpartition(".")
        changes.setdefault(module, {}).setdefault("shapes", {})[leaf] = list(shape)
    for host, columns in _table_columns(rewrite, names, locations):
        changes[host]["columns"] = columns
    modules = dict(model.named_modules())
    repeats = dict[str, dict[str, int]]()
    for location in locations:
        own = changes[location.module_path]
        module = modules[location.module_path]
        own |= _forward_changes(module, location, rewrite, has_columns="columns" in own)
        if location.repeats:
            repeats |= dict.fromkeys(location.kv_paths, location.repeats)
    has_constant = any("constant" in change for change in changes.values())
    return_counts = RETURN_COUNTS if has_constant else RETURN_COUNTS[:1]
    new_numbers = list(islice(_list_new_numbers(modules, locations), MAX_CANDIDATES))
    candidates = list[ModuleChanges]()
    for repeated in ({}, repeats) if repeats else ({},):
        for return_count, numbers in islice(product(return_counts, new_numbers), MAX_CANDIDATES):
            merged = {path: dict(change) for path, change in changes.items()}
            for path, values in numbers.items():
                merged.setdefault(path, {})["set"] = dict(values)
            for path, repeat in repeated.items():
                merged.setdefault(path, {})["repeat"] = dict(repeat)
            for change in merged.values():
                if "constant" in change:
                    change["constant"] = change["constant"] | {"num_outputs": return_count}
            candidates.append(merged)
    return candidates


def _build_hf_model(folder: Path) -> nn.Module:
    """Build the transformers model that config.json describes, on the meta device."""
    try:
        hf_config = load_config(folder)
        return build_without_weights(find_model_class(hf_config), hf_config)
    except Exception as error:  # transformers raises many types for a bad config
        raise SpecError(
            "transformers cannot build a model from its config.json: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None


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


def _shapes(
    model: nn.Module, names: Mapping[str, str], rewrite: ShardRewrite
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that the model has in another shape, or not at all."""
    model_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {
        name: shape
        for name, shape in rewrite.shapes.items()
        if (names[name] in model_shapes or rewrite.plan_name(name) in rewrite.new_plan.pieces)
        and model_shapes.get(names[name]) != shape
    }


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
        paths = {key: module_of_tensor.get(f"{site}.{key}") for key in spec.params()}
        paths = {key: path for key, path in paths.items() if path is not None}
        projections = [_parent_path(paths[key]) for key in paths if key.startswith("project.")]
        output_path = paths.get("output.o")
        if not projections or output_path is None:
            raise SpecError(f"{site} has no weight matrices of its own in these files")
        module_path = _common_module(projections)
        layer_path = _layer_path(module_path)
        tensor_paths = {*paths.values()}
        inner_paths = {module_path}
        for path in tensor_paths:
            inner_paths |= {one for one in _parent_paths(path) if len(one) > len(layer_path)}
        prefix = f"{module_path}."
        # keys and values, if each is projected by a module of its own
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


def _common_module(paths: Sequence[str]) -> str:
    """Return the innermost module that contains all of these paths."""
    names = [path.split(".") for path in paths]
    depth = 0
    while all(len(path) > depth and path[depth] == names[0][depth] for path in names):
        depth += 1
    return ".".join(names[0][:depth])


def _parent_paths(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _layer_path(path: str) -> str:
    """Return the innermost module on a path that is an element of a list, such as "layers.3"; "" if
    none is.
    """
    return next(
        (module for module in (path, *_parent_paths(path)) if module.rpartition(".")[2].isdigit()),
        "",
    )


# --- integer attributes of modules ----------------------------------------------------------------


def _derived_sizes(spec: AttentionSpec) -> dict[str, int]:
    """Return the sizes that depend on the heads and that a module may store as an attribute."""
    heads = spec.heads
    sizes = {"heads": heads.q, "kv_heads": heads.kv, "group": heads.q // heads.kv}
    return sizes | {
        "query_width": heads.q * heads.dim,
        "kv_width": heads.kv * heads.dim,
        "output_width": len(spec.score_head_of_output) * heads.vdim,
    }


def _fixed_widths(spec: AttentionSpec) -> set[int]:
    """Return the sizes that do not depend on the number of heads."""
    return {
        size
        for _, part in spec.parts()
        for axis, size in spec.sizes_of(part).items()
        if axis not in HEAD_AXES
    }


def _list_new_numbers(
    modules: Mapping[str, nn.Module], locations: Sequence[AttentionLocation]
) -> Iterator[dict[str, dict[str, int]]]:
    """Yield new attribute values by module path, one dictionary per interpretation of the current
    values.

    Those that follow from the sizes come first, then those in which a number is equal to one of
    them by chance.
    """
    for location in locations:
        if location.after and not location.after.heads.is_evenly_grouped:
            raise SpecError(
                f"transformers does not support key-value groups of unequal size ({location.site})"
            )
    rows = dict[tuple[str, str], list[ModuleNumber]]()
    for location in locations:
        for path in location.tensor_paths if location.after else ():
            for name, value in vars(modules[path]).items():
                if type(value) is not int or name.startswith("_"):
                    continue
                row = ModuleNumber(path, location, name, value)
                rows.setdefault((type(modules[path]).__name__, name), []).append(row)
    choices_of_name = [(name, _interpret_numbers(numbers)) for (_, name), numbers in rows.items()]
    names = [name for name, choices in choices_of_name if choices]
    strict = [choices for _, choices in choices_of_name if choices]
    loose = [choices if {} in choices else [*choices, {}] for choices in strict]
    by_chance = (
        chosen
        for chosen in product(*loose)
        if any(choice not in own for choice, own in zip(chosen, strict, strict=True))
    )
    for chosen in chain(product(*strict), by_chance):
        new_values = dict[str, dict[str, int]]()
        for name, choice in zip(names, chosen, strict=True):
            for path, value in choice.items():
                new_values.setdefault(path, {})[name] = value
        yield new_values


class ModuleNumber(NamedTuple):
    """An integer attribute of a module inside an attention."""

    path: str
    location: AttentionLocation
    name: str
    value: int


def _interpret_numbers(rows: Sequence[ModuleNumber]) -> list[dict[str, int]]:
    """Return the new values an attribute may get in all modules of one type; {} (unchanged) is
    last, if possible.
    """
    choices = list[dict[str, int]]()
    for size_name in _derived_sizes(rows[0].location.before):
        if all(row.value == _derived_sizes(row.location.before)[size_name] for row in rows):
            changed = dict[str, int]()
            for row in rows:
                if row.location.after is not None:
                    new = _derived_sizes(row.location.after)[size_name]
                    changed |= {row.path: new} if new != row.value else {}
            choices += [changed] if changed not in choices else []
    may_be_chance = all(row.value in _fixed_widths(row.location.before) for row in rows)
    if choices and {} not in choices and may_be_chance:
        choices.append({})
    return [] if choices == [{}] else choices


def _forward_changes(
    module: nn.Module, location: AttentionLocation, rewrite: ShardRewrite, *, has_columns: bool
) -> dict[str, Any]:
    """Changes to what the forward method of an attention computes or reads."""
    if location.after is None:
        has_cache = (
            location.site.endswith(".attention") and type(vars(module).get("layer_idx")) is int
        )
        return {"constant": {"output_weight": location.output_weight, "has_cache": has_cache}}
    has_own_bias = has_columns or location.site.endswith(".cross")
    own_bias = (
        {"own_position_bias": True} if has_own_bias and _takes(module, "position_bias") else {}
    )
    slopes = _kept_slopes(module, location, rewrite)
    return (
        _config_values(module, location, location.after)
        | _kept_outputs(location, location.after)
        | own_bias
        | slopes
    )


def _config_values(
    module: nn.Module, location: AttentionLocation, after: AttentionSpec
) -> dict[str, Any]:
    """Numbers of heads that the forward of a module reads from the config of the model, with their
    new values.
    """
    config = getattr(module, "config", None)
    names = _names_read_from_config(type(module))
    counts = dict.fromkeys(HEAD_COUNT_KEYS, (location.before.heads.q, after.heads.q))
    counts |= dict.fromkeys(KV_COUNT_KEYS, (location.before.heads.kv, after.heads.kv))
    values = {
        name: new
        for name, (old, new) in counts.items()
        if name in names and old != new and getattr(config, name, None) == old
    }
    return {"config": values} if values else {}


def _names_read_from_config(kind: type[nn.Module]) -> set[str]:
    """Attributes of `self.config` in the methods of a class, except for `__init__`."""
    source = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    methods = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"
    ]
    attributes = [
        node for method in methods for node in ast.walk(method) if isinstance(node, ast.Attribute)
    ]
    return {
        node.attr
        for node in attributes
        if isinstance(node.value, ast.Attribute) and node.value.attr == "config"
    }


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(module).forward).parameters


def _kept_outputs(location: AttentionLocation, after: AttentionSpec) -> dict[str, Any]:
    """The query heads that the output matrix reads, if a norm over all heads needs others too."""
    keep = list(after.score_head_of_output)
    if location.output_weight is None or keep == list(range(after.heads.q)):
        return {}
    return {"outputs": {"weight": location.output_weight, "keep": keep, "dim": after.heads.vdim}}


def _kept_slopes(
    module: nn.Module, location: AttentionLocation, rewrite: ShardRewrite
) -> dict[str, Any]:
    """The rows of the model's position biases that a layer reads, if they are not all, in order."""
    constants = [
        (key, param)
        for key, param in location.before.params().items()
        if param.layout.axes == ("q",) and not param.trainable
    ]
    if not _takes(module, "alibi") or not constants:
        return {}
    ((key, param),) = constants
    usual = param.init(location.before.shapes()[key]).tolist()
    keep = [usual.index(slope) for slope in rewrite.form.tensors[f"{location.site}.{key}"].tolist()]
    return (
        {"slopes": {"heads": len(usual), "keep": keep}} if keep != list(range(len(usual))) else {}
    )


# --- tables shared by layers ----------------------------------------------------------------------


def _table_columns(
    rewrite: ShardRewrite, names: Mapping[str, str], locations: Sequence[AttentionLocation]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the table columns each attention uses, for stacks in which any layer does not use all
    of them in order.
    """
    form: CanonicalForm = rewrite.form
    tensor_paths = dict[str, str]()
    for path, pieces in rewrite.new_plan.pieces.items():
        if path in names:
            tensor_paths |= dict.fromkeys((piece.name for piece in pieces), names[path])
    moved = set[str]()
    for path in rewrite.new_tensors:
        moved |= {piece.name for piece in rewrite.new_plan.pieces[path]}
    by_stack = dict[str, list[tuple[AttentionLocation, str, list[int]]]]()
    for location in locations:
        for constant, table, _ in list_index_constants(location.after) if location.after else ():
            keep = form.tensors[f"{location.site}.{constant}"].tolist()
            by_stack.setdefault(location.site.split(".")[0], []).append((location, table, keep))
    for stack, rows in by_stack.items():
        table = rows[0][1]
        owners = [name for name in form.tensors if name.endswith(f".{table}")]
        owner = next(name for name in owners if name.startswith(f"{stack}."))
        in_order = list(range(form.tensors[owner].shape[-1]))
        if owner in moved or any(keep != in_order for _, _, keep in rows):
            for location, _, keep in rows:
                yield (
                    location.module_path,
                    {"table": _parent_path(tensor_paths[owner]), "keep": keep},
                )


# --- Folders with a loader script, for models that config.json cannot describe --------------------

LOADER_NAME = "load_model.py"
LOADER_SOURCE = Path(__file__).with_name(
    "load_model.txt"
)  # for users without headwise; not imported here


class ResizedFolder(NamedTuple):
    """Summary of a folder with a loader script, and the additional contents of its heads.json."""

    summary: str
    document: Mapping[str, Any]


def add_loader(
    folder: Path, rewrite: ShardRewrite, net: Transformer, reason: str
) -> ResizedFolder | str:
    """Add the loader script to a folder with written weights and check it; return the reason if it
    does not work.
    """
    form = rewrite.form
    extra_constants = form.find_extra_constants(rewrite.weight_names)
    document: dict[str, Any] = {
        "model": to_dict(form.model_spec),
        "constants": {name: tensor.tolist() for name, tensor in extra_constants.items()},
        "unused_tensors": rewrite.unused_tensors,
    }
    not_plain = f"Not a plain transformers checkpoint, because {reason}; load it with headwise.load"
    if find_spec("transformers") is None:
        return ResizedFolder(
            f"{not_plain} (no loader script was written: it cannot be tested, because "
            "transformers is not installed).",
            document,
        )
    (folder / LOADER_NAME).write_bytes(LOADER_SOURCE.read_bytes())
    sync_folder(folder / LOADER_NAME)
    draft = {"format": RECORD_FORMAT, "kind": "resized"} | document
    (folder / RECORD_FILE).write_text(json.dumps(draft), encoding="utf-8")
    try:
        candidates = list_module_changes(folder, rewrite)
        check = check_load(folder, net, form, candidates)
    except SpecError as error:
        return str(error)
    (folder / RECORD_FILE).unlink()
    if not check.agrees:
        return f"its loader script failed ({check.message})"
    document |= {"modules": candidates[check.candidate], "checked": check.message}
    document |= {"loader": {"name": LOADER_NAME, "sha256": sha256(folder / LOADER_NAME)}}
    return ResizedFolder(f"{not_plain} or {LOADER_NAME}.", document)

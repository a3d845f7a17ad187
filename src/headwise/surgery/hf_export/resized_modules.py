"""What has to be set in the modules of transformers for attentions of other sizes: found in the modules themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import SpecError
from ...families import read_model_spec
from ...families.weight_names import CheckpointPlan
from ...files import sha256
from ...hub.model_import import CONFIG_FILE
from ...model_spec import ModelSpec, to_dict
from ...model_spec.serialization import RECORD_FILE, RECORD_FORMAT
from ...models import Transformer
from ...spec.attention_spec import AttentionSpec
from .load_check import check_load
from .shard_rewrite import HEAD_AXES, CanonicalForm, ShardRewrite, fsync_file, list_index_constants

MAX_CANDIDATES = 24  # ways that are tried
RETURN_COUNTS = (2, 3, 0)  # of an attention: what it says and one thing more, or two, or that alone

ModuleChanges = dict[str, dict[str, Any]]


class AttentionLocation(NamedTuple):
    """An attention in a model of transformers: the module that calls it has, and where its last matrix lies in it."""

    site: str
    module_path: str
    output_weight: str | None
    tensor_paths: tuple[str, ...]
    before: AttentionSpec
    after: AttentionSpec | None


def list_module_changes(folder: Path, rewrite: ShardRewrite) -> list[ModuleChanges]:
    """What to change in which module: every way that its numbers can be understood, likely ones first."""
    keys = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    model = _build_hf_model(folder, keys)
    names = _map_tensor_names(model, rewrite)
    places = list(_locate_attentions(rewrite, names, read_model_spec(keys)))
    fixed = ModuleChanges({place.module_path: {} for place in places})
    for name, shape in _shapes(model, names, rewrite).items():
        module, _, leaf = names[name].rpartition(".")
        fixed.setdefault(module, {}).setdefault("shapes", {})[leaf] = list(shape)
    for host, columns in _table_columns(rewrite, names, places):
        fixed[host]["columns"] = columns
    live = dict(model.named_modules())
    for place in places:
        if place.after is None:
            fixed[place.module_path]["still"] = {
                "last": place.output_weight,
                "remembers": _has_cache(live[place.module_path], place),
            }
    found = list[ModuleChanges]()
    returns = RETURN_COUNTS if any("still" in change for change in fixed.values()) else RETURN_COUNTS[:1]
    for parts, numbers in islice(product(returns, _list_new_numbers(live, places)), MAX_CANDIDATES):
        found.append(_merge_changes(fixed, numbers, parts))
    return found


def _merge_changes(fixed: ModuleChanges, numbers: Mapping[str, Mapping[str, int]], returns: int) -> ModuleChanges:
    both = {path: dict(change) for path, change in fixed.items()}
    for path, own in numbers.items():
        both.setdefault(path, {})["set"] = dict(own)
    for change in both.values():
        if "still" in change:
            change["still"] = change["still"] | {"returns": returns}
    return both


def _has_cache(module: nn.Module, place: AttentionLocation) -> bool:
    return place.site.endswith(".attention") and type(vars(module).get("layer_idx")) is int


def _build_hf_model(folder: Path, keys: Mapping[str, Any]) -> nn.Module:
    """The model that the config.json of a folder describes, without numbers."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return getattr(transformers, (keys.get("architectures") or [""])[0])._from_config(config)
    except Exception as error:  # whatever a config makes transformers raise
        raise SpecError(
            f"transformers builds nothing from its config.json: {' '.join(str(error).split())[:200]}"
        ) from None


# --- names ---------------------------------------------------------------------------------------------


def _map_tensor_names(model: Any, way: ShardRewrite) -> dict[str, str]:
    """The name in the model of every tensor in the files; one whose numbers it brings into another form is refused."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        raise SpecError("this transformers is too old to be asked how it names tensors; use 5.0 or later") from None

    there, found = model.state_dict(), dict[str, str]()
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    headed = {
        path
        for path, own in way.old_plan.pieces.items()
        if any(set(HEAD_AXES) & set(p.file_view.axis_sizes) for p in own)
    }
    for name in (*way.source_tensors.infos, *way.new_tensors):
        found[name], converted = rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        if converted is not None and way.plan_name(name) in headed:
            raise SpecError(f"transformers keeps {name} in another form than its files")
    # A tensor that the model has not stands where others of its module do: nobody else knows how the trunk is called.
    modules = {_parent_path(name): _parent_path(new) for name, new in found.items() if new in there}
    strange = [name for name, new in found.items() if new not in there and _parent_path(name) in modules]
    return found | {name: f"{modules[_parent_path(name)]}.{name.rpartition('.')[2]}" for name in strange}


def _parent_path(name: str) -> str:
    return name.rpartition(".")[0]


def _shapes(model: nn.Module, names: Mapping[str, str], way: ShardRewrite) -> dict[str, tuple[int, ...]]:
    """The tensors that are written in another shape than the model has, or that it has not at all."""
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {
        name: shape
        for name, shape in way.shapes.items()
        if (names[name] in there or way.plan_name(name) in way.new_plan.pieces) and there.get(names[name]) != shape
    }


def _locate_attentions(way: ShardRewrite, names: Mapping[str, str], before: ModelSpec) -> Iterator[AttentionLocation]:
    """Every attention that config.json asks for, by where its tensors lie."""
    there = {way.plan_name(name): name for name in way.source_tensors.infos}
    plan = CheckpointPlan.from_spec(before, way.weight_names, way.prefix)
    owner = {piece.name: there[path] for path, own in plan.pieces.items() if path in there for piece in own}
    left = dict(way.form.model_spec.attention_specs())
    for site, spec in before.attention_specs():
        paths = {
            key: names[owner[f"{site}.{key}"]].rpartition(".")[0] for key in spec.params() if f"{site}.{key}" in owner
        }
        sides = [path for key, path in paths.items() if key.startswith("project.")]
        last = paths.get("output.o")
        if not sides or last is None:
            raise SpecError(f"{site} has no matrices of its own in these files")
        host = _common_module([path.rpartition(".")[0] for path in sides])
        layer = _layer_path(host)
        every = {*paths.values()}
        parts = {up for path in every for up in _parent_paths(path) if len(up) > len(layer) and up not in every}
        inside = last.removeprefix(f"{host}.") if last.startswith(f"{host}.") else None
        yield AttentionLocation(site, host, inside, tuple(sorted(parts | {host})), spec, left.get(site))


def _common_module(paths: Sequence[str]) -> str:
    """The innermost module that holds all of these."""
    split = [path.split(".") for path in paths]
    shared = 0
    while all(len(path) > shared and path[shared] == split[0][shared] for path in split):
        shared += 1
    return ".".join(split[0][:shared])


def _parent_paths(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _layer_path(path: str) -> str:
    """The innermost module on a path that is one of many."""
    return next((up for up in (path, *_parent_paths(path)) if up.rpartition(".")[2].isdigit()), "")


# --- numbers -------------------------------------------------------------------------------------------


def _derived_sizes(spec: AttentionSpec) -> dict[str, int]:
    """What an attention may keep as a number that follows from its heads."""
    heads = spec.heads
    sizes = {"heads": heads.q, "shared": heads.kv, "group": heads.q // heads.kv}
    return sizes | {
        "wide": heads.q * heads.dim,
        "read": heads.kv * heads.dim,
        "said": len(spec.score_head_of_output) * heads.vdim,
    }


def _fixed_widths(spec: AttentionSpec) -> set[int]:
    """Sizes that stay what they are."""
    return {size for _, part in spec.parts() for axis, size in spec.sizes_of(part).items() if axis not in HEAD_AXES}


def _list_new_numbers(
    live: Mapping[str, nn.Module], places: Sequence[AttentionLocation]
) -> Iterator[dict[str, dict[str, int]]]:
    """New numbers of modules, by path: every way to understand those that are there."""
    if odd := [place.site for place in places if place.after and not place.after.heads.is_evenly_grouped]:
        raise SpecError(f"heads of {odd[0]} share keys and values unevenly, which transformers cannot")
    rows = dict[tuple[str, str], list[ModuleNumber]]()
    for row in (
        ModuleNumber(path, place, *one)
        for place in places
        for path in place.tensor_paths
        for one in _integer_attributes(live[path])
    ):
        if row.location.after:
            rows.setdefault((type(live[row.path]).__name__, row.name), []).append(row)
    free = [(name, choices) for (_, name), own in rows.items() if (choices := _interpret_numbers(own))]
    for chosen in product(*(choices for _, choices in free)):
        found = dict[str, dict[str, int]]()
        for (name, _), choice in zip(free, chosen, strict=True):
            for path, value in choice.items():
                found.setdefault(path, {})[name] = value
        yield found


def _integer_attributes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The whole numbers that a module keeps."""
    return ((name, n) for name, n in vars(module).items() if type(n) is int and not name.startswith("_"))


class ModuleNumber(NamedTuple):
    """A whole number of a module of an attention."""

    path: str
    location: AttentionLocation
    name: str
    value: int


def _interpret_numbers(rows: Sequence[ModuleNumber]) -> list[dict[str, int]]:
    """What one number of all modules of a kind may become; staying as it is comes last, if it may mean a width."""
    found = list[dict[str, int]]()
    for what in _derived_sizes(rows[0].location.before):
        if all(row.value == _derived_sizes(row.location.before)[what] for row in rows):
            sizes = {row.path: _derived_sizes(row.location.after)[what] for row in rows if row.location.after}
            fresh = {row.path: sizes[row.path] for row in rows if sizes[row.path] != row.value}
            found += [fresh] if fresh not in found else []
    if found and {} not in found and all(row.value in _fixed_widths(row.location.before) for row in rows):
        found.append({})
    return [] if found == [{}] else found


# --- shared tables -------------------------------------------------------------------------------------


def _table_columns(
    way: ShardRewrite, names: Mapping[str, str], places: Sequence[AttentionLocation]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Which columns of a table each attention reads, where one layer of the stack does not read it as it is."""
    form: CanonicalForm = way.form
    where = {piece.name: names[path] for path, own in way.new_plan.pieces.items() for piece in own if path in names}
    by_stack = dict[str, list[tuple[AttentionLocation, str, list[int]]]]()
    for place in places:
        for constant, table, _ in list_index_constants(place.after) if place.after else ():
            keep = form.tensors[f"{place.site}.{constant}"].tolist()
            by_stack.setdefault(place.site.split(".")[0], []).append((place, table, keep))
    for stack, rows in by_stack.items():
        table = rows[0][1]
        owner = next(name for name in form.tensors if name.startswith(f"{stack}.") and name.endswith(f".{table}"))
        size = form.tensors[owner].shape[-1]
        moved = any(piece.name == owner for path in way.new_tensors for piece in way.new_plan.pieces[path])
        if moved or any(keep != list(range(size)) for _, _, keep in rows):
            for place, _, keep in rows:
                yield place.module_path, {"table": where[owner].rpartition(".")[0], "keep": keep}


# --- A folder of transformers with attentions that its config.json cannot say, and a loader for who has ---

LOADER_NAME = "load_model.py"
LOADER_SOURCE = Path(__file__).with_name("load_model.txt")  # text for people without headwise; nothing here runs it


class ResizedFolder(NamedTuple):
    """What is to be said of such a folder, and what its heads.json holds besides."""

    summary: str
    document: Mapping[str, Any]


def add_loader(folder: Path, rewrite: ShardRewrite, net: Transformer, reason: str) -> ResizedFolder | str:
    """Add the loader to a folder whose weights are written, once it was seen to work; else the reason why it cannot."""
    form = rewrite.form
    odd = form.find_extra_constants(rewrite.weight_names)
    document: dict[str, Any] = {
        "model": to_dict(form.model_spec),
        "constants": {name: tensor.tolist() for name, tensor in odd.items()},
        "besides": rewrite.unused_tensors,
    }
    not_plain = f"Not a plain transformers checkpoint, because {reason}; load it with headwise.load"
    if find_spec("transformers") is None:
        return ResizedFolder(
            f"{not_plain} (transformers is not installed, so that no loader could be tried).", document
        )
    (folder / LOADER_NAME).write_bytes(LOADER_SOURCE.read_bytes())
    fsync_file(folder / LOADER_NAME)
    early = {"format": RECORD_FORMAT, "kind": "resized"} | document
    (folder / RECORD_FILE).write_text(json.dumps(early), encoding="utf-8")
    try:
        found = list_module_changes(folder, rewrite)
        trial = check_load(folder, net, form, found)
    except SpecError as error:
        return str(error)
    (folder / RECORD_FILE).unlink()
    if not trial.agrees:
        return f"its own loader was tried in vain ({trial.message})"
    document |= {"modules": found[trial.candidate], "checked": trial.message}
    document |= {"loader": {"name": LOADER_NAME, "sha256": sha256(folder / LOADER_NAME)}}
    return ResizedFolder(f"{not_plain} or {LOADER_NAME}.", document)

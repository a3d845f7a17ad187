"""What has to be set in the modules of transformers for attentions of other sizes: found in the modules themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..blueprint import Model
from ..errors import SpecError
from ..families import read
from ..hub.plan import Plan
from ..hub.pretrained import CONFIG
from ..spec import AttentionSpec
from .folders_form import Form, readers
from .folders_shards import HEADED, Rewriting

MOST = 24  # ways that are tried
RETURNS = (2, 3, 0)  # of an attention: what it says and one thing more, or two, or that alone

Modules = dict[str, dict[str, Any]]


class Place(NamedTuple):
    """An attention in a model of transformers: the module that calls it has, and where its last matrix lies in it."""

    site: str
    host: str
    last: str | None
    parts: tuple[str, ...]
    before: AttentionSpec
    after: AttentionSpec | None


def ways(folder: Path, way: Rewriting) -> list[Modules]:
    """What to change in which module: every way that its numbers can be understood, likely ones first."""
    keys = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model = _built(folder, keys)
    names = _renamed(model, way)
    places = list(_places(way, names, read(keys)))
    fixed = Modules({place.host: {} for place in places})
    for name, shape in _shapes(model, names, way).items():
        module, _, leaf = names[name].rpartition(".")
        fixed.setdefault(module, {}).setdefault("shapes", {})[leaf] = list(shape)
    for host, columns in _columns(way, names, places):
        fixed[host]["columns"] = columns
    live = dict(model.named_modules())
    for place in places:
        if place.after is None:
            fixed[place.host]["still"] = {"last": place.last, "remembers": _remembers(live[place.host], place)}
    found = list[Modules]()
    returns = RETURNS if any("still" in change for change in fixed.values()) else RETURNS[:1]
    for parts, numbers in islice(product(returns, _numbers(live, places)), MOST):
        found.append(_joined(fixed, numbers, parts))
    return found


def _joined(fixed: Modules, numbers: Mapping[str, Mapping[str, int]], returns: int) -> Modules:
    both = {path: dict(change) for path, change in fixed.items()}
    for path, own in numbers.items():
        both.setdefault(path, {})["set"] = dict(own)
    for change in both.values():
        if "still" in change:
            change["still"] = change["still"] | {"returns": returns}
    return both


def _remembers(module: nn.Module, place: Place) -> bool:
    return place.site.endswith(".attention") and type(vars(module).get("layer_idx")) is int


def _built(folder: Path, keys: Mapping[str, Any]) -> nn.Module:
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


def _renamed(model: Any, way: Rewriting) -> dict[str, str]:
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
    headed = {path for path, own in way.old.pieces.items() if any(set(HEADED) & set(p.there.sizes) for p in own)}
    for name in (*way.stored.kinds, *way.added):
        found[name], converted = rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        if converted is not None and way.first(name) in headed:
            raise SpecError(f"transformers keeps {name} in another form than its files")
    # A tensor that the model has not stands where others of its module do: nobody else knows how the trunk is called.
    modules = {_module(name): _module(new) for name, new in found.items() if new in there}
    strange = [name for name, new in found.items() if new not in there and _module(name) in modules]
    return found | {name: f"{modules[_module(name)]}.{name.rpartition('.')[2]}" for name in strange}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _shapes(model: nn.Module, names: Mapping[str, str], way: Rewriting) -> dict[str, tuple[int, ...]]:
    """The tensors that are written in another shape than the model has, or that it has not at all."""
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {
        name: shape
        for name, shape in way.shapes.items()
        if (names[name] in there or way.first(name) in way.new.pieces) and there.get(names[name]) != shape
    }


def _places(way: Rewriting, names: Mapping[str, str], before: Model) -> Iterator[Place]:
    """Every attention that config.json asks for, by where its tensors lie."""
    there = {way.first(name): name for name in way.stored.kinds}
    plan = Plan.of(before, way.names, way.trunk)
    owner = {piece.name: there[path] for path, own in plan.pieces.items() if path in there for piece in own}
    left = dict(way.form.described.specs())
    for site, spec in before.specs():
        paths = {key: names[owner[f"{site}.{key}"]].rpartition(".")[0] for key in spec.params()
                 if f"{site}.{key}" in owner}  # fmt: skip
        sides = [path for key, path in paths.items() if key.startswith("project.")]
        last = paths.get("output.o")
        if not sides or last is None:
            raise SpecError(f"{site} has no matrices of its own in these files")
        host = _common([path.rpartition(".")[0] for path in sides])
        layer = _layer(host)
        every = {*paths.values()}
        parts = {up for path in every for up in _above(path) if len(up) > len(layer) and up not in every}
        inside = last.removeprefix(f"{host}.") if last.startswith(f"{host}.") else None
        yield Place(site, host, inside, tuple(sorted(parts | {host})), spec, left.get(site))


def _common(paths: Sequence[str]) -> str:
    """The innermost module that holds all of these."""
    split = [path.split(".") for path in paths]
    shared = 0
    while all(len(path) > shared and path[shared] == split[0][shared] for path in split):
        shared += 1
    return ".".join(split[0][:shared])


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition(".")[0]:
        yield path


def _layer(path: str) -> str:
    """The innermost module on a path that is one of many."""
    return next((up for up in (path, *_above(path)) if up.rpartition(".")[2].isdigit()), "")


# --- numbers -------------------------------------------------------------------------------------------


def _sizes(spec: AttentionSpec) -> dict[str, int]:
    """What an attention may keep as a number that follows from its heads."""
    heads = spec.heads
    sizes = {"heads": heads.q, "shared": heads.kv, "group": heads.q // heads.kv}
    return sizes | {"wide": heads.q * heads.dim, "read": heads.kv * heads.dim, "said": len(spec.speaks) * heads.vdim}


def _widths(spec: AttentionSpec) -> set[int]:
    """Sizes that stay what they are."""
    return {size for _, part in spec.parts() for axis, size in spec.sizes_of(part).items() if axis not in HEADED}


def _numbers(live: Mapping[str, nn.Module], places: Sequence[Place]) -> Iterator[dict[str, dict[str, int]]]:
    """New numbers of modules, by path: every way to understand those that are there."""
    if odd := [place.site for place in places if place.after and not place.after.heads.even]:
        raise SpecError(f"heads of {odd[0]} share keys and values unevenly, which transformers cannot")
    rows = dict[tuple[str, str], list[Row]]()
    for row in (Row(path, place, *one) for place in places for path in place.parts for one in _whole(live[path])):
        if row.place.after:
            rows.setdefault((type(live[row.path]).__name__, row.name), []).append(row)
    free = [(name, choices) for (_, name), own in rows.items() if (choices := _meanings(own))]
    for chosen in product(*(choices for _, choices in free)):
        found = dict[str, dict[str, int]]()
        for (name, _), choice in zip(free, chosen, strict=True):
            for path, value in choice.items():
                found.setdefault(path, {})[name] = value
        yield found


def _whole(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The whole numbers that a module keeps."""
    return ((name, n) for name, n in vars(module).items() if type(n) is int and not name.startswith("_"))


class Row(NamedTuple):
    """A whole number of a module of an attention."""

    path: str
    place: Place
    name: str
    value: int


def _meanings(rows: Sequence[Row]) -> list[dict[str, int]]:
    """What one number of all modules of a kind may become; staying as it is comes last, if it may mean a width."""
    found = list[dict[str, int]]()
    for what in _sizes(rows[0].place.before):
        if all(row.value == _sizes(row.place.before)[what] for row in rows):
            sizes = {row.path: _sizes(row.place.after)[what] for row in rows if row.place.after}
            fresh = {row.path: sizes[row.path] for row in rows if sizes[row.path] != row.value}
            found += [fresh] if fresh not in found else []
    if found and {} not in found and all(row.value in _widths(row.place.before) for row in rows):
        found.append({})
    return [] if found == [{}] else found


# --- shared tables -------------------------------------------------------------------------------------


def _columns(way: Rewriting, names: Mapping[str, str], places: Sequence[Place]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Which columns of a table each attention reads, where one layer of the stack does not read it as it is."""
    form: Form = way.form
    where = {piece.name: names[path] for path, own in way.new.pieces.items() for piece in own if path in names}
    by_stack = dict[str, list[tuple[Place, str, list[int]]]]()
    for place in places:
        for constant, table, _ in readers(place.after) if place.after else ():
            keep = form.tensors[f"{place.site}.{constant}"].tolist()
            by_stack.setdefault(place.site.split(".")[0], []).append((place, table, keep))
    for stack, rows in by_stack.items():
        table = rows[0][1]
        owner = next(name for name in form.tensors if name.startswith(f"{stack}.") and name.endswith(f".{table}"))
        size = form.tensors[owner].shape[-1]
        moved = any(piece.name == owner for path in way.added for piece in way.new.pieces[path])
        if moved or any(keep != list(range(size)) for _, _, keep in rows):
            for place, _, keep in rows:
                yield place.host, {"table": where[owner].rpartition(".")[0], "keep": keep}

"""Where our tensors are stored in checkpoints of other libraries: names, axis layouts and slices.

One table per family (weight_names.toml) is used both to load and to save checkpoints.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import Tensor

from ...attention.interfaces.core_types import AxisLayout
from ...util.errors import SpecError
from ..model_spec import ModelSpec, WeightSpec

EMPTY: Mapping[str, Any] = MappingProxyType({})


class TensorLocation(NamedTuple):
    """Where one of our tensors is stored: the name of the stored tensor, and its axes by our axis
    names.

    - `path` is the stored name. `{layer}` in it is the layer's number; another axis in braces
      (`{expert}`) means that
      the file has a separate tensor for every index of that axis.
    - `layout` is the stored axis layout; empty if it equals ours.
    - `fixed_axes` selects on stored axes that our tensor does not have: an index, or one part of
      concatenated axes
      (`{"dim|vdim": "dim"}`).
    - `extra_axes` are the sizes of axes that only the file has.
    - `own_layout` splits our own axes further, if the file stores one of our axes in several parts.
    """

    path: str
    layout: str = ""
    fixed_axes: Mapping[str, int | str] = EMPTY
    extra_axes: Mapping[str, int] = EMPTY
    own_layout: str = ""


class TensorView(NamedTuple):
    """A view of a tensor: its axes, the fixed ones, and the order of the others."""

    layout: AxisLayout
    axis_sizes: Mapping[str, int]
    fixed_axes: Mapping[str, int | str]
    axis_order: tuple[str, ...]

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view of `tensor`, without copying, with one dimension for each axis of
        `axis_order`.

        >>> import torch
        >>> fused = torch.arange(12).view(
        ...     2, 6
        ... )  # two inputs, and q, k and v of two heads of one channel side by side
        >>> TensorView(
        ...     AxisLayout.parse("model (qkv q)"),
        ...     {"model": 2, "qkv": 3, "q": 2},
        ...     {"qkv": 1},
        ...     ("q", "model"),
        ... ).view(fused)
        tensor([[2, 8],
                [3, 9]])
        """
        axes = list(self.layout.axes)
        x = tensor.view(self.layout.unmerged_shape(self.axis_sizes))
        for axis, place in self.fixed_axes.items():
            dim = axes.index(axis)
            if isinstance(place, int):
                x = x.select(dim, place)
                del axes[dim]
            else:
                parts = axis.split("|")
                before = sum(self.axis_sizes[part] for part in parts[: parts.index(place)])
                x = x.narrow(dim, before, self.axis_sizes[place])
                axes[dim] = place
        return x.permute([axes.index(axis) for axis in self.axis_order])


class TensorPiece(NamedTuple):
    """Elements shared by a stored tensor (`path`, `shape`) and our tensor `name`, as a view of
    either.
    """

    path: str
    shape: tuple[int, ...]
    name: str
    file_view: TensorView
    own_view: TensorView


def make_pieces(
    location: TensorLocation, weight: WeightSpec, numbers: Mapping[str, object]
) -> Iterator[TensorPiece]:
    """Yield the stored pieces of one of our tensors: one, or one for each index of the axes named
    in its path.

    >>> q = WeightSpec("q", AxisLayout.parse("(q dim) model"), {"q": 2, "dim": 4, "model": 8})
    >>> fused = TensorLocation("{layer}.c_attn", "model (qkv q dim)", {"qkv": 0}, {"qkv": 3})
    >>> [(piece.path, piece.shape) for piece in make_pieces(fused, q, {"layer": 5})]
    [('5.c_attn', (8, 24))]
    """
    own_layout = AxisLayout.parse(location.own_layout) if location.own_layout else weight.layout
    file_layout = AxisLayout.parse(location.layout) if location.layout else weight.layout
    sizes = _complete_sizes(own_layout, {**weight.axis_sizes, **location.extra_axes}, weight.shape)
    separate_axes = [axis for axis in own_layout.axes if f"{{{axis}}}" in location.path]
    axis_order = tuple(axis for axis in own_layout.axes if axis not in separate_axes)
    for index in product(*(range(sizes[axis]) for axis in separate_axes)):
        fixed: dict[str, int | str] = dict(zip(separate_axes, index, strict=True))
        path = location.path.format(**numbers, **fixed)
        file_view = TensorView(file_layout, sizes, location.fixed_axes, axis_order)
        own_view = TensorView(own_layout, sizes, fixed, axis_order)
        yield TensorPiece(path, file_layout.shape(sizes), weight.name, file_view, own_view)


def _complete_sizes(
    layout: AxisLayout, sizes: Mapping[str, int], shape: tuple[int, ...]
) -> dict[str, int]:
    """Return the sizes of all axes; at most one axis of each dimension may be
    missing in `sizes`.
    """
    complete = dict(sizes)
    for axes, size in zip(layout.dims, shape, strict=True):
        names = "|".join(axes).split("|") if axes else []
        for name in [name for name in names if name not in complete]:
            num_others = AxisLayout((tuple(other for other in axes if other != name),)).numel(
                complete
            )
            complete[name] = size // num_others
    return complete


# --- Names of all tensors of an architecture, and the plan of a checkpoint ------------------------

LAYER = re.compile(r"^(\w+)\.(\d+)\.")
ADDED_BIAS = re.compile(r"^(\w+\.\{layer\}\.(?:attention|cross))\.(?:output\.o_bias|constant)$")


class WeightNames(NamedTuple):
    """Our tensor names and where checkpoints of some families store these tensors.

    - `locations` maps our names to stored ones; `{layer}` is the layer's number. A path that begins
      with a dot follows
      the prefix of the base model ("model", "transformer").
    - `prefixes` lists the prefixes found in files; the first one is used for writing.
    - `tied_names` maps second names of a stored tensor to its first name.
    - `suffix_aliases` maps other endings of stored names to the endings used in `locations`.
    - `ignored` are patterns of stored names that loading skips: constants, or heads that the class
      does not have.
    """

    families: tuple[str, ...]
    locations: Mapping[str, str | TensorLocation]
    prefixes: tuple[str, ...] = ("",)
    tied_names: Mapping[str, str] = EMPTY
    suffix_aliases: Mapping[str, str] = EMPTY
    ignored: tuple[str, ...] = ()

    def find_location(self, name: str) -> TensorLocation | None:
        """Return where the tensor of this name is stored, or None if these checkpoints have no
        place for it.
        """
        own = LAYER.sub(r"\1.{layer}.", name)
        location = self.locations.get(own) or self._added_bias(own)
        return TensorLocation(location) if isinstance(location, str) else location

    def _added_bias(self, own: str) -> str | TensorLocation | None:
        """Return where to store an output bias that these checkpoints lack: as the bias of the
        output projection.
        """
        match = ADDED_BIAS.match(own)
        if match is None:
            return None
        matrix = self.locations.get(f"{match[1]}.output.o")
        path = matrix.path if isinstance(matrix, TensorLocation) else matrix or ""
        bias = f"{path.removesuffix('.weight')}.bias" if path.endswith(".weight") else None
        return self.locations.get(f"{match[1]}.output.o_bias", bias)

    def find_prefix(self, names: Iterable[str]) -> str:
        """Return the base-model prefix of these stored names, or the first prefix if none fits."""
        names = list(names)
        matches = (
            prefix
            for prefix in self.prefixes
            if any(name.startswith(f"{prefix}.") for name in names) or not prefix
        )
        return next(matches, self.prefixes[0])

    def canonical_name(self, name: str) -> str:
        """Return a stored name with the ending used in `locations`."""
        for alias, ours in self.suffix_aliases.items():
            if name.endswith(alias):
                return name.removesuffix(alias) + ours
        return name

    def with_ignored(self, names: Iterable[str]) -> WeightNames:
        """Return a copy that also ignores stored tensors of these names."""
        return self._replace(ignored=(*self.ignored, *(f"^{re.escape(name)}$" for name in names)))

    def is_ignored(self, name: str) -> bool:
        """Return whether loading skips a stored tensor of this name."""
        return any(re.search(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class CheckpointPlan:
    """The pieces of every stored tensor, by stored name, and second names of stored tensors."""

    pieces: Mapping[str, list[TensorPiece]]
    tied_names: Mapping[str, str]

    def find_source(self, path: str, names: Container[str]) -> str | None:
        """Return the name under which a file with these `names` stores a tensor, its first or a
        tied one, or None.
        """
        aliases = (second for second, first in self.tied_names.items() if first == path)
        return next((name for name in (path, *aliases) if name in names), None)

    @staticmethod
    def from_spec(model_spec: ModelSpec, names: WeightNames, prefix: str) -> CheckpointPlan:
        """Return the plan for a model; refuse models with a trainable tensor that these checkpoints
        cannot store.
        """
        unnamed = find_unnamed_weight(model_spec, names)
        if unnamed:
            raise SpecError(
                f"cannot store {unnamed} in a checkpoint of {' and '.join(names.families)}; use "
                "hw.save"
            )
        pieces: dict[str, list[TensorPiece]] = {}
        for weight in model_spec.weights():
            location = names.find_location(weight.name)
            layer = LAYER.match(weight.name)
            if location is not None:
                location = location._replace(path=_add_prefix(prefix, location.path))
                for piece in make_pieces(location, weight, {"layer": layer[2]} if layer else {}):
                    pieces.setdefault(piece.path, []).append(piece)
        tied_names = {
            _add_prefix(prefix, second): _add_prefix(prefix, first)
            for second, first in names.tied_names.items()
        }
        for reader, owner in model_spec.tied_weights().items():
            second, first = (names.find_location(name) for name in (reader, owner))
            if second and first:
                tied_names[_add_prefix(prefix, second.path)] = _add_prefix(prefix, first.path)
        return CheckpointPlan(
            pieces, {second: first for second, first in tied_names.items() if first in pieces}
        )


def find_unnamed_weight(model_spec: ModelSpec, names: WeightNames) -> str:
    """Return the first trainable tensor of a model that checkpoints with these names cannot store;
    "" if there is none.
    """
    weights = (weight for weight in model_spec.weights() if weight.trainable)
    return next((weight.name for weight in weights if names.find_location(weight.name) is None), "")


def _add_prefix(prefix: str, path: str) -> str:
    return f"{prefix}{path}".removeprefix(".") if path.startswith(".") else path


# --- The tables of weight_names.toml --------------------------------------------------------------


def read_weight_names() -> dict[str, WeightNames]:
    """Return the table of each family."""
    text = Path(__file__).with_name("weight_names.toml").read_text(encoding="utf-8")
    tables = dict[str, WeightNames]()
    by_family = dict[str, WeightNames]()
    for name, fields in tomllib.loads(text).items():
        table = _make_weight_names(fields, tables.get(fields.pop("like", "")))
        tables[name] = table
        by_family |= dict.fromkeys(table.families, table)
    return by_family


def _make_weight_names(fields: dict[str, Any], base: WeightNames | None) -> WeightNames:
    locations = dict(base.locations) if base else {}
    for name in fields.pop("without", ()):
        del locations[name]
    for name, value in fields.pop("names", {}).items():
        locations |= _read_row(name, value, "", "")
    for stack in ("encoder", "decoder"):
        rows: dict[str, Any] = fields.pop(f"{stack}_layer", {})
        file_prefix = f"{rows.pop('path', '')}."
        for name, value in rows.items():
            locations |= _read_row(name, value, f"{stack}.{{layer}}.", file_prefix)
    values: dict[str, Any] = {"locations": locations}
    for name, value in fields.items():
        values[name] = tuple(value) if name in ("families", "prefixes", "ignored") else value
    return base._replace(**values) if base else WeightNames(**values)


def _read_row(name: str, value: Any, own: str, file: str) -> dict[str, str | TensorLocation]:
    """Return the locations of one row: one location, or a weight's and its bias's."""
    if not isinstance(value, str):
        row = cast("dict[str, Any]", value)
        at: Mapping[str, Any] = row.get("at", {})
        indexed = {axis: place for axis, place in at.items() if not isinstance(place, str)}
        fixed = {axis: place[0] if axis in indexed else place for axis, place in at.items()}
        sizes = {axis: place[1] for axis, place in indexed.items()}
        path = file + row["path"]
        location = TensorLocation(path, row.get("layout", ""), fixed, sizes, row.get("own", ""))
        return {own + name: location}
    if not value.endswith("*"):
        return {own + name: file + value}
    stem = name.removesuffix("*")
    weight, bias = (name, f"{name}_bias") if stem == name else (f"{stem}weight", f"{stem}bias")
    path = file + value.removesuffix("*")
    return {own + weight: f"{path}weight", own + bias: f"{path}bias"}

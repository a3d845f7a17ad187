"""Where a tensor of ours lies in somebody's file: axes by name, there and here, read one way and written the other."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import SpecError
from ..interfaces.axis_layout import AxisLayout
from ..model_spec import ModelSpec, WeightSpec

EMPTY: Mapping[str, Any] = MappingProxyType({})


class TensorLocation(NamedTuple):
    """The place of one of our tensors: the name of a tensor in a file, and its axes there by our names.

    Where `layout` is empty they lie as ours do. `at` fixes axes that ours has not: at an index, or, of axes laid end to
    end, at one of them. `sizes` are of axes that only the file has. `ours` says our own axes finer, where one of them
    is torn apart there. Words in braces in `path` are the number of a layer, or an axis of ours, of which every index
    has a tensor of its own there.
    """

    path: str
    layout: str = ""
    fixed_axes: Mapping[str, int | str] = EMPTY
    extra_axes: Mapping[str, int] = EMPTY
    own_layout: str = ""


class TensorView(NamedTuple):
    """How to look at a stored tensor: its axes, what is fixed of them, and in which order the others come."""

    layout: AxisLayout
    axis_sizes: Mapping[str, int]
    fixed_axes: Mapping[str, int | str]
    axis_order: tuple[str, ...]

    def view(self, tensor: Tensor) -> Tensor:
        """The numbers there, one dimension for each axis; they are those of `tensor`, not copies.

        >>> import torch
        >>> fused = torch.arange(12).view(2, 6)  # two inputs, and q, k and v of two heads of one channel side by side
        >>> TensorView(
        ...     AxisLayout.parse("model (qkv q)"), {"model": 2, "qkv": 3, "q": 2}, {"qkv": 1}, ("q", "model")
        ... ).view(fused)
        tensor([[2, 8],
                [3, 9]])
        """
        axes, x = list(self.layout.axes), tensor.view(self.layout.unmerged_shape(self.axis_sizes))
        for axis, place in self.fixed_axes.items():
            dim = axes.index(axis)
            if isinstance(place, int):
                x = x.select(dim, place)
                del axes[dim]
            else:
                parts = axis.split("|")
                before = sum(self.axis_sizes[part] for part in parts[: parts.index(place)])
                x, axes[dim] = x.narrow(dim, before, self.axis_sizes[place]), place
        return x.permute([axes.index(axis) for axis in self.axis_order])


class TensorPiece(NamedTuple):
    """Numbers that a tensor in a file, of this name and shape, has in common with the tensor of ours called `name`."""

    path: str
    shape: tuple[int, ...]
    name: str
    file_view: TensorView
    own_view: TensorView


def make_pieces(location: TensorLocation, weight: WeightSpec, numbers: Mapping[str, object]) -> Iterator[TensorPiece]:
    """What a file must hold of a tensor of ours: one piece, or one for each index of the axes that stand in its path.

    >>> q = WeightSpec("q", AxisLayout.parse("(q dim) model"), {"q": 2, "dim": 4, "model": 8})
    >>> fused = TensorLocation("{layer}.c_attn", "model (qkv q dim)", {"qkv": 0}, {"qkv": 3})
    >>> [(piece.path, piece.shape) for piece in make_pieces(fused, q, {"layer": 5})]
    [('5.c_attn', (8, 24))]
    """
    ours = AxisLayout.parse(location.own_layout) if location.own_layout else weight.layout
    theirs = AxisLayout.parse(location.layout) if location.layout else weight.layout
    sizes = _complete_sizes(ours, {**weight.axis_sizes, **location.extra_axes}, weight.shape)
    apart = [axis for axis in ours.axes if f"{{{axis}}}" in location.path]
    order = tuple(axis for axis in ours.axes if axis not in apart)
    for index in product(*(range(sizes[axis]) for axis in apart)):
        fixed: dict[str, int | str] = dict(zip(apart, index, strict=True))
        path = location.path.format(**numbers, **fixed)
        there, here = TensorView(theirs, sizes, location.fixed_axes, order), TensorView(ours, sizes, fixed, order)
        yield TensorPiece(path, theirs.shape(sizes), weight.name, there, here)


def _complete_sizes(layout: AxisLayout, sizes: Mapping[str, int], shape: tuple[int, ...]) -> dict[str, int]:
    """The sizes of all axes, where of each dimension one is not said."""
    found = dict(sizes)
    for axes, size in zip(layout.dims, shape, strict=True):
        names = [name for axis in axes for name in axis.split("|")]
        for name in [name for name in names if name not in found]:
            known = AxisLayout((tuple(other for other in axes if other != name),)).numel(found)
            found[name] = size // known
    return found


# --- What a file must hold to be a model, worked out from the names that one architecture gives its ----

LAYER = re.compile(r"^(\w+)\.(\d+)\.")
ADDED_BIAS = re.compile(r"^(\w+\.\{layer\}\.(?:attention|cross))\.(?:output\.o_bias|constant)$")


class WeightNames(NamedTuple):
    """The names that the files of some families give our tensors, {layer} standing for the number of a layer.

    A path that begins with a dot stands behind the name of the trunk, of which `trunks` lists all that files use, the
    one to write first. `twins` are second names of tensors, with the first, and `spelt` other ends of names, with those
    used here. What is `ignored` may lie in a file besides: nothing that was learnt, or heads that its class has not.
    """

    families: tuple[str, ...]
    locations: Mapping[str, str | TensorLocation]
    prefixes: tuple[str, ...] = ("",)
    tied_names: Mapping[str, str] = EMPTY
    suffix_aliases: Mapping[str, str] = EMPTY
    ignored: tuple[str, ...] = ()

    def find_location(self, name: str) -> TensorLocation | None:
        """Where the tensor of this name lies, if files have a place for it."""
        own = LAYER.sub(r"\1.{layer}.", name)
        found = self.locations.get(own) or self._added_bias(own)
        return TensorLocation(found) if isinstance(found, str) else found

    def _added_bias(self, own: str) -> str | TensorLocation | None:
        """Where a vector lies that an attention adds although its files have none: as the bias of its last matrix."""
        if not (site := ADDED_BIAS.match(own)):
            return None
        matrix = self.locations.get(f"{site[1]}.output.o")
        path = matrix.path if isinstance(matrix, TensorLocation) else matrix or ""
        bias = f"{path.removesuffix('.weight')}.bias" if path.endswith(".weight") else None
        return self.locations.get(f"{site[1]}.output.o_bias", bias)

    def find_prefix(self, names: Iterable[str]) -> str:
        """The name of the trunk that these names stand behind."""
        names = list(names)
        found = (trunk for trunk in self.prefixes if any(name.startswith(f"{trunk}.") for name in names) or not trunk)
        return next(found, self.prefixes[0])

    def canonical_name(self, name: str) -> str:
        """The name of a tensor as it is spelt here."""
        for other, ours in self.suffix_aliases.items():
            if name.endswith(other):
                return name.removesuffix(other) + ours
        return name

    def with_ignored(self, names: Iterable[str]) -> WeightNames:
        """The same where tensors of these names may be left out too."""
        return self._replace(ignored=(*self.ignored, *(f"^{re.escape(name)}$" for name in names)))

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name may be left out."""
        return any(re.search(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class CheckpointPlan:
    """The pieces of each tensor in a file, by its name there, and the second names that it may go by."""

    pieces: Mapping[str, list[TensorPiece]]
    tied_names: Mapping[str, str]

    def find_source(self, path: str, names: Container[str]) -> str | None:
        """The name by which a file that holds these names has a tensor: its first, or a second one."""
        twins = (second for second, first in self.tied_names.items() if first == path)
        return next((name for name in (path, *twins) if name in names), None)

    @staticmethod
    def from_spec(model_spec: ModelSpec, names: WeightNames, prefix: str) -> CheckpointPlan:
        """The plan of this model; a learned tensor that files of this kind have no place for is refused."""
        found: dict[str, list[TensorPiece]] = {}
        for piece in _make_pieces(model_spec, names, prefix):
            found.setdefault(piece.path, []).append(piece)
        twins = {_add_prefix(prefix, second): _add_prefix(prefix, first) for second, first in names.tied_names.items()}
        for reader, owner in model_spec.tied_weights().items():
            second, first = (names.find_location(name) for name in (reader, owner))
            if second and first:
                twins[_add_prefix(prefix, second.path)] = _add_prefix(prefix, first.path)
        return CheckpointPlan(found, {second: first for second, first in twins.items() if first in found})


def _make_pieces(described: ModelSpec, names: WeightNames, trunk: str) -> Iterator[TensorPiece]:
    for weight in described.weights():
        slot, layer = names.find_location(weight.name), LAYER.match(weight.name)
        if slot is not None:
            numbers = {"layer": layer[2]} if layer else {}
            yield from make_pieces(slot._replace(path=_add_prefix(trunk, slot.path)), weight, numbers)
        elif weight.trainable:
            raise SpecError(
                f"{weight.name} has no place in files of {' and '.join(names.families)}; write it with hw.save"
            )


def _add_prefix(trunk: str, path: str) -> str:
    return f"{trunk}{path}".removeprefix(".") if path.startswith(".") else path

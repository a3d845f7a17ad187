"""Where a tensor of ours lies in somebody's file: axes by name, there and here, read one way and written the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ..blueprint import WeightSpec
from ..layout import AxisLayout

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
        >>> TensorView(AxisLayout.parse("model (qkv q)"), {"model": 2, "qkv": 3, "q": 2}, {"qkv": 1}, ("q", "model")).of(fused)
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

"""Where a tensor of ours lies in somebody's file: axes by name, there and here, read one way and written the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ..blueprint import Weight
from ..layout import Layout

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Slot(NamedTuple):
    """The place of one of our tensors: the name of a tensor in a file, and its axes there by our names.

    Where `layout` is empty they lie as ours do. `at` fixes axes that ours has not: at an index, or, of axes laid end to
    end, at one of them. `sizes` are of axes that only the file has. `ours` says our own axes finer, where one of them
    is torn apart there. Words in braces in `path` are the number of a layer, or an axis of ours, of which every index
    has a tensor of its own there.
    """

    path: str
    layout: str = ""
    at: Mapping[str, int | str] = NOTHING
    sizes: Mapping[str, int] = NOTHING
    ours: str = ""


class View(NamedTuple):
    """How to look at a stored tensor: its axes, what is fixed of them, and in which order the others come."""

    layout: Layout
    sizes: Mapping[str, int]
    at: Mapping[str, int | str]
    order: tuple[str, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The numbers there, one dimension for each axis; they are those of `tensor`, not copies.

        >>> import torch
        >>> fused = torch.arange(12).view(2, 6)  # two inputs, and q, k and v of two heads of one channel side by side
        >>> View(Layout.parse("model (qkv q)"), {"model": 2, "qkv": 3, "q": 2}, {"qkv": 1}, ("q", "model")).of(fused)
        tensor([[2, 8],
                [3, 9]])
        """
        axes, x = list(self.layout.axes), tensor.view(self.layout.opened(self.sizes))
        for axis, place in self.at.items():
            dim = axes.index(axis)
            if isinstance(place, int):
                x = x.select(dim, place)
                del axes[dim]
            else:
                parts = axis.split("|")
                before = sum(self.sizes[part] for part in parts[: parts.index(place)])
                x, axes[dim] = x.narrow(dim, before, self.sizes[place]), place
        return x.permute([axes.index(axis) for axis in self.order])


class Piece(NamedTuple):
    """Numbers that a tensor in a file, of this name and shape, has in common with the tensor of ours called `name`."""

    path: str
    shape: tuple[int, ...]
    name: str
    there: View
    here: View


def pieces(slot: Slot, weight: Weight, numbers: Mapping[str, object]) -> Iterator[Piece]:
    """What a file must hold of a tensor of ours: one piece, or one for each index of the axes that stand in its path.

    >>> q = Weight("q", Layout.parse("(q dim) model"), {"q": 2, "dim": 4, "model": 8})
    >>> fused = Slot("{layer}.c_attn", "model (qkv q dim)", {"qkv": 0}, {"qkv": 3})
    >>> [(piece.path, piece.shape) for piece in pieces(fused, q, {"layer": 5})]
    [('5.c_attn', (8, 24))]
    """
    ours = Layout.parse(slot.ours) if slot.ours else weight.layout
    theirs = Layout.parse(slot.layout) if slot.layout else weight.layout
    sizes = _completed(ours, {**weight.sizes, **slot.sizes}, weight.shape)
    apart = [axis for axis in ours.axes if f"{{{axis}}}" in slot.path]
    order = tuple(axis for axis in ours.axes if axis not in apart)
    for index in product(*(range(sizes[axis]) for axis in apart)):
        fixed: dict[str, int | str] = dict(zip(apart, index, strict=True))
        path = slot.path.format(**numbers, **fixed)
        there, here = View(theirs, sizes, slot.at, order), View(ours, sizes, fixed, order)
        yield Piece(path, theirs.shape(sizes), weight.name, there, here)


def _completed(layout: Layout, sizes: Mapping[str, int], shape: tuple[int, ...]) -> dict[str, int]:
    """The sizes of all axes, where of each dimension one is not said."""
    found = dict(sizes)
    for axes, size in zip(layout.dims, shape, strict=True):
        names = [name for axis in axes for name in axis.split("|")]
        for name in [name for name in names if name not in found]:
            known = Layout((tuple(other for other in axes if other != name),)).numel(found)
            found[name] = size // known
    return found

"""Named axes of a tensor, written as text.

A layout names every axis of a tensor. ``"(q dim) model"`` is a matrix whose rows are q heads of dim
channels each; ``"q [nope|rope] rank"`` concatenates two axes into one. Code that prunes, groups,
counts, shards or checks weights reads their layouts, so it needs no knowledge of particular layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...util.errors import SpecError, suggest

_TOKEN_PATTERN = re.compile(r"\(|\)|\[[a-z_0-9|]+\]|[a-z_][a-z_0-9]*|\S")
_AXIS_PATTERN = re.compile(r"[a-z_][a-z_0-9]*(\|[a-z_][a-z_0-9]*)*")


@dataclass(frozen=True)
class AxisLayout:
    """The axes of each dimension of a tensor; one dimension may hold several axes.

    >>> layout = AxisLayout.parse("(q dim) model")
    >>> (
    ...     layout.shape({"q": 2, "dim": 3, "model": 5}),
    ...     layout.unmerged_shape({"q": 2, "dim": 3, "model": 5}),
    ... )
    ((6, 5), (2, 3, 5))
    """

    dims: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(text: str) -> AxisLayout:
        """Parse a layout such as ``"(q dim) model"``; ``[a|b]`` concatenates the axes a and b."""
        dims: list[tuple[str, ...]] = []
        group: list[str] | None = None
        for token in _TOKEN_PATTERN.findall(text):
            name = token[1:-1] if token.startswith("[") else token
            if token == "(" and group is None:
                group = []
            elif token == ")" and group:
                dims.append(tuple(group))
                group = None
            elif _AXIS_PATTERN.fullmatch(name) and group is not None:
                group.append(name)
            elif _AXIS_PATTERN.fullmatch(name):
                dims.append((name,))
            else:
                raise SpecError(
                    f"cannot parse layout {text!r} at {token!r}; write axes such as '(q dim) model'"
                )
        if group is not None:
            raise SpecError(
                f"layout {text!r} has an unclosed '('; write axes such as '(q dim) model'"
            )
        layout = AxisLayout(tuple(dims))
        if len(set(layout.axes)) != len(layout.axes):
            raise SpecError(
                f"layout {text!r} uses an axis name twice; give every axis a different name"
            )
        return layout

    @property
    def axes(self) -> tuple[str, ...]:
        """All axis names in order, ignoring how they are grouped into dimensions."""
        return tuple(axis for dim in self.dims for axis in dim)

    def unmerged_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape with one dimension per axis."""
        return tuple(_axis_size(axis, sizes) for axis in self.axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape as stored."""
        return tuple(math.prod(_axis_size(axis, sizes) for axis in dim) for dim in self.dims)

    def numel(self, sizes: Mapping[str, int]) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.unmerged_shape(sizes))

    def __str__(self) -> str:
        named_dims = [[f"[{axis}]" if "|" in axis else axis for axis in dim] for dim in self.dims]
        return " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in named_dims)


def _axis_size(axis: str, sizes: Mapping[str, int]) -> int:
    missing = [name for name in axis.split("|") if name not in sizes]
    if missing:
        raise SpecError(f"axis {missing[0]!r} has no size; {suggest(missing[0], sizes)}")
    return sum(sizes[name] for name in axis.split("|"))

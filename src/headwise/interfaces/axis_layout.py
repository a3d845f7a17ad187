"""Axes as text: where heads live in a tensor, said once.

A layout names every axis of a tensor. ``"(q dim) model"`` is a matrix whose rows are q heads of dim
channels each; ``"q [nope|rope] rank"`` joins two axes end to end. Whoever cuts, shares, counts, shards or
checks a weight reads its layout and knows no layer by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SpecError, suggest

_TOKEN_PATTERN = re.compile(r"\(|\)|\[[a-z_0-9|]+\]|[a-z_][a-z_0-9]*|\S")
_AXIS_PATTERN = re.compile(r"[a-z_][a-z_0-9]*(\|[a-z_][a-z_0-9]*)*")


@dataclass(frozen=True)
class AxisLayout:
    """The axes of a tensor, dimension by dimension; one dimension may hold several axes.

    >>> layout = AxisLayout.parse("(q dim) model")
    >>> layout.shape({"q": 2, "dim": 3, "model": 5}), layout.unmerged_shape({"q": 2, "dim": 3, "model": 5})
    ((6, 5), (2, 3, 5))
    """

    dims: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(text: str) -> AxisLayout:
        """Read ``"(q dim) model"``; ``[a|b]`` is the two axes a and b laid end to end."""
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
                raise SpecError(f"layout {text!r} stumbles at {token!r}; write axes like '(q dim) model'")
        if group is not None:
            raise SpecError(f"layout {text!r} opens a '(' that never closes; write axes like '(q dim) model'")
        layout = AxisLayout(tuple(dims))
        if len(set(layout.axes)) != len(layout.axes):
            raise SpecError(f"layout {text!r} names an axis twice; every axis of a tensor has its own name")
        return layout

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis, outermost first, as if no dimension held two."""
        return tuple(axis for dim in self.dims for axis in dim)

    def unmerged_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with one dimension per axis."""
        return tuple(_axis_size(axis, sizes) for axis in self.axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape as stored."""
        return tuple(math.prod(_axis_size(axis, sizes) for axis in dim) for dim in self.dims)

    def numel(self, sizes: Mapping[str, int]) -> int:
        """How many numbers the tensor holds."""
        return math.prod(self.unmerged_shape(sizes))

    def __str__(self) -> str:
        joined = [[f"[{axis}]" if "|" in axis else axis for axis in dim] for dim in self.dims]
        return " ".join(f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in joined)


def _axis_size(axis: str, sizes: Mapping[str, int]) -> int:
    missing = [name for name in axis.split("|") if name not in sizes]
    if missing:
        raise SpecError(f"axis {missing[0]!r} has no size; {suggest(missing[0], sizes)}")
    return sum(sizes[name] for name in axis.split("|"))

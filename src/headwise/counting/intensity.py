"""One token of each of N rows: the three boxes of a layer, how many FLOPs each has for a byte, what it waits for."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import SpecError
from ..spec import AttentionSpec
from .asking import Request, asks, by_part
from .costs import WIDTH, time
from .devices import HERE, PLAIN, Device, Formats, bytes_of, stored
from .layers import Layers
from .serving import first
from .timing import core_seconds, product_seconds

USUAL = 16  # rows in the middle, where a load has one
LARGEST = 2**29  # bytes of what is measured
LONGEST = 0.5  # seconds of it
INDENT: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "    "}
BOXES = {"projections": "red", "core": "purple", "output": "blue"}


@dataclass(frozen=True)
class Box:
    """Some products of one step: FLOPs, bytes, and what follows on a machine. `measured` are seconds, where it was."""

    name: str
    rows: int
    flops: int
    moved: int
    bound: str
    seconds: float
    measured: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.moved


@dataclass(frozen=True)
class Boxed:
    """A layer whose last token is being answered, on a device.

    Projections of one row do one FLOP for each byte of bfloat16, the core as many as query heads share a key:

    >>> import headwise as hw
    >>> gqa = Boxed(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h200"), 10**6)
    >>> [round(box.intensity, 2) for box in gqa.boxes(1)], gqa.critical("projections"), gqa.critical("core")
    ([1.0, 4.0, 1.0], 225, None)
    """

    spec: AttentionSpec
    device: Device
    context: int
    formats: Formats = PLAIN

    def __post_init__(self) -> None:
        if self.spec.source is not None:
            raise SpecError(
                f"source={self.spec.source} is read by cross-attention, which has other boxes; leave it out"
            )

    def boxes(self, rows: int) -> tuple[Box, ...]:
        """Projections, core and output of so many rows."""
        return tuple(self._box(name, rows) for name in BOXES)

    def critical(self, name: str) -> int | None:
        """The fewest rows with which a box waits for compute; None when it never does."""
        return first(lambda rows: self._box(name, rows).bound == "compute")

    def measured(self, box: Box) -> Box:
        """The same with the seconds that products of these sizes took just now; without, where they are too large."""
        if box.moved > LARGEST or box.seconds > LONGEST:
            return box
        dtype = self.formats.maths
        if box.name != "core":
            return replace(box, measured=product_seconds(self._shapes(box.name), box.rows, dtype))
        core, keys = self.spec.core_of(self.spec.form(one=True)), self._pairs
        if box.flops != core.flops(box.rows * keys):  # a state, or more than scores and values
            return box
        return replace(box, measured=core_seconds(core, self._kept, (box.rows, keys), dtype))

    @property
    def _pairs(self) -> int:
        return self.spec.pattern.pairs(range(self.context - 1, self.context), range(self.context))

    @property
    def _kept(self) -> int:
        return sum(math.prod(shape) for shape in self.spec.entry().values())

    def _shapes(self, name: str) -> list[tuple[int, ...]]:
        """The tensors of a box, by whose they are."""
        shapes = self.spec.shapes().items()
        return [shape for key, shape in shapes if (key.partition(".")[0] == "output") == (name == "output")]

    def _box(self, name: str, rows: int) -> Box:
        request, core = Request(1, self.context - 1), self.spec.core_of(self.spec.form(one=True))
        if name == "core":
            told = asks(Layers("attention", self.spec), request, self.formats)
            flops, moved = rows * told.core, rows * told.moved
        else:
            flops = rows * sum(
                n for part, n in by_part(self.spec, request).items() if (part == "output") == (name == "output")
            )
            heads = len(core.values) * core.vdim if name == "output" else len(core.keys) * core.dim + self._kept
            weights = sum(stored(shape, self.formats.weights) for shape in self._shapes(name))
            moved = weights + bytes_of(self.formats.maths) * rows * (self.spec.model + heads)
        maths = self.formats.maths
        return Box(
            name, rows, flops, moved, self.device.bound(flops, moved, maths), self.device.time(flops, moved, maths)
        )


@dataclass(frozen=True)
class Boxes:
    """The boxes of several layers, each with one row, with some, and with as many as projections need."""

    layers: dict[str, Boxed]
    boxes: dict[str, tuple[Box, ...]]

    @staticmethod
    def of(layers: Mapping[str, Boxed], rows: int = USUAL) -> Boxes:
        """Priced, and on this machine measured too."""
        found: dict[str, tuple[Box, ...]] = {}
        for name, layer in layers.items():
            counts = sorted({1, rows if rows > 1 else USUAL, layer.critical("projections") or 1})
            boxes = (box for count in counts for box in layer.boxes(count))
            found[name] = tuple(layer.measured(box) if layer.device.name == HERE else box for box in boxes)
        return Boxes(dict(layers), found)

    def __str__(self) -> str:
        layer = next(iter(self.layers.values()))
        device, formats = layer.device, layer.formats
        here = device.name == HERE
        told = f"one token of each of N rows of {layer.context:,} tokens, {formats.maths}, {device.what}"
        lines = [*textwrap.wrap(told, WIDTH), ""]
        lines.append(_row("", "N", "FLOP/byte", "waits for", "at least", "measured" if here else ""))
        for name, layer in self.layers.items():
            lines += [name, *_rows(self.boxes[name], here)]
            lines += textwrap.wrap(f"N from which it waits for compute: {_turns(layer)}", WIDTH, **INDENT)
        alone = device.critical(formats.maths, formats.weights)
        notes = f"Of weights alone any product waits for compute from N = {alone:,.1f}. "
        if here:
            notes += (
                "Measured are products of the same sizes, of any numbers, the best of some runs; what a processor "
                "keeps near itself from run to run is read faster than memory. - is too large, or more than two "
                "products."
            )
        return "\n".join([*lines, "", *textwrap.wrap(notes, WIDTH)])

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [
            {
                "name": name,
                "critical": {box: layer.critical(box) for box in BOXES},
                "boxes": [{**asdict(box), "intensity": box.intensity} for box in self.boxes[name]],
            }
            for name, layer in self.layers.items()
        ]


def _rows(boxes: Sequence[Box], here: bool) -> Iterator[str]:
    for name, colour in BOXES.items():
        some = [box for box in boxes if box.name == name]
        for n, box in enumerate(some):
            found = "" if not here else "-" if box.measured is None else time(box.measured)
            title = f"  {name} ({colour})" if n == 0 else ""
            yield _row(title, f"{box.rows:,}", f"{box.intensity:,.2f}", box.bound, time(box.seconds), found)


def _turns(layer: Boxed) -> str:
    words = {None: "never", 1: "any"}
    found = {name: layer.critical(name) for name in BOXES}
    return ", ".join(f"{name} {words.get(n) or f'{n:,}'}" for name, n in found.items())


def _row(*cells: str) -> str:
    name, *rest = cells
    return (name.ljust(24) + "".join(cell.rjust(11) for cell in rest)).rstrip()

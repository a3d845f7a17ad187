"""One token of each of N rows: the three boxes of a layer, how many FLOPs each has for a byte, what it waits for."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import SpecError
from ..spec import AttentionSpec
from .asking import RequestChunk, chunk_cost, flops_by_part
from .costs import TERMINAL_WIDTH, format_seconds
from .devices import THIS_MACHINE, DEFAULT_FORMATS, Device, NumberFormats, dtype_bytes, stored_bytes
from .layers import AttentionGroup
from .serving import first_where
from .timing import time_core, time_products

DEFAULT_ROWS = 16  # rows in the middle, where a load has one
MAX_TIMED_NUMBERS = 2**29  # bytes of what is measured
MAX_TIMED_SECONDS = 0.5  # seconds of it
WRAP_INDENT: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "    "}
COMPONENT_COLOURS = {"projections": "red", "core": "purple", "output": "blue"}


@dataclass(frozen=True)
class DecodeComponent:
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
class DecodeLayer:
    """A layer whose last token is being answered, on a device.

    Projections of one row do one FLOP for each byte of bfloat16, the core as many as query heads share a key:

    >>> import headwise as hw
    >>> gqa = DecodeLayer(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h200"), 10**6)
    >>> [round(box.intensity, 2) for box in gqa.boxes(1)], gqa.critical("projections"), gqa.critical("core")
    ([1.0, 4.0, 1.0], 225, None)
    """

    spec: AttentionSpec
    device: Device
    context: int
    formats: NumberFormats = DEFAULT_FORMATS

    def __post_init__(self) -> None:
        if self.spec.source is not None:
            raise SpecError(
                f"source={self.spec.source} is read by cross-attention, which has other boxes; leave it out"
            )

    def components(self, rows: int) -> tuple[DecodeComponent, ...]:
        """Projections, core and output of so many rows."""
        return tuple(self._component(name, rows) for name in COMPONENT_COLOURS)

    def compute_bound_rows(self, name: str) -> int | None:
        """The fewest rows with which a box waits for compute; None when it never does."""
        return first_where(lambda rows: self._component(name, rows).bound == "compute")

    def with_measured_seconds(self, box: DecodeComponent) -> DecodeComponent:
        """The same with the seconds that products of these sizes took just now; without, where they are too large."""
        if box.moved > MAX_TIMED_NUMBERS or box.seconds > MAX_TIMED_SECONDS:
            return box
        dtype = self.formats.compute
        if box.name != "core":
            return replace(box, measured=time_products(self._component_shapes(box.name), box.rows, dtype))
        core, keys = self.spec.core_of(self.spec.projection_form(one=True)), self._num_pairs
        if box.flops != core.flops(box.rows * keys):  # a state, or more than scores and values
            return box
        return replace(box, measured=time_core(core, self._cached_numbers, (box.rows, keys), dtype))

    @property
    def _num_pairs(self) -> int:
        return self.spec.pattern.pairs(range(self.context - 1, self.context), range(self.context))

    @property
    def _cached_numbers(self) -> int:
        return sum(math.prod(shape) for shape in self.spec.kv_entry_shapes().values())

    def _component_shapes(self, name: str) -> list[tuple[int, ...]]:
        """The tensors of a box, by whose they are."""
        shapes = self.spec.shapes().items()
        return [shape for key, shape in shapes if (key.partition(".")[0] == "output") == (name == "output")]

    def _component(self, name: str, rows: int) -> DecodeComponent:
        request, core = RequestChunk(1, self.context - 1), self.spec.core_of(self.spec.projection_form(one=True))
        if name == "core":
            told = chunk_cost(AttentionGroup("attention", self.spec), request, self.formats)
            flops, moved = rows * told.core_flops, rows * told.bytes_moved
        else:
            flops = rows * sum(
                n for part, n in flops_by_part(self.spec, request).items() if (part == "output") == (name == "output")
            )
            heads = len(core.value_head_of_row) * core.vdim if name == "output" else len(core.keys) * core.dim + self._cached_numbers
            weights = sum(stored_bytes(shape, self.formats.weights) for shape in self._component_shapes(name))
            moved = weights + dtype_bytes(self.formats.compute) * rows * (self.spec.model + heads)
        maths = self.formats.compute
        return DecodeComponent(
            name, rows, flops, moved, self.device.limiting_resource(flops, moved, maths), self.device.min_seconds(flops, moved, maths)
        )


@dataclass(frozen=True)
class IntensityReport:
    """The boxes of several layers, each with one row, with some, and with as many as projections need."""

    layers: dict[str, DecodeLayer]
    components: dict[str, tuple[DecodeComponent, ...]]

    @staticmethod
    def from_layers(layers: Mapping[str, DecodeLayer], rows: int = DEFAULT_ROWS) -> IntensityReport:
        """Priced, and on this machine measured too."""
        found: dict[str, tuple[DecodeComponent, ...]] = {}
        for name, layer in layers.items():
            counts = sorted({1, rows if rows > 1 else DEFAULT_ROWS, layer.compute_bound_rows("projections") or 1})
            boxes = (box for count in counts for box in layer.components(count))
            found[name] = tuple(layer.with_measured_seconds(box) if layer.device.name == THIS_MACHINE else box for box in boxes)
        return IntensityReport(dict(layers), found)

    def __str__(self) -> str:
        layer = next(iter(self.layers.values()))
        device, formats = layer.device, layer.formats
        here = device.name == THIS_MACHINE
        told = f"one token of each of N rows of {layer.context:,} tokens, {formats.compute}, {device.description}"
        lines = [*textwrap.wrap(told, TERMINAL_WIDTH), ""]
        lines.append(_format_component_row("", "N", "FLOP/byte", "waits for", "at least", "measured" if here else ""))
        for name, layer in self.layers.items():
            lines += [name, *_component_rows(self.components[name], here)]
            lines += textwrap.wrap(f"N from which it waits for compute: {_compute_bound_lines(layer)}", TERMINAL_WIDTH, **WRAP_INDENT)
        alone = device.compute_bound_tokens(formats.compute, formats.weights)
        notes = f"Of weights alone any product waits for compute from N = {alone:,.1f}. "
        if here:
            notes += (
                "Measured are products of the same sizes, of any numbers, the best of some runs; what a processor "
                "keeps near itself from run to run is read faster than memory. - is too large, or more than two "
                "products."
            )
        return "\n".join([*lines, "", *textwrap.wrap(notes, TERMINAL_WIDTH)])

    @property
    def data(self) -> list[dict[str, Any]]:
        """The same as plain values."""
        return [
            {
                "name": name,
                "critical": {box: layer.compute_bound_rows(box) for box in COMPONENT_COLOURS},
                "boxes": [{**asdict(box), "intensity": box.intensity} for box in self.components[name]],
            }
            for name, layer in self.layers.items()
        ]


def _component_rows(boxes: Sequence[DecodeComponent], here: bool) -> Iterator[str]:
    for name, colour in COMPONENT_COLOURS.items():
        some = [box for box in boxes if box.name == name]
        for n, box in enumerate(some):
            found = "" if not here else "-" if box.measured is None else format_seconds(box.measured)
            title = f"  {name} ({colour})" if n == 0 else ""
            yield _format_component_row(title, f"{box.rows:,}", f"{box.intensity:,.2f}", box.bound, format_seconds(box.seconds), found)


def _compute_bound_lines(layer: DecodeLayer) -> str:
    words = {None: "never", 1: "any"}
    found = {name: layer.compute_bound_rows(name) for name in COMPONENT_COLOURS}
    return ", ".join(f"{name} {words.get(n) or f'{n:,}'}" for name, n in found.items())


def _format_component_row(*cells: str) -> str:
    name, *rest = cells
    return (name.ljust(24) + "".join(cell.rjust(11) for cell in rest)).rstrip()

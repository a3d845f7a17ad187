"""Arithmetic intensity of a decode step by batch size: projections, core and output of one layer.

`DecodeLayer` gives the FLOPs and bytes of the components, `IntensityReport` the table; on the
device "here" the components are also timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError
from ..interfaces.core_types import CoreShape
from ..model_spec import WeightSpec
from ..spec.attention_spec import AttentionSpec
from ..translation.terminal_text import pad, pad_left, wrap
from .cost_report import format_seconds
from .kv_cache_memory import AttentionGroup
from .roofline import (
    DEFAULT_FORMATS,
    THIS_MACHINE,
    TORCH_DTYPES,
    Device,
    NumberFormats,
    accelerator_type,
    dtype_bytes,
    time_run,
)
from .serving_cost import RequestChunk, chunk_cost, first_where, flops_by_part
from .weight_storage import list_attention_weights

# --- Timing the products of a decode step on this machine -----------------------------------------

TIMING_SECONDS = 0.05  # of one measurement; a table has dozens


def time_products(shapes: Sequence[tuple[int, ...]], rows: int, dtype: str) -> float:
    """Time, in seconds, of multiplying `rows` vectors with matrices of these shapes; vectors are
    left out.

    >>> 0 < time_products([(8, 16), (8,)], 3, "fp32") < 1
    True
    """
    matrices = [
        _filled_tensor((math.prod(shape[:-1]), shape[-1]), dtype)
        for shape in shapes
        if len(shape) > 1
    ]
    inputs = [_filled_tensor((rows, matrix.shape[1]), dtype) for matrix in matrices]
    return time_run(
        lambda: [torch.mm(x, matrix.T) for x, matrix in zip(inputs, matrices, strict=True)],
        TIMING_SECONDS,
    )


def time_core(
    core: CoreShape, num_cached_numbers: int, sizes: tuple[int, int], dtype: str
) -> float:
    """Time, in seconds, of softmax attention for one query in each of `rows` rows; `sizes` are
    (rows, keys).

    If `num_cached_numbers`, the number of cached values per token, is too small for separate keys
    and values, the values are the first channels of the keys, as in latent attention.

    >>> 0 < time_core(CoreShape((0, 0), (0, 0), 4, 4, 1.0), 8, (3, 5), "fp32") < 1
    True
    """
    rows, keys = sizes
    key_heads, value_heads = max(core.key_head_of_query) + 1, max(core.value_head_of_row) + 1
    q = _filled_tensor(
        (rows * key_heads, -(-len(core.key_head_of_query) // key_heads), core.score_dim), dtype
    )
    k = _filled_tensor((rows * key_heads, keys, core.score_dim), dtype)
    values_are_keys = (
        num_cached_numbers < key_heads * core.score_dim + value_heads * core.vdim
        and key_heads == value_heads
        and core.vdim <= core.score_dim
    )
    v = (
        k[..., : core.vdim]
        if values_are_keys
        else _filled_tensor((rows * value_heads, keys, core.vdim), dtype)
    )

    def attend() -> Tensor:
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        return torch.bmm(weights.reshape(v.shape[0], -1, keys), v)

    return time_run(attend, TIMING_SECONDS)


def _filled_tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Create a tensor and write to it; memory that was never written is not read from DRAM."""
    return torch.full(shape, 0.01, dtype=TORCH_DTYPES[dtype], device=accelerator_type())


# --- Arithmetic intensity of a decode step, by batch size -----------------------------------------

DEFAULT_ROWS = 16  # rows of the second line, if the workload has one row
MAX_TIMED_NUMBERS = 2**29  # bytes; larger components are not timed
MAX_TIMED_SECONDS = 0.5  # estimated; slower components are not timed
WRAP_INDENT: dict[str, Any] = {"indent": "  ", "hanging": "    "}
COMPONENT_COLOURS = {"projections": "red", "core": "purple", "output": "blue"}


@dataclass(frozen=True)
class DecodeComponent:
    """One component of a decode step: FLOPs, bytes moved, limiting resource, least and measured
    seconds.
    """

    name: str
    rows: int
    flops: int
    moved: int
    bound: str
    seconds: float
    measured: float | None = None

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.moved


@dataclass(frozen=True)
class DecodeLayer:
    """One layer that decodes a token at the end of `context` tokens, on a device.

    Projections of one row have one FLOP per byte of bfloat16, the core one for each query head per
    key head:

    >>> import headwise as hw
    >>> gqa = DecodeLayer(
    ...     hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.from_name("h200"), 10**6
    ... )
    >>> [round(component.intensity, 2) for component in gqa.components(1)]
    [1.0, 4.0, 1.0]
    >>> gqa.compute_bound_rows("projections"), gqa.compute_bound_rows("core")
    (225, None)
    """

    spec: AttentionSpec
    device: Device
    context: int
    formats: NumberFormats = DEFAULT_FORMATS

    def __post_init__(self) -> None:
        if self.spec.source is not None:
            raise SpecError(
                f"cross-attention is not supported here, got source={self.spec.source}; leave it "
                "out"
            )

    def components(self, rows: int) -> tuple[DecodeComponent, ...]:
        """Return projections, core and output with this number of rows."""
        return tuple(self._component(name, rows) for name in COMPONENT_COLOURS)

    def compute_bound_rows(self, name: str) -> int | None:
        """Return the least number of rows with which a component is compute-bound; None if it never
        is.
        """
        return first_where(lambda rows: self._component(name, rows).bound == "compute")

    def with_measured_seconds(self, box: DecodeComponent) -> DecodeComponent:
        """Time products of the component's sizes on this machine; too large components are returned
        unchanged.
        """
        if box.moved > MAX_TIMED_NUMBERS or box.seconds > MAX_TIMED_SECONDS:
            return box
        dtype = self.formats.compute
        if box.name != "core":
            shapes = [weight.shape for weight in self._component_weights(box.name)]
            return replace(box, measured=time_products(shapes, box.rows, dtype))
        core, keys = self.spec.core_of(self.spec.projection_form(one=True)), self._num_pairs
        if box.flops != core.flops(
            box.rows * keys
        ):  # a recurrent state, or more products than scores and values
            return box
        return replace(box, measured=time_core(core, self._cached_numbers, (box.rows, keys), dtype))

    @property
    def _num_pairs(self) -> int:
        return self.spec.pattern.pairs(range(self.context - 1, self.context), range(self.context))

    @property
    def _cached_numbers(self) -> int:
        return sum(math.prod(shape) for shape in self.spec.kv_entry_shapes().values())

    def _component_weights(self, name: str) -> list[WeightSpec]:
        """The parameters of the output projection, or all others."""
        weights = list_attention_weights(self.spec)
        return [weight for weight in weights if (".output." in weight.name) == (name == "output")]

    def _component(self, name: str, rows: int) -> DecodeComponent:
        chunk = RequestChunk(1, self.context - 1)
        dtype = self.formats.compute
        if name == "core":
            cost = chunk_cost(AttentionGroup("attention", self.spec), chunk, self.formats)
            flops, moved = rows * cost.core_flops, rows * cost.bytes_moved
        else:
            core = self.spec.core_of(self.spec.projection_form(one=True))
            flops_per_row = sum(
                flops
                for part, flops in flops_by_part(self.spec, chunk).items()
                if (part == "output") == (name == "output")
            )
            flops = rows * flops_per_row
            if name == "output":
                head_numbers = len(core.value_head_of_row) * core.vdim
            else:
                head_numbers = len(core.key_head_of_query) * core.dim + self._cached_numbers
            weights = self.formats.storage().total_bytes(self._component_weights(name))
            dtype = self.formats.storage().product_dtype(
                self._component_weights(name), dtype, self.device
            )
            moved = weights + dtype_bytes(self.formats.compute) * rows * (
                self.spec.model + head_numbers
            )
        return DecodeComponent(
            name,
            rows,
            flops,
            moved,
            self.device.limiting_resource(flops, moved, dtype),
            self.device.min_seconds(flops, moved, dtype),
        )


@dataclass(frozen=True)
class IntensityReport:
    """Arithmetic intensity of the components of several layers, for three batch sizes each.

    The batch sizes are 1, that of the workload, and the one from which projections are
    compute-bound.
    """

    layers: dict[str, DecodeLayer]
    components: dict[str, tuple[DecodeComponent, ...]]

    @staticmethod
    def from_layers(layers: Mapping[str, DecodeLayer], rows: int = DEFAULT_ROWS) -> IntensityReport:
        """Create the report; on the device "here" the components are also timed."""
        components: dict[str, tuple[DecodeComponent, ...]] = {}
        for name, layer in layers.items():
            batch_sizes = sorted(
                {
                    1,
                    rows if rows > 1 else DEFAULT_ROWS,
                    layer.compute_bound_rows("projections") or 1,
                }
            )
            of_layer = [
                component
                for batch_size in batch_sizes
                for component in layer.components(batch_size)
            ]
            if layer.device.name == THIS_MACHINE:
                of_layer = [layer.with_measured_seconds(component) for component in of_layer]
            components[name] = tuple(of_layer)
        return IntensityReport(dict(layers), components)

    def __str__(self) -> str:
        layer = next(iter(self.layers.values()))
        device, formats = layer.device, layer.formats
        is_measured = device.name == THIS_MACHINE
        title = (
            f"decode step of N rows of {layer.context:,} tokens, {formats.compute}, "
            f"{device.description}"
        )
        lines = [*wrap(title), ""]
        headers = ("N", "FLOPs/byte", "bound by", "least time", "measured" if is_measured else "")
        lines.append(_format_component_row("", *headers))
        for name, layer in self.layers.items():
            lines += [name, *_component_rows(self.components[name], is_measured)]
            limits = f"compute-bound from N: {_compute_bound_limits(layer)}"
            lines += wrap(limits, **WRAP_INDENT)
        weights_only = device.compute_bound_tokens(formats.compute, formats.weights)
        notes = (
            f"A product with weights is compute-bound from N = {weights_only:,.1f} if only "
            "weights are moved. "
        )
        if is_measured:
            notes += (
                "Measured: the best of several runs of products with the same sizes; data that "
                "stays in the "
                "processor's cache between runs is read faster than memory. - means too large to "
                "measure, or more "
                "than two products."
            )
        return "\n".join([*lines, "", *wrap(notes.strip())])

    @property
    def data(self) -> list[dict[str, Any]]:
        """The report as plain values."""
        return [
            {
                "name": name,
                "critical": {
                    component: layer.compute_bound_rows(component)
                    for component in COMPONENT_COLOURS
                },
                "boxes": [
                    {**asdict(component), "intensity": component.intensity}
                    for component in self.components[name]
                ],
            }
            for name, layer in self.layers.items()
        ]


def _component_rows(components: Sequence[DecodeComponent], is_measured: bool) -> Iterator[str]:
    for name, colour in COMPONENT_COLOURS.items():
        with_name = [component for component in components if component.name == name]
        for n, component in enumerate(with_name):
            measured = ""
            if is_measured:
                measured = "-" if component.measured is None else format_seconds(component.measured)
            yield _format_component_row(
                f"  {name} ({colour})" if n == 0 else "",
                f"{component.rows:,}",
                f"{component.intensity:,.2f}",
                component.bound,
                format_seconds(component.seconds),
                measured,
            )


def _compute_bound_limits(layer: DecodeLayer) -> str:
    words = {None: "never", 1: "any"}
    limits = {name: layer.compute_bound_rows(name) for name in COMPONENT_COLOURS}
    return ", ".join(f"{name} {words.get(rows) or f'{rows:,}'}" for name, rows in limits.items())


def _format_component_row(*cells: str) -> str:
    name, *values = cells
    return (pad(name, 24) + "".join(pad_left(value, 11) for value in values)).rstrip()

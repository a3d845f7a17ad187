"""Time of serving: the least time of decode steps and prefill chunks of a spec or model on a device.

`chunk_cost` gives the FLOPs and bytes of one attention layer for one request; `ServingCost` sums them over requests and
layers; `DecodeLayer` and `IntensityReport` show the parts of a decode step by batch size.
"""

from __future__ import annotations

import math
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import CallSignature, linear_attention
from ..errors import SpecError
from ..interfaces.core_types import CallSize, CoreShape
from ..masking.key_intervals import KeyRetention
from ..model_spec import ModelSpec
from ..spec.attention_spec import AttentionSpec
from . import required_flops, self_attention_work
from .cost_report import TERMINAL_WIDTH, format_seconds
from .kv_cache_memory import (
    IDEAL_ALLOCATOR,
    AttentionGroup,
    CacheAllocator,
    RequestBatch,
    WeightMatrixGroup,
    WeightMemory,
    cache_bytes_per_token,
    group_attentions,
    group_matrices,
    state_bytes,
    weight_memory,
)
from .roofline import (
    DEFAULT_FORMATS,
    THIS_MACHINE,
    TORCH_DTYPES,
    Device,
    NumberFormats,
    RooflineOperation,
    accelerator_type,
    dtype_bytes,
    stored_bytes,
    time_run,
)
from .workload import MAX_SIZE


class RequestChunk(NamedTuple):
    """Some tokens of one sequence, the number of tokens before them, and the length of the source sequence."""

    tokens: int
    past: int = 0
    source: int = 0


class ChunkCost(NamedTuple):
    """FLOPs of products with weights, FLOPs of the core, and bytes that the core moves."""

    weight_flops: int
    core_flops: int
    bytes_moved: int


def chunk_cost(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> ChunkCost:
    """Return the cost of one layer for one request chunk; reading the weights, which all requests share, is left out.

    >>> import headwise as hw
    >>> gqa = AttentionGroup("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8))
    >>> chunk_cost(gqa, RequestChunk(1, past=9999), NumberFormats())
    ChunkCost(weight_flops=83886080, core_flops=163840000, bytes_moved=40976384)

    These are 2 x 41,943,040 FLOPs with weights, 2 x 32 x 256 x 10,000 FLOPs in the core, and 10,000 x 4,096 bytes of
    the cache besides the token's queries and outputs.
    """
    spec, single_query = layers.spec, request.tokens == 1
    work = _attention_work(layers, request)
    weight_flops = required_flops(spec, replace(work, pairs=0))
    core = spec.core_of(spec.projection_form(single_query))
    signature = CallSignature(
        spec,
        core,
        single_query=single_query,
        has_recurrent_state=spec.is_recurrent and (single_query or request.past > 0),
    )
    uses_state = (
        spec.recurrent_part is not None
        and layers.kv_source == "own"
        and not linear_attention.unsupported_reasons(signature)
    )
    if uses_state:
        new_work = replace(work, keys=request.tokens) if signature.has_recurrent_state else work
        core_flops = linear_attention.executed_flops(signature, new_work)
    else:
        core_flops = required_flops(spec, work) - weight_flops
    query_output_numbers = request.tokens * (
        len(core.key_head_of_query) * core.dim + len(core.value_head_of_row) * core.vdim
    )
    bytes_moved = _cache_bytes_read(layers, request, formats) + dtype_bytes(formats.compute) * query_output_numbers
    return ChunkCost(weight_flops, core_flops, bytes_moved)


def prefix_bytes_read(layers: AttentionGroup, request: RequestChunk, count: int, formats: NumberFormats) -> int:
    """Bytes that a chunk reads of the first `count` tokens of its sequence, which several requests may share.

    With a window of 4,096 tokens, token 5,000 reads the last 96 of the first 1,000 tokens, 4,096 bytes each:

    >>> import headwise as hw
    >>> gqa = AttentionGroup("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8, pattern="window(4096)"))
    >>> prefix_bytes_read(gqa, RequestChunk(1, past=4999), 1000, NumberFormats())
    393216
    """
    if layers.kv_source != "own" or layers.spec.is_recurrent:
        return 0
    end = request.past + request.tokens
    num_keys = _num_keys_read(layers.spec, range(request.past, end), range(min(count, end)))
    return cache_bytes_per_token(layers.spec, formats.cache) * num_keys


def flops_by_part(spec: AttentionSpec, request: RequestChunk) -> dict[str, int]:
    """FLOPs with weights of one request chunk, by part; they add up to `chunk_cost(...).weight_flops`."""
    executed_spec = replace(spec, project=spec.projection_form(request.tokens == 1))
    work = replace(_attention_work(AttentionGroup("attention", spec), request), pairs=0)
    flops: dict[str, int] = {}
    for name, part in executed_spec.parts():
        sizes = executed_spec.sizes_of(part)
        params = part.params(executed_spec).values()
        projection_flops = sum(2 * param.layout.numel(sizes) * work.tokens(param.applied) for param in params)
        flops[name] = projection_flops + part.flops(executed_spec, work)
    return flops


def _attention_work(layers: AttentionGroup, request: RequestChunk) -> CallSize:
    if layers.kv_source == "own":
        return self_attention_work(layers.spec, batch=1, queries=request.tokens, past=request.past)
    pairs = layers.spec.pattern.pairs(range(request.past, request.past + request.tokens), range(request.source))
    return CallSize(1, request.tokens, 0, request.source, pairs)


def _cache_bytes_read(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> int:
    """Bytes of the cached tokens that some query can read; or of a recurrent state, which is read and written."""
    spec = layers.spec
    if layers.kv_source == "own" and spec.is_recurrent:
        new_kv_bytes = request.tokens * cache_bytes_per_token(spec, formats.compute) if request.tokens > 1 else 0
        return 2 * state_bytes(spec, formats.cache) + new_kv_bytes
    end = request.past + request.tokens
    keys = range(end if layers.kv_source == "own" else request.source)
    return cache_bytes_per_token(spec, formats.cache) * _num_keys_read(spec, range(request.past, end), keys)


def _num_keys_read(spec: AttentionSpec, queries: range, keys: range) -> int:
    return sum(len(interval) for interval in spec.pattern.visible_keys(queries, keys))


# --- Steps of a batch of requests ----------------------------------------------------------------------

MAX_STEPS = 4096  # chunks of one prompt
ChunkCosts = Mapping[tuple[AttentionGroup, RequestChunk], ChunkCost]


@dataclass(frozen=True)
class ServingStep:
    """One forward pass through all layers: its products with weights, and its attention cores."""

    weight_operations: tuple[RooflineOperation, ...]
    core_operations: tuple[RooflineOperation, ...]

    @property
    def operations(self) -> tuple[RooflineOperation, ...]:
        """All operations of the step."""
        return (*self.weight_operations, *self.core_operations)

    @property
    def seconds(self) -> float:
        """Lower bound of the time, in seconds: the sum over the operations."""
        return sum(operation.seconds for operation in self.operations)


@dataclass(frozen=True)
class ServingCost:
    """Cost of serving `num_layers` layers of a spec, or a model, on a device.

    >>> import headwise as hw
    >>> spec = hw.design(preset="gqa", model=4096, heads=32, kv=8)
    >>> llama = ServingCost(spec, Device.from_name("h200"), num_layers=32)
    >>> step = llama.decode_step(RequestBatch.uniform(16, 8192))
    >>> [(operation.name, operation.bound) for operation in step.operations]
    [('projections', 'memory'), ('core, decode', 'memory')]
    >>> round(step.seconds * 1e3, 2)  # milliseconds: 2.68 GB of weights and 17.2 GB of cache, at 4.8 TB/s
    4.14
    """

    spec_or_model: AttentionSpec | ModelSpec
    device: Device
    formats: NumberFormats = DEFAULT_FORMATS
    num_layers: int = 1
    allocator: CacheAllocator = IDEAL_ALLOCATOR
    source_tokens: int = 0  # length of the source sequence of each request, for cross-attention
    attentions: tuple[AttentionGroup, ...] = field(init=False, repr=False, compare=False)
    matrices: tuple[WeightMatrixGroup, ...] = field(init=False, repr=False, compare=False)
    weights: WeightMemory = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attentions", group_attentions(self.spec_or_model, self.num_layers))
        object.__setattr__(self, "matrices", group_matrices(self.spec_or_model))
        object.__setattr__(self, "weights", weight_memory(self.spec_or_model, self.formats.weights, self.num_layers))
        if not self.source_tokens and any(group.kv_source == "source" for group in self.attentions):
            raise SpecError("cross-attention reads a source whose length is not given; give source, in tokens")

    @property
    def model_width(self) -> int:
        """Width of the hidden states between layers."""
        if isinstance(self.spec_or_model, AttentionSpec):
            return self.spec_or_model.model
        return self.spec_or_model.stacks[-1].model

    def operation_title(self, what: str, layers: AttentionGroup) -> str:
        """Return the label of an operation, with the kind and pattern of the attention if there are several."""
        label = what if layers.name == "attention" else f"{layers.name} {what}"
        patterns = {group.spec.pattern.text for group in self.attentions if group.name == layers.name}
        return f"{label}, {layers.spec.pattern.text}" if len(patterns) > 1 else label

    def estimate_step(self, chunks: Mapping[RequestChunk, int], shared_prefix: int = 0) -> ServingStep:
        """Estimate one step with `count` requests of each chunk: decoded tokens (chunks of one token), and prompts.

        The decoding requests begin with `shared_prefix` equal tokens, whose cache is read once for all of them.
        """
        costs = {
            (group, chunk): chunk_cost(group, chunk, self.formats) for group in self.attentions for chunk in chunks
        }
        projections = [self._projection_operation(group, chunks, costs) for group in self.attentions]
        return ServingStep(
            (*projections, *self._matrix_operations(chunks)),
            tuple(self._core_operations(chunks, costs, shared_prefix)),
        )

    def decode_step(self, requests: RequestBatch) -> ServingStep:
        """Estimate a step that decodes one token of every request; the lengths include that token."""
        return self.estimate_step(self._decode_chunks(requests), requests.shared_prefix)

    def mixed_step(self, decode_requests: RequestBatch | None, tokens: int, past: int = 0) -> ServingStep:
        """Estimate a step that decodes one token of every request and prefills `tokens` tokens of another prompt."""
        chunks = self._decode_chunks(decode_requests) if decode_requests else {}
        prompt = RequestChunk(tokens, past, self.source_tokens)
        return self.estimate_step(
            chunks | {prompt: chunks.get(prompt, 0) + 1}, decode_requests.shared_prefix if decode_requests else 0
        )

    def _decode_chunks(self, requests: RequestBatch) -> dict[RequestChunk, int]:
        return {RequestChunk(1, length - 1, self.source_tokens): times for length, times in requests.counts_by_length}

    def first_token_seconds(self, prompt: int, chunk: int, other_requests: RequestBatch | None = None) -> float:
        """Lower bound of the time to first token, if the prompt is prefilled in chunks while others are decoded."""
        if chunk < 1 or prompt < 1 or -(-prompt // chunk) > MAX_STEPS:
            min_chunk = max(1, -(-prompt // MAX_STEPS))
            fact = (
                f"cannot prefill a prompt of {prompt:,} tokens in chunks of {chunk:,}: it takes at most {MAX_STEPS:,}"
            )
            raise SpecError(f"{fact} steps; give a chunk of {min_chunk:,} or more")
        starts = range(0, prompt, chunk)
        return sum(self.mixed_step(other_requests, min(chunk, prompt - past), past).seconds for past in starts)

    def compute_bound_tokens(self) -> int | None:
        """Number of tokens per step from which products with weights are compute-bound; None if they never are."""
        chunk = RequestChunk(1, 0, self.source_tokens)
        costs = {(group, chunk): chunk_cost(group, chunk, self.formats) for group in self.attentions}

        def is_compute_bound(tokens: int) -> bool:
            chunks = {chunk: tokens}
            operations = [self._projection_operation(group, chunks, costs) for group in self.attentions]
            operations += self._matrix_operations(chunks)
            compute_seconds = sum(operation.flops for operation in operations) / self.device.flops[self.formats.compute]
            return compute_seconds >= sum(operation.moved for operation in operations) / self.device.bandwidth

        return first_where(is_compute_bound)

    def core_dominates_from(self, batch: int) -> int | None:
        """Context length from which the cores take longer than products with weights; None if they never do."""

        def dominates(context: int) -> bool:
            step = self.decode_step(RequestBatch.uniform(batch, context))
            core_seconds = sum(operation.seconds for operation in step.core_operations)
            return core_seconds >= sum(operation.seconds for operation in step.weight_operations)

        return first_where(dominates)

    def _projection_operation(
        self, group: AttentionGroup, chunks: Mapping[RequestChunk, int], costs: ChunkCosts
    ) -> RooflineOperation:
        tokens = sum(chunk.tokens * times for chunk, times in chunks.items())
        weights = sum(stored_bytes(shape, self.formats.weights) for shape in group.weight_shapes)
        flops = sum(costs[group, chunk].weight_flops * times for chunk, times in chunks.items())
        moved = weights + dtype_bytes(self.formats.compute) * tokens * 2 * group.spec.model
        return self._roofline_operation(self.operation_title("projections", group), flops, moved, group.num_layers)

    def _matrix_operations(self, chunks: Mapping[RequestChunk, int]) -> Iterator[RooflineOperation]:
        num_tokens = sum(chunk.tokens * times for chunk, times in chunks.items())
        num_requests = sum(chunks.values())
        for group in self.matrices:
            tokens = num_requests if group.name == "head" else num_tokens  # logits of the last token of each request
            weights = group.bytes_moved(tokens, self.formats.weights)
            moved = weights + dtype_bytes(self.formats.compute) * tokens * group.numbers_per_token
            yield self._roofline_operation(group.name, group.flops(tokens), moved, group.num_layers)

    def _core_operations(
        self, chunks: Mapping[RequestChunk, int], costs: ChunkCosts, shared_prefix: int
    ) -> Iterator[RooflineOperation]:
        phases = {
            "decode": {chunk: times for chunk, times in chunks.items() if chunk.tokens == 1},
            "prefill": {chunk: times for chunk, times in chunks.items() if chunk.tokens > 1},
        }
        for group in self.attentions:
            for phase, phase_chunks in phases.items():
                if not phase_chunks:
                    continue
                flops = sum(costs[group, chunk].core_flops * times for chunk, times in phase_chunks.items())
                moved = sum(costs[group, chunk].bytes_moved * times for chunk, times in phase_chunks.items())
                if phase == "decode":
                    moved -= self._saved_prefix_bytes(group, phase_chunks, shared_prefix)
                name = f"{self.operation_title('core', group)}, {phase}"
                yield self._roofline_operation(name, flops, moved, group.num_layers)

    def _saved_prefix_bytes(self, group: AttentionGroup, chunks: Mapping[RequestChunk, int], shared_prefix: int) -> int:
        """Bytes that are not read because the complete pages of a shared prefix are read once for all requests."""
        count = self.allocator.num_shared_slots(KeyRetention(0, None), shared_prefix, shared_prefix)
        prefix_bytes = {chunk: prefix_bytes_read(group, chunk, count, self.formats) for chunk in chunks}
        total = sum(prefix_bytes[chunk] * times for chunk, times in chunks.items())
        return total - max(prefix_bytes.values(), default=0)

    def _roofline_operation(self, name: str, flops: int, moved: int, num_layers: int) -> RooflineOperation:
        dtype = self.formats.compute
        seconds = self.device.min_seconds(flops, moved, dtype)
        bound = self.device.limiting_resource(flops, moved, dtype)
        if num_layers > 1 and not isinstance(self.spec_or_model, AttentionSpec):
            name = f"{num_layers:,} x {name}"
        return RooflineOperation(name, num_layers * flops, num_layers * moved, num_layers * seconds, bound)


def first_where(holds: Callable[[int], bool]) -> int | None:
    """Return the least whole number from 1 at which a monotonic condition becomes true; None if it never does.

    >>> first_where(lambda n: n * n >= 50), first_where(lambda n: False)
    (8, None)
    """
    first = bisect_left(range(1, MAX_SIZE + 1), True, key=holds) + 1
    return first if first <= MAX_SIZE else None


# --- Timing the products of a decode step on this machine ----------------------------------------------

TIMING_SECONDS = 0.05  # of one measurement; a table has dozens


def time_products(shapes: Sequence[tuple[int, ...]], rows: int, dtype: str) -> float:
    """Time, in seconds, of multiplying `rows` vectors with matrices of these shapes; vectors are left out.

    >>> 0 < time_products([(8, 16), (8,)], 3, "fp32") < 1
    True
    """
    matrices = [_filled_tensor((math.prod(shape[:-1]), shape[-1]), dtype) for shape in shapes if len(shape) > 1]
    inputs = [_filled_tensor((rows, matrix.shape[1]), dtype) for matrix in matrices]
    return time_run(lambda: [torch.mm(x, matrix.T) for x, matrix in zip(inputs, matrices, strict=True)], TIMING_SECONDS)


def time_core(core: CoreShape, num_cached_numbers: int, sizes: tuple[int, int], dtype: str) -> float:
    """Time, in seconds, of softmax attention for one query in each of `rows` rows; `sizes` are (rows, keys).

    If `num_cached_numbers`, the number of cached values per token, is too small for separate keys and values, the
    values are the first channels of the keys, as in latent attention.

    >>> 0 < time_core(CoreShape((0, 0), (0, 0), 4, 4, 1.0), 8, (3, 5), "fp32") < 1
    True
    """
    rows, keys = sizes
    key_heads, value_heads = max(core.key_head_of_query) + 1, max(core.value_head_of_row) + 1
    q = _filled_tensor((rows * key_heads, -(-len(core.key_head_of_query) // key_heads), core.score_dim), dtype)
    k = _filled_tensor((rows * key_heads, keys, core.score_dim), dtype)
    values_are_keys = (
        num_cached_numbers < key_heads * core.score_dim + value_heads * core.vdim
        and key_heads == value_heads
        and core.vdim <= core.score_dim
    )
    v = k[..., : core.vdim] if values_are_keys else _filled_tensor((rows * value_heads, keys, core.vdim), dtype)

    def attend() -> Tensor:
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        return torch.bmm(weights.reshape(v.shape[0], -1, keys), v)

    return time_run(attend, TIMING_SECONDS)


def _filled_tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Create a tensor and write to it; memory that was never written is not read from DRAM."""
    return torch.full(shape, 0.01, dtype=TORCH_DTYPES[dtype], device=accelerator_type())


# --- Arithmetic intensity of a decode step, by batch size ----------------------------------------------

DEFAULT_ROWS = 16  # rows of the second line, if the workload has one row
MAX_TIMED_NUMBERS = 2**29  # bytes; larger components are not timed
MAX_TIMED_SECONDS = 0.5  # estimated; slower components are not timed
WRAP_INDENT: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "    "}
COMPONENT_COLOURS = {"projections": "red", "core": "purple", "output": "blue"}


@dataclass(frozen=True)
class DecodeComponent:
    """One component of a decode step: FLOPs, bytes moved, limiting resource, least and measured seconds."""

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

    Projections of one row have one FLOP per byte of bfloat16, the core one for each query head per key head:

    >>> import headwise as hw
    >>> gqa = DecodeLayer(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.from_name("h200"), 10**6)
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
            raise SpecError(f"cross-attention is not supported here, got source={self.spec.source}; leave it out")

    def components(self, rows: int) -> tuple[DecodeComponent, ...]:
        """Return projections, core and output with this number of rows."""
        return tuple(self._component(name, rows) for name in COMPONENT_COLOURS)

    def compute_bound_rows(self, name: str) -> int | None:
        """Return the least number of rows with which a component is compute-bound; None if it never is."""
        return first_where(lambda rows: self._component(name, rows).bound == "compute")

    def with_measured_seconds(self, box: DecodeComponent) -> DecodeComponent:
        """Time products of the component's sizes on this machine; too large components are returned unchanged."""
        if box.moved > MAX_TIMED_NUMBERS or box.seconds > MAX_TIMED_SECONDS:
            return box
        dtype = self.formats.compute
        if box.name != "core":
            return replace(box, measured=time_products(self._component_shapes(box.name), box.rows, dtype))
        core, keys = self.spec.core_of(self.spec.projection_form(one=True)), self._num_pairs
        if box.flops != core.flops(box.rows * keys):  # a recurrent state, or more products than scores and values
            return box
        return replace(box, measured=time_core(core, self._cached_numbers, (box.rows, keys), dtype))

    @property
    def _num_pairs(self) -> int:
        return self.spec.pattern.pairs(range(self.context - 1, self.context), range(self.context))

    @property
    def _cached_numbers(self) -> int:
        return sum(math.prod(shape) for shape in self.spec.kv_entry_shapes().values())

    def _component_shapes(self, name: str) -> list[tuple[int, ...]]:
        """Shapes of the parameters of the output projection, or of all others."""
        shapes = self.spec.shapes().items()
        return [shape for key, shape in shapes if (key.partition(".")[0] == "output") == (name == "output")]

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
            weights = sum(stored_bytes(shape, self.formats.weights) for shape in self._component_shapes(name))
            moved = weights + dtype_bytes(dtype) * rows * (self.spec.model + head_numbers)
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

    The batch sizes are 1, that of the workload, and the one from which projections are compute-bound.
    """

    layers: dict[str, DecodeLayer]
    components: dict[str, tuple[DecodeComponent, ...]]

    @staticmethod
    def from_layers(layers: Mapping[str, DecodeLayer], rows: int = DEFAULT_ROWS) -> IntensityReport:
        """Create the report; on the device "here" the components are also timed."""
        components: dict[str, tuple[DecodeComponent, ...]] = {}
        for name, layer in layers.items():
            batch_sizes = sorted({1, rows if rows > 1 else DEFAULT_ROWS, layer.compute_bound_rows("projections") or 1})
            of_layer = [component for batch_size in batch_sizes for component in layer.components(batch_size)]
            if layer.device.name == THIS_MACHINE:
                of_layer = [layer.with_measured_seconds(component) for component in of_layer]
            components[name] = tuple(of_layer)
        return IntensityReport(dict(layers), components)

    def __str__(self) -> str:
        layer = next(iter(self.layers.values()))
        device, formats = layer.device, layer.formats
        is_measured = device.name == THIS_MACHINE
        title = f"decode step of N rows of {layer.context:,} tokens, {formats.compute}, {device.description}"
        lines = [*textwrap.wrap(title, TERMINAL_WIDTH), ""]
        headers = ("N", "FLOPs/byte", "bound by", "least time", "measured" if is_measured else "")
        lines.append(_format_component_row("", *headers))
        for name, layer in self.layers.items():
            lines += [name, *_component_rows(self.components[name], is_measured)]
            limits = f"compute-bound from N: {_compute_bound_limits(layer)}"
            lines += textwrap.wrap(limits, TERMINAL_WIDTH, **WRAP_INDENT)
        weights_only = device.compute_bound_tokens(formats.compute, formats.weights)
        notes = f"A product with weights is compute-bound from N = {weights_only:,.1f} if only weights are moved. "
        if is_measured:
            notes += (
                "Measured: the best of several runs of products with the same sizes; data that stays in the "
                "processor's cache between runs is read faster than memory. - means too large to measure, or more "
                "than two products."
            )
        return "\n".join([*lines, "", *textwrap.wrap(notes, TERMINAL_WIDTH)])

    @property
    def data(self) -> list[dict[str, Any]]:
        """The report as plain values."""
        return [
            {
                "name": name,
                "critical": {component: layer.compute_bound_rows(component) for component in COMPONENT_COLOURS},
                "boxes": [
                    {**asdict(component), "intensity": component.intensity} for component in self.components[name]
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
    return (name.ljust(24) + "".join(value.rjust(11) for value in values)).rstrip()

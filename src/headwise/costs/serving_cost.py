"""What one request asks of one attention: FLOPs with weights, FLOPs with what is remembered, and bytes read of that."""

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
    """Some tokens of one sequence, and how many of it, or of the source that it reads, came before them."""

    tokens: int
    past: int = 0
    source: int = 0


class ChunkCost(NamedTuple):
    """FLOPs of products with weights, FLOPs of products without, and bytes that the latter move."""

    weight_flops: int
    core_flops: int
    bytes_moved: int


def chunk_cost(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> ChunkCost:
    """What one such layer is asked by one sequence; its weights are read once for all of them, and not counted here.

    >>> import headwise as hw
    >>> gqa = AttentionGroup("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8))
    >>> told = chunk_cost(gqa, RequestChunk(1, past=9999), NumberFormats())
    >>> (
    ...     told.weight_flops,
    ...     told.core_flops,
    ...     told.bytes_moved,
    ... )  # 2 x 41,943,040; 2 x 32 x 256 x 10,000; 10,000 x 4,096 and its own
    (83886080, 163840000, 40976384)
    """
    spec, one = layers.spec, request.tokens == 1
    work = _attention_work(layers, request)
    weights = required_flops(spec, replace(work, pairs=0))
    core = spec.core_of(spec.projection_form(one))
    job = CallSignature(
        spec, core, single_query=one, has_recurrent_state=spec.is_recurrent and (one or request.past > 0)
    )
    if spec.recurrent_part is not None and layers.kv_source == "own" and not linear_attention.unsupported_reasons(job):
        inner = linear_attention.executed_flops(
            job, replace(work, keys=request.tokens) if job.has_recurrent_state else work
        )
    else:
        inner = required_flops(spec, work) - weights
    spoken = request.tokens * (len(core.key_head_of_query) * core.dim + len(core.value_head_of_row) * core.vdim)
    return ChunkCost(
        weights, inner, _cache_bytes_read(layers, request, formats) + dtype_bytes(formats.compute) * spoken
    )


def prefix_bytes_read(layers: AttentionGroup, request: RequestChunk, count: int, formats: NumberFormats) -> int:
    """Bytes that are read of so many first tokens of its sequence, for whoever reads them for several at once.

    >>> import headwise as hw
    >>> gqa = AttentionGroup("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8, pattern="window(4096)"))
    >>> prefix_bytes_read(
    ...     gqa, RequestChunk(1, past=4999), 1000, NumberFormats()
    ... )  # of 1,000 the latest 96, 4,096 bytes each
    393216
    """
    if layers.kv_source != "own" or layers.spec.is_recurrent:
        return 0
    end = request.past + request.tokens
    met = _num_keys_read(layers.spec, range(request.past, end), range(min(count, end)))
    return cache_bytes_per_token(layers.spec, formats.cache) * met


def flops_by_part(spec: AttentionSpec, request: RequestChunk) -> dict[str, int]:
    """FLOPs with weights of one sequence, part by part; together they are what `asks` says."""
    running = replace(spec, project=spec.projection_form(request.tokens == 1))
    work = replace(_attention_work(AttentionGroup("attention", spec), request), pairs=0)
    found: dict[str, int] = {}
    for name, part in running.parts():
        sizes = running.sizes_of(part)
        params = part.params(running).values()
        met = sum(2 * param.layout.numel(sizes) * work.tokens(param.applied) for param in params)
        found[name] = met + part.flops(running, work)
    return found


def _attention_work(layers: AttentionGroup, request: RequestChunk) -> CallSize:
    if layers.kv_source == "own":
        return self_attention_work(layers.spec, batch=1, queries=request.tokens, past=request.past)
    pairs = layers.spec.pattern.pairs(range(request.past, request.past + request.tokens), range(request.source))
    return CallSize(1, request.tokens, 0, request.source, pairs)


def _cache_bytes_read(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> int:
    """Bytes of each remembered token that some query may read; or a state, read and written."""
    spec = layers.spec
    if layers.kv_source == "own" and spec.is_recurrent:
        own = request.tokens * cache_bytes_per_token(spec, formats.compute) if request.tokens > 1 else 0
        return 2 * state_bytes(spec, formats.cache) + own
    end = request.past + request.tokens
    keys = range(end if layers.kv_source == "own" else request.source)
    return cache_bytes_per_token(spec, formats.cache) * _num_keys_read(spec, range(request.past, end), keys)


def _num_keys_read(spec: AttentionSpec, queries: range, keys: range) -> int:
    return sum(len(some) for some in spec.pattern.visible_keys(queries, keys))


# --- Answering many requests at once -------------------------------------------------------------------

MAX_STEPS = 4096  # that one prompt may take
ChunkCosts = Mapping[tuple[AttentionGroup, RequestChunk], ChunkCost]


@dataclass(frozen=True)
class ServingStep:
    """One pass of tokens through all layers: products with weights, and those with what is remembered."""

    weight_operations: tuple[RooflineOperation, ...]
    core_operations: tuple[RooflineOperation, ...]

    @property
    def operations(self) -> tuple[RooflineOperation, ...]:
        """All of them."""
        return (*self.weight_operations, *self.core_operations)

    @property
    def seconds(self) -> float:
        """Seconds at least: one operation after the other."""
        return sum(one.seconds for one in self.operations)


@dataclass(frozen=True)
class ServingCost:
    """A spec in so many layers, or a model, on a device: what a step of it takes.

    >>> import headwise as hw
    >>> llama = ServingCost(
    ...     hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.from_name("h200"), num_layers=32
    ... )
    >>> step = llama.decode_step(RequestBatch.uniform(16, 8192))
    >>> [(one.name, one.bound) for one in step.operations]
    [('projections', 'memory'), ('core, decoding', 'memory')]
    >>> round(step.seconds * 1e3, 2)  # 2.68 GB of weights and 17.2 GB remembered, at 4.8 TB/s
    4.14
    """

    spec_or_model: AttentionSpec | ModelSpec
    device: Device
    formats: NumberFormats = DEFAULT_FORMATS
    num_layers: int = 1
    allocator: CacheAllocator = IDEAL_ALLOCATOR
    source_tokens: int = 0  # tokens of another sequence that each request reads
    attentions: tuple[AttentionGroup, ...] = field(init=False, repr=False, compare=False)
    matrices: tuple[WeightMatrixGroup, ...] = field(init=False, repr=False, compare=False)
    weights: WeightMemory = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attentions", group_attentions(self.spec_or_model, self.num_layers))
        object.__setattr__(self, "matrices", group_matrices(self.spec_or_model))
        object.__setattr__(self, "weights", weight_memory(self.spec_or_model, self.formats.weights, self.num_layers))
        if not self.source_tokens and any(each.kv_source == "source" for each in self.attentions):
            raise SpecError("it reads another sequence of a length that nothing says; give source, in tokens")

    @property
    def model_width(self) -> int:
        """The width of what runs from layer to layer."""
        described = self.spec_or_model
        return described.model if isinstance(described, AttentionSpec) else described.stacks[-1].model

    def operation_title(self, what: str, layers: AttentionGroup) -> str:
        """What it is; and of which attention, where there are several kinds."""
        told = what if layers.name == "attention" else f"{layers.name} {what}"
        patterns = {each.spec.pattern.text for each in self.attentions if each.name == layers.name}
        return f"{told}, {layers.spec.pattern.text}" if len(patterns) > 1 else told

    def estimate_step(self, chunks: Mapping[RequestChunk, int], shared_prefix: int = 0) -> ServingStep:
        """One step of so many requests of each kind: single tokens, and chunks of prompts.

        Those that get a single token begin with so many that they share, which are read once.
        """
        told = {
            (each, request): chunk_cost(each, request, self.formats) for each in self.attentions for request in chunks
        }
        projections = [self._projection_operations(each, chunks, told) for each in self.attentions]
        return ServingStep(
            (*projections, *self._matrix_operations(chunks)), tuple(self._core_operations(chunks, told, shared_prefix))
        )

    def decode_step(self, requests: RequestBatch) -> ServingStep:
        """A step in which every row gets one token; lengths count it."""
        return self.estimate_step(
            {RequestChunk(1, length - 1, self.source_tokens): times for length, times in requests.counts_by_length},
            requests.shared_prefix,
        )

    def mixed_step(self, decode_requests: RequestBatch | None, tokens: int, past: int = 0) -> ServingStep:
        """A step in which every row gets one token, and a prompt of another so many behind what was taken of it."""
        requests = {
            RequestChunk(1, length - 1, self.source_tokens): times
            for length, times in (decode_requests.counts_by_length if decode_requests else ())
        }
        prompt = RequestChunk(tokens, past, self.source_tokens)
        return self.estimate_step(
            requests | {prompt: requests.get(prompt, 0) + 1}, decode_requests.shared_prefix if decode_requests else 0
        )

    def first_token_seconds(self, prompt: int, chunk: int, other_requests: RequestBatch | None = None) -> float:
        """Seconds at least until a prompt's first token: chunk by chunk, others being answered beside it."""
        if chunk < 1 or prompt < 1 or -(-prompt // chunk) > MAX_STEPS:
            least = max(1, -(-prompt // MAX_STEPS))
            raise SpecError(
                f"a prompt of {prompt:,} tokens cannot be taken {chunk:,} at a time; give a chunk of {least:,} or more"
            )
        starts = range(0, prompt, chunk)
        return sum(self.mixed_step(other_requests, min(chunk, prompt - past), past).seconds for past in starts)

    def compute_bound_tokens(self) -> int | None:
        """Tokens in a step from which products with weights wait for compute; None when they never do."""
        request = RequestChunk(1, 0, self.source_tokens)
        told = {(each, request): chunk_cost(each, request, self.formats) for each in self.attentions}

        def waits(tokens: int) -> bool:
            requests = {request: tokens}
            every = [self._projection_operations(each, requests, told) for each in self.attentions] + [
                *self._matrix_operations(requests)
            ]
            products = sum(one.flops for one in every) / self.device.flops[self.formats.compute]
            return products >= sum(one.moved for one in every) / self.device.bandwidth

        return first_where(waits)

    def core_dominates_from(self, batch: int) -> int | None:
        """Tokens of context from which cores take longer than products with weights; None when they never do."""

        def dominates(context: int) -> bool:
            step = self.decode_step(RequestBatch.uniform(batch, context))
            return sum(one.seconds for one in step.core_operations) >= sum(
                one.seconds for one in step.weight_operations
            )

        return first_where(dominates)

    def _projection_operations(
        self, layers: AttentionGroup, requests: Mapping[RequestChunk, int], told: ChunkCosts
    ) -> RooflineOperation:
        tokens = sum(request.tokens * n for request, n in requests.items())
        weights = sum(stored_bytes(shape, self.formats.weights) for shape in layers.weight_shapes)
        flops = sum(told[layers, request].weight_flops * n for request, n in requests.items())
        moved = weights + dtype_bytes(self.formats.compute) * tokens * 2 * layers.spec.model
        return self._roofline_operation(self.operation_title("projections", layers), flops, moved, layers.num_layers)

    def _matrix_operations(self, requests: Mapping[RequestChunk, int]) -> Iterator[RooflineOperation]:
        tokens, answers = sum(request.tokens * n for request, n in requests.items()), sum(requests.values())
        for each in self.matrices:
            met = answers if each.name == "head" else tokens
            moved = (
                each.bytes_moved(met, self.formats.weights)
                + dtype_bytes(self.formats.compute) * met * each.numbers_per_token
            )
            yield self._roofline_operation(each.name, each.flops(met), moved, each.num_layers)

    def _core_operations(
        self, requests: Mapping[RequestChunk, int], told: ChunkCosts, shared: int
    ) -> Iterator[RooflineOperation]:
        kinds = {
            "decoding": [request for request in requests if request.tokens == 1],
            "a prompt": [request for request in requests if request.tokens > 1],
        }
        for each in self.attentions:
            for kind, some in kinds.items():
                flops = sum(told[each, request].core_flops * requests[request] for request in some)
                moved = sum(told[each, request].bytes_moved * requests[request] for request in some)
                if kind == "decoding":
                    moved -= self._shared_prefix_bytes(each, {request: requests[request] for request in some}, shared)
                if some:
                    name = f"{self.operation_title('core', each)}, {kind}"
                    yield self._roofline_operation(name, flops, moved, each.num_layers)

    def _shared_prefix_bytes(self, layers: AttentionGroup, requests: Mapping[RequestChunk, int], shared: int) -> int:
        """Bytes of a beginning that are not read again for each row: whole pages of it, where rows share pages."""
        count = self.allocator.num_shared_slots(KeyRetention(0, None), shared, shared)
        each = {request: prefix_bytes_read(layers, request, count, self.formats) for request in requests}
        return sum(each[request] * times for request, times in requests.items()) - max(each.values(), default=0)

    def _roofline_operation(self, name: str, flops: int, moved: int, times: int) -> RooflineOperation:
        maths = self.formats.compute
        seconds, bound = (
            self.device.min_seconds(flops, moved, maths),
            self.device.limiting_resource(flops, moved, maths),
        )
        many = f"{times:,} x {name}" if times > 1 and not isinstance(self.spec_or_model, AttentionSpec) else name
        return RooflineOperation(many, times * flops, times * moved, times * seconds, bound)


def first_where(holds: Callable[[int], bool]) -> int | None:
    """The first whole number from 1 up at which something begins to hold, and holds from then on.

    >>> first_where(lambda n: n * n >= 50), first_where(lambda n: False)
    (8, None)
    """
    found = bisect_left(range(1, MAX_SIZE + 1), True, key=holds) + 1
    return found if found <= MAX_SIZE else None


# --- Products of the sizes that a box has, timed on this machine ---------------------------------------

TIMING_SECONDS = 0.05  # of one measurement: a table has dozens


def time_products(shapes: Sequence[tuple[int, ...]], rows: int, dtype: str) -> float:
    """Seconds in which so many vectors meet matrices of these shapes; tensors of one axis are left out.

    >>> 0 < time_products([(8, 16), (8,)], 3, "fp32") < 1
    True
    """
    matrices = [_random_tensor((math.prod(shape[:-1]), shape[-1]), dtype) for shape in shapes if len(shape) > 1]
    inputs = [_random_tensor((rows, matrix.shape[1]), dtype) for matrix in matrices]
    return time_run(lambda: [torch.mm(x, matrix.T) for x, matrix in zip(inputs, matrices, strict=True)], TIMING_SECONDS)


def time_core(core: CoreShape, num_cached_numbers: int, sizes: tuple[int, int], dtype: str) -> float:
    """Seconds in which one query of each of (rows, keys) meets keys, and their shares values.

    `kept` is how many numbers are remembered of a token: where that is less than keys and values, values are the first
    channels of keys, as in a latent.

    >>> 0 < time_core(CoreShape((0, 0), (0, 0), 4, 4, 1.0), 8, (3, 5), "fp32") < 1
    True
    """
    rows, keys = sizes
    groups, voices = max(core.key_head_of_query) + 1, max(core.value_head_of_row) + 1
    q = _random_tensor((rows * groups, -(-len(core.key_head_of_query) // groups), core.score_dim), dtype)
    k = _random_tensor((rows * groups, keys, core.score_dim), dtype)
    joint = (
        num_cached_numbers < groups * core.score_dim + voices * core.vdim
        and groups == voices
        and core.vdim <= core.score_dim
    )
    v = k[..., : core.vdim] if joint else _random_tensor((rows * voices, keys, core.vdim), dtype)

    def read() -> Tensor:
        shares = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
        return torch.bmm(shares.reshape(v.shape[0], -1, keys), v)

    return time_run(read, TIMING_SECONDS)


def _random_tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Any numbers, but written: memory that nobody wrote to is not read from memory."""
    return torch.full(shape, 0.01, dtype=TORCH_DTYPES[dtype], device=accelerator_type())


# --- One token of each of N rows -----------------------------------------------------------------------

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
    >>> gqa = DecodeLayer(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.from_name("h200"), 10**6)
    >>> (
    ...     [round(box.intensity, 2) for box in gqa.components(1)],
    ...     gqa.compute_bound_rows("projections"),
    ...     gqa.compute_bound_rows("core"),
    ... )
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
            heads = (
                len(core.value_head_of_row) * core.vdim
                if name == "output"
                else len(core.key_head_of_query) * core.dim + self._cached_numbers
            )
            weights = sum(stored_bytes(shape, self.formats.weights) for shape in self._component_shapes(name))
            moved = weights + dtype_bytes(self.formats.compute) * rows * (self.spec.model + heads)
        maths = self.formats.compute
        return DecodeComponent(
            name,
            rows,
            flops,
            moved,
            self.device.limiting_resource(flops, moved, maths),
            self.device.min_seconds(flops, moved, maths),
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
            found[name] = tuple(
                layer.with_measured_seconds(box) if layer.device.name == THIS_MACHINE else box for box in boxes
            )
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
            lines += textwrap.wrap(
                f"N from which it waits for compute: {_compute_bound_lines(layer)}", TERMINAL_WIDTH, **WRAP_INDENT
            )
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
            yield _format_component_row(
                title, f"{box.rows:,}", f"{box.intensity:,.2f}", box.bound, format_seconds(box.seconds), found
            )


def _compute_bound_lines(layer: DecodeLayer) -> str:
    words = {None: "never", 1: "any"}
    found = {name: layer.compute_bound_rows(name) for name in COMPONENT_COLOURS}
    return ", ".join(f"{name} {words.get(n) or f'{n:,}'}" for name, n in found.items())


def _format_component_row(*cells: str) -> str:
    name, *rest = cells
    return (name.ljust(24) + "".join(cell.rjust(11) for cell in rest)).rstrip()

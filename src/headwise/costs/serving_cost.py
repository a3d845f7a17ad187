"""Time of serving: the least time of decode steps and prefill chunks of a spec or model on a
device.

`chunk_cost` gives the FLOPs and bytes of one attention layer for one request; `ServingCost` sums
them over requests and layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..backends import CallSignature, linear_attention
from ..errors import SpecError
from ..interfaces.core_types import CallSize
from ..masking.key_intervals import KeyRetention
from ..masking.patterns import count_pairs_by_head
from ..model_spec import ModelSpec, WeightSpec
from ..spec.attention_spec import AttentionSpec
from . import required_flops, self_attention_work
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
from .pairs_per_head import patterns_of_kv_heads
from .roofline import DEFAULT_FORMATS, Device, NumberFormats, RooflineOperation, dtype_bytes
from .weight_storage import WeightStorage
from .workload import MAX_SIZE


class RequestChunk(NamedTuple):
    """Some tokens of one sequence, the number of tokens before them, and the length of the source
    sequence.
    """

    tokens: int
    past: int = 0
    source: int = 0


class ChunkCost(NamedTuple):
    """FLOPs of products with weights, FLOPs of the core, and bytes that the core moves."""

    weight_flops: int
    core_flops: int
    bytes_moved: int


def chunk_cost(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> ChunkCost:
    """Return the cost of one layer for one request chunk; reading the weights, which all requests
    share, is left out.

    >>> import headwise as hw
    >>> gqa = AttentionGroup("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8))
    >>> chunk_cost(gqa, RequestChunk(1, past=9999), NumberFormats())
    ChunkCost(weight_flops=83886080, core_flops=163840000, bytes_moved=40976384)

    These are 2 x 41,943,040 FLOPs with weights, 2 x 32 x 256 x 10,000 FLOPs in the core, and 10,000
    x 4,096 bytes of the cache besides the token's queries and outputs.
    """
    spec, single_query = layers.spec, request.tokens == 1
    work = _attention_work(layers, request)
    weight_flops = required_flops(spec, work.with_pairs(0))
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
    bytes_moved = (
        _cache_bytes_read(layers, request, formats)
        + dtype_bytes(formats.compute) * query_output_numbers
    )
    return ChunkCost(weight_flops, core_flops, bytes_moved)


def prefix_bytes_read(
    layers: AttentionGroup, request: RequestChunk, count: int, formats: NumberFormats
) -> int:
    """Bytes that a chunk reads of the first `count` tokens of its sequence, which several requests
    may share.

    With a window of 4,096 tokens, token 5,000 reads the last 96 of the first 1,000 tokens, 4,096
    bytes each:

    >>> import headwise as hw
    >>> gqa = AttentionGroup(
    ...     "attention", hw.design(preset="gqa", model=4096, heads=32, kv=8, pattern="window(4096)")
    ... )
    >>> prefix_bytes_read(gqa, RequestChunk(1, past=4999), 1000, NumberFormats())
    393216
    """
    if layers.kv_source != "own" or layers.spec.is_recurrent:
        return 0
    end = request.past + request.tokens
    return _key_bytes_read(layers.spec, range(request.past, end), range(min(count, end)), formats)


def flops_by_part(spec: AttentionSpec, request: RequestChunk) -> dict[str, int]:
    """FLOPs with weights of one request chunk, by part; they add up to
    `chunk_cost(...).weight_flops`.
    """
    executed_spec = replace(spec, project=spec.projection_form(request.tokens == 1))
    work = _attention_work(AttentionGroup("attention", spec), request).with_pairs(0)
    flops: dict[str, int] = {}
    for name, part in executed_spec.parts():
        sizes = executed_spec.sizes_of(part)
        params = part.params(executed_spec).values()
        projection_flops = sum(
            2 * param.layout.numel(sizes) * work.tokens(param.applied) for param in params
        )
        flops[name] = projection_flops + part.flops(executed_spec, work)
    return flops


def _attention_work(layers: AttentionGroup, request: RequestChunk) -> CallSize:
    if layers.kv_source == "own":
        return self_attention_work(layers.spec, batch=1, queries=request.tokens, past=request.past)
    queries = range(request.past, request.past + request.tokens)
    return CallSize(
        1,
        request.tokens,
        0,
        request.source,
        *count_pairs_by_head(layers.spec.pattern, queries, range(request.source)),
    )


def _cache_bytes_read(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> int:
    """Bytes of the cached tokens that some query can read; or of a recurrent state, which is read
    and written.
    """
    spec = layers.spec
    if layers.kv_source == "own" and spec.is_recurrent:
        new_kv_bytes = (
            request.tokens * cache_bytes_per_token(spec, formats.compute)
            if request.tokens > 1
            else 0
        )
        return 2 * state_bytes(spec, formats.cache) + new_kv_bytes
    end = request.past + request.tokens
    keys = range(end if layers.kv_source == "own" else request.source)
    return _key_bytes_read(spec, range(request.past, end), keys, formats)


def _key_bytes_read(
    spec: AttentionSpec, queries: range, keys: range, formats: NumberFormats
) -> int:
    """Bytes of the keys, with their values, that some query head of each
    key-value head attends to.
    """
    patterns = patterns_of_kv_heads(spec)
    num_keys = sum(
        len(interval) for pattern in patterns for interval in pattern.visible_keys(queries, keys)
    )
    return cache_bytes_per_token(spec, formats.cache) * num_keys // len(patterns)


# --- Steps of a batch of requests -----------------------------------------------------------------

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
    >>> round(
    ...     step.seconds * 1e3, 2
    ... )  # milliseconds: 2.68 GB of weights and 17.2 GB of cache, at 4.8 TB/s
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
        object.__setattr__(
            self, "attentions", group_attentions(self.spec_or_model, self.num_layers)
        )
        object.__setattr__(self, "matrices", group_matrices(self.spec_or_model))
        object.__setattr__(
            self, "weights", weight_memory(self.spec_or_model, self.storage, self.num_layers)
        )
        if not self.source_tokens and any(group.kv_source == "source" for group in self.attentions):
            raise SpecError(
                "cross-attention reads a source whose length is not given; give source, in tokens"
            )

    @property
    def storage(self) -> WeightStorage:
        """The formats of the weights."""
        return self.formats.storage(self.spec_or_model)

    @property
    def model_width(self) -> int:
        """Width of the hidden states between layers."""
        if isinstance(self.spec_or_model, AttentionSpec):
            return self.spec_or_model.model
        return self.spec_or_model.stacks[-1].model

    def operation_title(self, what: str, layers: AttentionGroup) -> str:
        """Return the label of an operation, with the kind and pattern of the attention if there are
        several.
        """
        label = what if layers.name == "attention" else f"{layers.name} {what}"
        patterns = {
            group.spec.pattern.text for group in self.attentions if group.name == layers.name
        }
        return f"{label}, {layers.spec.pattern.text}" if len(patterns) > 1 else label

    def estimate_step(
        self, chunks: Mapping[RequestChunk, int], shared_prefix: int = 0
    ) -> ServingStep:
        """Estimate one step with `count` requests of each chunk: decoded tokens (chunks of one
        token), and prompts.

        The decoding requests begin with `shared_prefix` equal tokens, whose cache is read once for
        all of them.
        """
        costs = {
            (group, chunk): chunk_cost(group, chunk, self.formats)
            for group in self.attentions
            for chunk in chunks
        }
        projections = [
            self._projection_operation(group, chunks, costs) for group in self.attentions
        ]
        return ServingStep(
            (*projections, *self._matrix_operations(chunks)),
            tuple(self._core_operations(chunks, costs, shared_prefix)),
        )

    def decode_step(self, requests: RequestBatch) -> ServingStep:
        """Estimate a step that decodes one token of every request; the lengths
        include that token.
        """
        return self.estimate_step(self._decode_chunks(requests), requests.shared_prefix)

    def mixed_step(
        self, decode_requests: RequestBatch | None, tokens: int, past: int = 0
    ) -> ServingStep:
        """Estimate a step that decodes one token of every request and prefills `tokens` tokens of
        another prompt.
        """
        chunks = self._decode_chunks(decode_requests) if decode_requests else {}
        prompt = RequestChunk(tokens, past, self.source_tokens)
        return self.estimate_step(
            chunks | {prompt: chunks.get(prompt, 0) + 1},
            decode_requests.shared_prefix if decode_requests else 0,
        )

    def _decode_chunks(self, requests: RequestBatch) -> dict[RequestChunk, int]:
        return {
            RequestChunk(1, length - 1, self.source_tokens): times
            for length, times in requests.counts_by_length
        }

    def first_token_seconds(
        self, prompt: int, chunk: int, other_requests: RequestBatch | None = None
    ) -> float:
        """Lower bound of the time to first token, if the prompt is prefilled in chunks while others
        are decoded.
        """
        if chunk < 1 or prompt < 1 or -(-prompt // chunk) > MAX_STEPS:
            min_chunk = max(1, -(-prompt // MAX_STEPS))
            fact = (
                f"cannot prefill a prompt of {prompt:,} tokens in chunks of {chunk:,}: it "
                f"takes at most {MAX_STEPS:,}"
            )
            raise SpecError(f"{fact} steps; give a chunk of {min_chunk:,} or more")
        starts = range(0, prompt, chunk)
        return sum(
            self.mixed_step(other_requests, min(chunk, prompt - past), past).seconds
            for past in starts
        )

    def compute_bound_tokens(self) -> int | None:
        """Number of tokens per step from which products with weights are compute-bound; None if
        they never are.
        """
        chunk = RequestChunk(1, 0, self.source_tokens)
        costs = {
            (group, chunk): chunk_cost(group, chunk, self.formats) for group in self.attentions
        }

        weights = [
            weight for group in (*self.attentions, *self.matrices) for weight in group.weights
        ]
        dtype = self.storage.product_dtype(weights, self.formats.compute, self.device)

        def is_compute_bound(tokens: int) -> bool:
            chunks = {chunk: tokens}
            operations = [
                self._projection_operation(group, chunks, costs) for group in self.attentions
            ]
            operations += self._matrix_operations(chunks)
            compute_seconds = (
                sum(operation.flops for operation in operations) / self.device.flops[dtype]
            )
            return (
                compute_seconds
                >= sum(operation.moved for operation in operations) / self.device.bandwidth
            )

        return first_where(is_compute_bound)

    def core_dominates_from(self, batch: int) -> int | None:
        """Context length from which the cores take longer than products with weights; None if they
        never do.
        """

        def dominates(context: int) -> bool:
            step = self.decode_step(RequestBatch.uniform(batch, context))
            core_seconds = sum(operation.seconds for operation in step.core_operations)
            return core_seconds >= sum(operation.seconds for operation in step.weight_operations)

        return first_where(dominates)

    def _projection_operation(
        self, group: AttentionGroup, chunks: Mapping[RequestChunk, int], costs: ChunkCosts
    ) -> RooflineOperation:
        tokens = sum(chunk.tokens * times for chunk, times in chunks.items())
        weights = self.storage.total_bytes(group.weights)
        flops = sum(costs[group, chunk].weight_flops * times for chunk, times in chunks.items())
        moved = weights + dtype_bytes(self.formats.compute) * tokens * 2 * group.spec.model
        title = self.operation_title("projections", group)
        return self._roofline_operation(title, (flops, moved), group.num_layers, group.weights)

    def _matrix_operations(self, chunks: Mapping[RequestChunk, int]) -> Iterator[RooflineOperation]:
        num_tokens = sum(chunk.tokens * times for chunk, times in chunks.items())
        num_requests = sum(chunks.values())
        for group in self.matrices:
            tokens = (
                num_requests if group.name == "head" else num_tokens
            )  # logits of the last token of each request
            weights = group.bytes_moved(tokens, self.storage)
            moved = weights + dtype_bytes(self.formats.compute) * tokens * group.numbers_per_token
            yield self._roofline_operation(
                group.name, (group.flops(tokens), moved), group.num_layers, group.weights
            )

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
                flops = sum(
                    costs[group, chunk].core_flops * times for chunk, times in phase_chunks.items()
                )
                moved = sum(
                    costs[group, chunk].bytes_moved * times for chunk, times in phase_chunks.items()
                )
                if phase == "decode":
                    moved -= self._saved_prefix_bytes(group, phase_chunks, shared_prefix)
                name = f"{self.operation_title('core', group)}, {phase}"
                yield self._roofline_operation(name, (flops, moved), group.num_layers)

    def _saved_prefix_bytes(
        self, group: AttentionGroup, chunks: Mapping[RequestChunk, int], shared_prefix: int
    ) -> int:
        """Bytes that are not read because the complete pages of a shared prefix are read once for
        all requests.
        """
        count = self.allocator.num_shared_slots(KeyRetention(0, None), shared_prefix, shared_prefix)
        prefix_bytes = {
            chunk: prefix_bytes_read(group, chunk, count, self.formats) for chunk in chunks
        }
        total = sum(prefix_bytes[chunk] * times for chunk, times in chunks.items())
        return total - max(prefix_bytes.values(), default=0)

    def _roofline_operation(
        self,
        name: str,
        flops_and_bytes: tuple[int, int],
        num_layers: int,
        weights: Sequence[WeightSpec] = (),
    ) -> RooflineOperation:
        flops, moved = flops_and_bytes
        dtype = self.storage.product_dtype(weights, self.formats.compute, self.device)
        seconds = self.device.min_seconds(flops, moved, dtype)
        bound = self.device.limiting_resource(flops, moved, dtype)
        if num_layers > 1 and not isinstance(self.spec_or_model, AttentionSpec):
            name = f"{num_layers:,} x {name}"
        return RooflineOperation(
            name, num_layers * flops, num_layers * moved, num_layers * seconds, bound
        )


def first_where(holds: Callable[[int], bool]) -> int | None:
    """Return the least whole number from 1 at which a monotonic condition becomes true; None if it
    never does.

    >>> first_where(lambda n: n * n >= 50), first_where(lambda n: False)
    (8, None)
    """
    first = bisect_left(range(1, MAX_SIZE + 1), True, key=holds) + 1
    return first if first <= MAX_SIZE else None

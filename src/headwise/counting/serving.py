"""Answering many requests at once: one step, its parts on the roofline, and how often a token comes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..blueprint import ModelSpec
from ..boxes import KeyRetention
from ..errors import SpecError
from ..spec import AttentionSpec
from .allocators import IDEAL_ALLOCATOR, CacheAllocator, RequestBatch
from .asking import ChunkCost, RequestChunk, chunk_cost, prefix_bytes_read
from .calls import MAX_SIZE
from .devices import DEFAULT_FORMATS, Device, NumberFormats, dtype_bytes, stored_bytes
from .layers import WeightMemory, AttentionGroup, WeightMatrixGroup, group_attentions, weight_memory, group_matrices
from .operations import RooflineOperation

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
    >>> llama = ServingCost(hw.design(preset="gqa", model=4096, heads=32, kv=8), Device.named("h200"), layers=32)
    >>> step = llama.decode_step(RequestBatch.alike(16, 8192))
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
        told = {(each, request): chunk_cost(each, request, self.formats) for each in self.attentions for request in chunks}
        projections = [self._projection_operations(each, chunks, told) for each in self.attentions]
        return ServingStep((*projections, *self._matrix_operations(chunks)), tuple(self._core_operations(chunks, told, shared_prefix)))

    def decode_step(self, requests: RequestBatch) -> ServingStep:
        """A step in which every row gets one token; lengths count it."""
        return self.estimate_step({RequestChunk(1, length - 1, self.source_tokens): times for length, times in requests.counts_by_length}, requests.shared_prefix)

    def mixed_step(self, decode_requests: RequestBatch | None, tokens: int, past: int = 0) -> ServingStep:
        """A step in which every row gets one token, and a prompt of another so many behind what was taken of it."""
        requests = {RequestChunk(1, length - 1, self.source_tokens): times for length, times in (decode_requests.counts_by_length if decode_requests else ())}
        prompt = RequestChunk(tokens, past, self.source_tokens)
        return self.estimate_step(requests | {prompt: requests.get(prompt, 0) + 1}, decode_requests.shared_prefix if decode_requests else 0)

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
            every = [self._projection_operations(each, requests, told) for each in self.attentions] + [*self._matrix_operations(requests)]
            products = sum(one.flops for one in every) / self.device.flops[self.formats.compute]
            return products >= sum(one.moved for one in every) / self.device.bandwidth

        return first_where(waits)

    def core_dominates_from(self, batch: int) -> int | None:
        """Tokens of context from which cores take longer than products with weights; None when they never do."""

        def dominates(context: int) -> bool:
            step = self.decode_step(RequestBatch.uniform(batch, context))
            return sum(one.seconds for one in step.core_operations) >= sum(one.seconds for one in step.weight_operations)

        return first_where(dominates)

    def _projection_operations(self, layers: AttentionGroup, requests: Mapping[RequestChunk, int], told: ChunkCosts) -> RooflineOperation:
        tokens = sum(request.tokens * n for request, n in requests.items())
        weights = sum(stored_bytes(shape, self.formats.weights) for shape in layers.weight_shapes)
        flops = sum(told[layers, request].weight_flops * n for request, n in requests.items())
        moved = weights + dtype_bytes(self.formats.compute) * tokens * 2 * layers.spec.model
        return self._roofline_operation(self.operation_title("projections", layers), flops, moved, layers.num_layers)

    def _matrix_operations(self, requests: Mapping[RequestChunk, int]) -> Iterator[RooflineOperation]:
        tokens, answers = sum(request.tokens * n for request, n in requests.items()), sum(requests.values())
        for each in self.matrices:
            met = answers if each.name == "head" else tokens
            moved = each.bytes_moved(met, self.formats.weights) + dtype_bytes(self.formats.compute) * met * each.numbers_per_token
            yield self._roofline_operation(each.name, each.flops(met), moved, each.num_layers)

    def _core_operations(self, requests: Mapping[RequestChunk, int], told: ChunkCosts, shared: int) -> Iterator[RooflineOperation]:
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
        seconds, bound = self.device.min_seconds(flops, moved, maths), self.device.limiting_resource(flops, moved, maths)
        many = f"{times:,} x {name}" if times > 1 and not isinstance(self.spec_or_model, AttentionSpec) else name
        return RooflineOperation(many, times * flops, times * moved, times * seconds, bound)


def first_where(holds: Callable[[int], bool]) -> int | None:
    """The first whole number from 1 up at which something begins to hold, and holds from then on.

    >>> first_where(lambda n: n * n >= 50), first_where(lambda n: False)
    (8, None)
    """
    found = bisect_left(range(1, MAX_SIZE + 1), True, key=holds) + 1
    return found if found <= MAX_SIZE else None

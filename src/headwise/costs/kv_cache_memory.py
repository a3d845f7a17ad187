"""Memory of serving: bytes of weights and KV cache, and the layers of a spec or model in groups of
equal ones.

`group_attentions` and `group_matrices` collect equal layers; `weight_memory` and `kv_cache_bytes`
give bytes. A `RequestBatch` says how long the sequences in memory are, a `CacheAllocator` how
memory is allocated to them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..cache import split_by_retention
from ..errors import SpecError, suggest
from ..interfaces.axis_layout import AxisLayout
from ..masking.key_intervals import KeyRetention
from ..model_spec import (
    ApproximateAttention,
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerRun,
    ModelSpec,
    WeightSpec,
)
from ..model_spec.components import add_prefix, expected_distinct
from ..model_spec.model import MAX_LAYERS
from ..spec.attention_spec import AttentionSpec
from . import count_parameters
from .flops import CostTerm
from .roofline import STORAGE_BYTES, NumberFormats, stored_bytes
from .weight_storage import (
    SINGLE_LAYER,
    WeightStorage,
    group_stored_alike,
    is_routed,
    list_attention_weights,
    list_feed_weights,
    list_head_matrices,
    list_mixer_weights,
    total_weight_bytes,
)
from .workload import MAX_SIZE

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AttentionGroup:
    """Equal attention layers; `kv_source` is "own" for self-attention, or "source" for
    cross-attention.
    """

    name: str
    spec: AttentionSpec
    num_layers: int = 1
    kv_source: str = "own"
    place: str = SINGLE_LAYER  # the first of the layers, by which weights are named

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        """The tensors of one layer that a decode step reads.

        Cross-attention projects the keys and values of the source only once, so those projections
        are left out.
        """
        weights = list_attention_weights(self.spec, self.place)
        if self.kv_source != "source":
            return weights
        unread = {
            f"{self.place}.{name}"
            for name, param in self.spec.params().items()
            if param.applied == "source"
        }
        return tuple(weight for weight in weights if weight.name not in unread)


@dataclass(frozen=True)
class WeightMatrixGroup:
    """Equal layers outside attention: tensors that every token passes through, and experts that
    some do.
    """

    name: str
    num_layers: int
    dense_weights: tuple[WeightSpec, ...]
    expert_weights: tuple[WeightSpec, ...] = ()  # of all experts
    num_experts: int = 0
    num_active_experts: int = 0
    hidden_numbers: int = (
        0  # values per token that are in memory at once inside the layer, including its input
    )

    def flops(self, tokens: int) -> int:
        """FLOPs of one layer on this number of tokens: two per matrix element and token."""
        active_elements = _num_matrix_elements(weight.shape for weight in self.dense_weights)
        active_elements += self.num_active_experts * _num_matrix_elements(self._expert_shapes)
        return 2 * tokens * active_elements

    def bytes_moved(self, tokens: int, storage: WeightStorage) -> int:
        """Bytes of the weights that one layer reads, with the expected number of different experts.

        >>> from headwise.model_spec.components import make_weight
        >>> up = make_weight(
        ...     "decoder.0.feed.each.up", "expert hidden model", expert=4, hidden=2, model=5
        ... )
        >>> experts = WeightMatrixGroup(
        ...     "experts", 1, (), (up,), num_experts=4, num_active_experts=2
        ... )
        >>> [
        ...     experts.bytes_moved(tokens, WeightStorage("fp32")) for tokens in (1, 2, 3)
        ... ]  # 40 bytes per expert
        [80, 120, 140]
        """
        dense = storage.total_bytes(self.dense_weights)
        if not self.num_experts:
            return dense
        experts_read = expected_distinct(self.num_experts, self.num_active_experts, tokens)
        return dense + round(
            storage.total_bytes(self.expert_weights) * experts_read / self.num_experts
        )

    @property
    def numbers_per_token(self) -> int:
        """Number of input and output values of all matrices, per token."""
        dense = _input_output_sizes(weight.shape for weight in self.dense_weights)
        return dense + self.num_active_experts * _input_output_sizes(self._expert_shapes)

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        """All tensors of one layer."""
        return (*self.dense_weights, *self.expert_weights)

    @property
    def _expert_shapes(self) -> Shapes:
        return tuple(weight.shape[1:] for weight in self.expert_weights)


def group_attentions(
    spec_or_model: AttentionSpec | ModelSpec, num_layers: int = 1
) -> tuple[AttentionGroup, ...]:
    """Return the attention layers that run in a decode step, equal ones as one group.

    These are `num_layers` layers of a spec, or those of a model's last stack.

    >>> import headwise as hw
    >>> [
    ...     (group.name, group.num_layers)
    ...     for group in group_attentions(hw.design(preset="gqa"), num_layers=32)
    ... ]
    [('attention', 32)]
    """
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise SpecError(
            f"layers must be a whole number, got {num_layers!r}; give 1 to {MAX_LAYERS}"
        )
    if isinstance(spec_or_model, AttentionSpec):
        kv_source = "own" if spec_or_model.source is None else "source"
        return (AttentionGroup("attention", spec_or_model, num_layers, kv_source),)
    if num_layers != 1:
        raise SpecError(
            f"cannot set layers={num_layers}: {spec_or_model.name} is a model with layers; leave "
            "layers out"
        )
    if spec_or_model.kind not in ("decoder", "encoder-decoder"):
        fact = (
            f"{spec_or_model.name} is of kind {spec_or_model.kind} and cannot decode token by token"
        )
        raise SpecError(f"{fact}; give a decoder")
    stack = spec_or_model.stacks[-1]
    layers = [
        (depth, item)
        for depth, block in enumerate(stack.layers)
        for item in block.attention_specs.items()
    ]
    groups = group_stored_alike(stack, layers, spec_or_model.quantization)
    return tuple(
        AttentionGroup(
            name,
            spec,
            times,
            "source" if name == "cross" else "own",
            f"{stack.name}.{depth}.{name}",
        )
        for depth, (name, spec), times in groups
    )


def group_matrices(spec_or_model: AttentionSpec | ModelSpec) -> tuple[WeightMatrixGroup, ...]:
    """Return the mixers and feed-forwards of a model's last stack, equal ones as one group, and its
    first head.
    """
    if isinstance(spec_or_model, AttentionSpec):
        return ()
    stack = spec_or_model.stacks[-1]
    layers = list(enumerate(stack.layers))
    feeds = [(depth, block.feed) for depth, block in layers if block.feed is not None]
    groups = group_stored_alike(stack, feeds, spec_or_model.quantization)
    mixers = [(depth, block.mixer) for depth, block in layers if block.mixer is not None]
    return (
        *(
            WeightMatrixGroup(
                "mixer",
                times,
                list_mixer_weights(mixer, stack.model, f"{stack.name}.{depth}.mixer"),
                hidden_numbers=mixer.hidden_vectors * stack.model,
            )
            for depth, mixer, times in group_stored_alike(stack, mixers, spec_or_model.quantization)
        ),
        *(
            _feed_forward_matrices(
                feed, times, list_feed_weights(feed, stack.model, f"{stack.name}.{depth}.feed")
            )
            for depth, feed, times in groups
        ),
        *_head_matrices(spec_or_model),
    )


def _feed_forward_matrices(
    feed: FeedForwardSpec | ExpertsSpec, times: int, weights: tuple[WeightSpec, ...]
) -> WeightMatrixGroup:
    model = next(weight.axis_sizes["model"] for weight in weights if "model" in weight.axis_sizes)
    if isinstance(feed, FeedForwardSpec):
        return WeightMatrixGroup(
            "feed-forward", times, weights, hidden_numbers=model + _hidden_numbers(feed)
        )
    routed = feed.active * _hidden_numbers(feed.each)
    shared = _hidden_numbers(feed.shared) if feed.shared else 0
    return WeightMatrixGroup(
        "experts",
        times,
        dense_weights=tuple(weight for weight in weights if not is_routed(weight)),
        expert_weights=tuple(weight for weight in weights if is_routed(weight)),
        num_experts=feed.count,
        num_active_experts=feed.active,
        hidden_numbers=model + max(routed, shared),
    )


def _hidden_numbers(feed: FeedForwardSpec) -> int:
    """Hidden values per token: the output of the up projection, and of the gate if there is one."""
    return feed.hidden * (len(feed.matrix_layouts) - 1)


def _head_matrices(model: ModelSpec) -> Iterator[WeightMatrixGroup]:
    for head in model.heads[:1]:
        width = model.stacks[-1].model
        own = [
            weight
            for weight in add_prefix(f"head.{head.name}", "head", head.weights(width))
            if weight.trainable
        ]
        matrices = {weight.name: weight for weight in list_head_matrices(head, width)}
        tied_table = [matrices["embedding.weight"]] if head.table else []
        yield WeightMatrixGroup("head", 1, (*own, *tied_table), hidden_numbers=width + head.outputs)


def live_numbers(spec: AttentionSpec) -> int:
    """Lower bound of the values per token inside an attention layer: input, queries, kv entries and
    head outputs.
    """
    core = spec.core
    kv_entry = sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())
    return (
        spec.model
        + len(core.key_head_of_query) * core.dim
        + kv_entry
        + len(core.value_head_of_row) * core.vdim
    )


class WeightMemory(NamedTuple):
    """Number of parameters, and their bytes."""

    num_parameters: int
    bytes: int


def weight_memory(
    spec_or_model: AttentionSpec | ModelSpec, storage: WeightStorage, num_layers: int = 1
) -> WeightMemory:
    """Return the parameters of `num_layers` layers of a spec, or of a whole model, and their bytes
    as stored.

    >>> import headwise as hw
    >>> weight_memory(
    ...     hw.design(preset="gqa", model=4096, heads=32, kv=8),
    ...     WeightStorage("bf16"),
    ...     num_layers=32,
    ... )
    WeightMemory(num_parameters=1342177280, bytes=2684354560)
    """
    times = num_layers if isinstance(spec_or_model, AttentionSpec) else 1
    num_bytes = total_weight_bytes(spec_or_model, storage)
    return WeightMemory(times * count_parameters(spec_or_model), times * num_bytes)


def map_attention_specs(
    spec_or_model: AttentionSpec | ModelSpec, change: Callable[[AttentionSpec], AttentionSpec]
) -> AttentionSpec | ModelSpec:
    """Apply a function to a spec, or to every self-attention spec in the last stack of a model."""
    if isinstance(spec_or_model, AttentionSpec):
        return change(spec_or_model)
    *earlier, last = spec_or_model.stacks
    runs = tuple(
        LayerRun(run.times, tuple(_map_block_specs(block, change) for block in run.blocks))
        for run in last.runs
    )
    return replace(spec_or_model, stacks=(*earlier, replace(last, runs=runs)))


def _map_block_specs(
    block: BlockSpec, change: Callable[[AttentionSpec], AttentionSpec]
) -> BlockSpec:
    attention = block.attention
    if isinstance(attention, ApproximateAttention):
        return replace(block, attention=replace(attention, like=change(attention.like)))
    return replace(block, attention=attention and change(attention))


def _num_matrix_elements(shapes: Iterable[tuple[int, ...]]) -> int:
    """Number of elements of the matrices; vectors (biases, scales) do not take part in products."""
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def _input_output_sizes(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape[:-1]) + shape[-1] for shape in shapes if len(shape) > 1)


# --- KV cache memory ------------------------------------------------------------------------------

MIN_STATE_BYTES = 4  # of each value of a recurrent state, which sums over thousands of tokens


class AllocationPolicy(NamedTuple):
    """Whether an allocator frees tokens that left the window, and whether it stores a shared prefix
    once.
    """

    frees_evicted: bool
    shares_prefix: bool


ALLOCATION_POLICIES = {
    "ideal": AllocationPolicy(frees_evicted=True, shares_prefix=True),
    "ring": AllocationPolicy(frees_evicted=True, shares_prefix=False),
    "paged": AllocationPolicy(frees_evicted=True, shares_prefix=True),
    "unified": AllocationPolicy(frees_evicted=False, shares_prefix=True),
}


@dataclass(frozen=True)
class CacheAllocator:
    """How the memory of the KV cache is allocated.

    - "ideal": one slot for each token that later queries can still read;
    - "ring": as many slots, but a ring buffer for each sequence, which shares no prefix, as in
      `layer.cache(...)`;
    - "paged": pages of `page_size` tokens, freed when all of their tokens have left the window;
    - "unified": the same pages for all layers, so that a window frees nothing.

    >>> window = KeyRetention(first=0, last=512)  # keeps the last 512 tokens, and no first tokens
    >>> [
    ...     CacheAllocator.from_text(text).num_slots(window, 1000)
    ...     for text in ("ideal", "paged(16)", "unified")
    ... ]
    [512, 528, 1000]
    """

    kind: str = "ideal"
    page_size: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ALLOCATION_POLICIES:
            raise SpecError(
                f"there is no allocator {self.kind!r}; {suggest(self.kind, ALLOCATION_POLICIES)}"
            )
        if type(self.page_size) is not int or not 1 <= self.page_size <= MAX_SIZE:
            fact = (
                "the page size of an allocator must be at least 1, got "
                f"{self.kind}({self.page_size!r})"
            )
            raise SpecError(f"{fact}; use paged(16), for example")
        if self.page_size > 1 and self.kind in ("ideal", "ring"):
            raise SpecError(f"{self.kind} has no pages, got {self}; use paged({self.page_size})")

    @staticmethod
    def from_text(text: str) -> CacheAllocator:
        """Parse a text such as "paged(16)".

        >>> CacheAllocator.from_text("paged(16)")
        CacheAllocator(kind='paged', page_size=16)
        """
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(-?\d{1,30})\s*\))?\s*", text)
        if not match:
            raise SpecError(
                f"cannot read {text!r} as an allocator; write ideal, ring, paged(16) or unified"
            )
        kind, page_size = match.groups()
        if kind == "paged" and page_size is None:
            raise SpecError(
                "the allocator paged needs a page size in tokens; write paged(16), for example"
            )
        return CacheAllocator(kind, 1 if page_size is None else int(page_size))

    def __str__(self) -> str:
        return (
            f"{self.kind}({self.page_size})"
            if self.page_size > 1 or self.kind == "paged"
            else self.kind
        )

    def num_slots(self, memory: KeyRetention, length: int) -> int:
        """Number of slots that a sequence needs at most while it grows to this length.

        A window may begin within a page, and so spans one page more than it fills.
        """
        first, last = memory
        pages = _ceil_div(length, self.page_size)
        if ALLOCATION_POLICIES[self.kind].frees_evicted and last is not None:
            pages = min(
                pages, _ceil_div(first, self.page_size) + _ceil_div(last - 1, self.page_size) + 1
            )
        return pages * self.page_size

    def num_shared_slots(self, memory: KeyRetention, length: int, prefix: int) -> int:
        """Number of these slots that hold a shared prefix: its complete pages, as far as they are
        not freed.
        """
        if not ALLOCATION_POLICIES[self.kind].shares_prefix:
            return 0
        first, last = memory
        pages = min(prefix, length) // self.page_size
        if not ALLOCATION_POLICIES[self.kind].frees_evicted or last is None:
            return pages * self.page_size
        first_pages = min(pages, _ceil_div(first, self.page_size))
        num_freed = max(length - last, 0) // self.page_size  # pages before the window
        return (first_pages + max(0, pages - max(first_pages, num_freed))) * self.page_size


IDEAL_ALLOCATOR = CacheAllocator()


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True)
class RequestBatch:
    """The sequences in memory: pairs of length and count, the length of a prefix that all share,
    and of each source.

    >>> (
    ...     RequestBatch.uniform(16, 2048).num_requests,
    ...     RequestBatch.from_lengths([7, 9, 7]).counts_by_length,
    ... )
    (16, ((7, 2), (9, 1)))
    """

    counts_by_length: tuple[tuple[int, int], ...] = field(default=((2048, 1),))
    shared_prefix: int = 0
    source_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.counts_by_length:
            raise SpecError("a batch needs at least one request; give one length or more")
        for length, times in self.counts_by_length:
            _check_size("length", length, 1)
            _check_size("batch", times, 1)
        _check_size("shared", self.shared_prefix, 0)
        _check_size("source", self.source_tokens, 0)
        if self.shared_prefix > (shortest := min(length for length, _ in self.counts_by_length)):
            fact = (
                f"a shared prefix of {self.shared_prefix:,} tokens is longer than the shortest "
                "request"
            )
            raise SpecError(f"{fact}; share at most {shortest:,}")

    @staticmethod
    def uniform(batch: int, length: int, shared: int = 0, source: int = 0) -> RequestBatch:
        """Create a batch of `batch` requests of one length."""
        return RequestBatch(((length, batch),), shared, source)

    @staticmethod
    def from_lengths(lengths: Iterable[int], shared: int = 0, source: int = 0) -> RequestBatch:
        """Create a batch with one request of each of these lengths."""
        counts: dict[int, int] = {}
        for length in lengths:
            counts[length] = counts.get(length, 0) + 1
        return RequestBatch(tuple(counts.items()), shared, source)

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return sum(times for _, times in self.counts_by_length)


def _check_size(name: str, size: object, least: int) -> None:
    if type(size) is not int or not least <= size <= MAX_SIZE:
        raise SpecError(f"{name} must be a whole number from {least} to {MAX_SIZE}, got {size!r}")


def list_cache_terms(
    groups: Iterable[AttentionGroup],
    requests: RequestBatch,
    allocator: CacheAllocator,
    formats: NumberFormats,
) -> list[CostTerm]:
    """Return the bytes of the KV cache, one term for each group of layers.

    Two layers with a window of 512 and one with full causal attention, each with one head of 64
    channels, in bfloat16:

    >>> import headwise as hw
    >>> spec = hw.design(model=64, heads=1, pattern="causal")
    >>> local = hw.design(model=64, heads=1, pattern="window(512)")
    >>> layers = (AttentionGroup("local", local, 2), AttentionGroup("full", spec))
    >>> for term in list_cache_terms(
    ...     layers, RequestBatch.uniform(3, 1000), CacheAllocator(), NumberFormats()
    ... ):
    ...     print(*term)
    local 2 layers x 1,536 tokens x 256 bytes 786432
    full 1 layer x 3,000 tokens x 256 bytes 768000
    """
    if requests.shared_prefix and not ALLOCATION_POLICIES[allocator.kind].shares_prefix:
        fact = (
            f"the allocator {allocator} cannot share {requests.shared_prefix:,} tokens of a "
            "common prefix"
        )
        raise SpecError(f"{fact}; use paged(16)")
    return [_cache_term(group, requests, allocator, formats) for group in groups]


def kv_cache_bytes(
    spec_or_model: AttentionSpec | ModelSpec,
    requests: RequestBatch,
    allocator: str = "ideal",
    dtype: str = "bf16",
    num_layers: int = 1,
) -> int:
    """Bytes of the KV cache of `num_layers` layers of a spec, or of a model, for these requests.

    Llama-3-8B caches 131,072 bytes per token:

    >>> import headwise as hw
    >>> kv_cache_bytes(
    ...     hw.design(preset="gqa", model=4096, heads=32, kv=8),
    ...     RequestBatch.uniform(1, 1),
    ...     num_layers=32,
    ... )
    131072
    """
    compute_dtype = dtype if dtype != "int8" else "bf16"
    terms = list_cache_terms(
        group_attentions(spec_or_model, num_layers),
        requests,
        CacheAllocator.from_text(allocator),
        NumberFormats(compute_dtype, cache=dtype),
    )
    return sum(term.value for term in terms)


def _cache_term(
    group: AttentionGroup, requests: RequestBatch, allocator: CacheAllocator, formats: NumberFormats
) -> CostTerm:
    spec = group.spec
    if group.kv_source == "source":
        if not requests.source_tokens:
            raise SpecError(
                "cross-attention reads a source whose length is not given; give source, in tokens"
            )
        slots_per_request = allocator.num_slots(KeyRetention(0, None), requests.source_tokens)
        return _slots_term(group, requests.num_requests * slots_per_request, formats)
    if spec.pattern.tokens_before_decode is None:
        raise SpecError(
            f"pattern {spec.pattern.text} reads future tokens and cannot decode token by token "
            "with a cache; "
            "use a causal pattern such as causal()"
        )
    if spec.is_recurrent:
        bytes_per_state = state_bytes(spec, formats.cache)
        value = group.num_layers * requests.num_requests * bytes_per_state
        text = (
            f"{_count_layers(group)} x {requests.num_requests:,} states x {bytes_per_state:,} bytes"
        )
        return CostTerm(group.name, text, value)
    if allocator.kind != "unified" and (head_groups := split_by_retention(spec)):
        terms = [
            _cache_term(replace(group, spec=own.spec), requests, allocator, formats)
            for own in head_groups
        ]
        return CostTerm(
            group.name,
            " + ".join(term.formula for term in terms),
            sum(term.value for term in terms),
        )
    return _slots_term(group, _total_slots(spec.pattern.retention, requests, allocator), formats)


def _slots_term(group: AttentionGroup, slots: int, formats: NumberFormats) -> CostTerm:
    bytes_per_token = cache_bytes_per_token(group.spec, formats.cache)
    text = f"{_count_layers(group)} x {slots:,} tokens x {bytes_per_token:,} bytes"
    return CostTerm(group.name, text, group.num_layers * slots * bytes_per_token)


def _count_layers(group: AttentionGroup) -> str:
    return f"{group.num_layers:,} layer{'s' if group.num_layers > 1 else ''}"


def _total_slots(memory: KeyRetention, requests: RequestBatch, allocator: CacheAllocator) -> int:
    """Number of slots of all requests; slots of a shared prefix count once, as long as some request
    needs them.
    """
    total = sum(
        times * allocator.num_slots(memory, length) for length, times in requests.counts_by_length
    )
    if not requests.shared_prefix:
        return total
    shared = [
        (allocator.num_shared_slots(memory, length, requests.shared_prefix), times)
        for length, times in requests.counts_by_length
    ]
    return total - sum(times * slots for slots, times in shared) + max(slots for slots, _ in shared)


def cache_bytes_per_token(spec: AttentionSpec, dtype: str) -> int:
    """Bytes that one layer caches per token.

    >>> import headwise as hw
    >>> gqa = hw.design(preset="gqa", model=4096, heads=32, kv=8)
    >>> (
    ...     cache_bytes_per_token(gqa, "bf16"),
    ...     cache_bytes_per_token(gqa, "int8"),
    ... )  # 2 x 8 heads x (128 + a scale of 4)
    (4096, 2112)
    """
    return sum(stored_bytes(shape, dtype) for shape in spec.kv_entry_shapes().values())


def state_bytes(spec: AttentionSpec, dtype: str) -> int:
    """Bytes of the recurrent state of one layer, with at least 4 bytes per value."""
    return sum(
        max(STORAGE_BYTES[dtype], MIN_STATE_BYTES) * layout.numel(sizes)
        for layout, sizes in _state_layouts(spec)
    )


def _state_layouts(spec: AttentionSpec) -> Iterable[tuple[AxisLayout, Mapping[str, int]]]:
    if spec.recurrent_part is None:
        return ()
    part = spec.recurrent_part[1]
    return ((layout, spec.sizes_of(part)) for layout in part.state_layouts(spec).values())


# --- Lengths of requests --------------------------------------------------------------------------

MAX_REQUESTS = 100_000  # requests whose lengths are sampled
# Names of the parameters of each distribution, and a function that samples a length.
LENGTH_DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "uniform": (("least", "most"), lambda generator, least, most: generator.randint(least, most)),
    "exponential": (("mean",), lambda generator, mean: generator.expovariate(1 / mean)),
}
LENGTHS_SYNTAX = "write 100,2000,30000 or uniform(100, 4000) or exponential(1000)"


def parse_lengths(text: str, count: int, seed: int = 0) -> list[int]:
    """Parse the lengths of requests: a list, or a distribution from which `count` lengths of at
    least 1 are sampled.

    >>> parse_lengths("100, 2000", count=1), parse_lengths("uniform(3, 5)", count=6, seed=1)
    ([100, 2000], [3, 5, 3, 4, 3, 4])
    """
    if match := re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text):
        return _sample_lengths(match[1], _parse_sizes(match[2], text), count, seed)
    return _parse_sizes(text, text)


def _sample_lengths(name: str, args: list[int], count: int, seed: int) -> list[int]:
    if name not in LENGTH_DISTRIBUTIONS:
        raise SpecError(
            f"there is no distribution of lengths {name!r}; {suggest(name, LENGTH_DISTRIBUTIONS)}"
        )
    parameters, sample = LENGTH_DISTRIBUTIONS[name]
    if len(args) != len(parameters) or args != sorted(args):
        raise SpecError(
            f"cannot sample lengths from {name}{tuple(args)}; write {name}({', '.join(parameters)})"
        )
    if not 1 <= count <= MAX_REQUESTS:
        raise SpecError(f"cannot sample {count:,} lengths; sample from 1 to {MAX_REQUESTS:,}")
    generator = random.Random(seed)
    return [max(1, round(sample(generator, *args))) for _ in range(count)]


def _parse_sizes(text: str, full_text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,19}", word) and 1 <= int(word) <= MAX_SIZE for word in words):
        raise SpecError(
            f"cannot read {full_text!r} as lengths of at least 1 token; {LENGTHS_SYNTAX}"
        )
    return [int(word) for word in words]

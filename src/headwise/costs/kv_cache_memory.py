"""A spec or a model as those see it who serve it: attentions that are alike, other matrices, and all numbers."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..errors import SpecError, suggest
from ..interfaces.axis_layout import AxisLayout
from ..masking.key_intervals import KeyRetention
from ..model_spec import ApproximateAttention, BlockSpec, ExpertsSpec, FeedForwardSpec, LayerRun, ModelSpec
from ..model_spec.model import MAX_LAYERS
from ..spec.attention_spec import AttentionSpec
from .flops import CostTerm
from .roofline import STORAGE_BYTES, NumberFormats, stored_bytes
from .workload import MAX_SIZE

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AttentionGroup:
    """Attentions that are alike: so many layers have one. `reads` says of whom: "own" tokens, or a "source"."""

    name: str
    spec: AttentionSpec
    num_layers: int = 1
    kv_source: str = "own"

    @property
    def weight_shapes(self) -> Shapes:
        """The learned tensors of one that answered tokens meet; of a source, only its reading."""
        params, shapes = self.spec.params().items(), self.spec.shapes()
        early = "source" if self.kv_source == "source" else None
        return tuple(shapes[name] for name, p in params if p.trainable and (not p.applied or p.applied != early))


@dataclass(frozen=True)
class WeightMatrixGroup:
    """What tokens meet outside attention: tensors that each token meets, and `active` of `count` experts."""

    name: str
    num_layers: int
    dense_shapes: Shapes
    expert_shapes: Shapes = ()
    num_experts: int = 0
    num_active_experts: int = 0
    hidden_numbers: int = 0  # numbers of one token that are alive in between, its input among them

    def flops(self, tokens: int) -> int:
        """Two for each number of a matrix and each token that meets it."""
        return (
            2
            * tokens
            * (
                _num_matrix_elements(self.dense_shapes)
                + self.num_active_experts * _num_matrix_elements(self.expert_shapes)
            )
        )

    def bytes_moved(self, tokens: int, dtype: str) -> int:
        """Bytes of the tensors that so many tokens meet, if no two choose the same expert while others are idle.

        >>> experts = WeightMatrixGroup(
        ...     "experts", 1, (), ((2, 5),), num_experts=4, num_active_experts=2
        ... )  # 40 bytes each
        >>> [experts.bytes_moved(tokens, "fp32") for tokens in (1, 2, 3)]
        [80, 160, 160]
        """
        return _stored_bytes(self.dense_shapes, dtype) + min(
            self.num_experts, tokens * self.num_active_experts
        ) * _stored_bytes(self.expert_shapes, dtype)

    @property
    def numbers_per_token(self) -> int:
        """Numbers of one token that go into every matrix and come out of it."""
        return _input_output_sizes(self.dense_shapes) + self.num_active_experts * _input_output_sizes(
            self.expert_shapes
        )


def group_attentions(spec_or_model: AttentionSpec | ModelSpec, num_layers: int = 1) -> tuple[AttentionGroup, ...]:
    """The attentions that answer a token, alike ones together: a spec so many times, or a model's last stack.

    >>> import headwise as hw
    >>> [(each.name, each.num_layers) for each in group_attentions(hw.design(preset="gqa"), num_layers=32)]
    [('attention', 32)]
    """
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise SpecError(f"layers={num_layers!r} is no number of layers; give 1 to {MAX_LAYERS}")
    if isinstance(spec_or_model, AttentionSpec):
        return (
            AttentionGroup("attention", spec_or_model, num_layers, "own" if spec_or_model.source is None else "source"),
        )
    if num_layers != 1:
        raise SpecError(f"layers={num_layers}, but {spec_or_model.name} says its own layers; leave layers out")
    if spec_or_model.kind not in ("decoder", "encoder-decoder"):
        raise SpecError(
            f"{spec_or_model.name} is of kind {spec_or_model.kind} and answers no token by token; give a decoder"
        )
    stack = spec_or_model.stacks[-1]
    found = Counter((name, spec) for block in stack.layers for name, spec in block.attention_specs.items())
    return tuple(
        AttentionGroup(name, spec, times, "source" if name == "cross" else "own")
        for (name, spec), times in found.items()
    )


def group_matrices(spec_or_model: AttentionSpec | ModelSpec) -> tuple[WeightMatrixGroup, ...]:
    """Feed-forwards of a model's last stack, alike ones together, and the first of its heads; a spec has none."""
    if isinstance(spec_or_model, AttentionSpec):
        return ()
    stack = spec_or_model.stacks[-1]
    feeds = Counter(block.feed for block in stack.layers if block.feed is not None)
    return (
        *(_feed_forward_matrices(feed, times, stack.model) for feed, times in feeds.items()),
        *_head_matrices(spec_or_model),
    )


def _feed_forward_matrices(feed: FeedForwardSpec | ExpertsSpec, times: int, model: int) -> WeightMatrixGroup:
    if isinstance(feed, FeedForwardSpec):
        return WeightMatrixGroup(
            "feed-forward", times, _feed_forward_shapes(feed, model), hidden_numbers=model + _hidden_numbers(feed)
        )
    always = tuple(w.shape for w in feed.weights(model) if not w.name.startswith("each."))
    inside = model + max(feed.active * _hidden_numbers(feed.each), _hidden_numbers(feed.shared) if feed.shared else 0)
    each = _feed_forward_shapes(feed.each, model)
    return WeightMatrixGroup("experts", times, always, each, feed.count, feed.active, inside)


def _hidden_numbers(feed: FeedForwardSpec) -> int:
    """Numbers of one token behind the first maps: what goes up, and beside it what gates it."""
    return feed.hidden * (len(feed.matrix_layouts) - 1)


def _feed_forward_shapes(feed: FeedForwardSpec, model: int) -> Shapes:
    return tuple(w.shape for w in feed.weights(model))


def _head_matrices(model: ModelSpec) -> Iterator[WeightMatrixGroup]:
    for head in model.heads[:1]:
        width = head.transform.hidden if head.transform else model.stacks[-1].model
        table = ((head.outputs, width),) if head.table else ()
        own = tuple(w.shape for w in head.weights(model.stacks[-1].model) if w.trainable)
        inside = model.stacks[-1].model + head.outputs
        yield WeightMatrixGroup("head", 1, (*own, *table), hidden_numbers=inside)


def live_numbers(spec: AttentionSpec) -> int:
    """Numbers of one token inside an attention, at least: its input, queries, what is remembered, what heads give."""
    core = spec.core
    kept = sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())
    return spec.model + len(core.key_head_of_query) * core.dim + kept + len(core.value_head_of_row) * core.vdim


class WeightMemory(NamedTuple):
    """Learned numbers, and the bytes they take."""

    num_parameters: int
    bytes: int


def weight_memory(spec_or_model: AttentionSpec | ModelSpec, dtype: str, num_layers: int = 1) -> WeightMemory:
    """All learned numbers of a spec in so many layers, or of a model: embeddings and encoders too.

    >>> import headwise as hw
    >>> weight_memory(hw.design(preset="gqa", model=4096, heads=32, kv=8), "bf16", num_layers=32)
    WeightMemory(num_parameters=1342177280, bytes=2684354560)
    """
    if isinstance(spec_or_model, AttentionSpec):
        shapes, times = _learned_shapes(spec_or_model), num_layers
    else:
        shapes, times = tuple(w.shape for w in spec_or_model.weights() if w.trainable), 1
    return WeightMemory(
        times * sum(map(math.prod, shapes)), times * sum(stored_bytes(shape, dtype) for shape in shapes)
    )


def map_attention_specs(
    spec_or_model: AttentionSpec | ModelSpec, change: Callable[[AttentionSpec], AttentionSpec]
) -> AttentionSpec | ModelSpec:
    """The same with every attention that remembers its own tokens changed so."""
    if isinstance(spec_or_model, AttentionSpec):
        return change(spec_or_model)
    *before, last = spec_or_model.stacks
    runs = tuple(
        LayerRun(run.times, tuple(_map_block_specs(block, change) for block in run.blocks)) for run in last.runs
    )
    return replace(spec_or_model, stacks=(*before, replace(last, runs=runs)))


def _map_block_specs(block: BlockSpec, change: Callable[[AttentionSpec], AttentionSpec]) -> BlockSpec:
    own = block.attention
    if isinstance(own, ApproximateAttention):
        return replace(block, attention=replace(own, like=change(own.like)))
    return replace(block, attention=own and change(own))


def _learned_shapes(spec: AttentionSpec) -> Shapes:
    params = spec.params()
    return tuple(shape for name, shape in spec.shapes().items() if params[name].trainable)


def _num_matrix_elements(shapes: Shapes) -> int:
    """Numbers of the matrices among them; vectors are added or scale."""
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def _input_output_sizes(shapes: Shapes) -> int:
    return sum(math.prod(shape[:-1]) + shape[-1] for shape in shapes if len(shape) > 1)


def _stored_bytes(shapes: Shapes, dtype: str) -> int:
    return sum(stored_bytes(shape, dtype) for shape in shapes)


# --- What remembered tokens take in memory -------------------------------------------------------------

MIN_STATE_BYTES = 4  # bytes at least of a number that adds up thousands of tokens


class AllocationPolicy(NamedTuple):
    """Whether what a pattern forgets is given back, and whether rows can keep a common beginning once."""

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
    """Who hands out memory to remembered tokens, in pages of so many.

    "ideal": a slot for each token that later queries may still read. "ring": the same slots, each row its own, as
    the caches of this library hold them. "paged": pages of `page` tokens, given back when all of theirs are
    forgotten. "unified": pages alike for all layers, so that a window gives nothing back.

    >>> window = KeyRetention(first=0, last=512)  # no first token for ever, the latest 512
    >>> [CacheAllocator.from_text(text).num_slots(window, 1000) for text in ("ideal", "paged(16)", "unified")]
    [512, 528, 1000]
    """

    kind: str = "ideal"
    page_size: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ALLOCATION_POLICIES:
            raise SpecError(f"there is no allocator {self.kind!r}; {suggest(self.kind, ALLOCATION_POLICIES)}")
        if type(self.page_size) is not int or not 1 <= self.page_size <= MAX_SIZE:
            raise SpecError(f"{self.kind}({self.page_size!r}) has no pages; give tokens of a page, as in paged(16)")
        if self.page_size > 1 and self.kind in ("ideal", "ring"):
            raise SpecError(
                f"{self.kind} has no pages, and so none of {self.page_size} tokens; use paged({self.page_size})"
            )

    @staticmethod
    def from_text(text: str) -> CacheAllocator:
        """The allocator that a text such as "paged(16)" says.

        >>> CacheAllocator.from_text("paged(16)")
        CacheAllocator(kind='paged', page_size=16)
        """
        found = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(-?\d{1,30})\s*\))?\s*", text)
        if not found:
            raise SpecError(f"{text!r} is no allocator; write ideal, ring, paged(16) or unified")
        kind, page = found.groups()
        if kind == "paged" and page is None:
            raise SpecError("paged says nothing of its pages; write tokens of a page, as in paged(16)")
        return CacheAllocator(kind, 1 if page is None else int(page))

    def __str__(self) -> str:
        return f"{self.kind}({self.page_size})" if self.page_size > 1 or self.kind == "paged" else self.kind

    def num_slots(self, memory: KeyRetention, length: int) -> int:
        """Slots that one row needs, at most on its way to this length: the latest tokens may lie across pages."""
        first, last = memory
        pages = _ceil_div(length, self.page_size)
        if ALLOCATION_POLICIES[self.kind].frees_evicted and last is not None:
            pages = min(pages, _ceil_div(first, self.page_size) + _ceil_div(last - 1, self.page_size) + 1)
        return pages * self.page_size

    def num_shared_slots(self, memory: KeyRetention, length: int, prefix: int) -> int:
        """Slots among these that hold a beginning which all rows have alike: whole pages of it, still in use."""
        if not ALLOCATION_POLICIES[self.kind].shares_prefix:
            return 0
        first, last = memory
        pages = min(prefix, length) // self.page_size
        if not ALLOCATION_POLICIES[self.kind].frees_evicted or last is None:
            return pages * self.page_size
        kept = min(pages, _ceil_div(first, self.page_size))
        return (kept + max(0, pages - max(kept, max(length - last, 0) // self.page_size))) * self.page_size


IDEAL_ALLOCATOR = CacheAllocator()


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


@dataclass(frozen=True)
class RequestBatch:
    """Sequences in memory: so many of each length, the first `shared` tokens alike, and a source of its own each.

    >>> RequestBatch.uniform(16, 2048).num_requests, RequestBatch.from_lengths([7, 9, 7]).counts_by_length
    (16, ((7, 2), (9, 1)))
    """

    counts_by_length: tuple[tuple[int, int], ...] = field(default=((2048, 1),))
    shared_prefix: int = 0
    source_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.counts_by_length:
            raise SpecError("there are no rows; give one length or more")
        for length, times in self.counts_by_length:
            _check_size("length", length, 1)
            _check_size("batch", times, 1)
        _check_size("shared", self.shared_prefix, 0)
        _check_size("source", self.source_tokens, 0)
        if self.shared_prefix > (shortest := min(length for length, _ in self.counts_by_length)):
            raise SpecError(
                f"rows of {shortest:,} tokens cannot share {self.shared_prefix:,}; share at most {shortest:,}"
            )

    @staticmethod
    def uniform(batch: int, length: int, shared: int = 0, source: int = 0) -> RequestBatch:
        """So many rows of one length."""
        return RequestBatch(((length, batch),), shared, source)

    @staticmethod
    def from_lengths(lengths: Iterable[int], shared: int = 0, source: int = 0) -> RequestBatch:
        """A row of each of these lengths."""
        found: dict[int, int] = {}
        for length in lengths:
            found[length] = found.get(length, 0) + 1
        return RequestBatch(tuple(found.items()), shared, source)

    @property
    def num_requests(self) -> int:
        """How many rows."""
        return sum(times for _, times in self.counts_by_length)


def _check_size(name: str, size: object, least: int) -> None:
    if type(size) is not int or not least <= size <= MAX_SIZE:
        raise SpecError(f"{name}={size!r} is no load; give a whole number from {least} to {MAX_SIZE}")


def list_cache_terms(
    groups: Iterable[AttentionGroup], requests: RequestBatch, allocator: CacheAllocator, formats: NumberFormats
) -> list[CostTerm]:
    """Bytes that these layers remember, kind by kind of layer.

    Two layers with a window of 512 and 1 that reads everything, a key and a value head of 64 channels, in bfloat16:

    >>> import headwise as hw
    >>> spec = hw.design(model=64, heads=1, pattern="causal")
    >>> local = hw.design(model=64, heads=1, pattern="window(512)")
    >>> layers = (AttentionGroup("local", local, 2), AttentionGroup("full", spec))
    >>> for term in list_cache_terms(layers, RequestBatch.uniform(3, 1000), CacheAllocator(), NumberFormats()):
    ...     print(*term)
    local 2 layers x 1,536 tokens x 256 bytes 786432
    full 1 layer x 3,000 tokens x 256 bytes 768000
    """
    if requests.shared_prefix and not ALLOCATION_POLICIES[allocator.kind].shares_prefix:
        raise SpecError(
            f"a {allocator} keeps every row apart and cannot share {requests.shared_prefix:,} tokens; use paged(16)"
        )
    return [_cache_term(each, requests, allocator, formats) for each in groups]


def kv_cache_bytes(
    spec_or_model: AttentionSpec | ModelSpec,
    requests: RequestBatch,
    allocator: str = "ideal",
    dtype: str = "bf16",
    num_layers: int = 1,
) -> int:
    """Bytes that a spec, in so many layers, or a model remembers of these rows.

    Llama-3-8B remembers 131,072 bytes of a token:

    >>> import headwise as hw
    >>> kv_cache_bytes(hw.design(preset="gqa", model=4096, heads=32, kv=8), RequestBatch.uniform(1, 1), num_layers=32)
    131072
    """
    maths = dtype if dtype != "int8" else "bf16"
    terms = list_cache_terms(
        group_attentions(spec_or_model, num_layers),
        requests,
        CacheAllocator.from_text(allocator),
        NumberFormats(maths, cache=dtype),
    )
    return sum(term.value for term in terms)


def _cache_term(
    layers: AttentionGroup, rows: RequestBatch, allocator: CacheAllocator, formats: NumberFormats
) -> CostTerm:
    spec, many = layers.spec, f"{layers.num_layers:,} layer{'s' if layers.num_layers > 1 else ''}"
    if layers.kv_source == "source":
        if not rows.source_tokens:
            raise SpecError("it reads another sequence of a length that nothing says; give source, in tokens")
        return _describe_slots(
            layers, rows.num_requests * allocator.num_slots(KeyRetention(0, None), rows.source_tokens), many, formats
        )
    if spec.pattern.tokens_before_decode is None:
        raise SpecError(
            f"pattern {spec.pattern.text} reads tokens that have not come yet, so nothing is remembered and nothing "
            "answered token by token; use a causal pattern such as causal()"
        )
    if spec.is_recurrent:
        each = state_bytes(spec, formats.cache)
        value = layers.num_layers * rows.num_requests * each
        return CostTerm(layers.name, f"{many} x {rows.num_requests:,} states x {each:,} bytes", value)
    return _describe_slots(layers, _total_slots(spec.pattern.retention, rows, allocator), many, formats)


def _describe_slots(layers: AttentionGroup, slots: int, many: str, formats: NumberFormats) -> CostTerm:
    each = cache_bytes_per_token(layers.spec, formats.cache)
    return CostTerm(layers.name, f"{many} x {slots:,} tokens x {each:,} bytes", layers.num_layers * slots * each)


def _total_slots(memory: KeyRetention, rows: RequestBatch, allocator: CacheAllocator) -> int:
    """Slots of all rows; of a beginning they have alike, what some row still needs is there once."""
    own = sum(times * allocator.num_slots(memory, length) for length, times in rows.counts_by_length)
    if not rows.shared_prefix:
        return own
    common = [
        (allocator.num_shared_slots(memory, length, rows.shared_prefix), times)
        for length, times in rows.counts_by_length
    ]
    return own - sum(times * slots for slots, times in common) + max(slots for slots, _ in common)


def cache_bytes_per_token(spec: AttentionSpec, dtype: str) -> int:
    """Bytes that one layer keeps of one token.

    >>> import headwise as hw
    >>> gqa = hw.design(preset="gqa", model=4096, heads=32, kv=8)
    >>> cache_bytes_per_token(gqa, "bf16"), cache_bytes_per_token(gqa, "int8")  # 2 x 8 heads x (128 + a scale of 4)
    (4096, 2112)
    """
    return sum(stored_bytes(shape, dtype) for shape in spec.kv_entry_shapes().values())


def state_bytes(spec: AttentionSpec, dtype: str) -> int:
    """Bytes of the state that one layer keeps in the place of tokens; never less than 4 a number."""
    return sum(
        max(STORAGE_BYTES[dtype], MIN_STATE_BYTES) * layout.numel(sizes) for layout, sizes in _state_numbers(spec)
    )


def _state_numbers(spec: AttentionSpec) -> Iterable[tuple[AxisLayout, Mapping[str, int]]]:
    if spec.recurrent_part is None:
        return ()
    part = spec.recurrent_part[1]
    return ((layout, spec.sizes_of(part)) for layout in part.state_layouts(spec).values())


# --- How long requests are -----------------------------------------------------------------------------

MAX_REQUESTS = 100_000  # requests that are drawn one by one
LENGTH_DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "uniform": (("least", "most"), lambda dice, least, most: dice.randint(least, most)),
    "exponential": (("mean",), lambda dice, mean: dice.expovariate(1 / mean)),
}
LENGTHS_SYNTAX = "write 100,2000,30000 or uniform(100, 4000) or exponential(1000)"


def parse_lengths(text: str, count: int, seed: int = 0) -> list[int]:
    """Tokens of each request: those of a list, or so many drawn ones, each at least 1.

    >>> parse_lengths("100, 2000", count=1), parse_lengths("uniform(3, 5)", count=6, seed=1)
    ([100, 2000], [3, 5, 3, 4, 3, 4])
    """
    if found := re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text):
        return _sample_lengths(found[1], _parse_sizes(found[2], text), count, seed)
    return _parse_sizes(text, text)


def _sample_lengths(name: str, said: list[int], count: int, seed: int) -> list[int]:
    if name not in LENGTH_DISTRIBUTIONS:
        raise SpecError(f"lengths cannot be drawn from {name!r}; {suggest(name, LENGTH_DISTRIBUTIONS)}")
    words, draw = LENGTH_DISTRIBUTIONS[name]
    if len(said) != len(words) or said != sorted(said):
        raise SpecError(f"{name}{tuple(said)} says no lengths; write {name}({', '.join(words)})")
    if not 1 <= count <= MAX_REQUESTS:
        raise SpecError(f"{count:,} lengths are too many to be drawn one by one; draw from 1 to {MAX_REQUESTS:,}")
    dice = random.Random(seed)
    return [max(1, round(draw(dice, *said))) for _ in range(count)]


def _parse_sizes(text: str, whole: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,19}", word) and 1 <= int(word) <= MAX_SIZE for word in words):
        raise SpecError(f"{whole!r} says no lengths of at least 1 token; {LENGTHS_SYNTAX}")
    return [int(word) for word in words]

"""What ranks that divide heads or tokens send each other inside layers, counted from the description."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import SpecError
from ..model_spec import ExpertsSpec, ModelSpec, StackSpec, WeightSpec
from ..nn.merged_attention import averaging_spec
from ..spec.attention_spec import AttentionSpec
from .collectives import BUCKET_BYTES
from .head_partition import count_replicas, partition_model
from .parallelism import Parallelism


class BatchShape(NamedTuple):
    """A batch: its rows, the tokens of each, and those of what an encoder reads before it."""

    rows: int
    tokens: int
    source: int = 0


def iter_tensor_parallel_sizes(spec: ModelSpec, batch_shape: BatchShape) -> Iterator[int]:
    """Numbers of each sum over ranks that divide heads: one for whatever enters a sublayer, backwards, and one for
    what leaves it.

    >>> from headwise.model_spec import BlockSpec, FeedForwardSpec
    >>> stack = StackSpec.from_blocks("decoder", 3, [BlockSpec(feed=FeedForwardSpec(7))] * 2)
    >>> list(
    ...     iter_tensor_parallel_sizes(ModelSpec("one", "decoder", (stack,)), BatchShape(5, 11))
    ... )  # 5 rows of 11 tokens of 3 numbers
    [165, 165, 165, 165]
    """
    for stack, tokens in _iter_stacks(spec, batch_shape):
        own, other = (
            batch_shape.rows * tokens * stack.model,
            batch_shape.rows * batch_shape.source * spec.stacks[0].model,
        )
        for block in stack.layers:
            for role in block.attention_specs:
                yield from [own] * (3 if block.form == "merged" else 2)  # the mean enters by a door of its own
                yield from [other] * (role == "cross")
            if block.feed is not None:
                yield from [own] * (4 if isinstance(block.feed, ExpertsSpec) and block.feed.shared else 2)


def iter_context_parallel_sizes(model_spec: ModelSpec, batch_shape: BatchShape) -> Iterator[int]:
    """Numbers of each gathering over ranks that divide tokens, of whole rows; backwards each is scattered once.

    >>> import headwise as hw
    >>> from headwise.model_spec import BlockSpec
    >>> stack = StackSpec.from_blocks("decoder", 8, [BlockSpec(hw.design(model=8, heads=4, kv=1))])
    >>> list(
    ...     iter_context_parallel_sizes(ModelSpec("one", "decoder", (stack,)), BatchShape(5, 11))
    ... )  # a key and a value, 2 wide, of each token
    [220]
    """
    for stack, tokens in _iter_stacks(model_spec, batch_shape):
        for block in stack.layers:
            if block.form == "merged" and block.cross is not None:
                yield batch_shape.rows * tokens * count_kv_entry_numbers(averaging_spec(block.cross))
            for role, spec in block.attention_specs.items():
                yield (
                    batch_shape.rows
                    * (batch_shape.source if role == "cross" else tokens)
                    * count_kv_entry_numbers(spec)
                )
    for head in model_spec.heads[:1]:
        if head.at != "each":
            yield batch_shape.rows * batch_shape.tokens * model_spec.stacks[-1].model


def count_kv_entry_numbers(spec: AttentionSpec) -> int:
    """Numbers that a token leaves behind in a layer."""
    return sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())


def _iter_stacks(described: ModelSpec, rows: BatchShape) -> Iterator[tuple[StackSpec, int]]:
    """Each stack with the tokens of its rows."""
    yield from zip(
        described.stacks, ([rows.source, rows.tokens] if len(described.stacks) > 1 else [rows.tokens]), strict=True
    )


# --- What ranks send each other in a step --------------------------------------------------------------

FLOAT_BYTES = 4  # bytes of a gradient, a weight, a loss
POSITION_BYTES = 16  # bytes that say where a token stands, asked of others where rows had to be filled up


class CollectiveMessage(NamedTuple):
    """One collective among so many ranks; `held` are the bytes that each of them holds of it when it is whole."""

    kind: str
    held: int
    ranks: int

    @property
    def moved(self) -> float:
        """Bytes that a rank sends, in a ring: each of the n pieces goes to n - 1 others, in a sum there and back.

        >>> CollectiveMessage("gather", 12, 3).moved, CollectiveMessage("sum", 12, 3).moved
        (8.0, 16.0)
        """
        return (2 if self.kind == "sum" else 1) * self.held * (self.ranks - 1) / self.ranks


def count_communication(
    spec: ModelSpec, parallelism: Parallelism, num_micro_batches: int = 1, batch_shape: BatchShape | None = None
) -> list[CollectiveMessage]:
    """The messages of one step, a batch of it taken in so many parts, each tensor in single precision.

    Ranks that divide heads or tokens send what follows from `rows`, those of the batch: as many for each rank, all of
    one length, and without terms of the ledger. Where heads do not divide, these are the messages of the first rank.

    >>> from headwise.model_spec import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, StackSpec
    >>> stack = StackSpec.from_blocks(
    ...     "encoder", 3, [BlockSpec(feed=FeedForwardSpec(7))], embedding=EmbeddingSpec(tokens=11)
    ... )
    >>> net = ModelSpec("one", "encoder", (stack,), (OutputHeadSpec("tokens", 11),))
    >>> numbers, tensors = 2 * 3 + 2 * 3 * 7 + 3 * 11 + 3 * 11, 6
    >>> count_communication(net, Parallelism(data=2)) == [
    ...     CollectiveMessage("sum", 4 * (numbers + tensors), 2),
    ...     CollectiveMessage("sum", 4, 2),
    ... ]
    True
    """
    workers, found = parallelism.size // parallelism.tensor, list[CollectiveMessage]()
    if max(parallelism.tensor, parallelism.context) > 1:
        if batch_shape is None:
            raise SpecError(f"what ranks of {parallelism} send follows from the batch; give rows=Rows(rows, tokens)")
        each = batch_shape.rows // num_micro_batches // (parallelism.data * parallelism.shards)
        found += _layer_messages(spec, parallelism, batch_shape._replace(rows=each)) * num_micro_batches
    if parallelism.tensor > 1:
        every = partition_model(spec, parallelism.tensor)
        weights, common = spec.params(), count_replicas(spec, every)
        found.append(
            CollectiveMessage("sum", FLOAT_BYTES * sum(weights[name].numel for name in common), parallelism.tensor)
        )
        spec = every[0].spec
        if parallelism.shards > 1:  # of what several ranks hold, slices are put together before they are summed
            held = [weight for name, weight in spec.params().items() if name in common and not _is_unsharded(weight)]
            found += [
                CollectiveMessage(
                    "gather", FLOAT_BYTES * _padded_numel([weight], parallelism.shards), parallelism.shards
                )
                for weight in held
            ]
    weights = {name: w for name, w in spec.params().items() if w.trainable}
    found += _fsdp_messages(spec, weights, parallelism, num_micro_batches) if parallelism.shards > 1 else []
    kept = [w for w in weights.values() if parallelism.shards == 1 or _is_unsharded(w)]
    if workers > 1:
        found += [CollectiveMessage("sum", FLOAT_BYTES * numel, workers) for numel in [*_bucket_sizes(kept), 1]]
    return found


def _layer_messages(described: ModelSpec, spread: Parallelism, rows: BatchShape) -> list[CollectiveMessage]:
    """What ranks send each other within layers, in one part of a batch."""
    tokens, source = (-(-count // spread.context) for count in (rows.tokens, rows.source))
    found = []
    if spread.tensor > 1:
        numels = iter_tensor_parallel_sizes(described, BatchShape(rows.rows, tokens, source))
        found += [CollectiveMessage("sum", FLOAT_BYTES * numel, spread.tensor) for numel in numels]
    if spread.context > 1:
        own = partition_model(described, spread.tensor)[0].spec
        numels = iter_context_parallel_sizes(
            own, BatchShape(rows.rows, tokens * spread.context, source * spread.context)
        )
        found += [
            CollectiveMessage(kind, FLOAT_BYTES * n, spread.context) for n in numels for kind in ("gather", "scatter")
        ]
        filled = [each for count, each in ((rows.tokens, tokens), (rows.source, source)) if count % spread.context]
        found += [
            CollectiveMessage("gather", POSITION_BYTES * each * spread.context, spread.context) for each in filled
        ]
    return found


def _is_unsharded(weight: WeightSpec) -> bool:
    return bool(weight.tied_to) or not weight.shape


def _bucket_sizes(weights: Iterable[WeightSpec]) -> Iterator[int]:
    """Numbers of each message of gradients: they are packed as they come, the last first."""
    held, count = 0, 0
    for weight in reversed(list(weights)):
        if count and (held + weight.numel) * FLOAT_BYTES > BUCKET_BYTES:
            yield held + count
            held, count = 0, 0
        held, count = held + weight.numel, count + 1
    if count:
        yield held + count


def _fsdp_messages(
    described: ModelSpec, weights: Mapping[str, WeightSpec], spread: Parallelism, parts: int
) -> Iterator[CollectiveMessage]:
    """Layers are put together on the way there and on the way back, what stands around them once."""
    unread = tuple(f"head.{head.name}." for head in described.heads[1:])
    around: list[tuple[str, WeightSpec]] = []
    layers: dict[str, list[tuple[str, WeightSpec]]] = {}
    for name, weight in weights.items():
        where = ".".join(name.split(".")[:2])
        inside = where.partition(".")[2].isdigit()
        (layers.setdefault(where, []) if inside else around).append((name, weight))
    for group, times in [(around, 1), *((layer, 2) for layer in layers.values())]:
        sliced = [(name, weight) for name, weight in group if not _is_unsharded(weight)]
        learned = [weight for name, weight in sliced if not name.startswith(unread)]
        gathered = CollectiveMessage(
            "gather", FLOAT_BYTES * _padded_numel([w for _, w in sliced], spread.shards), spread.shards
        )
        scattered = CollectiveMessage("scatter", FLOAT_BYTES * _padded_numel(learned, spread.shards), spread.shards)
        if not sliced:
            continue
        each = [*[gathered] * times, scattered]
        if (copies := spread.data * spread.context) > 1:
            each.append(CollectiveMessage("sum", scattered.held // spread.shards, copies))
        yield from each * parts


def _padded_numel(weights: Iterable[WeightSpec], ranks: int) -> int:
    """Numbers of these, each filled up to slices of the same size."""
    return sum(-(-w.shape[0] // ranks) * ranks * math.prod(w.shape[1:]) for w in weights)


# Which of its arguments a collective of c10d holds whole, by what it does.
COLLECTIVE_OPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "allreduce_": ("sum", lambda args: args[0]),
    "_allgather_base_": ("gather", lambda args: args[0]),
    "allgather_": ("gather", lambda args: args[0]),
    "_reduce_scatter_base_": ("scatter", lambda args: args[1]),
}


class CommunicationMeter(TorchDispatchMode):
    """Inside, every collective that this thread calls is written down as a message."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[CollectiveMessage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name not in COLLECTIVE_OPS:
                raise SpecError(f"a meter knows no collective {name!r}; it knows {', '.join(COLLECTIVE_OPS)}")
            kind, held = COLLECTIVE_OPS[name]
            ranks = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject))).size()
            self.messages.append(CollectiveMessage(kind, _num_bytes(held(args)), ranks))
        return func(*args, **(kwargs or {}))


def _num_bytes(held: Any) -> int:
    return held.nbytes if isinstance(held, Tensor) else sum(_num_bytes(one) for one in held)

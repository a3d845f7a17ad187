"""Bytes that ranks send in one training step, predicted from the model spec or measured."""

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
from ..nn.composite_attention import averaging_spec
from ..spec.attention_spec import AttentionSpec
from .collectives import BUCKET_BYTES
from .head_partition import count_replicas, partition_model
from .parallelism import Parallelism


class BatchShape(NamedTuple):
    """Rows of a batch, tokens of each row, and tokens of each encoder input."""

    rows: int
    tokens: int
    source: int = 0


def iter_tensor_parallel_sizes(spec: ModelSpec, batch_shape: BatchShape) -> Iterator[int]:
    """Yield the number of elements of each all-reduce of tensor parallelism: for every sublayer one
    of its output and, in the backward pass, one for each of its inputs.

    >>> from headwise.model_spec import BlockSpec, FeedForwardSpec
    >>> stack = StackSpec.from_blocks("decoder", 3, [BlockSpec(feed=FeedForwardSpec(7))] * 2)
    >>> list(
    ...     iter_tensor_parallel_sizes(ModelSpec("one", "decoder", (stack,)), BatchShape(5, 11))
    ... )  # 5 rows of 11 tokens of 3 numbers
    [165, 165, 165, 165]
    """
    for stack, tokens in _iter_stacks(spec, batch_shape):
        own = batch_shape.rows * tokens * stack.model
        other = batch_shape.rows * batch_shape.source * spec.stacks[0].model
        for block in stack.layers:
            for role in block.attention_specs:
                yield from [own] * (
                    3 if block.form == "merged" else 2
                )  # the averaging heads have an input of their own
                yield from [other] * (role == "cross")
            if block.feed is not None:
                yield from [own] * (
                    4 if isinstance(block.feed, ExpertsSpec) and block.feed.shared else 2
                )


def iter_context_parallel_sizes(model_spec: ModelSpec, batch_shape: BatchShape) -> Iterator[int]:
    """Yield the number of elements of each all-gather of context parallelism; the backward pass
    scatters as many.

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
                yield (
                    batch_shape.rows * tokens * count_kv_entry_numbers(averaging_spec(block.cross))
                )
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
    """Return the number of cached elements per token of a layer."""
    return sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())


def _iter_stacks(described: ModelSpec, rows: BatchShape) -> Iterator[tuple[StackSpec, int]]:
    """Yield each stack with the number of tokens of its rows."""
    yield from zip(
        described.stacks,
        ([rows.source, rows.tokens] if len(described.stacks) > 1 else [rows.tokens]),
        strict=True,
    )


# --- Messages of one training step ----------------------------------------------------------------

FLOAT_BYTES = 4  # bytes of a gradient, a weight, a loss
POSITION_BYTES = 16  # bytes of the position and segment of a token, gathered if rows are padded


class CollectiveMessage(NamedTuple):
    """One collective over `ranks` ranks; `nbytes` is the size of the full tensor."""

    kind: str
    nbytes: int
    ranks: int

    @property
    def moved(self) -> float:
        """Bytes that a rank sends in a ring: (n - 1) / n of the tensor, twice that for an
        all-reduce.

        >>> CollectiveMessage("gather", 12, 3).moved, CollectiveMessage("sum", 12, 3).moved
        (8.0, 16.0)
        """
        return (2 if self.kind == "sum" else 1) * self.nbytes * (self.ranks - 1) / self.ranks


def count_communication(
    spec: ModelSpec,
    parallelism: Parallelism,
    num_micro_batches: int = 1,
    batch_shape: BatchShape | None = None,
) -> list[CollectiveMessage]:
    """Return the messages of one training step in single precision, with `num_micro_batches`
    backward passes.

    Tensor and context parallelism need `batch_shape`. The count assumes equally many rows on every
    rank, rows of equal length and no auxiliary losses. If heads are not divisible, it is that of
    the first rank.

    >>> from headwise.model_spec import (
    ...     BlockSpec,
    ...     FeedForwardSpec,
    ...     EmbeddingSpec,
    ...     OutputHeadSpec,
    ...     StackSpec,
    ... )
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
    num_workers, messages = parallelism.size // parallelism.tensor, list[CollectiveMessage]()
    if max(parallelism.tensor, parallelism.context) > 1:
        if batch_shape is None:
            raise SpecError(
                f"communication of {parallelism} depends on the batch; give "
                "batch_shape=BatchShape(rows, tokens)"
            )
        each = batch_shape.rows // num_micro_batches // (parallelism.data * parallelism.shards)
        messages += (
            _layer_messages(spec, parallelism, batch_shape._replace(rows=each)) * num_micro_batches
        )
    if parallelism.tensor > 1:
        every = partition_model(spec, parallelism.tensor)
        weights, replicated = spec.params(), count_replicas(spec, every)
        messages.append(
            CollectiveMessage(
                "sum",
                FLOAT_BYTES * sum(weights[name].numel for name in replicated),
                parallelism.tensor,
            )
        )
        spec = every[0].spec
        if (
            parallelism.shards > 1
        ):  # slices of replicated tensors are gathered before they are summed
            gathered_weights = [
                weight
                for name, weight in spec.params().items()
                if name in replicated and not _is_unsharded(weight)
            ]
            messages += [
                CollectiveMessage(
                    "gather",
                    FLOAT_BYTES * _padded_numel([weight], parallelism.shards),
                    parallelism.shards,
                )
                for weight in gathered_weights
            ]
    weights = {name: w for name, w in spec.params().items() if w.trainable}
    messages += (
        _fsdp_messages(spec, weights, parallelism, num_micro_batches)
        if parallelism.shards > 1
        else []
    )
    unsharded = [w for w in weights.values() if parallelism.shards == 1 or _is_unsharded(w)]
    if num_workers > 1:
        messages += [
            CollectiveMessage("sum", FLOAT_BYTES * numel, num_workers)
            for numel in [*_bucket_sizes(unsharded), 1]
        ]
    return messages


def _layer_messages(
    described: ModelSpec, parallelism: Parallelism, rows: BatchShape
) -> list[CollectiveMessage]:
    """Return the messages inside layers, for one micro-batch."""
    tokens, source = (-(-count // parallelism.context) for count in (rows.tokens, rows.source))
    messages = []
    if parallelism.tensor > 1:
        numels = iter_tensor_parallel_sizes(described, BatchShape(rows.rows, tokens, source))
        messages += [
            CollectiveMessage("sum", FLOAT_BYTES * numel, parallelism.tensor) for numel in numels
        ]
    if parallelism.context > 1:
        own = partition_model(described, parallelism.tensor)[0].spec
        numels = iter_context_parallel_sizes(
            own, BatchShape(rows.rows, tokens * parallelism.context, source * parallelism.context)
        )
        messages += [
            CollectiveMessage(kind, FLOAT_BYTES * n, parallelism.context)
            for n in numels
            for kind in ("gather", "scatter")
        ]
        padded = [
            each
            for count, each in ((rows.tokens, tokens), (rows.source, source))
            if count % parallelism.context
        ]
        messages += [
            CollectiveMessage(
                "gather", POSITION_BYTES * each * parallelism.context, parallelism.context
            )
            for each in padded
        ]
    return messages


def _is_unsharded(weight: WeightSpec) -> bool:
    return bool(weight.tied_to) or not weight.shape


def _bucket_sizes(weights: Iterable[WeightSpec]) -> Iterator[int]:
    """Yield the number of elements of each gradient bucket, from the last
    parameter to the first.
    """
    numel, count = 0, 0
    for weight in reversed(list(weights)):
        if count and (numel + weight.numel) * FLOAT_BYTES > BUCKET_BYTES:
            yield numel + count
            numel, count = 0, 0
        numel, count = numel + weight.numel, count + 1
    if count:
        yield numel + count


def _fsdp_messages(
    described: ModelSpec, weights: Mapping[str, WeightSpec], parallelism: Parallelism, parts: int
) -> Iterator[CollectiveMessage]:
    """Yield the messages of FSDP2: layers are gathered in both passes,
    embeddings and heads once.
    """
    unread = tuple(f"head.{head.name}." for head in described.heads[1:])
    outside_layers: list[tuple[str, WeightSpec]] = []
    layers: dict[str, list[tuple[str, WeightSpec]]] = {}
    for name, weight in weights.items():
        prefix = ".".join(name.split(".")[:2])
        inside = prefix.partition(".")[2].isdigit()
        (layers.setdefault(prefix, []) if inside else outside_layers).append((name, weight))
    for group, times in [(outside_layers, 1), *((layer, 2) for layer in layers.values())]:
        sliced = [(name, weight) for name, weight in group if not _is_unsharded(weight)]
        learned = [weight for name, weight in sliced if not name.startswith(unread)]
        gathered = CollectiveMessage(
            "gather",
            FLOAT_BYTES * _padded_numel([w for _, w in sliced], parallelism.shards),
            parallelism.shards,
        )
        scattered = CollectiveMessage(
            "scatter", FLOAT_BYTES * _padded_numel(learned, parallelism.shards), parallelism.shards
        )
        if not sliced:
            continue
        messages = [*[gathered] * times, scattered]
        if (copies := parallelism.data * parallelism.context) > 1:
            messages.append(
                CollectiveMessage("sum", scattered.nbytes // parallelism.shards, copies)
            )
        yield from messages * parts


def _padded_numel(weights: Iterable[WeightSpec], ranks: int) -> int:
    """Return the number of elements of these tensors, padded to slices of equal size."""
    return sum(-(-w.shape[0] // ranks) * ranks * math.prod(w.shape[1:]) for w in weights)


# Kind of each c10d collective, and its argument that holds the full tensor.
COLLECTIVE_OPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "allreduce_": ("sum", lambda args: args[0]),
    "_allgather_base_": ("gather", lambda args: args[0]),
    "allgather_": ("gather", lambda args: args[0]),
    "_reduce_scatter_base_": ("scatter", lambda args: args[1]),
}


class CommunicationMeter(TorchDispatchMode):
    """Context manager that records every collective of this thread in `messages`."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[CollectiveMessage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name not in COLLECTIVE_OPS:
                raise SpecError(
                    f"cannot measure collective {name!r}; supported: {', '.join(COLLECTIVE_OPS)}"
                )
            kind, full_tensor = COLLECTIVE_OPS[name]
            ranks = dist.ProcessGroup.unbox(
                next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ).size()
            self.messages.append(CollectiveMessage(kind, _num_bytes(full_tensor(args)), ranks))
        return func(*args, **(kwargs or {}))


def _num_bytes(tensors: Any) -> int:
    return (
        tensors.nbytes
        if isinstance(tensors, Tensor)
        else sum(_num_bytes(tensor) for tensor in tensors)
    )

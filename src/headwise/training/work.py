"""How many FLOPs a training step is worth: what use of the machine is measured by."""

from __future__ import annotations

from collections.abc import Iterator

from .. import counting
from ..blueprint import FeedForwardSpec, ExpertsSpec, ModelSpec, StackSpec
from ..tasks import Batch
from ..terms import CallSize
from ..tokens import SequenceInfo

TRAINING_FLOP_FACTOR = 3  # a step is a forward pass and, backwards, two products for each of its own


def count_step_flops(model_spec: ModelSpec, batch: Batch) -> int:
    """FLOPs of one step on this batch, as the model asks for them: padding counts, what is computed twice does not.

    A matrix of n numbers that meets t tokens is 6 n t:

    >>> import torch
    >>> from headwise.blueprint import Block, FeedForwardSpec, Embedding, Head, StackSpec
    >>> stack = StackSpec.of("encoder", 3, [Block(feed=Dense(7))], embedding=Embedding(tokens=11))
    >>> batch = Batch(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64))
    >>> count_step_flops(ModelSpec("one", "encoder", (stack,), (Head("tokens", 11),)), batch) == 6 * (2 * 3 * 7 + 3 * 11) * 10
    True
    """
    first, last = model_spec.stacks[0], model_spec.stacks[-1]
    rows = len(batch.labels)
    own = count_stack_tokens(last, batch.x.shape)
    source = 0 if batch.source is None or first is last else count_stack_tokens(first, batch.source.shape)
    forward = sum(_layer_flops(last, rows, own, source)) + (sum(_layer_flops(first, rows, source, 0)) if source else 0)
    for head in model_spec.heads[:1]:
        read = rows * (own if head.at == "each" else 1)
        matrices = [w.numel for w in head.weights(last.model) if len(w.layout.axes) == 2]
        table = head.outputs * (head.transform.hidden if head.transform else last.model) if head.table else 0
        forward += 2 * read * (sum(matrices) + table)
    return TRAINING_FLOP_FACTOR * forward


def count_stack_tokens(stack: StackSpec, shape: tuple[int, ...]) -> int:
    """How many tokens of a row a stack sees of an input of this shape."""
    embedding = stack.embedding
    if embedding is None or not embedding.patches:
        return shape[1]
    patches = embedding.patches
    return embedding.first + shape[-2] // patches.high * (shape[-1] // patches.wide)


def count_batch_tokens(model_spec: ModelSpec, batch: Batch) -> int:
    """How many tokens a model reads of a batch, padding left out."""
    first, last = model_spec.stacks[0], model_spec.stacks[-1]
    read = _count_valid_tokens(batch.tokens, len(batch.labels), count_stack_tokens(last, batch.x.shape))
    if batch.source is None:
        return read
    return read + _count_valid_tokens(batch.source_tokens, len(batch.labels), count_stack_tokens(first, batch.source.shape))


def _count_valid_tokens(tokens: SequenceInfo | None, rows: int, each: int) -> int:
    if tokens is None:
        return rows * each
    return int(tokens.is_real.sum()) * (rows if len(tokens.is_real) == 1 else 1)


def _layer_flops(stack: StackSpec, rows: int, own: int, source: int) -> Iterator[int]:
    if stack.embedding and stack.embedding.patches:
        yield 2 * rows * own * sum(w.numel for w in stack.embedding.patches.weights(stack.model))
    for block in stack.layers:
        for name, spec in block.attention_specs.items():
            crossing = CallSize(rows, own, source, source)
            work = crossing if name == "cross" else counting.self_attention_work(spec, batch=rows, queries=own)
            yield counting.required_flops(spec, work)
        if block.feed is not None:
            yield 2 * rows * own * _active_parameters(block.feed, stack.model)


def _active_parameters(feed: FeedForwardSpec | ExpertsSpec, model: int) -> int:
    """How many numbers of its matrices a token meets: of experts only those that are active."""
    matrices = [w for w in feed.weights(model) if len([axis for axis in w.layout.axes if axis != "expert"]) == 2]
    if isinstance(feed, FeedForwardSpec):
        return sum(w.numel for w in matrices)
    each = sum(w.numel for w in matrices if "expert" in w.layout.axes)
    router = feed.count * model
    return sum(w.numel for w in matrices) - each + each * feed.active // feed.count + router

"""How many FLOPs a training step is worth: what use of the machine is measured by."""

from __future__ import annotations

from collections.abc import Iterator

from .. import counting
from ..blueprint import Dense, Experts, Model, Stack
from ..tasks import Batch
from ..terms import Work
from ..tokens import Tokens

BACKWARD = 3  # a step is a forward pass and, backwards, two products for each of its own


def step_flops(described: Model, batch: Batch) -> int:
    """FLOPs of one step on this batch, as the model asks for them: padding counts, what is computed twice does not.

    A matrix of n numbers that meets t tokens is 6 n t:

    >>> import torch
    >>> from headwise.blueprint import Block, Dense, Embedding, Head, Stack
    >>> stack = Stack.of("encoder", 3, [Block(feed=Dense(7))], embedding=Embedding(tokens=11))
    >>> batch = Batch(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64))
    >>> step_flops(Model("one", "encoder", (stack,), (Head("tokens", 11),)), batch) == 6 * (2 * 3 * 7 + 3 * 11) * 10
    True
    """
    first, last = described.stacks[0], described.stacks[-1]
    rows = len(batch.labels)
    own = tokens_of(last, batch.x.shape)
    source = 0 if batch.source is None or first is last else tokens_of(first, batch.source.shape)
    forward = sum(_layers(last, rows, own, source)) + (sum(_layers(first, rows, source, 0)) if source else 0)
    for head in described.heads[:1]:
        read = rows * (own if head.at == "each" else 1)
        matrices = [w.numel for w in head.weights(last.model) if len(w.layout.axes) == 2]
        table = head.outputs * (head.transform.hidden if head.transform else last.model) if head.table else 0
        forward += 2 * read * (sum(matrices) + table)
    return BACKWARD * forward


def tokens_of(stack: Stack, shape: tuple[int, ...]) -> int:
    """How many tokens of a row a stack sees of an input of this shape."""
    embedding = stack.embedding
    if embedding is None or not embedding.patches:
        return shape[1]
    patches = embedding.patches
    return embedding.first + shape[-2] // patches.high * (shape[-1] // patches.wide)


def tokens_in(described: Model, batch: Batch) -> int:
    """How many tokens a model reads of a batch, padding left out."""
    first, last = described.stacks[0], described.stacks[-1]
    read = _live(batch.tokens, len(batch.labels), tokens_of(last, batch.x.shape))
    if batch.source is None:
        return read
    return read + _live(batch.source_tokens, len(batch.labels), tokens_of(first, batch.source.shape))


def _live(tokens: Tokens | None, rows: int, each: int) -> int:
    if tokens is None:
        return rows * each
    return int(tokens.live.sum()) * (rows if len(tokens.live) == 1 else 1)


def _layers(stack: Stack, rows: int, own: int, source: int) -> Iterator[int]:
    if stack.embedding and stack.embedding.patches:
        yield 2 * rows * own * sum(w.numel for w in stack.embedding.patches.weights(stack.model))
    for block in stack.layers:
        for name, spec in block.specs.items():
            crossing = Work(rows, own, source, source)
            work = crossing if name == "cross" else counting.work_of(spec, batch=rows, queries=own)
            yield counting.asked(spec, work)
        if block.feed is not None:
            yield 2 * rows * own * _met(block.feed, stack.model)


def _met(feed: Dense | Experts, model: int) -> int:
    """How many numbers of its matrices a token meets: of experts only those that are active."""
    matrices = [w for w in feed.weights(model) if len([axis for axis in w.layout.axes if axis != "expert"]) == 2]
    if isinstance(feed, Dense):
        return sum(w.numel for w in matrices)
    each = sum(w.numel for w in matrices if "expert" in w.layout.axes)
    router = feed.count * model
    return sum(w.numel for w in matrices) - each + each * feed.active // feed.count + router

"""What ranks that divide heads or tokens send each other inside layers, counted from the description."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..blocks.merged import averaging_spec
from ..blueprint import ExpertsSpec, ModelSpec, StackSpec
from ..spec import AttentionSpec


class Rows(NamedTuple):
    """A batch: its rows, the tokens of each, and those of what an encoder reads before it."""

    rows: int
    tokens: int
    source: int = 0


def summed(described: ModelSpec, rows: Rows) -> Iterator[int]:
    """Numbers of each sum over ranks that divide heads: one for whatever enters a sublayer, backwards, and one for
    what leaves it.

    >>> from headwise.blueprint import Block, Dense
    >>> stack = StackSpec.of("decoder", 3, [Block(feed=Dense(7))] * 2)
    >>> list(summed(ModelSpec("one", "decoder", (stack,)), Rows(5, 11)))  # 5 rows of 11 tokens of 3 numbers
    [165, 165, 165, 165]
    """
    for stack, tokens in _stacks(described, rows):
        own, other = rows.rows * tokens * stack.model, rows.rows * rows.source * described.stacks[0].model
        for block in stack.layers:
            for role in block.attention_specs:
                yield from [own] * (3 if block.form == "merged" else 2)  # the mean enters by a door of its own
                yield from [other] * (role == "cross")
            if block.feed is not None:
                yield from [own] * (4 if isinstance(block.feed, ExpertsSpec) and block.feed.shared else 2)


def gathered(described: ModelSpec, rows: Rows) -> Iterator[int]:
    """Numbers of each gathering over ranks that divide tokens, of whole rows; backwards each is scattered once.

    >>> import headwise as hw
    >>> from headwise.blueprint import Block
    >>> stack = StackSpec.of("decoder", 8, [Block(hw.design(model=8, heads=4, kv=1))])
    >>> list(gathered(ModelSpec("one", "decoder", (stack,)), Rows(5, 11)))  # a key and a value, 2 wide, of each token
    [220]
    """
    for stack, tokens in _stacks(described, rows):
        for block in stack.layers:
            if block.form == "merged" and block.cross is not None:
                yield rows.rows * tokens * remembered(averaging_spec(block.cross))
            for role, spec in block.attention_specs.items():
                yield rows.rows * (rows.source if role == "cross" else tokens) * remembered(spec)
    for head in described.heads[:1]:
        if head.at != "each":
            yield rows.rows * rows.tokens * described.stacks[-1].model


def remembered(spec: AttentionSpec) -> int:
    """Numbers that a token leaves behind in a layer."""
    return sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())


def _stacks(described: ModelSpec, rows: Rows) -> Iterator[tuple[StackSpec, int]]:
    """Each stack with the tokens of its rows."""
    yield from zip(
        described.stacks, ([rows.source, rows.tokens] if len(described.stacks) > 1 else [rows.tokens]), strict=True
    )

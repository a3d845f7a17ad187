"""Blueprints of the small models that learn generated tasks within minutes."""

from __future__ import annotations

from dataclasses import dataclass

from ..blueprint import BlockSpec, FeedForwardSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, NormSpec, PositionSpec, StackSpec
from ..pattern import Pattern
from ..presets import design
from ..registry import find_class


@dataclass(frozen=True)
class Shape:
    """How large a model is: `layers` of `width` channels and so many heads; feed-forwards `feed` wide, 0 for none.

    positions="rotary" turns queries and keys, so that longer texts than those of training can be read at all;
    "sinusoidal" is added to the embedding; "none" leaves tokens without an order.
    """

    width: int
    heads: int
    layers: int
    feed: int = 0
    positions: str = "rotary"

    def blocks(self, pattern: str | Pattern, cross: str = "") -> list[BlockSpec]:
        """Its layers, norms first; `cross` is the pattern of a cross-attention, if there is one."""
        turns = (find_class("Rotary")(),) if self.positions == "rotary" else ()
        own = design(model=self.width, heads=self.heads, pattern=pattern, modifiers=turns)
        other = design(model=self.width, heads=self.heads, pattern=cross) if cross else None
        feed = FeedForwardSpec(self.feed, "gelu", bias="ud") if self.feed else None
        return [BlockSpec(own, other, feed)] * self.layers

    def embedding(self, tokens: int, table: str = "") -> EmbeddingSpec:
        """A table of so many tokens."""
        places = PositionSpec("sinusoidal") if self.positions == "sinusoidal" else None
        return EmbeddingSpec(tokens, positions=places, table=table)


def decoder(name: str, tokens: int, shape: Shape) -> ModelSpec:
    """A causal model that says a token at each place; what it says and what it reads have a table each."""
    stack = _stack("decoder", tokens, shape, "causal()")
    return ModelSpec(name, "decoder", (stack,), (OutputHeadSpec("tokens", tokens),))


def encoder(name: str, tokens: int, shape: Shape, head: OutputHeadSpec, pattern: str | Pattern = "full()") -> ModelSpec:
    """A model that reads all at once."""
    return ModelSpec(name, "encoder", (_stack("encoder", tokens, shape, pattern),), (head,))


def translator(name: str, tokens: int, shape: Shape) -> ModelSpec:
    """An encoder and a decoder as deep, with one table for all that is read and said (1706.03762)."""
    source = _stack("encoder", tokens, shape, "full()")
    embedding = shape.embedding(tokens, table="encoder")
    target = StackSpec.from_blocks("decoder", shape.width, shape.blocks("causal()", "full()"), embedding=embedding, norm=NormSpec())
    return ModelSpec(name, "encoder-decoder", (source, target), (OutputHeadSpec("tokens", tokens, table="encoder"),))


def _stack(name: str, tokens: int, shape: Shape, pattern: str | Pattern) -> StackSpec:
    return StackSpec.from_blocks(name, shape.width, shape.blocks(pattern), embedding=shape.embedding(tokens), norm=NormSpec())

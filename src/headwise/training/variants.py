"""The same model with another attention in every layer."""

from __future__ import annotations

from dataclasses import replace

from ..blueprint import BlockSpec, ModelSpec, ApproximateAttention, PositionSpec, StackSpec
from ..errors import SpecError
from ..pattern import Causal, Full
from ..presets import design
from ..spec import AttentionSpec


def replace_self_attention(model_spec: ModelSpec, name: str) -> ModelSpec:
    """A preset in the place of every self-attention: as wide, of as many heads, and no token reads more than before.

    What says where tokens stand is kept, unless the preset brings its own; where it cannot stand beside the preset,
    sinusoidal positions are added to the embedding instead. Cross-attention stays what it is.

    >>> from headwise.blueprint import Embedding
    >>> plain = design(model=8, heads=4, pattern="causal()")
    >>> stack = StackSpec.of("decoder", 8, [BlockSpec(plain)], embedding=Embedding(11))
    >>> changed = replace_self_attention(ModelSpec("one", "decoder", (stack,)), "mqa")
    >>> [spec.heads.kv for _, spec in changed.specs()]
    [1]
    """
    return replace(model_spec, stacks=tuple(_replace_in_stack(stack, name) for stack in model_spec.stacks))


def _replace_in_stack(stack: StackSpec, name: str) -> StackSpec:
    embedding = stack.embedding
    try:
        blocks = [_replace_in_block(block, name, turned=True) for block in stack.layers]
    except SpecError:
        blocks = [_replace_in_block(block, name, turned=False) for block in stack.layers]
        if embedding and embedding.positions is None:
            embedding = replace(embedding, positions=PositionSpec("sinusoidal"))
    return StackSpec.from_blocks(stack.name, stack.model, blocks, embedding=embedding, norm=stack.norm)


def _replace_in_block(block: BlockSpec, name: str, turned: bool) -> BlockSpec:
    if isinstance(block.attention, ApproximateAttention):
        raise SpecError(f"an attention that no spec says cannot be exchanged: {block.attention.reason}")
    return replace(block, attention=block.attention and _replace_spec(block.attention, name, turned))


def _replace_spec(spec: AttentionSpec, name: str, turned: bool) -> AttentionSpec:
    made = design(preset=name, model=spec.model, heads=spec.heads.q)
    pattern = spec.pattern if made.pattern in (Full(), Causal()) else made.pattern & spec.pattern
    modifiers = made.modifiers
    if turned and not any(modifier.positional for modifier in modifiers):
        modifiers = (*(modifier for modifier in spec.modifiers if modifier.positional), *modifiers)
    return replace(made, pattern=pattern, modifiers=modifiers)

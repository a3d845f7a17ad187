"""What can be priced of a model besides all of it, and how long its rows may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..blueprint import Block, Model, Nearly, Run, Stack
from ..errors import SpecError, nearest
from ..spec import AttentionSpec
from .whole import Described


class Longest(NamedTuple):
    """How many tokens a row may have, and how many the source that it reads; None where nothing says so."""

    own: int | None
    source: int | None


def longest(described: Described) -> Longest:
    """What learned positions allow, wherever they stand.

    >>> from headwise.families import read
    >>> longest(read({"model_type": "gpt2"}))
    Longest(own=1024, source=None)
    """
    if isinstance(described, AttentionSpec):
        return Longest(_least(_known(described)), None)
    *early, last = [_least(_positions(stack)) for stack in described.stacks]
    return Longest(last, _least(early))


def fixed(model: Model) -> list[int | None]:
    """How many tokens each stack has whatever is asked of it: those of an image."""
    tables = [stack.embedding for stack in model.stacks]
    return [table.patches.count + table.first if table and table.patches else None for table in tables]


def layer(model: Model, place: str) -> Model | AttentionSpec:
    """One block of a model, or one attention in it: "3" of the last stack, "encoder.3", "decoder.3.cross".

    A block is a model that has nothing else.

    >>> from headwise.families import read
    >>> from headwise.counting import params
    >>> params(layer(read({"model_type": "gpt2"}), "11"))  # 12 h^2 + 13 h
    7087872
    """
    stack, block, rest = _found(model, place)
    if rest:
        if rest not in block.specs:
            raise SpecError(f"{model.name}: {place!r} has no {rest!r}; {nearest(rest, block.specs)}")
        spec = block.specs[rest]
        return replace(spec, source=spec.source or spec.model) if rest == "cross" else spec
    alone = Stack(stack.name, stack.model, (Run(1, (block,)),))
    if not block.cross:
        kind = model.kind if len(model.stacks) == 1 else "decoder" if stack is model.stacks[-1] else "encoder"
        return Model(model.name, kind, (alone,))
    return Model(model.name, model.kind, (Stack(model.stacks[0].name, model.stacks[0].model, ()), alone))


def unsaid(described: Described) -> Iterator[str]:
    """What the description leaves out, and what it says only nearly."""
    if isinstance(described, AttentionSpec):
        return
    yield from described.notes
    reasons = {
        f"{stack.name}: nearly the attention that is priced; {block.attention.reason}"
        for stack in described.stacks
        for run in stack.runs
        for block in run.blocks
        if isinstance(block.attention, Nearly)
    }
    yield from sorted(reasons)


def _found(model: Model, place: str) -> tuple[Stack, Block, str]:
    stacks = {stack.name: stack for stack in model.stacks}
    name, _, rest = place.partition(".") if not place[:1].isdigit() else (model.stacks[-1].name, "", place)
    if name not in stacks:
        raise SpecError(f"{model.name} has no stack {name!r}; {nearest(name, stacks)}")
    number, _, rest = rest.partition(".")
    layers = stacks[name].layers
    if not number.isdecimal() or int(number) >= len(layers):
        there = f"0 to {len(layers) - 1}" if layers else "none"
        raise SpecError(f"{model.name} has no layer {place!r}; the layers of {name} are {there}")
    return stacks[name], layers[int(number)], rest


def _positions(stack: Stack) -> Iterator[int | None]:
    if stack.embedding and stack.embedding.positions:
        yield stack.embedding.positions.length
    specs = [block.specs.get("attention") for run in stack.runs for block in run.blocks]
    yield from (length for spec in specs if spec for length in _known(spec))


def _known(spec: AttentionSpec) -> list[int | None]:
    return [part.longest(spec) for _, part in spec.parts()]


def _least(lengths: Iterable[int | None]) -> int | None:
    return min((length for length in lengths if length is not None), default=None)

"""What can be priced of a model besides all of it, and how long its rows may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from ..blueprint import Block, Model, Nearly, Run, Stack
from ..errors import SpecError, nearest
from ..grouping import Heads
from ..seams import Part
from ..spec import AttentionSpec
from .whole import Described


class Longest(NamedTuple):
    """How many tokens a row may have, and how many the source that it reads; None where nothing says so."""

    own: int | None
    source: int | None


def longest(described: Described) -> Longest:
    """What learned positions allow, wherever they stand; those of an image are as many as there are.

    >>> from headwise.families import read
    >>> longest(read({"model_type": "gpt2"}))
    Longest(own=1024, source=None)
    """
    if isinstance(described, AttentionSpec):
        return Longest(_least(_known(described)), None)
    every = zip(described.stacks, fixed(described), strict=True)
    *early, last = [None if image else _least(_positions(stack)) for stack, image in every]
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


def check_placed(spec: AttentionSpec) -> None:
    """Refuse a layer whose sizes follow from a depth that nobody has said, unless it is the first as it stands."""
    for key, said, there in _late(spec):
        if not _first(spec):
            told = f"{key}={said!r} follows from the depth of a layer, and nothing says one"
            raise SpecError(f"{told}; give {there!r}, say, or a model whose stack places it")


def unsaid(described: Described) -> Iterator[str]:
    """What the description leaves out, and what it says only nearly."""
    if isinstance(described, AttentionSpec):
        late = {
            f"{key}={said!r} follows from the depth; priced is the first layer" for key, said, _ in _late(described)
        }
        yield from sorted(late)
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


def _late(spec: AttentionSpec) -> Iterator[tuple[str, str, Part]]:
    """Words by which sizes follow from the depth: their keys, what they say, and their part in the last of 3 layers."""
    if _sizes(spec.placed(0, 3)) == _sizes(spec.placed(2, 3)):
        return
    for name, part in spec.parts():
        there = part.placed(2, 3)
        for key in (field.name for field in fields(part)):
            said = getattr(part, key)
            if isinstance(said, str) and said != getattr(there, key):
                yield f"{name}.{key}", said, there


def _first(spec: AttentionSpec) -> bool:
    """Whether it has the sizes of a first layer, whatever the depth."""
    return _sizes(spec) == _sizes(spec.placed(0, 3)) == _sizes(spec.placed(0, 4))


def _sizes(spec: AttentionSpec) -> tuple[Heads, dict[str, tuple[int, ...]]]:
    return spec.heads, spec.shapes()


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

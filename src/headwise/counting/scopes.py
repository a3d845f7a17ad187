"""What can be priced of a model besides all of it, and how long its rows may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from ..blueprint import BlockSpec, ModelSpec, ApproximateAttention, LayerRun, StackSpec
from ..errors import SpecError, suggest
from ..grouping import Heads
from ..seams import Part
from ..spec import AttentionSpec
from .whole import SpecOrModel


class MaxLengths(NamedTuple):
    """How many tokens a row may have, and how many the source that it reads; None where nothing says so."""

    own: int | None
    source: int | None


def max_lengths(spec_or_model: SpecOrModel) -> MaxLengths:
    """What learned positions allow, wherever they stand; those of an image are as many as there are.

    >>> from headwise.families import read
    >>> max_lengths(read({"model_type": "gpt2"}))
    Longest(own=1024, source=None)
    """
    if isinstance(spec_or_model, AttentionSpec):
        return MaxLengths(_smallest(_check_known_depth(spec_or_model)), None)
    every = zip(spec_or_model.stacks, image_tokens(spec_or_model), strict=True)
    *early, last = [None if image else _smallest(_max_positions(stack)) for stack, image in every]
    return MaxLengths(last, _smallest(early))


def image_tokens(model: ModelSpec) -> list[int | None]:
    """How many tokens each stack has whatever is asked of it: those of an image."""
    tables = [stack.embedding for stack in model.stacks]
    return [table.patches.num_patches + table.first if table and table.patches else None for table in tables]


def select_layer(model: ModelSpec, path: str) -> ModelSpec | AttentionSpec:
    """One block of a model, or one attention in it: "3" of the last stack, "encoder.3", "decoder.3.cross".

    A block is a model that has nothing else.

    >>> from headwise.families import read
    >>> from headwise.select_counted import params
    >>> params(select_layer(read({"model_type": "gpt2"}), "11"))  # 12 h^2 + 13 h
    7087872
    """
    stack, block, rest = _find_block(model, path)
    if rest:
        if rest not in block.attention_specs:
            raise SpecError(f"{model.name}: {path!r} has no {rest!r}; {suggest(rest, block.attention_specs)}")
        spec = block.attention_specs[rest]
        return replace(spec, source=spec.source or spec.model) if rest == "cross" else spec
    alone = StackSpec(stack.name, stack.model, (LayerRun(1, (block,)),))
    if not block.cross:
        kind = model.kind if len(model.stacks) == 1 else "decoder" if stack is model.stacks[-1] else "encoder"
        return ModelSpec(model.name, kind, (alone,))
    return ModelSpec(model.name, model.kind, (StackSpec(model.stacks[0].name, model.stacks[0].model, ()), alone))


def check_depth_known(spec: AttentionSpec) -> None:
    """Refuse a layer whose sizes follow from a depth that nobody has said, unless it is the first as it stands."""
    for key, said, there in _depth_dependent_fields(spec):
        if not _is_first_layer(spec):
            told = f"{key}={said!r} follows from the depth of a layer, and nothing says one"
            raise SpecError(f"{told}; give {there!r}, say, or a model whose stack places it")


def list_assumptions(spec_or_model: SpecOrModel) -> Iterator[str]:
    """What the description leaves out, and what it says only nearly."""
    if isinstance(spec_or_model, AttentionSpec):
        late = {
            f"{key}={said!r} follows from the depth; priced is the first layer" for key, said, _ in _depth_dependent_fields(spec_or_model)
        }
        yield from sorted(late)
        return
    yield from spec_or_model.notes
    yield from (f"{one.reason}; what is computed there is not priced" for one in spec_or_model.beyond)
    reasons = {
        f"{stack.name}: nearly the attention that is priced; {block.attention.reason}"
        for stack in spec_or_model.stacks
        for run in stack.runs
        for block in run.blocks
        if isinstance(block.attention, ApproximateAttention)
    }
    yield from sorted(reasons)


def _depth_dependent_fields(spec: AttentionSpec) -> Iterator[tuple[str, str, Part]]:
    """Words by which sizes follow from the depth: their keys, what they say, and their part in the last of 3 layers."""
    if _parameter_shapes(spec.at_depth(0, 3)) == _parameter_shapes(spec.at_depth(2, 3)):
        return
    for name, part in spec.parts():
        there = part.at_depth(2, 3)
        for key in (field.name for field in fields(part)):
            said = getattr(part, key)
            if isinstance(said, str) and said != getattr(there, key):
                yield f"{name}.{key}", said, there


def _is_first_layer(spec: AttentionSpec) -> bool:
    """Whether it has the sizes of a first layer, whatever the depth."""
    return _parameter_shapes(spec) == _parameter_shapes(spec.at_depth(0, 3)) == _parameter_shapes(spec.at_depth(0, 4))


def _parameter_shapes(spec: AttentionSpec) -> tuple[Heads, dict[str, tuple[int, ...]]]:
    return spec.heads, spec.shapes()


def _find_block(model: ModelSpec, place: str) -> tuple[StackSpec, BlockSpec, str]:
    stacks = {stack.name: stack for stack in model.stacks}
    name, _, rest = place.partition(".") if not place[:1].isdigit() else (model.stacks[-1].name, "", place)
    if name not in stacks:
        raise SpecError(f"{model.name} has no stack {name!r}; {suggest(name, stacks)}")
    number, _, rest = rest.partition(".")
    layers = stacks[name].layers
    if not number.isdecimal() or int(number) >= len(layers):
        there = f"0 to {len(layers) - 1}" if layers else "none"
        raise SpecError(f"{model.name} has no layer {place!r}; the layers of {name} are {there}")
    return stacks[name], layers[int(number)], rest


def _max_positions(stack: StackSpec) -> Iterator[int | None]:
    if stack.embedding and stack.embedding.positions:
        yield stack.embedding.positions.length
    specs = [block.attention_specs.get("attention") for run in stack.runs for block in run.blocks]
    yield from (length for spec in specs if spec for length in _check_known_depth(spec))


def _check_known_depth(spec: AttentionSpec) -> list[int | None]:
    return [part.max_positions(spec) for _, part in spec.parts()]


def _smallest(lengths: Iterable[int | None]) -> int | None:
    return min((length for length in lengths if length is not None), default=None)

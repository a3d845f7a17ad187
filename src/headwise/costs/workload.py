"""What can be priced of a model besides all of it, and how long its rows may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from ..errors import SpecError, suggest
from ..interfaces import Part
from ..model_spec import ApproximateAttention, BlockSpec, LayerRun, ModelSpec, StackSpec
from ..spec.attention_spec import AttentionSpec
from ..spec.heads import Heads
from .flops import AttentionComponent, ExecutionTarget, ForwardCall, ModelComponent, SpecOrModel
from .roofline import Device, dtype_bytes


class MaxLengths(NamedTuple):
    """How many tokens a row may have, and how many the source that it reads; None where nothing says so."""

    own: int | None
    source: int | None


def max_lengths(spec_or_model: SpecOrModel) -> MaxLengths:
    """What learned positions allow, wherever they stand; those of an image are as many as there are.

    >>> from headwise.families import read_model_spec
    >>> max_lengths(read_model_spec({"model_type": "gpt2"}))
    MaxLengths(own=1024, source=None)
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

    >>> from headwise.families import read_model_spec
    >>> from headwise.costs import count_parameters
    >>> count_parameters(select_layer(read_model_spec({"model_type": "gpt2"}), "11"))  # 12 h^2 + 13 h
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
            f"{key}={said!r} follows from the depth; priced is the first layer"
            for key, said, _ in _depth_dependent_fields(spec_or_model)
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


# --- How much is asked, the calls that it comes to, and their totals as backends and torch's counter ---

MAX_SIZE = 2**62  # tokens, rows: beyond it nobody can mean what they say


@dataclass(frozen=True)
class Workload:
    """How much is asked: rows, tokens of each, precision, and the machine.

    `source` is how many tokens cross-attention reads, for a model as many as `context` unless said; `generate` how many
    tokens are written behind a prompt of `context`.
    """

    batch: int = 1
    context: int = 2048
    dtype: str = "bf16"
    device: str = "h200"
    source: int | None = None
    generate: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("source", 1), ("generate", 0)):
            size = getattr(self, name)
            if not (name == "source" and size is None) and (type(size) is not int or not least <= size <= MAX_SIZE):
                raise SpecError(f"{name}={size!r} is no load; give a whole number from {least} to {MAX_SIZE}")
        dtype_bytes(self.dtype)
        Device.from_name(self.device)

    @property
    def cached_tokens(self) -> int:
        """Tokens of a row that are remembered at the end: the last one written is read by nobody."""
        return self.context + max(self.generate - 1, 0)


PricedCalls = dict[str, tuple[list[ModelComponent], ForwardCall]]


def list_calls(spec_or_model: SpecOrModel, every: list[ModelComponent], workload: Workload, name: str) -> PricedCalls:
    """Every call that is priced, with the pieces that run in it."""
    whole, late = _full_call(spec_or_model, workload), [piece for piece in every if not piece.before_last_stack]
    calls = {"prefill": (every, whole)}
    readers = [piece for piece in late if isinstance(piece, AttentionComponent)]
    decodes = all(piece.can_decode for piece in readers) and (
        isinstance(spec_or_model, AttentionSpec) or not _reads_images_only(spec_or_model)
    )
    if decodes:
        calls["decode"] = (late, whole._replace(tokens=1, past=workload.context - 1, mode="steps"))
    if workload.generate and not decodes:
        raise SpecError(f"{name or 'this'} reads ahead and cannot write token by token; price it without generate")
    if workload.generate:
        steps = whole._replace(tokens=workload.generate - 1, past=workload.context, mode="steps")
        calls |= {"prompt": (every, whole._replace(mode="prompt")), "steps": (late, steps)}
    return calls


def _full_call(described: SpecOrModel, load: Workload) -> ForwardCall:
    """All tokens at once: those of the load, or of an image."""
    most, source = max_lengths(described), load.source or load.context
    if isinstance(described, AttentionSpec):
        check_depth_known(described)
        if described.source is not None and load.source is None:
            told = f"source={described.source} is the width of a sequence of a length that no load says"
            raise SpecError(f"{told}; give its tokens, as in Load(source=512) or --source 512")
        images: list[int | None] = [None, None]
    else:
        images = [None, *image_tokens(described)][-2:]
        source = min(source, most.source or source) if load.source is None else source
    if most.own is not None and load.cached_tokens > most.own:
        fewer = max(most.own - load.cached_tokens + load.context, 1)
        raise SpecError(
            f"{load.cached_tokens} tokens are more than the {most.own} that have positions; give context={fewer}"
        )
    if most.source is not None and source > most.source:
        fact = f"{source} tokens of the source are more than the {most.source} that have positions"
        raise SpecError(f"{fact}; give source={most.source}")
    return ForwardCall(load.batch, images[1] or load.context, source=images[0] or source)


def _reads_images_only(model: ModelSpec) -> bool:
    """Whether it looks at images alone."""
    return image_tokens(model)[-1] is not None


def executed_flops_by_call(calls: PricedCalls, on: ExecutionTarget) -> dict[str, int]:
    """What backends execute in each call."""
    every, whole = calls["prefill"]
    ahead = {phase: sum(p.times * p.executed_flops(call, on) for p in some) for phase, (some, call) in calls.items()}
    return {
        "prefill": ahead.pop("prefill"),
        "backward": sum(p.times * p.executed_backward_flops(whole, on) for p in every),
        **ahead,
    }


def counted_flops_by_call(calls: PricedCalls) -> dict[str, int | None]:
    """What torch's counter sees in each call; None where it cannot."""
    found: dict[str, int | None] = {}
    for phase, (some, call) in calls.items():
        seen = [(piece.times, piece.counted_products(call)) for piece in some]
        blind = any(each is None for _, each in seen)
        ways = {"prefill": (1, 1), "backward": (1, 2)} if phase == "prefill" else {phase: (1, 1)}
        for way, factors in ways.items():
            total = sum(
                n * sum(factors[one.num_grad_factors - 1] * one.flops for one in each or ()) for n, each in seen
            )
            found[way] = None if blind else total
    return found

"""Workloads: batch size, context length, precision and device; and the forward calls that follow
from them.

Also: the lengths that a model supports, and single layers of a model as separate specs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, cast

from ..attention.interfaces import Part
from ..attention.spec.attention_spec import AttentionSpec
from ..attention.spec.heads import Heads
from ..models.model_spec import WEIGHT_FORMATS, LayerRun, ModelSpec, StackSpec
from ..util.errors import SpecError, suggest
from .components import AttentionComponent, ModelComponent, SpecOrModel
from .counted_model import CountedModel
from .roofline import Device, ForwardCall
from .weight_storage import (
    DTYPE_BYTES,
    STORED,
    WeightStorage,
    check_weight_format,
    select_layers_storage,
)


class MaxLengths(NamedTuple):
    """Maximum length of a row and of the source sequence; None if unlimited."""

    own: int | None
    source: int | None


def max_lengths(spec_or_model: SpecOrModel) -> MaxLengths:
    """Return the maximum lengths that the position embeddings of a spec or model allow; stacks over
    images have none.

    >>> from headwise.models.families import read_model_spec
    >>> max_lengths(read_model_spec({"model_type": "gpt2"}))
    MaxLengths(own=1024, source=None)
    """
    if isinstance(spec_or_model, AttentionSpec):
        return MaxLengths(_smallest(_max_positions_of_parts(spec_or_model)), None)
    if isinstance(spec_or_model, CountedModel):
        return MaxLengths(None, None)
    stacks = zip(spec_or_model.stacks, image_tokens(spec_or_model), strict=True)
    *earlier, last = [
        None if image else _smallest(_max_positions(stack)) for stack, image in stacks
    ]
    return MaxLengths(last, _smallest(earlier))


def image_tokens(model: ModelSpec) -> list[int | None]:
    """Return the fixed number of tokens of each stack that reads images; None for other stacks."""
    embeddings = [stack.embedding for stack in model.stacks]
    return [
        embedding.patches.num_patches + embedding.first if embedding and embedding.patches else None
        for embedding in embeddings
    ]


DIGITS = tuple("-0123456789")  # how the number of a layer begins; -1 is the last


def select_layer(model: ModelSpec, path: str) -> ModelSpec | AttentionSpec:
    """Select one block of a model, or one attention in it: "3" of the last stack, "encoder.3",
    "decoder.3.cross".

    A block is returned as a model that consists of this block alone, stored as in the model. An
    attention is returned as a spec, which has no storage format.

    >>> from headwise.models.families import read_model_spec
    >>> from headwise.costs import count_parameters
    >>> count_parameters(
    ...     select_layer(read_model_spec({"model_type": "gpt2"}), "11")
    ... )  # 12 h^2 + 13 h
    7087872
    """
    stacks = {stack.name: stack for stack in model.stacks}
    name, _, place = (
        path.partition(".") if path[:1] not in DIGITS else (model.stacks[-1].name, "", path)
    )
    if name not in stacks:
        raise SpecError(f"{model.name} has no stack {name!r}; {suggest(name, stacks)}")
    index, _, role = place.partition(".")
    layers = stacks[name].layers
    depth = int(index) if index.removeprefix("-").isdecimal() else len(layers)
    if not -len(layers) <= depth < len(layers):
        fact = f"{name} has layers 0 to {len(layers) - 1}" if layers else f"{name} has no layers"
        raise SpecError(f"{model.name} has no layer {path!r}; {fact}")
    stack = stacks[name]
    depth %= len(layers)
    block = stack.layers[depth]
    if role:
        if role not in block.attention_specs:
            raise SpecError(
                f"{model.name}: {path!r} has no {role!r}; {suggest(role, block.attention_specs)}"
            )
        spec = block.attention_specs[role]
        return replace(spec, source=spec.source or spec.model) if role == "cross" else spec
    block_stack = StackSpec(stack.name, stack.model, (LayerRun(1, (block,)),))
    stored = select_layers_storage(model.quantization, stack.name, range(depth, depth + 1))
    if not block.cross:
        kind = (
            model.kind
            if len(model.stacks) == 1
            else "decoder"
            if stack is model.stacks[-1]
            else "encoder"
        )
        return ModelSpec(model.name, kind, (block_stack,), quantization=stored)
    first = StackSpec(model.stacks[0].name, model.stacks[0].model, ())
    return ModelSpec(model.name, model.kind, (first, block_stack), quantization=stored)


def check_depth_known(spec: AttentionSpec) -> None:
    """Raise an error if sizes of the layer depend on its depth in a model, unless it has the sizes
    of a first layer.
    """
    for key, value, part in _depth_dependent_fields(spec):
        if not (
            _parameter_shapes(spec)
            == _parameter_shapes(spec.at_depth(0, 3))
            == _parameter_shapes(spec.at_depth(0, 4))
        ):
            fact = (
                f"{key}={value!r} depends on the depth of the layer, which is unknown for a "
                "single layer"
            )
            raise SpecError(f"{fact}; use a fixed size such as {part!r}, or estimate a whole model")


def list_assumptions(spec_or_model: SpecOrModel) -> Iterator[str]:
    """Yield what the estimate leaves out or approximates, one sentence each."""
    if isinstance(spec_or_model, AttentionSpec):
        by_depth = {
            f"{key}={value!r} depends on the depth; the estimate is of the first layer"
            for key, value, _ in _depth_dependent_fields(spec_or_model)
        }
        yield from sorted(by_depth)
        return
    yield from spec_or_model.notes


def _depth_dependent_fields(spec: AttentionSpec) -> Iterator[tuple[str, str, Part]]:
    """Yield fields that make sizes depend on the depth: their key, value, and the part as in the
    last of 3 layers.
    """
    if _parameter_shapes(spec.at_depth(0, 3)) == _parameter_shapes(spec.at_depth(2, 3)):
        return
    for name, part in spec.parts():
        last_part = part.at_depth(2, 3)
        for key in (field.name for field in fields(part)):
            value = getattr(part, key)
            if isinstance(value, str) and value != getattr(last_part, key):
                yield f"{name}.{key}", value, last_part


def _parameter_shapes(spec: AttentionSpec) -> tuple[Heads, dict[str, tuple[int, ...]]]:
    return spec.heads, spec.shapes()


def _max_positions(stack: StackSpec) -> Iterator[int | None]:
    if stack.embedding and stack.embedding.positions:
        yield stack.embedding.positions.length
    for run in stack.runs:
        for block in run.blocks:
            spec = block.attention_specs.get("attention")
            if spec:
                yield from _max_positions_of_parts(spec)


def _max_positions_of_parts(spec: AttentionSpec) -> list[int | None]:
    return [part.max_positions(spec) for _, part in spec.parts()]


def _smallest(lengths: Iterable[int | None]) -> int | None:
    return min((length for length in lengths if length is not None), default=None)


# --- The workload, its forward calls, and their executed and counted FLOPs ------------------------

DEFAULT_CONTEXT = 2048
MAX_SIZE = 2**62  # of tokens and rows: larger values are typing errors


@dataclass(frozen=True)
class Workload:
    """A workload: `batch` rows of `context` tokens, in the precision `dtype`, on `device`.

    `context` defaults to 2,048, or the maximum of the spec or model that is estimated if that is
    less. `source` is the number of tokens that cross-attention reads; for a model it defaults to
    `context`. `generate` is the number of tokens generated after a prompt of `context` tokens.
    `weights` is the format of the weights, by default "stored": the quantised checkpoint's format,
    or else `dtype`. A quantised format such as dtype="fp8" applies to the weights, with everything
    else in bf16.

    >>> Workload(dtype="mxfp4")
    Workload(batch=1, context=2048, dtype='bf16', device='h200', source=None, generate=0,
    weights='mxfp4')
    """

    batch: int = 1
    context: int = cast(int, None)
    dtype: str = "bf16"
    device: str = "h200"
    source: int | None = None
    generate: int = 0
    weights: str = STORED

    has_default_context: ClassVar[bool] = False  # set for a workload without a given context

    def __post_init__(self) -> None:
        if self.context is None:  # pyright: ignore[reportUnnecessaryComparison] - the default
            object.__setattr__(self, "context", DEFAULT_CONTEXT)
            object.__setattr__(self, "has_default_context", True)
        for name, least in (("batch", 1), ("context", 1), ("source", 1), ("generate", 0)):
            size = getattr(self, name)
            if not (name == "source" and size is None) and (
                type(size) is not int or not least <= size <= MAX_SIZE
            ):
                raise SpecError(
                    f"{name} must be a whole number from {least} to {MAX_SIZE}, got {size!r}"
                )
        if self.dtype in WEIGHT_FORMATS:
            if self.weights not in (STORED, self.dtype):
                fact = (
                    f"dtype={self.dtype!r} is a format of weights, and "
                    f"weights={self.weights!r} is another"
                )
                raise SpecError(f"{fact}; give one of them")
            object.__setattr__(self, "weights", self.dtype)
            object.__setattr__(self, "dtype", "bf16")
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(
                f"dtype={self.dtype!r} is unknown; "
                f"{suggest(self.dtype, [*DTYPE_BYTES, *WEIGHT_FORMATS])}"
            )
        check_weight_format(self.weights)
        Device.from_name(self.device)

    def storage(self, spec_or_model: SpecOrModel) -> WeightStorage:
        """Return the formats of the weights of a spec or model."""
        is_layer = isinstance(spec_or_model, AttentionSpec)
        stored = None if is_layer else spec_or_model.quantization
        return WeightStorage.from_name(self.weights, self.dtype, stored)

    def fitted_to(self, targets: Iterable[SpecOrModel]) -> Workload:
        """Return the workload with a default context that none of these specs and models exceeds.

        >>> from headwise.models.families import read_model_spec
        >>> Workload().fitted_to([read_model_spec({"model_type": "gpt2"})]).context
        1024
        """
        limits = [
            own - max(self.generate - 1, 0)
            for own, _ in map(max_lengths, targets)
            if own is not None
        ]
        if not self.has_default_context or not limits:
            return self
        return replace(self, context=max(min([self.context, *limits]), 1))

    @property
    def cached_tokens(self) -> int:
        """Number of tokens per row in the cache at the end; the last generated token is never fed
        to the model.
        """
        return self.context + max(self.generate - 1, 0)


CallsByPhase = dict[str, tuple[list[ModelComponent], ForwardCall]]


def list_calls(
    spec_or_model: SpecOrModel, components: list[ModelComponent], workload: Workload, name: str
) -> CallsByPhase:
    """Return the forward calls of a workload by phase, each with the components that run in it.

    "prefill" is always there, "decode" (one step at full context) for a causal spec or model,
    "prompt" and "steps" if the workload generates tokens.
    """
    full_call = _full_call(spec_or_model, workload)
    decoder = [component for component in components if not component.before_last_stack]
    attentions = [component for component in decoder if isinstance(component, AttentionComponent)]
    # Nothing can be generated if the last stack reads images.
    if isinstance(spec_or_model, CountedModel):
        reads_tokens = spec_or_model.can_decode
    elif isinstance(spec_or_model, ModelSpec):
        reads_tokens = not image_tokens(spec_or_model)[-1]
    else:
        reads_tokens = True
    calls: CallsByPhase = {"prefill": (components, full_call)}
    past = workload.context - 1
    if reads_tokens and all(one.can_decode(past) for one in attentions):
        calls["decode"] = (decoder, full_call._replace(tokens=1, past=past, mode="steps"))
    if not workload.generate:
        return calls
    blocking = [one for one in attentions if not one.can_decode(workload.context)]
    if blocking or not reads_tokens:
        subject = name or "this spec"
        prefixes = [one.spec.pattern.tokens_before_decode for one in blocking]
        if reads_tokens and None not in prefixes:
            fact = f"{subject} needs a prefix of {max(filter(None, prefixes))} tokens"
            raise SpecError(
                f"{fact} before it generates, got context={workload.context}; use a longer context"
            )
        raise SpecError(
            f"{subject} is not causal and cannot generate token by token; leave out generate"
        )
    calls["prompt"] = (components, full_call._replace(mode="prompt"))
    num_steps = workload.generate - 1
    steps = full_call._replace(tokens=num_steps, past=workload.context, mode="steps")
    calls["steps"] = (decoder, steps)
    return calls


def _full_call(spec_or_model: SpecOrModel, workload: Workload) -> ForwardCall:
    """Return a single forward over the whole workload, or over all patches of an image."""
    limits = max_lengths(spec_or_model)
    source = workload.source or workload.context
    if isinstance(spec_or_model, AttentionSpec):
        check_depth_known(spec_or_model)
        if spec_or_model.source is not None and workload.source is None:
            fact = (
                f"the spec reads a source sequence (width {spec_or_model.source}) whose length "
                "is not given"
            )
            raise SpecError(f"{fact}; set Workload(source=512) or --source 512, for example")
        images: list[int | None] = [None, None]
    elif isinstance(spec_or_model, CountedModel):
        images = [None, None]
    else:
        images = [None, *image_tokens(spec_or_model)][-2:]
        source = min(source, limits.source or source) if workload.source is None else source
    if limits.own is not None and workload.cached_tokens > limits.own:
        max_context = max(limits.own - workload.cached_tokens + workload.context, 1)
        fact = f"{workload.cached_tokens} tokens exceed the maximum length {limits.own}"
        raise SpecError(f"{fact}; use context={max_context} or less")
    if limits.source is not None and source > limits.source:
        fact = f"{source} source tokens exceed the maximum source length {limits.source}"
        raise SpecError(f"{fact}; use source={limits.source} or less")
    return ForwardCall(workload.batch, images[1] or workload.context, source=images[0] or source)

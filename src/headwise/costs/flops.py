"""What a layer costs, item by item: a name, the formula it was computed by, and the number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from ..backends import CallSignature, choose_backend, linear_attention, recomputed_flops
from ..interfaces import Modifier, Part
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CallSize, CoreShape, Phase
from ..masking.patterns import Pattern
from ..model_spec import BlockSpec, EmbeddingSpec, ModelSpec, OutputHeadSpec, StackSpec, WeightSpec
from ..spec.attention_spec import AttentionSpec
from .symbolic_int import SymbolicInt, formula, formula_as_factor, name_sizes


class CostTerm(NamedTuple):
    """One line of a sum: what it is, how it is worked out, and what it comes to."""

    name: str
    formula: str
    value: int


class MatrixProduct(NamedTuple):
    """A matrix product: its name, its FLOPs, and how many of its two factors have a gradient."""

    name: str
    flops: int
    num_grad_factors: int = 2


@dataclass(frozen=True)
class CostBreakdown:
    """Items and their sum."""

    terms: tuple[CostTerm, ...]

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(term.value for term in self.terms)

    @staticmethod
    def from_items(items: Iterable[tuple[str, int]]) -> CostBreakdown:
        """From names and numbers that know their formulas; what costs nothing is left out."""
        return CostBreakdown.from_repeated_items((name, value, 1) for name, value in items)

    @staticmethod
    def from_repeated_items(items: Iterable[tuple[str, int, int]]) -> CostBreakdown:
        """From names, numbers, and how often each is there; what is equal becomes one item.

        >>> CostBreakdown.from_repeated_items([("up", 6, 2), ("up", 6, 3), ("up", 7, 1)]).terms
        (CostTerm(name='up', formula='5 · 6', value=30), CostTerm(name='up', formula='7', value=7))
        """
        times: Counter[tuple[str, str, str, int]] = Counter()
        for name, value, often in items:
            if value and often:
                times[name, formula(value), formula_as_factor(value), int(value)] += often
        lines = ((name, said if n == 1 else f"{n} · {held}", n * v) for (name, said, held, v), n in times.items())
        return CostBreakdown(tuple(CostTerm(*line) for line in lines))

    def __add__(self, other: CostBreakdown) -> CostBreakdown:
        return CostBreakdown(self.terms + other.terms)


def attention_parameters(spec: AttentionSpec) -> CostBreakdown:
    """Learned numbers, tensor by tensor.

    >>> import headwise as hw
    >>> [term.formula for term in attention_parameters(hw.design(model=512, heads=8)).terms]
    ['q dim model', 'kv dim model', 'kv vdim model', 'model out vdim']
    """
    return CostBreakdown.from_items(_parameter_items(name_sizes(spec)))


def cached_numbers(spec: AttentionSpec) -> CostBreakdown:
    """Numbers kept of one token; of a state, all of it."""
    return CostBreakdown.from_items(_cached_items(name_sizes(spec)))


def forward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """FLOPs of the products that the spec asks for, over the pairs its pattern allows."""
    return CostBreakdown.from_items((one.name, one.flops) for one in list_products(spec_as_executed(spec, work), work))


def backward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """FLOPs of the products behind gradients of the input and of every parameter.

    Each product of the forward pass has two, one for either factor, unless one of them is a constant.
    """
    return CostBreakdown.from_items(
        (one.name, one.num_grad_factors * one.flops) for one in list_products(spec_as_executed(spec, work), work)
    )


def spec_as_executed(spec: AttentionSpec, work: CallSize) -> AttentionSpec:
    """The spec in the form in which this call runs."""
    return replace(spec, project=spec.projection_form(work.queries == 1))


def list_products(spec: AttentionSpec, work: CallSize) -> Iterator[MatrixProduct]:
    """Every product of a call of this spec as it stands; of the core those of the pairs that `work` says."""
    spec, work = name_sizes(spec), _symbolic_sizes(work)
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            flops = 2 * param.layout.numel(sizes) * work.tokens(param.applied)
            yield MatrixProduct(f"{name}.{key}", flops, 2 if param.trainable else 1)
        fixed = part.constant_flops(spec, work)
        yield MatrixProduct(f"{name} (own products)", part.flops(spec, work) - fixed)
        yield MatrixProduct(f"{name} (with constants)", fixed, 1)
    yield from _core_products(spec, work)


def _symbolic_sizes(work: CallSize) -> CallSize:
    """The sizes of a call under their letters, but for those that have a name already."""
    names = {"batch": "b", "queries": "s", "new_tokens": "r", "keys": "t", "pairs": "pairs"}
    sizes = {name: (getattr(work, name), letter) for name, letter in names.items()}
    return CallSize(
        **{n: size if isinstance(size, SymbolicInt) else SymbolicInt.of(size, a) for n, (size, a) in sizes.items()}
    )


def _name_axis_sizes(spec: AttentionSpec, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes that were counted, and so came without a name, under the axis they belong to."""
    return {axis: size if isinstance(size, SymbolicInt) else SymbolicInt.of(size, axis) for axis, size in sizes.items()}


def _parameter_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            if param.trainable:
                yield f"{name}.{key}", param.layout.numel(sizes)


def _cached_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part, held in _state_items(spec):
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, layout in held.items():
            yield f"{name}.{key}", layout.numel(sizes)


def _state_items(spec: AttentionSpec) -> Iterator[tuple[str, Part, Mapping[str, AxisLayout]]]:
    if spec.recurrent_part is not None and spec.is_recurrent:
        name, part = spec.recurrent_part
        yield name, part, part.state_layouts(spec)
        return
    yield from ((name, part, part.kv_entry_layouts(spec)) for name, part in spec.parts())


def _core_products(spec: AttentionSpec, work: CallSize) -> Iterator[MatrixProduct]:
    core: CoreShape = spec.core_of(spec.project)
    heads, rows = SymbolicInt.of(len(core.key_head_of_query), "q"), SymbolicInt.of(len(core.value_head_of_row), "voice")
    pairs = work.batch * work.pairs
    scores = 2 * pairs * heads * _symbol_of_size(core.score_dim, "dim")
    yield MatrixProduct("core (scores)", scores)
    yield MatrixProduct(
        "core (values)", 2 * pairs * rows * _symbol_of_size(core.vdim, "vdim"), value_grad_factors(spec, core)
    )


def _symbol_of_size(size: int, name: str) -> int:
    return size if isinstance(size, SymbolicInt) or not size else SymbolicInt.of(size, name)


def value_grad_factors(spec: AttentionSpec, core: CoreShape) -> int:
    """How many factors of the reading of values have a gradient: 1 where no weight depends on what is learned."""
    inner = (Phase.SCORES, Phase.WEIGHTS)
    parts = [spec.normaliser, spec.similarity, *(m for _, m in spec.parts_of(Modifier) if m.phase in inner)]
    return 2 if core.score_dim or any(param.trainable for part in parts for param in part.params(spec).values()) else 1


# --- An attention where it stands, and what its products are in one call -------------------------------

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardCall(NamedTuple):
    """New tokens of each row behind `past` ones, and the tokens of the source that they read.

    way="whole": all at once, as in training; "prompt": the same, but of heads over each token only the last is asked;
    "steps": single tokens one after another, the source long remembered.
    """

    batch: int
    tokens: int
    past: int = 0
    source: int = 0
    mode: str = "whole"

    @property
    def encoder_call(self) -> ForwardCall:
        """The same call, as stacks before the last one see it."""
        return self._replace(tokens=0 if self.mode == "steps" else self.source, past=0)


class ExecutionTarget(NamedTuple):
    """What a call runs on: a kind of device, and a precision."""

    device: str = "cpu"
    dtype: str = "fp32"


CPU_FP32 = ExecutionTarget()


@dataclass(frozen=True)
class AttentionComponent:
    """An attention, alone or as it stands in a model so many times.

    `role` is "attention", or "cross" where it reads the source; `early` says that it stands before the last stack.
    """

    name: str
    spec: AttentionSpec
    role: str = "attention"
    times: int = 1
    before_last_stack: bool = False

    @property
    def can_decode(self) -> bool:
        """Whether single tokens can be asked one after another."""
        return self.role == "cross" or self.spec.pattern.tokens_before_decode == 0

    def work(self, call: ForwardCall) -> CallSize:
        """The work of a call; of single steps, their sum."""
        batch, new, past, source, way = call.encoder_call if self.before_last_stack else call
        pattern, asks = self.spec.pattern, range(past, past + new)
        if self.role == "cross" and way == "steps":
            return CallSize(batch, new, 0, new * source, pattern.pairs(asks, range(source)))
        if self.role == "cross":
            return CallSize(batch, new, source, source, pattern.pairs(asks, range(source)))
        read = _cached_tokens_read(pattern, past, new) if way == "steps" else past + new
        return CallSize(batch, new, new, read, pattern.pairs(asks, range(past + new)))

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """What is asked for: allowed pairs only, and sums over tokens where these are the same function."""
        work, job = self.work(call), self._call_signature(call)
        pairs = SymbolicInt.of(work.pairs, f"pairs[{self.spec.pattern.text}]" if self.name else "pairs")
        every = list_products(self._executed_spec(call), replace(work, pairs=pairs))
        if self.spec.recurrent_part is None or linear_attention.unsupported_reasons(job):
            yield from every
            return
        yield from (one for one in every if not one.name.startswith("core"))
        how = "a reading of the state, and each chunk of tokens among itself"
        sums = SymbolicInt.of(_executed_core_flops(linear_attention, job, work, call), how, loose="sum")
        # A product of two things that learn is two products; shares that no token has a say in do not learn.
        yield MatrixProduct("core (sums)", sums, 2 if self.spec.recurrent_part[1].num_state_features(job.core) else 1)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct] | None:
        """What torch's counter sees of the dense backend, allowed or not; None of steps that keep only a state."""
        work = self.work(call)
        if self._call_signature(call).has_recurrent_state:
            return None
        rectangle = work.keys if call.mode == "steps" else work.queries * work.keys
        return list(list_products(self._executed_spec(call), replace(work, pairs=rectangle)))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """What the backend executes that the layer would choose there."""
        job = self._call_signature(call, on)
        core = _executed_core_flops(choose_backend(job, self.work(call)), job, self.work(call), call)
        return core + sum(one.flops for one in self._products_outside_core(call, core))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """The same of gradients, with the scores that a backend did not keep and so forms once more."""
        job = replace(self._call_signature(call, on), needs_grad=True, training=True)
        work = self.work(call)
        backend = choose_backend(job, work)
        core = _executed_core_flops(backend, job, work, call)
        around = sum(one.num_grad_factors * one.flops for one in self._products_outside_core(call, core))
        again = recomputed_flops(backend, job, work, core)
        return around + core * value_grad_factors(self.spec, job.core) + again

    def num_weights_read(self, call: ForwardCall) -> int:
        """How many learned numbers are read: all, but for maps of tokens that do not come."""
        running, work = self._executed_spec(call), self.work(call)
        every = ((part, param) for _, part in running.parts() for param in part.params(running).values())
        met = ((part, one) for part, one in every if one.trainable and (not one.applied or work.tokens(one.applied)))
        return sum(one.layout.numel(running.sizes_of(part)) for part, one in met)

    def _executed_spec(self, call: ForwardCall) -> AttentionSpec:
        return replace(self.spec, project=self.spec.projection_form(call.mode == "steps"))

    def _call_signature(self, call: ForwardCall, on: ExecutionTarget = CPU_FP32) -> CallSignature:
        spec, one = self.spec, call.mode == "steps"
        stated = one and spec.is_recurrent and self.role == "attention"
        core = spec.core_of(spec.projection_form(one))
        return CallSignature(
            spec, core, device=on.device, dtype=TORCH_DTYPES[on.dtype], single_query=one, has_recurrent_state=stated
        )

    def _products_outside_core(self, call: ForwardCall, core: int) -> Iterable[MatrixProduct]:
        """The products outside the core, where a backend forms as many pairs as its core tells of."""
        work, running = self.work(call), self._executed_spec(call)
        pair = running.core.flops(work.batch)
        formed = core // pair if pair else work.keys if call.mode == "steps" else work.queries * work.keys
        every = list_products(running, replace(work, pairs=formed))
        return (one for one in every if not one.name.startswith("core"))


def _cached_tokens_read(pattern: Pattern, past: int, steps: int) -> int:
    """Tokens that single queries find remembered, all steps together: a ring holds no more than may be read."""
    first, last = pattern.retention
    kept = past + steps if last is None else min(past + steps, first + last)
    growing = max(kept - past, 0)  # steps that find one more than the step before
    return growing * past + growing * (growing + 1) // 2 + (steps - growing) * kept


def _executed_core_flops(backend: ModuleType, job: CallSignature, work: CallSize, call: ForwardCall) -> int:
    """What a backend spends in the core; of one query at a time it grows evenly with the keys it finds."""
    run: Callable[[CallSignature, CallSize], int] = backend.executed_flops
    if call.mode != "steps":
        return run(job, work)
    none, every = (run(job, CallSize(work.batch, 1, 1, keys)) for keys in (0, work.keys))
    return none * work.queries + every - none


# --- What is priced, in pieces -------------------------------------------------------------------------

SpecOrModel = AttentionSpec | ModelSpec

# Of which tokens of a call a head is asked: of each, or of one a row.
TOKENS_SCORED_BY_HEAD: dict[str, Callable[[ForwardCall], int]] = {
    "each": lambda call: 1 if call.mode == "prompt" else call.tokens,
    "first": lambda call: 0 if call.mode == "steps" else 1,
    "last": lambda call: call.tokens if call.mode == "steps" else 1,
    "mean": lambda call: call.tokens if call.mode == "steps" else 1,
}


@dataclass(frozen=True)
class LinearComponent:
    """Matrices that tokens are multiplied with one by one, and tables that they are looked up in.

    `tokens` says how many of a row, `met` how many numbers so many tokens read; `looked` is how many numbers are
    looked up for each token. `factors` is 1 where what is multiplied has no gradient, such as pixels.
    """

    name: str
    role: str
    matrices: tuple[WeightSpec, ...]
    count_tokens: Callable[[ForwardCall], int]
    num_weights_met: Callable[[int], int]
    times: int = 1
    before_last_stack: bool = False
    rows_looked_up: int = 0
    num_grad_factors: int = 2

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """One product for each matrix."""
        new = SymbolicInt.of(self._num_tokens(call), "s")
        for matrix in self.matrices:
            sizes = {axis: SymbolicInt.of(size, axis) for axis, size in matrix.axis_sizes.items()}
            flops = 2 * matrix.layout.numel(sizes) * SymbolicInt.of(call.batch, "b") * new
            yield MatrixProduct(matrix.name, flops, self.num_grad_factors)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct]:
        """What torch's counter sees: the same."""
        return list(self.required_products(call))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """What is executed: the same, on whatever."""
        return sum(one.flops for one in self.required_products(call))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """The same of gradients."""
        return sum(one.num_grad_factors * one.flops for one in self.required_products(call))

    def numbers_moved(self, call: ForwardCall) -> int:
        """Numbers that it reads and writes: weights that are met, and what goes into and out of every matrix."""
        tokens = call.batch * self._num_tokens(call)
        return (
            self.num_weights_met(tokens)
            + tokens * (sum(map(_input_output_sizes, self.matrices)) + 2 * self.rows_looked_up)
            if tokens
            else 0
        )

    def _num_tokens(self, call: ForwardCall) -> int:
        return self.count_tokens(call.encoder_call if self.before_last_stack else call)


def _input_output_sizes(matrix: WeightSpec) -> int:
    """How many numbers go into a matrix and come out of it, for one token."""
    sizes = dict(matrix.axis_sizes)
    often, out = sizes.pop("active", 1), sizes[next(axis for axis in matrix.layout.axes if axis != "active")]
    return often * (out + matrix.numel // (often * out))


ModelComponent = AttentionComponent | LinearComponent


def list_components(spec_or_model: SpecOrModel) -> list[ModelComponent]:
    """Everything that runs, in order."""
    if isinstance(spec_or_model, AttentionSpec):
        return [AttentionComponent("", spec_or_model, "attention" if spec_or_model.source is None else "cross")]
    found: list[ModelComponent] = []
    for stack in spec_or_model.stacks:
        early = stack is not spec_or_model.stacks[-1]
        found += [_embedding_component(stack, stack.embedding, early)] if stack.embedding else []
        blocks: Counter[BlockSpec] = Counter()
        for run in stack.runs:
            blocks.update({block: run.times * run.blocks.count(block) for block in run.blocks})
        for block, times in blocks.items():
            found += _block_components(stack, block, times, early)
    return found + [_head_component(spec_or_model, head) for head in spec_or_model.heads]


def _block_components(stack: StackSpec, block: BlockSpec, times: int, early: bool) -> Iterator[ModelComponent]:
    for role, spec in block.attention_specs.items():
        said = replace(spec, source=spec.source or spec.model) if role == "cross" else spec
        yield AttentionComponent(f"{stack.name}.*.{role}", said, role, times, early)
    if feed := block.feed:
        yield LinearComponent(
            f"{stack.name}.*.feed",
            "feed",
            tuple(feed.matmul_weights(stack.model)),
            lambda call: call.tokens,
            lambda tokens: feed.active_params(stack.model, tokens),
            times,
            early,
        )


def _embedding_component(stack: StackSpec, embedding: EmbeddingSpec, early: bool) -> LinearComponent:
    patches, matrices = embedding.patches, tuple(embedding.matmul_weights(stack.model))
    return LinearComponent(
        f"{stack.name}.embedding",
        "embedding",
        matrices,
        lambda call: call.tokens and patches.num_patches if patches else call.tokens,
        lambda _: sum(matrix.numel for matrix in matrices),
        before_last_stack=early,
        rows_looked_up=0 if patches else stack.model,
        num_grad_factors=1,
    )


def _head_component(model: ModelSpec, head: OutputHeadSpec) -> LinearComponent:
    matrices = tuple(head.matmul_weights(model.stacks[-1].model))
    numbers = sum(matrix.numel for matrix in matrices)
    return LinearComponent(f"head.{head.name}", "head", matrices, TOKENS_SCORED_BY_HEAD[head.at], lambda _: numbers)


def parameter_terms(spec_or_model: SpecOrModel) -> CostBreakdown:
    """Learned numbers, tensor by tensor; layers that have the same tensor are one term.

    >>> from headwise.families import read_model_spec
    >>> for term in parameter_terms(read_model_spec({"model_type": "gpt2", "n_layer": 2})).terms[:3]:
    ...     print(*term)
    decoder.embedding.tokens token model 38597376
    decoder.embedding.positions position model 786432
    decoder.*.attention.project.q 2 · q dim model 1179648
    """
    if isinstance(spec_or_model, AttentionSpec):
        return attention_parameters(spec_or_model)
    times: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    found: dict[tuple[str, tuple[tuple[str, int], ...]], WeightSpec] = {}
    for w in spec_or_model.weights():
        if w.trainable:
            line = (
                re.sub(r"^(\w+)\.\d+\.", r"\1.*.", w.name),
                tuple((axis, w.axis_sizes[axis]) for axis in _axis_sizes(w)),
            )
            times[line] += 1
            found[line] = w
    return CostBreakdown.from_repeated_items((line[0], _num_elements(w), times[line]) for line, w in found.items())


def _axis_sizes(w: WeightSpec) -> list[str]:
    return [name for axis in w.layout.axes for name in axis.split("|")]


def _num_elements(w: WeightSpec) -> int:
    told = {"source": "model"} if w.role == "attention" else {}  # what reads its own stack is told of no other width
    return w.layout.numel({axis: SymbolicInt.of(w.axis_sizes[axis], told.get(axis, axis)) for axis in _axis_sizes(w)})


def active_parameters(spec_or_model: SpecOrModel) -> int:
    """The learned numbers of which one token meets some: all, but for the experts that it does not choose."""
    total = parameter_terms(spec_or_model).total
    if isinstance(spec_or_model, AttentionSpec):
        return total
    feeds = [(stack.model, block.feed) for stack in spec_or_model.stacks for block in stack.layers if block.feed]
    return total - sum(
        sum(w.numel for w in feed.weights(model)) - feed.active_params(model, 1) for model, feed in feeds
    )

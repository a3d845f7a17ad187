"""Parameters, FLOPs and cache entries of a layer or model as sums of terms: a name, a formula and a
number each.

In formulas, the sizes of a call are letters: B rows (the batch), T queries, which are the tokens
that pass through a matrix, S keys that a row attends to, `new` tokens whose keys and values are
projected, and `pairs` of a query and a key that the pattern allows in one row. The sizes of a spec
have the names of its axes, as `headwise spec` prints them: `q`, `kv` and `v` heads, `out` output
heads, `row` rows of weights, `dim` and `vdim` channels, `model` and `source` widths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from ..backends import (
    CallSignature,
    choose_backend,
    linear_attention,
    recomputed_flops,
    split_by_pattern,
)
from ..backends.core_interface import HeadGroup
from ..cache import split_by_retention
from ..interfaces import Mix, Modifier, Part
from ..interfaces.axis_layout import AxisLayout
from ..interfaces.core_types import CallSize, CoreShape, Phase
from ..masking.patterns import Pattern, count_pairs_by_head
from ..model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    ModelSpec,
    OutputHeadSpec,
    StackSpec,
    WeightSpec,
)
from ..model_spec.components import add_prefix
from ..model_spec.mixers import SequenceMixerSpec
from ..spec.attention_spec import AttentionSpec
from .pairs_per_head import pairs_over_heads, patterns_of_kv_heads
from .symbolic_int import SymbolicInt, formula, formula_as_factor, name_sizes
from .weight_storage import (
    SINGLE_LAYER,
    WeightStorage,
    group_blocks_stored_alike,
    is_routed,
    list_feed_weights,
    list_head_matrices,
)


class CostTerm(NamedTuple):
    """One term of a sum: its name, its formula, and its value."""

    name: str
    formula: str
    value: int


class MatrixProduct(NamedTuple):
    """A matrix product: its name, its FLOPs, and how many of its two factors need a gradient."""

    name: str
    flops: int
    num_grad_factors: int = 2


@dataclass(frozen=True)
class CostBreakdown:
    """Cost terms and their sum."""

    terms: tuple[CostTerm, ...]

    @property
    def total(self) -> int:
        """The sum of all terms."""
        return sum(term.value for term in self.terms)

    @staticmethod
    def from_items(items: Iterable[tuple[str, int]]) -> CostBreakdown:
        """Build from (name, value) pairs; a `SymbolicInt` also gives its formula, and zeros are
        dropped.
        """
        return CostBreakdown.from_repeated_items((name, value, 1) for name, value in items)

    @staticmethod
    def from_repeated_items(items: Iterable[tuple[str, int, int]]) -> CostBreakdown:
        """Build from (name, value, count) triples; equal names, formulas and values become one
        term.

        >>> CostBreakdown.from_repeated_items([("up", 6, 2), ("up", 6, 3), ("up", 7, 1)]).terms
        (CostTerm(name='up', formula='5 · 6', value=30), CostTerm(name='up', formula='7', value=7))
        """
        counts: Counter[tuple[str, str, str, int]] = Counter()
        for name, value, count in items:
            if value and count:
                counts[name, formula(value), formula_as_factor(value), int(value)] += count
        terms: list[CostTerm] = []
        for (name, text, factor_text, value), count in counts.items():
            terms.append(
                CostTerm(name, text if count == 1 else f"{count} · {factor_text}", count * value)
            )
        return CostBreakdown(tuple(terms))

    def __add__(self, other: CostBreakdown) -> CostBreakdown:
        return CostBreakdown(self.terms + other.terms)


def attention_parameters(spec: AttentionSpec) -> CostBreakdown:
    """Trainable parameters of an attention layer, one term per tensor.

    >>> import headwise as hw
    >>> [term.formula for term in attention_parameters(hw.design(model=512, heads=8)).terms]
    ['q dim model', 'kv dim model', 'kv vdim model', 'model out vdim']
    """
    return CostBreakdown.from_items(_parameter_items(name_sizes(spec)))


def cached_numbers(spec: AttentionSpec) -> CostBreakdown:
    """Values that the cache stores per token; for a recurrent spec, the values
    of its whole state.
    """
    return CostBreakdown.from_items(_cached_items(name_sizes(spec)))


def forward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """Required FLOPs of the forward pass: the matrix products of the spec, over the pairs that its
    pattern allows.
    """
    products = list_products(spec_as_executed(spec, work), work)
    return CostBreakdown.from_items((product.name, product.flops) for product in products)


def backward_flops(spec: AttentionSpec, work: CallSize) -> CostBreakdown:
    """Required FLOPs of the backward pass: the products that give gradients of the input and of
    every parameter.

    Each product of the forward pass has two, one for each factor, unless one of the factors is a
    constant.
    """
    products = list_products(spec_as_executed(spec, work), work)
    return CostBreakdown.from_items(
        (product.name, product.num_grad_factors * product.flops) for product in products
    )


def spec_as_executed(spec: AttentionSpec, work: CallSize) -> AttentionSpec:
    """The spec with its projections in the form that this call runs (MLA, for one, has another form
    for one query).
    """
    return replace(spec, project=spec.projection_form(work.queries == 1))


def list_products(spec: AttentionSpec, work: CallSize) -> Iterator[MatrixProduct]:
    """Yield every matrix product of a call with the projections as given; the core covers
    `work.pairs` pairs.
    """
    spec, work = name_sizes(spec), _symbolic_sizes(work)
    core = spec.core_of(spec.project)
    parts_with_constant_input, _ = _find_constant_weights(spec, core)
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            flops = 2 * param.layout.numel(sizes) * work.tokens(param.applied)
            yield MatrixProduct(f"{name}.{key}", flops, 2 if param.trainable else 1)
        constant_flops = part.constant_flops(spec, work)
        if isinstance(part, Mix) and part in parts_with_constant_input:
            constant_flops += part.mixed_flops(spec, work)
        yield MatrixProduct(f"{name} (own products)", part.flops(spec, work) - constant_flops)
        yield MatrixProduct(f"{name} (with constants)", constant_flops, 1)
    yield from _core_products(spec, core, work)


def _symbolic_sizes(work: CallSize) -> CallSize:
    """Name the sizes of a call, except those that are symbolic already."""
    names = {"batch": "B", "queries": "T", "new_tokens": "new", "keys": "S", "pairs": "pairs"}
    sizes = {name: (getattr(work, name), letter) for name, letter in names.items()}
    symbols = {
        n: size if isinstance(size, SymbolicInt) else SymbolicInt.of(size, a)
        for n, (size, a) in sizes.items()
    }
    return replace(work, **symbols)


def _name_axis_sizes(spec: AttentionSpec, sizes: dict[str, int]) -> dict[str, int]:
    """Name by their axes the sizes that are plain integers."""
    return {
        axis: size if isinstance(size, SymbolicInt) else SymbolicInt.of(size, axis)
        for axis, size in sizes.items()
    }


def _parameter_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part in spec.parts():
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, param in part.params(spec).items():
            if param.trainable:
                yield f"{name}.{key}", param.layout.numel(sizes)


def _cached_items(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    for name, part, layouts in _cached_layouts(spec):
        sizes = _name_axis_sizes(spec, spec.sizes_of(part))
        for key, layout in layouts.items():
            yield f"{name}.{key}", layout.numel(sizes)


def _cached_layouts(spec: AttentionSpec) -> Iterator[tuple[str, Part, Mapping[str, AxisLayout]]]:
    if spec.recurrent_part is not None and spec.is_recurrent:
        name, part = spec.recurrent_part
        yield name, part, part.state_layouts(spec)
        return
    yield from ((name, part, part.kv_entry_layouts(spec)) for name, part in spec.parts())


def _core_products(spec: AttentionSpec, core: CoreShape, work: CallSize) -> Iterator[MatrixProduct]:
    if work.head_pairs:
        scores, values = (
            SymbolicInt.of(pairs, "head_pairs") for pairs in pairs_over_heads(spec, work)
        )
    else:
        heads = SymbolicInt.of(
            spec.num_core_heads, "q" if spec.num_core_heads == spec.heads.q else "row"
        )
        scores, values = (
            work.pairs * heads,
            work.pairs * SymbolicInt.of(len(core.value_head_of_row), "row"),
        )
    yield MatrixProduct(
        "core (scores)", 2 * work.batch * scores * _symbol_of_size(core.score_dim, "dim")
    )
    yield MatrixProduct(
        "core (values)",
        2 * work.batch * values * _symbol_of_size(core.vdim, "vdim"),
        value_grad_factors(spec, core),
    )


def _symbol_of_size(size: int, name: str) -> int:
    return size if isinstance(size, SymbolicInt) or not size else SymbolicInt.of(size, name)


def value_grad_factors(spec: AttentionSpec, core: CoreShape) -> int:
    """How many factors of the product "weights @ values" need a gradient.

    It is 1 if the attention weights depend on no parameter and no score, and 2 otherwise.
    """
    return 1 if _find_constant_weights(spec, core)[1] else 2


def _find_constant_weights(spec: AttentionSpec, core: CoreShape) -> tuple[list[Part], bool]:
    """Return the parts that change scores or weights which need no gradient, and True if the final
    weights need none.

    Without queries and keys, scores and weights are constants up to the first part with a trainable
    parameter.
    """
    modifiers = spec.parts_of(Modifier)
    on_scores, on_weights = (
        [part for _, part in modifiers if part.phase is phase]
        for phase in (Phase.SCORES, Phase.WEIGHTS)
    )
    constant, is_constant = list[Part](), not core.score_dim
    for part in (spec.similarity, *on_scores, spec.normaliser, *on_weights):
        if is_constant:
            constant.append(part)
        is_constant = is_constant and not any(
            param.trainable for param in part.params(spec).values()
        )
    return constant, is_constant


# --- One attention layer within a model, and its products in one call -----------------------------

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardCall(NamedTuple):
    """One forward call: `tokens` new tokens per row after `past` cached ones, and the length of the
    source sequence.

    mode="whole": all tokens in one call and logits for each, as in training; "prompt": all tokens
    in one call, logits for the last only; "steps": `tokens` decode steps of one token each, with
    the source cached before.
    """

    batch: int
    tokens: int
    past: int = 0
    source: int = 0
    mode: str = "whole"

    @property
    def encoder_call(self) -> ForwardCall:
        """The call that this makes to the encoder, or to any stack before the last one."""
        return self._replace(tokens=0 if self.mode == "steps" else self.source, past=0)


class ExecutionTarget(NamedTuple):
    """Where a call runs: the torch device type, and the precision."""

    device: str = "cpu"
    dtype: str = "fp32"


CPU_FP32 = ExecutionTarget()


@dataclass(frozen=True)
class AttentionComponent:
    """An attention layer, alone or as it occurs `times` times in a model.

    `role` is "attention" for self-attention, or "cross" if it reads the source. `before_last_stack`
    is true in the encoder of an encoder-decoder. `place` is the first layer that is this one, by
    which its weights are named.
    """

    name: str
    spec: AttentionSpec
    role: str = "attention"
    times: int = 1
    before_last_stack: bool = False
    place: str = SINGLE_LAYER

    def can_decode(self, past: int) -> bool:
        """True if the layer can decode a token after `past` cached ones.

        A bidirectional prefix must be whole in the cached tokens, or in the step itself if it is
        the first call.
        """
        prefix = self.spec.pattern.tokens_before_decode
        return self.role == "cross" or (prefix is not None and prefix <= max(past, 1))

    def work(self, call: ForwardCall) -> CallSize:
        """The size of a call; for decode steps, summed over the steps."""
        batch, new, past, source, mode = call.encoder_call if self.before_last_stack else call
        pattern, queries = self.spec.pattern, range(past, past + new)
        if self.role == "cross" and mode == "steps":
            return CallSize(
                batch, new, 0, new * source, *count_pairs_by_head(pattern, queries, range(source))
            )
        if self.role == "cross":
            return CallSize(
                batch, new, source, source, *count_pairs_by_head(pattern, queries, range(source))
            )
        keys = _cached_tokens_read(pattern, past, new) if mode == "steps" else past + new
        return CallSize(
            batch, new, new, keys, *count_pairs_by_head(pattern, queries, range(past + new))
        )

    def key_reads(self, call: ForwardCall) -> tuple[int, ...]:
        """The number of keys that one row reads: of each key-value head, or one number for all of
        them.
        """
        patterns = patterns_of_kv_heads(self.spec)
        return tuple(
            replace(self, spec=replace(self.spec, pattern=pattern)).work(call).keys
            for pattern in patterns
        )

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """The required products: allowed pairs only, or linear attention's running sums where the
        spec permits them.
        """
        work, signature = self.work(call), self._call_signature(call)
        pairs = SymbolicInt.of(
            work.pairs, f"pairs[{self.spec.pattern.text}]" if self.name else "pairs"
        )
        products = list_products(self._executed_spec(call), replace(work, pairs=pairs))
        if self.spec.recurrent_part is None or linear_attention.unsupported_reasons(signature):
            yield from products
            return
        yield from (product for product in products if not product.name.startswith("core"))
        text = "state updates and reads + scores within chunks"
        core_flops = _executed_core_flops(linear_attention, signature, work, call)
        sums = SymbolicInt.of(core_flops, text, loose="sum")
        # Both factors need a gradient, unless the weights are constants that depend on no token (no
        # state features).
        num_features = self.spec.recurrent_part[1].num_state_features(signature.core)
        yield MatrixProduct("core (sums)", sums, 2 if num_features else 1)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct] | None:
        """The products that `FlopCounterMode` counts in the dense backend: every pair, allowed or
        not.

        None for decode steps of a recurrent state, which the dense backend does not run.
        """
        work = self.work(call)
        if self._call_signature(call).has_recurrent_state:
            return None
        rectangle = work.keys if call.mode == "steps" else work.queries * work.keys
        return list(list_products(self._executed_spec(call), work.with_pairs(rectangle)))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs that the backend executes which the layer would choose on this target."""
        core = sum(
            part.flops for part in self._executed_cores(self._call_signature(call, on), call)
        )
        return core + sum(product.flops for product in self._products_outside_core(call, core))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs that the backend executes in the backward pass, including scores that it recomputes
        there.
        """
        signature = replace(self._call_signature(call, on), needs_grad=True, training=True)
        parts = list(self._executed_cores(signature, call))
        core = sum(part.flops for part in parts)
        outside = sum(
            product.num_grad_factors * product.flops
            for product in self._products_outside_core(call, core)
        )
        recomputed = sum(
            recomputed_flops(part.backend, part.call, part.work, part.flops) for part in parts
        )
        return outside + core * value_grad_factors(self.spec, signature.core) + recomputed

    def _executed_cores(
        self, signature: CallSignature, call: ForwardCall
    ) -> Iterator[ExecutedCore]:
        """Yield each call of a backend that computes the core: one for each
        pattern of the heads.
        """
        for part in split_by_pattern(signature):
            work = self.work(call)
            if part.head_group is not None and call.mode == "steps" and self.role == "attention":
                # One query reads the keys of its own pattern, unless the slots of its cache are
                # used again.
                own_work = replace(self, spec=replace(self.spec, pattern=part.pattern)).work(call)
                cached = self._cached_pattern(part.head_group)
                cached_keys = _cached_tokens_read(cached, call.past, call.tokens)
                work = (
                    own_work
                    if cached.retention.last is None
                    else replace(own_work, keys=cached_keys)
                )
            backend = choose_backend(part, work)
            yield ExecutedCore(backend, part, work, _executed_core_flops(backend, part, work, call))

    def _cached_pattern(self, heads: HeadGroup) -> Pattern:
        """The pattern of all heads whose keys are cached together with those of
        a group of heads.
        """
        kv_head = self.spec.heads.kv_head_of_query[heads.score_heads[0]]
        own = (
            group.spec.pattern
            for group in split_by_retention(self.spec)
            if kv_head in group.kv_heads
        )
        return next(own, self.spec.pattern)

    def weights_read(self, call: ForwardCall) -> list[WeightSpec]:
        """The tensors that the call reads: all, except projections that no token of the call passes
        through.
        """
        spec, work = self._executed_spec(call), self.work(call)
        weights: list[WeightSpec] = []
        for name, part in spec.parts():
            for key, param in part.params(spec).items():
                if param.trainable and (not param.applied or work.tokens(param.applied)):
                    weights.append(
                        WeightSpec(f"{self.place}.{name}.{key}", param.layout, spec.sizes_of(part))
                    )
        return weights

    def _executed_spec(self, call: ForwardCall) -> AttentionSpec:
        project = self.spec.projection_form(call.mode == "steps")
        return self.spec if project == self.spec.project else replace(self.spec, project=project)

    def _call_signature(self, call: ForwardCall, on: ExecutionTarget = CPU_FP32) -> CallSignature:
        spec, single_query = self.spec, call.mode == "steps"
        return CallSignature(
            spec,
            spec.core_of(spec.projection_form(single_query)),
            device=on.device,
            dtype=TORCH_DTYPES[on.dtype],
            single_query=single_query,
            has_recurrent_state=single_query and spec.is_recurrent and self.role == "attention",
        )

    def _products_outside_core(self, call: ForwardCall, core: int) -> Iterable[MatrixProduct]:
        """The products outside the core; the number of pairs that they see follows from the core's
        FLOPs.
        """
        work, spec = self.work(call), self._executed_spec(call)
        flops_per_pair = spec.core.flops(work.batch)
        if flops_per_pair:
            pairs = core // flops_per_pair
        else:
            pairs = work.keys if call.mode == "steps" else work.queries * work.keys
        products = list_products(spec, work.with_pairs(pairs))
        return (product for product in products if not product.name.startswith("core"))


class ExecutedCore(NamedTuple):
    """One call of a backend within a layer's core, and the FLOPs that it executes."""

    backend: ModuleType
    call: CallSignature
    work: CallSize
    flops: int


def _cached_tokens_read(pattern: Pattern, past: int, steps: int) -> int:
    """Total number of cached tokens that `steps` decode steps read; a ring buffer holds only tokens
    in the window.
    """
    first, last = pattern.retention
    capacity = past + steps if last is None else min(past + steps, first + last)
    growing = max(capacity - past, 0)  # steps that read one token more than the step before
    return growing * past + growing * (growing + 1) // 2 + (steps - growing) * capacity


def _executed_core_flops(
    backend: ModuleType, signature: CallSignature, work: CallSize, call: ForwardCall
) -> int:
    """FLOPs that a backend executes in the core.

    Those of a single query are linear in the number of keys, so all decode steps follow from two
    evaluations.
    """
    core_flops: Callable[[CallSignature, CallSize], int] = backend.executed_flops
    if call.mode != "steps":
        return core_flops(signature, work)
    without_keys, with_all_keys = (
        core_flops(signature, CallSize(work.batch, 1, 1, keys)) for keys in (0, work.keys)
    )
    return without_keys * work.queries + with_all_keys - without_keys


# --- The components of a model --------------------------------------------------------------------

SpecOrModel = AttentionSpec | ModelSpec

# How many tokens of each row an output head is applied to, by the position of the head.
TOKENS_SCORED_BY_HEAD: dict[str, Callable[[ForwardCall], int]] = {
    "each": lambda call: 1 if call.mode == "prompt" else call.tokens,
    "first": lambda call: 0 if call.mode == "steps" else 1,
    "last": lambda call: call.tokens if call.mode == "steps" else 1,
    "mean": lambda call: call.tokens if call.mode == "steps" else 1,
}


@dataclass(frozen=True)
class LinearComponent:
    """Linear maps and lookup tables, applied token by token: feed-forward, embedding, output head.

    `count_tokens` gives the number of tokens per row; `weights` are the tensors that they read, of
    which `experts` chooses some; `rows_looked_up` is the number of values looked up per token.
    `num_grad_factors` is 1 if the input has no gradient, such as pixels.
    """

    name: str
    role: str
    matrices: tuple[WeightSpec, ...]
    count_tokens: Callable[[ForwardCall], int]
    weights: tuple[WeightSpec, ...]
    times: int = 1
    before_last_stack: bool = False
    rows_looked_up: int = 0
    num_grad_factors: int = 2
    experts: ExpertsSpec | None = None

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """One product for each matrix."""
        tokens = SymbolicInt.of(self._num_tokens(call), "T")
        for matrix in self.matrices:
            sizes = {axis: SymbolicInt.of(size, axis) for axis, size in matrix.axis_sizes.items()}
            flops = 2 * matrix.layout.numel(sizes) * SymbolicInt.of(call.batch, "B") * tokens
            yield MatrixProduct(matrix.name, flops, self.num_grad_factors)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct]:
        """The products that `FlopCounterMode` counts, which are the required ones."""
        return list(self.required_products(call))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs executed on any target, which are the required ones."""
        return sum(product.flops for product in self.required_products(call))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs executed in the backward pass on any target."""
        return sum(
            product.num_grad_factors * product.flops for product in self.required_products(call)
        )

    def values_moved(self, call: ForwardCall) -> int:
        """Number of values read and written besides the weights: the input and output of every
        matrix.
        """
        values_per_token = sum(map(_input_output_sizes, self.matrices)) + 2 * self.rows_looked_up
        return call.batch * self._num_tokens(call) * values_per_token

    def weight_bytes_read(self, call: ForwardCall, storage: WeightStorage) -> int:
        """Bytes of the weights that are read; of experts, the expected number of different ones."""
        tokens = call.batch * self._num_tokens(call)
        if not tokens:
            return 0
        dense = storage.total_bytes(weight for weight in self.weights if not is_routed(weight))
        if self.experts is None:
            return dense
        routed = storage.total_bytes(weight for weight in self.weights if is_routed(weight))
        return dense + round(routed * self.experts.expected_experts(tokens) / self.experts.count)

    def _num_tokens(self, call: ForwardCall) -> int:
        return self.count_tokens(call.encoder_call if self.before_last_stack else call)


def _input_output_sizes(matrix: WeightSpec) -> int:
    """Number of input and output values of a matrix for one token; experts have one input and
    output per choice.
    """
    sizes = dict(matrix.axis_sizes)
    num_active = sizes.pop("active", 1)
    out = sizes[next(axis for axis in matrix.layout.axes if axis != "active")]
    return num_active * (out + matrix.numel // (num_active * out))


ModelComponent = AttentionComponent | LinearComponent


def list_components(spec_or_model: SpecOrModel) -> list[ModelComponent]:
    """List the components of a spec or model in the order in which they run; equal blocks of a
    stack are merged.
    """
    if isinstance(spec_or_model, AttentionSpec):
        return [
            AttentionComponent(
                "", spec_or_model, "attention" if spec_or_model.source is None else "cross"
            )
        ]
    components: list[ModelComponent] = []
    for stack in spec_or_model.stacks:
        early = stack is not spec_or_model.stacks[-1]
        components += (
            [_embedding_component(stack, stack.embedding, early)] if stack.embedding else []
        )
        for depth, block, times in group_blocks_stored_alike(stack, spec_or_model.quantization):
            components += _block_components(stack, block, (depth, times), early)
    return components + [_head_component(spec_or_model, head) for head in spec_or_model.heads]


def _block_components(
    stack: StackSpec, block: BlockSpec, layers: tuple[int, int], early: bool
) -> Iterator[ModelComponent]:
    """Yield the components of equal layers, given the first of them and their number."""
    depth, times = layers
    if block.mixer:
        yield from _mixer_components(stack, block.mixer, layers, early)
    for role, spec in block.attention_specs.items():
        cross_spec = replace(spec, source=spec.source or spec.model) if role == "cross" else spec
        place = f"{stack.name}.{depth}.{role}"
        yield AttentionComponent(f"{stack.name}.*.{role}", cross_spec, role, times, early, place)
    if feed := block.feed:
        yield LinearComponent(
            f"{stack.name}.*.feed",
            "feed",
            tuple(feed.matmul_weights(stack.model)),
            lambda call: call.tokens,
            list_feed_weights(feed, stack.model, f"{stack.name}.{depth}.feed"),
            times,
            early,
            experts=feed if isinstance(feed, ExpertsSpec) else None,
        )


def _mixer_components(
    stack: StackSpec, mixer: SequenceMixerSpec, layers: tuple[int, int], early: bool
) -> Iterator[LinearComponent]:
    """Yield the matrices of every token, and that of the first state, which is computed once a
    sequence.
    """
    (depth, times), place = layers, f"{stack.name}.*.mixer"
    for suffix, count_tokens in (
        ("", lambda call: call.tokens),
        (".start", TOKENS_SCORED_BY_HEAD["first"]),
    ):
        named = [
            w for w in mixer.weights(stack.model) if w.name.startswith("start") == bool(suffix)
        ]
        own = tuple(add_prefix(f"{stack.name}.{depth}.mixer", "mixer", named))
        if matrices := tuple(w for w in named if len(w.shape) == 2):
            yield LinearComponent(
                place + suffix, "mixer", matrices, count_tokens, own, times, early
            )


def _embedding_component(
    stack: StackSpec, embedding: EmbeddingSpec, early: bool
) -> LinearComponent:
    patches, matrices = embedding.patches, tuple(embedding.matmul_weights(stack.model))
    return LinearComponent(
        f"{stack.name}.embedding",
        "embedding",
        matrices,
        lambda call: call.tokens and patches.num_patches if patches else call.tokens,
        tuple(add_prefix(f"{stack.name}.embedding", "embedding", matrices)),
        before_last_stack=early,
        rows_looked_up=0 if patches else stack.model,
        num_grad_factors=1,
    )


def _head_component(model: ModelSpec, head: OutputHeadSpec) -> LinearComponent:
    matrices = tuple(head.matmul_weights(model.stacks[-1].model))
    weights = list_head_matrices(head, model.stacks[-1].model)
    return LinearComponent(
        f"head.{head.name}", "head", matrices, TOKENS_SCORED_BY_HEAD[head.at], weights
    )

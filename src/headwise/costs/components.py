"""The components of a spec or model, with everything that one of them costs in a forward call.

`list_components` is the one walk over a model: each component gives its weights, its FLOPs as
required (pairs that the pattern allows), executed (by the backend that the layer would choose) and
counted (by torch's `FlopCounterMode`), the bytes that it moves, and its cache. The tables of costs,
the roofline, training and studies read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import overload

from ..attention.backends import (
    CallSignature,
    choose_backend,
    linear_attention,
    recomputed_flops,
    split_by_pattern,
)
from ..attention.backends.core_interface import HeadGroup
from ..attention.cache import split_by_retention
from ..attention.interfaces.core_types import CallSize
from ..attention.masking.patterns import Pattern, count_pairs_by_head
from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import (
    BlockSpec,
    EmbeddingSpec,
    ExpertsSpec,
    ModelSpec,
    OutputHeadSpec,
    StackSpec,
    WeightSpec,
)
from ..models.model_spec.components import add_prefix
from . import cache_bytes, cached_numbers_per_token
from .counted_model import CountedComponent, CountedModel
from .flops import (
    TORCH_DTYPES,
    MatrixProduct,
    SymbolicInt,
    cached_numbers,
    list_products,
    name_size,
    patterns_of_kv_heads,
    value_grad_factors,
)
from .roofline import (
    CPU_FP32,
    ExecutionFormats,
    ExecutionTarget,
    ForwardCall,
    RooflineOperation,
    cached_tokens_read,
    merge_operations,
)
from .weight_storage import (
    SINGLE_LAYER,
    WeightStorage,
    dtype_bytes,
    group_blocks_stored_alike,
    is_routed,
)

SpecOrModel = AttentionSpec | ModelSpec | CountedModel


# --- Attention layers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionComponent:
    """An attention layer, alone or as it occurs `times` times in a model.

    `role` is "attention" for self-attention, or "cross" if it reads the source. `before_last_stack`
    is true in the encoder of an encoder-decoder. `place` is the first layer that is this one, by
    which its weights are named. With `reads_kv` it projects and caches no keys and values, but
    attends to those of an earlier layer.
    """

    name: str
    spec: AttentionSpec
    role: str = "attention"
    times: int = 1
    before_last_stack: bool = False
    place: str = SINGLE_LAYER
    reads_kv: bool = False

    def can_decode(self, past: int) -> bool:
        """True if the layer can decode a token after `past` cached ones.

        A bidirectional prefix must be whole in the cached tokens, or in the step itself if it is
        the first call.
        """
        prefix = self.spec.pattern.tokens_before_decode
        return self.role == "cross" or (prefix is not None and prefix <= max(past, 1))

    @property
    def num_slots(self) -> int | None:
        """Tokens that the cache keeps; None if it keeps all."""
        first, last = self.spec.pattern.retention
        return None if last is None else first + last

    def cached_terms(self) -> list[tuple[str, int]]:
        """Return the values cached per token, or those of a recurrent state, by name."""
        named: list[tuple[str, int]] = []
        for name, text, value in () if self.reads_kv else cached_numbers(self.spec).terms:
            full_name = f"{self.name}.{name}" if self.name else name
            named.append((full_name, SymbolicInt.with_formula(value, text)))
        return named

    def cached_bytes(self, tokens: int, number_bytes: int) -> int:
        """Count the bytes that the cache of one row keeps of some tokens."""
        if self.reads_kv:
            return 0
        return cache_bytes(self.spec, batch=1, capacity=tokens, bytes_per_number=number_bytes)

    def state_bytes(self, number_bytes: int) -> int:
        """Count the bytes of the recurrent state of one row, if the layer keeps one."""
        return self.cached_bytes(1, number_bytes) if self.spec.is_recurrent else 0

    def growing_values(self) -> int:
        """Count the values that one more token adds to the cache while no window is full."""
        return 0 if self.reads_kv else cached_numbers_per_token(self.spec)

    def work(self, call: ForwardCall) -> CallSize:
        """Return the size of a call; for decode steps, summed over the steps."""
        batch, new, past, source, mode = call.encoder_call if self.before_last_stack else call
        pattern = self.spec.pattern
        queries = range(past, past + new)
        if self.role == "cross":
            pairs = count_pairs_by_head(pattern, queries, range(source))
            if mode == "steps":
                return CallSize(batch, new, 0, new * source, *pairs)
            return CallSize(batch, new, source, source, *pairs)
        keys = cached_tokens_read(pattern, past, new) if mode == "steps" else past + new
        pairs = count_pairs_by_head(pattern, queries, range(past + new))
        return CallSize(batch, new, 0 if self.reads_kv else new, keys, *pairs)

    def _with_pattern(self, pattern: Pattern) -> AttentionComponent:
        return replace(self, spec=replace(self.spec, pattern=pattern))

    def key_reads(self, call: ForwardCall) -> tuple[int, ...]:
        """Return the number of keys that one row reads: of each key-value head, or one number for
        all of them.
        """
        patterns = patterns_of_kv_heads(self.spec)
        return tuple(self._with_pattern(pattern).work(call).keys for pattern in patterns)

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """Yield the required products: allowed pairs only, or linear attention's running sums where
        the spec permits them.
        """
        work = self.work(call)
        signature = self._call_signature(call)
        text = f"pairs[{self.spec.pattern.text}]" if self.name else "pairs"
        pairs = SymbolicInt.with_formula(work.pairs, text)
        products = list_products(self._executed_spec(call), replace(work, pairs=pairs))
        if self.spec.recurrent_part is None or linear_attention.unsupported_reasons(signature):
            yield from products
            return
        yield from (product for product in products if not product.name.startswith("core"))
        text = "state updates and reads + scores within chunks"
        core_flops = _executed_core_flops(linear_attention, signature, work, call)
        sums = SymbolicInt.with_formula(core_flops, text, loose="sum")
        # Both factors need a gradient, unless the weights are constants that depend on no token (no
        # state features).
        num_features = self.spec.recurrent_part[1].num_state_features(signature.core)
        yield MatrixProduct("core (sums)", sums, 2 if num_features else 1)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct] | None:
        """Return the products that `FlopCounterMode` counts in the dense backend: every pair,
        allowed or not.

        None for decode steps of a recurrent state, which the dense backend does not run.
        """
        if self._call_signature(call).has_recurrent_state:
            return None
        return list(self._products(call, self._all_pairs(call)))

    def _all_pairs(self, call: ForwardCall) -> int:
        work = self.work(call)
        return work.keys if call.mode == "steps" else work.queries * work.keys

    def _products(self, call: ForwardCall, pairs: int) -> Iterator[MatrixProduct]:
        return list_products(self._executed_spec(call), self.work(call).with_pairs(pairs))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs that the backend executes which the layer would choose on this target."""
        cores = self._executed_cores(self._call_signature(call, on), call)
        core = sum(flops for *_, flops in cores)
        return core + sum(product.flops for product in self._products_outside_core(call, core))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs that the backend executes in the backward pass, including scores that it recomputes
        there.
        """
        signature = replace(self._call_signature(call, on), grad_enabled=True, training=True)
        cores = list(self._executed_cores(signature, call))
        core = sum(flops for *_, flops in cores)
        total = core * value_grad_factors(self.spec, signature.core)
        for product in self._products_outside_core(call, core):
            total += product.num_grad_factors * product.flops
        return total + sum(recomputed_flops(*executed) for executed in cores)

    def _executed_cores(
        self, signature: CallSignature, call: ForwardCall
    ) -> Iterator[tuple[ModuleType, CallSignature, CallSize, int]]:
        """Yield each call of a backend that computes the core, one for each pattern of the heads,
        and the FLOPs that it executes.
        """
        for part in split_by_pattern(signature):
            work = self.work(call)
            if part.head_group is not None and call.mode == "steps" and self.role == "attention":
                # One query reads only the keys of its pattern, unless the slots of its cache are
                # used again.
                work = self._with_pattern(part.pattern).work(call)
                cached = self._cached_pattern(part.head_group)
                if cached.retention.last is not None:
                    work = replace(work, keys=cached_tokens_read(cached, call.past, call.tokens))
            backend = choose_backend(part, work)
            yield backend, part, work, _executed_core_flops(backend, part, work, call)

    def _cached_pattern(self, heads: HeadGroup) -> Pattern:
        """Return the pattern of all heads that share a key cache with a group of heads."""
        kv_head = self.spec.heads.kv_head_of_query[heads.score_heads[0]]
        for group in split_by_retention(self.spec):
            if kv_head in group.kv_heads:
                return group.spec.pattern
        return self.spec.pattern

    def weights_read(self, call: ForwardCall) -> list[WeightSpec]:
        """Return the tensors that the call reads: all, except projections that no token of the call
        passes through.
        """
        spec = self._executed_spec(call)
        work = self.work(call)
        weights: list[WeightSpec] = []
        read_elsewhere = spec.list_kv_only_params() if self.reads_kv else []
        for name, part in spec.parts():
            for key, param in part.params(spec).items():
                if (name, key) in read_elsewhere:
                    continue
                if param.trainable and (not param.applied or work.tokens(param.applied)):
                    full_name = f"{self.place}.{name}.{key}"
                    weights.append(WeightSpec(full_name, param.layout, spec.sizes_of(part)))
        return weights

    def operations(
        self, call: ForwardCall, formats: ExecutionFormats
    ) -> Iterator[RooflineOperation]:
        """Yield the projections and the core of one layer."""
        work = self.work(call)
        spec = self.spec
        number_bytes = dtype_bytes(formats.dtype)
        core_flops = 0
        projection_flops = 0
        for product in self.required_products(call):
            if product.name.startswith("core"):
                core_flops += product.flops
            else:
                projection_flops += product.flops
        weights = self.weights_read(call)
        numbers = work.batch * work.queries * 2 * spec.model
        numbers += work.batch * work.new_tokens * (spec.source or 0)
        moved = formats.storage.total_bytes(weights) + number_bytes * numbers
        dtype = formats.product_dtype(weights)
        yield formats.operation(f"{self.role} projections", projection_flops, moved, dtype)
        numbers_per_query = spec.num_core_heads * spec.core.dim
        numbers_per_query += len(spec.score_head_of_row) * spec.core.vdim
        moved = self._cached_bytes_read(call, number_bytes)
        moved += number_bytes * work.queries * numbers_per_query
        yield formats.operation(f"{self.role} core", core_flops, work.batch * moved, formats.dtype)

    def _cached_bytes_read(self, call: ForwardCall, number_bytes: int) -> int:
        """Count bytes of keys and values that one row reads, each token once; a recurrent state is
        read and written per step.
        """
        heads = self.spec.heads
        per_token = cached_numbers(self.spec).total
        if self.spec.is_recurrent:
            if call.mode == "steps":
                return 2 * per_token * max(number_bytes, 4) * self.work(call).queries
            per_token = heads.kv * heads.dim + heads.num_value_heads * heads.vdim
        reads = self.key_reads(call)
        return sum(reads) * number_bytes * per_token // len(reads)

    def _executed_spec(self, call: ForwardCall) -> AttentionSpec:
        project = self.spec.projection_form(call.mode == "steps")
        return self.spec if project == self.spec.project else replace(self.spec, project=project)

    def _call_signature(self, call: ForwardCall, on: ExecutionTarget = CPU_FP32) -> CallSignature:
        is_step = call.mode == "steps"
        return CallSignature(
            self.spec,
            self.spec.core_of(self.spec.projection_form(is_step)),
            device=on.device,
            dtype=TORCH_DTYPES[on.dtype],
            single_query=is_step,
            has_recurrent_state=is_step and self.spec.is_recurrent and self.role == "attention",
        )

    def _products_outside_core(self, call: ForwardCall, core: int) -> Iterable[MatrixProduct]:
        """Yield the products outside the core; the number of pairs that they see follows from the
        core's FLOPs.
        """
        flops_per_pair = self._executed_spec(call).core.flops(self.work(call).batch)
        pairs = core // flops_per_pair if flops_per_pair else self._all_pairs(call)
        products = self._products(call, pairs)
        return (product for product in products if not product.name.startswith("core"))


def _executed_core_flops(
    backend: ModuleType, signature: CallSignature, work: CallSize, call: ForwardCall
) -> int:
    """Count the FLOPs that a backend executes in the core.

    For a single query they are linear in the number of keys, so all decode steps follow from two
    evaluations.
    """
    core_flops: Callable[[CallSignature, CallSize], int] = backend.executed_flops
    if call.mode != "steps":
        return core_flops(signature, work)
    without_keys = core_flops(signature, CallSize(work.batch, 1, 1, 0))
    with_all_keys = core_flops(signature, CallSize(work.batch, 1, 1, work.keys))
    return without_keys * work.queries + with_all_keys - without_keys


# --- Linear maps and tables -----------------------------------------------------------------------

OPERATION_LABELS = {"feed": "feed-forward"}  # labels that differ from the role
# How many tokens of each row an output head is applied to, by the position of the head.
TOKENS_SCORED_BY_HEAD: dict[str, Callable[[ForwardCall], int]] = {
    "each": lambda call: 1 if call.mode == "prompt" else call.tokens,
    "first": lambda call: 0 if call.mode == "steps" else 1,
    "last": lambda call: call.tokens if call.mode == "steps" else 1,
    "mean": lambda call: call.tokens if call.mode == "steps" else 1,
}


def count_all_tokens(call: ForwardCall) -> int:
    """Count tokens per row that a layer is applied to."""
    return call.tokens


@dataclass(frozen=True)
class LinearComponent:
    """Linear maps and lookup tables, applied token by token: feed-forward, embedding, output head.

    `count_tokens` gives the number of tokens per row; `weights` are the tensors that they read, of
    which `experts` chooses some; `rows_looked_up` is the number of values looked up per token.
    `num_grad_factors` is 1 if the input has no gradient, such as pixels. `ends_with_product` is
    true if the last matrix product gives the output.
    """

    name: str
    role: str
    matrices: tuple[WeightSpec, ...]
    weights: tuple[WeightSpec, ...]
    count_tokens: Callable[[ForwardCall], int] = count_all_tokens
    times: int = 1
    before_last_stack: bool = False
    rows_looked_up: int = 0
    num_grad_factors: int = 2
    experts: ExpertsSpec | None = None
    ends_with_product: bool = True

    def required_products(self, call: ForwardCall) -> Iterator[MatrixProduct]:
        """One product for each matrix."""
        tokens = SymbolicInt.with_formula(self._num_tokens(call), "T")
        for matrix in self.matrices:
            sizes = {axis: name_size(size, axis) for axis, size in matrix.axis_sizes.items()}
            flops = (
                2 * matrix.layout.numel(sizes) * SymbolicInt.with_formula(call.batch, "B") * tokens
            )
            yield MatrixProduct(matrix.name, flops, self.num_grad_factors)

    def counted_products(self, call: ForwardCall) -> list[MatrixProduct]:
        """Return the products that `FlopCounterMode` counts, which are the required ones."""
        return list(self.required_products(call))

    def executed_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs executed on any target, which are the required ones."""
        return sum(product.flops for product in self.required_products(call))

    def executed_backward_flops(self, call: ForwardCall, on: ExecutionTarget) -> int:
        """FLOPs executed in the backward pass on any target."""
        return self.num_grad_factors * self.executed_flops(call, on)

    def operations(
        self, call: ForwardCall, formats: ExecutionFormats
    ) -> Iterator[RooflineOperation]:
        """Yield the operation of one layer: each matrix reads its input and writes its output."""
        numbers_per_token = sum(map(_input_output_sizes, self.matrices)) + 2 * self.rows_looked_up
        numbers = call.batch * self._num_tokens(call) * numbers_per_token
        moved = self._weight_bytes_read(call, formats.storage)
        moved += dtype_bytes(formats.dtype) * numbers
        label = OPERATION_LABELS.get(self.role, self.role)
        flops = sum(product.flops for product in self.required_products(call))
        yield formats.operation(label, flops, moved, formats.product_dtype(self.weights))

    def _weight_bytes_read(self, call: ForwardCall, storage: WeightStorage) -> int:
        """Count bytes of the weights that are read; of experts, the expected number of different
        ones.
        """
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
    """Count input and output values of a matrix for one token; experts have one input and output
    per choice.
    """
    sizes = dict(matrix.axis_sizes)
    num_active = sizes.pop("active", 1)
    out = sizes[next(axis for axis in matrix.layout.axes if axis != "active")]
    return num_active * (out + matrix.numel // (num_active * out))


# --- The walk -------------------------------------------------------------------------------------

SpecComponent = AttentionComponent | LinearComponent
ModelComponent = SpecComponent | CountedComponent


@overload
def list_components(spec_or_model: AttentionSpec | ModelSpec) -> list[SpecComponent]: ...
@overload
def list_components(spec_or_model: SpecOrModel) -> list[ModelComponent]: ...


def list_components(
    spec_or_model: SpecOrModel,
) -> list[SpecComponent] | list[ModelComponent]:
    """List the components of a spec or model in the order in which they run; equal blocks of a
    stack are merged.

    >>> import headwise as hw
    >>> [
    ...     (component.name, component.times)
    ...     for component in list_components(hw.families.read_model_spec("gpt2"))
    ... ]
    [('decoder.embedding', 1), ('decoder.*.attention', 12), ('decoder.*.feed', 12), ('head.tokens',
    1)]
    """
    if isinstance(spec_or_model, AttentionSpec):
        role = "attention" if spec_or_model.source is None else "cross"
        return [AttentionComponent("", spec_or_model, role)]
    if isinstance(spec_or_model, CountedModel):
        return [*spec_or_model.components]
    components: list[SpecComponent] = []
    for stack in spec_or_model.stacks:
        early = stack is not spec_or_model.stacks[-1]
        if stack.embedding:
            components.append(_embedding_component(stack, stack.embedding, early))
        for depth, block, times in group_blocks_stored_alike(stack, spec_or_model.quantization):
            components += list_block_components(stack, block, depth, times, early)
    return components + [_head_component(spec_or_model, head) for head in spec_or_model.heads]


def list_attentions(spec_or_model: SpecOrModel) -> list[AttentionComponent]:
    """List the components that are attention layers."""
    components = list_components(spec_or_model)
    return [one for one in components if isinstance(one, AttentionComponent)]


def list_block_components(
    stack: StackSpec, block: BlockSpec, depth: int = 0, times: int = 1, early: bool = False
) -> Iterator[SpecComponent]:
    """Yield the components of `times` equal layers, starting at `depth`."""
    place = f"{stack.name}.{depth}"
    mixer = block.mixer
    if mixer:
        # The matrices of every token, and the matrix of the first state, computed once a row.
        for suffix in ("", ".start"):
            is_start = bool(suffix)
            named = [
                weight
                for weight in mixer.weights(stack.model)
                if weight.name.startswith("start") == is_start
            ]
            matrices = tuple(weight for weight in named if len(weight.shape) == 2)
            if matrices:
                yield LinearComponent(
                    f"{stack.name}.*.mixer{suffix}",
                    "mixer",
                    matrices,
                    tuple(add_prefix(f"{place}.mixer", "mixer", named)),
                    TOKENS_SCORED_BY_HEAD["first"] if is_start else count_all_tokens,
                    times,
                    early,
                    ends_with_product=mixer.ends_with_product,
                )
    for role, spec in block.attention_specs.items():
        if role == "cross":
            spec = replace(spec, source=spec.source or spec.model)
        name = f"{stack.name}.*.{role}"
        reads_kv = role == "attention" and block.kv_layers_back > 0
        yield AttentionComponent(name, spec, role, times, early, f"{place}.{role}", reads_kv)
    feed = block.feed
    if feed:
        experts = feed if isinstance(feed, ExpertsSpec) else None
        weights = add_prefix(f"{place}.feed", "feed", feed.weights(stack.model))
        yield LinearComponent(
            f"{stack.name}.*.feed",
            "feed",
            tuple(feed.matmul_weights(stack.model)),
            tuple(weight for weight in weights if weight.trainable),
            times=times,
            before_last_stack=early,
            experts=experts,
            ends_with_product=experts is None or experts.shared is not None,
        )


def _embedding_component(
    stack: StackSpec, embedding: EmbeddingSpec, early: bool
) -> LinearComponent:
    patches = embedding.patches
    matrices = tuple(embedding.matmul_weights(stack.model))

    def count_patches(call: ForwardCall) -> int:
        return max(call.tokens - embedding.first, 0) if patches else call.tokens

    return LinearComponent(
        f"{stack.name}.embedding",
        "embedding",
        matrices,
        tuple(add_prefix(f"{stack.name}.embedding", "embedding", matrices)),
        count_patches,
        before_last_stack=early,
        rows_looked_up=0 if patches else stack.model,
        num_grad_factors=1,
    )


def _head_component(model: ModelSpec, head: OutputHeadSpec) -> LinearComponent:
    width = model.stacks[-1].model
    place = "embedding" if head.table else f"head.{head.name}"
    return LinearComponent(
        f"head.{head.name}",
        "head",
        tuple(head.matmul_weights(width)),
        tuple(add_prefix(place, "head", head.matmul_weights(width))),
        TOKENS_SCORED_BY_HEAD[head.at],
    )


def list_operations(
    components: Iterable[ModelComponent], call: ForwardCall, formats: ExecutionFormats
) -> tuple[RooflineOperation, ...]:
    """List the operations of a call on a device; operations of the same name are summed over the
    layers.
    """
    by_name: dict[str, list[RooflineOperation]] = {}
    for component in components:
        for operation in component.operations(call, formats):
            if operation.flops or operation.moved:
                repeated = operation.repeated(component.times)
                by_name.setdefault(operation.name, []).append(repeated)
    return tuple(merge_operations(name, operations) for name, operations in by_name.items())

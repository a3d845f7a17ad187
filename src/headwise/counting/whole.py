"""What is priced, in pieces: an attention alone, or every attention, map and table of a model, equal ones once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..blueprint import BlockSpec, EmbeddingSpec, OutputHeadSpec, ModelSpec, StackSpec, WeightSpec
from ..spec import AttentionSpec
from . import bills
from .bills import CostBreakdown, MatrixProduct
from .reading import ForwardCall, ExecutionTarget, AttentionComponent
from .symbols import SymbolicInt

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
        return self.num_weights_met(tokens) + tokens * (sum(map(_input_output_sizes, self.matrices)) + 2 * self.rows_looked_up) if tokens else 0

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

    >>> from headwise.families import read
    >>> for term in parameter_terms(read({"model_type": "gpt2", "n_layer": 2})).terms[:3]:
    ...     print(*term)
    decoder.embedding.tokens token model 38597376
    decoder.embedding.positions position model 786432
    decoder.*.attention.project.q 2 · q dim model 1179648
    """
    if isinstance(spec_or_model, AttentionSpec):
        return bills.attention_parameters(spec_or_model)
    times: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    found: dict[tuple[str, tuple[tuple[str, int], ...]], WeightSpec] = {}
    for w in spec_or_model.weights():
        if w.trainable:
            line = (re.sub(r"^(\w+)\.\d+\.", r"\1.*.", w.name), tuple((axis, w.axis_sizes[axis]) for axis in _axis_sizes(w)))
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
    return total - sum(sum(w.numel for w in feed.weights(model)) - feed.active_params(model, 1) for model, feed in feeds)

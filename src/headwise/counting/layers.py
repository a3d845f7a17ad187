"""A spec or a model as those see it who serve it: attentions that are alike, other matrices, and all numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..blueprint import BlockSpec, FeedForwardSpec, ExpertsSpec, ModelSpec, ApproximateAttention, LayerRun
from ..blueprint.stack import MAX_LAYERS
from ..errors import SpecError
from ..spec import AttentionSpec
from .devices import stored_bytes

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AttentionGroup:
    """Attentions that are alike: so many layers have one. `reads` says of whom: "own" tokens, or a "source"."""

    name: str
    spec: AttentionSpec
    num_layers: int = 1
    kv_source: str = "own"

    @property
    def weight_shapes(self) -> Shapes:
        """The learned tensors of one that answered tokens meet; of a source, only its reading."""
        params, shapes = self.spec.params().items(), self.spec.shapes()
        early = "source" if self.kv_source == "source" else None
        return tuple(shapes[name] for name, p in params if p.trainable and (not p.applied or p.applied != early))


@dataclass(frozen=True)
class WeightMatrixGroup:
    """What tokens meet outside attention: tensors that each token meets, and `active` of `count` experts."""

    name: str
    num_layers: int
    dense_shapes: Shapes
    expert_shapes: Shapes = ()
    num_experts: int = 0
    num_active_experts: int = 0
    hidden_numbers: int = 0  # numbers of one token that are alive in between, its input among them

    def flops(self, tokens: int) -> int:
        """Two for each number of a matrix and each token that meets it."""
        return 2 * tokens * (_num_matrix_elements(self.dense_shapes) + self.num_active_experts * _num_matrix_elements(self.expert_shapes))

    def bytes_moved(self, tokens: int, dtype: str) -> int:
        """Bytes of the tensors that so many tokens meet, if no two choose the same expert while others are idle.

        >>> experts = WeightMatrixGroup("experts", 1, (), ((2, 5),), count=4, active=2)  # 40 bytes each
        >>> [experts.moved(tokens, "fp32") for tokens in (1, 2, 3)]
        [80, 160, 160]
        """
        return _stored_bytes(self.dense_shapes, dtype) + min(self.num_experts, tokens * self.num_active_experts) * _stored_bytes(self.expert_shapes, dtype)

    @property
    def numbers_per_token(self) -> int:
        """Numbers of one token that go into every matrix and come out of it."""
        return _input_output_sizes(self.dense_shapes) + self.num_active_experts * _input_output_sizes(self.expert_shapes)


def group_attentions(spec_or_model: AttentionSpec | ModelSpec, num_layers: int = 1) -> tuple[AttentionGroup, ...]:
    """The attentions that answer a token, alike ones together: a spec so many times, or a model's last stack.

    >>> import headwise as hw
    >>> [(each.name, each.times) for each in group_attentions(hw.design(preset="gqa"), layers=32)]
    [('attention', 32)]
    """
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise SpecError(f"layers={num_layers!r} is no number of layers; give 1 to {MAX_LAYERS}")
    if isinstance(spec_or_model, AttentionSpec):
        return (AttentionGroup("attention", spec_or_model, num_layers, "own" if spec_or_model.source is None else "source"),)
    if num_layers != 1:
        raise SpecError(f"layers={num_layers}, but {spec_or_model.name} says its own layers; leave layers out")
    if spec_or_model.kind not in ("decoder", "encoder-decoder"):
        raise SpecError(f"{spec_or_model.name} is of kind {spec_or_model.kind} and answers no token by token; give a decoder")
    stack = spec_or_model.stacks[-1]
    found = Counter((name, spec) for block in stack.layers for name, spec in block.attention_specs.items())
    return tuple(
        AttentionGroup(name, spec, times, "source" if name == "cross" else "own") for (name, spec), times in found.items()
    )


def group_matrices(spec_or_model: AttentionSpec | ModelSpec) -> tuple[WeightMatrixGroup, ...]:
    """Feed-forwards of a model's last stack, alike ones together, and the first of its heads; a spec has none."""
    if isinstance(spec_or_model, AttentionSpec):
        return ()
    stack = spec_or_model.stacks[-1]
    feeds = Counter(block.feed for block in stack.layers if block.feed is not None)
    return (*(_feed_forward_matrices(feed, times, stack.model) for feed, times in feeds.items()), *_head_matrices(spec_or_model))


def _feed_forward_matrices(feed: FeedForwardSpec | ExpertsSpec, times: int, model: int) -> WeightMatrixGroup:
    if isinstance(feed, FeedForwardSpec):
        return WeightMatrixGroup("feed-forward", times, _feed_forward_shapes(feed, model), hidden_numbers=model + _hidden_numbers(feed))
    always = tuple(w.shape for w in feed.weights(model) if not w.name.startswith("each."))
    inside = model + max(feed.active * _hidden_numbers(feed.each), _hidden_numbers(feed.shared) if feed.shared else 0)
    each = _feed_forward_shapes(feed.each, model)
    return WeightMatrixGroup("experts", times, always, each, feed.count, feed.active, inside)


def _hidden_numbers(feed: FeedForwardSpec) -> int:
    """Numbers of one token behind the first maps: what goes up, and beside it what gates it."""
    return feed.hidden * (len(feed.matrix_layouts) - 1)


def _feed_forward_shapes(feed: FeedForwardSpec, model: int) -> Shapes:
    return tuple(w.shape for w in feed.weights(model))


def _head_matrices(model: ModelSpec) -> Iterator[WeightMatrixGroup]:
    for head in model.heads[:1]:
        width = head.transform.hidden if head.transform else model.stacks[-1].model
        table = ((head.outputs, width),) if head.table else ()
        own = tuple(w.shape for w in head.weights(model.stacks[-1].model) if w.trainable)
        inside = model.stacks[-1].model + head.outputs
        yield WeightMatrixGroup("head", 1, (*own, *table), hidden_numbers=inside)


def live_numbers(spec: AttentionSpec) -> int:
    """Numbers of one token inside an attention, at least: its input, queries, what is remembered, what heads give."""
    core = spec.core
    kept = sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())
    return spec.model + len(core.keys) * core.dim + kept + len(core.value_head_of_row) * core.vdim


class WeightMemory(NamedTuple):
    """Learned numbers, and the bytes they take."""

    num_parameters: int
    bytes: int


def weight_memory(spec_or_model: AttentionSpec | ModelSpec, dtype: str, num_layers: int = 1) -> WeightMemory:
    """All learned numbers of a spec in so many layers, or of a model: embeddings and encoders too.

    >>> import headwise as hw
    >>> weight_memory(hw.design(preset="gqa", model=4096, heads=32, kv=8), "bf16", layers=32)
    Held(numbers=1342177280, bytes=2684354560)
    """
    if isinstance(spec_or_model, AttentionSpec):
        shapes, times = _learned_shapes(spec_or_model), num_layers
    else:
        shapes, times = tuple(w.shape for w in spec_or_model.weights() if w.trainable), 1
    return WeightMemory(times * sum(map(math.prod, shapes)), times * sum(stored_bytes(shape, dtype) for shape in shapes))


def map_attention_specs(
    spec_or_model: AttentionSpec | ModelSpec, change: Callable[[AttentionSpec], AttentionSpec]
) -> AttentionSpec | ModelSpec:
    """The same with every attention that remembers its own tokens changed so."""
    if isinstance(spec_or_model, AttentionSpec):
        return change(spec_or_model)
    *before, last = spec_or_model.stacks
    runs = tuple(LayerRun(run.times, tuple(_map_block_specs(block, change) for block in run.blocks)) for run in last.runs)
    return replace(spec_or_model, stacks=(*before, replace(last, runs=runs)))


def _map_block_specs(block: BlockSpec, change: Callable[[AttentionSpec], AttentionSpec]) -> BlockSpec:
    own = block.attention
    if isinstance(own, ApproximateAttention):
        return replace(block, attention=replace(own, like=change(own.like)))
    return replace(block, attention=own and change(own))


def _learned_shapes(spec: AttentionSpec) -> Shapes:
    params = spec.params()
    return tuple(shape for name, shape in spec.shapes().items() if params[name].trainable)


def _num_matrix_elements(shapes: Shapes) -> int:
    """Numbers of the matrices among them; vectors are added or scale."""
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def _input_output_sizes(shapes: Shapes) -> int:
    return sum(math.prod(shape[:-1]) + shape[-1] for shape in shapes if len(shape) > 1)


def _stored_bytes(shapes: Shapes, dtype: str) -> int:
    return sum(stored_bytes(shape, dtype) for shape in shapes)

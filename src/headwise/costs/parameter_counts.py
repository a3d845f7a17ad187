"""Parameters of specs and models: one term for each tensor, and those that are active for one
token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import ModelSpec, WeightSpec
from .components import SpecOrModel
from .flops import CostBreakdown, attention_parameters
from .symbolic_int import SymbolicInt


def parameter_terms(spec_or_model: SpecOrModel) -> CostBreakdown:
    """Trainable parameters, one term per tensor; tensors with the same name and shape in several
    layers are merged.

    >>> from headwise.models.families import read_model_spec
    >>> for term in parameter_terms(read_model_spec({"model_type": "gpt2", "n_layer": 2})).terms[
    ...     :3
    ... ]:
    ...     print(*term)
    decoder.embedding.tokens token model 38597376
    decoder.embedding.positions position model 786432
    decoder.*.attention.project.q 2 · q dim model 1179648
    """
    if isinstance(spec_or_model, AttentionSpec):
        return attention_parameters(spec_or_model)
    counts: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    weights: dict[tuple[str, tuple[tuple[str, int], ...]], WeightSpec] = {}
    for weight in spec_or_model.weights():
        if weight.trainable:
            name = re.sub(r"^(\w+)\.\d+\.", r"\1.*.", weight.name)
            key = (name, tuple((axis, weight.axis_sizes[axis]) for axis in _axis_names(weight)))
            counts[key] += 1
            weights[key] = weight
    return CostBreakdown.from_repeated_items(
        (key[0], _num_elements(weight), counts[key]) for key, weight in weights.items()
    )


def _axis_names(weight: WeightSpec) -> list[str]:
    return "|".join(weight.layout.axes).split("|") if weight.layout.axes else []


def _num_elements(weight: WeightSpec) -> int:
    # The source of self-attention is its stack.
    renamed = {"source": "model"} if weight.role == "attention" else {}
    sizes = {
        axis: SymbolicInt.of(weight.axis_sizes[axis], renamed.get(axis, axis))
        for axis in _axis_names(weight)
    }
    return weight.layout.numel(sizes)


def active_parameters(spec_or_model: SpecOrModel, *, embeddings: bool = True) -> int:
    """Number of parameters that are active for one token: all, except experts that the token is not
    routed to.

    With embeddings=False, embedding tables of which a token only reads a row are left out, as
    published numbers often do; a table that is tied to an output head stays, because the head
    multiplies with all of it.

    >>> from headwise.models.families import read_model_spec
    >>> gpt_oss = read_model_spec(
    ...     {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
    ... )
    >>> [
    ...     round(active_parameters(gpt_oss, embeddings=each) / 1e9, 2) for each in (True, False)
    ... ]  # published: 3.61
    [4.19, 3.61]
    """
    total = parameter_terms(spec_or_model).total
    if isinstance(spec_or_model, AttentionSpec):
        return total
    for stack in spec_or_model.stacks:
        for block in stack.layers:
            if block.feed:
                total -= sum(weight.numel for weight in block.feed.weights(stack.model))
                total += block.feed.active_params(stack.model, 1)
    if embeddings:
        return total
    return total - sum(weight.numel for weight in _lookup_tables(spec_or_model))


def _lookup_tables(model: ModelSpec) -> Iterator[WeightSpec]:
    """Yield the trainable embedding tables of which each token reads one row, and no output head
    multiplies.
    """
    tied = {head.table for head in model.heads}
    for stack in model.stacks:
        names = {"tokens", "positions", "types"} - ({"tokens"} if stack.name in tied else set())
        for weight in stack.embedding.weights(stack.model) if stack.embedding else ():
            if weight.name in names and weight.trainable:
                yield weight

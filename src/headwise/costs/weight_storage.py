"""Weights of specs and models: parameters, one term for each tensor; those that are active for one
token; and bytes as they are stored: quantised matrices with their scales, all else in one format.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import (
    WEIGHT_FORMATS,
    BlockSpec,
    ModelSpec,
    QuantizationSpec,
    StackSpec,
    WeightSpec,
    attention_weights,
)
from ..models.model_spec.components import add_prefix
from ..util.errors import SpecError, suggest
from .flops import CostBreakdown, SymbolicInt, attention_parameters

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # formats that matrix products are computed in
STORED = "stored"  # format of weights as the checkpoint stores them
SINGLE_LAYER = "layer.0.attention"  # place of an attention layer that is in no model
FP8 = "fp8"


@dataclass(frozen=True)
class WeightStorage:
    """Formats of weights: `dtype`, and `quantization` for the matrices that it covers.

    >>> from headwise.attention.interfaces.core_types import AxisLayout
    >>> up = WeightSpec(
    ...     "decoder.0.feed.up", AxisLayout.parse("hidden model"), {"hidden": 256, "model": 128}
    ... )
    >>> (
    ...     WeightStorage("bf16").num_bytes(up),
    ...     WeightStorage.from_name("fp8", "bf16").num_bytes(up),
    ... )  # 2 float32 scales
    (65536, 32776)
    """

    dtype: str
    quantization: QuantizationSpec | None = None

    @staticmethod
    def from_name(
        weights: str, dtype: str, stored: QuantizationSpec | None = None
    ) -> WeightStorage:
        """Return the storage that `weights` names; "stored" is that of the model, or `dtype` if it
        is not quantised.
        """
        check_weight_format(weights)
        if weights == STORED:
            return WeightStorage(dtype, stored)
        if weights in DTYPE_BYTES:
            return WeightStorage(weights)
        return WeightStorage(dtype, QuantizationSpec(WEIGHT_FORMATS[weights]))

    def num_bytes(self, weight: WeightSpec) -> int:
        """Count the bytes of one tensor, which has its full name."""
        if self.quantization is None or not self.quantization.covers(weight):
            return weight.numel * DTYPE_BYTES[self.dtype]
        *leading, rows, columns = weight.shape
        count = math.prod(leading)
        return count * self.quantization.format.matrix_bytes(rows, columns)

    def total_bytes(self, weights: Iterable[WeightSpec]) -> int:
        """Count the bytes of several tensors."""
        return sum(map(self.num_bytes, weights))

    def describe(self) -> str:
        """Describe the formats, as in "mxfp4 and bf16"."""
        return (
            f"{self.quantization.format.name} and {self.dtype}" if self.quantization else self.dtype
        )


def dtype_bytes(dtype: str) -> int:
    """Return the bytes per number of a format that matrix products are computed in.

    >>> dtype_bytes("bf16")
    2
    """
    if dtype not in DTYPE_BYTES:
        raise SpecError(f"dtype={dtype!r} is unknown; {suggest(dtype, DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def check_weight_format(name: str) -> None:
    """Raise an error for an unknown format of weights."""
    formats = (STORED, *DTYPE_BYTES, *WEIGHT_FORMATS)
    if name not in formats:
        raise SpecError(f"weights={name!r} is unknown; {suggest(name, formats)}")


# --- The weights of a layer, with their full names ------------------------------------------------


def total_weight_bytes(spec_or_model: AttentionSpec | ModelSpec, storage: WeightStorage) -> int:
    """Count the bytes of all trained tensors of a layer or model."""
    if isinstance(spec_or_model, AttentionSpec):
        weights = add_prefix(SINGLE_LAYER, "attention", attention_weights(spec_or_model))
    else:
        weights = spec_or_model.weights()
    return storage.total_bytes(weight for weight in weights if weight.trainable)


def is_routed(weight: WeightSpec) -> bool:
    """True if a tensor, with its full name, is stacked over the experts among which a router
    chooses.
    """
    return ".feed.expert." in weight.name


def group_blocks_stored_alike(
    stack: StackSpec, quantization: QuantizationSpec | None
) -> Iterator[tuple[int, BlockSpec, int]]:
    """Yield (first layer, block, number of layers) for blocks that are equal and stored in equal
    formats.

    Layers differ in storage only if the quantisation names one of them alone.
    """
    groups: dict[tuple[BlockSpec, frozenset[str]], tuple[int, int]] = {}
    for depth, block in enumerate(stack.layers):
        exceptions: Iterable[str] = ()
        if quantization:
            patterns = (*quantization.included, *quantization.excluded)
            exceptions = frozenset(
                pattern for pattern in patterns if pattern.startswith(f"{stack.name}.{depth}.")
            )
        key = (block, frozenset(pattern.split(".", 2)[2] for pattern in exceptions))
        first, times = groups.get(key, (depth, 0))
        groups[key] = (first, times + 1)
    return ((first, block, times) for (block, _), (first, times) in groups.items())


def select_layers_storage(
    quantization: QuantizationSpec | None, stack: str, layers: range
) -> QuantizationSpec | None:
    """Return the quantisation of some layers of a stack, as for a model with only these layers."""
    if quantization is None:
        return None

    def renamed(patterns: tuple[str, ...]) -> Iterator[str]:
        for pattern in patterns:
            words = pattern.split(".")
            if len(words) < 2 or not words[1].isdecimal():
                yield pattern
            elif words[0] == stack and int(words[1]) in layers:
                yield ".".join([stack, str(int(words[1]) - layers.start), *words[2:]])

    included, excluded = (
        tuple(renamed(patterns)) for patterns in (quantization.included, quantization.excluded)
    )
    return replace(quantization, included=included, excluded=excluded)


# --- Parameters -----------------------------------------------------------------------------------


def parameter_terms(spec_or_model: AttentionSpec | ModelSpec) -> CostBreakdown:
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
        axis: SymbolicInt.with_formula(weight.axis_sizes[axis], renamed.get(axis, axis))
        for axis in _axis_names(weight)
    }
    return weight.layout.numel(sizes)


def active_parameters(spec_or_model: AttentionSpec | ModelSpec, *, embeddings: bool = True) -> int:
    """Count parameters that are active for one token: all, except experts that the token is not
    routed to.

    With embeddings=False, embedding tables that only look up rows are left out, as published
    numbers often do. A table tied to an output head stays, because the head multiplies with the
    whole table.

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
    """Yield the trainable embedding tables that tokens only look up, without tables of heads."""
    tied = {head.table for head in model.heads}
    for stack in model.stacks:
        names = {"tokens", "positions", "types"} - ({"tokens"} if stack.name in tied else set())
        for weight in stack.embedding.weights(stack.model) if stack.embedding else ():
            if weight.name in names and weight.trainable:
                yield weight

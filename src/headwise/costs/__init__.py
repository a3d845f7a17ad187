"""Cost of a spec or a model before it runs: parameters, FLOPs, memory, KV cache, time.

In reading order:

- `flops` counts term by term and keeps the formula of every number, `weight_storage`
  gives parameters and the bytes of weights, `roofline` lower bounds of times on a device, and
  the record of one forward call;
- `counted_model` describes a model by its modules; `components` is the one walk over a spec or
  model, and gives all costs of a component;
- `workload` describes forward calls; `cost_estimate` gives the costs of one layer or model,
  `cost_report` the tables and figures of `hw.cost` and `headwise cost`, `size_matching` sizes of
  equal cost;
- `activations` and `training_memory` give the memory of training;
- `published_article` and `complexity` compare with the literature;
- `part_checks` compares what a part declares with what it does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..attention.cache import split_by_retention
from ..attention.interfaces.core_types import CallSize
from ..attention.masking.patterns import count_pairs_by_head
from ..attention.spec.attention_spec import AttentionSpec
from ..models.model_spec import ModelSpec
from ..util.errors import SpecError
from ..util.lazy_names import import_lazily
from .flops import CostTerm, forward_flops, list_products

if TYPE_CHECKING:
    from .activations import layer_activation_memory
    from .roofline import Device
    from .training_memory import ActivationSettings, activation_memory

_MODULE_OF_NAME = {
    "ActivationSettings": "training_memory",
    "Device": "roofline",
    "activation_memory": "training_memory",
    "layer_activation_memory": "activations",
}
__all__ = [
    *sorted(_MODULE_OF_NAME),
    "CallSize",
    "CostTerm",
    "cache_bytes",
    "cached_numbers_per_token",
    "count_constants",
    "count_parameters",
    "counted_flops",
    "executed_flops",
    "required_flops",
    "self_attention_work",
]
__getattr__ = import_lazily(__name__, _MODULE_OF_NAME)
__dir__ = __all__.copy


def count_parameters(spec: AttentionSpec | ModelSpec) -> int:
    """Count trainable parameters of one layer, or of a whole model.

    >>> import headwise as hw
    >>> count_parameters(hw.design(model=512, heads=8, bias="qkvo"))  # 4 d^2 + 4 d
    1050624
    """
    trainable = {name for name, param in spec.params().items() if param.trainable}
    return sum(math.prod(shape) for name, shape in spec.shapes().items() if name in trainable)


def count_constants(spec: AttentionSpec | ModelSpec) -> int:
    """Count constants (buffers): saved and moved but not trained, such as ALiBi slopes."""
    return sum(math.prod(shape) for shape in spec.shapes().values()) - count_parameters(spec)


def cached_numbers_per_token(spec: AttentionSpec) -> int:
    """Count values that the KV cache stores per token and layer; 0 for a spec that keeps one state
    instead.
    """
    return (
        0
        if spec.is_recurrent
        else sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())
    )


def cache_bytes(
    spec: AttentionSpec,
    *,
    batch: int,
    capacity: int,
    bytes_per_number: int = 4,
    storage: str | None = None,
) -> int:
    """Count the bytes of one layer's cache for `capacity` tokens: a ring buffer of the tokens its
    pattern can read, or a state.

    A recurrent state sums over thousands of tokens and so has at least 4 bytes per value. With
    storage="int8" the entries of the projection have 1 byte per value, plus a float32 scale for
    each vector along the last axis.

    >>> import headwise as hw
    >>> cache_bytes(
    ...     hw.design(model=512, heads=8, kv=2, pattern="window(256) | first(4)"),
    ...     batch=1,
    ...     capacity=9999,
    ... )
    266240
    """
    if spec.recurrent_part and spec.is_recurrent:
        part = spec.recurrent_part[1]
        sizes = spec.sizes_of(part)
        return (
            batch
            * max(bytes_per_number, 4)
            * sum(layout.numel(sizes) for layout in part.state_layouts(spec).values())
        )
    groups = split_by_retention(spec)
    if groups:
        sizes = {
            "batch": batch,
            "capacity": capacity,
            "bytes_per_number": bytes_per_number,
            "storage": storage,
        }
        return sum(cache_bytes(group.spec, **sizes) for group in groups)
    first, last = spec.pattern.retention
    slots = capacity if last is None else min(capacity, first + last)
    bytes_per_token = cached_numbers_per_token(spec) * bytes_per_number
    if storage == "int8":
        shapes = [
            layout.unmerged_shape(spec.sizes_of(spec.project))
            for layout in spec.project.kv_entry_layouts(spec).values()
        ]
        bytes_per_token -= sum(
            math.prod(shape) * (bytes_per_number - 1) - 4 * math.prod(shape[:-1])
            for shape in shapes
        )
    return batch * slots * bytes_per_token


def required_flops(spec: AttentionSpec, work: CallSize) -> int:
    """FLOPs that the spec requires: projections, and the core over the query-key pairs that the
    pattern allows.
    """
    return forward_flops(spec, work).total


def counted_flops(spec: AttentionSpec, work: CallSize) -> int:
    """FLOPs of a dense forward pass as `FlopCounterMode` counts them: all queries times all keys,
    masked or not.
    """
    return required_flops(spec, work.with_pairs(work.queries * work.keys))


def executed_flops(spec: AttentionSpec, work: CallSize, core_flops: int) -> int:
    """FLOPs that a backend executes, given those that it executes in the core."""
    products = list_products(spec, work)
    outside = sum(one.flops for one in products if not one.name.startswith("core"))
    return int(outside) + core_flops


def self_attention_work(
    spec: AttentionSpec, *, batch: int, queries: int, past: int = 0
) -> CallSize:
    """Size of a self-attention call: `queries` new tokens after `past` cached ones, and the pairs
    the pattern allows.

    >>> import headwise as hw
    >>> self_attention_work(hw.design(model=8, heads=2, pattern="causal"), batch=1, queries=4).pairs
    10
    """
    if not (batch >= 0 and queries >= 0 and past >= 0):
        raise SpecError(
            f"batch, queries and past must be >= 0, got batch={batch}, queries={queries}, "
            f"past={past}"
        )
    keys = past + queries
    return CallSize(
        batch,
        queries,
        queries,
        keys,
        *count_pairs_by_head(spec.pattern, range(past, keys), range(keys)),
    )

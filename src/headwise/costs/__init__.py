"""Cost of a spec or a model before it runs: parameters, FLOPs, memory, KV cache, time.

`workload` describes a call, `flops` counts it, `roofline` turns it into seconds on a device; `activations`,
`training_memory` and `saved_tensors` price training; `kv_cache_memory`, `serving_cost` and `serving_capacity` price
serving; `cost_report`, `cost_vs_length` and `cost_plots` show it; `size_matching` finds sizes of equal cost;
`complexity` and `published_formulas` compare with the literature; `formula_checks` runs a small layer and compares
every formula with what happened.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import SpecError
from ..interfaces.core_types import CallSize
from ..model_spec import ModelSpec
from ..spec.attention_spec import AttentionSpec
from .flops import CostTerm

__all__ = [
    "CostTerm",
    "cache_bytes",
    "cached_numbers_per_token",
    "count_constants",
    "count_parameters",
    "counted_flops",
    "required_flops",
]
__all__ += ["executed_flops", "params_terms", "self_attention_work"]


def count_parameters(spec: AttentionSpec | ModelSpec) -> int:
    """Learned numbers of one layer, or of a whole model.

    >>> import headwise as hw
    >>> count_parameters(hw.design(model=512, heads=8, bias="qkvo"))  # 4 d^2 + 4 d
    1050624
    """
    learned = {name for name, param in spec.params().items() if param.trainable}
    return sum(math.prod(shape) for name, shape in spec.shapes().items() if name in learned)


def count_constants(spec: AttentionSpec | ModelSpec) -> int:
    """Numbers that are saved and moved but never trained, such as slopes and frequencies."""
    return sum(math.prod(shape) for shape in spec.shapes().values()) - count_parameters(spec)


def cached_numbers_per_token(spec: AttentionSpec) -> int:
    """Numbers remembered of one token; 0 when all of them share one state."""
    return 0 if spec.is_recurrent else sum(math.prod(shape) for shape in spec.kv_entry_shapes().values())


def cache_bytes(
    spec: AttentionSpec, *, batch: int, capacity: int, bytes_per_number: int = 4, storage: str | None = None
) -> int:
    """Bytes that a cache of this capacity holds: a ring of what the pattern still reads, or a state.

    A state adds up thousands of tokens and so keeps at least 4 bytes a number. With store="int8" what the project
    remembers takes a byte a number, and 4 for the scale of each vector.

    >>> import headwise as hw
    >>> cache_bytes(hw.design(model=512, heads=8, kv=2, pattern="window(256) | first(4)"), batch=1, capacity=9999)
    266240
    """
    if spec.recurrent_part and spec.is_recurrent:
        part = spec.recurrent_part[1]
        sizes = spec.sizes_of(part)
        return (
            batch * max(bytes_per_number, 4) * sum(layout.numel(sizes) for layout in part.state_layouts(spec).values())
        )
    first, last = spec.pattern.retention
    slots = capacity if last is None else min(capacity, first + last)
    each = cached_numbers_per_token(spec) * bytes_per_number
    if storage == "int8":
        shapes = [
            layout.unmerged_shape(spec.sizes_of(spec.project))
            for layout in spec.project.kv_entry_layouts(spec).values()
        ]
        each -= sum(math.prod(shape) * (bytes_per_number - 1) - 4 * math.prod(shape[:-1]) for shape in shapes)
    return batch * slots * each


def required_flops(spec: AttentionSpec, work: CallSize) -> int:
    """FLOPs of what the spec asks for: projections, and the core over allowed pairs only."""
    spec = replace(spec, project=spec.projection_form(work.queries == 1))
    return _flops_outside_core(spec, work) + spec.core.flops(work.batch * work.pairs)


def counted_flops(spec: AttentionSpec, work: CallSize) -> int:
    """FLOPs of the dense forward as torch's counter sees them: the full rectangle of queries and keys."""
    return required_flops(spec, replace(work, pairs=work.queries * work.keys))


def executed_flops(spec: AttentionSpec, work: CallSize, core_flops: int) -> int:
    """FLOPs that a backend executes, given what it spends in the core."""
    return _flops_outside_core(spec, work) + core_flops


def _flops_outside_core(spec: AttentionSpec, work: CallSize) -> int:
    total = 0
    for _, part in spec.parts():
        sizes = spec.sizes_of(part)
        for param in part.params(spec).values():
            total += 2 * param.layout.numel(sizes) * work.tokens(param.applied)
        total += part.flops(spec, work)
    return total


def self_attention_work(spec: AttentionSpec, *, batch: int, queries: int, past: int = 0) -> CallSize:
    """Self-attention of new tokens after `past` remembered ones, with the pairs its pattern allows.

    >>> import headwise as hw
    >>> self_attention_work(hw.design(model=8, heads=2, pattern="causal"), batch=1, queries=4).pairs
    10
    """
    if not (batch >= 0 and queries >= 0 and past >= 0):
        raise SpecError(f"batch={batch}, queries={queries}, past={past} is no work; none of them can be negative")
    keys = past + queries
    pairs = spec.pattern.pairs(range(past, keys), range(keys))
    return CallSize(batch, queries, queries, keys, pairs)

"""What a spec costs, read off the same declarations that build it."""

from __future__ import annotations

import math
from dataclasses import replace

from ..blueprint import Model
from ..errors import SpecError
from ..spec import AttentionSpec
from ..terms import Work
from .bills import Term

__all__ = ["Term", "asked", "cache_bytes", "cache_numbers", "constants", "counted", "params"]
__all__ += ["params_terms", "spent", "work_of"]


def params(spec: AttentionSpec | Model) -> int:
    """Learned numbers of one layer, or of a whole model.

    >>> import headwise as hw
    >>> params(hw.design(model=512, heads=8, bias="qkvo"))  # 4 d^2 + 4 d
    1050624
    """
    learned = {name for name, param in spec.params().items() if param.learned}
    return sum(math.prod(shape) for name, shape in spec.shapes().items() if name in learned)


def constants(spec: AttentionSpec | Model) -> int:
    """Numbers that are saved and moved but never trained, such as slopes and frequencies."""
    return sum(math.prod(shape) for shape in spec.shapes().values()) - params(spec)


def cache_numbers(spec: AttentionSpec) -> int:
    """Numbers remembered of one token; 0 when all of them share one state."""
    return 0 if spec.stateful else sum(math.prod(shape) for shape in spec.entry().values())


def cache_bytes(
    spec: AttentionSpec, *, batch: int, capacity: int, bytes_each: int = 4, store: str | None = None
) -> int:
    """Bytes that a cache of this capacity holds: a ring of what the pattern still reads, or a state.

    A state adds up thousands of tokens and so keeps at least 4 bytes a number. With store="int8" what the project
    remembers takes a byte a number, and 4 for the scale of each vector.

    >>> import headwise as hw
    >>> cache_bytes(hw.design(model=512, heads=8, kv=2, pattern="window(256) | first(4)"), batch=1, capacity=9999)
    266240
    """
    if spec.folder and spec.stateful:
        part = spec.folder[1]
        sizes = spec.sizes_of(part)
        return batch * max(bytes_each, 4) * sum(layout.numel(sizes) for layout in part.state(spec).values())
    first, last = spec.pattern.memory
    slots = capacity if last is None else min(capacity, first + last)
    each = cache_numbers(spec) * bytes_each
    if store == "int8":
        shapes = [layout.opened(spec.sizes_of(spec.project)) for layout in spec.project.entry(spec).values()]
        each -= sum(math.prod(shape) * (bytes_each - 1) - 4 * math.prod(shape[:-1]) for shape in shapes)
    return batch * slots * each


def asked(spec: AttentionSpec, work: Work) -> int:
    """FLOPs of what the spec asks for: projections, and the core over allowed pairs only."""
    spec = replace(spec, project=spec.form(work.queries == 1))
    return _outside(spec, work) + spec.core.flops(work.batch * work.pairs)


def counted(spec: AttentionSpec, work: Work) -> int:
    """FLOPs of the dense forward as torch's counter sees them: the full rectangle of queries and keys."""
    return asked(spec, replace(work, pairs=work.queries * work.keys))


def spent(spec: AttentionSpec, work: Work, core_flops: int) -> int:
    """FLOPs that a backend executes, given what it spends in the core."""
    return _outside(spec, work) + core_flops


def _outside(spec: AttentionSpec, work: Work) -> int:
    total = 0
    for _, part in spec.parts():
        sizes = spec.sizes_of(part)
        for param in part.params(spec).values():
            total += 2 * param.layout.numel(sizes) * work.tokens(param.applied)
        total += part.flops(spec, work)
    return total


def work_of(spec: AttentionSpec, *, batch: int, queries: int, past: int = 0) -> Work:
    """Self-attention of new tokens after `past` remembered ones, with the pairs its pattern allows.

    >>> import headwise as hw
    >>> work_of(hw.design(model=8, heads=2, pattern="causal"), batch=1, queries=4).pairs
    10
    """
    if not (batch >= 0 and queries >= 0 and past >= 0):
        raise SpecError(f"batch={batch}, queries={queries}, past={past} is no work; none of them can be negative")
    keys = past + queries
    pairs = spec.pattern.pairs(range(past, keys), range(keys))
    return Work(batch, queries, queries, keys, pairs)

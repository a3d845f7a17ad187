"""What one request asks of one attention: FLOPs with weights, FLOPs with what is remembered, and bytes read of that."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..backends import CallSignature, linear
from ..spec import AttentionSpec
from ..terms import CallSize
from . import required_flops, self_attention_work
from .allocators import state_bytes, cache_bytes_per_token
from .devices import NumberFormats, dtype_bytes
from .layers import AttentionGroup


class RequestChunk(NamedTuple):
    """Some tokens of one sequence, and how many of it, or of the source that it reads, came before them."""

    tokens: int
    past: int = 0
    source: int = 0


class ChunkCost(NamedTuple):
    """FLOPs of products with weights, FLOPs of products without, and bytes that the latter move."""

    weight_flops: int
    core_flops: int
    bytes_moved: int


def chunk_cost(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> ChunkCost:
    """What one such layer is asked by one sequence; its weights are read once for all of them, and not counted here.

    >>> import headwise as hw
    >>> gqa = AttentionGroup("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8))
    >>> told = chunk_cost(gqa, RequestChunk(1, past=9999), NumberFormats())
    >>> told.weights, told.core, told.moved  # 2 x 41,943,040; 2 x 32 x 256 x 10,000; 10,000 x 4,096 and its own
    (83886080, 163840000, 40976384)
    """
    spec, one = layers.spec, request.tokens == 1
    work = _attention_work(layers, request)
    weights = required_flops(spec, replace(work, pairs=0))
    core = spec.core_of(spec.projection_form(one))
    job = CallSignature(spec, core, single_query=one, has_recurrent_state=spec.is_recurrent and (one or request.past > 0))
    if spec.recurrent_part is not None and layers.kv_source == "own" and not linear.unsupported_reasons(job):
        inner = linear.executed_flops(job, replace(work, keys=request.tokens) if job.has_recurrent_state else work)
    else:
        inner = required_flops(spec, work) - weights
    spoken = request.tokens * (len(core.keys) * core.dim + len(core.value_head_of_row) * core.vdim)
    return ChunkCost(weights, inner, _cache_bytes_read(layers, request, formats) + dtype_bytes(formats.compute) * spoken)


def prefix_bytes_read(layers: AttentionGroup, request: RequestChunk, count: int, formats: NumberFormats) -> int:
    """Bytes that are read of so many first tokens of its sequence, for whoever reads them for several at once.

    >>> import headwise as hw
    >>> gqa = AttentionGroup("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8, pattern="window(4096)"))
    >>> prefix_bytes_read(gqa, RequestChunk(1, past=4999), 1000, NumberFormats())  # of 1,000 the latest 96, 4,096 bytes each
    393216
    """
    if layers.kv_source != "own" or layers.spec.is_recurrent:
        return 0
    end = request.past + request.tokens
    met = _num_keys_read(layers.spec, range(request.past, end), range(min(count, end)))
    return cache_bytes_per_token(layers.spec, formats.cache) * met


def flops_by_part(spec: AttentionSpec, request: RequestChunk) -> dict[str, int]:
    """FLOPs with weights of one sequence, part by part; together they are what `asks` says."""
    running = replace(spec, project=spec.projection_form(request.tokens == 1))
    work = replace(_attention_work(AttentionGroup("attention", spec), request), pairs=0)
    found: dict[str, int] = {}
    for name, part in running.parts():
        sizes = running.sizes_of(part)
        params = part.params(running).values()
        met = sum(2 * param.layout.numel(sizes) * work.tokens(param.applied) for param in params)
        found[name] = met + part.flops(running, work)
    return found


def _attention_work(layers: AttentionGroup, request: RequestChunk) -> CallSize:
    if layers.kv_source == "own":
        return self_attention_work(layers.spec, batch=1, queries=request.tokens, past=request.past)
    pairs = layers.spec.pattern.pairs(range(request.past, request.past + request.tokens), range(request.source))
    return CallSize(1, request.tokens, 0, request.source, pairs)


def _cache_bytes_read(layers: AttentionGroup, request: RequestChunk, formats: NumberFormats) -> int:
    """Bytes of each remembered token that some query may read; or a state, read and written."""
    spec = layers.spec
    if layers.kv_source == "own" and spec.is_recurrent:
        own = request.tokens * cache_bytes_per_token(spec, formats.compute) if request.tokens > 1 else 0
        return 2 * state_bytes(spec, formats.cache) + own
    end = request.past + request.tokens
    keys = range(end if layers.kv_source == "own" else request.source)
    return cache_bytes_per_token(spec, formats.cache) * _num_keys_read(spec, range(request.past, end), keys)


def _num_keys_read(spec: AttentionSpec, queries: range, keys: range) -> int:
    return sum(len(some) for some in spec.pattern.visible_keys(queries, keys))

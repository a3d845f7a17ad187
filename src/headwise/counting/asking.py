"""What one request asks of one attention: FLOPs with weights, FLOPs with what is remembered, and bytes read of that."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..backends import Job, linear
from ..spec import AttentionSpec
from ..terms import Work
from . import asked, work_of
from .allocators import state_bytes, token_bytes
from .devices import Formats, bytes_of
from .layers import Layers


class Request(NamedTuple):
    """Some tokens of one sequence, and how many of it, or of the source that it reads, came before them."""

    tokens: int
    past: int = 0
    source: int = 0


class Asked(NamedTuple):
    """FLOPs of products with weights, FLOPs of products without, and bytes that the latter move."""

    weights: int
    core: int
    moved: int


def asks(layers: Layers, request: Request, formats: Formats) -> Asked:
    """What one such layer is asked by one sequence; its weights are read once for all of them, and not counted here.

    >>> import headwise as hw
    >>> gqa = Layers("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8))
    >>> told = asks(gqa, Request(1, past=9999), Formats())
    >>> told.weights, told.core, told.moved  # 2 x 41,943,040; 2 x 32 x 256 x 10,000; 10,000 x 4,096 and its own
    (83886080, 163840000, 40976384)
    """
    spec, one = layers.spec, request.tokens == 1
    work = _work(layers, request)
    weights = asked(spec, replace(work, pairs=0))
    core = spec.core_of(spec.form(one))
    job = Job(spec, core, one=one, stated=spec.stateful and (one or request.past > 0))
    if spec.folder is not None and layers.reads == "own" and not linear.refuses(job):
        inner = linear.spent(job, replace(work, keys=request.tokens) if job.stated else work)
    else:
        inner = asked(spec, work) - weights
    spoken = request.tokens * (len(core.keys) * core.dim + len(core.values) * core.vdim)
    return Asked(weights, inner, _read(layers, request, formats) + bytes_of(formats.maths) * spoken)


def begun(layers: Layers, request: Request, count: int, formats: Formats) -> int:
    """Bytes that are read of so many first tokens of its sequence, for whoever reads them for several at once.

    >>> import headwise as hw
    >>> gqa = Layers("attention", hw.design(preset="gqa", model=4096, heads=32, kv=8, pattern="window(4096)"))
    >>> begun(gqa, Request(1, past=4999), 1000, Formats())  # of 1,000 the latest 96, 4,096 bytes each
    393216
    """
    if layers.reads != "own" or layers.spec.stateful:
        return 0
    end = request.past + request.tokens
    met = _met(layers.spec, range(request.past, end), range(min(count, end)))
    return token_bytes(layers.spec, formats.cache) * met


def by_part(spec: AttentionSpec, request: Request) -> dict[str, int]:
    """FLOPs with weights of one sequence, part by part; together they are what `asks` says."""
    running = replace(spec, project=spec.form(request.tokens == 1))
    work = replace(_work(Layers("attention", spec), request), pairs=0)
    found: dict[str, int] = {}
    for name, part in running.parts():
        sizes = running.sizes_of(part)
        params = part.params(running).values()
        met = sum(2 * param.layout.numel(sizes) * work.tokens(param.applied) for param in params)
        found[name] = met + part.flops(running, work)
    return found


def _work(layers: Layers, request: Request) -> Work:
    if layers.reads == "own":
        return work_of(layers.spec, batch=1, queries=request.tokens, past=request.past)
    pairs = layers.spec.pattern.pairs(range(request.past, request.past + request.tokens), range(request.source))
    return Work(1, request.tokens, 0, request.source, pairs)


def _read(layers: Layers, request: Request, formats: Formats) -> int:
    """Bytes of each remembered token that some query may read; or a state, read and written."""
    spec = layers.spec
    if layers.reads == "own" and spec.stateful:
        own = request.tokens * token_bytes(spec, formats.maths) if request.tokens > 1 else 0
        return 2 * state_bytes(spec, formats.cache) + own
    end = request.past + request.tokens
    keys = range(end if layers.reads == "own" else request.source)
    return token_bytes(spec, formats.cache) * _met(spec, range(request.past, end), keys)


def _met(spec: AttentionSpec, queries: range, keys: range) -> int:
    return sum(len(some) for some in spec.pattern.reach(queries, keys))

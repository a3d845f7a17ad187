"""Backends: the ways to compute the attention core, one file each, tried in order of preference.

A backend is a module with `unsupported_reasons(call)`, `attend(...)` and `executed_flops(...)`. `core_interface`
holds what dispatch may look at and what a backend receives; `dense` is the definition in torch operations; `sdpa`,
`flex`, `flash_cpu`, `bf16_matmul`, `chunked_attention` and `block_sparse` are faster forms; `varlen` runs packed
documents, `routed_heads` skips closed heads, `linear_attention` keeps a state; `grouped_decode`, `ragged_decode`
and `paged_decode` answer single queries. `backend_report` is `headwise why`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from ..errors import NoBackend, suggest
from ..interfaces.core_types import CallSize
from . import (
    bf16_matmul,
    block_sparse,
    chunked_attention,
    dense,
    flash_cpu,
    flex,
    grouped_decode,
    linear_attention,
    paged_decode,
    ragged_decode,
    routed_heads,
    sdpa,
    varlen,
)
from .core_interface import CallSignature, CoreInputs, CoreSteps
from .linear_attention import values_per_row
from .paged_decode import gather_pages
from .query_blocks import QUERY_BLOCK_SIZE
from .sdpa import is_plain_softmax, softmax_args

AttendFunction = Callable[..., Any]

# In the order of preference (see `order`): the first that does not refuse runs.
BACKENDS: dict[str, ModuleType] = {
    "paged": paged_decode,
    "ragged": ragged_decode,
    "routed": routed_heads,
    "grouped": grouped_decode,
    "banded": block_sparse,
    "halves": bf16_matmul,
    "tiled": flash_cpu,
    "sdpa": sdpa,
    "linear": linear_attention,
    "flex": flex,
    "composed": chunked_attention,
    "dense": dense,
}

PREFERENCE_LENGTHS = tuple(
    sorted({module.MIN_KEYS for module in (block_sparse, linear_attention, routed_heads, flash_cpu)})
)  # keys at which another is preferred


def choose_backend(signature: CallSignature, backend_name: str | None = None) -> ModuleType:
    """The first backend that takes the job; `only` insists on one by name, be it the fastest or not."""
    check_backend_name(backend_name)
    if backend_name:
        signature = replace(signature, num_keys=None)
    refusals = {}
    for name in [backend_name] if backend_name else preference_order(signature):
        if not (reasons := _unique_reasons(name, signature)):
            return BACKENDS[name]
        refusals[name] = reasons
    said = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refusals.items())
    raise NoBackend(
        f"the backend asked for refuses this call: {said}" if backend_name else f"nothing can run this: {said}"
    )


def recomputed_flops(backend: ModuleType, job: CallSignature, work: CallSize, core_flops: int) -> int:
    """Of so many FLOPs in the core, those that a backend spends once more backwards: on scores that it did not keep.

    Kernels that are fused keep none (2205.14135), `composed` none of a call that it cut into blocks.
    """
    if backend in (dense, linear_attention) or (backend is chunked_attention and work.queries <= QUERY_BLOCK_SIZE):
        return 0
    if backend is bf16_matmul and bf16_matmul.saves_weights_for_backward(work.keys):
        return 0
    scores, values = (
        job.core.score_dim * len(job.core.key_head_of_query),
        job.core.vdim * len(job.core.value_head_of_row),
    )
    return core_flops * scores // (scores + values)


def check_backend_name(only: str | None) -> None:
    """Refuse a name that no backend has."""
    if only is not None and only not in BACKENDS:
        raise NoBackend(f"there is no backend {only!r}; {suggest(str(only), BACKENDS)}")


def backend_notes(name: str, job: CallSignature) -> list[str]:
    """What a backend does with a job that it takes, beyond what it does with every one."""
    return chunked_attention.notes(job) if BACKENDS[name] is chunked_attention else []


def preference_order(job: CallSignature) -> list[str]:
    """The names of all backends, the preferred first."""
    return sorted(BACKENDS, key=lambda name: _is_last_resort(name, job))


def reads_quantized_cache(backend: ModuleType, job: CallSignature) -> bool:
    """Whether it reads keys and values as a cache keeps them; others are handed numbers in full."""
    return backend is paged_decode or (backend is ragged_decode and ragged_decode.reads_quantized_cache(job))


def preference_length(keys: int) -> int:
    """The last length that a call of so many keys has, of those at which another backend is preferred."""
    return max((least for least in PREFERENCE_LENGTHS if least <= keys), default=0)


def backends_by_length(job: CallSignature) -> list[tuple[int, str]]:
    """From how many keys on which backend runs such a job."""
    found: list[tuple[int, str]] = []
    for least in (0, *PREFERENCE_LENGTHS):
        told = replace(job, num_keys=least)
        name = next((name for name in preference_order(told) if not BACKENDS[name].unsupported_reasons(told)), None)
        if name is not None and (not found or found[-1][1] != name):
            found.append((least, name))
    return found


def unsupported_reasons_by_backend(job: CallSignature) -> dict[str, list[str]]:
    """Every backend, in order of preference, with its reasons to refuse; none means it takes the job."""
    return {name: _unique_reasons(name, job) for name in preference_order(job)}


def _is_last_resort(name: str, job: CallSignature) -> bool:
    """Whether even dense goes before it."""
    if name == "flex":  # on the CPU it compiles for seconds and then forms every score
        return job.device == "cpu"
    return name == "halves" and not bf16_matmul.is_preferred(job)


def _unique_reasons(name: str, job: CallSignature) -> list[str]:
    """Each reason once: two parts of one kind say the same."""
    return list(dict.fromkeys(BACKENDS[name].unsupported_reasons(job)))


__all__ = [
    "BACKENDS",
    "AttendFunction",
    "CallSignature",
    "CoreInputs",
    "CoreSteps",
    "backend_notes",
    "backends_by_length",
    "choose_backend",
    "gather_pages",
    "is_plain_softmax",
    "preference_length",
    "reads_quantized_cache",
    "recomputed_flops",
    "softmax_args",
    "unsupported_reasons_by_backend",
    "values_per_row",
    "varlen",
]

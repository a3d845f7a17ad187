"""Backends: implementations of the attention core, one file each, and the choice between them.

`core_interface` defines what a backend knows before it is chosen (`CallSignature`) and what it
receives when it runs (`CoreInputs`, `CoreSteps`). `dispatch` chooses and is the only module that
runs a backend; `head_group_dispatch` makes one call per pattern if heads have several;
`backend_report` explains the choice (`headwise why`).

`dense` is the definition in plain operations, with every score in memory. `sdpa` (torch's fused
call), `flex`, `flash_cpu`, `bf16_matmul`, `chunked_attention` and `block_sparse` compute the same
outputs in less time or memory. `linear_attention` keeps a recurrent state instead of keys;
`routed_heads` skips closed heads; `varlen` runs packed sequences; `ragged_decode` and
`paged_decode` run decode steps (one query per row). `query_blocks` divides a call into blocks of
queries for several of these backends.
"""

from __future__ import annotations

from . import varlen
from .core_interface import CallSignature, CoreInputs, CoreSteps, HeadsKV
from .dispatch import (
    BACKENDS,
    CoreDispatch,
    PackedDispatch,
    backend_notes,
    backends_by_length,
    check_backend_name,
    choose_backend,
    make_dispatch,
    preference_order,
    reads_cache_in_place,
    recomputed_flops,
    unsupported_reasons,
    unsupported_reasons_by_backend,
)
from .head_group_dispatch import HeadGroupDispatch, plan_dispatch, split_by_pattern
from .linear_attention import values_per_row
from .paged_decode import gather_pages
from .sdpa import is_softmax_with_bias, softmax_args

__all__ = [
    "BACKENDS",
    "CallSignature",
    "CoreDispatch",
    "CoreInputs",
    "CoreSteps",
    "HeadGroupDispatch",
    "HeadsKV",
    "PackedDispatch",
    "backend_notes",
    "backends_by_length",
    "check_backend_name",
    "choose_backend",
    "gather_pages",
    "is_softmax_with_bias",
    "make_dispatch",
    "plan_dispatch",
    "preference_order",
    "reads_cache_in_place",
    "recomputed_flops",
    "softmax_args",
    "split_by_pattern",
    "unsupported_reasons",
    "unsupported_reasons_by_backend",
    "values_per_row",
    "varlen",
]

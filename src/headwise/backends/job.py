"""What a backend is told before it decides, and what it is handed when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import AttentionSpec
from ..terms import QueryContext, CoreShape


@dataclass(frozen=True)
class CallSignature:
    """One kind of call. Everything in it is known without looking at the device."""

    spec: AttentionSpec
    core: CoreShape
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    needs_grad: bool = False
    single_query: bool = False  # a single query per row
    has_recurrent_state: bool = False  # past tokens are a state
    has_paged_cache: bool = False  # they lie in pages that rows may share
    has_caller_mask: bool = False  # the caller hands a mask of their own
    training: bool = False
    probed_tensors: frozenset[str] = field(default_factory=frozenset)
    is_compiling: bool = False  # traced into a graph, which cannot ask the data
    cache_format: str | None = None  # the form in which past tokens are kept, where it is not `dtype`
    num_keys: int | None = None  # how many keys a row has at least, where who is asked shall be chosen by it

    heads_in_order: bool = field(init=False)  # every score head reads values for itself, in order
    group_size: int = field(init=False)  # score heads to a key head when all groups are equal neighbours, else 0

    def __post_init__(self) -> None:
        keys = self.core.keys
        each = len(keys) // (max(keys) + 1)
        even = keys == self.core.value_head_of_row and keys == tuple(h // each for h in range(each * (max(keys) + 1)))
        object.__setattr__(self, "groups", each if even else 0)
        object.__setattr__(self, "straight", self.spec.score_head_of_row == tuple(range(self.spec.heads.q)))

    def slower_than(self, min_keys: int, faster_backends: str) -> list[str]:
        """Why a call is left to others that could run here: with so few keys these were measured to be faster.

        That is a preference and no ability: nothing is said of calls whose keys are not told, on devices where nobody
        measured, or of past tokens that are a state.
        """
        if self.num_keys is None or self.num_keys >= min_keys or self.device != "cpu" or self.has_recurrent_state:
            return []
        return [f"for {self.num_keys:,} keys {faster_backends}: it begins at {min_keys:,}, or where it is asked for by name"]


class CoreInputs(NamedTuple):
    """The tensors of one call: q_BTHK, k_BSGK, v_BSGV, what queries bring, and what was remembered beside.

    `gates` are those of the spec in their order, [B, T, O, V] or broadcast to it: outputs are multiplied with them.
    Where the keys of a call were not gathered from pages (`Tokens.spans`), k and v have a row for each page.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_context: QueryContext
    kv_entry: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    gates: Sequence[Tensor] = ()

"""Cache of linear attention: one recurrent state per head instead of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..backends.linear_attention import empty_state
from ..masking.sequence_info import SequenceInfo
from ..spec.attention_spec import AttentionSpec
from .kv_cache import KVCache, KVEntry


class RecurrentStateCache(KVCache):
    """One recurrent state per head, updated with every token; its size does not depend on the length."""

    def __init__(self, spec: AttentionSpec, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, batch, dtype, device)
        self._state = empty_state(spec, batch, dtype, device)

    @property
    def state(self) -> Mapping[str, Tensor]:
        return self._state

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Store the state after the tokens just appended."""
        self._state = state

    def append(self, entry: KVEntry, at: SequenceInfo) -> tuple[KVEntry, SequenceInfo]:
        if at.start is None and bool((at.is_real & (at.segment != 0)).any()):
            raise ValueError(
                "a recurrent state cannot tell segments apart; give each packed document a cache of its own"
            )
        self._advance(at)
        return entry, at

    def select_rows(self, index: Tensor) -> None:
        self._take(index)
        self._state = {name: state[index] for name, state in self._state.items()}

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._state.values())

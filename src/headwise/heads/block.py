"""A band of weights, as statistics see it; what several of them ask for is found once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .scene import TokenAnnotations, find_sink_tokens

GATHER_RATIO = 32  # of so many keys one is picked, and more are gone through with all others
MIN_NON_SINK_WEIGHT = 0.01  # of a row's weight must be left beside sinks for the rest to be looked at


@dataclass(frozen=True, eq=False)
class WeightBand:
    """Some queries of one attention over one text: weights [H, T, S], and which pairs may be [T, S] or [H, T, S].

    `start` is the number of the first query, and `first` of the first key: none of these queries may read a key that
    is not here. `asks` and `told` are the tokens that ask and are read, the same object where a text reads itself. Of
    rows only those in `left` [H, T] count, all where nothing is said.
    """

    w_HTS: Tensor
    allowed: Tensor
    first_query: int
    query_tokens: TokenAnnotations
    key_tokens: TokenAnnotations
    counted_rows: Tensor | None = None
    first_key: int = 0
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def _cached(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made under this name, made now if nobody asked before."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def is_self_attention(self) -> bool:
        """Whether a text reads itself."""
        return self.query_tokens is self.key_tokens

    @property
    def query_positions(self) -> Tensor:
        """The numbers of the queries, [T]."""
        return torch.arange(self.first_query, self.first_query + self.w_HTS.shape[1], device=self.w_HTS.device)

    @property
    def key_positions(self) -> Tensor:
        """The numbers of the keys, [S]."""
        return torch.arange(self.first_key, self.first_key + self.w_HTS.shape[2], device=self.w_HTS.device)

    def slice_keys(self, values: Tensor) -> Tensor:
        """Of what is known of all tokens that are read, that of the keys, [S]."""
        return values[self.first_key : self.first_key + self.w_HTS.shape[2]]

    def weight_on(self, keys: Tensor) -> Tensor:
        """The weight of each row on some of all tokens, [H, T]."""
        those = self.slice_keys(keys).nonzero()[:, 0]
        if len(those) * GATHER_RATIO < self.w_HTS.shape[2]:
            return self.w_HTS[..., those].sum(-1)
        return self.w_HTS @ self.slice_keys(keys).to(self.w_HTS.dtype)

    def may_read(self, keys: Tensor) -> Tensor:
        """Which rows count, and may read one of some tokens, [H or 1, T]."""
        return self.select_counted(self._allowed_as_float @ self.slice_keys(keys).to(self._allowed_as_float.dtype) > 0)

    def select_counted(self, rows: Tensor) -> Tensor:
        """Of these rows [T] or [H, T] those that count, [H or 1, T]."""
        rows = rows[None] if rows.dim() == 1 else rows
        return rows if self.counted_rows is None else rows & self.counted_rows

    @property
    def _allowed_as_float(self) -> Tensor:
        """`allowed` as numbers, which products add up faster."""
        return self._cached("flags", lambda: self.allowed.to(self.w_HTS.dtype))

    @property
    def num_allowed_keys(self) -> Tensor:
        """How many keys each row may read, [T] or [H, T]."""
        return self._cached("visible", lambda: self.allowed.sum(-1))

    @property
    def has_keys(self) -> Tensor:
        """Which rows count and have something to read, [H or 1, T]."""
        return self._cached("alive", lambda: self.select_counted(self.num_allowed_keys > 0))

    @property
    def non_sink_weight(self) -> Tensor:
        """The weight that sinks leave of each row, [H, T]."""
        return self._cached("rest", lambda: self.weight_on(~find_sink_tokens(self.key_tokens)))

    @property
    def max_weight(self) -> Tensor:
        """The largest weight of each row, [H, T]."""
        return self._cached("top", lambda: self.w_HTS.amax(-1))

    @property
    def is_max(self) -> Tensor:
        """1 at the largest weight of each row, and at every other as large, [H, T, S]; numbers add up faster."""
        return self._cached("most", lambda: torch.eq(self.w_HTS, self.max_weight[..., None], out=torch.empty_like(self.w_HTS)))

    @property
    def num_max_keys(self) -> Tensor:
        """How many keys have the largest weight of each row, [H, T]: a hit on one of them is a part of a hit.

        Where a row reads nothing, none of them is one.
        """
        return self._cached("ties", lambda: torch.where(self.max_weight == 0, torch.inf, self.is_max.sum(-1)))

    @property
    def same_id_pairs(self) -> tuple[Tensor, Tensor]:
        """Of each pair of a query and a token of the same id, a key or the one before all keys, the two numbers."""
        return self._cached("alike", self._find_same_id_pairs)

    def _find_same_id_pairs(self) -> tuple[Tensor, Tensor]:
        before = max(0, self.first_key - 1)
        ids = self.key_tokens.ids[before : self.first_key + self.w_HTS.shape[2]]
        t, s = (self.query_tokens.ids[self.query_positions][:, None] == ids).nonzero(as_tuple=True)
        return t + self.first_query, s + before

    def weights_at_offsets(self, offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The weights of each row on what stands so many tokens behind it, [H, T, N], and if it may, [H or 1, T, N]."""
        at = self.query_positions[:, None] + torch.tensor(offsets, device=self.w_HTS.device) - self.first_key
        there = (at >= 0) & (at < self.w_HTS.shape[2])
        at = torch.where(there, at, 0)
        allowed = self.allowed if self.allowed.dim() == 3 else self.allowed[None]
        those, may = (grid.gather(-1, at.expand(len(grid), -1, -1)) for grid in (self.w_HTS, allowed))
        return torch.where(there, those, 0), there & may

    @property
    def uniform_baseline(self) -> WeightBand:
        """The same of one head that reads every key it may alike: what chance is."""
        allowed = self.allowed if self.allowed.dim() == 2 else self.allowed.any(0)
        count = allowed.sum(-1, keepdim=True)
        alike = allowed.to(self.w_HTS.dtype) / count.clamp(min=1)
        return replace(self, w_HTS=alike[None], allowed=allowed, counted_rows=None)

    def append_uniform_baseline(self) -> WeightBand:
        """The same with one more head, the uniform one."""
        chance = self.uniform_baseline
        allowed = self.allowed if self.allowed.dim() == 2 else torch.cat([self.allowed, chance.allowed[None]])
        return replace(self, w_HTS=torch.cat([self.w_HTS, chance.w_HTS]), allowed=allowed)

    def without_sinks(self) -> WeightBand:
        """What sinks leave of each row, made whole again; rows of which they leave nothing do not count."""
        there, out = self.non_sink_weight >= MIN_NON_SINK_WEIGHT, self.slice_keys(find_sink_tokens(self.key_tokens))
        whole = self.w_HTS * torch.where(there, 1 / self.non_sink_weight.clamp(min=MIN_NON_SINK_WEIGHT), 0)[..., None]
        whole.index_fill_(-1, out.nonzero()[:, 0], 0)
        return replace(self, w_HTS=whole, allowed=self.allowed & ~out, counted_rows=self.select_counted(there))

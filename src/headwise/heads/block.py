"""A band of weights, as statistics see it; what several of them ask for is found once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .scene import Tokens, sinks

FEW = 32  # of so many keys one is picked, and more are gone through with all others
LEAST = 0.01  # of a row's weight must be left beside sinks for the rest to be looked at


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries of one attention over one text: weights [H, T, S], and which pairs may be [T, S] or [H, T, S].

    `start` is the number of the first query, and `first` of the first key: none of these queries may read a key that
    is not here. `asks` and `told` are the tokens that ask and are read, the same object where a text reads itself. Of
    rows only those in `left` [H, T] count, all where nothing is said.
    """

    w_HTS: Tensor
    allowed: Tensor
    start: int
    asks: Tokens
    told: Tokens
    left: Tensor | None = None
    first: int = 0
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made under this name, made now if nobody asked before."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def itself(self) -> bool:
        """Whether a text reads itself."""
        return self.asks is self.told

    @property
    def places(self) -> Tensor:
        """The numbers of the queries, [T]."""
        return torch.arange(self.start, self.start + self.w_HTS.shape[1], device=self.w_HTS.device)

    @property
    def keys(self) -> Tensor:
        """The numbers of the keys, [S]."""
        return torch.arange(self.first, self.first + self.w_HTS.shape[2], device=self.w_HTS.device)

    def here(self, known: Tensor) -> Tensor:
        """Of what is known of all tokens that are read, that of the keys, [S]."""
        return known[self.first : self.first + self.w_HTS.shape[2]]

    def on(self, keys: Tensor) -> Tensor:
        """The weight of each row on some of all tokens, [H, T]."""
        those = self.here(keys).nonzero()[:, 0]
        if len(those) * FEW < self.w_HTS.shape[2]:
            return self.w_HTS[..., those].sum(-1)
        return self.w_HTS @ self.here(keys).to(self.w_HTS.dtype)

    def may(self, keys: Tensor) -> Tensor:
        """Which rows count, and may read one of some tokens, [H or 1, T]."""
        return self.counting(self._flags @ self.here(keys).to(self._flags.dtype) > 0)

    def counting(self, rows: Tensor) -> Tensor:
        """Of these rows [T] or [H, T] those that count, [H or 1, T]."""
        rows = rows[None] if rows.dim() == 1 else rows
        return rows if self.left is None else rows & self.left

    @property
    def _flags(self) -> Tensor:
        """`allowed` as numbers, which products add up faster."""
        return self._once("flags", lambda: self.allowed.to(self.w_HTS.dtype))

    @property
    def visible(self) -> Tensor:
        """How many keys each row may read, [T] or [H, T]."""
        return self._once("visible", lambda: self.allowed.sum(-1))

    @property
    def alive(self) -> Tensor:
        """Which rows count and have something to read, [H or 1, T]."""
        return self._once("alive", lambda: self.counting(self.visible > 0))

    @property
    def rest(self) -> Tensor:
        """The weight that sinks leave of each row, [H, T]."""
        return self._once("rest", lambda: self.on(~sinks(self.told)))

    @property
    def top(self) -> Tensor:
        """The largest weight of each row, [H, T]."""
        return self._once("top", lambda: self.w_HTS.amax(-1))

    @property
    def most(self) -> Tensor:
        """1 at the largest weight of each row, and at every other as large, [H, T, S]; numbers add up faster."""
        return self._once("most", lambda: torch.eq(self.w_HTS, self.top[..., None], out=torch.empty_like(self.w_HTS)))

    @property
    def ties(self) -> Tensor:
        """How many keys have the largest weight of each row, [H, T]: a hit on one of them is a part of a hit.

        Where a row reads nothing, none of them is one.
        """
        return self._once("ties", lambda: torch.where(self.top == 0, torch.inf, self.most.sum(-1)))

    @property
    def alike(self) -> tuple[Tensor, Tensor]:
        """Of each pair of a query and a token of the same id, a key or the one before all keys, the two numbers."""
        return self._once("alike", self._pairs)

    def _pairs(self) -> tuple[Tensor, Tensor]:
        before = max(0, self.first - 1)
        ids = self.told.ids[before : self.first + self.w_HTS.shape[2]]
        t, s = (self.asks.ids[self.places][:, None] == ids).nonzero(as_tuple=True)
        return t + self.start, s + before

    def beside(self, offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The weights of each row on what stands so many tokens behind it, [H, T, N], and if it may, [H or 1, T, N]."""
        at = self.places[:, None] + torch.tensor(offsets, device=self.w_HTS.device) - self.first
        there = (at >= 0) & (at < self.w_HTS.shape[2])
        at = torch.where(there, at, 0)
        allowed = self.allowed if self.allowed.dim() == 3 else self.allowed[None]
        those, may = (grid.gather(-1, at.expand(len(grid), -1, -1)) for grid in (self.w_HTS, allowed))
        return torch.where(there, those, 0), there & may

    @property
    def uniform(self) -> Block:
        """The same of one head that reads every key it may alike: what chance is."""
        allowed = self.allowed if self.allowed.dim() == 2 else self.allowed.any(0)
        count = allowed.sum(-1, keepdim=True)
        alike = allowed.to(self.w_HTS.dtype) / count.clamp(min=1)
        return replace(self, w_HTS=alike[None], allowed=allowed, left=None)

    def with_chance(self) -> Block:
        """The same with one more head, the uniform one."""
        chance = self.uniform
        allowed = self.allowed if self.allowed.dim() == 2 else torch.cat([self.allowed, chance.allowed[None]])
        return replace(self, w_HTS=torch.cat([self.w_HTS, chance.w_HTS]), allowed=allowed)

    def beside_sinks(self) -> Block:
        """What sinks leave of each row, made whole again; rows of which they leave nothing do not count."""
        there, out = self.rest >= LEAST, self.here(sinks(self.told))
        whole = self.w_HTS * torch.where(there, 1 / self.rest.clamp(min=LEAST), 0)[..., None]
        whole.index_fill_(-1, out.nonzero()[:, 0], 0)
        return replace(self, w_HTS=whole, allowed=self.allowed & ~out, left=self.counting(there))

"""A band of weights, as statistics see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .scene import Tokens, sinks

LEAST = 0.01  # of a row's weight must be left beside sinks for the rest to be looked at


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries of one attention over one text: weights [H, T, S], and which pairs may be [T, S] or [H, T, S].

    `start` is the number of the first query. `asks` and `told` are the tokens that ask and are read, the same object
    where a text reads itself. Of rows only those in `left` [H, T] count, all where nothing is said.
    """

    w_HTS: Tensor
    allowed: Tensor
    start: int
    asks: Tokens
    told: Tokens
    left: Tensor | None = None

    def __post_init__(self) -> None:
        queries, keys = self.start + self.w_HTS.shape[1], self.w_HTS.shape[2]
        if queries > self.asks.count or keys != self.told.count:
            fact = (
                f"the model reads {keys} tokens and asks for {queries}, where {self.told.count} and {self.asks.count}"
            )
            raise ValueError(f"{fact} are known; tell of all tokens as the model's tokenizer makes them")

    @property
    def itself(self) -> bool:
        """Whether a text reads itself."""
        return self.asks is self.told

    @property
    def places(self) -> Tensor:
        """The numbers of the queries, [T]."""
        return torch.arange(self.start, self.start + self.w_HTS.shape[1], device=self.w_HTS.device)

    @property
    def uniform(self) -> Block:
        """The same of one head that reads every key it may alike: what chance is."""
        allowed = self.allowed if self.allowed.dim() == 2 else self.allowed.any(0)
        count = allowed.sum(-1, keepdim=True)
        alike = allowed.to(self.w_HTS.dtype) / count.clamp(min=1)
        return Block(alike[None], allowed, self.start, self.asks, self.told)

    def beside_sinks(self) -> Block:
        """What sinks leave of each row, made whole again; rows of which they leave nothing do not count."""
        kept = ~sinks(self.told)
        mass = (self.w_HTS @ kept.to(self.w_HTS.dtype))[..., None]
        there = mass >= LEAST
        whole = self.w_HTS * torch.where(there, 1 / mass.clamp(min=LEAST), 0)
        whole[..., ~kept] = 0
        left = there[..., 0] if self.left is None else there[..., 0] & self.left
        return Block(whole, self.allowed & kept, self.start, self.asks, self.told, left)

"""Soft-capping of scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..interfaces import ScoreStep
from ..interfaces.core_types import ScorePosition, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec


@part
class Softcap(ScoreStep):
    """s -> limit tanh(s / limit): limits scores smoothly to (-limit, limit) (Gemma 2, 2408.00118).

    >>> Softcap(50.0).score(torch.tensor(1e6), None, None, {}).item()
    50.0
    """

    paper = "2408.00118"
    unrestricted_sides: ClassVar[str] = "kv"
    limit: float = 50.0
    positive_fields: ClassVar = ("limit",)

    def score(
        self, s: Tensor, position: ScorePosition, factors: Tensor | None, p: Mapping[str, Tensor]
    ) -> Tensor:
        return torch.tanh(s / self.limit) * self.limit

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(modifiers=(cls(limit=0.5),), pattern="causal")

"""Stick-breaking attention: the nearest keys take their share first, later ones of what is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..interfaces import Normaliser
from ..interfaces.core_types import PartParams, SpecFactory
from ..interfaces.part import part
from ..spec.attention_spec import AttentionSpec


@part
class StickBreaking(Normaliser):
    """w_j = sigmoid(s_j) times the product of 1 - sigmoid(s_k) over the allowed keys k after j
    (2410.17980).

    The last key takes sigmoid(s) of a stick of length 1, the one before it the same of what is
    left, and so on: the order of the keys takes the place of positions. It is their order in the
    tensors; caches give them in the order of their positions. Scores of 0 halve the stick at each
    key:

    >>> StickBreaking().normalise_row(torch.zeros(3), {}).tolist()
    [0.125, 0.25, 0.5]
    """

    paper = "2410.17980"
    disagreements: ClassVar[tuple[str, ...]] = (
        "In the paper a token does not attend to itself; here it does where the pattern allows "
        "it, as with `attend_current` in the released code.",
    )

    ordered: ClassVar[bool] = True

    def normalise_row(self, s_S: Tensor, p_h: Mapping[str, Tensor]) -> Tensor:
        left = torch.ones_like(s_S[0])
        weights = []
        for score in s_S.flip(0):
            weights.append(left * torch.sigmoid(score))
            left = left * (1 - torch.sigmoid(score))
        return torch.stack(weights[::-1])

    def normalise(self, s_BHTS: Tensor, allowed: Tensor, p: PartParams) -> Tensor:
        log_left = F.logsigmoid(-s_BHTS).masked_fill(~allowed, 0.0)
        log_after = log_left.flip(-1).cumsum(-1).flip(-1) - log_left
        return (F.logsigmoid(s_BHTS) + log_after).exp().masked_fill(~allowed, 0.0)

    @classmethod
    def examples(cls, base: SpecFactory) -> Iterator[AttentionSpec]:
        yield base(normaliser=cls(), pattern="causal", kv=2)
        yield base(normaliser=cls(), pattern="window(4)")

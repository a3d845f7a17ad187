"""Dropout whose random numbers cost little on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PROBABILITY_STEPS = 1 << 16  # how finely a rate is told apart on a CPU


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """x with a share `rate` of its numbers zero, each alone by chance, and the others larger so that means stay.

    On a CPU torch draws 32 random bits or more for each number, one by one, which takes as long as a product of
    matrices. 16 bits are drawn here, four numbers at a time: rates are multiples of 1/65,536.

    >>> torch.equal(dropout(torch.ones(3), 0.5, training=False), torch.ones(3))
    True
    """
    if not training or not rate:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate, training)
    cut = round(rate * PROBABILITY_STEPS)
    if cut == PROBABILITY_STEPS:
        return x * 0
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    stay = bits.view(torch.int16)[: x.numel()].view(x.shape) >= cut - PROBABILITY_STEPS // 2
    return x * stay.to(x.dtype).mul_(PROBABILITY_STEPS / (PROBABILITY_STEPS - cut))

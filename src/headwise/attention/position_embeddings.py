"""Position embeddings that are added to the input of the first layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..kernels.devices import to_float64
from ..util.errors import SpecError
from .masking.sequence_info import SequenceInfo

SINUSOID_LAYOUTS = ("interleaved", "halves")


def sinusoidal_table(
    position: Tensor, model: int, layout: str = "interleaved", base: float = 10_000.0
) -> Tensor:
    """sin and cos of t base^(-2i/model), i = 0 .. model/2 - 1, for each position t (1706.03762,
    section 3.5).

    layout="interleaved" alternates sines and cosines, as in the paper; "halves" puts all sines
    first, as tensor2tensor does. A model trained with one layout does not work with the other.

    >>> sinusoidal_table(torch.tensor([0, 1]), 4).round(decimals=4)[1].tolist()
    [0.8415, 0.5403, 0.01, 1.0]
    """
    if layout not in SINUSOID_LAYOUTS:
        raise SpecError(
            f"sinusoidal layout {layout!r} is unknown; use one of {', '.join(SINUSOID_LAYOUTS)}"
        )
    if model % 2 or model < 2:
        raise SpecError(f"sines and cosines come in pairs, but model={model}; use an even width")
    position = to_float64(position)
    rate = torch.exp(
        torch.arange(0, model, 2, device=position.device, dtype=torch.float64)
        * (-math.log(base) / model)
    )
    angle = position[..., None] * rate
    pair = torch.stack([angle.sin(), angle.cos()], -1)
    return pair.flatten(-2) if layout == "interleaved" else pair.transpose(-1, -2).flatten(-2)


class SinusoidalPositions(nn.Module):
    """Adds sinusoidal positions to x.

    >>> SinusoidalPositions(4)(torch.zeros(1, 1, 4)).tolist()
    [[[0.0, 1.0, 0.0, 1.0]]]
    """

    def __init__(self, model: int, *, layout: str = "interleaved", base: float = 10_000.0) -> None:
        super().__init__()
        sinusoidal_table(torch.zeros(1), model, layout, base)
        self.model = model
        self.layout = layout
        self.base = base

    def forward(self, x: Tensor, *, sequence: SequenceInfo | None = None) -> Tensor:
        """x plus the sinusoids of each token's position."""
        at = _positions_of(x, self.model, sequence)
        return x + sinusoidal_table(at.position, self.model, self.layout, self.base).to(x)


class LearnedPositions(nn.Module):
    """Adds a learned vector per position to x, for positions 0 .. `length` - 1.

    >>> LearnedPositions(4, length=3)(torch.zeros(1, 2, 4)).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, model: int, *, length: int) -> None:
        super().__init__()
        if model < 1 or length < 1:
            raise SpecError(
                f"a table of {length} positions of width {model} is empty; both need at least 1"
            )
        self.table = nn.Parameter(torch.randn(length, model).mul_(0.02))

    def forward(self, x: Tensor, *, sequence: SequenceInfo | None = None) -> Tensor:
        """x plus the vector of each token's position."""
        at = _positions_of(x, self.table.shape[1], sequence)
        position = torch.where(at.is_real, at.position, 0)
        last = at.position_beyond(len(self.table))
        if last is not None:
            raise ValueError(
                f"position {last} is beyond the {len(self.table)} learned ones; use "
                f"length={last + 1} or more"
            )
        return x + self.table[position].to(x.dtype)


def _positions_of(x: Tensor, model: int, sequence: SequenceInfo | None) -> SequenceInfo:
    if x.dim() != 3 or x.shape[-1] != model or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}; give floating-point numbers [batch, "
            f"tokens, {model}]"
        )
    at = sequence or SequenceInfo.contiguous(0, x.shape[1], x.device)
    if at.position.shape[0] not in (1, x.shape[0]) or at.count != x.shape[1]:
        shape = list(at.position.shape)
        raise ValueError(
            f"sequence is {shape} but x is {list(x.shape[:2])}; give SequenceInfo.from_batch(x, "
            "...)"
        )
    return at
